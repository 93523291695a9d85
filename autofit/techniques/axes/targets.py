"""Which Linear layers get adapters."""

from __future__ import annotations

from autofit.catalog.models import in_catalog, shape
from autofit.core.lattice import Axis, Config, chain
from autofit.core.workload import Effect
from autofit.techniques import adapters
from autofit.techniques.job import Job
from autofit.techniques.technique import Technique


class Targets(Technique):
    """`attention`: the q, k, v and o projections. `all-linear`: every Linear layer except the head, plus what peft
    treats as one: in a mixture of experts, the router and the stacked experts."""

    axis = Axis(
        name="targets",
        values=("attention", "all-linear"),
        effects={"attention": Effect.TRAINING},
        recipe="all-linear",
        lighter=chain("attention", "all-linear"),
        does="Which layers get adapters.",
        meanings={
            "attention": "the q, k, v and o projections",
            "all-linear": "every linear layer but the head; with stacked experts not with --lora-dropout",
        },
        where="with method=lora or method=qlora",
    )

    def unsupported(self, config: Config, job: Job) -> str | None:
        if config["targets"] == "all-linear" and job.workload.lora_dropout > 0 and shape(job.model).experts:
            return "peft does not support lora-dropout on stacked experts: use targets=attention or --lora-dropout 0"
        if in_catalog(job.model):
            return None  # tests already build its adapters: no need to wait for that here
        reason = adapters.why_not(job.model, config.text("targets"), job.workload.lora_dropout)
        if reason is not None:
            return f"targets={config['targets']} cannot work for {job.model.name}: {reason}"
        return None

    def applies(self, config: Config) -> bool:
        return config["method"] != "full"
