"""What a search, launches, estimates and a server's answers take. Run nothing else on the machine meanwhile.

    python benchmarks/timings.py search [--job JOB] [--out FILE]
    python benchmarks/timings.py launches | estimator [--model NAME] [--out FILE]
    python benchmarks/timings.py service [--trials N] [--contexts N] [--rate N] [--seconds N] [--store URL] [--out FILE]

search     a search as a user runs it, the whole command, in a fresh store. Job `main` is `make search`, `lora` the same
           with that method, `plain` has no options. ONEDNN_MAX_CPU_ISA and the like make another processor of it
launches   host time per operation of a tiny decoder, as the probe measures it, of the fastest of 12 micro-steps; on
           an emulated card it is the host's alone (tests/emulated_card/cards.py)
estimator  one config, after imports, and the lattice of `single-gpu`, the whole command: new, and known
service    recommendations and frontiers as a client on the server's machine waits for them, while ten trials a second
           are stored: 200 where the answer has changed since it was last asked for, 304 where it has not. The server's
           memory, too. The store is filled with drawn trials first, as far as the one that --store names has too few
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from http.client import HTTPConnection
from itertools import cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import torch

from autofit.core.outcome import Fits, OutOfMemory, Trial
from autofit.core.workload import Workload
from autofit.operations import Estimation, WorkloadOptions
from autofit.operations.recording.table_file import read_table
from autofit.planning.lattices import load_space
from autofit.probe.launches import TINY, per_operation
from autofit.store import Store
from autofit.techniques import AXES, Job, complete, parse
from autofit.trial.machine.detection import detect

WORKLOAD = ("--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "4", "--memory-limit", "2GiB")
JOBS = {"main": WORKLOAD, "lora": (*WORKLOAD, "--method", "lora"), "plain": WORKLOAD[:2]}
ESTIMATED = (
    "method=full,precision=bf16-mixed,micro_batch=4,checkpointing=full",
    "method=full,precision=bf16,micro_batch=4,checkpointing=none,optimizer=adamw-8bit,loss=chunked",
    "method=lora,rank=16,micro_batch=4,checkpointing=none",
    "method=qlora,rank=16,micro_batch=4,checkpointing=selective,loss=fused",
)
LIBRARIES = ("torch._dynamo", "transformers.models.llama.modeling_llama", "peft", "bitsandbytes")
"""Libraries that an estimate would otherwise import while it runs."""


def search(asked: argparse.Namespace) -> dict[str, Any]:
    """One search in a fresh store."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "autofit", "search", *JOBS[asked.job], "--json", "--store", f"{folder}/store.db"]
        started, began = time.monotonic(), datetime.now(UTC)
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        seconds = round(time.monotonic() - started, 1)
        with Store.open(f"{folder}/store.db") as store:
            trials = store.trials()
    first = [(datetime.fromisoformat(t.recorded_at) - began).total_seconds() - t.seconds for t in trials[:1]]
    return {
        "job": asked.job,
        "seconds": seconds,
        "first_trial_after": round(first[0], 1) if first else None,
        "trials": [{"config": t.config.to_json(), "outcome": t.outcome.kind, "seconds": t.seconds} for t in trials],
        "answer": done.stderr[-1000:] if done.returncode else json.loads(done.stdout),
    }


LAUNCHING = {
    "full": ("none", "full"),
    "lora": ("none", "full", "offload", "selective"),
    "qlora": ("none", "full", "offload", "selective"),
}
"""Of `launches`: the methods, and how each is checkpointed."""


