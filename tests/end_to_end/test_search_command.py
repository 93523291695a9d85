"""The main job as a user runs it: the real command, real trials of a small model, real Ray, a real store."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobs import tiny_model
from started import VARIABLE, processes

from autofit.catalog.models import Model
from autofit.core.frontier import Frontier, Point, dominates, ties
from autofit.core.lattice import Config
from autofit.core.outcome import Fits
from autofit.store import Store

SPACE = """
purpose: A handful of configs for tests.
axes:
  method: [lora, full]
  precision: [bf16, fp32]
  micro_batch: [1, 4]
  checkpointing: [full, none]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a tiny model and a search space; all that is started from it can be told by it."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "small").mkdir()
    write_model(tmp_path, tiny_model())
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


def write_model(folder: Path, model: Model) -> None:
    """Have the folder's searches train `model`."""
    (folder / "small" / "config.json").write_text(json.dumps(model.config))


TEN_MILLION = tiny_model(vocabulary=16384, hidden=384, layers=4)
"""Parameters enough for a memory limit to tell their formats apart."""
PROGRAM = (str(Path(__file__).with_name("quiet_machine.py")),)
EVEN_SPEEDS = (str(Path(__file__).with_name("even_speeds.py")),)
"""The same program, whose trials have the same speed however busy the machine is."""


def command(folder: Path, *more: str, program: tuple[str, ...] = PROGRAM) -> list[str]:
    return [
        *(sys.executable, *program, "search", "--model", str(folder / "small")),
        *("--seq-len", "32", "--global-batch", "4", "--space", str(folder / "space.yaml")),
        # The trials are to end a search, not the time, however busy the machine is.
        *("--time-budget", "30m", "--store", str(folder / "store.db"), "--json", *more),
    ]


def run(folder: Path, *more: str, expect: int = 0, program: tuple[str, ...] = PROGRAM) -> tuple[Any, str]:
    done = subprocess.run(command(folder, *more, program=program), capture_output=True, text=True)
    assert done.returncode == expect, done.stderr
    return json.loads(done.stdout) if expect == 0 else None, done.stderr


def trials(folder: Path) -> list[Any]:
    if not (folder / "store.db").exists():
        return []
    with Store.open(str(folder / "store.db")) as store:
        return store.trials()


def strays(folder: Path) -> list[str]:
    """Command lines of processes that a search of this test's folder left behind; Ray's agents end by themselves."""
    return [line for line in processes(folder).values() if "Agent" not in line]


def wait_until_gone(folder: Path) -> None:
    while strays(folder):
        time.sleep(0.2)


def test_search_through_ray_ends_with_an_answer_and_is_then_answered_from_the_store(folder: Path) -> None:
    limits = ("--memory-limit", "2GiB", "--max-trials", "5")
    first, progress = run(folder, *limits)
    assert first["trials"] >= 2, first["stopped_because"]
    assert "trials done" in progress and "best" in progress and "left" in progress
    answer = first["recommendation"]
    assert answer["provenance"] == "measured"
    assert answer["config"]["method"] == "full"  # the most faithful that fits
    assert answer["headroom_bytes"] == 2 * 1024**3 - answer["measurement"]["device_bytes"]
    assert answer["config"] in [p["config"] for p in first["frontier"]["points"]]
    measured = {
        t.config: Point(config=t.config, measurement=t.outcome.measurement, trial_id=None) for t in trials(folder)
    }
    fastest = max(
        (p for p in measured.values() if p.method == "full" and not p.measurement.stopped_early),
        key=lambda p: p.measurement.tokens_per_second,
    )
    chosen = measured[Config.from_json(answer["config"])]
    assert chosen == fastest or ties(chosen, fastest)
    again, _ = run(folder, *limits)
    assert again["trials"] == 0
    assert again["recommendation"]["config"] == answer["config"]
    assert again["frontier"]["points"] == first["frontier"]["points"]
    ran = Counter(t.config.key for t in trials(folder))
    assert max(ran.values()) == 2, first[
        "stopped_because"
    ]  # who led when one trial was left was run again in a fresh process
    assert answer["verified"] == (ran[Config.from_json(answer["config"]).key] == 2)
    wait_until_gone(folder)


