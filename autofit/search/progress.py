"""Where a search stands, for whoever displays it."""

from __future__ import annotations

from dataclasses import dataclass

from autofit.core.frontier import Point
from autofit.core.lattice import Config


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a search stands. Updated in place by the search."""

    candidates: int
    """Valid configs of the lattice."""
    done: int = 0
    """Trials run by this search, including verification and those cut off at the end of its time."""
    out_of_memory: int = 0
    failed: int = 0
    """Trials that crashed, timed out or diverged."""
    ruled_out: int = 0
    """Configs that need not run, because a trial, the memory floor or their predicted memory excludes them."""
    from_store: int = 0
    """Configs answered by earlier trials."""
    estimated: tuple[int, int] | None = None
    """While configs are estimated before the first trial: how many are done, out of how many."""
    running: tuple[Config, ...] = ()
    slow_nodes: tuple[str, ...] = ()
    """A sentence for each node of a cluster whose trials are set aside, because it is slower than its type."""
    best: Point | None = None
    """The best config so far, as the recommendation would choose it."""
    verifying: bool = False
    elapsed_seconds: float = 0.0
    left_seconds: float | None = None
    """What is left of the time budget; None without one."""
    stopped_because: str = ""
    regret_bound: float | None = None
    """When the search has ended: upper bound, with 95 % confidence, on how much slower the winner is than the best of
    its method, as a share of the best speed. None where nothing fits, and for an answer from the store, for which it is
    not computed."""
