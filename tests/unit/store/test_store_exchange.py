"""Trials carried from one store to another as lines, and lines that are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from databases import a_database
from leases import begin
from unit.store.conftest import OUTCOMES, PREDICTION, a_trial, context, measured

from autofit import __version__
from autofit.core.errors import UsageError
from autofit.core.outcome import Fits, Trial
from autofit.store import ImportReport, Store, export_lines, import_lines, read_lines

HEADER = json.dumps({"schema": 1, "autofit": __version__}) + "\n"


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    """A second store."""
    with Store.open(str(tmp_path / "other.db")) as store:
        yield store


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """For tests that add nothing to it: one of each kind, for all of them."""
    with ExitStack() as opened:
        if request.param == "sqlite":
            url = str(tmp_path_factory.mktemp("empty") / "store.db")
        else:
            url = opened.enter_context(a_database(request.getfixturevalue("postgresql_server")))
        yield opened.enter_context(Store.open(url))


def test_carries_every_trial_and_its_attempts(store: Store, other: Store) -> None:
    base = a_trial()
    lease = begin(store, base)
    store.add(base, lease=lease)
    for outcome in OUTCOMES:
        store.add(a_trial(outcome=outcome))
    store.add(a_trial(workload=replace(base.workload, seq_len=512, trainer="trl", lengths=(3, 40, 512))))
    assert isinstance(base.outcome, Fits)
    silent = replace(base.outcome, measurement=replace(base.outcome.measurement, losses=()))
    store.add(a_trial(workload=replace(base.workload, program="python train.py {micro_batch}"), outcome=silent))
    lines = list(export_lines(store))
    assert json.loads(lines[0]) == {"schema": 1, "autofit": __version__}
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    assert all("trial_id" not in json.loads(line) for line in lines)
    assert import_lines(other, iter(lines)) == ImportReport(added=8, repeated=0)
    assert other.trials() == store.trials()
    assert list(export_lines(other)) == lines
    assert import_lines(other, lines) == ImportReport(added=0, repeated=8)
    assert import_lines(store, lines) == ImportReport(added=0, repeated=8)
    assert other.attempts(**context(base)) == {base.config: store.trials(workload_key=base.workload.key)}


def test_each_context_says_its_own_hardware_after_an_import(store: Store, other: Store) -> None:
    base = a_trial()
    cards = [replace(base.hardware, name=name, memory_bytes=size * 2**30) for name, size in (("a", 80), ("b", 24))]
    for card in cards:
        store.add(a_trial(hardware=card))
    import_lines(other, list(export_lines(store)))
    for card in cards:
        found = other.frontier(**context(a_trial(hardware=card)))
        assert found is not None and found.hardware == card


def test_carries_predictions(store: Store, other: Store) -> None:
    trials = [a_trial(prediction=PREDICTION), a_trial()]
    for trial in trials:
        store.add(trial)
    lines = list(export_lines(store))
    assert ["prediction" in json.loads(line) for line in lines[1:]] == [True, False]
    assert list(read_lines(lines)) == trials
    assert import_lines(other, lines) == ImportReport(added=2, repeated=0)
    assert other.trials() == trials


def test_what_was_predicted_does_not_make_another_trial(store: Store) -> None:
    trial = a_trial(prediction=PREDICTION)
    null = {**trial.to_json(), "prediction": None}
    assert import_lines(store, [HEADER, json.dumps(trial.to_json()), json.dumps(null)]) == ImportReport(
        added=1, repeated=1
    )
    assert store.trials() == [trial]


def test_reads_predictions_of_before_reserved_memory_was_kept(store: Store) -> None:
    trial = a_trial(prediction=PREDICTION)
    body = trial.to_json()
    del body["prediction"]["peak_reserved_bytes"]
    import_lines(store, [HEADER, json.dumps(body)])
    assert store.trials() == [replace(trial, prediction=replace(PREDICTION, peak_reserved_bytes=None))]


def test_carries_gradients_that_overflowed(store: Store, other: Store) -> None:
    outcome = Fits(measurement=replace(measured(1000.0).measurement, gradient_norms=(None, None, 2.5)))
    kept = store.add(a_trial(outcome=outcome))
    assert kept.outcome == outcome
    lines = list(export_lines(store))
    assert "[null,null,2.5]" in lines[1]
    assert import_lines(other, lines).added == 1
    assert other.trials() == store.trials() == [kept]


def test_carries_more_trials_than_one_chunk(store: Store, other: Store) -> None:
    trials = [a_trial(config=a_trial().config.replace(micro_batch=n % 700 + 1)) for n in range(1300)]
    assert other.add_new(trials) == (1300, 0)
    assert import_lines(store, export_lines(other)) == ImportReport(added=1300, repeated=0)
    assert list(store.stream()) == trials
    assert store.add_new(trials) == (0, 1300)


def test_others_write_while_much_is_imported(store: Store) -> None:
    trials = [a_trial(config=a_trial().config.replace(micro_batch=n % 700 + 1)) for n in range(1300)]

    def read() -> Iterator[Trial]:
        yield from trials
        store.add(a_trial())
        raise UsageError("a bad line")

    with pytest.raises(UsageError, match="a bad line"):
        store.add_new(read())
    assert store.count() == 1001
    assert store.add_new(trials) == (300, 1000)


def test_adds_what_is_new_beside_what_is_not(store: Store) -> None:
    there, new = a_trial(), a_trial()
    store.add(there)
    same_time = replace(there, outcome=OUTCOMES[0])
    lines = [HEADER, "\n", *(json.dumps(trial.to_json()) for trial in (there, new, new, same_time))]
    assert import_lines(store, lines) == ImportReport(added=2, repeated=2)
    assert store.trials() == [there, new, same_time]
    after = store.add(there)
    assert store.trials()[-1].trial_id == after.trial_id


def test_an_empty_store_is_carried_too(store: Store, other: Store) -> None:
    assert import_lines(other, export_lines(store)) == ImportReport(added=0, repeated=0)


def changed(body: dict[str, Any], path: str, value: object) -> str:
    """The line of `body` with the value at `path` replaced, or removed where it is `...`."""
    body = json.loads(json.dumps(body))
    *outer, last = path.split(".")
    inner = body
    for name in outer:
        inner = inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return json.dumps(body)


BAD: list[tuple[str, object, str]] = [
    ("outcome", "fit", "unknown outcome 'fit': did you mean fits"),
    ("outcome", ..., "unknown outcome None"),
    ("config", ..., "config is missing"),
    ("config", [], "config: "),
    ("config.rank", 16.5, r"config.rank is 16.5"),
    ("config.rank", None, r"config.rank is None"),
    ("config.method", "prefix", "method is 'prefix'"),
    ("hardware.kind", ..., "hardware.kind: field required"),
    ("hardware.speed", 3, "Hardware has no field 'speed'"),
    ("stack.mamba", "2.2", "Stack has no field 'mamba'"),
    ("workload.seq_len", "2048", "workload.seq_len: input should be a valid integer"),
    ("workload.seq_len", 0, "seq-len is 0"),
    ("stack.torch", 2.13, "stack.torch: input should be a valid string"),
    ("measurement", 3, "measurement: input should be an object"),
    ("measurement.losses", "low", "measurement.losses: "),
    ("measurement.losses", [], "measurement.losses is empty"),
    ("measurement.phase_peaks.forward", "much", r"measurement.phase_peaks.forward: "),
    ("measurement.tokens_per_second", float("nan"), "NaN is not JSON"),
    ("measurement.tokens_per_second", float("inf"), "Infinity is not JSON"),
    ("measurement.step_seconds.p95", True, "measurement.step_seconds.p95: "),
    ("measurement.watts", 300, "Measurement has no field 'watts'"),
    ("memory_limit_bytes", 1.5, "memory_limit_bytes: "),
    ("memory_limit_bytes", 10**30, "beyond 64 bits"),
    ("seconds", "12", "seconds: input should be a valid number"),
    ("recorded_at", "today", "isoformat"),
    ("recorded_at", 12, "recorded_at: "),
    ("prediction.device_bytes", "much", "prediction.device_bytes: input should be a valid integer"),
    ("prediction.step_seconds", ..., "prediction.step_seconds: field required"),
    ("prediction.watts", 300, "Prediction has no field 'watts'"),
    ("prediction", 3, "prediction: "),
    ("note", "mine", "'note' is not a field of a trial that ends with fits"),
]


@pytest.mark.parametrize(("path", "value", "words"), BAD, ids=lambda part: str(part)[:30])
def test_refuses_a_bad_line_and_all_others_with_it(empty: Store, path: str, value: object, words: str) -> None:
    body = a_trial(prediction=PREDICTION).to_json()
    lines = [HEADER, "", json.dumps(body), changed(body, path, value)]
    with pytest.raises(UsageError, match=f"line 4 cannot be imported: .*{words}") as refused:
        import_lines(empty, lines)
    assert "\n" not in str(refused.value)
    assert empty.count() == 0
    assert empty.workloads() == []


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "nothing to import"),
        (["\n"], "nothing to import"),
        (["{}"], 'line 1 .*first line must be {"schema": 1'),
        (['{"schema": 2}'], "line 1 .*its schema is 2"),
        (["[1]"], "line 1 .*not a JSON object"),
        (["trials"], "line 1 .*Expecting value"),
        ([HEADER, "[]"], "line 2 .*not a JSON object"),
        ([HEADER, '{"outcome": "fits"'], "line 2 .*delimiter"),
        ([HEADER, '{"outcome": [1]}'], "line 2 .*unknown outcome"),
        (["[" * 100_000], "line 1 .*nested too deeply"),
    ],
)
def test_refuses_what_is_no_export(empty: Store, lines: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        import_lines(empty, lines)
    assert empty.count() == 0


def test_numbers_become_the_type_they_are_declared_with(store: Store) -> None:
    trial = a_trial(outcome=measured(1000.0))
    text = changed(changed_body(trial, "workload.lora_dropout", 0), "measurement.tokens_per_second", 1000)
    assert import_lines(store, [HEADER, text]).added == 1
    imported = store.trials()[0]
    assert isinstance(imported.workload.lora_dropout, float)
    assert isinstance(imported.outcome, Fits)
    assert isinstance(imported.outcome.measurement.tokens_per_second, float)
    assert store.workloads()[0].key == replace(trial.workload, lora_dropout=0.0).key


def changed_body(trial: Trial, path: str, value: object) -> dict[str, Any]:
    """As `changed`, still a JSON object."""
    body: dict[str, Any] = json.loads(changed(trial.to_json(), path, value))
    return body
