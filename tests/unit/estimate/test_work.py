"""What single operations cost."""

from __future__ import annotations

import bitsandbytes  # noqa: F401  (registers its operations)
import torch

from autofit.estimate.kernels.scratch import Held, host_scratch
from autofit.estimate.memory.symbolic_sizes import MICRO_BATCH
from autofit.estimate.time.op_costs import work

_ATEN = torch.ops.aten


def test_an_operation_moves_its_operands_and_its_result() -> None:
    a, b = torch.empty(8, 16), torch.empty(8, 16)
    assert work(_ATEN.add.Tensor, (a, b), torch.empty(8, 16)).moved == (512, 512, 512)


def test_of_a_table_only_the_rows_that_are_looked_up_move() -> None:
    table, places, rows = torch.empty(1000, 16), torch.zeros(8, dtype=torch.long), torch.empty(8, 16)
    assert work(_ATEN.embedding.default, (table, places), rows).moved == (64, 512)
    picked = torch.empty(1000, 1)
    assert sum(work(_ATEN.gather.default, (table, 1, places[:, None]), picked).moved) < 5000


def test_a_four_bit_product_makes_its_weight_wide_first() -> None:
    activations, packed = torch.empty(32, 64, dtype=torch.bfloat16), torch.empty(64 * 64, 1, dtype=torch.uint8)
    args = (activations, packed, (128, 64), torch.empty(128), 64, "nf4")
    product = torch.ops.bitsandbytes.gemm_4bit.default
    found = work(product, args, torch.empty(32, 128, dtype=torch.bfloat16))
    weight = 128 * 64 * 2
    assert found.flops == 2 * 32 * 128 * 64 and found.moved[-1] == weight
    assert (found.kinds.near, found.kinds.far) == ("dequantise-4bit/bf16",) * 2
    assert host_scratch(str(product), args) == Held(before=(128 * 4, weight))
    assert host_scratch("aten.mm.default", (activations, activations.T)) == Held()


def test_a_product_is_of_its_format_its_layout_and_its_width() -> None:
    """The three products of a linear layer, each as autograd makes it."""
    inputs, weight, gradient = torch.empty(8, 64), torch.empty(128, 64), torch.empty(8, 128)
    forward = work(_ATEN.mm.default, (inputs, weight.t()), gradient)
    of_input = work(_ATEN.mm.default, (gradient, weight), inputs)
    of_weight = work(_ATEN.mm.default, (gradient.t(), inputs), weight)
    assert [w.kinds.flops for w in (forward, of_input, of_weight)] == [f"product/fp32/{x}" for x in ("nt", "nn", "tn")]
    narrow = work(_ATEN.mm.default, (inputs.bfloat16(), weight.bfloat16().t()), gradient.bfloat16())
    assert narrow.kinds.flops == "product/bf16/nt" and narrow.made == gradient.nbytes / 2
    head = work(_ATEN.mm.default, (inputs, torch.empty(50_000, 64).t()), torch.empty(8, 50_000))
    assert head.kinds.flops == "product/fp32/nt/wide"
    many = torch.empty(MICRO_BATCH, 64, device="meta")
    assert work(_ATEN.mm.default, (many, weight.t()), torch.empty(1)).kinds.flops == "product/fp32/nt", "tokens"


def test_what_moves_bytes_is_of_its_class_and_its_narrowest_format() -> None:
    wide, narrow = torch.empty(8, 16), torch.empty(8, 16, dtype=torch.bfloat16)
    kinds = work(_ATEN.mul.Tensor, (narrow, narrow), narrow).kinds
    assert (kinds.near, kinds.far) == ("elementwise/bf16/near", "elementwise/bf16/far")
    for op, args, result, name in (
        (_ATEN.mul.Tensor, (narrow, narrow), narrow, "elementwise/bf16/near"),
        (_ATEN._to_copy.default, (wide,), narrow, "cast/bf16/near"),
        (_ATEN.silu.default, (wide,), wide, "transcendental/fp32/near"),
        (_ATEN._log_softmax.default, (wide,), wide, "softmax/fp32/near"),
        (_ATEN.sum.dim_IntList, (wide,), wide, "reduction/fp32/near"),
        (_ATEN._fused_adamw_.default, ([narrow], [narrow]), None, "update/bf16"),
    ):
        assert work(op, args, result).kinds.near == name
    assert work(_ATEN.add_.Tensor, (wide, narrow), wide).made == 0, "in place"
