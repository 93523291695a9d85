"""One fork server for the trials of this folder: nothing its children do may keep it from running the next one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autofit.trial.process.runner import TrialRunner

SERVE = "from autofit.trial.process import fork_server as f; f.DEFAULT_ENTRY = 'entries:by_name'; f.main()"


@pytest.fixture(scope="package")
def warm() -> Iterator[TrialRunner]:
    """The real parent, its imports done. A child whose model is named after an entry function runs that function; any
    other trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
        with TrialRunner() as runner:
            runner._command = [sys.executable, "-c", SERVE]
            yield runner
