"""Several ranks, and offloading: they train what one process trains, and hold the share that the library promises."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
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
from autofit.training import engines
from autofit.training.build import build, make_plan, make_skeleton
from autofit.training.loss_module import LossModule
from autofit.training.prerequisites import nvme
from autofit.training.step import TrainingStep
from autofit.training.weights import materialise
from tests.group import Case, on_ranks
from tests.resident import Resident, resident
from tests.tiny import (
    CPU,
    FSDP_TAKES_QLORA,
    GLOBAL_BATCH,
    LLAMA,
    LLAMA_TIED,
    SEQ_LEN,
    STACK,
    config,
    job,
    model,
    plan,
    rows,
)

RANKS, STEPS = 2, 5
DEEP = model("llama", num_hidden_layers=8, tie_word_embeddings=False)
MODELS = {"llama": LLAMA, "tied": LLAMA_TIED}
STATES = {"sgd": 0, "lion": 1}
"""States of the size of a parameter, of the optimizers that do not have Adam's two."""
WITH_DEEPSPEED = replace(STACK, deepspeed="0.19.8")
TOLERANCE = {"fp32": 1e-5, "bf16-mixed": 2e-3, "bf16": 2e-3, "fp16-mixed": 5e-4}
"""Relative difference of losses that rounding explains: the order of sums in fp32; 16 bits in the residual stream
where autocast has 32; measured 4e-7, 1.5e-3, 1e-4 and 1e-4."""


@dataclass(frozen=True)
class Trained:
    """What a rank saw of five steps."""

    reference: float
    """The plain forward's share of the loss before the first."""
    losses: list[float]
    norms: list[float]
    after_backward: Resident
    after_update: Resident


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
    """Five steps of this rank on its part of the batch."""
    step = make(case, dist.get_world_size())
    return run(step, rows().chunk(dist.get_world_size())[dist.get_rank()], case.get("offload", "none"))


def run(step: TrainingStep, tokens: torch.Tensor, offload: str = "none") -> Trained:
    reference = step.reference_loss(tokens) / step.engine.ranks
    losses, norms, held = [], [], []
    update = step.engine.update

    def watched() -> torch.Tensor:
        held.append(resident(step, offload))
        return update()

    step.engine.update = watched  # type: ignore[method-assign]
    for _ in range(STEPS):
        losses.append(float(step.run(tokens)))
        norms.append(float(step.gradient_norm))
    return Trained(reference, losses, norms, held[-1], resident(step, offload))


