"""Several ranks, and offloading: they train what one process trains."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from unit.techniques.live_bytes import LiveBytes

from autofit.core.lattice import Config
from autofit.techniques import unsupported
from autofit.techniques.axes.sharding import NVME_VARIABLE, uses_deepspeed
from autofit.techniques.habits import TRAINERS
from autofit.training import engines
from autofit.training.build import build, make_plan, make_skeleton
from autofit.training.loss_module import LossModule
from autofit.training.prerequisites import nvme
from autofit.training.step import TrainingStep
from autofit.training.weights import materialise
from tests.group import Case, on_ranks
from tests.tiny import CPU, FSDP_TAKES_QLORA, GLOBAL_BATCH, LLAMA, LLAMA_TIED, SEQ_LEN, STACK, config, job, model, rows

RANKS, STEPS = 2, 3
DEEP = model("llama", num_hidden_layers=8, tie_word_embeddings=False)
MODELS = {"llama": LLAMA, "tied": LLAMA_TIED}
WITH_DEEPSPEED = replace(STACK, deepspeed="0.19.8")
TOLERANCE = {"fp32": 1e-5, "bf16-mixed": 2e-3, "bf16": 2e-3, "fp16-mixed": 5e-4}
"""Relative difference of losses that rounding explains: the order of sums in fp32; 16 bits in the residual stream
where autocast has 32; measured 4e-7, 1.5e-3, 1e-4 and 1e-4."""


@dataclass(frozen=True)
class Trained:
    """What a rank saw of a few steps."""

    reference: float
    """The plain forward's share of the loss before the first."""
    losses: list[float]
    norms: list[float]


def of(**values: Any) -> Case:
    """A config on top of a plain one: fp32, one micro-batch on each of two ranks."""
    return {"model": "llama", "precision": "fp32", "micro_batch": 2, **values}


def make(case: Case, devices: int) -> TrainingStep:
    """The step of `case`, with the same weights in every process."""
    values = dict(case)
    of_case = MODELS[values.pop("model")]
    torch.manual_seed(0)
    return build(config(**values), job(of_case, devices=devices, stack=WITH_DEEPSPEED), CPU)


def train(case: Case) -> Trained:
    """A few steps of this rank on its part of the batch."""
    step = make(case, dist.get_world_size())
    return run(step, rows().chunk(dist.get_world_size())[dist.get_rank()])


def run(step: TrainingStep, tokens: torch.Tensor) -> Trained:
    reference = step.reference_loss(tokens) / step.engine.ranks
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(float(step.run(tokens)))
        norms.append(float(step.gradient_norm))
    return Trained(reference, losses, norms)


SHARDINGS = ("ddp", "fsdp", "fsdp-no-reshard", "zero1", "zero2", "zero3")
TWO = [
    *(of(sharding=sharding, micro_batch=1) for sharding in SHARDINGS),
    *(of(sharding=s, method="lora") for s in ("fsdp", "zero2", "zero3")),
    *(of(sharding=s, method="qlora") for s in ("ddp", "zero3", *(["fsdp"] if FSDP_TAKES_QLORA else []))),
    *(of(sharding=sharding, precision="bf16-mixed") for sharding in ("fsdp", "zero1", "zero3")),
    *(of(sharding=sharding, precision="bf16") for sharding in ("fsdp", "zero2")),
    of(sharding="fsdp", precision="fp16-mixed"),
    of(sharding="fsdp", model="tied", checkpointing="selective"),
    of(sharding="zero3", model="tied", checkpointing="full"),
    of(sharding="ddp", model="tied", checkpointing="every-2", optimizer="sgd"),
    of(sharding="zero1", offload="optimizer"),
    of(sharding="zero2", offload="optimizer", precision="bf16-mixed", micro_batch=1),
    of(sharding="zero3", offload="optimizer"),
    of(sharding="zero3", offload="params", precision="bf16-mixed"),
    of(sharding="fsdp-no-reshard", offload="params"),
    of(sharding="fsdp", offload="params", optimizer="adamw-foreach"),
    of(sharding="zero3", offload="params", method="lora"),
    of(sharding="zero2", optimizer="lion"),
    *(of(sharding=s, method="lora", precision="bf16-mixed") for s in ("ddp", "zero2")),
    of(sharding="zero2", method="qlora", precision="bf16-mixed"),
]
ONE = [
    of(offload="optimizer"),
    of(offload="params"),
    of(offload="optimizer", precision="bf16-mixed"),
    of(offload="params", method="qlora"),
]


def name(case: Case) -> str:
    shown = {k: v for k, v in case.items() if v != of().get(k)}
    return "-".join(map(str, shown.values()))


@pytest.fixture(scope="module")
def trained(compiled_adam: None) -> dict[str, list[Trained]]:
    """Every case, by its name, as each of its ranks saw it."""
    result = {name(case): answers for case, answers in zip(TWO, on_ranks(RANKS, train, TWO), strict=True)}
    return result | {name(case): answers for case, answers in zip(ONE, on_ranks(1, train, ONE), strict=True)}