def wall(run: Callable[[], None]) -> float:
    """Seconds of a call, by this process's clock: an emulated card's events have another."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def launches(asked: argparse.Namespace) -> dict[str, Any]:
    """Microseconds per operation, and their ratio to full training without checkpointing."""
    hardware, stack = detect("cuda")
    workload = Workload(model=TINY.name, model_digest=TINY.digest, seq_len=8, global_batch=1)
    job, found = Job(model=TINY, workload=workload, hardware=hardware, stack=stack), {}
    for method, values in LAUNCHING.items():
        for value in values:
            config = complete({"method": method, "precision": "bf16", "micro_batch": 1, "checkpointing": value})
            found[f"{method}, checkpointing={value}"] = 1e6 * per_operation(job, config, torch.device("cuda"), wall)
    plain = found["full, checkpointing=none"]
    return {"microseconds": found, "ratios": {name: taken / plain for name, taken in found.items()}}


def estimator(asked: argparse.Namespace) -> dict[str, Any]:
    """Each config in a process of its own, and the lattice."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as alone:
        singles = list(alone.map(partial(estimate_seconds, asked.model), ESTIMATED))
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: lattice_seconds(asked.model, folder) for name in ("cold", "warm")}
    return {"model": asked.model, "singles": singles, "lattice": runs}


def estimate_seconds(model: str, config: str) -> dict[str, Any]:
    """Of one config in this process, after imports: new, and again once the store knows it."""
    for library in LIBRARIES:
        importlib.import_module(library)
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOFIT_CACHE"] = folder  # the traces of earlier runs would make it a known one
        for _ in range(2):
            started, workload = time.monotonic(), WorkloadOptions(model=model)
            Estimation.of(workload, complete(parse(config)), hardware="h100-80g", store=f"{folder}/store.db").estimate()
            taken.append(round(time.monotonic() - started, 4))
    return {"config": config, "new_seconds": taken[0], "known_seconds": taken[1]}


def lattice_seconds(model: str, folder: str) -> dict[str, Any]:
    """Of predicting the default space, the whole command, with what the folder keeps of an earlier one."""
    command = f"-m autofit search --dry-run --json --store {folder}/store.db --model {model} --hardware h100-80g"
    started, kept = time.monotonic(), {**os.environ, "AUTOFIT_CACHE": folder}
    said = subprocess.run([sys.executable, *command.split()], check=True, capture_output=True, env=kept).stdout
    return {"configs": json.loads(said)["configs"], "seconds": round(time.monotonic() - started, 2)}


TABLE = Path(__file__).parent / "recorded" / "cpu-2c-smollm2-135m.jsonl"
PATHS = ("/v1/recommendation", "/v1/frontier")
CONNECTIONS = 8
"""Requests of `service` that may be under way at once."""