def test_out_of_memory_rules_out_and_the_search_ends_with_what_fits(folder: Path) -> None:
    """fp32 needs 16 bytes a parameter beside activations, bf16 half of that: the limit lies between, and above the
    lightest config by more than the address space that RLIMIT_DATA counts beside it. Predictions would rule out what
    is to run out, and only a thorough search runs what is likelier to run out than to fit."""
    write_model(folder, TEN_MILLION)
    (folder / "space.yaml").write_text(SPACE.replace("micro_batch: [1, 4]", "micro_batch: [1]"))
    limit = 240 * 1024**2
    options = ("--in-place", "--method", "full", "--no-predict", "--thorough")
    answer, _ = run(folder, *options, "--memory-limit", "240MiB", program=EVEN_SPEEDS)
    assert answer["recommendation"]["config"]["precision"] == "bf16"
    assert answer["recommendation"]["measurement"]["device_bytes"] <= limit
    assert answer["recommendation"]["headroom_bytes"] >= 0
    assert answer["out_of_memory"] >= 1
    assert answer["out_of_memory"] + answer["ruled_out"] == 2  # the half of the space in fp32
    stored = trials(folder)
    assert {t.outcome.kind for t in stored} == {"fits", "out_of_memory"}
    # what ran out under this limit answers for a lower one, without a trial
    lower, _ = run(folder, *options, "--memory-limit", "239MiB", "--max-trials", "1", program=EVEN_SPEEDS)
    assert lower["answered_from_store"] >= answer["trials"] - 2


HEAP_NOISE_BYTES = 64 * 1024**2
"""What the C library may keep or give back of freed memory: of a small model's peak it is more than a tenth."""
FEW_CONFIGS = """
purpose: Configs enough to be killed several times among.
axes:
  method: [full]
  precision: [bf16]
  micro_batch: [1, 4]
  checkpointing: [full, none]
"""
FEW = 4
"""How many they are."""


def frontier_of(store: Path) -> Frontier:
    """The frontier of all that a store has measured, by what each config has shown last."""
    with Store.open(str(store)) as opened:
        stored = opened.trials()
    latest = {t.config: t for t in stored}
    points = []
    for config, trial in latest.items():
        assert isinstance(trial.outcome, Fits), trial.outcome
        points.append(Point(config=config, measurement=trial.outcome.measurement, trial_id=trial.trial_id))
    any_ = stored[0]
    return Frontier.of(
        points, hardware=any_.hardware, workload=any_.workload, stack=any_.stack, trials=len(stored), out_of_memory=0
    )


def check_same_results(one: Frontier, other: Frontier) -> None:
    """Both have measured all that the space has, with the same results but for the heap's noise."""
    results = [{p.config: p.measurement for p in frontier.considered} for frontier in (one, other)]
    mine, theirs = results
    assert mine.keys() == theirs.keys() and len(mine) == FEW
    for config in mine:
        a, b = mine[config], theirs[config]
        assert a.tokens_per_second == b.tokens_per_second
        assert a.device_bytes == pytest.approx(b.device_bytes, abs=HEAP_NOISE_BYTES)
        steps = min(len(a.losses), len(b.losses))
        assert a.losses[:steps] == pytest.approx(b.losses[:steps], rel=1e-3)


def check_same_frontier(one: Frontier, other: Frontier) -> None:
    """Each config on one frontier is on the other, or is beaten there only by configs that are lighter by no more than
    the heap's noise. Speeds are the same in both, so that nothing else can excuse a difference."""
    for here, there in ((one, other), (other, one)):
        by_config = {p.config: p for p in there.considered}
        for point in here.points:
            same = by_config[point.config]
            for better in (p for p in there.points if p.method == same.method and dominates(p, same)):
                lighter = same.measurement.device_bytes - better.measurement.device_bytes
                assert lighter <= HEAP_NOISE_BYTES, (str(same.config), str(better.config), lighter)


