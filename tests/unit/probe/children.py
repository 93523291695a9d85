"""Stands in for the process that probes a device: `python -m unit.probe.children DESCRIPTOR`."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

NAMES = ["first", "hangs", "dies", "fails", "last"]


def main() -> None:
    """Reports the parts that it is asked for; one of them hangs and one ends the process."""
    request, descriptor = json.load(sys.stdin), int(sys.argv[1])

    def send(event: dict[str, Any]) -> None:
        os.write(descriptor, (json.dumps(event) + "\n").encode())

    names = request["parts"] or NAMES
    send({"parts": names})
    for name in names:
        send({"begin": name})
        send({"seconds_per": {f"launch/{name}": 1.0}})
        if name == "hangs":
            time.sleep(3600)
        if name == "dies":
            print("the driver has gone away", flush=True)
            os._exit(7)
        send({"end": name, "seconds": 0.5, "failure": "RuntimeError: no such kernel" if name == "fails" else None})


if __name__ == "__main__":
    main()
