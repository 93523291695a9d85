"""The process that drives one claimed search, and ends with the runner that started it.

`python -m autofit.operations.service.driver` reads a JSON object from standard input: `lease`, `store`, `runner` (the
process to end with) and `driven` (options of `SearchRequest`).
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from autofit.core.errors import AutofitError, NothingFits, StoreError, in_one_line
from autofit.operations.searching import search
from autofit.operations.service.asked import from_json
from autofit.planning.nothing_fits import Shortfall
from autofit.store import Heartbeat, Lease, LeaseLost, Store
from autofit.workers.watch import end_with


def drive(told: dict[str, Any]) -> None:
    """Drive the search to its end, and store that; a driver that has lost its lease changes nothing."""
    lease = Lease.from_json(told["lease"])
    with Store.open(told["store"], create=False) as store, Heartbeat(store.queue, lease) as held:
        found = store.search(lease.search_id)
        assert found is not None, "it was claimed"
        try:
            request = from_json(found.request["asked"], store=told["store"], **told["driven"])
            search(request, held=held)
        except KeyboardInterrupt:
            with suppress(LeaseLost):  # the search itself has said so, unless it had not begun
                store.queue.give_back(lease, "its driver was interrupted")
        except (LeaseLost, StoreError):
            raise
        except NothingFits as error:
            more = error.facts() if isinstance(error, Shortfall) else {}
            store.queue.end(lease, "nothing_fits", {"reason": str(error), **more})
        except Exception as error:
            said = str(error) if isinstance(error, AutofitError) else in_one_line(error)
            store.queue.end(lease, "failed", {"reason": said})
            if not isinstance(error, AutofitError):
                raise


def main() -> None:
    """Read what to do, and do it; foreseen failures are one line on standard error."""
    told = json.load(sys.stdin)
    end_with(told["runner"])

    def interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the runner says what is to end
    try:
        drive(told)
    except AutofitError as error:
        print(f"autofit: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
