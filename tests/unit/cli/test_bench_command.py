"""What `autofit bench record` refuses. Replays of searches: test_replay_command.py."""

from __future__ import annotations

import pytest
from unit.cli.conftest import Autofit


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("smollm2-135m",), "Missing option '--out'"),
        (("smollm2-135m", "--out", __file__), "row 1: not JSON"),
        (("no-such-model", "--out", "t.jsonl"), "no-such-model"),
    ],
)
def test_a_recording_that_is_refused(autofit: Autofit, arguments: tuple[str, ...], part: str) -> None:
    done = autofit("bench", "record", "--model", *arguments)
    assert (done.code, done.out) == (2, "")
    assert part in done.err
