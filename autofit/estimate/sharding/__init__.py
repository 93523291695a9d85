"""What the sharding libraries do to a step: one object per library, which rewrites the trace of one device."""

from __future__ import annotations

from autofit.core.lattice import Config
from autofit.estimate.sharding.ddp import Ddp
from autofit.estimate.sharding.fsdp import Fsdp
from autofit.estimate.sharding.library import Holdings, Hosted, Library, Traffic
from autofit.estimate.sharding.zero import Zero
from autofit.estimate.sharding.zero_amounts import Buckets
from autofit.estimate.sharding.zero_third import ZeroThree
from autofit.techniques import Job, needs_process_group
from autofit.techniques.axes.precision import is_mixed, product_format
from autofit.techniques.axes.sharding import uses_deepspeed
from autofit.techniques.deepspeed_settings import deepspeed_settings, deepspeed_stage
from autofit.techniques.habits import has_habit
from autofit.techniques.habits.habit import GradientsBesideBuckets
from autofit.techniques.selective import interval


def library(config: Config, job: Job) -> Library | None:
    """The library that runs the ranks of `config`; None where torch alone runs one device."""
    if not needs_process_group(config):
        return None
    ranks, sharding, offload = job.workload.devices, config.text("sharding"), config.text("offload")
    if sharding == "ddp":
        return Ddp(ranks=ranks, views=not has_habit(GradientsBesideBuckets, config, job.workload.trainer))
    if not uses_deepspeed(config):
        return Fsdp(
            ranks=ranks,
            offload=offload,
            mixed=is_mixed(config),
            reshards=sharding == "fsdp",
            foreach=config["optimizer"] == "adamw-foreach",
        )
    stage = deepspeed_stage(config)
    return (ZeroThree if stage == 3 else Zero)(
        stage=stage,
        ranks=ranks,
        offload=offload,
        mixed=is_mixed(config),
        wide=product_format(config) == "fp32",
        bf16=config["precision"] != "fp16-mixed",
        pinned=job.hardware.kind != "cpu",
        buckets=Buckets.of(deepspeed_settings(config, job)),
        rank=int(config.get("rank") or 1),
        interval=interval(config),
    )


__all__ = ["Buckets", "Holdings", "Hosted", "Library", "Traffic", "library"]
