"""Both kinds of database for the store's tests, and trials to put in them."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from autofit.hardware import Hardware, Stack
from autofit.lattice import Config
from autofit.outcome import (
    Crashed,
    Diverged,
    Fits,
    Measurement,
    Outcome,
    OutOfMemory,
    Prediction,
    StepSeconds,
    TimedOut,
    Trial,
    Unsupported,
)
from autofit.store import Store
from autofit.workload import Workload

HARDWARE = Hardware(
    name="h100-80g",
    kind="cuda",
    device_name="NVIDIA H100 80GB HBM3",
    memory_bytes=80 * 2**30,
    capability="9.0",
    peak_flops=989.4e12,
)
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
    )


@pytest.fixture
def make_trial() -> Callable[..., Trial]:
    """Makes a trial from the fields given."""
    return a_trial


@pytest.fixture
def outcomes() -> tuple[Outcome, ...]:
    """One outcome of each kind except `fits`."""
    return OUTCOMES


@pytest.fixture
def prediction() -> Prediction:
    """The prediction for a trial."""
    return PREDICTION


@pytest.fixture
def fits() -> Callable[..., Fits]:
    """Makes a fitting outcome from a throughput and a device memory."""
    return measured


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
    yield server.get_uri()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgresql_url(postgresql_server: str) -> Iterator[str]:
    """The URL of an empty PostgreSQL database."""
    name = f"autofit_{next(_NUMBERS)}"
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield postgresql_server.replace("/postgres?", f"/{name}?")
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a SQLite file that does not exist yet."""
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


@pytest.fixture
def other_hardware() -> Hardware:
    """Hardware with the same key as the usual one, differing only where neither memory nor speed is affected."""
    return replace(HARDWARE, count=8, host_memory_bytes=2**40)
