"""How fast bytes go between ranks: a reduction and a gather among as many processes as a trial has.

    python -m autofit.probe.ranks KIND RENDEZVOUS [LISTENER]

is one of them; they meet as those of a trial do (`training.distributed.ranks`), and each prints what it has measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from socket import socket

import torch

from autofit.core.device.probe import collective
from autofit.core.errors import lines_of
from autofit.core.units import MIB
from autofit.probe.bench import Bench
from autofit.training.distributed.ranks import join
from autofit.training.distributed.rendezvous import LOOPBACK, Rendezvous, listening
from autofit.trial.process.child_process import die_with_parent

SENT_BYTES = 16 * MIB, 256 * MIB
"""The size of the tensor that is reduced, and of all that is gathered, on processors and on accelerators."""
MOST_SECONDS = 120.0
"""What all of it may take. Most of it is loading torch."""


def measure(bench: Bench, environments: Sequence[Mapping[str, str]]) -> Iterator[dict[str, float]]:
    """Bytes per second that each rank sends to others on this machine, as figures; each rank's environment shows it one
    device, its own. Raises `RuntimeError` if a rank fails."""
    ranks = len(environments)
    with listening(LOOPBACK) as listener:
        host, port = listener.getsockname()
        places = [Rendezvous(rank=rank, ranks=ranks, ranks_here=ranks, host=host, port=port) for rank in range(ranks)]
        for measured in run(bench.device.type, dict(zip(places, environments, strict=True)), listener):
            yield {collective(name): rate for name, rate in measured.items()}


def run(
    kind: str, ranks: Mapping[Rendezvous, Mapping[str, str]], listener: socket | None
) -> Iterator[dict[str, float]]:
    """Have these ranks, each with its environment, measure among all of their group; `listener` listens where they
    meet, if the first of the group is one of them. Nothing while they do, then the `rates` of the first of these.
    Raises `RuntimeError` if one of them fails."""
    with ExitStack() as opened:
        logs = [opened.enter_context(tempfile.TemporaryFile("w+")) for _ in ranks]
        processes = []
        for (place, environment), log in zip(ranks.items(), logs, strict=True):
            listens = [listener.fileno()] if listener is not None and place.rank == 0 else []
            words = ["-m", "autofit.probe.ranks", kind, json.dumps(place.to_json()), *map(str, listens)]
            process = subprocess.Popen(
                [sys.executable, *words],
                env=dict(environment),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                pass_fds=listens,
            )
            processes.append(opened.enter_context(process))
            opened.callback(process.kill)
        until = time.monotonic() + MOST_SECONDS
        while None in (codes := [process.poll() for process in processes]) and time.monotonic() < until:
            if any(codes):
                break  # the others would wait for it
            time.sleep(0.1)
            yield {}
        for code, place, log in sorted(zip(codes, ranks, logs, strict=True), key=lambda ended: ended[0] is None):
            if code != 0:
                log.seek(0)
                message = lines_of(log.read(), f"no end within {MOST_SECONDS:.0f} s")[-1]
                raise RuntimeError(f"rank {place.rank}: {message[:200]}")
        output = processes[0].communicate()[0]
    yield json.loads(output)


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


def main(kind: str, rendezvous: str, listener: str | None = None) -> None:
    """Meet the others, measure, and print it as JSON."""
    die_with_parent()
    place = Rendezvous.from_json(json.loads(rendezvous))
    torch.set_num_threads(max(1, torch.get_num_threads() // place.ranks_here))
    group = join(kind, place, timeout_seconds=MOST_SECONDS, listener=None if listener is None else int(listener))
    print(json.dumps(rates(place.rank, place.ranks, torch.device(kind))), flush=True)
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