def alone(case: Case) -> Trained:
    """What one process trains. DeepSpeed's master copies start from 16-bit weights: so do those of its counterpart."""
    plain = {k: v for k, v in case.items() if k not in ("sharding", "offload")}
    step = make(plain, 1)
    if case["precision"] == "bf16-mixed" and uses_deepspeed(config(**{k: v for k, v in case.items() if k != "model"})):
        with torch.no_grad():
            for parameter in step.module.parameters():
                parameter.copy_(parameter.bfloat16())
    return run(step, rows())


@pytest.mark.slow
@pytest.mark.parametrize("case", [*TWO, *ONE], ids=name)
def test_the_losses_are_those_of_one_process(case: Case, trained: dict[str, list[Trained]]) -> None:
    answers, expected = trained[name(case)], alone(case)
    tolerance = TOLERANCE[case["precision"]]
    losses = [sum(shares) for shares in zip(*(a.losses for a in answers), strict=True)]
    assert losses == pytest.approx(expected.losses, rel=tolerance)
    assert losses[-1] < losses[0]
    assert sum(a.reference for a in answers) == pytest.approx(expected.reference, rel=tolerance)
    for answer in answers:
        assert answer.norms == pytest.approx(expected.norms, rel=1e-4 if case["precision"] == "fp32" else 2e-2)


COMPILED = [of(sharding="fsdp", checkpointing="full"), of(sharding="zero3", offload="optimizer")]
"""One for each way in which compilation meets a library's hooks: few, because each takes seconds."""


def train_compiled(case: Case) -> tuple[Trained, int]:
    """Compiled steps, and of how many graphs: as torch traces and differentiates them, without Inductor, which
    knows nothing of ranks and takes most of the time."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()

    by_layer = partialmethod(LossModule.compile_layers, backend="aot_eager")
    with patch.object(LossModule, "compile_layers", by_layer):
        return train({**case, "compile": True}), counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def compiled(compiled_adam: None) -> dict[str, list[tuple[Trained, int]]]:
    """Every case of `COMPILED`, by its name, as each of its ranks saw it."""
    return {
        name(case): answers for case, answers in zip(COMPILED, on_ranks(RANKS, train_compiled, COMPILED), strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED, ids=name)
def test_compiled_steps_are_those_of_one_process(case: Case, compiled: dict[str, list[tuple[Trained, int]]]) -> None:
    answers, expected = compiled[name(case)], alone(case)
    losses = [sum(shares) for shares in zip(*(trained.losses for trained, _ in answers), strict=True)]
    assert losses == pytest.approx(expected.losses, rel=TOLERANCE[case["precision"]])
    assert all(graphs > 0 for _, graphs in answers), "nothing was compiled"


def unsynchronised(case: Case) -> tuple[list[float], list[float]]:
    """Sums of a gradient's magnitudes on this rank: after the first of two micro-batches, and after the second."""
    step = make(case, dist.get_world_size())
    tokens = rows().chunk(dist.get_world_size())[dist.get_rank()]
    result: list[list[float]] = []
    for number, (inputs, labels) in enumerate(step.split(tokens)):
        step.micro_step(inputs, labels, 1, last=number == 1)
        result.append([float(p.grad.abs().sum()) for p in step.module.parameters() if p.grad is not None])
    return result[0], result[1]


def test_ddp_sends_gradients_with_the_last_micro_batch_only() -> None:
    ((first, second),) = on_ranks(RANKS, unsynchronised, [of(sharding="ddp", micro_batch=1)])
    assert first[0] != pytest.approx(second[0], rel=1e-3)
    assert first[1] == pytest.approx(second[1], rel=1e-6)
    assert len(first[0]) == len(first[1]) > 0


def looks_for_room(case: Case) -> tuple[float, float]:
    """When this rank looked at the folder for files, rank 1 late, and when it could have begun to write there."""
    os.environ[NVME_VARIABLE] = case["folder"]
    time.sleep(0.5 * dist.get_rank())
    looked_at = time.monotonic()
    made = config(sharding="zero3", offload="nvme")
    assert nvme.require_on_all_ranks(made, job(LLAMA, devices=RANKS, stack=WITH_DEEPSPEED)) == Path(case["folder"])
    return looked_at, time.monotonic()


def test_no_rank_writes_files_before_all_have_looked_for_room(tmp_path: Path) -> None:
    (seen,) = on_ranks(RANKS, looks_for_room, [{"folder": str(tmp_path)}])
    assert min(went_on for _, went_on in seen) >= max(looked_at for looked_at, _ in seen)


def views_of_buckets(case: Case) -> list[bool]:
    """Whether DDP's gradients are views of its buckets without a trainer's habits, and with those of each."""
    jobs = (job(LLAMA, devices=RANKS, trainer=trainer) for trainer in (None, *TRAINERS))
    return [build(config(**case), each, CPU).engine.root.gradient_as_bucket_view for each in jobs]


