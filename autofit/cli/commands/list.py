"""Commands that list what autofit knows: models, hardware, and the state of this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, TypeVar

import typer

from autofit.cli import options
from autofit.cli.output import columns, print_json, resumable, warn
from autofit.core.errors import EnvironmentLacks, UsageError, unknown
from autofit.core.units import format_bytes, parse_duration

SUPPORT = {
    ("estimate", "search"): "estimate, search",
    ("search",): "search, not estimate",
    (): "nothing yet: listed only",
}
"""What autofit can do for a card, in words."""


Part = Annotated[str, typer.Argument(help="Only those with this in their names.", show_default=False)]
Entry = TypeVar("Entry")


def _named(part: str, kind: str, entries: Mapping[str, Entry]) -> list[Entry]:
    """The entries with `part` in their names; raises `UsageError` if there are none."""
    of_part = [entry for name, entry in entries.items() if part.lower() in name]
    if not of_part:
        raise unknown(kind, part, entries)
    return of_part


def models(part: Part = "", as_json: options.Json = False) -> None:
    """List the models of the catalog. Any folder with a config.json works too.

    \b
    Examples:
      autofit models
      autofit models llama
      autofit models --json
    """
    from autofit.catalog.models import listing

    entries = _named(part, "model", {m["name"]: m for m in listing()})
    if as_json:
        print_json(entries)
        return
    rows = [("model", "parameters", "source")]
    rows += [(m["name"], f"{m['parameters']:,}" if m["parameters"] else "unknown", m["source"]) for m in entries]
    print(columns(rows, right=frozenset({1})))
    print()
    for entry in entries:
        if entry["note"]:
            print(f"{entry['name']}: {entry['note']}")


def hardware(part: Part = "", as_json: options.Json = False) -> None:
    """List the cards of the catalog, and what this machine has.

    \b
    Examples:
      autofit hardware
      autofit hardware h100
      autofit hardware --json
    """
    from autofit.catalog.hardware import cards
    from autofit.trial.machine.detection import detect

    listed = _named(part, "hardware", {card.name: card for card in cards()})
    try:
        site, lacks = detect(), None
    except EnvironmentLacks as error:
        site, lacks = None, error  # the catalog can still be listed
    if as_json:
        machine = None if site is None else {"hardware": site[0].to_json(), "stack": site[1].to_json()}
        print_json({"here": machine, "cards": [c.to_json() for c in listed]})
        if lacks is not None:
            warn(f"this machine: {lacks}")
        return
    rows = [("card", "memory", "bandwidth", "bf16 dense", "autofit can", "source")]
    for card in listed:
        peak = card.training_peak_flops
        rows.append(
            (
                card.name,
                format_bytes(card.memory_bytes),
                f"{card.bandwidth_bytes_per_second / 1e12:.2f} TB/s",
                f"{peak / 1e12:.0f} TFLOP/s" if peak else "-",
                SUPPORT[card.supports],
                card.source,
            )
        )
    print(columns(rows, right=frozenset({1, 2, 3})))
    description = str(lacks)
    if site is not None:
        device, stack = site
        description = f"{device.name} ({device.device_name}, {format_bytes(device.memory_bytes)}), torch {stack.torch}"
    print(f"\nThis machine: {description}")


def doctor(
    store: options.Store = None,
    device: options.Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Skip whatever takes long: the trial and Ray.")] = False,
    ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Also start a Ray worker.")] = True,
    build_ops: Annotated[
        bool, typer.Option("--build-ops", help="Compile DeepSpeed's native operations first, about a minute each.")
    ] = False,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test", help="Instead, try every technique on the device; needs no store, no Ray and no Optuna."
        ),
    ] = False,
    out: Annotated[
        str, typer.Option("--out", help="The self-test's report, to attach to a bug report; kept up to date.")
    ] = "autofit-self-test.json",
    time_limit: Annotated[
        str, typer.Option("--time-limit", help="For the self-test: checks that no longer fit are not run.")
    ] = "2m",
    devices: options.Devices = 1,
    as_json: options.Json = False,
) -> None:
    """Check what trials need on this machine; exit code 4 if something is missing.

    \b
    Examples:
      autofit doctor
      autofit doctor --quick                           only what takes no time: no trial, no Ray
      autofit doctor --json
      autofit doctor --self-test                       a short trial of every technique: what works on this device?
    """
    if quick and (self_test or build_ops):
        raise UsageError("--quick skips what takes long: leave --self-test and --build-ops out")
    if self_test:
        _self_test(device, devices, out, time_limit, as_json)
        return
    from autofit.operations.doctor import examine

    if not quick and not as_json:
        print("a small trial runs, and Ray starts: that takes half a minute (--quick skips both)", file=sys.stderr)
    checks = examine(store=store, device=device, with_ray=ray, build_ops=build_ops, quick=quick)
    if as_json:
        print_json([c.to_json() for c in checks])
    else:
        rows = [("check", "state", "found")]
        rows += [(c.name, c.state, c.found + (f" -> {c.remedy}" if c.remedy else "")) for c in checks]
        print(columns(rows))
    if any(c.state == "missing" for c in checks):
        raise typer.Exit(4)


def _self_test(device: str, devices: int, out: str, time_limit: str, as_json: bool) -> None:
    """Try everything on the device; exit code 4 if anything fails or computes something else."""
    from autofit.cli.text.self_test import defects, keeper, line, report_text
    from autofit.operations.self_test.finding import CheckResult
    from autofit.operations.self_test.running import self_test

    def tell(check: CheckResult) -> None:
        print(line(check), file=sys.stderr, flush=True)

    with resumable(f"what the self-test has shown so far is in {out}"):
        report = self_test(
            device=device, ranks=devices, time_limit_seconds=parse_duration(time_limit), keep=keeper(out), tell=tell
        )
    print_json(report.to_json()) if as_json else print(f"\n{report_text(report)}\n\nReport: {out}")
    for remedy in defects(report):
        warn(remedy)
    if report.bad:
        raise typer.Exit(4)
