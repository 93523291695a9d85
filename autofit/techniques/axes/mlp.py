"""How much of a sequence a decoder layer's MLP computes at once."""

from __future__ import annotations

import math
from typing import Any

from autofit.catalog.models import Model, shape
from autofit.core.lattice import Axis, Config, chain
from autofit.techniques.axes.kernels import DENSE, MODEL_TYPES
from autofit.techniques.axes.sharding import needs_process_group
from autofit.techniques.axes.update import updates_in_backward
from autofit.techniques.job import Job
from autofit.techniques.technique import BuildPlan, Part, Technique


def tile_count(seq_len: int, hidden_size: int) -> int:
    """In how many tiles a sequence's MLP is computed. A tile has at most as many tokens as the model is wide, as in
    Arctic Long Sequence Training (Bekman et al. 2025, arXiv:2506.13996; `TiledMLP` of deepspeed 0.19.8,
    runtime/sequence_parallel/ulysses_sp.py)."""
    return math.ceil(seq_len / hidden_size)


def why_whole(config: Config, model: Model, *, seq_len: int, lora_dropout: float) -> str | None:
    """Why the MLPs of `model` cannot be computed in tiles, in one sentence; None if they can."""
    if model.config["model_type"] not in MODEL_TYPES:
        return f"mlp=tiled is for dense models whose MLP is known, which {model.name} is not: use whole"
    width = shape(model).hidden_size
    if tile_count(seq_len, width) == 1:
        return f"mlp=tiled would tile nothing: {seq_len} tokens are no more than the model is wide, {width}; use whole"
    if config["compile"] is True:
        return "mlp=tiled cannot work with compile=true, which compiles a layer as a whole: use compile=false"
    how = "which takes a weight's gradient once in a backward pass"
    if updates_in_backward(config):
        return f"mlp=tiled cannot work with update=in-backward, {how}: use whole"
    if needs_process_group(config):
        axis = "offload" if config["sharding"] == "none" else "sharding"
        return f"mlp=tiled cannot work with {axis}={config[axis]}, {how}: use whole"
    if config["checkpointing"] == "selective":
        return "mlp=tiled cannot work with checkpointing=selective, which keeps the MLP's products: use save-attention"
    if lora_dropout and config.get("targets") == "all-linear":
        return "mlp=tiled would drop out other values in the backward pass: use a lora-dropout of 0, or whole"
    return None


class Mlp(Technique):
    """A tile is computed again in the backward pass: what lies between the MLP's products exists for one tile only."""

    axis = Axis(
        name="mlp",
        values=("tiled", "whole"),
        recipe="whole",
        leaves_out_recipe=True,
        lighter=chain("tiled", "whole"),
        slower=chain("tiled", "whole"),
        does="How much of a sequence the MLP of each decoder layer computes at once.",
        meanings={
            "tiled": "at most as many tokens as the model is wide; not with compile=true or checkpointing=selective",
            "whole": "all of it",
        },
        where=f"one device, {DENSE}",
    )
    parts = frozenset({Part.DECODER, Part.EVALUATION})

    def unsupported(self, config: Config, job: Job) -> str | None:
        if config.get("mlp") != "tiled":
            return None
        workload = job.workload
        return why_whole(config, job.model, seq_len=workload.seq_len, lora_dropout=workload.lora_dropout)

    def on_model(self, plan: BuildPlan, model: Any) -> None:
        if plan.config.get("mlp") == "tiled":
            from transformers.modeling_layers import GradientCheckpointingLayer

            from autofit.techniques.tiled_mlp import tile_mlps

            layers = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
            tile_mlps(layer.mlp for layer in layers)
