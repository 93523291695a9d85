"""The optimizer's part of a step, run on fake parameters of the whole model."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autofit.core.lattice import Config
from autofit.estimate.kernels.scratch import Scratch
from autofit.estimate.memory.memory_trace import AFTER, MemoryTrace
from autofit.estimate.tracing import fake_weights
from autofit.estimate.tracing.fake_optimizer import as_on_host, give_quantisation_maps, page_states
from autofit.estimate.tracing.recorder import Recorder, without_data
from autofit.estimate.tracing.trace import HOST, architecture_kinds
from autofit.techniques import Job
from autofit.training.build import make_plan, make_skeleton
from autofit.training.decoder import decoder_layers, replace_layers
from autofit.training.engines.local import LocalEngine


def trace_updates(
    config: Config, job: Job, scratch: Scratch, *, exact: bool = False, flat: float | None = None
) -> MemoryTrace:
    """The trace of two updates: `optimizer-1`, which creates the states, and `optimizer-2`, like all later ones.

    Weights and gradients exist beforehand and are not recorded. Of the decoder layers of a kind only the first is
    built, and stands for the others, unless `exact`. With `flat` the optimizer sees no parameters, but flat buffers of
    at most that many elements, which are updated one after another.
    """
    plan = make_plan(config, job, HOST)
    plan.attention = "eager"  # no update runs attention, so its package need not be installed
    plan.loss_scaling = False  # which needs no memory
    kinds = architecture_kinds(job.model)
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    built = range(len(kinds)) if exact else sorted(first.values())
    model = make_skeleton(plan, built)
    fake = without_data()
    with fake:
        fake_weights.materialise(model)
        if not exact:
            _repeat_layers(model, [built.index(first[kind]) for kind in kinds], fake)
        modules = [model] if flat is None else _flat_buffers(model, flat)
    # Outside the fake mode: bitsandbytes computes its quantisation maps from numbers.
    engines = [LocalEngine(module, plan) for module in modules]
    recorder = Recorder(scratch)
    with fake:
        for engine in engines:
            give_quantisation_maps(engine.optimizer)
            page_states(engine.optimizer, recorder)
        for update in (1, 2):
            recorder.move(f"optimizer-{update}", AFTER)
            for engine in engines:
                for parameter in (p for p in engine.root.parameters() if p.requires_grad):
                    gradient = _like(parameter, fake)
                    with torch._C._DisableTorchDispatch():  # as below
                        parameter.grad = gradient
                    recorder.ignore(parameter)
                    recorder.ignore(gradient)
                with recorder, as_on_host(job):
                    engine.update()
        recorder.close()
    return recorder.trace


def _flat_buffers(model: nn.Module, most: float) -> list[nn.Module]:
    """Modules with one parameter each, of at most so many elements, that together have the trained elements of
    `model`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    left = sum(p.numel() for p in trained)
    modules = []
    while left:
        elements = int(min(left, most))
        module = nn.Module()
        module.register_parameter("flat", nn.Parameter(torch.empty(elements, dtype=trained[0].dtype)))
        modules.append(module)
        left -= elements
    return modules


def _repeat_layers(model: nn.Module, stand_ins: list[int], mode: FakeTensorMode) -> None:
    """Give `model` as many layers as there are `stand_ins`, places of layers whose trained parameters each one
    copies."""
    layers = decoder_layers(model)
    replace_layers(model, [_alike(layers[place], mode) for place in stand_ins])


def _alike(layer: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of the layer's trained parameters; of all of it if it has embeddings, whose states bitsandbytes keeps in
    another format."""
    if any(isinstance(module, nn.Embedding) for module in layer.modules()):
        return deepcopy(layer)
    copy = nn.Module()
    for index, parameter in enumerate(p for p in layer.parameters() if p.requires_grad):
        like: Any = _like(parameter, mode).requires_grad_()
        like._is_param = True  # as nn.Parameter marks a subclass of torch.Tensor
        copy.register_parameter(str(index), like)
    return copy


def _like(tensor: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    return fake_weights.empty(mode, tensor.shape, tensor.stride(), tensor.dtype, HOST)
