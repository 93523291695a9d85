"""`autofit doctor` and `autofit probe`: what trials need on this machine, and what its device does well."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from autofit.cli import options
from autofit.cli.output import columns, print_json, resumable, warn
from autofit.core.errors import UsageError
from autofit.core.units import parse_duration


def doctor(
    store: options.Store = None,
    device: options.Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Skip whatever takes long: the trial and Ray.")] = False,
    ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Also start a Ray worker.")] = True,
    build_ops: Annotated[
        bool, typer.Option("--build-ops", help="Compile DeepSpeed's native operations first, about a minute each.")
    ] = False,
    portable: Annotated[
        bool, typer.Option("--portable", help="With --build-ops: for any processor with AVX2, as in an image.")
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
    if portable and not build_ops:
        raise UsageError("--portable says how to compile: give --build-ops, too")
    if self_test:
        _self_test(device, devices, out, time_limit, as_json)
        return
    from autofit.operations.doctor import examine

    if not quick and not as_json:
        print("a small trial runs, and Ray starts: that takes half a minute (--quick skips both)", file=sys.stderr)
    checks = examine(store=store, device=device, with_ray=ray, build_ops=build_ops, portable=portable, quick=quick)
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
    from autofit.operations.self_test.running import self_test

    with resumable(f"what the self-test has shown so far is in {out}"):
        report = self_test(
            device=device,
            ranks=devices,
            time_limit_seconds=parse_duration(time_limit),
            keep=keeper(out),
            tell=lambda check: print(line(check), file=sys.stderr, flush=True),
        )
    print_json(report.to_json()) if as_json else print(f"\n{report_text(report)}\n\nReport: {out}")
    for remedy in defects(report):
        warn(remedy)
    if report.bad:
        raise typer.Exit(4)


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
