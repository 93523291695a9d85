"""What the ranks of a slot send each other over the link between its machines, measured by its workers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from autofit.core.device.probe import ProbePart, between, collective
from autofit.core.errors import lines_of
from autofit.workers.slots.slot import Slot

WAIT_SECONDS = 30.0
"""How long the devices may be another process's: a search without the figure is better than none."""
MOST_SECONDS = 180.0
"""Waiting for the devices, and `probe.ranks.MOST_SECONDS`, with some more for Ray."""


def measured_link(ray: Any, slot: Slot) -> ProbePart:
    """As `Pool.link`, by the workers of an idle slot."""
    assert slot.site is not None, "it is up"
    name, started = between(slot.site[0], slot.demand.ranks), time.monotonic()
    figures, failure = dict[str, float](), None
    try:
        figures = {collective(c, name): rate for c, rate in _measured(ray, slot.actors, started + MOST_SECONDS).items()}
    except (ray.exceptions.RayError, RuntimeError, TimeoutError) as error:
        failure = lines_of(error)[-1]
    return ProbePart(name=name, seconds=time.monotonic() - started, figures=figures, failure=failure)


def _measured(ray: Any, actors: Sequence[Any], until: float) -> Mapping[str, float]:
    """Bytes per second that a rank sends, by collective. Raises `RayError`, `RuntimeError` with the reason of the first
    that fails, as the others would wait for it, and `TimeoutError`."""
    listening = actors[0].listen_to_measure.remote(WAIT_SECONDS, *[actor.where.remote() for actor in actors])
    place = ray.get(listening, timeout=until - time.monotonic())
    left, measured = [actor.between.remote(place, rank) for rank, actor in enumerate(actors)], dict[str, float]()
    while left:
        ended, left = ray.wait(left, timeout=max(0.0, until - time.monotonic()))
        if not ended:
            raise TimeoutError(f"no end within {MOST_SECONDS:.0f} s")
        measured = ray.get(ended[0])
        if isinstance(measured, str):
            raise RuntimeError(measured)
    return measured
