"""The Python script that settings for transformers become: fixed pieces, and what is filled in between them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from autofit.export import trainer_arguments as ta
from autofit.export.distributed import allocator
from autofit.export.document import Recommended, Settings
from autofit.techniques.axes.batching import separates_sequences
from autofit.techniques.axes.compilation import VARIANTS

CHUNK_THE_LOSS = '''
def chunk_the_loss(model):
    """Make `model` compute its loss a few rows of logits at a time; without labels nothing changes."""
    whole = model.forward

    def forward(
        input_ids=None, attention_mask=None, position_ids=None, labels=None, num_items_in_batch=None, **kwargs
    ):
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        if labels is None:
            return whole(**inputs, **kwargs)
        hidden = model.base_model(**inputs, use_cache=False, **kwargs).last_hidden_state
        config, output = model.config.get_text_config(), model.get_output_embeddings()
        head = Head(
            weight=output.weight,
            bias=getattr(output, "bias", None),
            softcap=getattr(config, "final_logit_softcapping", None),
            scale=(getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0),
        )
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = KERNEL(hidden.flatten(0, 1), head, shifted.flatten())
        count = (shifted != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutput(loss=loss / count)

    model.forward = forward
'''
"""Installs a loss kernel, called KERNEL here, in a model; needs the measured `Head`, and `CausalLMOutput`."""

UPDATE_IN_BACKWARD = '''
def in_backward(model, args):
    """The optimizer that `args` name, which updates each parameter of `model` within the backward pass.
    Trainer then logs a gradient norm of 0."""
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)

    def make(parameters):
        made = kind(parameters, weight_decay=args.weight_decay, **options)
    SET_OVERRIDES
        return made

    return UpdatesInBackward([p for p in model.parameters() if p.requires_grad], make)
'''
"""Needs the measured `UpdatesInBackward`. SET_OVERRIDES stands for calling the measured `set_overrides`."""

CHECKPOINTING_NAME = """\
# transformers 5.23 renamed gradient_checkpointing to activation_checkpointing.
CHECKPOINTING = "activation_checkpointing"
if CHECKPOINTING not in TrainingArguments.__dataclass_fields__:
    CHECKPOINTING = "gradient_checkpointing"

"""
"""Finds what the installed transformers calls checkpointing."""

LOAD = """\
    model = AutoModelForCausalLM.from_pretrained(SOURCE, **model_kwargs)
"""
LOAD_TEXT_PART = """\
    # The language model alone, as it was measured, even if SOURCE holds more.
    text = AutoConfig.from_pretrained(SOURCE).get_text_config()
    names = {r"^(model\\.)?language_model\\.(model\\.)?": "model.", r"^language_model\\.lm_head\\.": "lm_head."}
    model = AutoModelForCausalLM.from_pretrained(SOURCE, config=text, key_mapping=names, **model_kwargs)
"""

FUNCTIONS = '''\
def load_model():
    """The model as it was measured."""
    LOAD
    return model


def make_trainer(train_dataset):
    """A Trainer for ITEMS."""
    if training_args.learning_rate is None:
        raise SystemExit("the learning rate is yours to choose: set LEARNING_RATE in this script")
    TRAINER
'''
"""LOAD stands for loading the model and applying the method and techniques to it; ITEMS for what the trainer takes;
TRAINER for creating it."""

MAIN = """\
if __name__ == "__main__":
    tokens = torch.load(sys.argv[1])[:, :SEQ_LEN]  # your data: token ids, [sequences, SEQ_LEN]
    make_trainer([{"input_ids": row, "labels": row} for row in tokens]).train()
"""
"""What the script does when run."""
PADDING = """\
def padded(items):
    \"\"\"A micro-batch padded to its longest sequence: with causal attention, what follows a token needs no mask.\"\"\"
    def filled(name, value):
        return pad_sequence([torch.as_tensor(item[name]) for item in items], batch_first=True, padding_value=value)

    return {"input_ids": filled("input_ids", 0), "labels": filled("labels", -100)}
"""
MAIN_PADDED = """\
if __name__ == "__main__":
    rows = [row[:SEQ_LEN] for row in torch.load(sys.argv[1])]  # your data: a list with the token ids of each sequence
    make_trainer([{"input_ids": row, "labels": row} for row in rows]).train()
"""
"""`PADDING` and `MAIN_PADDED` are for data whose sequences have lengths."""
APART = """\
def apart(rows):
    \"\"\"A micro-batch of rows, each of several sequences: positions that restart keep these apart.\"\"\"
    joined = DataCollatorWithFlattening(return_flash_attn_kwargs=ONE_ROW)
    if ONE_ROW:  # as flash attention takes it
        return joined([{"input_ids": tokens} for row in rows for tokens in row])
    made = [joined([{"input_ids": tokens} for tokens in row]) for row in rows]
    fills = {"input_ids": 0, "labels": -100, "position_ids": 0}
    return {
        name: pad_sequence([row[name][0] for row in made], batch_first=True, padding_value=value)
        for name, value in fills.items()
    }
"""
MAIN_APART = """\
if __name__ == "__main__":
    make_trainer(torch.load(sys.argv[1])).train()  # your data: a list of rows, each a list of its sequences' token ids
