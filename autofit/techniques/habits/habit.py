"""What a trainer does in ways of its own: which configs it cannot train as they say, and its habits in the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autofit.core.lattice import Config, Value
from autofit.techniques.axes.batching import separates_sequences
from autofit.techniques.axes.sharding import has_own_mixed_precision
from autofit.techniques.technique import BuildPart


class Habit(BuildPart):
    """Something that a trainer adds to a config's step without being asked, by the stages of a build."""

    does: str
    """One sentence about the training, without its subject."""

    def applies(self, config: Config) -> bool:
        """Whether the trainer does so with this config."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """One trainer, as its named version is."""

    name: str
    version: str
    """Where its habits were read, and the keys of its files, such as `trl 1.16`."""
    habits: tuple[Habit, ...] = ()
    usual: Mapping[str, Value] = field(default_factory=dict)
    """Axis -> the value that stands for the plain recipe's, which the trainer cannot train."""
    nearest: Mapping[str, Mapping[Value, Value]] = field(default_factory=dict)
    """Axis -> value that the trainer lacks -> the one that it has in its place."""
    cannot: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Axis -> value -> what the trainer does instead, beginning with a verb."""
    cannot_with_adapters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """As `cannot`, for LoRA and QLoRA alone."""
    cannot_in_full: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """As `cannot`, for full training alone, unless DeepSpeed or FSDP decides the weights' formats."""

    cannot_keep_apart: Callable[[Config], str | None] = lambda config: None
    """What it does instead of keeping a config's packed sequences apart, beginning with a verb; None if it can."""
    liger_is_one: bool = False
    """Whether one switch turns on Liger's loss and its kernels alike."""

    @property
    def release(self) -> str:
        """The number of `version`."""
        return self.version.split()[1]

    def why_not(self, config: Config) -> str | None:
        """Why the trainer trains something else than `config` says, in one sentence; None if it does not."""
        of_method = self.cannot_with_adapters
        if config["method"] == "full":
            of_method = {} if has_own_mixed_precision(config) else self.cannot_in_full
        for axis, values in (row for table in (self.cannot, of_method) for row in table.items()):
            instead = values.get(str(config.get(axis)))
            if instead is not None:
                return f"{axis}={config[axis]} is not possible with {self.name}, which {instead}"
        instead = self.cannot_keep_apart(config) if separates_sequences(config) else None
        return instead and f"batching=padding-free is not possible here with {self.name}, which {instead}"
