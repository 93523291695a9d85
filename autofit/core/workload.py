"""What the user wants to train, and how far a search may stray from it."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, ParamSpec, Self, TypedDict, TypeVar, get_type_hints

from autofit.core.document import LastingDocument
from autofit.core.errors import UsageError, unknown
from autofit.core.lengths import LARGEST_COUNT, mean

P = ParamSpec("P")
R = TypeVar("R")
METHODS = ("full", "lora", "qlora")
"""Training methods, the most faithful to full fine-tuning first."""


class Effect(enum.IntEnum):
    """What a technique changes: nothing but the order of rounding, numerical precision, or the training itself."""

    EXACT = 0
    NUMERICS = 1
    TRAINING = 2

    @property
    def label(self) -> str:
        """The name used on the command line and in documents."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFields:
    """What a workload and the options that ask for it have in common: each option, and what it is by default."""

    model: str
    """Name in the catalog, hub id, or folder that holds the config.json; a workload has the folder's name alone."""
    seq_len: int = 2048
    """Tokens per sequence, of the longest one if they have `lengths`."""
    global_batch: int = 64
    """Sequences per optimizer step, over all micro-steps and devices."""
    lora_dropout: float = 0.0
    """Dropout in front of each adapter; 0 lets kernels skip the mask."""
    devices: int = 1
    """Data-parallel ranks."""
    seed: int = 0
    """Seed of weights and tokens."""
    trainer: str | None = None
    """The trainer whose habits the step has (`techniques.habits`); None for plain training, as a config says."""
    eval_batch: int | None = None
    """Sequences that are evaluated at a time between training steps, on each device; None where training alone
    counts."""
    program: str | None = None
    """The command that trains, a user's own, with placeholders for a config's values (`trial.program.command`); None
    for autofit's own step. What a program took says nothing of what another takes."""


class WorkloadKeywords(TypedDict, total=False):
    """The options as keyword arguments, with what users may give for each; `WorkloadFields` has what they mean."""

    seq_len: int
    global_batch: int
    lora_dropout: float
    devices: int
    seed: int
    trainer: str | None
    lengths: str | Path | Sequence[int] | None
    """As a file, or as the tokens of each sequence."""
    eval_batch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(WorkloadFields, LastingDocument):
    """One training job, fixed during a search. Two trials are comparable only if their workloads are equal."""

    model_digest: str
    """Digest of the architecture (`catalog.Model.digest`), so that two models of the same name are never mixed up."""
    lengths: tuple[int, ...] | None = None
    """How long the data's sequences are (`Lengths.tokens`), of which the longest has `seq_len` tokens; None where every
    sequence is full."""

    def to_json(self) -> dict[str, Any]:
        """Fields that are None go without saying, as in the workloads that were stored before there were any."""
        return {name: value for name, value in super(Workload, self).to_json().items() if value is not None}

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora_dropout", float(self.lora_dropout) + 0.0)  # 0, 0.0 and -0.0 are one
        for name in ("seq_len", "global_batch", "devices", "eval_batch"):
            value = getattr(self, name)
            if value is not None:
                check_count(name.replace("_", "-"), value)
        if not 0.0 <= self.lora_dropout < 1.0:
            raise UsageError(f"lora-dropout is {self.lora_dropout}: it must be at least 0 and below 1")
        if self.seq_len < 2:
            raise UsageError("seq-len is 1: a next-token loss needs at least 2 tokens")
        if self.lengths is not None and not 2 <= min(self.lengths, default=0) <= max(self.lengths) <= self.seq_len:
            raise UsageError(f"lengths must be from 2 to seq-len, which is {self.seq_len}")
        check_shared_equally(self.global_batch, self.devices)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that an optimizer step trains on; padding is none of them."""
        tokens = self.seq_len if self.lengths is None else mean(self.lengths)
        return round(tokens * self.global_batch)

    @property
    def sequence(self) -> str:
        """How long a sequence is, in words."""
        text = f"{self.seq_len:,} tokens"
        return text if self.lengths is None else f"{text} at most, {mean(self.lengths):,.0f} in the mean"

    @property
    def batch_per_device(self) -> int:
        return self.global_batch // self.devices

    @property
    def masks_padding(self) -> bool:
        """Whether the trainer says where sequences are padded (`techniques.habits.masks_padding`)."""
        return self.trainer is not None and self.lengths is not None

    @property
    def key(self) -> str:
        """That of trials whose padding was not masked, or which held no gradients beside a trainer's buckets, as it
        once was, is another one."""
        since = {"padding": "masked"} if self.masks_padding else {}
        since |= {"buckets": "apart"} if self.trainer is not None and self.devices > 1 else {}
        return digest({**self.to_json(), **since})


def spelled_out(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose last parameter is `**workload: Unpack[WorkloadKeywords]`, with each of these and its default in
    the signature, as help and notebooks show it. It is given all of them, and no other."""
    plain = signature(function)
    *parameters, _ = plain.parameters.values()
    defaults = {field.name: field.default for field in fields(Workload)}
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
        for name, kind in get_type_hints(WorkloadKeywords).items()
    ]
    whole = plain.replace(parameters=sorted([*options, *parameters], key=lambda parameter: parameter.kind))

    @wraps(function)
    def call(*positional: P.args, **named: P.kwargs) -> R:
        try:
            arguments = whole.bind(*positional, **named)
        except TypeError as error:
            raise TypeError(f"{function.__name__}(): {error}") from None
        arguments.apply_defaults()
        return function(*arguments.args, **arguments.kwargs)

    vars(call)["__signature__"] = whole
    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """How far a search may stray from the workload's plain recipe (`bf16-mixed`, AdamW, the given method and rank)."""

    method: str = "any"
    """`full`, `lora`, `qlora`, or `any` for the three side by side."""
    min_rank: int = 8
    """The lowest adapter rank that the user accepts."""
    allow: Effect = Effect.NUMERICS
    """The strongest change that the search may make."""

    def __post_init__(self) -> None:
        if self.method not in ("any", *METHODS):
            raise unknown("method", self.method, ("any", *METHODS))
        check_count("min-rank", self.min_rank)

    @classmethod
    def of(cls, method: str, min_rank: int, allow: str) -> Self:
        """The goal of the options that users write, `allow` by its label; raises `UsageError`."""
        effects = {effect.label: effect for effect in Effect}
        if allow not in effects:
            raise unknown("value of allow", allow, effects)
        return cls(method=method, min_rank=min_rank, allow=effects[allow])

    @property
    def methods(self) -> tuple[str, ...]:
        return METHODS if self.method == "any" else (self.method,)


def check_count(name: str, value: int) -> None:
    """Raise `UsageError` unless `value` is from 1 to `LARGEST_COUNT`; `name` is the user's name for it."""
    if not 1 <= value <= LARGEST_COUNT:
        bound = "at least 1" if value < 1 else f"at most {LARGEST_COUNT}"
        raise UsageError(f"{name} is {value}: it must be {bound}")


def check_shared_equally(global_batch: int, devices: int) -> None:
    """Raise `UsageError` unless every device gets the same number of sequences."""
    if global_batch % devices:
        raise UsageError(f"global-batch {global_batch} is not a multiple of {devices} devices")


def digest(data: object) -> str:
    """Sixteen hexadecimal digits that identify a JSON value."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
