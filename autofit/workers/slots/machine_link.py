"""What the ranks of a slot send each other over the link between its machines, measured by its workers."""

from __future__ import annotations

import time
from typing import Any

from autofit.core.device.probe import ProbePart, between, collective
from autofit.core.errors import lines_of
from autofit.workers.slots.slot import Slot

WAIT_SECONDS = 30.0
"""How long the devices may be another process's: a search without the figure is better than none."""
MOST_SECONDS = 180.0
"""Waiting for the devices, and `probe.ranks.MOST_SECONDS`, with some more for Ray."""


def measured_link(ray: Any, slot: Slot) -> ProbePart:
    """As `Pool.link`, by the workers of an idle slot: one that is not heard within `MOST_SECONDS` is a failure, too."""
    assert slot.site is not None, "it is up"
    name, started = between(slot.site[0], slot.demand.ranks), time.monotonic()
    wheres = [actor.where.remote() for actor in slot.actors]
    place = slot.actors[0].listen_to_measure.remote(WAIT_SECONDS, *wheres)
    answers = left = [actor.between.remote(place, rank) for rank, actor in enumerate(slot.actors)]
    figures, failure = dict[str, float](), None
    try:
        while left:  # the first that fails says why; the others would wait for it
            ended, left = ray.wait(left, timeout=max(0.0, started + MOST_SECONDS - time.monotonic()))
            if not ended:
                raise TimeoutError(f"no end within {MOST_SECONDS:.0f} s")
            ray.get(ended)
        figures = {collective(c, name): rate for c, rate in ray.get(answers[0]).items()}
    except (ray.exceptions.RayError, TimeoutError) as error:
        failure = lines_of(error)[-1]
    return ProbePart(name=name, seconds=time.monotonic() - started, figures=figures, failure=failure)
