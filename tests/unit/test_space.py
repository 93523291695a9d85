"""Search spaces: what their files describe, and how a wrong file is refused."""

from __future__ import annotations

import itertools
import pickle
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.catalog import space as space_module
from autofit.catalog.space import EVERY_DIVISOR, Rule, Space, load, names
from autofit.core.errors import UsageError
from autofit.core.lattice import Axis, Config
from autofit.techniques import AXES as REGISTRY

AXES = (
    Axis(name="method", values=("qlora", "lora", "full"), recipe="full"),
    Axis(name="rank", values=(), recipe=8),
    Axis(name="targets", values=("attention", "all-linear"), recipe="all-linear"),
    Axis(name="precision", values=("bf16", "bf16-mixed", "fp16-mixed", "fp32"), recipe="bf16-mixed"),
    Axis(name="micro_batch", values=(), recipe=1),
    Axis(name="checkpointing", values=("full", "every-2", "every-4", "selective", "none", "offload"), recipe="none"),
    Axis(name="optimizer", values=("sgd", "adamw-8bit", "adamw"), recipe="adamw"),
    Axis(name="attention", values=("sdpa", "flash", "eager"), recipe="sdpa"),
    Axis(name="loss", values=("fused", "chunked", "full"), recipe="full"),
    Axis(name="compile", values=(False, True), recipe=False),
    Axis(name="offload", values=("nvme", "params", "optimizer", "none"), recipe="none"),
    Axis(name="sharding", values=("zero3", "fsdp", "zero2", "zero1", "ddp", "none"), recipe="none"),
)

BUILT_IN = (
    "compiled",
    "cpu",
    "example",
    "full",
    "long-context",
    "lora",
    "multi-cpu",
    "multi-gpu",
    "offload",
    "qlora",
    "single-gpu",
    "smoke",
)


def read(folder: Path, text: str | bytes) -> Space:
    """The space that a file with this content describes."""
    file = folder / "mine.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return load(str(file), AXES)


def refusal(folder: Path, text: str | bytes) -> str:
    """The message that refuses a file with this content, from the line number on."""
    with pytest.raises(UsageError) as caught:
        read(folder, text)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'mine.yaml'}:")
    return message.removeprefix(f"{folder / 'mine.yaml'}:")


def configs(space: Space, batch: int = 4) -> list[Config]:
    return list(space.configs(AXES, batch=batch))


# What a file describes


def test_a_file_becomes_a_space(tmp_path: Path) -> None:
    space = read(
        tmp_path,
        """
purpose: >
  Two lines,
  folded.
rules:
  - when: {method: qlora}
    only: {precision: [bf16-mixed, bf16]}
    because: It computes in 16 bits.
axes:
  rank: [64, 8]
  method: [full, qlora]
defaults: {precision: bf16, compile: true}
""",
    )
    assert space == Space(
        name="mine",
        purpose="Two lines, folded.",
        path=str(tmp_path / "mine.yaml"),
        axes={"method": ("qlora", "full"), "rank": (8, 64)},
        defaults={"precision": "bf16", "compile": True},
        rules=(Rule(when={"method": ("qlora",)}, only={"precision": ("bf16", "bf16-mixed")}, never={}),),
    )
    assert pickle.loads(pickle.dumps(space)) == space


def test_order_in_the_file_changes_nothing(tmp_path: Path) -> None:
    fixed = "defaults: {compile: true}\n"
    one = read(tmp_path, "axes: {method: [lora], rank: [8, 64], loss: [full, fused]}\n" + fixed)
    two = read(tmp_path, fixed + "axes: {loss: [fused, full], rank: [64, 8], method: [lora]}\n")
    assert one == two
    assert list(one.axes) == list(two.axes) == ["method", "rank", "loss"]
    assert configs(one) == configs(two)


def test_every_config_is_complete(tmp_path: Path) -> None:
    space = read(tmp_path, "axes: {method: [lora]}\ndefaults: {loss: chunked}")
    assert configs(space, batch=1) == [
        Config.of(
            {
                "method": "lora",
                "rank": 8,
                "targets": "all-linear",
                "precision": "bf16-mixed",
                "micro_batch": 1,
                "checkpointing": "none",
                "optimizer": "adamw",
                "attention": "sdpa",
                "loss": "chunked",
                "compile": False,
                "offload": "none",
                "sharding": "none",
            }
        )
    ]


