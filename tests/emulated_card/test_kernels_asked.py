"""What the estimator says of CUDA's kernels, held to what torch itself answers on each generation of cards."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from autofit.catalog.hardware import card as catalog_card
from autofit.core.device.hardware import Hardware
from autofit.core.units import round_up
from autofit.estimate.kernels.column_sums import blocks_at_a_time, taken
from autofit.estimate.kernels.cuda_kernels import cublas_workspace_bytes
from autofit.estimate.memory.allocator import MIN_BLOCK
from autofit.techniques.attention_kernels import Attention, attention_kernel
from tests.emulated_card.cards import Machine

if TYPE_CHECKING:
    from pathlib import Path

    from tests.emulated_card.conftest import Start

UNKNOWN = Hardware(name="", kind="cuda", device_name="", memory_bytes=0)
GENERATIONS = ("t4", "a100-40g", "a10g", "rtx-4090", "h100-80g", "b200", "rtx-5090")
"""Compute capabilities 7.5, 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0."""
CHOICES = """
    import itertools, json
    from torch.nn.attention import SDPBackend as Backend
    names = {Backend.MATH: "math", Backend.EFFICIENT_ATTENTION: "efficient"}
    formats = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    chosen = []
    for (name, format), width, grouped, masked, dropout in itertools.product(
        formats.items(), (64, 80, 96, 100, 128, 192, 208, 256, 320), (False, True), (False, True), (False, True)
    ):
        if (name == "bf16") > torch.cuda.is_bf16_supported(including_emulation=False):
            continue
        made = dict(device="cuda", dtype=format, requires_grad=True)
        query, key = (torch.empty(2, heads, 256, width, **made) for heads in (8, 2 if grouped else 8))
        mask = torch.zeros(2, 1, 256, 256, device="cuda", dtype=format) if masked else None
        choice = torch._fused_sdp_choice(
            query, key, key, mask, 0.1 if dropout else 0.0, is_causal=not masked, enable_gqa=grouped
        )
        chosen.append([name, width, grouped, masked, dropout, names.get(Backend(choice), "flash")])
    print(json.dumps(chosen))
"""
"""cuDNN's kernel counts as flash attention, as in the estimator."""


@pytest.mark.parametrize("name", GENERATIONS)
def test_torch_picks_the_attention_kernel_that_is_predicted(home: Path, start: Start, name: str) -> None:
    with Machine(home, name) as machine:
        chosen = start(machine, CHOICES).answer()
    assert {kernel for *_, kernel in chosen} == {kernel.value for kernel in Attention} - (
        {"flash"} if name == "t4" else set()
    )
    for number_format, width, grouped, masked, dropout, kernel in chosen:
        case = dict(number_format=number_format, width=width, grouped=grouped, masked=masked, dropout=dropout)
        predicted = attention_kernel(**case, value_width=width, capability=catalog_card(name).capability)
        assert predicted.value == kernel, case


PRODUCT = """
    import json
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    operand = torch.empty(512, 512, device="cuda", dtype=torch.float16)
    result = torch.empty_like(operand)
    before = torch.cuda.memory_allocated()
    torch.mm(operand, operand, out=result)
    release = [int(number) for number in torch.__version__.split(".")[:2]]
    print(json.dumps([release, torch.cuda.memory_allocated() - before]))
"""


@pytest.mark.parametrize("name", GENERATIONS)
def test_the_first_product_takes_the_workspace_that_is_predicted(home: Path, start: Start, name: str) -> None:
    with Machine(home, name) as machine:
        release, workspace = start(machine, PRODUCT).answer()
    assert workspace == cublas_workspace_bytes(catalog_card(name).capability, tuple(release))


SUMS = """
    import json
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")  # or what is left of a segment counts
    found = []
    for rows in (256, 1020, 1021, 4096, 30_000, 60_000):
        for columns in (128, 768, 3072, 16_384):
            operand = torch.empty(rows, columns, device="cuda", dtype=torch.float16)
            torch.cuda.reset_peak_memory_stats()
            result = operand.sum(0)
            found.append([rows, columns, torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()])
            del operand, result
    print(json.dumps(found))
"""


@pytest.mark.parametrize("name", GENERATIONS)
def test_adding_columns_up_takes_what_is_predicted(home: Path, start: Start, name: str) -> None:
    """But for a word for every 128 columns, by which blocks tell that they are done."""
    hardware = replace(UNKNOWN, name=name, capability=catalog_card(name).capability)
    with Machine(home, name) as machine:
        found = np.array(start(machine, SUMS).answer())
    rows, columns, measured = found.T
    predicted = taken((rows * columns).astype(float), columns, blocks_at_a_time(hardware))
    words = np.array([round_up(4 * -(-int(each) // 128), MIN_BLOCK) for each in columns])
    assert (measured == predicted + np.where(predicted > 0, words, 0)).all(), found[measured != predicted].tolist()
    assert (predicted > 0).any()
