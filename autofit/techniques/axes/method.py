"""Which weights are trained: all, or which adapters on a frozen base (LoRA) or on a 4-bit one (QLoRA)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autofit.catalog.models import in_catalog, shape
from autofit.core.distribution import install
from autofit.core.lattice import Axis, Config, Value, chain
from autofit.core.workload import Effect, Goal
from autofit.techniques import adapters, quantisation
from autofit.techniques.job import Job
from autofit.techniques.technique import BuildPlan, Part, Technique


class Method(Technique):
    """`full`, `lora` (Hu et al. 2021), `qlora`: nf4 with double quantisation (Dettmers et al. 2023)."""

    axis = Axis(
        name="method",
        values=("qlora", "lora", "full"),
        effects={"qlora": Effect.TRAINING, "lora": Effect.TRAINING, "full": Effect.EXACT},
        recipe="full",
        # No claim between lora and full: with small models and large batches the adapters' activations outweigh
        # the gradients and states that they save.
        lighter=frozenset({("qlora", "lora")}),
        does="Which weights are trained.",
        meanings={
            "qlora": "adapters on a frozen 4-bit base; needs peft and bitsandbytes, not for stacked experts",
            "lora": "adapters on a frozen 16-bit base; needs peft",
            "full": "every weight",
        },
    )
    parts = frozenset({Part.DECODER, Part.UPDATE, Part.EVALUATION})

    def plain(self, goal: Goal) -> Value | None:
        return self.axis.recipe if goal.method == "any" else goal.method

    def unsupported(self, config: Config, job: Job) -> str | None:
        if config["method"] != "full" and job.stack.peft is None:
            return f"{config['method']} needs peft, which is not installed here ({install()})"
        if config["method"] != "qlora":
            return None
        if job.stack.bitsandbytes is None:
            return f"qlora needs bitsandbytes, which is not installed here ({install()})"
        if job.hardware.kind not in ("cpu", "cuda", "xpu"):
            return f"bitsandbytes has no 4-bit kernels for {job.hardware.kind}"
        counts = shape(job.model)
        if counts.experts:
            return (
                f"qlora cannot quantise the experts of {job.model.name}: bitsandbytes quantises Linear layers, and "
                "transformers keeps experts as stacked tensors; use method=lora"
            )
        if counts.linear_parameters == 0:
            return (
                f"qlora has nothing to quantise in {job.model.name}: bitsandbytes quantises Linear layers, and its "
                "decoder layers have none (GPT-2's are Conv1D)"
            )
        return None

    def on_skeleton(self, plan: BuildPlan, model: Any) -> Any:
        config = plan.config
        if config["method"] == "full":
            return model
        if config["method"] == "qlora":
            quantisation.replace_linears(model, compute_dtype=plan.compute_dtype)
        return adapters.add(
            model,
            rank=config.number("rank"),
            targets=config.text("targets"),
            dropout=plan.job.workload.lora_dropout,
            dtype=plan.trained_dtype,
        )


class Rank(Technique):
    """Inner dimension of an adapter's matrices. The user sets the minimum; higher ranks only cost memory and time."""

    axis = Axis(
        name="rank",
        values=(),
        recipe=8,
        does="The inner dimension of the adapters. A search stays at --min-rank unless --allow is training.",
        where="with method=lora or method=qlora",
    )
    parts = frozenset({Part.DECODER, Part.UPDATE, Part.EVALUATION})
    scales = True

    def plain(self, goal: Goal) -> Value:
        return goal.min_rank

    def effect(self, config: Config, goal: Goal) -> Effect:
        return Effect.EXACT if config["rank"] == self.plain(goal) else Effect.TRAINING

    def applies(self, config: Config) -> bool:
        return config["method"] != "full"


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
    parts = frozenset({Part.DECODER, Part.UPDATE, Part.EVALUATION})

    def unsupported(self, config: Config, job: Job) -> str | None:
        if config["targets"] == "all-linear" and job.workload.lora_dropout > 0 and shape(job.model).experts:
            return "peft does not support lora-dropout on stacked experts: use targets=attention or --lora-dropout 0"
        if in_catalog(job.model):
            return None  # tests already build its adapters: no need to wait for that here
        reason = adapters.unsupported(job.model, config.text("targets"), job.workload.lora_dropout)
        if reason is not None:
            return f"targets={config['targets']} cannot work for {job.model.name}: {reason}"
        return None

    def applies(self, config: Config) -> bool:
        return config["method"] != "full"


def nearest_ranks(configs: Iterable[Config], goal: Goal) -> dict[str, int]:
    """For each method, the lowest rank among `configs` that `goal` accepts.

    A space or a store need not contain the exact rank that was asked for; this is the nearest to it.
    """
    ranks: dict[str, int] = {}
    for config in configs:
        rank = config.get("rank")
        if rank is not None and int(rank) >= goal.min_rank:
            method = config.text("method")
            ranks[method] = min(int(rank), ranks.get(method, int(rank)))
    return ranks
