"""Lines for people: configs, progress and trials in words."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
from unit.operations.made_trials import crashed, fits, make_trial, out_of_memory
from unit.operations.test_estimate_cache import FOOTPRINT

from autofit.cli.live import ProgressDisplay, block, line
from autofit.cli.output import columns
from autofit.cli.text.measured import IN_DOUBT, frontier_text, recommendation_text, trial_text
from autofit.cli.text.phrases import EMULATED, padding_text, step_text
from autofit.cli.text.predicted import (
    CLOSE,
    advice_text,
    change_rows,
    change_text,
    estimate_text,
    fit_text,
    memory_text,
    short_text,
    speed_text,
)
from autofit.core.frontier import Frontier, Point
from autofit.core.outcome import Fits
from autofit.core.units import GIB
from autofit.core.workload import Effect, Goal, Workload
from autofit.estimate.estimate import Change, Estimate, Lightest
from autofit.estimate.memory.deviation import MemoryDeviation
from autofit.operations.recommendation import read_off
from autofit.search.progress import Progress
from autofit.techniques import complete
from autofit.techniques.short_text import short

CONFIG = complete({"method": "lora", "rank": 16, "micro_batch": 4})
SIZES = {f.name: getattr(FOOTPRINT, f.name) for f in fields(FOOTPRINT)}
TIMES = {"step_seconds": 0.3, "tokens_per_second": 12345.678, "calibrated_on": 5, "relative_error": 0.07}
ESTIMATE = Estimate(**SIZES, **TIMES)


def best() -> Point:
    return Point(config=CONFIG, measurement=fits(3, 1234.5).measurement, trial_id=1)


def test_columns_are_aligned() -> None:
    text = columns([("name", "size"), ("a", "1"), ("bcdefg", "100")], right=frozenset({1}))
    assert text == "name    size\na          1\nbcdefg   100"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "full, bf16-mixed, micro-batch 1, ckpt none, adamw, loss full"),
        (
            {"method": "lora", "rank": 16, "targets": "attention", "compile": True},
            "lora, r16, bf16-mixed, micro-batch 1, ckpt none, adamw, loss full, targets attention, compile",
        ),
        ({"attention": "eager"}, "full, bf16-mixed, micro-batch 1, ckpt none, adamw, loss full, attention eager"),
        ({"update": "in-backward"}, "full, bf16-mixed, micro-batch 1, ckpt none, adamw, loss full, update in-backward"),
        ({"offload": "nvme", "sharding": "zero3"}, "full, bf16-mixed, micro-batch 1, ckpt none, adamw, loss full, "
         "offload nvme, sharding zero3"),
    ],
)  # fmt: skip
def test_a_config_in_short(values: dict[str, object], words: str) -> None:
    assert short(complete(values)) == words


def test_estimating_in_a_line() -> None:
    progress = Progress(candidates=264, estimated=(40, 264))
    assert line(progress) == block(progress) == "estimating 40 of 264 configs before the first trial"


def test_progress_in_a_line() -> None:
    progress = Progress(candidates=264)
    assert line(progress) == "0 trials done, 0 out of memory, 0 of 264 ruled out"
    progress = Progress(
        candidates=264,
        done=12,
        out_of_memory=3,
        failed=1,
        ruled_out=48,
        from_store=5,
        running=(CONFIG,),
        best=best(),
        left_seconds=185.0,
    )
    assert line(progress) == (
        "12 trials done, 1 running, 3 out of memory, 1 failed, 48 of 264 ruled out, 5 from the store, "
        "best 1,234 tokens/s at 3.00 GiB, 3 m 05 s left"
    )


def test_one_is_counted_as_one() -> None:
    assert line(Progress(candidates=264, done=1)).startswith("1 trial done, ")


def test_the_frontier_and_the_recommendation_on_a_processor_have_one_limit() -> None:
    trial = make_trial({}, fits(3, 1234.5))
    processor = replace(trial.hardware, kind="cpu", memory_bytes=10 * GIB)
    frontier = Frontier.of(
        [best()], hardware=processor, workload=trial.workload, stack=trial.stack, trials=1, out_of_memory=0
    )
    assert ", within 8.00 GiB:" in frontier_text(frontier)
    assert ", within 4.00 GiB:" in frontier_text(frontier, memory_limit_bytes=4 * GIB)


def test_a_point_whose_device_was_not_free_is_in_doubt() -> None:
    trial = make_trial({}, fits(3, 1234.5))
    for in_doubt in (True, False):
        frontier = Frontier.of(
            [replace(best(), in_doubt=in_doubt)],
            hardware=trial.hardware,
            workload=trial.workload,
            stack=trial.stack,
            trials=1,
            out_of_memory=0,
        )
        answer = read_off(frontier, memory_limit_bytes=4 * GIB, goal=Goal())
        assert answer is not None
        assert [IN_DOUBT in text for text in (frontier_text(frontier), recommendation_text(answer))] == [in_doubt] * 2
        assert ("(in doubt)" in frontier_text(frontier)) == in_doubt


def test_progress_beyond_the_budget_has_nothing_left() -> None:
    assert line(Progress(candidates=1, left_seconds=-3.0)).endswith("0.0 s left")


def test_progress_as_a_block() -> None:
    progress = Progress(candidates=264, running=(CONFIG,), best=best())
    lines = block(progress).splitlines()
    assert lines[1] == f"  best     {short(CONFIG)}"
    assert lines[2] == f"  running  {short(CONFIG)}"
    progress.verifying = True
    assert block(progress).splitlines()[2].startswith("  verifying ")


def test_where_it_is_no_terminal_a_line_is_printed_as_a_trial_begins_and_as_it_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress(candidates=8)
    with ProgressDisplay() as display:
        for done, running in ((0, ()), (0, (CONFIG,)), (0, (CONFIG,)), (1, ()), (1, (CONFIG,)), (2, ())):
            progress.done, progress.running = done, running
            display(progress)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [text.split()[0] for text in captured.err.splitlines()] == ["0", "running", "1", "running", "2"]


def test_on_a_terminal_one_block_is_kept_up_to_date(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressDisplay() as display:
        display(Progress(candidates=8, done=3, best=best()))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3 trials done" in re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", captured.err)


def test_an_empty_frontier() -> None:
    trial = make_trial({}, out_of_memory())
    empty = Frontier.of(
        [], hardware=trial.hardware, workload=trial.workload, stack=trial.stack, trials=1, out_of_memory=1
    )
    assert frontier_text(empty).endswith(":\n\nnothing that was measured fits")


def test_a_predicted_speed_says_what_it_rests_on() -> None:
    guessed = replace(ESTIMATE, calibrated_on=0, relative_error=0.5)
    assert speed_text(guessed) == "12,346 tokens/s, give or take 50% (no trial yet)"
    assert speed_text(ESTIMATE).endswith("7% (5 trials)")
    assert speed_text(replace(ESTIMATE, calibrated_on=1)).endswith("(1 trial)")
    like = "cards of compute capability 8.6, because x is not in the catalog"
    assert like in speed_text(replace(guessed, stand_in=like))
    silent = replace(ESTIMATE, tokens_per_second=None)
    assert silent.hardware in speed_text(silent)
    assert "not traced" in speed_text(replace(silent, untraced="a test"))


def test_an_estimate_that_fits_without_its_cache_alone_says_so() -> None:
    assert CLOSE not in estimate_text(ESTIMATE)
    assert CLOSE in estimate_text(replace(ESTIMATE, gives_back_cache=True))


def test_an_estimate_names_the_departures_from_the_plain_recipe_alone_and_details_only_if_asked() -> None:
    estimate = replace(ESTIMATE, config=CONFIG, assumptions=("the moon is full",))
    text = estimate_text(estimate)
    assert "method=lora,micro_batch=4,rank=16\n" in text
    assert "the moon" not in text and "allocated" not in text
    assert {"assumed", "allocated", "reserved"} <= {
        line.split()[0] for line in estimate_text(estimate, verbose=True).split("\n") if line
    }


@pytest.mark.parametrize(
    ("gib", "words"),
    [(30, "fits"), (24, "likely fits"), (22, "may fit"), (20, "may not fit"), (18, "likely does not fit"),
     (15, "does not fit")],
)  # fmt: skip
def test_a_fit_is_stated_as_sure_as_memory_is(gib: int, words: str) -> None:
    deviation = MemoryDeviation(mean=0.0, deviation=0.1, compared_on=0)
    estimate = replace(ESTIMATE, memory_limit_bytes=gib * GIB, memory_deviation=deviation)
    assert fit_text(estimate) == words
    text = estimate_text(estimate)
    assert text.startswith(f"{words} h100-80g: ")
    room = f"{abs(gib - 21)}.00 GiB {'to spare' if gib > 21 else 'too much'}"
    assert f"21.00 GiB of {gib}.00 GiB, {room}\n" in text
    assert "give or take 10% (no qlora trial on h100-80g yet)" in text


@pytest.mark.parametrize(("limit", "words"), [(80, "does not fit the host's memory"), (20, "does not fit")])
def test_a_host_that_is_too_small_is_said_first(limit: int, words: str) -> None:
    deviation = MemoryDeviation(mean=0.0, deviation=0.1, compared_on=3)
    short = replace(
        ESTIMATE,
        memory_limit_bytes=limit * GIB,
        memory_deviation=deviation,
        host_bytes=12 * GIB,
        host_memory_bytes=8 * GIB,
    )
    assert fit_text(short) == words
    assert estimate_text(short).startswith(f"{words} h100-80g: ")
    assert "12.00 GiB: does not fit, the machine has 8.00 GiB" in estimate_text(short)
    assert short.to_json()["fits"] is False and short.to_json()["certainty"] is None
    change = Change(values={"micro_batch": 1}, effect=Effect.EXACT, estimate=short)
    assert f"(exact: trains the same): {words}, 21.00 GiB" in change_text(change)
    enough = replace(short, host_memory_bytes=12 * GIB, memory_limit_bytes=80 * GIB)
    assert fit_text(enough) == "fits" and enough.certainty == "sure"


def test_where_the_lightest_config_lacks_host_memory_no_card_is_named() -> None:
    light = replace(ESTIMATE, host_bytes=12 * GIB, host_memory_bytes=8 * GIB)
    text = advice_text(replace(light, lightest=Lightest(estimate=light, card="h100-80g")))
    assert "the lightest config needs 12.00 GiB of host memory, and the machine has 8.00 GiB" in text
    assert "h100-80g has" not in text


@pytest.mark.parametrize(
    ("stated", "sure", "unsure"),
    [(0.07, "", ", give or take 20%"), (0.3, "", ""), (None, "give or take 7%", ", give or take 20%")],
)
def test_a_change_says_how_far_its_speed_may_be_off_where_that_is_more_than_was_stated(
    stated: float | None, sure: str, unsure: str
) -> None:
    known = Change(values={"micro_batch": 1}, effect=Effect.EXACT, estimate=ESTIMATE)
    guessed = replace(known, estimate=replace(ESTIMATE, relative_error=0.2))
    _, (_, first), (_, second), *speeds = change_rows("fits with", {"smallest": known, "fastest": guessed}, stated)
    assert (second.removeprefix(first), "".join(text for _, text in speeds)) == (unsure, sure)


def test_a_faster_choice_that_the_host_cannot_hold_says_what_is_missing() -> None:
    assert short_text(replace(ESTIMATE, host_bytes=12 * GIB, host_memory_bytes=8 * GIB)) == (
        "4.00 GiB more than the host's memory"
    )
    assert short_text(replace(ESTIMATE, memory_limit_bytes=20 * GIB)) == "1.00 GiB over the limit"


def test_an_estimate_of_several_devices_says_so_and_the_speed_of_each() -> None:
    text = estimate_text(replace(ESTIMATE, devices=8, tokens_per_second=16_000.0))
    assert "fits each of 8 x h100-80g: 21.00 GiB of 80.00 GiB, 59.00 GiB to spare" in text
    assert "21.00 GiB at the peak on each" in text
    assert "16,000 tokens/s, 2,000 of each" in text
    assert "each" not in estimate_text(ESTIMATE)
    document = replace(ESTIMATE, devices=8, tokens_per_second=16_000.0).to_json()
    assert (document["devices"], document["tokens_per_second_per_device"]) == (8, 2000.0)
    assert ESTIMATE.to_json()["devices"] == 1 and "tokens_per_second_per_device" not in ESTIMATE.to_json()


def test_a_trial_on_several_devices_says_so_and_the_speed_of_each() -> None:
    for outcome in (fits(3, 1234.5), out_of_memory()):
        alone = make_trial({}, outcome)
        several = replace(alone, workload=replace(alone.workload, devices=2))
        assert f"\non 2 x {alone.hardware.name}\n" in trial_text(several)
        assert f" x {alone.hardware.name}" not in trial_text(alone)
        if isinstance(outcome, Fits):
            assert "1,234.5 tokens/s, 617.2 of each" in trial_text(several)
            assert "3.00 GiB on the fullest" in trial_text(several)
            assert "1,234.5 tokens/s\n" in trial_text(alone)


def test_the_error_of_memory_says_what_it_rests_on() -> None:
    deviation = MemoryDeviation(mean=0.0296, deviation=0.051, compared_on=40)
    basis = "qlora trials on h100-80g took 103% of what was predicted"
    assert memory_text(replace(ESTIMATE, memory_deviation=deviation)) == f"give or take 5% (40 {basis})"
    one = replace(ESTIMATE, memory_deviation=replace(deviation, compared_on=1))
    assert "(1 qlora trial on" in memory_text(one)
    assert "50% (by formula" in memory_text(replace(ESTIMATE, untraced="a test"))


def test_a_trial_that_fits_in_words() -> None:
    text = trial_text(make_trial({}, fits(3, 1234.5)))
    assert "1,234.5" in text and "3.00 GiB" in text and "40.0%" in text
    assert "10.8000 -> 10.1000 over 3 steps" in text
    assert "leak" not in text


def test_a_leak_and_an_unknown_peak_are_said() -> None:
    outcome = fits(3, 1234.5)
    leaking = Fits(measurement=replace(outcome.measurement, leak_bytes_per_step=2 * GIB, mfu=None))
    text = trial_text(make_trial({}, leaking))
    assert "about 2.00 GiB more with each step" in text
    assert "unknown peak" in text


def test_a_recommendation_warns_of_a_leak() -> None:
    trial = make_trial({}, fits(3, 1234.5))
    assert isinstance(trial.outcome, Fits)
    point = Point(
        config=trial.config, measurement=replace(trial.outcome.measurement, leak_bytes_per_step=GIB), trial_id=1
    )
    frontier = Frontier.of(
        [point], hardware=trial.hardware, workload=trial.workload, stack=trial.stack, trials=1, out_of_memory=0
    )
    answer = read_off(frontier, memory_limit_bytes=4 * GIB, goal=Goal())
    assert answer is not None
    assert "warning: memory grew by about 1.00 GiB a step" in recommendation_text(answer)


def test_what_an_emulated_card_has_shown_is_said_to_be_no_speed() -> None:
    trial = make_trial({}, fits(3, 1234.5))
    assert isinstance(trial.outcome, Fits)
    point = Point(config=trial.config, measurement=trial.outcome.measurement, trial_id=1)
    for hardware in (trial.hardware, replace(trial.hardware, name=f"emulated-{trial.hardware.name}")):
        frontier = Frontier.of(
            [point], hardware=hardware, workload=trial.workload, stack=trial.stack, trials=1, out_of_memory=0
        )
        answer = read_off(frontier, memory_limit_bytes=4 * GIB, goal=Goal())
        assert answer is not None
        texts = frontier_text(frontier), recommendation_text(answer), trial_text(replace(trial, hardware=hardware))
        assert [EMULATED in text for text in texts] == [hardware.is_emulated] * 3


def test_what_padding_costs_is_said_and_from_a_fifth_on_what_would_spare_it() -> None:
    alike = Workload(model="m", model_digest="0" * 16, seq_len=100, lengths=tuple(range(90, 101)))
    unlike = replace(alike, lengths=(10, 20, 100))
    assert padding_text(replace(alike, lengths=None), CONFIG) is None
    little, much = (str(padding_text(workload, CONFIG)) for workload in (alike, unlike))
    assert little.startswith("3% of what it computes is padding") and "batching" not in little
    assert much.startswith("48% of what it computes is padding") and "--allow training tries batching=packed" in much
    packed = str(padding_text(unlike, CONFIG.replace(batching="packed")))
    assert packed == "rows have 100 tokens, of which 0% are padding; a row counts as one sequence"
    grouped = str(padding_text(unlike, CONFIG.replace(batching="grouped")))
    assert "of what it computes is padding" in grouped and "--allow" not in grouped
    assert step_text(unlike) == "43 tokens in the mean, 100 at most, x 64 sequences a step"


def test_a_trial_that_failed_in_words() -> None:
    assert "out of memory: tried to allocate 2.00 GiB" in trial_text(make_trial({}, out_of_memory()))
    text = trial_text(make_trial({}, crashed()))
    assert text.endswith("crashed: killed by SIGSEGV\nSegmentation fault")