"""
"""`APART` and `MAIN_APART` are for sequences that share rows and are kept apart. ONE_ROW says whether a micro-batch
becomes one row."""
COLLATORS = {
    "padded": (PADDING, MAIN_PADDED, "items of `input_ids` and `labels`: at most SEQ_LEN tokens each"),
    "apart": (
        APART,
        MAIN_APART,
        "rows, each a list of the token ids of sequences that have at most SEQ_LEN tokens together",
    ),
    "": ("", MAIN, "items of `input_ids` and `labels`: SEQ_LEN tokens each, none of them padding"),
}
"""By collator: its code, what the script does when run, and what the trainer takes."""


def _collator(task: Recommended) -> str:
    """The name of the script's collator; empty where every row is full."""
    if separates_sequences(task.config):
        return "apart"
    return "" if task.packs else "padded"


def script(merged: Settings, task: Recommended) -> str:
    """The script without its header, from the sections of `merged`."""
    constants = (
        f"SOURCE = {task.source!r}\nSEQ_LEN = {task.workload.seq_len}\n"
        "LEARNING_RATE = None  # yours to choose: it changes neither memory nor speed\n"
    ) + "".join(f"{name} = {value}\n" for name, value in merged.sections.get("constants", {}).items())
    code = [str(block).strip("\n") + "\n" for block in merged.sections.get("code", {}).values()]
    collate, main, _ = COLLATORS[_collator(task)]
    collate = collate.replace("ONE_ROW", str(task.config.get("attention") == "flash"))
    parts = [_imports(merged, task), constants, *code, _definitions(merged), *([collate] if collate else [])]
    return "\n\n".join([*parts, _functions(merged, task), main])


def _imports(merged: Settings, task: Recommended) -> str:
    environment = [f"os.environ[{name!r}] = {value!r}" for name, value in allocator(task).items()]
    names, collator = ["AutoModelForCausalLM", "Trainer", "TrainingArguments"], _collator(task)
    if collator == "apart":
        names.append("DataCollatorWithFlattening")
    if "quantization_config" in merged.sections.get("model", {}):
        names.append("BitsAndBytesConfig")
    if ta.is_part(task):
        names.append("AutoConfig")
    imports = {*merged.sections.get("imports", {}), "import sys", "import torch"}
    imports.add(f"from transformers import {', '.join(sorted(names))}")
    if collator:
        imports.add("from torch.nn.utils.rnn import pad_sequence")
    if environment:
        imports.add("import os")
    if "adapter" in merged.sections:
        of_peft = ["LoraConfig", "get_peft_model"]
        if any("prepare_model_for_kbit_training" in line for line in merged.sections.get("prepare", {})):
            of_peft.append("prepare_model_for_kbit_training")
        imports.add(f"from peft import {', '.join(of_peft)}")
    statements = sorted(imports, key=lambda line: (line.startswith("from"), line))
    standard = [line for line in statements if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    lines = [
        "",
        *(["from __future__ import annotations", ""] if merged.sections.get("code") else []),
        *standard,
        "",
        *(["# Read when CUDA starts.", *environment, ""] if environment else []),
        *(line for line in statements if line not in standard),
    ]
    return "\n".join(lines) + "\n"


def _definitions(merged: Settings) -> str:
    checkpointing = merged.sections.get("checkpointing")
    arguments = _arguments(merged.sections["training"])
    constants = ""
    if "deepspeed" in merged.sections:
        constants = f"DEEPSPEED = {_literal(dict(merged.sections['deepspeed']), '')}\n\n"
    if checkpointing is not None:
        constants += CHECKPOINTING_NAME
        arguments += f"    **{{CHECKPOINTING: {checkpointing['on']!r}, "
        arguments += f'f"{{CHECKPOINTING}}_kwargs": {checkpointing["kwargs"]!r}}},\n'
    entries = "".join(f"    {key!r}: {value!r},\n" for key, value in merged.sections.get("model", {}).items())
    adapter = merged.sections.get("adapter")
    lora = "None" if adapter is None else f"LoraConfig(\n{_arguments(adapter)})"
    return (
        f"model_kwargs = {{\n{entries}}}\n\npeft_config = {lora}\n\n{constants}"
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


def _functions(merged: Settings, task: Recommended) -> str:
    lines: list[str] = ["model.config.use_cache = False", *merged.sections.get("load", {})]
    if "adapter" in merged.sections:
        lines += merged.sections.get("prepare", {})
        lines += [
            "model = get_peft_model(model, peft_config)",
            "for parameter in model.parameters():",
            "    if parameter.requires_grad:",
            f"        parameter.data = parameter.data.to(torch.{ta.trained_dtype(task)})",
        ]
    if "compile" in merged.sections:
        lines += [
            f"torch._dynamo.config.recompile_limit = {VARIANTS}  # kinds of layers, not runs",
            *merged.sections.get("budget", {}),
            "for layer in model.modules():",
            "    if isinstance(layer, GradientCheckpointingLayer):",
            "        layer.compile()  # each decoder layer and nothing else, as it was measured",
        ]
    load = LOAD_TEXT_PART if ta.is_part(task) else LOAD
    collator = _collator(task)
    functions = FUNCTIONS.replace("ITEMS", COLLATORS[collator][2])
    trainer = _trainer(merged, collator)
    return functions.replace("    LOAD\n", load + _indented(lines)).replace("    TRAINER\n", _indented(trainer))


def _trainer(merged: Settings, collator: str) -> list[str]:
    lines = []
    if merged.sections.get("constants"):
        lines += [
            "if NVME_FOLDER is None:",
            '    raise SystemExit("where to offload is yours to choose: set NVME_FOLDER in this script")',
        ]
    collate = f", data_collator={collator}" if collator else ""
    call = f"Trainer(model=load_model(), args=training_args, train_dataset=train_dataset{collate})"
    if "trainer" not in merged.sections:
        return [*lines, f"return {call}"]
    return [*lines, f"trainer = {call}", *merged.sections["trainer"], "return trainer"]


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)
