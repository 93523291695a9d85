"""FLOPs of a training step, and model FLOP utilisation."""

from __future__ import annotations

from functools import cache

from autofit.catalog.model_shape import ModelShape
from autofit.catalog.models import shape
from autofit.core.lattice import Config
from autofit.techniques import Job


def flops_per_token(model: ModelShape, *, lengths: tuple[int, ...], full: bool) -> float:
    """Floating-point operations per trained token that the mathematics requires, in sequences of these lengths, which
    are equally frequent; recomputation is not counted.

    Matrix products: per weight, 2 for the forward pass, 2 for the gradient of the inputs, and 2 for the gradient of the
    weight where it is trained (with adapters the base weights need none; the adapters' own products are below 2 % and
    left out). Attention: 12 * width for each token that a token attends to, in each layer that has attention. Follows
    Chowdhery et al. 2022 (PaLM), appendix B, with the causal mask and sliding windows; the matrix products of full
    training are its 6N.
    """
    attended = model.full_attention_layers * _attended(lengths, max(lengths))
    attended += model.sliding_layers * _attended(lengths, model.sliding_window)
    return _product_flops(model, full=full) + 12.0 * model.attention_width * attended


@cache
def _attended(lengths: tuple[int, ...], window: int) -> float:
    """How many tokens a token attends to in the mean: half of those in a sequence or, beyond the window, as many as
    that holds."""
    within = ((length, min(window, length)) for length in lengths)
    return sum(reach * length - reach * reach / 2.0 for length, reach in within) / sum(lengths)


def _product_flops(model: ModelShape, *, full: bool) -> float:
    return (6.0 if full else 4.0) * model.active_matmul_parameters


def mfu(job: Job, config: Config, tokens_per_second: float) -> float | None:
    """Model FLOP utilisation (0 to 1) relative to the devices' dense peak; None if the peak is unknown."""
    peak = job.hardware.peak_flops
    if peak is None:
        return None
    lengths = job.workload.lengths or (job.workload.seq_len,)
    flops = flops_per_token(shape(job.model), lengths=lengths, full=config["method"] == "full")
    return tokens_per_second * flops / (peak * job.workload.devices)


def least_token_seconds(job: Job, *, full: bool) -> float | None:
    """Seconds that a token's matrix products take at the devices' dense peak, which no step can beat; None if it is
    unknown. Attention is not counted, because a sliding window needs less of it."""
    peak = job.hardware.peak_flops
    return None if peak is None else _product_flops(shape(job.model), full=full) / (peak * job.workload.devices)
