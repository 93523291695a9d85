"""The estimator against measurements that others have published, made with older libraries than ours.

    python benchmarks/published.py memory|speeds|limits [--json FILE]

memory  peaks of allocated memory in published/measurements.csv. `config` there is a run in our words, where axes that
        an out-of-memory row does not state have their lightest value; `left_out` says why a row is not compared. On two
        GPUs the runs used torch's older `FullyShardedDataParallel`, the prediction is for ours, `fully_shard`: at the
        loss both hold the root and one more layer (torch/distributed/fsdp/_runtime_utils.py).
speeds  of the same runs on one GPU and of published/speeds.csv, predicted from data sheets alone. The time to launch an
        operation (`OPERATION_SECONDS` of guessed_rates.py) was taken from the two smallest runs of that file's smallest
        model. Its Qwen models are traced as Llamas of the same widths. The runs of TransformerEngine's example pad
        their batches, so their figures are upper bounds.
limits  the longest sequences that published/limits.csv says to fit a card: what they need, predicted as transformers'
        Trainer with peft trains them, against the card's memory.

Exits with 0 only if every target is reached. One to two minutes each.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from estimate_trials import kendall
from older_libraries import older_libraries

from autofit.catalog.models import Model, load, names
from autofit.core.device.work_kinds import LAUNCH
from autofit.core.lattice import Config
from autofit.core.workload import Workload
from autofit.estimate.estimator import Estimator
from autofit.estimate.time.guessed_rates import prior
from autofit.prediction.estimation import site
from autofit.techniques import Job, complete, parse

PUBLISHED = Path(__file__).parent / "published"
MEDIAN_ERROR, LARGEST_ERROR, SHARDED_MEDIAN_ERROR = 0.03, 0.08, 0.05
"""Targets of the peaks: median and largest error on one GPU, and the median on several."""
LIMIT_ERROR = 0.05
"""Target of the limits: largest error."""
SPEED_ERROR, TAU = 0.2, 0.85
"""Targets of the speeds: median error at most, and Kendall's tau at least."""
LORA_DROPOUT = 0.1
"""`lora_dropout` of every adapter run in scripts/benchmarks/refs/a100_80gb.csv of the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run that is compared."""

    job: Job
    config: Config
    fields: Mapping[str, str]
    """The row of the file."""

    @property
    def ran_out(self) -> bool:
        """Whether it ran out of memory."""
        return self.fields.get("note") == "out of memory"


def runs(file: str) -> Iterator[Run]:
    """The runs of a file of published/ that are compared."""
    with (PUBLISHED / file).open(newline="", encoding="utf-8") as lines:
        for fields in csv.DictReader(lines):
            if not fields.get("left_out"):
                yield _run(fields)


def _run(fields: Mapping[str, str]) -> Run:
    model, config = architecture(fields["model"]), complete(parse(fields["config"]))
    hardware, stack = site(fields["card"])
    gpus = int(fields.get("gpus", 1))
    workload = Workload(
        model=model.name,
        model_digest=model.digest,
        # The trainer truncates sequences to the length that the tokenizer states for the model (fms-hf-tuning 2.5.0,
        # setup_dataprocessor.py): santacoder's tokens per second over samples per second are 2048.
        seq_len=min(int(fields["seq_len"]), model.config.get("n_positions", sys.maxsize)),
        global_batch=int(fields.get("global_batch") or config.number("micro_batch") * gpus),
        devices=gpus,
        lora_dropout=LORA_DROPOUT if fields.get("rank") else 0.0,
        trainer=fields.get("trainer"),
    )
    return Run(job=Job(model=model, workload=workload, hardware=hardware, stack=stack), config=config, fields=fields)


@cache
def architecture(name: str) -> Model:
    """The model from published/models, else from the catalog, by its name there or on the hub."""
    own = PUBLISHED / "models" / f"{name.rpartition('/')[2]}.json"
    if own.exists():
        return load(str(own))
    return next(model for model in map(load, names()) if name in (model.name, model.source.partition(",")[0]))


def peak(run: Run) -> dict[str, Any]:
    """Predicted as its older libraries ran it; one that ran out of memory as ours would, which need less."""
    # sample-configurations of the source: baseline-peft-bnb leaves the adapters to trl, accelerated-peft-bnb does not.
    older = nullcontext() if run.ran_out else older_libraries(wide_norms=run.fields["note"] == "baseline-peft-bnb")
    with older:
        found = Estimator(run.job, None).estimate(run.config, memory_limit_bytes=run.job.hardware.memory_bytes)
    measured = None if run.ran_out else int(run.fields["peak_bytes"])
    error = None if measured is None else found.peak_allocated_bytes / measured - 1
    said = {"measured_bytes": measured, "predicted_bytes": found.peak_allocated_bytes, "error": error}
    return {"gpus": run.job.workload.devices, **said, "misjudged": found.fits is run.ran_out}