class Stage(IntEnum):
    """How far a search is."""

    START_UP = 0
    """Its own process runs, and no other yet."""
    PREPARING = 1
    """The trials' parent process loads its libraries, and configs are estimated."""
    TRIAL = 2
    """A trial runs: that process has a child, which leads a session of its own, too."""


def stage(folder: Path) -> Stage:
    """How far the search of this test's folder is. Between two trials it counts as preparing."""
    hosts = [pid for pid, line in processes(folder).items() if "autofit.trial.process.fork_server" in line]
    return Stage(min(sum(map(leads_session, hosts)), Stage.TRIAL))


def leads_session(pid: int) -> bool:
    """Whether a process leads a session; one that has ended does not."""
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When a search is killed, and how."""

    stage: Stage
    """It is at this stage."""
    stored: int = 0
    """So many trials are stored, at least."""
    kind: signal.Signals = signal.SIGKILL
    """What it is sent."""

    def is_due(self, folder: Path) -> bool:
        """Whether the search of this test's folder has come so far."""
        return (self.stored == 0 or len(trials(folder)) >= self.stored) and stage(folder) == self.stage


def kill_again_and_again(folder: Path, kills: Iterable[Kill], *more: str) -> list[int]:
    """Start the same search once for each of `kills`, and check that nothing measured is lost and no process stays. How
    each ended."""
    before: list[Any] = []
    ends = []
    for how in kills:
        search = subprocess.Popen(
            command(folder, "--memory-limit", "2GiB", *more, program=EVEN_SPEEDS),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        time.sleep(START_UP_SECONDS)
        wait_until(search, partial(how.is_due, folder))
        # A batch system stops whole groups: Ray is not to end before those who ask it to.
        os.killpg(search.pid, how.kind) if how.kind == signal.SIGTERM else search.send_signal(how.kind)
        ends.append(search.wait())
        wait_until_gone(folder)
        now = trials(folder)
        assert [t.to_json() for t in now[: len(before)]] == [t.to_json() for t in before]
        before = now
    return ends


def wait_until(search: subprocess.Popen[Any], condition: Callable[[], bool]) -> None:
    """Wait until it holds; the search must not end before."""
    while not condition():
        assert search.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)


START_UP_SECONDS = 0.2
"""Enough to be in the middle of one's own imports; other processes come later on any machine."""
EARLY_KILLS = (Kill(stage=Stage.START_UP), Kill(stage=Stage.PREPARING))
LATE_KILLS = (Kill(stage=Stage.TRIAL, stored=2),)
"""No two alike. Each that comes late pays for a whole start, which is most of this test's time: without a probe and
predictions, that is less."""


def test_killed_at_every_stage_it_goes_on_to_the_same_frontier(folder: Path) -> None:
    write_model(folder, tiny_model(vocabulary=16384, hidden=128))
    (folder / "space.yaml").write_text(FEW_CONFIGS)
    options = ("--in-place", "--seq-len", "128")  # activations enough to stand out of the heap's noise
    kill_again_and_again(folder, EARLY_KILLS, *options)
    options = (*options, "--no-predict")
    limited = (*options, "--memory-limit", "2GiB")
    undisturbed = folder / "undisturbed.db"
    alongside = command(folder, *limited, "--store", str(undisturbed), program=EVEN_SPEEDS)
    # Speeds come from a formula and memory is each process's own: the two searches may run at once.
    elsewhere = {**os.environ, VARIABLE: ""}
    with subprocess.Popen(alongside, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=elsewhere) as other:
        kill_again_and_again(folder, LATE_KILLS, *options)
        expected = json.loads(other.communicate()[0])
    measured = len({t.config for t in trials(folder)})
    assert 1 <= measured < FEW
    answer, _ = run(folder, *limited, program=EVEN_SPEEDS)
    assert answer["answered_from_store"] == measured
    assert answer["recommendation"]["config"] == expected["recommendation"]["config"]
    mine, theirs = frontier_of(folder / "store.db"), frontier_of(undisturbed)
    check_same_results(mine, theirs)
    check_same_frontier(mine, theirs)
    for frontier, document in ((mine, answer), (theirs, expected)):
        assert [p["trial_id"] for p in document["frontier"]["points"]] == [p.trial_id for p in frontier.points]
    ran = Counter(t.config.key for t in trials(folder))
    assert sum(count > 1 for count in ran.values()) <= 6, "only winners are run again"  # three a method at most
    again, _ = run(folder, *limited, program=EVEN_SPEEDS)
    assert again["trials"] == 0
    assert again["frontier"]["points"] == answer["frontier"]["points"]


