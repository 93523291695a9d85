"""Every claim of the lattice's order against the bytes of real training steps: a false one rules out what would fit."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from unit.techniques.live_bytes import LiveBytes, peak_bytes

from autofit.core.lattice import Axis, Config, Lattice, Value
from autofit.techniques import AXES, Job, complete, holds, unsupported
from autofit.techniques.losses import chunked_cross_entropy, chunks
from autofit.training.build import build
from tests.tiny import CPU, job, model

HIDDEN, VOCABULARY = 64, 2048
NARROW = model(
    "llama", hidden_size=HIDDEN, intermediate_size=224, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=VOCABULARY, tie_word_embeddings=False,
)  # fmt: skip
"""In Llama's proportions: three and a half times as wide in the MLP, a vocabulary of many times the width."""
BATCH = 4
FEW, MANY = 4, 80
"""Tokens per sequence: a micro-batch of fewer than the hidden size, and of five times that."""
NUMBERS: dict[str, tuple[Value, ...]] = {"micro_batch": (1, 2, 4), "rank": (8, 32)}
SETTINGS: tuple[dict[str, Value], ...] = (
    {"precision": "bf16", "checkpointing": "none"},
    {"precision": "bf16-mixed", "checkpointing": "full", "loss": "chunked"},
)
"""What else a config holds while one axis is varied."""
IN_BOTH = ("method", "micro_batch", "mlp", "loss")
"""Axes that are varied in each setting, the others in the first only."""
UPSET = ("method", "micro_batch", "checkpointing", "loss")
"""Axes whose claims a 4-bit base could upset, or a second micro-step; of the others LoRA shows as much, or one."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks as much smaller as the model is."""
    monkeypatch.setattr(chunks, "MIN_CHUNK", 16)
    monkeypatch.setattr(chunked_cross_entropy, "STRIPE", VOCABULARY // 8)


def make_job(seq_len: int) -> Job:
    return job(NARROW, seq_len=seq_len, global_batch=BATCH)


@cache
def peak(config: Config, seq_len: int) -> int:
    """Bytes alive at the peak of a step of `config`."""
    torch.manual_seed(0)
    step = build(config, make_job(seq_len), CPU)
    return peak_bytes(step, torch.randint(VOCABULARY, (BATCH, seq_len)))


def pairs(axis: Axis, method: str, micro_batch: int, seq_len: int) -> list[tuple[Config, Config]]:
    """Configs that differ on `axis` alone and run on a CPU, claimed to be in this order."""
    here = make_job(seq_len)
    order = Lattice(axes=AXES, configs=(), holds=holds(here))
    result: list[tuple[Config, Config]] = []
    if (method == "full" and axis.name in ("rank", "targets")) or (
        axis.name not in UPSET and (method == "qlora" or micro_batch < BATCH)
    ):
        return result
    for setting in SETTINGS if axis.name in IN_BOTH else SETTINGS[:1]:
        base = {"method": method, "micro_batch": micro_batch, **setting}
        values = NUMBERS.get(axis.name, axis.values)
        configs = [complete({**base, axis.name: value}) for value in values]
        runnable = [c for c in configs if unsupported(c, here) is None]
        result += [(a, b) for a, b in itertools.permutations(runnable, 2) if order.is_lighter_or_equal(a, b)]
    return list(dict.fromkeys(result))


@pytest.mark.parametrize(
    ("method", "micro_batch", "seq_len"),
    [("full", BATCH, MANY), ("full", BATCH // 2, FEW), ("lora", BATCH, MANY), ("qlora", BATCH // 2, FEW)],
)
def test_what_is_claimed_to_be_lighter_is(method: str, micro_batch: int, seq_len: int) -> None:
    wrong = []
    for axis in AXES:
        for light, heavy in pairs(axis, method, micro_batch, seq_len):
            if peak(light, seq_len) > peak(heavy, seq_len):
                wrong.append(
                    f"{axis.name} {axis.of(light)} <= {axis.of(heavy)}: "
                    f"{peak(light, seq_len):,} > {peak(heavy, seq_len):,} ({heavy})"
                )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("checkpointing", ["full", "none"])
def test_the_whole_batch_at_once_may_need_less_than_half_of_it_twice(checkpointing: str) -> None:
    """Why accumulation is an exception: all gradients are alive beside the second micro-step."""
    whole = complete({"precision": "bf16", "checkpointing": checkpointing, "loss": "chunked", "micro_batch": BATCH})
    half = whole.replace(micro_batch=BATCH // 2)
    assert peak(half, FEW) > peak(whole, FEW)
    order = Lattice(axes=AXES, configs=(), holds=holds(make_job(FEW)))
    assert not order.is_lighter_or_equal(half, whole)
    assert order.is_lighter_or_equal(half.replace(micro_batch=1), half)


def test_with_adapters_the_whole_batch_is_above_its_parts_where_there_are_tokens_enough() -> None:
    light, heavy = (complete({"method": "lora", "rank": 8, "micro_batch": size}) for size in (BATCH // 2, BATCH))
    claimed = [holds(make_job(seq_len))(light, heavy) for seq_len in (FEW, 2048)]
    assert claimed == [False, True]
    assert not holds(make_job(2048))(light, heavy.replace(checkpointing="offload"))


def test_selective_keeps_much_less_than_no_checkpointing_with_adapters() -> None:
    """Beyond what either needs anyway; the products of adapters are not kept."""
    base = complete({"method": "lora", "precision": "bf16", "micro_batch": BATCH, "loss": "chunked"})
    kept = {v: peak(base.replace(checkpointing=v), MANY) for v in ("full", "selective", "none")}
    assert kept["selective"] - kept["full"] < 0.5 * (kept["none"] - kept["full"])


def test_the_counter_sees_each_storage_once_until_it_is_gone() -> None:
    with LiveBytes() as counter:
        a = torch.zeros(1000, dtype=torch.float32)
        b = a.view(10, 100)[1:]  # the same storage
        c = torch.ones_like(a)
        assert counter.live == 8000
        del a, c
        assert counter.live == 4000
        del b
        assert counter.live == 0
    assert counter.peak == 8000
