"""A change of axes as an edit of the user's own file: it reads back as exactly the changed config, comments kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from unit.trainers.trainer_examples import EXAMPLES, Example

from autofit.core.errors import UsageError
from autofit.core.lattice import Config, Value
from autofit.export.document import Task
from autofit.planning.requests import WorkloadOptions
from autofit.prediction.estimation import site
from autofit.techniques import AXES, complete
from autofit.trainers.edits import REMOVED, applied, edits_for
from autofit.trainers.keys import settings_in_text
from autofit.trainers.run import Run, Where
from autofit.trainers.source_file import SourceFile, edited_text
from autofit.trainers.trainer import READERS, TrainerFiles

SMALL = "smollm2-135m"
"""What every example trains here: shapes decide nothing that an edit says, but for DeepSpeed's buffers."""


def task_of(run: Run) -> Task:
    batch = run.global_batch
    options = WorkloadOptions(model=SMALL, global_batch=batch, devices=run.devices, lora_dropout=run.lora_dropout)
    job = options.job(site("h100-80g"))
    return Task(config=run.config, workload=job.workload, hardware=job.hardware, stack=job.stack, source=SMALL)


def neighbours(run: Run) -> Iterator[Config]:
    """The configs that differ in one value, whether they work or not, and in the method."""
    values = run.config.to_json()
    for axis in AXES:
        listed = axis.values or (1, 2, 8, 64)
        for value in listed:
            if axis.name in values and value != values[axis.name] and (axis.name, value) != ("targets", "attention"):
                changed = {**values, axis.name: value}
                if changed["method"] == "full":
                    changed = {name: value for name, value in changed.items() if name not in ("rank", "targets")}
                if run.global_batch // run.devices % changed["micro_batch"] == 0:
                    yield complete(changed)


def edits_and_config(trainer: TrainerFiles, values: Mapping[str, Any], run: Run, config: Config, where: Where) -> Any:
    """The edits for a config, with what the file asks for then; None if there are none."""
    task = task_of(run)
    try:
        edits = edits_for(
            trainer, values, task, replace(task, config=config), lambda keys: trainer.read(keys, where).config
        )
        return (edits, trainer.read(applied(values, edits), where).config) if edits else None
    except UsageError:
        return None


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.file.replace("/examples/", ": "))
def test_every_change_that_a_file_can_say_is_an_edit_of_its_text(example: Example) -> None:
    run, file = example.run(), SourceFile.of("mine.yml", example.text())
    axes = set()
    for wanted in neighbours(run):
        answer = edits_and_config(example.trainer, file.values, run, wanted, example.where)
        if answer is None:
            continue
        edits, config = answer
        axes |= {axis for axis in config if config[axis] != run.config.get(axis) and config[axis] == wanted.get(axis)}
        changed = file.changed(edits)
        assert changed is not None, edits
        after = example.trainer.read(SourceFile.of("mine.yml", changed).values, example.where)
        assert after.config == config and after.global_batch == run.global_batch
        kept = sum("# said" in line for line in changed.splitlines())
        gone = sum(value is REMOVED or isinstance(value, dict) for value in edits.values()) + len(edits)
        assert changed.startswith("# my file\n") and kept >= file.text.count("# said") - gone
        assert file.diff(changed).startswith("--- mine.yml\n+++ mine.yml\n@@")
    assert axes >= {"checkpointing", "optimizer", "method"} or run.devices > 1


def test_an_edit_is_as_small_as_the_change() -> None:
    trainer, where = READERS["axolotl"], Where()
    text = "base_model: x\nadapter: lora\nlora_r: 8\nmicro_batch_size: 4\nbf16: auto\nlora_target_linear: true\n"
    file = SourceFile.of("mine.yml", text + "optimizer: adamw_torch_fused\nweight_decay: 0.1\n")
    run = trainer.read(file.values, where)
    for changed, edits in {
        ("optimizer", "lion"): {("optimizer",): "lion_32bit"},
        ("micro_batch", 2): {("micro_batch_size",): 2, ("gradient_accumulation_steps",): 2},
        ("rank", 16): {("lora_r",): 16},
        ("attention", "eager"): {("attn_implementation",): "eager"},
    }.items():
        config = run.config.replace(**dict([changed]))
        assert edits_and_config(trainer, file.values, run, config, where) == (edits, config)


def test_an_edit_has_no_key_that_changes_nothing() -> None:
    """DeepSpeed's own optimizer takes the place of the trainer's, whatever the file says of that."""
    trainer, where = READERS["trl"], Where(devices=2)
    deepspeed = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}}
    values = {"model_name_or_path": "x", "deepspeed": deepspeed, "per_device_train_batch_size": 4}
    run = trainer.read(values, where)
    edits, config = edits_and_config(trainer, values, run, run.config.replace(optimizer="lion", micro_batch=2), where)
    assert ("optim",) not in edits and config == run.config.replace(micro_batch=2)


