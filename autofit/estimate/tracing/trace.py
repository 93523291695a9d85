"""Runs the actual training step on fake tensors, with only as many decoder layers as it takes to show them all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from autofit.catalog.models import Model, architecture
from autofit.catalog.quiet import errors_only
from autofit.core.lattice import Config
from autofit.core.outcome import EVALUATION
from autofit.estimate.kernels.liger_layers import liger_layers
from autofit.estimate.kernels.scratch import Scratch
from autofit.estimate.memory.memory_trace import AFTER, BEFORE, LOSS, Category, MemoryTrace
from autofit.estimate.memory.symbolic_sizes import MICRO_BATCH, RANK
from autofit.estimate.tracing import fake_weights
from autofit.estimate.tracing.as_on_device import as_on_device, traceable_attention
from autofit.estimate.tracing.fake_optimizer import as_on_host, give_quantisation_maps
from autofit.estimate.tracing.loss_boundary import HeadShape, LossBoundary, traceable
from autofit.estimate.tracing.recorder import Recorder, RecorderOfCompiled, without_data
from autofit.techniques import Job
from autofit.techniques.axes.attention import keeps_scores
from autofit.techniques.axes.update import updates_in_backward
from autofit.techniques.in_backward import UpdatesInBackward
from autofit.techniques.losses.cross_entropy import full_cross_entropy
from autofit.techniques.selective import interval
from autofit.techniques.technique import BuildPlan
from autofit.training import engines
from autofit.training.build import make_plan, make_skeleton
from autofit.training.decoder import decoder_layers, kind
from autofit.training.loss_module import LossModule
from autofit.training.rows import Rows
from autofit.training.step import TrainingStep

HOST = torch.device("cpu")


def layer_kinds(config: Config, job: Job) -> tuple[Hashable, ...]:
    """What distinguishes the decoder layers: architecture, whether a layer is checkpointed, and with frozen weights
    whether it is the first, whose input needs no gradient."""
    kinds = architecture_kinds(job.model)
    every = interval(config)
    frozen = config["method"] != "full"
    return tuple((kind, bool(every) and i % every == 0, frozen and i == 0) for i, kind in enumerate(kinds))


@cache
@errors_only()
def architecture_kinds(model: Model) -> tuple[int, ...]:
    """One number per decoder layer, the same for layers of the same kind."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        layers = decoder_layers(AutoModelForCausalLM.from_config(architecture(model), attn_implementation="eager"))
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(kind(layer), len(numbers)) for layer in layers)


def at_primes(config: Config, job: Job) -> Config:
    """`config` with the micro-batch and rank at which it is traced.

    Scores of a single sequence are a different program: rearranging the heads needs no copy there.
    """
    values = dict(config.items)
    if config["micro_batch"] != 1 or not keeps_scores(config, job):
        values["micro_batch"] = MICRO_BATCH
    if values.get("rank") is not None:
        values["rank"] = RANK
    return Config.of(values)


@errors_only()
def trace_decoder(
    config: Config,
    job: Job,
    layers: tuple[int, ...],
    scratch: Scratch,
    *,
    keeps_inputs: bool = False,
    masked: bool = False,
) -> tuple[MemoryTrace, HeadShape]:
    """The trace of two forwards and backwards of the model cut down to `layers`, with a boundary in place of the loss.
    `keeps_inputs` as `Library.keeps_inputs`; `masked` says whether padding is masked.

    The first of an accumulation leaves its gradients, the second runs with them present; all later ones are like it.
    Where the backward pass updates, both are whole steps: the first makes the optimizer's states. In place of the
    flash-attn package's kernel, torch's own build of it is traced, which keeps and allocates the same.
    """
    untraced, config = config, at_primes(config, job)
    plan = _fake_plan(config, job, masked=masked)
    boundary = plan.loss = LossBoundary(plan.autocast, gives_view=plan.loss is full_cross_entropy)
    recorder = boundary.recorder = _recorder(config, scratch)
    model = make_skeleton(plan, layers)  # peft cannot add adapters to fake weights
    with without_data():
        step = _fake_step(plan, model, recorder)
        stack = decoder_layers(step.module.model)
        kinds = layer_kinds(config, job)
        _checkpoint_as_in_full(stack, [kinds[i] for i in layers])
        tokens = torch.empty((step.micro_batch, job.workload.seq_len), dtype=torch.long)
        inputs, labels = next(step.split(tokens))
        keeping = patch.object(torch.nn.functional, "linear", _KeepingLinear.apply) if keeps_inputs else nullcontext()
        with keeping, _recorded(step, config, job, recorder, compiled_as=untraced):
            for number in (1, 2):
                observe = partial(_stage, recorder, number)
                step.micro_step(inputs, labels, 1, last=number == 2, observe=observe)
                if updates_in_backward(config):
                    step.update(observe)
        recorder.close()
    if updates_in_backward(config):
        _name_states(recorder.trace)
    assert boundary.shape is not None
    return recorder.trace, boundary.shape


