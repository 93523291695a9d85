"""Hand-made recommendations, and a sample of the lattice that contains every pair of values."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_utils import IntervalStrategy

from autofit import techniques
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.frontier import Point, Recommendation
from autofit.core.lattice import Config, Value
from autofit.core.outcome import Measurement, StepSeconds
from autofit.core.workload import Workload

OPTIM = {
    "sgd": "sgd",
    "adafactor": "adafactor",
    "lion-8bit": "lion_8bit",
    "adamw-8bit": "adamw_bnb_8bit",
    "paged-adamw-8bit": "paged_adamw_8bit",
    "lion": "lion_32bit",
    "adamw": "adamw_torch_fused",
    "adamw-foreach": "adamw_torch",
}
"""transformers' `optim` of each optimizer."""

NUMBERS: Mapping[str, tuple[Value, ...]] = {"rank": (8, 64), "micro_batch": (1, 2, 8)}
AXES: Mapping[str, tuple[Value, ...]] = {axis.name: axis.values or NUMBERS[axis.name] for axis in techniques.AXES}
"""Every axis, with a few values of the numeric ones."""
UNCHECKPOINTED = {value for value in AXES["checkpointing"] if value == "none" or str(value).startswith("budget-")}
"""Values with which no layer is checkpointed."""

PLAIN: Mapping[str, Value] = {
    "method": "full",
    "precision": "bf16-mixed",
    "micro_batch": 2,
    "checkpointing": "none",
    "optimizer": "adamw",
    "attention": "sdpa",
    "loss": "full",
    "compile": False,
    "offload": "none",
    "sharding": "none",
}


def make_config(**values: Value) -> Config:
    """The plain recipe with other values; adapters get a rank and targets."""
    filled = {**PLAIN, **values}
    if filled["method"] == "full":
        filled = {k: v for k, v in filled.items() if k not in ("rank", "targets")}
    else:
        filled = {"rank": 16, "targets": "all-linear", **filled}
    unsaid = {"batching": "padded", "kernels": "torch", "mlp": "whole", "update": "after-backward"}
    return Config.of({axis: value for axis, value in filled.items() if unsaid.get(axis) != value})


def make_recommendation(
    config: Config | None = None, *, expandable_segments: bool = False, **workload: Any
) -> Recommendation:
    """What a search would recommend for `config`, with invented but plausible figures."""
    measurement = Measurement(
        tokens_per_second=12345.6,
        step_seconds=StepSeconds(median=1.25, p95=1.3, relative_spread=0.02),
        mfu=0.41,
        peak_allocated_bytes=40 * 2**30,
        peak_reserved_bytes=42 * 2**30,
        device_bytes=43 * 2**30,
        host_peak_bytes=3 * 2**30,
        host_baseline_bytes=2**30,
        phase_peaks={"forward": 1, "backward": 2, "optimizer": 3},
        losses=(10.0, 9.5),
        reference_loss=10.0,
        steps=5,
        setup_seconds=9.0,
        overhead_seconds=0.5,
        expandable_segments=expandable_segments,
    )
    return Recommendation(
        point=Point(config=config or make_config(), measurement=measurement, trial_id=17),
        memory_limit_bytes=80 * 2**30,
        headroom_bytes=37 * 2**30,
        changes_training=(),
        alternatives=(),
        hardware=Hardware(
            name="h100-80g", kind="cuda", device_name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30, count=8
        ),
        workload=Workload(
            **{"model": "llama-3.1-8b", "model_digest": "0" * 16, "seq_len": 2048, "global_batch": 64, **workload}
        ),
        stack=Stack(python="3.12", torch="2.11.0+cu130", transformers="5.17.0", peft="0.19.0"),
    )


def imported(script: str) -> dict[str, Any]:
    """The names of an exported script after importing it. Models loaded afterwards are not sharded by ZeRO-3."""
    module = ModuleType("exported")
    sys.modules[module.__name__] = module  # where dataclasses look up the module of their annotations
    exec(compile(script, "exported.py", "exec"), module.__dict__)
    unset_hf_deepspeed_config()
    return module.__dict__


