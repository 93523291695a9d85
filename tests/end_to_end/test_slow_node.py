"""A real cluster of two nodes, of which one says that it is ten times as slow as it was measured."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import tiny_model
from ray.cluster_utils import Cluster
from unit.workers.made_workers import with_head

from autofit.core.device.state import ProcessorState
from autofit.core.units import GIB, MIB
from autofit.operations import SearchRequest, WorkloadOptions, search
from autofit.search.progress import Progress
from autofit.store import Store
from autofit.trial.machine.device_lock import FOLDER_VARIABLE
from autofit.workers.slots import slot_set, worker_starter

SPACE = """
purpose: A handful of configs for tests.
axes:
  method: [full]
  precision: [fp32]
  micro_batch: [1, 2, 4]
"""
SLOW = "AUTOFIT_TEST_SLOW"
"""Set for the workers of that node."""


def slowed_actor(folder: Path) -> type:
    """A worker that is slow if the environment says so, and until the other one has measured itself runs one trial
    at most: the order of events is then the same on any machine."""
    from autofit.workers.slots.trial_actor import TrialActor

    class Slowed(TrialActor):
        begun = 0

        def _measured(self, hardware: Any, stack: Any) -> dict[str, Any]:
            import os

            from autofit.probe import short

            # However slow the machine of the tests is, both nodes are measured to the end.
            short.MOST_SECONDS, short.PAUSES = 3600.0, ()
            slow = "AUTOFIT_TEST_SLOW" in os.environ
            try:
                measured = super()._measured(hardware, stack)
            finally:
                (folder / f"measured-{'slowed' if slow else 'free'}").touch()
            # Ten times: what else runs on the machine of the tests makes either of them several times slower.
            for part in measured["probe"]["parts"] if slow else ():
                part["seconds_per"] = {kind: 10.0 * rate for kind, rate in part["seconds_per"].items()}
            return measured

        def run(self, request: dict[str, Any], place: Any = None, rank: int = 0) -> dict[str, Any]:
            import os
            import time

            self.begun += 1
            while self.begun > 1 and "AUTOFIT_TEST_SLOW" in os.environ and not (folder / "measured-free").exists():
                time.sleep(0.1)
            return super().run(request, place, rank)

    return Slowed


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    running = with_head()
    yield running
    running.shutdown()


def test_a_slow_node_is_named_and_the_search_ends_with_the_others_frontier(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_starter, "TrialActor", slowed_actor(tmp_path))
    monkeypatch.setattr(slot_set, "RENEW_SECONDS", 0.1)
    # What else runs beside the tests is not to repeat their trials.
    monkeypatch.setattr(ProcessorState, "doubts", lambda state, seconds: ())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny_model().config))
    (tmp_path / "space.yaml").write_text(SPACE)
    nodes: list[Any] = []

    def add(name: str) -> None:
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / name))  # as if on a machine of its own
        (tmp_path / name).mkdir()
        nodes.append(cluster.add_node(num_cpus=2, object_store_memory=80 * MIB))

    def report(progress: Progress) -> None:
        if progress.done == 1 and len(nodes) == 1:
            add("free")

    with monkeypatch.context() as patch:
        patch.setenv(SLOW, "1")
        add("shared")
    request = SearchRequest(
        workload=WorkloadOptions(model=str(tmp_path / "model"), seq_len=32, global_batch=4),
        space=str(tmp_path / "space.yaml"),
        device="cpu",
        ray_address=cluster.address,
        memory_limit_bytes=4 * GIB,
        store=str(tmp_path / "store.db"),
    )
    with caplog.at_level(logging.WARNING):
        result = search(request, report)
    (reason,) = result.disturbed.slow_nodes
    assert "is slow: " in reason and "in fp32 run there at" in reason
    assert f"{reason}: its trials are set aside" in caplog.text
    with Store.open(request.store) as store:
        trials = {trial.trial_id: trial for trial in store.trials(search_id=result.search_id)}
    aside = [number for number, trial in trials.items() if trial.why_set_aside == reason]
    assert len(aside) == result.disturbed.set_aside >= 2, "the one before it was found out, and the one meanwhile"
    assert aside == sorted(trials)[: len(aside)]
    points = result.frontier.points
    assert points and not {point.trial_id for point in points} & set(aside)
    assert {trials[number].config for number in aside} <= {t.config for n, t in trials.items() if n not in aside}
