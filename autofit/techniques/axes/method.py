"""Training method: every weight, adapters on a frozen base (LoRA), or adapters on a 4-bit base (QLoRA)."""

from __future__ import annotations

from typing import Any

from autofit.catalog.models import shape
from autofit.core.distribution import install
from autofit.core.lattice import Axis, Config, Value
from autofit.core.workload import Effect, Goal
from autofit.techniques import adapters, quantisation
from autofit.techniques.job import Job
from autofit.techniques.technique import BuildPlan, Technique


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