def test_other_names_of_a_key_give_way() -> None:
    trainer, where = READERS["transformers"], Where()
    values = {"output_dir": "out", "per_gpu_train_batch_size": 4, "torch_compile_mode": "default"}
    run = trainer.read(values, where)
    edits, config = edits_and_config(trainer, values, run, run.config.replace(micro_batch=2, compile=False), where)
    assert config == run.config.replace(micro_batch=2, compile=False)
    assert {path[0] for path, value in edits.items() if value is REMOVED} == {
        "per_gpu_train_batch_size",
        "torch_compile_mode",
    }


def test_older_spellings_make_room() -> None:
    trainer, where = READERS["axolotl"], Where()
    values = {"base_model": "x", "flash_attention": True, "plugins": ["mine.Plugin"], "micro_batch_size": 1}
    run = trainer.read(values, where)
    edits, _ = edits_and_config(trainer, values, run, run.config.replace(attention="sdpa"), where)
    assert edits == {("attn_implementation",): "sdpa", ("flash_attention",): REMOVED}
    fused, _ = edits_and_config(trainer, values, run, run.config.replace(loss="fused"), where)
    assert fused[("plugins",)] == ["mine.Plugin", "axolotl.integrations.liger.LigerPlugin"]


def test_all_of_ligers_layers_are_switched_off_for_its_loss_alone() -> None:
    """Which of the two gated layers a model has is not known here, and Liger takes no notice of the other."""
    trainer, where = READERS["transformers"], Where()
    values = {"output_dir": "out", "per_device_train_batch_size": 1}
    run = trainer.read(values, where)
    edits, config = edits_and_config(trainer, values, run, run.config.replace(loss="fused"), where)
    off = {path[-1] for path, value in edits.items() if value is False}
    assert off == {"rope", "rms_norm", "swiglu", "geglu"} and config == run.config.replace(loss="fused")


def test_a_key_keeps_the_name_of_the_users_version() -> None:
    trainer, where = READERS["trl"], Where()
    values = {"model_name_or_path": "x", "torch_dtype": "bfloat16", "bf16": True, "activation_checkpointing": False}
    run = trainer.read(values, where)
    edits, config = edits_and_config(trainer, values, run, run.config.replace(checkpointing="every-2"), where)
    assert edits == {("activation_checkpointing",): True, ("activation_checkpointing_kwargs", "every_n_layers"): 2}
    adapted = complete({**run.config.to_json(), "method": "lora"})
    _, config = edits_and_config(trainer, values, run, adapted, where)
    assert (config["method"], config["precision"]) == ("lora", "bf16-mixed")  # trl keeps adapters in fp32


@pytest.mark.parametrize("end", ["", "\n"])
def test_the_diff_of_json_in_one_line_is_by_keys_and_says_so(end: str) -> None:
    file = SourceFile.of("args.json", '{"output_dir": "out", "optim": "adamw_torch", "bf16": true}' + end)
    changed = file.changed({("optim",): "lion_8bit"})
    assert changed == '{"output_dir": "out", "optim": "lion_8bit", "bf16": true}' + end
    headings, edits = (file.diff(changed).splitlines()[part] for part in (slice(2), slice(3, None)))
    assert headings == [f"{sign} args.json (as python -m json.tool prints it)" for sign in ("---", "+++")]
    assert edits == [
        '     "output_dir": "out",', '-    "optim": "adamw_torch",', '+    "optim": "lion_8bit",', '     "bf16": true'
    ]  # fmt: skip


def test_json_stays_json() -> None:
    file = SourceFile.of("args.json", '{\n    "output_dir": "out",\n    "optim": "adamw_torch"\n}\n')
    changed = file.changed({("optim",): "lion_8bit", ("torch_compile",): True})
    assert changed == '{\n    "output_dir": "out",\n    "optim": "lion_8bit",\n    "torch_compile": true\n}\n'


TEXT = """\
# top
a: 1  # one
list:
- x
- y  # last
inner:   # its own
  deep:
    k: v  # kv

  empty:
# middle
flow: {p: 1, q: [1, 2]}
blank:
next:
  word  # below
end: z"""


