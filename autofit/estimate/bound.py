"""Memory by formula, for models whose code the tracer cannot follow; it says so, and how far off it may be."""

from __future__ import annotations

import time

from autofit.catalog.models import shape
from autofit.core.lattice import Config
from autofit.core.outcome import EVALUATION, SAVING
from autofit.estimate.assumptions import context_bytes
from autofit.estimate.footprint import Footprint
from autofit.estimate.memory.lower_bound import floor_parts
from autofit.estimate.saving import whole_bytes
from autofit.estimate.sharding.hosted import hosted_bytes
from autofit.techniques import Job
from autofit.techniques.axes.attention import attention_format, keeps_scores
from autofit.techniques.selective import SAVE_ATTENTION, budget, interval

LAYER_BYTES, OUTSIDE_MLP_BYTES = 34, 15
"""Saved activations of a layer in 16 bits, and those outside its MLP, per token and unit of width, without attention
scores (Korthikanti et al. 2022, arXiv:2205.05198, equation 1 and the list before it)."""
EXPERT_BYTES, EXPERT_WEIGHT_BYTES = 6, 8 / 3
"""Saved activations of the MLP for each expert that a token is sent to: three rows of the model's width (as it goes in,
comes out and is weighted), and four as wide as the expert, which has three matrices of that width (transformers,
integrations/moe.py)."""
SCORE_BYTES, WIDE_SCORE_BYTES = 6, 4
"""Per query head, token and token attended to, where no fused kernel attends: the fp32 softmax and, if the values are
in 16 bits, its copy in 16 bits (`eager_attention_forward` of transformers' models)."""
CHECKPOINT_BYTES = 2
"""Only the input of a checkpointed layer is kept (ibid., section 5)."""
LOGIT_BYTES = 12
"""Per token and entry of the vocabulary: fp32 log-probabilities, their gradient, and that of the logits."""


def bounded(config: Config, job: Job, *, memory_limit_bytes: int, reason: str) -> Footprint:
    """The memory of `config` by formula; `reason` says why it was not traced."""
    started = time.monotonic()
    model = shape(job.model)
    tokens = config.number("micro_batch") * job.workload.seq_len
    width = 2 if attention_format(config, job) == "fp32" else 1
    layer = int(budget(config) * _layer_bytes(config, job))
    saved_width = model.attention_width if config["checkpointing"] == SAVE_ATTENTION else 0
    kept = CHECKPOINT_BYTES * width * tokens * (model.hidden_size + saved_width)
    every = 0 if config["checkpointing"] == "selective" else interval(config)
    checkpointed = -(-model.layers // every) if every else 0
    recomputed = layer if checkpointed else 0
    pinned = checkpointed * kept if config["checkpointing"] == "offload" else 0
    on_host, processor = hosted_bytes(config, job), job.hardware.kind == "cpu"
    parts = {
        **floor_parts(config, job),
        "activations": (model.layers - checkpointed) * layer + checkpointed * kept - pinned + recomputed,
        "logits_and_loss": LOGIT_BYTES * tokens * model.vocabulary_size,
        "temporaries": 0,
        "fragmentation": 0,
        "context": context_bytes(job),
    }
    if processor:  # its memory is that of its host
        parts["optimizer"] += on_host
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    peaks = dict.fromkeys(("forward", "backward"), sum(parts.values()) - parts["context"]) | {"optimizer": states}
    peaks[SAVING] = parts["weights"] + parts["optimizer"] + whole_bytes(config, job)
    if job.workload.eval_batch is not None:
        evaluated = _evaluated_parts(parts, config, job, job.workload.eval_batch)
        peaks[EVALUATION] = sum(evaluated.values()) - evaluated["context"]
        parts = max(parts, evaluated, key=lambda candidate: sum(candidate.values()))
    allocated = sum(parts.values()) - parts["context"]
    return Footprint(
        config=config,
        hardware=job.hardware.name,
        memory_limit_bytes=memory_limit_bytes,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=allocated,
        device_bytes=sum(parts.values()),
        host_bytes=allocated if processor else on_host + pinned,
        breakdown=parts,
        phase_peaks=peaks,
        untraced=reason,
        seconds_to_estimate=time.monotonic() - started,
    )


def _evaluated_parts(parts: dict[str, int], config: Config, job: Job, sequences: int) -> dict[str, int]:
    """`parts` while so many sequences are evaluated: without gradients, one layer's activations, all logits."""
    tokens = sequences * job.workload.seq_len
    layer = _layer_bytes(config.replace(micro_batch=sequences), job)
    logits = LOGIT_BYTES * tokens * shape(job.model).vocabulary_size
    return {**parts, "gradients": 0, "activations": layer, "logits_and_loss": logits}


def _layer_bytes(config: Config, job: Job) -> int:
    """What one layer keeps from its forward to its backward, if nothing is recomputed."""
    model = shape(job.model)
    tokens = config.number("micro_batch") * job.workload.seq_len
    wide = attention_format(config, job) == "fp32"
    per_token = float(LAYER_BYTES * model.hidden_size)
    merged = 0.0
    if model.experts:
        weights = model.expert_parameters / model.layers
        of_one = EXPERT_BYTES * model.hidden_size + EXPERT_WEIGHT_BYTES * weights / model.experts / model.hidden_size
        per_token = OUTSIDE_MLP_BYTES * model.hidden_size + model.experts_per_token * of_one
        if config["method"] != "full" and config["targets"] == "all-linear":
            merged = 2 * weights  # peft adds adapters of stacked experts to a copy of all of these
    scores = (WIDE_SCORE_BYTES if wide else SCORE_BYTES) * model.attention_heads * job.workload.seq_len
    return int((2 if wide else 1) * (tokens * per_token + merged) + tokens * scores * keeps_scores(config, job))
