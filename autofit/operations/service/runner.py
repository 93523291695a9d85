"""A runner claims queued searches, one after another, and has a process of its own drive each."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any

from autofit.catalog.hardware import card_of
from autofit.core.errors import AutofitError, StoreError, in_one_line, lines_of
from autofit.planning.requests import check_driven
from autofit.store import Lease, LeaseLost, Store, new_owner
from autofit.store.searches.lease import LEASE_SECONDS
from autofit.trial.machine.detection import detect
from autofit.workers.cluster.offer import Offer, look

DRIVER = ("-m", "autofit.operations.service.driver")
"""What Python runs to drive a search."""
LOOK_SECONDS = 1.0
"""Time between two looks into the store."""
OFFER_SECONDS = 30.0
"""How long what a cluster offers is believed while searches wait: a look takes a process some seconds."""
ENDING_SECONDS = 30.0
"""How long a driver may take to end its trials."""
STACK = "*** StackTrace Information ***"
"""What Ray says before the addresses with which it ends a process whose head it has lost: the reason stands above."""
MOST_DEATHS = 5
"""A search whose driver has died is driven again, but not for ever: something in it may kill every driver."""
CHUNK_BYTES = 65536
"""How much of what a driver has written is read at a time."""
NOTICE = b"autofit: "
"""How a line begins that a driver writes for people: that it waits its turn, that it leaves a node out."""

_log = logging.getLogger(__name__)


class Runner:
    """Drives the searches of a store on this machine, or on a Ray cluster."""

    def __init__(
        self,
        store: Store | str | None,
        *,
        ray_address: str | None = None,
        in_place: bool = False,
        workers: int | None = None,
        device: str = "auto",
        search_id: str | None = None,
    ) -> None:
        """`store` is one that is open, and stays so, or the URL of one. With `search_id` it drives that search alone,
        else those for what the cluster at `ray_address` has or may get, or for this machine's device. Raises
        `EnvironmentLacks` without a device, and `UsageError` for options that exclude each other."""
        check_driven(workers=workers, ray_address=ray_address, in_place=in_place)
        self._store, self._search_id = store, search_id
        self._driver_options: dict[str, Any] = {
            "ray_address": ray_address,
            "in_place": in_place,
            "workers": workers,
            "device": device,
        }
        self._hardware = None if ray_address is not None or search_id is not None else detect(device)[0]
        self._offer: Offer | None = None
        self._offered_at = float("-inf")
        self._said: list[str] = []
        """What the cluster lacks, as it was said last."""
        self._stopping = threading.Event()
        self._looked_at = time.monotonic()

    def stop(self) -> None:
        """Have `run` return; a search under way goes back to the queue."""
        self._stopping.set()

    def is_alive(self) -> bool:
        """Whether it still looks into the store, or after its driver, as often as it should."""
        # Ending a driver and a lost store together take less than a minute.
        return not self._stopping.is_set() and time.monotonic() - self._looked_at < 60.0

    def run(self) -> None:
        """Claim and drive searches until `stop` is called. What fails is tried again, such as the store, or a full
        disk; but a runner of one search raises what is wrong with the machine."""
        announced, last_error = False, ""
        with ExitStack() as stack:
            stack.callback(self.stop)  # whatever ends it
            given = self._store
            store = given if isinstance(given, Store) else stack.enter_context(Store.open(given))
            while not self._stopping.is_set():
                self._looked_at, pause = time.monotonic(), LOOK_SECONDS
                try:
                    if self._hardware is not None and not announced:
                        store.queue.announce(self._hardware)
                        announced = True
                    lease = store.queue.claim(new_owner(), self._claimed(store), search_id=self._search_id)
                    if lease is not None:
                        self._drive(store, lease)
                        continue
                    last_error = ""
                except Exception as error:
                    if not isinstance(error, StoreError):
                        if self._search_id is not None:
                            raise
                        pause = LEASE_SECONDS  # meanwhile another runner may take what this one has claimed
                    reason = str(error) if isinstance(error, AutofitError) else in_one_line(error)
                    if reason != last_error:
                        unforeseen = not isinstance(error, (AutofitError, OSError))
                        _log.warning("autofit: the runner waits: %s", reason, exc_info=unforeseen)
                    last_error = reason
                self._stopping.wait(pause)

    def _claimed(self, store: Store) -> list[str] | None:
        """The names of hardware for which it claims searches; None where it drives one search alone."""
        if self._hardware is not None:
            # With another power limit it is still the same card, but an emulated card never stands for the real one.
            card = None if self._hardware.is_emulated else card_of(self._hardware.name)
            return [self._hardware.name] if card is None else [self._hardware.name, card.name]
        if self._search_id is not None:
            return None
        waited_for = store.queue.hardware_waited_for()
        is_old = time.monotonic() - self._offered_at > OFFER_SECONDS
        if self._offer is None or (waited_for and is_old):
            self._look_at_cluster(store, waited_for)
        return [name for name in waited_for if self._offer is not None and name in self._offer.possible]

    def _look_at_cluster(self, store: Store, waited_for: Sequence[str]) -> None:
        """Announce what the cluster has, and say what it lacks."""
        from autofit.prediction.estimation import site

        offer = look(self._driver_options["ray_address"], self._driver_options["device"])
        for hardware in [*(site(name)[0] for name in offer.cards), *([offer.here] if offer.here else [])]:
            store.queue.announce(hardware)
        lacking = sorted(set(waited_for) - offer.possible)
        if lacking and lacking != self._said:
            _log.warning("autofit: searches wait for what the cluster lacks: %s", ", ".join(lacking))
        self._offer, self._offered_at, self._said = offer, time.monotonic(), lacking

    def _drive(self, store: Store, lease: Lease) -> None:
        _log.info("autofit: search %s begins, epoch %d", lease.search_id, lease.epoch)
        message = {"lease": lease.to_json(), "store": store.url, "runner": os.getpid(), "driven": self._driver_options}
        command = [sys.executable, *DRIVER]
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            # Standard input and not arguments: the store's address may hold a password.
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
            try:
                assert child.stdin is not None
                with suppress(BrokenPipeError), child.stdin as pipe:
                    pipe.write(json.dumps(message).encode())
                self._wait(store, lease, child, errors)
            finally:  # an interrupt included
                _end(child)
                _log.info("autofit: search %s: its driver ended with exit code %d", lease.search_id, child.returncode)
                errors.seek(0)
                last_line = lines_of(errors.read().partition(STACK)[0], "")[-1]
                self._requeue_or_fail(store, lease, child.returncode, last_line)

    def _wait(self, store: Store, lease: Lease, child: subprocess.Popen[bytes], errors: IO[str]) -> None:
        """Return when the driver has ended, or should be made to; pass its notices on meanwhile."""
        position = 0
        try:
            while not self._stopping.is_set():
                self._looked_at = time.monotonic()
                position = _pass_on(errors, position)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(LOOK_SECONDS)
                    return
                with suppress(StoreError):
                    if not store.queue.is_held(lease):
                        with suppress(subprocess.TimeoutExpired):
                            child.wait(ENDING_SECONDS)
                        return
        finally:
            _pass_on(errors, position)

    def _requeue_or_fail(self, store: Store, lease: Lease, code: int, last_line: str) -> None:
        """Give a search back whose driver has ended, or fail it if drivers keep dying without being told to end."""
        reason = f"its driver ended with exit code {code}: {last_line}"
        died = not self._stopping.is_set()
        with suppress(LeaseLost):  # it has ended as it should
            if died and store.queue.deaths(lease.search_id) + 1 >= MOST_DEATHS:
                store.queue.end(lease, "failed", {"reason": reason})
            else:
                store.queue.give_back(lease, reason, died=died)
            _log.warning("autofit: search %s: %s", lease.search_id, reason)


@contextmanager
def running(runners: Sequence[Runner]) -> Iterator[list[Exception]]:
    """Run each runner in a thread; yields what has ended any of them. At exit their searches are queued again."""
    failures: list[Exception] = []

    def run(runner: Runner) -> None:
        try:
            runner.run()
        except Exception as error:
            _log.warning("autofit: a runner has ended", exc_info=True)
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(runner,), name=f"autofit-runner-{n}") for n, runner in enumerate(runners)
    ]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        for runner in runners:
            runner.stop()
        for thread in threads:
            thread.join()


def _pass_on(errors: IO[str], position: int) -> int:
    """Log the notices after `position`, and return the new one. The file's own offset, the driver's, must not move."""
    written = os.pread(errors.fileno(), CHUNK_BYTES, position)
    whole = written.rfind(b"\n") + 1
    # A line that is longer is passed on in parts, or nothing after it ever would be.
    lines = written if not whole and len(written) == CHUNK_BYTES else written[:whole]
    for line in lines.splitlines():
        if line.startswith(NOTICE):
            _log.warning("%s", line.decode(errors="replace"))
    return position + len(lines)


def _end(child: subprocess.Popen[Any]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
