"""An example of every body that is sent and answered, for the API's description."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from autofit import __version__
from autofit.core.units import GIB

SEARCH_ID = "9f0c1e5a7d3b4c2e8f6a1b0d2c4e6f80"
AT = "2026-01-01T00:00:00+00:00"
CONFIG = {
    "attention": "sdpa", "checkpointing": "none", "compile": False, "loss": "full", "method": "full", "micro_batch": 2,
    "offload": "none", "optimizer": "adamw", "precision": "bf16-mixed", "sharding": "none",
}  # fmt: skip
MEASUREMENT = {
    "tokens_per_second": 2000.0, "step_seconds": {"median": 0.256, "p95": 0.261, "relative_spread": 0.03}, "mfu": 0.4,
    "peak_allocated_bytes": 18 * GIB, "peak_reserved_bytes": 20 * GIB - 1, "device_bytes": 20 * GIB,
    "host_peak_bytes": 3 * GIB, "phase_peaks": {"forward": 9 * GIB, "backward": 18 * GIB, "optimizer": 6 * GIB},
    "loss": {"first": 10.8, "last": 10.1}, "steps": 5, "setup_seconds": 3.0,
}  # fmt: skip
SITE = {
    "hardware": {
        "name": "h100-80g", "kind": "cuda", "device_name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * GIB,
        "host_memory_bytes": 512 * GIB, "capability": "9.0", "peak_flops": 989.4e12,
    },
    "stack": {"python": "3.11", "torch": "2.13.0", "transformers": "5.23.0", "peft": "0.21.2"},
    "workload": {
        "model": "smollm2-135m", "model_digest": "e1103c98141cec17", "seq_len": 128, "global_batch": 4,
        "lora_dropout": 0.0, "devices": 1, "seed": 0,
    },
}  # fmt: skip
ASKED_CONFIG = {"method": "qlora", "micro_batch": 4, "checkpointing": "full"}
EXAMPLES: dict[str, dict[str, Any]] = {
    "AskedSearch": {"model": "llama-3.1-8b", "hardware": "h100-80g", "memory_limit": "40GiB"},
    "AskedEstimate": {"model": "llama-3.1-8b", "hardware": "rtx-4090", "config": ASKED_CONFIG},
    "RecommendationAnswer": {
        "config": CONFIG, "provenance": "measured", "measurement": MEASUREMENT, "trial_id": 2, "verified": True,
        "memory_limit_bytes": 30 * GIB, "headroom_bytes": 10 * GIB, "changes_training": [], "contradictory": 0,
        "alternatives": [
            {
                "role": "faster, does not fit", "config": {**CONFIG, "micro_batch": 4}, "over_limit_bytes": 10 * GIB,
                "speedup": 2.0,
            }
        ],
        **SITE,
    },
    "FrontierAnswer": {
        **SITE, "points": [{"config": CONFIG, "measurement": MEASUREMENT, "trial_id": 2}], "trials": 10,
        "out_of_memory": 1, "contradictory": 0,
    },
    "TrialsAnswer": {
        "trials": [
            {
                "outcome": "fits", "config": CONFIG, **SITE, "measurement": MEASUREMENT, "memory_limit_bytes": 80 * GIB,
                "seconds": 7.5, "recorded_at": AT, "trial_id": 2,
            }
        ],
        "total": 8, "next": 2,
    },
    "EstimateAnswer": {
        "provenance": "predicted", "config": {**CONFIG, **ASKED_CONFIG, "rank": 8, "targets": "all-linear"},
        "hardware": "rtx-4090", "fits": True, "certainty": "unsure", "headroom_bytes": 1496645632,
        "peak_allocated_bytes": 20946447360, "peak_reserved_bytes": 23477616640, "device_bytes": 23897047040,
        "host_bytes": 0, "memory_limit_bytes": 25393692672,
        "breakdown": {
            "weights": 5786641408, "gradients": 83886080, "optimizer": 168001536, "activations": 2282799104,
            "logits_and_loss": 12608079872, "temporaries": 17039360, "fragmentation": 2531169280, "context": 419430400,
        },
        "phase_peaks": {"forward": 18954152960, "backward": 20946447360, "optimizer": 6055802368},
        "tokens_per_second": 1499.8, "step_seconds": 87.4, "mfu": 0.287, "seconds_to_estimate": 8.7,
    },
    "SearchState": {
        "search_id": SEARCH_ID, "state": "queued",
        "asked": {"model": "llama-3.1-8b", "seq_len": 2048, "hardware": "h100-80g", "memory_limit_bytes": 40 * GIB},
        "waiting_for": "a free runner with h100-80g", "result": None, "started_at": AT, "ended_at": None, "drivers": 0,
        "spent_seconds": 0.0, "spent_trials": 0,
    },
    "ModelAnswer": {
        "name": "gemma-2-2b", "parameters": 2614341888, "source": "google/gemma-2-2b, config.json", "note": None,
    },
    "HardwareAnswer": {
        "cards": [
            {
                "name": "h200", "memory_bytes": 150109945856, "bandwidth_bytes_per_second": 4.8e12,
                "supports": ["estimate", "search"], "source": "NVIDIA H200 Tensor Core GPU datasheet",
            }
        ],
        "measured": [SITE["hardware"]],
    },
    "SpaceAnswer": {"name": "cpu", "purpose": "Small models on a machine without a GPU", "devices": 1, "configs": 672},
    "Audited": {"number": 1, "at": AT, "token": "ci", "action": "search", "search_id": SEARCH_ID},
    "HealthAnswer": {"status": "ok", "version": __version__},
    "ReadyAnswer": {"status": "ok", "store": "ok", "runner": "ok"},
}  # fmt: skip
"""By the names of their models; each is checked against its schema by a test."""


def install(app: FastAPI) -> None:
    """Add them to the application's description. FastAPI's own examples lose what is null."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        document = described()
        for name, example in EXAMPLES.items():
            document["components"]["schemas"][name]["examples"] = [example]
        return document

    app.openapi = openapi  # type: ignore[method-assign]
