"""Commands that run trials: search and trial."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autofit import operations
from autofit.cli import options
from autofit.cli.arguments import (
    given,
    hardware_names,
    loaded,
    prices,
    read_config,
    remarks_on,
    requested_device,
    size,
    warn_of_emulated_bf16,
)
from autofit.cli.output import columns, nothing_fits_as_json, print_json, resumable, warn, warn_of_contradictions
from autofit.cli.waiting import Waiting
from autofit.core.errors import UsageError
from autofit.core.units import format_bytes, format_duration, parse_duration

if TYPE_CHECKING:
    from autofit.operations import SearchRequest

RESUMES = "what was measured is stored, the same command resumes from there"
"""What becomes of a search that is interrupted."""


@options.expand_groups
def search(
    context: typer.Context,
    workload: options.Trained,
    wanted: options.GoalOptions,
    space: options.Space = None,
    hardware: options.SeveralHardware = "auto",
    price: options.Price = None,
    prices_file: options.Prices = None,
    device: options.Device = "auto",
    memory_limit: options.MemoryLimit = None,
    max_trials: Annotated[int | None, typer.Option("--max-trials", help="End after this many trials.")] = None,
    time_budget: Annotated[str, typer.Option("--time-budget", help="End after this time, such as 10m.")] = "10m",
    workers: options.Workers = None,
    ray_address: options.RayAddress = None,
    store: options.Store = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what the store knows.")] = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Once the best is found, go on to measure the whole frontier.")
    ] = False,
    no_predict: Annotated[
        bool, typer.Option("--no-predict", help="Make no estimates: learn what fits from trials alone.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Predict the frontier, and run nothing.")] = False,
    in_place: options.InPlace = False,
    fewer_devices: Annotated[
        bool, typer.Option("--fewer-devices", help="Also search with each smaller number that divides --global-batch.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Run real training trials and recommend the fastest config that fits.

    \b
    Examples:
      autofit search --model llama-3.1-8b
      autofit search --model smollm2-135m --seq-len 128 --global-batch 4 --memory-limit 2GiB
      autofit search --model ./my-model --method lora --min-rank 16 --time-budget 30m
      autofit search --model llama-3.1-8b --hardware h100-80g --dry-run
      autofit search --model llama-3.1-8b --method full --devices 4 --fewer-devices
      autofit search --model gpt2 --space my.yaml --command "python train.py --batch {micro_batch}"
      autofit search --model qwen3-8b --ray-address auto --store postgresql://db/autofit
      autofit search --model qwen3-8b --ray-address auto --hardware h100-80g,l40s --price h100-80g=2.50

    Every trial is stored as it ends: run the same command again to resume, or to get the answer from the store.
    """
    names = hardware_names(hardware, device)  # a wrong one is refused before anything is imported that takes long
    loaded(workload.model)

    request = operations.SearchRequest(
        workload=workload.asked(),
        goal=wanted.goal(),
        space=space,
        hardware=names[0],
        device=device,
        memory_limit_bytes=size(memory_limit),
        max_trials=max_trials,
        time_budget_seconds=parse_duration(time_budget),
        workers=workers,
        ray_address=ray_address,
        in_place=in_place,
        store=store,
        fresh=fresh,
        thorough=thorough,
        predict=not no_predict,
    )
    per_hour = prices(price or [], names, prices_file, store)
    several = len(names) > 1 or names == ["all"]
    if several and (dry_run or fewer_devices):
        raise UsageError("--dry-run and --fewer-devices take one kind of hardware at a time")
    if dry_run and fewer_devices:
        raise UsageError("--dry-run predicts one number of devices at a time: leave --fewer-devices out")
    if several:
        _search_each(request, names, per_hour, as_json=as_json)
    elif dry_run:
        if idle := given(context, "fresh", "thorough", "max_trials", "time_budget", "workers", "in_place"):
            warn(f"--dry-run runs no trial, so it makes no use of {', '.join(idle)}")
        _predict(request, as_json=as_json)
    else:
        _search(request, fewer_devices=fewer_devices, as_json=as_json)


