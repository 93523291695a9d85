"""The program on a machine that is never too busy: what else runs beside the tests is not to repeat their trials."""

from __future__ import annotations

from autofit.cli import main as program
from autofit.core.device.hardware import Hardware
from autofit.core.device.state import DeviceState


def never_too_busy() -> None:
    """Have this process trust every trial, whatever its device went through."""

    def doubts(state: DeviceState, hardware: Hardware) -> tuple[str, ...]:
        return ()

    DeviceState.doubts = doubts  # type: ignore[method-assign]


if __name__ == "__main__":
    never_too_busy()
    program.main()
