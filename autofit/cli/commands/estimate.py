"""`autofit estimate`: predicts what a config needs, without a device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from autofit.cli import options
from autofit.cli.arguments import device_asked, given, hardware_names, prices, read_config, size
from autofit.cli.output import print_json, write_page

if TYPE_CHECKING:
    from autofit.core.lattice import Config
    from autofit.planning.requests import WorkloadOptions


def estimate(
    context: typer.Context,
    model: options.Model,
    config: Annotated[str, typer.Option("--config", help="axis=value,... or a JSON file. Absent axes: plain recipe.")],
    hardware: options.SeveralEstimated = "auto",
    price: options.Price = None,
    seq_len: options.SeqLen = 2048,
    global_batch: options.GlobalBatch = 64,
    lora_dropout: options.LoraDropout = 0.0,
    memory_limit: options.MemoryLimit = None,
    devices: options.Devices = 1,
    seed: options.Seed = 0,
    trainer: options.For = None,
    lengths: options.Lengths = None,
    explain: Annotated[
        str | None,
        typer.Option("--explain", help="Another config: explain its difference in memory, byte by byte."),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Trace every decoder layer, not just a few.")] = False,
    no_advice: Annotated[
        bool, typer.Option("--no-advice", help="Do not look for a change that makes it fit, or makes it faster.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write a chart of a step's memory to this file, and its script beside it."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print the allocator's figures and what is assumed.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Predict the memory and speed of a config on a card that need not be in this machine.

    The training step itself is traced on tensors without data; nothing is downloaded and no device is needed.

    \b
    Examples:
      autofit estimate --model llama-3.1-8b --hardware rtx-4090 \\
          --config method=qlora,rank=16,micro_batch=4,checkpointing=full
      autofit estimate --model qwen3-8b --hardware h100-80g --config precision=bf16,checkpointing=full --json
      autofit estimate --model qwen3-8b --hardware l4 --config method=lora --html memory.html
      autofit estimate --model qwen3-8b --hardware all --config method=lora,checkpointing=full
      autofit estimate --model llama-3.1-8b --hardware h100-80g --devices 8 \\
          --config method=lora,rank=16,sharding=ddp --explain method=lora,rank=16,sharding=zero2
    """
    from autofit.core.errors import UsageError

    if explain is not None and (exact or html is not None):
        raise UsageError("--explain compares two configs: leave --exact and --html out")
    limit = size(memory_limit)
    names = hardware_names(hardware)
    if len(names) > 1 or names == ["all"]:
        idle = given(context, "explain", "exact", "html", "no_advice", "verbose")
        if idle:
            raise UsageError(f"several cards are compared in a table: leave {', '.join(idle)} out")
        of_all = (model, seq_len, global_batch, lora_dropout, devices, seed, trainer, lengths)
        _on_each(of_all, config, names, price or [], memory_limit_bytes=limit, as_json=as_json)
    if price:
        raise UsageError("--price compares kinds of hardware: name several, such as --hardware h100-80g,l40s")
    on = device_asked(hardware)
    chosen = read_config(config, on=on, trainer=trainer)
    other = None if explain is None else read_config(explain, on=on, trainer=trainer)

    from autofit import operations
    from autofit.cli.text.predicted import estimate_text
    from autofit.cli.waiting import Waiting

    asked = operations.WorkloadOptions.of(model, seq_len, global_batch, lora_dropout, devices, seed, trainer, lengths)
    if other is not None:
        _explain(asked, chosen, other, hardware=hardware, memory_limit_bytes=limit, as_json=as_json)
        return
    with Waiting() as waiting:
        estimation = operations.Estimation.of(asked, chosen, hardware=hardware, memory_limit_bytes=limit, exact=exact)
        found = estimation.estimate() if no_advice else estimation.advised(waiting)
    print_json(found.to_json()) if as_json else print(estimate_text(found, verbose=verbose))
    if html is not None:
        # Comes second, because a model that cannot be traced has an estimate but no timeline, which ends the program.
        from autofit.export.charts import memory_chart

        write_page(html, memory_chart.figure(estimation.timeline(), found, estimation.job))
    raise typer.Exit(0 if found.likely_fits else 3)


def _on_each(
    asked: tuple[Any, ...],
    config: str,
    names: list[str],
    price: list[str],
    *,
    memory_limit_bytes: int | None,
    as_json: bool,
) -> NoReturn:
    """Print what the config takes on each card, and end with 0 if it is likely to fit one."""
    from autofit import operations
    from autofit.catalog.hardware import called, card, cards
    from autofit.cli.text.cards import cards_text
    from autofit.cli.waiting import Waiting
    from autofit.core.errors import UsageError
    from autofit.operations.hardware_compared import estimate_each

    for name in names:
        if name != "all" and not called(name):
            raise UsageError(f"only cards of the catalog can be compared: leave {name} out")
    per_hour = prices(price, names)
    chosen = [known for known in cards() if "estimate" in known.supports] if names == ["all"] else map(card, names)
    configs = {each.name: read_config(config, on=each, trainer=asked[6]) for each in chosen}
    options = operations.WorkloadOptions.of(*asked)
    with Waiting() as waiting:
        found = estimate_each(options, configs, memory_limit_bytes=memory_limit_bytes, report=waiting)
    rows = [row.to_json(per_hour.get(row.name)) for row in found]
    print_json({"cards": rows}) if as_json else print(cards_text(found, per_hour))
    raise typer.Exit(0 if any(row.fits for row in found) else 3)


def _explain(
    options: WorkloadOptions,
    before: Config,
    after: Config,
    *,
    hardware: str,
    memory_limit_bytes: int | None,
    as_json: bool,
) -> None:
    """Print why the second config needs a different amount of memory from the first."""
    from autofit import operations
    from autofit.cli.text.explanation import explanation_text
    from autofit.cli.waiting import Waiting

    with Waiting():
        found = operations.explain(options, before, after, hardware=hardware, memory_limit_bytes=memory_limit_bytes)
    print_json(found.to_json()) if as_json else print(explanation_text(found))