def _search(request: SearchRequest, *, fewer_devices: bool, as_json: bool) -> None:
    from autofit.cli.live import ProgressDisplay
    from autofit.cli.text.search import over_devices_text, result_text

    run = operations.search_over_devices if fewer_devices else operations.search
    with resumable(RESUMES), nothing_fits_as_json(as_json), ProgressDisplay() as display:
        result = run(request, display)
    several = result if isinstance(result, operations.OverDevices) else None
    results = [result] if isinstance(result, operations.SearchResult) else list(result.results.values())
    warn_of_emulated_bf16(results[0].frontier.hardware)
    warn_of_contradictions(sum(r.frontier.contradictory for r in results))
    if as_json:
        print_json(result.to_json())
        return
    best = results[0] if several is None else several.best
    remarks = remarks_on(best.recommendation, request.workload.model)
    print(result_text(best, remarks) if several is None else over_devices_text(several, remarks))


def _search_each(request: SearchRequest, names: list[str], prices: dict[str, float], *, as_json: bool) -> None:
    from autofit.cli.live import StandingsDisplay
    from autofit.cli.text.search import over_hardware_text

    with resumable(RESUMES), StandingsDisplay() as display:
        results = operations.search_over_hardware(request, names, display)
    print_json(results.to_json(prices)) if as_json else print(over_hardware_text(results, prices))


def _predict(request: SearchRequest, *, as_json: bool) -> None:
    from autofit.cli.text.predicted import predicted_frontier_text

    with nothing_fits_as_json(as_json), Waiting() as waiting:
        predicted = operations.predict_frontier(request, waiting)
    warn_of_emulated_bf16(predicted.plan.job.hardware)
    document = predicted.to_json()
    print_json(document) if as_json else print(f"{predicted_frontier_text(predicted)}\n\n{preview_text(document)}")


@options.expand_groups
def trial(
    workload: options.Trained,
    config: options.Config,
    memory_limit: options.MemoryLimit = None,
    device: options.Device = "auto",
    deadline: Annotated[str, typer.Option("--deadline", help="Kill the trial after this time.")] = "10m",
    snapshot: Annotated[
        str | None, typer.Option("--snapshot", help="Write PyTorch's memory snapshot to this file (CUDA).")
    ] = None,
    profile: Annotated[str | None, typer.Option("--profile", help="Write a profiler trace to this file.")] = None,
    store: options.Store = None,
    as_json: options.Json = False,
) -> None:
    """Run one config once, and print its memory use and speed.

    \b
    Examples:
      autofit trial --model smollm2-135m --seq-len 128 --global-batch 4 --config micro_batch=4,precision=bf16
      autofit trial --model llama-3.1-8b --config config.json --snapshot memory.pickle
    """
    from autofit.cli.text.measured import trial_text
    from autofit.core.outcome import machinery_failed
    from autofit.operations.single_trial import TrialInterrupted
    from autofit.store import Store

    model, on = loaded(workload.model), requested_device("auto", device)
    chosen = read_config(config, on=on, model=model, trainer=workload.trainer)
    with Store.open(store) as opened:
        log = operations.StoredTrials(opened)
        try:
            result = operations.trial(
                workload.asked(),
                chosen,
                device=device,
                memory_limit_bytes=size(memory_limit),
                deadline_seconds=parse_duration(deadline),
                snapshot=str(Path(snapshot).resolve()) if snapshot else None,
                profile=str(Path(profile).resolve()) if profile else None,
                log=log,
            )
        except TrialInterrupted as interrupt:
            so_far = interrupt.trial
            print_json({**so_far.to_json(), "outcome": "interrupted"}) if as_json else print(trial_text(so_far))
            raise
    print_json(result.to_json()) if as_json else print(trial_text(result))
    log.check()
    raise typer.Exit(4 if machinery_failed(result.outcome) else EXIT_CODES[result.outcome.kind])


EXIT_CODES = {"fits": 0, "unsupported": 2, "out_of_memory": 3, "timed_out": 3, "crashed": 3, "diverged": 3}
"""Exit code of `trial` by outcome. If the machinery crashed rather than the config, it is 4."""


def preview_text(plan: dict[str, Any]) -> str:
    rows = [
        ("hardware", plan["hardware"]["name"]),
        ("space", plan["space"]),
        ("memory limit", format_bytes(plan["memory_limit_bytes"])),
        ("configs", str(plan["configs"])),
        ("predicted to fit", str(plan["fitting"])),
        ("ruled out by weights, gradients and states alone", str(plan["ruled_out_by_floor"])),
        ("beyond what --allow, --method and --min-rank permit", str(plan["beyond_goal"])),
    ]
    rows += [(f"unsupported: {reason}", str(count)) for reason, count in plan["unsupported"].items()]
    rows += [(f"not predicted: {reason}", str(count)) for reason, count in plan["not_predicted"].items()]
    rows.append(("predicted in", format_duration(plan["seconds"])))
    return columns(rows)
