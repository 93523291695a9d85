"""What only a device does, as the estimator sees it: every technique's place in its axis, kernels, memory elsewhere."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny import CUDA_HARDWARE, GEMMA2, LLAMA, STACK, model, shallow

from autofit.catalog.models import Model, load
from autofit.core.device.work_kinds import HOST_LINK
from autofit.core.lattice import Axis, Config, Lattice, Value
from autofit.core.units import GIB, MIB
from autofit.estimate.assumptions import COMPILE_ERROR
from autofit.estimate.estimate import Estimate
from autofit.estimate.estimator import Estimator
from autofit.estimate.kernels.column_sums import taken, taken_by_entry
from autofit.estimate.kernels.cuda_kernels import cuda_scratch
from autofit.estimate.kernels.liger import chunk_rows
from autofit.estimate.kernels.liger_layers import replaced
from autofit.estimate.kernels.scratch import Held
from autofit.estimate.memory.memory_trace import BEFORE
from autofit.estimate.time.guessed_rates import guess
from autofit.estimate.time.roofline import seconds
from autofit.estimate.time.transfers import seconds_per_byte
from autofit.estimate.tracing.fake_optimizer import PAGED_FROM
from autofit.estimate.tracing.trace import trace_decoder
from autofit.techniques import AXES, Job, complete, holds, parse, unsupported
from autofit.techniques.attention_kernels import attention_kernel
from autofit.training.build import make_plan, make_skeleton

RATES = replace(guess(flops=1e15, wide_flops=5e13, bandwidth=3e12), transfers=seconds_per_byte(CUDA_HARDWARE))
DEVICE_STACK = replace(STACK, liger_kernel="0.8.5", flash_attn="2.8.3")
LAYERS = 9
"""As many as it takes to see the last of those of which every fourth is checkpointed."""
SMALL = shallow("smollm2-135m", LAYERS)
BATCH = 8
FEW, MANY = 16, 1024
"""Tokens per sequence: two micro-batches of the few are fewer than the hidden size."""
SETTINGS: tuple[dict[str, Value], ...] = (
    {"precision": "bf16", "checkpointing": "none"},
    {"precision": "bf16-mixed", "checkpointing": "full", "loss": "chunked"},
)
"""What else a config holds while one axis is varied."""
IN_BOTH = ("micro_batch", "loss", "checkpointing")
"""Axes that are varied in each setting with full training; the others, and those of adapters, in the first."""
WITH_FEW = ("micro_batch", "loss")
"""Axes that are varied with few tokens, too; the real bytes of the others are held to their order elsewhere."""
OF_FULL = ("precision", "optimizer", "attention")
"""Axes that adapters show nothing more of."""
NUMBERS: dict[str, tuple[Value, ...]] = {"micro_batch": (1, 2, 4, 8), "rank": (8, 32)}


def job(of: Model = SMALL, *, seq_len: int = MANY, capability: str = "9.0") -> Job:
    hardware = replace(CUDA_HARDWARE, capability=capability, bf16=capability >= "8.0")
    return tiny.job(of, hardware=hardware, stack=DEVICE_STACK, seq_len=seq_len, global_batch=BATCH)


@cache
def estimator(of: Job) -> Estimator:
    return Estimator(of, RATES)


def predicted(text: str, of: Job, limit: int = 80 * GIB) -> Estimate:
    return estimator(of).estimate(complete(parse(text)), memory_limit_bytes=limit)


def alive(config: Config, of: Job) -> int:
    """Bytes of tensors at the peak, wherever on the device."""
    traced = estimator(of).trace(config)
    return traced.timeline.peak() + traced.paged_bytes


def pairs(axis: Axis, of: Job) -> list[tuple[Config, Config]]:
    """Configs that differ on `axis` alone and run on the device, claimed to be in this order."""
    order = Lattice(axes=AXES, configs=(), holds=holds(of))
    found: list[tuple[Config, Config]] = []
    for method, micro_batch, setting in itertools.product(
        ("full",) if axis.name in OF_FULL else ("full", "lora"),
        (BATCH, BATCH // 2),
        SETTINGS if axis.name in IN_BOTH else SETTINGS[:1],
    ):
        if axis.name in ("rank", "targets") if method == "full" else setting is not SETTINGS[0]:
            continue
        base = {"method": method, "micro_batch": micro_batch, **setting}
        values = NUMBERS.get(axis.name, axis.values)
        configs = [complete({**base, axis.name: value}) for value in values]
        runnable = [c for c in configs if unsupported(c, of) is None]
        found += [(a, b) for a, b in itertools.permutations(runnable, 2) if order.is_lighter_or_equal(a, b)]
    return list(dict.fromkeys(found))


CLAIMS = [axis for axis in AXES if axis.numeric or axis.lighter]
CASES = [*((axis, MANY) for axis in CLAIMS), *((axis, FEW) for axis in CLAIMS if axis.name in WITH_FEW)]
SLACK = 1e-3
"""Fused AdamW counts the steps of each parameter on the device, in a block of 512 bytes, and foreach on the host: with
many small adapters that is half a thousandth of a small step."""


@pytest.mark.parametrize(("axis", "seq_len"), CASES, ids=[f"{axis.name}-{seq_len}" for axis, seq_len in CASES])
def test_the_estimators_order_of_an_axis_is_the_claimed_one(axis: Axis, seq_len: int) -> None:
    # With few tokens the copies of all layers' weights weigh most: what holds then must hold of the whole model.
    of = job(load("smollm2-135m") if seq_len == FEW else SMALL, seq_len=seq_len)
    claimed = pairs(axis, of)
    sizes = {config: alive(config, of) for config in {c for pair in claimed for c in pair}}
    wrong = [
        f"{light[axis.name]} <= {heavy[axis.name]}: {sizes[light]:,} > {sizes[heavy]:,} ({heavy})"
        for light, heavy in claimed
        if sizes[light] > sizes[heavy] * (1 + SLACK)
    ]
    assert not wrong, "\n".join(wrong)


def test_every_axis_with_a_claim_on_this_device_has_pairs_to_hold_it_against() -> None:
    without = [axis.name for axis in CLAIMS if not pairs(axis, job())]
    assert without == ["offload", "sharding"], "they need deepspeed, and several devices"


def test_offloaded_activations_are_on_the_host_but_for_those_of_one_layer() -> None:
    common = "method=full,precision=bf16,micro_batch=4,loss=chunked,checkpointing="
    full, offload = (predicted(common + value, job()) for value in ("full", "offload"))
    layers, input_bytes = LAYERS, 4 * MANY * 576 * 2
    assert offload.host_bytes == layers * 8 * 1024**2, "blocks of pinned memory are powers of two"
    assert full.host_bytes == 0
    saved = full.breakdown["activations"] - offload.breakdown["activations"]
    assert (layers - 2) * input_bytes <= saved <= layers * input_bytes
    assert offload.step_seconds > full.step_seconds  # type: ignore[operator]
    assert "host link" in offload.assumptions[0] and set(full.assumptions) < set(offload.assumptions)


@pytest.mark.parametrize("card", ["h100-80g", "a100-80g"])
def test_offloaded_activations_move_at_the_pace_of_the_cards_own_link(card: str) -> None:
    of = replace(job(), hardware=replace(CUDA_HARDWARE, name=card))
    work = predicted("method=full,precision=bf16,micro_batch=4,checkpointing=offload", of).work
    moved = 2 * (BATCH // 4) * LAYERS * 4 * MANY * 576 * 2  # the input of each layer, out and in at every micro-step
    assert work is not None and work.waits == {HOST_LINK: moved}
    per = seconds_per_byte(of.hardware)
    at = replace(RATES, transfers=per)
    assert seconds(work, at) == pytest.approx(seconds(replace(work, waits={}), at) + moved * per[HOST_LINK])


@pytest.mark.parametrize("method", ["full", "lora"])
def test_paged_states_are_on_the_device_but_not_in_its_allocator(method: str) -> None:
    common = f"method={method},precision=bf16,micro_batch=8,checkpointing=full,optimizer="
    plain, paged = (predicted(common + value, job()) for value in ("adamw-8bit", "paged-adamw-8bit"))
    config = complete(parse(common + "paged-adamw-8bit"))
    plan = make_plan(config, job(), torch.device("cpu"))
    skeleton = make_skeleton(plan)
    embeddings = {id(m.weight) for m in skeleton.modules() if isinstance(m, torch.nn.Embedding)}
    trained = [p for p in skeleton.parameters() if p.requires_grad and p.numel() >= PAGED_FROM]
    states = sum(p.numel() * (8 if id(p) in embeddings else 2) for p in trained)
    assert plain.peak_allocated_bytes - paged.peak_allocated_bytes == pytest.approx(states, rel=1e-3)
    assert paged.breakdown["optimizer"] == pytest.approx(plain.breakdown["optimizer"], rel=1e-3)
    assert sum(paged.breakdown.values()) == paged.device_bytes
    assert paged.device_bytes - paged.peak_reserved_bytes - paged.breakdown["context"] == states


def test_paged_states_give_way_on_a_full_card_and_count_in_full_under_a_limit() -> None:
    config = "method=full,precision=bf16,micro_batch=8,checkpointing=full,optimizer=paged-adamw-8bit"
    roomy = predicted(config, job())
    missing = 10 * MIB
    card = roomy.device_bytes - missing
    of = replace(job(), hardware=replace(CUDA_HARDWARE, memory_bytes=card))
    full = predicted(config, of, card)
    assert full.fits and full.device_bytes == card == sum(full.breakdown.values())
    assert full.host_bytes - roomy.host_bytes == missing
    assert full.work is not None and roomy.work is not None
    assert full.work.waits[HOST_LINK] - roomy.work.waits.get(HOST_LINK, 0) == 2 * missing, "out and in at every step"
    limited = predicted(config, job(), card)
    assert limited.host_bytes == roomy.host_bytes
    in_full = roomy.device_bytes - roomy.peak_reserved_bytes
    assert limited.device_bytes - limited.peak_reserved_bytes == in_full
    assert full.device_bytes - full.peak_reserved_bytes == in_full - missing


def test_a_compiled_step_takes_less_and_is_faster_and_the_estimate_says_what_it_assumes() -> None:
    common = "method=lora,precision=bf16,micro_batch=4,checkpointing=full,compile="
    eager, compiled = (predicted(common + value, job()) for value in ("false", "true"))
    assert compiled.peak_allocated_bytes < eager.peak_allocated_bytes
    assert compiled.step_seconds is not None and eager.step_seconds is not None
    assert 0.2 * eager.step_seconds < compiled.step_seconds < 0.95 * eager.step_seconds
    assert eager.relative_error is not None
    assert COMPILE_ERROR < (compiled.relative_error or 0.0) < eager.relative_error + 2 * COMPILE_ERROR
    assert set(eager.assumptions) < set(compiled.assumptions)
    assert "graphs that torch makes of each layer" in compiled.assumptions[0]
    assert compiled.to_json()["assumptions"] == list(compiled.assumptions)


@pytest.mark.parametrize("rest", ["method=full,checkpointing=full", "method=lora,compile=true"])
def test_flash_attn_takes_what_torchs_own_flash_kernel_takes(rest: str) -> None:
    """So it is not traced apart. It would differ by what asks, before the first layer, for a mask's sake."""
    common = f"{rest},precision=bf16-mixed,micro_batch=4,attention="
    flash, sdpa = (predicted(common + value, job()) for value in ("flash", "sdpa"))
    assert flash.breakdown == sdpa.breakdown
    traces = [
        trace_decoder(complete(parse(common + value)), job(), (0, 1), cuda_scratch)[0] for value in ("flash", "sdpa")
    ]
    flash_at, sdpa_at = (
        [(at, sorted((e.allocates, trace.storages[e.storage].bytes) for e in events)) for at, events in trace.segments]
        for trace in traces
    )
    differing = {one[0] for one, other in zip(flash_at, sdpa_at, strict=True) if one != other}
    assert {at.layer for at in differing} <= {BEFORE}
    assert [trace.flash_layers for trace in traces] == [2, 2]
    of_flash, of_sdpa = ({at: work for at, work in trace.work.items() if at.layer >= 0} for trace in traces)
    assert of_flash == of_sdpa


