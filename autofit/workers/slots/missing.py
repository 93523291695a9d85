"""What the machines of a pool's workers lack for configs: each may get any of the trials."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from autofit.core.errors import EnvironmentLacks, lines_of
from autofit.core.lattice import Config, Value
from autofit.core.workload import Workload
from autofit.techniques import Job
from autofit.training.prerequisites.requirements import requirement_key
from autofit.workers.slots.slot import Slot


@dataclass(slots=True, kw_only=True)
class MissingRequirements:
    """Asks the workers once for all configs that ask the same of their machines."""

    ray: Any
    _answers: dict[tuple[Workload, tuple[Value | None, ...]], tuple[Config, Job, str | None]] = field(
        default_factory=dict
    )
    """Keyed by what is asked of them; with a config and job that ask it."""

    def reason(self, config: Config, job: Job, slots: Iterable[Slot]) -> str | None:
        """What one of the slots' machines lacks for `config`, with its address; None if none lacks anything. Raises
        `EnvironmentLacks` if one does not answer."""
        key = (job.workload, requirement_key(config, job))
        if key not in self._answers:
            lacking = next(filter(None, (self._ask(slot, config, job) for slot in slots)), None)
            self._answers[key] = config, job, lacking
        return self._answers[key][2]

    def later(self, slot: Slot) -> str | None:
        """What a slot that comes up later lacks of what the first ones had; None if nothing."""
        for config, job, lacking in self._answers.values():
            if lacking is None and (reason := self._ask(slot, config, job)) is not None:
                return reason
        return None

    def _ask(self, slot: Slot, config: Config, job: Job) -> str | None:
        references = [actor.lacks.remote(config, job) for actor in slot.actors]
        try:
            # A worker that is up and does not answer within this time never will.
            answers = self.ray.get(references, timeout=300.0)
        except (self.ray.exceptions.RayError, self.ray.exceptions.GetTimeoutError) as error:
            slot.blame(self.ray, references)
            raise EnvironmentLacks(
                f"Ray's worker failed: {lines_of(error)[-1]}", remedy="run `autofit doctor` on that machine"
            ) from error
        slot.at_fault = tuple(node for node, lacks in zip(slot.node_ids, answers, strict=True) if lacks is not None)
        return next(filter(None, answers), None)
