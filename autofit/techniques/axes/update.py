"""When the optimizer updates the weights."""

from __future__ import annotations

from autofit.core.lattice import Axis, Config, chain
from autofit.core.workload import Effect
from autofit.techniques.axes.optimizer import kind_of, trainable
from autofit.techniques.job import Job
from autofit.techniques.technique import BuildPlan, Part, Technique


def updates_in_backward(config: Config) -> bool:
    """Whether each weight is updated as soon as its gradient is there."""
    return config.get("update") == "in-backward"


class Update(Technique):
    """`in-backward` (Lv et al. 2023) is another training: gradients cannot be clipped by the norm of all of them."""

    axis = Axis(
        name="update",
        values=("in-backward", "after-backward"),
        effects={"in-backward": Effect.TRAINING},
        recipe="after-backward",
        leaves_out_recipe=True,
        lighter=chain("in-backward", "after-backward"),
        of_whole_batch=frozenset({"in-backward"}),
        does="When the optimizer updates the weights.",
        meanings={
            "in-backward": "each as soon as its gradient is there, which is then freed; gradients are not clipped",
            "after-backward": "all at once, when all gradients are there",
        },
        where="with method=full, one device, nothing offloaded, and the whole batch in one micro-batch",
    )
    parts = frozenset({Part.DECODER})

    def unsupported(self, config: Config, job: Job) -> str | None:
        if not updates_in_backward(config):
            return None
        refused = "update=in-backward cannot work with"
        batch = job.workload.batch_per_device
        if config["method"] != "full":
            return f"update=in-backward has nothing to save with method={config['method']}: adapters' gradients are few"
        if config["micro_batch"] != batch:
            return f"{refused} accumulated gradients, as it uses each up at once: use micro_batch={batch}"
        for axis in ("sharding", "offload"):
            if config[axis] != "none":
                return f"{refused} {axis}={config[axis]}, which has updates of its own: use {axis}=none"
        if config["precision"] == "fp16-mixed":
            return f"{refused} fp16-mixed: a step whose gradients overflow would be half taken; use bf16-mixed or fp32"
        if kind_of(config).paged:
            return f"{refused} optimizer={config['optimizer']}, which waits for its pages: use adamw-8bit"
        return None

    def holds(self, lighter: Config, heavier: Config, job: Job) -> bool:
        """Only where updates have no temporaries, as bitsandbytes' have on a CPU: within the backward pass there are
        activations beside these."""
        kind = kind_of(lighter)
        return not kind.has_temporaries and not (kind.package == "bitsandbytes" and job.hardware.kind == "cpu")

    def plan(self, plan: BuildPlan) -> None:
        if updates_in_backward(plan.config):
            from autofit.techniques.in_backward import UpdatesInBackward

            make = kind_of(plan.config).make
            plan.optimizer = lambda module: UpdatesInBackward(trainable(module), lambda one: make(module, one))