def test_flash_attn_has_a_trace_of_its_own_where_a_trainer_treats_it_otherwise() -> None:
    """Axolotl leaves norms, embeddings and the head in fp32, but not with flash-attn."""
    found = job()
    axolotl = replace(found, workload=replace(found.workload, trainer="axolotl"))
    common = "method=full,precision=bf16,micro_batch=4,attention="
    flash, sdpa = (predicted(common + value, axolotl).breakdown["weights"] for value in ("flash", "sdpa"))
    assert flash < sdpa


def test_flash_attn_needs_neither_the_mask_of_a_window_nor_scores_to_cap() -> None:
    sliding = model("mistral", sliding_window=8, num_hidden_layers=4)
    common = "method=full,precision=bf16,micro_batch=4,attention="
    flash, sdpa = (predicted(common + value, job(sliding, seq_len=512)) for value in ("flash", "sdpa"))
    assert flash.peak_allocated_bytes < sdpa.peak_allocated_bytes
    flash, eager = (predicted(common + value, job(GEMMA2, seq_len=128)) for value in ("flash", "eager"))
    assert flash.peak_allocated_bytes < eager.peak_allocated_bytes


def test_grouped_heads_in_fp32_have_their_scores_as_a_tensor() -> None:
    """Neither flash attention, which is for 16 bits, nor efficient attention, which is for equal heads, takes them."""
    ungrouped = model("llama", num_key_value_heads=4)
    scores = 3 * 4 * 4 * MANY**2 * 4  # three layers, batch and heads of four
    kept = {}
    for name, of in (("grouped", LLAMA), ("ungrouped", ungrouped)):
        for precision in ("bf16", "fp32"):
            config = f"method=full,precision={precision},micro_batch=4,loss=chunked"
            kept[name, precision] = predicted(config, job(of)).breakdown["activations"]
    assert kept["grouped", "fp32"] > scores
    assert max(kept["grouped", "bf16"], kept["ungrouped", "bf16"], kept["ungrouped", "fp32"]) < scores / 3


