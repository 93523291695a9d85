"""Chunked cross-entropy: torch's value and gradients, without all logits at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from unit.techniques.live_bytes import LiveBytes

from autofit.techniques.axes.loss import chunks_are_one
from autofit.techniques.losses import chunked_cross_entropy as module
from autofit.techniques.losses import chunks
from autofit.techniques.losses.chunked_cross_entropy import chunked_cross_entropy, saves_memory
from autofit.techniques.losses.chunks import chunk_rows
from autofit.techniques.losses.cross_entropy import KERNELS, full_cross_entropy, lighter_cross_entropy
from autofit.techniques.technique import IGNORE_INDEX, Head

TOKENS, HIDDEN, VOCABULARY = 50, 24, 200
CHUNKS = (1, 7, 16, 50, 256)
"""Rows per chunk: one, a divisor of nothing, a power of two, all, more than all."""


class Sizes(TorchDispatchMode):
    """Notes the largest tensor that any operation makes; views of what it was given do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = [
            t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in old
        ]
        self.largest = max([self.largest, *(t.numel() for t in made)])
        return out


def inputs(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> tuple[torch.Tensor, Head, torch.Tensor]:
    """Hidden states, a head and labels of which about a third are ignored; the same at every call."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).mul(0.3).to(dtype).requires_grad_()
    offset = torch.randn(VOCABULARY, generator=generator).to(dtype) if bias else None
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    labels[torch.rand(TOKENS, generator=generator) < 0.3] = IGNORE_INDEX
    return hidden, Head(weight=weight, bias=offset), labels


def torchs(hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> torch.Tensor:
    """The definition, by torch's own cross-entropy."""
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    if head.softcap is not None:
        logits = head.softcap * (logits / head.softcap).tanh()
    return torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")


Learnt = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""A loss, and the gradients of a sixtieth of it by the hidden states and by the head."""


def run(kernel: Callable[..., torch.Tensor], hidden: torch.Tensor, head: Head, labels: torch.Tensor) -> Learnt:
    loss = kernel(hidden, head, labels)
    (loss / 60).backward()  # type: ignore[no-untyped-call]
    return loss.detach(), hidden.grad, head.weight.grad


def of_both(
    kernel: Callable[..., torch.Tensor],
    dtype: torch.dtype = torch.float32,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    bias: bool = False,
) -> tuple[Learnt, Learnt]:
    """What the kernel gives for `inputs`, and what torch gives."""
    results = []
    for each in (kernel, torchs):
        hidden, head, labels = inputs(dtype, bias=bias)
        head.softcap, head.scale = softcap, scale
        results.append(run(each, hidden, head, labels))
    return results[0], results[1]


def assert_within_rounding(results: tuple[Learnt, Learnt], dtype: torch.dtype, of_gradients: torch.dtype) -> None:
    """Both round the gradient of the logits to 16 bits, one before the factor 1/60 and one after it, and one adds up
    chunks in 16 bits: a few units in the last of bf16's 8 or fp16's 11 bits."""
    (loss, *gradients), (expected_loss, *expected_gradients) = results
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert gradient is not None and expected is not None and gradient.dtype is of_gradients
        error = (gradient.float() - expected.float()).norm()
        assert error < 3 * torch.finfo(dtype).eps * expected.float().norm()


@pytest.mark.parametrize("rows", CHUNKS)
@pytest.mark.parametrize(("softcap", "scale"), itertools.product([None, 2.0, 30.0], [1.0, 0.25, 3.0]))
@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradients_are_torchs(
    monkeypatch: pytest.MonkeyPatch, rows: int, softcap: float | None, scale: float, bias: bool
) -> None:
    monkeypatch.setattr(module, "chunk_rows", lambda *_: rows)
    for value, expected in zip(*of_both(chunked_cross_entropy, softcap=softcap, scale=scale, bias=bias), strict=True):
        assert value is not None
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_the_other_kernel_for_all_devices_is_torchs_too() -> None:
    for softcap, scale, bias in ((None, 1.0, False), (2.0, 0.25, True)):
        torch.testing.assert_close(*of_both(full_cross_entropy, softcap=softcap, scale=scale, bias=bias))
    assert KERNELS["full"] is full_cross_entropy
    assert KERNELS["chunked"] is lighter_cross_entropy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_weights_give_the_gradients_of_sixteen_bit_logits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(module, "chunk_rows", lambda *_: 16)
    assert_within_rounding(of_both(chunked_cross_entropy, dtype), dtype, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_wide_weights_get_wide_gradients(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(module, "chunk_rows", lambda *_: 16)

    def autocast(kernel: Callable[..., torch.Tensor]) -> Learnt:
        hidden, head, labels = inputs()
        with torch.autocast("cpu", dtype):
            loss = kernel(hidden, head, labels)
        (loss / 60).backward()  # type: ignore[no-untyped-call]
        return loss.detach(), hidden.grad, head.weight.grad

    assert_within_rounding((autocast(chunked_cross_entropy), autocast(torchs)), dtype, torch.float32)


def test_a_frozen_head_gets_no_gradient_and_no_memory_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "chunk_rows", lambda *_: 8)
    hidden, head, labels = inputs()
    expected = run(torchs, hidden, head, labels)[1]
    hidden, head, labels = inputs()
    head.weight.requires_grad_(False)
    with Sizes() as sizes:
        loss, by_hidden, by_weight = run(chunked_cross_entropy, hidden, head, labels)
    assert by_weight is None
    torch.testing.assert_close(by_hidden, expected, rtol=1e-5, atol=1e-6)
    assert loss.isfinite()
    assert sizes.largest == 8 * VOCABULARY


def test_hidden_states_that_need_no_gradient_leave_the_heads_alone() -> None:
    hidden, head, labels = inputs()
    expected = run(torchs, hidden, head, labels)[2]
    hidden, head, labels = inputs()
    hidden.requires_grad_(False)
    _, by_hidden, by_weight = run(chunked_cross_entropy, hidden, head, labels)
    assert by_hidden is None
    torch.testing.assert_close(by_weight, expected, rtol=1e-5, atol=1e-6)


def test_without_gradients_the_value_is_the_same_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "chunk_rows", lambda *_: 8)
    hidden, head, labels = inputs()
    with torch.no_grad(), Sizes() as sizes:
        loss = chunked_cross_entropy(hidden, head, labels)
    assert not loss.requires_grad
    assert sizes.largest == 8 * VOCABULARY
    torch.testing.assert_close(loss, torchs(hidden, head, labels).detach(), rtol=1e-5, atol=1e-6)


def test_a_batch_without_any_target_has_no_loss_and_no_gradient() -> None:
    hidden, head, labels = inputs()
    loss, by_hidden, by_weight = run(chunked_cross_entropy, hidden, head, torch.full_like(labels, IGNORE_INDEX))
    assert float(loss) == 0.0
    assert by_hidden is not None and not by_hidden.any()
    assert by_weight is not None and not by_weight.any()


def test_large_logits_stay_finite() -> None:
    hidden, head, labels = inputs()
    loss, by_hidden, by_weight = run(chunked_cross_entropy, (hidden.detach() * 1e4).requires_grad_(), head, labels)
    assert loss.isfinite()
    assert by_hidden is not None and by_hidden.isfinite().all()
    assert by_weight is not None and by_weight.isfinite().all()


def test_a_bias_is_trained_as_torch_does_or_refused() -> None:
    hidden, head, labels = inputs(bias=True)
    assert head.bias is not None
    head.bias.requires_grad_()
    run(torchs, hidden, head, labels)
    expected, head.bias.grad = head.bias.grad, None
    try:
        run(chunked_cross_entropy, hidden, head, labels)
    except ValueError as refusal:
        assert "bias" in str(refusal)
    else:
        torch.testing.assert_close(head.bias.grad, expected, rtol=1e-5, atol=1e-6)


def test_a_bias_that_could_be_trained_is_no_obstacle_where_nothing_is() -> None:
    hidden, head, labels = inputs(bias=True)
    assert head.bias is not None
    head.bias.requires_grad_()
    with torch.no_grad():
        torch.testing.assert_close(chunked_cross_entropy(hidden, head, labels), torchs(hidden, head, labels))


def test_a_weight_that_is_used_elsewhere_too_gets_both_gradients() -> None:
    results = []
    for kernel in (chunked_cross_entropy, torchs):
        _, head, labels = inputs()
        tokens = torch.arange(TOKENS)
        embedded = torch.nn.functional.embedding(tokens, head.weight)
        (kernel(embedded, head, labels) + head.weight.square().sum()).backward()
        results.append(head.weight.grad)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [chunked_cross_entropy, full_cross_entropy], ids=["chunked", "full"])
def test_only_the_chunked_kernel_never_holds_all_logits(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., torch.Tensor]
) -> None:
    monkeypatch.setattr(chunks, "MIN_CHUNK", 4)
    tokens, hidden_size, vocabulary = 256, 16, 512
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    head = Head(weight=torch.randn(vocabulary, hidden_size, requires_grad=True), softcap=5.0)
    with Sizes() as sizes:
        (kernel(hidden, head, torch.randint(vocabulary, (tokens,))) / tokens).backward()  # type: ignore[no-untyped-call]
    logits, largest_other = tokens * vocabulary, vocabulary * hidden_size
    if kernel is full_cross_entropy:
        assert sizes.largest == logits
    else:
        assert sizes.largest == largest_other == logits // 16


@pytest.mark.parametrize(
    ("tokens", "hidden_size", "vocabulary", "rows"),
    [
        (2048, 4096, 128_256, 256),  # an even share would be 65 rows: too few for fast matrix products
        (65_536, 4096, 128_256, 4096),  # 2093, up to a power of two
        (100, 4096, 128_256, 100),  # never more than there are
        (65_536, 576, 49_152, 1024),
        (8192, 4096, 1000, 8192),
    ],
)
def test_a_chunk_is_about_as_large_as_all_hidden_states(
    tokens: int, hidden_size: int, vocabulary: int, rows: int
) -> None:
    assert chunk_rows(tokens, hidden_size, vocabulary) == rows


@pytest.mark.parametrize(
    ("tokens", "trained", "chunked"),
    [
        (256, False, False),  # one chunk holds all
        (512, False, True),
        (512, True, False),  # the head's gradient is more than the logits that chunks save
        (2048, True, True),
    ],
)
def test_chunks_are_taken_where_they_save_memory(tokens: int, trained: bool, chunked: bool) -> None:
    with torch.device("meta"):
        hidden = torch.empty(tokens, 4096, dtype=torch.bfloat16)
        weight = torch.empty(128_256, 4096, dtype=torch.bfloat16, requires_grad=trained)
    assert saves_memory(hidden, weight) is chunked


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed", "fp32"])
def test_what_is_known_beforehand_to_be_one_program_is_one(method: str, precision: str) -> None:
    hidden_size = tiny.LLAMA.config["hidden_size"]
    known = []
    for micro_batch in (1, 2, 4, 8, 16):
        job = tiny.job(seq_len=128, global_batch=16)
        config = tiny.config(method=method, precision=precision, micro_batch=micro_batch, loss="chunked")
        known.append(chunks_are_one(config, job))
        with torch.device("meta"):
            hidden = torch.empty(128 * micro_batch, hidden_size, dtype=torch.bfloat16)
            hidden = hidden.float() if precision == "fp32" else hidden
            dtype = torch.bfloat16 if precision == "bf16" or method == "lora" else torch.float32
            weight = torch.empty(tiny.VOCABULARY, hidden_size, dtype=dtype, requires_grad=method == "full")
        assert known[-1] is not saves_memory(hidden, weight)
        assert not known[-1] or not saves_memory(hidden.float(), weight)
    assert known == [True, True, False, False, False]


@pytest.mark.parametrize("tokens", [24, 400])
def test_the_lighter_kernel_never_holds_more_than_all_logits_at_once(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    monkeypatch.setattr(chunks, "MIN_CHUNK", 16)
    largest = {}
    for kernel in (lighter_cross_entropy, full_cross_entropy):
        hidden = torch.randn(tokens, 64, requires_grad=True)
        head = Head(weight=torch.randn(512, 64, requires_grad=True))
        with LiveBytes() as counter:
            kernel(hidden, head, torch.randint(512, (tokens,))).backward()  # type: ignore[no-untyped-call]
        largest[kernel] = counter.peak
    if tokens == 24:
        assert largest[lighter_cross_entropy] == largest[full_cross_entropy]
    else:
        assert largest[lighter_cross_entropy] < 0.5 * largest[full_cross_entropy]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sixteen_bit_gradient_is_not_scaled_by_a_rounded_factor(dtype: torch.dtype) -> None:
    """1/60 is 1/59.9 in bf16, and a loss scale of 65536 is infinite in fp16."""
    lengths = []
    for factor in (1.0, 1 / 60):
        hidden, head, labels = inputs(dtype)
        (chunked_cross_entropy(hidden, head, labels) * factor).backward()  # type: ignore[no-untyped-call]
        assert head.weight.grad is not None
        lengths.append(float(head.weight.grad.double().norm()))
    assert lengths[1] * 60 == pytest.approx(lengths[0], rel=3e-4)
    hidden, head, labels = inputs(dtype)
    ((chunked_cross_entropy(hidden, head, labels) / 65536) * 65536).backward()  # type: ignore[no-untyped-call]
    assert head.weight.grad is not None and head.weight.grad.isfinite().all()


def test_a_widened_gradient_has_no_temporary_of_the_heads_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "chunk_rows", lambda *_: 1)
    peaks = {}
    for stripe in (20, VOCABULARY):
        monkeypatch.setattr(module, "STRIPE", stripe)
        hidden, head, labels = inputs()
        with torch.autocast("cpu", torch.bfloat16), LiveBytes() as counter:
            chunked_cross_entropy(hidden, head, labels)
        peaks[stripe] = counter.peak
    # Of the product in bf16 a tenth is there at a time: stripes of 20 rows of 200.
    assert peaks[VOCABULARY] - peaks[20] > 0.8 * 2 * VOCABULARY * HIDDEN


def test_a_second_backward_is_refused_and_never_wrong() -> None:
    hidden, head, labels = inputs()
    loss = chunked_cross_entropy(hidden, head, labels) / 60
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_gradients_accumulate_over_micro_steps() -> None:
    result = []
    for kernel in (chunked_cross_entropy, torchs):
        hidden, head, labels = inputs()
        for part in (slice(0, 30), slice(30, TOKENS)):
            kernel(hidden[part], head, labels[part]).backward()  # type: ignore[no-untyped-call]
        result.append(head.weight.grad)
    torch.testing.assert_close(result[0], result[1], rtol=1e-5, atol=1e-5)
