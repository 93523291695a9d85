"""The self-test for people: a line as each check ends, and a table of all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.cli.output import STDOUT, columns, warn, write
from autofit.cli.text.phrases import EMULATED
from autofit.core.errors import AutofitError, UsageError
from autofit.core.units import format_duration

if TYPE_CHECKING:
    from autofit.operations.self_test.finding import CheckResult, Report


def line(check: CheckResult) -> str:
    heading = f"{format_duration(check.finding.seconds):>8}  {check.finding.verdict:<8}  {check.name}"
    return ": ".join(filter(None, (heading, _remark(check))))


def report_text(report: Report) -> str:
    """The summary, then a line for each check."""
    device = f"{report.hardware.device_name} ({report.hardware.name}), torch {report.stack.torch}"
    took = format_duration(report.seconds)
    parts = [report.summary, f"{device}, transformers {report.stack.transformers}, in {took}."]
    if report.hardware.is_emulated:
        parts.append(EMULATED)
    cores = report.hardware.cores
    if cores and report.load_average > cores:
        parts.append(
            f"The machine was busy: a load of {report.load_average:.1f} on {cores} cores. Times, and whatever timed "
            "out, may be due to that."
        )
    rows = [("check", "verdict", "figure")]
    rows += [(check.name, check.finding.verdict.value, _remark(check)) for check in report.checks]
    parts += ["", columns(rows)]
    if report.absent:
        parts += ["", "Not installed here:"]
        parts += [f"  {name}: {remedy}" for name, remedy in report.absent.items()]
    return "\n".join(parts)


def defects(report: Report) -> list[str]:
    """For each check that shows a defect, what to do about it."""
    advice = "the reason says what failed; mend the library that it names, or report it with the file"
    return [f"{check.name}: {check.finding.remedy or advice}" for check in report.bad]


def _remark(check: CheckResult) -> str:
    finding = check.finding
    reason = finding.reason + (f" ({finding.remedy})" if finding.remedy else "")
    return "; ".join(filter(None, (finding.figure, reason if len(reason) <= 160 else reason[:157] + "...")))


def keeper(file: str) -> Callable[[Report], None]:
    """Writes each report in place of the one before. Raises if the first cannot be written; later ones only warn."""
    path, warned = Path(file), False
    if file == STDOUT:
        raise UsageError("--out needs a file, which is written anew after every check: use --json for standard output")

    def keep(report: Report) -> None:
        nonlocal warned
        try:
            write(path, [json.dumps(report.to_json(), indent=2, allow_nan=False).encode(), b"\n"])
        except AutofitError as error:
            if not report.checks:
                raise
            if not warned:
                warn(f"the self-test goes on without its file: {error}")
            warned = True

    return keep
