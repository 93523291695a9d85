"""A Python script for transformers' Trainer: complete but for the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autofit.errors import unknown
from autofit.export import trainer_arguments as ta
from autofit.export.document import Code, Emit, Export, Settings, collect, merge, settings
from autofit.export.header import header
from autofit.export.transformers_code import CHECKPOINTING_NAME, CHUNKED, FUNCTIONS, MAIN, SELECTIVE
from autofit.frontier import Recommendation
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
"""Liger's switches: its fused loss was measured, its other kernels were not."""


def _torch(dtype: str) -> Code:
    return Code(f"torch.{dtype}")


def _method(value: Value, recommendation: Recommendation) -> Settings:
    config = recommendation.point.config
    if value == "full":
        return settings()
    quantisation: dict[str, object] = {}
    if value == "qlora":
        compute = ta.compute_dtype(config)
        quantisation["quantization_config"] = Code(
            "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', "
            f"bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.{compute})"
        )
    dropout = recommendation.workload.lora_dropout
    adapter = {"lora_dropout": dropout, "bias": "none", "task_type": "CAUSAL_LM"}
    return settings(model=quantisation, adapter=adapter)


def _rank(value: Value, recommendation: Recommendation) -> Settings:
    return settings(adapter={"r": value, "lora_alpha": alpha(int(value))})


def _targets(value: Value, recommendation: Recommendation) -> Settings:
    return settings(adapter={"target_modules": ta.target_modules(value)})


def _precision(value: Value, recommendation: Recommendation) -> Settings:
    config = recommendation.point.config
    training = ta.autocast_flags(config)
    if value == "fp32":
        training["tf32"] = False
    return settings(model={"dtype": _torch(ta.load_dtype(config))}, training=training)


def _checkpointing(value: Value, recommendation: Recommendation) -> Settings:
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
    kwargs["context_fn"] = Code("selective_contexts")
    return settings(
        checkpointing={"on": True, "kwargs": kwargs},
        imports={"from torch.utils.checkpoint import create_selective_checkpoint_contexts": None},
        code={"selective": SELECTIVE},
    )


def _attention(value: Value, recommendation: Recommendation) -> Settings:
    return settings(model={"attn_implementation": ta.named("attention", value, ta.ATTENTION)})


def _loss(value: Value, recommendation: Recommendation) -> Settings:
    if value == "fused":
        return settings(training={"use_liger_kernel": True, "liger_kernel_config": _LIGER_LOSS_ONLY})
    if value == "full":
        return settings(training={"use_liger_kernel": False})
    if value != "chunked":
        raise unknown("value of loss", value, ["fused", "chunked", "full"])
    return settings(
        "loss=chunked: Trainer has no option for it; the script's own lines hold as little at a time as was "
        "measured, but compute the logits twice",
        training={"use_liger_kernel": False},
        imports={
            "from torch.utils.checkpoint import checkpoint": None,
            "from transformers.modeling_outputs import CausalLMOutput": None,
        },
        code={"chunked": CHUNKED},
        load={"chunk_the_loss(model)": None},
    )


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
    "compile": ta.compilation,
    "offload": ta.offload,
    "sharding": ta.sharding,
}
"""Axis to what it becomes. A new technique is one new line here."""


def export_transformers(recommendation: Recommendation, source: str) -> Export:
    """A script that defines `model_kwargs`, `peft_config`, `training_args` and `make_trainer(dataset)`."""
    made = merge(settings(training=ta.run(recommendation)), collect(TABLE, recommendation))
    top = header(
        recommendation,
        source,
        needs=_needs(made),
        launch=_launch(recommendation),
        notes=made.notes,
    )
    workload = recommendation.workload
    sizes = f"SOURCE = {source!r}\nSEQ_LEN = {workload.seq_len}\n"
    code = [block.strip("\n") + "\n" for block in map(str, made.sections.get("code", {}).values())]
    trained = ta.trained_dtype(recommendation.point.config)
    imports = _imports(made, expandable_segments=recommendation.point.measurement.expandable_segments)
    blocks = [imports, sizes, *code, _definitions(made), _functions(made, trained), MAIN]
    return Export(text=top + "\n\n".join(blocks), suffix=".py", notes=made.notes)


