"""The changes to a config that help, held against every change that there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from tiny import CUDA_HARDWARE, STACK, model

from autofit.catalog.hardware import card
from autofit.core.device.hardware import Hardware
from autofit.core.lattice import Config, Lattice, Value
from autofit.core.units import GIB, MIB
from autofit.core.workload import METHODS, Effect, Workload
from autofit.estimate.estimate import Change, Estimate
from autofit.estimate.estimator import Estimator
from autofit.estimate.memory.deviation import nothing_compared
from autofit.estimate.time.guessed_rates import guess
from autofit.estimate.time.transfers import seconds_per_byte
from autofit.operations import Estimation
from autofit.planning.lattices import load_space
from autofit.prediction.calibration import Calibration, why_not
from autofit.prediction.estimate_cache import CachedEstimator, EstimateCache
from autofit.prediction.helpful_changes import GAIN, Expressible, _Neighbourhood, changed, effect_of
from autofit.techniques import AXES, Job, complete, holds, lightness, parse

BATCH = 8
RATES = replace(guess(flops=1e13, wide_flops=1e12, bandwidth=1e11), transfers=seconds_per_byte(CUDA_HARDWARE))
"""Of a card so slow that this model's operations take longer than their start."""
EXACT: dict[str, tuple[Value, ...]] = {
    "micro_batch": (1, 2, 4, 8),
    "checkpointing": ("offload", "full", "every-2", "every-4", "selective", "none"),
    "loss": ("fused", "chunked", "full"),
}
UNKNOWN = dict.fromkeys(METHODS, nothing_compared(CUDA_HARDWARE, devices=2))  # as of what is small
"""How far memory may be off where no trial was compared."""
CPU = Hardware(name="cpu-x", kind="cpu", device_name="x", memory_bytes=64 * GIB, cores=2)


