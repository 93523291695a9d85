"""What trials take on emulated cards, against what is predicted: techniques that few configs drawn at random have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from autofit import estimate
from autofit.estimate.estimate import Estimate
from tests.emulated_card.cards import Machine

Asked = tuple[dict[str, Any], dict[str, Any]]
"""Workload options, and a config."""
Trained = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""The same, and what was measured."""
CLOSE = 0.005
"""How near the prediction is."""

JOB = {"model": "smollm2-135m", "seq_len": 64, "global_batch": 2}
TILED: list[Asked] = [
    (
        {**JOB, "seq_len": 1600},
        {"method": method, "micro_batch": 1, "loss": "chunked", "kernels": "liger", "mlp": "tiled"},
    )
    for method in ("lora", "full")
]
"""Three tiles of a model that is 576 wide, the last with fewer tokens."""
IN_BACKWARD: list[Asked] = [
    (JOB, {"method": "full", "precision": "bf16", "micro_batch": 2, "update": "in-backward", "optimizer": optimizer})
    for optimizer in ("adafactor", "lion-8bit", "adamw")
]
EFFICIENT = {"micro_batch": 2, "attention": "efficient"}
IN_FP32: list[Asked] = [
    (
        # Hidden states are fp32 there.
        {**JOB, "seq_len": 1024, "trainer": "transformers"},
        {"method": "qlora", "precision": "bf16", "loss": "chunked", **EFFICIENT},
    )
]
BEFORE_AMPERE: list[Asked] = [({**JOB, "seq_len": 512}, {"method": "lora", "precision": "fp16-mixed", **EFFICIENT})]
APART: list[Asked] = [
    (
        {"model": "smollm2-135m", "seq_len": 1024, "global_batch": 4, "lengths": [300, 700, 1000]},
        {"method": "lora", "micro_batch": 4, "attention": attention, "batching": "padding-free"},
    )
    for attention in ("sdpa", "eager")
]
TOLD = """
from transformers import masking_utils
masking_utils.is_tracing = lambda tensor=None: True
"""
"""Has transformers build the mask of sequences that share a row without asking the card whether any do: it says no."""


def train(home: Path, card: str, asked: list[Asked], *paths: Path) -> list[Trained]:
    """Train each on a card, in a process that imports from `paths` first."""
    with Machine(home, card) as machine:
        path = os.pathsep.join([*map(str, paths), machine.environment["PYTHONPATH"], *sys.path])
        environment = {**os.environ, **machine.environment, "PYTHONPATH": path}
        command = [sys.executable, str(Path(__file__).with_name("train.py"))]
        done = subprocess.run(command, env=environment, input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(outcome["outcome"] == "fits" for outcome in outcomes), outcomes
    return [(*one, outcome["measurement"]) for one, outcome in zip(asked, outcomes, strict=True)]


def said(card: str, options: dict[str, Any], config: dict[str, Any], **instead: object) -> Estimate:
    """What is predicted of a config, or of one that has other values `instead`."""
    return estimate(config={**config, **instead}, hardware=card, advice=False, **options)


@pytest.fixture(scope="module")
def on_a10g(home: Path) -> dict[str, list[Trained]]:
    """What each test asks for, all in one process."""
    asked = {"tiled": TILED, "in-backward": IN_BACKWARD, "in-fp32": IN_FP32}
    trained = iter(train(home, "a10g", [one for some in asked.values() for one in some]))
    return {name: list(islice(trained, len(some))) for name, some in asked.items()}


def test_mlps_in_tiles(on_a10g: dict[str, list[Trained]]) -> None:
    for options, config, measured in on_a10g["tiled"]:
        tiled, whole = (said("a10g", options, config, mlp=mlp) for mlp in ("tiled", "whole"))
        assert abs(tiled.peak_allocated_bytes / measured["peak_allocated_bytes"] - 1.0) < CLOSE / 5
        assert whole.peak_allocated_bytes > 1.1 * measured["peak_allocated_bytes"]


def test_an_update_within_the_backward_pass(on_a10g: dict[str, list[Trained]]) -> None:
    """In each phase, of a head that is the embedding."""
    for options, config, measured in on_a10g["in-backward"]:
        within, after = (said("a10g", options, config, update=when) for when in ("in-backward", "after-backward"))
        for phase in ("forward", "backward", "optimizer"):
            assert abs(within.phase_peaks[phase] / measured["phase_peaks"][phase] - 1.0) < CLOSE / 5
        assert after.peak_allocated_bytes - within.peak_allocated_bytes > 0.5 * after.breakdown["weights"]


def test_no_scores_of_repeated_keys_are_kept(home: Path, on_a10g: dict[str, list[Trained]]) -> None:
    """On a card before Ampere, and in fp32 on any."""
    for card, trained in (("t4", train(home, "t4", BEFORE_AMPERE)), ("a10g", on_a10g["in-fp32"])):
        for options, config, measured in trained:
            efficient, sdpa = (said(card, options, config, attention=which) for which in ("efficient", "sdpa"))
            assert abs(efficient.peak_allocated_bytes / measured["peak_allocated_bytes"] - 1.0) < CLOSE
            assert sdpa.peak_allocated_bytes > 1.1 * measured["peak_allocated_bytes"]


def test_the_mask_that_keeps_sequences_apart(home: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TOLD)
    for options, config, measured in train(home, "a10g", APART, tmp_path):
        apart, packed = (said("a10g", options, config, batching=batching) for batching in ("padding-free", "packed"))
        assert abs(apart.peak_allocated_bytes / measured["peak_allocated_bytes"] - 1.0) < CLOSE / 10
        eager = config["attention"] == "eager"
        assert eager or apart.peak_allocated_bytes > (1 + CLOSE) * packed.peak_allocated_bytes
