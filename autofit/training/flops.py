"""FLOPs of a training step, and model FLOP utilisation."""

from __future__ import annotations

from autofit.catalog.models import ModelShape, shape
from autofit.core.lattice import Config
from autofit.core.lengths import mean
from autofit.techniques import Job


def flops_per_token(model: ModelShape, *, seq_len: float, full: bool) -> float:
    """Floating-point operations per trained token that the mathematics requires; recomputation is not counted.

    Matrix products: per weight, 2 for the forward pass, 2 for the gradient of the inputs, and 2 for the gradient of the
    weight where it is trained (with adapters the base weights need none; the adapters' own products are below 2 % and
    left out). Attention: 12 * width for each token that a token attends to, in each layer that has attention. Follows
    Chowdhery et al. 2022 (PaLM), appendix B, with the causal mask and sliding windows; the matrix products of full
    training are its 6N.
    """
    attended = model.full_attention_layers * _attended(seq_len, seq_len)
    attended += model.sliding_layers * _attended(seq_len, model.sliding_window)
    return _product_flops(model, full=full) + 12.0 * model.attention_width * attended


def _attended(seq_len: float, window: float) -> float:
    """How many of its `window` last tokens a token of a sequence has before it, in the mean: half of a sequence that is
    shorter than the window."""
    window = min(window, seq_len)
    return window - window * window / (2.0 * seq_len)


def _product_flops(model: ModelShape, *, full: bool) -> float:
    return (6.0 if full else 4.0) * model.active_matmul_parameters


def mfu(job: Job, config: Config, tokens_per_second: float) -> float | None:
    """Model FLOP utilisation (0 to 1) relative to the devices' dense peak; None if the peak is unknown."""
    peak = job.hardware.peak_flops
    if peak is None:
        return None
    lengths = job.workload.lengths
    # Attention's share of a token grows with its sequence, of which longer ones have more tokens.
    seq_len = job.workload.seq_len if lengths is None else mean(lengths, 2) / mean(lengths)
    flops = flops_per_token(shape(job.model), seq_len=seq_len, full=config["method"] == "full")
    return tokens_per_second * flops / (peak * job.workload.devices)


def least_token_seconds(job: Job, *, full: bool) -> float | None:
    """Seconds that a token's matrix products take at the devices' dense peak, which no step can beat; None if it is
    unknown. Attention is not counted, because a sliding window needs less of it."""
    peak = job.hardware.peak_flops
    return None if peak is None else _product_flops(shape(job.model), full=full) / (peak * job.workload.devices)