def make_job(hardware: Hardware = CUDA_HARDWARE) -> Job:
    of = model(
        "llama", num_hidden_layers=4, hidden_size=256, intermediate_size=512, vocab_size=4096,
        max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    workload = Workload(model=of.name, model_digest=of.digest, seq_len=1024, global_batch=BATCH)
    return Job(model=of, workload=workload, hardware=hardware, stack=STACK)


@cache
def estimator() -> Estimator:
    """Shared, so that what the tests have in common is traced once."""
    return Estimator(make_job(), RATES)


def config(text: str) -> Config:
    return complete(parse(text))


def predicted(of: Config, limit: int = 80 * GIB) -> Estimate:
    return Estimate.of(estimator().estimate(of, memory_limit_bytes=limit), make_job(), RATES, UNKNOWN)


def too_little(*configs: Config) -> int:
    """A limit under which none of them is likely to fit, though hardly less than one of them takes for that: before a
    config does not fit, the allocator gives its cache back, in pages of 2 MiB."""
    limit = int(min(predicted(c).device_bytes for c in configs) * math.exp(UNKNOWN["full"].deviation))
    for each in configs:
        while predicted(each, limit).likely_fits:
            limit -= 2 * MIB
    return limit


def fitting(configs: list[Config], limit: int) -> list[Estimate]:
    return [e for e in (predicted(c, limit) for c in configs) if e.likely_fits]


def fastest(estimates: list[Estimate]) -> float:
    return max(e.tokens_per_second or 0.0 for e in estimates)


def asking(by: Estimator, of: Config, limit: int, *, store: str | None = None) -> Estimation:
    """Of an estimator whose predictions were never compared with a trial."""
    calibration = Calibration(job=by.job, rates=by.rates, deviations=UNKNOWN)
    result = Estimation(calibration=calibration, config=of, memory_limit_bytes=limit, store=store)
    vars(result)["estimator"] = by
    return result


def advised(of: Config, limit: int) -> Estimate:
    return asking(estimator(), of, limit).advised()


def advice(of: Config, limit: int) -> dict[str, Change]:
    """The changes by their roles."""
    result = advised(of, limit)
    assert result.lightest is None
    return {role: change for change in result.advice for role in change.roles}


def exact_changes(of: Config, changes: int) -> list[Config]:
    """Every config that differs from `of` in so many exact axes."""
    result = []
    for axes in itertools.combinations(EXACT, changes):
        for values in itertools.product(*(EXACT[axis] for axis in axes)):
            if all(value != of[axis] for axis, value in zip(axes, values, strict=True)):
                result.append(of.replace(**dict(zip(axes, values, strict=True))))
    return [c for c in result if why_not(c, estimator().job) is None]


HEAVY = config(f"method=full,precision=bf16-mixed,micro_batch={BATCH},checkpointing=none,loss=full")


def test_of_the_changes_that_fit_the_smallest_the_fastest_and_the_safest_are_proposed() -> None:
    single, double = (exact_changes(HEAVY, n) for n in (1, 2))
    limit = (min(predicted(c).device_bytes for c in single) + predicted(HEAVY).device_bytes) // 2
    changes = advice(HEAVY, limit)
    assert changes.keys() == {"smallest", "fastest", "safest"}
    for change in changes.values():
        assert change.effect is Effect.EXACT and change.estimate.likely_fits
        assert change.estimate.config == HEAVY.replace(**change.values)
    assert len(changes["smallest"].values) == 1
    assert changes["smallest"].estimate.tokens_per_second == fastest(fitting(single, limit))
    lighter = [e for e in fitting(single + double, limit) if is_lighter(e.config)]
    assert changes["fastest"].estimate.tokens_per_second == fastest(lighter)
    assert changes["safest"].estimate.headroom_bytes == max(e.headroom_bytes for e in lighter)


def test_where_no_change_is_sure_to_fit_lighter_ones_that_train_the_same_are_tried_too() -> None:
    near = [c for n in (1, 2) for c in exact_changes(HEAVY, n)]
    needs = min(predicted(c).device_bytes for c in near)
    limit = int(needs * math.exp(1.5 * UNKNOWN["full"].deviation))
    assert {e.certainty for e in fitting(near, limit)} == {"likely"}
    safest = advice(HEAVY, limit)["safest"]
    assert safest.effect is Effect.EXACT and safest.estimate.device_bytes < needs and len(safest.values) > 2


def test_a_value_that_goes_without_saying_may_be_changed() -> None:
    """Liger's kernels take less than torch's operations, and move fewer bytes."""
    by = Estimator(replace(make_job(), stack=replace(STACK, liger_kernel="0.8.5")), RATES)
    limit = (predicted(HEAVY).device_bytes + predicted(HEAVY.replace(kernels="liger")).device_bytes) // 2
    result = asking(by, HEAVY, limit).advised()
    assert any(change.values.get("kernels") == "liger" for change in result.advice)


def is_lighter(config: Config) -> bool:
    """Whether no value is a heavier one than that of `HEAVY`."""
    return all(a <= b for a, b in zip(lightness(config), lightness(HEAVY), strict=True))


def test_what_may_fit_is_told_what_is_likely_to() -> None:
    limit = int(predicted(HEAVY).device_bytes * 1.01)
    result = advised(HEAVY, limit)
    assert result.fits and not result.likely_fits
    assert result.advice and all(change.estimate.likely_fits for change in result.advice)


def test_two_exact_changes_come_before_one_that_only_may_fit_or_rounds_otherwise() -> None:
    single, double = (exact_changes(HEAVY, n) for n in (1, 2))
    limit = too_little(*single)
    assert any(predicted(c, limit).fits for c in single)
    changes = advice(HEAVY, limit)
    assert {change.effect for change in changes.values()} == {Effect.EXACT}
    assert {len(changes[role].values) for role in ("smallest", "fastest")} == {2}
    assert len(changes["safest"].values) <= 3, "one value beside the lightest step"
    assert changes["safest"].estimate.headroom_bytes >= max(e.headroom_bytes for e in fitting(double, limit))
    change = changes["fastest"]
    assert change.estimate.tokens_per_second == fastest(fitting(double, limit))


def test_what_rounds_otherwise_comes_before_what_trains_something_else() -> None:
    light = config("method=full,precision=bf16-mixed,micro_batch=1,checkpointing=offload,loss=chunked")
    limit = too_little(light, *(c for changes in (1, 2) for c in exact_changes(light, changes)))
    assert {change.effect for change in advice(light, limit).values()} == {Effect.NUMERICS}


def test_where_two_changes_are_not_enough_one_is_made_beside_the_lightest_step() -> None:
    for change in advice(HEAVY, too_little(*exact_changes(HEAVY, 1), *exact_changes(HEAVY, 2))).values():
        assert change.effect is Effect.EXACT and change.estimate.likely_fits
        assert change.values["micro_batch"] == 1 and change.values["checkpointing"] in ("full", "offload")
        assert len(change.values) == 3


def test_another_method_is_the_last_resort() -> None:
    light = config("method=full,precision=bf16,micro_batch=1,checkpointing=offload,loss=chunked,optimizer=sgd")
    for change in advice(light, too_little(light)).values():
        assert change.effect is Effect.TRAINING
        assert change.estimate.likely_fits
        assert change.values["method"] == "lora", "the most faithful one"


def test_offload_comes_before_what_trains_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing but another method or optimizer near, offload, which the space of one card lacks, keeps both."""
    heavy = config("method=full,precision=bf16-mixed,micro_batch=1,checkpointing=none,loss=chunked")
    near = neighbourhood(predicted(heavy))
    lighter = near._lighter()
    training = [values for values in lighter if near._effect_of(changed(heavy, values)) is Effect.TRAINING]
    monkeypatch.setattr(near, "_lighter", lambda: training)
    monkeypatch.setattr(near, "_beside_the_lightest_step", list)
    kept, *others = near.that_fit()
    assert kept.roles == ("same training",) and kept.effect is Effect.EXACT and kept.estimate.likely_fits
    assert kept.values.keys() <= {"offload", "checkpointing"} and kept.values["offload"] != "none"
    assert others and {change.effect for change in others} == {Effect.TRAINING}


def test_doing_without_gradients_comes_before_another_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    heavy = config(f"method=full,precision=bf16,micro_batch={BATCH},checkpointing=full,loss=chunked")
    early: dict[str, Value] = {"update": "in-backward"}
    assert early in neighbourhood(predicted(heavy))._lighter()
    changes = changes_among([{"optimizer": "sgd"}, early], heavy, monkeypatch)
    (smallest,) = (change for change in changes if "smallest" in change.roles)
    assert smallest.values == early and smallest.effect is Effect.TRAINING


def test_what_needs_the_host_comes_first_or_last_and_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """First where nothing else trains the same, last where something does, and alone where nothing else fits."""
    heavy = config("method=full,precision=bf16-mixed,micro_batch=1,checkpointing=none,loss=chunked")
    on_host: dict[str, Value] = {"offload": "params"}
    rounded: dict[str, Value] = {"precision": "bf16"}
    first, *others = changes_among([on_host, rounded], heavy, monkeypatch)
    assert first.roles == ("same training",) and first.values == on_host
    assert [change.values for change in others] == [rounded]
    (same,) = changes_among([on_host], heavy, monkeypatch, beside=[{"checkpointing": "full"}])
    assert "offload" not in same.values and same.effect is Effect.EXACT
    for alone in (on_host, on_host | rounded):
        (change,) = changes_among([alone], heavy, monkeypatch)
        assert change.values == alone and set(change.roles) == {"smallest", "fastest", "safest"}


def changes_among(
    near: list[dict[str, Value]],
    heavy: Config,
    monkeypatch: pytest.MonkeyPatch,
    *,
    beside: Sequence[dict[str, Value]] = (),
) -> tuple[Change, ...]:
    """The changes to `heavy`, which does not fit, where no other configs are near, or beside the lightest step."""
    result = neighbourhood(predicted(heavy))
    monkeypatch.setattr(result, "_lighter", lambda: near)
    monkeypatch.setattr(result, "_beside_the_lightest_step", lambda: beside)
    return result.that_fit()


def test_what_other_weights_take_is_counted_for_each_change() -> None:
    """They leave with the method that has them, as fp32 weights do when they are quantised."""
    lora = config("method=lora,precision=bf16-mixed,micro_batch=1,checkpointing=full,loss=chunked")
    limit, beside = predicted(lora).device_bytes * 3 // 2, 8 * GIB
    near = asking(estimator(), lora, limit - beside)
    assert near.advised().advice == ()

    class Wide(Expressible):
        def extra_bytes(self, config: Config) -> int:
            return beside if config["method"] == "lora" else 0

    result = near.advised(expressible=Wide())
    assert {change.values.get("method") for change in result.advice} == {"qlora"}
    assert all(change.estimate.memory_limit_bytes == limit for change in result.advice)


def test_what_would_be_faster_but_for_memory_gets_a_lighter_value_beside_it() -> None:
    slow = config("method=full,precision=bf16-mixed,micro_batch=2,checkpointing=full,loss=full")
    limit = predicted(slow).device_bytes
    while not predicted(slow, limit).likely_fits:
        limit += 2 * MIB
    changes = advice(slow, limit)
    single = fitting(exact_changes(slow, 1), limit)
    best = changes["fastest"]
    assert best.effect is Effect.EXACT and best.estimate.likely_fits and len(best.values) == 2
    assert (best.estimate.tokens_per_second or 0.0) > fastest(single)


def test_where_nothing_helps_the_lightest_config_and_a_card_with_room_for_the_error_are_named() -> None:
    light = config("method=qlora,precision=bf16,micro_batch=1,checkpointing=offload,loss=chunked,optimizer=adamw-8bit")
    limit = too_little(light)
    result = advised(light, limit)
    assert result.advice == ()
    assert result.lightest is not None
    assert result.lightest.estimate.config == light
    assert result.lightest.card is not None
    # T4 and V100 are smaller, and have no bf16.
    assert result.lightest.card not in ("t4", "v100-16g")
    named = replace(result.lightest.estimate, memory_limit_bytes=card(result.lightest.card).memory_bytes)
    assert named.likely_fits
    heavy = advised(HEAVY.replace(optimizer="sgd"), limit)
    assert heavy.advice == () and heavy.lightest is not None
    assert heavy.lightest.estimate.device_bytes <= predicted(light).device_bytes * 1.01


def test_a_card_that_would_be_full_is_not_named() -> None:
    near = neighbourhood(predicted(HEAVY))
    full = card("a100-40g").memory_bytes
    assert near._card(replace(predicted(HEAVY), device_bytes=int(0.995 * full))) == "a40"
    assert near._card(replace(predicted(HEAVY), device_bytes=int(0.8 * full))) == "a100-40g"
    limited = neighbourhood(predicted(HEAVY, 2 * GIB))
    named = limited._card(replace(predicted(HEAVY, 2 * GIB), device_bytes=int(0.8 * full)))
    assert named == "h100-80g" == limited._estimator.job.hardware.name, "it is the limit that lacks memory"


def neighbourhood(asked: Estimate) -> _Neighbourhood:
    """What is near to it, of which nothing has been measured."""
    job = estimator().job
    job = replace(job, stack=replace(job.stack, deepspeed="0.19.8"))  # which offload needs
    calibration = Calibration(job=job, rates=RATES, deviations=UNKNOWN)
    made = CachedEstimator(calibration, EstimateCache(job, None), estimator)
    return _Neighbourhood(asked, made, lambda done: None, Expressible())


def test_what_fits_is_made_faster_by_the_fastest_exact_change() -> None:
    slow = config("method=full,precision=bf16-mixed,micro_batch=2,checkpointing=full,loss=full")
    changes = advice(slow, 80 * GIB)
    single = [predicted(c) for c in (*exact_changes(slow, 1), slow.replace(compile=True))]
    assert {change.effect for change in changes.values()} == {Effect.EXACT}
    assert changes["fastest"].estimate.tokens_per_second == fastest(single)
    for change in changes.values():
        assert (change.estimate.tokens_per_second or 0.0) >= (predicted(slow).tokens_per_second or math.inf) * (
            1 + GAIN
        )


def test_a_faster_change_must_be_likely_to_fit() -> None:
    slow = config("method=full,precision=bf16-mixed,micro_batch=2,checkpointing=full,loss=full")
    room = int(advice(slow, 80 * GIB)["fastest"].estimate.device_bytes * 1.1)
    assert all(change.estimate.likely_fits for change in advised(slow, room).advice)


def test_the_fastest_config_has_nothing_faster_beside_it() -> None:
    slow = config("method=full,precision=bf16-mixed,micro_batch=2,checkpointing=full,loss=full")
    seen = []
    for _ in range(5):
        changes = advice(slow, 80 * GIB)
        if not changes:
            break
        seen.append(changes["fastest"].effect)
        slow = changes["fastest"].estimate.config
    assert not changes
    assert seen and Effect.TRAINING not in seen


def test_without_a_speed_what_does_not_fit_is_still_helped() -> None:
    of = make_job(CPU)
    heavy = config(f"method=full,precision=fp32,micro_batch={BATCH},checkpointing=none,loss=full")
    result = Estimator(of, None).estimate(heavy, memory_limit_bytes=80 * GIB)
    estimation = asking(Estimator(of, None), heavy, 80 * GIB)
    assert estimation.advised().advice == ()
    changes = asking(estimation.estimator, heavy, result.device_bytes * 3 // 4).advised().advice
    assert changes
    assert all(change.effect is Effect.EXACT and change.estimate.likely_fits for change in changes)


def test_progress_is_told_as_configs_are_predicted() -> None:
    counts: list[int] = []
    asking(estimator(), HEAVY, 80 * GIB).advised(counts.append)
    assert counts == list(range(2, len(counts) + 2))


class Untraceable(Estimator):
    """Finds out whether anything has to be traced."""

    def trace(self, config: Config) -> NoReturn:
        raise AssertionError(f"{config} is traced")


def kept(estimator: Estimator, path: Path, limit: int) -> Estimation:
    """`HEAVY` as it is asked for with a store."""
    return asking(estimator, HEAVY, limit, store=f"sqlite:///{path}/store.db")


@pytest.mark.parametrize("share", [0.75, 2.0])
def test_asked_again_nothing_is_traced_and_the_answer_is_the_same(share: float, tmp_path: Path) -> None:
    limit = int(share * predicted(HEAVY).device_bytes)
    first = kept(estimator(), tmp_path, limit).advised()
    assert first.advice and first.fits is (share > 1)
    again = kept(Untraceable(make_job(), RATES), tmp_path, limit).advised()
    assert without_times(again) == without_times(first)


def without_times(found: Estimate) -> dict[str, Any]:
    """What does not depend on when it was asked, nor on whether anybody asked how sure it is."""
    aside = ("seconds_to_estimate", "certainty", "memory_deviation")
    return {name: value for name, value in found.to_json().items() if name not in aside}


def test_what_was_traced_before_an_interruption_is_kept(tmp_path: Path) -> None:
    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept(estimator(), tmp_path, 80 * GIB).advised(interrupt)
    again = kept(Untraceable(make_job(), RATES), tmp_path, 80 * GIB).estimate()
    assert without_times(again) == without_times(predicted(HEAVY))


def test_the_time_stated_is_that_of_this_answer_with_its_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter(range(0, 10_000, 10))
    monkeypatch.setattr("autofit.prediction.estimation.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    estimation = kept(estimator(), tmp_path, 80 * GIB)
    made = estimation.advised().seconds_to_estimate
    assert made == estimation.advised().seconds_to_estimate == estimation.estimate().seconds_to_estimate == 10


@pytest.mark.parametrize(
    ("before", "after", "effect"),
    [
        ("method=full", "method=full", Effect.EXACT),
        ("method=full", "method=full,micro_batch=4,checkpointing=full,loss=chunked", Effect.EXACT),
        ("method=full,precision=bf16", "method=full,precision=bf16-mixed", Effect.NUMERICS),
        ("method=full,checkpointing=full", "method=full,optimizer=adamw-8bit", Effect.NUMERICS),
        ("method=full", "method=lora", Effect.TRAINING),
        ("method=lora,rank=16", "method=lora,rank=8", Effect.TRAINING),
        ("method=full,optimizer=sgd,precision=bf16", "method=full,precision=bf16-mixed", Effect.TRAINING),
    ],
)
def test_the_effect_of_a_change_is_its_strongest(before: str, after: str, effect: Effect) -> None:
    job = make_job()
    assert effect_of(config(before), config(after), job) is effect
    assert effect_of(config(after), config(before), job) is effect


@pytest.mark.parametrize(
    ("trainer", "text", "change", "effect"),
    [
        # DeepSpeed converts all weights itself; flash attention takes axolotl's in one format.
        ("transformers", "method=qlora,precision=bf16", {"offload": "optimizer"}, Effect.NUMERICS),
        ("axolotl", "method=lora,precision=bf16", {"offload": "optimizer"}, Effect.NUMERICS),
        ("axolotl", "method=full,precision=bf16", {"attention": "flash"}, Effect.NUMERICS),
        ("transformers", "method=qlora,precision=bf16", {"checkpointing": "full"}, Effect.EXACT),
        ("transformers", "method=full,precision=bf16", {"offload": "optimizer"}, Effect.EXACT),
        (None, "method=qlora,precision=bf16", {"offload": "optimizer"}, Effect.EXACT),
    ],
)
def test_what_a_trainer_widens_of_one_config_only_is_numerics(
    trainer: str | None, text: str, change: dict[str, Value], effect: Effect
) -> None:
    job = make_job()
    job = replace(job, workload=replace(job.workload, trainer=trainer))
    before, after = config(text), config(text).replace(**change)
    assert effect_of(before, after, job) is effect_of(after, before, job) is effect


def test_lightness_puts_nothing_before_what_needs_less() -> None:
    of = make_job()
    configs = tuple(load_space("single-gpu").configs(AXES, batch=BATCH))[::97]
    order = Lattice(axes=AXES, configs=configs, holds=holds(of))
    pairs = [(a, b) for a, b in itertools.permutations(configs, 2) if order.is_lighter_or_equal(a, b)]
    assert pairs
    assert all(lightness(a) < lightness(b) for a, b in pairs)


def test_the_fastest_changes_no_more_than_its_speed_is_worth() -> None:
    def made(speed: float | None, **values: Value) -> Estimate:
        estimate = replace(predicted(HEAVY), config=HEAVY.replace(**values), tokens_per_second=speed)
        return replace(estimate, device_bytes=GIB * len(values))

    near = neighbourhood(predicted(HEAVY))
    plain = made(1000.0, checkpointing="full")
    more = made(1001.0, checkpointing="full", loss="chunked")
    assert near._fastest([more, plain], ()) is plain
    other = made(1002.0, loss="fused", attention="flash")
    assert near._fastest([plain, other], (plain,)) is plain, "shown anyway"
    assert near._fastest([plain, other], (plain, other)) is other, "none that is shown is faster"
    worth_it = made(1100.0, checkpointing="full", loss="chunked")
    assert near._fastest([worth_it, plain], ()) is worth_it
    unknown = [made(None, micro_batch=1), made(None, micro_batch=1, loss="fused")]
    assert near._fastest(unknown, ()) is unknown[1], "where no speed is known, what takes the most memory"


def test_the_lightest_that_fits_trains_what_was_asked_for_if_that_fits_too() -> None:
    adapters = complete({"method": "lora", "rank": 16, "precision": "bf16", "micro_batch": 8, "loss": "full"})
    heavy = replace(predicted(adapters), memory_limit_bytes=4 * GIB)
    result = neighbourhood(heavy).lightest().estimate
    assert result.likely_fits
    assert [result.config[axis] for axis in ("method", "rank", "optimizer")] == ["lora", 16, adapters["optimizer"]]
