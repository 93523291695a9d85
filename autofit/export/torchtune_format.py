"""YAML for `tune run RECIPE --config FILE`.

Keys and their meaning are those of torchtune 0.6.1, the last release: recipes/{full,lora}_finetune_{single_device,
distributed}.py, torchtune/modules/loss and torchtune/training/activations.py, at github.com/pytorch/torchtune.
"""

from __future__ import annotations

from collections.abc import Mapping

from autofit.errors import unknown
from autofit.export import distributed
from autofit.export import trainer_arguments as ta
from autofit.export.document import Emit, Export, Settings, Task, collect, merge, settings
from autofit.export.header import header
from autofit.export.torchtune_models import builder
from autofit.export.yaml_document import blocks
from autofit.lattice import Value
from autofit.techniques.adapters import alpha
from autofit.techniques.offload import Offload
from autofit.techniques.sharding import Sharding
from autofit.techniques.technique import MAX_GRADIENT_NORM

MISSING = "???"
"""What OmegaConf refuses to read until it is set in the file or on the command line."""

OPTIMIZERS: Mapping[str, Mapping[str, object]] = {
    "sgd": {"_component_": "torch.optim.SGD", "fused": True},
    "adafactor": {
        "_component_": "transformers.optimization.Adafactor",
        "scale_parameter": False,
        "relative_step": False,
    },
    "lion-8bit": {"_component_": "bitsandbytes.optim.Lion8bit"},
    "adamw-8bit": {"_component_": "bitsandbytes.optim.AdamW8bit"},
    "paged-adamw-8bit": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"},
    "lion": {"_component_": "bitsandbytes.optim.Lion"},
    "adamw": {"_component_": "torch.optim.AdamW", "fused": True},
    "adamw-foreach": {"_component_": "torch.optim.AdamW", "foreach": True},
}
"""The section `optimizer`, apart from the learning rate."""

_CHUNKED, _FULL = "torchtune.modules.loss.CEWithChunkedOutputLoss", "torch.nn.CrossEntropyLoss"


def _shards(task: Task) -> bool:
    """Whether the recipe for several devices is needed."""
    return task.workload.devices > 1 or distributed.by_fsdp(task)


def _offloads(task: Task) -> bool:
    """Whether torchtune can offload what the config offloads."""
    return task.config.get("offload") == "params" and distributed.by_fsdp(task)


def _recipe(task: Task) -> str:
    kind = "full" if task.config["method"] == "full" else "lora"
    return f"{kind}_finetune_{'distributed' if _shards(task) else 'single_device'}"


def _method(value: Value, task: Task) -> Settings:
    found = builder(task)
    model: dict[str, object] = {"_component_": found.component(adapters=value != "full"), **found.sizes}
    if value == "full":
        return settings(model=model)
    model |= {"apply_lora_to_output": False, "lora_dropout": task.workload.lora_dropout, "use_dora": False}
    notes = []
    if value == "qlora":
        notes.append("method=qlora: torchtune quantises with torchao's NF4; bitsandbytes' was measured")
    return settings(*notes, model={**model, "quantize_base": value == "qlora"})


def _rank(value: Value, task: Task) -> Settings:
    return settings(model={"lora_rank": value, "lora_alpha": alpha(int(value))})


def _targets(value: Value, task: Task) -> Settings:
    if value not in ("attention", "all-linear"):
        raise unknown("value of targets", value, ["attention", "all-linear"])
    projections = ["q_proj", "k_proj", "v_proj", "output_proj"]
    return settings(model={"lora_attn_modules": projections, "apply_lora_to_mlp": value == "all-linear"})


def _precision(value: Value, task: Task) -> Settings:
    dtypes = {"bf16": "bf16", "bf16-mixed": "bf16", "fp16-mixed": "bf16", "fp32": "fp32"}
    notes = []
    if str(value).endswith("-mixed"):
        notes.append(
            f"precision={value}: torchtune has no mixed precision: bf16 throughout, with less memory and other "
            "rounding than was measured"
        )
    return settings(*notes, training={"dtype": ta.named("precision", value, dtypes)})


def _micro_batch(value: Value, task: Task) -> Settings:
    size = int(value)
    count = task.workload.batch_per_device // size
    return settings(training={"batch_size": size, "gradient_accumulation_steps": count})


def _checkpointing(value: Value, task: Task) -> Settings:
    """Only the recipe for full training on several devices checkpoints some layers or operations and not others."""
    every = ta.checkpointed_every(value)
    training: dict[str, object] = {
        "enable_activation_checkpointing": every is not None,
        "enable_activation_offloading": value == "offload",
    }
    if value not in ("every-2", "every-4", "selective"):
        return settings(training=training)
    if _recipe(task) == "full_finetune_distributed":
        option = "op" if value == "selective" else every
        return settings(training={**training, "ac_mode": "selective", "ac_option": option})
    note = (
        f"checkpointing={value}: torchtune's {_recipe(task)} checkpoints all layers or none; all are here: less memory "
        "and more recomputation than was measured"
    )
    return settings(note, training=training)


def _optimizer(value: Value, task: Task) -> Settings:
    if value not in OPTIMIZERS:
        raise unknown("value of optimizer", value, OPTIMIZERS)
    notes = []
    if str(value).endswith("8bit"):
        notes.append(f"optimizer={value}: torchtune keeps the embeddings' states in 8 bits, too; 32 were measured")
    return settings(*notes, optimizer={**OPTIMIZERS[str(value)], "lr": MISSING})


