"""Memory by formula, for models whose code the tracer cannot follow; it says so, and how far off it may be."""

from __future__ import annotations

import time

from autofit.catalog.models import shape
from autofit.estimate.assumptions import of_any_step
from autofit.estimate.estimate import Estimate
from autofit.estimate.floor import floor_parts
from autofit.estimate.libraries import Holdings, library
from autofit.estimate.libraries.edit import plain
from autofit.estimate.memory import CONTEXT_BYTES
from autofit.lattice import Config
from autofit.techniques import Job

LAYER_BYTES = 34
"""Saved activations of a layer in 16 bits, per token and unit of width, without attention scores (Korthikanti et al.
2022, arXiv:2205.05198, equation 1)."""
CHECKPOINT_BYTES = 2
"""Of a checkpointed layer only its input is kept (ibid., section 5)."""
LOGIT_BYTES = 12
"""Per token and entry of the vocabulary: fp32 log-probabilities, their gradient, and that of the logits."""
MEMORY_ERROR = 0.5
"""Assumed relative error of the formula. It was made for GPT-2's layers; a test checks it against traces of others."""


def bounded(config: Config, job: Job, *, memory_limit_bytes: int, reason: str) -> Estimate:
    """The memory of `config` by formula; `reason` says why it was not traced. No time is predicted."""
    started = time.monotonic()
    model = shape(job.model)
    tokens = config.number("micro_batch") * job.workload.seq_len
    width = 2 if config["precision"] == "fp32" else 1
    layer = LAYER_BYTES * width * tokens * model.hidden_size
    kept = CHECKPOINT_BYTES * width * tokens * model.hidden_size
    value = config.text("checkpointing")
    every = int(value.removeprefix("every-")) if value.startswith("every-") else 1
    checkpointed = 0 if value in ("none", "selective") else -(-model.layers // every)
    recomputed = layer if checkpointed else 0
    pinned = checkpointed * kept if value == "offload" else 0
    on_host, processor = _hosted_bytes(config, job), job.hardware.kind == "cpu"
    parts = {
        **floor_parts(config, job),
        "activations": (model.layers - checkpointed) * layer + checkpointed * kept - pinned + recomputed,
        "logits_and_loss": LOGIT_BYTES * tokens * model.vocabulary_size,
        "temporaries": 0,
        "fragmentation": 0,
        "context": CONTEXT_BYTES if job.hardware.kind == "cuda" else 0,
    }
    if processor:  # its memory is that of its host
        parts["optimizer"] += on_host
    allocated = sum(parts.values()) - parts["context"]
    states = parts["weights"] + parts["gradients"] + parts["optimizer"]
    return Estimate(
        config=config,
        hardware=job.hardware.name,
        memory_limit_bytes=memory_limit_bytes,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=allocated,
        device_bytes=sum(parts.values()),
        host_bytes=allocated if processor else on_host + pinned,
        breakdown=parts,
        phase_peaks={"forward": allocated, "backward": allocated, "optimizer": states},
        work=None,
        memory_error=MEMORY_ERROR,
        assumptions=(
            f"by formula, not traced ({reason}): to fit, it needs a limit {MEMORY_ERROR:.0%} above this; time is not "
            "predicted",
            *of_any_step(config, job),
        ),
        seconds_to_estimate=time.monotonic() - started,
    )


def _hosted_bytes(config: Config, job: Job) -> int:
    """Host memory of what one rank offloads; adapters are left out, as in the floor."""
    spread = library(config, job)
    if spread is None:
        return 0
    model, full = shape(job.model), config["method"] == "full"
    stored, computed = floor_parts(plain(config), job), floor_parts(spread.traced(config), job)
    trained = computed["weights"] if full else 0
    embeddings = trained * model.embedding_parameters // model.parameters
    return spread.host_bytes(
        Holdings(
            trained=float(model.parameters) if full else 0.0,
            trained_bytes=trained,
            sizes=(embeddings, *[(trained - embeddings) // model.layers] * model.layers),
            frozen_bytes=0 if full else computed["weights"],
            stored_bytes=stored["weights"] if full else 0,
            states_bytes=stored["optimizer"],
        ),
        accumulates=job.workload.batch_per_device > config.number("micro_batch"),
    )
