"""The estimator's memory per rank against trials of several ranks on a CPU.

    python benchmarks/sharded_memory.py [--model smollm2-135m] [--seq-len 64] [--global-batch 8] [--ranks 2]
                                        [--shardings ddp,zero1,...] [--methods full,lora] [--mapped] [--json FILE]

Trains every sharding with every method, each rank a process that communicates over gloo, and prints the device memory
of the rank that takes most beside the prediction. Other work on the machine does not affect memory; times are not
reported. With --json, configs in the file that are not asked for now are kept, so that a long run can be made in parts;
those of other hardware, libraries or another workload are dropped.

With --mapped, the C library maps every block by itself and gives it back when it is freed (mallopt(3),
M_MMAP_THRESHOLD): the trials then show what tensors take, and are compared with the predicted tensors. What trials take
beyond that without --mapped is what the heap keeps of freed blocks.
"""

from __future__ import annotations

import argparse
import json
import os
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
MAPPED = "glibc.malloc.mmap_threshold=65536"
"""Blocks of at least this many bytes are mapped by themselves."""


def compared(
    runner: GroupRunner, estimator: Estimator, config: Config, limit: int, *, mapped: bool = False
) -> dict[str, Any]:
    """One config, measured and predicted, in bytes; tensors alone if `mapped`. Raises `SystemExit` for a trial that
    does not fit."""
    predicted, phases = predictions(estimator, config, limit, mapped=mapped)
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
        "predicted_device_bytes": predicted,
        "measured_phase_peaks": measured.phase_peaks,
        "predicted_phase_peaks": phases,
        "error": predicted / measured.device_bytes - 1.0,
    }


def predictions(estimator: Estimator, config: Config, limit: int, *, mapped: bool) -> tuple[int, dict[str, int]]:
    """Predicted device memory and the peak of each phase, in bytes."""
    if not mapped:
        found = estimator.estimate(config, memory_limit_bytes=limit)
        return found.device_bytes, found.phase_peaks
    traced = estimator.trace(config)
    phases = {phase: size + traced.hosted_bytes for phase, size in traced.timeline.phase_peaks().items()}
    return max(phases.values()), phases


def text(row: dict[str, Any]) -> str:
    """One config on one line."""
    measured, predicted = row["measured_device_bytes"] / 2**20, row["predicted_device_bytes"] / 2**20
    return (
        f"{row['config']['sharding']:6} {row['config']['method']:5} {measured:7.0f} {predicted:7.0f} MiB "
        f"{row['error']:+6.1%}"
    )


def kept(file: Path | None, about: dict[str, Any], asked: list[Config]) -> list[dict[str, Any]]:
    """The rows of `file` of the same hardware, libraries and workload that are not asked for again."""
    if file is None or not file.exists():
        return []
    known = json.loads(file.read_text(encoding="utf-8"))
    if any(known.get(name) != about.get(name) for name in (*about, "tunables")):
        return []
    again = [config.to_json() for config in asked]
    return [row for row in known["configs"] if row["config"] not in again]


def document(about: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The record as one JSON object."""
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
    parser.add_argument("--limit-gib", type=float, default=4.0, help="memory limit per rank")
    parser.add_argument("--mapped", action="store_true", help="show tensors alone, without the C library's heap")
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
    if asked.mapped:
        os.environ["GLIBC_TUNABLES"] = MAPPED  # read when the trials' parent starts
        about["tunables"] = {"GLIBC_TUNABLES": MAPPED}
    rows = kept(asked.json, about, configs)
    estimator = Estimator(job, None)
    with GroupRunner(ranks=asked.ranks) as runner:
        runner.start()
        for config in configs:
            rows.append(compared(runner, estimator, config, int(asked.limit_gib * 2**30), mapped=asked.mapped))
            print(text(rows[-1]), flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(document(about, rows), indent=2) + "\n", encoding="utf-8")
    print(f"median absolute error {document(about, rows)['median_absolute_error']:.1%} over {len(rows)} configs")


if __name__ == "__main__":
    main()