@pytest.mark.parametrize("batch", [0, -4])
def test_a_batch_of_no_sequences_is_refused(tmp_path: Path, batch: int) -> None:
    space = read(tmp_path, "axes: {method: [full]}")
    with pytest.raises(UsageError, match=f"the batch is {batch}: it must be at least 1"):
        list(configs(space, batch=batch))


def test_rank_is_eight_where_nothing_says_otherwise(tmp_path: Path) -> None:
    axes = tuple(Axis(name="rank", values=()) if axis.name == "rank" else axis for axis in AXES)
    (tmp_path / "mine.yaml").write_text("axes: {method: [lora]}")
    space = load(str(tmp_path / "mine.yaml"), axes)
    assert {config["rank"] for config in space.configs(axes, batch=1)} == {8}


def test_full_has_no_rank_and_comes_once(tmp_path: Path) -> None:
    space = read(tmp_path, "axes: {method: [full, lora], rank: [8, 16], targets: [attention, all-linear]}")
    listed = configs(space, batch=1)
    full = [config for config in listed if config["method"] == "full"]
    assert len(full) == 1 and "rank" not in full[0] and "targets" not in full[0]
    assert len(listed) == 1 + 4


@pytest.mark.parametrize("line", ["micro_batch: divisors", "micro_batch: Divisors", "loss: [full]"])
def test_micro_batch_takes_every_divisor(tmp_path: Path, line: str) -> None:
    space = read(tmp_path, f"axes:\n  method: [full]\n  {line}")
    assert space.axes.get("micro_batch", EVERY_DIVISOR) == EVERY_DIVISOR
    assert [config["micro_batch"] for config in configs(space, batch=12)] == [1, 2, 3, 4, 6, 12]
    assert [config["micro_batch"] for config in configs(space, batch=1)] == [1]


def test_micro_batch_of_a_list_takes_the_divisors_in_it(tmp_path: Path) -> None:
    space = read(tmp_path, "axes: {method: [full], micro_batch: [8, 4, 2, 1]}")
    assert [config["micro_batch"] for config in configs(space, batch=12)] == [1, 2, 4]


