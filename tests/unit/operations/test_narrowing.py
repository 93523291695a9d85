"""From a space and a goal to the lattice that is searched: what is left out, why, and what is told about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jobs import model_in
from unit.operations.made_trials import HARDWARE, OPTIONS, STACK, make_job

from autofit.core.device.hardware import Hardware
from autofit.core.errors import UsageError
from autofit.core.lattice import Config
from autofit.core.units import GIB
from autofit.core.workload import METHODS, Effect, Goal
from autofit.operations import SearchRequest
from autofit.planning.lattices import Narrowed, default_space, load_space, narrow, space_summaries, within
from autofit.planning.plan import resolve_for
from autofit.techniques import AXES, complete, unsupported

CPU = Hardware(name="cpu-of-tests", kind="cpu", device_name="Some CPU", memory_bytes=32 * GIB, cores=4)
SPACES = ("cpu", "full", "long-context", "lora", "qlora", "single-gpu", "smoke")


@cache
def narrowed(space: str, *, hardware: Hardware | None = None, **goal: object) -> Narrowed:
    """The lattice of a built-in space for a goal; a value, so that tests may share it."""
    job = make_job(OPTIONS, hardware=hardware) if hardware else make_job()
    return narrow(load_space(space), Goal(**goal), job)  # type: ignore[arg-type]


def methods(found: Narrowed) -> set[object]:
    return {c["method"] for c in found.lattice.configs}


def strongest(config: Config, *, besides: tuple[str, ...] = ("method",)) -> Effect:
    return max(axis.effect(config[axis.name]) for axis in AXES if axis.name in config and axis.name not in besides)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("allow", list(Effect))
def test_nothing_goes_further_than_allowed(space: str, allow: Effect) -> None:
    if space in ("full", "qlora") and allow == Effect.EXACT:
        pytest.skip("a space whose very point is another precision or optimizer")
    result = narrowed(space, allow=allow)
    assert result.lattice.configs
    assert all(strongest(c) <= allow for c in result.lattice.configs)
    assert len(set(result.lattice.configs)) == len(result.lattice.configs)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("min_rank", [8, 32])
def test_who_allows_more_gets_no_less(space: str, min_rank: int) -> None:
    """Every config of a narrower goal is one of the wider goal: a permission takes nothing away."""
    configs: list[set[Config]] = []
    for allow in Effect:
        try:
            configs.append(set(narrowed(space, allow=allow, min_rank=min_rank).lattice.configs))
        except UsageError:
            configs.append(set())
    assert configs[0] <= configs[1] <= configs[2]


def test_the_cpu_space_by_what_is_allowed() -> None:
    exact = narrowed("cpu", hardware=CPU, allow=Effect.EXACT)
    assert {(c["precision"], c["optimizer"]) for c in exact.lattice.configs} == {("bf16-mixed", "adamw")}
    numerics = narrowed("cpu", hardware=CPU)
    assert {c["precision"] for c in numerics.lattice.configs} == {"bf16", "bf16-mixed", "fp32"}
    assert {c["optimizer"] for c in numerics.lattice.configs} == {"adamw", "adamw-8bit"}
    assert exact.beyond_goal == len(numerics.lattice.configs) - len(exact.lattice.configs)
    assert numerics.beyond_goal == 0


def test_a_chunked_loss_of_one_chunk_is_the_full_one() -> None:
    """256 rows are a chunk: of the micro-batches of 128 tokens only those of four sequences have two."""
    result = narrowed("cpu", hardware=CPU)
    kept = Counter((c["loss"], c["micro_batch"]) for c in result.lattice.configs)
    assert set(kept) == {("full", 1), ("full", 2), ("full", 4), ("chunked", 4)}
    assert len(set(kept.values())) == 1, "what is not listed twice is not lost"
    without_full = narrowed("long-context", hardware=CPU)
    assert {c["loss"] for c in without_full.lattice.configs if c["micro_batch"] == 1} == {"full"}


def test_another_optimizer_family_needs_the_permission_to_change_training() -> None:
    families = {"sgd", "adafactor", "lion", "lion-8bit"}
    assert not families & {c["optimizer"] for c in narrowed("full").lattice.configs}
    assert families & {c["optimizer"] for c in narrowed("full", allow=Effect.TRAINING).lattice.configs}


def test_what_a_model_cannot_do_is_left_out_with_the_reason(tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4, "vocab_size": 512, "n_positions": 256}
    model_in(tmp_path / "gpt2", {"model_type": "gpt2", **sizes})
    model_in(tmp_path / "ctrl", {"model_type": "ctrl", "dff": 128, **sizes})
    on_gpt2 = narrow(load_space("cpu"), Goal(), make_job(replace(OPTIONS, model=str(tmp_path / "gpt2")), hardware=CPU))
    assert methods(on_gpt2) == {"lora", "full"}
    assert any("nothing to quantise in gpt2" in reason for reason in on_gpt2.unsupported)
    on_ctrl = narrow(load_space("cpu"), Goal(), make_job(replace(OPTIONS, model=str(tmp_path / "ctrl")), hardware=CPU))
    assert {c["checkpointing"] for c in on_ctrl.lattice.configs} == {"none"}
    assert any("no checkpointing for ctrl" in reason for reason in on_ctrl.unsupported)


@pytest.mark.parametrize("method", METHODS)
def test_the_users_method_is_the_only_one(method: str) -> None:
    result = narrowed("single-gpu", method=method)
    assert methods(result) == {method}
    every = narrowed("single-gpu")
    assert methods(every) == set(METHODS)
    assert result.lattice.configs == tuple(c for c in every.lattice.configs if c["method"] == method)


@pytest.mark.parametrize("space", ["single-gpu", "lora", "cpu"])
@pytest.mark.parametrize("min_rank", [8, 12, 64])
def test_the_rank_is_the_users_floor(space: str, min_rank: int) -> None:
    """Higher ranks cost memory and time, and change the training: without leave they are not searched."""
    result = narrowed(space, min_rank=min_rank)
    assert {c.get("rank") for c in result.lattice.configs} <= {None, min_rank}
    assert len(result.lattice.configs) == len(narrowed(space).lattice.configs)


@pytest.mark.parametrize("min_rank", [8, 32])
def test_ranks_are_searched_where_training_may_change(min_rank: int) -> None:
    result = narrowed("lora", allow=Effect.TRAINING, min_rank=min_rank)
    ranks = {c.number("rank") for c in result.lattice.configs}
    assert len(ranks) > 1
    assert min(ranks) == min_rank


@pytest.mark.parametrize(
    ("values", "goal", "inside"),
    [
        ({"method": "lora"}, Goal(), True),
        ({"method": "lora", "rank": 64}, Goal(), False),
        ({"method": "lora", "rank": 64}, Goal(method="lora"), False),
        ({"method": "lora", "rank": 64}, Goal(min_rank=64), True),
        ({"method": "lora", "rank": 64}, Goal(allow=Effect.TRAINING), True),
        # Where there is no rank 9, the next higher one comes nearest.
        ({"method": "lora", "rank": 16}, Goal(min_rank=9), True),
        ({"method": "lora", "rank": 64}, Goal(min_rank=9), False),
        # Of each method: qlora was not run with less.
        ({"method": "qlora", "rank": 16}, Goal(), True),
        ({"method": "lora", "rank": 4}, Goal(), False),
        ({"method": "lora", "rank": 8}, Goal(min_rank=16), False),
        ({"method": "lora", "rank": 64}, Goal(method="qlora"), False),
        ({"method": "lora"}, Goal(allow=Effect.EXACT), True),
        ({"method": "full", "precision": "bf16"}, Goal(allow=Effect.EXACT), False),
        ({"method": "full", "precision": "bf16"}, Goal(), True),
        ({"method": "full", "optimizer": "sgd"}, Goal(), False),
        ({"method": "full", "optimizer": "sgd"}, Goal(allow=Effect.TRAINING), True),
        ({"method": "lora", "targets": "attention"}, Goal(), False),
    ],
)
def test_within(values: dict[str, object], goal: Goal, inside: bool) -> None:
    ranks = [("lora", 4), ("lora", 8), ("lora", 16), ("lora", 64), ("qlora", 16), ("qlora", 64)]
    every = [complete({"method": method, "rank": rank}) for method, rank in ranks]
    assert within(goal, every)(complete(values)) is inside


def test_a_space_of_higher_ranks_is_searched_from_its_lowest(tmp_path: Path) -> None:
    path = tmp_path / "high.yaml"
    path.write_text("axes:\n  method: [lora]\n  rank: [16, 32]\n")
    job = make_job()
    assert {c["rank"] for c in narrow(load_space(str(path)), Goal(), job).lattice.configs} == {16}
    every = narrow(load_space(str(path)), Goal(allow=Effect.TRAINING), job).lattice.configs
    assert {c["rank"] for c in every} == {16, 32}


def test_what_cannot_work_here_is_counted_by_its_reason() -> None:
    without = replace(STACK, bitsandbytes=None)
    job = make_job(stack=without)
    result = narrow(load_space("single-gpu"), Goal(), job)
    assert "qlora" not in methods(result)
    assert any("bitsandbytes" in reason for reason in result.unsupported)
    assert all(count > 0 for count in result.unsupported.values())
    assert all(unsupported(c, job) is None for c in result.lattice.configs)


def test_every_config_of_the_space_is_accounted_for() -> None:
    job = make_job(replace(OPTIONS, seq_len=2048))  # tokens enough that no two names are of one program
    result = narrow(load_space("single-gpu"), Goal(method="full"), job)
    listed = list(load_space("single-gpu").configs(AXES, batch=OPTIONS.global_batch))
    full = [c for c in listed if c["method"] == "full"]
    unsupported_full = sum(result.unsupported.values())
    beyond_full = sum(strongest(c) > Effect.NUMERICS for c in full)
    assert len(result.lattice.configs) + unsupported_full + beyond_full == len(full)


def test_where_nothing_is_left_the_most_frequent_reason_is_given() -> None:
    job = make_job(stack=replace(STACK, bitsandbytes=None))
    with pytest.raises(UsageError, match=r"space qlora has no config for this search: .*bitsandbytes"):
        narrow(load_space("qlora"), Goal(), job)
    with pytest.raises(UsageError, match="space qlora has no config for this search: the goal allows none"):
        narrowed("qlora", method="full")


def test_digests_tell_lattices_apart() -> None:
    def digest(space: str, **goal: Any) -> str:
        request = SearchRequest(workload=OPTIONS, space=space, goal=Goal(**goal))
        return resolve_for(request, make_job(OPTIONS), 80 * GIB).lattice_digest

    assert digest("cpu") == digest("cpu")
    assert digest("cpu") != digest("cpu", allow=Effect.EXACT)
    assert digest("cpu") != digest("smoke")


def test_the_default_space_is_the_devices() -> None:
    assert default_space(CPU, 1) == "cpu"
    assert default_space(make_job().hardware, 1) == "single-gpu"
    assert default_space(CPU, 2) == "multi-cpu"
    assert default_space(make_job().hardware, 2) == "multi-gpu"


def test_the_space_of_several_gpus_offloads_on_one_as_well() -> None:
    """So one space can be searched with every number of devices; that of offload on one GPU is refused for several."""
    stack = replace(STACK, deepspeed="0.19.8")
    for space, devices, offloads in (("multi-gpu", 1, True), ("single-gpu", 1, False), ("multi-gpu", 2, True)):
        job = replace(make_job(replace(OPTIONS, devices=devices), hardware=HARDWARE), stack=stack)
        result = {c["offload"] for c in narrow(load_space(space), Goal(), job).lattice.configs}
        assert result == ({"none", "optimizer", "params", "nvme"} if offloads else {"none"}), space
    with pytest.raises(UsageError, match="space offload has no config"):
        narrow(load_space("offload"), Goal(), job)


@pytest.mark.parametrize("space", [*SPACES, "multi-gpu", "multi-cpu", "offload"])
def test_what_a_listing_counts_can_be_searched(space: str) -> None:
    """`autofit spaces` counts valid configs: those that a search of that global batch, on the hardware that the space
    is meant for, may walk."""
    (summary,) = (s for s in space_summaries(64) if s["name"] == space)
    devices = 2 if space.startswith("multi-") else 1
    options = replace(OPTIONS, seq_len=1024, global_batch=64, devices=devices)
    stack = replace(STACK, deepspeed="0.19.8")
    job = make_job(options, hardware=CPU if space.endswith("cpu") else make_job().hardware, stack=stack)
    listed = list(load_space(space).configs(AXES, batch=job.workload.batch_per_device))
    assert (summary["devices"], summary["configs"]) == (devices, len(listed))
    invalid = {reason for c in listed if (reason := unsupported(c, job)) is not None}
    # Packages that are an option to install are no matter of the space.
    assert not [r for r in invalid if "not installed" not in r]


@pytest.mark.parametrize("batch", [1, 7])
def test_an_odd_batch_cannot_be_shared_by_two_devices(batch: int) -> None:
    counts = {s["name"]: s["configs"] for s in space_summaries(batch)}
    assert (counts["multi-gpu"], counts["multi-cpu"]) == (0, 0)
    assert counts["smoke"] == 4  # micro-batch 1 alone


T4 = replace(make_job().hardware, name="t4", capability="7.5", bf16=False)


@pytest.mark.parametrize("space", [name for name in SPACES if name != "cpu"])
def test_a_gpu_without_bf16_gets_fp16_in_its_place(space: str) -> None:
    result = narrowed(space, hardware=T4)
    assert {c["precision"] for c in result.lattice.configs} == {"fp16-mixed"}
    assert "fp16-mixed" not in {c["precision"] for c in narrowed(space).lattice.configs}
    if space != "smoke":
        assert any("precision=bf16 is only emulated on t4" in reason for reason in result.unsupported)


@pytest.mark.parametrize(
    ("hardware", "trainer", "attention"),
    [
        (T4, None, "efficient"),
        (T4, "trl", "sdpa"),  # which cannot repeat keys
        (make_job().hardware, None, "sdpa"),
    ],
)
def test_keys_are_repeated_where_torch_would_keep_all_scores(
    hardware: Hardware, trainer: str | None, attention: str
) -> None:
    job = make_job(replace(OPTIONS, trainer=trainer), hardware=hardware)
    assert {c["attention"] for c in narrow(load_space("single-gpu"), Goal(), job).lattice.configs} == {attention}


def test_a_gpu_without_bf16_cannot_follow_the_recipe_exactly() -> None:
    with pytest.raises(UsageError, match="precision=bf16-mixed is only emulated on t4: use fp16-mixed"):
        narrowed("single-gpu", hardware=T4, allow=Effect.EXACT)


@pytest.mark.parametrize("hardware", [make_job().hardware, T4], ids=["h100", "t4"])
def test_the_default_space_is_large_on_every_kind_of_card(hardware: Hardware) -> None:
    job = make_job(replace(OPTIONS, global_batch=64), hardware=hardware)
    result = narrow(load_space("single-gpu"), Goal(allow=Effect.TRAINING), job)
    assert len(result.lattice.configs) >= 2000


def test_rules_judge_the_rank_that_is_run() -> None:
    """qlora has 8-bit optimizer states from rank 64 on, whichever ranks are listed."""
    assert {c["optimizer"] for c in narrowed("qlora", min_rank=8).lattice.configs} == {"adamw"}
    raised = narrowed("qlora", min_rank=64).lattice.configs
    assert {c["rank"] for c in raised} == {64}
    assert {c["optimizer"] for c in raised} == {"adamw", "adamw-8bit"}
