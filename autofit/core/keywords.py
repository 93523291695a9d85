"""The workload's options as keyword arguments, written once for all functions that take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import ParamSpec, TypedDict, TypeVar, get_type_hints

from autofit.core.workload import Workload

P = ParamSpec("P")
R = TypeVar("R")


class WorkloadKeywords(TypedDict, total=False):
    """Their types; `WorkloadFields` has what they mean, and their defaults."""

    seq_len: int
    global_batch: int
    lora_dropout: float
    devices: int
    seed: int
    trainer: str | None
    lengths: str | Path | Sequence[int] | None
    """As a file, or as the tokens of each sequence."""
    eval_batch: int | None


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
