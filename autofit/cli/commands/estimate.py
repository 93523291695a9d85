"""`autofit estimate`: predicts what a config needs, without a device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autofit import operations
from autofit.cli import options
from autofit.cli.arguments import given, hardware_names, loaded, prices, read_config, requested_device, size
from autofit.cli.output import print_json, warn, write_page
from autofit.cli.waiting import Waiting
from autofit.core.errors import UsageError
from autofit.core.units import parse_tokens

if TYPE_CHECKING:
    from autofit.catalog.hardware import Card
    from autofit.core.device.hardware import Hardware
    from autofit.core.lattice import Config
    from autofit.estimate.estimate import Estimate
    from autofit.operations import Comparison, Estimation
    from autofit.planning.requests import WorkloadOptions


@options.expand_groups
def estimate(
    context: typer.Context,
    workload: options.Estimated,
    config: options.Config,
    hardware: options.SeveralEstimated = "auto",
    price: options.Price = None,
    prices_file: options.Prices = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            "--tokens", help="With several cards: how long so many tokens take on each, such as 500M or 1.5B."
        ),
    ] = None,
    memory_limit: options.MemoryLimit = None,
    explain: Annotated[
        str | None, typer.Option("--explain", help="Another config, or what changes: explain the difference in memory.")
    ] = None,
    longest: Annotated[
        bool, typer.Option("--longest", help="Find the longest --seq-len that fits with room for the error.")
    ] = False,
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
      autofit estimate --model qwen3-8b --hardware l4 --config method=qlora,checkpointing=full,loss=chunked --longest
      autofit estimate --model qwen3-8b --hardware all --config method=lora,checkpointing=full --tokens 100M
      autofit estimate --model llama-3.1-8b --hardware h100-80g --devices 8 \\
          --config method=lora,rank=16,sharding=ddp --explain method=lora,rank=16,sharding=zero2
    """
    limit = size(memory_limit)
    names = hardware_names(hardware)
    _check_together(context, several=len(names) > 1 or names == ["all"])
    per_hour = prices(price or [], names, prices_file)
    total = None if tokens is None else parse_tokens(tokens)
    devices = _devices(names)
    read = partial(read_config, model=loaded(workload.model), trainer=workload.trainer)
    configs = {name: read(config, on=device) for name, device in devices.items()}
    other = None if explain is None else read(explain, on=devices[names[0]], changed=configs[names[0]])
    asked = workload.asked()
    if len(configs) > 1:
        spreads = not given(context, "devices")
        fits = _on_each(asked, configs, limit, per_hour, total, spreads=spreads, as_json=as_json)
    else:
        ((name, chosen),) = configs.items()
        if name == "auto" and devices[name].kind == "cpu":
            warn("there is no GPU here, so this is for the processor: name a card with --hardware")
        if other is not None:
            comparison = operations.Comparison(asked, hardware=name, memory_limit_bytes=limit)
            fits = _explain(comparison, chosen, other, as_json=as_json)
        elif longest:
            fits = _find_longest(asked, chosen, name, limit, verbose=verbose, as_json=as_json)
        else:
            with Waiting():
                estimation = operations.Estimation.of(
                    asked, chosen, hardware=name, memory_limit_bytes=limit, exact=exact
                )
                prediction = estimation.estimate()
            fits = _tell(estimation, prediction, advice=not no_advice, html=html, verbose=verbose, as_json=as_json)
    raise typer.Exit(0 if fits else 3)


def _check_together(context: typer.Context, *, several: bool) -> None:
    """Raise `UsageError` for options that have no meaning beside others."""
    modes = {
        "--explain compares two configs": (given(context, "explain"), ("exact", "html")),
        "--longest finds the length, and no more": (
            given(context, "longest"),
            ("seq_len", "explain", "exact", "html", "no_advice"),
        ),
        "several cards are compared in a table": (several, ("longest", "explain", "exact", "html", "verbose")),
    }
    for reason, (chosen, others) in modes.items():
        if chosen and (idle := given(context, *others)):
            raise UsageError(f"{reason}: leave {', '.join(idle)} out")
    if given(context, "tokens") and not several:
        raise UsageError("--tokens compares cards: name several, such as --hardware h100-80g,l40s, or all")


def _devices(names: list[str]) -> dict[str, Card | Hardware]:
    """The device that each name stands for. Raises `UsageError` for one of several that is not in the catalog."""
    from autofit.catalog.hardware import card, cards, matching_cards

    if len(names) == 1 and names != ["all"]:
        return {names[0]: requested_device(names[0])}
    strange = [name for name in names if name != "all" and not matching_cards(name)]
    if strange:
        raise UsageError(f"only cards of the catalog can be compared: leave {', '.join(strange)} out")
    chosen = [c for c in cards() if "estimate" in c.supports] if names == ["all"] else map(card, names)
    return {each.name: each for each in chosen}


def _on_each(
    workload: WorkloadOptions,
    configs: Mapping[str, Config],
    limit: int | None,
    prices: Mapping[str, float],
    tokens: int | None,
    *,
    spreads: bool,
    as_json: bool,
) -> bool:
    """Print what each card's config takes on it; whether one is likely to fit."""
    from autofit.cli.text.cards import cards_text
    from autofit.operations.hardware_compared import estimate_cards

    with Waiting() as waiting:
        cards = estimate_cards(workload, configs, memory_limit_bytes=limit, spreads=spreads, report=waiting)
    rows = [row.to_json(prices.get(row.name), tokens) for row in cards]
    print_json({"cards": rows}) if as_json else print(cards_text(cards, prices, tokens, workload.devices))
    return any(row.fits for row in cards)


def _explain(comparison: Comparison, config: Config, other: Config, *, as_json: bool) -> bool:
    """Print why another config needs a different amount of memory; nothing is said of whether they fit."""
    from autofit.cli.text.explanation import explanation_text

    explanation = comparison.explanation(config, other)
    print_json(explanation.to_json()) if as_json else print(explanation_text(explanation))
    return True


def _find_longest(
    workload: WorkloadOptions, config: Config, hardware: str, limit: int | None, *, verbose: bool, as_json: bool
) -> bool:
    """Print how long sequences may be; whether those fit."""
    from autofit.cli.text.predicted import longest_text

    with Waiting("lengths predicted") as waiting:
        longest = operations.longest_sequence(
            workload, config, hardware=hardware, memory_limit_bytes=limit, report=waiting
        )
    print_json(longest.to_json()) if as_json else print(longest_text(longest, verbose=verbose))
    return longest.estimate.likely_fits


def _tell(
    estimation: Estimation, prediction: Estimate, *, advice: bool, html: Path | None, verbose: bool, as_json: bool
) -> bool:
    """Print what the config needs, and changes that help; whether it is likely to fit."""
    from autofit.cli.text.predicted import advice_text, estimate_text

    if not as_json:
        print(estimate_text(prediction, verbose=verbose), flush=True)
    if advice:
        with Waiting("changes tried") as waiting:
            prediction = estimation.advised(waiting, of=prediction)
    if as_json:
        print_json(prediction.to_json())
    elif advised := advice_text(prediction):
        print(advised)
    if html is not None:
        # Comes second: a model that cannot be traced has an estimate but no timeline, which ends the program.
        from autofit.export.charts import memory_chart

        write_page(html, memory_chart.figure(estimation.timeline(), prediction, estimation.job))
    return prediction.likely_fits
