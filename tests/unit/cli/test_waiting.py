"""Progress of predictions: nothing of what is quick, lines of what is not."""

from __future__ import annotations

import pytest

from autofit.cli import waiting
from autofit.cli.waiting import Waiting, line


def test_progress_in_words() -> None:
    assert line(1, None, 2.5) == "1 config predicted after 2.5 s"
    assert line(1, 8, 2.5) == "1 of 8 configs predicted after 2.5 s"
    assert line(3, None, 2.5) == "3 configs predicted after 2.5 s"
    assert line(3, 8, 61) == "3 of 8 configs predicted after 1 m 01 s"


def test_what_is_quick_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Waiting() as display:
        for done in range(100):
            display(done, 100)
    assert capsys.readouterr() == ("", "")


def test_what_takes_longer_says_so_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: clock[0])
    with Waiting() as display:
        for done in range(1, 13):
            clock[0] += 1.0
            display(done, 12)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "2 of 12 configs predicted after 2.0 s",
        "7 of 12 configs predicted after 7.0 s",
        "12 of 12 configs predicted after 12 s",
    ]


def test_that_nothing_is_done_yet_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(waiting, "SECONDS_BETWEEN_LINES", 0.0)
    with Waiting() as display:
        display._still_none.join()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("0 configs predicted after ")


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(waiting.sys.stderr, "isatty", lambda: True, raising=False)
    with Waiting() as display:
        display(1)
        display(2, 4)
        assert display._bar is not None
        (task,) = display._bar.tasks
        assert (task.completed, task.total) == (2, 4)
        live = display._live
        assert live is not None and live.is_started
    assert not live.is_started
    assert capsys.readouterr().out == ""
