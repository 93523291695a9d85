"""YAML for axolotl and LLaMA-Factory: it has keys that their sources read, and says what the config says.

`trainers_keys.json` has the names of keys, values and parameters in the versions that it states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from export_samples import OPTIM, UNCHECKPOINTED, make_config, make_recommendation

from autofit.core.frontier import Recommendation
from autofit.core.lattice import Config, Value
from autofit.export import FORMATS, export
from autofit.export.distributed import FIRST_GPU, by_deepspeed, deepspeed_config
from autofit.export.document import Recommended
from autofit.export.trainer_arguments import FILLED
from autofit.techniques.axes.kernels import by_liger
from autofit.techniques.selective import SELECTIVE

KNOWN = json.loads((Path(__file__).parent / "trainers_keys.json").read_text())
READ = {"json", "transformers", "trl", "accelerate", "deepspeed"}
"""The formats that other tests of this folder have their own library read, and the JSON that is no trainer's."""


def document(recommendation: Recommendation, name: str) -> dict[str, Any]:
    result: dict[str, Any] = yaml.safe_load(export(recommendation, format=name, source="org/model").text)
    return result


def recommended(config: Config, index: int) -> Recommendation:
    return make_recommendation(config, devices=2 if index % 3 else 1, lora_dropout=index % 2 / 10)


@pytest.fixture(scope="module")
def some(sampled: list[Config]) -> list[Recommendation]:
    """A third of the sample: seconds are few, and the exporters look at two axes at most together."""
    return [recommended(config, index) for index, config in enumerate(sampled[::3])]


def test_every_format_is_read_by_its_own_library_or_has_its_keys_here() -> None:
    assert not KNOWN.keys() & READ
    assert KNOWN.keys() | READ == FORMATS.keys()


@pytest.mark.parametrize("name", KNOWN)
def test_every_key_and_name_is_one_that_the_trainer_reads(name: str, some: list[Recommendation]) -> None:
    known = KNOWN[name]
    for recommendation in some:
        result = document(recommendation, name)
        assert set(result) <= set(known["keys"])
        for key, choices in known["choices"].items():
            assert isinstance(result.get(key), bool | None) or result[key] in choices, (key, result[key])
        for nested in ("fsdp_config", "selective_checkpointing"):
            assert nested not in known or set(result.get(nested, {})) <= set(known[nested])


