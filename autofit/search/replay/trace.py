"""What a search method did on a problem: the basis for judging it."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.lattice import Config
from autofit.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One trial that was paid for."""

    config: Config
    outcome: Outcome
    """As recorded, under the problem's limit; the method saw a fresh draw of the speed. Of a trial that was cut, what
    the method saw."""
    seconds: float
    """What it cost: as recorded, unless it was cut or the device has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What a search that has ended states about the config that it recommends."""

    config: Config
    regret_bound: float
    """Upper bound on how much slower it is than the best, as a share of the best speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One search: its trials in order, and what else it asked."""

    runs: tuple[Run, ...]
    asks: int
    """All asks, of which many may be repeats."""
    repeats: int = 0
    """Asks for a config that had already run: answered as if from a store, at no cost."""
    outside: int = 0
    """Asks for configs that are not in the table, answered by the nearest one that is."""
    stopped: bool = False
    """Whether the method ended by itself; otherwise it was ended, because going on would not change its score, or
    because it had asked too often."""
    stated: Stated | None = None
    """What the method stated when it ended."""
