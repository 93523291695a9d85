"""What `autofit bench replay` prints for people: for each problem, one table of all methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autofit.cli.output import columns
from autofit.core.units import counted, format_bytes

if TYPE_CHECKING:
    from autofit.bench.replay import Judged, ReplayResult
    from autofit.bench.score import Ended, Quantiles, Score

NEVER = "never"
"""Printed where half (or nine tenths) of the seeds never got there, or found nothing that fits."""


def replay_text(result: ReplayResult) -> str:
    """A heading that says how to read the tables, then a table for each problem."""
    seeds = counted(result.seeds, "seed")
    parts = [
        f"{seeds}; median / 90th percentile of trials, and of their seconds, until the best found is within 1 % of the "
        "problem's best;\nout of memory: trials that ran out of it until then; hv: share of the exhaustive "
        "frontier's hypervolume after so many trials, median"
    ]
    parts += [_problem(judged) for judged in result.problems]
    if result.left_out:
        parts.append(f"Left out, because nothing fits: {', '.join(result.left_out)}")
    return "\n\n".join(parts)


def _problem(judged: Judged) -> str:
    recorded, problem = judged.recorded, judged.recorded.problem
    memory = recorded.reference_bytes
    of_method = f" of {recorded.best.method}" if len(problem.methods) > 1 else ""
    heading = (
        f"{problem.name}: {len(problem.configs)} configs, {len(recorded.points)} fit "
        f"{_bytes(problem.memory_limit_bytes)}, {recorded.out_of_memory} out of memory; "
        f"best{of_method} {recorded.best.measurement.tokens_per_second:,.0f} tokens/s; "
        f"hypervolume up to {_bytes(memory)} and from 0 tokens/s"
    )
    scores = {name: score for name, score in judged.scores.items() if not isinstance(score, str)}
    lines = [heading]
    if scores:
        some = next(iter(scores.values()))
        title = ("method", "trials", "seconds", "out of memory", *(f"hv {share.trials}" for share in some.hypervolume))
        rows = [_row(name, score) for name, score in scores.items()]
        lines.append(columns([title, *rows], right=frozenset(range(1, len(title)))))
    for name, score in scores.items():
        if score.ended is not None:
            lines += _end(name, score.ended)
    lines += [f"{name} not run: {reason}" for name, reason in judged.scores.items() if isinstance(reason, str)]
    return "\n".join(lines)


def _row(name: str, score: Score) -> tuple[str, ...]:
    return (
        name,
        _pair(score.trials),
        _pair(score.seconds),
        _pair(score.out_of_memory),
        *("" if share.median is None else f"{share.median:.1%}" for share in score.hypervolume),
    )


def _end(name: str, ended: Ended) -> list[str]:
    """When the method stopped of its own accord and how far from the best; what it recommended and stated."""
    lines = [
        f"{name} stopped by itself for {ended.seeds} of the seeds, after {_pair(ended.trials)} trials, "
        f"{_pair(ended.seconds)} s, {_pair(ended.out_of_memory)} out of memory, "
        f"{_shares(ended.regret)} slower than the best"
    ]
    if ended.recommended is not None and ended.stated is not None:
        lines.append(
            f"{name} recommended what is {_shares(ended.recommended)} slower than the best, and stated at most "
            f"{_shares(ended.stated)} slower, which held for {ended.within_stated} of the seeds"
        )
    return lines


def _shares(quantiles: Quantiles) -> str:
    return " / ".join(NEVER if share is None else f"{share:.1%}" for share in (quantiles.median, quantiles.p90))


def _pair(quantiles: Quantiles) -> str:
    return f"{_figure(quantiles.median)} / {_figure(quantiles.p90)}"


def _figure(value: float | None) -> str:
    return NEVER if value is None else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def _bytes(size: float) -> str:
    return format_bytes(round(size))
