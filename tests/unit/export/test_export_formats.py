"""The registry of formats, the tables' completeness, the JSON document and the header."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from export_samples import AXES, imported, make_config, make_recommendation

from autofit import export as package
from autofit.core.errors import UsageError
from autofit.core.lattice import Config
from autofit.export import FORMATS, export, transformers_format, trl_format
from autofit.export.document import Recommended, collect, fidelity, merge, settings
from autofit.export.measured_code import excerpt
from autofit.techniques.axes.optimizer import OPTIMIZERS
from autofit.techniques.habits import TRAINERS
from autofit.trial.limits.segments import ALLOCATOR

EVERY_TABLE = {name: import_module(f"autofit.export.{name}_format").TABLE for name in FORMATS if name != "json"}
TABLES = {name: table for name, table in EVERY_TABLE.items() if name in TRAINERS}
STARTERS = EVERY_TABLE.keys() - TRAINERS
"""Formats that start a script: axes that their tables lack are the script's."""


@pytest.mark.parametrize("document", ["README.md", "docs/exports/index.md"])
def test_every_format_has_a_row_and_a_page(document: str) -> None:
    page = Path(__file__).parents[3] / document
    rows = dict(re.findall(r"^\| \[`(\w+)`\]\((\S+)\) \|", page.read_text(), re.MULTILINE))
    assert rows.keys() == FORMATS.keys()
    for name, link in rows.items():
        assert name in (page.parent / link).read_text()


@pytest.mark.parametrize("name", TABLES)
def test_every_axis_has_a_line_in_every_table(name: str) -> None:
    assert set(TABLES[name]) == set(AXES)


@pytest.mark.parametrize("name", EVERY_TABLE)
def test_every_value_is_emitted_or_noted(name: str) -> None:
    """Changing one axis changes the settings, or a note names the value."""
    for axis, values in AXES.items():
        method = "qlora" if axis in ("rank", "targets") else "full"
        seen = []
        for value in values:
            config = make_config(**{"method": method, axis: value})
            task = Recommended.of(make_recommendation(config), "x")
            trainer = TRAINERS.get(name)
            made = collect(EVERY_TABLE[name], task, starts_a_script=name in STARTERS, trainer=trainer)
            # Packing is said with the data, as it is where every sequence is full.
            alike = (axis, value) in (("sharding", "none"), ("batching", "padded"))
            assert (made.sections, made.notes) not in seen or alike, (axis, value)
            seen.append((made.sections, made.notes))


def test_unknown_axis_is_noted_and_absent_one_too() -> None:
    config = Config.of({"method": "full", "precision": "bf16", "rotation": "hadamard"})
    task = Recommended.of(make_recommendation(config), "x")
    notes = collect(trl_format.TABLE, task).notes
    assert any(note.startswith("rotation=hadamard:") for note in notes)
    assert any(note.startswith("checkpointing: the config does not name it") for note in notes)
    assert not any(note.startswith(("rank", "targets")) for note in notes)
    assert "CHECKPOINTING" not in FORMATS["transformers"](task).text


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("name", EVERY_TABLE)
def test_unknown_value_is_refused(name: str, axis: str) -> None:
    if name in STARTERS and axis not in EVERY_TABLE[name]:
        return
    config = make_config(**{"method": "lora", axis: "newer"})
    with pytest.raises(UsageError, match=f"unknown value of {axis} 'newer'"):
        export(make_recommendation(config), format=name, source="x")


def test_merge_refuses_two_values_of_one_key() -> None:
    with pytest.raises(AssertionError, match=r"training\.lr"):
        merge(settings(training={"lr": 1}), settings(training={"lr": 2}))


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown format 'tlr': did you mean trl"):
        export(make_recommendation(), format="tlr", source="x")


def test_what_needs_more_memory_is_refused_and_its_axis_differs() -> None:
    config = make_config(method="lora", precision="bf16", loss="chunked")
    for format, axis in (("axolotl", "loss"), ("llamafactory", "loss"), ("trl", "precision")):
        result = export(make_recommendation(config), format=format, source="org/model")
        assert any(note.startswith(f"{axis}=") for note in result.needs_more)
        assert fidelity(config, result.notes)[axis] == "differs"
        with pytest.raises(UsageError, match=rf"needs more memory as {format} .*--anyway"):
            package.check_memory(result, format)
    result = export(make_recommendation(config), format="transformers", source="org/model")
    package.check_memory(result, "transformers")
    assert set(fidelity(config, result.notes).values()) == {"same"}
    assert "# Fidelity:  all same\n" in result.text


def test_an_optimizer_without_a_name_in_trainers_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "lion", replace(OPTIMIZERS["lion"], trainer=None))
    config = make_config(optimizer="lion")
    for name in TABLES:
        result = export(make_recommendation(config), format=name, source="org/model")
        assert any(note.startswith("optimizer=lion: ") for note in result.notes)
        assert fidelity(config, result.notes)["optimizer"] == "differs"


