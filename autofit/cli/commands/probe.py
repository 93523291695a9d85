"""The command that measures a device's rates."""

from __future__ import annotations

from typing import Annotated

import typer

from autofit.cli import options
from autofit.cli.output import columns, print_json


def probe(
    model: Annotated[
        str | None, typer.Option("--model", help="Measure at this model's shapes. Default: a small one on a CPU.")
    ] = None,
    device: options.Device = "auto",
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even if the store has a probe.")] = False,
    store: options.Store = None,
    as_json: options.Json = False,
) -> None:
    """Measure this machine's device for 10 to 20 seconds: what it is fast at, and what is slow on it.

    The result is kept in the store, and predictions use it in place of the device's data sheet.

    \b
    Examples:
      autofit probe
      autofit probe --model llama-3.1-8b --fresh
    """
    from autofit.core.device.probe_findings import findings, table
    from autofit.prediction import probing

    result, measured = probing.probe(device=device, model=model, fresh=fresh, store=store)
    if as_json:
        print_json(result.to_json())
        return
    when = f"measured in {result.seconds:.1f} s" if measured else f"measured on {result.recorded_at}, kept in the store"
    print(f"{result.hardware.name} ({result.hardware.device_name}), shapes of {result.model}, {when}")
    for sentence in findings(result):
        print(f"  {sentence}")
    print()
    rows = [("operation", "fp32", "bf16", "fp16", "unit")]
    print(columns(rows + table(result), right=frozenset({1, 2, 3})))
