"""An explanation of a memory difference, as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.cli.output import columns
from autofit.core.units import format_bytes

if TYPE_CHECKING:
    from autofit.operations.explaining import Explanation, Step


def explanation_text(explanation: Explanation) -> str:
    """Both configs, a table of their memory per device, and what each change contributed to the difference."""
    before, after = explanation.before, explanation.after
    rows = [("per device", "first", "second", "difference")]
    rows += [
        _row(name.replace("_", " "), size, then)
        for name, size in before.breakdown.items()
        if (then := after.breakdown[name]) or size
    ]
    rows.append(_row("device memory", before.device_bytes, after.device_bytes))
    if before.host_bytes or after.host_bytes:
        rows.append(_row("host memory", before.host_bytes, after.host_bytes))
    rows += [
        _row(f"peak in {phase}", size, after.phase_peaks[phase])
        for phase, size in before.phase_peaks.items()
        if phase in after.phase_peaks  # estimates stored by earlier versions have none of saving
    ]
    if before.step_seconds is not None and after.step_seconds is not None:
        change = f"{after.step_seconds / before.step_seconds - 1:+.0%}"
        rows.append(("step", f"{before.step_seconds:.2f} s", f"{after.step_seconds:.2f} s", change))
    table = columns(rows, right=frozenset({1, 2, 3}))
    steps = "\n".join(step_text(step) for step in explanation.steps) or "the two configs are the same"
    return f"first   {before.config}\nsecond  {after.config}\n\n{table}\n\n{steps}"


def step_text(step: Step) -> str:
    change = ",".join(f"{axis}={'-' if value is None else value}" for axis, value in step.change.items())
    sentence = f"{change} {'saves' if step.saved_bytes >= 0 else 'costs'} {format_bytes(abs(step.saved_bytes))}"
    return "\n  ".join([sentence, *step.reasons])


def _row(what: str, before: int, after: int) -> tuple[str, str, str, str]:
    more = format_bytes(after - before)
    return what, format_bytes(before), format_bytes(after), f"+{more}" if after > before else more
