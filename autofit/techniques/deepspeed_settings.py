"""The DeepSpeed configuration for a config, as used by trials and written by exports."""

from __future__ import annotations

from typing import Any

from autofit.catalog.model_shape import ModelShape
from autofit.catalog.models import shape
from autofit.core.lattice import Config
from autofit.techniques.axes.precision import is_mixed
from autofit.techniques.job import Job
from autofit.techniques.technique import MAX_GRADIENT_NORM

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
"""ZeRO stage for each value of `sharding`."""
SINGLE_DEVICE_STAGES = {"optimizer": 2, "params": 3, "nvme": 3}
"""ZeRO stage for each value of `offload` on one device: the lowest that supports it."""
OPTIMIZER_BUFFERS = 4
"""Buffers for Adam's states in files: parameter, gradient, momentum, variance."""
PARAMETER_BUFFERS = 8
"""Buffers for parameters in files: those of the module being run, and those that DeepSpeed prefetches, for which it
takes only free buffers."""
SUB_GROUP = 10**9
"""Parameters of a rank that stage 3 updates at a time (`sub_group_size` of deepspeed/runtime/zero/config.py)."""
GROUP = 2**22
"""Trained elements whose states are read and written as a group; a group is closed once it has this many."""


def deepspeed_stage(config: Config) -> int:
    """The ZeRO stage of a config that DeepSpeed trains."""
    sharding = config.text("sharding")
    return STAGES[sharding] if sharding in STAGES else SINGLE_DEVICE_STAGES[config.text("offload")]


def deepspeed_settings(config: Config, job: Job, *, folder: str | None = None) -> dict[str, Any]:
    """DeepSpeed's JSON for `config`; the optimizer is passed to DeepSpeed as an object. `folder` is for offload=nvme.

    Buffers: reduce and all-gather buckets of hidden_size ** 2 elements, a prefetch bucket of nine tenths of that, and
    parameters of up to 10 * hidden_size elements kept whole. These are the values that transformers writes for "auto"
    (HfTrainerDeepSpeedConfig.trainer_config_finalize); DeepSpeed's own defaults, 5e8 elements, outweigh a small model.
    ZeRO-3 frees gathered parameters beyond an eighth of the model's parameters, and no earlier. That limit is at most
    1e9, DeepSpeed's default, which by itself would keep the whole of a model of up to 1e9 parameters.
    """
    model = shape(job.model)
    bucket = model.hidden_size**2
    zero: dict[str, Any] = {
        "stage": deepspeed_stage(config),
        "contiguous_gradients": True,
        "overlap_comm": job.hardware.kind != "cpu",
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket + bucket % 2,
    }
    if zero["stage"] == 3:
        live = min(10**9, model.parameters // 8)
        zero |= {
            "stage3_prefetch_bucket_size": bucket * 9 // 10,
            "stage3_param_persistence_threshold": 10 * model.hidden_size,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
        }
    if config["offload"] == "nvme":
        zero |= _in_files(job, folder)
    elif config["offload"] != "none":
        target = {"device": "cpu", "pin_memory": job.hardware.kind != "cpu"}
        zero |= {"offload_optimizer": target} | ({"offload_param": target} if config["offload"] == "params" else {})
    return {
        "train_micro_batch_size_per_gpu": config.number("micro_batch"),
        "gradient_accumulation_steps": job.workload.batch_per_device // config.number("micro_batch"),
        "gradient_clipping": MAX_GRADIENT_NORM,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        **_precision(config),
    }


def _in_files(job: Job, folder: str | None) -> dict[str, Any]:
    """Sizes depend on the model. DeepSpeed's defaults are fixed: with those, a parameter of more than 1e8
    elements would not fit in a buffer, and the states of up to 1e9 parameters would be buffered at once. A parameter
    kept for reuse would hold on to its buffer, of which there are few.

    DeepSpeed keeps 1e9 of the trained parameters in memory. On a single CPU it keeps all of them: there a gathered
    parameter is the buffer itself, which another parameter has by the time a checkpointed layer uses it again.
    """
    model = shape(job.model)
    is_single_cpu = job.hardware.kind == "cpu" and job.workload.devices == 1
    target = {"device": "nvme", "pin_memory": job.hardware.kind != "cpu", "nvme_path": folder}
    offload_param = {
        **target,
        "buffer_count": PARAMETER_BUFFERS,
        "buffer_size": -(-largest_parameter(model) // job.workload.devices),
        "max_in_cpu": max(10**9, model.parameters) if is_single_cpu else 10**9,
    }
    return {
        "offload_optimizer": {**target, "buffer_count": OPTIMIZER_BUFFERS},
        "offload_param": offload_param,
        "sub_group_size": GROUP,
        "stage3_max_reuse_distance": 0,
    }


def locked_elements(job: Job) -> tuple[int, int]:
    """Elements of the buffers for data in files: those for parameters, and at most those for Adam's states."""
    model, devices = shape(job.model), job.workload.devices
    largest = -(-largest_parameter(model) // devices)
    return PARAMETER_BUFFERS * largest, OPTIMIZER_BUFFERS * min(largest + GROUP, -(-model.parameters // devices))


def largest_parameter(model: ModelShape) -> int:
    """Upper bound on the elements of one parameter: those of the input embedding or of a layer, whichever is larger."""
    return max(model.embedding_parameters, (model.parameters - model.embedding_parameters) // model.layers)


def sums_in_fp32(config: Config) -> bool:
    """Whether gradients of 16-bit weights are summed over micro-batches in fp32, as autocast over fp32 weights does.

    Not in stages 1 and 2 with the optimizer on the host, where the summing also takes place: asked for fp32, DeepSpeed
    still keeps a rank's share of the sums on the device (`_get_compact_grad_partition_buffer` of stage_1_and_2.py),
    which outweighs the weights.
    """
    summed_on_host = config["offload"] == "optimizer" and deepspeed_stage(config) < 3
    return is_mixed(config) and not summed_on_host


def _precision(config: Config) -> dict[str, Any]:
    """Mixed precision is DeepSpeed's own: 16-bit weights, with fp32 master copies in the optimizer. Its
    `torch_autocast` would keep both formats of every weight on the device. Loss scaling has the settings of torch's
    GradScaler."""
    accumulation: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}} if sums_in_fp32(config) else {}
    match config["precision"]:
        case "bf16-mixed":
            return {"bf16": {"enabled": True}, **accumulation}
        case "bf16":
            bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
            return {"bf16": bf16}
        case "fp16-mixed":
            scale = {"initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
            return {"fp16": {"enabled": True, **scale}, **accumulation}
    return {}