@errors_only()
def trace_evaluation(
    config: Config, job: Job, layers: tuple[int, ...], scratch: Scratch, *, sequences: int, masked: bool = False
) -> MemoryTrace:
    """The trace of so many sequences evaluated together (`TrainingStep.evaluate`) by the model cut down to `layers`, at
    the prime rank alone: a loss's number of chunks is not proportional to the sequences."""
    config = config if config.get("rank") is None else config.replace(rank=RANK)
    plan = _fake_plan(config.without("update"), job, masked=masked)
    kernel = traceable(plan.evaluated_loss or plan.loss, job.hardware.capability)
    recorder = _recorder(config, scratch)

    def loss(*args: Any) -> torch.Tensor:
        recorder.move(EVALUATION, LOSS)
        return kernel(*args)

    plan.loss = plan.evaluated_loss = loss
    model = make_skeleton(plan, layers)  # peft cannot add adapters to fake weights
    with without_data():
        step = _fake_step(plan, model, recorder)
        with _recorded(step, config, job, recorder, compiled_as=config):
            recorder.move(EVALUATION, BEFORE)
            step.evaluate(torch.empty((sequences, job.workload.seq_len), dtype=torch.long))
        recorder.close()
    return recorder.trace


def _recorder(config: Config, scratch: Scratch) -> Recorder:
    return RecorderOfCompiled(scratch) if config["compile"] is True else Recorder(scratch)


@contextmanager
def _recorded(
    step: TrainingStep, config: Config, job: Job, recorder: Recorder, *, compiled_as: Config
) -> Iterator[None]:
    """Inside, `recorder` sees what `step` does on the device; `compiled_as` has the sizes for which it is compiled."""
    model = step.module.model
    layers = decoder_layers(model)
    compiling: AbstractContextManager[None] = nullcontext()
    if config["compile"] is True:
        from autofit.estimate.compiled.layers import compiled  # which loads torch's compiler

        compiling = compiled(layers, recorder, compiled_as)
    with (
        compiling,
        as_on_host(job) if updates_in_backward(config) else nullcontext(),
        as_on_device(config, job, recorder),
        liger_layers(config, model),
        recorder,
        _layer_marks(recorder, layers),
    ):
        yield


def _fake_plan(config: Config, job: Job, *, masked: bool) -> BuildPlan:
    """The plan of a step that is only traced; `masked` says whether padding is masked."""
    plan = make_plan(config, job, HOST)
    plan.masks_padding = masked
    plan.attention = traceable_attention(plan.attention)
    plan.loss_scaling = False  # which needs no memory
    if not updates_in_backward(config):
        plan.optimizer = lambda root: torch.optim.SGD(root.parameters())  # never run: updates are traced apart
    return plan


