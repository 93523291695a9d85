"""The command that drives queued searches."""

from __future__ import annotations

from autofit.cli import options


def runner(
    store: options.Store = None, ray_address: options.RayAddress = None, in_place: options.InPlace = False
) -> None:
    """Run the searches that others have queued, until it is stopped.

    \b
    Examples:
      autofit runner
      autofit runner --store postgresql://db/autofit --ray-address auto

    Without --ray-address it takes searches for this machine's device only. A search whose runner is stopped goes on
    with the next one. Each search that begins or ends is a line on standard error. `autofit serve` has a runner of its
    own.
    """
    import logging
    import signal

    from autofit.operations.service.runner import Runner

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("autofit").setLevel(logging.INFO)
    found = Runner(store, ray_address=ray_address, in_place=in_place)
    # A service that is told to end has not failed. No exception, which could come while a driver is being started.
    told = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda number, frame: found.stop()) for each in told]
    try:
        found.run()
    finally:
        for each, earlier in zip(told, before, strict=True):
            signal.signal(each, earlier or signal.SIG_DFL)
