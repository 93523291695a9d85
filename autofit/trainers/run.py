"""What a trainer's own file asks for, as a value: the config, the workload, and what could not be taken from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autofit.core.document import Document
from autofit.core.lattice import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What decides how a file is read, but is not in it."""

    folder: Path = Path()
    """Where the file is: paths in it may be relative to it."""
    devices: int | None = None
    """Data-parallel ranks; None where the user has not said."""
    bf16: bool = True
    """Whether the card computes in bf16: some trainers look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotCounted(Document):
    """Something a file asks for that no estimate covers."""

    key: str
    effect: str
    """What it does to memory: `more`, `less` or `unknown`."""
    because: str
    """What it is, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownKey(Document):
    """A key that its trainer does not have, in any version that was read."""

    key: str
    nearest: tuple[str, ...]
    """Keys that may be meant, the nearest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run, as its trainer would start it from the file."""

    trainer: str
    model: str | None
    """Hub id or folder of the weights; None where the file does not say."""
    seq_len: int | None
    """Tokens of the longest sequence; None where the file does not say."""
    accumulation: int
    """Micro-batches per optimizer step, on each device."""
    devices: int
    config: Config
    """Every axis."""
    lora_dropout: float = 0.0
    frozen_bytes: int = 2
    """Bytes of a frozen weight: 2, but 1 with 8-bit loading, and 4 where it is loaded in fp32."""
    assumed: tuple[str, ...] = ()
    """What the file does not say and the trainer's default decides, one sentence each."""
    not_counted: tuple[NotCounted, ...] = ()
    unknown: tuple[UnknownKey, ...] = ()
    irrelevant: tuple[str, ...] = ()
    """Keys that change neither memory nor speed."""

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step, over all micro-batches and devices."""
        return self.config.number("micro_batch") * self.accumulation * self.devices
