"""Every search method that a replay knows, by name. A new one needs one new file, and its line here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from autofit.bench import ours, rivals_of_practice, rivals_optuna
from autofit.bench.oracle import SearchMethod
from autofit.core.errors import UsageError, unknown

OURS: Mapping[str, SearchMethod] = {"autofit": ours.search, "autofit-thorough": partial(ours.search, thorough=True)}
METHODS: Mapping[str, SearchMethod] = {**OURS, **rivals_optuna.RIVALS, **rivals_of_practice.RIVALS}
"""In display order."""
SLOW = ("optuna-gp",)
"""Methods that compute for half a minute to minutes per search, every other one for seconds at most."""


def chosen(names: Iterable[str]) -> tuple[str, ...]:
    """These names; those of all methods but the slow ones if none is given. Raises `UsageError` for one that is
    unknown or repeated."""
    selected = tuple(names)
    for name in selected:
        if name not in METHODS:
            raise unknown("search method", name, METHODS)
        if selected.count(name) > 1:
            raise UsageError(f"--methods names {name} twice")
    return selected or tuple(name for name in METHODS if name not in SLOW)
