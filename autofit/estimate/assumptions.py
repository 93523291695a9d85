"""What an estimate takes for granted because no trace can show it."""

from __future__ import annotations

from autofit.lattice import Config
from autofit.techniques import Job, needs_process_group

COMPILE_ERROR = 0.41
"""Relative error that compilation adds to a predicted time: its speedup in training has a geometric mean of 1.41 (Ansel
et al. 2024, "PyTorch 2": over 180 models on an A100), and none of it is predicted."""


def assumptions(config: Config, job: Job) -> tuple[str, ...]:
    """One sentence for each thing that is assumed of `config`."""
    found = []
    if job.hardware.kind == "cpu":
        found.append(_kept_by_the_heap(config))
    if config["compile"] is True:
        found.append(
            "compile=true is predicted as the step without compilation: what a compiled graph fuses, keeps and "
            "recomputes is up to the compiler, and setting it up is left out"
        )
        if job.hardware.kind == "cuda" and config["attention"] == "sdpa":
            found.append(
                "compile=true with attention=sdpa is predicted to attend as without compilation: transformers builds a "
                "mask where it is compiled, with which a GPU repeats keys and values and takes a slower kernel"
            )
    if config["checkpointing"] == "offload":
        found.append(
            "checkpointing=offload copies activations at three quarters of the host link's nominal bandwidth, with no "
            "computation meanwhile"
        )
    if config["sharding"] != "none":
        found.append(
            f"sharding={config['sharding']} communicates within one machine, at three quarters of its links' nominal "
            "bandwidth, and never waits for another rank"
        )
    if config["offload"] != "none":
        found.append(
            f"offload={config['offload']} copies at three quarters of the host link's nominal bandwidth, and the "
            "host's memory serves the optimizer at 50 GB/s"
        )
    if config["offload"] != "none" or config["checkpointing"] == "offload":
        found += _of_hosts(job)
    if config["offload"] == "nvme":
        found.append("offload=nvme reads 7 and writes 5 GB/s, as one drive on PCIe 4.0 does")
    if config["optimizer"] == "paged-adamw-8bit":
        found.append("optimizer=paged-adamw-8bit keeps all its states on the device, as it does if they fit there")
    return tuple(found)


def _of_hosts(job: Job) -> list[str]:
    ranks = job.workload.devices
    if not job.hardware.host_memory_bytes:
        return ["the host has enough memory: how much it has is not known"]
    if ranks_per_host(job) < ranks:
        return [f"each of the {ranks} ranks has a host's memory to itself: how many share one is not known"]
    return []


def ranks_per_host(job: Job) -> int:
    """Ranks that are taken to share one host's memory: all, or one where a host with fewer devices was seen.

    Of a card of the catalog all are taken to be in one machine.
    """
    hardware, ranks = job.hardware, job.workload.devices
    return 1 if hardware.host_memory_bytes and not hardware.has_devices_for(ranks) else ranks


def _kept_by_the_heap(config: Config) -> str:
    """How far the shares of estimate/heap.py are off. Figures of sharding are those of
    benchmarks/recorded/cpu-zen5-2c-sharded-memory.json; a test compares them."""
    kept = "how much freed memory the C library keeps is an average over trials"
    if not needs_process_group(config):
        return f"{kept}: half of them were off by less than 3 %, and the worst by 20 %"
    said = (
        f"{kept} without sharding and offload: of 10 predictions for two ranks half were off by more than 9 %, and "
        "those for zero3 and fsdp were 14 to 45 % too low"
    )
    return said if config["offload"] == "none" else f"{said}; none with offload was compared"


def added_error(config: Config) -> float:
    """What the assumptions add to the relative error of a predicted time."""
    return COMPILE_ERROR if config["compile"] is True else 0.0
