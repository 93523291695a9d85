"""Activation checkpointing: which activations are kept for the backward pass, and where."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from autofit.catalog.models import shape
from autofit.core.lattice import Axis, Config, chain, closure
from autofit.techniques.axes.attention import keeps_scores
from autofit.techniques.axes.kernels import by_liger
from autofit.techniques.job import Job
from autofit.techniques.selective import BUDGETS, SAVE_ATTENTION, SELECTIVE, interval, keeps_results, selective_contexts
from autofit.techniques.technique import BuildPlan, Part, Technique


class Checkpointing(Technique):
    """Decoder layers whose activations are recomputed (Chen et al. 2016), through transformers' own layer hook.

    `none` leaves to torch.compile what it recomputes by itself. Within a budget torch chooses what a compiled layer
    keeps, so that the fewest operations run again (`within_budget`). It counts those of products and of its own
    attention kernels; 4-bit products and those of experts count as nothing.
    """

    axis = Axis(
        name="checkpointing",
        values=("offload", "full", SAVE_ATTENTION, "every-2", "every-4", "selective", *reversed(BUDGETS), "none"),
        recipe="none",
        # No claim between every-N and what keeps results: which is lighter depends on the architecture. None about
        # budgets: torch keeps to an estimate, a smaller one may keep as much, and recomputation takes memory, too.
        lighter=closure({*chain("offload", "full", "every-2", "every-4", "none"), *chain("full", *SELECTIVE, "none")}),
        # Each recomputes the layers of the next and others, or moves what they save. No claim between full and what
        # keeps results, whose bookkeeping may take longer than what it saves from recomputation.
        slower=closure(
            {*chain("offload", "full", "every-2", "every-4", "none"), *((value, "none") for value in SELECTIVE)}
        ),
        does="Which activations are recomputed in the backward pass instead of kept.",
        meanings={
            "offload": "all, and what recomputation starts from is moved to host memory; not on a CPU",
            "full": "those of every decoder layer",
            SAVE_ATTENTION: "all but the outputs of attention, for long sequences; not with ZeRO-3",
            "every-2": "those of every second layer",
            "every-4": "those of every fourth layer",
            "selective": "all but the outputs of attention and of every second product; not with ZeRO-3",
            **{
                value: f"all but about {share:.0%} of what none keeps; with compile=true; not with flash, ZeRO-3, DDP"
                for value, share in BUDGETS.items()
            },
            "none": "nothing is recomputed",
        },
        where="models whose layers transformers can checkpoint",
    )
    parts = frozenset({Part.DECODER})

    def unsupported(self, config: Config, job: Job) -> str | None:
        value = config.text("checkpointing")
        if value != "none" and not shape(job.model).checkpointable:
            return f"checkpointing={value} cannot work: transformers has no checkpointing for {job.model.name}"
        if value == "offload" and job.hardware.kind == "cpu":
            return "checkpointing=offload moves activations to host memory, where a CPU's activations already are"
        if value == SAVE_ATTENTION and keeps_scores(config, job):
            return f"checkpointing={value} would keep nothing: no fused kernel computes attention here, use full"
        return _why_no_budget(config) if value in BUDGETS else None

    def holds(self, lighter: Config, heavier: Config, job: Job) -> bool:
        """False for what keeps results against `none` under compilation, which chooses what `none` keeps and may keep
        less."""
        return not (keeps_results(lighter) and heavier["checkpointing"] == "none" and lighter["compile"])

    def on_model(self, plan: BuildPlan, model: Any) -> None:
        """The flag and the function are those that transformers' layers have read in every version since 4.53."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        if not interval(plan.config):
            return
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        assert layers, "`unsupported` refuses models without such layers"
        function = _checkpoint_function(plan.config)
        for layer in layers[:: interval(plan.config)]:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = function


def within_budget(share: float, backend: Callable[..., Any]) -> Callable[..., Any]:
    """`backend` of torch.compile, with that share in force while it divides a graph into forward and backward, at no
    other time: torch reads it there (`min_cut_rematerialization_partition` of torch/_functorch/partitioners.py)."""
    import torch._functorch.config

    def within(graph: Any, operands: Any, **options: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=share):
            return backend(graph, operands, **options)

    return within


def _why_no_budget(config: Config) -> str | None:
    value = config.text("checkpointing")
    if config["compile"] is not True:
        return f"checkpointing={value} needs compile=true, which recomputes within a compiled layer: or use selective"
    if by_liger(config) or config["attention"] == "flash":
        foreign, native = (
            ("kernels=liger", "kernels=torch") if by_liger(config) else ("attention=flash", "attention=sdpa")
        )
        return f"checkpointing={value} cannot work with {foreign}: torch weighs its own operations only; use {native}"
    if config["sharding"] == "ddp":
        return (
            f"checkpointing={value} cannot work with sharding=ddp: DDP splits a layer's graph to compile it, and what "
            "passes from part to part is kept beside the budget; use every-2"
        )
    return None


def _checkpoint_function(config: Config) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    if keeps_results(config):
        policy = {"products": config["checkpointing"] == "selective", "adapters": config["method"] != "full"}
        return partial(checkpoint, use_reentrant=False, context_fn=partial(selective_contexts, **policy))
    if config["checkpointing"] == "offload":
        return _offloaded_checkpoint
    return partial(checkpoint, use_reentrant=False)


def _offloaded_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """A checkpoint whose saved input is kept in pinned host memory."""
    import torch
    from torch.autograd.graph import save_on_cpu
    from torch.utils.checkpoint import checkpoint

    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *args, use_reentrant=False)
