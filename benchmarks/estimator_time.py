"""How long predictions take, and how much memory: one config and a whole lattice, each new and known.

    python benchmarks/estimator_time.py [--model NAME ...] [--hardware h100-80g] [--json FILE]

Each figure is from a process of its own. A single config is timed after the imports, in the process that made them; the
lattice is `autofit search --dry-run` with a store of its own, run twice, imports included. Peak memory is that of all
the command's processes together, with shared memory counted once, sampled five times a second. Needs psutil. Prints the
targets beside the results, and exits with 0 only if all are reached; takes about five minutes for both models.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from autofit.operations import Estimation, WorkloadOptions
from autofit.techniques import complete, parse
from autofit.trial.site import detect

MIB = 1024**2
LOOKS_PER_SECOND = 5
LIBRARIES = ("torch._dynamo", "transformers.models.llama.modeling_llama", "peft", "bitsandbytes")
"""Libraries that an estimate would otherwise import while it runs."""
CONFIGS = (
    "method=full,precision=bf16-mixed,micro_batch=4,checkpointing=full",
    "method=full,precision=bf16,micro_batch=4,checkpointing=none,optimizer=adamw-8bit,loss=chunked",
    "method=lora,rank=16,micro_batch=4,checkpointing=none",
    "method=qlora,rank=16,micro_batch=4,checkpointing=selective,loss=fused",
)
ASKED = {"new_seconds": 2.0, "known_seconds": 0.02, "cold_seconds": 60.0, "warm_seconds": 2.0, "peak_mib": 2048.0}
"""Upper limits on 2 cores for an 8B model."""
LARGER = {"llama-3.1-70b": 2.0}
"""By model, how many times as long it may take; peak memory may be no larger."""


def one_config(model: str, hardware: str, config: str) -> dict[str, Any]:
    """Seconds for one config after imports, in this process: new, and again once the store knows it."""
    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder:

        def estimated() -> tuple[float, float]:
            started, cpu = time.monotonic(), time.process_time()
            asked = Estimation.of(
                WorkloadOptions(model=model), complete(parse(config)), hardware=hardware, store=f"{folder}/store.db"
            )
            asked.estimate()
            return time.monotonic() - started, time.process_time() - cpu

        new, known = estimated(), estimated()
    return {
        "config": config,
        "new_seconds": round(new[0], 2),
        "new_cpu_seconds": round(new[1], 2),
        "known_seconds": round(known[0], 4),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def alone(model: str, hardware: str, config: str) -> dict[str, Any]:
    """`one_config` in a process of its own."""
    asked = ["--one", config, "--model", model, "--hardware", hardware]
    done = subprocess.run([sys.executable, __file__, *asked], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def lattice(model: str, hardware: str, store: Path) -> dict[str, Any]:
    """Seconds, CPU seconds and peak memory of predicting the default space."""
    command = [sys.executable, "-m", "autofit.cli.main", "search", "--dry-run", "--json", "--store", str(store)]
    started = time.monotonic()
    process = subprocess.Popen(
        [*command, "--model", model, "--hardware", hardware], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    seen = Seen()
    looking = threading.Thread(target=seen.follow, args=(psutil.Process(process.pid),))
    looking.start()
    answer = json.loads(process.communicate()[0])
    took = time.monotonic() - started
    looking.join()
    return {
        "configs": answer["configs"],
        "estimated": answer["configs"] - answer["ruled_out_by_floor"],
        "seconds": round(took, 2),
        "seconds_after_imports": round(answer["seconds"], 2),
        "cpu_seconds": round(sum(seen.cpu_seconds.values()), 1),
        "peak_mib": round(seen.peak_bytes / MIB),
    }


class Seen:
    """What sampling a process and its children has shown."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        """The most that all of them held at once."""
        self.cpu_seconds: dict[int, float] = {}
        """By process id, up to when the process was last seen."""

    def follow(self, process: psutil.Process) -> None:
        """Sample until the process ends."""
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            together = 0
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in (process, *process.children(recursive=True)):
                    with contextlib.suppress(psutil.Error, FileNotFoundError):  # just ended
                        together += one.memory_full_info().pss
                        times = one.cpu_times()
                        self.cpu_seconds[one.pid] = times.user + times.system
            self.peak_bytes = max(self.peak_bytes, together)
            time.sleep(1 / LOOKS_PER_SECOND)


def measured(model: str, hardware: str) -> dict[str, Any]:
    """All figures of one model."""
    singles = [alone(model, hardware, config) for config in CONFIGS]
    for single in singles:
        print(f"{model}: {json.dumps(single)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: lattice(model, hardware, Path(folder) / "store.db") for name in ("cold", "warm")}
    for name, run in runs.items():
        print(f"{model}, lattice, {name}: {json.dumps(run)}", flush=True)
    worst = {
        "new_seconds": max(single["new_seconds"] for single in singles),
        "known_seconds": max(single["known_seconds"] for single in singles),
        "cold_seconds": runs["cold"]["seconds"],
        "warm_seconds": runs["warm"]["seconds"],
        "peak_mib": max(found["peak_mib"] for found in (*singles, *runs.values())),
    }
    return {"model": model, "singles": singles, "lattice": runs, "worst": worst}


def asked(model: str) -> dict[str, float]:
    """The upper limits for this model."""
    return {name: most * (LARGER.get(model, 1.0) if name.endswith("_seconds") else 1.0) for name, most in ASKED.items()}


def judged(found: list[dict[str, Any]]) -> list[str]:
    """What is over its limit, of the figures of each model, in words."""
    return [
        f"{of['model']}: {name} is {of['worst'][name]:g}, at most {most:g} is asked"
        for of in found
        for name, most in asked(of["model"]).items()
        if of["worst"][name] > most
    ]


def main() -> int:
    """Time every model, and print the targets beside the results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append")
    parser.add_argument("--hardware", default="h100-80g")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = arguments.model or ["llama-3.1-8b", "llama-3.1-70b"]
    if arguments.one:
        print(json.dumps(one_config(models[0], arguments.hardware, arguments.one)))
        return 0
    found = [measured(model, arguments.hardware) for model in models]
    for name in ASKED:
        figures = (f"{f['model']} {f['worst'][name]:g} (at most {asked(f['model'])[name]:g})" for f in found)
        print(f"{name:>14}: {', '.join(figures)}")
    missed = judged(found)
    print("\n".join(missed) or "all targets are reached")
    here, stack = detect()
    report = {
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": here.name,
        "stack": stack.to_json(),
        "hardware": arguments.hardware,
        "models": found,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