@pytest.mark.parametrize("name", ["axolotl", "llamafactory"])
def test_the_batch_and_the_libraries_are_those_measured(name: str, some: list[Recommendation]) -> None:
    size = {"axolotl": "micro_batch_size", "llamafactory": "per_device_train_batch_size"}[name]
    evaluated = {"axolotl": "eval_batch_size", "llamafactory": "per_device_eval_batch_size"}[name]
    for recommendation in some:
        config, workload, result = recommendation.point.config, recommendation.workload, document(recommendation, name)
        assert result[size] == config["micro_batch"]
        assert result[size] * result["gradient_accumulation_steps"] * workload.devices == workload.global_batch
        # Training on as many takes more, but with Liger's loss, which is for training alone in these trainers.
        assert result[evaluated] == (1 if config["loss"] == "fused" else config["micro_batch"])
        notes = export(recommendation, format=name, source="org/model").notes
        assert any("makes all logits in evaluation" in note for note in notes) is (config["loss"] == "fused")
        requested = replace(recommendation, workload=replace(workload, eval_batch=16))
        assert document(requested, name)[evaluated] == 16
        assert (result["max_grad_norm"], result["learning_rate"]) == (1.0, "CHOOSE")
        assert result["torch_compile"] is config["compile"]
        fsdp = config.text("sharding").startswith("fsdp")
        assert ("fsdp_config" in result) is fsdp
        if fsdp:
            assert result["fsdp_config"]["reshard_after_forward"] is (config["sharding"] == "fsdp")
            assert result["accelerator_config"] == {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        task = Recommended.of(recommendation, "x")
        assert ("deepspeed" in result) is by_deepspeed(task)
        if "deepspeed" in result:
            assert result["deepspeed"] == deepspeed_config(task, filled=FILLED)


def test_axolotl_says_what_the_config_says(some: list[Recommendation]) -> None:
    for recommendation in some:
        config, result = recommendation.point.config, document(recommendation, "axolotl")
        method, precision, value = config["method"], config["precision"], config["checkpointing"]
        assert result.get("adapter") == (None if method == "full" else method)
        assert result.get("load_in_4bit", False) is (method == "qlora")
        if method != "full":
            assert (result["lora_r"], result["lora_alpha"]) == (config["rank"], 2 * config.number("rank"))
            assert result["lora_target_linear"] is (config["targets"] == "all-linear")
            assert result["peft_autocast_adapter_dtype"] is (precision != "bf16")
        assert (result["bf16"], result["fp16"]) == (str(precision).startswith("bf16"), precision == "fp16-mixed")
        assert result["gradient_checkpointing"] is (value not in UNCHECKPOINTED)
        kwargs = result.get("gradient_checkpointing_kwargs", {})
        assert kwargs.get("every_n_layers", 1) == {"every-2": 2, "every-4": 4}.get(str(value), 1)
        assert (result.get("activation_offloading") == "hidden_states") is (value == "offload")
        assert ("selective_checkpointing" in result) is (value in SELECTIVE)
        refused = config["optimizer"] == "adamw-8bit" and config.text("sharding").startswith("fsdp")
        assert result["optimizer"] == ("adamw_torch_8bit" if refused else OPTIM[config.text("optimizer")])
        assert result["weight_decay"] == (0.01 if "adamw" in config.text("optimizer") else 0.0)
        switches = {key: value for key, value in result.items() if key.startswith("liger_")}
        layers = ["liger_rope", "liger_rms_norm", "liger_glu_activation"] if by_liger(config) else []
        loss = ["liger_fused_linear_cross_entropy"] if config["loss"] == "fused" else []
        assert [key for key, value in switches.items() if value] == layers + loss


def test_axolotl_has_as_many_tiles_as_were_measured() -> None:
    result = document(make_recommendation(make_config(mlp="tiled", checkpointing="full"), seq_len=32_768), "axolotl")
    tiles = {key: value for key, value in result.items() if key.startswith("tiled_mlp")}
    assert tiles == {"tiled_mlp": True, "tiled_mlp_num_shards": 8, "tiled_mlp_use_original_mlp": True}


def test_llamafactory_says_what_the_config_says(some: list[Recommendation]) -> None:
    for recommendation in some:
        config, result = recommendation.point.config, document(recommendation, "llamafactory")
        method, precision, value = config["method"], config["precision"], config["checkpointing"]
        assert result["finetuning_type"] == ("full" if method == "full" else "lora")
        assert result.get("quantization_bit") == (4 if method == "qlora" else None)
        if method != "full":
            assert (result["lora_rank"], result["lora_alpha"]) == (config["rank"], 2 * config.number("rank"))
            attention = "k_proj,o_proj,q_proj,v_proj"
            assert result["lora_target"] == (attention if config["targets"] == "attention" else "all")
        assert result["pure_bf16"] is (precision == "bf16" and "deepspeed" not in result)
        assert result["fp16"] is (precision == "fp16-mixed")
        off = value in UNCHECKPOINTED
        assert (result["disable_gradient_checkpointing"], result["use_reentrant_gc"]) == (off, False)
        assert result.get("use_unsloth_gc", False) is (value == "offload")
        assert result["optim"] == OPTIM[config.text("optimizer")]
        assert result["weight_decay"] == (0.01 if "adamw" in config.text("optimizer") else 0.0)
        assert result["cutoff_len"] + 1 == recommendation.workload.seq_len  # packed sequences have one token more
        offloads = config.text("sharding").startswith("fsdp") and config["offload"] == "params"
        assert ("offload" in result.get("fsdp", "")) is offloads


NOTES: dict[str, list[tuple[dict[str, Value], set[str]]]] = {
    "axolotl": [
        ({"attention": "flash", "precision": "fp32", "micro_batch": 64}, set()),
        ({"attention": "flash"}, {"precision=bf16-mixed", "micro_batch=2"}),
        ({"attention": "flash", "precision": "fp32", "loss": "chunked"}, {"loss=chunked", "micro_batch=2"}),
        (
            {"attention": "flash", "precision": "fp32", "checkpointing": "selective"},
            {"checkpointing=selective", "micro_batch=2"},
        ),
        ({"attention": "flash", "precision": "fp32", "checkpointing": "save-attention"}, {"micro_batch=2"}),
        ({"attention": "efficient", "precision": "fp32"}, {"attention=efficient", "micro_batch=2"}),
        ({"attention": "flash", "precision": "fp32", "mlp": "tiled"}, {"mlp=tiled", "micro_batch=2"}),
        (
            {"attention": "flash", "precision": "fp32", "sharding": "fsdp", "optimizer": "adamw-8bit"},
            {"optimizer=adamw-8bit", "sharding=fsdp", "micro_batch=2"},
        ),
        ({"attention": "flash", "sharding": "zero3", "offload": "nvme"}, {"offload=nvme", "micro_batch=2"}),
        (
            {"attention": "flash", "precision": "fp32", "sharding": "ddp", "offload": "params"},
            {"offload=params", "sharding=ddp", "micro_batch=2"},
        ),
    ],
    "llamafactory": [
        ({}, set()),
        ({"checkpointing": "every-4"}, {"checkpointing=every-4"}),
        ({"checkpointing": "save-attention"}, {"checkpointing=save-attention"}),
        ({"attention": "efficient", "precision": "fp32"}, {"attention=efficient"}),
        ({"mlp": "tiled"}, {"mlp=tiled"}),
        ({"checkpointing": "budget-25"}, {"checkpointing=budget-25"}),
        ({"method": "lora", "precision": "fp32"}, {"precision=fp32"}),
        ({"method": "qlora", "precision": "bf16"}, {"precision=bf16"}),
        ({"loss": "fused"}, {"loss=fused", "evaluation"}),
        ({"sharding": "fsdp", "offload": "params"}, {"sharding=fsdp"}),
        ({"sharding": "zero3", "offload": "nvme"}, {"offload=nvme"}),
    ],
}


@pytest.mark.parametrize("name", NOTES)
def test_notes_name_what_the_trainer_cannot_say(name: str) -> None:
    for values, expected in NOTES[name]:
        devices = 1 if values.get("sharding", "none") == "none" else 2
        made = export(make_recommendation(make_config(**values), devices=devices), format=name, source="x")
        assert {note.partition(":")[0] for note in made.notes} == expected, values
        assert all(f"# Differs:   {note}" in made.text for note in made.notes)


@pytest.mark.parametrize("name", ["transformers", "axolotl", "llamafactory"])
def test_trainers_are_said_to_leave_liger_out_where_it_has_nothing_for_the_model(name: str) -> None:
    for model, more in (("pythia-160m", True), ("llama-3.2-1b", False)):
        made = export(make_recommendation(make_config(loss="fused"), model=model), format=name, source="x")
        assert any("leaves Liger out" in note for note in made.needs_more) is more


def test_the_launch_says_how_many_processes() -> None:
    def launch(name: str, **workload: Any) -> str:
        text = export(make_recommendation(make_config(sharding="none"), **workload), format=name, source="x").text
        return next(line for line in text.splitlines() if line.startswith("# Launch:"))

    assert "--num_processes 4" in launch("axolotl", devices=4)
    assert "FORCE_TORCHRUN=1 NPROC_PER_NODE=4 " in launch("llamafactory", devices=4)
    for name in NOTES:
        assert FIRST_GPU in launch(name)


def test_a_measurement_on_the_cpu_is_said_to_be_one() -> None:
    recommendation = make_recommendation(make_config(precision="fp32"))
    on_cpu = replace(recommendation, hardware=replace(recommendation.hardware, kind="cpu"))
    assert document(on_cpu, "llamafactory")["use_cpu"] is True
    notes = export(on_cpu, format="axolotl", source="x").notes
    assert any(note.startswith("hardware: axolotl has no setting for the CPU") for note in notes)
