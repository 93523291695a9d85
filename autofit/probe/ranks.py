"""How fast bytes go between ranks: a reduction and a gather among as many processes as a trial has.

    python -m autofit.probe.ranks FOLDER RANK RANKS KIND

is one of them; they meet through a file in the folder, and the first prints what it has measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from autofit.core.device.probe import collective
from autofit.core.errors import lines_of
from autofit.core.units import MIB
from autofit.probe.bench import Bench

SENT_BYTES = 16 * MIB, 256 * MIB
"""The size of the tensor that is reduced, and of all that is gathered, on processors and on accelerators."""


def measure(bench: Bench, environments: Sequence[Mapping[str, str]]) -> Iterator[dict[str, float]]:
    """Bytes per second that each rank sends to others, as figures; each rank's environment shows it one device, its
    own. Raises `RuntimeError` if a rank fails."""
    ranks = len(environments)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        logs = [opened.enter_context((Path(folder) / f"{rank}.log").open("w+")) for rank in range(ranks)]
        words = [sys.executable, "-m", "autofit.probe.ranks", folder]
        processes = [
            opened.enter_context(
                subprocess.Popen(
                    [*words, str(rank), str(ranks), bench.device.type],
                    env=dict(environment),
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )
            )
            for rank, (log, environment) in enumerate(zip(logs, environments, strict=True))
        ]
        for process in processes:
            opened.callback(process.kill)
        # Most of it is loading torch.
        until = time.monotonic() + 120.0
        while any(process.poll() is None for process in processes) and time.monotonic() < until:
            time.sleep(0.1)
            yield {}
        for rank, (process, log) in enumerate(zip(processes, logs, strict=True)):
            if process.poll() != 0:
                log.seek(0)
                message = lines_of(log.read(), "no end within 120 s")[-1]
                raise RuntimeError(f"rank {rank}: {message[:200]}")
        output = processes[0].communicate()[0]
    yield {collective(name): rate for name, rate in json.loads(output).items()}


def rates(rank: int, ranks: int, device: torch.device) -> dict[str, float]:
    """What this rank has measured, together with the others: bytes per second that it sends, by collective."""
    from torch import distributed

    size = SENT_BYTES[device.type != "cpu"] // 4 // ranks * ranks
    whole = torch.ones(size, device=device)
    parts = list(torch.empty_like(whole).chunk(ranks))
    share = (ranks - 1) / ranks
    # A ring sends each share once to gather, and twice to reduce (Patarasuk and Yuan 2009).
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "reduction": (lambda: distributed.all_reduce(whole), 2.0 * share * whole.nbytes),
        "gather": (lambda: distributed.all_gather(parts, whole[: size // ranks]), share * whole.nbytes),
    }
    bench = Bench(device)
    # The ranks connect in the first call of each.
    return {n: sent / min([bench.timed(call) for _ in range(6)][1:]) for n, (call, sent) in calls.items()}


def main(folder: str, rank: int, ranks: int, kind: str) -> None:
    """Meet the others, measure, and print it as JSON if this is the first rank."""
    from torch import distributed

    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    backend = "nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{folder}/met", rank=rank, world_size=ranks)
    measured = rates(rank, ranks, torch.device(kind))
    if rank == 0:
        print(json.dumps(measured), flush=True)
    with suppress(RuntimeError):
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