def test_gradients_are_views_of_ddps_buckets_but_for_trainers() -> None:
    (seen,) = on_ranks(RANKS, views_of_buckets, [{"sharding": "ddp"}])
    assert seen == [[True, *[False] * len(TRAINERS)]] * RANKS


class DeviceBytes(LiveBytes):
    """Leaves out what has no storage on the device."""

    def note(self, tensor: torch.Tensor) -> None:
        if not tensor.is_meta and type(tensor) in (torch.Tensor, torch.nn.Parameter):
            super().note(tensor)


def build_peak(case: Case) -> tuple[int, int]:
    """Bytes at the peak of building a deep model's weights on this rank, and bytes of all of them."""
    made = config(**case)
    decided = make_plan(made, job(DEEP, devices=dist.get_world_size(), stack=WITH_DEEPSPEED), CPU)
    skeleton = make_skeleton(decided)
    whole = sum(p.nbytes for p in skeleton.parameters())
    with DeviceBytes() as counter:
        materialise(skeleton, device=CPU, sharder=engines.sharder(decided))
    return counter.peak, whole


@pytest.mark.parametrize("sharding", ["fsdp", "zero3"])
def test_no_rank_ever_holds_all_of_a_sharded_model(sharding: str) -> None:
    case = {"precision": "fp32", "sharding": sharding}
    layer = 37_000 * 4
    for peak, whole in on_ranks(RANKS, build_peak, [case])[0]:
        outside = 2 * 512 * 64 * 4
        assert (whole - outside) / RANKS + outside <= peak <= (whole - outside) / RANKS + outside + 2 * layer < whole


def refusal(devices: int = RANKS, kind: str = "cpu", **values: Any) -> str:
    made: Config = config(precision="bf16-mixed", **{k: v for k, v in values.items() if k != "precision"})
    if "precision" in values:
        made = made.replace(precision=values["precision"])
    here = job(LLAMA, devices=devices, stack=WITH_DEEPSPEED, global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN)
    return unsupported(made, here) or ""


@pytest.mark.parametrize("case", [*TWO, *ONE], ids=name)
def test_what_trains_is_supported(case: Case) -> None:
    made = config(**{k: v for k, v in case.items() if k != "model"})
    devices = 1 if case in ONE else RANKS
    assert unsupported(made, job(LLAMA, devices=devices, stack=WITH_DEEPSPEED)) is None


def test_fsdp_takes_4_bit_weights_from_a_release_of_torch_on() -> None:
    requested = config(sharding="fsdp", method="qlora")
    reasons = {
        release: unsupported(requested, job(devices=RANKS, stack=replace(STACK, torch=release)))
        for release in ("2.11.0+cu130", "2.12.0", "2.13.0+cpu")
    }
    assert "from torch 2.12 on, and this is 2.11.0+cu130" in (reasons.pop("2.11.0+cu130") or "")
    assert set(reasons.values()) == {None}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sharding": "none"}, ("one device", "ddp")),
        ({"sharding": "zero2", "devices": 1}, ("several devices", "--devices")),
        ({"sharding": "ddp", "offload": "optimizer"}, ("sharding=ddp", "zero2")),
        ({"sharding": "zero2", "offload": "params"}, ("sharding=zero2", "zero3")),
        ({"sharding": "fsdp", "offload": "optimizer"}, ("sharding=fsdp", "zero2")),
        ({"sharding": "zero2", "offload": "optimizer", "optimizer": "adamw-8bit"}, ("adamw-8bit", "use adamw")),
        ({"sharding": "zero2", "offload": "optimizer", "optimizer": "lion"}, ("two states", "use adamw")),
        ({"sharding": "zero3", "offload": "params", "optimizer": "adamw-foreach"}, ("foreach", "use adamw")),
        ({"sharding": "fsdp", "offload": "params", "optimizer": "sgd"}, ("sgd", "use adamw")),
        ({"sharding": "zero3", "offload": "nvme", "precision": "bf16"}, ("precision=bf16", "use bf16-mixed")),
        ({"sharding": "fsdp", "optimizer": "adamw-8bit"}, ("adamw-8bit", "zero2")),
        ({"sharding": "fsdp", "optimizer": "sgd"}, ("sgd", "use adamw")),
        ({"sharding": "zero2", "optimizer": "adafactor"}, ("flattens", "ddp")),
        ({"sharding": "zero3", "checkpointing": "selective"}, ("selective", "use full")),
        ({"sharding": "zero3", "checkpointing": "budget-50", "compile": True}, ("in pieces", "use full")),
        ({"sharding": "ddp", "checkpointing": "budget-50", "compile": True}, ("DDP splits", "use every-2")),
        ({"sharding": "zero1", "precision": "fp16-mixed"}, ("fp16", "bf16-mixed")),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(values: dict[str, Any], words: tuple[str, ...]) -> None:
    reason = refusal(**values)
    assert all(word in reason for word in words), reason
