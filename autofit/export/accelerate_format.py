"""YAML for `accelerate launch --config_file FILE SCRIPT`: the number of processes, and how the model is sharded."""

from __future__ import annotations

import json
from collections.abc import Mapping

import yaml

from autofit.core.lattice import Value
from autofit.export import distributed
from autofit.export import trainer_arguments as ta
from autofit.export.document import Emit, Export, Recommended, Settings, Task, collect, header, merge, settings
from autofit.techniques.axes.optimizer import weight_decay
from autofit.techniques.deepspeed_settings import deepspeed_stage

MIXED = {"bf16": "no", "bf16-mixed": "bf16", "fp16-mixed": "fp16", "tf32": "no", "fp32": "no"}
"""`mixed_precision` of each precision."""

FILLED = ("lr", "weight_decay")
"""Optimizer arguments that accelerate fills in from its DummyOptim, and Trainer from its own arguments."""


def _precision(value: Value, task: Task) -> Settings:
    if distributed.by_deepspeed(task):  # its own configuration sets this, and nothing else may
        return settings()
    mixed = MIXED[str(value)]
    notes = [f"precision={value}: the training script must load the weights in that format"] if mixed == "no" else []
    if value == "tf32":
        call = 'torch.set_float32_matmul_precision("high")'
        notes = [f"precision=tf32: the training script must load the weights in fp32 and call {call}"]
    return settings(*notes, launch={"mixed_precision": mixed})


def _micro_batch(value: Value, task: Task) -> Settings:
    if distributed.by_deepspeed(task):
        return settings()
    count = task.workload.batch_per_device // int(value)
    plugin = ", GradientAccumulationPlugin(sync_each_batch=True)" if distributed.by_fsdp(task) and count > 1 else ""
    return settings(f"micro_batch={value}: the training script must set it, and accumulate {count} of them{plugin}")


def _sharding(value: Value, task: Task) -> Settings:
    if distributed.by_deepspeed(task):
        return _deepspeed(task)
    if distributed.by_fsdp(task):
        return _fsdp(task)
    if value == "none":
        return settings(launch={"distributed_type": "NO"})
    views = "pass Accelerator DistributedDataParallelKwargs(gradient_as_bucket_view=True), as measured"
    notes = [f"sharding=ddp: {views}"] if task.workload.trainer is None else []
    kind = task.hardware.kind
    if kind != "cpu":
        return settings(*notes, launch={"distributed_type": "MULTI_XPU" if kind == "xpu" else "MULTI_GPU"})
    notes.append("sharding=ddp: on a CPU accelerate starts several processes only with mpirun; torchrun works too")
    return settings(*notes, launch={"distributed_type": "MULTI_CPU"})


def _deepspeed(task: Task) -> Settings:
    """DeepSpeed's own file, embedded in this one: accelerate's keys for DeepSpeed do not cover bucket sizes."""
    notes = distributed.nvme_notes(task)
    if task.hardware.kind == "cpu":
        notes.append("DeepSpeed: accelerate supports it on accelerators only; on a CPU use Trainer with use_cpu=True")
    if distributed.on_host(task):
        notes.append(
            "optimizer=adamw: DeepSpeed creates it; a script without Trainer passes accelerate's DummyOptim. The script"
            f" sets weight_decay, of which {weight_decay('adamw')} was measured"
        )
    text = json.dumps(distributed.deepspeed_config(task, filled=FILLED), indent=2)
    deepspeed = {"deepspeed_config_file": text, "zero3_init_flag": deepspeed_stage(task.config) == 3}
    return settings(*notes, launch={"distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed})


def _fsdp(task: Task) -> Settings:
    fsdp = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": distributed.reshards(task),
        "fsdp_offload_params": task.config["offload"] == "params",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": ",".join(distributed.sharded_layers(task)),
        "fsdp_activation_checkpointing": False,
    }
    notes = distributed.fsdp_notes(task, narrow_sums=True)
    if task.config["method"] == "qlora":
        storage = ta.compute_dtype(task.config)
        notes.append(f"method=qlora: load it with bnb_4bit_quant_storage={storage}: FSDP shards only floating point")
    return settings(*notes, launch={"distributed_type": "FSDP", "fsdp_config": fsdp})


TABLE: Mapping[str, Emit] = {
    "precision": _precision,
    "micro_batch": _micro_batch,
    "offload": ta.offload,
    "sharding": _sharding,
}
"""The other axes are up to the training script."""


def export_accelerate(task: Recommended) -> Export:
    """The file only says how to launch a script; what is trained is up to the script."""
    devices, kind = task.workload.devices, task.hardware.kind
    notes = distributed.machine_notes(task, otherwise="num_machines, machine_rank and main_process_ip")
    merged = merge(settings(*notes), collect(TABLE, task, starts_a_script=True))
    launch: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": 1,
        "num_processes": devices,
        "use_cpu": kind == "cpu",
        **({"gpu_ids": "0"} if devices == 1 and kind != "cpu" else {}),
        **merged.sections.get("launch", {}),
    }
    environment = distributed.environment(task) + distributed.threads(task)
    top = header(
        task,
        needs=["accelerate >= 1.15", *(["deepspeed >= 0.18"] if distributed.by_deepspeed(task) else [])],
        launch=f"{environment}accelerate launch --config_file THIS_FILE YOUR_SCRIPT",
        notes=merged.notes,
    )
    return Export(text=f"{top}\n{yaml.dump(launch, Dumper=_Dumper, sort_keys=False)}", notes=merged.notes)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as block literals."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)
