"""What a GPU's machine needs for trials with trl's habits."""

from __future__ import annotations

from dataclasses import replace
from importlib.machinery import ModuleSpec

import pytest
import tiny

from autofit.techniques import complete
from autofit.training.prerequisites import requirements
from autofit.training.prerequisites.requirements import missing_requirement, requirement_key

CONFIG = complete({"method": "lora", "loss": "chunked"})


@pytest.mark.parametrize(
    ("kind", "trainer", "installed", "tool", "reason"),
    [
        ("cuda", "trl", False, None, "needs trl 1.16 where"),
        ("cuda", "trl", True, "a compiler (gcc)", "needs a compiler (gcc) where"),
        ("cuda", "trl", True, None, None),
        ("cuda", "transformers", False, None, None),
        ("cuda", None, False, None, None),
        ("cpu", "trl", False, None, None),
    ],
)
def test_trls_loss_is_asked_for_where_it_runs(
    kind: str,
    trainer: str | None,
    installed: bool,
    tool: str | None,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: ModuleSpec(name, None) if installed else None)
    monkeypatch.setattr(requirements, "missing_tool", lambda kind: tool)
    job = tiny.plan(CONFIG).job
    job = replace(job, hardware=replace(job.hardware, kind=kind), workload=replace(job.workload, trainer=trainer))
    result = missing_requirement(CONFIG, job)
    assert (result is None) == (reason is None) and (reason or "") in (result or "")
    assert bool(requirement_key(CONFIG, job)) == (kind == "cuda" and trainer == "trl")


def test_a_broken_trl_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleSpec:
        raise ImportError("No module named 'datasets'")

    monkeypatch.setattr(requirements, "find_spec", broken)
    job = tiny.plan(CONFIG).job
    job = replace(job, hardware=replace(job.hardware, kind="cuda"), workload=replace(job.workload, trainer="trl"))
    assert "trl 1.16" in (missing_requirement(CONFIG, job) or "")
