"""Which cards a process sees: CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER and MIG, to CUDA and to `autofit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from autofit.catalog import hardware as catalog
from tests.emulated_card.cards import Machine, described

if TYPE_CHECKING:
    from tests.emulated_card.conftest import Start

MIXED = ("t4", "h100-80g", "a10g")
"""The fastest is in the second slot."""
NAMES = """
    import ctypes, json
    runtime, count, shown = ctypes.CDLL("libcudart.so.13"), ctypes.c_int(), ctypes.create_string_buffer(4096)
    runtime.cudaGetDeviceCount(ctypes.byref(count))
    names = []
    for device in range(count.value):
        runtime.cudaGetDeviceProperties(shown, device)
        names.append(shown.value.decode().split()[1].split("-")[0])
    print(json.dumps(names))
"""


@pytest.mark.parametrize(
    ("value", "order", "names"),
    [
        (None, None, ["H100", "T4", "A10G"]),
        (None, "FASTEST_FIRST", ["H100", "T4", "A10G"]),
        (None, "PCI_BUS_ID", ["T4", "H100", "A10G"]),
        ("2,0", None, ["A10G", "H100"]),
        ("2,0", "PCI_BUS_ID", ["A10G", "T4"]),
        ("", None, []),
        ("-1", None, []),
        ("1,7,0", None, ["T4"]),
        ("1,x,0", None, ["T4"]),
        ("1,1", None, []),
        (" 1 , 0 ", None, ["T4", "H100"]),
        ("{2}", None, ["A10G"]),
        ("{2:.12},{0}", None, ["A10G", "T4"]),
        ("GPU-", None, []),
        ("{0:.12}0000,1", None, []),
    ],
)
def test_visible(home: Path, start: Start, value: str | None, order: str | None, names: list[str]) -> None:
    """Numbers count in CUDA's order; UUIDs may be abbreviated; the list ends at the first word that names no card."""
    with Machine(home, *MIXED) as machine:
        environment = {}
        if value is not None:
            environment["CUDA_VISIBLE_DEVICES"] = value.format(*(machine.uuid(card) for card in range(len(MIXED))))
        if order is not None:
            environment["CUDA_DEVICE_ORDER"] = order
        assert start(machine, NAMES, **environment).answer() == names


DEVICES = """
    import ctypes, json
    from autofit.trial.machine import detection as site
    from autofit.trial.machine import nvml
    hardware, _ = site.detect("cuda")
    instance = torch.cuda.get_device_properties(0)
    said_by_driver = ctypes.create_string_buffer(16)
    assert ctypes.CDLL("libcuda.so.1").cuDeviceGetUuid_v2(said_by_driver, 0) == 0
    assert said_by_driver.raw.hex() == str(instance.uuid).replace("-", "")
    kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    first = nvml.visible(0)
    assert str(instance.uuid) in first.uuid
    print(json.dumps([torch.cuda.device_count(), instance.name, instance.total_memory, instance.multi_processor_count,
                      hardware.name, first.uuid, first.memory_bytes, first.held_bytes]))
"""


def test_mig(home: Path, start: Start) -> None:
    """A process sees one instance, with its memory and multiprocessors."""
    with Machine(home, "h100-80g:3g.40gb:1g.10gb") as machine:
        card, large, small = map(machine.uuid, range(3))
        assert card.startswith("GPU-") and large.startswith("MIG-") and small.startswith("MIG-")
        for visible, uuid, gib, processors, profile in (
            (None, large, 39.5, 60, "3g.40gb"),
            ("0", large, 39.5, 60, "3g.40gb"),
            (card, large, 39.5, 60, "3g.40gb"),
            (small, small, 9.75, 16, "1g.10gb"),
            (f"{small[:16]},{large}", small, 9.75, 16, "1g.10gb"),
        ):
            environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
            size, name = int(gib * 1024**3), f"NVIDIA H100 80GB HBM3 MIG {profile}"
            slug = f"emulated-nvidia-h100-80gb-hbm3-mig-{profile.replace('.', '-')}-{round(gib)}g"
            held = (1024 + 400) * 1024**2
            expected = [1, name, size, processors, slug, uuid, size, held]
            assert start(machine, DEVICES, **environment).answer() == expected


def test_nvml_shows_a_card_and_its_instances(home: Path, start: Start) -> None:
    """Memory is said of both, and of the card that of all; clocks, power and capability are the card's alone."""
    program = """
        import json
        pynvml.nvmlInit()
        def said(function, *arguments):
            try:
                return getattr(pynvml, function)(*arguments)
            except pynvml.NVMLError as error:
                return str(error)
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        first, second = (pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number) for number in range(2))
        kept = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        print(json.dumps([
            pynvml.nvmlDeviceGetCount(),
            said("nvmlDeviceGetMigMode", card),
            said("nvmlDeviceGetMigMode", pynvml.nvmlDeviceGetHandleByIndex(1)),
            said("nvmlDeviceGetMigDeviceHandleByIndex", card, 2),
            [said("nvmlDeviceGetMemoryInfo", one, pynvml.nvmlMemory_v2).used >> 20 for one in (card, first, second)],
            [len(said("nvmlDeviceGetComputeRunningProcesses", one)) for one in (card, first, second)],
            [said("nvmlDeviceGetPowerManagementLimit", one) for one in (card, first)],
            said("nvmlDeviceGetCudaComputeCapability", first),
            [pynvml.nvmlDeviceGetUUID(one) for one in (card, first, second)],
        ]))
    """
    with Machine(home, "a100-80g:1g.10gb:2g.20gb", "t4") as machine:
        assert start(machine, program).answer() == [
            2,
            [1, 1],
            "Not Supported",
            "Not Found",
            [1424, 1424, 0],
            [1, 1, 0],
            [400_000, "Not Supported"],
            "Not Supported",
            [machine.uuid(place) for place in (0, 2, 3)],
        ]


def test_every_nvidia_card_of_the_catalog_can_be_emulated() -> None:
    """Under a name by which the catalog knows it."""
    for known in catalog.cards():
        if known.vendor == "nvidia":
            emulated, _ = described(known.name, 0)
            assert catalog.match(emulated.name.decode(), emulated.total_bytes) == known, known.name


ESTIMATING = """
    import json, math
    from autofit.core.units import GIB
    from autofit.estimate import sweep
    from autofit.planning.requests import WorkloadOptions
    from autofit.prediction.estimation import site
    from autofit.techniques import complete, parse

    def asked_of_the_card():
        return [torch.cuda.is_initialized(), torch.utils._triton.has_triton.cache_info().currsize]

    job = WorkloadOptions(model="smollm2-135m", seq_len=64, global_batch=2).job(site("t4"))
    asked = ("method=qlora", "method=lora,compile=true", "method=full,compile=true,checkpointing=full")  # torch's alone
    configs = [complete(parse("precision=fp16-mixed," + config)) for config in asked]
    traced = sweep._predicted(job, configs[2:], 16 * GIB, math.inf)
    in_a_users_process = asked_of_the_card()
    sweep._begin()
    traced += sweep._predicted(job, configs, 16 * GIB, math.inf)
    print(json.dumps([in_a_users_process, torch.cuda.is_initialized(), all(e.work is not None for e in traced)]))
"""


def test_an_estimating_process_asks_nothing_of_a_card(home: Path, start: Start) -> None:
    with Machine(home, "t4") as machine:
        assert start(machine, ESTIMATING).answer() == [[False, 0], False, True]
