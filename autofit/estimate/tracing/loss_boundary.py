"""Where the decoder ends and the loss begins: the two are traced separately, and this is their interface.

One trace of the decoder serves every micro-batch, because its sizes are proportional to it. The loss is traced for a
number of tokens, because its number of chunks is not proportional to that.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from autofit.estimate.kernels.liger import fused_linear_cross_entropy
from autofit.estimate.kernels.scratch import Scratch
from autofit.estimate.memory.memory_trace import AFTER, LOSS, MemoryTrace
from autofit.estimate.tracing.recorder import Recorder, without_data
from autofit.techniques.attention_kernels import generation
from autofit.techniques.losses.cross_entropy import fused_by, fused_cross_entropy
from autofit.techniques.losses.tiled_cross_entropy import tiled_cross_entropy

if TYPE_CHECKING:
    from autofit.techniques.technique import Head, LossKernel

HIDDEN, HIDDEN_GRADIENT, HEAD_GRADIENT = "hidden", "gradient of hidden", "gradient of the head"


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The projection of hidden states from which the loss is computed: formats and sizes, without data."""

    hidden: torch.dtype
    weight: torch.dtype
    vocabulary: int
    hidden_size: int
    trained: bool
    bias: bool
    softcap: float | None
    scale: float
    autocast: torch.dtype | None


class LossBoundary:
    """A loss kernel that computes nothing: it takes the place of the loss in the decoder's trace."""

    def __init__(self, autocast: torch.dtype | None, *, gives_view: bool) -> None:
        """`gives_view`: whether the head's gradient is a view, as that of a product with a transposed weight is."""
        self.recorder: Recorder | None = None
        self.shape: HeadShape | None = None
        self._autocast = autocast
        self._gives_view = gives_view

    def __call__(self, hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> torch.Tensor:
        """A scalar whose backward gives the hidden states, and a trained head, gradients of their own size."""
        recorder = self.recorder
        assert recorder is not None
        self.shape = HeadShape(
            hidden=hidden.dtype,
            weight=head.weight.dtype,
            vocabulary=head.weight.shape[0],
            hidden_size=head.weight.shape[1],
            trained=head.weight.requires_grad,
            bias=head.bias is not None,
            softcap=head.softcap,
            scale=head.scale,
            autocast=self._autocast,
        )
        enter(recorder, hidden)
        weight = head.weight if head.weight.requires_grad else None
        is_view = self._gives_view and self._autocast in (None, head.weight.dtype)  # else a copy is what arrives
        result: torch.Tensor = _Gradients.apply(hidden, weight, recorder, is_view)  # type: ignore[no-untyped-call]
        return result


def enter(recorder: Recorder, hidden: torch.Tensor) -> None:
    """Attribute what follows to the loss, until its backward hands a gradient to `hidden`."""
    recorder.move(recorder.place.stage, LOSS)
    recorder.label(hidden, HIDDEN)

    def leave(gradient: torch.Tensor) -> None:
        recorder.label(gradient, HIDDEN_GRADIENT)
        recorder.move(recorder.place.stage, AFTER)

    hidden.register_hook(leave)  # type: ignore[no-untyped-call]


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor | None, recorder: Recorder, is_view: bool
    ) -> torch.Tensor:
        ctx.of_hidden = (hidden.shape, hidden.dtype)
        ctx.of_weight = None if weight is None else (weight.shape, weight.dtype)
        ctx.recorder = recorder
        ctx.is_view = is_view
        return torch.zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        of_hidden = torch.empty(ctx.of_hidden[0], dtype=ctx.of_hidden[1])
        if ctx.of_weight is None:
            return of_hidden, None, None, None
        of_weight = torch.empty(ctx.of_weight[0], dtype=ctx.of_weight[1])
        of_weight = of_weight.t().t() if ctx.is_view else of_weight
        ctx.recorder.label(of_weight, HEAD_GRADIENT)
        return of_hidden, of_weight, None, None


def trace_loss(
    kernel: LossKernel,
    shape: HeadShape,
    tokens: int,
    scratch: Scratch,
    *,
    capability: str | None,
) -> MemoryTrace:
    """The trace of two forwards and backwards of the loss alone, of which only the events at LOSS count. When its
    gradients are freed is up to the decoder."""
    from autofit.techniques.technique import Head

    kernel = traceable(kernel, capability)
    recorder = Recorder(scratch)
    with without_data():
        leaf = torch.empty(tokens, shape.hidden_size, dtype=shape.hidden, requires_grad=True)
        weight = torch.empty(shape.vocabulary, shape.hidden_size, dtype=shape.weight, requires_grad=shape.trained)
        bias = torch.empty(shape.vocabulary, dtype=shape.weight) if shape.bias else None
        labels = torch.empty(tokens, dtype=torch.long)
        for tensor in (leaf, weight, bias, labels):
            if tensor is not None:
                recorder.ignore(tensor)

        def micro_step(number: int) -> tuple[torch.Tensor, ...]:
            """Run one forward and backward; returns the gradients."""
            recorder.move(f"forward-{number}", AFTER)
            head = Head(weight=weight, bias=bias, softcap=shape.softcap, scale=shape.scale)
            with torch.autocast("cpu", shape.autocast) if shape.autocast is not None else nullcontext():
                loss = _loss(recorder, kernel, leaf, head, labels) / 1
            recorder.move(f"backward-{number}", LOSS)
            gradients = torch.autograd.grad(loss, [leaf, weight] if shape.trained else [leaf])
            for gradient in gradients[1:]:
                recorder.label(gradient, HEAD_GRADIENT)
            return gradients

        with recorder:
            held = [micro_step(number) for number in (1, 2)]
        recorder.close()
        del held
    return recorder.trace


def traceable(kernel: LossKernel, capability: str | None) -> LossKernel:
    """`kernel` as it allocates on a device of this compute capability (None for a processor): a stand-in for Liger's,
    which is for a device alone."""
    if kernel is fused_cross_entropy:
        adds_products = generation(capability).ampere
        return partial(fused_by, partial(fused_linear_cross_entropy, adds_products=adds_products))
    if kernel is tiled_cross_entropy:
        return partial(tiled_cross_entropy, for_card=capability is not None)
    return kernel


def _loss(recorder: Recorder, kernel: LossKernel, leaf: torch.Tensor, head: Head, labels: torch.Tensor) -> torch.Tensor:
    """The loss of hidden states that nothing else keeps alive."""
    hidden = leaf.clone()
    enter(recorder, hidden)
    return kernel(hidden, head, labels)
