"""The interface of a search method in the replay."""

from __future__ import annotations

from typing import Protocol

from autofit.search.replay.oracle import Oracle
from autofit.search.replay.problem import Problem


class CannotRun(Exception):
    """Something that a method needs is missing here; the message says what, in one line."""


class SearchMethod(Protocol):
    """Searches a problem by asking the oracle, until it is done or the oracle ends it."""

    def __call__(self, problem: Problem, oracle: Oracle, seed: int) -> None:
        """Ask `oracle` for configs. Everything that is random must follow from `seed`. Raises `CannotRun`."""
