"""Whatever is wrong with a database, the user reads one clear line, and reads on where reading can go on."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, event, text
from unit.store.conftest import a_trial, context

from autofit.core.errors import StoreError
from autofit.store import Store, check, upgrade
from autofit.store.database.schema import REVISIONS


@contextmanager
def refused(words: str) -> Iterator[pytest.ExceptionInfo[StoreError]]:
    """Expects a `StoreError` of one line with these words and a remedy, and no trace of the driver."""
    with pytest.raises(StoreError, match=words) as raised:
        yield raised
    assert "\n" not in str(raised.value)
    assert raised.value.remedy
    assert raised.value.exit_code == 4
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None or raised.value.__suppress_context__
    assert "sqlalche.me" not in str(raised.value)


def sql(url: str, *statements: str) -> None:
    """Executes statements behind the store's back."""
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


class TestEveryDatabase:
    """What can go wrong on both kinds."""

    def test_opening_does_not_create_unasked(self, url: str) -> None:
        for _ in range(2):
            with refused("no store at"):
                Store.open(url, create=False)

    def test_a_newer_schema(self, url: str) -> None:
        Store.open(url).close()
        sql(url, "UPDATE alembic_version SET version_num = '9999'")
        with refused("schema 9999, newer"):
            Store.open(url)
        with refused("schema 9999, newer"):
            upgrade(url)
        report = check(url)
        assert not report.sound
        assert report.revision == "9999"

    def test_an_older_schema(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        Store.open(url).close()
        monkeypatch.setattr("autofit.store.database.schema.REVISIONS", (*REVISIONS, "9999"))
        with refused(f"older schema {REVISIONS[-1]}.*autofit db upgrade"):
            Store.open(url)
        assert not check(url).sound

    def test_tables_of_another_program(self, url: str) -> None:
        sql(url, "CREATE TABLE trials (id INTEGER)")
        with refused("another program"):
            Store.open(url)
        with refused("another program"):
            upgrade(url)
        assert check(url).problems

    def test_a_row_that_makes_no_sense(self, url: str) -> None:
        with Store.open(url) as store:
            added = store.add(a_trial())
            sql(url, 'UPDATE trials SET evidence = \'{"outcome": "vanished"}\'')
            with refused(f"trial {added.trial_id} .*vanished.*autofit db check"):
                store.trials()

    def test_a_prediction_that_makes_no_sense(self, url: str) -> None:
        with Store.open(url) as store:
            added = store.add(a_trial())
            sql(url, "UPDATE trials SET prediction = '{}'")
            with refused(f"trial {added.trial_id} .*autofit db check"):
                list(store.predicted(latest=9))

    def test_text_that_is_not_json(self, sqlite_url: str) -> None:
        with Store.open(sqlite_url) as store:
            store.add(a_trial())
            sql(sqlite_url, "UPDATE trials SET config = '{'")
            with refused("not JSON"):
                store.trials()


class TestSQLite:
    """What can go wrong with a file."""

    def test_no_database(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        path.write_text("not a database, but long enough to have a header of its own: " * 20)
        with refused("damaged or is not a SQLite"):
            Store.open(str(path))
        with refused("damaged or is not a SQLite"):
            check(str(path))

    def test_a_damaged_database(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        with Store.open(str(path)) as store:
            for _ in range(100):
                store.add(a_trial())
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2 :] = b"\xa5" * (len(damaged) - len(damaged) // 2)
        path.write_bytes(damaged)
        with Store.open(str(path)) as store, refused("damaged"):
            store.trials()
        report = check(str(path))
        assert report.problems
        assert not report.sound

    def test_a_folder_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "store.db").mkdir()
        with refused("cannot be opened"):
            Store.open(str(tmp_path / "store.db"))

    def test_a_file_in_the_folders_place(self, tmp_path: Path) -> None:
        (tmp_path / "folder").write_text("")
        with refused("folder"):
            Store.open(str(tmp_path / "folder" / "store.db"))

    def test_locked_by_another_process(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        with Store.open(f"sqlite:///{path}?timeout=0.2") as store:
            added = store.add(a_trial())
            with locked(path):
                with refused("locked by another process"):
                    store.add(a_trial())
                assert store.trials() == [added]
            store.add(a_trial())
            assert store.count() == 2

    def test_locked_while_it_is_created(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        with locked(path), refused("locked by another process"):
            Store.open(f"sqlite:///{path}?timeout=0.2")

    def test_waits_for_a_lock_that_ends(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        with Store.open(str(path)) as store:
            with locked(path, seconds=0.5):
                store.add(a_trial())
            assert store.count() == 1

    def test_no_disk_space(self, sqlite_url: str) -> None:
        with Store.open(sqlite_url) as store:
            store.add(a_trial())
            engine = store._database.engine
            engine.dispose()

            @event.listens_for(engine, "connect")
            def limit(connection: sqlite3.Connection, _record: object) -> None:
                # The smallest that SQLite allows: the pages that there are.
                connection.execute("PRAGMA max_page_count = 1")

            kept = 1
            with refused("no disk space"):
                for _ in range(1000):
                    store.add(a_trial())
                    kept += 1
            assert store.count() == kept

    def test_a_file_opened_read_only(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        with Store.open(str(path)) as store:
            added = store.add(a_trial())
        with Store.open(f"sqlite:///file:{path}?mode=ro&uri=true") as store:
            assert store.trials() == [added]
            with refused("read-only"):
                store.add(a_trial())
        assert check(f"sqlite:///file:{path}?mode=ro&uri=true").sound

    def test_a_folder_of_another_user(self) -> None:
        # Not below tmp_path, which is closed to other users.
        folder = Path(tempfile.mkdtemp())
        try:
            path = folder / "store.db"
            with Store.open(str(path)) as store:
                store.add(a_trial())
            path.chmod(0o444)
            folder.chmod(0o555)
            lines = as_nobody(lambda: read_then_write(str(path)))
            assert lines[0] == "1 1"
            assert "is read-only" in lines[1]
            # A writer's log that this user cannot join: the database alone would be an old state.
            path.with_name("store.db-wal").write_bytes(b"\0" * 64)
            path.with_name("store.db-wal").chmod(0o400)
            assert "cannot be opened" in as_nobody(lambda: read_then_write(str(path)))[0]
        finally:
            folder.chmod(0o755)
            shutil.rmtree(folder)


def read_then_write(url: str) -> list[str]:
    """How many trials and points the store has, then what it says to a new trial."""
    lines = []
    try:
        with Store.open(url) as store:
            trial = store.trials()[0]
            frontier = store.frontier(**context(trial))
            lines.append(f"{store.count()} {len(frontier.points) if frontier else 0}")
            store.add(trial)
    except StoreError as error:
        lines.append(str(error))
    return lines


def as_nobody(work: Callable[[], list[str]]) -> list[str]:
    """What `work` returns in a child without root's power over permissions."""
    # A fork, because another user may not be able to start this Python.
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        lines = ["failed"]
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            lines = work()
        except BaseException as error:
            lines = [f"failed: {error!r}"]
        finally:
            os.write(sending, "\n".join(lines).encode())
            os._exit(0)
    os.close(sending)
    os.waitpid(child, 0)
    with os.fdopen(receiving) as pipe:
        return pipe.read().splitlines()


@contextmanager
def locked(path: Path, seconds: float = 3600.0) -> Iterator[None]:
    """Another process holds the file's lock, for some seconds at most."""
    code = (
        "import sqlite3, sys, time\n"
        "connection = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "connection.execute('BEGIN EXCLUSIVE')\n"
        "print('locked', flush=True)\n"
        "time.sleep(float(sys.argv[2]))\n"
        "connection.execute('ROLLBACK')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path), str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    try:
        yield
    finally:
        process.kill()
        process.communicate()


class TestPostgreSQL:
    """What can go wrong with a server."""

    def test_unreachable(self) -> None:
        with refused("cannot be reached.*server runs") as raised:
            Store.open("postgresql://me:secret@127.0.0.1:1/autofit")
        assert "secret" not in str(raised.value)

    def test_a_host_that_does_not_exist(self) -> None:
        with refused("cannot be reached"):
            Store.open("postgresql://me@no-such-host.invalid/autofit")

    def test_a_database_that_does_not_exist(self, postgresql_server: str) -> None:
        with refused("does not exist on this server.*createdb"):
            Store.open(postgresql_server.replace("/postgres?", "/nowhere?"))

    def test_a_user_that_does_not_exist(self, postgresql_server: str) -> None:
        with refused("rejects this user or password"):
            Store.open(postgresql_server.replace("postgres:@", "somebody:@"))

    def test_a_user_without_rights(self, postgresql_url: str) -> None:
        sql(postgresql_url, "CREATE ROLE guest LOGIN")
        try:
            with refused("does not permit this to its user"):
                Store.open(postgresql_url.replace("postgres:@", "guest:@"))
        finally:
            sql(postgresql_url, "DROP ROLE guest")

    def test_a_read_only_server(self, postgresql_url: str, postgresql_server: str) -> None:
        with Store.open(postgresql_url) as store:
            added = store.add(a_trial())
        name = postgresql_url.split("/")[3].split("?")[0]
        sql(postgresql_server, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        with Store.open(postgresql_url) as store:
            assert store.trials() == [added]
            with refused("read-only"):
                store.add(a_trial())

    def test_a_server_that_was_restarted(self, postgresql_url: str, postgresql_server: str) -> None:
        with Store.open(postgresql_url) as store:
            store.add(a_trial())
            with closing(psycopg.connect(postgresql_server, autocommit=True)) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'autofit%'"
                )
            store.add(a_trial())
            assert store.count() == 2

    def test_shares_a_database_with_other_programs(self, postgresql_url: str) -> None:
        sql(postgresql_url, "CREATE TABLE notes (id INTEGER)")
        with Store.open(postgresql_url) as store:
            added = store.add(a_trial())
            assert store.trials() == [added]
