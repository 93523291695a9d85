"""Every search method that a replay knows, by name. A new one needs one new file, and its line here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autofit.errors import UsageError, unknown
from autofit.search.replay import ours, rivals_deepspeed, rivals_of_practice, rivals_optuna
from autofit.search.replay.method import SearchMethod

METHODS: Mapping[str, SearchMethod] = {
    "autofit": ours.search,
    "autofit-warm": ours.search_warm,
    "autofit-thorough": ours.search_thoroughly,
    **rivals_optuna.RIVALS,
    **rivals_deepspeed.RIVALS,
    **rivals_of_practice.RIVALS,
}
"""In display order."""


SLOW = ("optuna-gp", "optuna-gp-frontier")
"""Methods that compute for half a minute to minutes per search, every other one for seconds at most."""


def chosen(names: Iterable[str]) -> dict[str, SearchMethod]:
    """The methods of these names; all but the slow ones if none is given. Raises `UsageError` for one that is unknown
    or repeated."""
    wanted = list(names)
    for name in wanted:
        if name not in METHODS:
            raise unknown("search method", name, METHODS)
        if wanted.count(name) > 1:
            raise UsageError(f"--methods names {name} twice")
    return {name: METHODS[name] for name in wanted or (name for name in METHODS if name not in SLOW)}
