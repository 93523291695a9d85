"""Steps that are issued ahead of the device are read in order, and what filled the queue is not timed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from autofit.trial.measure.steps import Steps, composed

EVENTS = cast(Any, SimpleNamespace(enter=lambda phase: None, send=lambda event: None))
"""Tells nobody."""


class Queued:
    """A device that is one step behind the host, by its own clock; the n-th step takes n seconds a mark."""

    def __init__(self, kind: str) -> None:
        self.device = SimpleNamespace(type=kind)
        self.issued = 0
        self.ended = 0
        self.read: list[tuple[float, int]] = []
        """Each number that was read, and how many steps had been issued by then."""
        self.phases: list[str] = []
        """To which memory was attributed."""

    def mark(self) -> int:
        return self.issued

    def seconds(self, start: int, end: int) -> float:
        assert start == end, "marks of one step"
        self.ended = end
        return float(start)

    def scalar(self, value: torch.Tensor) -> float:
        assert float(value) <= self.ended, "read before its step has ended"
        self.read.append((float(value), self.issued))
        return float(value)

    def in_use(self) -> int:
        return 0

    def phase(self, name: str) -> AbstractContextManager[None]:
        self.phases.append(name)
        self.peaks = {name: 0}
        return nullcontext()


class Counted:
    """A step whose loss is its number."""

    engine = SimpleNamespace(ranks=1)

    def __init__(self, meter: Queued) -> None:
        self._meter = meter
        self.gradient_norm = torch.ones(())
        self.micro_batch = 2
        self.rows: list[int] = []
        self.lengths: list[int] = []

    def run(self, tokens: torch.Tensor, observe: Any, mark: Callable[[], None]) -> torch.Tensor:
        self.rows.append(len(tokens))
        self.lengths.append(tokens.shape[1])
        with observe("forward"):
            pass
        self._meter.issued += 1
        for _ in range(4):
            mark()
        return torch.tensor(float(self._meter.issued))


@pytest.mark.parametrize(("kind", "first_timed"), [("cpu", 3), ("cuda", 4)])
def test_the_first_timed_step_found_the_queue_filled(kind: str, first_timed: int) -> None:
    meter = Queued(kind)
    steps = Steps(cast(Any, Counted(meter)), torch.zeros(1, 1), 4, cast(Any, meter), EVENTS)
    steps.warm_up(lambda seconds: 2)
    assert steps.seconds == [] and steps.in_use == []
    # First micro-step, three further ones and the update: five spans.
    assert [steps.timed() for _ in range(2)] == [5.0 * first_timed, 5.0 * (first_timed + 1)]
    steps.finish()
    assert steps.losses == [float(n) for n in range(1, meter.issued + 1)], "no step is lost"


@pytest.mark.parametrize(("updates", "rows"), [(1, [2, 6, 6]), (2, [2, 6, 6, 6])])
def test_a_brief_warm_up_begins_with_one_micro_step(updates: int, rows: list[int]) -> None:
    meter = Queued("cpu")
    counted = Counted(meter)
    steps = Steps(cast(Any, counted), torch.zeros(6, 1), 4, cast(Any, meter), EVENTS)
    steps.warm_up(lambda seconds: updates, brief=True)
    attributed = len(meter.phases)
    steps.timed()
    steps.timed()
    assert counted.rows == rows
    # What only the whole step shows is attributed in a timed one, unless a further warm-up has shown it.
    assert (len(meter.phases) > attributed) == (updates == 1)


@pytest.mark.parametrize("updates", [1, 2])
def test_memory_is_attributed_beside_the_optimizers_states(updates: int) -> None:
    """Which the first update makes."""
    meter = Queued("cpu")
    steps = Steps(cast(Any, Counted(meter)), torch.zeros(6, 1), 4, cast(Any, meter), EVENTS)
    steps.warm_up(lambda seconds: updates)
    attributed = len(meter.phases)
    steps.timed()
    assert attributed == updates and len(meter.phases) == 2


def test_a_step_is_read_while_the_next_one_is_queued() -> None:
    meter = Queued("cuda")
    steps = Steps(cast(Any, Counted(meter)), torch.zeros(1, 1), 4, cast(Any, meter), EVENTS)
    steps.warm_up(lambda seconds: 2)
    meter.read.clear()
    for _ in range(3):
        steps.timed()
    losses = [(number, issued) for number, issued in meter.read if number != 1.0]  # 1 is every gradient's norm
    assert losses == [(float(number), number + 1) for number in (3, 4, 5, 6)]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_timed_step_is_the_mean_of_those_on_each_length(kind: str) -> None:
    meter = Queued(kind)
    counted = Counted(meter)
    lengths = ((3, 0.75), (7, 0.25))
    steps = Steps(cast(Any, counted), torch.zeros(6, 8), 4, cast(Any, meter), EVENTS, lengths=lengths)
    steps.warm_up(lambda seconds: 2)
    assert counted.lengths[:4] == [8, 8, 3, 7], "compiled for every length before it is timed"
    first = len(counted.lengths) + 1
    assert steps.timed() == 5.0 * (0.75 * first + 0.25 * (first + 1))
    assert steps.timed() == 5.0 * (0.75 * (first + 2) + 0.25 * (first + 3))
    steps.finish()
    assert counted.lengths[first - 1 : first + 3] == [3, 7, 3, 7]
    assert steps.losses == [1.0, 2.0], "those before updates on other lengths"
    counts = {length: len(losses) for length, losses in steps.later_losses.items()}
    assert counts == ({3: 4, 7: 3, 8: 1} if kind == "cuda" else {3: 3, 7: 3})
    assert len(steps.norm_spreads) == meter.issued
    steps.once()
    assert counted.lengths[-1] == 8 and len(steps.seconds) == 2


def test_a_step_on_packed_rows_counts_as_much_as_they_take_the_place_of() -> None:
    """Every row is full: nothing else is trained than where all sequences are."""
    meter = Queued("cpu")
    counted = Counted(meter)
    steps = Steps(cast(Any, counted), torch.zeros(6, 8), 4, cast(Any, meter), EVENTS, lengths=((8, 0.2),))
    steps.warm_up(lambda seconds: 2)
    assert steps.timed() == 5.0 * 0.2 * 3
    assert counted.lengths == [8, 8, 8] and steps.losses == [1.0, 2.0, 3.0] and not steps.later_losses


@pytest.mark.parametrize(
    ("spans", "accumulation", "seconds"),
    [
        ([5.0, 1.0], 1, 6.0),
        ([5.0, 4.0, 1.0], 2, 10.0),
        ([5.0, 4.0, 1.0], 8, 5.0 + 7 * 4.0 + 1.0),
        ([5.0, 4.0, 9.0, 1.0], 3, 19.0),
        ([5.0, 4.0, 9.0, 1.0], 8, 5.0 + 6 * 4.0 + 9.0 + 1.0),  # the exchange of gradients counts once
    ],
)
def test_the_whole_step_is_composed_of_what_was_timed(spans: list[float], accumulation: int, seconds: float) -> None:
    assert composed(spans, accumulation) == seconds
