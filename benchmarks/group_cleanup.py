"""What trials of several ranks leave behind when half of them are killed at random moments.

    python benchmarks/group_cleanup.py [--trials 50] [--ranks 2] [--seed 0] [--out FILE]

The trials run in a process of their own, as those of a search do. In the killed half, SIGKILL hits a random rank in
most trials, the warm parent of one in some, and that whole process in others. Counted before, after and between trials:
processes (zombies too), ports that they listen on, shared memory segments, and temporary files. Fails if any is left.

A trial counts as killed if it died of the signal. One that had already ended is counted separately, and another is
killed in its place.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autofit.catalog.models import Model
from autofit.techniques import Job, complete, parse
from autofit.training import native_ops
from autofit.trial.group_runner import GroupRunner
from autofit.trial.request import TrialRequest
from autofit.trial.shared_memory import is_mapped
from autofit.trial.site import cpu, installed_stack
from autofit.workload import Workload

CONFIGS = ("ddp", "fsdp", "zero2", "zero3")
"""Values of `sharding`."""
OFFLOADED = "zero2,offload=optimizer"
"""One more, where DeepSpeed's operation for it is compiled."""
VICTIMS = "rank,rank,parent,rank,rank,driver,rank,rank,rank,rank"
"""What is killed, in turn; mostly ranks, because parents and drivers take half a minute to come back."""
SETTLE_SECONDS = 20.0
"""How long killed processes may take to be gone. They end at once, but a busy machine is slower to show it."""
MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip
_PR_SET_CHILD_SUBREAPER = 36


def drive(ranks: int) -> None:
    """Run a trial for each line of standard input, which names its sharding and offload, and print how it ended."""
    model = Model(name="tiny", config=MODEL, source="a benchmark", parameters=None)
    workload = Workload(model=model.name, model_digest=model.digest, seq_len=32, global_batch=2 * ranks, devices=ranks)
    job = Job(model=model, workload=workload, hardware=cpu(), stack=installed_stack())
    with GroupRunner(ranks=ranks) as runner:
        runner.start()
        for line in sys.stdin:
            config = complete(parse(f"micro_batch=1,precision=bf16,sharding={line.strip()}"))
            request = TrialRequest(
                job=job, config=config, memory_limit_bytes=2 * 1024**3, deadline_seconds=60.0, timing_seconds=0.2
            )
            outcome, seconds = runner.run(request)
            print(json.dumps({"outcome": outcome.kind, "reason": getattr(outcome, "reason", ""), "seconds": seconds}))
            sys.stdout.flush()


class Driver:
    """The process that runs the trials; started again after it has been killed."""

    def __init__(self, ranks: int) -> None:
        command = [sys.executable, __file__, "--drive", "--ranks", str(ranks)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self, sharding: str) -> None:
        """Start a trial."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{sharding}\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """How the trial ended; None if the driver was killed."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    @property
    def parents(self) -> list[int]:
        """The warm parents, one for each rank."""
        return children(self.process.pid)

    @property
    def ranks(self) -> list[int]:
        """The trial's processes."""
        return [rank for parent in self.parents for rank in children(parent)]


def children(pid: int) -> list[int]:
    """The children of a process, zombies included."""
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def descendants(pid: int) -> list[int]:
    """The descendants of a process, in any generation; this process inherits its own orphaned descendants."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def listening(pids: list[int]) -> list[str]:
    """Local addresses on which the processes listen, as /proc/net/tcp writes them."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):
            sockets |= {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(fields[1])
    return found


def segments() -> set[str]:
    """This user's shared memory segments, except those that a process has mapped, which belong to other programs."""
    found = set()
    for path in Path("/dev/shm").iterdir():
        with suppress(OSError):
            if path.stat().st_uid == os.getuid() and not is_mapped(path):
                found.add(path.name)
    return found


def left_behind(driver: Driver | None, before: set[str], temporary: Path) -> dict[str, list[Any]]:
    """What a trial has left behind, apart from the driver and its warm parents."""
    standing = [] if driver is None else [driver.process.pid, *driver.parents]
    every = descendants(os.getpid())
    return {
        "processes": [pid for pid in every if pid not in standing],
        "ports": listening(every),
        "segments": sorted(segments() - before),
        "files": sorted(str(path) for path in temporary.rglob("*")),
    }


def settled(driver: Driver | None, before: set[str], temporary: Path) -> dict[str, list[Any]]:
    """The same, as soon as nothing is left or when time is up."""
    until = time.monotonic() + SETTLE_SECONDS
    while any((left := left_behind(driver, before, temporary)).values()) and time.monotonic() < until:
        reap_orphans(driver)
        time.sleep(0.05)
    return left


def reap_orphans(driver: Driver | None) -> None:
    """Reap inherited processes that have ended, as init does for orphans."""
    for pid in children(os.getpid()):
        if driver is None or pid != driver.process.pid:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def kill(driver: Driver, victim: str, chance: random.Random) -> bool:
    """Send SIGKILL to one process of the running trial; False if it is no longer running."""
    pids = {"rank": driver.ranks, "parent": driver.parents, "driver": [driver.process.pid]}[victim]
    if not pids or not driver.ranks:
        return False
    with suppress(ProcessLookupError):
        os.kill(chance.choice(pids), signal.SIGKILL)
    if victim == "driver":
        driver.process.wait()
    return True


def one_trial(
    driver: Driver, sharding: str, victim: str | None, seconds: float, chance: random.Random
) -> tuple[dict[str, Any] | None, bool]:
    """Run a trial and, if there is a victim, kill it within the first `seconds`. Returns how the trial ended (None if
    no driver is left to say so) and whether a signal was sent."""
    driver.begin(sharding)
    sent = False
    if victim is not None:
        until = time.monotonic() + 120.0
        while not driver.ranks and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, seconds))
        sent = kill(driver, victim, chance)
    return driver.answer(), sent


