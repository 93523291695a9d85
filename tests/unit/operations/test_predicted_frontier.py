"""The frontier that is predicted without running anything, on hardware that is not here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from jobs import tiny_model

from autofit.catalog.hardware import card
from autofit.cli.text.predicted import predicted_frontier_text
from autofit.core.errors import Shortfall
from autofit.core.frontier import by_method
from autofit.core.units import GIB, MIB
from autofit.core.workload import Effect, Goal
from autofit.estimate.estimate import Estimate
from autofit.operations import PredictedFrontier, SearchRequest, WorkloadOptions, predict_frontier
from autofit.prediction.predicted_frontier import recommended
from autofit.techniques import changes, complete, parse

SPACE = """\
axes:
  micro_batch: [1, 2]
  attention: [flash, sdpa]
defaults:
  method: full
  precision: bf16
  checkpointing: none
  optimizer: adamw
  loss: chunked
  compile: false
  offload: none
  sharding: none
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the user's own."""
    made = tmp_path_factory.mktemp("tiny")
    (made / "config.json").write_text(json.dumps(tiny_model(vocabulary=4096, hidden=128).config))
    return made


@pytest.fixture(scope="module")
def request_(folder: Path) -> SearchRequest:
    """A search on a card that is not here."""
    options = WorkloadOptions(model=str(folder), seq_len=256, global_batch=4)
    return SearchRequest(workload=options, hardware="h100-80g", space="smoke")


@pytest.fixture(scope="module")
def found(request_: SearchRequest) -> PredictedFrontier:
    """What is predicted of it."""
    return predict_frontier(request_)