def kernel_for(number_format: str, width: int, capability: str | None, **options: Any) -> str:
    """The kernel that torch takes for heads of this width."""
    asked = {"value_width": width, "grouped": False, "masked": False, **options}
    return attention_kernel(number_format=number_format, width=width, capability=capability, **asked).value


@pytest.mark.parametrize(
    ("number_format", "width", "grouped", "masked", "capability", "kernel"),
    [
        ("bf16", 128, True, False, "9.0", "flash"),
        ("fp16", 64, False, False, "8.0", "flash"),
        ("bf16", 72, False, False, None, "flash"),
        ("bf16", 256, True, False, "8.6", "flash"),
        ("bf16", 208, False, False, "8.6", "efficient"),
        ("bf16", 208, False, False, "9.0", "flash"),
        ("bf16", 128, False, True, "8.9", "efficient"),
        ("bf16", 128, True, True, "8.9", "math"),
        ("bf16", 320, False, False, "9.0", "efficient"),
        ("bf16", 100, False, True, "9.0", "math"),
        ("fp32", 128, False, False, "9.0", "efficient"),
        ("fp32", 128, True, False, "9.0", "math"),
        ("fp32", 66, False, False, "8.0", "math"),
        ("fp16", 64, False, False, "7.5", "efficient"),
        ("fp16", 64, True, False, "7.5", "math"),
        ("bf16", 64, False, False, "7.0", "math"),
        ("fp32", 66, False, False, "7.5", "efficient"),
    ],
)
def test_which_kernel_torch_takes(
    number_format: str, width: int, grouped: bool, masked: bool, capability: str | None, kernel: str
) -> None:
    assert kernel_for(number_format, width, capability, grouped=grouped, masked=masked) == kernel


