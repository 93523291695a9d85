"""Values of options that several commands share, made from what was typed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autofit.cli.output import warn
from autofit.core.errors import UsageError, unknown
from autofit.core.units import format_bytes, is_decimal, parse_bytes

if TYPE_CHECKING:
    # Imported where they are used: `autofit --help` needs none of them.
    import typer

    from autofit.catalog.hardware import Card
    from autofit.catalog.models import Model
    from autofit.core.device.hardware import Hardware
    from autofit.core.frontier import Recommendation
    from autofit.core.lattice import Config


def given(context: typer.Context, *names: str) -> list[str]:
    """Those of the options with these parameters' names that the user has typed."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [f"--{n.replace('_', '-')}" for n, source in sources.items() if source and source.name == "COMMANDLINE"]


def requested_device(hardware: str, device: str = "auto") -> Card | Hardware:
    """The card that --hardware names, or this machine's device. Called before anything slow is imported."""
    from autofit.trial.machine.detection import detect, requested_card

    return requested_card(hardware, device) or detect(device)[0]


def hardware_names(hardware: str, device: str = "auto") -> list[str]:
    """What --hardware names, with commas between several, or `all`; raises as `requested_device` does."""
    from autofit.trial.machine.detection import requested_card

    if hardware.strip().lower() == "all":
        return ["all"]
    names = [name.strip() for name in hardware.split(",")]
    cards = [requested_card(name, device) for name in names]
    if len(names) > 1 and "auto" in names:
        raise UsageError(f"--hardware {hardware}: auto is one of its own, name every kind")
    return [name if card is None or len(names) == 1 else card.name for name, card in zip(names, cards, strict=True)]


def prices(
    given: Sequence[str], names: Sequence[str], listed: Path | None = None, store: str | None = None
) -> dict[str, float]:
    """Hardware -> the price of one device for an hour: from the file of `--prices`, which may have more than is
    compared, then from `--price NAME=NUMBER`. Raises `UsageError`."""
    from autofit.operations.hardware_compared import price_of_an_hour

    if (given or listed) and len(names) == 1 and names != ["all"]:
        raise UsageError("a price compares kinds of hardware: name several, such as --hardware h100-80g,l40s")
    in_file = {_priced(name, names, store): price_of_an_hour(str(n)) for name, n in _price_list(listed).items()}
    price_of = {name: price for name, price in in_file.items() if names == ["all"] or name in names}
    for text in given:
        name, _, number = text.partition("=")
        if names == ["all"]:
            name = _priced(name, names, store)
        elif name not in names:
            raise unknown("hardware with a price", name, names)
        price_of[name] = price_of_an_hour(number)
    return price_of


def _priced(name: str, names: Sequence[str], store: str | None) -> str:
    from autofit.catalog.hardware import card, matching_cards
    from autofit.prediction.estimate_cache import readable

    if name in names:
        return name
    if not matching_cards(name):
        with readable(store) as opened:
            if opened is not None and name.lower() in opened.queue.hardware_names():
                return name.lower()
    return card(name).name


def _price_list(path: Path | None) -> dict[str, object]:
    import yaml

    try:
        listed = {} if path is None else yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except yaml.MarkedYAMLError as error:
        mark = error.context_mark or error.problem_mark
        line = "" if mark is None else f" from line {mark.line + 1} on"
        raise UsageError(f"the prices in {path} cannot be read{line}: write one a line, as in l4: 0.70") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"the prices in {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed):
        raise UsageError(f"{path} must map names of hardware to prices, such as h100-80g: 2.50")
    return listed


def size(text: str | None) -> int | None:
    """The bytes of --memory-limit; standard error says so where a unit is a power of ten. Raises `UsageError`."""
    if text is None:
        return None
    limit = parse_bytes(text)
    if is_decimal(text):
        warn(f"{text} is in powers of ten: {limit:,} bytes, or {format_bytes(limit)}")
    return limit


def remarks_on(answer: Recommendation, model: str) -> list[str]:
    """What a recommendation's text says besides: a program to run, or a checkpoint that exceeds the host."""
    from autofit import operations
    from autofit.export import command_line
    from autofit.export.distributed import saving_notes
    from autofit.export.document import Recommended

    source = operations.hub_id(model)
    if answer.workload.program is not None:
        return [f"Run: {command_line(answer, source)}"]
    return saving_notes(Recommended.of(answer, source))


def read_config(
    text: str, *, on: Card | Hardware, model: Model, trainer: str | None = None, changed: Config | None = None
) -> Config:
    """The config given as `axis=value,...` or as the path of a JSON file. What it leaves out takes the values of the
    device's plain recipe or, without a method, of the config `changed`, if that is given. Raises `UsageError`."""
    from autofit import techniques

    values = _config_values(text)
    if changed is not None and "method" not in values:
        values = {**changed.to_json(), **values}
    if "precision" not in values:
        warn_of_emulated_bf16(on)
    return techniques.complete(values, techniques.recipe(on, model, trainer))


def loaded(name: str) -> Model:
    """The model of this name; what figures leave out of its file is said on standard error. Raises as `load` does."""
    from autofit.catalog.models import load, notes

    model = load(name)
    for note in notes(model):
        warn(f"{model.name}: {note}")
    return model


def warn_of_emulated_bf16(on: Card | Hardware) -> None:
    """Say on standard error if the device's plain recipe is in fp16."""
    from autofit.techniques import mixed_precision

    precision = mixed_precision(on)
    if precision != "bf16-mixed":
        warn(f"{on.name} only emulates bf16: precision={precision} takes the place of bf16-mixed")


def _config_values(text: str) -> Mapping[str, object]:
    from autofit import techniques

    if not text.strip():
        raise UsageError("the config is empty: write axis=value pairs, such as method=lora,micro_batch=4")
    if "=" in text and not os.path.exists(text):  # unlike Path's, it also answers for what is too long for a name
        return techniques.parse(text)
    try:
        data = json.loads(Path(text).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(
            f"config {text!r} is neither axis=value pairs nor a readable file: {error.strerror}"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"config file {text} is not JSON: {error} (a trainer's own file is for `autofit diagnose`)"
        ) from error
    except RecursionError as error:
        raise UsageError(f"config file {text} is not a config: it is nested too deeply") from error
    config = data.get("config", data) if isinstance(data, dict) else data
    if not isinstance(config, dict):
        raise UsageError(f"config file {text} must hold one JSON object")
    return config
