"""The made devices that a problem is searched on: always the same, so that figures can be compared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

from autofit.bench.made_device import MadeDevice, Slow
from autofit.search.replay.problem import Problem
from autofit.search.replay.recorded import Recorded

FACTORS = (3.0, 10.0, 30.0, 100.0)
"""How many times as long steps with a value take: a missing instruction costs some, an emulated format up to 90."""
PAIRS = 12
"""How many pairs of values, drawn once for each problem, are slow together, each by one of the factors."""
NAMED = (
    "precision=bf16:30,precision=bf16-mixed:12",
    "optimizer=adamw-8bit:10",
    "method=qlora:10,optimizer=adamw-8bit:10",
    "loss=chunked:10",
    "micro_batch=2:3,micro_batch=4:9",
    "memory:0.7",
    "memory:1.4",
    "noise:0.15",
    "drift:4",
    "drift:10",
    "drift:200s",
    "precision=bf16:30,precision=bf16-mixed:12,noise:0.15",
    "precision=bf16:10,memory:1.4,drift:10",
)
"""Processors without arithmetic in 16 bits, slow 4-bit and 8-bit kernels, memory that predictions miss, small
micro-batches as the fastest, and devices that do not hold still."""


def devices(recorded: Recorded) -> tuple[MadeDevice, ...]:
    """The made devices on which the problem differs from what was recorded."""
    problem = recorded.problem
    every = dict.fromkeys([*(MadeDevice.of(name) for name in NAMED), *_single(problem), *_pairs(problem)])
    return tuple(device for device in every if device.differs(recorded))


def _single(problem: Problem) -> Iterator[MadeDevice]:
    """Every value of every axis on which configs differ, by every factor."""
    for axis in problem.axes:
        for value in problem.values(axis):
            for factor in FACTORS:
                yield MadeDevice(slow=(Slow(values=((axis.name, value),), factor=factor),))


def _pairs(problem: Problem) -> Iterator[MadeDevice]:
    every = [(axis.name, value) for axis in problem.axes for value in problem.values(axis)]
    pairs = [pair for pair in combinations(every, 2) if pair[0][0] != pair[1][0]]
    draw = random.Random(problem.name)
    for pair in draw.sample(pairs, min(PAIRS, len(pairs))):
        yield MadeDevice(slow=(Slow(values=pair, factor=draw.choice(FACTORS)),))
