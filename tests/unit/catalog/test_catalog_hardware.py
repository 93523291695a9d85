"""The accelerators' rows are complete and plausible, and drivers' device names find the right one."""

from __future__ import annotations

import json
import pickle
import re

import pytest

from autofit.catalog.hardware import Card, card, cards, cards_of_size, fitting, match, matching_cards
from autofit.core.errors import UsageError
from autofit.core.units import GIB, MIB

NAMES = {
    "h200", "h100-80g", "h100-pcie-80g", "h100-nvl-94g", "h20", "gh200-96g", "a100-40g", "a100-80g", "b200", "l40s",
    "l40", "rtx-6000-ada", "l4", "a10", "a10g", "a40", "rtx-a6000", "rtx-3060", "rtx-3080", "rtx-3090", "rtx-4070-ti",
    "rtx-4080", "rtx-4090", "rtx-5090", "rtx-pro-6000", "t4", "v100-16g", "v100-32g", "mi300x", "apple-m2-max",
    "apple-m3-max", "apple-m4-max",
}  # fmt: skip

every_card = pytest.mark.parametrize("entry", cards(), ids=lambda entry: entry.name)


def test_the_catalog_has_each_card_once() -> None:
    assert len(cards()) == len(NAMES)
    assert {entry.name for entry in cards()} == NAMES


@every_card
def test_figures_are_in_their_unit(entry: Card) -> None:
    assert isinstance(entry.memory_bytes, int) and isinstance(entry.marketed_memory_bytes, int)
    assert 8 * GIB < entry.memory_bytes < 200 * GIB
    assert 1e11 < entry.bandwidth_bytes_per_second < 1e13
    assert all(5e12 < peak < 1e16 for peak in entry.peak_flops.values())
    for link in (entry.interconnect, entry.host_link):
        assert link is None or 1e10 <= link.bytes_per_second <= 1e12


@every_card
def test_reachable_memory_is_less_than_marketed(entry: Card) -> None:
    share = entry.memory_bytes / entry.marketed_memory_bytes
    assert share == 0.75 if entry.unified_memory else 1 - 0.12 < share < 1


@every_card
def test_formats_and_their_order(entry: Card) -> None:
    peaks = entry.peak_flops
    assert {"fp32", "fp16"} <= set(peaks) <= {"fp32", "tf32", "fp16", "bf16", "fp8"}
    assert entry.training_peak_flops == peaks["bf16" if entry.bf16 else "fp16"]
    ordered = [peaks[f] for f in ("fp32", "tf32", "bf16", "fp8") if f in peaks]
    assert ordered == sorted(ordered)
    # Dense figures: a sparse one among them would be twice the next narrower step.
    if "fp8" in peaks:
        assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=0.03)


@every_card
def test_capability_decides_the_formats(entry: Card) -> None:
    if entry.vendor != "nvidia":
        assert entry.capability == ("gfx942" if entry.vendor == "amd" else entry.capability)
        return
    capability = float(entry.capability)
    assert entry.bf16 == (capability >= 8.0)
    assert ("fp8" in entry.peak_flops) == (capability >= 8.9)


@every_card
def test_vendor_decides_the_kind(entry: Card) -> None:
    assert entry.kind == {"nvidia": "cuda", "amd": "cuda", "apple": "mps"}[entry.vendor]
    assert entry.unified_memory == (entry.vendor == "apple") == (entry.host_link is None)
    assert entry.source


@every_card
def test_a_row_is_a_value(entry: Card) -> None:
    assert pickle.loads(pickle.dumps(entry)) == entry
    assert hash(entry) == hash(card(entry.name))
    assert json.loads(json.dumps(entry.to_json()))["memory_bytes"] == entry.memory_bytes
    assert all(re.compile(pattern) for pattern in entry.device_names)


def test_ray_knows_its_names() -> None:
    constants = vars(pytest.importorskip("ray.util.accelerators.accelerators"))
    valid = {value for name, value in constants.items() if not name.startswith("_")}
    assert {entry.ray_accelerator_type for entry in cards()} - {None} <= valid


