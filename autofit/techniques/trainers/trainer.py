"""What a trainer does in ways of its own: which configs it cannot train as they say, and its habits in the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autofit.core.lattice import Config
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
    """Where its habits were read, such as `trl 1.16`."""
    habits: tuple[Habit, ...] = ()
    cannot: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Axis -> value -> what the trainer does instead, beginning with a verb."""
    cannot_together: Callable[[Config], str | None] = lambda config: None
    """What the trainer does instead of a config whose values are each possible; None for one that it trains."""

    def why_not(self, config: Config) -> str | None:
        """Why the trainer trains something else than `config` says, in one sentence; None if it does not."""
        for axis, values in self.cannot.items():
            instead = values.get(str(config.get(axis)))
            if instead is not None:
                return f"{axis}={config[axis]} is not possible with {self.name}, which {instead}"
        instead = self.cannot_together(config)
        return None if instead is None else f"not possible with {self.name}, which {instead}"