@pytest.mark.parametrize(
    ("width", "capability", "kernel"), [(256, "8.9", "efficient"), (192, "8.9", "flash"), (256, "9.0", "flash")]
)
def test_dropped_scores_of_wide_heads_are_not_for_flash_attention_on_small_cards(
    width: int, capability: str, kernel: str
) -> None:
    assert kernel_for("bf16", width, capability, dropout=True) == kernel


def test_heads_of_values_that_are_narrower_are_not_for_flash_attention() -> None:
    assert kernel_for("bf16", 192, "9.0", value_width=128) == "efficient"


def scratch(kernel: str, key_heads: int, *, dtype: torch.dtype = torch.bfloat16) -> tuple[int, ...]:
    query = torch.empty(2, 8, 256, 64, dtype=dtype, device="meta")
    key = torch.empty(2, key_heads, 256, 64, dtype=dtype, device="meta")
    held = cuda_scratch(f"aten._scaled_dot_product_{kernel}_attention_backward.default", (query, query, key, key))
    assert held.before == ()
    assert held.passing == (query.nbytes if dtype is torch.float32 else 0), "what is summed for each row"
    return held.beside


def test_the_backward_of_attention_sums_the_querys_gradient_in_fp32() -> None:
    rows = 2 * 8 * 256
    assert scratch("flash", 8) == (rows * 4, rows * 64 * 4)
    of_keys = rows * 64 * 2
    assert scratch("flash", 2) == (rows * 4, rows * 64 * 4, of_keys, of_keys), "keys and values for every query head"
    for dtype in (torch.bfloat16, torch.float32):
        assert scratch("efficient", 8, dtype=dtype) == (rows * 4, rows * 64 * 4 + 2 * 8 * 4 * 16)


