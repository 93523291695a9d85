"""Trying again what may succeed a little later."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def retried(work: Callable[[], T], may_pass: Callable[[Exception], bool], *, seconds: float, pause_seconds: float) -> T:
    """The result of `work`, which is called again after an error that may pass, as long as `seconds` have not passed.

    The pauses vary around `pause_seconds`, so that processes that met do not meet again.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return work()
        except Exception as error:
            if not may_pass(error) or time.monotonic() + pause_seconds > deadline:
                raise
        time.sleep(random.uniform(0.1, 1.9) * pause_seconds)
