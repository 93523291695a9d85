"""Exported scripts and configurations, trained over two ranks on this processor: the losses are those of one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import one_rank
import pytest
import tiny
import torch
from export_samples import imported, make_config, make_recommendation
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from autofit.catalog import models as catalog
from autofit.core.device.hardware import Hardware
from autofit.core.lattice import Value
from autofit.export import export
from autofit.techniques.axes.optimizer import OPTIMIZERS, trainable
from autofit.training.build import make_plan
from tests.group import on_ranks
from tests.tiny import FSDP_TAKES_QLORA

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")

SEQ_LEN, STEPS, RATE = 16, 3, 1e-2
CASES: dict[str, dict[str, Value]] = {
    "a-zero3": {"sharding": "zero3", "loss": "chunked"},  # first: nothing else has started DeepSpeed for it
    "ddp": {"sharding": "ddp"},
    "fsdp": {"sharding": "fsdp", "loss": "chunked"},
    "fsdp-no-reshard": {"sharding": "fsdp-no-reshard", "precision": "bf16-mixed", "method": "lora"},
    **({"fsdp-4-bit": {"sharding": "fsdp", "precision": "bf16-mixed", "method": "qlora"}} if FSDP_TAKES_QLORA else {}),
    "zero1": {"sharding": "zero1", "precision": "bf16-mixed"},
    "zero2": {"sharding": "zero2", "precision": "bf16"},
    "zero2-optimizer": {"sharding": "zero2", "offload": "optimizer"},
    "zero3-params": {"sharding": "zero3", "offload": "params", "precision": "bf16"},
}
ALONE: dict[str, dict[str, Value]] = {
    "alone-zero1": {"sharding": "zero1"},
    "alone-zero3": {"sharding": "zero3", "offload": "params"},
}
"""For `deepspeed.initialize`, without Trainer."""
DECAYS_ALL = ("zero2-optimizer", "zero3-params", *ALONE)
"""Where DeepSpeed makes the optimizer, norms decay, too; Trainer leaves them out."""


def written(form: str, source: Path, values: dict[str, Value], *, devices: int = 2, hardware: Hardware) -> str:
    """The export of the config, with a learning rate."""
    config = make_config(**{"precision": "fp32", "micro_batch": 1, **values})
    recommendation = make_recommendation(config, seq_len=SEQ_LEN, global_batch=4, devices=devices)
    recommendation = replace(recommendation, hardware=hardware)
    text = export(recommendation, format=form, source=str(source)).text
    return text.replace("LEARNING_RATE = None", f"LEARNING_RATE = {RATE}").replace('"lr": "auto"', f'"lr": {RATE}')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama, one batch four times over, and what is exported of every case."""
    folder = tmp_path_factory.mktemp("cases")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=320, num_hidden_layers=2, **sizes)).save_pretrained(folder / "model")
    torch.save(torch.randint(320, (4, SEQ_LEN)).expand(STEPS, -1, -1), folder / "tokens.pt")
    for name, values in CASES.items():
        fsdp = str(values["sharding"]).startswith("fsdp")
        # Accelerate has FSDP for accelerators only: the ranks tell it that this processor is one.
        hardware = tiny.CUDA_HARDWARE if fsdp else tiny.CPU_HARDWARE
        file = folder / (f"{name}.gpu.py" if fsdp else f"{name}.py")
        file.write_text(written("transformers", folder / "model", values, hardware=hardware))
    for name, values in ALONE.items():
        text = written("deepspeed", folder / "model", values, hardware=tiny.CPU_HARDWARE)
        (folder / f"{name}.json").write_text(text)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path, compiled_adam: None) -> dict[str, Any]:
    """By case, what rank 0 saw of it."""
    tokens = torch.load(folder / "tokens.pt")
    files = sorted([*folder.glob("*.py"), *folder.glob("*.json")], key=lambda file: file.name)
    cases = [{"file": str(file), "source": str(folder / "model"), "tokens": tokens} for file in files]
    answers = on_ranks(2, one_rank.trained, cases)
    return {file.name.partition(".")[0]: answer[0] for file, answer in zip(files, answers, strict=True)}


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses on one device, by method; of `norms too`, all weights decay."""
    tokens = torch.load(folder / "tokens.pt")

    def losses(method: str) -> list[float]:
        text = written("transformers", folder / "model", {"method": method}, devices=1, hardware=tiny.CPU_HARDWARE)
        return one_rank.losses(one_rank.train(imported(text), tokens, tmp_path_factory.mktemp("run")))

    result = {method: losses(method) for method in ("full", "lora", "qlora")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "get_decay_parameter_names", lambda self, model: dict(model.named_parameters()))
        result["norms too"] = losses("full")
    return result


@pytest.mark.parametrize("name", [*CASES, *ALONE])
def test_losses_are_those_of_one_device(name: str, results: dict[str, Any], plain: dict[str, list[float]]) -> None:
    values = {**CASES, **ALONE}[name]
    expected = plain["norms too" if name in DECAYS_ALL else str(values.get("method", "full"))]
    assert expected[-1] < expected[0] - 0.1
    noise = 1e-2 if "precision" in values else 1e-5
    assert results[name]["losses"] == pytest.approx(expected, rel=noise)


@pytest.mark.parametrize("name", [*CASES, *ALONE])
def test_weights_decay_as_in_trials(name: str, results: dict[str, Any]) -> None:
    """Where DeepSpeed makes the optimizer, and where Trainer does."""
    module = torch.nn.Linear(1, 1)
    made = OPTIMIZERS["adamw"].make(module, trainable(module))
    assert results[name]["weight_decay"] == one_rank.weight_decay(made) > 0


@pytest.mark.parametrize("name", [name for name in CASES if "zero" in name])
def test_deepspeed_is_told_what_trials_tell_it(name: str, results: dict[str, Any], folder: Path) -> None:
    config = make_config(**{"precision": "fp32", "micro_batch": 1, **CASES[name]})
    job = tiny.job(catalog.load(str(folder / "model")), seq_len=SEQ_LEN, global_batch=4, devices=2)
    planned, result = make_plan(config, job, tiny.CPU).deepspeed, results[name]["deepspeed"]
    assert planned is not None
    for key, value in planned.items():
        if key == "zero_optimization":
            saved_whole = {"stage3_gather_16bit_weights_on_model_save": True} if value["stage"] == 3 else {}
            value = {**value, **saved_whole}
        assert result[key] == value, key
    on_host = "offload" in CASES[name]
    assert results[name]["optimizer"] == ("DeepSpeedCPUAdam" if on_host else "AdamW")


def test_deepspeed_makes_the_optimizer_of_its_own_file(results: dict[str, Any]) -> None:
    assert results["alone-zero1"]["optimizer"] == "AdamW"
    assert results["alone-zero3"]["optimizer"] == "DeepSpeedCPUAdam"


def test_ddp_keeps_gradients_once(results: dict[str, Any]) -> None:
    result = results["ddp"]
    assert (result["model"], result["view"], result["searches"]) == ("DistributedDataParallel", True, False)


def test_fsdp_shares_layers_out_and_sums_in_fp32(results: dict[str, Any]) -> None:
    for name, sums in {"fsdp": "None", "fsdp-no-reshard": "torch.float32", "fsdp-4-bit": "torch.float32"}.items():
        assert results[name]["share"] == 0.5
        assert results[name]["sums"] == sums  # none: in the weights' own format
