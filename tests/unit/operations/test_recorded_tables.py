"""A space measured exhaustively: what is in the file, and how a recording goes on."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from unit.operations.made_trials import OPTIONS, crashed
from unit.operations.made_world import World
from unit.operations.test_probing import made_probe
from unit.search.made_truth import FakePool
from unit.search.test_doubted_trials import BUSY, CLEAN

from autofit.core.device.state import DeviceState
from autofit.core.errors import EnvironmentLacks, UsageError
from autofit.core.outcome import DEADLINE_SECONDS, Fits, OutOfMemory
from autofit.core.units import GIB
from autofit.operations import SearchRequest, read_table, record
from autofit.operations.recording import record as recording
from autofit.planning import plan as planning
from autofit.planning.plan import resolve
from autofit.trial.request import TrialRequest

REQUEST = SearchRequest(workload=OPTIONS, device="cpu", memory_limit_bytes=2 * GIB, space="smoke")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Workers without a device."""
    made = World()
    monkeypatch.setattr(recording, "open_pool", made.open_pool)
    monkeypatch.setattr(recording, "undisturbed_probe", lambda model, *site: made_probe())
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where the table goes; the folder is made."""
    return tmp_path / "tables" / "table.jsonl"


def test_the_file_has_a_header_and_every_config_once(world: World, file: Path) -> None:
    result = record(REQUEST, file)
    header, *lines = map(json.loads, file.read_text().splitlines())
    assert set(header) == {
        *("schema", "hardware", "stack", "workload", "space", "memory_limit_bytes", "recorded_at", "probe")
    }
    assert header["schema"] == 1 and header["memory_limit_bytes"] == 2 * GIB
    assert result.recorded == result.configs == result.run == len(lines) > 1
    assert len({json.dumps(line["config"], sort_keys=True) for line in lines}) == len(lines)
    for line in lines:
        assert {"config", "outcome", "seconds"} <= set(line)
        assert ("measurement" in line) == (line["outcome"] == "fits") != ("reason" in line)


def test_what_is_too_large_is_recorded_as_such(world: World, file: Path) -> None:
    request = replace(REQUEST, space="cpu", memory_limit_bytes=1 * GIB, max_trials=40)
    result = record(request, file)
    trials = read_table(file).trials
    assert {type(t.outcome) for t in trials} == {Fits, OutOfMemory}
    assert result.outcomes["out_of_memory"] == sum(isinstance(t.outcome, OutOfMemory) for t in trials)
    assert all(t.memory_limit_bytes == GIB and t.workload.model == OPTIONS.model for t in trials)


def test_a_cluster_says_itself_what_it_has_and_can_run(
    world: World, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_here(device: str) -> None:
        raise EnvironmentLacks("this machine has no device", remedy="none")

    def opened(request: SearchRequest) -> FakePool:
        pool = world.open_pool(replace(request, ray_address=None))
        monkeypatch.setattr(planning, "detect", not_here)
        return pool

    monkeypatch.setattr(recording, "open_pool", opened)
    result = record(replace(REQUEST, ray_address="auto"), file)
    assert result.run == result.configs > 1
    (pool,) = world.pools
    assert pool.closed >= 1
    assert json.loads(file.read_text().splitlines()[0])["hardware"] == pool.site()[0].to_json()


def test_a_recording_goes_on_where_it_stopped(world: World, file: Path) -> None:
    request = replace(REQUEST, space="cpu")
    record(replace(request, max_trials=3), file)
    first = file.read_text()
    file.write_text(first[:-20])  # killed while it wrote the last line
    result = record(replace(request, max_trials=5), file)
    assert (result.recorded, result.run) == (5, 3)
    whole = file.read_text()
    assert whole.splitlines()[:3] == first.splitlines()[:3]
    assert len(read_table(file).trials) == 5
    assert record(replace(request, max_trials=5), file).run == 0 and file.read_text() == whole


def test_a_recording_killed_while_it_wrote_its_header_begins_anew(world: World, file: Path) -> None:
    request = replace(REQUEST, space="cpu", max_trials=2)
    record(request, file)
    header = file.read_text().splitlines()[0]
    for torn in (header[:40], header[:-5]):
        file.write_text(torn)
        assert record(request, file).run == 2 and len(read_table(file).trials) == 2
    file.write_text('{"schema": 1, "of": "another program"}')
    with pytest.raises(UsageError, match="row 1: not the first line of `autofit bench record`"):
        record(request, file)
    assert file.read_text() == '{"schema": 1, "of": "another program"}'


def test_a_config_with_two_outcomes_is_refused_by_its_row(world: World, file: Path) -> None:
    request = replace(REQUEST, space="cpu", max_trials=3)
    record(request, file)
    lines = file.read_text().splitlines()
    again = {"config": json.loads(lines[2])["config"], "outcome": "out_of_memory", "reason": "", "seconds": 1.0}
    file.write_text("\n".join([*lines, json.dumps(again)]) + "\n")
    for read in (read_table, partial(read_table, whole=True), lambda file: record(request, file)):
        with pytest.raises(UsageError, match=r"table\.jsonl, row 5: repeats the config of row 3: .*method"):
            read(file)


@pytest.mark.parametrize(
    "row",
    [
        "[1]",
        '{"config": 3, "outcome": "out_of_memory", "reason": "", "seconds": 1.0}',
        '{"config": {"method": "full"}, "outcome": "eaten", "seconds": 1.0}',
    ],
)
def test_a_row_that_is_no_trials_is_refused_before_anything_is_added(world: World, file: Path, row: str) -> None:
    request = replace(REQUEST, space="cpu", max_trials=2)
    record(request, file)
    text = file.read_text() + row + "\n"
    file.write_text(text)
    for read in (read_table, lambda file: record(replace(request, max_trials=5), file)):
        with pytest.raises(UsageError, match=r"table\.jsonl, row 4: "):
            read(file)
    assert file.read_text() == text


def test_the_order_is_shuffled_by_the_seed(world: World, tmp_path: Path) -> None:
    orders = []
    for number, seed in enumerate((0, 0, 1)):
        request = replace(REQUEST, space="cpu", max_trials=6, workload=replace(OPTIONS, seed=seed))
        record(request, tmp_path / f"{number}.jsonl")
        orders.append([t.config for t in read_table(tmp_path / f"{number}.jsonl").trials])
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory_limit_bytes": 3 * GIB}, "memory limit"),
        ({"space": "cpu"}, "space"),
        ({"workload": replace(OPTIONS, seq_len=64)}, "workload"),
    ],
)
def test_another_recordings_file_is_refused(world: World, file: Path, change: dict[str, object], said: str) -> None:
    record(REQUEST, file)
    before = file.read_text()
    with pytest.raises(UsageError, match=f"another {said}.*--out"):
        record(replace(REQUEST, **change), file)
    assert file.read_text() == before


@pytest.mark.parametrize("text", ["[1]\n", "no json\n", "a list\nwithout an end", '{"schema": 7}\n'])
def test_what_is_no_table_is_left_alone(world: World, tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.txt").write_text(text)
    for read in (read_table, partial(record, REQUEST)):
        with pytest.raises(UsageError, match=r"notes\.txt, row 1: (not|schema)"):
            read(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == text


def test_no_two_recordings_write_one_file(world: World, file: Path) -> None:
    def recorded_by_another() -> None:
        with pytest.raises(UsageError, match="being recorded by another process"):
            record(REQUEST, file)

    world.on_wait = recorded_by_another
    result = record(REQUEST, file)
    assert result.recorded == result.configs == len(read_table(file).trials)


def test_a_file_that_cannot_be_written_is_named(world: World, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        record(REQUEST, tmp_path)


def test_what_the_machinery_fails_is_not_recorded(world: World, file: Path) -> None:
    failures = iter(range(2))
    world.special = lambda request: replace(crashed(), transient=True) if next(failures, None) is not None else None
    result = record(REQUEST, file)
    assert result.recorded == result.configs - 2
    assert record(REQUEST, file).recorded == result.configs


def test_no_value_is_left_out_of_some_configs_by_chance(world: World, file: Path) -> None:
    request = replace(REQUEST, space="cpu", max_trials=12)
    record(request, file, covering=True)
    chosen = [trial.config for trial in read_table(file).trials]
    everything = {value for config in resolve(request).lattice.configs for value in config.items}
    assert len(set(chosen)) == 12
    for part in (chosen[:4], chosen[4:8]):  # no axis has more values than this space has checkpointings: 4
        assert {value for config in part for value in config.items} == everything
    assert record(request, file, covering=True).run == 0


def test_a_recording_that_is_out_of_time_goes_on_in_the_next_call(
    world: World, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(recording, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    requests: list[TrialRequest] = []

    def seen(request: TrialRequest) -> None:
        requests.append(request)

    world.special = seen
    request = replace(REQUEST, space="cpu", max_trials=5)
    first = record(request, file, time_budget_seconds=100.0 / 3)
    assert (first.recorded, first.run, first.left) == (2, 2, 3), "one look at the clock before, and one for each trial"
    assert {request.deadline_seconds for request in requests} == {90.0}
    second = record(request, file)
    assert (second.recorded, second.run, second.left) == (5, 3, 0)
    assert [request.deadline_seconds for request in requests[2:]] == [DEADLINE_SECONDS] * 3
    assert len(read_table(file, whole=True).trials) == 5


def test_trials_that_take_too_long_are_cut_if_that_is_asked(world: World, file: Path) -> None:
    requests: list[TrialRequest] = []
    world.special = lambda request: requests.append(request)
    record(REQUEST, file, trial_seconds=60.0)
    fitted = [
        (t.config["method"], t.outcome.measurement.tokens_per_second)
        for t in read_table(file).trials
        if isinstance(t.outcome, Fits)
    ]
    assert len(fitted) == len(requests) > 1 and len({method for method, _ in fitted}) > 1
    assert {request.allowance_seconds for request in requests} == {60.0}
    # Each is compared with the fastest of its method before it, as if that were as heavy as the limit allows.
    for place, request in enumerate(requests):
        before = sorted(speed for method, speed in fitted[:place] if method == request.config["method"])
        assert [rival.tokens_per_second for rival in request.rivals] == before[-1:]
        assert all(rival.device_bytes == request.memory_limit_bytes for rival in request.rivals)
    again = file.with_name("whole.jsonl")
    requests.clear()
    record(REQUEST, again)
    assert {(request.allowance_seconds, request.rivals) for request in requests} == {(None, ())}


def test_a_recording_goes_on_on_another_machine_with_the_same_device(
    world: World, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = replace(REQUEST, space="cpu", max_trials=3)
    record(replace(request, max_trials=2), file)
    header, *lines = file.read_text().splitlines()
    body = json.loads(header)
    body["hardware"]["host_memory_bytes"] -= 4096
    file.write_text("\n".join([json.dumps(body), *lines]) + "\n")
    assert record(request, file).run == 1
    for changed in ({**body["hardware"], "device_name": "another"}, {"name": "another"}):
        file.write_text("\n".join([json.dumps({**body, "hardware": changed}), *lines]) + "\n")
        with pytest.raises(UsageError, match=r"another hardware|row 1: not a header"):
            record(request, file)


def test_a_trial_that_met_a_busy_device_is_measured_again_and_keeps_what_it_met(
    world: World, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = itertools.chain([BUSY, CLEAN, BUSY, BUSY], itertools.repeat(CLEAN))
    wait = FakePool.wait
    monkeypatch.setattr(
        FakePool,
        "wait",
        lambda pool, timeout: [(r, replace(a, device_state=next(met))) for r, a in wait(pool, timeout)],
    )
    requests: list[TrialRequest] = []
    world.special = lambda request: requests.append(request)
    result = record(REQUEST, file)
    assert len(requests) == result.run + 2 and requests[0] == requests[1] and requests[2] == requests[3]
    _, *lines = map(json.loads, file.read_text().splitlines())
    assert [DeviceState.from_json(line["device_state"]) for line in lines[:3]] == [CLEAN, BUSY, CLEAN]
    assert len(read_table(file).trials) == result.recorded == len(lines)


def test_a_broken_machine_ends_the_recording(world: World, file: Path) -> None:
    world.special = lambda request: replace(crashed(), transient=True)
    with pytest.raises(EnvironmentLacks, match="3 trials in a row"):
        record(REQUEST, file)
