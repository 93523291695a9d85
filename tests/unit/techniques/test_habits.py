"""Trainers' habits: where they apply, what is refused for them, and the loss that trl computes tile by tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import CPU, CUDA_HARDWARE, QWEN3_MOE, job

from autofit.catalog.models import load
from autofit.core.errors import UsageError
from autofit.core.workload import Goal, Workload
from autofit.estimate.tracing.traces import Traces
from autofit.planning.lattices import load_space, narrow
from autofit.planning.requests import WorkloadOptions
from autofit.techniques import complete, holds, recipe, unsupported
from autofit.techniques.axes.optimizer import OPTIMIZERS
from autofit.techniques.habits import trained_format
from autofit.techniques.habits import unsupported as unsupported_by_trainer
from autofit.techniques.habits.habit import NormsAndEmbeddingsInFp32
from autofit.techniques.losses import tiled_cross_entropy as tiled
from autofit.techniques.losses.cross_entropy import full_cross_entropy
from autofit.techniques.technique import IGNORE_INDEX, Head
from autofit.training.build import make_plan, make_skeleton


@pytest.mark.parametrize(
    ("trainer", "values", "trained"),
    [
        (None, {"method": "qlora"}, None),
        ("transformers", {"method": "full"}, None),
        ("transformers", {"method": "qlora", "precision": "bf16"}, "float32"),
        ("transformers", {"method": "lora", "precision": "bf16"}, "float32"),
        ("transformers", {"method": "lora", "precision": "bf16-mixed"}, None),
        ("trl", {"method": "qlora", "precision": "bf16-mixed"}, "bfloat16"),
        ("trl", {"method": "lora", "precision": "bf16"}, "float32"),
        ("llamafactory", {"method": "qlora", "precision": "bf16"}, "float32"),
        ("axolotl", {"method": "qlora", "precision": "bf16"}, None),
        # DeepSpeed and FSDP convert all weights themselves.
        ("trl", {"method": "lora", "precision": "bf16", "sharding": "zero3"}, None),
        ("transformers", {"method": "qlora", "sharding": "fsdp"}, None),
        ("transformers", {"method": "qlora", "sharding": "ddp"}, "float32"),
    ],
)
def test_formats_of_trained_weights(trainer: str | None, values: dict[str, str], trained: str | None) -> None:
    assert trained_format(complete(values), trainer) == trained


def test_no_order_is_claimed_between_formats_that_a_trainer_changes() -> None:
    bf16, mixed = (complete({"method": "lora", "precision": p}) for p in ("bf16", "bf16-mixed"))
    qlora = complete({"method": "qlora", "precision": "bf16-mixed"})
    smaller = complete({"method": "lora", "precision": "bf16-mixed", "checkpointing": "full"})
    assert holds(job())(bf16, mixed) and holds(job())(qlora, mixed)
    for trainer in ("transformers", "trl"):
        claim = holds(job(trainer=trainer))
        assert not claim(bf16, mixed) and not claim(qlora, mixed) and claim(smaller, mixed)


def test_a_search_for_trl_has_only_what_trl_trains() -> None:
    for_trl = narrow(load_space("cpu"), Goal(), job(seq_len=512, trainer="trl"))
    assert {config["loss"] for config in for_trl.lattice.configs} == {"chunked"}
    tried = {(config["method"], config["checkpointing"]) for config in for_trl.lattice.configs}
    assert not {value for _, value in tried} & {"selective"}
    assert ("full", "save-attention") in tried and ("lora", "save-attention") not in tried
    (reason,) = (reason for reason in for_trl.unsupported if reason.startswith("checkpointing=selective"))
    assert reason.endswith("is not possible with trl, which recomputes attention, too, in a model with adapters")
    plain = narrow(load_space("cpu"), Goal(), job(seq_len=512))
    assert {config["checkpointing"] for config in plain.lattice.configs} >= {"selective", "full"}


def test_the_recipe_is_one_that_the_trainer_trains() -> None:
    trl_job = job(trainer="trl")
    config = complete({"method": "lora"}, recipe(trl_job.hardware, trl_job.model, "trl"))
    assert config["loss"] == "chunked" and unsupported(config, trl_job) is None
    reason = unsupported(config.replace(loss="full"), trl_job)
    assert reason == "loss=full is not possible with trl, which always chunks the loss"


def test_an_optimizer_that_trainers_have_no_name_for_is_none_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = complete({"method": "lora", "optimizer": "lion", "loss": "chunked"})
    monkeypatch.setitem(OPTIMIZERS, "lion", replace(OPTIMIZERS["lion"], trainer=None))
    reason = "optimizer=lion is not possible with trl, which has no name for it"
    assert unsupported(config, job(trainer="trl")) == reason and unsupported(config, job()) is None


def test_adapters_in_bf16_cannot_have_loss_scaling() -> None:
    mixed = {method: complete({"method": method, "precision": "fp16-mixed"}) for method in ("lora", "qlora")}
    reason = "precision=fp16-mixed is not possible with trl, which trains the adapters in bf16, for which torch refuses"
    assert unsupported(mixed["qlora"], job(trainer="trl")) == f"{reason} loss scaling"
    for trainer, method in ((None, "qlora"), ("transformers", "qlora"), ("trl", "lora")):
        assert "loss scaling" not in (unsupported(mixed[method], job(trainer=trainer)) or "")


@pytest.mark.parametrize(("loss", "kernels"), [("fused", "torch"), ("full", "liger")])
def test_where_one_switch_turns_on_all_of_liger_its_loss_and_kernels_go_together(loss: str, kernels: str) -> None:
    config = complete({"loss": loss, "kernels": kernels})
    reason = unsupported_by_trainer(config, job(trainer="llamafactory"))
    assert reason is not None and "one switch for both" in reason
    assert unsupported_by_trainer(config, job(trainer="transformers")) is None
    assert unsupported_by_trainer(complete({"loss": "fused", "kernels": "liger"}), job(trainer="llamafactory")) is None
    if kernels == "torch":  # where there are none for the layers, the loss has the switch for itself
        assert unsupported_by_trainer(config, job(QWEN3_MOE, trainer="llamafactory")) is None
        for trainer in ("transformers", "axolotl", "llamafactory"):
            reason = unsupported_by_trainer(config, job(load("pythia-160m"), trainer=trainer))
            assert reason == f"loss=fused is not possible with {trainer}, which leaves Liger out for pythia-160m"


def test_what_a_trainer_cannot_with_adapters_it_can_without() -> None:
    llamafactory = job(trainer="llamafactory")
    assert unsupported(complete({"method": "full", "precision": "fp32"}), llamafactory) is None
    assert unsupported(complete({"method": "lora", "precision": "fp32"}), llamafactory) == (
        "precision=fp32 is not possible with llamafactory, which keeps frozen weights in the format of the checkpoint"
    )


def test_only_flash_attention_takes_a_narrow_copy_of_hidden_states_in_fp32() -> None:
    """Elsewhere torch has no flash kernel for what peft widens beside a 4-bit base."""
    traces = Traces(job(hardware=CUDA_HARDWARE, trainer="transformers"))
    values = {"method": "qlora", "precision": "bf16"}
    for attention, is_flash in {"flash": True, "sdpa": False, "efficient": False}.items():
        config = complete({**values, "attention": attention})
        assert traces.decoder(config, None, accumulates=False).is_flash is is_flash


def test_axolotl_has_some_weights_of_full_training_in_fp32_unless_attention_is_flash() -> None:
    sdpa = complete({"method": "full", "precision": "bf16"})
    parameters = dict(make_skeleton(make_plan(sdpa, job(trainer="axolotl"), CPU)).named_parameters())
    wide = {name for name, parameter in parameters.items() if parameter.dtype == torch.float32}
    assert wide == {name for name in parameters if "norm" in name or "embed" in name or "lm_head" in name}
    flash = make_plan(sdpa.replace(attention="flash"), job(trainer="axolotl"), CPU)
    assert not any(isinstance(part, NormsAndEmbeddingsInFp32) for part in flash.parts)
    assert flash.autocast == torch.bfloat16


def test_axolotl_keeps_fp32_copies_only_where_a_library_does() -> None:
    axolotl = job(trainer="axolotl", devices=2)
    full = complete({"method": "full", "precision": "bf16-mixed", "sharding": "ddp"})
    reason = unsupported(full, axolotl)
    assert reason is not None and "axolotl, which loads the weights in bf16 and keeps none in fp32" in reason
    assert unsupported(full.replace(sharding="fsdp"), axolotl) is None
    assert unsupported(complete({"method": "lora", "precision": "bf16-mixed", "sharding": "ddp"}), axolotl) is None


def test_an_unknown_trainer_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"trainer.*'trll'.*trl"):
        WorkloadOptions(model="smollm2-135m", trainer="trll").resolve()


def test_plain_workloads_keep_their_keys() -> None:
    plain = Workload(model="m", model_digest="0" * 16)
    assert plain.key == "dfc692afa8fb1b54" and "trainer" not in plain.to_json()
    other = Workload(model="m", model_digest="0" * 16, trainer="trl")
    assert other.key != plain.key and Workload.from_json(other.to_json()) == other


@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (3.0, 0.5)])
def test_tiles_give_the_loss_and_gradients_of_all_logits(
    softcap: float | None, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "TILE_TOKENS", 7)
    monkeypatch.setattr(tiled, "TILE_WORDS", 11)
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((20, 8), (30, 8), (30,)))
    labels = torch.randint(30, (20,))
    labels[3] = IGNORE_INDEX
    head = Head(weight=weight, bias=bias, softcap=softcap, scale=scale)

    def as_on_a_card(hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> torch.Tensor:
        return -(tiled._by_trl(hidden, head, labels.clamp(min=0)) * (labels != IGNORE_INDEX)).sum()

    result = []
    for kernel in (full_cross_entropy, tiled.tiled_cross_entropy, as_on_a_card):
        loss = kernel(hidden, head, labels)
        result.append((loss, *torch.autograd.grad(loss, [hidden, weight, bias])))
    for plain, *others in zip(*result, strict=True):
        for other in others:
            torch.testing.assert_close(other, plain)
