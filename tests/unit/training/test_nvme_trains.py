"""Parameters and states in files, where libaio and DeepSpeed's operation for it are there: they train the same."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autofit.techniques.axes.sharding import NVME_VARIABLE
from autofit.training.build import build
from autofit.training.prerequisites import nvme
from tests.group import Case, on_ranks
from tests.resident import Resident, resident
from tests.tiny import CPU, STACK, config, job, model, rows

WIDE = model("llama", hidden_size=512, intermediate_size=2048, vocab_size=2048, num_hidden_layers=2)
"""Some of its matrices are of more than the 1 MiB below which DeepSpeed writes no file, also as shared by two ranks."""
WITH_DEEPSPEED = replace(STACK, deepspeed="0.19.8")
FULL: Case = {"precision": "fp32", "micro_batch": 2, "checkpointing": "full"}
LORA: Case = {"precision": "fp32", "micro_batch": 2, "method": "lora", "rank": 8}
MIXED: Case = {"precision": "bf16-mixed", "micro_batch": 1}
STEPS = 5


def train(case: Case) -> tuple[list[float], Resident]:
    """Losses of five steps on this rank's part of the batch, and what the rank holds afterwards."""
    values = {k: v for k, v in case.items() if k != "folder"}
    os.environ[NVME_VARIABLE] = case.get("folder", "")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    step = build(config(**values), job(WIDE, devices=ranks, stack=WITH_DEEPSPEED), CPU)
    tokens = rows().chunk(ranks)[dist.get_rank() if ranks > 1 else 0]
    return [float(step.run(tokens)) for _ in range(STEPS)], resident(step, case.get("offload", "none"))


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_files")
@pytest.mark.parametrize(("ranks", "sharding"), [(1, "none"), (2, "zero3")])
def test_what_is_in_files_trains_as_one_process_does(ranks: int, sharding: str, tmp_path: Path) -> None:
    away = {"offload": "nvme", "sharding": sharding, "micro_batch": 1}
    cases = [{**case, **away, "folder": str(tmp_path / str(n))} for n, case in enumerate((FULL, LORA))]
    for case in cases:
        Path(case["folder"]).mkdir()
    for plain, case, answers in zip((FULL, LORA), cases, on_ranks(ranks, train, cases), strict=True):
        expected, _ = train(plain)
        losses = [sum(shares) for shares in zip(*(losses for losses, _ in answers), strict=True)]
        assert losses == pytest.approx(expected, rel=1e-5)
        needed = nvme.needed_bytes(config(**{k: v for k, v in case.items() if k != "folder"}), job(WIDE))
        written = sum(path.stat().st_size for path in Path(case["folder"]).rglob("*") if path.is_file())
        # What is smaller than 1 MiB has no file: a part of the layers' matrices, and adapters.
        assert 0.7 * needed < written <= needed
        held = answers[0][1]
        assert held.optimizer == 0
        if plain is FULL:
            assert held.host_optimizer == 0, "states are in files"


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_files")
@pytest.mark.parametrize(("ranks", "sharding"), [(1, "none"), (2, "zero3")])
def test_16_bit_weights_train_in_files_as_in_memory(ranks: int, sharding: str, tmp_path: Path) -> None:
    cases = [{**MIXED, "sharding": sharding, "offload": away, "folder": str(tmp_path)} for away in ("params", "nvme")]
    in_memory, in_files = on_ranks(ranks, train, cases)
    for (expected, held), (losses, beside) in zip(in_memory, in_files, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert losses[-1] < losses[0]
        assert (held.host_optimizer > 0, beside.host_optimizer) == (True, 0)
