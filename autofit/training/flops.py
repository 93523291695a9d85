"""Arithmetic of a training step, for model FLOP utilisation."""

from __future__ import annotations

from autofit.catalog.models import ModelShape, shape
from autofit.lattice import Config
from autofit.techniques import Job


def flops_per_token(model: ModelShape, *, seq_len: int, full: bool) -> float:
    """Floating-point operations per trained token that the mathematics needs, recomputation not counted.

    Matrix products: 2 per weight forward, 2 for the gradient of the inputs, 2 for that of the weights where they are
    trained (with adapters the base's weights need none; the adapters' own products are below 2 % and left out).
    Attention: 12 * layers * width * seq_len, halved for the causal mask. After Chowdhery et al. 2022 (PaLM),
    appendix B, whose 6N is this for full training.
    """
    per_weight = 6.0 if full else 4.0
    attention = 12.0 * model.layers * model.attention_width * seq_len / 2.0
    return per_weight * model.active_matmul_parameters + attention


def mfu(job: Job, config: Config, tokens_per_second: float) -> float | None:
    """Model FLOP utilisation in 0..1 against the device's dense peak; None where the peak is not known."""
    peak = job.hardware.peak_flops
    if peak is None:
        return None
    needed = flops_per_token(shape(job.model), seq_len=job.workload.seq_len, full=config["method"] == "full")
    return tokens_per_second * needed / (peak * job.workload.devices)