def _fake_step(plan: BuildPlan, model: nn.Module, recorder: Recorder) -> TrainingStep:
    """The step of `model` on fake tensors; its weights are the recorder's residents."""
    fake_weights.materialise(model)
    for part in plan.parts:
        part.on_model(plan, model)
    rows = Rows(plan.sequences)
    module = LossModule(model, plan.loss, plan.evaluated_loss, masks_padding=plan.masks_padding, rows=rows)
    module.train()
    _register_residents(recorder, model, decoder_layers(model))
    _mark_gradients(recorder, module, in_backward=updates_in_backward(plan.config))  # before they are used up
    with unset_fake_temporarily():  # bitsandbytes computes its quantisation maps from numbers
        engine = engines.make_local(module, plan)
    if isinstance(engine.optimizer, UpdatesInBackward):
        for optimizer in engine.optimizer.of.values():
            give_quantisation_maps(optimizer)
    return TrainingStep(module, engine, plan)


def _mark_gradients(recorder: Recorder, module: nn.Module, *, in_backward: bool) -> None:
    """Tell the recorder of each gradient once it is there. Where it is used up `in_backward`, that of a head comes when
    its loss is done."""

    def arrived(parameter: torch.Tensor) -> None:
        recorder.mark_hook()
        if in_backward:
            if recorder.place.layer == LOSS:
                recorder.move(recorder.place.stage, AFTER)
            assert parameter.grad is not None
            recorder.holds(parameter.grad, Category.GRADIENTS)

    for parameter in filter(lambda p: p.requires_grad, module.parameters()):
        parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]


def _name_states(trace: MemoryTrace) -> None:
    """Say of what outlives its step, where no gradient does, that it is an optimizer's state."""
    for storage in trace.storages:
        if storage.allocated and (storage.freed is None or storage.freed.stage[-1] != storage.allocated.stage[-1]):
            storage.holds = Category.OPTIMIZER


def _checkpoint_as_in_full(layers: list[Any], kinds: list[Any]) -> None:
    """Checkpoint the layers that are checkpointed in the full stack, where their indices differ."""
    functions = [vars(layer)["_gradient_checkpointing_func"] for layer in layers if layer.gradient_checkpointing]
    for layer, (_, checkpointed, _) in zip(layers, kinds, strict=True):
        layer.gradient_checkpointing = checkpointed
        if checkpointed:
            layer._gradient_checkpointing_func = functions[0]


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
    """A backward starts with the loss, all else before the first layer."""
    recorder.move(f"{phase}-{micro_step}", LOSS if phase == "backward" else BEFORE)
    return nullcontext()


class _KeepingLinear(torch.autograd.Function):
    """As `LinearFunctionForZeroStage3` of deepspeed 0.19.8, runtime/zero/linear.py."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight, bias)
        product = inputs.matmul(weight.t())
        if bias is not None:
            product += bias
        return product

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, bias = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_inputs = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        of_weight = flat.t().matmul(inputs.reshape(-1, inputs.shape[-1])) if ctx.needs_input_grad[1] else None
        of_bias = flat.sum(0) if bias is not None and ctx.needs_input_grad[2] else None
        return of_inputs, of_weight, of_bias


@contextmanager
def _layer_marks(recorder: Recorder, layers: list[Any]) -> Iterator[None]:
    """Tell the recorder which layer is running: around its call in the forward, by tensor hooks in the backward."""

    def backward_reaches(tensor: torch.Tensor, layer: int) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: recorder.move(recorder.place.stage, layer))  # type: ignore[no-untyped-call]

    def marked(index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any, **named: Any) -> Any:
            if recorder.place.stage.startswith("backward"):  # a checkpoint's recomputation
                return call(*inputs, **named)
            if index == 0:
                backward_reaches(inputs[0], BEFORE)
            recorder.move(recorder.place.stage, index)
            output = call(*inputs, **named)
            backward_reaches(output[0] if isinstance(output, tuple) else output, index)
            if index == len(layers) - 1:
                recorder.move_with_next_operation(recorder.place.stage, AFTER)
            return output

        return run

    before = [layer._compiled_call_impl for layer in layers]
    for index, layer in enumerate(layers):
        layer._compiled_call_impl = marked(index, layer._compiled_call_impl or layer._call_impl)
    try:
        yield
    finally:
        for layer, call in zip(layers, before, strict=True):
            layer._compiled_call_impl = call
