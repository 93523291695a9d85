"""What a driver writes for people reaches those who look at its runner."""

from __future__ import annotations

import tempfile

import pytest

from autofit.operations.service.runner import CHUNK_BYTES, _pass_on


def test_notices_are_passed_on_once_and_in_whole_lines(caplog: pytest.LogCaptureFixture) -> None:
    """The driver goes on writing where it was."""
    with tempfile.TemporaryFile("w+") as errors:
        print(
            "autofit: this search waits its turn\na library's warning\nautofit: a node", end="", file=errors, flush=True
        )
        position = _pass_on(errors, 0)
        assert caplog.messages == ["autofit: this search waits its turn"]
        print(" is left out", file=errors, flush=True)
        position = _pass_on(errors, position)
        assert _pass_on(errors, position) == position
        assert caplog.messages[1:] == ["autofit: a node is left out"]


def test_a_line_of_any_length_holds_no_later_notice_back(caplog: pytest.LogCaptureFixture) -> None:
    with tempfile.TemporaryFile("w+") as errors:
        print("." * (2 * CHUNK_BYTES), file=errors)
        print("autofit: a node is left out", file=errors, flush=True)
        position = 0
        for _ in range(3):
            position = _pass_on(errors, position)
    assert caplog.messages == ["autofit: a node is left out"]
