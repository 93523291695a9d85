"""Of trials that should train alike, the one with more techniques is wrong, whichever came first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.operations.made_trials import fits, make_trial

from autofit.core.outcome import Diverged, Fits, Trial
from autofit.operations.recording.table_file import read_table
from autofit.search.correctness import FamilyBaselines, techniques
from autofit.techniques import Job, complete, parse

RECORDED = Path(__file__).parents[3] / "benchmarks" / "recorded"
PLAIN = "method=full,precision=bf16-mixed,checkpointing=none,loss=full"
TRICKY = "method=full,precision=bf16-mixed,checkpointing=selective,loss=chunked"


def trial(job: Job, config: str, **changes: Any) -> Trial:
    """A trial that fits, with the losses and gradient norms given."""
    made = fits(1.0, 100.0)
    values = {"losses": (11.0, 10.9, 10.8), "gradient_norms": (2.0, 1.9, 1.8), **changes}
    outcome = Fits(measurement=replace(made.measurement, **values))
    return make_trial(complete(parse(config)), outcome, job=job, limit=2**40)


def test_equal_losses_and_gradients_are_no_reason(job: Job) -> None:
    family = FamilyBaselines()
    for config in (TRICKY, PLAIN, TRICKY):
        tricky = trial(job, config, gradient_norms=(2.02, 1.9, 1.8))
        assert family.checked(tricky) is tricky
    assert family.take_refuted() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradient_norms": (4.0, 1.9, 1.8)}, "first gradient's norm is 4"),
        ({"gradient_norms": (0.0, 0.0, 0.0)}, "first gradient's norm is 0"),
        ({"losses": (11.0, 10.9, 11.9)}, "loss of step 3 is 11.9"),
    ],
)
def test_the_trial_with_more_techniques_is_wrong_if_it_comes_second(
    job: Job, changes: dict[str, Any], words: str
) -> None:
    family = FamilyBaselines()
    family.checked(trial(job, PLAIN))
    outcome = family.checked(trial(job, TRICKY, **changes)).outcome
    assert isinstance(outcome, Diverged)
    assert words in outcome.reason
    assert "checkpointing=none" in outcome.reason
    assert family.take_refuted() == []


def test_the_trial_with_more_techniques_is_wrong_if_it_came_first(job: Job) -> None:
    family = FamilyBaselines()
    first = family.checked(trial(job, TRICKY, gradient_norms=(4.0, 1.9, 1.8)))
    assert isinstance(first.outcome, Fits), "nothing is known yet"
    plain = family.checked(trial(job, PLAIN))
    assert isinstance(plain.outcome, Fits)
    (refuted,) = family.take_refuted()
    assert refuted.config == first.config
    assert isinstance(refuted.outcome, Diverged)
    assert family.take_refuted() == []


WRONG = {"gradient_norms": (4.0, 1.9, 1.8)}


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_of_equally_plain_trials_the_one_that_stands_alone_is_wrong(job: Job, wrong: int) -> None:
    family = FamilyBaselines()
    trials = [
        trial(job, f"{PLAIN},micro_batch={n}", **(WRONG if place == wrong else {})) for place, n in enumerate((1, 2, 4))
    ]
    checked = [family.checked(t) for t in trials]
    refuted = family.take_refuted() + [t for t in checked if isinstance(t.outcome, Diverged)]
    assert [t.config for t in refuted] == [trials[wrong].config]


def test_of_two_equally_plain_trials_neither_is_wrong_however_often_they_run(job: Job) -> None:
    family = FamilyBaselines()
    for _ in range(3):
        for plain in (trial(job, f"{PLAIN},micro_batch=1"), trial(job, f"{PLAIN},micro_batch=2", **WRONG)):
            assert family.checked(plain) is plain
    assert family.take_refuted() == []
    assert family.checked(tricky := trial(job, TRICKY)) is tricky, "one of the plainest agrees"
    assert isinstance(family.checked(trial(job, TRICKY, losses=(1.0, 1.0, 1.0))).outcome, Diverged)


def test_overflowed_gradients_of_loss_scaling_are_passed_over(job: Job) -> None:
    family = FamilyBaselines()
    family.checked(trial(job, PLAIN, losses=(11.0, 11.0, 9.0), gradient_norms=(None, 2.0, 1.8)))
    checked = family.checked(trial(job, TRICKY, losses=(11.0, 11.0, 11.0), gradient_norms=(None, None, 2.0)))
    assert isinstance(checked.outcome, Fits)
    wrong = family.checked(trial(job, TRICKY, gradient_norms=(None, 4.0, 2.0)))
    assert isinstance(wrong.outcome, Diverged)


def test_later_losses_tell_nothing_where_one_trial_rounds_its_master_weights(job: Job) -> None:
    """Losses of smollm2-135m on a CPU, without and with DeepSpeed's Adam on the host."""
    in_fp32, rounded = (11.0945, 8.7412, 6.8884), (11.0999, 10.6537, 9.4772)
    offloaded = f"{PLAIN},offload=optimizer"
    family = FamilyBaselines()
    family.checked(trial(job, PLAIN, losses=in_fp32))
    kept = trial(job, offloaded, losses=rounded)
    assert family.checked(kept) is kept
    other = trial(job, offloaded.replace("checkpointing=none", "checkpointing=full"), losses=(9.0, *rounded[1:]))
    assert isinstance(family.checked(other).outcome, Diverged), "the first loss is compared"
    wide = PLAIN.replace("bf16-mixed", "fp32")
    family.checked(trial(job, wide, losses=in_fp32))
    assert isinstance(family.checked(trial(job, f"{wide},offload=optimizer", losses=rounded)).outcome, Diverged)


