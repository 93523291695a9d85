"""A store that fails, through the command line: one clear line, exit code 4, and nothing that was measured is lost."""

from __future__ import annotations

import io
import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from unit.cli.conftest import Autofit, Done
from unit.operations.made_trials import MADE, out_of_memory
from unit.operations.made_world import World
from unit.store.test_store_failures import locked, sql

from autofit.core.outcome import Fits, Trial
from autofit.core.units import GIB
from autofit.store import Store, export_lines
from autofit.store import trial_log as keeping
from autofit.store.database.schema import REVISIONS
from autofit.store.searches.queue import SearchQueue
from tests.made_stores import put

ASKED = ("--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "4")
SEARCH = ("search", *ASKED, "--device", "cpu", "--memory-limit", "2GiB", "--max-trials", "12")
READING = {
    "frontier": ("frontier", *ASKED),
    "recommend": ("recommend", *ASKED),
    "export": ("db", "export", "-"),
}
WRITING = {"search": SEARCH, "import": ("db", "import", "trials.jsonl")}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that tries a failing store again for a moment only."""
    monkeypatch.setattr(keeping, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(keeping, "PAUSE_SECONDS", 0.1)


def check(done: Done, *parts: str) -> str:
    """Exit code 4, nothing on standard output, and the last line of standard error, which holds `parts`."""
    assert (done.code, done.out) == (4, ""), done.err
    assert "Traceback" not in done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("autofit: the store") or last.startswith("autofit: there is no store"), last
    for part in parts:
        assert part in last, last
    return last


def trials_file(folder: Path) -> None:
    """What `db import` reads."""
    put(folder / "exported.db", filled=True)
    with Store.open(str(folder / "exported.db")) as store:
        (folder / "trials.jsonl").write_text("".join(export_lines(store)))


@pytest.mark.parametrize("command", [*READING, "serve", "check"])
def test_a_store_that_is_not_there_is_not_made_by_reading(autofit: Autofit, store_file: Path, command: str) -> None:
    words = {**READING, "serve": ("serve", "--port", "0", "--no-runner"), "check": ("db", "check")}[command]
    check(autofit(*words), f"there is no store at {store_file}", "autofit search")
    assert not store_file.exists()


@pytest.mark.parametrize("command", [*READING, *WRITING])
class TestEveryCommand:
    """What stands in the way of each command, with a real SQLite file."""

    def test_damaged(self, autofit: Autofit, filled: Path, world: World, command: str) -> None:
        trials_file(filled.parent)
        for file in filled.parent.glob("store.db*"):
            file.write_bytes(b"no database" * 1000)
        check(autofit(*(READING | WRITING)[command]), "damaged", "db export")
        assert world.pools == []

    def test_newer_schema(self, autofit: Autofit, filled: Path, world: World, command: str) -> None:
        trials_file(filled.parent)
        sql(f"sqlite:///{filled}", "UPDATE alembic_version SET version_num = '9999'")
        check(autofit(*(READING | WRITING)[command]), "schema 9999, newer", "use the version that wrote it")
        sql(f"sqlite:///{filled}", f"UPDATE alembic_version SET version_num = '{REVISIONS[-1]}'")
        with Store.open(str(filled)) as store:
            assert store.count() == len(MADE)

    def test_unreachable(self, autofit: Autofit, world: World, tmp_path: Path, command: str) -> None:
        trials_file(tmp_path)
        url = "postgresql://me:secret@127.0.0.1:1/autofit"
        last = check(autofit(*(READING | WRITING)[command], "--store", url), "cannot be reached", "server runs")
        assert "secret" not in last


@pytest.mark.parametrize("command", WRITING)
def test_read_only(autofit: Autofit, filled: Path, world: World, command: str) -> None:
    trials_file(filled.parent)
    sql(f"sqlite:///{filled}", "DELETE FROM trials")
    check(autofit(*WRITING[command], "--store", f"sqlite:///file:{filled}?mode=ro&uri=true"), "read-only", "writable")


@pytest.mark.parametrize("command", WRITING)
def test_locked(autofit: Autofit, filled: Path, world: World, command: str) -> None:
    trials_file(filled.parent)
    with locked(filled):
        check(
            autofit(*WRITING[command], "--store", f"sqlite:///{filled}?timeout=0.2"),
            "locked by another process",
            "again",
        )
    with Store.open(str(filled)) as store:
        assert store.count() == len(MADE)


def test_check_ends_with_4_unless_all_is_sound(autofit: Autofit, filled: Path) -> None:
    assert autofit("db", "check").code == 0
    sql(f"sqlite:///{filled}", "DELETE FROM workloads")
    done = autofit("db", "check", "--json")
    assert (done.code, done.err) == (4, "")
    assert done.document["sound"] is False
    assert "row of workloads that is lost" in done.document["problems"][0]
    assert autofit("db", "check", "--schema").out == f"the store is at schema {done.document['newest']}\n"
    assert autofit("db", "check", "--schema", "--json").document == {"revision": done.document["newest"]}


def contradict(store_file: Path) -> tuple[Trial, Trial]:
    """Makes the fastest stored config run out of memory where it has fitted; the trials of both outcomes."""
    with Store.open(str(store_file)) as store:
        fitted = max((t for t in store.trials(outcome="fits")), key=speed)
        return fitted, store.add(replace(fitted, outcome=out_of_memory(), recorded_at="2026-04-01T00:00:00+00:00"))


def speed(trial: Trial) -> float:
    """Tokens per second of a trial that fits."""
    assert isinstance(trial.outcome, Fits)
    return trial.outcome.measurement.tokens_per_second


def test_contradictory_results_are_listed_and_said(autofit: Autofit, filled: Path) -> None:
    before = autofit("recommend", *ASKED)
    fitted, failed = contradict(filled)
    listed = autofit("db", "check")
    assert (listed.code, listed.err) == (0, "")
    line = next(line for line in listed.out.splitlines() if line.startswith(str(fitted.config)))
    assert f"40.00 GiB ({fitted.trial_id})" in line and f"80.00 GiB ({failed.trial_id})" in line
    (contradiction,) = autofit("db", "check", "--json").document["contradictions"]
    assert contradiction["config"] == fitted.config.to_json()
    assert contradiction["fits"] == [
        {"trial_id": fitted.trial_id, "device_bytes": 40 * GIB, "memory_limit_bytes": fitted.memory_limit_bytes}
    ]
    assert contradiction["out_of_memory"] == [
        {"trial_id": failed.trial_id, "memory_limit_bytes": failed.memory_limit_bytes}
    ]
    for command in (("recommend", *ASKED), ("frontier", *ASKED), ("frontier", *ASKED, "--json")):
        done = autofit(*command)
        assert done.code == 0
        (warning,) = done.err.splitlines()
        assert warning.startswith("autofit: 1 config has contradictory results") and "count" in warning
        assert "db check" in warning and "search --fresh" in warning
    for command in ("recommend", "frontier"):
        assert autofit(command, *ASKED, "--json").document["contradictory"] == 1
    assert "4,000" in before.out and "4,000" not in autofit("recommend", *ASKED).out
    # Of a limit below what it took nothing is contradictory.
    assert autofit("recommend", *ASKED, "--memory-limit", "24GiB").err == ""


def test_a_search_says_how_it_reads_contradictory_results(autofit: Autofit, store_file: Path, world: World) -> None:
    assert "contradictory" not in autofit(*SEARCH).err
    contradict(store_file)
    done = autofit(*SEARCH)
    assert done.code == 0
    (warning,) = [line for line in done.err.splitlines() if "contradictory" in line]
    assert warning.startswith("autofit: 1 config has contradictory results")


def test_check_of_a_damaged_file(autofit: Autofit, filled: Path) -> None:
    body = bytearray(filled.read_bytes())
    body[len(body) // 3 :] = b"\xa5" * (len(body) - len(body) // 3)
    for log in filled.parent.glob("store.db-*"):
        log.unlink()
    filled.write_bytes(body)
    assert autofit("db", "check").code == 4


# A store that fails while a search runs.


def file_named(done: Done) -> Path:
    """The file that the message tells to import."""
    return Path(done.err.splitlines()[-1].rpartition("autofit db import ")[2].rstrip(")"))


def check_nothing_is_lost(autofit: Autofit, world: World, done: Done, url: str, folder: Path) -> None:
    """The message names a file beside the store; the same search imports it, and goes on from there."""
    file = file_named(done)
    assert file.parent == folder and file.name.startswith("autofit-unsaved-")
    ended = len(world.pools[0].submitted)
    with Store.open(url) as store:
        kept = store.count()
        assert 0 < kept < ended
    others = folder / "autofit-unsaved-of-another-store.jsonl"
    others.write_bytes(file.read_bytes())
    world.on_wait = lambda: None
    rest = autofit(*SEARCH, "--json", "--store", url)
    assert rest.code == 0
    assert rest.document["answered_from_store"] == ended
    assert others.exists() and not file.exists()


def failing_after(world: World, trials: int, fail: Callable[[], None]) -> None:
    """Calls `fail` once, while the next trial runs."""
    pending = [fail]

    def on_wait() -> None:
        if len(world.pools[0].submitted) == trials + 1 and pending:
            pending.pop()()

    world.on_wait = on_wait


def test_locked_in_the_middle(autofit: Autofit, world: World, store_file: Path) -> None:
    url = f"sqlite:///{store_file}?timeout=0.1"
    with ExitStack() as lock:
        failing_after(world, 3, lambda: lock.enter_context(locked(store_file)))
        done = autofit(*SEARCH, "--json", "--store", url)
    check(done, "locked by another process", "autofit db import")
    check_nothing_is_lost(autofit, world, done, str(store_file), store_file.parent)


def test_a_lock_that_ends_in_time_is_waited_for(
    autofit: Autofit, world: World, store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "PATIENCE_SECONDS", 600.0)
    with ExitStack() as lock:
        failing_after(world, 3, lambda: lock.enter_context(locked(store_file, seconds=0.5)))
        done = autofit(*SEARCH, "--json", "--store", f"sqlite:///{store_file}?timeout=0.1")
    assert done.code == 0
    assert not list(store_file.parent.glob("autofit-unsaved-*"))


def test_no_disk_space_in_the_middle(
    autofit: Autofit, world: World, store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autofit.store.database import engine

    full: list[bool] = []
    connect = engine._open_sqlite

    def limited(*arguments: object) -> sqlite3.Connection:
        connection = connect(*arguments)  # type: ignore[arg-type]
        if full:
            connection.execute("PRAGMA max_page_count = 1")  # SQLite takes the pages that there are
        return connection

    monkeypatch.setattr(engine, "_open_sqlite", limited)
    monkeypatch.setattr(Store, "add", with_new_connection(Store.add))
    failing_after(world, 3, lambda: full.append(True))
    done = autofit(*SEARCH, "--json", "--max-trials", "40")
    full.clear()
    check(done, "no disk space", "autofit db import")
    with Store.open(str(store_file)) as store:
        kept = store.count()
    assert autofit("db", "import", str(file_named(done))).code == 0
    with Store.open(str(store_file)) as store:
        assert store.count() == len(world.pools[0].submitted) > kept


def with_new_connection(add: Callable[..., object]) -> Callable[..., object]:
    """`Store.add` that meets the disk as it is now."""

    def adding(store: Store, *arguments: object, **options: object) -> object:
        store._database.engine.dispose()
        return add(store, *arguments, **options)

    return adding


def test_a_server_that_goes_read_only_in_the_middle(
    autofit: Autofit, world: World, postgresql_url: str, postgresql_server: str, tmp_path: Path
) -> None:
    name = postgresql_url.split("/")[3].split("?")[0]

    def mode(value: str) -> None:
        with psycopg.connect(postgresql_server, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {value}")  # type: ignore[arg-type]
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))

    failing_after(world, 3, lambda: mode("on"))
    done = autofit(*SEARCH, "--json", "--store", postgresql_url)
    mode("off")
    check(done, "read-only", "autofit db import")
    # A server has no folder here: the file is where the search was started.
    check_nothing_is_lost(autofit, world, done, postgresql_url, tmp_path)


def test_an_interrupt_while_the_store_is_waited_for_loses_nothing(
    autofit: Autofit, world: World, store_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    with ExitStack() as lock:
        failing_after(world, 3, lambda: lock.enter_context(locked(store_file)))
        done = autofit(*SEARCH, "--json", "--store", f"sqlite:///{store_file}?timeout=0.1")
    assert (done.code, done.out) == (130, ""), "the store's failure at the end must not take the interrupt's place"
    (file,) = store_file.parent.glob("autofit-unsaved-*.jsonl")
    assert str(file) in caplog.text
    assert len(file.read_text().splitlines()) == 2


def test_a_store_that_fails_at_the_very_end_does_not_cost_the_answer(
    autofit: Autofit, world: World, store_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autofit.core.errors import StoreError

    def fail(*arguments: object, **options: object) -> None:
        raise StoreError("the store is gone", remedy="none")

    monkeypatch.setattr(SearchQueue, "end", fail)
    done = autofit(*SEARCH, "--json")
    assert done.code == 0
    assert done.document["recommendation"]["provenance"] == "measured"


def test_an_export_and_its_import_through_pipes(
    autofit: Autofit, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = autofit("db", "export", "-")
    assert (done.code, done.err) == (0, f"{len(MADE)} trials written to -\n")
    lines = done.out.splitlines()
    assert len(lines) == len(MADE) + 1 and json.loads(lines[0])["schema"] == 1
    monkeypatch.setattr("sys.stdin", io.StringIO(done.out))
    assert (
        autofit("db", "import", "-", "--store", "other.db").out == f"{len(MADE)} trials added, 0 were there already\n"
    )
