"""Compilation of the decoder by torch.compile."""

from __future__ import annotations

from autofit.lattice import Axis, Config
from autofit.techniques.job import Job
from autofit.techniques.technique import Plan, Technique


class Compilation(Technique):
    """Fusion of elementwise operations. Setting it up takes minutes: a trial counts that beside the speed."""

    # No claim on memory: fused graphs keep fewer activations, and need workspace of their own.
    axis = Axis(name="compile", values=(False, True), recipe=False)

    def plan(self, config: Config, job: Job, plan: Plan) -> None:
        plan.compile = config["compile"] is True
