"""Trainers' own files as values: thirty real ones, and what is no trainer's file."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from unit.trainers.trainer_examples import EXAMPLES, Example

from autofit.core.errors import UsageError
from autofit.trainers.keys import EFFECTS, Keys, known_keys
from autofit.trainers.run import Run, Where
from autofit.trainers.source_file import SourceFile
from autofit.trainers.trainer import READERS, recognised, trainer_named
from autofit.trainers.training_arguments import OPTIMIZERS, STAND_INS

AXOLOTL = {"base_model": "smollm2-135m", "sequence_len": 512, "micro_batch_size": 2}
FACTORY = {"model_name_or_path": "smollm2-135m", "stage": "sft", "finetuning_type": "full"}
TRL = {"model_name_or_path": "smollm2-135m", "max_length": 512, "dataset_name": "mine"}
ARGUMENTS = {"output_dir": "out", "per_device_train_batch_size": 2}
SELECTIVE = {"selective": True}


def read(values: dict[str, Any], **where: Any) -> Run:
    return recognised(values).read(values, Where(**where))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.file.replace("/examples/", ": "))
def test_a_real_file_is_read(example: Example) -> None:
    assert recognised(example.values) is example.trainer
    run = example.run()
    assert {name: getattr(run, name) for name in example.asks} == example.asks
    assert run.config.to_json() == example.config
    assert run.beyond == example.beyond
    assert {part.key: part.effect for part in run.not_counted} == example.not_counted
    assert [key.key for key in run.unknown] == example.unknown
    assert run.global_batch == run.config.number("micro_batch") * run.accumulation * run.devices


def test_there_are_thirty_of_three_trainers() -> None:
    assert Counter(example.asks["trainer"] for example in EXAMPLES) == {"axolotl": 16, "llamafactory": 10, "trl": 4}


def test_every_key_of_the_installed_trainers_is_known() -> None:
    from transformers import TrainingArguments
    from trl import ModelConfig, ScriptArguments, SFTConfig

    for owner, known in ((TrainingArguments, "transformers"), *((c, "trl") for c in (SFTConfig, ModelConfig))):
        assert {field.name for field in dataclasses.fields(owner)} <= known_keys(known).all
    assert {field.name for field in dataclasses.fields(ScriptArguments)} <= known_keys("trl").all


def test_arguments_that_a_script_has_written_are_of_their_trainer(tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainingArguments
    from trl import SFTConfig

    own = {"output_dir": str(tmp_path), "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False}
    run = read(json.loads(SFTConfig(**own, max_length=512).to_json_string()))
    assert (run.trainer, run.seq_len, run.config["checkpointing"], run.model) == ("trl", 512, "full", None)
    assert read(json.loads(Seq2SeqTrainingArguments(**own).to_json_string())).trainer == "transformers"
    assert read({**ARGUMENTS, "dataset_name": "mine"}).trainer == "transformers"


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_key_is_of_one_kind(name: str) -> None:
    known = known_keys(name)
    assert not known.read & known.irrelevant and not known.not_counted.keys() & (known.read | known.irrelevant)
    assert {effect for effect, _ in known.not_counted.values()} <= set(EFFECTS)


FSDP = {"fsdp": "full_shard", "fsdp_config": {"version": 1}}
BY_HAND: list[dict[str, Any]] = [
    {**TRL, "packing": True, "packing_strategy": "wrapped", "bf16": False, "activation_checkpointing": True},
    {**ARGUMENTS, **FSDP, "gradient_checkpointing": True, "use_liger_kernel": True, "eval_strategy": "steps"},
    {**FACTORY, "do_eval": True},
    {**AXOLOTL, "batch_size": 4, "bf16": False, "val_set_size": 0.1, "evals_per_epoch": 1, "eval_batch_size": 1},
]
"""Files with which readers look at keys that the thirty examples leave aside."""


def test_every_key_that_counts_as_read_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: set[str] = set()
    value = Keys.value
    monkeypatch.setattr(Keys, "value", lambda keys, name: (looked_at.add(name), value(keys, name))[1])
    for example in EXAMPLES:
        example.run()
    for values in BY_HAND:
        read(values, devices=2)
    assert not {name: known_keys(name).read - looked_at for name in READERS if known_keys(name).read - looked_at}


def test_fsdps_first_version_and_a_processor_are_not_counted() -> None:
    for values, key in (
        ({**AXOLOTL, "fsdp_config": {"offload_params": False}, "fsdp_version": 1}, "fsdp_version: 1"),
        ({**ARGUMENTS, **FSDP}, "fsdp_version: 1"),
        ({**ARGUMENTS, "use_cpu": True}, "use_cpu"),
    ):
        assert [(part.key, part.effect) for part in read(values, devices=2).not_counted] == [(key, "unknown")]


def test_the_trainers_defaults_decide_and_are_said() -> None:
    run = read(TRL)
    assert run.config["checkpointing"] == "full" and run.config["precision"] == "bf16-mixed"
    assert (run.config["micro_batch"], run.accumulation, run.config["optimizer"]) == (8, 1, "adamw")
    assert any("gradient_checkpointing is true" in message for message in run.assumed)
    assert any("dtype is float32" in message for message in run.assumed)
    assert read(FACTORY).config["checkpointing"] == "full"
    assert read({**TRL, "max_length": None}).seq_len is None
    assert read({"base_model": "x", "micro_batch_size": 1}).seq_len == 512
    arguments = read(ARGUMENTS)
    assert (arguments.model, arguments.seq_len, arguments.config["checkpointing"]) == (None, None, "none")
    assert arguments.config["precision"] == "fp32"


@pytest.mark.parametrize(
    ("values", "axis", "value"),
    [
        ({**TRL, "dtype": "bfloat16"}, "precision", "bf16"),
        ({**TRL, "fp16": True}, "precision", "fp16-mixed"),
        ({**TRL, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}, "checkpointing", "every-2"),
        ({**TRL, "gradient_checkpointing_kwargs": '{"every_n_layers": 2}'}, "checkpointing", "every-2"),
        ({**TRL, "activation_offloading": True}, "checkpointing", "offload"),
        ({**TRL, "optim": "adamw_torch"}, "optimizer", "adamw-foreach"),
        ({**TRL, "adafactor": True}, "optimizer", "adafactor"),
        ({**TRL, "use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]}, "targets", "attention"),
        ({**FACTORY, "pure_bf16": True}, "precision", "bf16"),
        ({**FACTORY, "disable_gradient_checkpointing": True}, "checkpointing", "none"),
        ({**FACTORY, "use_unsloth_gc": True}, "checkpointing", "offload"),
        ({**FACTORY, "flash_attn": "disabled"}, "attention", "eager"),
        ({**FACTORY, "flash_attn": "sdpa"}, "attention", "sdpa"),
        ({**TRL, "gradient_checkpointing_kwargs": SELECTIVE}, "checkpointing", "save-attention"),
        ({**TRL, "gradient_checkpointing_kwargs": SELECTIVE, "use_peft": True}, "checkpointing", "full"),
        ({**TRL, "bf16": False, "tf32": True}, "precision", "tf32"),
        ({**AXOLOTL, "bf16": False, "tf32": True}, "precision", "tf32"),
        ({**AXOLOTL, "bf16": False, "tf32": "auto"}, "precision", "fp32"),
        ({**ARGUMENTS, "bf16": False, "tf32": True}, "precision", "tf32"),
        ({**AXOLOTL, "selective_checkpointing": {"save": ["attention"]}}, "checkpointing", "save-attention"),
        ({**FACTORY, "enable_liger_kernel": True}, "loss", "fused"),
        ({**FACTORY, "enable_liger_kernel": True}, "kernels", "liger"),
        ({**TRL, "use_liger_kernel": True}, "kernels", "liger"),
        ({**AXOLOTL, "flash_attention": True}, "attention", "flash"),
        ({**AXOLOTL, "tiled_mlp": True, "tiled_mlp_num_shards": 2}, "mlp", "tiled"),
        ({**AXOLOTL, "tiled_mlp": True, "sequence_len": 65_536}, "mlp", "tiled"),
        ({**AXOLOTL, "fp16": True}, "precision", "fp16-mixed"),
        ({**AXOLOTL, "chunked_cross_entropy": True}, "loss", "full"),
        ({**AXOLOTL, "optimizer": "paged_adamw_8bit"}, "optimizer", "paged-adamw-8bit"),
        ({**ARGUMENTS, "activation_checkpointing": True}, "checkpointing", "full"),
        ({**ARGUMENTS, "use_liger_kernel": True}, "loss", "fused"),
        ({**ARGUMENTS, "use_liger_kernel": True}, "kernels", "liger"),
        ({**ARGUMENTS, "torch_compile": True}, "compile", True),
        ({**ARGUMENTS, "torch_compile_mode": "max-autotune"}, "compile", True),
        ({**TRL, "torch_compile_backend": "inductor"}, "compile", True),
        ({**FACTORY, "torch_compile_mode": "default"}, "compile", True),
        ({**ARGUMENTS, "per_gpu_train_batch_size": 4}, "micro_batch", 4),  # goes before the newer name
        ({**AXOLOTL, "selective_checkpointing": True}, "checkpointing", "save-attention"),
    ],
)
def test_a_key_means_an_axis(values: dict[str, Any], axis: str, value: object) -> None:
    assert read(values).config[axis] == value


@pytest.mark.parametrize(
    ("values", "optimizer", "effect"),
    [
        ({**AXOLOTL, "optimizer": "flash_adamw"}, "adamw", "less"),
        ({**AXOLOTL, "optimizer": "never_heard_of"}, "adamw", "unknown"),
        ({**TRL, "optim": "rmsprop_bnb_8bit"}, "lion-8bit", "unknown"),
        ({**TRL, "optim": "adamw_bnb_8bit"}, "adamw-8bit", None),
    ],
)
def test_another_optimizer_has_one_that_stands_for_it(
    values: dict[str, Any], optimizer: str, effect: str | None
) -> None:
    run = read(values)
    assert run.config["optimizer"] == optimizer
    assert [part.effect for part in run.not_counted] == ([] if effect is None else [effect])


def test_every_optimizer_of_transformers_is_known() -> None:
    from transformers.training_args import OptimizerNames

    assert {optimizer.value for optimizer in OptimizerNames} <= OPTIMIZERS.keys() | STAND_INS.keys()


def test_what_axolotl_calls_offload_is_activation_offloading() -> None:
    for keys in (
        {"gradient_checkpointing": "offload"},
        {"activation_offloading": True, "gradient_checkpointing": True},
    ):
        run = read({**AXOLOTL, **keys})
        assert run.config["checkpointing"] == "offload"
        assert [part.key for part in run.not_counted] == ["activation_offloading"]


@pytest.mark.parametrize(
    "keys", [{"quantization_bit": "4"}, {"quantization_bit": 4, "quantization_method": "bitsandbytes"}]
)
def test_older_spellings_of_4_bits_are_the_same(keys: dict[str, Any]) -> None:
    run = read({**FACTORY, "finetuning_type": "lora", **keys})
    assert run.config["method"] == "qlora" and run.not_counted == ()


@pytest.mark.parametrize(
    ("switches", "kernels", "not_counted"),
    [
        ({"liger_rope": True, "liger_rms_norm": True, "liger_glu_activation": True}, "liger", ()),
        ({"liger_rope": True, "liger_rms_norm": True, "liger_swiglu": True}, "liger", ()),
        ({"liger_rope": True, "liger_rms_norm": True}, None, ("liger_rope", "liger_rms_norm")),
        ({}, None, ()),
    ],
)
def test_ligers_kernels_count_where_all_of_them_are_asked_for(
    switches: dict[str, Any], kernels: str | None, not_counted: tuple[str, ...]
) -> None:
    """A plugin that is not loaded switches nothing."""
    run = read({**AXOLOTL, "plugins": ["axolotl.integrations.liger.LigerPlugin"], **switches})
    assert run.config.get("kernels") == kernels
    assert tuple(part.key for part in run.not_counted) == not_counted
    assert read({**AXOLOTL, **switches}).config.get("kernels") is None


def test_what_trl_refuses_of_liger_is_refused() -> None:
    assert read({**TRL, "use_liger_kernel": True, "liger_kernel_config": {"rope": True}}).config["loss"] == "chunked"
    with pytest.raises(UsageError, match="which trl refuses: leave it out"):
        read({**TRL, "use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}})


@pytest.mark.parametrize(
    ("off", "kernels", "notes"),
    [
        (("geglu",), "liger", 1),
        (("rope",), None, 1),
        (("rope", "rms_norm", "swiglu"), None, 1),
        (("rope", "rms_norm", "swiglu", "geglu"), None, 0),
        (("swiglu", "geglu"), None, 1),
    ],
)
def test_a_model_has_one_of_ligers_two_gated_layers(off: tuple[str, ...], kernels: str | None, notes: int) -> None:
    """Which one is not known here: where they differ, that is said."""
    run = read({**ARGUMENTS, "use_liger_kernel": True, "liger_kernel_config": dict.fromkeys(off, False)})
    assert (run.config["loss"], run.config.get("kernels")) == ("fused", kernels)
    assert [part.key for part in run.not_counted] == ["liger_kernel_config"] * notes


def test_one_tile_is_the_whole_sequence() -> None:
    run = read({**AXOLOTL, "tiled_mlp": True, "sequence_len": 32_768})
    assert "mlp" not in run.config and "tiled_mlp: one tile has 32,768 tokens" in run.notes[0]


def test_bf16_is_what_the_card_has() -> None:
    assert read(AXOLOTL, bf16=False).config["precision"] == "fp16-mixed"
    assert read({**AXOLOTL, "bf16": True}, bf16=False).config["precision"] == "bf16"


@pytest.mark.parametrize("plugin", ["axolotl.integrations.mora.MoraPlugin", "mine.AdapterPlugin"])
def test_adapters_of_a_plugin_are_taken_for_lora(plugin: str) -> None:
    run = read({**AXOLOTL, "adapter": "mora", "plugins": [plugin]})
    assert run.config["method"] == "lora" and run.not_counted[0].key == "adapter: mora"


def test_adapters_that_trl_is_not_told_to_make_are_said() -> None:
    idle = read({**TRL, "lora_r": 16})
    assert idle.config["method"] == "full" and idle.adapters == ("use_peft", True) and "use_peft" in idle.notes[0]
    for decided in (TRL, {**TRL, "lora_r": 16, "use_peft": False}, {**TRL, "lora_r": 16, "use_peft": True}):
        assert (read(decided).adapters, read(decided).notes) == (None, ())


FLASH = {"attn_implementation": "flash_attention_2"}


@pytest.mark.parametrize(
    ("values", "effect", "mask"),
    [
        ({**TRL, "packing": True}, "more", "16 MiB"),  # of 8 x 512 tokens
        ({**TRL, "packing": True, "max_length": None}, "more", "dense mask"),
        ({**TRL, "padding_free": True}, "more", "16 MiB"),
        ({**TRL, "padding_free": True, **FLASH}, "less", ""),
        ({**TRL, "packing": True, **FLASH}, None, ""),
        ({**TRL, "packing": True, "packing_strategy": "wrapped"}, None, ""),
        ({**FACTORY, "neat_packing": True, "cutoff_len": 1024}, "more", "16 MiB"),  # 8 of 1024 x 1024
        ({**FACTORY, "neat_packing": True, "flash_attn": "fa2"}, "less", ""),
        ({**FACTORY, "packing": True}, None, ""),
    ],
)
def test_sequences_that_a_mask_keeps_apart_need_more(values: dict[str, Any], effect: str | None, mask: str) -> None:
    not_counted = read(values).not_counted
    assert [part.effect for part in not_counted] == ([] if effect is None else [effect])
    assert all(mask in part.because for part in not_counted)


def test_frozen_weights_in_another_format_are_counted() -> None:
    lora = {**TRL, "use_peft": True}
    assert read(lora).beyond == (("all", 2.0),)
    assert read({**lora, "dtype": "bfloat16"}).beyond == ()
    assert read({**lora, "dtype": "bfloat16", "load_in_8bit": True}).beyond == (("linear", -1.0),)
    adapters = {"finetuning_type": "lora", "additional_target": "embed_tokens,lm_head,norm"}
    assert read({**FACTORY, **adapters}).beyond == (("vocabulary", 32.0),)


@pytest.mark.parametrize(
    ("settings", "sharding", "offload"),
    [
        ({"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_params.json"}, "zero3", "params"),
        ({"deepspeed": "ds_z2_offload_config.json"}, "zero2", "optimizer"),
        ({"deepspeed": {"zero_optimization": {"stage": 1}}}, "zero1", "none"),
        ({"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}}, "zero3", "nvme"),
        ({"fsdp": "full_shard auto_wrap offload"}, "fsdp", "params"),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}}, "fsdp-no-reshard", "none"),
        ({"fsdp": "shard_grad_op auto_wrap"}, "fsdp-no-reshard", "none"),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": "false"}}, "fsdp-no-reshard", "none"),
        ({"fsdp": ["no_shard"]}, "ddp", "none"),
        ({"fsdp": []}, "ddp", "none"),
        (
            {"deepspeed": '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'},
            "zero2",
            "optimizer",
        ),
        ({"deepspeed": json.dumps({"comment": "long " * 100, "zero_optimization": {"stage": 3}})}, "zero3", "none"),
    ],
)
def test_what_several_devices_share(settings: dict[str, Any], sharding: str, offload: str) -> None:
    run = read({**FACTORY, **settings}, devices=4)
    assert (run.devices, run.config["sharding"], run.config["offload"]) == (4, sharding, offload)


@pytest.mark.parametrize(
    "settings",
    [
        {"fsdp_version": 2, "fsdp_config": {"offload_params": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}},
        {"fsdp": ["full_shard", "offload"]},
    ],
)
def test_either_of_its_keys_turns_axolotls_fsdp_on(settings: dict[str, Any]) -> None:
    run = read({**AXOLOTL, **settings}, devices=8)
    assert (run.config["sharding"], run.config["offload"], run.unknown) == ("fsdp", "params", ())


def test_trainer_looks_at_the_settings_of_fsdp_where_that_is_on(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"reshard_after_forward": False, "cpu_offload": True}))
    in_file = {"fsdp": True, "fsdp_config": "mine.json"}
    run = read({**TRL, **in_file}, devices=2, folder=tmp_path)
    assert (run.config["sharding"], run.config["offload"]) == ("fsdp-no-reshard", "params")
    assert read({**TRL, **in_file, "fsdp": []}, devices=2, folder=tmp_path).config["sharding"] == "ddp"
    with pytest.raises(UsageError, match=r"fsdp_config is 'mine.json': .* or a JSON file that is here"):
        read({**TRL, **in_file}, devices=2)


def test_deepspeeds_own_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert read({**TRL, "deepspeed": "mine.json"}, devices=2, folder=tmp_path).config["sharding"] == "zero2"
    with pytest.raises(UsageError, match=r"names mine.json, which is not here"):
        read({**TRL, "deepspeed": "mine.json"}, devices=2)
    with pytest.raises(UsageError, match="several GPUs: say how many with --devices"):
        read({**TRL, "deepspeed": "mine.json"}, folder=tmp_path)
    alone = read({**TRL, "deepspeed": "zero3_offload.json"}, devices=1)
    assert (alone.config["sharding"], alone.config["offload"]) == ("none", "params")


OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("keys", "settings", "optimizer", "not_counted"),
    [
        ({**TRL, "optim": "adamw_bnb_8bit"}, {"optimizer": {"type": "AdamW"}}, "adamw", []),
        ({**AXOLOTL, "optimizer": "lion_8bit"}, {"optimizer": {"type": "Lion"}}, "lion", []),
        (TRL, {"optimizer": {"type": "OneBitAdam"}}, "adamw", ["deepspeed.optimizer: OneBitAdam"]),
        ({**TRL, "optim": "adamw_bnb_8bit"}, {}, "adamw-8bit", []),
        ({**TRL, "optim": "adamw_bnb_8bit"}, OFFLOADED, "adamw", ["optim: adamw_bnb_8bit"]),
        ({**TRL, "optim": "adamw_torch"}, OFFLOADED, "adamw", []),
        (
            {**TRL, "optim": "adamw_torch"},
            {**OFFLOADED, "optimizer": {"type": "Lion"}},
            "adamw",
            ["deepspeed.optimizer: Lion"],
        ),
    ],
)
def test_deepspeeds_own_optimizer_takes_the_trainers_place(
    keys: dict[str, Any], settings: dict[str, Any], optimizer: str, not_counted: list[str]
) -> None:
    """On the host its Adam stands for every other, as trials have no other there."""
    run = read({**keys, "deepspeed": {"zero_optimization": {"stage": 2}, **settings}}, devices=2)
    assert run.config["optimizer"] == optimizer
    assert [part.key for part in run.not_counted] == not_counted
    assert any("own optimizer" in note for note in run.notes) is ("optimizer" in settings)


def test_an_unknown_key_is_named_with_the_nearest() -> None:
    run = read({**AXOLOTL, "micro_batchsize": 4, "gradient_checkpointing": True, "fsdp_config": {}})
    assert [(key.key, key.nearest[0]) for key in run.unknown] == [("micro_batchsize", "micro_batch_size")]
    inner = read({**TRL, "gradient_checkpointing_kwargs": {"use_reentrent": True}})
    assert inner.unknown[0].key == "gradient_checkpointing_kwargs.use_reentrent"
    assert inner.unknown[0].nearest[0].endswith("use_reentrant")
    assert read({**AXOLOTL, "wandb_project": None, "special_tokens": {}}).unknown == ()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**AXOLOTL, "micro_batch_size": "two"}, "micro_batch_size is 'two': it must be a whole number"),
        ({**AXOLOTL, "micro_batch_size": 0}, "it must be a whole number of at least 1"),
        ({**AXOLOTL, "micro_batch_size": True}, "it must be a whole number of at least 1"),
        ({**AXOLOTL, "lora_dropout": 2, "adapter": "lora"}, "lora_dropout is 2: it must be a number"),
        ({**AXOLOTL, "gradient_checkpointing": "maybe"}, "it must be true or false"),
        ({**AXOLOTL, "optimizer": "adamw_8bits"}, "optimizer is 'adamw_8bits': autofit knows adamw_8bit"),
        ({**AXOLOTL, "adapter": "qlora"}, "adapter: qlora needs load_in_4bit: true"),
        ({**AXOLOTL, "adapter": "qlorra", "load_in_4bit": True}, "adapter is 'qlorra': autofit knows qlora"),
        ({**AXOLOTL, "adapter": "lroa"}, "adapter is 'lroa': autofit knows lora"),
        ({**AXOLOTL, "adapter": "LoRA", "plugins": ["x.liger.LigerPlugin"]}, "adapter is 'LoRA': autofit knows lora"),
        ({**AXOLOTL, "load_in_4bit": True}, "quantised weights cannot be trained"),
        ({**AXOLOTL, "attn_implementation": "flash"}, "attn_implementation is 'flash': autofit knows"),
        ({**AXOLOTL, "lora_target_modules": {"q": 1}, "adapter": "lora"}, "it must be a list of names"),
        ({**AXOLOTL, "deepspeed": 3}, "deepspeed is 3: it must be a file or its settings"),
        ({**AXOLOTL, "fsdp_config": "no"}, "fsdp_config is 'no': it must be a mapping"),
        ({**FACTORY, "stage": "sftt"}, "stage is 'sftt': autofit knows sft"),
        ({**FACTORY, "finetuning_type": "loraa"}, "finetuning_type is 'loraa': autofit knows lora"),
        ({**FACTORY, "export_dir": "out"}, "trains nothing"),
        ({**TRL, "deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}}}, "must be a mapping"),
        ({**AXOLOTL, "micro_batch_size": "9" * 5000}, "it must be a whole number"),
        ({**TRL, "model_name_or_path": 7}, "model_name_or_path is 7: it must be text"),
        ({**TRL, "deepspeed": {"zero_optimization": {"stage": 7}}}, "must be 0, 1, 2 or 3"),
        ({**TRL, "deepspeed": '{"zero_optimization": 2'}, "deepspeed is not JSON"),
        ({**TRL, "deepspeed": "mine" * 100}, "names mine.*, which is not here"),
    ],
)
def test_a_wrong_value_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- a\n- b\n", "holds a list"),
        ("just words", "holds plain text"),
        ("a: [1\n", "is not YAML"),
        ('{"a": 1,}', "is not JSON"),
        ("a:\tb: c\n", "is not YAML"),
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
        ("base_model: x\nbf16: true\nbase_model: y\n", "has base_model twice"),
        ("from unsloth import FastLanguageModel\nmodel = FastLanguageModel()\n", "holds plain text|is not YAML"),
        ("version: '3'\nservices:\n  web:\n    image: nginx\n", "Docker Compose"),
        ('{"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}', "a DeepSpeed configuration"),
        ("compute_environment: LOCAL_MACHINE\nnum_processes: 8\n", "accelerate launch"),
        ('{"architectures": ["LlamaForCausalLM"], "hidden_size": 64}', "config.json"),
        ("tokenizer:\n  _component_: torchtune.models.llama3\n", "torchtune"),
        ("model: Qwen/Qwen3-4B\nkernel_config: {name: auto}\n", "new engine"),
        ("model_name_or_path: x\nreward_funcs: [accuracy]\n", "GRPO"),
        ("hello: world\n", "no trainer's file has the keys hello"),
        ("model_name_or_path: x\nlearning_rate: 1\n", "llamafactory or trl: say which with --trainer"),
    ],
)
def test_what_is_no_trainers_file_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        recognised(SourceFile.of("my.file", text).values)


def test_a_file_must_be_readable_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        SourceFile.read(tmp_path / "none.yml")
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)))
    with pytest.raises(UsageError, match="is not text"):
        SourceFile.read(tmp_path / "weights.bin")
    with pytest.raises(UsageError, match="unknown trainer 'axolot': did you mean axolotl"):
        trainer_named("axolot")


@pytest.mark.parametrize(
    ("values", "evaluation"),
    [
        (TRL, None),
        ({**TRL, "eval_strategy": "no", "per_device_eval_batch_size": 4}, None),
        ({**TRL, "eval_strategy": False, "do_eval": True}, None),  # a bare no of YAML
        ({**TRL, "eval_strategy": "steps"}, ("per_device_eval_batch_size", 8)),
        ({**TRL, "evaluation_strategy": "epoch", "per_device_eval_batch_size": 4}, ("per_device_eval_batch_size", 4)),
        ({**ARGUMENTS, "eval_on_start": True}, ("per_device_eval_batch_size", 8)),
        ({**FACTORY, "do_eval": True}, ("per_device_eval_batch_size", 8)),
        (AXOLOTL, None),
        ({**AXOLOTL, "val_set_size": 0.0, "eval_batch_size": 4}, None),
        ({**AXOLOTL, "val_set_size": 0.05}, None),
        ({**AXOLOTL, "val_set_size": 0.05, "evals_per_epoch": 4}, ("eval_batch_size", 2)),
        (
            {**AXOLOTL, "test_datasets": [{"path": "mine"}], "eval_steps": 50, "eval_batch_size": 4},
            ("eval_batch_size", 4),
        ),
        ({**AXOLOTL, "val_set_size": 0.05, "eval_strategy": "no"}, None),
        ({**AXOLOTL, "evals_per_epoch": 4}, None),
    ],
)
def test_evaluation_is_read_as_each_trainer_decides_it(
    values: dict[str, Any], evaluation: tuple[str, int] | None
) -> None:
    evaluates = read(values).evaluates
    assert (None if evaluates is None else (evaluates.key, evaluates.sequences)) == evaluation


def test_the_arguments_that_a_script_has_written_are_edited_in_their_own_keys() -> None:
    """They hold no keys of the model: `SFTConfig` would refuse `use_peft` or `attn_implementation`."""
    arguments = {"output_dir": "o", "per_device_train_batch_size": 8, "packing_strategy": "bfd", "max_length": 512}
    trainer = recognised(arguments)
    assert trainer.name == "trl" and trainer.read(arguments, Where()).seq_len == 512
    assert trainer.table is READERS["transformers"].table
    assert recognised({**arguments, "model_name_or_path": "m"}).table is READERS["trl"].table