def test_every_config_of_the_space_is_predicted_once(request_: SearchRequest, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    own = replace(request_, store=str(tmp_path / "store.db"))
    result = predict_frontier(own, lambda done, total: reports.append((done, total)))
    assert reports == [(done, 8) for done in range(9)]
    reports.clear()
    again = predict_frontier(own, lambda done, total: reports.append((done, total)))
    assert reports == [(8, 8)]
    assert again.points == result.points and again.recommendation == result.recommendation
    assert result.fitting == len(result.plan.lattice.configs) == 8
    assert result.plan.limits.memory_bytes == card("h100-80g").memory_bytes


def test_of_equals_what_needs_no_further_package_is_shown(request_: SearchRequest, tmp_path: Path) -> None:
    """flash-attn's kernel takes what torch's own takes, and is predicted to be as fast."""
    space = tmp_path / "space.yaml"
    space.write_text(SPACE)
    result = predict_frontier(replace(request_, space=str(space)))
    assert {point.config["attention"] for point in result.points} == {"sdpa"}
    assert result.recommendation is not None and result.recommendation.estimate.config["attention"] == "sdpa"


def test_a_method_of_which_nothing_fits_is_named(found: PredictedFrontier) -> None:
    missing = "No config of full is predicted to fit."
    assert missing not in predicted_frontier_text(found)
    assert missing in predicted_frontier_text(replace(found, points=tuple(by_method(found.points)["lora"])))


def test_points_fit_and_are_beaten_by_none_of_their_method(found: PredictedFrontier) -> None:
    assert {p.config["method"] for p in found.points} == {"full", "lora"}
    assert [p.device_bytes for p in found.points] == sorted(p.device_bytes for p in found.points)
    for points in by_method(found.points).values():
        speeds = [p.tokens_per_second or 0.0 for p in points]
        assert speeds == sorted(set(speeds))
    assert all(p.fits and p.hardware == "h100-80g" for p in found.points)


def test_the_document_has_what_an_outline_has_and_says_predicted(found: PredictedFrontier) -> None:
    body = found.to_json()
    assert set(body) == {
        *("provenance", "hardware", "workload", "space", "memory_limit_bytes", "configs", "ruled_out_by_floor"),
        *("beyond_goal", "unsupported", "not_predicted", "fitting", "frontier", "recommendation", "seconds"),
    }
    assert body["provenance"] == body["recommendation"]["provenance"] == "predicted"
    assert set(body["recommendation"]) == {
        *("config", "provenance", "estimate", "headroom_bytes", "changes_training", "alternatives"),
    }
    assert [p["config"] for p in body["frontier"]] == [p.config.to_json() for p in found.points]
    assert all(p["estimate"]["provenance"] == "predicted" for p in body["frontier"])
    assert json.loads(json.dumps(body, allow_nan=False)) == body


def test_how_far_predicted_memory_may_be_off_is_said_to_be_unknown(found: PredictedFrontier) -> None:
    for point in found.points:
        assert point.memory_deviation is not None and point.memory_deviation.compared_on == 0
        assert point.certainty == "sure"
    text = predicted_frontier_text(found)
    assert "memory: give or take 5% (no full trial on h100-80g yet)" in text
    tight = replace(found, points=tuple(replace(p, memory_limit_bytes=p.device_bytes) for p in found.points))
    assert predicted_frontier_text(tight).count(" (may fit)") == len(found.points)


def test_borrowed_memory_says_so(found: PredictedFrontier) -> None:
    exact = replace(found, points=tuple(replace(p, borrowed_error=0.0) for p in found.points))
    assert "up to 10% higher" not in predicted_frontier_text(exact)
    borrowed = (*exact.points[:-1], replace(exact.points[-1], borrowed_error=0.1))
    assert "may be up to 10% higher" in predicted_frontier_text(replace(exact, points=borrowed))


def test_the_most_faithful_method_is_recommended(found: PredictedFrontier) -> None:
    choice = found.recommendation
    assert choice is not None
    assert choice.estimate.config["method"] == "full"
    assert choice.estimate in found.points
    assert [a.point.config["method"] for a in choice.alternatives if a.role == "other method"] == ["lora"]


def test_a_goal_narrows_what_is_predicted(request_: SearchRequest) -> None:
    lora = predict_frontier(replace(request_, goal=Goal(method="lora")))
    assert {p.config["method"] for p in lora.points} == {"lora"}
    assert lora.plan.beyond_goal == 4


def test_what_cannot_be_predicted_is_counted_with_its_reason(request_: SearchRequest) -> None:
    result = predict_frontier(replace(request_, hardware="mi300x"))
    ((reason, count),) = result.not_predicted.items()
    assert "mi300x is neither: measure on it with `autofit search`" in reason
    assert (count, result.fitting, result.points, result.recommendation) == (8, 0, (), None)


def test_what_offload_would_keep_on_the_host_is_no_need_of_nothing(request_: SearchRequest) -> None:
    request = replace(request_, workload=WorkloadOptions(model="llama-3.1-70b"), goal=Goal(method="full"))
    with pytest.raises(Shortfall, match="--space offload would keep all of that in host memory; --method any would"):
        predict_frontier(request)


@pytest.mark.parametrize("here", [True, False])
def test_on_a_limit_that_nothing_fits_a_card_that_would_do_is_named(request_: SearchRequest, here: bool) -> None:
    """Also where the device is a processor, whose programs have no driver's context."""
    own = {"hardware": "auto", "device": "cpu"} if here else {}
    with pytest.raises(Shortfall, match="the smallest card that could hold it is rtx-3080 "):
        predict_frontier(replace(request_, **own, memory_limit_bytes=(30 if here else 300) * MIB))


def test_a_processors_speed_is_a_guess_that_claims_little(request_: SearchRequest) -> None:
    result = predict_frontier(replace(request_, hardware="auto", device="cpu", memory_limit_bytes=2 * GIB))
    assert result.plan.job.hardware.kind == "cpu"
    assert result.fitting == 8 and result.recommendation is not None
    for point in result.points:
        assert point.tokens_per_second is not None
        assert (point.calibrated_on, point.relative_error) == (0, 1.0)


@cache
def one() -> Estimate:
    return Estimate(
        config=complete({}), hardware="h100-80g", memory_limit_bytes=80 * GIB, peak_allocated_bytes=GIB,
        peak_reserved_bytes=GIB, device_bytes=GIB, host_bytes=0, breakdown={}, phase_peaks={}, step_seconds=1.0,
        tokens_per_second=1.0, mfu=None, calibrated_on=0, relative_error=0.5, seconds_to_estimate=0.0,
    )  # fmt: skip


def made(config: str, gib: float, speed: float | None) -> Estimate:
    return replace(one(), config=complete(parse(config)), device_bytes=int(gib * GIB), tokens_per_second=speed)


def chosen(estimates: Sequence[Estimate], goal: Goal | None = None) -> Estimate | None:
    result = recommended(estimates, goal or Goal())
    return None if result is None else result.estimate


def test_ties_go_to_what_changes_less_and_then_to_what_is_lighter() -> None:
    plain, rounded = made("micro_batch=2", 10, 100), made("micro_batch=2,precision=bf16", 5, 102)
    assert chosen([plain, rounded]) == plain
    assert chosen([plain, replace(rounded, tokens_per_second=120.0)]) == replace(rounded, tokens_per_second=120.0)
    assert chosen([plain, made("micro_batch=1", 9, 99)]) == made("micro_batch=1", 9, 99)
    assert len(changes(rounded.config)) == 1


def test_the_recommendation_stops_at_the_first_method_that_fits() -> None:
    full, lora, qlora = made("method=full", 90, 50), made("method=lora", 40, 100), made("method=qlora", 20, 90)
    result = recommended([full, lora, qlora], Goal())
    assert result is not None
    assert result.estimate == lora
    assert [(a.role, a.point) for a in result.alternatives] == [("other method", qlora)]
    assert result.changes_training and Effect.TRAINING > Effect.EXACT
    assert chosen([full, lora, qlora], Goal(method="qlora")) == qlora
    assert chosen([full]) is None
    own = recommended([lora], Goal(method="lora", min_rank=8))
    assert own is not None and own.changes_training == ()  # the user asked for it
    assert chosen([made("method=full", 1, None)]) is None


def test_beside_it_stand_the_next_faster_and_the_next_lighter() -> None:
    fits, over, further = made("micro_batch=2", 70, 100), made("micro_batch=4", 85, 130), made("micro_batch=8", 99, 140)
    light, lightest = made("micro_batch=1", 50, 80), made("checkpointing=full", 40, 60)
    result = recommended([further, over, fits, light, lightest], Goal())
    assert result is not None
    assert [(a.role, a.point) for a in result.alternatives] == [("faster, does not fit", over), ("lighter", light)]
    assert result.to_json()["alternatives"][0]["over_limit_bytes"] == 5 * GIB
    assert result.alternatives[0].speedup == pytest.approx(1.3)
