"""What an estimate takes for granted because no trace can show it."""

from __future__ import annotations

from autofit.lattice import Config
from autofit.techniques import Job

COMPILE_ERROR = 0.41
"""Relative error that compilation adds to a predicted time: its speedup in training has a geometric mean of 1.41 (Ansel
et al. 2024, "PyTorch 2": over 180 models on an A100), and none of it is predicted."""


def assumptions(config: Config, job: Job) -> tuple[str, ...]:
    """One sentence for each thing that is assumed of `config`."""
    found = []
    if job.hardware.kind == "cpu":
        found.append(
            "what the C library keeps of freed memory is an average over trials: half of them were off by more than "
            "3 %, and some by 19 %"
        )
    if config["compile"] is True:
        found.append(
            "compile=true is predicted as the step without compilation: what a compiled graph fuses, keeps and "
            "computes again is the compiler's choice, and setting it up is left out"
        )
    if config["checkpointing"] == "offload":
        found.append("checkpointing=offload moves activations at the pace of PCIe 4.0, while nothing is computed")
    if config["sharding"] != "none":
        found.append(
            f"sharding={config['sharding']} exchanges within one machine, at three quarters of the pace that its links "
            "have on paper, and waits for no other rank"
        )
    if config["offload"] != "none":
        found.append(
            f"offload={config['offload']} copies at three quarters of what the host link's data sheet states, and the "
            "host's memory gives an optimizer 50 GB/s"
        )
        if not job.hardware.host_memory_bytes:
            found.append("how much memory the host has is not known: that it is enough")
    if config["offload"] == "nvme":
        found.append("offload=nvme reads 7 and writes 5 GB/s, as one drive on PCIe 4.0 does")
    if config["optimizer"] == "paged-adamw-8bit":
        found.append("optimizer=paged-adamw-8bit has all its states on the device, as where there is room for them")
    return tuple(found)


def added_error(config: Config) -> float:
    """What the assumptions add to the relative error of a predicted time."""
    return COMPILE_ERROR if config["compile"] is True else 0.0
