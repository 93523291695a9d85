"""Traces kept between processes: what may use them, and what becomes of those that cannot be read."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import tiny
from tiny import CUDA_HARDWARE, STACK

from autofit.core.units import GIB
from autofit.estimate.estimate import Estimate
from autofit.estimate.estimator import Estimator
from autofit.estimate.tracing import trace_cache, traces
from autofit.estimate.tracing.trace_cache import TraceCache
from autofit.techniques import Job, complete, parse

CONFIG = "method=lora,precision=bf16,checkpointing=full,loss=chunked"
TRACING = ("trace_decoder", "trace_loss", "trace_updates")


def job(*, capability: str = "9.0", seq_len: int = 64, devices: int = 1) -> Job:
    hardware = replace(CUDA_HARDWARE, capability=capability)
    return tiny.job(hardware=hardware, seq_len=seq_len, global_batch=8, devices=devices)


def figures(found: Estimate) -> tuple[object, ...]:
    return found.device_bytes, found.breakdown, found.phase_peaks, found.work


def estimate(of: Job, folder: Path | None, config: str = CONFIG) -> Estimate:
    made = Estimator(of, None, cache=None if folder is None else TraceCache(folder))
    return made.estimate(complete(parse(config)), memory_limit_bytes=80 * GIB)


@cache
def plain(of: Job, config: str = CONFIG) -> Estimate:
    """What is estimated without a cache."""
    return estimate(of, None, config)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The traces of `CONFIG`."""
    folder = tmp_path_factory.mktemp("traces")
    estimate(job(), folder)
    assert len(list(folder.iterdir())) == len(TRACING)
    return folder


@pytest.fixture
def kept(made: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(made, tmp_path / "traces"))


@pytest.mark.parametrize(
    ("changed", "capability"), [("micro_batch=2", "8.0"), ("rank=16", "9.0"), ("optimizer=adamw-8bit", "9.0")]
)
def test_the_decoder_is_traced_once_for_micro_batches_ranks_and_like_cards(
    kept: Path, changed: str, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = f"{CONFIG},{changed}"
    expected = plain(job(capability=capability), config)
    monkeypatch.delattr(traces, "trace_decoder")
    if "8bit" not in changed:
        monkeypatch.delattr(traces, "trace_updates")
    assert figures(estimate(job(capability=capability), kept, config)) == figures(expected)


def test_the_same_config_is_not_traced_at_all(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(job())
    for name in TRACING:
        monkeypatch.delattr(traces, name)
    assert figures(estimate(job(), kept)) == figures(expected)


@pytest.mark.parametrize(
    "of",
    [job(capability="7.5"), job(capability="8.6"), job(seq_len=32), replace(job(), stack=replace(STACK, torch="2.0"))],
)
def test_what_differs_in_kernels_length_or_libraries_is_traced_anew(kept: Path, of: Job) -> None:
    before = len(list(kept.iterdir()))
    assert figures(estimate(of, kept)) == figures(plain(of))
    of_update = of.workload.seq_len == job().workload.seq_len  # which sees no sequences
    assert len(list(kept.iterdir())) == before + len(TRACING) - (not of_update)


def test_traces_are_of_the_libraries_that_are_installed(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(list(kept.iterdir()))
    monkeypatch.setattr(trace_cache, "installed", lambda package: f"another {package}")
    estimate(job(), kept)
    assert len(list(kept.iterdir())) == before + len(TRACING)


def test_traces_that_cannot_be_read_are_made_again(kept: Path) -> None:
    for file in kept.iterdir():
        file.write_bytes(file.read_bytes()[:50])
    assert figures(estimate(job(), kept)) == figures(plain(job()))


def test_a_folder_that_cannot_be_written_costs_no_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert estimate(job(), tmp_path / "file" / "traces").device_bytes > 0


def test_what_cannot_be_kept_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = TraceCache(tmp_path)
    cache.put("key", lambda: None)
    assert cache.get("key") is None and list(tmp_path.iterdir()) == []


def test_the_oldest_go_when_there_are_too_many(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(file.stat().st_size for file in kept.iterdir())
    monkeypatch.setattr(trace_cache, "MAX_BYTES", size)
    first = {file.name for file in kept.iterdir()}
    estimate(job(seq_len=32), kept)
    left = {file.name for file in kept.iterdir()}
    assert sum(file.stat().st_size for file in kept.iterdir()) <= size
    assert left - first and not first <= left
