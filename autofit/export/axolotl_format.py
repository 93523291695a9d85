"""YAML for `axolotl train FILE`.

Keys and their meaning are those of axolotl's version in `known_trainers`: src/axolotl/utils/schemas (config.py,
model.py, training.py, peft.py, fsdp.py, validation.py), integrations/liger/args.py, loaders/model.py and
core/builders/base.py, at github.com/axolotl-ai-cloud/axolotl.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from autofit.catalog.models import shape
from autofit.core.lattice import Value
from autofit.export import distributed
from autofit.export import trainer_arguments as ta
from autofit.export.document import Emit, Export, Near, NeedsMore, Recommended, Settings, Task, as_yaml, merge, settings
from autofit.techniques.axes.kernels import by_liger
from autofit.techniques.axes.mlp import tile_count
from autofit.techniques.axes.optimizer import weight_decay
from autofit.techniques.habits.known_trainers import AXOLOTL
from autofit.techniques.selective import interval, keeps_results
from autofit.techniques.technique import MAX_GRADIENT_NORM


def _method(value: Value, task: Task) -> Settings:
    if value == "full":
        return settings()
    model: dict[str, object] = {"adapter": value, "load_in_8bit": False, "load_in_4bit": value == "qlora"}
    if value == "qlora" and distributed.by_fsdp(task):  # which shards floating-point tensors only
        model["bnb_config_kwargs"] = {"bnb_4bit_quant_storage": ta.compute_dtype(task.config)}
    # axolotl turns its own kernels on unless it is told; peft's were measured.
    kernels = {f"lora_{part}_kernel": False for part in ("mlp", "qkv", "o")}
    return settings(model={**model, "lora_dropout": task.workload.lora_dropout, **kernels})


def _targets(value: Value, task: Task) -> Settings:
    modules = ta.target_modules(value, task)
    if isinstance(modules, str):
        return settings(model={"lora_target_linear": True})
    return settings(model={"lora_target_linear": False, "lora_target_modules": modules})


def _precision(value: Value, task: Task) -> Settings:
    """axolotl's keys name the format in which weights are loaded, and turn on autocast for the same one."""
    config = task.config
    is_bf16 = value in ("bf16", "bf16-mixed")
    training: dict[str, object] = {"bf16": is_bf16, "fp16": value == "fp16-mixed", "tf32": value == "tf32"}
    if config["method"] != "full":
        training["peft_autocast_adapter_dtype"] = value != "bf16"
    notes: list[str] = []
    if value == "bf16" and distributed.by_fsdp(task):
        notes.append(NeedsMore("precision=bf16: axolotl's FSDP keeps trained weights in fp32; bf16 was measured"))
    if is_bf16 and task.workload.trainer is None and not distributed.by_deepspeed(task):
        difference = "axolotl runs the forward pass under autocast, and may keep norms and embeddings in fp32"
        notes.append(Near(f"precision={value}: {difference}"))
    return settings(*notes, training=training)


def _micro_batch(value: Value, task: Task) -> Settings:
    size = int(value)
    count = task.workload.batch_per_device // size
    notes = []
    if task.workload.global_batch > size:  # `AxolotlTrainer.__init__` of core/trainers/base.py
        notes.append(Near(f"micro_batch={value}: axolotl weighs micro-batches alike, however many labels each has"))
    return settings(*notes, training={"micro_batch_size": size, "gradient_accumulation_steps": count})


def _checkpointing(value: Value, task: Task) -> Settings:
    kwargs = ta.checkpointing(value)
    if kwargs is None:
        return settings(training={"gradient_checkpointing": False})
    training: dict[str, object] = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
    if kwargs.pop("offload", False):
        training["activation_offloading"] = "hidden_states"
    if keeps_results(task.config):
        training["selective_checkpointing"] = {"save": ["attention"]}
    return settings(training=training)


def _batching(value: Value, task: Task) -> Settings:
    notes = [ta.packing_note("axolotl")] if value == "packed" else ta.first_label_notes(value, "axolotl")
    if value == "padding-free" and task.config["attention"] == "sdpa":
        difference = (
            "axolotl has sdpa keep sequences apart without a mask where torch can: less memory than was measured"
        )
        notes.append(Near(f"batching=padding-free: {difference}"))
    return settings(*notes, training={"group_by_length": True} if value == "grouped" else {})


def _optimizer(value: Value, task: Task) -> Settings:
    name, notes = ta.optimizer_name(value, "axolotl")
    if value == "adamw-8bit" and distributed.by_fsdp(task):
        name = "adamw_torch_8bit"
        notes.append(Near("optimizer=adamw-8bit: axolotl refuses bitsandbytes' with FSDP; torchao's stands in for it"))
    named = {} if name is None else {"optimizer": name}
    return settings(*notes, training={**named, "weight_decay": weight_decay(value)})


