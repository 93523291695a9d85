"""What a store promises, on every kind of database."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest
from leases import begin
from sqlalchemy import event, select, update
from unit.store.conftest import OTHER_HARDWARE, OUTCOMES, PREDICTION, a_probe, a_trial, context, measured

from autofit.core.device import probe as device_probe
from autofit.core.device.probe import ProbePart
from autofit.core.errors import UsageError
from autofit.core.outcome import Crashed, OutOfMemory, Trial
from autofit.store import LeaseLost, Store
from autofit.store.tables import HardwareRow, StackRow, WorkloadRow


class TestAdding:
    """What is added comes back as it was."""

    def test_gives_back_what_was_added(self, store: Store) -> None:
        trial = a_trial()
        added = store.add(trial)
        assert added == trial
        assert trial.trial_id is None
        assert added.trial_id is not None
        stored = store.trial(added.trial_id)
        assert stored == trial
        assert stored is not None
        assert stored.to_json() == added.to_json()

    def test_keeps_every_outcome_with_its_evidence(self, store: Store) -> None:
        added = [store.add(a_trial(outcome=outcome)) for outcome in OUTCOMES]
        assert store.trials() == added
        assert tuple(trial.outcome for trial in store.trials()) == OUTCOMES

    def test_keeps_undecodable_output_as_unicode(self, store: Store) -> None:
        raw = b"caf\xc3\xa9 \xff".decode(errors="surrogateescape")
        added = store.add(a_trial(outcome=Crashed(reason="exit", stderr_tail=raw)))
        assert added.outcome == Crashed(reason="exit", stderr_tail="caf\N{LATIN SMALL LETTER E WITH ACUTE} \ufffd")
        assert store.trials() == [added]
        assert store.add_new([added]) == (0, 1)

    def test_a_nul_in_what_a_trial_printed_spoils_no_answer(self, store: Store) -> None:
        printed = OutOfMemory(reason="CUDA\0 out of memory", phase="forward")
        added = [store.add(a_trial(outcome=outcome)) for outcome in (printed, None, None, printed)]
        assert store.trials() == added
        frontier = store.frontier(**context(added[0]))
        assert frontier is not None and (frontier.trials, frontier.out_of_memory) == (4, 2)

    def test_fields_that_another_version_has_written_are_left_out(self, store: Store) -> None:
        added = store.add(a_trial())
        with store._database.write() as connection:
            for table in (HardwareRow, StackRow, WorkloadRow):
                (body,) = connection.scalars(select(table.body))
                connection.execute(update(table).values(body={**body, "tensor_cores": None, "liger": "1.0"}))
        assert store.trials() == [added] and store.stacks(*list(context(added).values())[::2]) == [added.stack]

    def test_keeps_numbers_to_the_last_digit(self, store: Store) -> None:
        trial = a_trial(outcome=measured(0.1 + 0.2, 2**53 + 1), seconds=1e-300, memory_limit_bytes=2**62)
        assert store.add(trial) == store.trials()[0] == trial
        assert isinstance(store.trials()[0].seconds, float)

    def test_keeps_each_repeat_as_an_attempt(self, store: Store) -> None:
        attempts = [store.add(a_trial()) for _ in range(3)]
        same = store.add(attempts[0])
        assert store.trials() == [*attempts, same]
        assert len({trial.trial_id for trial in store.trials()}) == 4

    def test_keeps_what_was_written_twice_once(self, store: Store) -> None:
        trial = a_trial()
        first = store.add(trial, uid="one")
        assert store.add(trial, uid="one").trial_id == first.trial_id
        assert store.add(trial, uid="another").trial_id != first.trial_id
        assert store.count() == 2

    def test_keeps_hardware_that_shares_a_key(self, store: Store) -> None:
        first, second = store.add(a_trial()), store.add(a_trial(hardware=OTHER_HARDWARE))
        assert first.hardware.key == second.hardware.key
        assert first.hardware != second.hardware
        assert store.trials() == [first, second]
        assert store.hardware() == [OTHER_HARDWARE]
        store.add(first)
        assert store.hardware() == [first.hardware]

    def test_keeps_what_was_predicted(self, store: Store) -> None:
        plain, predicted = store.add(a_trial()), store.add(a_trial(prediction=PREDICTION))
        assert [trial.prediction for trial in store.trials()] == [None, PREDICTION]
        assert list(store.predicted(latest=9)) == [predicted]
        assert list(store.predicted(latest=9, hardware_key=plain.hardware.key)) == [predicted]
        assert list(store.predicted(latest=9, hardware_key="another")) == []
        later = store.add(predicted)
        assert [t.trial_id for t in store.predicted(latest=1)] == [later.trial_id]
        assert [t.trial_id for t in store.predicted(latest=9)] == [later.trial_id, predicted.trial_id]

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_refuses_what_json_has_not(self, store: Store, value: float) -> None:
        with pytest.raises(ValueError, match="NaN or infinite"):
            store.add(a_trial(outcome=measured(value)))
        with pytest.raises(ValueError, match="NaN or infinite"):
            store.add(a_trial(seconds=value))
        with pytest.raises(ValueError, match="NaN or infinite"):
            store.add(a_trial(prediction=replace(PREDICTION, step_seconds=value)))
        assert store.count() == 0
        assert store.workloads() == []

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"recorded_at": "2026-01-01T00:00:00"}, "no time zone"),
            ({"recorded_at": "yesterday"}, "isoformat"),
            ({"memory_limit_bytes": 2**63}, "beyond 64 bits"),
        ],
    )
    def test_refuses_what_sql_cannot_hold(self, store: Store, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            store.add(a_trial(**changes))

    def test_refuses_names_and_configs_that_cannot_be_asked_for(self, store: Store) -> None:
        trial = a_trial()
        for model in ("a\0b", "\udc80"):
            with pytest.raises(ValueError, match="character"):
                store.add(replace(trial, workload=replace(trial.workload, model=model)))
        with pytest.raises(ValueError, match="method"):
            store.add(replace(trial, config=trial.config.replace(method="prefix")))

    def test_is_seen_at_once_by_another_store(self, store: Store, url: str) -> None:
        with Store.open(url, create=False) as other:
            added = store.add(a_trial())
            assert other.trials() == [added]


class TestAsking:
    """What can be asked of the trials."""

    def test_an_empty_store_knows_nothing(self, store: Store) -> None:
        where = context(a_trial())
        assert store.trials() == []
        assert store.trial(1) is None
        assert store.count() == 0
        assert store.attempts(**where) == {}
        assert store.frontier(**where) is None
        assert store.hardware() == []
        assert store.workloads() == []
        assert store.searches() == []
        assert store.stacks(where["hardware_key"], where["workload_key"]) == []

    def test_finds_trials_by_each_condition(self, store: Store) -> None:
        first = store.add(a_trial())
        faster = replace(first.hardware, name="h200-141g", memory_bytes=141 * 2**30)
        newer = replace(first.stack, torch="2.14.0")
        longer = replace(first.workload, seq_len=4096, model="smollm2-135m", trainer="trl")
        on_hardware = store.add(a_trial(hardware=faster, outcome=OutOfMemory(reason="")))
        on_stack = store.add(a_trial(stack=newer))
        of_workload = store.add(a_trial(workload=longer))
        conditions: list[tuple[dict[str, Any], list[Trial]]] = [
            ({}, [first, on_hardware, on_stack, of_workload]),
            ({"hardware_key": faster.key}, [on_hardware]),
            ({"stack_key": newer.key}, [on_stack]),
            ({"workload_key": longer.key}, [of_workload]),
            ({"workload": {"seq_len": 4096, "lora_dropout": 0.05}}, [of_workload]),
            ({"workload": {"seq_len": 4096, "lora_dropout": 0.25}}, []),
            ({"workload": {"trainer": "trl", "seed": 0}}, [of_workload]),
            ({"workload": {"trainer": "axolotl"}}, []),
            ({"workload": {"seed": 0}, "hardware_key": faster.key}, [on_hardware]),
            ({"model": "smollm2-135m"}, [of_workload]),
            ({"outcome": "out_of_memory"}, [on_hardware]),
            ({"outcome": "fits", "hardware_key": faster.key}, []),
            (context(first), [first]),
        ]
        for condition, expected in conditions:
            assert store.trials(**condition) == expected  # type: ignore[arg-type]
            assert store.count(**condition) == len(expected)

    def test_refuses_a_condition_that_there_is_not(self, store: Store) -> None:
        store.add(a_trial())
        for asked in (store.count, store.trials):
            with pytest.raises(TypeError, match="unknown condition 'hardware': did you mean hardware_key"):
                asked(hardware="h100-80g")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="unknown condition 'search_id'"):
            store.count(search_id="one")  # type: ignore[call-arg]

    def test_pages_in_either_order(self, store: Store) -> None:
        added = [store.add(a_trial()) for _ in range(5)]
        assert store.trials(limit=2) == added[:2]
        assert store.trials(newest_first=True, limit=2) == [added[4], added[3]]
        assert store.trials(newest_first=True, limit=2, before=added[4].trial_id) == [added[3], added[2]]
        assert store.trials(limit=0) == []

    def test_groups_attempts_by_config(self, store: Store) -> None:
        one = a_trial()
        other = a_trial(config=one.config.replace(micro_batch=2))
        elsewhere = a_trial(workload=replace(one.workload, seed=1))
        tight = replace(one, memory_limit_bytes=2**30, outcome=OutOfMemory(reason=""))
        stored = [store.add(trial) for trial in (one, other, elsewhere, one, tight)]
        attempts = store.attempts(**context(one))
        assert attempts == {one.config: [stored[0], stored[3], stored[4]], other.config: [stored[1]]}
        assert [trial.trial_id for trial in attempts[one.config]] == [
            stored[0].trial_id,
            stored[3].trial_id,
            stored[4].trial_id,
        ]

    def test_lists_what_was_used_newest_first(self, store: Store) -> None:
        one = a_trial()
        other = replace(
            one,
            hardware=replace(one.hardware, name="a100-80g"),
            stack=replace(one.stack, torch="2.11.0"),
            workload=replace(one.workload, seq_len=512),
        )
        mixed = replace(one, stack=other.stack)
        for trial in (one, other, mixed):
            store.add(trial)
        assert store.hardware() == [one.hardware, other.hardware]
        assert store.workloads() == [one.workload, other.workload]
        assert store.workloads(model="no-such-model") == []
        assert store.workloads(hardware_key=other.hardware.key) == [other.workload]
        assert store.workloads(model=one.workload.model, hardware_key=one.hardware.key) == [one.workload]
        assert store.stacks(one.hardware.key, one.workload.key) == [other.stack, one.stack]
        assert store.stacks(other.hardware.key, one.workload.key) == []


class TestEstimates:
    """Estimates are kept by key until somebody empties the table."""

    def test_gives_back_what_was_kept(self, store: Store) -> None:
        first = {
            "config": {"method": "lora", "compile": False},
            "step_seconds": 0.1 + 0.2,
            "mfu": None,
            "size": 2**53 + 1,
        }
        store.estimates.keep({"a": first, "b": {}})
        assert store.estimates.find(["b", "a", "c", "a"]) == {"a": first, "b": {}}
        assert store.estimates.find([]) == {}

    def test_the_latest_stays(self, store: Store) -> None:
        store.estimates.keep({"a": {"device_bytes": 1}})
        store.estimates.keep({"a": {"device_bytes": 2}, "b": {"device_bytes": 3}})
        store.estimates.keep({})
        assert store.estimates.find(iter(["a", "b"])) == {"a": {"device_bytes": 2}, "b": {"device_bytes": 3}}

    def test_refuses_what_json_has_not(self, store: Store) -> None:
        with pytest.raises(ValueError):
            store.estimates.keep({"a": {}, "b": {"step_seconds": math.inf}})
        assert store.estimates.find(["a", "b"]) == {}

    def test_threads_may_keep_the_same(self, store: Store) -> None:
        same = {f"{number:064x}": {"device_bytes": number} for number in range(500)}
        threads = [
            threading.Thread(target=store.estimates.keep, args=[dict(list(same.items())[::step])])
            for step in (1, -1, 2, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.estimates.find(same) == same

    def test_a_whole_lattice_is_looked_up_at_once(self, store: Store) -> None:
        parts = {f"part-{number}": 10**9 + number for number in range(12)}
        many = {
            f"{number:064x}": {"device_bytes": number, "breakdown": parts, "phases": parts} for number in range(6000)
        }
        store.estimates.keep(many)
        statements: list[str] = []
        event.listen(store._database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
        assert store.estimates.find(many) == many
        assert len([statement for statement in statements if "FROM estimates" in statement]) <= 6


class TestProbes:
    """A device's rates are kept by hardware, stack and shapes."""

    def test_gives_back_the_newest_of_each_device_and_shapes(self, store: Store) -> None:
        first = a_probe()
        keys = {"hardware_key": first.hardware.key, "stack_key": first.stack.key}
        assert store.probes.find(**keys) is None
        store.probes.keep(first)
        assert store.probes.find(**keys, shapes_key=first.shapes_key) == first
        again = replace(first, seconds=8.5, recorded_at="2026-01-02T00:00:00+00:00")
        other = replace(first, shapes_key="1" * 16, recorded_at="2026-01-01T12:00:00+00:00")
        store.probes.keep(again)
        store.probes.keep(other)
        assert store.probes.find(**keys, shapes_key=first.shapes_key) == again
        assert store.probes.find(**keys, shapes_key=other.shapes_key) == other
        assert store.probes.find(**keys) == again, "the latest, whatever the shapes"

    def test_is_of_no_other_hardware_and_stack(self, store: Store) -> None:
        kept = a_probe()
        store.probes.keep(kept)
        newer = replace(kept.stack, torch="2.99.0")
        assert store.probes.find(hardware_key=kept.hardware.key, stack_key=newer.key) is None
        slower = replace(kept.hardware, cores=1)
        assert store.probes.find(hardware_key=slower.key, stack_key=kept.stack.key) is None

    def test_a_link_is_found_by_its_name_alone(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        device = a_probe()
        hardware, stack = device.hardware, device.stack
        keys = {"hardware_key": hardware.key, "stack_key": stack.key}
        links = [ProbePart(name=f"between {n} ranks", seconds=1.5, figures={"reduction": 0.1 + n}) for n in (2, 4)]
        for link in links:
            store.probes.keep_link(replace(link, seconds=9.0), hardware, stack)
            store.probes.keep_link(link, hardware, stack)
        assert [store.probes.find_link(link.name, **keys) for link in links] == links
        assert store.probes.find(**keys) is None, "it is of no model's shapes"
        store.probes.keep(device)
        assert store.probes.find(**keys) == device
        newer = replace(stack, torch="2.99.0")
        assert store.probes.find_link(links[0].name, hardware_key=hardware.key, stack_key=newer.key) is None
        monkeypatch.setattr(device_probe, "PROBE_VERSION", -1)
        assert store.probes.find_link(links[0].name, **keys) is None

    def test_refuses_what_json_has_not(self, store: Store) -> None:
        with pytest.raises(ValueError):
            store.probes.keep(a_probe(seconds=math.nan))


class TestSearches:
    """Searches are kept beside their trials, and changed only by whoever has their lease."""

    def test_runs_and_ends(self, store: Store) -> None:
        trial = a_trial()
        lease = begin(store, trial, space="one-gpu", allow=None)
        running = store.search("s1")
        assert running is not None
        assert (running.state, running.result, running.ended_at, running.held) == ("running", None, None, True)
        assert (running.hardware, running.stack, running.workload) == (trial.hardware, trial.stack, trial.workload)
        assert running.request == {"space": "one-gpu", "allow": None}
        for _ in range(2):  # the answer to the first commit may have been lost
            store.queue.end(lease, "succeeded", {"trials": 3})
        done = store.search("s1")
        assert done is not None
        ended = {"state": "succeeded", "result": {"trials": 3}, "ended_at": done.ended_at, "held": False}
        assert done == replace(running, **ended)
        assert done.ended_at is not None
        assert done.ended_at >= done.started_at
        assert store.searches() == [done]
        assert done.to_json()["state"] == "succeeded"
        assert [e.kind for e in store.queue.events("s1")] == ["running", "succeeded"]

    def test_goes_on_after_an_interruption(self, store: Store) -> None:
        trial = a_trial()
        lease = begin(store, trial, time_budget=600.0)
        store.queue.renew(lease, 12.5)
        store.queue.end(lease, "cancelled", None)
        first = store.search("s1")
        again = begin(store, trial, time_budget=60.0)
        assert first is not None and first.spent_seconds == 12.5
        assert (again.epoch, again.spent_seconds) == (2, 0.0)  # who asks anew has a budget of their own
        resumed = store.search("s1")
        changed = {"state": "running", "held": True, "lease_epoch": 2, "spent_seconds": 0.0}
        assert resumed == replace(first, ended_at=None, request={"time_budget": 60.0}, **changed)

    def test_knows_the_trials_of_a_search(self, store: Store) -> None:
        trial = a_trial()
        lease = begin(store, trial)
        store.add(trial)
        ours = [store.add(trial, lease=lease, uid="u1") for _ in range(2)]
        assert store.trials(search_id="s1") == [ours[0]]
        assert store.trials(search_id="s1")[0].trial_id == ours[0].trial_id == ours[1].trial_id
        events = store.queue.events("s1", after=1)
        assert [(e.seq, e.kind, e.body["trial_id"]) for e in events] == [(2, "trial", ours[0].trial_id)]

    def test_refuses_searches_that_do_not_exist(self, store: Store) -> None:
        lease = begin(store, a_trial())
        nobody = replace(lease, search_id="s9")
        with pytest.raises(LeaseLost, match="search s9"):
            store.add(a_trial(), lease=nobody)
        with pytest.raises(LeaseLost, match="search s9"):
            store.queue.end(nobody, "succeeded", {})
        with pytest.raises(UsageError, match="no search 's9'"):
            store.queue.cancel("s9")
        assert store.search("s9") is None
        assert store.count() == 0

    def test_refuses_what_is_no_state_and_no_json(self, store: Store) -> None:
        lease = begin(store, a_trial())
        with pytest.raises(UsageError, match="ending"):
            store.queue.end(lease, "finished", {})
        with pytest.raises(ValueError):
            store.queue.end(lease, "succeeded", {"speed": math.nan})
        with pytest.raises(ValueError):
            begin(store, a_trial(), "s2", time_budget=math.inf)
        with pytest.raises(ValueError):
            begin(store, a_trial(), "s\0")

    def test_lists_the_newest_first(self, store: Store) -> None:
        for name in ("b", "a", "c"):
            begin(store, a_trial(), name)
        assert [search.search_id for search in store.searches()] == ["c", "a", "b"]
