"""The program in this process, which has the libraries loaded: for what need not be a process to be proven."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

import pytest

from autofit.cli import main as program


def run_here(words: Sequence[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `autofit` with these words."""
    handlers = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGHUP)}
    capfd.readouterr()
    try:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["autofit", *words])
            program.main()
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
    out, err = capfd.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err
