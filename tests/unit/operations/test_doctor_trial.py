"""The doctor's small trial is one that the hardware can run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from unit.operations.made_trials import HARDWARE, fits

from autofit.operations import doctor, single_trial


@pytest.mark.parametrize(("bf16", "precision"), [(True, "bf16"), (False, "fp16-mixed")])
def test_the_small_trial_is_in_a_format_that_the_card_has(
    monkeypatch: pytest.MonkeyPatch, bf16: bool, precision: str
) -> None:
    asked = []

    def trial(options: Any, config: Any, *, device: str) -> Any:
        asked.append(config["precision"])
        return SimpleNamespace(outcome=fits(1, 100), seconds=4.0)

    monkeypatch.setattr(single_trial, "trial", trial)
    doctor._trial("cuda", replace(HARDWARE, kind="cuda", bf16=bf16))
    assert asked == [precision]
