"""LLaMA-Factory: keys and defaults are those of src/llamafactory/hparams; model/adapter.py and model/model_utils say
what they do."""

from __future__ import annotations

from collections.abc import Mapping

from autofit.core.errors import UsageError
from autofit.core.units import format_bytes
from autofit.export.llamafactory_format import ATTENTION
from autofit.techniques import complete
from autofit.trainers import training_arguments as args
from autofit.trainers.keys import Keys
from autofit.trainers.run import EIGHT_BITS, SINGLE_SCALES, Run, Where, trained_whole
from autofit.trainers.sharded import Sharded, read_sharding

STAGES: Mapping[str, str | None] = {
    "sft": None,
    "pt": None,
    "dpo": "pairs of sequences, and a frozen reference without adapters",
    "kto": "pairs of sequences, and a frozen reference without adapters",
    "rm": "pairs of sequences, and a value head",
    "ppo": "a value head, a reward model and generated sequences",
}
"""What each stage needs beside supervised training; None if nothing."""
_FLASH = {**{name: value for value, name in ATTENTION.items()}, "fa3": "flash"}
"""The axis's value for each `flash_attn` (model_utils/attention.py)."""


def read(keys: Keys, where: Where) -> Run:
    """Checkpointing is on, and every linear layer has an adapter of rank 8, unless the file says otherwise."""
    if keys.value("export_dir") is not None:
        raise UsageError("this file exports a model and trains nothing (export_dir)")
    sharded = read_sharding(keys, where, devices=keys.ray_workers)
    stage = keys.text("stage") or "sft"
    extra = keys.one_of("stage", STAGES, stage)
    if extra is not None:
        keys.count_not(f"stage: {stage}", "more", extra)
    if keys.flag("use_unsloth"):
        keys.count_not("use_unsloth", "less", "Unsloth's kernels and checkpointing")
    method, adapters = _method(keys)
    size, accumulation = args.batch(keys)
    seq_len, attention = keys.count("cutoff_len", 2048), _attention(keys)
    if keys.flag("neat_packing") and attention == "flash":
        keys.count_not("neat_packing", "less", "attention stays within each packed sequence")
    elif keys.flag("neat_packing"):  # of 16 bits (data/collator.py, prepare_4d_attention_mask)
        keys.count_not("neat_packing", "more", f"a mask of {format_bytes(2 * size * seq_len**2)} but with fa2")
    return Run(
        trainer="llamafactory",
        model=keys.text("model_name_or_path"),
        seq_len=seq_len,
        accumulation=accumulation,
        devices=sharded.devices,
        lora_dropout=keys.fraction("lora_dropout", 0.0) if method != "full" else 0.0,
        evaluates=args.evaluation(keys, by_flag=True),
        beyond=_extra_bytes(keys, method),
        config=complete(
            {
                "method": method,
                **adapters,
                "precision": _precision(keys, sharded, method),
                "micro_batch": size,
                "checkpointing": _checkpointing(keys),
                "optimizer": args.trainers_optimizer(keys, sharded),
                "attention": attention,
                **_liger(keys),
                "compile": args.compiles(keys),
                **sharded.axes,
            }
        ),
    )


def _method(keys: Keys) -> tuple[str, dict[str, object]]:
    kind = keys.text("finetuning_type") or "lora"
    methods = {"full": "full", "lora": "lora", "freeze": "full", "oft": "lora"}
    method = keys.one_of("finetuning_type", methods, kind)
    if kind == "freeze":
        keys.count_not("finetuning_type: freeze", "less", "only some layers are trained; method=full stands for it")
    if kind == "oft":
        keys.count_not("finetuning_type: oft", "unknown", "OFT's rotations; LoRA of rank 8 stands for them")
    if method == "full":
        return "full", {}
    targets = keys.targets("lora_target", default=["all"])
    quantised = _is_four_bit(keys)
    return "qlora" if quantised else "lora", {"rank": keys.count("lora_rank", 8), "targets": targets}


def _bits(keys: Keys) -> int | None:
    return None if keys.value("quantization_bit") is None else keys.count("quantization_bit", 4)


def _is_four_bit(keys: Keys) -> bool:
    bits = _bits(keys)
    if bits in (None, 8):
        return False
    by = keys.text("quantization_method") or "bnb"
    if bits != 4 or by not in ("bnb", "bitsandbytes"):  # its name until 0.9.2
        keys.count_not("quantization_bit", "unknown", f"{bits} bits by {by}; 4 by bitsandbytes stand for it")
    return True


def _extra_bytes(keys: Keys, method: str) -> tuple[tuple[str, float], ...]:
    if method == "full":
        return ()
    eight = (EIGHT_BITS,) if _bits(keys) == 8 else ()
    single = (SINGLE_SCALES,) if method == "qlora" and not keys.flag("double_quantization", True) else ()
    return (*eight, *single, *trained_whole(keys.names("additional_target")))


def _precision(keys: Keys, sharded: Sharded, method: str) -> str:
    """Trained weights are cast to fp32, but not with `pure_bf16` (adapter.py); frozen ones keep the checkpoint's."""
    if keys.flag("pure_bf16"):
        return "bf16" if method == "full" else "bf16-mixed"  # peft itself keeps adapters in fp32
    if method != "full" and not keys.flag("bf16") and not keys.flag("fp16"):
        keys.assume("neither bf16 nor fp16 is set: the frozen weights are taken to be in bfloat16")
        return "bf16-mixed"
    return args.mixed(keys, sharded, method=method, loaded="float32")


def _checkpointing(keys: Keys) -> str:
    if keys.flag("disable_gradient_checkpointing"):
        return "none"
    if keys.value("disable_gradient_checkpointing") is None:
        keys.assume("activations are checkpointed unless disable_gradient_checkpointing is set")
    return "offload" if keys.flag("use_unsloth_gc") else "full"


def _attention(keys: Keys) -> str:
    value = keys.value("flash_attn")
    return args.attention(keys, "flash_attn", None if value in (None, "auto") else str(value), _FLASH)


def _liger(keys: Keys) -> dict[str, str]:
    if not keys.flag("enable_liger_kernel") and not keys.flag("use_liger_kernel"):
        return {"loss": "full"}
    return {"loss": "fused", "kernels": "liger"}
