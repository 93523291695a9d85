"""A Python script for transformers' Trainer, complete except for the data and the learning rate."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from autofit.errors import unknown
from autofit.export import trainer_arguments as ta
from autofit.export.distributed import FIRST_GPU, by_deepspeed, by_fsdp, deepspeed_config, machine_notes, threads
from autofit.export.document import Code, Emit, Export, Settings, Task, collect, merge, settings
from autofit.export.header import header
from autofit.export.measured_code import Excerpt, excerpt
from autofit.export.transformers_code import (
    CHECKPOINTING_NAME,
    CHUNK_THE_LOSS,
    FUNCTIONS,
    LOAD,
    LOAD_TEXT_PART,
    MAIN,
)
from autofit.lattice import Value
from autofit.techniques.adapters import alpha

_LIGER_LOSS_ONLY = {
    "rope": False,
    "rms_norm": False,
    "layer_norm": False,
    "swiglu": False,
    "geglu": False,
    "cross_entropy": False,
    "fused_linear_cross_entropy": True,
}
"""Liger's switches: only its fused loss was measured, none of its other kernels."""
CHUNKED_KERNEL = "lighter_cross_entropy"
"""The loss kernel of `chunked`."""


def _torch(dtype: str) -> Code:
    return Code(f"torch.{dtype}")


def _method(value: Value, task: Task) -> Settings:
    config = task.config
    if value == "full":
        return settings()
    quantisation: dict[str, object] = {}
    if value == "qlora":
        compute = ta.compute_dtype(config)
        quantisation["quantization_config"] = Code(
            "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', "
            f"bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.{compute}{_storage(task)})"
        )
    dropout = task.workload.lora_dropout
    adapter = {"lora_dropout": dropout, "bias": "none", "task_type": "CAUSAL_LM"}
    return settings(model=quantisation, adapter=adapter)


def _storage(task: Task) -> str:
    """How 4-bit weights must be packed for FSDP, which shards floating-point tensors only."""
    return f", bnb_4bit_quant_storage=torch.{ta.compute_dtype(task.config)}" if by_fsdp(task) else ""


def _rank(value: Value, task: Task) -> Settings:
    return settings(adapter={"r": value, "lora_alpha": alpha(int(value))})


def _targets(value: Value, task: Task) -> Settings:
    return settings(adapter={"target_modules": ta.target_modules(value, task)})


def _precision(value: Value, task: Task) -> Settings:
    training = ta.autocast_flags(task)
    if value == "fp32":
        training["tf32"] = False
    return settings(model={"dtype": _torch(ta.load_dtype(task))}, training=training)


def _checkpointing(value: Value, task: Task) -> Settings:
    every = ta.checkpointed_every(value)
    if every is None:
        return settings(checkpointing={"on": False, "kwargs": None})
    kwargs: dict[str, object] = {"use_reentrant": False}
    if every > 1:
        kwargs["every_n_layers"] = every
    if value == "offload":
        kwargs["offload"] = True
    if value != "selective":
        return settings(checkpointing={"on": True, "kwargs": kwargs})
    policy = excerpt("autofit.techniques.selective", "selective_contexts")
    adapters = task.config.get("rank") is not None
    kwargs["context_fn"] = Code(f"partial(selective_contexts, adapters={adapters})")
    return settings(
        checkpointing={"on": True, "kwargs": kwargs},
        imports=_imports_of(policy, "from functools import partial"),
        code={"selective": "# TensorBoard's callback cannot write arguments that hold a function.\n" + policy.code},
    )


def _imports_of(part: Excerpt, *others: str) -> dict[str, object]:
    return dict.fromkeys((*part.imports, *others))


def _attention(value: Value, task: Task) -> Settings:
    return settings(model={"attn_implementation": ta.named("attention", value, ta.ATTENTION)})


def _loss(value: Value, task: Task) -> Settings:
    if value == "fused":
        return settings(training={"use_liger_kernel": True, "liger_kernel_config": _LIGER_LOSS_ONLY})
    if value == "full":
        return settings(training={"use_liger_kernel": False})
    if value != "chunked":
        raise unknown("value of loss", value, ["fused", "chunked", "full"])
    kernel = excerpt("autofit.techniques.cross_entropy", CHUNKED_KERNEL)
    return settings(
        training={"use_liger_kernel": False},
        imports=_imports_of(kernel, "from transformers.modeling_outputs import CausalLMOutput"),
        code={"kernel": kernel.code, "chunked": CHUNK_THE_LOSS.replace("KERNEL", CHUNKED_KERNEL)},
        load={"chunk_the_loss(model)": None},
    )


