"""axolotl: keys and defaults are those of src/axolotl/utils/schemas; loaders/ and core/builders/base.py say what
they do."""

from __future__ import annotations

from collections.abc import Mapping

from autofit.core.errors import UsageError
from autofit.techniques import complete
from autofit.techniques.selective import SAVE_ATTENTION
from autofit.trainers import training_arguments as args
from autofit.trainers.keys import Keys
from autofit.trainers.run import EIGHT_BITS, Evaluates, Run, Where, trained_whole
from autofit.trainers.sharded import Sharded, read_sharding

OLD_FLAGS: Mapping[str, str] = {
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
"""What each flag of earlier versions means in `attn_implementation` (enums.py, LEGACY_ATTN_FLAG_TO_IMPL)."""
ADAPTERS = ("lora", "qlora")
_PLUGINS = ("liger", "cut_cross_entropy", "lm_eval", "swanlab", "kernels", "spectrum", "kd", "diffusion", "mora")
"""Plugins whose own keys say what they do."""
TILE_TOKENS = 32_768
"""Of a tile of an MLP, unless the file says how many tiles there are (monkeypatch/tiled_mlp/patch.py)."""


def read(keys: Keys, where: Where) -> Run:
    """Weights are loaded in the format of `bf16` or `fp16`, and no fp32 copies are kept but by DeepSpeed and FSDP."""
    sharded = read_sharding(keys, where, devices=keys.ray_workers, config_is_enough=True)
    method, adapters = _method(keys)
    if rl := keys.text("rl"):
        keys.count_not(f"rl: {rl}", "more", "pairs of sequences or generated ones, and a frozen reference")
    size = keys.count("micro_batch_size", 1)
    return Run(
        trainer="axolotl",
        model=keys.text("base_model"),
        seq_len=keys.count("sequence_len", 512),
        accumulation=_accumulation(keys, size),
        devices=sharded.devices,
        lora_dropout=keys.fraction("lora_dropout", 0.0) if method != "full" else 0.0,
        evaluates=_evaluation(keys, size),
        beyond=_extra_bytes(keys, method),
        config=complete(
            {
                "method": method,
                **adapters,
                "precision": _precision(keys, sharded, where, method),
                "micro_batch": size,
                "checkpointing": "full" if sharded.checkpointing else _checkpointing(keys),
                "optimizer": args.optimizer(keys, sharded, "optimizer", _optimizer(keys)),
                "attention": args.attention(keys, "attn_implementation", _attention(keys)),
                "loss": _loss(keys),
                "kernels": _kernels(keys),
                "mlp": _mlp(keys),
                "compile": keys.flag("torch_compile"),
                **sharded.axes,
            }
        ),
    )


def _accumulation(keys: Keys, size: int) -> int:
    """Micro-batches per step; an older key, `batch_size`, has the sequences of a step on one device."""
    if keys.value("gradient_accumulation_steps") is None and keys.value("batch_size") is not None:
        return max(1, keys.count("batch_size", size) // size)
    return keys.count("gradient_accumulation_steps", 1)


def _evaluation(keys: Keys, size: int) -> Evaluates | None:
    """The evaluation batch is the micro-batch unless it is set (utils/config). Nothing is evaluated without a set to
    evaluate, nor unless the file says when (`_configure_save_and_eval_strategy` of core/builders/base.py)."""
    has_set = keys.value("val_set_size") not in (None, 0, 0.0) or bool(keys.value("test_datasets"))
    when = ("eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy")
    if not has_set or all(keys.value(name) in (None, False, 0, "no") for name in when):
        return None
    is_set = keys.value("eval_batch_size") is not None
    return Evaluates(key="eval_batch_size", sequences=keys.count("eval_batch_size", size) if is_set else size)


def _method(keys: Keys) -> tuple[str, dict[str, object]]:
    kind = keys.text("adapter")
    is_four_bit = keys.flag("load_in_4bit")
    if kind is None:
        if is_four_bit or keys.flag("load_in_8bit"):
            raise UsageError("load_in_4bit and load_in_8bit need an adapter: quantised weights cannot be trained")
        return "full", {}
    if not any(kind in plugin or not _is_known(plugin) for plugin in keys.names("plugins")):
        keys.one_of("adapter", dict.fromkeys(ADAPTERS), kind)
    if kind not in ADAPTERS:
        keys.count_not(f"adapter: {kind}", "unknown", "an adapter of another kind; LoRA stands for it")
    if kind == "qlora" and not is_four_bit:
        raise UsageError("adapter: qlora needs load_in_4bit: true, as axolotl itself says")
    _count_kernels(keys)
    targets = "all-linear" if keys.flag("lora_target_linear") else keys.targets("lora_target_modules")
    return "qlora" if is_four_bit else "lora", {"rank": keys.count("lora_r", 8), "targets": targets}


def _count_kernels(keys: Keys) -> None:
    """axolotl's own kernels for adapters, which are on unless one of them is set, or where they cannot be
    (`check_auto_enable_lora_kernels` of src/axolotl/utils/schemas/config.py)."""
    switches = [keys.value(f"lora_{part}_kernel") for part in ("mlp", "qkv", "o", "embedding")]
    unsupported = keys.flag("load_in_8bit") or keys.flag("trust_remote_code") or keys.text("rl") is not None
    by_default = switches == [None] * 4 and not unsupported and keys.text("adapter") in ("lora", "qlora")
    if by_default or any(switches):
        keys.count_not("lora_*_kernel", "less", "axolotl's own kernels for adapters" + " are on" * by_default)


def _extra_bytes(keys: Keys, method: str) -> tuple[tuple[str, float], ...]:
    if method == "full":
        return ()
    narrow = (EIGHT_BITS,) if keys.flag("load_in_8bit") and method == "lora" else ()
    return (*narrow, *trained_whole(keys.names("lora_modules_to_save")))


def _precision(keys: Keys, sharded: Sharded, where: Where, method: str) -> str:
    """`bf16` is `auto` unless it is set: fp16 takes its place on a card without bf16 (resolve_dtype)."""
    if keys.flag("fp16") or keys.flag("float16"):
        return "fp16-mixed"
    value = keys.value("bf16")
    if value in (None, "auto") and not where.bf16:
        keys.assume("bf16 is auto, and this card only emulates bf16: axolotl takes fp16")
        return "fp16-mixed"
    if keys.flag("bf16", True) or keys.flag("bfloat16"):
        return "bf16-mixed" if sharded.keeps_masters or method != "full" else "bf16"
    if keys.value("tf32") in (None, "auto"):
        keys.assume("tf32 is auto: on an NVIDIA GPU from Ampere on, steps are faster than is predicted for fp32")
    return args.fp32(keys)


def _checkpointing(keys: Keys) -> str:
    """Activation offloading turns checkpointing off, but for hidden states (`_configure_gradient_checkpointing`). Two
    older values of `gradient_checkpointing` turn it on (`check_gradient_checkpointing_w_offload`)."""
    older = keys.value("gradient_checkpointing") in ("offload", "offload_disk")
    offloading = older or keys.value("activation_offloading")
    if offloading == "hidden_states":
        return "offload"
    if offloading:
        keys.count_not("activation_offloading", "unknown", "every activation moves; offload stands for it")
        return "offload"
    if keys.value("selective_checkpointing") is True:
        return SAVE_ATTENTION
    if selection := keys.mapping("selective_checkpointing"):
        if selection == {"save": ["attention"]}:
            return SAVE_ATTENTION
        keys.count_not("selective_checkpointing", "unknown", "what it keeps is chosen otherwise")
        return "selective"
    if not keys.flag("gradient_checkpointing"):
        return "none"
    return args.checkpointing_of(keys, "gradient_checkpointing_kwargs")


def _optimizer(keys: Keys) -> str:
    value = keys.text("optimizer")
    if value is None:
        keys.assume("optimizer is adamw_torch_fused unless it is set")
    return value or "adamw_torch_fused"


def _attention(keys: Keys) -> str | None:
    old = [value for name, value in OLD_FLAGS.items() if keys.flag(name)]
    return keys.text("attn_implementation") or (old[0] if old else None)


def _is_known(plugin: str) -> bool:
    return any(name in plugin for name in _PLUGINS)


def _loss(keys: Keys) -> str:
    plugins = " ".join(keys.names("plugins"))
    for name in keys.names("plugins"):
        if not _is_known(name):
            keys.count_not(f"plugins: {name}", "unknown", "a plugin that autofit does not know")
    if "liger" in plugins and keys.flag("liger_fused_linear_cross_entropy"):
        return "fused"
    if "cut_cross_entropy" in plugins and keys.flag("cut_cross_entropy", True):
        keys.count_not("cut_cross_entropy", "less", "Apple's fused loss; the nearest of ours stands for it")
        return "fused"
    if keys.flag("chunked_cross_entropy"):
        keys.count_not("chunked_cross_entropy", "less", "the loss in chunks, over logits that all exist at once")
    return "full"


def _kernels(keys: Keys) -> str:
    """`liger` where its plugin replaces norms, rotary embeddings and gates. `liger_swiglu` is the older name."""
    names = ("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_swiglu")
    chosen = [name for name in names if keys.flag(name)]
    if not any("liger" in name for name in keys.names("plugins")):
        return "torch"
    if set(names[:2]) <= set(chosen) and len(chosen) > 2:
        return "liger"
    for name in chosen:
        keys.count_not(name, "less", "a Liger kernel without the others")
    return "torch"


def _mlp(keys: Keys) -> str:
    tiles = keys.value("tiled_mlp_num_shards")
    if not keys.flag("tiled_mlp"):
        return "whole"
    if tiles is None and keys.count("sequence_len", 512) <= TILE_TOKENS:
        keys.note(f"tiled_mlp: one tile has {TILE_TOKENS:,} tokens, so here is only one: set tiled_mlp_num_shards")
        return "whole"
    return "tiled"
