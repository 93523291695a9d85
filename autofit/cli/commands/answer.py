"""Commands that answer from the store alone: frontier and recommend."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autofit import operations
from autofit.cli import options
from autofit.cli.arguments import remarks_on, size
from autofit.cli.output import (
    nothing_fits_as_json,
    print_json,
    tell_written,
    warn,
    warn_of_contradictions,
    write,
    write_page,
)
from autofit.core.errors import UsageError


@options.expand_groups
def frontier(
    workload: options.Trained,
    wanted: options.GoalOptions,
    hardware: options.Hardware = "auto",
    memory_limit: options.MemoryLimit = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write an interactive chart to this file, and its script beside it.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Write a chart to this file.")] = None,
    store: options.Store = None,
    as_json: options.Json = False,
) -> None:
    """Show the measured Pareto frontier of memory against throughput.

    \b
    Examples:
      autofit frontier --model llama-3.1-8b
      autofit frontier --model llama-3.1-8b --hardware h100-80g --html frontier.html --png frontier.png
    """
    from autofit.cli.text.measured import frontier_text
    from autofit.store import Store

    limit = size(memory_limit)
    if html is not None and html == png:
        raise UsageError(f"--html and --png both name {html}: give each a file of its own")
    with Store.open(store, create=False) as opened:
        answer = operations.frontier(
            workload.asked(), hardware=hardware, goal=wanted.goal(), memory_limit_bytes=limit, store=opened
        )
    warn_of_contradictions(answer.contradictory)
    if html is not None or png is not None:
        from autofit.export.charts import frontier_chart

        if html is not None:
            write_page(html, frontier_chart.figure(answer))
        if png is not None:
            write(png, [frontier_chart.png(answer)])
            tell_written(png)
    print_json(answer.to_json()) if as_json else print(frontier_text(answer, memory_limit_bytes=limit))


@options.expand_groups
def recommend(
    workload: options.Trained,
    wanted: options.GoalOptions,
    hardware: options.Hardware = "auto",
    memory_limit: options.MemoryLimit = None,
    form: Annotated[
        str | None,
        options.completed(
            "--format",
            "formats",
            "json, transformers, trl, accelerate, deepspeed, axolotl, llamafactory; default: text.",
        ),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Write it even if its trainer needs more memory than was measured.")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file.")] = None,
    store: options.Store = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Recommend the fastest measured config that fits, in the format that your trainer reads.

    \b
    Examples:
      autofit recommend --model llama-3.1-8b --memory-limit 24GiB
      autofit recommend --model llama-3.1-8b --method lora --format trl -o sft.yaml
    """
    from autofit.cli.text.measured import recommendation_text
    from autofit.store import Store

    if as_json:
        if form not in (None, "json"):
            raise UsageError(f"--json is --format json, and --format {form} was also given: leave one of them out")
        form = "json"
    if form is not None:
        from autofit import export

        export.check_format(form)
    with nothing_fits_as_json(form == "json" and out is None), Store.open(store, create=False) as opened:
        answer = operations.recommend(
            workload.asked(), hardware=hardware, memory_limit_bytes=size(memory_limit), goal=wanted.goal(), store=opened
        )
    warn_of_contradictions(answer.contradictory)
    text = recommendation_text(answer, remarks_on(answer, workload.model)) + "\n"
    if form is not None:
        exported = export.export(answer, format=form, source=operations.hub_id(workload.model))
        if not anyway:
            export.check_memory(exported, form, trainer=workload.trainer)
        text = exported.text
        for note in exported.notes:
            warn(note)
    if out is not None:
        write(out, [text.encode()])
        tell_written(out)
    else:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
