"""What the fork server is told, by whoever asks it for trials and by its children: no line is lost."""

from __future__ import annotations

import json
import os

import pytest

from autofit.core.outcome import Crashed
from autofit.trial.process.events import Event
from autofit.trial.process.following import Commands, Stopped


def test_a_stop_that_came_with_the_request_is_heard() -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"run": 1}\n{"stop": {"interrupted": false}}\n')
    commands = Commands(reading)
    assert commands.next() == {"run": 1}
    assert commands.waiting, "no descriptor tells of the second line"
    with pytest.raises(Stopped):
        commands.check()
    assert not commands.waiting
    os.write(writing, b'{"run": 2}\n')
    os.close(writing)
    assert commands.next() == {"run": 2}
    with pytest.raises(EOFError):
        commands.check()
    os.close(reading)


def test_an_event_says_only_what_has_happened_and_is_read_back() -> None:
    assert Event(steps=3).to_json() == {"steps": 3}
    whole = Event(
        phase="forward",
        room_bytes=0,
        share=0.5,
        least_step_seconds=1.5,
        earned=True,
        timing=False,
        peak_bytes=0,
        result=Crashed(reason="made", transient=True),
        recording=True,
    )
    assert Event.from_json(json.loads(json.dumps(whole.to_json()))) == whole