def service(asked: argparse.Namespace) -> dict[str, Any]:
    """A server over a filled store, asked about each context in turn, with the tag of its last answer."""
    options = {"model": "smollm2-135m", "seq_len": 128, "global_batch": 4}
    targets = [f"{path}?{urlencode({**options, 'seed': n})}" for n in range(asked.contexts) for path in PATHS]
    drawn = drawn_trials([WorkloadOptions(**options, seed=seed) for seed in range(asked.contexts)])
    with tempfile.TemporaryDirectory() as folder, Store.open(asked.store or f"{folder}/store.db") as store:
        there = sum(1 for _ in islice(drawn, store.count()))  # by an earlier run, which drew the same
        store.add_new(islice(drawn, max(asked.trials - there, 0)))
        with (
            running_server(store.url) as (server, port),
            closing(Client(port)) as client,
            ThreadPoolExecutor(CONNECTIONS) as threads,
            storing(store, drawn),
        ):
            for target in targets:
                client.ask(target, due=time.monotonic())
            began, memory, asking = time.monotonic(), [], []
            for number, target in zip(range(asked.rate * asked.seconds), cycle(targets), strict=False):
                due = began + number / asked.rate
                time.sleep(max(0.0, due - time.monotonic()))
                asking.append(threads.submit(client.ask, target, due=due))
                if number % (asked.rate * asked.seconds // 10) == 0:
                    pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
                    memory.append(pages * os.sysconf("SC_PAGE_SIZE") >> 20)
            taken = defaultdict[str, list[float]](list)
            for name, seconds in (answer.result() for answer in asking):
                taken[name].append(seconds)
        return {
            **{name: getattr(asked, name) for name in ("contexts", "rate", "seconds")},
            "store": "postgresql" if store.folder is None else "sqlite",
            "trials": store.count(),
            "answers": {name: summed_up(seconds) for name, seconds in sorted(taken.items())},
            "server_mib": memory,
        }


def summed_up(seconds: Sequence[float]) -> dict[str, float]:
    """How many there are, with their median and 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    return {"count": len(ordered)} | {f"p{p}": round(1e3 * ordered[len(ordered) * p // 100], 2) for p in (50, 99)}


@contextmanager
def storing(store: Store, trials: Iterator[Trial]) -> Iterator[None]:
    """Stores one trial after another meanwhile, ten a second."""
    over = threading.Event()

    def store_them() -> None:
        while not over.wait(0.1):
            store.add(next(trials))

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(store_them)
        try:
            yield
        finally:
            over.set()
            done.result()


def drawn_trials(workloads: Sequence[WorkloadOptions]) -> Iterator[Trial]:
    """Trials of each workload in turn, without end: configs of `single-gpu` with drawn memory and speed, a fifth of
    them out of memory, all else as in a recorded trial."""
    source, table = random.Random(0), read_table(TABLE)
    recorded = next(trial for trial in table.trials if trial.measurement is not None)
    assert recorded.measurement is not None
    configs = list(load_space("single-gpu").configs(AXES, batch=4))
    resolved = [workload.job((table.hardware, table.stack)).workload for workload in workloads]
    for number, workload in enumerate(cycle(resolved)):
        speed, size = source.lognormvariate(8.0, 0.5), int(source.lognormvariate(23.0, 0.5))
        fits = Fits(measurement=replace(recorded.measurement, tokens_per_second=speed, device_bytes=size))
        ran_out = OutOfMemory(reason="tried to allocate 2.00 GiB", phase="backward")
        yield replace(
            recorded,
            config=source.choice(configs),
            workload=workload,
            outcome=ran_out if source.random() < 0.2 else fits,
            recorded_at=datetime.fromtimestamp(number, UTC).isoformat(),
        )


@contextmanager
def running_server(store: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server without a runner, and its port."""
    command = [sys.executable, "-m", "autofit", "serve", "--no-runner", "--port", "0", "--store", store]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            yield process, int(process.stderr.readline().split("127.0.0.1:")[1].partition(",")[0])
        finally:
            process.terminate()


class Client:
    """Asks a server over connections that stay open."""

    def __init__(self, port: int) -> None:
        self._connections = [HTTPConnection("127.0.0.1", port) for _ in range(CONNECTIONS)]
        self._idle, self._tags = list(self._connections), dict[str, str]()

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def ask(self, target: str, *, due: float) -> tuple[str, float]:
        """The path with the status of its answer, and the seconds from when it was due until the whole of it was there:
        a server that cannot keep up keeps requests waiting."""
        connection = self._idle.pop()
        connection.request("GET", target, headers={"If-None-Match": self._tags.get(target, "")})
        answer = connection.getresponse()
        answer.read()
        seconds = time.monotonic() - due
        self._idle.append(connection)
        assert answer.status in (200, 304), (target, answer.status)
        self._tags[target] = answer.headers["ETag"]
        return f"{target.partition('?')[0]} {answer.status}", seconds


def main() -> None:
    """Measure, print, write."""
    programs = {"search": search, "launches": launches, "estimator": estimator, "service": service}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=programs)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", default="main", choices=JOBS, help="of `search`")
    parser.add_argument("--model", default="llama-3.1-8b", help="of `estimator`")
    of_service = {"trials": 1_000_000, "contexts": 200, "rate": 200, "seconds": 600}
    for name, default in of_service.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="of `service`")
    parser.add_argument("--store", help="of `service`")
    asked = parser.parse_args()
    hardware, stack = detect()
    about = {"recorded_at": datetime.now(UTC).isoformat(timespec="seconds"), "hardware": hardware.name}
    text = json.dumps({**about, "stack": stack.to_json(), **programs[asked.what](asked)}, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
