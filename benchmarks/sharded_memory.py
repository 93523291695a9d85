"""The estimator's memory of each rank against trials of several ranks on a processor.

    python benchmarks/sharded_memory.py [--model smollm2-135m] [--seq-len 64] [--global-batch 8] [--ranks 2]
                                        [--shardings ddp,zero1,...] [--methods full,lora] [--json FILE]

Trains every sharding with every method, each rank a process that talks over gloo, and prints the device memory of the
rank that takes most beside the prediction. Memory is not disturbed by what else runs, so nothing is said of time. With
--json the configs in the file that are not asked for are kept, so that a long run can be made in parts; those of other
hardware, libraries or another workload are not.
"""

from __future__ import annotations

import argparse
import json
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autofit.catalog.models import load
from autofit.estimate.estimator import Estimator
from autofit.lattice import Config
from autofit.outcome import Fits
from autofit.techniques import Job, complete
from autofit.trial.group_runner import GroupRunner
from autofit.trial.request import TrialRequest
from autofit.trial.site import check_devices, cpu, installed_stack
from autofit.workload import Workload

SHARDINGS = "ddp,zero1,zero2,zero3,fsdp"
METHODS = "full,lora"


def compared(runner: GroupRunner, estimator: Estimator, config: Config, limit: int) -> dict[str, Any]:
    """One config, measured and predicted, in bytes. Raises `SystemExit` for a trial that does not fit."""
    predicted = estimator.estimate(config, memory_limit_bytes=limit)
    request = TrialRequest(
        job=estimator.job, config=config, memory_limit_bytes=limit, deadline_seconds=180.0, timing_seconds=0.5
    )
    outcome, _ = runner.run(request)
    if not isinstance(outcome, Fits):
        raise SystemExit(f"{config.to_json()}: {outcome.kind}: {outcome.reason}")
    measured = outcome.measurement
    return {
        "config": config.to_json(),
        "measured_device_bytes": measured.device_bytes,
        "measured_by_rank": [rank.device_bytes for rank in measured.ranks],
        "predicted_device_bytes": predicted.device_bytes,
        "measured_phase_peaks": measured.phase_peaks,
        "predicted_phase_peaks": predicted.phase_peaks,
        "error": predicted.device_bytes / measured.device_bytes - 1.0,
    }


def text(row: dict[str, Any]) -> str:
    """One config in a line."""
    measured, predicted = row["measured_device_bytes"] / 2**20, row["predicted_device_bytes"] / 2**20
    return (
        f"{row['config']['sharding']:6} {row['config']['method']:5} {measured:7.0f} {predicted:7.0f} MiB "
        f"{row['error']:+6.1%}"
    )


def kept(file: Path | None, about: dict[str, Any], asked: list[Config]) -> list[dict[str, Any]]:
    """The rows of `file` that are of the same hardware, libraries and workload, and not asked for again."""
    if file is None or not file.exists():
        return []
    known = json.loads(file.read_text(encoding="utf-8"))
    if any(known[name] != value for name, value in about.items()):
        return []
    again = [config.to_json() for config in asked]
    return [row for row in known["configs"] if row["config"] not in again]


def document(about: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is recorded."""
    return {
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **about,
        "median_absolute_error": statistics.median(abs(row["error"]) for row in rows),
        "worst_error": max((row["error"] for row in rows), key=abs),
        "configs": rows,
    }


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shardings", default=SHARDINGS)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--limit-gib", type=float, default=4.0, help="memory limit of a rank")
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    model, hardware = load(asked.model), cpu()
    check_devices(hardware, asked.ranks)
    workload = Workload(
        model=model.name,
        model_digest=model.digest,
        seq_len=asked.seq_len,
        global_batch=asked.global_batch,
        devices=asked.ranks,
    )
    job = Job(model=model, workload=workload, hardware=hardware, stack=installed_stack())
    configs = [
        complete({"sharding": sharding, "method": method, "micro_batch": 2})
        for sharding in asked.shardings.split(",")
        for method in asked.methods.split(",")
    ]
    about = {"hardware": hardware.to_json(), "stack": job.stack.to_json(), "workload": workload.to_json()}
    rows = kept(asked.json, about, configs)
    estimator = Estimator(job, None)
    with GroupRunner(ranks=asked.ranks) as runner:
        runner.start()
        for config in configs:
            rows.append(compared(runner, estimator, config, int(asked.limit_gib * 2**30)))
            print(text(rows[-1]), flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(document(about, rows), indent=2) + "\n", encoding="utf-8")
    print(f"median absolute error {document(about, rows)['median_absolute_error']:.1%} over {len(rows)} configs")


if __name__ == "__main__":
    main()
