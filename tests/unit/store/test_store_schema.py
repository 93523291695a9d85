"""Migrations give what the models say, old stores stay readable, a failed upgrade changes nothing."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, inspect, text
from unit.store.conftest import a_trial, context

from autofit.core.errors import StoreError
from autofit.core.outcome import OutOfMemory, Trial
from autofit.store import Store, check, check_schema, export_lines, import_lines, upgrade
from autofit.store.database import schema
from autofit.store.tables import TABLES, Base

ASSETS = Path(__file__).with_name("assets")
MIGRATIONS = Path(schema.__file__).with_name("migrations")
STORED = sorted(asset.stem for asset in ASSETS.glob("*.jsonl"))
"""The revisions of the assets: every migration is run on one."""


@contextmanager
def behind_the_back(url: str) -> Iterator[Connection]:
    """A transaction on the database that the store knows nothing of."""
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def trials_of(revision: str) -> list[Trial]:
    """What the store of a revision holds, oldest first."""
    lines = (ASSETS / f"{revision}.jsonl").read_text().splitlines()
    return [Trial.from_json(json.loads(line)) for line in lines[1:]]


def load(url: str, revision: str) -> None:
    """Fills an empty database with the dump of a store as that revision's autofit left it."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
            database.executescript((ASSETS / f"{revision}.sqlite.sql").read_text())
    else:
        with psycopg.connect(url) as connection:
            connection.execute((ASSETS / f"{revision}.postgresql.sql").read_bytes())


def test_revisions_are_those_of_the_migrations() -> None:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    scripts = ScriptDirectory.from_config(config).walk_revisions()
    assert tuple(reversed([script.revision for script in scripts])) == schema.REVISIONS


def test_migrations_give_what_the_models_say(store: Store, url: str) -> None:
    with behind_the_back(url) as connection:
        configured = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(configured, Base.metadata) == []


def test_sqlite_is_set_up_for_many_readers_and_a_writer(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store, store._database.read() as connection:
        pragmas = {
            name: connection.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "busy_timeout", "foreign_keys", "synchronous")
        }
    assert pragmas == {"journal_mode": "wal", "busy_timeout": 30_000, "foreign_keys": 1, "synchronous": 2}


def test_the_schema_is_checked_while_a_migration_has_all_other_tables(postgresql_url: str) -> None:
    impatient = f"{postgresql_url}&options=-c%20lock_timeout%3D200"
    upgrade(postgresql_url)
    with behind_the_back(postgresql_url) as connection:
        connection.execute(text(f"LOCK TABLE {', '.join(TABLES)} IN ACCESS EXCLUSIVE MODE"))
        assert check_schema(impatient) == schema.REVISIONS[-1]
        with pytest.raises(StoreError, match="locked"):
            check(impatient)


@pytest.mark.parametrize("revision", STORED)
def test_reads_the_stores_of_every_revision(url: str, revision: str, tmp_path: Path) -> None:
    load(url, revision)
    assert check(url).revision == revision
    if revision != schema.REVISIONS[-1]:
        with pytest.raises(StoreError, match=f"older schema {revision}"):
            check_schema(url)
    assert upgrade(url) == schema.REVISIONS[-1]
    assert check(url).sound
    lines = (ASSETS / f"{revision}.jsonl").read_text().splitlines()
    with Store.open(url) as store, Store.open(str(tmp_path / "new.db")) as fresh:
        assert store.trials() == trials_of(revision)
        states = ["failed" if revision < "0008" else "running", "succeeded", "cancelled", "failed"]
        assert [search.state for search in store.searches()][::-1] == states
        assert import_lines(store, lines).added == 0
        assert [t.name for t in store.access.tokens()] == (["ann", "bob"] if revision >= "0009" else [])
        # Keys are digests of values: where a value has gained a field, a migration must have renewed them.
        import_lines(fresh, export_lines(store))
        for trial in store.trials():
            assert trial.stack in store.stacks(trial.hardware.key, trial.workload.key)
            assert trial in store.attempts(**context(trial))[trial.config]
            assert points(store, trial) == points(fresh, trial)
        store.add(store.trials()[0])


def test_trials_that_were_never_predicted_say_so(url: str) -> None:
    load(url, "0001")
    upgrade(url)
    with Store.open(url) as store:
        assert {trial.prediction for trial in store.trials()} == {None}
        assert list(store.predicted(latest=9)) == []


def points(store: Store, trial: Trial) -> list[object]:
    """The points of a trial's frontier without their numbers."""
    frontier = store.frontier(**context(trial))
    assert frontier is not None
    return [(point.config, point.measurement) for point in frontier.points]


