"""The speed of products of matrices in one number format, as a linear layer makes them forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from autofit.core.device.work_kinds import LAYOUTS, batched, called, operands, product, wide_product
from autofit.probe.bench import FORMATS, Bench
from autofit.probe.shapes import Shapes

ROWS = 512, 4096
"""Tokens in a product, on a processor and on an accelerator: as many as a micro-batch has that keeps the device at
work."""
FEW_ROWS, TRIED_ROWS = 64, 8
"""The fewest tokens, and those of the product that shows how many a slow format can afford."""
HEAD_FLOPS = 6e9, 2e12
"""The head's product is made with as many tokens as this allows, on a processor and on an accelerator: with few, it
takes as long as reading its weights."""
LAYOUT_SECONDS = 0.2
"""The most that all products of one layout in one format take."""
BATCHED = (32, 256), (1024, 1024)
"""Tokens of the sequences whose scores are computed, at least and at most, on a processor and on an accelerator: fewer
would take that no longer than a launch does."""

Sample = tuple[float, float, float]
"""FLOPs, bytes, seconds."""


def measure(bench: Bench, shapes: Shapes, number_format: str) -> Iterator[dict[str, float]]:
    """Seconds per FLOP and per byte of operands, layout by layout, as they are known."""
    dtype = FORMATS[number_format]
    call = _sample(bench, dtype, "nt", TRIED_ROWS, TRIED_ROWS, TRIED_ROWS, LAYOUT_SECONDS / 50)[2]
    yield {called(number_format): call}
    for layout in LAYOUTS:
        samples = list(_samples(bench, shapes, dtype, layout))
        if bench.accelerator:  # it has done one product when the host has launched the next
            per_flop, per_byte = roofline(samples)
        else:
            per_flop, per_byte = fitted([(f, b, max(s - call, s / 2.0)) for f, b, s in samples])
        yield {product(number_format, layout): per_flop, operands(number_format, layout): per_byte}
        yield {wide_product(number_format, layout): _wide(bench, shapes, dtype, layout, per_flop, per_byte)}
    yield {batched(number_format): _batched(bench, shapes, dtype)}


def _samples(bench: Bench, shapes: Shapes, dtype: torch.dtype, layout: str) -> Iterator[Sample]:
    """Samples of a feed-forward matrix with many tokens and, on a processor, with few; then of an adapter, rank 16."""
    hidden, inner = shapes.hidden, shapes.feed_forward
    tried = _sample(bench, dtype, layout, TRIED_ROWS, hidden, inner, LAYOUT_SECONDS / 8)
    affordable = int(TRIED_ROWS * LAYOUT_SECONDS / 3 / tried[2])
    rows = max(min(ROWS[bench.accelerator], affordable), FEW_ROWS)
    yield _sample(bench, dtype, layout, rows, hidden, inner, LAYOUT_SECONDS / 4)
    if not bench.accelerator:  # whose rates are those of the two extremes
        yield _sample(bench, dtype, layout, max(rows // 8, TRIED_ROWS), hidden, inner, LAYOUT_SECONDS / 8)
    yield _sample(bench, dtype, layout, rows, hidden, 16, LAYOUT_SECONDS / 8)


def _wide(bench: Bench, shapes: Shapes, dtype: torch.dtype, layout: str, per_flop: float, per_byte: float) -> float:
    """Seconds per FLOP of the head's product, or those of the others where it would take over half a second."""
    hidden, vocabulary = shapes.hidden, shapes.vocabulary
    of_token = 2.0 * hidden * vocabulary
    most_flops = HEAD_FLOPS[bench.accelerator]
    affordable = min(most_flops, LAYOUT_SECONDS / 4 / per_flop) / of_token
    rows = int(max(min(affordable, ROWS[bench.accelerator]), TRIED_ROWS))
    if rows * of_token * per_flop > 0.5:
        return per_flop
    # Into a result that is there: new pages are measured apart.
    shape = {"nt": (rows, vocabulary), "nn": (rows, hidden), "tn": (vocabulary, hidden)}[layout]
    result = torch.empty(shape, dtype=dtype, device=bench.device)
    flops, moved, seconds = _sample(bench, dtype, layout, rows, hidden, vocabulary, 0.02, result)
    if bench.accelerator:
        return seconds / flops
    return max(seconds - moved * per_byte, seconds / 2.0) / flops


