"""Training steps over several processes, each a rank on the CPU, for tests to compare with one process."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Case = dict[str, Any]
Function = Callable[[Case], Any]


def on_ranks(ranks: int, function: Function, cases: Sequence[Case]) -> list[list[Any]]:
    """What `function`, defined at the top of a module, returns for each of `cases` on each rank: answers[case][rank].

    One group of processes runs all cases, one after another. Raises AssertionError with the traceback of a rank that
    fails.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.heavy"])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        children = [
            context.Process(target=_rank, args=(rank, ranks, folder, function, list(cases), pipes[rank][1]))
            for rank in range(ranks)
        ]
        for child in children:
            child.start()
        try:
            answers = []
            for (ours, _), child in zip(pipes, children, strict=True):
                while not ours.poll(1.0):
                    assert child.is_alive() or ours.poll(), "a rank died without an answer"
                answers.append(ours.recv())
        finally:
            for child in children:
                child.join(5)
                if child.is_alive():
                    child.kill()
                    child.join()
    for answer in answers:
        assert not isinstance(answer, str), answer
    return [[of_rank[number] for of_rank in answers] for number in range(len(cases))]


def _rank(rank: int, ranks: int, folder: str, function: Function, cases: list[Case], pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # the server may have been started by another, before it was set
    os.dup2(os.open(Path(folder) / f"stdout-{rank}", os.O_WRONLY | os.O_CREAT), 1)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        answer: Any = [function(case) for case in cases]
        printed = (Path(folder) / f"stdout-{rank}").read_text()
        pipe.send(answer if not printed else f"a rank wrote to standard output: {printed[:500]}")
    except BaseException:
        pipe.send(traceback.format_exc())
        os._exit(1)  # the others may wait for this rank in a collective
    dist.destroy_process_group()
