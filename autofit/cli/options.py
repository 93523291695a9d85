"""Options that several commands share, each with one name and one help text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import typer


def completing(kind: str) -> Callable[[str], list[str]]:
    return lambda incomplete: [name for name in _names(kind) if name.startswith(incomplete)]


def _names(kind: str) -> Iterable[str]:
    from autofit import export
    from autofit.catalog import space
    from autofit.catalog.hardware import cards
    from autofit.catalog.models import names as models
    from autofit.core.workload import METHODS, Effect
    from autofit.techniques import AXES
    from autofit.techniques.habits import TRAINERS
    from autofit.trackers import TRACKERS
    from autofit.trial.machine.detection import DEVICE_KINDS

    every: dict[str, Callable[[], Iterable[str]]] = {
        "models": models,
        "hardware": lambda: ("auto", *(card.name for card in cards())),
        "spaces": space.names,
        "methods": lambda: ("any", *METHODS),
        "effects": lambda: (effect.label for effect in Effect),
        "devices": lambda: DEVICE_KINDS,
        "formats": lambda: export.FORMATS,
        "trainers": lambda: TRAINERS,
        "axes": lambda: (axis.name for axis in AXES),
        "trackers": lambda: TRACKERS,
    }
    return every[kind]()


Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="Catalog name (see `autofit models`), folder with a config.json, that file, or hub id.",
        autocompletion=completing("models"),
    ),
]
SeqLen = Annotated[
    int, typer.Option("--seq-len", help="Tokens per sequence; with --lengths, longer ones are cut to it.")
]
Lengths = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        help="How long your data's sequences are: a file with a number of tokens a line, or JSON lines with token ids. "
        "Default: every sequence is full.",
    ),
]
EvalBatch = Annotated[
    int | None,
    typer.Option(
        "--eval-batch",
        help="Sequences that your trainer evaluates at a time, per device: what that takes counts too. "
        "Default: training alone counts.",
    ),
]
GlobalBatch = Annotated[
    int, typer.Option("--global-batch", help="Sequences per optimizer step, over all micro-steps and devices.")
]
LoraDropout = Annotated[float, typer.Option("--lora-dropout", help="Dropout in front of each adapter.")]
MemoryLimit = Annotated[
    str | None, typer.Option("--memory-limit", help="Device memory that may be used, such as 24GiB.")
]
Devices = Annotated[int, typer.Option("--devices", help="Data-parallel devices.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of weights and tokens.")]
For = Annotated[
    str | None,
    typer.Option(
        "--for",
        help="Your trainer: transformers, trl, axolotl or llamafactory. Trials train as it does.",
        autocompletion=completing("trainers"),
    ),
]
Command = Annotated[
    str | None,
    typer.Option(
        "--command",
        help="Your own program, such as 'python train.py --batch {micro_batch}': trials run it. See "
        "docs/guides/your-program.md.",
    ),
]
Method = Annotated[
    str,
    typer.Option(
        "--method",
        help="any, full, lora or qlora.",
        autocompletion=completing("methods"),
    ),
]
MinRank = Annotated[int, typer.Option("--min-rank", help="Lowest adapter rank that you accept.")]
Allow = Annotated[
    str,
    typer.Option(
        "--allow",
        help="How far the result may change: exact, numerics or training.",
        autocompletion=completing("effects"),
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="auto, cpu, cuda, mps or xpu (mps and xpu are not supported yet).",
        autocompletion=completing("devices"),
    ),
]
Hardware = Annotated[
    str,
    typer.Option(
        "--hardware",
        help="auto, or a name that `autofit hardware` lists.",
        autocompletion=completing("hardware"),
    ),
]
SeveralHardware = Annotated[
    str,
    typer.Option(
        "--hardware",
        help="auto, a name that `autofit hardware` lists, or several with commas, or all: a search on each.",
        autocompletion=completing("hardware"),
    ),
]
SeveralEstimated = Annotated[
    str,
    typer.Option(
        "--hardware",
        help="auto, a name that `autofit hardware` lists, or several with commas, or all: a table of cards.",
        autocompletion=completing("hardware"),
    ),
]
Price = Annotated[
    list[str] | None, typer.Option("--price", help="Of a device for an hour, such as h100-80g=2.50; repeat it.")
]
Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Store of trials: a file or a SQLAlchemy URL. Default: $AUTOFIT_STORE, then your data folder.",
    ),
]
RayAddress = Annotated[str | None, typer.Option("--ray-address", help="Ray cluster to run on; default: this machine.")]
InPlace = Annotated[bool, typer.Option("--in-place", help="Run trials without Ray, for debugging.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


Space = Annotated[
    str | None,
    typer.Option(
        "--space",
        help="Search space: a name that `autofit spaces` lists, or a YAML file.",
        autocompletion=completing("spaces"),
    ),
]