def _attention(value: Value, task: Task) -> Settings:
    ta.named("attention", value, ta.ATTENTION)
    return settings(
        f"attention={value}: torchtune chooses the kernel: for packed sequences flex attention, or SDPA with a mask"
    )


def _loss(value: Value, task: Task) -> Settings:
    if value == "full":
        return settings(loss={"_component_": _FULL})
    different = {
        "fused": "torchtune has no fused loss and chunks it",
        "chunked": "torchtune keeps the logits of all chunks: more memory than was measured",
    }
    if value not in different:
        raise unknown("value of loss", value, [*different, "full"])
    return settings(f"loss={value}: {different[str(value)]}", loss={"_component_": _CHUNKED})


def _compilation(value: Value, task: Task) -> Settings:
    notes = ["compile=True: torchtune compiles each layer and the loss; the decoder alone was measured"]
    return settings(*(notes if value is True else []), training={"compile": value is True})


def _offload(value: Value, task: Task) -> Settings:
    Offload.axis.check(value)
    possible = _offloads(task)
    notes = []
    if value != "none" and not possible:
        notes.append(f"offload={value}: torchtune offloads parameters with FSDP alone; it is left out")
    return settings(*notes, training={"fsdp_cpu_offload": possible} if _shards(task) else {})


def _sharding(value: Value, task: Task) -> Settings:
    Sharding.axis.check(value)
    notes = []
    if value != "none" and not distributed.by_fsdp(task):
        there = "it stands in" if _shards(task) else "nothing is sharded"
        notes.append(f"sharding={value}: torchtune has FSDP alone; {there}")
    if not _shards(task):
        return settings(*notes)
    if task.workload.devices == 1:
        notes.append(f"sharding={value}: torchtune shards over several devices only")
    return settings(*notes, training={"fsdp_reshard_after_forward": value in ("fsdp", "zero3")})


TABLE: Mapping[str, Emit] = {
    "method": _method,
    "rank": _rank,
    "targets": _targets,
    "precision": _precision,
    "micro_batch": _micro_batch,
    "checkpointing": _checkpointing,
    "optimizer": _optimizer,
    "attention": _attention,
    "loss": _loss,
    "compile": _compilation,
    "offload": _offload,
    "sharding": _sharding,
}
"""Each axis and its translation. A new technique is one new line here."""

_TITLES = {
    "model": "Model",
    "data": "Data: yours to choose. Full sequences, as was measured",
    "training": "Training",
}


def export_torchtune(task: Task) -> Export:
    """Raises `UsageError` for a model that torchtune cannot build."""
    found = collect(TABLE, task)
    notes = distributed.machine_notes(task, otherwise="torchrun's --nnodes and --rdzv_endpoint as options of tune run")
    made = merge(settings(*notes), Settings(sections=_document(found, task), notes=found.notes))
    top = header(task, needs=_needs(task), launch=_launch(task), notes=made.notes)
    return Export(text="\n".join([top, *blocks(made, _TITLES)]), suffix=".yaml", notes=made.notes)


def _document(found: Settings, task: Task) -> dict[str, dict[str, object]]:
    """What the axes say, with the sections that every recipe reads."""
    nested = {name: dict(found.sections.get(name, {})) for name in ("model", "optimizer", "loss")}
    folder = "autofit-run"
    model = {
        "model": nested["model"],
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": task.source,
            "checkpoint_files": MISSING,
            "recipe_checkpoint": None,
            "output_dir": folder,
            "model_type": builder(task).checkpoint,
        },
        "resume_from_checkpoint": False,
    }
    data = {
        "tokenizer": {"_component_": MISSING, "path": MISSING, "max_seq_len": task.workload.seq_len},
        "dataset": {"_component_": MISSING, "packed": True},
        "shuffle": True,
        "seed": None,
        "epochs": 1,
        "max_steps_per_epoch": None,
    }
    training = {
        "output_dir": folder,
        "device": task.recommendation.hardware.kind,
        **found.sections.get("training", {}),
        "clip_grad_norm": MAX_GRADIENT_NORM,
        "optimizer": nested["optimizer"],
        "loss": nested["loss"],
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": f"{folder}/logs",
        },
    }
    if task.config["method"] == "full":
        training["optimizer_in_bwd"] = False
    else:
        name = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
        training["lr_scheduler"] = {"_component_": name, "num_warmup_steps": 100}
    return {"model": model, "data": data, "training": training}


def _needs(task: Task) -> str:
    optimizer = str(task.config.get("optimizer"))
    beside = "bitsandbytes" if "8bit" in optimizer or optimizer == "lion" else ""
    beside = "transformers" if optimizer == "adafactor" else beside
    return ", ".join(filter(None, ["torchtune 0.6.1", "torchao", beside]))


def _launch(task: Task) -> str:
    devices = task.workload.devices
    segments = task.recommendation.point.measurement.expandable_segments
    environment = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True " if segments else ""
    if _shards(task):
        threads = distributed.threads(task) if _offloads(task) else ""
        return f"{threads}{environment}tune run --nproc_per_node {devices} {_recipe(task)} --config THIS_FILE"
    chosen = "CUDA_VISIBLE_DEVICES=0 " if task.recommendation.hardware.kind == "cuda" else ""
    return f"{chosen}{environment}tune run {_recipe(task)} --config THIS_FILE"