def test_ddps_second_copy_of_the_gradients_counts_where_all_weights_are_trained() -> None:
    for format in ("trl", "llamafactory", "axolotl"):
        for method, counts in (("full", True), ("lora", False)):
            config = make_config(method=method, sharding="ddp", loss="full")
            result = export(make_recommendation(config, devices=8), format=format, source="org/model")
            assert any(note.startswith("sharding=ddp") for note in result.needs_more) is counts
            assert any("holds gradients twice" in note for note in result.notes)
        loss = "chunked" if format == "trl" else "full"
        measured_so = make_recommendation(make_config(sharding="ddp", loss=loss), devices=8, trainer=format)
        result = export(measured_so, format=format, source="org/model")
        package.check_memory(result, format, trainer=format)
        assert not any(note.startswith("sharding=ddp") for note in result.notes)
    for trainer, sets_views in ((None, True), ("transformers", False)):
        measured = make_recommendation(make_config(sharding="ddp"), devices=8, trainer=trainer)
        for format in ("transformers", "accelerate"):
            assert ("gradient_as_bucket_view" in export(measured, format=format, source="org/model").text) is sets_views


def test_measured_with_a_trainers_habits_it_is_exported_for_that_trainer_alone() -> None:
    config = make_config(method="lora", precision="bf16", loss="chunked")
    recommendation = make_recommendation(config, trainer="trl")
    result = export(recommendation, format="trl", source="org/model")
    package.check_memory(result, "trl")
    assert fidelity(config, result.notes)["precision"] == "same"
    assert export(recommendation, format="accelerate", source="org/model").text
    for format in ("transformers", "axolotl", "llamafactory"):
        with pytest.raises(UsageError, match="measured as trl trains: use --format trl"):
            export(recommendation, format=format, source="org/model")


def test_json_is_the_contract() -> None:
    recommendation = make_recommendation(expandable_segments=True)
    made = export(recommendation, format="json", source="some/model")
    assert json.loads(made.text) == json.loads(json.dumps(recommendation.to_json()))
    assert made.notes == ()
    assert made.text.startswith('{\n  "config": {')


@pytest.mark.parametrize("name", ["accelerate", "llamafactory"])
def test_a_launch_line_sets_the_allocator_under_both_of_its_names(name: str) -> None:
    for expands in (True, False):
        text = export(make_recommendation(expandable_segments=expands), format=name, source="x").text
        launch = next(line for line in text.splitlines() if line.startswith("# Launch:"))
        assert all((f"{variable}=expandable_segments:True " in launch) is expands for variable in ALLOCATOR)


@pytest.mark.parametrize("name", TABLES)
def test_header_says_where_the_numbers_come_from(name: str) -> None:
    made = export(make_recommendation(make_config(loss="fused", sharding="fsdp")), format=name, source="org/model")
    comments = "".join(line for line in made.text.splitlines(keepends=True) if line.startswith("#"))
    for expected in ("12,346 tokens/s", "43.00 GiB", "37.00 GiB", "NVIDIA H100 80GB HBM3", "org/model", "trial 17"):
        assert expected in comments
    assert all(note in comments for note in made.notes)
    assert any(note.startswith("sharding=fsdp") for note in made.notes)


@pytest.mark.parametrize("name", TABLES)
def test_names_from_outside_stay_inside_the_comment(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "x\nimport os; os.abort()\r\x85\u2028'\"\\"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    hostile = str(folder)
    made = export(make_recommendation(model=folder.name), format=name, source=hostile)
    if name == "transformers":
        body = ast.parse(made.text).body
        values = {ast.unparse(n.targets[0]): n.value for n in body if isinstance(n, ast.Assign)}
        assert ast.literal_eval(values["SOURCE"]) == hostile
        assert "os" not in {n.names[0].name for n in body if isinstance(n, ast.Import)}
    else:
        import yaml

        result = yaml.safe_load(made.text)
        assert result["base_model" if name == "axolotl" else "model_name_or_path"] == hostile


def test_measured_code_is_taken_whole() -> None:
    """The excerpt runs alone, imports nothing of this package, and names are in the order they are needed."""
    from autofit.techniques.losses.cross_entropy import KERNELS

    assert KERNELS["chunked"].__name__ == transformers_format.CHUNKED_KERNEL
    for module, name in (
        ("autofit.techniques.losses.cross_entropy", transformers_format.CHUNKED_KERNEL),
        ("autofit.techniques.selective", "selective_contexts"),
        ("autofit.techniques.axes.attention", "register_repeated_keys"),
    ):
        part = excerpt(module, name)
        assert "autofit" not in part.code and "type: ignore" not in part.code
        script = "\n".join(["from __future__ import annotations", *part.imports, part.code])
        assert callable(imported(script)[name])
    with pytest.raises(AssertionError, match="does not define nothing"):
        excerpt("autofit.techniques.selective", "nothing")


def test_a_users_program_is_told_its_command_line() -> None:
    result = make_recommendation(make_config(micro_batch=2))
    workload = replace(result.workload, program="python train.py {micro_batch} {model}")
    result = replace(result, workload=workload)
    assert package.formats_for(None, workload.program) == ["json"]
    assert json.loads(package.export(result, format="json", source="a hub/id").text)["command"] == (
        "python train.py 2 'a hub/id'"
    )
    with pytest.raises(UsageError, match=r"run python train\.py 2"):
        package.export(result, format="trl", source="x")
