"""Updates within the backward pass are those of all gradients after it, and few of these are alive at a time."""

from __future__ import annotations

import itertools

import pytest
import torch

from autofit.core.lattice import Value
from autofit.techniques import holds, unsupported
from autofit.techniques.axes.optimizer import OPTIMIZERS
from autofit.techniques.in_backward import UpdatesInBackward
from autofit.training.engines import local
from autofit.training.step import TrainingStep
from tests.tiny import CUDA_HARDWARE, FAMILIES, GLOBAL_BATCH, LLAMA, LLAMA_TIED, attention_of, built, config, job, rows


def step_of(family: str = "llama", **values: Value) -> TrainingStep:
    of = FAMILIES[family]
    fixed: dict[str, Value] = {"micro_batch": GLOBAL_BATCH, "attention": attention_of(of)}
    return built(config(**{**fixed, **values}), of)


def weights(step: TrainingStep) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in step.module.named_parameters()}


def optimizers(step: TrainingStep) -> UpdatesInBackward:
    made = step.engine.optimizer  # type: ignore[attr-defined]
    assert isinstance(made, UpdatesInBackward)
    return made


CASES: list[tuple[str, dict[str, Value]]] = [
    *((family, {"precision": "fp32"}) for family in FAMILIES),
    ("llama", {"optimizer": "sgd", "precision": "bf16", "checkpointing": "full"}),
    ("llama", {"optimizer": "adafactor", "precision": "bf16", "loss": "chunked"}),
    ("llama", {"optimizer": "lion", "checkpointing": "selective"}),
    ("llama", {"optimizer": "adamw-8bit", "precision": "bf16"}),
    ("llama", {"optimizer": "adamw-foreach", "precision": "fp32", "loss": "chunked"}),
]


@pytest.mark.parametrize(("family", "values"), CASES, ids=str)
def test_it_trains_as_without_clipping(family: str, values: dict[str, Value], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_GRADIENT_NORM", 1e9)
    after, within = step_of(family, **values), step_of(family, update="in-backward", **values)
    for _ in range(3):
        assert float(within.run(rows())) == float(after.run(rows()))
        assert float(within.gradient_norm) == pytest.approx(float(after.gradient_norm), rel=1e-2)
    expected = weights(after)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(within).items())


def test_tied_embeddings_are_updated_once() -> None:
    step = built(config(micro_batch=GLOBAL_BATCH, update="in-backward"), LLAMA_TIED)
    step.run(rows())
    assert {float(state["step"]) for one in optimizers(step).of.values() for state in one.state.values()} == {1.0}


def test_no_gradient_waits_for_another() -> None:
    step, alive = step_of(update="in-backward"), []
    parameters = list(step.module.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in parameters))
        )
    step.run(rows())
    assert alive == [0] * len(parameters)


def test_what_is_only_looked_at_is_not_updated() -> None:
    step, row = step_of(update="in-backward", precision="fp32"), rows()[:1]
    assert step.plain_gradient_norm(row) == step_of(precision="fp32").plain_gradient_norm(row)
    step.run(rows())
    before = weights(step)
    step.plain_gradient_norm(row)
    step.reference_loss(row)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(step).items())


def test_states_of_embeddings_stay_in_32_bits() -> None:
    step = built(config(micro_batch=GLOBAL_BATCH, update="in-backward", optimizer="adamw-8bit"))
    step.run(rows())
    name = {parameter: name for name, parameter in step.module.named_parameters()}
    states = {name[p]: one.state[p]["state1"].dtype for p, one in optimizers(step).of.items()}
    assert [key for key in states if "embed" in key and states[key] is torch.float32]
    assert all(states[key] is torch.uint8 for key in states if "mlp" in key)


def test_a_schedule_and_a_checkpoint_reach_every_parameter() -> None:
    made, again = (optimizers(step_of(update="in-backward")) for _ in range(2))
    step = step_of(update="in-backward")
    step.run(rows())
    saved = optimizers(step).state_dict()
    made.load_state_dict(saved)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda epoch: 0.5)
    assert {group["lr"] for one in made.of.values() for group in one.param_groups} == set(schedule.get_last_lr())
    assert [len(one.state) for one in made.of.values()] == [1] * len(made.of)
    assert not any(one.state for one in again.of.values())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"method": "lora"}, "nothing to save with method=lora"),
        ({"micro_batch": 2}, "use micro_batch=4"),
        ({"offload": "optimizer"}, "use offload=none"),
        ({"precision": "fp16-mixed"}, "use bf16-mixed or fp32"),
        ({"optimizer": "paged-adamw-8bit"}, "use adamw-8bit"),
    ],
    ids=str,
)
def test_what_it_cannot_work_with_is_refused(values: dict[str, Value], says: str) -> None:
    of = job(LLAMA, hardware=CUDA_HARDWARE)
    fixed: dict[str, Value] = {"micro_batch": GLOBAL_BATCH, "update": "in-backward"}
    assert unsupported(config(**fixed), of) is None
    assert says in (unsupported(config(**{**fixed, **values}), of) or "")


def test_it_is_claimed_to_be_lighter_where_updates_have_no_temporaries() -> None:
    of = {"cpu": job(LLAMA), "cuda": job(LLAMA, hardware=CUDA_HARDWARE)}
    claimed = set()
    for optimizer, kind in itertools.product(OPTIMIZERS, of):
        after = config(micro_batch=GLOBAL_BATCH, optimizer=optimizer)
        if holds(of[kind])(after.replace(update="in-backward"), after):
            claimed.add((optimizer, kind))
    eight_bit = {"lion-8bit", "adamw-8bit", "paged-adamw-8bit"}
    assert {name for name, kind in claimed if kind == "cuda"} == {"sgd", "lion", "adamw", *eight_bit}
    assert {name for name, kind in claimed if kind == "cpu"} == {"sgd", "adamw"}


def test_several_ranks_are_refused() -> None:
    of = job(LLAMA, devices=2)
    refused = unsupported(config(micro_batch=2, update="in-backward", sharding="ddp"), of)
    assert refused is not None and "use sharding=none" in refused
