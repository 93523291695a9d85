"""Values of options that several commands share, made from what was typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Imported where they are used: `autofit --help` needs none of them.
    from autofit.lattice import Config
    from autofit.operations import WorkloadOptions
    from autofit.workload import Goal


def workload(
    model: str, seq_len: int, global_batch: int, lora_dropout: float, devices: int, seed: int
) -> WorkloadOptions:
    """The workload options as one value."""
    from autofit.operations import WorkloadOptions

    return WorkloadOptions(
        model=model,
        seq_len=seq_len,
        global_batch=global_batch,
        lora_dropout=lora_dropout,
        devices=devices,
        seed=seed,
    )


def goal(method: str, min_rank: int, allow: str) -> Goal:
    """How far a search may go, as one value; raises `UsageError` for an unknown value of --allow."""
    from autofit.errors import unknown
    from autofit.workload import Effect, Goal

    effects = {effect.label: effect for effect in Effect}
    if allow not in effects:
        raise unknown("value of --allow", allow, effects)
    return Goal(method=method, min_rank=min_rank, allow=effects[allow])


def read_config(text: str) -> Config:
    """The config given as `axis=value,...` or as the path of a JSON file; raises `UsageError`."""
    from autofit import techniques
    from autofit.errors import UsageError

    if "=" in text and not Path(text).exists():
        return techniques.complete(techniques.parse(text))
    try:
        data = json.loads(Path(text).read_text())
    except OSError as error:
        raise UsageError(
            f"config {text!r} is neither axis=value pairs nor a readable file: {error.strerror}"
        ) from error
    except ValueError as error:
        raise UsageError(f"config file {text} is not JSON: {error}") from error
    except RecursionError as error:
        raise UsageError(f"config file {text} is not a config: it is nested too deeply") from error
    config = data.get("config", data) if isinstance(data, dict) else data
    if not isinstance(config, dict):
        raise UsageError(f"config file {text} must hold one JSON object")
    return techniques.complete(config)
