"""Both kinds of database for the store's tests, and trials to put in them."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from autofit.core.device.hardware import Hardware, Stack
from autofit.core.device.probe import MeasuredStep, Probe, ProbePart
from autofit.core.device.state import CardState, DeviceState
from autofit.core.lattice import Config
from autofit.core.outcome import (
    Crashed,
    Diverged,
    Fits,
    Measurement,
    Outcome,
    OutOfMemory,
    StepSeconds,
    TimedOut,
    Trial,
    Unsupported,
    context_keys,
)
from autofit.core.prediction import Prediction
from autofit.core.workload import Workload
from autofit.store import Store
from tests.made_stores import put

HARDWARE = Hardware(
    name="h100-80g",
    kind="cuda",
    device_name="NVIDIA H100 80GB HBM3",
    memory_bytes=80 * 2**30,
    capability="9.0",
    peak_flops=989.4e12,
)
OTHER_HARDWARE = replace(HARDWARE, count=8, host_memory_bytes=2**40)
"""Hardware with the same key, differing only where neither memory nor speed is affected."""
STACK = Stack(python="3.11.9", torch="2.13.0", transformers="5.23.0", peft="0.21.2", cuda="13.0")
WORKLOAD = Workload(model="llama-3.1-8b", model_digest="0123456789abcdef", lora_dropout=0.05)
CONFIG = Config.of({"method": "lora", "rank": 16, "micro_batch": 1, "compile": False, "precision": "bf16-mixed"})

OUTCOMES: tuple[Outcome, ...] = (
    OutOfMemory(reason="tried to allocate 2 GiB", phase="backward", requested_bytes=2**31, host=False),
    TimedOut(reason="no end within 60 s", deadline_seconds=60.0, phase="forward"),
    Crashed(reason="SIGSEGV", signal="SIGSEGV", exit_code=-11, stderr_tail="naïve \0 \N{SNOWMAN}\n"),
    Diverged(reason="loss is not finite", losses=(11.5, None), reference_loss=11.5),
    Unsupported(reason="flash attention needs compute capability 8.0"),
)

PREDICTION = Prediction(
    peak_allocated_bytes=19 * 2**30 + 1,
    peak_reserved_bytes=20 * 2**30 + 7,
    device_bytes=21 * 2**30,
    step_seconds=0.1 + 0.2,
    calibrated_on=5,
    relative_error=None,
)

SHARED = DeviceState(seconds=3.25, cards=(CardState(uuid="GPU-a", others_share=0.45),))
"""Of a trial beside another process."""


def a_probe(**changes: Any) -> Probe:
    """A probe of the hardware and stack of `a_trial`."""
    trial = a_trial()
    part = ProbePart(name="products in fp32", seconds=0.1 + 0.2, seconds_per={"product/fp32/nt": 1e-11})
    step = MeasuredStep(config={"method": "lora"}, layers=2, seconds=0.6, work=None)
    values: dict[str, Any] = {
        "hardware": trial.hardware,
        "stack": trial.stack,
        "model": "llama-3.1-8b",
        "shapes_key": "0" * 16,
        "parts": (part, ProbePart(name="attention in fp16", seconds=1.0, failure="RuntimeError: not implemented")),
        "steps": (step,),
        "seconds": 9.5,
        "recorded_at": "2026-01-01T00:00:00+00:00",
    }
    return Probe(**{**values, **changes})


_NUMBERS = itertools.count(1)


def measured(tokens_per_second: float = 1234.5678901234567, device_bytes: int = 20 * 2**30) -> Fits:
    """A fitting outcome."""
    return Fits(
        measurement=Measurement(
            tokens_per_second=tokens_per_second,
            step_seconds=StepSeconds(median=0.1, p95=0.11, relative_spread=0.02),
            mfu=0.41,
            peak_allocated_bytes=device_bytes - 3,
            peak_reserved_bytes=device_bytes - 2,
            device_bytes=device_bytes,
            host_peak_bytes=2**31,
            host_baseline_bytes=2**30,
            phase_peaks={"forward": 1, "backward": 2, "optimizer": 3},
            losses=(11.5, 11.25, 1e-7),
            reference_loss=11.5,
            steps=7,
            setup_seconds=2.5,
            overhead_seconds=0.25,
        )
    )


def a_trial(
    *,
    config: Config = CONFIG,
    workload: Workload = WORKLOAD,
    hardware: Hardware = HARDWARE,
    stack: Stack = STACK,
    memory_limit_bytes: int = 80 * 2**30,
    outcome: Outcome | None = None,
    seconds: float = 12.25,
    recorded_at: str | None = None,
    prediction: Prediction | None = None,
    device_state: DeviceState | None = None,
) -> Trial:
    """A trial, recorded at a time of its own unless one is given."""
    number = next(_NUMBERS)
    return Trial(
        config=config,
        workload=workload,
        hardware=hardware,
        stack=stack,
        memory_limit_bytes=memory_limit_bytes,
        outcome=measured() if outcome is None else outcome,
        seconds=seconds,
        recorded_at=recorded_at or f"2026-01-01T{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}Z",
        prediction=prediction,
        device_state=device_state,
    )


def context(trial: Trial) -> dict[str, str]:
    """The keys of a trial's hardware, stack and workload, as the store's methods take them."""
    return context_keys(trial.hardware, trial.stack, trial.workload)


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """The URI of a real PostgreSQL server's database `postgres`."""
    # Not in pytest's own folder: started by root, the server runs as another user, whom any later pytest locks out.
    folder = tempfile.mkdtemp(prefix="autofit-postgresql-")
    with warnings.catch_warnings():
        # It warns about a runtime folder that containers do not have.
        warnings.simplefilter("ignore")
        from pgserver.postgres_server import get_server

        server = get_server(folder)
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        # Nothing here survives a crash of the machine. Databases are made and dropped for every test.
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            connection.execute(f"ALTER SYSTEM SET {setting} = off")  # type: ignore[arg-type]
        connection.execute("SELECT pg_reload_conf()")
    yield server.get_uri()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def migrated(postgresql_server: str) -> str:
    """The name of a PostgreSQL database that has the schema, and nothing else."""
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute("CREATE DATABASE migrated")
    Store.open(postgresql_server.replace("/postgres?", "/migrated?")).close()
    return "migrated"


@pytest.fixture
def postgresql_url(postgresql_server: str, migrated: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a PostgreSQL database: an empty one, or with the schema for a test that only asks for a store."""
    with a_database(postgresql_server, f"TEMPLATE {migrated}" if "store" in request.fixturenames else "") as url:
        yield url


@contextmanager
def a_database(server: str, options: str = "") -> Iterator[str]:
    """The URL of a new database of the PostgreSQL server, which is there no longer afterwards."""
    name = f"autofit_{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} {options}")  # type: ignore[arg-type]
    yield server.replace("/postgres?", f"/{name}?")
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[arg-type]


@pytest.fixture
def sqlite_url(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The URL of a SQLite file: one that does not exist yet, or with the schema for a test that only asks for a
    store."""
    if "store" in request.fixturenames:
        put(tmp_path / "store.db")
    return f"sqlite:///{tmp_path / 'store.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database, of each kind in turn."""
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """An empty store, of each kind in turn."""
    with Store.open(url) as opened:
        yield opened
