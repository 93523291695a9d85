"""Options that several commands share, each with one name and one help text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from autofit.core.workload import METHODS, Effect, Goal

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from autofit.planning.requests import WorkloadOptions


def whole_tokens(text: str | int) -> int:
    """Some write 8k for 8,000 tokens and some for 8,192, so it is no number here."""
    try:
        return int(text)
    except ValueError:
        thousands = re.fullmatch(r"(\d{1,9})k", str(text), re.IGNORECASE)
        example = 1024 * int(thousands[1]) if thousands else 8192
        raise typer.BadParameter(f"{text!r} is no whole number of tokens: write it out, such as {example}") from None


def completing(kind: str) -> Callable[[str], list[str]]:
    return lambda incomplete: [name for name in _names(kind) if name.startswith(incomplete)]


def completed(flag: str, kind: str, text: str) -> Any:
    """An option whose values the shell completes."""
    return typer.Option(flag, help=text, autocompletion=completing(kind))


def _names(kind: str) -> Iterable[str]:
    from autofit import export
    from autofit.catalog import space
    from autofit.catalog.hardware import cards
    from autofit.catalog.models import names as models
    from autofit.techniques import AXES
    from autofit.techniques.habits import TRAINERS
    from autofit.trackers import TRACKERS
    from autofit.trial.machine.detection import DEVICE_KINDS

    names: dict[str, Iterable[str]] = {
        "models": models(),
        "hardware": ("auto", *(card.name for card in cards())),
        "spaces": space.names(),
        "methods": ("any", *METHODS),
        "effects": (effect.label for effect in Effect),
        "devices": DEVICE_KINDS,
        "formats": export.FORMATS,
        "trainers": TRAINERS,
        "axes": (axis.name for axis in AXES),
        "trackers": TRACKERS,
    }
    return names[kind]


Config = Annotated[str, typer.Option("--config", help="axis=value,... or a JSON file. Absent axes: plain recipe.")]
GlobalBatch = Annotated[
    int, typer.Option("--global-batch", help="Sequences per optimizer step, over all micro-steps and devices.")
]
Devices = Annotated[int, typer.Option("--devices", help="Data-parallel devices.")]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory-limit", help="Device memory that may be used, such as 24GiB.")
]
Device = Annotated[
    str, completed("--device", "devices", "auto, cpu, cuda, mps or xpu (mps and xpu are not supported yet).")
]
_SEVERAL = "auto, a name that `autofit hardware` lists, or several with commas, or all:"
Hardware = Annotated[str, completed("--hardware", "hardware", "auto, or a name that `autofit hardware` lists.")]
SeveralHardware = Annotated[str, completed("--hardware", "hardware", f"{_SEVERAL} a search on each.")]
SeveralEstimated = Annotated[str, completed("--hardware", "hardware", f"{_SEVERAL} a table of cards.")]
Price = Annotated[
    list[str] | None, typer.Option("--price", help="Of a device for an hour, such as h100-80g=2.50; repeat it.")
]
Prices = Annotated[
    Path | None, typer.Option("--prices", help="A YAML or JSON file of such prices, by name; --price goes first.")
]
Store = Annotated[
    str | None,
    typer.Option(
        "--store", help="Store of trials: a file or a SQLAlchemy URL. Default: $AUTOFIT_STORE, then your data folder."
    ),
]
RayAddress = Annotated[str | None, typer.Option("--ray-address", help="Ray cluster to run on; default: this machine.")]
Workers = Annotated[
    int | None, typer.Option("--workers", help="Trials to run at the same time; default: one per device.")
]
InPlace = Annotated[bool, typer.Option("--in-place", help="Run trials without Ray, for debugging.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Space = Annotated[
    str | None, completed("--space", "spaces", "Search space: a name that `autofit spaces` lists, or a YAML file.")
]


@dataclass(frozen=True, slots=True)
class Estimated:
    """What is trained: the options of `WorkloadOptions` that an estimate takes."""

    model: Annotated[
        str,
        completed(
            "--model", "models", "Catalog name (see `autofit models`), folder with a config.json, that file, or hub id."
        ),
    ]
    seq_len: Annotated[
        int,
        typer.Option(
            "--seq-len",
            parser=whole_tokens,
            metavar="<int>",
            help="Tokens per sequence; with --lengths, longer ones are cut to it.",
        ),
    ] = 2048
    global_batch: GlobalBatch = 64
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            help="How long your data's sequences are: a file with a number of tokens a line, or JSON lines with "
            "token ids. Default: every sequence is full.",
        ),
    ] = None
    trainer: Annotated[
        str | None,
        completed(
            "--for", "trainers", "Your trainer: transformers, trl, axolotl or llamafactory. Trials train as it does."
        ),
    ] = None
    eval_batch: Annotated[
        int | None,
        typer.Option(
            "--eval-batch",
            help="Sequences that your trainer evaluates at a time, per device: what that takes counts too. "
            "Default: training alone counts.",
        ),
    ] = None
    devices: Devices = 1
    lora_dropout: Annotated[float, typer.Option("--lora-dropout", help="Dropout in front of each adapter.")] = 0.0
    seed: Annotated[int, typer.Option("--seed", help="Seed of weights and tokens.")] = 0

    def asked(self) -> WorkloadOptions:
        """The options as an operation takes them; raises `UsageError` for what are no lengths or no command."""
        from autofit.planning.requests import WorkloadOptions

        return WorkloadOptions.of(**{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True, slots=True)
class Trained(Estimated):
    """What is trained: the options of `WorkloadOptions` that a trial takes."""

    command: Annotated[
        str | None,
        typer.Option(
            "--command",
            help="Your own program, such as 'python train.py --batch {micro_batch}': trials run it. See "
            "docs/guides/your-program.md.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class GoalOptions:
    """What a config may change: the options of `Goal`."""

    method: Annotated[str, completed("--method", "methods", "any, full, lora or qlora.")] = "any"
    min_rank: Annotated[int, typer.Option("--min-rank", help="Lowest adapter rank that you accept.")] = 8
    allow: Annotated[
        str, completed("--allow", "effects", "How far the result may change: exact, numerics or training.")
    ] = "numerics"

    def goal(self) -> Goal:
        """Raises `UsageError` for an unknown method or effect."""
        return Goal.of(self.method, self.min_rank, self.allow)


def expand_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command for typer, with an option for each field of its parameters that are data classes."""
    parameters = signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {own.name: own.annotation for own in parameters if is_dataclass(own.annotation)}
    options = [option for own in parameters for option in (_of(groups[own.name]) if own.name in groups else [own])]

    @wraps(command)
    def run(**given: Any) -> Any:
        grouped = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**grouped, **given)

    named = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in options]
    vars(run)["__signature__"] = Signature(named, return_annotation=None)
    run.__annotations__ = {option.name: option.annotation for option in named}
    return run


def _of(group: type[DataclassInstance]) -> Iterator[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = Parameter.empty if field.default is MISSING else field.default
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])
