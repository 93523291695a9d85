"""Errors: the exit codes that scripts rely on, and the nearest names that people need."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.core.errors import (
    AutofitError,
    EnvironmentLacks,
    Interrupted,
    NothingFits,
    StoreError,
    UsageError,
    in_one_line,
    lines_of,
    unknown,
)
from autofit.core.lattice import Axis
from autofit.techniques import AXES

NAMED_AXES = [axis for axis in AXES if not axis.numeric]


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (UsageError("wrong"), 2),
        (NothingFits("too big"), 3),
        (EnvironmentLacks("no compiler", remedy="apt install g++"), 4),
        (StoreError("the store is locked", remedy="close the other program"), 4),
        (Interrupted("stopped"), 130),
    ],
)
def test_each_kind_of_error_has_its_exit_code(error: AutofitError, exit_code: int) -> None:
    assert isinstance(error, AutofitError)
    assert error.exit_code == exit_code


def test_what_the_environment_lacks_is_said_with_its_remedy() -> None:
    error = EnvironmentLacks("bitsandbytes is not installed", remedy="pip install bitsandbytes")
    assert str(error) == "bitsandbytes is not installed (pip install bitsandbytes)"
    assert error.remedy == "pip install bitsandbytes"


def test_what_a_worker_lacks_arrives_as_it_was() -> None:
    for kind in (EnvironmentLacks, StoreError):
        sent = pickle.loads(pickle.dumps(kind("no driver", remedy="install one")))
        assert type(sent) is kind and str(sent) == "no driver (install one)" and sent.remedy == "install one"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError("no room"), "MemoryError: no room"),
        (
            TypeError("Overflow\nException raised from unpack (most recent call first):\nframe #0"),
            "TypeError: Overflow",
        ),
        (ValueError(), "ValueError"),
    ],
)
def test_what_another_library_says_is_told_in_one_line(error: Exception, line: str) -> None:
    assert in_one_line(error) == line


def test_the_lines_of_what_another_library_says_are_never_none() -> None:
    assert (
        lines_of(" at first\n\n  at last \n") == lines_of(ValueError("at first\n \nat last")) == ["at first", "at last"]
    )
    assert (lines_of(ValueError("\n")), lines_of(" ", "nothing")) == (["ValueError"], ["nothing"])


def test_an_unknown_name_is_answered_with_the_nearest_first() -> None:
    error = unknown("optimizer", "adam-8bit", ["sgd", "adamw", "adamw-8bit", "lion-8bit"])
    assert isinstance(error, UsageError)
    assert str(error).startswith("unknown optimizer 'adam-8bit': did you mean adamw-8bit")
    assert "sgd" not in str(error)


@pytest.mark.parametrize(
    ("given_name", "names", "hint"),
    [
        ("zzz", ["json", "trl"], "valid: json, trl"),
        (
            "???",
            [f"name-{number:02d}" for number in range(20)],
            f"valid: {', '.join(f'name-{number:02d}' for number in range(12))}, ...",
        ),
        (7, [], "there are none"),
        ("yes", [False, True], "valid: false, true"),
    ],
)
def test_where_no_name_is_near_the_first_are_listed(given_name: object, names: list[object], hint: str) -> None:
    assert str(unknown("format", given_name, names)) == f"unknown format {given_name!r}: {hint}"


@given(st.data(), st.sampled_from(NAMED_AXES))
def test_a_name_with_one_letter_missing_is_recognised(data: st.DataObject, axis: Axis) -> None:
    names = [str(value) for value in axis.values if len(str(value)) >= 4]
    name = data.draw(st.sampled_from(names or ["none"]))
    gone = data.draw(st.integers(0, len(name) - 1))
    message = str(unknown("value", name[:gone] + name[gone + 1 :], [*names, "unlike-anything"]))
    assert "did you mean" in message
    assert name in message or len(names) > 3


@given(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())),
    st.lists(st.text(max_size=8), max_size=15),
)
def test_anything_at_all_can_be_unknown(given_name: object, names: list[str]) -> None:
    message = str(unknown("thing", given_name, names))
    assert message.startswith(f"unknown thing {given_name!r}: ")