def test_checks_a_sound_store(store: Store, url: str) -> None:
    store.add(a_trial())
    report = check(url)
    assert report.sound
    assert report.kind in url
    filled = ("hardware", "stacks", "workloads", "trials", "contexts")
    empty = ("searches", "events", "estimates", "probes", "tokens", "audit", "idempotency_keys")
    assert report.counts == dict.fromkeys(filled, 1) | dict.fromkeys(empty, 0)
    assert (report.revision, report.problems) == (report.newest, ())


def test_checks_what_contradicts_itself(store: Store, url: str) -> None:
    fitted = store.add(a_trial())
    other = a_trial(config=fitted.config.replace(rank=64))
    elsewhere = replace(fitted, stack=replace(fitted.stack, torch="2.14.0"))
    failed = [store.add(replace(t, outcome=OutOfMemory(reason=""))) for t in (fitted, elsewhere, other)]
    report = check(url)
    assert report.sound and [(c.fitted, c.ran_out) for c in report.contradictions] == [((fitted,), (failed[0],))]
    assert [c.ran_out[0].trial_id for c in report.contradictions] == [failed[0].trial_id]
    for _ in range(2):
        store.add(fitted)
    assert check(url).contradictions == ()


def test_checks_what_rows_refer_to(sqlite_url: str) -> None:
    with Store.open(sqlite_url) as store:
        store.add(a_trial())
    with behind_the_back(sqlite_url) as connection:
        connection.execute(text("DELETE FROM workloads"))
    assert check(sqlite_url).problems == ("row 1 of trials refers to a row of workloads that is lost",)


def test_upgrade_creates_a_store_and_is_repeatable(url: str) -> None:
    assert upgrade(url) == schema.REVISIONS[-1]
    assert upgrade(url) == schema.REVISIONS[-1]
    with Store.open(url, create=False) as store:
        assert store.count() == 0


@pytest.fixture
def next_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes autofit know one more revision; returns the file that its test writes."""
    folder = tmp_path / "100%" / "migrations"
    shutil.copytree(MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(schema, "_SCRIPTS", folder)
    monkeypatch.setattr(schema, "REVISIONS", (*schema.REVISIONS, "9999"))
    return folder / "versions" / "9999_next.py"


NEXT = f"""
from alembic import op
import sqlalchemy as sa

revision, down_revision = "9999", "{schema.REVISIONS[-1]}"

def upgrade():
    op.create_table("notes", sa.Column("id", sa.Integer, primary_key=True))
    with op.batch_alter_table("trials") as batch:
        batch.add_column(sa.Column("note", sa.String))