def errors_of(errors: Sequence[float]) -> dict[str, Any]:
    """Their number, median and largest, without their signs."""
    sizes = [abs(error) for error in errors]
    median, largest = statistics.median(sizes), max(sizes)
    return {"rows": len(sizes), "median_absolute_error": median, "largest_absolute_error": largest}


def peaks_judged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of memory, and whether they reach the targets."""
    ran = [row for row in rows if row["error"] is not None]
    one, several = (errors_of([r["error"] for r in ran if (r["gpus"] > 1) is sharded]) for sharded in (False, True))
    reached = one["median_absolute_error"] <= MEDIAN_ERROR and one["largest_absolute_error"] <= LARGEST_ERROR
    reached = reached and several["median_absolute_error"] <= SHARDED_MEDIAN_ERROR
    misjudged = sum(row["misjudged"] for row in rows)
    return {**one, "several_gpus": several, "fit_misjudged": misjudged, "reached": reached and not misjudged}


def speed(run: Run) -> dict[str, Any]:
    """Predicted from the data sheet, with the share of its time that the host takes to launch operations."""
    rates, published = prior(run.job.hardware), float(run.fields["tokens_per_second"])
    assert rates is not None, "every card of the files is in the catalog"
    found = Estimator(run.job, rates).estimate(run.config, memory_limit_bytes=run.job.hardware.memory_bytes)
    launching = found.work.amounts[LAUNCH] * rates.per(LAUNCH) / found.step_seconds
    said = {"published": published, "predicted": found.tokens_per_second, "launching": launching}
    return {"card": run.job.hardware.name, **said, "ratio": found.tokens_per_second / published}


def speeds_judged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of speed, and whether they reach the targets."""
    found = errors_of([row["ratio"] - 1 for row in rows])
    tau = kendall([row["predicted"] for row in rows], [row["published"] for row in rows])
    cards = sorted({row["card"] for row in rows})
    return {
        **found,
        "median_ratio": {card: statistics.median(r["ratio"] for r in rows if r["card"] == card) for card in cards},
        "kendall_tau": tau,
        "reached": found["median_absolute_error"] <= SPEED_ERROR and tau >= TAU,
    }


def at_limit(run: Run) -> dict[str, Any]:
    """Predicted for the longest sequence that was found to fit, against the memory it was found to fit."""
    limit = int(run.fields["limit_bytes"])
    found = Estimator(run.job, None).estimate(run.config, memory_limit_bytes=run.job.hardware.memory_bytes)
    said = {"limit_bytes": limit, "predicted_bytes": found.device_bytes}
    return {**said, "error": found.device_bytes / limit - 1}


def limits_judged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the limits, and whether they reach the target."""
    found = errors_of([row["error"] for row in rows])
    return {**found, "reached": found["largest_absolute_error"] <= LIMIT_ERROR}


def main() -> int:
    """Print every row and the figures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "speeds", "limits"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    asked = parser.parse_args()
    of, judged, chosen = peak, peaks_judged, list(runs("measurements.csv"))
    if asked.what == "limits":
        of, judged, chosen = at_limit, limits_judged, list(runs("limits.csv"))
    if asked.what == "speeds":
        alone = [run for run in chosen if not run.ran_out and run.job.workload.devices == 1]
        of, judged, chosen = speed, speeds_judged, [*alone, *runs("speeds.csv")]
    rows = []
    for run in chosen:
        job = run.job.workload
        rows.append({"model": job.model, "config": run.fields["config"], "seq_len": job.seq_len, **of(run)})
        print(json.dumps(rows[-1]), flush=True)
    figures = {"recorded_at": datetime.now(UTC).isoformat(timespec="seconds"), **judged(rows)}
    print(json.dumps(figures, indent=1))
    if asked.json:
        stack = chosen[0].job.stack.to_json()
        asked.json.write_text(json.dumps({**figures, "stack": stack, "listed": rows}, indent=1) + "\n")
    return 0 if figures["reached"] else 1


if __name__ == "__main__":
    sys.exit(main())
