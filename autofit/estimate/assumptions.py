"""What an estimate takes for granted because no trace can show it."""

from __future__ import annotations

from autofit.lattice import Config
from autofit.techniques import Job

COMPILE_ERROR = 0.41
"""Relative error that compilation adds to a predicted time: its speedup in training is 1.41 in the geometric mean
(Ansel et al. 2024, "PyTorch 2": over 180 models on an A100), and none of it is predicted."""


def assumptions(config: Config, job: Job) -> tuple[str, ...]:
    """One sentence for each thing that is assumed of `config`."""
    found = []
    if job.hardware.kind == "cpu":
        found.append(
            "what the C library keeps of freed memory is an average over trials: of other trials half were off by more "
            "than 4 %, and some by 26 %; those in fp32 all took more"
        )
    if config["compile"] is True:
        found.append(
            "compile=true is predicted as the step without compilation: what a compiled graph fuses, keeps and "
            "computes again is the compiler's choice, and setting it up is left out"
        )
    if config["checkpointing"] == "offload":
        found.append("checkpointing=offload moves activations at the pace of PCIe 4.0, while nothing is computed")
    if config["optimizer"] == "paged-adamw-8bit":
        found.append("optimizer=paged-adamw-8bit has all its states on the device, as where there is room for them")
    return tuple(found)


def added_error(config: Config) -> float:
    """What the assumptions add to the relative error of a predicted time."""
    return COMPILE_ERROR if config["compile"] is True else 0.0
