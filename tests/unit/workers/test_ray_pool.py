"""Trials on real Ray: one worker on this machine, nothing beyond loopback, nothing left behind."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import tiny_job, tiny_model, tiny_request

from autofit.core.errors import EnvironmentLacks
from autofit.core.outcome import Crashed, Fits
from autofit.operations import SearchRequest, WorkloadOptions
from autofit.planning.plan import resolve
from autofit.techniques import complete
from autofit.techniques.axes.sharding import NVME_VARIABLE
from autofit.training.prerequisites import native_ops
from autofit.training.prerequisites.requirements import why_not_trainable
from autofit.trial.machine.cores import threads
from autofit.trial.machine.detection import cpu
from autofit.trial.machine.device_lock import held
from autofit.trial.process import runner
from autofit.workers.cluster import nodes as cluster
from autofit.workers.ray_pool import RayPool
from autofit.workers.slots import running_trial


@pytest.fixture(scope="module")
def compiled_there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch compiles is in this folder where the workers run, and elsewhere for who asks them."""
    return tmp_path_factory.mktemp("extensions")


@pytest.fixture(scope="module")
def pool(compiled_there: Path) -> Iterator[RayPool]:
    """A private Ray with its one CPU worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(compiled_there))
        patch.delenv(NVME_VARIABLE, raising=False)
        pool = RayPool(device="cpu")
        pool.site()
    yield pool
    pool.close()


def completed(pool: RayPool):  # type: ignore[no-untyped-def]
    while not (done := pool.wait(1.0)):
        pass
    return [attempt for _, attempt in done]


def ray_processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "ray" in " ".join(command_line(p))]


def command_line(process: psutil.Process) -> list[str]:
    """Empty for one that has ended, also if nobody has waited for it yet."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def actor_processes() -> list[psutil.Process]:
    return [p for p in ray_processes() if "".join(command_line(p)[:1]).startswith("ray::TrialActor")]


def actor_process() -> psutil.Process:
    while not (processes := actor_processes()):
        time.sleep(0.05)
    return processes[0]


