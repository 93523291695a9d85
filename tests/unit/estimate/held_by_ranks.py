"""A program of its own: trains configs on one or two gloo ranks and prints what each rank's engine holds, as JSON.

    python held_by_ranks.py CONFIG ...

For each config, per rank: its `Resident` between the last backward and the update, and after the update. Then the bytes
of its parameters before the first step, which with FSDP follows a reference loss; of the largest fp64 copy made in the
backward passes; of DeepSpeed's host buffers for gradients and weights in transit and for what is in files; and of the
roots that an update operation by operation makes. Configs without `sharding` have one rank, all others two.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from resident import local, resident
from tiny import STACK, job, model, rows

from autofit.techniques import Job, complete, parse
from autofit.training.step import TrainingStep

MODEL = model("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2, tie_word_embeddings=False)
IN_FILES = model(
    "llama", hidden_size=512, intermediate_size=2048, vocab_size=2048, num_hidden_layers=2, tie_word_embeddings=False
)
"""Where parameters are in files: DeepSpeed writes none for less than 1 MiB."""
SEQUENCES = 4
"""Per rank and optimizer step."""


def ranks_of(config: str) -> int:
    """The number of ranks that train `config`."""
    return 1 if complete(parse(config))["sharding"] == "none" else 2


def job_of(config: str) -> Job:
    """The job that `config` is for."""
    ranks, stack = ranks_of(config), replace(STACK, deepspeed="installed")
    return job(IN_FILES if "nvme" in config else MODEL, devices=ranks, global_batch=SEQUENCES * ranks, stack=stack)


def held(config: str, rank: int) -> list[dict[str, int]]:
    """What one rank holds before and after the first update, and what it holds in passing."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from autofit.training.build import build

    class Fp64(TorchDispatchMode):
        largest = 0
        roots = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._foreach_sqrt.default:
                self.roots = sum(local(root).nbytes for root in made)
            if isinstance(made, torch.Tensor) and made.dtype == torch.float64:
                self.largest = max(self.largest, made.untyped_storage().nbytes())
            return made

    torch.manual_seed(0)
    ranks = ranks_of(config)
    step = build(complete(parse(config)), job_of(config), torch.device("cpu"))
    if "fsdp" in config:
        step.reference_loss(rows(1, seed=rank))
    divided = sum(local(parameter).nbytes for parameter in step.module.parameters())
    tokens = rows(SEQUENCES, seed=rank)
    micro_batches = list(step.split(tokens))
    targets = SEQUENCES * (tokens.shape[1] - 1) * ranks
    with Fp64() as fp64:
        for index, (inputs, labels) in enumerate(micro_batches):
            step.micro_step(inputs, labels, targets, last=index == len(micro_batches) - 1)
    offload = complete(parse(config)).text("offload")
    before = asdict(resident(step, offload))
    with Fp64() as updating:
        step.update()
    zero = getattr(step.engine.root, "optimizer", None)
    out, back = (
        sum(buffer.nbytes for buffer in buffers)
        for buffers in (
            [b for b in [getattr(zero, "temp_grad_buffer_for_cpu_offload", None)] if b is not None],
            getattr(zero, "param_buffer_of_bit16_for_cpu_offload_groups", []),
        )
    )
    passing = {"fp64": fp64.largest, "host_out": out, "host_back": back, "roots": updating.roots}
    return [before, asdict(resident(step, offload)), {**passing, "locked": locked(step), "divided": divided}]


def locked(step: TrainingStep) -> int:
    """Bytes of DeepSpeed's buffers for what is in files; 0 if nothing is."""
    swappers = [swapper for p in step.module.parameters() if (swapper := getattr(p, "nvme_swapper", None)) is not None]
    if not swappers:
        return 0
    of_states = step.engine.root.optimizer.optimizer_swapper.swap_buffer_manager.all_buffers
    return sum(buffer.nbytes for buffer in (swappers[0].buffers, *of_states))


def on_group(configs: Sequence[str], ranks: int) -> list[list[list[dict[str, int]]]]:
    """What is held for each config, by each of so many ranks: a process each, forked from this one, which has already
    imported the libraries."""
    import torch

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    ends = []
    for rank in range(ranks):
        read, write = os.pipe()
        if os.fork() == 0:
            os.dup2(2, 1)  # DeepSpeed prints
            torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
            os.write(write, json.dumps([held(config, rank) for config in configs]).encode())
            os._exit(0)
        os.close(write)
        ends.append(read)
    answers = [json.loads(os.fdopen(end).read() or "null") for end in ends]
    return [list(of_config) for of_config in zip(*answers, strict=True)]


def main(configs: list[str]) -> None:
    """Answer for every config, in order, with one group of processes for each number of ranks."""
    import deepspeed.ops.adam  # noqa: F401
    import torch
    import torch.distributed.fsdp

    from autofit.training.build import build

    torch.set_num_threads(1)
    build(complete(parse("method=qlora")), job(MODEL), torch.device("cpu"))  # imports what ranks need
    gc.freeze()  # DeepSpeed collects garbage again and again: none of this is ever scanned
    found: dict[str, list[list[dict[str, int]]]] = {}
    for ranks in sorted(set(map(ranks_of, configs))):
        of_group = [config for config in configs if ranks_of(config) == ranks]
        found |= dict(zip(of_group, on_group(of_group, ranks), strict=True))
    print(json.dumps([found[config] for config in configs]))


if __name__ == "__main__":
    main(sys.argv[1:])
