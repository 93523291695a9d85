"""Searches over numbers of devices: which, how they share the time, and what is told of them together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from unit.operations.made_trials import OPTIONS, crashed
from unit.operations.made_world import World

from autofit.cli.text.search import over_devices_text
from autofit.core.errors import EnvironmentLacks, NothingFits, UsageError
from autofit.core.outcome import Outcome, OutOfMemory
from autofit.core.units import GIB
from autofit.operations import SearchRequest, search_over_devices
from autofit.operations.searching.over_devices import requests_over_devices
from autofit.operations.searching.result import SearchResult
from autofit.trial.request import TrialRequest

TWO = replace(OPTIONS, devices=2)
TWO_ONLY = """
purpose: Offload by FSDP, and on one device by DeepSpeed, whose operations must be compiled for it.
axes:
  method: [full]
  optimizer: [adamw]
  micro_batch: [1]
  offload: [params]
  sharding: [fsdp]
"""


@pytest.fixture
def request_(tmp_path: Path) -> SearchRequest:
    """A search on this machine's processor, with up to two ranks."""
    return SearchRequest(
        workload=TWO, device="cpu", memory_limit_bytes=2 * GIB, store=str(tmp_path / "store.db"), max_trials=60
    )


def failing_on(devices: int) -> Callable[[TrialRequest], Outcome | None]:
    def special(request: TrialRequest) -> Outcome | None:
        return OutOfMemory(reason="made") if request.job.workload.devices == devices else None

    return special


@pytest.mark.parametrize("devices", [0, -1, 10**20])
def test_a_number_of_devices_that_cannot_be_is_refused(devices: int) -> None:
    with pytest.raises(UsageError, match=f"devices is {devices}"):
        requests_over_devices(SearchRequest(workload=replace(OPTIONS, devices=devices)))


def test_only_numbers_that_divide_the_global_batch_each_with_its_share_of_the_time() -> None:
    request = SearchRequest(workload=replace(OPTIONS, global_batch=6, devices=6), time_budget_seconds=400.0)
    requests = requests_over_devices(request)
    assert list(requests) == [1, 2, 3, 6]
    assert {r.time_budget_seconds for r in requests.values()} == {100.0}
    assert [r.workload.devices for r in requests.values()] == [1, 2, 3, 6]
    unlimited = requests_over_devices(replace(request, time_budget_seconds=None))
    assert {r.time_budget_seconds for r in unlimited.values()} == {None}


def test_every_number_of_devices_is_searched_in_its_own_space(world: World, request_: SearchRequest) -> None:
    searches = search_over_devices(request_)
    assert list(searches.results) == [1, 2] and not searches.unanswered
    points = {n: r.recommendation.point for n, r in searches.results.items()}
    assert points[1].config["sharding"] == "none" and points[2].config["sharding"] != "none"
    batches = {n: r.frontier.workload.batch_per_device for n, r in searches.results.items()}
    assert batches == {1: 4, 2: 2}, "the global batch stays"
    fastest = max(points, key=lambda n: points[n].measurement.tokens_per_second)
    assert searches.best is searches.results[fastest]


def test_as_json_the_best_stands_first_and_every_number_beside_it(world: World, request_: SearchRequest) -> None:
    searches = search_over_devices(request_)
    body = searches.to_json()
    others = ("by_devices", "fewest_devices", "devices_left_out")
    assert {k: v for k, v in body.items() if k not in others} == searches.best.to_json()
    assert body["devices_left_out"] == []
    for entry, (devices, result) in zip(body["by_devices"], searches.results.items(), strict=True):
        speed = result.recommendation.point.measurement.tokens_per_second
        assert entry["devices"] == devices
        assert entry["tokens_per_second_per_device"] == pytest.approx(speed / devices)
        assert entry["search_id"] == result.search_id


def test_smaller_numbers_that_were_not_searched_are_named(world: World, request_: SearchRequest) -> None:
    searches = search_over_devices(request_)
    assert searches.left_out == () and "Left out" not in over_devices_text(searches)
    more = replace(searches, unanswered={4: NothingFits("made")})
    assert more.to_json()["devices_left_out"] == [3]
    line = "Left out, because the global batch of 4 is not a multiple of them: 3 devices"
    assert line in over_devices_text(more).splitlines()


