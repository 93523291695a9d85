"""What a search method did on a problem, from which it is judged."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.lattice import Config
from autofit.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One trial that was paid for."""

    config: Config
    outcome: Outcome
    """As recorded under the problem's limit; what the method saw has another draw of the speed."""
    seconds: float
    """As recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What a search that ended says of the config that it recommends."""

    config: Config
    regret_bound: float
    """By what share of the best speed it is at most slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One search: its trials in order, and what else it asked."""

    runs: tuple[Run, ...]
    asks: int
    """Of which many may have been repeats."""
    repeats: int = 0
    """Asks for a config that had run: answered as if kept, for nothing."""
    outside: int = 0
    """Asks for configs that are not in the table, answered by the nearest one that is."""
    stopped: bool = False
    """Whether the method ended by itself; otherwise it was ended, because more would not change its score, or because
    it had asked too often."""
    stated: Stated | None = None
    """What the method said when it ended."""