def _launch(recommendation: Recommendation) -> str:
    """On one device the others are hidden: Trainer would spread the batch over all that it sees."""
    devices = recommendation.workload.devices
    if devices > 1:
        return f"torchrun --nproc-per-node {devices} THIS_FILE TOKENS.pt"
    hidden = "CUDA_VISIBLE_DEVICES=0 " if recommendation.hardware.kind == "cuda" else ""
    return f"{hidden}python THIS_FILE TOKENS.pt"


def _needs(made: Settings) -> str:
    kwargs = made.sections["checkpointing"]["kwargs"] if "checkpointing" in made.sections else None
    newer = isinstance(kwargs, dict) and ("every_n_layers" in kwargs or "offload" in kwargs)
    parts = [f"transformers >= {'5.17' if newer else '5.0'}"]
    if "adapter" in made.sections:
        parts.append("peft")
    bits = str(made.sections["training"].get("optim"))
    if "quantization_config" in made.sections.get("model", {}) or "8bit" in bits or "lion" in bits:
        parts.append("bitsandbytes")
    if made.sections["training"].get("use_liger_kernel"):
        parts.append("liger-kernel")
    if made.sections.get("model", {}).get("attn_implementation") == "flash_attention_2":
        parts.append("flash-attn")
    return ", ".join(parts)


def _imports(made: Settings, *, expandable_segments: bool) -> str:
    adapters = "adapter" in made.sections
    quantised = "quantization_config" in made.sections.get("model", {})
    config = ["BitsAndBytesConfig"] if quantised else []
    names = ["AutoModelForCausalLM", *config, "Trainer", "TrainingArguments"]
    environment = 'os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # read when CUDA starts'
    lines = [
        "",
        *(["import os"] if expandable_segments else []),
        "import sys",
        "",
        *([environment, ""] if expandable_segments else []),
        "import torch",
        *(["from peft import LoraConfig, get_peft_model"] if adapters else []),
        *sorted([*made.sections.get("imports", {}), f"from transformers import {', '.join(names)}"]),
    ]
    return "\n".join(lines) + "\n"


def _definitions(made: Settings) -> str:
    checkpointing = made.sections.get("checkpointing")
    arguments = _arguments(made.sections["training"])
    name = ""
    if checkpointing is not None:
        name = CHECKPOINTING_NAME
        arguments += f"    **{{CHECKPOINTING: {checkpointing['on']!r}, "
        arguments += f'f"{{CHECKPOINTING}}_kwargs": {checkpointing["kwargs"]!r}}},\n'
    entries = "".join(f"    {key!r}: {value!r},\n" for key, value in made.sections.get("model", {}).items())
    adapter = made.sections.get("adapter")
    lora = "None" if adapter is None else f"LoraConfig(\n{_arguments(adapter)})"
    return (
        f"model_kwargs = {{\n{entries}}}\n\npeft_config = {lora}\n\n{name}"
        f"training_args = TrainingArguments(\n{arguments})\n"
    )


def _arguments(values: Mapping[str, object]) -> str:
    return "".join(f"    {key}={value!r},\n" for key, value in values.items())


def _functions(made: Settings, trained: str) -> str:
    lines: list[str] = [*made.sections.get("load", {})]
    if "adapter" in made.sections:
        lines += [
            "model = get_peft_model(model, peft_config)",
            "for parameter in model.parameters():",
            "    if parameter.requires_grad:",
            f"        parameter.data = parameter.data.to(torch.{trained})",
        ]
    return FUNCTIONS.replace("    ...\n", _indented(lines))


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)