@pytest.mark.parametrize(("share", "method", "fewest"), [(0.96, "full", 1), (0.94, "full", 2), (0.96, "lora", 2)])
def test_the_answer_begins_with_the_number_of_devices_to_take(
    world: World, request_: SearchRequest, share: float, method: str, fewest: int
) -> None:
    """The fastest, and the fewest that train the same at 95 % of its speed."""
    searches = search_over_devices(request_)

    def at(devices: int, speed: float, method: str = "full") -> SearchResult:
        result = searches.results[devices]
        point = result.recommendation.point
        measurement = replace(point.measurement, tokens_per_second=speed)
        point = replace(point, config=point.config.replace(method=method), measurement=measurement)
        return replace(result, recommendation=replace(result.recommendation, point=point))

    made = replace(searches, results={1: at(1, 1000 * share, method), 2: at(2, 1000)})
    assert (made.best, made.fewest) == (made.results[2], made.results[fewest])
    assert made.to_json()["fewest_devices"] == fewest
    near = f" Fewest within 5% of it: 1 device, {1000 * share:.0f} tokens/s." if fewest == 1 else ""
    first = f"Fastest with full: 2 devices, 1,000 tokens/s, 500 of each.{near}"
    assert over_devices_text(made).splitlines()[0] == first


def test_a_second_run_is_answered_from_the_store(world: World, request_: SearchRequest) -> None:
    first = search_over_devices(request_)
    pools = len(world.pools)
    again = search_over_devices(request_)
    assert len(world.pools) == pools
    assert [r.search_id for r in again.results.values()] == [r.search_id for r in first.results.values()]


def test_where_one_device_is_too_small_the_others_answer(world: World, request_: SearchRequest) -> None:
    world.special = failing_on(1)
    searches = search_over_devices(request_)
    assert list(searches.results) == [2] and list(searches.unanswered) == [1]
    text = over_devices_text(searches)
    rows = text.splitlines()[2:]
    assert rows[0].split() == ["devices", "memory", "of", "each", "tokens/s", "of", "each", "config"]
    assert rows[1].split()[0] == "1" and "nothing that was measured fits" in rows[1]
    speed = searches.best.recommendation.point.measurement.tokens_per_second
    assert rows[2].split()[0] == "2" and f"{speed / 2:,.0f}" in rows[2]
    assert f"\n  {speed:,.0f} tokens/s, {speed / 2:,.0f} of each, " in text[text.index("\nRecommended for ") :]
    assert searches.to_json()["by_devices"][0]["outcome"] == "nothing_fits"


def crashing_on(devices: int) -> Callable[[TrialRequest], Outcome | None]:
    return lambda request: crashed() if request.job.workload.devices == devices else None


def test_a_smaller_number_whose_trials_all_crash_keeps_the_answer_of_the_larger(
    world: World, request_: SearchRequest
) -> None:
    world.special = crashing_on(1)
    searches = search_over_devices(request_)
    assert list(searches.results) == [2] and list(searches.unanswered) == [1]
    assert isinstance(searches.unanswered[1], EnvironmentLacks)
    assert searches.to_json()["by_devices"][0]["outcome"] == "failed"
    assert str(searches.unanswered[1]) in over_devices_text(searches)


def test_a_space_without_anything_for_a_smaller_number_answers_for_the_larger(
    world: World, request_: SearchRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "space.yaml").write_text(TWO_ONLY)
    searches = search_over_devices(replace(request_, space=str(tmp_path / "space.yaml")))
    assert list(searches.results) == [2]
    assert isinstance(searches.unanswered[1], UsageError), searches.unanswered


def test_what_fails_before_any_answer_is_told_at_once(world: World, request_: SearchRequest) -> None:
    world.special = crashing_on(2)
    with pytest.raises(EnvironmentLacks):
        search_over_devices(request_)
    assert {request.job.workload.devices for pool in world.pools for request in pool.submitted} == {2}


def test_nothing_fits_only_if_nothing_does_anywhere(world: World, request_: SearchRequest) -> None:
    world.special = lambda request: OutOfMemory(reason="made")
    with pytest.raises(NothingFits, match=r"^on 1 device: .+; on 2 devices: .+"):
        search_over_devices(request_)