def _sample(
    bench: Bench,
    dtype: torch.dtype,
    layout: str,
    rows: int,
    width_in: int,
    width_out: int,
    most: float,
    result: torch.Tensor | None = None,
) -> Sample:
    """The sample of a linear layer's product. Each call has another weight, as the next layer has."""
    inputs, gradients = bench.take(dtype, rows, width_in), bench.take(dtype, rows, width_out)
    weight = _tensors_like(bench, bench.take(dtype, width_out, width_in))
    another_gradient = _tensors_like(bench, gradients)
    call = {
        "nt": lambda: torch.mm(inputs, weight().t(), out=result),
        "nn": lambda: torch.mm(gradients, weight(), out=result),
        "tn": lambda: torch.mm(another_gradient().t(), inputs, out=result),
    }[layout]
    seconds = bench.seconds(call, most=most)
    moved = dtype.itemsize * (rows * width_in + rows * width_out + width_in * width_out)
    return 2.0 * rows * width_in * width_out, moved, seconds


def _tensors_like(bench: Bench, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that returns tensors like this one: always this one where it is too large for the caches."""
    return lambda: tensor if tensor.nbytes > bench.size / 4 else bench.take(tensor.dtype, *tensor.shape)


def roofline(samples: Sequence[Sample]) -> tuple[float, float]:
    """Seconds per FLOP and per byte of what takes as long as the slower of its arithmetic and its bytes: those of the
    sample with most of the one to a unit of the other (Williams et al. 2009, "Roofline")."""
    by_intensity = sorted(samples, key=lambda sample: sample[0] / sample[1])
    (_, moved, slowest), (flops, _, fastest) = by_intensity[0], by_intensity[-1]
    return fastest / flops, slowest / moved


def fitted(samples: Sequence[Sample]) -> tuple[float, float]:
    """Seconds per FLOP and per byte: least squares of relative errors, with neither below 2 % of what it
    would be if it alone took all the time of some sample: calibration multiplies them."""
    flops = [f / s for f, _, s in samples]
    moved = [b / s for _, b, s in samples]
    least_per_flop, least_per_byte = 0.02 / max(flops), 0.02 / max(moved)
    ff, bb = sum(f * f for f in flops), sum(b * b for b in moved)
    fb, f1, b1 = sum(f * b for f, b in zip(flops, moved, strict=True)), sum(flops), sum(moved)
    determinant = ff * bb - fb * fb
    if determinant <= 1e-9 * ff * bb:
        return f1 / ff, least_per_byte
    per_flop, per_byte = (f1 * bb - b1 * fb) / determinant, (b1 * ff - f1 * fb) / determinant
    if per_flop < least_per_flop:
        return least_per_flop, max((b1 - least_per_flop * fb) / bb, least_per_byte)
    if per_byte < least_per_byte:
        return max((f1 - least_per_byte * fb) / ff, least_per_flop), least_per_byte
    return per_flop, per_byte


def _batched(bench: Bench, shapes: Shapes, dtype: torch.dtype) -> float:
    """Seconds per FLOP of the scores of attention that is not fused."""
    tokens, most_tokens = BATCHED[bench.accelerator]
    per_flop = 0.0
    while tokens <= most_tokens:
        queries = bench.take(dtype, shapes.heads, tokens, shapes.head_width)
        keys = bench.take(dtype, shapes.heads, tokens, shapes.head_width)
        call = lambda q=queries, k=keys: q @ k.transpose(1, 2)  # noqa: E731
        seconds = bench.seconds(call, most=LAYOUT_SECONDS / 8)
        per_flop = seconds / (2.0 * shapes.heads * tokens * tokens * shapes.head_width)
        if seconds > LAYOUT_SECONDS / 8:
            break
        tokens *= 2
    return per_flop
