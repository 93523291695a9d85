"""A Python script for transformers' Trainer, complete except for the data and the learning rate."""

from __future__ import annotations

from collections.abc import Mapping

from autofit.core.lattice import Value
from autofit.export import trainer_arguments as ta
from autofit.export.distributed import FIRST_GPU, by_deepspeed, by_fsdp, deepspeed_config, machine_notes, threads
from autofit.export.document import Code, Emit, Export, Recommended, Settings, Task, header, merge, settings
from autofit.export.measured_code import Excerpt, excerpt
from autofit.export.transformers_script import CHUNK_THE_LOSS, UPDATE_IN_BACKWARD, script
from autofit.techniques.adapters import alpha
from autofit.techniques.axes.attention import IMPLEMENTATIONS
from autofit.techniques.axes.batching import packs
from autofit.techniques.axes.optimizer import OPTIMIZERS
from autofit.techniques.axes.precision import is_mixed
from autofit.techniques.axes.update import updates_in_backward
from autofit.techniques.habits import has_habit
from autofit.techniques.habits.habit import InputGradients, UpcastBeside4Bit
from autofit.techniques.habits.known_trainers import TRANSFORMERS
from autofit.techniques.selective import BUDGETS, keeps_results

CHUNKED_KERNEL = "lighter_cross_entropy"
"""The loss kernel of `chunked`."""


def _method(value: Value, task: Task) -> Settings:
    config = task.config
    if value == "full":
        return settings()
    quantisation: dict[str, object] = {}
    if value == "qlora":
        compute = ta.compute_dtype(config)
        # FSDP shards floating-point tensors only.
        storage = f", bnb_4bit_quant_storage=torch.{compute}" if by_fsdp(task) else ""
        quantisation["quantization_config"] = Code(
            "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', "
            f"bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.{compute}{storage})"
        )
    dropout = task.workload.lora_dropout
    adapter = {"lora_dropout": dropout, "bias": "none", "task_type": "CAUSAL_LM"}
    prepare: dict[str, object] = {}
    if has_habit(UpcastBeside4Bit, config, task.workload.trainer):
        prepare["model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)"] = None
    if has_habit(InputGradients, config, task.workload.trainer):
        prepare["model.enable_input_require_grads()"] = None
    return settings(model=quantisation, adapter=adapter, prepare=prepare)


def _rank(value: Value, task: Task) -> Settings:
    return settings(adapter={"r": value, "lora_alpha": alpha(int(value))})


def _targets(value: Value, task: Task) -> Settings:
    return settings(adapter={"target_modules": ta.target_modules(value, task)})


def _precision(value: Value, task: Task) -> Settings:
    return settings(model={"dtype": Code(f"torch.{ta.load_dtype(task)}")}, training=ta.precision(task))


def _checkpointing(value: Value, task: Task) -> Settings:
    kwargs = ta.checkpointing(value)
    if value in BUDGETS:
        line = f"torch._functorch.config.activation_memory_budget = {BUDGETS[str(value)]}  # read at the first step"
        imports = {"import torch._functorch.config": None}
        return settings(checkpointing={"on": False, "kwargs": None}, budget={line: None}, imports=imports)
    if kwargs is None or not keeps_results(task.config):
        return settings(checkpointing={"on": kwargs is not None, "kwargs": kwargs})
    policy = excerpt("autofit.techniques.selective", "selective_contexts")
    argument = f"adapters={task.config.get('rank') is not None}" if value == "selective" else "products=False"
    kwargs["context_fn"] = Code(f"partial(selective_contexts, {argument})")
    return settings(
        checkpointing={"on": True, "kwargs": kwargs},
        imports=_imports_of(policy, "from functools import partial"),
        code={"selective": "# TensorBoard's callback cannot write arguments that hold a function.\n" + policy.code},
    )


def _imports_of(part: Excerpt, *statements: str) -> dict[str, object]:
    return dict.fromkeys((*part.imports, *statements))


def _batching(value: Value, task: Task) -> Settings:
    notes = []
    if packs(task.config):
        notes.append(f"batching={value}: the script takes rows; put whole sequences into them yourself")
    return ta.batching(value, *notes)


def _attention(value: Value, task: Task) -> Settings:
    name = IMPLEMENTATIONS[str(value)]
    implementation = settings(model={"attn_implementation": name})
    if value != "efficient":
        return implementation
    function = excerpt("autofit.techniques.axes.attention", "register_repeated_keys")
    code = f"{function.code}\n\nregister_repeated_keys({name!r})\n"
    return merge(implementation, settings(imports=_imports_of(function), code={"attention": code}))


def _mlp(value: Value, task: Task) -> Settings:
    if value != "tiled":
        return settings()
    tiles = excerpt("autofit.techniques.tiled_mlp", "tile_mlps")
    call = "tile_mlps(layer.mlp for layer in model.model.layers)"
    return settings(imports=_imports_of(tiles), code={"tiles": tiles.code}, load={call: None})


def _loss(value: Value, task: Task) -> Settings:
    if value != "chunked":
        return merge(ta.liger(value, task), settings(*ta.left_out_notes(task, TRANSFORMERS, "Trainer")))
    kernel = excerpt("autofit.techniques.losses.cross_entropy", CHUNKED_KERNEL)
    return merge(
        ta.liger(value, task),
        settings(
            imports=_imports_of(kernel, "from transformers.modeling_outputs import CausalLMOutput"),
            code={"kernel": kernel.code, "chunked": CHUNK_THE_LOSS.replace("KERNEL", CHUNKED_KERNEL)},
            load={"chunk_the_loss(model)": None},
        ),
    )


