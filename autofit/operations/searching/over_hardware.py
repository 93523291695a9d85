"""A search on each of several kinds of hardware of one cluster, all at the same time: which to rent for a workload."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from autofit.catalog.hardware import matching_cards
from autofit.core.errors import EnvironmentLacks, NothingFits, StoreError, UsageError
from autofit.core.outcome import Fits, OutOfMemory
from autofit.operations.hardware_compared import OnHardware, compare_hardware
from autofit.operations.service.runner import Runner, running
from autofit.operations.service.submission import submit
from autofit.planning.requests import SearchRequest
from autofit.store import ENDINGS, Store
from autofit.trial.machine.detection import detect
from autofit.workers.cluster.nodes import HARDWARE_LABEL
from autofit.workers.cluster.offer import look_here

ALL = ("all",)
"""In place of names: every kind that the cluster has now."""
LOOK_SECONDS = 1.0
"""Time between two looks at how the searches stand."""
RESUMES = "run the same command again once this is mended: it resumes"


@dataclass(slots=True, kw_only=True)
class Standing:
    """Where the search on one kind of hardware stands."""

    hardware: str
    """As trials find it, once they have: at another power limit, or emulated, it is not called as it was asked for."""
    search_id: str
    asked: str = ""
    """As it was asked for; empty where it is called so."""
    state: str = "queued"
    trials: int = 0
    out_of_memory: int = 0
    tokens_per_second: float | None = None
    """The highest measured so far."""
    reason: str | None = None
    """Why it did not succeed, once it has ended so."""
    seen: int = 0
    """The number of the last event that is counted here."""

    def look(self, store: Store) -> None:
        """Bring it up to date."""
        search = store.search(self.search_id)
        assert search is not None, "it was submitted, and searches are never deleted"
        for event in store.queue.events(self.search_id, after=self.seen):
            self.seen = event.seq
            if event.kind == "trial":
                self.trials += 1
                self.out_of_memory += event.body["outcome"] == OutOfMemory.kind
                if event.body["outcome"] == Fits.kind:
                    self.tokens_per_second = max(self.tokens_per_second or 0.0, event.body["tokens_per_second"] or 0.0)
        self.state, reason = search.state, (search.result or {}).get("reason")
        self.reason = str(reason) if reason is not None and search.state in ENDINGS else None
        if search.hardware is not None and search.hardware.name != self.hardware:
            self.asked, self.hardware = self.asked or self.hardware, search.hardware.name


@dataclass(frozen=True, slots=True, kw_only=True)
class OverHardware:
    """How the searches ended, the fastest first. At least one has succeeded."""

    campaign_id: str
    """Shared by the searches."""
    standings: Mapping[str, Standing]
    """By hardware."""
    rows: Sequence[OnHardware]

    def cost(self, row: OnHardware, prices: Mapping[str, float]) -> float | None:
        """As `OnHardware.cost`; `prices` are of one device for an hour, by hardware as it was asked for."""
        return row.cost(prices.get(self.standings[row.name].asked or row.name))

    def to_json(self, prices: Mapping[str, float]) -> dict[str, Any]:
        """What each would give and cost; `prices` as `cost` takes them."""
        return {"campaign_id": self.campaign_id, "by_hardware": [self._entry(row, prices) for row in self.rows]}

    def _entry(self, row: OnHardware, prices: Mapping[str, float]) -> dict[str, Any]:
        standing = self.standings[row.name]
        return {
            "hardware": row.name,
            "search_id": standing.search_id,
            "state": standing.state,
            "trials": standing.trials,
            "out_of_memory": standing.out_of_memory,
            "cost_per_million_tokens": self.cost(row, prices),
            "reason": row.reason,
            "recommendation": None if row.recommendation is None else row.recommendation.to_json(),
        }


def search_over_hardware(
    request: SearchRequest, names: Sequence[str], report: Callable[[Sequence[Standing]], None] = lambda standings: None
) -> OverHardware:
    """Search on each of the named kinds of hardware, or on `ALL` that the cluster has, at the same time: each search
    has a driver of its own, and a store in common.

    A search that finds nothing, or that cannot run, does not end the others. After an interruption the same call goes
    on. Raises `UsageError` without a cluster, and `NothingFits` or `EnvironmentLacks` if no search has succeeded.
    """
    if request.ray_address is None and not request.in_place:
        raise UsageError("several kinds of hardware are those of a cluster: name it with --ray-address")
    if request.workload.program is not None:
        raise UsageError("--command takes one kind of hardware at a time")
    if tuple(names) == ALL:
        names = _kinds(request)
    campaign_id = uuid4().hex
    request = replace(request, campaign_id=campaign_id)
    with Store.open(request.store) as store:
        if not all(map(matching_cards, names)):  # the name of this machine's own device, which no catalog has
            store.queue.announce(detect(request.device)[0])
        submitted: list[Standing] = []
        try:
            for name in dict.fromkeys(names):
                search_id = submit(replace(request, hardware=name), store)
                # A card with a power limit is searched as that card: both names together mean one search.
                if all(search_id != standing.search_id for standing in submitted):
                    submitted.append(Standing(hardware=name, search_id=search_id))
            _drive(submitted, request, store, report)
        except BaseException:
            _withdraw(campaign_id, submitted, store)
            raise
        standings = {standing.hardware: standing for standing in submitted}
        rows = compare_hardware(
            request.workload,
            list(standings),
            goal=request.goal,
            memory_limit_bytes=request.memory_limit_bytes,
            store=store,
        )
    failed = {name: one.reason or one.state for name, one in standings.items() if one.state != "succeeded"}
    explained = [replace(row, reason=failed[row.name]) if row.name in failed else row for row in rows]
    if all(standing.state != "succeeded" for standing in submitted):
        reasons = "; ".join(f"{row.name}: {row.reason}" for row in explained)
        if any(standing.state == "nothing_fits" for standing in submitted):
            raise NothingFits(reasons)
        raise EnvironmentLacks(reasons, remedy=RESUMES)
    return OverHardware(campaign_id=campaign_id, standings=standings, rows=explained)


def _kinds(request: SearchRequest) -> Sequence[str]:
    """The cards that the cluster has now. Raises `EnvironmentLacks` where it has none, or does not say which."""
    # Not by a process of its own, which would run a script without a guard (`if __name__ == "__main__"`) again.
    offer = look_here(request.ray_address or "auto", request.device)
    if offer.unclear:
        label = f"label the node: {HARDWARE_LABEL}=NAME"
        raise EnvironmentLacks(offer.unclear[0], remedy=f"name the kinds with --hardware, or {label}")
    if not offer.cards:
        remedy = "name the kinds of card that an autoscaler may add"
        raise EnvironmentLacks("no node of Ray's that is up has a GPU", remedy=remedy)
    return offer.cards


def _drive(
    standings: Sequence[Standing], request: SearchRequest, store: Store, report: Callable[[Sequence[Standing]], None]
) -> None:
    """Run the searches until all have ended. Raises `EnvironmentLacks` if no driver is left."""
    runners = [
        Runner(
            store,
            ray_address=request.ray_address,
            in_place=request.in_place,
            workers=request.workers,
            device=request.device,
            search_id=standing.search_id,
        )
        for standing in standings
    ]
    with running(runners) as failures:
        while True:
            for standing in standings:
                standing.look(store)
            report(standings)
            unfinished = sum(standing.state not in ENDINGS for standing in standings)
            if not unfinished:
                return
            if len(failures) >= unfinished:
                raise EnvironmentLacks(f"no search can be driven here: {failures[0]}", remedy=RESUMES)
            time.sleep(LOOK_SECONDS)


def _withdraw(campaign_id: str, standings: Sequence[Standing], store: Store) -> None:
    """End the searches that this campaign has queued, lest a runner takes them on; no others."""
    with suppress(StoreError):
        for search in map(store.search, (standing.search_id for standing in standings)):
            if search is not None and search.campaign_id == campaign_id and search.state == "queued":
                store.queue.cancel(search.search_id, for_all=False)
