"""A real cluster of machines with different emulated cards: one call searches on all kinds at once, and what happens
to nodes and beside it changes nothing of what it finds."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from jobs import tiny_model
from ray.cluster_utils import Cluster
from started import VARIABLE, processes
from unit.workers.made_workers import with_head

from autofit.core.outcome import Crashed, Fits, Trial
from autofit.core.units import MIB
from autofit.operations import OverHardware, SearchRequest, WorkloadOptions, search_over_hardware
from autofit.operations.searching.over_hardware import Standing
from autofit.store import Store
from autofit.trial.machine.device_lock import FOLDER_VARIABLE
from autofit.workers.cluster.nodes import HARDWARE_LABEL
from tests.emulated_card.cards import Machine

DIES, STAYS = "a10g", "h100-80g"
CARDS = {DIES: 2, STAYS: 1}
"""How many cards the machine of each kind has."""
SPACE = """
purpose: A handful of configs for tests, each of which is on the frontier.
axes:
  method: [full]
  precision: [bf16]
  micro_batch: [1, 2, 4]
"""
CONFIGS = 3


@dataclass(kw_only=True)
class Node:
    """A machine of the cluster."""

    kind: str
    machine: Machine
    folder: Path
    """By which what runs there can be told."""
    raylet: Any

    @property
    def cards(self) -> range:
        return range(self.machine.cards)

    def trials(self) -> list[list[int]]:
        """The processes on each of its cards."""
        return [self.machine.processes(card) for card in self.cards]

    def is_free(self) -> bool:
        """Whether nothing runs on its cards, and none of their memory is taken."""
        return not any(self.trials()) and not any(self.machine.held_bytes(card) for card in self.cards)

    def hang(self, hangs: bool = True) -> None:
        """Whether trials on its cards stand still."""
        for card in self.cards:
            self.machine.hang(card, hangs)

    def hang_in_mid_trial(self, given_up: Callable[[], bool]) -> None:
        """Have a trial stand still on each card, however long that takes; what is at its end may end."""
        self.hang()
        before, now = [], self.trials()
        while not (all(now) and now == before) and not given_up():
            time.sleep(1)
            before, now = now, self.trials()


@dataclass(kw_only=True)
class Nodes:
    """A head that runs nothing, and machines with cards."""

    ray_cluster: Cluster
    home: Path
    folder: Path
    there: list[Node] = field(default_factory=list)

    def add(self, kind: str, cards: int = 1) -> Node:
        """A machine joins, whose workers see its own cards alone."""
        folder = self.folder / f"node-{len(list(self.folder.glob('node-*')))}"
        folder.mkdir()
        machine = Machine(self.home, *[kind] * cards)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in machine.environment.items():
                patch.setenv(name, value, prepend=":" if name == "PYTHONPATH" else None)
            patch.setenv(FOLDER_VARIABLE, str(folder))  # as if on a machine of its own
            patch.setenv(VARIABLE, str(folder))
            raylet = self.ray_cluster.add_node(
                num_cpus=cards, num_gpus=cards, object_store_memory=80 * MIB, labels={HARDWARE_LABEL: kind}
            )
        self.there.append(Node(kind=kind, machine=machine, folder=folder, raylet=raylet))
        return self.there[-1]

    def kill(self, node: Node) -> None:
        """Its power goes."""
        self.there.remove(node)
        self.ray_cluster.remove_node(node.raylet, allow_graceful=False)

    def wait_until_nothing_is_left(self) -> None:
        """No process of a search, here or on a node, and nothing on a card. What Ray keeps for whoever comes next is
        its own."""

        def runs(folder: Path) -> bool:
            return any("-m autofit." in line or "TrialActor" in line for line in processes(folder).values())

        wait_until(lambda: not any(map(runs, [self.folder, *(node.folder for node in self.there)])))
        assert all(node.is_free() for node in self.there)


def wait_until(true: Callable[[], object]) -> None:
    """However long it takes."""
    while not true():
        time.sleep(0.05)


@pytest.fixture(scope="module")
def nodes(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A machine of each kind."""
    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(folder))
        cluster = with_head()
        try:
            found = Nodes(ray_cluster=cluster, home=home, folder=folder)
            for kind, cards in CARDS.items():
                found.add(kind, cards)
            yield found
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def request_(nodes: Nodes) -> SearchRequest:
    """For all that the space has: without predictions, which might leave some of it out."""
    (nodes.folder / "model").mkdir()
    (nodes.folder / "model" / "config.json").write_text(json.dumps(tiny_model().config))
    (nodes.folder / "space.yaml").write_text(SPACE)
    return SearchRequest(
        workload=WorkloadOptions(model=str(nodes.folder / "model"), seq_len=2048, global_batch=8),
        space=str(nodes.folder / "space.yaml"),
        ray_address=nodes.ray_cluster.address,
        store=str(nodes.folder / "undisturbed.db"),
        time_budget_seconds=None,
        predict=False,
        thorough=True,
    )