@pytest.mark.parametrize(
    ("path", "value", "now"),
    [
        (("a",), 2, "a: 2  # one\n"),
        (("list",), ["z"], "list: [z]  # last\ninner:"),
        (("inner", "deep", "k"), False, "    k: false  # kv\n"),
        (("inner", "deep", "new"), 3, "    k: v  # kv\n    new: 3\n"),
        (("inner", "empty"), "full", "  empty: full\n# middle"),
        (("inner", "more"), 1, "  empty:\n  more: 1\n# middle"),
        (("flow", "p"), 2, "flow: {p: 2, q: [1, 2]}"),
        (("flow", "r"), "s", "flow: {p: 1, q: [1, 2], r: s}"),
        (("blank",), 5, "blank: 5\nnext:"),
        (("blank", "x"), 5, "blank:\n  x: 5\nnext:"),
        (("next",), "other", "next:\n  other  # below"),
        (("a_more",), True, "a: 1  # one\na_more: true\n"),
        (("brand", "new"), 1, "end: z\nbrand:\n  new: 1\n"),
        (("a",), {"b": {"c": 1}}, "a:  # one\n  b:\n    c: 1\nlist:"),
        (("list",), REMOVED, "# one\ninner:"),
        (("inner", "deep"), REMOVED, "# its own\n\n  empty:"),
        (("end",), REMOVED, "word  # below\n"),
    ],
)
def test_text_is_edited_in_place(path: tuple[str, ...], value: object, now: str) -> None:
    changed = edited_text(TEXT, {path: value})
    assert changed is not None and now in changed
    assert yaml.safe_load(changed) == applied(yaml.safe_load(TEXT), {path: value})
    assert changed.startswith("# top\n")


@pytest.mark.parametrize("text", ["{a: 1, b: 2}", "a: &x {b: 1}\nc: *x\n"])
def test_text_that_cannot_be_edited_exactly_is_left_alone(text: str) -> None:
    assert SourceFile.of("mine.yml", text).changed({("c", "b"): 2}) in (None, "{a: 1, b: 2, c: {b: 2}}")


DS_VALUES = {
    **{"model_name_or_path": "x", "stage": "sft", "finetuning_type": "full", "cutoff_len": 512, "bf16": True},
    **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "deepspeed": "ds_z3.json"},
}


def deepspeed_of(folder: Path, **changed: Value) -> Any:
    """What takes the place of the file's DeepSpeed settings for a config with these values, once they are edited."""
    where, trainer = Where(folder=folder, devices=2), READERS["llamafactory"]
    run = trainer.read(DS_VALUES, where)
    wanted, task = run.config.replace(**changed), task_of(run)
    edits = edits_for(
        trainer,
        DS_VALUES,
        task,
        replace(task, config=wanted),
        lambda keys: trainer.read(keys, where).config,
        settings_in_text(DS_VALUES, where),
    )
    made = applied(DS_VALUES, edits)
    assert trainer.read(made, where).config == wanted
    return made["deepspeed"]


def test_what_takes_the_place_of_a_deepspeed_file_that_is_not_here_is_one_that_deepspeed_starts_with(
    tmp_path: Path,
) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    made = deepspeed_of(tmp_path, offload="optimizer")
    assert made["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert made["zero_optimization"]["stage"] == 3
    del made["optimizer"]  # whose values Trainer fills in
    started = DeepSpeedConfig(made | {"train_batch_size": 8})
    assert started.train_micro_batch_size_per_gpu == 4


def test_what_takes_the_place_of_a_deepspeed_file_goes_on_with_what_is_in_it(tmp_path: Path) -> None:
    own = {
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 7, "offload_optimizer": {"device": "cpu"}},
        **{"steps_per_print": 99, "gradient_clipping": 0.5, "bf16": {"enabled": "auto"}},
        **{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"},
    }
    (tmp_path / "ds_z3.json").write_text(json.dumps(own))
    made = deepspeed_of(tmp_path, offload="none")
    assert "offload_optimizer" not in made["zero_optimization"] or not made["zero_optimization"]["offload_optimizer"]
    kept = ("steps_per_print", "gradient_clipping", "bf16", "train_micro_batch_size_per_gpu")
    assert {name: made[name] for name in kept} == {name: own[name] for name in kept}


def test_what_takes_the_place_of_settings_as_text_goes_on_with_what_is_in_them(tmp_path: Path) -> None:
    own = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_ram_efficient_loading": True}
    (tmp_path / "fsdp.json").write_text(json.dumps(own))
    where, trainer = Where(folder=tmp_path, devices=2), READERS["transformers"]
    plain = {name: value for name, value in DS_VALUES.items() if name != "deepspeed"}
    for text in ("fsdp.json", json.dumps(own)):
        values = {**plain, "fsdp": "full_shard auto_wrap", "fsdp_config": text}
        run = trainer.read(values, where)
        task, wanted = task_of(run), run.config.replace(offload="params")
        after = replace(task, config=wanted)
        in_text = settings_in_text(values, where)
        edits = edits_for(trainer, values, task, after, lambda keys: trainer.read(keys, where).config, in_text)
        edited = applied(values, edits)
        assert trainer.read(edited, where).config == wanted
        assert edited["fsdp_config"].items() >= own.items()
