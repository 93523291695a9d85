"""transformers' TrainingArguments: what trl's and LLaMA-Factory's files inherit, and a file of nothing else.

Keys, values and defaults are those of transformers 5.23, training_args.py; where 4.57 differs, it is said.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import partial

from autofit.core.lattice import Value
from autofit.export import trainer_arguments as ta
from autofit.export.document import Emit, Settings, Task, settings
from autofit.techniques import complete
from autofit.techniques.axes.attention import IMPLEMENTATIONS
from autofit.techniques.selective import SAVE_ATTENTION
from autofit.techniques.trainer_names import names_of
from autofit.trainers.keys import Keys
from autofit.trainers.run import Evaluates, Run, Where
from autofit.trainers.sharded import Sharded, read_sharding

OPTIMIZERS: Mapping[str, str] = {
    spelling: name for names in names_of("optimizer") for spelling, name in (names.values or {}).items()
}
"""The axis's value for each spelling."""
STAND_INS: Mapping[str, tuple[str, str, str]] = {
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw"), ("adamw", "less", "its states may be paged to the host")),
    "paged_lion_32bit": ("lion", "less", "its states may be paged to the host"),
    "paged_lion_8bit": ("lion-8bit", "less", "its states may be paged to the host"),
    **dict.fromkeys(("adamw_torch_8bit", "ao_adamw_8bit"), ("adamw-8bit", "unknown", "torchao's 8-bit states")),
    **dict.fromkeys(("adamw_torch_4bit", "ao_adamw_4bit"), ("adamw-8bit", "less", "4-bit states")),
    "ao_adamw_fp8": ("adamw-8bit", "unknown", "fp8 states"),
    "adamw_hf": ("adamw", "unknown", "transformers' own AdamW"),
    "adamw_apex_fused": ("adamw", "unknown", "apex's AdamW"),
    "adamw_anyprecision": ("adamw", "unknown", "states in the format that optim_args names"),
    "optimi_adamw": ("adamw", "unknown", "optimi's AdamW"),
    "adopt_adamw": ("adamw", "unknown", "ADOPT"),
    "stable_adamw": ("adamw", "unknown", "StableAdamW"),
    "came_pytorch": ("adafactor", "unknown", "CAME's factorised states"),
    "muon": ("adamw", "less", "Muon has one state where AdamW has two"),
    "dion": ("adamw", "unknown", "Dion"),
    **dict.fromkeys(("rmsprop", "adagrad"), ("lion", "unknown", "one state, like Lion")),
    **{f"galore_{name}": ("adamw", "less", "GaLore's projected states") for name in ("adamw", "adamw_8bit")},
    **{f"galore_{name}_layerwise": ("adamw", "less", "GaLore's projected states") for name in ("adamw", "adamw_8bit")},
    "q_galore_adamw8bit": ("adamw-8bit", "less", "GaLore's projected states"),
    **dict.fromkeys(("apollo_adamw", "apollo_adamw_layerwise"), ("adamw", "less", "APOLLO's projected states")),
    "schedule_free_adamw": ("adamw", "more", "schedule-free AdamW keeps another copy of the weights"),
    "ademamix": ("adamw", "more", "AdEMAMix has a third state"),
    "ademamix_8bit": ("adamw-8bit", "more", "AdEMAMix has a third state"),
    "grokadamw": ("adamw", "more", "GrokAdamW keeps a running average of the gradients"),
    "schedule_free_radam": ("adamw", "more", "schedule-free RAdam keeps another copy of the weights"),
    "schedule_free_sgd": ("sgd", "more", "schedule-free SGD keeps another copy of the weights"),
    "paged_ademamix_32bit": ("adamw", "unknown", "AdEMAMix has a third state, and states may be paged to the host"),
    "paged_ademamix_8bit": ("adamw-8bit", "unknown", "AdEMAMix has a third state, and states may be paged to the host"),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_32bit"), ("lion", "unknown", "one state, like Lion")),
    "rmsprop_bnb_8bit": ("lion-8bit", "unknown", "one state, like Lion"),
    **{f"galore_adafactor{form}": ("adafactor", "less", "GaLore's projected states") for form in ("", "_layerwise")},
    **dict.fromkeys(("adamw_torch_xla", "adamw_torch_npu_fused"), ("adamw", "unknown", "AdamW of other devices")),
    **dict.fromkeys(("flash_adamw", "flash_adam"), ("adamw", "less", "FlashOptim's compressed states")),
    **dict.fromkeys(("flash_sgd", "flash_sgdw"), ("sgd", "unknown", "FlashOptim's SGD")),
    "flash_lion": ("lion", "less", "FlashOptim's compressed state"),
    "adamc": ("adamw", "unknown", "AdamC"),
    "sinkgd": ("adamw", "unknown", "SinkGD"),
    "polora": ("adamw", "unknown", "PoLoRA"),
    "lomo": ("sgd", "less", "LOMO updates while gradients are computed"),
    "adalomo": ("sgd", "less", "AdaLOMO updates while gradients are computed"),
}
"""Optimizers that the axis does not have: the nearest value, what that does to memory, and why."""
MISSPELT = 0.9
"""Likeness (`difflib`) from which a name that is not known is taken for a typing error: one letter more in ten leaves
0.95, and most optimizers of transformers and axolotl are below 0.85 from all others."""
_OF_DEEPSPEED: Mapping[str, str] = {"adam": "adamw", "adamw": "adamw", "lion": "lion"}
"""The axis's value for each `optimizer.type` of DeepSpeed, in lower case."""
ALIASES: Mapping[str, str] = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""The names of keys since transformers 5.20 that exports write by the older ones."""
OTHER_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("adafactor",),
    "compile": ("torch_compile_backend", "torch_compile_mode"),
    "micro_batch": ("per_gpu_train_batch_size",),
}
"""Axis -> keys that exports do not write, which say it otherwise."""
ATTENTION: Mapping[str, str] = {name: value for value, name in IMPLEMENTATIONS.items() if value != "efficient"}
OF_TRANSFORMERS_5_17 = tuple(f"gradient_checkpointing_kwargs.{name}" for name in ("every_n_layers", "offload"))
"""Keys, in the older of their two names, that transformers before 5.17 lacks: 5.16.1 has but the first, 4.57 none."""
OLDER = frozenset(
    {"max_seq_length", "evaluation_strategy", "torch_dtype", "per_gpu_train_batch_size", "per_gpu_eval_batch_size"}
)
"""Keys that show an older transformers or trl."""
CHECKPOINTING = ("use_reentrant", "every_n_layers", "offload", "selective", "preserve_rng_state", "determinism_check")
"""Arguments of checkpointing (transformers, modeling_utils.py; torch, utils/checkpoint.py; trl's `selective`)."""
ATTENTION_STAND_INS = ("flash_attention_3", "flash_attention_4", "flex_attention", "xformers", "sage")


def optimizer(keys: Keys, sharded: Sharded, name: str, value: str) -> str:
    """The axis's value for that of a key, the file's or its default. Raises `UsageError` for a name it cannot place.

    DeepSpeed's own optimizer goes first (`deepspeed_optim_sched` of transformers). On the host its Adam stands for all.
    """
    chosen = OPTIMIZERS.get(value)
    if sharded.optimizer is not None:
        keys.note(f"DeepSpeed's own optimizer, {sharded.optimizer}, is used, whatever {name} says")
        name, value = "deepspeed.optimizer", sharded.optimizer
        chosen = _OF_DEEPSPEED.get(value.lower())
    elif not sharded.updates_on_host:
        return _named(keys, name, value)
    if chosen is None or (sharded.updates_on_host and chosen not in ("adamw", "adamw-foreach")):
        where = "its states are on the host" if sharded.updates_on_host else "another optimizer"
        keys.count_not(f"{name}: {value}", "unknown", f"{where}; optimizer=adamw stands for it")
    return "adamw" if chosen is None or sharded.updates_on_host else chosen


def _named(keys: Keys, name: str, value: str) -> str:
    """The axis's value for the optimizer that a trainer calls so."""
    is_misspelt = bool(difflib.get_close_matches(value, [*OPTIMIZERS, *STAND_INS], cutoff=MISSPELT))
    if value in OPTIMIZERS or (value not in STAND_INS and is_misspelt):
        stand_ins = {other: stand_in for other, (stand_in, _, _) in STAND_INS.items()}
        return str(keys.one_of(name, {**stand_ins, **OPTIMIZERS}, value))
    stand_in, effect, because = STAND_INS.get(value, ("adamw", "unknown", "an optimizer that autofit does not know"))
    keys.count_not(f"{name}: {value}", effect, f"{because}; optimizer={stand_in} stands for it")
    return stand_in


def trainers_optimizer(keys: Keys, sharded: Sharded) -> str:
    """The optimizer that Trainer's `optim` names. In transformers 4 its default with torch before 2.8 is
    `adamw_torch`."""
    value = "adafactor" if keys.flag("adafactor") else keys.text("optim")
    if value is None and sharded.optimizer is None:
        keys.assume("optim is adamw_torch_fused unless it is set")
    return optimizer(keys, sharded, "optim", value or "adamw_torch_fused")


def attention(keys: Keys, name: str, value: str | None, kernels: Mapping[str, str] = ATTENTION) -> str:
    """transformers chooses sdpa where a model has it (modeling_utils.py)."""
    if value is None:
        keys.assume(f"{name} is sdpa unless it is set")
        return "sdpa"
    if value in ATTENTION_STAND_INS or "/" in value:  # with a slash it names a kernel of the hub
        keys.count_not(f"{name}: {value}", "unknown", "another attention kernel; attention=flash stands for it")
        return "flash"
    return str(keys.one_of(name, kernels, value))


def checkpointing(keys: Keys, default: bool = False) -> str:
    """The value for `activation_checkpointing`, or for `gradient_checkpointing`, its name until transformers 5.20."""
    on = keys.value("activation_checkpointing")
    name = "gradient" if on is None else "activation"
    if on is None and keys.value("gradient_checkpointing") is None and default:
        keys.assume("gradient_checkpointing is true unless it is set")
    if not keys.flag(f"{name}_checkpointing", default):
        return "none"
    return checkpointing_of(keys, f"{name}_checkpointing_kwargs")


def checkpointing_of(keys: Keys, name: str) -> str:
    """The axis's value for the arguments of checkpointing that is on."""
    kwargs = keys.mapping(name, CHECKPOINTING)
    if kwargs.get("offload"):
        return "offload"
    if kwargs.get("selective"):
        return SAVE_ATTENTION
    every = kwargs.get("every_n_layers", 1)
    if every in (1, 2, 4):
        return "full" if every == 1 else f"every-{every}"
    keys.count_not(f"{name}.every_n_layers", "unknown", "checkpointing=every-4 stands for it")
    return "every-4"


def mixed(keys: Keys, sharded: Sharded, *, method: str, loaded: str, bf16: bool = False) -> str:
    """The precision of Trainer's flags `bf16` (its default is given) and `fp16`, for weights that are `loaded` so.

    Adapters are in fp32 over a 16-bit base (peft's `autocast_adapter_dtype`); DeepSpeed and FSDP keep masters in fp32.
    """
    if keys.flag("fp16"):
        return "fp16-mixed"
    autocast = keys.flag("bf16", bf16)
    if loaded == "float32" and not autocast:
        return fp32(keys)
    if method != "full":
        return "bf16-mixed"
    return "bf16-mixed" if autocast and (loaded == "float32" or sharded.keeps_masters) else "bf16"


def fp32(keys: Keys) -> str:
    """The precision where weights and products are in fp32."""
    return "tf32" if keys.value("tf32") != "auto" and keys.flag("tf32") else "fp32"


def liger(keys: Keys) -> dict[str, str]:
    """The values of `loss` and `kernels`: which of Liger's kernels replace the model's own. All do by default."""
    if not keys.flag("use_liger_kernel"):
        return {"loss": "full"}
    chosen = keys.mapping("liger_kernel_config")
    on = {name: bool(chosen.get(name, True)) for name in ta.LIGER_LAYERS}
    gated = {on.pop(name) for name in ("swiglu", "geglu")}
    every, none = all(on.values()) and True in gated, not any(on.values()) and False in gated
    if not every and not none:
        keys.count_not("liger_kernel_config", "less", "some of Liger's kernels in decoder layers without the others")
    elif len(gated) > 1:
        keys.count_not("liger_kernel_config", "unknown", "a model has swiglu or geglu, taken to be the one as the rest")
    fused = chosen.get("fused_linear_cross_entropy", True)
    return {"loss": "fused" if fused else "full", "kernels": "liger" if every else "torch"}


def batch(keys: Keys) -> tuple[int, int]:
    """Micro-batch and accumulation: 8 and 1 unless they are set."""
    return keys.count(_batch_key(keys, "train"), 8), keys.count("gradient_accumulation_steps", 1)


def _batch_key(keys: Keys, of: str) -> str:
    """The key that holds a batch size: transformers 4 has another name, which goes first."""
    older = f"per_gpu_{of}_batch_size"
    return f"per_device_{of}_batch_size" if keys.value(older) is None else older


def compiles(keys: Keys) -> bool:
    """Whether the model is compiled: a backend or a mode turns that on as well."""
    chosen = (keys.value(f"torch_compile_{name}") for name in ("backend", "mode"))
    return keys.flag("torch_compile") or any(value is not None for value in chosen)


def evaluation(keys: Keys, *, by_flag: bool = False) -> Evaluates | None:
    """8 sequences at a time unless it is set. Nothing is evaluated unless `eval_strategy`, in older versions
    `evaluation_strategy`, or `eval_on_start` asks for it, or `do_eval` where that is looked at (`by_flag`)."""
    strategies = [keys.value(name) for name in ("eval_strategy", "evaluation_strategy")]
    has_strategy = any(value not in (None, False, "no") for value in strategies)  # YAML takes a bare no for false
    if not (has_strategy or keys.flag("eval_on_start") or (by_flag and keys.flag("do_eval"))):
        return None
    if not keys.flag("prediction_loss_only"):
        until = "" if keys.value("eval_accumulation_steps") else ", and stay on the GPU without eval_accumulation_steps"
        keys.assume(f"evaluation keeps losses alone: with a compute_metrics in your script, logits are kept too{until}")
    name = _batch_key(keys, "eval")
    return Evaluates(key=name, sequences=keys.count(name, 8))


def read(keys: Keys, where: Where) -> Run:
    """A file of nothing but TrainingArguments: model, adapters and the weights' format are in the user's script."""
    sharded = read_sharding(keys, where)
    keys.assume("all weights are trained, loaded in fp32: TrainingArguments do not say; say otherwise with --also")
    size, accumulation = batch(keys)
    return Run(
        trainer="transformers",
        model=None,
        seq_len=None,
        accumulation=accumulation,
        devices=sharded.devices,
        evaluates=evaluation(keys),
        config=complete(
            {
                "method": "full",
                "precision": mixed(keys, sharded, method="full", loaded="float32"),
                "micro_batch": size,
                "checkpointing": "full" if sharded.checkpointing else checkpointing(keys),
                "optimizer": trainers_optimizer(keys, sharded),
                **liger(keys),
                "compile": compiles(keys),
                **sharded.axes,
            }
        ),
    )


def _checkpointing(value: Value, task: Task) -> Settings:
    kwargs = ta.checkpointing(value)
    on: dict[str, object] = {} if kwargs is None else {"gradient_checkpointing_kwargs": kwargs}
    return settings(training={"gradient_checkpointing": kwargs is not None, **on})


TABLE: Mapping[str, Emit] = {
    "precision": lambda value, task: settings(training=ta.precision(task)),
    "micro_batch": ta.batch,
    "checkpointing": _checkpointing,
    "optimizer": ta.optimizer,
    "kernels": ta.liger,
    "loss": ta.liger,
    "compile": ta.compilation,
    "offload": ta.offload,
    "sharding": partial(ta.sharding, trainer="transformers"),
}
"""The axes of which a file of TrainingArguments alone decides; the others are up to the user's script."""
