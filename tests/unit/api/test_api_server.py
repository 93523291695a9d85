"""`autofit serve` as a process: where it listens, what it refuses, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from leases import submit
from unit.operations.made_trials import MADE

from autofit.api import server
from autofit.core.errors import EnvironmentLacks, UsageError
from autofit.store import Store
from autofit.trial.machine.detection import detect
from tests.made_stores import put

TOKEN = "a-secret-of-the-operator"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "autofit.cli.main", "serve", *arguments]


def environment(token: str | None) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != server.TOKEN_VARIABLE}
    return inherited | ({} if token is None else {server.TOKEN_VARIABLE: token})


@contextmanager
def running(store: Path, *, token: str | None = None, host: str = "127.0.0.1") -> Iterator[tuple[Any, str]]:
    """A server process and its address, once it answers."""
    process = subprocess.Popen(
        command("--host", host, "--port", "0", "--store", str(store)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(token),
    )
    try:
        line = process.stderr.readline() if process.stderr else ""
        place = re.match(rf"autofit: serving on http://{re.escape(host)}:(\d+), ", line)
        assert place, line
        address = f"http://127.0.0.1:{place[1]}"
        get(f"{address}/healthz")  # it listens before it says so
        yield process, address
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def get(url: str, token: str | None = None) -> Any:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        return json.load(answer)


@pytest.fixture
def store_file(tmp_path: Path) -> Path:
    """A SQLite store with hand-made trials."""
    path = tmp_path / "store.db"
    put(path, filled=True)
    return path


def test_a_server_answers_and_ends_on_sigterm(store_file: Path) -> None:
    with running(store_file) as (process, address):
        assert get(f"{address}/v1/trials?limit=2")["total"] == len(MADE)
        url = f"{address}/v1/recommendation?model=smollm2-135m&seq_len=128&global_batch=4&memory_limit=24GiB"
        assert get(url)["config"]["method"] == "full"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
    assert out == ""
    assert "Traceback" not in err
    # A service that is told to end and ends has not failed; supervisors report what has.
    assert process.returncode == 0
    assert "trial" not in err and "measured" not in err, "a server measures nothing: the message is a search's"


def test_searches_of_the_servers_own_runner_are_lines_of_its_log(store_file: Path) -> None:
    with Store.open(str(store_file)) as store:
        search_id = submit(store, replace(store.trials()[0], hardware=detect()[0]))  # which asks nothing that can run
    with running(store_file) as (process, address):
        while get(f"{address}/v1/searches/{search_id}")["state"] != "failed":
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert f"search {search_id} begins, epoch 1\n" in err and f"search {search_id}: its driver ended" in err
    assert "GET" not in err, "requests are logged where that is asked for"


def test_a_server_on_loopback_answers_to_its_own_names_only(store_file: Path) -> None:
    with running(store_file) as (_, address):
        request = urllib.request.Request(f"{address}/v1/trials", headers={"Host": "rebound.example.org"})
        with pytest.raises(urllib.error.HTTPError, match="421") as refused:
            urllib.request.urlopen(request)
        refused.value.close()


def test_ctrl_c_ends_a_server(store_file: Path) -> None:
    with running(store_file) as (process, _):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode in (0, 130)
    assert (out, err.count("Traceback")) == ("", 0)


def test_beyond_loopback_the_token_is_asked_for(store_file: Path) -> None:
    with running(store_file, token=TOKEN, host="0.0.0.0") as (_, address):
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            get(f"{address}/v1/trials")
        refused.value.close()
        assert get(f"{address}/v1/trials", TOKEN)["total"] == len(MADE)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize("token", [None, ""])
def test_beyond_loopback_a_token_must_be_set(tmp_path: Path, host: str, token: str | None) -> None:
    store = tmp_path / "store.db"
    done = subprocess.run(
        command("--host", host, "--port", "0", "--store", str(store)),
        capture_output=True,
        text=True,
        env=environment(token),
    )
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.count("\n") == 1
    assert "AUTOFIT_TOKEN" in done.stderr and "--host 127.0.0.1" in done.stderr
    assert not store.exists()


def test_a_port_in_use_is_refused(store_file: Path) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            command("--port", str(port), "--store", str(store_file)),
            capture_output=True,
            text=True,
            env=environment(None),
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"autofit: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


@pytest.mark.parametrize("host", ["nowhere.invalid", "300.1.1.1"])
def test_an_address_that_is_none_is_refused(store_file: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(server.TOKEN_VARIABLE, TOKEN)
    with pytest.raises(UsageError, match=f"cannot listen on {host} port 1234: "):
        server.serve(host=host, port=1234, store=str(store_file))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert server.is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "192.168.1.2", "example.org", "localhost.example.org", ""]
)
def test_not_loopback(host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not server.is_loopback(host)
    monkeypatch.delenv(server.TOKEN_VARIABLE, raising=False)
    with pytest.raises(EnvironmentLacks, match="AUTOFIT_TOKEN"):
        server.serve(host=host, port=0, store=str(tmp_path / "store.db"))
