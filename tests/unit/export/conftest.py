"""Fixtures that every test of the exporters shares."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from export_samples import sample
from transformers import training_args as training_args_module

from autofit.core.lattice import Config

sys.path.append(str(Path(__file__).parents[1] / "techniques"))  # live_bytes


@pytest.fixture(scope="session")
def sampled() -> list[Config]:
    """See `export_samples.sample`."""
    return sample()


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Restore the environment variables that exported scripts and trl's parser set."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread: tiny matrix products on several threads mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments that are made ask the GPU for bf16 and TF32, and set TF32 for whatever else this process tests."""
    monkeypatch.setattr(training_args_module, "is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr(training_args_module, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(training_args_module, "enable_tf32", lambda enable: None)
