"""Searches on several kinds of hardware at once: what is told of them while they run and at their end."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.operations.made_trials import HARDWARE, OPTIONS, fits, make_job, make_trial, out_of_memory

from autofit.cli.arguments import hardware_names, prices
from autofit.cli.live import StandingsDisplay, standing_line
from autofit.cli.text.search import over_hardware_text
from autofit.core.errors import EnvironmentLacks, NothingFits, UsageError
from autofit.operations import SearchRequest, search_over_hardware
from autofit.operations.searching import over_hardware
from autofit.operations.searching.over_hardware import Standing
from autofit.operations.service.runner import Runner
from autofit.operations.service.submission import submit
from autofit.store import Lease, Store, new_owner

NAMES = ["l40s", "h100-80g", "a10g"]


@pytest.fixture
def request_(tmp_path: Path) -> SearchRequest:
    return SearchRequest(workload=OPTIONS, store=str(tmp_path / "store.db"), ray_address="auto")


def drives(monkeypatch: pytest.MonkeyPatch, drive: Callable[[Store, Lease, str], None]) -> None:
    """Has searches driven by `drive`, which is told the hardware, in place of runners and Ray."""

    class Made:
        def __init__(self, store: Store, *, search_id: str, **options: Any) -> None:
            self.store, self.search_id = store, search_id

        def run(self) -> None:
            lease = self.store.queue.claim(new_owner(), search_id=self.search_id)
            result = self.store.search(self.search_id)
            if lease is not None and result is not None:
                drive(self.store, lease, str(result.hardware_name))

        def stop(self) -> None: ...

    monkeypatch.setattr(over_hardware, "Runner", Made)
    monkeypatch.setattr(over_hardware, "LOOK_SECONDS", 0.05)


def made_drive(store: Store, lease: Lease, name: str) -> None:
    if name == "a10g":
        store.queue.end(lease, "failed", {"reason": "Ray has no a10g GPUs"})
        return
    job = make_job(hardware=replace(HARDWARE, name=name))
    store.add(make_trial({"method": "full", "micro_batch": 4}, out_of_memory(), job=job), lease=lease)
    speed = 2000 if name == "l40s" else 9000
    store.add(make_trial({"method": "full", "micro_batch": 2}, fits(20, speed), job=job), lease=lease)
    store.queue.end(lease, "succeeded", {})


def test_the_fastest_and_the_cheapest_are_named(
    request_: SearchRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drives(monkeypatch, made_drive)
    result = search_over_hardware(request_, NAMES, StandingsDisplay())
    assert [row.name for row in result.rows] == ["h100-80g", "l40s", "a10g"]
    lines = capsys.readouterr().err.splitlines()
    assert "h100-80g: succeeded, 2 trials done, 1 out of memory, best 9,000 tokens/s" in lines
    assert "a10g: failed, 0 trials done, Ray has no a10g GPUs" in lines
    per_hour = {"h100-80g": 9.0, "l40s": 1.0}
    text = over_hardware_text(result, per_hour).splitlines()
    assert text[0] == "h100-80g is the fastest: 9,000 tokens/s. l40s is the cheapest: 0.1389 per million tokens."
    assert text[-1].split(maxsplit=1) == ["a10g", "Ray has no a10g GPUs"]
    assert "cheapest" not in over_hardware_text(result, {}) and "per million" not in over_hardware_text(result, {})
    h100, l40s, a10g = result.to_json(per_hour)["by_hardware"]
    assert h100["cost_per_million_tokens"] == pytest.approx(9 / 3600 / 9000 * 1e6)
    assert h100["recommendation"]["hardware"]["name"] == "h100-80g" and h100["out_of_memory"] == 1
    assert (l40s["state"], a10g["state"], a10g["recommendation"]) == ("succeeded", "failed", None)
    with Store.open(request_.store) as store:
        assert {search.campaign_id for search in store.searches()} == {result.campaign_id}


def test_a_card_is_told_as_it_was_found_and_priced_as_it_was_asked_for(
    request_: SearchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At another power limit it is hardware of its own, which a worker of `--hardware h100-80g` may have all the
    same."""

    def drive(store: Store, lease: Lease, name: str) -> None:
        job = make_job(hardware=replace(HARDWARE, name=f"{name}-350w"))
        site = {"hardware": job.hardware, "stack": job.stack, "workload": job.workload}
        begun = store.queue.begin(lease.search_id, lease.owner, digest=lease.search_id, request={}, **site)
        store.add(make_trial({"method": "full", "micro_batch": 2}, fits(20, 9000), job=job), lease=begun)
        store.queue.end(begun, "succeeded", {})

    drives(monkeypatch, drive)
    result = search_over_hardware(request_, ["h100-80g"])
    assert over_hardware_text(result, {"h100-80g": 9.0}).startswith("h100-80g-350w is the fastest: 9,000 tokens/s.")
    (entry,) = result.to_json({"h100-80g": 9.0})["by_hardware"]
    assert entry["hardware"] == "h100-80g-350w" and entry["cost_per_million_tokens"] == pytest.approx(9 / 32.4)


