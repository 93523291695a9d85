"""Expandable segments are asked for, and done without where the driver refuses them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from autofit.core.errors import EnvironmentLacks
from autofit.trial.limits.segments import ALLOCATOR, allocator_settings, first_allocation
from autofit.trial.process.runner import trial_environment

DEVICE = torch.device("cuda", 0)


class Driver:
    """One whose answer to an allocation depends on whether the allocator uses expandable segments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, settings: str, refusal: Exception | None) -> None:
        self.refusal = refusal
        self.settings = [settings]
        self.allocations = 0
        monkeypatch.setenv(ALLOCATOR[0], settings)
        monkeypatch.setattr(torch, "empty", self._empty)
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.settings.append)

    def _empty(self, count: int, *, device: torch.device) -> None:
        self.allocations += 1
        if self.refusal is not None and "segments:False" not in self.settings[-1]:
            raise self.refusal


@pytest.mark.parametrize("message", ["operation not supported", "unknown error\nmore"])
@pytest.mark.parametrize("users", ["", "max_split_size_mb:512,"])
def test_where_the_driver_refuses_them_the_allocator_does_without(
    monkeypatch: pytest.MonkeyPatch, message: str, users: str
) -> None:
    driver = Driver(monkeypatch, f"{users}expandable_segments:True", RuntimeError(f"CUDA driver error: {message}"))
    first_allocation(DEVICE)
    assert driver.settings[1:] == [f"{users}expandable_segments:False"] and driver.allocations == 2


def test_where_the_driver_gives_them_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, "expandable_segments:True", None)
    first_allocation(DEVICE)
    assert driver.settings == ["expandable_segments:True"] and driver.allocations == 1


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ("expandable_segments:True", torch.OutOfMemoryError("CUDA driver error: CUDA out of memory")),
        ("expandable_segments:True", RuntimeError("CUDA driver error: out of memory")),
        ("expandable_segments:True", RuntimeError("CUDA error: unknown error")),
        ("max_split_size_mb:512", RuntimeError("CUDA driver error: operation not supported")),
    ],
)
def test_any_other_failure_is_the_trials(monkeypatch: pytest.MonkeyPatch, settings: str, error: Exception) -> None:
    driver = Driver(monkeypatch, settings, error)
    with pytest.raises(RuntimeError, match=str(error)):
        first_allocation(DEVICE)
    assert driver.settings == [settings]


def test_torch_takes_the_settings_anew() -> None:
    settings = "expandable_segments:False,max_split_size_mb:512"
    code = f"import torch; torch._C._accelerator_setAllocatorSettings({settings!r})"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("users", "settings"),
    [
        (None, "expandable_segments:True"),
        ("max_split_size_mb:512", "max_split_size_mb:512,expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments:False"),
        ("backend:native", "backend:native,expandable_segments:True"),
    ],
)
def test_the_users_own_settings_stay(monkeypatch: pytest.MonkeyPatch, users: str | None, settings: str) -> None:
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    if users is not None:
        monkeypatch.setenv(ALLOCATOR[1], users)
    assert allocator_settings() == settings


def test_an_allocator_whose_memory_is_not_counted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOCATOR[0], "max_split_size_mb:512,backend:cudaMallocAsync")
    with pytest.raises(EnvironmentLacks, match=r"asks for cudaMallocAsync, .* \(leave `backend` out of it\)"):
        trial_environment("cuda")
    assert trial_environment("cpu"), "which that allocator does not concern"