@pytest.mark.parametrize(
    ("text", "line", "listed"),
    [
        ("axes: {method: [full], micro_batch: [2, 4]}", 1, "2, 4"),
        ("axes:\n  method: [full]\n  micro_batch: [2, 4]", 3, "2, 4"),
        ("axes: {method: [full]}\ndefaults: {micro_batch: 8}", 2, "8"),
    ],
)
def test_no_micro_batch_that_divides_is_said(tmp_path: Path, text: str, line: int, listed: str) -> None:
    space = read(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        space.configs(AXES, batch=5)
    assert str(caught.value) == f"{space.path}:{line}: none of its micro_batch values ({listed}) divides the batch of 5"


@given(batch=st.integers(1, 100_000))
def test_divisors_are_all_and_only_the_divisors(batch: int) -> None:
    divisors = space_module._divisors(batch)
    assert divisors == sorted(set(divisors))
    assert all(batch % d == 0 for d in divisors)
    assert {batch // d for d in divisors} == set(divisors)
    assert set(divisors) >= {d for d in range(1, min(batch, 400) + 1) if batch % d == 0}


def test_count_counts_the_valid(tmp_path: Path) -> None:
    space = read(tmp_path, "axes: {method: [full], loss: [full, chunked]}")
    assert space.count(AXES, batch=4) == 6


@pytest.mark.parametrize("rule", ["never: {micro_batch: [1, 4]}", "only: {micro_batch: 2}"])
@pytest.mark.parametrize("batch", [1, 4, 60])
def test_count_is_the_number_of_configs(tmp_path: Path, rule: str, batch: int) -> None:
    axes = "axes: {method: [full], loss: [full, chunked], micro_batch: divisors}"
    space = read(tmp_path, f"{axes}\nrules: [{{when: {{loss: full}}, {rule}}}]")
    assert space.count(AXES, batch=batch) == len(list(space.configs(AXES, batch=batch)))


# Rules


def test_only_keeps_what_it_lists(tmp_path: Path) -> None:
    space = read(
        tmp_path,
        "axes: {method: [full, lora], loss: [fused, chunked, full]}\n"
        "rules: [{when: {method: lora}, only: {loss: [chunked, fused]}}]",
    )
    combinations = {(config["method"], config["loss"]) for config in configs(space)}
    all_of_full = {("full", loss) for loss in ("fused", "chunked", "full")}
    assert combinations == {("lora", "fused"), ("lora", "chunked")} | all_of_full


def test_never_leaves_out_each_axis_on_its_own(tmp_path: Path) -> None:
    space = read(
        tmp_path,
        "axes: {method: [full], loss: [fused, full], attention: [sdpa, eager], compile: [false, true]}\n"
        "rules: [{when: {compile: true}, never: {loss: full, attention: eager}}]",
    )
    compiled = [config for config in configs(space, batch=1) if config["compile"] is True]
    combinations = {(config["loss"], config["attention"]) for config in compiled}
    assert combinations == {("fused", "sdpa")}
    assert len(configs(space, batch=1)) == 1 + 4


def test_when_needs_all_its_axes_and_any_value_of_each(tmp_path: Path) -> None:
    space = read(
        tmp_path,
        "axes: {method: [full, lora, qlora], loss: [full, chunked], compile: [false, true]}\n"
        "rules: [{when: {method: [lora, qlora], loss: full}, never: {compile: true}}]",
    )
    compiled = {(c["method"], c["loss"]) for c in configs(space) if c["compile"] is True}
    excluded = set(itertools.product(("full", "lora", "qlora"), ("full", "chunked"))) - compiled
    assert excluded == {("lora", "full"), ("qlora", "full")}


def test_a_rule_neither_matches_nor_breaks_on_an_absent_axis(tmp_path: Path) -> None:
    axes = "axes: {method: [full, lora], rank: [8, 64], loss: [full, chunked]}\n"
    rules = (
        "rules:\n- {when: {rank: 8}, never: {loss: full}}\n"
        "- {when: {loss: chunked}, only: {rank: 64}}\n- {when: {loss: full}, never: {rank: 64}}"
    )
    combinations = [(c["method"], c.get("rank"), c["loss"]) for c in configs(read(tmp_path, axes + rules), batch=1)]
    assert sorted(combinations, key=str) == sorted(
        [("full", None, "chunked"), ("full", None, "full"), ("lora", 64, "chunked")], key=str
    )


def test_a_rule_may_name_a_default_and_a_micro_batch(tmp_path: Path) -> None:
    space = read(
        tmp_path,
        "axes: {method: [full], micro_batch: divisors}\ndefaults: {loss: full}\n"
        "rules: [{when: {loss: full}, only: {micro_batch: [1, 2, 3]}}]",
    )
    assert [config["micro_batch"] for config in configs(space, batch=8)] == [1, 2]


# What YAML might read otherwise than people


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ("[false, true]", (False, True)),
        ("[True, FALSE]", (False, True)),
        ("[on, off]", (False, True)),
        ("[yes]", (True,)),
        ("['true']", (True,)),
    ],
)
def test_spellings_of_true_and_false(tmp_path: Path, written: str, values: tuple[bool, ...]) -> None:
    assert read(tmp_path, f"axes: {{method: [full], compile: {written}}}").axes["compile"] == values


@pytest.mark.parametrize(("written", "rank"), [("8", 8), ("'8'", 8), ("010", 10), ("0008", 8)])
def test_numbers_are_read_as_people_read_them(tmp_path: Path, written: str, rank: int) -> None:
    assert read(tmp_path, f"axes: {{method: [lora], rank: [{written}]}}").axes["rank"] == (rank,)


