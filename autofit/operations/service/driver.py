"""The process that drives one claimed search, and ends with the runner that started it.

`python -m autofit.operations.service.driver` reads a JSON object from standard input: `lease`, `store`, `runner` (the
process to end with) and `driven` (options of `SearchRequest`).
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from autofit.core.errors import AutofitError, Interrupted
from autofit.operations.searching.resume import Driver
from autofit.operations.service.submission import from_json
from autofit.store import Lease, Store
from autofit.workers.watch import end_with

_told_to_end = threading.Event()


def drive(arguments: dict[str, Any]) -> None:
    lease = Lease.from_json(arguments["lease"])
    with Store.open(arguments["store"], create=False) as store, Driver(store, lease) as driver, _interrupted_as_told():
        from autofit.operations.searching.search import search  # takes long on a busy machine: the lease is kept by now

        stored_search = store.search(lease.search_id)
        assert stored_search is not None, "it was claimed"
        asked = from_json(stored_search.request["asked"], store=arguments["store"], **arguments["driven"])
        search(asked, driver=driver)


@contextmanager
def _interrupted_as_told() -> Iterator[None]:
    """Raise an interruption as one, though in the middle of an import libraries make their own errors of it."""
    try:
        yield
    except Exception as error:
        if _told_to_end.is_set():
            raise KeyboardInterrupt from error
        raise


def main() -> None:
    """Read what to do, and do it; foreseen failures are one line on standard error."""
    arguments = json.load(sys.stdin)
    end_with(arguments["runner"])

    def interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
        _told_to_end.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the runner says what is to end
    try:
        drive(arguments)
    except AutofitError as error:
        print(f"autofit: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(Interrupted.exit_code)


if __name__ == "__main__":
    main()
