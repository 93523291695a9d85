"""Searches of a whole service of which one part is killed: none may lose, double or leave behind anything.

    PYTHONPATH=tests python tests/end_to_end/kills.py FILE [--searches 200] [--seed 0] [--real]

The service is a server, a runner, a Ray cluster of a head and two nodes, and PostgreSQL. What ends is started again, as
Kubernetes does. Searches are asked for over HTTP and followed, one after another. In each, one part is killed, in turn,
at a moment that the seed draws: after so many trials, and a moment later. The trials are a stub (`stubbed.py`), with
`--real` those of a tiny model. Every result is written to the file as it ends, and is not run again. Prints what went
wrong, and exits with 1 if anything did.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from jobs import tiny_model
from postgresql import Database
from sqlalchemy import text
from started import processes
from stubbed import EFFECTS, REAL
from test_service import ASKED, Service, followed

from autofit.core.errors import StoreError
from autofit.core.outcome import Fits
from autofit.store import ENDINGS, Store

T = TypeVar("T")
HERE = Path(__file__).parent
VICTIMS = ("driver", "worker", "raylet", "head", "PostgreSQL", "server", "runner")
LONGEST_SECONDS = 900.0
"""A search that runs longer has failed to end, on whatever machine."""
GRACE_SECONDS = 180.0
"""What a search started may live so long after it."""
UNCLAIMED_SECONDS = 30.0
"""So long a lease may have expired before another driver has taken it: runners look every second, but one that has been
killed must start again first."""
MARKS = {"driver": "stubbed.py driver", "worker": "Actor", "fork server": "autofit.trial.process.fork_server"}
"""Of a search's processes, by what each is."""
PARTS = {"raylet": "raylet/raylet --", "head": "gcs/gcs_server --"}


class Part:
    """A process of the service, which is started again whenever it has ended."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self._command, self._log, self._environment = command, log, environment
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(
                self._command, stdout=out, stderr=out, env=self._environment, start_new_session=True
            )

    def keep_up(self) -> None:
        if self.process.poll() is not None:
            self.start()

    def end(self) -> int:
        """Its exit code."""
        self.process.terminate()
        return self.process.wait()


class World:
    """The service, in a folder that all its processes can be told by."""

    def __init__(self, folder: Path, database: Database, *, real: bool) -> None:
        self.folder, self.database, self.real = folder, database, real
        (folder / "small").mkdir()
        (folder / "small" / "config.json").write_text(json.dumps(tiny_model().config))
        os.environ["AUTOFIT_TEST_FOLDER"] = str(folder)
        self.store = Store.open(database.url)
        from autofit.trial.machine.detection import detect

        self.store.queue.announce(detect()[0])
        self.client = Service(folder, database.url, self.store.access.create("ann", "run"))
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE), str(HERE.parent)]),
            "AUTOFIT_CACHE": str(folder / "cache"),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "15",  # a node ends so long after its head, not 60
            **({REAL: "1"} if real else {}),
        }
        port, ray_port = free_port(), free_port()
        self.address = f"http://127.0.0.1:{port}"
        self.parts = {"head": self._stubbed("head", "head", str(ray_port), str(folder / "ray"))}
        while b'{"address"' not in (log := (folder / "head.log").read_bytes()):
            self.parts["head"].keep_up()  # on a busy machine Ray gives up after 30 s
            time.sleep(0.1)
        ray_address = json.loads(log.splitlines()[-1])["address"]
        for name in ("a", "b"):
            self.parts[name] = self._stubbed(name, "node", str(ray_port), str(folder / "ray"))
        self.parts["runner"] = self._stubbed("runner", "runner", "--store", database.url, "--ray-address", ray_address)
        serve = ("-m", "autofit", "serve", "--no-runner", "--port", str(port), "--models", str(folder))
        self.parts["server"] = self._part("server", *serve, "--store", database.url)

    def _stubbed(self, name: str, *words: str) -> Part:
        return self._part(name, str(HERE / "stubbed.py"), *words)

    def _part(self, name: str, *words: str) -> Part:
        locks = self.folder / f"locks-{name}"  # each node's, as if on a machine of its own
        locks.mkdir(exist_ok=True)
        environment = {**self._environment, "AUTOFIT_LOCKS": str(locks)}
        return Part([sys.executable, *words], self.folder / f"{name}.log", environment)

    def keep_up(self) -> None:
        for part in self.parts.values():
            part.keep_up()

    def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> Any:
        """What the server answers, once it does."""
        while True:
            with unanswered():
                return self.client.ask(self.address + path, method, body, **headers)
            time.sleep(0.2)

    def of(self, mark: str) -> list[int]:
        """The processes whose command has the mark, by number."""
        return sorted(process for process, line in processes(self.folder).items() if mark in line)

    def kill(self, victim: str, draw: random.Random) -> bool:
        """Kill a part, if it is there; returns whether it was."""
        if victim == "PostgreSQL":
            self.database.restart()
            return True
        if victim in ("server", "runner"):
            self.parts[victim].process.kill()
            return True
        pids = self.of(MARKS.get(victim) or PARTS[victim])
        if victim == "raylet":  # not the head's, without which no other joins
            pids = [process for process in pids if os.getsid(process) != self.parts["head"].process.pid]
        if not pids:
            return False
        with suppress(ProcessLookupError):
            os.kill(draw.choice(pids), signal.SIGKILL)
            return True
        return False

    def read(self, query: str, **values: Any) -> list[Any]:
        with self.store._database.read() as connection:
            return list(connection.execute(text(query), values).all())

    def close(self) -> list[str]:
        """End all; what is wrong with how that went."""
        wrong = [f"{n} ended with {c}" for n in ("runner", "server") if (c := self.parts[n].end())]
        for name in ("a", "b", "head"):
            self.parts[name].end()
        self.client.close()
        self.store.close()
        left = waited_for(lambda: [line for line in processes(self.folder).values() if "Agent" not in line])
        for process in processes(self.folder):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return wrong + [f"the service left {line[:100]}" for line in left]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def waited_for(left: Callable[[], list[T]]) -> list[T]:
    """What is left after some time; usually nothing."""
    until = time.monotonic() + GRACE_SECONDS
    while (remaining := left()) and time.monotonic() < until:
        time.sleep(0.2)
    return remaining


@contextmanager
def world(*, real: bool = False) -> Iterator[World]:
    """A service that runs. Raises `AssertionError` if it leaves anything behind, or does not end as told."""
    folder = Path(tempfile.mkdtemp(prefix="af", dir="/tmp"))  # short, as Ray's sockets need
    database = Database()
    try:
        service = World(folder, database, real=real)
        try:
            yield service
        finally:
            wrong = service.close()
        assert not wrong, wrong
    finally:
        database.end()
        os.environ.pop("AUTOFIT_TEST_FOLDER", None)
    shutil.rmtree(folder, ignore_errors=True)  # what went wrong can be read in it


@contextmanager
def unanswered() -> Iterator[None]:
    """Nobody may answer, or only to say that the store does not."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        assert error.code >= 500, error
    except (OSError, http.client.HTTPException):
        pass