def test_anchors_windows_line_ends_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = "axes:\n  method: &all [lora, full]\nrules:\n- {when: {method: *all}, never: {method: lora}}\n"
    space = read(tmp_path, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert {config["method"] for config in configs(space)} == {"full"}


@pytest.mark.parametrize("rest", ["defaults:\nrules:\npurpose:", "defaults: ~\nrules: null", "rules: []", ""])
def test_sections_may_be_empty_or_absent(tmp_path: Path, rest: str) -> None:
    space = read(tmp_path, "axes: {method: [full]}\n" + rest)
    assert (space.purpose, space.defaults, space.rules) == ("", {}, ())


def test_method_may_be_fixed(tmp_path: Path) -> None:
    space = read(tmp_path, "axes: {loss: [full]}\ndefaults: {method: qlora}")
    assert {config["method"] for config in configs(space)} == {"qlora"}


# Refusals: each with its line, the name, and the nearest valid one

AXES_LINE = "axes: {method: [full, lora], loss: [full, chunked]}\n"

REFUSED: dict[str, tuple[str | bytes, str]] = {
    "unknown section": ("purpose: x\naxis:\n  method: [full]\n", "2: unknown section 'axis': did you mean axes?"),
    "no axes": ("purpose: x\n", "1: section axes is missing: list at least the method there"),
    "axes null": ("axes:\n", "1: axes must be lines of 'name: value', not nothing"),
    "axes empty": ("axes: {}\n", "1: axes names no axis: list at least the method"),
    "axes a list": ("axes:\n  - method\n", "2: axes must be lines of 'name: value', not a list"),
    "a scalar": ("single-gpu\n", "1: a search space must be lines of 'name: value', not 'single-gpu'"),
    "a list": ("# comment\n- method\n", "2: a search space must be lines of 'name: value', not a list"),
    "method missing": (
        "purpose: x\naxes:\n  loss: [full]\n",
        "2: axis 'method' is missing: list its values under axes, or fix it under defaults",
    ),
    "unknown axis": ("axes:\n  method: [full]\n  ranks: [8]\n", "3: unknown axis 'ranks': did you mean rank?"),
    "axis with a hyphen": (
        "axes:\n  method: [full]\n  micro-batch: [1]\n",
        "3: unknown axis 'micro-batch': did you mean micro_batch?",
    ),
    "axis twice": (
        "axes:\n  method: [full]\n  loss: [full]\n  method: [lora]\n",
        "4: axis 'method' is given twice: first in line 2",
    ),
    "section twice": (
        "axes: {method: [full]}\n\naxes: {method: [lora]}\n",
        "3: section 'axes' is given twice: first in line 1",
    ),
    "merge key": (
        "axes:\n  method: [full]\n  <<: {loss: [full]}\n",
        "3: unknown axis '<<': valid: method, rank, targets, precision, micro_batch, checkpointing, "
        "optimizer, attention, loss, compile, offload, sharding",
    ),
    "key a list": (
        "axes:\n  method: [full]\n  ? [loss]\n  : [full]\n",
        "3: a name in axes must be a single word, not a list",
    ),
    "unknown value": (
        "axes:\n  method:\n  - full\n  - qlorra\n",
        "4: unknown value of method 'qlorra': did you mean qlora or lora?",
    ),
    "value off where a name belongs": (
        "axes:\n  method: [full]\n  offload: [off]\n",
        "3: unknown value of offload 'off': valid: nvme, params, optimizer, none",
    ),
    "value null": ("axes:\n  method: [full, ~]\n", "2: unknown value of method '~': valid: qlora, lora, full"),
    "compile misspelled": (
        "axes: {method: [full], compile: [ture]}\n",
        "1: unknown value of compile 'ture': did you mean true?",
    ),
    "rank a word": (
        "axes: {method: [lora], rank: [eight]}\n",
        "1: unknown value of rank 'eight': valid: a whole number of at least 1",
    ),
    "rank zero": (
        "axes: {method: [lora], rank: [8, 0]}\n",
        "1: unknown value of rank 0: valid: a whole number of at least 1",
    ),
    "rank endless": (f"axes:\n  method: [lora]\n  rank: [{'9' * 5000}]\n", "3: value of rank is too long for a number"),
    "value twice": ("axes:\n  method: [full, full]\n", "2: value full of method is listed twice"),
    "value twice, spelled otherwise": (
        "axes: {method: [full], compile: [true, on]}\n",
        "1: value true of compile is listed twice",
    ),
    "number twice": ("axes: {method: [lora],\n  rank: [8,\n 08]}\n", "3: value 8 of rank is listed twice"),
    "nested list": ("axes:\n  method: [full, [lora]]\n", "2: a value of method must be a word or a number, not a list"),
    "value a mapping": (
        "axes:\n  method: [full, {lora: 8}]\n",
        "2: a value of method must be a word or a number, not a group of names",
    ),
    "alias of itself": ("axes:\n  method: &a [*a]\n", "2: a value of method must be a word or a number, not a list"),
    "axis without values": ("axes:\n  method: [full]\n  loss: []\n", "3: axis 'loss' has no values: list at least one"),
    "axis null": ("axes:\n  method: [full]\n  loss:\n", "3: axis 'loss' has no values: list at least one"),
    "axis a scalar": (
        "axes:\n  method: [full]\n  loss: chunked\n",
        "3: axis 'loss' needs a list: write [chunked], or move it to defaults",
    ),
    "micro_batch a scalar": (
        "axes:\n  method: [full]\n  micro_batch: 4\n",
        "3: axis 'micro_batch' needs a list: write [4], or move it to defaults",
    ),
    "micro_batch misspelled": (
        "axes:\n  method: [full]\n  micro_batch: divisor\n",
        "3: unknown value of micro_batch 'divisor': did you mean divisors?",
    ),
    "rank of divisors": (
        "axes:\n  method: [lora]\n  rank: divisors\n",
        "3: axis 'rank' needs a list: write [divisors], or move it to defaults",
    ),
    "default unknown": (
        AXES_LINE + "defaults:\n  atention: sdpa\n",
        "3: unknown axis 'atention': did you mean attention?",
    ),
    "default a list": (
        AXES_LINE + "defaults:\n  attention: [sdpa]\n",
        "3: default of attention must be one value; to search several, use axes",
    ),
    "default and axis": (
        AXES_LINE + "defaults:\n  compile: true\n  loss: full\n",
        "4: axis 'loss' is under axes and under defaults: keep one of them",
    ),
    "default of divisors": (
        AXES_LINE + "defaults:\n  micro_batch: divisors\n",
        "3: unknown value of micro_batch 'divisors': valid: a whole number of at least 1",
    ),
    "defaults a list": (
        AXES_LINE + "defaults:\n  - compile\n",
        "3: defaults must be lines of 'name: value', not a list",
    ),
    "purpose a list": (AXES_LINE + "purpose: [x]\n", "2: purpose must be a sentence, not a list"),
    "rules a mapping": (
        AXES_LINE + "rules:\n  when: {loss: full}\n",
        "3: rules must be a list: start each rule with '- when:'",
    ),
    "rule a scalar": (AXES_LINE + "rules:\n- never\n", "3: a rule must be lines of 'name: value', not 'never'"),
    "rule with an unknown key": (
        AXES_LINE + "rules:\n- when: {loss: full}\n  nevr: {method: full}\n",
        "4: unknown key of a rule 'nevr': did you mean never?",
    ),
    "rule without when": (
        AXES_LINE + "rules:\n- never: {method: full}\n",
        "3: the rule has no when: say which configs it is for",
    ),
    "rule without effect": (
        AXES_LINE + "rules:\n- when: {loss: full}\n  because: x\n",
        "3: the rule has neither only nor never: say what it leaves out",
    ),
    "rule with an empty when": (AXES_LINE + "rules:\n- when: {}\n  never: {method: full}\n", "3: when names no axis"),
    "rule with a null only": (
        AXES_LINE + "rules:\n- when: {loss: full}\n  only:\n",
        "4: only must be lines of 'name: value', not nothing",
    ),
    "rule on no values": (
        AXES_LINE + "rules:\n- when: {loss: full}\n  only:\n    method: []\n",
        "5: axis 'method' has no values: list at least one",
    ),
    "rule on an axis that is not here": (
        AXES_LINE + "rules:\n- when: {loss: full}\n  never: {attention: eager}\n",
        "4: axis 'attention' is not in this space: add it to axes or defaults",
    ),
    "rule that leaves nothing": (
        AXES_LINE + "rules:\n- when: {loss: full}\n  only: {method: qlora}\n",
        "4: only leaves nothing of method: the space lacks qlora",
    ),
    "reason a list": (
        AXES_LINE + "rules:\n- when: {loss: full}\n  never: {method: full}\n  because: [x]\n",
        "5: because must be a sentence, not a list",
    ),
    "empty file": ("", "1: the file is empty: a search space needs at least axes with a method"),
    "tab": (
        "axes:\n\tmethod: [full]\n",
        "2: not valid YAML: found character '\\t' that cannot start any token; indent with spaces, not tabs",
    ),
    "open bracket": (
        "axes:\n  method: [full\n  loss: [full]\n",
        "3: not valid YAML: while parsing a flow sequence of line 2, expected ',' or ']', but got ':'",
    ),
    "colon too many": (
        "axes:\n  method: [full]\npurpose: a: b\n",
        "3: not valid YAML: mapping values are not allowed here",
    ),
    "undefined alias": ("axes:\n  method: *methods\n", "2: not valid YAML: found undefined alias 'methods'"),
    "two documents": (
        "axes: {method: [full]}\n---\naxes: {method: [lora]}\n",
        "2: not valid YAML: expected a single document in the stream of line 1, but found another document",
    ),
    "not UTF-8": (b"axes:\n  method: [full]\npurpose: caf\xe9\n", "3: not text in UTF-8, so not a search space"),
    "zero bytes": (b"axes:\n  method: [\x00full]\n", "2: not text: it has a character #x0000"),
    "nested without end": ("axes: " + "[" * 5000, "1: not a search space: nested too deeply"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_file_is_refused(tmp_path: Path, case: str) -> None:
    text, message = REFUSED[case]
    assert refusal(tmp_path, text) == message


def test_yaml_tags_run_nothing(tmp_path: Path) -> None:
    text = f"axes:\n  method: [!!python/object/apply:pathlib.Path.touch ['{tmp_path}/ran']]\n"
    assert refusal(tmp_path, text) == "2: a value of method must be a word or a number, not a list"
    assert not (tmp_path / "ran").exists()


@given(data=st.binary(max_size=200) | st.text(alphabet="axesmthod:[]{}-&*!'\"|>#% \t\nfull,?", max_size=80))
def test_any_content_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes | str) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        read(folder, data)
    except UsageError as error:
        assert str(error).startswith(f"{folder / 'mine.yaml'}:")


# Names and files


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        UsageError, match=r"^unknown search space 'singel-gpu': did you mean single-gpu or multi-gpu\?$"
    ):
        load("singel-gpu", AXES)
    with pytest.raises(UsageError, match=r"^unknown search space '': valid: compiled, cpu, example, full, "):
        load("", AXES)


@pytest.mark.parametrize("name", ["no\0where", "x" * 5000, "../search_spaces/cpu", "a/b"])
def test_a_name_that_is_no_file_is_an_unknown_name(name: str) -> None:
    with pytest.raises(UsageError, match=r"^unknown search space "):
        load(name, AXES)


@pytest.mark.parametrize("ending", [".yaml", ".yml"])
def test_a_file_that_is_not_there(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"missing{ending}"
    with pytest.raises(UsageError) as caught:
        load(str(file), AXES)
    assert str(caught.value) == f"{file}: no such file; built-in search spaces: {', '.join(BUILT_IN)}"


@pytest.mark.parametrize("name", ["no\0where.yaml", "x" * 5000 + ".yaml"])
def test_a_path_that_no_file_can_have(name: str) -> None:
    with pytest.raises(UsageError, match=r"space cannot be read: (embedded null byte|File name too long)$"):
        load(name, AXES)


def test_a_folder_is_no_search_space(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load(str(tmp_path), AXES)
    assert str(caught.value) == f"{tmp_path}: the search space cannot be read: Is a directory"


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)  # root reads everything
    with pytest.raises(UsageError, match=r"mine.yaml: the search space cannot be read: Permission denied$"):
        load(str(tmp_path / "mine.yaml"), AXES)


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError) as caught:
        load(str(tmp_path / "model.safetensors"), AXES)
    assert str(caught.value) == f"{tmp_path / 'model.safetensors'}: over 1 MiB, too large for a search space"


def test_a_file_needs_no_ending(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("axes: {method: [full]}")
    assert load(str(tmp_path / "mine"), AXES).name == "mine"


def test_a_built_in_name_wins_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu").mkdir()
    assert load("cpu", REGISTRY).name == "cpu"


def test_an_installed_package_has_its_files_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "autofit" / "search_spaces").mkdir(parents=True)
    source = Path(space_module.__file__).parents[2] / "search_spaces"
    shutil.copy(source / "smoke.yaml", tmp_path / "autofit" / "search_spaces" / "smoke.yaml")
    monkeypatch.setattr(space_module, "__file__", str(tmp_path / "autofit" / "catalog" / "space.py"))
    assert names() == ("smoke",)
    assert load("smoke", REGISTRY).path == str(tmp_path / "autofit" / "search_spaces" / "smoke.yaml")


# The built-in spaces


def test_the_built_in_spaces_are_these() -> None:
    assert names() == BUILT_IN


def axis_values(name: str, axis: str, batch: int = 64) -> set[object]:
    """Every value that a built-in space's configs have on an axis."""
    return {config.get(axis) for config in load(name, REGISTRY).configs(REGISTRY, batch=batch)}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_space_loads_and_says_what_it_is_for(name: str) -> None:
    space = load(name, REGISTRY)
    assert space.name == name
    assert space.purpose.endswith(".") and len(space.purpose) <= 90
    assert Path(space.path).read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_spaces_configs_are_complete_and_distinct(name: str) -> None:
    space = load(name, REGISTRY)
    listed = list(space.configs(REGISTRY, batch=8))
    assert listed and len(set(listed)) == len(listed)
    assert listed == list(space.configs(REGISTRY, batch=8))
    every = {axis.name for axis in REGISTRY if not axis.leaves_out_recipe}
    for config in listed:
        named = set(config) - {"kernels", "mlp", "update"}  # which go without saying where they are the recipe's
        assert named == (every - {"rank", "targets"} if config["method"] == "full" else every)
        for axis in REGISTRY:
            value = config.get(axis.name)
            assert value is None or axis.check(value) == value


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_space_excludes_by_every_rule_and_searches_every_value(name: str) -> None:
    space = load(name, REGISTRY)
    listed = list(space.configs(REGISTRY, batch=64))
    by_name = {axis.name: axis for axis in REGISTRY}
    for axis, values in space.axes.items():
        assert {by_name[axis].of(config) for config in listed} >= set(values)
    for index, rule in enumerate(space.rules):
        others = Space(
            name="", purpose="", path="", axes=space.axes, defaults=space.defaults,
            rules=space.rules[:index] + space.rules[index + 1 :],
        )  # fmt: skip
        excluded = set(others.configs(REGISTRY, batch=64)) - set(listed)
        assert excluded, f"a rule that changes nothing: {rule}"


def test_cpu_is_small_and_needs_no_gpu() -> None:
    space = load("cpu", REGISTRY)
    assert 100 <= space.count(REGISTRY, batch=4) <= 400
    assert axis_values("cpu", "method", 4) == {"full", "lora", "qlora"}
    assert axis_values("cpu", "micro_batch", 4) == {1, 2, 4}
    assert axis_values("cpu", "attention", 4) == {"sdpa"}
    assert axis_values("cpu", "loss", 4) == {"chunked", "full"}
    assert axis_values("cpu", "optimizer", 4) == {"adamw-8bit", "adamw"}


def test_single_gpu_is_large() -> None:
    assert load("single-gpu", REGISTRY).count(REGISTRY, batch=64) >= 2000
    assert axis_values("single-gpu", "method") == {"full", "lora", "qlora"}
    assert axis_values("single-gpu", "micro_batch") == {1, 2, 4, 8, 16, 32, 64}


def test_smoke_is_a_handful() -> None:
    assert 4 <= load("smoke", REGISTRY).count(REGISTRY, batch=8) <= 8


def test_long_context_never_keeps_all_logits() -> None:
    assert axis_values("long-context", "loss") == {"fused", "chunked"}
    assert axis_values("long-context", "micro_batch") == {1, 2}
    assert axis_values("long-context", "checkpointing") == {"full", "save-attention", "selective", "offload"}


@pytest.mark.parametrize("name", [name for name in BUILT_IN if not name.startswith("multi-")])
def test_one_device_never_shards_and_offloads_where_that_is_asked(name: str) -> None:
    assert axis_values(name, "sharding") == {"none"}
    offloads = {"none", "optimizer", "params", "nvme"} if name == "offload" else {"none"}
    assert axis_values(name, "offload") == offloads


def test_multi_gpu_shards() -> None:
    assert axis_values("multi-gpu", "sharding") == {"ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-no-reshard"}
    assert axis_values("multi-gpu", "offload") == {"none", "optimizer", "params", "nvme"}


@pytest.mark.parametrize("name", ["full", "lora", "qlora"])
def test_the_spaces_of_one_method(name: str) -> None:
    assert axis_values(name, "method") == {name}


@pytest.mark.parametrize("name", ["multi-gpu", "multi-cpu", "offload"])
def test_every_method_is_searched_on_several_devices_and_with_offload(name: str) -> None:
    assert axis_values(name, "method") == {"full", "lora", "qlora"}
    adapters = [c for c in load(name, REGISTRY).configs(REGISTRY, batch=8) if c["method"] == "qlora"]
    wide = {"fp32"} if name == "multi-cpu" else set()  # a processor may emulate all 16-bit formats
    assert {c["precision"] for c in adapters} <= {"bf16", "bf16-mixed"} | wide
    assert {c["offload"] for c in adapters} == ({"none"} if name == "multi-cpu" else {"params", "none"})
