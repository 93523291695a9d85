"""Runs the very training step on fake tensors, over as few decoder layers as show all there is to see."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from autofit.catalog.models import Model, architecture
from autofit.estimate import fake_weights
from autofit.estimate.recorder import Recorder, Scratch
from autofit.estimate.tape import AFTER, BEFORE, Tape
from autofit.lattice import Config
from autofit.techniques import TECHNIQUES, Job
from autofit.techniques.technique import Plan
from autofit.training.build import make_plan, make_skeleton
from autofit.training.decoder import decoder_layers, kind
from autofit.training.loss_module import LossModule
from autofit.training.step import TrainingStep

HOST = torch.device("cpu")


def layer_kinds(config: Config, job: Job) -> tuple[Hashable, ...]:
    """What tells each decoder layer from the others: its architecture, whether it is checkpointed, and with frozen
    weights the first, whose input needs no gradient."""
    kinds = _architecture_kinds(job.model)
    value = config.text("checkpointing")
    every = 0 if value == "none" else int(value.removeprefix("every-")) if value.startswith("every-") else 1
    frozen = config["method"] != "full"
    return tuple((kind, bool(every) and i % every == 0, frozen and i == 0) for i, kind in enumerate(kinds))


def _architecture_kinds(model: Model) -> tuple[Hashable, ...]:
    """One number per decoder layer; layers of one kind have the same."""
    known = _KINDS.get(model.digest)
    if known is None:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            layers = decoder_layers(AutoModelForCausalLM.from_config(architecture(model), attn_implementation="eager"))
        numbers: dict[Hashable, int] = {}
        known = _KINDS[model.digest] = tuple(numbers.setdefault(kind(layer), len(numbers)) for layer in layers)
    return known


_KINDS: dict[str, tuple[Hashable, ...]] = {}


def trace_micro_steps(config: Config, job: Job, layers: tuple[int, ...], micro_steps: int, scratch: Scratch) -> Tape:
    """The tape of `micro_steps` forwards and backwards (1 or 2) of the model cut down to `layers`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    plan = make_plan(config, job, HOST)
    kinds = layer_kinds(config, job)
    model = make_skeleton(config, plan, job.model, layers)
    with FakeTensorMode():
        _give_fake_weights(model, config, plan)
        stack = decoder_layers(model)
        _checkpoint_as_in_full(stack, [kinds[i] for i in layers])
        step = _step(model, plan)
        recorder = Recorder(scratch)
        _register_residents(recorder, model, stack)
        tokens = torch.empty((plan.micro_batch, job.workload.seq_len), dtype=torch.long)
        inputs, labels = next(step.split(tokens))
        with recorder, _layer_marks(recorder, stack), _as_with_data():
            for number in range(1, micro_steps + 1):
                last = number == micro_steps
                step.micro_step(inputs, labels, 1, last=last, observe=partial(_stage, recorder, number))
        recorder.close()
    return recorder.tape


def _give_fake_weights(model: nn.Module, config: Config, plan: Plan) -> None:
    fake_weights.materialise(model)
    for technique in TECHNIQUES:
        if technique.applies(config):
            technique.on_model(config, plan, model)


def _checkpoint_as_in_full(layers: list[Any], kinds: list[Any]) -> None:
    """Checkpoint those layers that are checkpointed in the full stack, where they have other indices."""
    functions = [vars(layer)["_gradient_checkpointing_func"] for layer in layers if layer.gradient_checkpointing]
    for layer, (_, checkpointed, _) in zip(layers, kinds, strict=True):
        layer.gradient_checkpointing = checkpointed
        if checkpointed:
            layer._gradient_checkpointing_func = functions[0]


def _step(model: nn.Module, plan: Plan) -> TrainingStep:
    assert plan.loss is not None
    module = LossModule(model, plan.loss)
    module.train()
    return TrainingStep(
        module=module,
        engine=_Backward(module),
        device=HOST,
        micro_batch=plan.micro_batch,
        autocast=plan.compute_dtype if plan.autocast else None,
        vocabulary=0,
    )


class _Backward:
    """An engine that leaves the update out: it is traced apart, over all parameters."""

    ranks = 1

    def __init__(self, root: nn.Module) -> None:
        self.root = root

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self) -> torch.Tensor:
        raise AssertionError("the update is traced apart")


def _register_residents(recorder: Recorder, model: nn.Module, layers: list[Any]) -> None:
    home = {module: index for index, layer in enumerate(layers) for module in layer.modules()}
    for module in model.modules():
        tensors = [*module._parameters.values(), *module._buffers.values()]
        if type(module).__name__ == "Linear4bit":
            tensors += fake_weights.quantised_tensors(module)
        for tensor in tensors:
            if tensor is not None:
                recorder.resident(tensor, home.get(module))


def _stage(recorder: Recorder, micro_step: int, phase: str) -> AbstractContextManager[None]:
    """A forward starts before the first layer, a backward after the last."""
    return recorder.at(f"{phase}-{micro_step}", BEFORE if phase == "forward" else AFTER)


@contextmanager
def _as_with_data() -> Iterator[None]:
    """Have transformers look into fake tensors as it does into others: it would build masks to be on the safe side."""
    from transformers import masking_utils

    module: Any = masking_utils
    before = module.is_tracing
    module.is_tracing = lambda tensor=None: False
    try:
        yield
    finally:
        module.is_tracing = before


@contextmanager
def _layer_marks(recorder: Recorder, layers: list[Any]) -> Iterator[None]:
    """Tell the recorder which layer is at work: by module hooks in the forward, by tensor hooks in the backward."""

    def backward_reaches(layer: int) -> Any:
        def hook(gradient: torch.Tensor) -> None:
            recorder.move(recorder.place.stage, layer)

        return hook

    def enter(index: int) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if recorder.place.stage.startswith("forward"):
                if index == 0 and inputs[0].requires_grad:
                    inputs[0].register_hook(backward_reaches(BEFORE))
                recorder.move(recorder.place.stage, index)

        return hook

    def leave(index: int) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if recorder.place.stage.startswith("forward"):
                if hidden.requires_grad:
                    hidden.register_hook(backward_reaches(index))
                if index == len(layers) - 1:
                    recorder.move_with_next_operation(recorder.place.stage, AFTER)

        return hook

    handles = []
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(enter(index)))
        handles.append(layer.register_forward_hook(leave(index)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
