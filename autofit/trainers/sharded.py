"""How a file spreads a training over devices: DeepSpeed's and FSDP's settings, in Trainer's spelling or axolotl's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autofit.core.errors import UsageError
from autofit.export.trainer_arguments import SYNC_EACH_BATCH
from autofit.trainers.keys import Keys, settings_of
from autofit.trainers.run import Where

FSDP_OPTIONS = frozenset(
    {
        "version", "sharding_strategy", "reshard_after_forward", "offload_params", "cpu_offload",
        "cpu_offload_pin_memory", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params",
        "backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params", "sync_module_states",
        "cpu_ram_efficient_loading", "state_dict_type", "final_state_dict_type", "activation_checkpointing",
        "mixed_precision_policy", "xla", "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "xla_fsdp_v2",
    }
)  # fmt: skip
"""Keys of `fsdp_config`, which may all begin with `fsdp_` (accelerate's FullyShardedDataParallelPlugin; axolotl's
schemas/fsdp.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """The axes `sharding` and `offload`, and what goes with them."""

    devices: int
    sharding: str = "none"
    offload: str = "none"
    checkpointing: bool = False
    """Whether FSDP checkpoints activations."""
    optimizer: str | None = None
    """The type of DeepSpeed's own optimizer, which takes the place of the trainer's; None where it has none."""
    keeps_masters: bool = False
    """Whether DeepSpeed or FSDP keeps fp32 copies of the trained weights, whatever they were loaded in."""

    @property
    def updates_on_host(self) -> bool:
        """Whether DeepSpeed keeps the optimizer's states in host memory."""
        return self.offload != "none" and not self.sharding.startswith("fsdp")

    @property
    def axes(self) -> dict[str, object]:
        return {"offload": self.offload, "sharding": self.sharding}


def read_sharding(keys: Keys, where: Where, *, devices: int | None = None, config_is_enough: bool = False) -> Sharded:
    """`devices` is what the file itself says; the user's own word in `where` goes first. Trainer looks at `fsdp_config`
    only where `fsdp` is set; with `config_is_enough`, either turns FSDP on.

    Raises `UsageError` where weights, gradients or states are spread over devices and nobody says how many.
    """
    ranks, optimizer = devices if where.devices is None else where.devices, None
    if keys.value("deepspeed"):
        settings, library = _deepspeed(keys, where)
        stage, offload, optimizer = _stage(settings), _offload(settings), _optimizer(settings)
        value = f"zero{stage}" if stage else "ddp"
    elif keys.value("fsdp") or (config_is_enough and keys.value("fsdp_config")):
        options = _fsdp_options(keys, where)
        if "1" in {str(options.get("version")), str(keys.value("fsdp_version") if config_is_enough else None)}:
            keys.count_not("fsdp_version: 1", "unknown", "FSDP's first version; the second stands for it")
        switches = (_is_true(options.get(name)) for name in ("offload_params", "cpu_offload"))
        offload = "params" if "offload" in _words(keys) or any(switches) else "none"
        library, value = "fsdp", _fsdp(keys, options)
    else:
        if ranks is None:
            keys.assume("one GPU trains: say otherwise with --devices")
        return Sharded(devices=ranks or 1, sharding="none" if (ranks or 1) == 1 else "ddp")
    if ranks is None and value != "ddp":
        raise UsageError(f"{library} spreads the training over several GPUs: say how many with --devices")
    checkpointing = library == "fsdp" and _is_true(options.get("activation_checkpointing"))
    if (ranks or 1) == 1:
        keys.assume(f"one GPU trains: {library} has nothing to spread")
        value, offload = "none", "none" if library == "fsdp" else offload
    return Sharded(
        devices=ranks or 1,
        sharding=value,
        offload=offload,
        checkpointing=checkpointing,
        optimizer=optimizer,
        keeps_masters=True,
    )


def synchronises(keys: Keys, where: Where) -> bool:
    """Whether the file asks for a reduction after each micro-batch. Settings in a file that is not here are taken not
    to."""
    settings: Any = settings_of(SYNC_EACH_BATCH[0], keys.value(SYNC_EACH_BATCH[0]), where)
    for key in SYNC_EACH_BATCH[1:]:
        settings = settings.get(key) if isinstance(settings, dict) else None
    return _is_true(settings)


def saves_in_shards(keys: Keys, where: Where) -> bool:
    """Whether `fsdp_config` says so; a full state dict is the default (transformers' training_args.py)."""
    return _fsdp_options(keys, where).get("state_dict_type") == "SHARDED_STATE_DICT"


def _fsdp_options(keys: Keys, where: Where) -> Mapping[str, Any]:
    """What `fsdp_config` holds, without the prefix that its keys may have."""
    fsdp_config = keys.mapping("fsdp_config", FSDP_OPTIONS | {f"fsdp_{name}" for name in FSDP_OPTIONS}, where)
    return {name.removeprefix("fsdp_"): value for name, value in fsdp_config.items()}


def _deepspeed(keys: Keys, where: Where) -> tuple[Mapping[str, Any], str]:
    """DeepSpeed's settings, and what to call them. For a file that is not here, settings guessed from its name."""
    value = keys.value("deepspeed")
    if (settings := settings_of("deepspeed", value)) is not None:
        return settings, "deepspeed"
    if not isinstance(value, str):
        raise UsageError(f"deepspeed is {value!r}: it must be a file or its settings")
    if (settings := settings_of("deepspeed", value, where)) is not None:
        return settings, f"deepspeed ({value})"
    stage = re.search(r"(?:zero|z|stage)[_-]?([0-3])", value.lower())
    if stage is None:
        raise UsageError(f"deepspeed names {value}, which is not here: put it beside the config")
    keys.assume(f"{value} is not here: its name says ZeRO stage {stage[1]}")
    zero: dict[str, Any] = {"stage": int(stage[1])}
    if "offload" in value.lower():
        zero["offload_optimizer"] = {"device": "cpu"}
        if "param" in value.lower() or stage[1] == "3":
            zero["offload_param"] = {"device": "cpu"}
    return {"zero_optimization": zero}, f"deepspeed ({value})"


def _stage(settings: Mapping[str, Any]) -> int:
    stage = _zero(settings).get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise UsageError(f"DeepSpeed's zero_optimization.stage is {stage!r}: it must be 0, 1, 2 or 3")
    return int(stage)


def _zero(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    zero = settings.get("zero_optimization") or {}
    return zero if isinstance(zero, dict) else {}


def _optimizer(settings: Mapping[str, Any]) -> str | None:
    section = settings.get("optimizer")
    name = section.get("type") if isinstance(section, dict) else None
    return name if isinstance(name, str) else None


def _offload(settings: Mapping[str, Any]) -> str:
    zero = _zero(settings)
    devices = {}
    for name in ("optimizer", "param"):
        section = zero.get(f"offload_{name}") or {}
        if not isinstance(section, dict):
            raise UsageError(f"DeepSpeed's offload_{name} is {section!r}: it must be a mapping with a device")
        devices[name] = section.get("device", "none")
    if "nvme" in devices.values():
        return "nvme"
    if devices["param"] == "cpu":
        return "params"
    return "optimizer" if devices["optimizer"] == "cpu" else "none"


def _fsdp(keys: Keys, options: Mapping[str, Any]) -> str:
    """The strategy is a word of `fsdp`, or an option; version 1 has it in `reshard_after_forward` as well
    (transformers' training_args.py; accelerate's FullyShardedDataParallelPlugin)."""
    words = [*_words(keys), options.get("sharding_strategy", ""), options.get("reshard_after_forward", "")]
    strategies = {str(word).upper() for word in words}
    if strategies & {"HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "4", "5"}:
        keys.count_not("fsdp: hybrid_shard", "more", "weights are shared within a machine only; fsdp stands for it")
    if strategies & {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2", "2", "5", "FALSE"}:
        return "fsdp-no-reshard"
    return "ddp" if strategies & {"NO_SHARD", "3"} else "fsdp"


def _words(keys: Keys) -> list[str]:
    """The words of `fsdp`, which is a text or a list."""
    value = keys.value("fsdp")
    return value.split() if isinstance(value, str) else value if isinstance(value, list) else []


def _is_true(value: object) -> bool:
    return str(value).lower() == "true"
