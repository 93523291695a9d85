"""Rank of the adapters."""

from __future__ import annotations

from autofit.lattice import Axis, Config
from autofit.techniques.job import Job
from autofit.techniques.technique import Plan, Technique


class Rank(Technique):
    """Columns of each adapter's first matrix. The floor is the user's; higher ranks only cost memory and time."""

    axis = Axis(name="rank", values=(), recipe=8)

    def applies(self, config: Config) -> bool:
        return config["method"] != "full"

    def plan(self, config: Config, job: Job, plan: Plan) -> None:
        if self.applies(config):
            plan.rank = config.number("rank")
