"""`autofit bench`: how well autofit itself performs, judged against measurements."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autofit import operations
from autofit.cli import options
from autofit.cli.output import print_json, resumable
from autofit.core.errors import UsageError
from autofit.core.units import parse_duration

if TYPE_CHECKING:
    from autofit.core.outcome import Trial
    from autofit.operations.recording.record import RecordResult

group = typer.Typer(help="Measure how well autofit itself performs.", no_args_is_help=True, rich_markup_mode=None)
Out = Annotated[Path, typer.Option("--out", help="File to write; an unfinished recording in it is resumed.")]
MaxTrials = Annotated[int | None, typer.Option("--max-trials", help="Record only this many of the shuffled configs.")]
Cover = Annotated[
    bool, typer.Option("--cover", help="With --max-trials: choose configs so that every value occurs repeatedly.")
]
TimeBudget = Annotated[
    str | None,
    typer.Option("--time-budget", help="Begin no trial after this time, such as 7m; the same command goes on."),
]
TrialBudget = Annotated[
    str | None,
    typer.Option(
        "--trial-budget",
        help="Cut a trial that takes longer, such as 1m, or is beaten many times over, as a search does; the lower "
        "bound of its step is recorded.",
    ),
]


@group.command()
@options.expand_groups
def record(
    workload: options.Estimated,
    out: Out,
    space: options.Space = None,
    memory_limit: options.MemoryLimit = None,
    max_trials: MaxTrials = None,
    cover: Cover = False,
    time_budget: TimeBudget = None,
    trial_budget: TrialBudget = None,
    device: options.Device = "auto",
    ray_address: options.RayAddress = None,
    in_place: options.InPlace = False,
    as_json: options.Json = False,
) -> None:
    """Measure every config of a space into a file.

    Configs run in shuffled order, and those that run out of memory are recorded too. Each result is written as its
    trial ends; run the same command again to resume.

    \b
    Examples:
      autofit bench record --model smollm2-135m --space cpu --seq-len 128 --global-batch 4 --out t.jsonl
      autofit bench record --model llama-3.1-8b --space single-gpu --max-trials 100 --out h100-8b.jsonl
    """
    from autofit.cli.arguments import size

    if cover and max_trials is None:
        raise UsageError("--cover chooses among the configs: say how many with --max-trials, or leave it out")
    request = operations.SearchRequest(
        workload=workload.asked(),
        space=space,
        device=device,
        memory_limit_bytes=size(memory_limit),
        max_trials=max_trials,
        ray_address=ray_address,
        in_place=in_place,
    )
    with resumable(f"{out} has what was measured, the same command resumes from there"):
        result = operations.record(
            request,
            out,
            _recorded,
            time_budget_seconds=None if time_budget is None else parse_duration(time_budget),
            trial_seconds=None if trial_budget is None else parse_duration(trial_budget),
            covering=cover,
        )
    print_json(result.to_json()) if as_json else print(_how_far(result))


def _how_far(result: RecordResult) -> str:
    kinds = ", ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in result.outcomes.items())
    left = f", {result.left} left: run the same command again" if result.left else ""
    return (
        f"{result.file}: {result.recorded} of {result.configs} configs (trials: {kinds}), {result.run} trials now{left}"
    )


def _recorded(done: int, total: int, last: Trial | None) -> None:
    from autofit.techniques.short_text import short

    ending = ""
    if last is not None:
        ending = f": {last.outcome.kind.replace('_', ' ')} after {last.seconds:.0f} s, {short(last.config)}"
    print(f"{done} of {total} recorded{ending}", file=sys.stderr, flush=True)


@group.command()
def replay(
    table: Annotated[list[Path] | None, typer.Option("--table", help="Recorded table; may be repeated.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            help="Search methods, separated by commas; if not given, all but Optuna's Gaussian process (optuna-gp), "
            "which computes for hours.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", help="Searches per method and problem; 20 if not given.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Folder that keeps the searches; in your cache folder if not given.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", help="Searches at a time; as many as there are cores if not given.")
    ] = None,
    memory_limit: options.MemoryLimit = None,
    store: options.Store = None,
    as_json: options.Json = False,
) -> None:
    """Drive search methods over recorded tables.

    Replays searches as if the trials ran: how many trials, and seconds of trials, autofit's search and others need to
    come within 1 % of the best, for each training method of a table and for all together. Without --table, all
    tables of a checkout are used, which takes minutes. Searches are kept as they end: run the same command again to
    resume.

    \b
    Examples:
      autofit bench replay --table t.jsonl --methods autofit,optuna-tpe
      autofit bench replay --memory-limit 1GiB --seeds 20 --json
    """
    from autofit.bench.replay import SEEDS
    from autofit.bench.replay import replay as replayed
    from autofit.catalog.answer_cache import cache_folder
    from autofit.cli.arguments import size
    from autofit.cli.text.replay import replay_text
    from autofit.trial.machine.cores import cores

    folder = cache_folder() / "searches" if keep is None else keep
    limit = size(memory_limit)
    with resumable(f"finished searches are kept in {folder}: the same command continues from there"):
        result = replayed(
            table or (),
            methods=() if methods is None else [name.strip() for name in methods.split(",")],
            seeds=SEEDS if seeds is None else seeds,
            limit_of=None if limit is None else lambda recorded: limit,
            store=store,
            keep=folder,
            jobs=cores() if jobs is None else jobs,
            report=lambda line: print(line, file=sys.stderr, flush=True),
        )
    print_json(result.to_json()) if as_json else print(replay_text(result))