def _update(value: Value, task: Task) -> Settings:
    """Trainer's optimizer for each parameter. Trainer has none that updates within the backward pass, but for GaLore's
    and the like, whose states its checkpoints leave out."""
    if value != "in-backward":
        return settings()
    parts = [excerpt("autofit.techniques.in_backward", "UpdatesInBackward")]
    overrides = OPTIMIZERS[str(task.config["optimizer"])].in_8_bits
    if overrides:
        parts.append(excerpt("autofit.techniques.axes.optimizer", "set_overrides"))
    code = {f"update-{index}": part.code for index, part in enumerate(parts)}
    function = UPDATE_IN_BACKWARD.replace("    SET_OVERRIDES\n", "        set_overrides(made, model)\n" * overrides)
    return settings(
        imports={statement: None for part in parts for statement in part.imports},
        code={**code, "in_backward": function},
        trainer={"trainer.optimizer = in_backward(trainer.model, training_args)": None},
    )


def _compilation(value: Value, task: Task) -> Settings:
    """Compiles decoder layers alone, as trials do; `torch_compile` would compile all, and allow TF32 products."""
    checkpointing_layer = "from transformers.modeling_layers import GradientCheckpointingLayer"
    compiled = {"compile": {"on": None}, "imports": {checkpointing_layer: None}} if value is True else {}
    return settings(training={"torch_compile": False}, **compiled)


def _sharding(value: Value, task: Task) -> Settings:
    """DeepSpeed's configuration as a constant of its own, and settings for which Trainer has no argument."""
    trainer_settings = ta.sharding(value, task, trainer=None)
    if by_deepspeed(task):
        offloaded = task.config["offload"] == "nvme"
        folder = {"NVME_FOLDER": "None  # yours to choose: a folder on an NVMe disk"} if offloaded else {}
        library = deepspeed_config(task, filled=ta.FILLED, folder=Code("NVME_FOLDER"))
        return Settings(
            sections={"training": {"deepspeed": Code("DEEPSPEED")}, "deepspeed": library, "constants": folder},
            notes=trainer_settings.notes,
        )
    if value == "ddp" and task.workload.trainer is None:
        line = (
            "trainer.accelerator.ddp_handler.gradient_as_bucket_view = True  # one copy of each gradient, as measured"
        )
        return merge(trainer_settings, settings(trainer={line: None}))
    if by_fsdp(task) and is_mixed(task.config) and task.hardware.kind != "cpu":
        compute = ta.compute_dtype(task.config)
        return merge(
            trainer_settings,
            settings(
                imports={"from torch.distributed.fsdp import MixedPrecisionPolicy": None},
                trainer={
                    "# Trainer would sum gradients in 16 bits.": None,
                    f"policy = MixedPrecisionPolicy(param_dtype=torch.{compute}, reduce_dtype=torch.float32)": None,
                    "trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy": None,
                },
            ),
        )
    return trainer_settings


TABLE: Mapping[str, Emit] = {
    "method": _method,
    "rank": _rank,
    "targets": _targets,
    "precision": _precision,
    "micro_batch": ta.batch,
    "batching": _batching,
    "checkpointing": _checkpointing,
    "optimizer": ta.optimizer,
    "update": _update,
    "attention": _attention,
    "kernels": ta.liger,
    "mlp": _mlp,
    "loss": _loss,
    "compile": _compilation,
    "offload": ta.offload,
    "sharding": _sharding,
}


def export_transformers(task: Recommended) -> Export:
    """A script that defines `model_kwargs`, `peft_config`, `training_args` and `make_trainer(dataset)`."""
    machines = machine_notes(task, otherwise="torchrun's --nnodes, --nproc-per-node, --node-rank and --master-addr")
    clips = not updates_in_backward(task.config)
    run = settings(*machines, training={"learning_rate": Code("LEARNING_RATE"), **ta.run(task, clips=clips)})
    merged = ta.translated(task, run, TABLE, trainer="transformers")
    top = header(task, needs=_needs(task), launch=_launch(task), notes=merged.notes)
    return Export(text=top + script(merged, task), notes=merged.notes)


def _launch(task: Recommended) -> str:
    """For one device the others are hidden: Trainer would spread the batch over every device it sees. On a processor
    the number of threads is that of the trials: torch by itself knows of no quota, and counts cores without their
    siblings."""
    devices = task.workload.devices
    if devices > 1 or by_deepspeed(task):
        return f"{threads(task)}torchrun --nproc-per-node {devices} THIS_FILE TOKENS.pt"
    if task.hardware.kind != "cuda":
        return f"OMP_NUM_THREADS={task.hardware.cores} python THIS_FILE TOKENS.pt"
    return f"{FIRST_GPU}python THIS_FILE TOKENS.pt"


def _needs(task: Task) -> list[str]:
    config = task.config
    newer = config.get("checkpointing") in ("every-2", "every-4", "offload") or by_fsdp(task)
    oldest = "5.2" if config.get("batching") == "grouped" else "5.0"
    packages = {
        f"transformers >= {'5.17' if newer else oldest}": True,
        "peft": config["method"] != "full",
        "deepspeed >= 0.18": by_deepspeed(task),
    }
    return [*(name for name, is_needed in packages.items() if is_needed), *ta.libraries(config)]