@pytest.mark.parametrize(
    ("device_name", "memory_mebibytes", "name"),
    [
        # as the driver (NVML) and as torch report the same card
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA H200", 143156, "h200"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80g"),
        ("NVIDIA H100 80GB HBM3", 81090, "h100-80g"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie-80g"),
        ("NVIDIA H100 NVL", 95830, "h100-nvl-94g"),
        ("NVIDIA H20", 97871, "h20"),
        ("NVIDIA GH200 480GB", 97871, "gh200-96g"),
        ("GH200 120GB", 97157, "gh200-96g"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40g"),
        ("A100-SXM4-40GB", 40536, "a100-40g"),
        ("NVIDIA A100-PCIE-40GB", 40960, "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80g"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100-80g"),
        ("NVIDIA B200", 183359, "b200"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA L40", 46068, "l40"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx-6000-ada"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA A10", 23028, "a10"),
        ("NVIDIA A10G", 23028, "a10g"),
        ("NVIDIA A40", 46068, "a40"),
        ("NVIDIA RTX A6000", 49140, "rtx-a6000"),
        ("RTX A6000", 48676, "rtx-a6000"),
        ("NVIDIA GeForce RTX 3090", 24576, "rtx-3090"),
        ("GeForce RTX 3090", 24268, "rtx-3090"),
        ("NVIDIA GeForce RTX 3060", 12288, "rtx-3060"),
        ("NVIDIA GeForce RTX 3080", 10240, "rtx-3080"),
        ("NVIDIA GeForce RTX 4070 Ti", 12282, "rtx-4070-ti"),
        ("NVIDIA GeForce RTX 4080", 16376, "rtx-4080"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", 32607, "rtx-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "rtx-pro-6000"),
        ("Tesla T4", 15360, "t4"),
        ("Tesla V100-SXM2-16GB", 16384, "v100-16g"),
        ("Tesla V100-PCIE-32GB", 32510, "v100-32g"),
        ("AMD Instinct MI300X", 196592, "mi300x"),
        ("Apple M2 Max", 32 * 1024, "apple-m2-max"),
        ("Apple M3 Max", 128 * 1024, "apple-m3-max"),
        ("Apple M4 Max", 64 * 1024, "apple-m4-max"),
    ],
)
def test_device_names_find_their_card(device_name: str, memory_mebibytes: int, name: str) -> None:
    matched = match(device_name, memory_mebibytes * MIB)
    assert matched is not None and matched.name == name


@pytest.mark.parametrize(
    ("device_name", "memory_mebibytes"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864),
        ("NVIDIA A100-SXM4-40GB MIG 7g.40gb", 40192),
        ("GRID A100-40C", 40960),
        ("NVIDIA A100-SXM-64GB", 65536),
        ("NVIDIA H200 NVL", 143771),
        ("NVIDIA H20", 143771),
        ("NVIDIA H20-3e", 143771),
        ("NVIDIA GH200 144G HBM3e", 146831),
        ("NVIDIA GB200", 189471),
        ("NVIDIA L4", 11517),
        ("NVIDIA L40G", 23034),
        ("NVIDIA A10-24Q", 24576),
        ("NVIDIA A10M", 23028),
        ("NVIDIA A40-48Q", 49152),
        ("Quadro RTX 6000", 24576),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376),
        ("NVIDIA GeForce RTX 3090 Ti", 24564),
        ("NVIDIA T400", 2048),
        ("AMD Instinct MI300X", 24576),
        ("Apple M3 Pro", 36864),
        ("", 0),
    ],
)
def test_other_devices_find_none(device_name: str, memory_mebibytes: int) -> None:
    assert match(device_name, memory_mebibytes * MIB) is None


def test_card_by_name() -> None:
    assert card("H100-80G") is card("h100-80g")
    with pytest.raises(UsageError, match=r"unknown hardware 'h100-90g': did you mean h100-80g"):
        card("h100-90g")


@pytest.mark.parametrize(
    ("size", "hint"),
    [
        ("24GB", r"name a card that has it \(l4, a10, a10g, rtx-3090, rtx-4090\); --memory-limit 24GB beside a larger"),
        ("16 gib", r"name a card that has it \(rtx-4080, t4, v100-16g\); --memory-limit 16gib beside"),
        ("7.5GB", r"name a card; --memory-limit 7\.5GB beside"),
    ],
)
def test_a_size_is_no_card_and_names_those_that_have_it(size: str, hint: str) -> None:
    assert matching_cards(size) == ()
    with pytest.raises(UsageError, match=rf"hardware '{size}' is a size of memory: {hint}"):
        card(size)


def test_fitting_goes_from_small_to_large() -> None:
    sizes = [entry.memory_bytes for entry in fitting(0)]
    assert sizes == sorted(sizes) and len(sizes) == len(cards())
    assert fitting(20 * GIB)[0].name == "l4"
    assert {entry.name for entry in fitting(130 * GIB)} == {"h200", "b200", "mi300x"}
    exact = card("a100-40g").memory_bytes
    assert card("a100-40g") in fitting(exact) and card("a100-40g") not in fitting(exact + 1)
    assert fitting(1024 * GIB) == ()


@pytest.mark.parametrize(
    ("text", "names"),
    {
        "NVIDIA GeForce RTX 4090": ["rtx-4090"],
        "RTX 4090": ["rtx-4090"],
        "4090": ["rtx-4090"],
        "A100-SXM4-80GB": ["a100-80g"],
        "NVIDIA A100-PCIE-40GB": ["a100-40g"],
        "V100-SXM2-16GB": ["v100-16g"],
        "A100": ["a100-40g", "a100-80g"],
        "h100": ["h100-80g", "h100-pcie-80g", "h100-nvl-94g"],
        "H100 SXM 80GB": ["h100-80g"],
        "H100 SXM": ["h100-80g"],
        "A100 SXM": ["a100-40g", "a100-80g"],
        "L40": ["l40"],
        "a6000": ["rtx-a6000"],
        "RTX 3090 Ti": [],
        "RTX 4070": [],
        "RTX 4070 Ti": ["rtx-4070-ti"],
        "m3": [],
        "M3 Max": ["apple-m3-max"],
        "mi300": [],
        "gpu": [],
        "": [],
    }.items(),
)
def test_the_cards_that_a_user_may_mean(text: str, names: list[str]) -> None:
    assert [entry.name for entry in matching_cards(text)] == names


@pytest.mark.parametrize(
    ("text", "near"), [("RTX 4070", "rtx-4070-ti"), ("6000", "rtx-6000-ada, rtx-a6000, rtx-pro-6000")]
)
def test_a_card_that_is_missing_is_no_other_and_those_near_are_told(text: str, near: str) -> None:
    with pytest.raises(UsageError, match=f"the catalog has no '{text}'; near it are: {near}"):
        card(text)


def test_a_card_that_nothing_is_near_is_told_how_to_stand_in_for_it() -> None:
    with pytest.raises(UsageError, match=r"unknown hardware '4060': .*--memory-limit") as caught:
        card("4060")
    assert "did you mean" not in str(caught.value)
    with pytest.raises(UsageError, match="did you mean rtx-4090"):
        card("rtx-409")


def test_a_name_that_may_be_several_cards_is_refused_with_these() -> None:
    with pytest.raises(UsageError, match=r"a100-40g.*a100-80g"):
        card("A100")


@pytest.mark.parametrize(
    ("gib", "name"),
    [(44.52, "l40s"), (44.42, "l40s"), (44.39, "l40s"), (44.35, "a40"), (23.65, "rtx-4090"), (23.69, "rtx-3090")],
)
def test_a_driver_reports_no_more_than_its_card_has(gib: float, name: str) -> None:
    assert cards_of_size(int(gib * GIB))[0].name == name