def listening(process: psutil.Process) -> list[str]:
    """Addresses that it accepts connections on; none once it has ended."""
    try:
        return [c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def test_one_worker_takes_the_whole_machine(pool: RayPool) -> None:
    assert pool.size == 1
    assert [node.free_cpus for node in cluster.nodes(pool._ray)] == [0.0]
    assert pool.site()[0].key == cpu().key


def test_a_trial_runs_and_the_worker_is_free_again(pool: RayPool) -> None:
    for _ in range(2):
        pool.submit(tiny_request())
        (done,) = completed(pool)
        assert isinstance(done.outcome, Fits)
        assert done.seconds > 0
    assert pool.wait(0.0) == []


def test_a_trial_waits_for_another_processes_and_says_so_once(
    pool: RayPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running_trial, "ASK_SECONDS", 0.1)
    with held(["cpu"]), caplog.at_level(logging.WARNING):
        pool.submit(tiny_request(deadline_seconds=600.0))
        (under_way,) = pool._busy.values()
        for _ in range(2):
            under_way.since = earlier = time.monotonic() - 60.0
            while under_way.since == earlier:  # what it waits is not held against it
                assert pool.wait(0.2) == []
    assert [r.getMessage() for r in caplog.records] == [
        f"autofit: waiting for another autofit trial on this device (pid {os.getpid()})"
    ]
    assert isinstance(completed(pool)[0].outcome, Fits)


def test_what_the_workers_machines_lack_is_left_out_of_a_search(
    pool: RayPool, compiled_there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of offloading, which needs operations that are compiled there, and for nvme a folder."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    compile_in_name_only(tmp_path)
    job, axes = tiny_job(), {"micro_batch": 1, "precision": "bf16"}
    plain, optimizer, params = (complete({**axes, "offload": value}) for value in ("none", "optimizer", "params"))
    assert [why_not_trainable(config, job) for config in (plain, optimizer, params)] == [None] * 3
    assert pool.cannot(plain, job) is None
    message = pool.cannot(optimizer, job) or ""
    assert message.startswith(
        "on 127.0.0.1: offload=optimizer needs DeepSpeed's cpu_adam, which is not compiled here yet"
    )
    assert "use adamw" in (pool.cannot(optimizer.replace(optimizer="sgd"), job) or ""), "nobody need be asked"
    space = tmp_path / "space.yaml"
    space.write_text("axes:\n  method: [full]\n  offload: [optimizer, none]\n")
    options = WorkloadOptions(model="smollm2-135m", seq_len=128, global_batch=4)
    narrowed = resolve(SearchRequest(workload=options, space=str(space), device="cpu"), pool)
    assert {config["offload"] for config in narrowed.lattice.configs} == {"none"}
    assert message in narrowed.unsupported

    compile_in_name_only(compiled_there)
    assert pool.cannot(params, job) is None, "whatever there is here"
    shutil.rmtree(tmp_path / "cpu_adam")
    assert pool.cannot(params, job) is None
    assert pool.cannot(optimizer, job) == message, "once and for all its likes"


def compile_in_name_only(folder: Path) -> None:
    """An operation that is taken for compiled."""
    (folder / "cpu_adam").mkdir(exist_ok=True)  # who looks for it makes it
    (folder / "cpu_adam" / "cpu_adam.so").touch()
    (folder / "cpu_adam" / native_ops.STAMP).write_text(native_ops._versions())


def test_a_worker_is_served_as_who_has_started_it(pool: RayPool) -> None:
    """Ray's own default is nice 15: on a machine that does anything else, trials would be timed as its last."""
    assert actor_process().nice() == psutil.Process().nice()


def test_a_trial_uses_all_cores_whatever_its_worker_asks_of_ray(pool: RayPool) -> None:
    class OneCore:
        """An actor of whose cores Ray says what it says to a GPU's worker: one."""

        def run(self, request: dict[str, Any], entries: str) -> tuple[str | None, str]:
            """What Ray has set, and why a trial fails whose updates say with how many threads they are made."""
            import os

            from autofit.trial.process.runner import TrialRunner
            from autofit.trial.request import TrialRequest

            os.environ["PYTHONPATH"] = os.pathsep.join([entries, os.environ.get("PYTHONPATH", "")])
            with TrialRunner(entry="rank_entries:by_name") as runner:
                outcome = runner.attempt(TrialRequest.from_json(request)).outcome
            return os.environ.get("OMP_NUM_THREADS"), outcome.reason

    request = tiny_request(job=tiny_job(replace(tiny_model(), name="says_threads"))).to_json()
    # Ray leaves alone what its own environment has set, as an earlier trial of this process may have.
    one = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    actor = pool._ray.remote(OneCore).options(num_cpus=0, runtime_env=one).remote()
    try:
        answer = actor.run.remote(request, str(Path(__file__).parents[1] / "trial"))
        of_ray, message = pool._ray.get(answer)
    finally:
        pool._ray.kill(actor)
    assert of_ray == "1", "otherwise this shows nothing"
    assert f"{threads()} threads, OpenMP {threads()}" in message, message


def test_nothing_listens_beyond_loopback(pool: RayPool) -> None:
    pool.site()
    addresses = [ip for process in ray_processes() for ip in listening(process)]
    assert addresses
    assert {ip.removeprefix("::ffff:") for ip in addresses} <= {"127.0.0.1", "::1"}


def test_a_lost_worker_is_replaced(pool: RayPool) -> None:
    """Whether its trial is run again is for the search to say."""
    pool.submit(tiny_request())
    actor_process().send_signal(signal.SIGKILL)
    (done,) = completed(pool)
    assert isinstance(done.outcome, Crashed) and done.outcome.worker_lost
    assert done.outcome.transient, "that says nothing of the config"
    assert "worker process has died" in done.outcome.reason, done.outcome.reason
    pool.submit(tiny_request())
    assert isinstance(completed(pool)[0].outcome, Fits)


def test_a_worker_that_does_not_answer_is_given_up(pool: RayPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_trial, "LOST_SECONDS", 2.0)
    actor_process().send_signal(signal.SIGSTOP)  # as good as a node behind a broken cable
    pool.submit(tiny_request(deadline_seconds=1.0))
    (done,) = completed(pool)
    assert isinstance(done.outcome, Crashed) and done.outcome.transient
    assert "did not answer" in done.outcome.reason
    monkeypatch.undo()
    pool.submit(tiny_request())
    assert isinstance(completed(pool)[0].outcome, Fits)


def test_a_worker_is_given_time_to_say_that_its_fork_server_hangs() -> None:
    running = running_trial.RunningTrial(tiny_request(deadline_seconds=1.0), [], worker="w", queued_seconds=0.0)
    running.since -= 1.0 + runner.GRACE_SECONDS + 2 * runner.ENDING_SECONDS
    assert not running.is_overdue
    running.since -= 60.0
    assert running.is_overdue


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the private Rays of processes that a test starts have their folders. A short path, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="af", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_more_workers_than_machines_are_refused(place: Path) -> None:
    code = "from autofit.workers.ray_pool import RayPool; RayPool(device='cpu', workers=2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "EnvironmentLacks" in done.stderr and "--workers 1" in done.stderr
    assert names(place) == []


def test_searches_of_one_process_share_its_ray(place: Path) -> None:
    """The second waits for the machine that the first one has; the first one's end is not its own."""
    code = """
from autofit.workers.ray_pool import RayPool
first = RayPool(device="cpu")
first.site()
second = RayPool(device="cpu")
try:
    RayPool(address="192.0.2.1:6379")
except Exception as error:
    print(error)
first.close()
first.close()
print(second.site()[0].kind)
second.close()
import ray
print(ray.is_initialized())
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
try:
    RayPool(device="cpu")
except Exception as error:
    print(error)
mine = RayPool(address="auto")
mine.site()
mine.close()
print(ray.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    message = done.stdout.splitlines()
    assert "connected to another Ray: a private one on this machine" in message[0], done.stderr[-2000:]
    assert message[1:3] == ["cpu", "False"]
    assert "connected to a Ray of its own" in message[3] and "ray_address=" in message[3]
    assert message[4:] == ["True"], "what the program has connected is left to it"
    assert names(place) == ["ray"], "the program's own"


def test_a_private_ray_needs_no_home_and_leaves_no_token_behind(tmp_path: Path, place: Path) -> None:
    """Also the second one of a process, and one that the program starts itself with a token in its own home."""
    code = """
import os
from pathlib import Path
from autofit.workers.cluster.connection import connect
for _ in range(2):
    connection = connect(None)
    print(len(connection.ray.nodes()))
    connection.close()
print([name for name in os.environ if name.startswith("RAY_AUTH")])
os.environ["HOME"] = os.environ["AUTOFIT_TEST_HOME"]
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
print(len(ray.nodes()), Path.home().joinpath(".ray", "auth_token").exists())
"""
    (tmp_path / "file").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"HOME": str(tmp_path / "file"), "AUTOFIT_TEST_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == ["1", "1", "[]", "1 True"], done.stderr[-2000:]


def test_a_private_ray_has_the_mig_instances_that_are_named(place: Path) -> None:
    """However many cards there are, which is what Ray counts."""
    code = """
from types import SimpleNamespace
from autofit.trial.machine import nvml
from autofit.workers.cluster.connection import connect
nvml.devices = lambda: SimpleNamespace(visible=("MIG-a", "MIG-b"))
connection = connect(None)
print(connection.ray.cluster_resources()["GPU"])
connection.close()
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines() == ["2.0"], done.stderr[-2000:]


def test_an_address_that_does_not_answer_is_named() -> None:
    code = "from autofit.workers.ray_pool import RayPool; RayPool(address='127.0.0.1:1')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert EnvironmentLacks.__name__ in done.stderr, done.stderr[-2000:]
    assert "--ray-address" in done.stderr


def test_a_killed_driver_leaves_no_process(tmp_path: Path, place: Path) -> None:
    """Ray's two agents and its idle workers are no part of this: they find out by themselves, within minutes."""
    code = (
        "import time; from autofit.workers.ray_pool import RayPool; "
        "pool = RayPool(device='cpu'); pool.site(); print('up', flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "AUTOFIT_TEST_MARKER": str(tmp_path)}
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert driver.stdout is not None
    assert driver.stdout.readline().strip() == "up"
    assert any("autofit.trial.process.fork_server" in line for line in left_by(tmp_path))
    (folder,) = place.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700, "others cannot enter, whatever Ray makes of its own"
    assert [name[:8] for name in names(folder / "ray")] == ["session_"] * 2, "one session, and a link to it"
    driver.kill()
    driver.wait()
    driver.stdout.close()
    while left_by(tmp_path):
        time.sleep(0.5)


def left_by(marker: Path) -> list[str]:
    """Command lines of the processes with the marker in their environment, Ray's agents and idle workers apart."""
    lines = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                environment = (process / "environ").read_bytes().split(b"\0")
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:
                continue
            if f"AUTOFIT_TEST_MARKER={marker}".encode() in environment and "Agent" not in line and line != "ray::IDLE":
                lines.append(line)
    return lines
