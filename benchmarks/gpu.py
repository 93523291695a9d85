"""What is recorded on an NVIDIA GPU, in as many calls as it takes. It needs neither Ray nor a network.

    python benchmarks/gpu.py OUT_DIR WHAT [--seconds 420]

every-axis          24 configs each of three models with every value of every axis, beside their predictions
tables              a complete grid for two models, to replay searches over; then what a replay under the limits of
                    smaller cards could get wrong, measured under these
offload             full training of llama-3.1-8b with and without offload, beside predictions; 128 GiB of host memory
offload-large-host  the same in mixed precision: 192 GiB
all                 these, one after another, but for offload-large-host

Everything is in OUT_DIR as soon as it is measured, and a further call goes on from there, on any machine with the same
GPU. No trial begins after --seconds, so that a call ends within ten minutes. Exits with 75 while something is left,
with 1 if a target is missed, or with the status of what failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from autofit.core.lattice import Config
from autofit.core.outcome import Fits
from autofit.core.units import parse_bytes
from autofit.operations.recording.table_file import RecordedTable, read_table

ROOT = Path(__file__).resolve().parents[1]
AUTOFIT = [sys.executable, "-m", "autofit.cli.main"]
EIGHT = ("--model", "llama-3.1-8b", "--seq-len", "2048", "--global-batch", "16")
EVERY_AXIS = ("--space", "benchmarks/gpu_every_axis.yaml", "--seq-len", "2048", "--global-batch", "8", "--cover")
GRID = ("--space", "benchmarks/gpu_grid.yaml", "--seq-len", "2048", "--global-batch", "16")
TABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "every-axis": {  # another seed for each model, so that their configs differ
        f"every-axis-{model}": ("--model", model, *EVERY_AXIS, "--seed", str(seed), "--max-trials", "24")
        for seed, model in enumerate(("qwen2.5-0.5b", "llama-3.2-1b", "llama-3.1-8b"))
    },
    "tables": {f"grid-{model}": ("--model", model, *GRID) for model in ("llama-3.2-1b", "llama-3.1-8b")},
    "offload": {"offload_8b": (*EIGHT, "--space", "benchmarks/offload_8b.yaml")},
    "offload-large-host": {"offload_8b_large_host": (*EIGHT, "--space", "benchmarks/offload_8b_large_host.yaml")},
}
"""The tables of each recording, with the options of `autofit bench record`."""
LEAST = {"every-axis": "60", "offload": "1", "offload-large-host": "1"}
"""Those that are compared with their predictions, with the configs that must have trained."""
LIMITS = ("24GiB", "40GiB", "79GiB")


class Recording:
    """One call: where it writes, and when it must begin nothing more."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out = out
        self._ends = time.monotonic() + seconds

    @property
    def left(self) -> int:
        """Seconds."""
        return max(0, int(self._ends - time.monotonic()))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run in the checkout: a table names its space's file by the same path on every machine."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)

    def record(self, what: str) -> int:
        """The tables of a recording; then the comparison or the smaller limits, once all are done."""
        report = self.out / "doctor.json"
        # Anew where it compiles operations: OUT_DIR may have come to a machine that has none.
        if self.left and (what in LEAST or not report.exists()):
            build = ["--build-ops"] if what in LEAST else []
            report.write_text(self.run(*AUTOFIT, "doctor", "--no-ray", *build, "--json").stdout)
        unfinished = False
        for name, options in TABLES[what].items():
            if not self.left:
                return os.EX_TEMPFAIL
            command = (*AUTOFIT, "bench", "record", "--out", f"{self.out}/{name}.jsonl", *options, "--in-place")
            done = self.run(*command, "--time-budget", f"{self.left}s", "--json")
            if done.returncode:
                return done.returncode
            unfinished = unfinished or json.loads(done.stdout)["left"] > 0
        if unfinished or not self.left:
            return os.EX_TEMPFAIL
        if what not in LEAST:
            return max(self.smaller_limits(name) for name in TABLES[what])
        program, found = str(ROOT / "benchmarks" / "estimate_trials.py"), str(self.out / f"{what}.estimates.json")
        tables = (f"{self.out}/{name}.jsonl" for name in TABLES[what])
        judged = self.run(sys.executable, program, *tables, "--least", LEAST[what], "--json", found)
        print(judged.stdout)
        return judged.returncode

    def smaller_limits(self, name: str) -> int:
        """Measure what a replay of the table under smaller limits could get wrong. 1 if a config does not fit that fits
        by the table."""
        table, file = read_table(self.out / f"{name}.jsonl", whole=True), self.out / f"limits-{name}.jsonl"
        known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        of = table.workload
        asked = ("--model", of.model, "--seq-len", str(of.seq_len), "--global-batch", str(of.global_batch), "--json")
        limits = [limit for limit in LIMITS if parse_bytes(limit) < table.memory_limit_bytes]
        cases = [(limit, *case) for limit in limits for case in doubtful(table, parse_bytes(limit)).items()]
        for limit, config, fits in cases:
            case = {"config": str(config), "limit": limit, "fits_by_table": fits}
            if any(case.items() <= earlier.items() for earlier in known):
                continue
            if not self.left:
                return os.EX_TEMPFAIL
            trial = (*AUTOFIT, "trial", *asked, "--config", str(config), "--memory-limit", limit)
            done = self.run(*trial, "--store", str(self.out / "limits.db"))
            known.append({**case, "trial": json.loads(done.stdout)})
            with file.open("a") as lines:
                lines.write(json.dumps(known[-1]) + "\n")
        return 1 if any(case["fits_by_table"] and case["trial"]["outcome"] == "out_of_memory" for case in known) else 0


def doubtful(table: RecordedTable, limit: int) -> dict[Config, bool]:
    """The configs of which a replay under `limit` could be wrong, and whether they fit by their size without a limit.

    A step that never reaches a limit runs as it did without. What exceeds one may still train, because the allocator
    then frees what it has cached: the four lightest of these, and of those that fit the fastest, the three heaviest and
    the one that took most while it was built."""
    known = {trial.config: trial.outcome.measurement for trial in table.trials if isinstance(trial.outcome, Fits)}
    fitting = [config for config, m in known.items() if m.device_bytes <= limit]
    cached = [
        c for c, m in known.items() if 0 < m.device_bytes - limit <= m.peak_reserved_bytes - m.peak_allocated_bytes
    ]
    chosen = [
        *sorted(fitting, key=lambda config: -known[config].tokens_per_second)[:1],
        *sorted(fitting, key=lambda config: -known[config].device_bytes)[:3],
        *sorted(fitting, key=lambda config: -known[config].setup_peak_bytes)[:1],
        *sorted(cached, key=lambda config: known[config].device_bytes)[:4],
    ]
    return {config: known[config].device_bytes <= limit for config in chosen}


def main() -> int:
    """Record; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("what", choices=(*TABLES, "all"))
    parser.add_argument("--seconds", type=float, default=420)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    call = Recording(asked.out.resolve(), asked.seconds)
    if asked.what != "all":
        return call.record(asked.what)
    found = {what: call.record(what) for what in TABLES if what != "offload-large-host"}
    print(json.dumps(found))
    return os.EX_TEMPFAIL if os.EX_TEMPFAIL in found.values() else max(found.values())


if __name__ == "__main__":
    sys.exit(main())