@dataclass(kw_only=True)
class Undisturbed:
    """A campaign to which nothing happens."""

    found: OverHardware
    seen: list[set[str]]
    """The states of its searches, at each look."""


@pytest.fixture(scope="module")
def undisturbed(request_: SearchRequest) -> Undisturbed:
    seen: list[set[str]] = []

    def report(standings: Sequence[Standing]) -> None:
        seen.append({standing.state for standing in standings})

    return Undisturbed(found=search_over_hardware(request_, ["all"], report), seen=seen)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a search has found."""

    frontier: tuple[str, ...]
    """The store's configs for its hardware and workload, the lightest first."""
    memory: dict[str, Any]
    """What each of its own configs takes, in bytes."""
    recommended: str


def answers(store: str | None, campaign: OverHardware) -> dict[str, Answer]:
    """By hardware. Each search has ended and holds no lease, and each attempt is stored once."""
    found = {}
    recommended = {row.name: row.recommendation for row in campaign.rows}
    with Store.open(store) as opened:
        for name, standing in campaign.standings.items():
            search, trials = opened.search(standing.search_id), opened.trials(search_id=standing.search_id)
            assert search is not None and (search.state, search.held) == ("succeeded", False)
            assert len(trials) == standing.trials and {trial.hardware.name for trial in trials} == {name}
            keys = {f"{part}_key": getattr(trials[0], part).key for part in ("hardware", "stack", "workload")}
            frontier, best = opened.frontier(**keys), recommended[name]
            assert frontier is not None and best is not None
            found[name] = Answer(
                frontier=tuple(point.config.key for point in frontier.points),
                memory=memory(trials),
                recommended=best.point.config.key,
            )
    with closing(sqlite3.connect(str(store))) as database:
        ((attempts, uids),) = database.execute("SELECT count(*), count(DISTINCT uid) FROM trials")
    assert attempts == uids
    return found


def memory(trials: Sequence[Trial]) -> dict[str, Any]:
    """What each config takes, in bytes: the same in every attempt that came to its end."""
    found: dict[str, Any] = {}
    for trial in trials:
        if isinstance(trial.outcome, Fits):
            m = trial.outcome.measurement
            taken = (m.peak_allocated_bytes, m.peak_reserved_bytes, m.device_bytes, m.phase_peaks)
            assert found.setdefault(trial.config.key, taken) == taken
    return found


def test_one_call_searches_on_all_kinds_of_card_at_once(
    nodes: Nodes, request_: SearchRequest, undisturbed: Undisturbed
) -> None:
    assert {"running"} in undisturbed.seen
    found = answers(request_.store, undisturbed.found)
    assert found.keys() == {f"emulated-{kind}" for kind in CARDS}
    for answer in found.values():
        assert len(answer.frontier) == len(answer.memory) == CONFIGS and answer.recommended in answer.frontier
    prices = dict.fromkeys(CARDS, 1.0)
    assert all(entry["cost_per_million_tokens"] for entry in undisturbed.found.to_json(prices)["by_hardware"])
    nodes.wait_until_nothing_is_left()


def test_a_node_dies_another_joins_and_a_second_campaign_waits_its_turn(
    nodes: Nodes, request_: SearchRequest, undisturbed: Undisturbed, caplog: pytest.LogCaptureFixture
) -> None:
    """Cards that stand still keep the order of events: the trials on them end only after what happens meanwhile."""
    request, kinds = replace(request_, store=str(nodes.folder / "disturbed.db")), [DIES, STAYS]
    (dies,) = (node for node in nodes.there if node.kind == DIES)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(search_over_hardware, request, kinds)
        dies.hang_in_mid_trial(first.done)
        assert processes(dies.folder) and processes(nodes.folder), "else nothing could be said to be left"
        nodes.kill(dies)
        wait_until(lambda: not processes(dies.folder))
        joins = nodes.add(DIES)
        try:
            joins.hang_in_mid_trial(first.done)
            caplog.clear()
            second = threads.submit(search_over_hardware, replace(request, fresh=True), kinds)
            turn = f"others use all {DIES} GPUs: this search waits its turn"
            wait_until(lambda: turn in caplog.text or first.done() or second.done())
            assert turn in caplog.text and not first.done()
        finally:
            joins.hang(False)
        campaigns = [first.result(), second.result()]
    expected = answers(request_.store, undisturbed.found)
    for campaign in campaigns:
        assert answers(request.store, campaign) == {f"emulated-{kind}": expected[f"emulated-{kind}"] for kind in kinds}
    with Store.open(request.store) as store:
        of_first, of_second = (store.trials(search_id=c.standings[f"emulated-{DIES}"].search_id) for c in campaigns)
    lost = [trial for trial in of_first if isinstance(trial.outcome, Crashed) and trial.outcome.worker_lost]
    assert len(lost) == CARDS[DIES], "what ran on each card of the node that died"
    assert max(trial.trial_id for trial in of_first) < min(trial.trial_id for trial in of_second)
    nodes.wait_until_nothing_is_left()
