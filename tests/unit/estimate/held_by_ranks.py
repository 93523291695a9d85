"""A program of its own: trains configs on two gloo ranks and prints what each rank's engine holds, as JSON.

    python held_by_ranks.py CONFIG ...

For each config, per rank: the engine's `Resident` between the last backward and the update, and after the update; then
the bytes of the largest fp64 copy made in the backward passes, and of DeepSpeed's host buffer for gradients in transit.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tiny import STACK, job, model, rows

from autofit.techniques import Job, complete, parse

RANKS = 2
MODEL = model("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2, tie_word_embeddings=False)
SEQUENCES = 4
"""Per rank and optimizer step."""


def shared_job() -> Job:
    """The job that the ranks train."""
    stack = replace(STACK, deepspeed="installed")
    return job(MODEL, devices=RANKS, global_batch=SEQUENCES * RANKS, stack=stack)


def held(config: str, rank: int) -> list[dict[str, int]]:
    """What one rank holds before and after the first update, and what it holds in passing."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from autofit.training.build import build

    class Fp64(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.dtype == torch.float64:
                self.largest = max(self.largest, made.untyped_storage().nbytes())
            return made

    torch.manual_seed(0)
    step = build(complete(parse(config)), shared_job(), torch.device("cpu"))
    tokens = rows(SEQUENCES, seed=rank)
    micro_batches = list(step.split(tokens))
    targets = SEQUENCES * (tokens.shape[1] - 1) * RANKS
    with Fp64() as fp64:
        for index, (inputs, labels) in enumerate(micro_batches):
            step.micro_step(inputs, labels, targets, last=index == len(micro_batches) - 1)
    before = asdict(step.engine.resident())
    step.update()
    on_the_way = getattr(getattr(step.engine.root, "optimizer", None), "temp_grad_buffer_for_cpu_offload", None)
    passing = {"fp64": fp64.largest, "on_the_way": 0 if on_the_way is None else on_the_way.nbytes}
    return [before, asdict(step.engine.resident()), passing]


def main(configs: list[str]) -> None:
    """Fork one process per rank from this one, which has already imported the libraries."""
    import deepspeed.ops.adam  # noqa: F401
    import torch
    import torch.distributed.fsdp

    from autofit.training.build import build

    torch.set_num_threads(1)
    build(complete(parse("method=lora")), job(MODEL), torch.device("cpu"))  # imports what ranks need
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    ends = []
    for rank in range(RANKS):
        read, write = os.pipe()
        if os.fork() == 0:
            os.dup2(2, 1)  # DeepSpeed prints
            torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
            answer: list[Any] = [held(config, rank) for config in configs]
            os.write(write, json.dumps(answer).encode())
            os._exit(0)
        os.close(write)
        ends.append(read)
    print(json.dumps([json.loads(os.fdopen(end).read() or "null") for end in ends]))


if __name__ == "__main__":
    main(sys.argv[1:])