SHARDINGS = ("ddp", "fsdp", "fsdp-no-reshard", "zero1", "zero2", "zero3")
TWO = [
    *(of(sharding=sharding, micro_batch=1) for sharding in SHARDINGS),
    *(of(sharding=s, method="lora") for s in SHARDINGS),
    *(of(sharding=s, method="qlora") for s in SHARDINGS if FSDP_TAKES_QLORA or not s.startswith("fsdp")),
    *(of(sharding=sharding, precision="bf16-mixed") for sharding in ("ddp", "fsdp", "zero1", "zero2", "zero3")),
    *(of(sharding=sharding, precision="bf16") for sharding in ("ddp", "zero1", "zero2", "zero3")),
    of(sharding="fsdp", precision="fp16-mixed"),
    of(sharding="fsdp", model="tied", checkpointing="selective"),
    of(sharding="zero3", model="tied", checkpointing="full"),
    of(sharding="ddp", model="tied", checkpointing="every-2"),
    of(sharding="fsdp", offload="params"),
    of(sharding="zero1", offload="optimizer"),
    of(sharding="zero1", offload="optimizer", micro_batch=1),
    of(sharding="zero2", offload="optimizer", precision="bf16-mixed"),
    of(sharding="zero2", offload="optimizer", precision="bf16-mixed", micro_batch=1),
    of(sharding="zero3", offload="optimizer"),
    of(sharding="zero3", offload="params"),
    of(sharding="zero3", offload="params", precision="bf16-mixed"),
    of(sharding="fsdp-no-reshard", offload="params"),
    of(sharding="fsdp", offload="params", optimizer="adamw-foreach"),
    of(sharding="zero3", offload="params", method="lora"),
    of(sharding="zero2", optimizer="lion"),
    of(sharding="ddp", optimizer="sgd"),
    of(sharding="fsdp", precision="bf16"),
    *(of(sharding=s, method="lora", precision="bf16-mixed") for s in ("ddp", "fsdp", "zero2", "zero3")),
    *(of(sharding=s, method="qlora", precision="bf16-mixed") for s in ("ddp", "zero2")),
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
    """Every case, by its name, as each of its ranks saw it. Some forty seconds, most of them DeepSpeed's."""
    found = {name(case): answers for case, answers in zip(TWO, on_ranks(RANKS, train, TWO), strict=True)}
    return found | {name(case): answers for case, answers in zip(ONE, on_ranks(1, train, ONE), strict=True)}


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


@pytest.mark.slow
@pytest.mark.parametrize("case", [*TWO, *ONE], ids=name)
def test_a_rank_holds_the_share_that_is_promised(case: Case, trained: dict[str, list[Trained]]) -> None:
    answers = trained[name(case)]
    expected = promised(case, len(answers))
    for field, predicted in asdict(expected).items():
        # The rank that holds most is what a device must have room for.
        held = max(
            asdict(a.after_update if field.endswith(("parameters", "optimizer")) else a.after_backward)[field]
            for a in answers
        )
        assert held == pytest.approx(predicted, rel=0.02), field


COMPILED = [
    of(sharding="ddp", method="lora", checkpointing="every-2"),
    of(sharding="fsdp", checkpointing="full"),
    of(sharding="zero3", offload="optimizer"),
]
"""One for each way in which compilation meets a library's hooks: few, because each takes seconds."""


def train_compiled(case: Case) -> tuple[Trained, int]:
    """Five compiled steps, and of how many graphs: as torch traces and differentiates them, without Inductor, which
    knows nothing of ranks and takes most of the time."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()

    def compile_decoder(module: LossModule) -> None:
        module._decoder[0].compile(backend="aot_eager")

    with patch.object(LossModule, "compile_decoder", compile_decoder):
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


def promised(case: Case, ranks: int) -> Resident:
    """The share of the rank that holds most, by the libraries' own rules of division."""
    values = {k: v for k, v in case.items() if k != "model"}
    made = config(**values)
    decided = plan(made, MODELS[case["model"]])
    skeleton = make_skeleton(decided)
    sharding, offload = str(made["sharding"]), str(made["offload"])
    parameters = list(skeleton.parameters())
    trained = [p for p in parameters if p.requires_grad]
    constants = 0
    sizes = {id(p): p.numel() for p in parameters}
    for module in skeleton.modules():
        if type(module).__name__ == "Linear4bit":
            # nf4: half a byte per weight, a scale byte per 64, their fp32 scale per 256, two tables and an offset
            weights: int = module.weight.numel()  # type: ignore[operator, union-attr]
            sizes[id(module.weight)] = weights // 2
            constants += weights // 64 + 4 * -(-weights // 64 // 256) + 4 * (16 + 256 + 1)

    def width(parameter: torch.nn.Parameter, *, kept: bool) -> int:
        if sizes[id(parameter)] != parameter.numel():
            return 1
        if kept and uses_deepspeed(made):
            return {"fp32": 4}.get(case["precision"], 2)
        return parameter.element_size()

    def shard(parameter: torch.nn.Parameter) -> int:
        if sharding.startswith("fsdp"):
            if sizes[id(parameter)] != parameter.numel():
                return -(-sizes[id(parameter)] // ranks)
            return -(-parameter.shape[0] // ranks) * parameter[0].numel()
        return -(-sizes[id(parameter)] // ranks)

    whole = sum(sizes[id(p)] * width(p, kept=True) for p in parameters)
    shared = sum(shard(p) * width(p, kept=True) for p in parameters)
    states = STATES.get(str(made["optimizer"]), 2) * trained[0].element_size()
    if sharding in ("ddp", "none") and offload == "none":
        return Resident(
            parameters=whole + constants,
            gradients=sum(p.nbytes for p in trained),
            optimizer=sum(p.numel() for p in trained) * states,
        )
    if sharding.startswith("fsdp"):
        gradients = sum(shard(p) * p.element_size() for p in trained)
        optimizer = sum(shard(p) for p in trained) * states
        return on_host(offload, constants, shared, gradients, optimizer)
    optimizer = sum(map(shard, trained)) * (states + trained[0].element_size())
    summed = sum(map(shard, trained)) * (2 if case["precision"] == "bf16" else 4)
    if sharding == "zero3" or offload == "params":
        persistent = 10 * LLAMA.config["hidden_size"]
        small = [p for p in parameters if sizes[id(p)] <= persistent]
        kept = sum(sizes[id(p)] * width(p, kept=True) for p in small) if ranks > 1 else 0  # else the share is all
        copies = 2 if offload != "none" else 1  # as they are summed, and as the master copies' gradients
        return on_host(offload, constants + kept, shared, copies * summed, optimizer)
    if offload == "optimizer":
        # Beside the master copies' gradients what is summed over micro-batches, for which pure bf16 takes the former.
        accumulates = ranks * case["micro_batch"] < GLOBAL_BATCH
        on_host_summed = accumulates and sharding != "zero1"  # which sums on the device
        sums = {"bf16": 0, "fp32": 4}.get(case["precision"], 2) * overlapping(trained, ranks) if on_host_summed else 0
        return on_host(offload, constants, whole, summed + sums, optimizer)
    if sharding == "zero1" and case["precision"] == "bf16-mixed":
        # all gradients twice: in 16 bits, and in fp32 where they are summed
        return on_host(offload, constants, whole, sum(p.numel() for p in trained) * (4 + 2), optimizer)
    if case["precision"] != "bf16-mixed":
        summed = overlapping(trained, ranks) * (2 if case["precision"] == "bf16" else 4)
    return on_host(offload, constants, whole, summed, optimizer)


def on_host(offload: str, whole: int, shared: int, gradients: int, optimizer: int) -> Resident:
    """The same bytes where `offload` has them."""
    if offload == "none":
        return Resident(parameters=whole + shared, gradients=gradients, optimizer=optimizer)
    away = offload == "params"
    return Resident(
        parameters=whole if away else whole + shared,
        gradients=0,
        optimizer=0,
        host_parameters=shared if away else 0,
        host_gradients=gradients,
        host_optimizer=optimizer,
    )


def overlapping(parameters: list[torch.nn.Parameter], ranks: int) -> int:
    """Elements of the parameters that lie, if only in part, in the share of the rank where these are most: ZeRO 1 and 2
    keep such gradients whole until the update."""
    total = sum(p.numel() for p in parameters)
    share = -(-total // (2 * ranks)) * 2
    found = []
    for rank in range(ranks):
        start, inside = 0, 0
        for parameter in parameters:
            end = start + parameter.numel()
            inside += parameter.numel() if start < (rank + 1) * share and end > rank * share else 0
            start = end
        found.append(inside)
    return max(found)


def unsynchronised(case: Case) -> tuple[list[float], list[float]]:
    """Sums of a gradient's magnitudes on this rank: after the first of two micro-batches, and after the second."""
    step = make(case, dist.get_world_size())
    tokens = rows().chunk(dist.get_world_size())[dist.get_rank()]
    found: list[list[float]] = []
    for number, (inputs, labels) in enumerate(step.split(tokens)):
        step.micro_step(inputs, labels, 1, last=number == 1)
        found.append([float(p.grad.abs().sum()) for p in step.module.parameters() if p.grad is not None])
    return found[0], found[1]


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
    asked = config(sharding="fsdp", method="qlora")
    said = {
        release: unsupported(asked, job(devices=RANKS, stack=replace(STACK, torch=release)))
        for release in ("2.11.0+cu130", "2.12.0", "2.13.0+cpu")
    }
    assert "from torch 2.12 on, and this is 2.11.0+cu130" in (said.pop("2.11.0+cu130") or "")
    assert set(said.values()) == {None}


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
        ({"sharding": "zero1", "precision": "fp16-mixed"}, ("fp16", "bf16-mixed")),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(values: dict[str, Any], words: tuple[str, ...]) -> None:
    reason = refusal(**values)
    assert all(word in reason for word in words), reason
