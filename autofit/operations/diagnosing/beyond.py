"""What a run takes of a device beyond the estimate of its config: other formats of weights, and whole gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autofit.catalog.models import Model, shape
from autofit.core.units import GIB, format_bytes
from autofit.estimate.assumptions import of_scales
from autofit.estimate.estimate import Estimate
from autofit.prediction.estimation import Estimation
from autofit.techniques.axes.precision import product_format
from autofit.trainers.run import Run

PARTS = {
    "all": "the frozen weights are loaded in fp32, which takes",
    "outside": "embeddings, norms and the head are loaded in fp32, which takes",
    "vocabulary": "modules that are trained as a whole beside the adapters take",
}
"""What weights beyond the config's formats are called."""


def of_whole_run(estimate: Estimate, run: Run, estimation: Estimation, missed_bytes: int) -> Estimate:
    """`estimate` with what the run takes beyond it and what predictions missed, under the limit of `estimation`."""
    beyond, parts = bytes_beyond(run, estimation.job.model), estimate.breakdown
    peaks = {
        phase: size + (beyond["gradients"] if phase in ("forward", "backward") else 0)
        for phase, size in estimate.phase_peaks.items()
    }
    # Where the peak is in another phase, whole gradients raise it by less.
    beyond["gradients"] = max(peaks.values()) - max(estimate.phase_peaks.values())
    always = beyond["weights"] + missed_bytes
    more = always + beyond["gradients"]
    stated = of_scales(estimation.job)  # by the file: where it has single scales, they are counted
    return replace(
        estimate,
        assumptions=tuple(sentence for sentence in estimate.assumptions if sentence != stated),
        memory_limit_bytes=estimation.memory_limit_bytes,
        device_bytes=estimate.device_bytes + more,
        peak_allocated_bytes=estimate.peak_allocated_bytes + more,
        peak_reserved_bytes=estimate.peak_reserved_bytes + more,
        breakdown={
            **parts,
            **{part: parts[part] + size for part, size in beyond.items()},
            "temporaries": parts["temporaries"] + missed_bytes,
        },
        phase_peaks={phase: size + always for phase, size in peaks.items()},
    )


def bytes_beyond(run: Run, model: Model) -> dict[str, int]:
    """What a run takes on each device beyond the estimate of its config, by part of the breakdown."""
    return {"weights": bytes_beyond_formats(run, model), "gradients": _whole_gradients_bytes(run, model)}


def _whole_gradients_bytes(run: Run, model: Model) -> int:
    """What gradients that FSDP leaves whole take beyond the shards that an estimate has in their place.

    They are in the format of the products: accelerate reduces in that one, too (`set_mixed_precision` of its
    utils/dataclasses.py), so that torch widens none (`to_accumulated_grad_if_needed` of _fully_shard/_fsdp_param.py,
    2.13). Adapters' are left out, as in the floor.
    """
    if not run.defers or run.config["method"] != "full":
        return 0
    whole = 4.0 if product_format(run.config) == "fp32" else 2.0
    shard = 0.0 if run.config["offload"] == "params" else 2.0 if run.config["precision"] == "bf16" else 4.0
    return round(shape(model).parameters * (whole - shard / run.devices))


def bytes_beyond_formats(run: Run, model: Model) -> int:
    """What weights take on each device beyond the config's own formats (`Run.beyond`); negative for less."""
    if run.config["offload"] in ("params", "nvme"):
        return 0  # they are on the host
    counts = shape(model)
    parameters = {
        "all": counts.parameters,
        "linear": counts.linear_parameters,
        "outside": counts.parameters - counts.linear_parameters,
        "vocabulary": counts.embedding_parameters,
    }
    shared = run.devices if run.config["sharding"] in ("zero3", "fsdp", "fsdp-no-reshard") else 1
    return round(sum(size * parameters[which] for which, size in run.beyond)) // shared


def notes_on_formats(run: Run, model: Model) -> Iterator[str]:
    """Which weights beyond the config's own formats take more than half a GiB."""
    for which, size in run.beyond:
        more = bytes_beyond_formats(replace(run, beyond=((which, size),)), model)
        if which in PARTS and more > GIB // 2:
            yield f"{PARTS[which]} {format_bytes(more)} more"
