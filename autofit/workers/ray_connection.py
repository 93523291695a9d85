"""The connection to Ray, to a private one on this machine or to a cluster, and the resources it has."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from autofit.core.distribution import not_installed
from autofit.core.errors import EnvironmentLacks, lines_of
from autofit.core.units import MIB
from autofit.workers.private_folder import PrivateFolder


def check_installed() -> None:
    """Raise `EnvironmentLacks` if Ray is not installed. Imports nothing, so that it can be checked before all else."""
    if importlib.util.find_spec("ray") is None:
        raise not_installed(ModuleNotFoundError(name="ray"), otherwise=", or use --in-place")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """This process's connection to Ray."""

    ray: Any
    """The `ray` module, connected."""
    folder: PrivateFolder | None
    """A private Ray's; None for a cluster."""

    def close(self) -> None:
        """Leave Ray; a private one ends, and its folder is removed. To be called once."""
        self.ray.shutdown()
        if self.folder is not None:
            self.folder.close()


def connect(address: str | None) -> Connection:
    """Connect to the cluster at `address`, or start a private Ray; raises `EnvironmentLacks` if Ray is not installed or
    cannot be reached."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # By default Ray runs workers at nice 15, where anything else on the machine takes precedence over the timed steps.
    os.environ.setdefault("RAY_worker_niceness", "0")
    check_installed()
    import ray
    from ray._private import ray_constants

    # Ray replaces 127.0.0.1 with an address that other machines can reach, unless it believes that this machine cannot
    # be in a cluster: only this keeps every port of a private Ray on loopback. The environment variable
    # RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER sets the same flag, but is read only once, at ray's first import in the process.
    if address is not None:
        _check_answers(address)
    ray_constants.ENABLE_RAY_CLUSTER = address is not None and not _on_loopback_only(address)

    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    folder = PrivateFolder() if address is None else None
    if folder is not None:
        settings |= {
            "address": "local",
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "object_store_memory": 80 * MIB,  # the minimum: only small JSON documents pass
            "_temp_dir": str(folder.path),
        }
    else:
        settings["address"] = address
    try:
        with _sigterm_kept():
            ray.init(**settings)
    except Exception as error:  # of the driver, too, in the words of Ray's own copy of pynvml
        if folder is not None:
            folder.release()
        raise EnvironmentLacks(
            f"Ray cannot be reached: {lines_of(error)[-1]}",
            remedy="check --ray-address and, for a cluster with token authentication, RAY_AUTH_MODE=token"
            if address
            else "run `autofit doctor`, or use --in-place",
        ) from error
    return Connection(ray=ray, folder=folder)


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep the present handling of SIGTERM, which Ray's initialisation would replace.

    Ray's handler prints stacks of its own and ends the program with the signal's number as exit code. A SIGTERM that
    arrives meanwhile is raised again. Only the main thread has handlers to lose.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
    try:
        yield
    except SystemExit as ended:
        if ended.code != signal.SIGTERM:
            raise
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def _on_loopback_only(address: str) -> bool:
    """Whether the cluster answers at 127.0.0.1 but not at the address that Ray would put in its place."""
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not port.isdecimal():
        return False
    try:
        # The address from which this machine's packets to others leave; nothing is sent.
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


def wait_for_nodes(ray: Any) -> None:
    """Return once the cluster has a machine for trials, or after two minutes without one."""
    until = time.monotonic() + 120.0
    while not cpus_per_node(ray) and time.monotonic() < until:
        time.sleep(1.0)


def gpus(ray: Any, accelerator: str | None) -> int:
    """GPUs in the cluster; only those of one type, if one is named."""
    return int(sum(resources["GPU"] for resources in _with_gpus(ray, accelerator)))


def cpus_per_gpu(ray: Any, accelerator: str | None) -> float:
    """CPUs that a worker with one GPU may ask of Ray: 1, or less where a node has more GPUs than CPUs, on which Ray
    would otherwise let workers wait for ever."""
    shares = [resources.get("CPU", 0.0) / resources["GPU"] for resources in _with_gpus(ray, accelerator)]
    return math.floor(100 * min([1.0, *shares])) / 100


def _with_gpus(ray: Any, accelerator: str | None) -> list[dict[str, float]]:
    """Resources of each node that has GPUs, of that type if one is named."""
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    return [r for r in resources if accelerator is None or f"accelerator_type:{accelerator}" in r]


def cpus_per_node(ray: Any) -> list[float]:
    """CPUs of each node that may run trials; a cluster's head often has none."""
    return [node["Resources"]["CPU"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
