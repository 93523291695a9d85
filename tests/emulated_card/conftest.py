"""Programs on emulated machines. torch is imported once, by a server that forks a process for each program."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from tests.emulated_card import build
from tests.emulated_card.cards import Machine

SERVER = """
import contextlib, gc, json, os, socket, sys
import pynvml, torch
gc.freeze()
server = socket.socket(fileno=int(sys.argv[1]))
while True:
    said, files, _, _ = socket.recv_fds(server, 1 << 20, 2)
    if not said:
        break
    with contextlib.suppress(ChildProcessError):  # those that have ended; no sooner, so that each can be opened
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    child = os.fork()
    if child:
        server.send(str(child).encode())
        for file in files:
            os.close(file)
        continue
    server.close()
    os.dup2(files[0], 0), os.dup2(files[1], 1), os.dup2(files[1], 2)
    told = json.loads(said)
    os.environ.update(told["environment"])
    exec(told["program"], {"torch": torch, "pynvml": pynvml, "os": os})
    sys.stdout.flush()
    os._exit(0)
"""


@dataclass
class Program:
    """A program that runs."""

    pid: int
    end: int
    """A descriptor that can be read once the program has ended."""
    stdin: IO[str]
    stdout: IO[str]

    def line(self) -> str:
        """The next line that it prints, on standard output or standard error."""
        return self.stdout.readline().rstrip("\n")

    def go_on(self) -> None:
        """Let it return from its `input()`."""
        print(file=self.stdin, flush=True)

    def ends_within(self, seconds: float | None) -> bool:
        """Whether it ends in that time; None waits for it."""
        return bool(select.select([self.end], [], [], seconds)[0])

    def kill(self) -> None:
        """End it as the kernel would, and see it end."""
        signal.pidfd_send_signal(self.end, signal.SIGKILL)
        self.ends_within(None)

    def answer(self) -> Any:
        """What it prints last, which is JSON, when it has ended."""
        text = self.stdout.read()
        self.ends_within(None)  # it holds the card for a moment more
        try:
            return json.loads(text.splitlines()[-1])
        except (IndexError, json.JSONDecodeError):
            raise AssertionError(text) from None


@pytest.fixture(scope="session")
def home() -> Path:
    """The folder with the emulated card's libraries and its torch; skips where they have not been built."""
    root = Path(__file__).parents[2]
    folder = Path(os.environ.get("EMULATED_CARD_HOME", root / ".venv" / "emulated-card")).absolute()
    built = folder / "lib" / build.SOURCES_DIGEST
    if not (folder / "lib").exists():
        pytest.skip(f"no emulated card in {folder}: make emulated-card")
    if not built.exists() or built.read_text() != build.digest():
        pytest.skip(f"the emulated card in {folder} was built from other sources: make emulated-card")
    return folder


@pytest.fixture(scope="session")
def server(home: Path) -> Iterator[socket.socket]:
    """The process that has imported torch; it has no machine, and so would end if the import asked for a card."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(home / "lib"), "PYTHONPATH": str(home / "site")}
    for name in ("EMULATED_CARDS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF"):
        environment.pop(name, None)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            command = [sys.executable, "-W", "ignore", "-c", SERVER, str(theirs.fileno())]
            process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        yield ours
    assert process.wait(timeout=60) == 0


Start = Callable[..., Program]


@pytest.fixture
def start(server: socket.socket) -> Iterator[Start]:
    """Starts a program on a machine, with more environment variables if need be."""
    started: list[Program] = []

    def start(machine: Machine, program: str, **environment: str) -> Program:
        told = {"environment": {**machine.environment, **environment}, "program": textwrap.dedent(program)}
        (their_stdin, stdin), (stdout, their_stdout) = os.pipe(), os.pipe()
        socket.send_fds(server, [json.dumps(told).encode()], [their_stdin, their_stdout])
        pid = int(server.recv(64))
        os.close(their_stdin)
        os.close(their_stdout)
        started.append(Program(pid, os.pidfd_open(pid), os.fdopen(stdin, "w"), os.fdopen(stdout)))
        return started[-1]

    yield start
    for program in started:
        with suppress(ProcessLookupError):
            program.kill()
        os.close(program.end)
        program.stdin.close()
        program.stdout.close()