def test_a_card_asked_for_by_two_names_is_searched_and_told_once(
    request_: SearchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with and without its power limit."""
    driven: list[str] = []
    looks: list[int] = []

    def drive(store: Store, lease: Lease, name: str) -> None:
        driven.append(name)
        made_drive(store, lease, name)

    with Store.open(request_.store) as store:
        store.queue.announce(replace(HARDWARE, name="h100-80g-500w"))
    drives(monkeypatch, drive)
    result = search_over_hardware(request_, ["h100-80g", "h100-80g-500w"], lambda all_: looks.append(len(all_)))
    assert driven == ["h100-80g"] and set(looks) == {1}
    assert [entry["hardware"] for entry in result.to_json({})["by_hardware"]] == ["h100-80g"]


def test_a_search_that_failed_says_so_beside_what_earlier_trials_have_shown(
    request_: SearchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    drives(monkeypatch, made_drive)
    search_over_hardware(request_, NAMES[:2])

    def drive(store: Store, lease: Lease, name: str) -> None:
        store.queue.end(lease, "failed" if name == "l40s" else "succeeded", {"reason": f"Ray has no {name} GPUs"})

    drives(monkeypatch, drive)
    again = replace(request_, fresh=True)
    result = search_over_hardware(again, NAMES[:2])
    assert over_hardware_text(result, {}).endswith(
        "l40s: what earlier trials have shown; its search did not succeed: Ray has no l40s GPUs"
    )

    drives(monkeypatch, lambda store, lease, name: store.queue.end(lease, "failed", {"reason": "no GPUs"}))
    with pytest.raises(EnvironmentLacks, match="h100-80g: no GPUs; l40s: no GPUs"):
        search_over_hardware(again, NAMES[:2])


def test_a_campaign_that_is_interrupted_leaves_nothing_to_runners(
    request_: SearchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a search that someone else asks for is left in the queue; the same command begins the other anew."""
    seen: list[str] = []

    def interrupted(store: Store, lease: Lease, name: str) -> None:
        seen.append(lease.search_id)
        store.queue.give_back(lease, "its driver was interrupted")

    def stopped(standings: object) -> None:
        if len(seen) == 2:
            raise KeyboardInterrupt

    drives(monkeypatch, interrupted)
    with Store.open(request_.store) as store:
        others = submit(replace(request_, hardware="h100-80g"), store, by="a token")
        with pytest.raises(KeyboardInterrupt):
            search_over_hardware(request_, NAMES[:2], stopped)
        assert {search.search_id: search.state for search in store.searches()} == {
            search_id: "queued" if search_id == others else "cancelled" for search_id in seen
        }
    drives(monkeypatch, made_drive)
    result = search_over_hardware(request_, NAMES[:2])
    assert result.standings["h100-80g"].search_id == others


@pytest.mark.parametrize(("state", "raised"), [("failed", EnvironmentLacks), ("nothing_fits", NothingFits)])
def test_where_nothing_is_found_each_says_why(
    request_: SearchRequest, monkeypatch: pytest.MonkeyPatch, state: str, raised: type[Exception]
) -> None:
    def drive(store: Store, lease: Lease, name: str) -> None:
        store.queue.end(lease, state if name == "l40s" else "failed", {"reason": f"no {name} today"})

    drives(monkeypatch, drive)
    with pytest.raises(raised, match="l40s: no l40s today; h100-80g: no h100-80g today"):
        search_over_hardware(request_, NAMES[:2])


def test_what_ends_a_runner_ends_the_wait_for_its_search(
    request_: SearchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drive(store: Store, lease: Lease, name: str) -> None:
        if name == "l40s":
            raise OSError(errno.ENOSPC, "No space left on device")
        store.queue.end(lease, "succeeded", {})

    drives(monkeypatch, drive)
    with pytest.raises(EnvironmentLacks, match="No space left"):
        search_over_hardware(request_, NAMES[:2])


def test_what_ends_a_runner_does_not_end_the_others_search(
    request_: SearchRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, has_failed, seen = 0, threading.Event(), threading.Event()

    def drive(store: Store, lease: Lease, name: str) -> None:
        if name == "l40s":
            has_failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        assert seen.wait(60.0), "the wait has ended with the failed one"
        store.queue.end(lease, "succeeded", {})

    def report(standings: Sequence[Standing]) -> None:
        nonlocal looks
        looks += has_failed.is_set()
        if looks == 3:
            seen.set()

    drives(monkeypatch, drive)
    with pytest.raises(EnvironmentLacks, match="No space left"):
        search_over_hardware(request_, NAMES[:2], report)
    with Store.open(request_.store) as store:
        assert {search.state for search in store.searches()} >= {"succeeded"}


def test_drivers_get_what_was_asked_of_them(request_: SearchRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def start(self: Runner, store: Store, lease: Lease) -> None:
        given.append(self._driver_options)
        store.queue.end(lease, "nothing_fits", {"reason": "none"})

    monkeypatch.setattr(Runner, "_drive", start)
    asked = replace(request_, workers=3, device="cuda")
    with pytest.raises(NothingFits):
        search_over_hardware(asked, NAMES[:1])
    (driven,) = given
    assert {name: getattr(asked, name) for name in driven} == driven
    assert (driven["workers"], driven["device"], driven["ray_address"]) == (3, "cuda", "auto")


def test_a_real_runner_fails_on_hardware_that_is_not_here(request_: SearchRequest) -> None:
    with pytest.raises(EnvironmentLacks, match=r"l40s: this machine has .*, not l40s"):
        search_over_hardware(replace(request_, ray_address=None, in_place=True, device="cpu"), ["l40s"])


def test_what_cannot_be_asked_is_refused(request_: SearchRequest) -> None:
    with pytest.raises(UsageError, match="--ray-address"):
        search_over_hardware(replace(request_, ray_address=None), NAMES)
    assert hardware_names(" H100-80g, l40s") == ["h100-80g", "l40s"]
    for names, said in (
        ("h100-80g,auto", "name every kind"),
        ("h100-80g,,l40s", "unknown hardware"),
        ("h200,zz", "zz"),
    ):
        with pytest.raises(UsageError, match=said):
            hardware_names(names)
    assert prices(["l40s=0.5"], NAMES) == prices(["L40S=0.5"], hardware_names("All")) == {"l40s": 0.5}
    for text, of, said in (("l40s=0.5", ["l40s"], "name several"), ("t4=1", NAMES, "t4"), ("l40s", NAMES, "price ''")):
        with pytest.raises(UsageError, match=said):
            prices([text], of)


def test_a_search_that_waits_says_so() -> None:
    assert standing_line(Standing(hardware="l40s", search_id="x")) == "l40s: queued, 0 trials done"
