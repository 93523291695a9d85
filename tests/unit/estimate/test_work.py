"""What single operations cost."""

from __future__ import annotations

import bitsandbytes  # noqa: F401  (registers its operations)
import torch

from autofit.estimate.host_kernels import host_scratch
from autofit.estimate.work import Kind, work

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
    assert found.flops == 2 * 32 * 128 * 64 and found.moved[-1] == weight and Kind.DEQUANTISED in Kind(found.kind)
    assert host_scratch(product, args, {}, None) == weight + 128 * 4
    assert host_scratch(_ATEN.mm.default, (activations, activations.T), {}, None) == 0