@pytest.mark.parametrize(
    ("width", "dtype", "forward", "staged"),
    [
        (256, torch.bfloat16, (2 * 4 * 300 * 256 * 4,), 2 * 200 * 64 * 256 * 4),
        (128, torch.bfloat16, (), 0),
        (256, torch.float32, (), 0),
    ],
)
def test_efficient_attention_adds_up_beside_its_results_for_wide_heads_in_16_bits(
    width: int, dtype: torch.dtype, forward: tuple[int, ...], staged: int
) -> None:
    query = torch.empty(2, 4, 300, width, device="meta", dtype=dtype)
    name = "aten._scaled_dot_product_efficient_attention"
    assert cuda_scratch(f"{name}.default", (query, query, query)).beside == forward
    beside = cuda_scratch(f"{name}_backward.default", (query, query, query)).beside
    assert sum(beside[2:]) == staged


def test_the_backward_of_softmax_holds_a_product_beside_its_result() -> None:
    result = torch.empty(2, 8, 256, 256, device="meta")
    held = cuda_scratch("aten._softmax_backward_data.default", (result, result, -1, torch.float32))
    assert held == Held(beside=(result.nbytes,))


@pytest.mark.parametrize(
    ("rows", "columns", "blocks", "divided"),
    [
        (1020, 4096, 2112, 0),  # too few rows
        (1021, 4096, 2112, 16),  # as few values to a thread as may be: 16
        (8192, 4096, 2112, 66),  # as many blocks as run at a time
        (8192, 128, 2112, 128),
        (100_000, 16384, 320, 98),  # as many values to a thread as may be: 256
    ],
)
def test_what_adding_columns_up_takes_is_512_bytes_for_each_part_of_a_column(
    rows: int, columns: int, blocks: int, divided: int
) -> None:
    found = taken(np.array([float(rows * columns)]), np.array([columns]), blocks)
    assert found.tolist() == [512 * columns * divided]