def sample() -> list[Config]:
    """Several hundred configs that cover every pair of values of every two axes (a pair may need an adapter)."""
    choose = random.Random(0)
    configs: dict[Config, None] = {}
    seen: set[frozenset[tuple[str, Value]]] = set()

    def add(forced: Mapping[str, Value]) -> None:
        values = {axis: choose.choice(options) for axis, options in AXES.items()}
        if forced.keys() & {"rank", "targets"}:
            values["method"] = choose.choice(("lora", "qlora"))
        config = make_config(**{**values, **forced})
        configs[config] = None
        seen.update(frozenset(pair) for pair in itertools.combinations(config.items, 2))

    for (a, xs), (b, ys) in itertools.combinations(AXES.items(), 2):
        for x, y in itertools.product(xs, ys):
            possible = x != "full" or b not in ("rank", "targets") or a != "method"
            if possible and frozenset({(a, x), (b, y)}) not in seen:
                add({a: x, b: y})
    while len(configs) < 300:
        add({})
    return list(configs)


def shorten(args: Any, folder: Path, *, steps: int, learning_rate: float) -> None:
    """Have Trainer's arguments take a few steps in order, log every loss and save nothing."""
    args.output_dir, args.max_steps, args.save_strategy, args.disable_tqdm = str(folder), steps, "no", True
    args.logging_strategy, args.logging_steps = IntervalStrategy.STEPS, 1
    args.learning_rate, args.lr_scheduler_type, args.train_sampling_strategy = learning_rate, "constant", "sequential"


def checkpointing_kwargs(args: Any) -> Any:
    """What Trainer's arguments pass to checkpointing, by either of its names."""
    name = "activation_checkpointing_kwargs"
    return getattr(args, name if hasattr(args, name) else "gradient_checkpointing_kwargs")


def check_batch(config: Config, args: Any, recommendation: Recommendation) -> None:
    """Trainer's arguments for what trl and a script of transformers' Trainer have alike."""
    workload = recommendation.workload
    assert args.per_device_train_batch_size == args.per_device_eval_batch_size == config["micro_batch"]
    steps = args.per_device_train_batch_size * args.gradient_accumulation_steps * workload.devices
    assert steps == workload.global_batch
    # DeepSpeed's own configuration says bf16 for both, and Trainer has to agree.
    assert args.bf16 is (config["precision"] in ({"bf16-mixed", "bf16"} if args.deepspeed else {"bf16-mixed"}))
    assert args.fp16 is (config["precision"] == "fp16-mixed")
    assert args.optim.value == OPTIM[config.text("optimizer")]
    assert args.weight_decay == (0.01 if "adamw" in config.text("optimizer") else 0.0)
    assert args.gradient_checkpointing is (config["checkpointing"] not in UNCHECKPOINTED)


def loaded_format(config: Config, *, masters_elsewhere: bool) -> str:
    """The format that the weights are to be loaded in."""
    masters = config["method"] == "full" and config["precision"] != "bf16" and not masters_elsewhere
    if config["precision"] in ("tf32", "fp32") or masters:
        return "float32"
    return "float16" if config["precision"] == "fp16-mixed" else "bfloat16"


def check_quantisation(config: Config, quantisation: Any, dtype: torch.dtype) -> None:
    assert (quantisation is not None) is (config["method"] == "qlora")
    if quantisation is not None:
        assert quantisation.load_in_4bit and quantisation.bnb_4bit_use_double_quant
        assert quantisation.bnb_4bit_quant_type == "nf4"
        assert quantisation.bnb_4bit_compute_dtype is dtype
        sharded = config.text("sharding").startswith("fsdp")
        assert quantisation.bnb_4bit_quant_storage is (dtype if sharded else torch.uint8)


def check_adapter(config: Config, adapter: Any, dropout: float) -> None:
    assert (adapter is None) is (config["method"] == "full")
    if adapter is not None:
        assert (adapter.r, adapter.lora_alpha) == (config["rank"], 2 * config.number("rank"))
        assert (adapter.lora_dropout, adapter.bias, adapter.task_type) == (dropout, "none", "CAUSAL_LM")
        attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
        assert adapter.target_modules == (attention if config["targets"] == "attention" else "all-linear")
