"""The published measurements: what the benchmark reads of them, and that its predictions of some still hold."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import STACK

from autofit.techniques import TECHNIQUES, unsupported
from autofit.techniques.cross_entropy import full_cross_entropy
from autofit.techniques.technique import IGNORE_INDEX, Head
from autofit.training import build

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("estimate_published")


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("older_libraries")


def test_every_row_is_compared_or_left_out_for_a_reason(published: ModuleType) -> None:
    every = published.rows()
    text = (BENCHMARKS / "published" / "measurements.csv").read_text(encoding="utf-8")
    assert len(every) == len(text.splitlines()) - 1
    reasons = [published.left_out(row) for row in every]
    assert all(reason is None or len(reason) > 10 for reason in reasons)
    kept = [row for row, reason in zip(every, reasons, strict=True) if reason is None]
    sharded = [row for row in kept if row.gpus > 1]
    assert {row.words["method"] for row in sharded} == {"full", "lora"} and len(sharded) >= 6
    measured = [row for row in kept if not row.ran_out and row.gpus == 1]
    assert len(measured) >= 12
    assert {row.words["method"] for row in measured} == {"full", "lora", "qlora"}
    assert all(row.peak_bytes and row.metric == published.ALLOCATED for row in measured)
    assert [row for row in every if row.ran_out] == [row for row in kept if row.ran_out] != []


def test_what_is_compared_is_a_config_that_we_support(published: ModuleType) -> None:
    stack = replace(STACK, liger_kernel="0.8.5")
    for row in published.rows():
        if published.left_out(row) is None:
            config, job = published.settings(row), published.job(row, stack)
            assert unsupported(config, job) is None
            assert (config["sharding"] == "fsdp") is (row.gpus > 1)
            assert config["method"] == row.words["method"] and config["micro_batch"] == row.micro_batch
            assert job.workload.global_batch == row.micro_batch * (row.accumulation or 1) * row.gpus
            assert job.workload.seq_len <= job.model.config.get("n_positions", job.workload.seq_len)


def test_what_an_out_of_memory_row_does_not_state_is_the_lightest_value_of_its_axis(published: ModuleType) -> None:
    (row,) = (row for row in published.rows() if row.ran_out)
    assert row.words["optimizer"] == row.words["loss"] == row.words["checkpointing"] == ""
    config = published.settings(row)
    assert (config["optimizer"], config["loss"], config["checkpointing"]) == ("sgd", "fused", "offload")


@pytest.mark.parametrize(
    ("model", "method", "gpus", "target"),
    [
        ("santacoder", "full", 1, "MEDIAN_ERROR"),
        ("Mistral", "lora", 1, "MEDIAN_ERROR"),
        ("santacoder", "qlora", 1, "MEDIAN_ERROR"),
        ("Mistral", "full", 2, "SHARDED_MEDIAN_ERROR"),
        ("Mistral", "lora", 2, "LARGEST_ERROR"),  # beyond its median: the benchmark's docstring says by what
    ],
)
def test_a_published_peak_is_predicted_to_within_the_target(
    published: ModuleType, model: str, method: str, gpus: int, target: str
) -> None:
    """One run of each method on one GPU, and those that FSDP ran on two: the shortest to trace, between them with
    dropout everywhere and autocast."""
    every = (row for row in published.rows() if published.left_out(row) is None)
    row = next(r for r in every if model in r.model and (r.words["method"], r.gpus) == (method, gpus))
    found = published.compared(row, STACK)
    assert abs(found.error) <= getattr(published, target)
    assert found.estimate.fits
    assert found.estimate.config["sharding"] == ("fsdp" if gpus > 1 else "none")


def row_like(published: ModuleType, **changed: Any) -> Any:
    """The first row that is compared, with other fields."""
    first = next(row for row in published.rows() if published.left_out(row) is None)
    words = {**first.words, **changed.pop("words", {})}
    return replace(first, words=words, **changed)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gpus": 8, "source": "another"}, "8 GPUs"),
        ({"gpus": 2, "words": {"method": "qlora"}}, "autocasts"),
        ({"micro_batch": None}, "micro-batch"),
        ({"versions": ""}, "versions"),
        ({"words": {"checkpointing": ""}}, "checkpointing"),
        ({"words": {"method": "lora"}}, "rank, targets"),
        ({"words": {"loss": "fused"}}, "another project (cross-entropy"),
        ({"words": {"loss": "fused linear"}}, "its cross-entropy is Liger's"),
        ({"words": {"loss": "chunked"}}, "loss chunked"),
        ({"words": {"precision": "float8"}}, "precision float8"),
        ({"peak_bytes": None}, "did not finish"),
        ({"metric": "GB as printed"}, "GB as printed"),
        ({"versions": "torch 2.0"}, "torch 2.0"),
        ({"model": "someone/else"}, "someone/else"),
    ],
)
def test_a_row_left_out_says_what_is_missing(published: ModuleType, changed: dict[str, Any], said: str) -> None:
    assert said in (published.left_out(row_like(published, **changed)) or "")


@pytest.mark.parametrize("loss", ["_causal_lm_loss", "_gpt_bigcode_loss"])
def test_the_old_losses_are_the_same_loss(older: ModuleType, loss: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3 * 8, 16, generator=generator)
    head = Head(weight=torch.randn(32, 16, generator=generator))
    labels = torch.randint(32, (3, 8), generator=generator)
    labels[:, -1] = IGNORE_INDEX
    found = older._kernel(getattr(older, loss), 8)(hidden, head, labels.reshape(-1))
    assert found.item() == pytest.approx(full_cross_entropy(hidden, head, labels.reshape(-1)).item(), rel=1e-5)


def test_the_older_libraries_leave_nothing_behind(older: ModuleType) -> None:
    with pytest.raises(KeyError), older.older_libraries(wide_norms=True):
        assert len(build.TECHNIQUES) == len(TECHNIQUES) + 1
        raise KeyError
    assert build.TECHNIQUES == TECHNIQUES
