"""Words that measured and predicted results share."""

from __future__ import annotations

from autofit.core.hardware import Hardware
from autofit.core.lattice import Config
from autofit.core.workload import Effect, Workload

_ALWAYS = {"precision": "", "micro_batch": "micro-batch ", "checkpointing": "ckpt ", "optimizer": "", "loss": "loss "}

SAME_TRAINING = "trains exactly as the plain recipe does"
EMULATED = (
    "emulated: memory is real; time is a virtual clock's and no speed of a card; losses and gradients were not checked"
)
"""Of what was measured on a card that is not there."""

EFFECTS = {
    Effect.EXACT: "exact: trains the same",
    Effect.NUMERICS: "numerics: rounds differently",
    Effect.TRAINING: "training: trains something else",
}


def short(config: Config) -> str:
    """A config abbreviated for a table: the axes that usually differ, then others that depart from the plain choice."""
    words = [config.text("method")]
    if "rank" in config:
        words.append(f"r{config['rank']}")
    # An imported trial may know fewer axes than there are today.
    words += [f"{before}{config[axis]}" for axis, before in _ALWAYS.items() if axis in config]
    if config.get("targets") == "attention":
        words.append("targets attention")
    if config.get("attention") not in (None, "sdpa"):
        words.append(f"attention {config['attention']}")
    if config.get("compile") is True:
        words.append("compile")
    words += [f"{axis} {config[axis]}" for axis in ("offload", "sharding") if config.get(axis) not in (None, "none")]
    return ", ".join(words)


def devices_text(hardware: Hardware, workload: Workload) -> str:
    """The hardware's name and, if there are several, the number of devices."""
    return several_text(hardware.name, workload.devices)


def several_text(name: str, devices: int) -> str:
    return name if devices == 1 else f"{devices} x {name}"


def on_each(devices: int) -> str:
    """What follows an amount of memory that each of several devices takes."""
    return " on each" if devices > 1 else ""


def total_text(tokens_per_second: float, devices: int, *, decimals: int = 0) -> str:
    """A speed in total and, with several devices, that of each."""
    each = f", {tokens_per_second / devices:,.{decimals}f} of each" if devices > 1 else ""
    return f"{tokens_per_second:,.{decimals}f} tokens/s{each}"


def step_text(workload: Workload) -> str:
    return f"{workload.seq_len} tokens x {workload.global_batch} sequences a step"
