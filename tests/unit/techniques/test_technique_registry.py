"""Completing, reading and judging configs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autofit.catalog.models import Model
from autofit.core.device.hardware import Hardware
from autofit.core.errors import UsageError
from autofit.core.lattice import Axis, Value
from autofit.core.workload import Effect, Goal
from autofit.export.trainer_arguments import OPTIMIZERS
from autofit.techniques import AXES, TECHNIQUES, Job, changes, complete, family, needs_process_group, parse, unsupported
from autofit.techniques.axes.attention import attention_format, keeps_scores
from autofit.techniques.axes.compilation import missing_tool
from autofit.techniques.trainer_names import names_of
from tests.tiny import COHERE, CPU_HARDWARE, CTRL, CUDA_HARDWARE, GEMMA2, GPT2, LLAMA, PHI, QWEN3_MOE, STACK, job, model

FLASH = replace(STACK, flash_attn="2.8.3")
LIGER = replace(STACK, liger_kernel="0.6.4")
BARE = replace(STACK, bitsandbytes=None)
PASCAL = replace(CUDA_HARDWARE, name="gtx-1080-ti", capability="6.1", bf16=False)
T4 = replace(CUDA_HARDWARE, name="t4", capability="7.5", bf16=False)
MI300X = replace(CUDA_HARDWARE, name="mi300x", device_name="AMD Instinct MI300X", capability="gfx942")
MAC = Hardware(name="m3-max", kind="mps", device_name="Apple M3 Max", memory_bytes=64 * 2**30)
XPU = Hardware(name="max-1550", kind="xpu", device_name="Intel Max 1550", memory_bytes=64 * 2**30)


def test_every_axis_of_the_contract_is_there_once_in_its_order() -> None:
    assert [axis.name for axis in AXES] == [
        "method",
        "rank",
        "targets",
        "precision",
        "micro_batch",
        "batching",
        "checkpointing",
        "optimizer",
        "update",
        "attention",
        "kernels",
        "mlp",
        "loss",
        "compile",
        "offload",
        "sharding",
    ]
    assert tuple(technique.axis for technique in TECHNIQUES) == AXES


def test_a_config_of_nothing_is_the_plain_recipe() -> None:
    assert complete({}).to_json() == {
        "method": "full",
        "precision": "bf16-mixed",
        "micro_batch": 1,
        "checkpointing": "none",
        "optimizer": "adamw",
        "attention": "sdpa",
        "loss": "full",
        "compile": False,
        "offload": "none",
        "sharding": "none",
    }


def test_a_method_with_adapters_gets_rank_and_targets() -> None:
    config = complete({"method": "lora"})
    assert config["rank"] == 8
    assert config["targets"] == "all-linear"


def test_defaults_of_a_space_come_before_the_recipe_and_after_what_is_given() -> None:
    defaults: dict[str, Value] = {"rank": 32, "micro_batch": 4, "loss": "chunked"}
    config = complete({"method": "qlora", "micro_batch": 2}, defaults)
    assert (config["rank"], config["micro_batch"], config["loss"]) == (32, 2, "chunked")
    assert complete({}, defaults).get("rank") is None
    assert complete({"rank": 16}, {"method": "lora"})["rank"] == 16


@pytest.mark.parametrize("name", ["rank", "targets"])
def test_an_adapter_axis_of_a_method_without_adapters_is_refused(name: str) -> None:
    values = {"rank": 8, "targets": "attention"}
    with pytest.raises(UsageError, match=f"{name} does not apply to method full: leave it out"):
        complete({"method": "full", name: values[name]})


def test_text_spells_values_with_spaces_a_comma_at_the_end_and_any_case() -> None:
    assert parse(" method = LoRA, rank=16,compile=True, micro_batch=4, ") == {
        "method": "lora",
        "rank": 16,
        "compile": True,
        "micro_batch": 4,
    }
    assert parse("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("method", "config 'method' is not understood: write axis=value, such as micro_batch=4"),
        ("methods=full", "unknown axis 'methods': did you mean method"),
        ("method=ful", "unknown value of method 'ful': did you mean full"),
        ("rank=8,rank=16", "config names rank twice"),
        ("micro_batch=1,,loss=fused", "config has nothing between two commas, after 'micro_batch=1'"),
        ("loss=fused, ,", "config has nothing between two commas, after 'loss=fused'"),
        (",loss=fused", "config has nothing before its first comma"),
        ("rank=", "unknown value of rank ''"),
        ("=8", "unknown axis ''"),
        ("compile=yes", "unknown value of compile 'yes': valid: false, true"),
    ],
)
def test_text_that_is_wrong_is_refused_by_the_part_that_is(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse(text)
    assert message in str(refusal.value)


def test_changes_name_what_is_not_the_plain_recipe() -> None:
    assert changes(complete({"checkpointing": "full", "micro_batch": 8, "loss": "chunked", "compile": True})) == ()
    config = complete({"method": "lora", "optimizer": "adamw-8bit", "precision": "bf16", "targets": "attention"})
    assert changes(config) == (
        "method=lora instead of full changes the training itself",
        "targets=attention instead of all-linear changes the training itself",
        "precision=bf16 instead of bf16-mixed changes numerical precision",
        "optimizer=adamw-8bit instead of adamw changes numerical precision",
    )


def test_a_higher_rank_than_the_users_changes_the_training() -> None:
    config = complete({"method": "lora", "rank": 64})
    method, rank = changes(config)
    assert rank == "rank=64 instead of 8 changes the training itself"
    assert changes(config, Goal(min_rank=16)) == (method, rank.replace("8", "16"))
    assert changes(config, Goal(min_rank=64)) == (method,)


def test_the_method_that_the_user_names_is_no_change() -> None:
    for method in ("lora", "qlora"):
        config = complete({"method": method})
        assert changes(config, Goal(method=method)) == ()
        assert changes(config, Goal()) == (f"method={method} instead of full changes the training itself",)
    assert changes(complete({"method": "full"}), Goal(method="full")) == ()


def test_the_plain_recipe_changes_nothing() -> None:
    for axis in AXES:
        if axis.values and axis.recipe is not None:
            assert axis.effect(axis.recipe) is Effect.EXACT


def test_a_family_shares_all_that_is_not_exact() -> None:
    base = complete({"method": "lora", "rank": 16})
    exact = base.replace(micro_batch=8, checkpointing="full", attention="eager", loss="chunked", compile=True)
    assert family(exact) == family(base)
    others = [
        base.replace(rank=32),
        base.replace(method="qlora"),
        base.replace(targets="attention"),
        base.replace(precision="bf16"),
        base.replace(optimizer="adamw-8bit"),
    ]
    assert len({family(config) for config in [base, *others]}) == 6


@pytest.mark.parametrize(
    ("values", "job", "reason"),
    [
        ({"micro_batch": 3}, job(), "micro_batch 3 does not divide the 4 sequences"),
        ({"micro_batch": 8}, job(), "micro_batch 8 does not divide the 4 sequences"),
        ({"checkpointing": "offload"}, job(), "checkpointing=offload moves activations to host memory"),
        ({"attention": "flash"}, job(), "attention=flash needs a CUDA device"),
        ({"attention": "flash"}, job(hardware=CUDA_HARDWARE), "needs the flash-attn package"),
        ({"attention": "flash", "precision": "fp32"}, job(hardware=CUDA_HARDWARE, stack=FLASH), "16 bits only"),
        (
            {"attention": "flash", "precision": "fp16-mixed"},
            job(hardware=T4, stack=FLASH),
            "needs compute capability 8.0, t4 has 7.5",
        ),
        ({"loss": "fused"}, job(stack=LIGER), "needs an accelerator that Triton compiles for"),
        ({"loss": "fused"}, job(hardware=CUDA_HARDWARE), "needs the liger-kernel package"),
        ({"kernels": "liger"}, job(stack=LIGER), "needs an NVIDIA or AMD GPU"),
        *(
            ({"precision": "fp32", name: value}, job(hardware=PASCAL, stack=LIGER), "need compute capability 7.0")
            for name, value in (("kernels", "liger"), ("loss", "fused"), ("compile", True))
        ),
        (
            {"kernels": "liger", "checkpointing": "selective"},
            job(hardware=CUDA_HARDWARE, stack=LIGER),
            "wrong gradients with checkpointing=selective",
        ),
        ({"kernels": "liger"}, job(hardware=CUDA_HARDWARE), "needs the liger-kernel package"),
        (
            {"kernels": "liger"},
            job(QWEN3_MOE, hardware=CUDA_HARDWARE, stack=LIGER),
            "not known to work for tiny-qwen3_moe",
        ),
        ({"mlp": "tiled"}, job(QWEN3_MOE, seq_len=128), "dense models"),
        ({"mlp": "tiled"}, job(GPT2, seq_len=128), "dense models"),
        ({"mlp": "tiled"}, job(seq_len=64), "would tile nothing: 64 tokens are no more than the model is wide, 64"),
        ({"mlp": "tiled", "compile": True}, job(seq_len=128), "use compile=false"),
        (
            {"mlp": "tiled", "method": "full", "micro_batch": 4, "update": "in-backward"},
            job(seq_len=128),
            "once in a backward",
        ),
        ({"mlp": "tiled", "sharding": "ddp"}, job(seq_len=128, devices=2), "cannot work with sharding=ddp"),
        ({"mlp": "tiled", "offload": "optimizer"}, job(seq_len=128), "cannot work with offload=optimizer"),
        ({"mlp": "tiled", "checkpointing": "selective"}, job(seq_len=128), "use save-attention"),
        ({"mlp": "tiled", "method": "lora"}, job(seq_len=128, lora_dropout=0.1), "drop out other values"),
        ({"optimizer": "paged-adamw-8bit"}, job(), "pages states between a CUDA device and its host"),
        ({"optimizer": "adamw-8bit"}, job(stack=BARE), "adamw-8bit needs bitsandbytes"),
        ({"optimizer": "lion-8bit"}, job(stack=BARE), "lion-8bit needs bitsandbytes"),
        ({"optimizer": "lion"}, job(stack=BARE), "lion needs bitsandbytes"),
        ({"method": "qlora"}, job(stack=BARE), "qlora needs bitsandbytes"),
        ({"method": "qlora"}, job(hardware=MAC), "no 4-bit kernels for mps"),
        ({"method": "qlora"}, job(QWEN3_MOE), "qlora cannot quantise the experts of tiny-qwen3_moe"),
        ({"method": "qlora"}, job(GPT2), "qlora has nothing to quantise in tiny-gpt2"),
        ({"checkpointing": "full"}, job(CTRL), "transformers has no checkpointing for tiny-ctrl"),
        ({"checkpointing": "every-2", "method": "lora"}, job(CTRL), "checkpointing=every-2 cannot work"),
        ({"checkpointing": "budget-50"}, job(), "checkpointing=budget-50 needs compile=true"),
        (
            {"checkpointing": "budget-25", "compile": True, "kernels": "liger"},
            job(hardware=CUDA_HARDWARE, stack=LIGER),
            "use kernels=torch",
        ),
        (
            {"checkpointing": "budget-25", "compile": True, "attention": "flash", "precision": "bf16"},
            job(hardware=CUDA_HARDWARE, stack=FLASH),
            "use attention=sdpa",
        ),
        ({"compile": True}, job(CTRL), "transformers does not mark the decoder layers of tiny-ctrl"),
        ({"offload": "optimizer"}, job(stack=BARE), "offload=optimizer needs deepspeed"),
        ({"offload": "optimizer", "optimizer": "lion"}, job(), "DeepSpeed's Lion has two states for each parameter"),
        ({"offload": "optimizer", "optimizer": "sgd"}, job(), "has none for this optimizer; use adamw"),
        ({"sharding": "zero3"}, job(), "sharding=zero3 needs several devices"),
        ({"sharding": "fsdp"}, job(CTRL, devices=2), "fsdp shards layer by layer"),
        ({}, job(devices=2), "sharding=none, the default, is for one device: add sharding=ddp"),
    ],
)
def test_a_combination_that_cannot_work_is_refused_with_the_reason(
    values: dict[str, Value], job: Job, reason: str
) -> None:
    refusal = unsupported(complete(values), job)
    assert refusal is not None and reason in refusal and "\n" not in refusal


@pytest.mark.parametrize(
    ("values", "job"),
    [
        ({"micro_batch": 4}, job()),
        ({"method": "qlora"}, job()),
        ({"method": "qlora"}, job(hardware=XPU)),
        ({"method": "lora"}, job(QWEN3_MOE)),
        ({"optimizer": "lion-8bit"}, job()),
        ({"attention": "flash"}, job(hardware=CUDA_HARDWARE, stack=FLASH)),
        ({"loss": "fused"}, job(hardware=CUDA_HARDWARE, stack=LIGER)),
        ({"kernels": "liger", "attention": "eager"}, job(GEMMA2, hardware=CUDA_HARDWARE, stack=LIGER)),
        ({"checkpointing": "offload", "optimizer": "paged-adamw-8bit"}, job(hardware=CUDA_HARDWARE)),
        ({"mlp": "tiled"}, job(seq_len=65)),
        ({"mlp": "tiled", "method": "lora", "targets": "attention"}, job(seq_len=65, lora_dropout=0.1)),
        ({"attention": "eager"}, job(GEMMA2)),
        ({"method": "full", "loss": "full"}, job(PHI)),
        ({"method": "lora", "loss": "chunked"}, job(PHI)),
        ({"loss": "chunked"}, job(COHERE)),
        ({"method": "lora", "checkpointing": "full"}, job(GPT2)),
        ({"checkpointing": "none", "attention": "eager"}, job(CTRL)),
    ],
)
def test_a_combination_that_works_is_not_refused(values: dict[str, Value], job: Job) -> None:
    assert unsupported(complete(values), job) is None


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_kernel_that_cannot_softcap_scores_is_refused_for_a_model_that_does(method: str) -> None:
    # transformers raises when such a model is built with sdpa
    reason = unsupported(complete({"method": method, "attention": "sdpa"}), job(GEMMA2))
    assert (
        reason
        == "attention=sdpa is unavailable for tiny-gemma2: no fused kernel computes its layers, use attention=eager"
    )


@pytest.mark.parametrize(
    ("hardware", "values", "refused"),
    [
        (T4, {"precision": "fp16-mixed"}, False),
        (T4, {"precision": "fp32"}, False),
        (CUDA_HARDWARE, {"precision": "fp32"}, False),
        (CUDA_HARDWARE, {"precision": "bf16-mixed"}, True),
    ],
)
def test_keys_are_repeated_where_torch_has_no_kernel_for_shared_ones(
    hardware: Hardware, values: dict[str, Value], refused: bool
) -> None:
    reason = unsupported(complete({**values, "attention": "efficient"}), job(hardware=hardware))
    where = f"{values['precision']} on {hardware.name}"
    assert reason == (
        f"attention=efficient is of no use in {where}: sdpa has a fused kernel there" if refused else None
    )


def test_keys_are_repeated_on_gpus_alone() -> None:
    reason = unsupported(complete({"precision": "fp32", "attention": "efficient"}), job())
    assert reason == f"attention=efficient is for NVIDIA and AMD GPUs, not for {CPU_HARDWARE.name}: use sdpa"


def test_a_mask_has_transformers_repeat_keys() -> None:
    config = complete({"precision": "fp16-mixed", "attention": "efficient", "micro_batch": 2})
    of_no_use = "attention=efficient is of no use in fp16-mixed on t4: sdpa has a fused kernel there"
    windowed = model("mistral", sliding_window=16)
    assert unsupported(config, job(windowed, hardware=T4, seq_len=15)) is None
    assert unsupported(config, job(windowed, hardware=T4, seq_len=16)) == of_no_use
    padded = job(hardware=T4, seq_len=16, lengths=(4, 12, 16), trainer="transformers")
    assert unsupported(config, padded) == of_no_use
    assert unsupported(config.replace(micro_batch=1), padded) is None


@pytest.mark.parametrize(
    ("trainer", "values", "widened"),
    [
        ("transformers", {"precision": "bf16"}, True),
        ("transformers", {"precision": "bf16", "sharding": "ddp"}, True),
        # DeepSpeed converts all weights itself, autocast narrows what enters attention, and trl widens nothing.
        ("transformers", {"precision": "bf16", "offload": "optimizer"}, False),
        ("transformers", {"precision": "bf16-mixed"}, False),
        ("trl", {"precision": "bf16", "loss": "chunked"}, False),
        (None, {"precision": "bf16"}, False),
    ],
)
def test_attention_is_in_fp32_where_the_trainer_has_hidden_states_so(
    trainer: str | None, values: dict[str, Value], widened: bool
) -> None:
    devices = 2 if "sharding" in values else 1
    asked = job(hardware=CUDA_HARDWARE, stack=replace(STACK, deepspeed="0.19.8"), trainer=trainer, devices=devices)
    sdpa = complete({"method": "qlora", **values})
    assert attention_format(sdpa, asked) == ("fp32" if widened else "bf16")
    assert keeps_scores(sdpa, asked) is widened
    assert not keeps_scores(sdpa.replace(attention="efficient"), asked)
    if trainer != "trl":  # which has no `efficient` anyway
        assert (unsupported(sdpa.replace(attention="efficient"), asked) is None) is widened
        assert (unsupported(sdpa.replace(checkpointing="save-attention"), asked) is None) is not widened


def test_nothing_is_kept_of_attention_that_no_kernel_fuses() -> None:
    kept = complete({"precision": "fp16-mixed", "checkpointing": "save-attention"})
    reason = unsupported(kept, job(hardware=T4))
    assert (
        reason == "checkpointing=save-attention would keep nothing: no fused kernel computes attention here, use full"
    )
    assert unsupported(kept.replace(attention="efficient"), job(hardware=T4)) is None
    assert unsupported(kept.replace(attention="eager"), job()) == reason


def test_keys_that_no_heads_share_and_odd_heads_need_no_repeating() -> None:
    config = complete({"precision": "fp16-mixed", "attention": "efficient"})
    of_no_use = "of no use in fp16-mixed on t4: "
    own_keys = unsupported(config, job(model("llama", num_attention_heads=4, num_key_value_heads=4), hardware=T4))
    assert own_keys == f"attention=efficient is {of_no_use}sdpa has a fused kernel there"
    odd = unsupported(config, job(model("llama", head_dim=12), hardware=T4))
    assert odd == f"attention=efficient is {of_no_use}torch has no fused kernel there, use sdpa"


def test_a_compute_capability_that_is_a_name_is_judged_without_failing() -> None:
    # flash-attn supports AMD's CDNA accelerators
    assert unsupported(complete({"attention": "flash"}), job(hardware=MI300X, stack=FLASH)) is None


@pytest.mark.parametrize(
    "mixture",
    [
        model("deepseek_v3", n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1),
        model("ernie4_5_moe", moe_num_experts=4, moe_k=2),
        model("mixtral", num_local_experts=4, num_experts_per_tok=2),
    ],
    ids=lambda mixture: mixture.config["model_type"],
)
def test_experts_are_recognised_under_every_name_they_have(mixture: Model) -> None:
    assert "experts" in str(unsupported(complete({"method": "qlora"}), job(mixture)))


@pytest.mark.parametrize("fields", [{}, {"num_experts": 0}, {"num_local_experts": None}])
def test_a_dense_model_is_no_mixture(fields: dict[str, Any]) -> None:
    dense = Model(name="dense", config={**LLAMA.config, **fields}, source="a test", parameters=None)
    assert unsupported(complete({"method": "qlora"}), job(dense, hardware=CPU_HARDWARE)) is None


@pytest.mark.parametrize(("value", "works"), [("bf16", False), ("bf16-mixed", False), ("fp16-mixed", True)])
def test_emulated_bf16_is_refused_and_fp16_is_anybodys_to_ask_for(value: str, works: bool) -> None:
    config = complete({"precision": value})
    assert (unsupported(config, job(hardware=T4)) is None) is works
    assert unsupported(config, job(hardware=CUDA_HARDWARE)) is None
    assert unsupported(config, job()) is None


@pytest.fixture
def tools_looked_for_again() -> Iterator[None]:
    missing_tool.cache_clear()
    yield
    missing_tool.cache_clear()


@pytest.mark.parametrize(
    ("hardware", "variable", "value"),
    [
        (CPU_HARDWARE, "CXX", {"compile": True}),
        (CUDA_HARDWARE, "CC", {"compile": True}),
        (CUDA_HARDWARE, "CC", {"loss": "fused"}),
    ],
)
def test_what_is_compiled_is_refused_without_a_compiler(
    hardware: Hardware,
    variable: str,
    value: dict[str, Value],
    tools_looked_for_again: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, "no-such-compiler")
    here = job(hardware=hardware, stack=LIGER)
    reason = "needs a compiler (no-such-compiler), which is not installed here"
    assert (unsupported(complete(value), here) or "").endswith(reason)
    assert unsupported(complete({}), here) is None


@pytest.mark.parametrize(
    ("torch", "values", "refused"),
    [
        ("2.11.0+cu128", {"sharding": "ddp", "checkpointing": "selective"}, True),
        ("2.12.1", {"sharding": "ddp", "checkpointing": "save-attention"}, True),
        ("2.13.0", {"sharding": "ddp", "checkpointing": "selective"}, False),
        ("2.11.0", {"sharding": "ddp", "checkpointing": "full"}, False),
        ("2.11.0", {"sharding": "fsdp", "checkpointing": "selective"}, False),
    ],
)
def test_ddp_that_forgets_what_selective_checkpointing_keeps_is_not_compiled(
    torch: str, values: dict[str, Value], refused: bool
) -> None:
    config, here = complete({**values, "compile": True}), job(devices=2, stack=replace(STACK, torch=torch))
    reason = unsupported(config, here)
    assert (reason is not None and "use checkpointing=full" in reason) if refused else reason is None
    assert unsupported(config.replace(compile=False), here) is None


def test_compilation_without_pythons_headers_is_refused(
    tools_looked_for_again: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert "python3-dev" in str(unsupported(complete({"compile": True}), job()))


@pytest.mark.parametrize(
    ("values", "needs"),
    [({}, False), ({"sharding": "ddp"}, True), ({"sharding": "fsdp"}, True), ({"offload": "optimizer"}, True)],
)
def test_ranks_and_deepspeed_need_a_process_group(values: dict[str, Value], needs: bool) -> None:
    assert needs_process_group(complete(values)) is needs


@pytest.mark.parametrize(
    ("setting", "ours"),
    [
        ("per_device_train_batch_size=4", "micro_batch=4"),
        ("batch_size=auto", "micro_batch"),
        ("gradient_checkpointing=True", "checkpointing=full"),
        ("load_in_4bit=true", "method=qlora"),
        ("lora_r=16", "rank=16"),
        ("bf16=true", "precision=bf16-mixed"),
        ("max_length=512", "--seq-len 512"),
        ("gradient_accumulation_steps=8", "--global-batch"),
        ("deepspeed=ds.json", "zero3"),
    ],
)
def test_a_trainers_key_is_refused_with_ours(setting: str, ours: str) -> None:
    with pytest.raises(UsageError) as by_text:
        parse(setting)
    key, _, value = setting.partition("=")
    with pytest.raises(UsageError) as by_json:
        complete({key: value})
    assert ours in str(by_text.value).partition(":")[2]
    assert str(by_json.value) == str(by_text.value)


@pytest.mark.parametrize(
    ("setting", "ours"),
    [
        ("checkpointing=true", "checkpointing=full"),
        ("attention=flash_attention_2", "attention=flash"),
        ("loss=liger", "loss=fused"),
        ("optimizer=adamw_torch_fused", "optimizer=adamw"),
    ],
)
def test_a_trainers_value_is_refused_with_ours(setting: str, ours: str) -> None:
    with pytest.raises(UsageError, match=f"unknown value of .*: write {ours}$"):
        parse(setting)


def test_every_wrong_word_is_named_at_once() -> None:
    with pytest.raises(UsageError, match=r"write micro_batch=4; .*write checkpointing=full; .*precison"):
        parse("per_device_train_batch_size=4,gradient_checkpointing=true,precison=bf16")


def test_every_optimizer_that_is_exported_is_understood_as_the_only_one_of_its_name() -> None:
    named: dict[str, list[str]] = {}
    for ours, kind in OPTIMIZERS.items():
        if kind.trainer is not None:
            named.setdefault(kind.trainer, []).append(ours)
    assert not [several for several in named.values() if len(several) > 1]
    for theirs, (ours,) in named.items():
        with pytest.raises(UsageError, match=f"write optimizer={ours}$"):
            parse(f"optim={theirs}")


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_every_axis_and_value_is_described_and_every_trainers_value_is_one(axis: Axis) -> None:
    assert axis.does
    assert set(axis.meanings) == set(axis.values)
    for name in names_of(axis.name):
        for value in (name.values or {}).values():
            axis.parse(value)


@pytest.mark.parametrize("text", ["method=lora rank=8", "method=lora; rank = 8", "method=lora;rank=8"])
def test_axes_that_are_not_separated_by_commas(text: str) -> None:
    with pytest.raises(UsageError, match=r"method=lora,rank=8$"):
        parse(text)
