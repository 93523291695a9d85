"""Trials on Ray actors: one per device, on this machine or on a cluster."""

from __future__ import annotations

import logging
import os
import socket
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autofit.errors import EnvironmentLacks, not_installed
from autofit.hardware import Hardware, Stack
from autofit.outcome import Crashed, Outcome
from autofit.trial.request import TrialRequest
from autofit.workers.pool import Completed

OBJECT_STORE_BYTES = 80 * 1024**2
"""Ray's minimum: nothing but small JSON documents passes between driver and workers."""
LOST_WORKER_RETRIES = 1
"""A worker that is lost (a preempted node) costs its trial one more attempt, which is ours to count, not Ray's."""
START_SECONDS = 300.0
"""A worker that has not started by then will not: its node is gone, or the resources it needs are."""
NODES_SECONDS = 120.0
"""How long a cluster whose nodes are still starting is waited for."""
GRACE_SECONDS = 60.0
"""After its deadline a trial is killed and answered for by its worker; beyond this the worker itself is gone."""


class TrialActor:
    """One device's worker. The actor's process never touches the device: trials run in children of its warm parent."""

    def __init__(self, device: str, driver: int | None = None) -> None:
        from autofit.trial.runner import TrialRunner
        from autofit.trial.site import detect
        from autofit.workers.watch import end_with

        if driver is not None:
            end_with(driver)
        self._hardware, self._stack = detect(device)
        self._runner = TrialRunner(kind=self._hardware.kind)
        self._runner.start()

    def site(self) -> dict[str, Any]:
        """Hardware and stack of this worker, as JSON."""
        return {"hardware": self._hardware.to_json(), "stack": self._stack.to_json()}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one request, as JSON, to its outcome and seconds."""
        from autofit.outcome import outcome_to_json

        outcome, seconds = self._runner.run(TrialRequest.from_json(request))
        return {"outcome": outcome_to_json(outcome), "seconds": seconds}


@dataclass(slots=True, kw_only=True)
class _Running:
    """A request that a worker has taken."""

    worker: int
    request: TrialRequest
    attempt: int
    since: float = field(default_factory=time.monotonic)

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self.since > self.request.deadline_seconds + GRACE_SECONDS


class RayPool:
    """Workers on Ray; a private one-machine Ray without dashboard, on loopback, unless an address is given."""

    def __init__(
        self,
        *,
        address: str | None = None,
        workers: int | None = None,
        device: str = "auto",
        accelerator: str | None = None,
    ) -> None:
        self._ray = _connect(address)
        self._device = device
        # In a cluster the driver may be on another machine; there Ray itself ends a lost driver's workers.
        self._driver = os.getpid() if address is None else None
        self._accelerator = accelerator
        self._running: dict[Any, _Running] = {}
        self._starting: dict[int, tuple[Any, float]] = {}
        """Workers that take the place of lost ones: the answer that shows they are up, and since when it is awaited."""
        try:
            if address is not None:
                _wait_for_nodes(self._ray)
            self._uses_gpus = device != "cpu" and self._ray.cluster_resources().get("GPU", 0) >= 1
            self.size = self._size(workers)
            self._actors = [self._new_actor() for _ in range(self.size)]
            self._idle = list(range(self.size))
            self._site: tuple[Hardware, Stack] | None = None
        except BaseException:
            self._ray.shutdown()
            raise

    def _size(self, workers: int | None) -> int:
        available = _gpus(self._ray, self._accelerator) if self._uses_gpus else len(_cpus_per_node(self._ray))
        if self._uses_gpus:
            what = f"{self._accelerator or ''} GPUs".lstrip()
        else:
            what = "machines (on CPUs a trial takes a whole machine)"
        if available == 0:
            raise EnvironmentLacks(f"Ray has no {what}", remedy="check `ray status`, and --hardware")
        if workers is not None and workers > available:
            raise EnvironmentLacks(
                f"--workers {workers} asks for more than the {available} {what} that Ray has",
                remedy=f"use --workers {available} or add nodes",
            )
        return workers or available

    def _new_actor(self) -> Any:
        options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0}
        if self._uses_gpus:
            options["num_gpus"] = 1
            options["num_cpus"] = 1
            if self._accelerator is not None:
                options["accelerator_type"] = self._accelerator
        else:
            # A whole machine each, so that trials do not take cores from one another.
            options["num_cpus"] = min(_cpus_per_node(self._ray))
            options["scheduling_strategy"] = "SPREAD"
        return self._ray.remote(TrialActor).options(**options).remote(self._device, self._driver)

    def site(self) -> tuple[Hardware, Stack]:
        """The first worker's device and versions; raises `EnvironmentLacks` if workers differ or none comes up."""
        if self._site is None:
            try:
                sites = self._ray.get([actor.site.remote() for actor in self._actors], timeout=START_SECONDS)
            except self._ray.exceptions.GetTimeoutError as error:
                raise EnvironmentLacks(
                    "Ray started no worker within 5 minutes", remedy="check `ray status` for resources"
                ) from error
            except self._ray.exceptions.RayError as error:
                raise EnvironmentLacks(
                    f"Ray's worker failed: {_cause(error)}", remedy="run `autofit doctor` on that machine"
                ) from error
            found = [(Hardware.from_json(s["hardware"]), Stack.from_json(s["stack"])) for s in sites]
            if len({(h.key, s.key) for h, s in found}) > 1:
                kinds = ", ".join(sorted({h.name for h, _ in found}))
                raise EnvironmentLacks(
                    f"Ray's workers differ in hardware or library versions ({kinds}): their trials are not comparable",
                    remedy="name one with --hardware, use --workers 1, or use one image on all nodes",
                )
            self._site = found[0]
        return self._site

    def submit(self, request: TrialRequest) -> None:
        """Start `request` on an idle worker."""
        self._start(request, attempt=0)

    def _start(self, request: TrialRequest, *, attempt: int) -> None:
        worker = self._idle.pop()
        reference = self._actors[worker].run.remote(request.to_json())
        self._running[reference] = _Running(worker=worker, request=request, attempt=attempt)

    def wait(self, timeout: float) -> list[Completed]:
        """The trials that ended. Raises `EnvironmentLacks` when no worker is left."""
        if not self._running:
            return []
        done, _ = self._ray.wait(list(self._running), timeout=timeout)
        answered = (self._completed(self._running.pop(reference), reference) for reference in done)
        return [c for c in answered if c is not None] + self._given_up()

    def _completed(self, ended: _Running, reference: Any) -> Completed | None:
        """What a worker has answered; None if it was lost, and another runs the trial again."""
        outcome, seconds = self._answer(reference)
        if outcome is not None:
            self._idle.append(ended.worker)
            return Completed(request=ended.request, outcome=outcome, seconds=seconds)
        self._replace(ended.worker)
        if ended.attempt < LOST_WORKER_RETRIES:
            self._start(ended.request, attempt=ended.attempt + 1)
            return None
        return _lost(ended, "the Ray worker that ran the trial was lost, twice")

    def _replace(self, worker: int) -> None:
        with suppress(Exception):  # it may be gone already
            self._ray.kill(self._actors[worker])
        self._actors[worker] = self._new_actor()
        self._starting[worker] = (self._actors[worker].site.remote(), time.monotonic())
        self._idle.append(worker)

    def _given_up(self) -> list[Completed]:
        """The trials whose workers do not answer any more, or never started. Without this a lost node would be waited
        for until it comes back."""
        given_up = []
        for reference, running in list(self._running.items()):
            if running.worker in self._starting:
                if self._is_starting(running.worker):
                    running.since = time.monotonic()
                elif running.worker in self._starting:
                    del self._running[reference]
                    self._retire(running.worker)
                    given_up.append(_lost(running, "its Ray worker was lost, and no other could be started"))
            elif running.overdue:
                del self._running[reference]
                self._replace(running.worker)
                given_up.append(_lost(running, "its Ray worker did not answer after the trial's deadline"))
        return given_up

    def _is_starting(self, worker: int) -> bool:
        """Whether a worker may still come up; one that is up is taken off the list."""
        reference, since = self._starting[worker]
        up, _ = self._ray.wait([reference], timeout=0)
        if up:
            del self._starting[worker]
            return False
        return time.monotonic() - since < START_SECONDS

    def _retire(self, worker: int) -> None:
        """Go on with one worker less."""
        del self._starting[worker]
        with suppress(Exception):
            self._ray.kill(self._actors[worker])
        self.size -= 1
        if self.size == 0:
            raise EnvironmentLacks(
                "Ray has lost its last worker and started no other within 5 minutes",
                remedy="see `ray status`, and run the same command when there are nodes again: it goes on",
            )

    def _answer(self, reference: Any) -> tuple[Outcome | None, float]:
        from autofit.outcome import outcome_from_json

        try:
            data = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            return Crashed(reason=f"the worker failed: {_cause(error)}", transient=True), 0.0
        except self._ray.exceptions.RayError:
            return None, 0.0
        return outcome_from_json(data["outcome"]), data["seconds"]

    def close(self) -> None:
        """Kill the workers and leave Ray. A trial's processes end with their worker: its pipe closes."""
        actors, self._actors = self._actors, []
        if actors:
            for actor in actors:
                self._ray.kill(actor)
            self._ray.shutdown()


