"""The least memory that a config can need: that of its weights, gradients and optimizer states alone."""

from __future__ import annotations

from autofit.catalog.models import shape
from autofit.core.lattice import Config
from autofit.techniques import Job, quantisation
from autofit.techniques.axes.optimizer import kind_of
from autofit.techniques.axes.precision import is_mixed, product_format
from autofit.techniques.axes.sharding import gathers_weights
from autofit.techniques.axes.update import updates_in_backward


def floor_parts(config: Config, job: Job) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states, each a lower bound."""
    model = shape(job.model)
    precision = config["precision"]
    if config["method"] != "full":
        # Adapters are left out: their size depends on the targets, and a floor may be too low.
        compute = 4.0 if product_format(config) == "fp32" else 2.0
        quantised = model.linear_parameters if config["method"] == "qlora" else 0
        weights = (model.parameters - quantised) * compute + quantised * quantisation.BYTES_PER_WEIGHT
        share = _left(config, job.workload.devices)["weights"] if gathers_weights(config) else 1.0
        return {
            "weights": int(weights * share),
            "gradients": 0,
            "optimizer": 0,
        }
    per_weight = 2.0 if precision in ("bf16", "fp16") else 4.0
    state_bytes = kind_of(config).state_bytes
    state = 2.0 * per_weight if state_bytes is None else state_bytes
    gradients = 0.0 if updates_in_backward(config) else per_weight
    trained = {"weights": per_weight, "gradients": gradients, "optimizer": state}
    left = _left(config, job.workload.devices)
    return {part: int(model.parameters * size * left[part]) for part, size in trained.items()}


def _left(config: Config, devices: int) -> dict[str, float]:
    """The share of each part that remains on a device. Sharding libraries convert to 16 bits themselves, so they may
    halve what is fp32 elsewhere."""
    sharding, offload = config.text("sharding"), config.text("offload")
    if sharding in ("none", "ddp") and offload == "none":
        return {"weights": 1.0, "gradients": 1.0, "optimizer": 1.0}
    half = 0.5 if is_mixed(config) else 1.0
    share = 1.0 / devices
    whole = sharding in ("none", "zero1", "zero2")
    shares = {
        "weights": half if whole else half * share,
        "gradients": half if sharding == "zero1" else half * share,
        "optimizer": share,
    }
    if offload == "none":
        return shares
    return {**shares, "gradients": 0.0, "optimizer": 0.0} | ({} if offload == "optimizer" else {"weights": 0.0})


def floor_bytes(config: Config, job: Job) -> int:
    """Bytes that are alive together at the first update: weights, gradients, states. A lower bound on the peak."""
    return sum(floor_parts(config, job).values())
