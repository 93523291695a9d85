"""What a trainer's own file asks for, as a value: the config, the workload, and what could not be taken from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autofit.core.document import Document
from autofit.core.lattice import Config
from autofit.techniques.quantisation import BYTES_PER_WEIGHT, SINGLE_BYTES_PER_WEIGHT


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
class Evaluates:
    """How a run evaluates between training steps."""

    key: str
    """The file's key for how many sequences at a time, on each device."""
    sequences: int


EIGHT_BITS = ("linear", -1.0)
"""Frozen weights in 8 bits, where the config has 16."""
SINGLE_SCALES = ("linear", SINGLE_BYTES_PER_WEIGHT - BYTES_PER_WEIGHT)
"""4-bit weights without double quantisation."""


def trained_whole(modules: list[str]) -> tuple[tuple[str, float], ...]:
    """`beyond` for modules that adapters train as a whole, of which embeddings and the head have a size that counts."""
    large = [name for name in modules if name.rsplit(".", 1)[-1] in ("embed_tokens", "lm_head", "wte", "embed_out")]
    # 16 bytes a parameter: an fp32 copy, its gradient and Adam's states.
    return (("vocabulary", 16.0 * len(large)),) if large else ()


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
    evaluates: Evaluates | None = None
    """None where nothing is evaluated between training steps."""
    beyond: tuple[tuple[str, float], ...] = ()
    """What weights take beyond the config's own formats: bytes a parameter, of `all` parameters, of those of `linear`
    layers inside of decoder layers, of those `outside` of these, or of one matrix of the `vocabulary`'s size."""
    synchronises: bool = False
    """Whether the file has gradients reduced over the devices after each micro-batch (`sync_each_batch`)."""
    saves_in_shards: bool = False
    """Whether FSDP saves each device's share of weights and states by itself, where it would gather them."""
    narrower: tuple[str, str] | None = None
    """The key and value that load frozen weights in 16 bits; None where they are, or where none is frozen."""
    adapters: tuple[str, object] | None = None
    """The key and value that turn on the adapters whose settings the file has to no effect; None where it has none."""
    notes: tuple[str, ...] = ()
    """What else the user must know of how the file is read, one sentence each."""
    assumed: tuple[str, ...] = ()
    """What the file does not say and the trainer's default decides, one sentence each."""
    not_counted: tuple[NotCounted, ...] = ()
    unknown: tuple[UnknownKey, ...] = ()

    @property
    def defers(self) -> bool:
        """Whether FSDP leaves gradients whole on every device until the accumulation's last micro-batch, as Trainer has
        it unless it `synchronises` (`no_sync` of accelerate/accelerator.py, 1.15)."""
        return self.accumulation > 1 and self.config.text("sharding").startswith("fsdp") and not self.synchronises

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step, over all micro-batches and devices."""
        return self.config.number("micro_batch") * self.accumulation * self.devices