def died(answer: dict[str, Any] | None) -> bool:
    """Whether a trial did not end by itself: a signal to a process that has already answered changes nothing."""
    return answer is None or answer["outcome"] != "fits"


def said(answer: dict[str, Any] | None) -> str:
    """How a trial ended, in words."""
    if answer is None:
        return "driver killed"
    return ": ".join(filter(None, (answer["outcome"], answer["reason"])))


def run(trials: int, ranks: int, victims: list[str], chance: random.Random, temporary: Path) -> dict[str, Any]:
    """Run all trials and report what they have left behind."""
    before = segments()
    report: dict[str, Any] = {
        "ranks": ranks,
        "hardware": cpu().name,
        "stack": installed_stack().to_json(),
        "at_first": {name: len(found) for name, found in left_behind(None, before, temporary).items()},
    }
    outcomes: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    too_late: Counter[str] = Counter()
    between: dict[str, list[Any]] = {}
    configs = (*CONFIGS, OFFLOADED) if native_ops.is_built("cpu_adam") else CONFIGS
    typical = dict.fromkeys(configs, 2.0)
    driver = Driver(ranks)
    done = 0
    while done < trials:
        sharding = configs[done // 2 % len(configs)]
        victim = victims[done // 2 % len(victims)] if done % 2 else None
        answer, sent = one_trial(driver, sharding, victim, 0.9 * typical[sharding], chance)
        if died(answer) and not sent:
            raise SystemExit(f"a trial died without being killed: {answer}")
        if answer is None or driver.process.poll() is not None:
            driver.close()
            driver = Driver(ranks)
        if victim is not None:
            (killed if died(answer) else too_late)[victim] += 1
        elif answer is not None:
            typical[sharding] = min(typical[sharding], answer["seconds"])  # some also wait for imports
        if victim is None or died(answer):  # otherwise another trial is killed in its place
            done += 1
            outcomes[said(answer)] += 1
            ran[sharding] += 1
        for name, found in settled(driver, before, temporary).items():
            between.setdefault(name, []).extend(found)
    driver.close()
    report["trials"] = trials
    report["by_config"] = dict(ran)
    report["killed"] = killed.total()
    report["of_them"] = dict(killed)
    report["had_just_ended"] = dict(too_late)
    report["outcomes"] = dict(outcomes)
    report["between_trials"] = between
    left = settled(None, before, temporary)
    report["at_last"] = {name: len(found) for name, found in left.items()}
    report["left"] = left
    return report


def main() -> None:
    """Run the trials and count what they leave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--victims", default=VICTIMS, help="comma-separated: rank, parent, driver")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        drive(arguments.ranks)
        return
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryDirectory() as cache:
        os.environ["TMPDIR"] = temporary
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # torch's own files, which are meant to stay
        victims, chance = arguments.victims.split(","), random.Random(arguments.seed)
        report = run(arguments.trials, arguments.ranks, victims, chance, Path(temporary))
    text = json.dumps({"recorded_at": datetime.now(UTC).isoformat(timespec="seconds"), **report}, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    if any(report["left"].values()) or any(report["between_trials"].values()):
        raise SystemExit("something was left behind")


if __name__ == "__main__":
    main()
