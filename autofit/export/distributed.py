"""What the axes `offload` and `sharding` translate to: DeepSpeed's configuration, and FSDP's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autofit.core.errors import AutofitError
from autofit.estimate.saving import why_not_saved
from autofit.export.document import Near, Recommended, Task
from autofit.techniques import Job, complete
from autofit.techniques.axes.optimizer import weight_decay
from autofit.techniques.axes.precision import is_mixed
from autofit.techniques.axes.sharding import SHARDINGS_OF_OFFLOAD, uses_deepspeed
from autofit.techniques.deepspeed_settings import deepspeed_settings
from autofit.trial.limits.segments import ALLOCATOR, EXPANDABLE

NVME_FOLDER = "/dev/null/choose-a-folder-on-nvme"
"""Placeholder for a folder that the user must choose, if the format cannot ask for one: it is not writable."""

FIRST_GPU = "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=$(echo ${CUDA_VISIBLE_DEVICES:-0} | cut -d, -f1) "
"""Environment of a launch that is to use the GPU that trials use, and no other: the first that the user or a scheduler
leaves visible. CUDA by itself numbers them by speed, nvidia-smi by slot."""


def allocator(task: Recommended) -> dict[str, str]:
    """The environment in which CUDA's allocator is as it was in the trial, under both of its names (`ALLOCATOR`)."""
    expands = task.recommendation.point.measurement.expandable_segments
    return dict.fromkeys(ALLOCATOR, f"{EXPANDABLE}:True") if expands else {}


def by_deepspeed(task: Task) -> bool:
    """Whether the config was trained with DeepSpeed."""
    config = task.config
    return "sharding" in config and "offload" in config and uses_deepspeed(config)


def by_fsdp(task: Task) -> bool:
    """Whether the config was trained with torch's `fully_shard`."""
    return str(task.config.get("sharding")).startswith("fsdp")


def offload_is_covered(task: Task) -> bool:
    """Whether the settings written for `sharding` also cover the config's `offload`."""
    value = task.config.text("offload")
    return value == "none" or task.config.get("sharding") in SHARDINGS_OF_OFFLOAD[value]


def on_host(task: Task) -> bool:
    """Whether DeepSpeed's CPU Adam updates the weights."""
    return by_deepspeed(task) and task.config["offload"] != "none"


def threads(task: Task) -> str:
    """What to write before a launch line: as many threads per process for updates made on the host as trials have.

    Otherwise torchrun (torch/distributed/run.py) and accelerate (utils/launch.py) start processes with one thread.
    Empty where nothing is offloaded.
    """
    if task.config.get("offload") in (None, "none") or not offload_is_covered(task):
        return ""
    devices = task.workload.devices
    return f"OMP_NUM_THREADS=$({'nproc' if devices == 1 else f'($(nproc) / {devices})'}) "


def environment(task: Recommended) -> str:
    """What to write before a launch line for `allocator`."""
    return "".join(f"{name}={value} " for name, value in allocator(task).items())


def deepspeed_config(task: Task, *, filled: Iterable[str], folder: str = NVME_FOLDER) -> dict[str, Any]:
    """DeepSpeed's configuration as it was measured; `folder` is for offload=nvme.

    An optimizer that runs on the host is created by DeepSpeed, as only DeepSpeed knows the format of its states;
    `filled` names its arguments that whatever reads the file fills in. The weight decay is stated unless it is one of
    them: there it is 0 by default. One line is added that affects no step: in stage 3, saved models are whole.
    """
    job = Job(model=task.model(), workload=task.workload, hardware=task.hardware, stack=task.stack)
    deepspeed = deepspeed_settings(task.config, job, folder=folder)
    if deepspeed["zero_optimization"]["stage"] == 3:
        deepspeed["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if on_host(task):
        arguments = {"weight_decay": weight_decay(task.config["optimizer"])}
        deepspeed["optimizer"] = {"type": "AdamW", "params": {**arguments, **dict.fromkeys(filled, "auto")}}
    return deepspeed


def nvme_notes(task: Task) -> list[str]:
    """Notes on what offload=nvme leaves to the user, for formats that cannot ask for it."""
    if task.config["offload"] != "nvme" or not by_deepspeed(task):
        return []
    return [Near("offload=nvme: the folder is yours to choose: set nvme_path in both places")]


def machine_notes(task: Task, *, otherwise: str) -> list[str]:
    """A note if the ranks of the trials may have been on several machines, for formats that start all of them on one;
    `otherwise` names the options for several."""
    ranks = task.workload.devices
    if task.hardware.has_devices_for(ranks):
        return []
    return [
        f"launch: all {ranks} ranks start on one machine; those of the trials may have been on several, as Ray places "
        f"them: for that, set {otherwise}"
    ]


def saving_notes(task: Task) -> list[str]:
    """A note if a checkpoint exceeds the host's memory, as transformers' Trainer saves it; none for a model or a config
    that can no longer be read."""
    if not task.hardware.host_memory_bytes:
        return []
    try:
        job = Job(model=task.model(), workload=task.workload, hardware=task.hardware, stack=task.stack)
        reason = why_not_saved(complete(task.config.to_json()), job)
    except AutofitError:
        return []
    return [] if reason is None else [f"checkpoints: {reason}"]


def sharded_layers(task: Task) -> list[str]:
    """Class names of the decoder layers, which FSDP gathers one at a time. Imports torch and transformers."""
    from autofit.training.decoder import decoder_layers

    return sorted({type(layer).__name__ for layer in decoder_layers(task.meta_model())})


def reshards(task: Task) -> bool:
    """Whether FSDP frees the gathered parameters between the forward and the backward pass."""
    return task.config["sharding"] != "fsdp-no-reshard"


def fsdp_notes(task: Task, *, narrow_sums: bool) -> list[str]:
    """How accelerate's FSDP differs from trials; `narrow_sums` if gradients are reduced in the dtype it chooses."""
    value = task.config["sharding"]
    if task.hardware.kind == "cpu":
        return [f"sharding={value}: accelerate supports FSDP on accelerators only; on a CPU it trains with DDP"]
    notes: list[str] = [
        Near(
            f"sharding={value}: accelerate gathers the embeddings separately from the last norm and the head, and "
            "keeps these two until the backward pass; in trials all are gathered together"
        )
    ]
    if narrow_sums and is_mixed(task.config):
        notes.append(Near(f"sharding={value}: accelerate sums gradients over devices in 16 bits; fp32 was measured"))
    return notes
