"""Predicts many configs of one job at once, in as many processes as the caller has cores for."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from itertools import zip_longest
from multiprocessing import forkserver
from typing import TYPE_CHECKING

from autofit.core.lattice import Config
from autofit.estimate.footprint import Footprint
from autofit.estimate.warm import context, hide_cards
from autofit.techniques import Job, Part, affecting
from autofit.techniques.selective import budget

if TYPE_CHECKING:
    from autofit.estimate.estimator import Estimator

_log = logging.getLogger(__name__)

MOST_PROCESSES = 16
"""Each process takes half a GiB for the lattice of an 8B model, whose predictions take 5 CPU-minutes in all."""


def sweep(
    job: Job,
    configs: Sequence[Config],
    *,
    memory_limit_bytes: int,
    processes: int = 1,
    report: Callable[[int], None] = lambda done: None,
    seconds: float | None = None,
) -> dict[Config, Footprint]:
    """Predict every config, each of which must be supported; the result is in the order given.

    At most `processes` share the work. With `seconds`, no config is begun after that time, and those not predicted by
    then are left out. `report` is called with how many are done. Fragmentation is borrowed from similar configs unless
    it might decide what fits (`replays.Fragmentation`).
    """
    groups = groups_of(configs)
    workers = workers_for(configs, processes)
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    if workers > 1:
        parts = _in_processes(job, groups, memory_limit_bytes, workers, deadline)
    else:
        estimator = _estimator(job)
        parts = (
            [footprint] for group in groups for footprint in _predict(estimator, group, memory_limit_bytes, deadline)
        )
    footprints: dict[Config, Footprint] = {}
    for part in parts:
        footprints.update((footprint.config, footprint) for footprint in part)
        report(len(footprints))
    if late := len(configs) - len(footprints):
        _log.warning("autofit: %d of %d configs are left unpredicted, for there was no time", late, len(configs))
    return {config: footprints[config] for config in configs if config in footprints}


def workers_for(configs: Sequence[Config], processes: int) -> int:
    """How many of at most `processes` `sweep` uses."""
    if len(configs) < 32:  # fewer are not worth the seconds that further processes take to start
        return 1
    return min(len(groups_of(configs)), processes, MOST_PROCESSES)


def get_ready(configs: Sequence[Config], processes: int) -> None:
    """Begin to load what `sweep` will need for `configs`, in the background; without this, `sweep` waits for it."""
    if workers_for(configs, processes) > 1:
        context()  # says what to load
        forkserver.ensure_running()


def groups_of(configs: Sequence[Config]) -> list[list[Config]]:
    """Configs that share most of a decoder's traces, those of one attention kernel side by side. The largest group of
    each method comes first, then the second of each: if time runs out, something of every method is known."""
    groups: dict[str, dict[Config, list[Config]]] = defaultdict(lambda: defaultdict(list))
    for config in sorted(configs, key=lambda c: (c["compile"], c.text("attention"))):  # what compiles comes last
        decoder = affecting(config, Part.DECODER, sizes=budget(config) < 1)
        groups[config.text("method")][decoder.without("attention")].append(config)  # torch's flash serves two values
    largest_first = [sorted(of_method.values(), key=len, reverse=True) for of_method in groups.values()]
    return [group for round in zip_longest(*largest_first) for group in round if group]


def _estimator(job: Job) -> Estimator:
    """One estimator for all groups of a process: they share the traces of losses and updates."""
    from autofit.estimate.estimator import Estimator
    from autofit.estimate.tracing.trace_cache import TraceCache

    return Estimator(job, None, cache=TraceCache.of_user())


def _predict(estimator: Estimator, configs: list[Config], limit: int, deadline: float) -> Iterator[Footprint]:
    """Those that are begun before the system's monotonic clock, which all processes share, shows `deadline`."""
    for config in configs:
        if time.monotonic() >= deadline:
            break
        yield estimator.footprint(config, memory_limit_bytes=limit, replayed=False)
    estimator.forget_decoders()


def _in_processes(
    job: Job, groups: list[list[Config]], limit: int, workers: int, deadline: float
) -> Iterator[list[Footprint]]:
    with ProcessPoolExecutor(workers, mp_context=context(), initializer=_begin) as pool:
        pending = [pool.submit(_predicted, job, group, limit, deadline) for group in groups]
        for done in as_completed(pending):
            yield done.result()


def _begin() -> None:
    hide_cards()
    gc.freeze()  # the libraries are not garbage: collections need not scan them


_estimator_of_process = cache(_estimator)
"""Of a process of the pool, for the pool's one job."""


def _predicted(job: Job, configs: list[Config], limit: int, deadline: float) -> list[Footprint]:
    return list(_predict(_estimator_of_process(job), configs, limit, deadline))