def _loss(value: Value, task: Task) -> Settings:
    notes = ta.left_out_notes(task, AXOLOTL, "axolotl")
    training = {} if value == "fused" else {"chunked_cross_entropy": value == "chunked"}
    return merge(_liger(value, task), settings(*notes, training=training))


def _liger(value: Value, task: Task) -> Settings:
    """Liger's plugin with the kernels that were measured, for the axes `kernels` and `loss`; nothing without any."""
    layers, loss = by_liger(task.config), task.config.get("loss") == "fused"
    if not layers and not loss:
        return settings()
    switches = dict.fromkeys(("rope", "rms_norm", "glu_activation"), layers)
    switches |= {"layer_norm": False, "cross_entropy": False, "fused_linear_cross_entropy": loss}
    plugin = ["axolotl.integrations.liger.LigerPlugin"]
    return settings(training={"plugins": plugin, **{f"liger_{name}": on for name, on in switches.items()}})


def _mlp(value: Value, task: Task) -> Settings:
    """As many tiles as the longest sequence was measured in, by axolotl's own code (monkeypatch/tiled_mlp)."""
    if value != "tiled":
        return settings()
    model = task.model()
    if model.config["model_type"] == "gemma3_text":  # it imports a module of that name, which transformers has not
        return settings(NeedsMore("mlp=tiled: axolotl cannot tile this model: more memory than was measured"))
    notes: list[str] = []
    if interval(task.config):
        notes.append(Near("mlp=tiled: axolotl computes the tiles of a checkpointed layer once more than trials do"))
    if task.config["method"] == "full":
        notes.append(NeedsMore("mlp=tiled: axolotl keeps a further copy of an MLP's gradients"))
    tiles = tile_count(task.workload.seq_len, shape(model).hidden_size)
    keys = {"tiled_mlp": True, "tiled_mlp_num_shards": tiles, "tiled_mlp_use_original_mlp": True}
    return settings(*notes, training=keys)


def _fsdp(task: Task) -> dict[str, object]:
    return {
        "fsdp_version": 2,
        "fsdp_config": {
            "offload_params": task.config["offload"] == "params",
            "reshard_after_forward": distributed.reshards(task),
            "cpu_ram_efficient_loading": False,  # not possible with 4-bit weights
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ",".join(distributed.sharded_layers(task)),
            "state_dict_type": "FULL_STATE_DICT",
        },
        **ta.SYNCHRONISED,
    }


TABLE: Mapping[str, Emit] = {
    "method": _method,
    "rank": ta.rank,
    "targets": _targets,
    "precision": _precision,
    "micro_batch": _micro_batch,
    "batching": _batching,
    "checkpointing": _checkpointing,
    "optimizer": _optimizer,
    "update": ta.unsettable,
    "attention": ta.attention,
    "kernels": _liger,
    "mlp": _mlp,
    "loss": _loss,
    "compile": ta.compilation,
    "offload": ta.offload,
    "sharding": partial(ta.sharding, trainer="axolotl", fsdp=_fsdp),
}

_TITLES = {"model": "Model", "data": "Data: add datasets. Packing is as was measured", "training": "Training"}


def export_axolotl(task: Recommended) -> Export:
    """Every value is stated: bf16 and tf32 are `auto` by default."""
    workload, kind = task.workload, task.hardware.kind
    base = settings(
        *ta.general_notes(task, "axolotl", machines="--num_machines, --machine_rank and --main_process_ip"),
        *(["hardware: axolotl has no setting for the CPU, on which this was measured"] if kind == "cpu" else []),
        model={"base_model": task.source},
        data={
            "sequence_len": workload.seq_len,
            "sample_packing": task.packs,
            "pad_to_sequence_len": task.packs,
            **({"pad_to_multiple_of": workload.seq_len} if task.packs else {}),  # instead of 64
            **({} if workload.lengths is None else {"excess_length_strategy": "truncate"}),
        },
        training={
            "learning_rate": ta.CHOOSE,
            "output_dir": "autofit-run",
            "max_grad_norm": MAX_GRADIENT_NORM,
            "auto_find_batch_size": False,
        },
    )
    merged = ta.translated(task, base, TABLE, trainer="axolotl", eval_key="eval_batch_size")
    needs = [f"axolotl >= {AXOLOTL.release}"]
    if distributed.by_deepspeed(task) or task.config.get("mlp") == "tiled":
        needs.append("deepspeed")
    if task.config.get("attention") == "flash":
        needs.append("flash-attn")
    return as_yaml(task, merged, titles=_TITLES, needs=needs, launch=_launch(task))


def _launch(task: Recommended) -> str:
    """For one device the others are hidden. Expandable segments are axolotl's default."""
    devices = task.workload.devices
    hides_gpus = devices == 1 and task.hardware.kind == "cuda"
    environment = distributed.threads(task) + (distributed.FIRST_GPU if hides_gpus else "")
    return f"{environment}axolotl train THIS_FILE --launcher accelerate -- --num_processes {devices}"