def _compilation(value: Value, task: Task) -> Settings:
    """Compiles the decoder alone, as in trials; `torch_compile` would also compile the loss and allow TF32 products."""
    compiled = {"compile": {"on": None}} if value is True else {}
    return settings(training={"torch_compile": False}, **compiled)


def _sharding(value: Value, task: Task) -> Settings:
    """DeepSpeed's configuration as a constant of its own, and settings for which Trainer has no argument."""
    made = ta.sharding(value, task, narrow_sums=False)
    if by_deepspeed(task):
        offloaded = task.config["offload"] == "nvme"
        folder = {"NVME_FOLDER": "None  # yours to choose: a folder on an NVMe disk"} if offloaded else {}
        library = deepspeed_config(task, filled=ta.FILLED, folder=Code("NVME_FOLDER"))
        return Settings(
            sections={"training": {"deepspeed": Code("DEEPSPEED")}, "deepspeed": library, "constants": folder},
            notes=made.notes,
        )
    if value == "ddp":
        line = (
            "trainer.accelerator.ddp_handler.gradient_as_bucket_view = True  # one copy of each gradient, as measured"
        )
        return merge(made, settings(trainer={line: None}))
    mixed = task.config["precision"] in ("bf16-mixed", "fp16-mixed")
    if by_fsdp(task) and mixed and task.recommendation.hardware.kind != "cpu":
        compute = ta.compute_dtype(task.config)
        return merge(
            made,
            settings(
                imports={"from torch.distributed.fsdp import MixedPrecisionPolicy": None},
                trainer={
                    "# Trainer would sum gradients in 16 bits.": None,
                    f"policy = MixedPrecisionPolicy(param_dtype=torch.{compute}, reduce_dtype=torch.float32)": None,
                    "trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = policy": None,
                },
            ),
        )
    return made


TABLE: Mapping[str, Emit] = {
    "method": _method,
    "rank": _rank,
    "targets": _targets,
    "precision": _precision,
    "micro_batch": ta.batch,
    "checkpointing": _checkpointing,
    "optimizer": ta.optimizer,
    "attention": _attention,
    "loss": _loss,
    "compile": _compilation,
    "offload": ta.offload,
    "sharding": _sharding,
}
"""Each axis and its translation. A new technique is one new line here."""


def export_transformers(task: Task) -> Export:
    """A script that defines `model_kwargs`, `peft_config`, `training_args` and `make_trainer(dataset)`."""
    machines = machine_notes(task, otherwise="torchrun's --nnodes, --nproc-per-node, --node-rank and --master-addr")
    yours = settings(*machines, training={"learning_rate": Code("LEARNING_RATE"), **ta.run(task)})
    made = merge(yours, collect(TABLE, task))
    top = header(task, needs=_needs(made), launch=_launch(task), notes=made.notes)
    constants = (
        f"SOURCE = {task.source!r}\nSEQ_LEN = {task.workload.seq_len}\n"
        "LEARNING_RATE = None  # yours to choose: it changes neither memory nor speed\n"
    ) + "".join(f"{name} = {value}\n" for name, value in made.sections.get("constants", {}).items())
    code = [str(block).strip("\n") + "\n" for block in made.sections.get("code", {}).values()]
    part = ta.is_part(task)
    imports = _imports(
        made,
        expandable_segments=task.recommendation.point.measurement.expandable_segments,
        names=["AutoConfig"] if part else [],
    )
    functions = _functions(made, LOAD_TEXT_PART if part else LOAD, ta.trained_dtype(task))
    blocks = [imports, constants, *code, _definitions(made), functions, MAIN]
    return Export(text=top + "\n\n".join(blocks), suffix=".py", notes=made.notes)


def _launch(task: Task) -> str:
    """For one device the others are hidden: Trainer would spread the batch over every device it sees. Numbered by slot,
    as trials number them, device 0 is the same card everywhere; by default CUDA numbers by speed."""
    devices = task.workload.devices
    if devices > 1 or by_deepspeed(task):
        return f"{threads(task)}torchrun --nproc-per-node {devices} THIS_FILE TOKENS.pt"
    if task.recommendation.hardware.kind != "cuda":
        return "python THIS_FILE TOKENS.pt"
    return f"{FIRST_GPU}python THIS_FILE TOKENS.pt"


