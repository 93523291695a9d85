"""This process's connection to Ray: to a private one on this machine, or to a cluster."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from autofit.core.distribution import not_installed
from autofit.core.errors import EnvironmentLacks, lines_of
from autofit.core.units import MIB
from autofit.trial.machine import nvml
from autofit.trial.machine.cores import cores


def check_installed() -> None:
    """Raise `EnvironmentLacks` if Ray is not installed. Imports nothing, so that it can be checked before all else."""
    if importlib.util.find_spec("ray") is None:
        raise not_installed(ModuleNotFoundError(name="ray"), otherwise=", or use --in-place")


@dataclass(slots=True, kw_only=True)
class Connection:
    """What this process is connected to, shared by its users: Ray has one connection per process."""

    ray: Any
    """The `ray` module, connected."""
    address: str | None
    """As it was asked for; None for a private Ray."""
    folder: str | None = None
    """A private Ray's, for its sockets and logs."""
    is_ours: bool = True
    """Whether it ends with its last user: not if the program that calls us was connected before."""
    users: int = 0

    def close(self) -> None:
        """Each user calls this once. The last one leaves Ray; a private one ends, and its folder is removed."""
        global _joined
        with _joining:
            self.users -= 1
            if self.users > 0:
                return
            if self is _joined:
                _joined = None
                if self.is_ours:
                    self.ray.shutdown()
                if self.folder is not None:
                    _read_authentication_anew()
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)


_joined: Connection | None = None
_joining = threading.Lock()


def connect(address: str | None) -> Connection:
    """Connect to the cluster at `address`, or start a private Ray; what this process is connected to is shared. Raises
    `EnvironmentLacks` if Ray is not installed or cannot be reached, or if this process is connected to another one."""
    global _joined
    with _joining:
        if _joined is None or not _joined.ray.is_initialized():
            _joined = _join(address)
        elif _joined.address != address:
            where = _joined.address or "a private one on this machine"
            raise EnvironmentLacks(
                f"this process is connected to another Ray: {where}",
                remedy="let that search end first, or run this one in a process of its own",
            )
        _joined.users += 1
        return _joined


def _join(address: str | None) -> Connection:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # By default Ray runs workers at nice 15, where anything else on the machine takes precedence over the timed steps.
    os.environ.setdefault("RAY_worker_niceness", "0")
    check_installed()
    import ray
    from ray._private import ray_constants

    if ray.is_initialized():
        return _joined_before(ray, address)
    # Ray replaces 127.0.0.1 with an address that other machines can reach, unless it believes that this machine cannot
    # be in a cluster: only this keeps every port of a private Ray on loopback. The environment variable
    # RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER sets the same flag, but is read only once, at ray's first import in the process.
    if address is not None:
        _check_answers(address)
    ray_constants.ENABLE_RAY_CLUSTER = address is not None and not _on_loopback_only(address)

    # Of this user alone, and with a short name: a socket's path is limited to 107 characters.
    folder = tempfile.mkdtemp(prefix="autofit-ray-") if address is None else None
    where = {"address": address} if folder is None else _private(folder)
    try:
        with _sigterm_kept(), _in_a_group_of_their_own(), nullcontext() if folder is None else _token_of_its_own():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **where)
    except Exception as error:  # of the driver, too, in the words of Ray's own copy of pynvml
        logs = "" if folder is None else f" (its logs are in {folder})"
        if folder is not None:
            _read_authentication_anew()
        if (versions := re.findall(r"Ray: (\S+)\s+Python: (\S+)", str(error))) and "ersion mismatch" in str(error):
            (of_cluster, its_python), (here, python) = versions[:2]
            raise EnvironmentLacks(
                f"the cluster runs Ray {of_cluster} with Python {its_python}, and this environment Ray {here} with "
                f"Python {python}",
                remedy="use the cluster's image or versions here",
            ) from error
        raise EnvironmentLacks(
            f"Ray cannot be reached: {lines_of(error)[-1]}{logs}",
            remedy="check --ray-address and, for a cluster with token authentication, RAY_AUTH_MODE=token"
            if address
            else "run `autofit doctor`, or use --in-place",
        ) from error
    return Connection(ray=ray, address=address, folder=folder)


def _private(folder: str) -> dict[str, Any]:
    # By default Ray starts as many idle processes as there are processors; a trial takes one for the whole machine.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    return {
        "address": "local",
        "num_cpus": cores(),  # Ray rounds a quota of half a processor down to none
        "num_gpus": _nvidia_devices(),
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        "object_store_memory": 80 * MIB,  # the minimum: only small JSON documents pass
        "_temp_dir": f"{folder}/ray",  # which Ray makes everybody's
    }


def _nvidia_devices() -> int | None:
    """How many there are to use, of which Ray counts only whole cards, and not the MIG instances that
    CUDA_VISIBLE_DEVICES names; None to let Ray count, where there is no driver or it does not answer."""
    with suppress(EnvironmentLacks):
        machine = nvml.devices()
        return None if machine is None else len(machine.visible)
    return None


@contextmanager
def _token_of_its_own() -> Iterator[None]:
    """Give a private Ray a token unless the environment has one. Ray itself would write it to ~/.ray, which it may not
    be allowed to; and from then on a cluster that is started by this user would want it of everybody."""
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")}
    mode, *tokens = before.values()
    if any(tokens) or (mode or "token").lower() != "token":
        yield
        return
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    _read_authentication_anew()
    try:
        yield
    finally:  # Ray and what it has started know it by now
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _read_authentication_anew() -> None:
    """Ray reads mode and token once in a process: those of a private one are no other's."""
    raylet: Any = importlib.import_module("ray._raylet")
    with suppress(AttributeError):  # of versions that know no token
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        raylet.Config.initialize("")


def _joined_before(ray: Any, address: str | None) -> Connection:
    """The connection that the calling program has made; raises `EnvironmentLacks` if it is not to what is asked for."""
    connected_to = ray.get_runtime_context().gcs_address
    if address not in (connected_to, "auto"):
        raise EnvironmentLacks(
            f"this process is connected to a Ray of its own at {connected_to}",
            remedy=f"give ray_address={connected_to!r}, or run the search in a process of its own",
        )
    return Connection(ray=ray, address=address, is_ours=False)


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


@contextmanager
def _in_a_group_of_their_own() -> Iterator[None]:
    """Start a private Ray's processes outside of our process group. A batch system's SIGTERM reaches a whole group: Ray
    would end first, and whoever asks it then to end its workers waits for a minute. As Ray has it, they die with us."""
    from ray._private import services, utils

    if not utils.detect_fate_sharing_support():  # then Ray ends its processes by their group
        yield
        return
    grouped = partial(services.ConsolePopen, process_group=0)
    with patch.object(services, "ConsolePopen", grouped):
        yield


def _on_loopback_only(address: str) -> bool:
    """Whether the cluster answers at 127.0.0.1 but not at the address that Ray would put in its place."""
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost") or not port.isdecimal():
        return False
    try:
        # The address from which this machine's packets to others leave; nothing is sent.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            outer_address = probe.getsockname()[0]
        socket.create_connection((outer_address, int(port)), timeout=5).close()
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
