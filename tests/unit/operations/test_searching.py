"""A search from request to result, over workers that look outcomes up: what is asked, answered and kept."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from leases import a_gone_process, expire
from unit.operations.made_trials import HARDWARE, MODEL, OPTIONS, crashed, make_trial, out_of_memory
from unit.operations.made_world import World, predictor_of
from unit.operations.test_probing import made_probe
from unit.search.made_truth import Truth

from autofit import operations
from autofit.catalog.hardware import card
from autofit.cli.text.search import result_text
from autofit.core.device.probe import ProbePart
from autofit.core.device.work_kinds import FORMATS, LAYOUTS, product
from autofit.core.errors import EnvironmentLacks, NothingFits, Shortfall, UsageError
from autofit.core.lattice import Config, Lattice
from autofit.core.outcome import Diverged, Outcome, Trial
from autofit.core.prediction import StepWork
from autofit.core.units import GIB, format_bytes
from autofit.core.workload import Effect, Goal
from autofit.estimate.footprint import Footprint
from autofit.estimate.memory.deviation import NOTHING_COMPARED, MemoryDeviation
from autofit.estimate.version import ESTIMATOR_VERSION
from autofit.operations import SearchRequest
from autofit.operations.searching import search as searching
from autofit.operations.searching.resume import Driver
from autofit.operations.service.submission import digest_of, submit
from autofit.planning.lattices import default_space
from autofit.planning.plan import outline, resolve
from autofit.prediction import lattice_predictor as predicting_ahead
from autofit.prediction import memory_deviations
from autofit.prediction.estimate_cache import EstimateCache
from autofit.prediction.predict_configs import predict_all
from autofit.search.loop import SearchLoop
from autofit.store import LeaseLost, Store, UnderWay, new_owner
from autofit.store.searches.heartbeat import LOOK_SECONDS
from autofit.store.searches.queue import SearchQueue
from autofit.techniques import Job
from autofit.trial.machine.detection import detect
from autofit.trial.process.classify import timed_out
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Pool

RESULT_KEYS = {
    *("search_id", "recommendation", "frontier", "trials", "out_of_memory", "ruled_out", "answered_from_store"),
    "seconds",
}
RESULT_KEYS_BESIDES = {
    "unsupported",
    "beyond_goal",
    "disturbed",
    "emulated",
    "impractical",
    "stopped_because",
    "regret_bound",
}


@pytest.fixture
def request_(tmp_path: Path) -> SearchRequest:
    """A search on this machine's processor."""
    return SearchRequest(
        workload=OPTIONS, device="cpu", memory_limit_bytes=2 * GIB, store=str(tmp_path / "store.db"), max_trials=200
    )


@pytest.fixture
def store(request_: SearchRequest) -> Iterator[Store]:
    """The search's store."""
    with Store.open(request_.store) as opened:
        yield opened


def test_a_result_has_the_designs_keys(world: World, request_: SearchRequest, store: Store) -> None:
    result = operations.search(request_)
    body = result.to_json()
    assert set(body) == RESULT_KEYS | RESULT_KEYS_BESIDES
    assert body["trials"] == len(world.pools[0].submitted) == store.count()
    assert body["out_of_memory"] == store.count(outcome="out_of_memory")
    assert body["ruled_out"] > 0
    assert body["answered_from_store"] == 0
    assert body["seconds"] > 0
    assert body["frontier"]["workload"] == body["recommendation"]["workload"] == OPTIONS.resolve()[1].to_json()
    assert world.pools[0].closed == 1


def test_the_recommendation_is_read_off_the_frontier(world: World, request_: SearchRequest, store: Store) -> None:
    result = operations.search(request_)
    answer = result.recommendation
    assert answer.point.method == "full"
    assert answer.point in result.frontier.points
    assert answer.headroom_bytes == 2 * GIB - answer.point.measurement.device_bytes >= 0
    # The same from the store, by whoever asks later.
    later = operations.recommend(OPTIONS, memory_limit_bytes=2 * GIB, store=store)
    assert later.point == answer.point


def test_a_search_is_kept_with_what_it_asked_and_how_it_ended(
    world: World, request_: SearchRequest, store: Store
) -> None:
    result = operations.search(request_)
    kept = store.search(result.search_id)
    assert kept is not None
    assert kept.state == "succeeded"
    assert kept.request["max_trials"] == 200
    assert kept.result is not None and kept.result["stopped_because"] == result.stopped_because
    assert len(store.trials(search_id=result.search_id)) == result.trials