"""


def test_an_upgrade_keeps_every_trial(url: str, next_revision: Path) -> None:
    load(url, "0001")
    with pytest.raises(StoreError, match="autofit db upgrade"):
        Store.open(url)
    next_revision.write_text(NEXT)
    assert upgrade(url) == "9999"
    with Store.open(url) as store:
        assert store.trials() == trials_of("0001")
    assert check(url).sound


def test_trials_under_two_drivers_come_together(url: str) -> None:
    """Up to revision 0009 each driver had a frontier of its own."""
    load(url, "0009")
    expected = trials_of("0009")
    (stack,) = {trial.stack for trial in expected}
    under = {3: "570.1", 5: "580.2", 11: "580.2"}
    attempts = {3: 1, 5: 1, 11: 2}
    with behind_the_back(url) as connection:
        copied = "INSERT INTO probes SELECT hardware_key, :key, shapes_key, body, '2020' FROM probes"
        for driver in ("570.1", "580.2"):
            values = {"key": driver, "own": stack.key, "body": json.dumps({**stack.to_json(), "driver": driver})}
            connection.execute(text("INSERT INTO stacks VALUES (:key, :body)"), values)
            connection.execute(text(f"{copied} WHERE stack_key = :own"), values)
        for number, driver in under.items():
            values = {"id": number, "key": driver, "attempt": attempts[number]}
            connection.execute(text("UPDATE trials SET stack_key = :key, attempt = :attempt WHERE id = :id"), values)
            expected[number - 1] = replace(expected[number - 1], stack=replace(stack, driver=driver))
    upgrade(url)
    report = check(url)
    assert report.sound and (report.counts["stacks"], report.counts["probes"], report.counts["contexts"]) == (1, 1, 2)
    with Store.open(url) as store:
        assert store.trials() == expected
        trial = expected[2]
        frontier = store.frontier(**context(trial))
        assert frontier is not None and frontier.trials == 13
        assert len(store.attempts(**context(trial))[trial.config]) == 5
        assert store.add(trial).trial_id == 15
    with behind_the_back(url) as connection:
        numbered = connection.execute(text("SELECT attempt FROM trials WHERE id IN (2, 3, 5, 11, 12) ORDER BY id"))
        assert list(numbered.scalars()) == [1, 2, 3, 4, 5]


def test_idempotency_keys_become_those_of_the_tokens_that_asked(url: str) -> None:
    load(url, "0010")
    with behind_the_back(url) as connection:
        connection.execute(text("UPDATE searches SET idempotency_key = search_id"))
        audited = "INSERT INTO audit (id, at, token, action, search_id) VALUES (:id, '2026', :token, 'search', :search)"
        for number, (token, search) in enumerate([("ann", "running"), ("bob", "running"), ("ann", "failed")], 10):
            connection.execute(text(audited), {"id": number, "token": token, "search": search})
    upgrade(url)
    with behind_the_back(url) as connection:
        keys = connection.execute(text("SELECT token, key, search_id, digest FROM idempotency_keys")).all()
    expected = [("", "succeeded"), ("", "cancelled"), ("ann", "running"), ("bob", "running"), ("ann", "failed")]
    assert {tuple(row) for row in keys} == {(token, name, name, name) for token, name in expected}


def test_a_failed_upgrade_changes_nothing(url: str, next_revision: Path) -> None:
    load(url, "0001")
    next_revision.write_text(NEXT + '    op.execute("INSERT INTO nowhere VALUES (1)")\n')
    before = check(url).counts
    with pytest.raises(StoreError, match="nowhere"):
        upgrade(url)
    after = check(url)
    assert (after.revision, after.counts) == ("0001", before)
    with behind_the_back(url) as connection:
        assert set(inspect(connection).get_table_names()) == {*before, "alembic_version"}


def test_a_contributor_can_begin_a_migration(tmp_path: Path) -> None:
    """`alembic revision` writes a file in the house's form, which Python reads."""
    folder = tmp_path / "migrations"
    shutil.copytree(MIGRATIONS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    config = Config()
    config.set_main_option("script_location", str(folder))
    made = ScriptDirectory.from_config(config).generate_revision("8888", "A column for watts", head="head")
    assert made is not None and made.down_revision == schema.REVISIONS[-1]
    assert Path(made.path).read_text().startswith('"""A column for watts"""\n')


def test_flags_of_older_trials_are_found(url: str) -> None:
    load(url, "0001")
    with behind_the_back(url) as connection:
        of = text("SELECT CAST(evidence AS TEXT) FROM trials WHERE id = :id")
        early = str(connection.scalar(of, {"id": 2})).replace('"stopped_early":false', '"stopped_early":true')
        reason = json.dumps(
            {**json.loads(str(connection.scalar(of, {"id": 7}))), "reason": 'reason "stopped_early":true\0'}
        )
        for number, evidence in ((2, early), (7, reason)):
            values = {"id": number, "evidence": evidence}
            connection.execute(text("UPDATE trials SET evidence = :evidence WHERE id = :id"), values)
    upgrade(url)
    with behind_the_back(url) as connection:
        early_ids = connection.execute(text("SELECT id FROM trials WHERE stopped_early")).scalars().all()
    assert early_ids == [2]


def test_trials_of_one_card_come_together(url: str) -> None:
    """Up to revision 0001 a driver's few bytes less made another hardware, with attempts of its own."""
    load(url, "0001")
    expected = trials_of("0001")
    hardware = expected[2].hardware
    smaller = replace(hardware, memory_bytes=hardware.memory_bytes - 2**20)
    expected[2] = replace(expected[2], hardware=smaller)
    with behind_the_back(url) as connection:
        values = {"name": hardware.name, "body": json.dumps(smaller.to_json())}
        connection.execute(text("INSERT INTO hardware VALUES ('smaller', 'of the smaller', :name, :body)"), values)
        moved = "hardware_digest = 'smaller', hardware_key = 'of the smaller', attempt = 1"
        connection.execute(text(f"UPDATE trials SET {moved} WHERE id = 3"))
        connection.execute(text("UPDATE trials SET attempt = 2 WHERE id = 5"))
    upgrade(url)
    with behind_the_back(url) as connection:
        numbered = connection.execute(
            text("SELECT attempt, hardware_key FROM trials WHERE id IN (2, 3, 5) ORDER BY id")
        )
        assert [tuple(row) for row in numbered] == [(number, hardware.key) for number in (1, 2, 3)]
    with Store.open(url) as store:
        assert store.trials() == expected
        trial = expected[2]
        attempts = store.attempts(hardware_key=hardware.key, stack_key=trial.stack.key, workload_key=trial.workload.key)
        assert attempts[trial.config] == [expected[1], expected[2], expected[4]]
        assert len(store.hardware()) == 1
