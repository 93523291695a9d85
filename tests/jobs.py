"""Jobs and trial requests of a real but tiny Llama, for tests that run trials."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autofit.catalog.models import Model
from autofit.core.lattice import Config
from autofit.core.workload import Workload
from autofit.techniques import Job, complete
from autofit.trial.machine.detection import cpu, installed_stack
from autofit.trial.request import TrialRequest

GIB = 1024**3


def tiny_model(*, vocabulary: int = 512, hidden: int = 64, layers: int = 2) -> Model:
    """A Llama with grouped-query attention and tied embeddings, about a hundred thousand parameters."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    return Model(name="tiny", config=config, source="tests", parameters=None)


def model_in(folder: Path, config: Mapping[str, Any] | None = None) -> Path:
    """The folder, made where there is none, of a model with this config, else of the tiny one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_model().config if config is None else config))
    return folder


def tiny_job(model: Model | None = None, *, seq_len: int = 32, global_batch: int = 4, **workload: Any) -> Job:
    """A job on this machine's CPU."""
    model = model or tiny_model()
    return Job(
        model=model,
        workload=Workload(
            model=model.name, model_digest=model.digest, seq_len=seq_len, global_batch=global_batch, **workload
        ),
        hardware=cpu(),
        stack=installed_stack(),
    )


def tiny_request(
    config: Config | None = None,
    *,
    job: Job | None = None,
    memory_limit_bytes: int = 2 * GIB,
    **request: Any,
) -> TrialRequest:
    """A request that takes about a second: no more steps than must be timed."""
    return TrialRequest(
        job=job or tiny_job(),
        config=config or complete({}),
        memory_limit_bytes=memory_limit_bytes,
        **{"timing_seconds": 0.0, **request},
    )