def test_the_number_formats_that_the_device_only_emulates_are_told(
    world: World, request_: SearchRequest, store: Store
) -> None:
    assert operations.search(request_).emulated == ()
    hardware, stack = detect("cpu")
    products = {
        product(name, layout): 1e-9 if name in ("bf16", "fp16") else 1e-11 for name in FORMATS for layout in LAYOUTS
    }
    part = ProbePart(name="products", seconds=1.0, seconds_per=products)
    store.probes.keep(made_probe(hardware=hardware, stack=stack, parts=(part,)))
    result = operations.search(request_)
    assert result.emulated == ("bf16 is 100 times slower than fp32 here.",), "no config of the space is in fp16"
    assert result.emulated[0] in result_text(result)


def test_the_same_question_is_answered_from_the_store(world: World, request_: SearchRequest, store: Store) -> None:
    first = operations.search(request_)
    again = operations.search(request_)
    assert (again.trials, len(world.pools)) == (0, 1)
    assert again.answered_from_store == len({t.config for t in store.trials()})
    assert again.recommendation == first.recommendation
    assert again.frontier.points == first.frontier.points
    assert store.count() == first.trials
    assert again.stopped_because == f"the same search has already ended: {first.stopped_because}"
    assert operations.search(request_).stopped_because == again.stopped_because


@pytest.mark.parametrize(
    ("earlier", "later", "answers"),
    [
        ({"max_trials": 3}, {"max_trials": 3}, True),
        ({"max_trials": 3}, {"max_trials": 2}, True),
        ({"max_trials": 3}, {"max_trials": 9}, False),
        ({"max_trials": 3}, {"max_trials": None}, False),
        ({"max_trials": 3, "time_budget_seconds": 600.0}, {"max_trials": 3, "time_budget_seconds": 60.0}, True),
        ({"max_trials": 3, "time_budget_seconds": 60.0}, {"max_trials": 3, "time_budget_seconds": 600.0}, False),
        ({"max_trials": 3, "time_budget_seconds": 60.0}, {"max_trials": 3, "time_budget_seconds": None}, False),
        ({"max_trials": 3, "time_budget_seconds": None}, {"max_trials": 3}, True),
        ({"max_trials": 3}, {"max_trials": 3, "memory_limit_bytes": 3 * GIB}, False),
        ({"max_trials": 3}, {"max_trials": 3, "goal": Goal(allow=Effect.EXACT)}, False),
        ({"max_trials": 3}, {"max_trials": 3, "goal": Goal(method="lora")}, False),
        ({"max_trials": 3}, {"max_trials": 3, "space": "smoke"}, False),
        ({"max_trials": 3}, {"max_trials": 3, "workload": replace(OPTIONS, seed=1)}, False),
        ({"max_trials": 3}, {"max_trials": 3, "fresh": True}, False),
        ({"max_trials": 3}, {"max_trials": 3, "thorough": True}, False),
        ({"max_trials": 3}, {"max_trials": 3, "predict": False}, False),
        ({"max_trials": 3}, {"max_trials": 3, "workers": 1, "space": "cpu"}, True),
    ],
)
def test_which_earlier_search_answers(
    world: World, request_: SearchRequest, earlier: dict[str, object], later: dict[str, object], answers: bool
) -> None:
    operations.search(replace(request_, **earlier))  # type: ignore[arg-type]
    operations.search(replace(request_, **later))  # type: ignore[arg-type]
    assert len(world.pools) == (1 if answers else 2)


def test_a_larger_budget_goes_on(world: World, request_: SearchRequest, store: Store) -> None:
    first = operations.search(replace(request_, max_trials=3))
    stored = {t.config for t in store.trials()}
    more = operations.search(replace(request_, max_trials=50))
    assert more.trials > 5
    assert more.answered_from_store == len(stored)
    explored = [r.config for r in world.pools[1].submitted]
    repeated = [c for c in explored if c in stored]
    assert len(repeated) <= 3, "only a winner is run again"
    assert store.count() == first.trials + more.trials


def test_fresh_measures_again(world: World, request_: SearchRequest, store: Store) -> None:
    first = operations.search(request_)
    again = operations.search(replace(request_, fresh=True))
    assert again.answered_from_store == 0
    assert again.trials > 10
    assert store.count() == first.trials + again.trials
    # What was measured last answers from then on.
    assert operations.search(request_).trials == 0