def test_families_are_not_compared(job: Job) -> None:
    family = FamilyBaselines()
    family.checked(trial(job, PLAIN))
    other = trial(job, PLAIN + ",optimizer=adamw-8bit", losses=(3.0, 2.0, 1.0), gradient_norms=(9.0, 9.0, 9.0))
    assert family.checked(other) is other


def test_dropout_makes_every_run_another(job: Job) -> None:
    family = FamilyBaselines(comparable=False)
    family.checked(trial(job, PLAIN))
    other = trial(job, TRICKY, losses=(9.0, 9.0, 9.0))
    assert family.checked(other) is other


def test_techniques_are_counted_against_the_plain_recipe() -> None:
    assert techniques(complete(parse(PLAIN))) == 0
    assert techniques(complete(parse(PLAIN + ",micro_batch=4,optimizer=adamw-8bit"))) == 0
    assert techniques(complete(parse(TRICKY))) == 2


def test_a_small_loss_is_compared_by_its_difference(job: Job) -> None:
    """Once a batch is known by heart its losses are rounding: those of an H100 are `kept` and `plain`."""
    plain = (12.557393, 5.964091, 1.242723, 0.038114, 1.4812e-3, 5.4228e-5, 3.7033e-5)
    kept = (12.557393, 5.962315, 1.242471, 0.038013, 1.4821e-3, 5.4986e-5, 3.7841e-5)
    family = FamilyBaselines()
    family.checked(trial(job, PLAIN, losses=plain))
    right = trial(job, TRICKY, losses=kept)
    assert family.checked(right) is right
    wrong = trial(job, TRICKY.replace("chunked", "full"), losses=(*kept[:3], 0.07, *kept[4:]))
    assert "loss of step 4 is 0.0700" in getattr(family.checked(wrong).outcome, "reason", "")


def test_no_trial_of_a_real_card_is_refuted() -> None:
    tables = [read_table(file) for file in sorted(RECORDED.glob("h*00/*8b*.jsonl"))]
    assert sum(len(table.trials) for table in tables) > 30
    for table in tables:
        family = FamilyBaselines()
        checked = [family.checked(trial) for trial in table.trials]
        assert not [t.outcome for t in [*checked, *family.take_refuted()] if isinstance(t.outcome, Diverged)], (
            table.name
        )
