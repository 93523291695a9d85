"""What the fork server is told: no line is lost, however lines arrive."""

from __future__ import annotations

import os

import pytest

from autofit.trial.process.commands import Commands, Stopped


def test_a_stop_that_came_with_the_request_is_heard() -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"run": 1}\n{"stop": true}\n')
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