def test_killed_through_ray_nothing_is_lost_and_no_process_stays(folder: Path) -> None:
    (folder / "space.yaml").write_text(FEW_CONFIGS)
    # What Kubernetes, systemd and Slurm send is an interrupt, as Ctrl-C is.
    kills = [Kill(stage=Stage.TRIAL, stored=1, kind=signal.SIGTERM)]
    assert kill_again_and_again(folder, kills, "--no-predict") == [130]
    with Store.open(str(folder / "store.db")) as store:
        assert store.searches()[0].state == "cancelled"
    measured = {t.config.key for t in trials(folder)}
    assert measured
    options = ("--in-place", "--memory-limit", "2GiB", "--max-trials", "1", "--no-predict")
    answer, _ = run(folder, *options, program=EVEN_SPEEDS)
    assert answer["answered_from_store"] == len(measured)
    assert answer["recommendation"]["provenance"] == "measured"


@pytest.fixture
def cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a Ray cluster of one node, on loopback, that is there before the search and after it."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    short = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # a socket's path is limited to 107 characters
    ray = str(Path(sys.executable).with_name("ray"))
    words = ["start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=2"]
    words += ["--include-dashboard=false", f"--object-store-memory={80 * 1024**2}", f"--temp-dir={short.name}"]
    # The second variable keeps Ray from replacing 127.0.0.1 by an address that others reach.
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", VARIABLE: ""}
    (folder / "nothing compiled").mkdir()
    quiet["TORCH_EXTENSIONS_DIR"] = str(folder / "nothing compiled")
    with (folder / "ray.log").open("w") as log:
        head = subprocess.Popen(
            [ray, *words], env={**os.environ, **quiet}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        while "runtime started" not in (folder / "ray.log").read_text():
            assert head.poll() is None, (folder / "ray.log").read_text()
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        head.wait()
        short.cleanup()


def test_a_running_cluster_is_used_and_left_as_it_was(folder: Path, cluster: str) -> None:
    options = ("--ray-address", cluster, "--memory-limit", "2GiB", "--max-trials", "2", "--no-predict")
    answer, _ = run(folder, *options, program=EVEN_SPEEDS)
    assert answer["recommendation"]["provenance"] == "measured"
    assert answer["trials"] == len(trials(folder)) == 2
    wait_until_gone(folder)
    host, _, port = cluster.rpartition(":")
    socket.create_connection((host, int(port))).close()
    (folder / "space.yaml").write_text(SPACE.replace("[lora, full]", "[full]") + "defaults:\n  offload: optimizer\n")
    _, errors = run(folder, *options, expect=2)
    lacking = f"on {host}: offload=optimizer needs DeepSpeed's cpu_adam, which is not compiled here yet"
    assert f"space space has no config for this search: {lacking} (autofit doctor --build-ops)" in errors
    wait_until_gone(folder)


def test_sigint_ends_with_130_and_keeps_what_was_measured(folder: Path) -> None:
    process = subprocess.Popen(
        # Of the sixteen configs most are still to come when the first is stored: speeds do not end this search.
        command(folder, "--in-place", "--memory-limit", "2GiB", "--no-predict", program=EVEN_SPEEDS),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(process, lambda: bool(trials(folder)))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130
    assert out == ""
    assert "resumes from there" in err
    assert trials(folder)
    wait_until_gone(folder)
    with Store.open(str(folder / "store.db")) as store:
        assert store.searches()[0].state == "cancelled"