def _connect(address: str | None) -> Any:
    """The `ray` module, connected; raises `EnvironmentLacks` where an address does not answer."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise not_installed(error, otherwise=", or use --in-place") from error
    from ray._private import ray_constants

    # Ray replaces 127.0.0.1 by an address that other machines reach, unless it takes this machine for one that cannot
    # be in a cluster: this alone keeps every port of a private Ray on loopback. It is what the environment variable
    # RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER sets, which is read only once, at ray's first import in the process.
    if address is not None:
        _check_answers(address)
    ray_constants.ENABLE_RAY_CLUSTER = address is not None and not _on_loopback_only(address)

    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        settings |= {
            "address": "local",
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "object_store_memory": OBJECT_STORE_BYTES,
            "_temp_dir": str(_private_folder()),
        }
    else:
        settings["address"] = address
    try:
        ray.init(**settings)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise EnvironmentLacks(
            f"Ray cannot be reached: {_cause(error)}",
            remedy="check --ray-address and, for a cluster with token authentication, RAY_AUTH_MODE=token"
            if address
            else "run `autofit doctor`, or use --in-place",
        ) from error
    return ray


def _on_loopback_only(address: str) -> bool:
    """Whether the cluster answers at 127.0.0.1 and not at the address that Ray would put in its place."""
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not port.isdecimal():
        return False
    try:
        # Where this machine's packets to others leave from; nothing is sent.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            own = probe.getsockname()[0]
        socket.create_connection((own, int(port)), timeout=5).close()
    except (OSError, OverflowError):
        return True
    return False


def _check_answers(address: str) -> None:
    """Raise `EnvironmentLacks` if nothing listens at `host:port`: Ray itself would end this process.

    Other forms of address (`auto`, `ray://...`, `local`) fail with an exception of Ray's own.
    """
    host, _, port = address.rpartition(":")
    if "/" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise EnvironmentLacks(
            f"no Ray cluster answers at {address}: {error}",
            remedy="check --ray-address, or leave it out for this machine",
        ) from error


def _private_folder() -> Path:
    """Where a private Ray keeps its sockets and logs: one short path a user, because a socket's path is limited to 107
    characters. Raises `EnvironmentLacks` if somebody else has made it first."""
    folder = Path(tempfile.gettempdir()) / f"autofit-ray-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise EnvironmentLacks(
            f"{folder} is not this user's folder", remedy="remove it, or let TMPDIR name another place"
        )
    folder.chmod(0o700)
    return folder


def _lost(running: _Running, reason: str) -> Completed:
    outcome = Crashed(reason=reason, transient=True)
    return Completed(request=running.request, outcome=outcome, seconds=time.monotonic() - running.since)


def _wait_for_nodes(ray: Any) -> None:
    """Return when the cluster has a machine for trials, or after a while without one."""
    until = time.monotonic() + NODES_SECONDS
    while not _cpus_per_node(ray) and time.monotonic() < until:
        time.sleep(1.0)


def _gpus(ray: Any, accelerator: str | None) -> int:
    """GPUs of the cluster; of one type, if one is named."""
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if accelerator is not None:
        resources = [r for r in resources if f"accelerator_type:{accelerator}" in r]
    return int(sum(r.get("GPU", 0) for r in resources))


def _cpus_per_node(ray: Any) -> list[float]:
    """Of the nodes that may run trials: a cluster's head often has none."""
    return [node["Resources"]["CPU"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def _cause(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