@contextmanager
def interrupted(world: World, store: Store, trials: int) -> Iterator[None]:
    """The search herein is interrupted once the store holds so many trials."""

    def interrupt() -> None:
        if store.count() >= trials:
            raise KeyboardInterrupt

    world.on_wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        yield
    world.on_wait = lambda: None


def test_an_interrupted_search_goes_on(world: World, request_: SearchRequest, store: Store) -> None:
    with interrupted(world, store, 5):
        operations.search(request_)
    assert world.pools[0].closed == 1
    assert store.count() == 5
    assert [s.state for s in store.searches()] == ["cancelled"]
    rest = operations.search(request_)
    assert rest.answered_from_store == 5
    assert rest.trials > 0
    assert {s.state for s in store.searches()} == {"cancelled", "succeeded"}


def test_a_search_that_is_interrupted_as_it_begins_is_stored_as_that(
    world: World, request_: SearchRequest, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(loop: SearchLoop) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SearchLoop, "_begin", interrupt)
    with pytest.raises(KeyboardInterrupt):
        operations.search(request_)
    assert [search.state for search in store.searches()] == ["cancelled"]


@pytest.mark.parametrize("how", ["interrupted", "killed"])
def test_measuring_afresh_goes_on_where_it_was_interrupted(
    world: World, request_: SearchRequest, store: Store, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_trials = operations.search(request_).trials
    afresh = replace(request_, fresh=True)
    with monkeypatch.context() as patched, interrupted(world, store, first_trials + 4):
        if how == "killed":
            patched.setattr(SearchQueue, "end", lambda *arguments: None)
        operations.search(afresh)
    expire(store)
    rest = operations.search(afresh)
    assert (rest.answered_from_store, rest.trials > 0) == (4, True)
    assert len(store.trials(search_id=rest.search_id)) == 4 + rest.trials
    assert [s.state for s in store.searches()] == ["succeeded", "succeeded"]
    # That one has ended: whoever asks afresh again gets all of it measured again.
    again = operations.search(afresh)
    assert again.answered_from_store == 0
    assert again.search_id != rest.search_id


def test_measuring_afresh_begins_anew_once_the_question_is_answered(
    world: World, request_: SearchRequest, store: Store
) -> None:
    with interrupted(world, store, 4):
        operations.search(replace(request_, fresh=True))
    assert operations.search(request_).answered_from_store == 4
    assert operations.search(replace(request_, fresh=True)).answered_from_store == 0


def test_a_search_that_was_killed_goes_on(world: World, request_: SearchRequest, store: Store) -> None:
    """SIGKILL leaves the search as running: it is no answer, and what it has spent counts."""
    limited = replace(request_, max_trials=6)
    job = resolve(limited).job
    site = {"hardware": job.hardware, "stack": job.stack, "workload": job.workload, "request": {}}
    same = digest_of(limited, job.workload, job.hardware.name)
    lease = store.queue.begin("killed", a_gone_process(), digest=same, **site)  # type: ignore[arg-type]
    for number in range(4):
        done = make_trial({"method": "lora", "micro_batch": 2**number}, out_of_memory(), job=job)
        store.add(done, lease=lease)
    rest = operations.search(limited)
    assert (rest.search_id, rest.trials) == ("killed", 2)
    ended = store.search("killed")
    assert ended is not None and (ended.state, ended.lease_epoch, ended.spent_trials) == ("succeeded", 2, 6)


def test_the_same_search_is_driven_once(world: World, request_: SearchRequest, store: Store) -> None:
    """Whoever asks the same meanwhile is told, with --fresh too, and nothing is measured twice."""
    for asked in (request_, replace(request_, fresh=True)):
        messages: list[str] = []

        def ask_again(asked: SearchRequest = asked, messages: list[str] = messages) -> None:
            if not messages:
                with pytest.raises(UnderWay, match="the same search is under way") as error:
                    operations.search(asked)
                messages.append(str(error.value))

        world.on_wait = ask_again
        result = operations.search(asked)
        assert result.search_id in messages[0]
    assert len(world.pools) == len(store.searches()) == 2


def test_a_command_drives_the_same_search_that_waits_for_a_runner(
    world: World, request_: SearchRequest, store: Store
) -> None:
    store.queue.announce(detect("cpu")[0])
    queued = submit(request_, store)
    assert operations.search(request_).search_id == queued
    assert [(s.search_id, s.state) for s in store.searches()] == [(queued, "succeeded")]


def test_waiting_for_a_device_spends_no_time_of_a_runners_search(
    world: World, request_: SearchRequest, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store.queue.announce(detect("cpu")[0])
    search_id = submit(request_, store)
    lease = store.queue.claim(new_owner(), search_id=search_id)
    assert lease is not None
    spent: list[float] = []
    elsewhere = tmp_path / "elsewhere.db"
    with Driver(store, lease) as driver:
        open_pool = searching.open_pool

        def when_one_is_free(request: SearchRequest) -> Pool:
            spent.append(driver.spent_seconds)
            return open_pool(request)

        monkeypatch.setattr(searching, "open_pool", when_one_is_free)
        searching.search(replace(request_, ray_address="auto", store=str(elsewhere)), driver=driver)
        spent.append(driver.spent_seconds)
    assert spent[0] == 0.0 < spent[1]
    assert store.count() and not elsewhere.exists(), "the driver's store is open: no other is"


def test_nobody_takes_a_search_whose_ending_is_being_stored(
    request_: SearchRequest, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.queue.announce(detect("cpu")[0])
    submit(request_, store)
    lease = store.queue.claim(new_owner())
    assert lease is not None
    end, others = store.queue.end, []

    def as_another_asks(*arguments: Any) -> None:
        others.append(store.queue.claim(new_owner()))
        end(*arguments)

    monkeypatch.setattr(store.queue, "end", as_another_asks)
    with Driver(store, lease):
        pass
    assert (others, store.searches()[0].state) == ([None], "succeeded")


def test_a_cluster_is_not_asked_for_a_card_whose_answer_is_stored(
    world: World, request_: SearchRequest, store: Store
) -> None:
    """A node for it may have to be rented first."""
    world.site = HARDWARE, world.site[1]
    space = default_space(detect("cpu")[0], 1)
    asked = replace(request_, device="auto", ray_address="auto", hardware=HARDWARE.name, max_trials=3, space=space)
    first = operations.search(asked)
    again = operations.search(asked)
    assert (len(world.pools), again.trials, again.recommendation.point) == (1, 0, first.recommendation.point)
    for other in (
        replace(asked, max_trials=4),
        replace(asked, fresh=True),
        replace(asked, memory_limit_bytes=3 * GIB),
    ):
        before = len(world.pools)
        operations.search(other)
        assert len(world.pools) == before + 1


def test_two_fresh_searches_of_different_length_are_two(world: World, request_: SearchRequest, store: Store) -> None:
    """They once wrote under one id."""
    shorter = replace(request_, fresh=True, max_trials=3)
    other: list[str] = []

    def ask_beside() -> None:
        if not other:
            world.on_wait = lambda: None
            other.append(operations.search(shorter).search_id)

    world.on_wait = ask_beside
    assert operations.search(replace(request_, fresh=True)).search_id != other[0]


def test_a_cancelled_search_ends_and_keeps_what_it_has(world: World, request_: SearchRequest, store: Store) -> None:
    def cancel() -> None:
        if store.count() >= 3:
            store.queue.cancel(store.searches()[0].search_id)
            time.sleep(LOOK_SECONDS + 0.5)

    world.on_wait = cancel
    with pytest.raises(LeaseLost, match="cancelled or taken over"):
        operations.search(request_)
    assert world.pools[0].closed == 1
    assert (store.count(), [s.state for s in store.searches()]) == (3, ["cancelled"])
    events = store.queue.events(store.searches()[0].search_id)
    assert [event.kind for event in events] == ["running", "trial", "trial", "trial", "cancelled"]
    assert [event.seq for event in events] == [1, 2, 3, 4, 5]


def test_a_pool_that_fails_leaves_a_failed_search(world: World, request_: SearchRequest, store: Store) -> None:
    def fail() -> None:
        if store.count() >= 2:
            raise EnvironmentLacks("the cluster is gone", remedy="start it again")

    world.on_wait = fail
    with pytest.raises(EnvironmentLacks, match="the cluster is gone"):
        operations.search(request_)
    assert world.pools[0].closed == 1
    assert (store.count(), [s.state for s in store.searches()]) == (2, ["failed"])


def test_where_nothing_fits_it_says_so_at_once_the_second_time(
    world: World, request_: SearchRequest, store: Store
) -> None:
    world.special = lambda request: out_of_memory()
    with pytest.raises(
        Shortfall, match=r"nothing that was measured fits 2.00 GiB: every trial ran out of memory"
    ) as error:
        operations.search(request_)
    closest = error.value.to_json()["closest"]
    assert closest["outcome"] == "out_of_memory" and closest["config"]["micro_batch"] == 1
    assert "what would help: a higher --memory-limit" in str(error.value)
    assert world.pools[0].closed == 1
    trials = store.count()
    assert trials > 0
    with pytest.raises(NothingFits, match="every trial ran out of memory"):
        operations.search(request_)
    assert (store.count(), len(world.pools)) == (trials, 1)


def test_where_some_run_out_and_others_crash_both_are_told(world: World, request_: SearchRequest) -> None:
    world.special = lambda request: crashed() if request.config["method"] == "full" else out_of_memory()
    with pytest.raises(Shortfall, match="failed for reasons other than memory, the last: crashed") as error:
        operations.search(replace(request_, max_trials=30))
    assert error.value.to_json()["closest"]["outcome"] == "out_of_memory"
    assert "the closest under 2.00 GiB: out of memory" in str(error.value)
    assert "what would help: " in str(error.value)


def test_progress_is_reported(world: World, request_: SearchRequest) -> None:
    seen: list[tuple[int, int]] = []
    result = operations.search(request_, lambda p: seen.append((p.done, p.candidates)))
    assert seen[0][0] == 0
    assert seen[-1][0] == result.trials
    assert {candidates for _, candidates in seen} == {192}


def test_a_cluster_is_asked_for_its_site_and_left(world: World, request_: SearchRequest) -> None:
    result = operations.search(replace(request_, ray_address="auto"))
    assert len(world.pools) == 1
    assert world.pools[0].closed >= 1
    assert result.trials == len(world.pools[0].submitted)
    assert world.pools[0].claims == [(result.search_id, 1)], "before any trial, under the lease"


def test_a_cluster_is_left_where_the_request_is_wrong(world: World, request_: SearchRequest) -> None:
    with pytest.raises(UsageError, match="unknown search space 'cpuu'"):
        operations.search(replace(request_, ray_address="auto", space="cpuu"))
    assert all(pool.closed for pool in world.pools)


LARGE = replace(OPTIONS, model="llama-3.1-70b")


@pytest.mark.parametrize(
    ("method", "least", "holder"),
    [
        # 70.6e9 parameters in bf16: weights alone are 131 GiB, and an H200 has 139.7 for everything.
        ("full", "394.25 GiB", None),
        ("lora", "131.42 GiB", "b200"),
        # A 40 GiB card would leave 2.7 GiB for context, activations and a dequantised matrix.
        ("qlora", "36.80 GiB", "a40"),
        ("any", "36.80 GiB", "a40"),
    ],
)
def test_a_model_that_is_too_large_says_what_could_hold_it(
    world: World, request_: SearchRequest, method: str, least: str, holder: str | None
) -> None:
    request = replace(request_, workload=LARGE, goal=Goal(method=method), memory_limit_bytes=4 * GIB)
    with pytest.raises(Shortfall, match="the smallest config needs at least") as error:
        resolve(request)
    text = str(error.value)
    assert error.value.exit_code == 3
    assert f"at least {least} for weights, gradients and states, and activations on top (" in text
    assert (f"could hold it is {holder} (" if holder else "no card of the catalog could hold it") in text
    closest = error.value.to_json()["closest"]
    assert closest["over_limit_bytes"] == closest["at_least_bytes"] - 4 * GIB > 0
    assert closest["provenance"] == "predicted"
    assert ("--method any would lower that to 36.80 GiB" in text) == (method in ("full", "lora"))
    if holder:
        assert card(holder).kind == "cuda", "no card that autofit refuses is recommended"


def test_what_a_search_rejects_is_not_recommended(world: World, request_: SearchRequest, store: Store) -> None:
    """The winner's second run fails: search and recommendation agree on the next."""
    failures: Sequence[Outcome] = (out_of_memory(), crashed(), Diverged(reason="other losses"))
    for failure in failures:
        runs: Counter[Config] = Counter()
        rejected: list[Config] = []

        def special(request: TrialRequest, runs=runs, rejected=rejected, failure=failure) -> Outcome | None:  # type: ignore[no-untyped-def]
            runs[request.config] += 1
            if runs[request.config] == 2 and not rejected:
                rejected.append(request.config)
                return failure
            return None

        world.special = special
        fresh = replace(request_, fresh=True)
        result = operations.search(fresh)
        assert rejected and result.recommendation.point.config != rejected[0]
        later = operations.recommend(OPTIONS, memory_limit_bytes=2 * GIB, store=store)
        assert later.point.config == result.recommendation.point.config


def test_a_contradiction_is_settled_by_measuring_afresh(world: World, request_: SearchRequest, store: Store) -> None:
    """Somebody else held the memory when the winner ran the second time: it is not recommended until it has fitted
    twice more, which a fresh search sees to."""
    runs: Counter[Config] = Counter()
    rejected: list[Config] = []

    def special(request: TrialRequest) -> Outcome | None:
        runs[request.config] += 1
        if runs[request.config] < 2 or rejected:
            return None
        rejected.append(request.config)
        return out_of_memory()

    world.special = special
    first = operations.search(request_)
    assert first.frontier.contradictory == first.recommendation.contradictory == 1
    again = operations.search(request_)
    assert again.recommendation.point.config == first.recommendation.point.config
    for answer in (again.recommendation, operations.recommend(OPTIONS, memory_limit_bytes=2 * GIB, store=store)):
        assert answer.contradictory == 1 and answer.point.config not in rejected
    mended = operations.search(replace(request_, fresh=True))
    assert mended.frontier.contradictory == 0 and [mended.recommendation.point.config] == rejected
    later = operations.recommend(OPTIONS, memory_limit_bytes=2 * GIB, store=store)
    assert later.contradictory == 0 and [later.point.config] == rejected


def test_a_search_counts_trials_as_the_frontier_does(world: World, request_: SearchRequest, store: Store) -> None:
    result = operations.search(request_)
    later = operations.frontier(OPTIONS, store=store)
    assert (result.frontier.trials, result.frontier.out_of_memory) == (later.trials, later.out_of_memory)


def test_hardware_is_named_in_any_case(world: World, request_: SearchRequest) -> None:
    here, _ = detect("cpu")
    assert operations.search(replace(request_, hardware=here.name.upper(), max_trials=1)).trials > 0


def test_a_wider_permission_that_needs_less_is_named(world: World, request_: SearchRequest) -> None:
    """The bare weights of a full fine-tuning with AdamW in 8 bits, or with SGD, are known without a trial."""
    request = replace(request_, goal=Goal(method="full", allow=Effect.EXACT), memory_limit_bytes=GIB)
    with pytest.raises(Shortfall) as error:
        resolve(request)
    text = str(error.value)
    assert "the smallest config needs at least 2.00 GiB" in text
    assert "--allow numerics would lower that to " in text and "--method any would lower that to " in text
    here, _ = detect("cpu")
    assert f"--memory-limit may be up to the {format_bytes(here.memory_bytes)} of {here.name}" in text


def test_an_outline_runs_nothing(world: World, request_: SearchRequest) -> None:
    plan = outline(resolve(request_))
    assert world.pools == []
    assert not Path(str(request_.store)).exists()
    assert set(plan) == {
        *("hardware", "workload", "space", "memory_limit_bytes", "configs", "ruled_out_by_floor", "beyond_goal"),
        "unsupported",
    }
    assert (plan["space"], plan["configs"], plan["memory_limit_bytes"]) == ("cpu", 192, 2 * GIB)
    assert 0 < plan["ruled_out_by_floor"] < 192
    assert plan["workload"]["model"] == MODEL
    assert operations.search(request_).ruled_out >= plan["ruled_out_by_floor"]


def made_footprint(config: Config, bytes_: int, limit: int, work: StepWork | None = None) -> Footprint:
    return Footprint(
        config=config,
        hardware="cpu",
        memory_limit_bytes=limit,
        peak_allocated_bytes=bytes_,
        peak_reserved_bytes=bytes_,
        device_bytes=bytes_,
        host_bytes=0,
        breakdown={},
        phase_peaks={},
        seconds_to_estimate=0.1,
        work=work,
    )


class Predictor:
    """Predicts every config by formula, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.seconds: list[object] = []

    def __call__(
        self,
        known: EstimateCache,
        configs: Sequence[Config],
        *,
        memory_limit_bytes: int,
        report: Callable[[int, int], None],
        **more: object,
    ) -> dict[Config, Footprint]:
        """What stands in for `predict_all`."""
        self.asked.append(len(configs))
        self.seconds.append(more["seconds"])
        truth = Truth(known.job, Lattice(axes=(), configs=tuple(configs)), seed=1)
        report(len(configs), len(configs))
        return {c: made_footprint(c, int(0.9 * truth.memory(c)), memory_limit_bytes) for c in configs}


def test_every_kept_trial_has_its_prediction(world: World, request_: SearchRequest, store: Store) -> None:
    world.predict_all = predictor = Predictor()
    plain = resolve(request_)
    result = operations.search(request_)
    (count,) = predictor.asked
    assert count == sum(least <= 2 * GIB for least in plain.lower_bounds.values())
    assert store.count() == len(list(store.predicted(latest=99))) == result.trials > 0
    assert result.ruled_out > len(plain.lattice.configs) - count


def test_a_host_that_is_too_small_for_every_config_is_told(world: World, request_: SearchRequest) -> None:
    here, _ = detect("cpu")

    def predict_all(known: EstimateCache, configs: Sequence[Config], **options: object) -> dict[Config, Footprint]:
        takes = {c: here.host_memory_bytes + (2 if c["method"] == "qlora" else 3) * GIB for c in configs}
        made = {c: made_footprint(c, GIB, 2 * GIB) for c in configs}
        return {c: replace(footprint, host_bytes=takes[c]) for c, footprint in made.items()}

    world.predict_all = predict_all
    for _ in range(2):
        with pytest.raises(Shortfall) as error:
            operations.search(request_)
    takes, there = here.host_memory_bytes + 2 * GIB, here.host_memory_bytes
    assert f"needs {format_bytes(takes)}, and a machine has {format_bytes(there)} (" in str(error.value)
    closest = error.value.to_json()["closest"]
    assert (closest["config"]["method"], closest["over_limit_bytes"]) == ("qlora", 2 * GIB)
    assert [pool.submitted for pool in world.pools] == [[], []]


def test_a_time_budget_too_short_for_any_trial_is_told(world: World, request_: SearchRequest, store: Store) -> None:
    here, _ = detect("cpu")

    def predict_all(known: EstimateCache, configs: Sequence[Config], **options: object) -> dict[Config, Footprint]:
        """Full training exceeds the host; a step of the others takes hours."""
        takes = {c: here.host_memory_bytes + (GIB if c["method"] == "full" else -GIB) for c in configs}
        launches = StepWork(amounts={"launch": 1e9}, estimator=ESTIMATOR_VERSION)
        made = {c: made_footprint(c, GIB, 2 * GIB, launches) for c in configs}
        return {c: replace(footprint, host_bytes=takes[c]) for c, footprint in made.items()}

    world.predict_all = predict_all
    for _ in range(2):
        with pytest.raises(
            EnvironmentLacks, match=r"is expected to take \d+ [hm] .* time budget of 10 m 00 s"
        ) as error:
            operations.search(replace(request_, time_budget_seconds=600.0))
    assert "method=full" not in str(error.value) and "a longer --time-budget" in str(error.value)
    assert [pool.submitted for pool in world.pools] == [[], []]
    assert [search.state for search in store.searches()] == ["failed", "failed"]


def test_where_all_trials_take_too_long_the_budget_is_named(world: World, request_: SearchRequest) -> None:
    world.special = lambda request: timed_out(deadline_seconds=27.1654, phase="backward", phases_entered=8)
    with pytest.raises(Shortfall, match=r"not finished after 27.2 s, in phase backward; .* a longer --time-budget"):
        operations.search(replace(request_, max_trials=2))


def test_what_the_store_answers_is_not_estimated(world: World, request_: SearchRequest) -> None:
    world.predict_all = predictor = Predictor()
    first = operations.search(request_)
    again = operations.search(request_)
    assert len(predictor.asked) == 1
    assert again.trials == 0
    assert again.ruled_out == first.ruled_out


def test_errors_of_earlier_trials_on_this_hardware_make_the_margin(
    world: World, request_: SearchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.predict_all = Predictor()
    seen: list[int] = []
    real = memory_deviations.learned

    def learned(trials: Iterator[Trial], unseen: MemoryDeviation) -> MemoryDeviation:
        every = list(trials)
        seen.append(len(every))
        return real(every, unseen)

    monkeypatch.setattr(predicting_ahead, "learned", learned)
    first = operations.search(request_)
    other = operations.search(replace(request_, workload=replace(OPTIONS, seq_len=256)))
    # What was measured of the same workload is recalled trial by trial, and is left out here.
    operations.search(replace(request_, fresh=True))
    assert seen == [0, first.trials, other.trials]


def test_errors_on_other_hardware_and_of_the_question_itself_are_not_counted(
    world: World, request_: SearchRequest, store: Store, tmp_path: Path
) -> None:
    world.predict_all = Predictor()
    operations.search(request_)
    measured = list(store.predicted(latest=99))[::-1]
    job = request_.workload.job(detect("cpu"))
    longer = replace(job, workload=replace(job.workload, seq_len=256))
    moved = [replace(trial, hardware=replace(trial.hardware, name="another")) for trial in measured]
    with Store.open(str(tmp_path / "other.db")) as other:

        def told(asked: Job) -> MemoryDeviation:
            configs = [trial.config for trial in measured]
            return predictor_of(asked, other, configs).predict(lambda *counted: None).memory_deviation

        assert told(job) == told(longer) == NOTHING_COMPARED
        for trial in moved:
            other.add(trial)
        assert told(job) == NOTHING_COMPARED
        for trial in measured:
            other.add(trial)
        assert told(job) == NOTHING_COMPARED  # those of its own question are recalled one by one
        assert told(longer) == memory_deviations.learned(measured[::-1])


def test_without_predictions_trials_alone_tell_what_fits(world: World, request_: SearchRequest, store: Store) -> None:
    world.predict_all = predictor = Predictor()
    result = operations.search(replace(request_, predict=False))
    assert predictor.asked == []
    assert list(store.predicted(latest=99)) == []
    assert store.count() == result.trials > 0


def test_an_estimator_that_fails_costs_the_predictions_alone(
    world: World, request_: SearchRequest, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = operations.search(replace(request_, store=f"{request_.store}-other.db"))

    def fails(*asked: object, **options: object) -> dict[Config, Footprint]:
        raise MemoryError("no room for a trace")

    world.predict_all = fails
    result = operations.search(request_)
    assert (result.trials, result.ruled_out) == (undisturbed.trials, undisturbed.ruled_out)
    assert list(store.predicted(latest=99)) == []
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == "autofit: continuing without predictions, which failed: MemoryError: no room for a trace"


@pytest.mark.parametrize(("budget", "estimated"), [(None, [None]), (600.0, [180.0]), (60.0, [18.0])])
def test_estimating_has_a_share_of_the_time_budget(
    world: World, request_: SearchRequest, budget: float | None, estimated: list[float | None]
) -> None:
    world.predict_all = predictor = Predictor()
    with suppress(NothingFits):
        operations.search(replace(request_, time_budget_seconds=budget, max_trials=3))
    assert predictor.seconds == estimated


def test_a_search_uses_the_real_estimator(world: World, request_: SearchRequest, store: Store) -> None:
    world.predict_all = predict_all
    progress_shown: list[tuple[int, int]] = []
    few = replace(request_, space="smoke", goal=Goal(method="lora", allow=Effect.EXACT), max_trials=3)
    operations.search(few, lambda progress: progress_shown.append(progress.estimated) if progress.estimated else None)
    assert progress_shown[-1][0] == progress_shown[-1][1] > 0
    predictions = [t.prediction for t in store.predicted(latest=99)]
    assert len(predictions) == store.count() > 0
    assert all(p is not None and p.device_bytes > p.peak_allocated_bytes // 2 > 0 for p in predictions)


@pytest.mark.parametrize("one_host", [True, False])
def test_a_hosts_memory_is_shared_where_all_trials_run_on_it(
    world: World, request_: SearchRequest, store: Store, one_host: bool
) -> None:
    job = request_.workload.job(detect("cpu"))
    predictor = predictor_of(job, store, (), ray_address=None if one_host else "auto")
    predictions = predictor.predict(lambda done, total: None)
    assert predictions.shared_host_bytes == (job.hardware.host_memory_bytes if one_host else None)