def _needs(made: Settings) -> str:
    kwargs = made.sections["checkpointing"]["kwargs"] if "checkpointing" in made.sections else None
    newer = isinstance(kwargs, dict) and ("every_n_layers" in kwargs or "offload" in kwargs)
    newer = newer or "fsdp" in made.sections["training"]
    parts = [f"transformers >= {'5.17' if newer else '5.0'}"]
    if "adapter" in made.sections:
        parts.append("peft")
    if "deepspeed" in made.sections:
        parts.append("deepspeed >= 0.18")
    bits = str(made.sections["training"].get("optim"))
    if "quantization_config" in made.sections.get("model", {}) or "8bit" in bits or "lion" in bits:
        parts.append("bitsandbytes")
    if made.sections["training"].get("use_liger_kernel"):
        parts.append("liger-kernel")
    if made.sections.get("model", {}).get("attn_implementation") == "flash_attention_2":
        parts.append("flash-attn")
    return ", ".join(parts)


def _imports(made: Settings, *, expandable_segments: bool, names: list[str]) -> str:
    quantised = "quantization_config" in made.sections.get("model", {})
    config = ["BitsAndBytesConfig"] if quantised else []
    names = sorted([*names, "AutoModelForCausalLM", *config, "Trainer", "TrainingArguments"])
    needed = {*made.sections.get("imports", {}), "import sys", "import torch"}
    needed.add(f"from transformers import {', '.join(names)}")
    if expandable_segments:
        needed.add("import os")
    if "adapter" in made.sections:
        needed.add("from peft import LoraConfig, get_peft_model")
    ours = sorted(needed, key=lambda line: (line.startswith("from"), line))
    standard = [line for line in ours if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    environment = 'os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # read when CUDA starts'
    lines = [
        "",
        *(["from __future__ import annotations", ""] if made.sections.get("code") else []),
        *standard,
        "",
        *([environment, ""] if expandable_segments else []),
        *(line for line in ours if line not in standard),
    ]
    return "\n".join(lines) + "\n"


def _definitions(made: Settings) -> str:
    checkpointing = made.sections.get("checkpointing")
    arguments = _arguments(made.sections["training"])
    before = ""
    if "deepspeed" in made.sections:
        before = f"DEEPSPEED = {_literal(dict(made.sections['deepspeed']), '')}\n\n"
    if checkpointing is not None:
        before += CHECKPOINTING_NAME
        arguments += f"    **{{CHECKPOINTING: {checkpointing['on']!r}, "
        arguments += f'f"{{CHECKPOINTING}}_kwargs": {checkpointing["kwargs"]!r}}},\n'
    entries = "".join(f"    {key!r}: {value!r},\n" for key, value in made.sections.get("model", {}).items())
    adapter = made.sections.get("adapter")
    lora = "None" if adapter is None else f"LoraConfig(\n{_arguments(adapter)})"
    return (
        f"model_kwargs = {{\n{entries}}}\n\npeft_config = {lora}\n\n{before}"
        f"training_args = TrainingArguments(\n{arguments})\n"
    )


def _literal(value: object, indent: str = "    ") -> str:
    """`value` as Python source; a dictionary gets a line for each key."""
    if not isinstance(value, dict):
        return repr(value)
    inner = indent + "    "
    return "{\n" + "".join(f"{inner}{k!r}: {_literal(v, inner)},\n" for k, v in value.items()) + indent + "}"


def _arguments(values: Mapping[str, object]) -> str:
    return "".join(f"    {key}={_literal(value)},\n" for key, value in values.items())


def _functions(made: Settings, load: str, trained: str) -> str:
    lines: list[str] = ["model.config.use_cache = False", *made.sections.get("load", {})]
    decoder = "model.base_model"
    if "adapter" in made.sections:
        lines += [
            "model = get_peft_model(model, peft_config)",
            "for parameter in model.parameters():",
            "    if parameter.requires_grad:",
            f"        parameter.data = parameter.data.to(torch.{trained})",
        ]
        decoder = "model.get_base_model().base_model"
    if "compile" in made.sections:
        lines.append(f"{decoder}.compile()  # the decoder alone, as it was measured")
    return FUNCTIONS.replace("    LOAD\n", load + _indented(lines)).replace("    TRAINER\n", _indented(_trainer(made)))


def _trainer(made: Settings) -> list[str]:
    lines = []
    if made.sections.get("constants"):
        lines += [
            "if NVME_FOLDER is None:",
            '    raise SystemExit("where to offload is yours to choose: set NVME_FOLDER in this script")',
        ]
    call = "Trainer(model=load_model(), args=training_args, train_dataset=train_dataset)"
    if "trainer" not in made.sections:
        return [*lines, f"return {call}"]
    return [*lines, f"trainer = {call}", *made.sections["trainer"], "return trainer"]


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)
