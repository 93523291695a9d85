"""What a trial ran on: the accelerator and the versions of the libraries."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autofit.core.document import LastingDocument
from autofit.core.workload import digest

EMULATED = "emulated-"
"""What the name of a card begins with that is not there (tests/emulated_card): it never stands for the real one."""


def compute_capability(capability: str | None) -> float | None:
    """NVIDIA's compute capability as a number; None where it is not known, and for AMD's gfx names."""
    return float(capability) if capability is not None and capability[:1].isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware(LastingDocument):
    """The device of a trial. Frontiers are kept per `key`, so the key covers only what changes memory or speed."""

    name: str
    """Catalog name (`h100-80g`) if the device is in the catalog, else a name made from what the driver reports."""
    kind: str
    """Torch device type: `cpu`, `cuda` (NVIDIA and ROCm), `mps`, `xpu`."""
    device_name: str
    """The name that the driver or the processor reports."""
    memory_bytes: int
    """Memory of one device: the driver's total, or for `cpu` the host's physical memory."""
    count: int = 1
    """Devices on the machine, or on a cluster the most that a trial has on one machine; for `cpu` 1."""
    cores: int = 0
    """Processor cores that a trial may use on `cpu`, and with how many threads it computes; 0 for accelerators."""
    host_memory_bytes: int = 0
    """Physical memory of the host, bytes."""
    capability: str | None = None
    """Compute capability (`9.0`) or gfx name, for accelerators."""
    bf16: bool = True
    """Whether bf16 arithmetic is native (emulated bf16 works but is never faster)."""
    peak_flops: float | None = None
    """Dense bf16 peak of one device in FLOP/s (fp16 where bf16 is not native), None if unknown; MFU needs it."""
    instructions: str | None = None
    """The instruction sets that torch's kernels use on `cpu`, such as `avx512-bf16` (`trial.machine.instructions`);
    None for accelerators, and for trials stored before it was recorded."""
    power_limit_watts: int | None = None
    """The limit that a card was given in place of its default; None for the default, and where it is not known."""
    mig_profile: str | None = None
    """The size of a slice of a partitioned card, such as `1g.10gb`; None for a whole one."""

    @property
    def key(self) -> str:
        """A digest of what changes memory or speed. Of what was not recorded from the start only what is known is part
        of it, so that the keys of older records stay the same.

        The memory size is not part of it: drivers, error correction and control groups change it slightly, and a
        trial's limit is stored with the trial. Cards that differ only in memory size or MIG profile differ in `name`.
        """
        later = {"instructions": self.instructions, "power_limit_watts": self.power_limit_watts}
        stated = {name: value for name, value in later.items() if value is not None}
        return digest([self.name, self.kind, self.device_name, self.cores, *([stated] if stated else [])])

    @property
    def is_emulated(self) -> bool:
        """Whether it is a driver's emulation of a card, which takes memory as the card would and computes nothing."""
        return self.name.startswith(EMULATED)

    @property
    def slices(self) -> int | None:
        """How many slices of a partitioned card's processors it has (`3g.40gb`, `1c.3g.40gb`); None for a whole one."""
        count = re.search(r"(\d+)g\.", self.mig_profile or "")
        return None if count is None else int(count[1])

    @property
    def share_of_card(self) -> float:
        """The share of a card's processors that it has: an A30 and an RTX PRO 6000 are divided into four slices, the
        others into seven (NVIDIA's MIG user guide)."""
        of = 4 if re.search(r"\bA30\b|RTX PRO 6000", self.device_name) else 7
        return 1.0 if self.slices is None else self.slices / of

    @property
    def is_nvidia(self) -> bool:
        """Whether it is an NVIDIA device, whose capability is a number: AMD's are names (`gfx942`)."""
        return self.kind == "cuda" and compute_capability(self.capability) is not None

    def has_devices_for(self, ranks: int) -> bool:
        """Whether so many ranks are known to be on one machine."""
        return self.kind == "cpu" or self.count >= ranks

    def spans_machines(self, ranks: int) -> bool:
        """Whether so many ranks are on several machines. All cards of the catalog are taken to be in one."""
        return bool(self.host_memory_bytes) and not self.has_devices_for(ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack(LastingDocument):
    """Versions of the software that executes the training step; memory and time may differ between versions."""

    python: str
    torch: str
    transformers: str
    peft: str | None = None
    bitsandbytes: str | None = None
    deepspeed: str | None = None
    flash_attn: str | None = None
    liger_kernel: str | None = None
    mamba_ssm: str | None = None
    """This package and the next two replace the scans and convolutions of hybrid models by being installed."""
    causal_conv1d: str | None = None
    flash_linear_attention: str | None = None
    cuda: str | None = None
    """CUDA or ROCm version that torch was built for."""
    driver: str | None = None
    """The version of NVIDIA's driver: noted with each trial, but trials under two of them are compared."""

    @property
    def torch_release(self) -> tuple[int, int]:
        major, minor, *_ = re.findall(r"\d+", self.torch)
        return int(major), int(minor)

    @property
    def key(self) -> str:
        """A digest of all but the driver, which differs between nodes while a cluster is upgraded. Absent libraries
        are not part of it: when a later version records another library, the keys of stacks without it stay the same.
        """
        named = self.to_json().items()
        return digest({name: version for name, version in named if version is not None and name != "driver"})
