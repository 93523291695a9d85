"""The command that measures a device's rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autofit.cli import options
from autofit.cli.output import columns, print_json

if TYPE_CHECKING:
    from autofit.core.device.probe import Probe


def probe(
    model: Annotated[
        str | None, typer.Option("--model", help="Measure at this model's shapes. Default: a small one on a CPU.")
    ] = None,
    device: options.Device = "auto",
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even if the store has a probe.")] = False,
    store: options.Store = None,
    as_json: options.Json = False,
) -> None:
    """Measure this machine's device for 10 to 20 seconds: what it is fast at, and what it only emulates.

    The result is kept in the store, and predictions use it in place of the device's data sheet.

    \b
    Examples:
      autofit probe
      autofit probe --model llama-3.1-8b --fresh
    """
    from autofit.prediction import probing

    found, measured = probing.probe(device=device, model=model, fresh=fresh, store=store)
    if as_json:
        print_json(found.to_json())
        return
    _show(found, measured)


def _show(found: Probe, measured: bool) -> None:
    from autofit.core.device.probe_findings import findings, table

    when = f"measured in {found.seconds:.1f} s" if measured else f"measured on {found.recorded_at}, kept in the store"
    print(f"{found.hardware.name} ({found.hardware.device_name}), shapes of {found.model}, {when}")
    for sentence in findings(found):
        print(f"  {sentence}")
    print()
    rows = [("operation", "fp32", "bf16", "fp16", "unit")]
    print(columns(rows + table(found), right=frozenset({1, 2, 3})))