class Watch:
    """What is seen of one search while it runs."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.search_id: str | None = None
        self.rows: dict[int, Any] = {}
        """Every trial that was ever there, as it was first seen."""
        self.changed: set[int] = set()
        self.state = "not asked"
        self.unclaimed_seconds = 0.0
        self.events: list[int] = []
        self.over = threading.Event()

    def look(self) -> None:
        """See what is stored."""
        if self.search_id is None:
            return
        query = "SELECT t.id, t.uid, t.search_epoch, md5(t::text) FROM trials t WHERE search_id = :id ORDER BY id"
        rows = {row.id: row for row in self.world.read(query, id=self.search_id)}
        self.changed |= {number for number, row in self.rows.items() if rows.get(number) != row}
        self.rows = {**rows, **self.rows}
        lease = "lease_expires_at - extract(epoch FROM clock_timestamp()) AS left"
        (row,) = self.world.read(f"SELECT state, {lease} FROM searches WHERE search_id = :id", id=self.search_id)
        self.state = row.state
        if row.state == "running":
            self.unclaimed_seconds = max(self.unclaimed_seconds, -float(row.left))

    def follow(self) -> None:
        """Read the search's events to their end, from one server after another. For a thread of its own."""
        address = f"{self.world.address}/v1/searches/{self.search_id}/events"
        while not self.over.is_set():
            with unanswered():
                stream = self.world.client.opened(address, Last_Event_ID=str(self.events[-1] if self.events else 0))
                heard = followed(stream)
                self.events += [number for number, _ in heard]
                if heard and heard[-1][1] in ENDINGS:
                    return
            time.sleep(0.2)


