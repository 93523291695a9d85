"""What saving a checkpoint takes besides training, by formula: copies in host memory, and what the device makes whole.

As transformers' Trainer saves (5.23, with accelerate 1.15, safetensors 0.8, deepspeed 0.19.8 and torch 2.13). Adapters
are left out, as in the floor: alone, they are all that is saved of LoRA and QLoRA.

* On one device, and by rank 0 of DDP: `save_file` of safetensors/torch.py copies all tensors of a file to the host at
  once. `torch.save` then copies the optimizer's states one tensor at a time, so that these need less.
* FSDP: a full state dict is the Trainer's default (training_args.py). Rank 0 gathers the whole model in host memory,
  frozen weights too (`get_state_dict` of accelerate/accelerator.py), and afterwards the optimizer's states all at once
  (`save_fsdp_optimizer` of accelerate/utils/fsdp_utils.py). A sharded state dict would take megabytes.
* ZeRO-1 and 2, also on one device with offload: every rank copies the whole model, frozen weights too
  (`clone_tensors_for_torch_save` in accelerate/accelerator.py).
* ZeRO-3: rank 0 gathers what is trained, with `stage3_gather_16bit_weights_on_model_save`. Afterwards every rank copies
  its masters, then each of its moments, a group of parameters at a time (`_save_zero_checkpoint` of
  deepspeed/runtime/engine.py; torch.save copies one storage at a time).
"""

from __future__ import annotations

from autofit.catalog.models import shape
from autofit.core.lattice import Config
from autofit.core.units import format_bytes
from autofit.estimate.memory.lower_bound import floor_parts
from autofit.techniques import Job
from autofit.techniques.axes.precision import is_mixed, product_format
from autofit.techniques.axes.sharding import uses_deepspeed
from autofit.techniques.deepspeed_settings import SUB_GROUP, deepspeed_stage
from autofit.techniques.job import ranks_per_host

FILE_BYTES = 50 * 10**9
"""Most that one file of weights holds (`max_shard_size` of `save_pretrained` in transformers/modeling_utils.py)."""


def too_much(config: Config, needed_bytes: int, present_bytes: int) -> str:
    """That a checkpoint exceeds the host's memory, and what would help, in a sentence."""
    instead = ": set state_dict_type: SHARDED_STATE_DICT" if config.text("sharding").startswith("fsdp") else ""
    needed, present = format_bytes(needed_bytes), format_bytes(present_bytes)
    return f"saving one takes {needed} of the machine's host memory: does not fit, it has {present}{instead}"


def why_not_saved(config: Config, job: Job) -> str | None:
    """`too_much` by formula, where no step is traced; None where a checkpoint fits, or the host's memory is unknown."""
    needed, present = copied_bytes(config, job), job.hardware.host_memory_bytes
    if not needed or not present:
        return None
    if config["offload"] != "none":
        from autofit.estimate.sharding.hosted import hosted_bytes  # which imports torch

        needed += ranks_per_host(job) * hosted_bytes(config, job)
    return too_much(config, needed, present) if needed > present else None


def copied_bytes(config: Config, job: Job) -> int:
    """Host memory that copies take while a checkpoint is saved, of all ranks on the machine of rank 0 together; on a
    processor, what DeepSpeed copies is left out."""
    if job.hardware.kind == "cpu":
        return 0
    trained, of = config["method"] == "full", _on_one_device(config, job)
    weights = of["weights"] + (_split(config, job) if trained else 0)
    if not uses_deepspeed(config):
        if config.text("sharding").startswith("fsdp"):
            return max(weights, of["optimizer"])
        return min(of["weights"], FILE_BYTES) if trained else 0
    if deepspeed_stage(config) < 3:
        return (ranks_per_host(job) - 1) * of["weights"] + weights
    if not trained:
        return 0
    masters = 2 if config["precision"] == "bf16" else 4
    group = masters * min(shape(job.model).parameters // job.workload.devices, SUB_GROUP)
    return max(weights, ranks_per_host(job) * group if config["offload"] == "none" else 0)


def whole_bytes(config: Config, job: Job) -> int:
    """Device memory that saving takes beyond what lies there between steps: the largest parameter, gathered whole; or,
    where nothing is sharded or offloaded, a copy of the experts' weights. The training step takes more than that."""
    sharding = config.text("sharding")
    if sharding.startswith("fsdp") or (uses_deepspeed(config) and deepspeed_stage(config) == 3):
        model = shape(job.model)
        return max(model.embedding_parameters, _stacked(job) // model.layers) * _width(config)
    on_device = config["method"] == "full" and not uses_deepspeed(config) and job.hardware.kind != "cpu"
    return _split(config, job) if on_device else 0


def _on_one_device(config: Config, job: Job) -> dict[str, int]:
    """The floor of the whole model's weights and states, in the formats that they are saved in."""
    kept = product_format(config) if uses_deepspeed(config) else config.text("precision")
    alone = config.replace(sharding="none", offload="none")
    return {**floor_parts(alone, job), "weights": floor_parts(alone.replace(precision=kept), job)["weights"]}


def _width(config: Config) -> int:
    """Bytes of a weight as it is saved: trained ones are fp32 where precision is mixed, but for DeepSpeed's."""
    mixed = config["method"] == "full" and is_mixed(config)
    return 4 if product_format(config) == "fp32" or (mixed and not uses_deepspeed(config)) else 2


def _split(config: Config, job: Job) -> int:
    """Bytes of what is stacked in training and lies apart in files: it is copied (`revert_weight_conversion` of
    transformers/core_model_loading.py). Architectures whose files have it stacked need less."""
    return _stacked(job) * _width(config)


def _stacked(job: Job) -> int:
    """Weights of all routed experts' gate and up projections, two of their three matrices."""
    return 2 * shape(job.model).expert_parameters // 3