def test_only_leading_dimensions_are_added_up_as_columns() -> None:
    operand = torch.empty(2, 600, 128, device="meta")
    sums = {dims: cuda_scratch("aten.sum.dim_IntList", (operand, list(dims))).sums for dims in ((0, 1), (0,), (-1,))}
    assert sums == {(0, 1): (2 * 600 * 128, 128, 0), (0,): (2 * 600 * 128, 600 * 128, 0), (-1,): None}
    assert cuda_scratch("aten.sum.dim_IntList", (operand[:, :, :100], [0, 1])).sums is None, "not one after the other"
    heads = torch.empty(2, 8, 600, 128, device="meta").transpose(1, 2)
    assert cuda_scratch("aten.sum.dim_IntList", (heads, [0, 1, 2])).sums == (heads.numel(), 128, 0), "in another order"
    assert cuda_scratch("aten.sum.dim_IntList", (heads, [0, 1])).sums is None, "a row of 8 times 128 has gaps"


@pytest.mark.parametrize(
    ("tokens", "sums"),
    [
        (3072, 0),  # added up in place
        (3073, 307 + 3073),  # each may be another token
        (8192, 819 + 8192),  # 70.398 MiB of 2,048 columns: seen on an emulated card
        (300_000, 30_000 + 128_256),  # more than there are tokens
    ],
)
def test_the_gradient_of_an_embedding_is_added_up_in_sums_of_ten_rows(tokens: int, sums: int) -> None:
    found = taken_by_entry(np.array([tokens * 2048.0]), np.array([2048]), np.array([128_256]))
    assert found.tolist() == [sums * 2048 * 4]


def test_chunks_of_the_fused_loss_are_ligers() -> None:
    """The example in a comment of its source, and the borders of its formula."""
    assert chunk_rows(4 * 4096, 4096, 32000) == 2048
    assert chunk_rows(4 * 4096, 4096, 32001 + 4096) == 2048
    assert chunk_rows(100, 4096, 4096) == 100
    assert chunk_rows(100, 64, 64000) == 1


def test_of_ligers_mlp_the_product_alone_is_held_while_the_output_projection_runs() -> None:
    skeleton: Any = make_skeleton(make_plan(complete(parse("method=full,micro_batch=1")), job(), torch.device("cpu")))
    mlp = skeleton.model.layers[0].mlp
    held: list[weakref.ref[torch.Tensor]] = []
    for projection in (mlp.gate_proj, mlp.up_proj):
        projection.register_forward_hook(lambda module, inputs, output: held.append(weakref.ref(output)))
    alive: list[object] = []
    mlp.down_proj.register_forward_pre_hook(lambda module, inputs: alive.extend(made() for made in held))
    with replaced(skeleton), torch.no_grad():
        mlp(torch.empty(1, 2, mlp.gate_proj.in_features, device="meta", dtype=mlp.gate_proj.weight.dtype))
    assert alive == [None, None]


def test_to_the_gradient_of_ligers_norm_nothing_is_added_in_place() -> None:
    skeleton: Any = make_skeleton(make_plan(complete(parse("method=full,micro_batch=1")), job(), torch.device("cpu")))
    norm = skeleton.model.norm
    given = torch.zeros(1, 2, norm.weight.numel(), device="meta", requires_grad=True)
    norm.weight.requires_grad_(False)
    views: list[bool] = []
    given.register_hook(lambda gradient: views.append(gradient._is_view()))
    with replaced(skeleton):
        norm(given).sum().backward()
    assert views == [True]


@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_the_fused_loss_holds_one_chunk_and_from_ampere_on_no_product_beside_the_heads_gradient(precision: str) -> None:
    """A trained head: its gradient is in 16 bits; older cards hold each product, too, and widened to fp32."""
    of = model("llama", vocab_size=65536, tie_word_embeddings=False)
    head, chunk = 65536 * 64 * 2, chunk_rows(BATCH * FEW, 64, 65536) * 65536 * 2
    peaks = {}
    for capability in ("7.5", "8.0"):
        line = estimator(job(of, seq_len=FEW, capability=capability)).trace(
            complete(parse(f"method=full,precision={precision},micro_batch=8,loss=fused,attention=eager"))
        )
        peaks[capability] = line.timeline.phase_peaks()["forward"]
    assert peaks["7.5"] - peaks["8.0"] == 3 * head
    assert chunk < head
