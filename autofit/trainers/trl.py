"""`trl sft`: keys and defaults are those of trl 1.16, sft_config.py and model_config.py; sft_trainer.py uses them."""

from __future__ import annotations

from autofit.core.errors import UsageError
from autofit.core.units import format_bytes
from autofit.techniques import complete
from autofit.techniques.habits.known_trainers import TRL
from autofit.techniques.selective import SAVE_ATTENTION
from autofit.trainers import training_arguments as args
from autofit.trainers.keys import Keys
from autofit.trainers.run import EIGHT_BITS, SINGLE_SCALES, Run, Where, trained_whole
from autofit.trainers.sharded import read_sharding

OF_SFT_CONFIG = frozenset(
    {"assistant_only_loss", "completion_only_loss", "dataset_text_field", "max_seq_length", "packing_strategy"}
)
"""Keys that SFTConfig alone has, in this version or an earlier one."""


def read(keys: Keys, where: Where) -> Run:
    """The loss is computed in chunks, the default from 1.7 on (`loss_type` of sft_config.py)."""
    sharded = read_sharding(keys, where)
    method, adapters = _method(keys)
    dtype_key = "torch_dtype" if keys.text("dtype") is None and keys.text("torch_dtype") is not None else "dtype"
    if keys.text("model_name_or_path") is None and method == "full":
        keys.assume("all weights are trained: SFTConfig does not say; say otherwise with --also")
    stated = keys.text(dtype_key)
    if stated is None:
        keys.assume("dtype is float32 unless it is set: the weights are loaded in fp32")
    elif stated == "auto":
        keys.assume("dtype is auto: the weights are taken to be in bfloat16")
    formats = {"auto": "bfloat16", **{name: name for name in ("float32", "bfloat16", "float16")}}
    loaded = keys.one_of(dtype_key, formats, stated or "float32")
    liger = args.liger(keys)
    if keys.flag("use_liger_kernel") and keys.mapping("liger_kernel_config").get("fused_linear_cross_entropy"):
        raise UsageError("liger_kernel_config has fused_linear_cross_entropy: true, which trl refuses: leave it out")
    if liger["loss"] == "fused":
        keys.assume("trl has a chunked loss of its own in place of Liger's")
    liger["loss"] = "chunked"
    size, accumulation = args.batch(keys)
    seq_len = _seq_len(keys)
    attention = args.attention(keys, "attn_implementation", keys.text("attn_implementation"))
    _count_mask(keys, attention, size, seq_len)
    return Run(
        trainer="trl",
        model=keys.text("model_name_or_path"),
        seq_len=seq_len,
        accumulation=accumulation,
        devices=sharded.devices,
        lora_dropout=keys.fraction("lora_dropout", 0.05) if method != "full" else 0.0,
        evaluates=args.evaluation(keys),
        beyond=_extra_bytes(keys, method, loaded),
        narrower=(dtype_key, "bfloat16" if where.bf16 else "float16")
        if loaded == "float32" and method != "full"
        else None,
        adapters=_idle_adapters(keys),
        config=complete(
            {
                "method": method,
                **adapters,
                "precision": args.mixed(keys, sharded, method=method, loaded=loaded, bf16=not keys.flag("fp16")),
                "micro_batch": size,
                "checkpointing": _checkpointing(keys, sharded.checkpointing),
                "optimizer": args.trainers_optimizer(keys, sharded),
                "attention": attention,
                **liger,
                "compile": args.compiles(keys),
                **sharded.axes,
            }
        ),
    )


def _seq_len(keys: Keys) -> int | None:
    """`max_length`, which was called `max_seq_length` until trl 0.20; empty, it cuts no sequence."""
    if keys.value("max_seq_length") is not None:
        keys.count_not("max_seq_length", "more", "only trl before 0.20 has it, which computes all logits at once")
    if keys.is_null("max_length"):
        return None
    return keys.count("max_length" if keys.value("max_seq_length") is None else "max_seq_length", 1024)


def _count_mask(keys: Keys, attention: str, size: int, seq_len: int | None) -> None:
    """Packing, but for `wrapped`, and `padding_free` make one row of the `size` sequences of a micro-batch
    (sft_trainer.py). Only flash attention keeps several apart without a dense mask (transformers' masking_utils.py)."""
    packs = keys.flag("packing") and keys.text("packing_strategy") != "wrapped"
    if not packs and (not keys.flag("padding_free") or size == 1):
        return
    key = "packing" if packs else "padding_free"
    if attention != "flash":
        mask = "a dense mask" if seq_len is None else f"a mask of at least {format_bytes((size * seq_len) ** 2)}"
        keys.count_not(key, "more", f"one row of each micro-batch, under {mask} but with flash attention")
    elif not packs:
        keys.count_not(key, "less", "no memory for padding")


def _method(keys: Keys) -> tuple[str, dict[str, object]]:
    if not keys.flag("use_peft"):
        for key in ("load_in_4bit", "load_in_8bit"):
            if keys.flag(key):
                keys.count_not(key, "unknown", "quantised weights cannot be trained without use_peft: true")
        return "full", {}
    targets = keys.targets("lora_target_modules")
    method = "qlora" if keys.flag("load_in_4bit") else "lora"
    return method, {"rank": keys.count("lora_r", 16), "targets": targets}


def _idle_adapters(keys: Keys) -> tuple[str, object] | None:
    """Where the file has settings of adapters and does not say whether to make any: trl then trains all weights
    (`get_peft_config` of model_config.py)."""
    if keys.value("use_peft") is not None or not keys.has_set("lora_", "load_in_"):
        return None
    if not keys.flag("load_in_4bit") and not keys.flag("load_in_8bit"):  # of which more is said
        keys.note("the settings of adapters are ignored without use_peft: true: all weights are trained")
    return "use_peft", True


def _extra_bytes(keys: Keys, method: str, loaded: str) -> tuple[tuple[str, float], ...]:
    """Frozen weights stay in the format that they are loaded in; with 4-bit ones, embeddings, norms and the head do."""
    if method == "full":
        return ()
    extra = list(trained_whole(keys.names("lora_modules_to_save")))
    if keys.flag("load_in_8bit"):
        extra.append(EIGHT_BITS)
    if method == "qlora" and not keys.flag("use_bnb_nested_quant"):
        extra.append(SINGLE_SCALES)
    if loaded == "float32":
        extra.append(("outside" if method == "qlora" or keys.flag("load_in_8bit") else "all", 2.0))
    return tuple(extra)


def _checkpointing(keys: Keys, by_fsdp: bool) -> str:
    value = "full" if by_fsdp else args.checkpointing(keys, default=True)
    if keys.flag("activation_offloading"):
        keys.count_not("activation_offloading", "unknown", "trl's own; checkpointing=offload stands for it")
        return "offload"
    if value == SAVE_ATTENTION and keys.flag("use_peft"):
        keys.assume(f"trl {TRL.release} with adapters recomputes attention, too, though the file says selective")
        return "full"
    return value