def searched(world: World, number: int, seed: int) -> dict[str, Any]:
    """One search, in which one part is killed: what it came to, and what was wrong with it."""
    draw = random.Random(f"{seed} {number}")
    victim, stored, pause = VICTIMS[number % len(VICTIMS)], draw.randint(-1, 5), round(draw.uniform(0.0, 1.0), 2)
    watch, killed_after = Watch(world), []
    began, executed = time.monotonic(), len(list(world.folder.glob("execution-*")))

    def kill() -> None:
        """Once so many trials are stored (-1: at once, maybe before it is asked for)."""
        while len(watch.rows) < stored and not watch.over.wait(0.05):
            pass
        time.sleep(pause)
        while not watch.over.is_set():
            if world.kill(victim, draw):
                killed_after.append(len(watch.rows))
                return
            time.sleep(0.05)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with keeping_up(world):
        request = {**ASKED, "max_trials": None, "seed": number}
        begun = world.ask("/v1/searches", "POST", request, Idempotency_Key=f"{seed} {number}")
        watch.search_id = begun["search_id"]
        follower = threading.Thread(target=watch.follow, daemon=True)
        follower.start()
        while watch.state not in ENDINGS and time.monotonic() - began < LONGEST_SECONDS:
            with suppress(StoreError):
                watch.look()
            time.sleep(0.2)
        seconds = time.monotonic() - began
        left = waited_for(lambda: [name for name, mark in MARKS.items() if world.of(mark)])
        follower.join(GRACE_SECONDS)
        watch.over.set()
        killer.join()
        state = world.ask(f"/v1/searches/{watch.search_id}")
    return {
        "number": number,
        "victim": victim,
        "after": [stored, pause],
        "killed_after": killed_after[0] if killed_after else None,
        "state": state["state"],
        "reason": (state["result"] or {}).get("reason"),
        "seconds": round(seconds, 1),
        "drivers": state["drivers"],
        "trials": len(watch.rows),
        "executed": len(list(world.folder.glob("execution-*"))) - executed,
        "unclaimed_seconds": round(watch.unclaimed_seconds, 1),
        "left": left,
        "wrong": wrong_with(watch, state),
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@contextmanager
def keeping_up(world: World) -> Iterator[None]:
    """Meanwhile, what ends is started again."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(0.2):
            world.keep_up()

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def wrong_with(watch: Watch, state: dict[str, Any]) -> list[str]:
    """What is wrong with a search that should have ended, and with what is stored of it."""
    store, search_id = watch.world.store, str(watch.search_id)
    watch.look()
    faults: dict[str, object] = {}
    faults["did not end"] = watch.state not in ENDINGS
    faults["lost or changed a committed trial"] = watch.changed
    faults["stored a trial twice"] = repeated(row.uid for row in watch.rows.values())
    epochs = [watch.rows[number].search_epoch for number in sorted(watch.rows)]
    faults["an overtaken driver wrote"] = any(later < earlier for earlier, later in pairwise(epochs))
    numbers = [event.seq for event in store.queue.events(search_id)]
    kinds = Counter(event.kind for event in store.queue.events(search_id))
    faults["events have gaps"] = numbers != list(range(1, len(numbers) + 1))
    faults["who followed missed events or met some twice"] = watch.events != numbers
    faults["trials and their events differ"] = (
        kinds["trial"] != len(watch.rows) or state["spent_trials"] != kinds["trial"]
    )
    fitted = [t for t in store.trials(search_id=search_id) if isinstance(t.outcome, Fits)]
    sure = Counter(str(t.config) for t in fitted if not t.doubts)  # else a search runs them again by itself
    faults["ran a config again whose trials were stored"] = [config for config, times in sure.items() if times > 2]
    (row,) = watch.world.read("SELECT lease_owner, lease_expires_at FROM searches WHERE search_id = :id", id=search_id)
    faults["has ended and holds a lease"] = watch.state in ENDINGS and any(row)
    faults["a lease had expired and nobody took it"] = watch.unclaimed_seconds > UNCLAIMED_SECONDS
    if not watch.world.real:
        faults["one execution is two trials"] = repeated(t.outcome.measurement.device_bytes for t in fitted)  # type: ignore[union-attr]
        recommended = ((state["result"] or {}).get("recommendation") or {}).get("config", {})
        best = {"method": "full", **{axis: value for (axis, value) in EFFECTS if axis != "method"}}
        faults["recommends another config than the fastest"] = state["state"] == "succeeded" and not (
            best.items() <= recommended.items()
        )
    return [what for what, is_so in faults.items() if is_so]


def repeated(values: Iterator[Any]) -> list[Any]:
    return [value for value, times in Counter(values).items() if times > 1]


def wrong(record: dict[str, Any]) -> list[str]:
    """What is wrong with a recorded search."""
    left = [f"left a {name}" for name in record["left"]]
    ended = [] if record["state"] == "succeeded" else [f"{record['state']}: {record['reason']}"]
    return [*record["wrong"], *left, *ended]


def main() -> int:
    """Run what the file lacks, then judge all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--searches", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="trials train a tiny model")
    options = parser.parse_args()
    done = [json.loads(line) for line in options.file.read_text().splitlines()] if options.file.exists() else []
    lacking = sorted(set(range(options.searches)) - {record["number"] for record in done})
    while lacking:
        with world(real=options.real) as service:
            while lacking:
                done.append(searched(service, lacking.pop(0), options.seed))
                with options.file.open("a") as out:
                    out.write(json.dumps(done[-1], separators=(",", ":")) + "\n")
                problems = wrong(done[-1])
                print(
                    f"{done[-1]['number'] + 1} of {options.searches}: {problems or 'sound'}",
                    file=sys.stderr,
                    flush=True,
                )
                if problems:
                    break  # the next one is to begin with a sound service
    killed = [record for record in done if record["killed_after"] is not None]
    sound = sum(not wrong(record) for record in killed)
    print(f"{sound} of {len(killed)} searches in which one part was killed were sound")
    print(dict(Counter(record["victim"] for record in killed)))
    for record in done:
        if problems := wrong(record):
            print(f"{record['number']}: {'; '.join(problems)}: {json.dumps(record)}")
    return int(any(map(wrong, done)))


if __name__ == "__main__":
    sys.exit(main())
