"""The card that is not there does what a card does: to real torch, and to what looks at it from outside."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from autofit.core.errors import UsageError
from tests.emulated_card import build, cards
from tests.emulated_card.cards import Machine, described

if TYPE_CHECKING:
    from tests.emulated_card.conftest import Start

GIB = 1024**3
MIB = 1024**2


def test_what_a_process_holds_is_seen_by_all(home: Path, start: Start) -> None:
    """By NVML and CUDA in another process, and by tests; a process that is killed gives it back."""
    with Machine(home, "h100-80g") as machine:
        holder = start(machine, "x = torch.zeros(2**28, device='cuda'); print(os.getpid()); input()")
        assert holder.line() == str(holder.pid)
        held = GIB + cards.CONTEXT_BYTES
        assert machine.held_bytes(0) == held
        assert machine.processes(0) == [holder.pid]
        machine.take_memory(0, 5 * GIB)
        seen = """
            import json
            pynvml.nvmlInit()
            card = pynvml.nvmlDeviceGetHandleByIndex(0)
            memory = pynvml.nvmlDeviceGetMemoryInfo(card, version=pynvml.nvmlMemory_v2)
            holders = {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(card)}
            free, total = torch.cuda.mem_get_info()
            print(json.dumps([memory.used, holders, free - total]))
        """
        others = {"1": 5 * GIB, str(holder.pid): held}
        assert start(machine, seen).answer() == [held + 5 * GIB, others, -(held + 5 * GIB + cards.CONTEXT_BYTES)]
        holder.kill()
        machine.take_memory(0, 0)
        assert (machine.held_bytes(0), machine.processes(0)) == (0, [])
        assert start(machine, seen).answer() == [0, {}, -cards.CONTEXT_BYTES]


ALLOCATES = """
    import ctypes, json
    kept, answer = [], []
    def allocate(gib):
        try:
            kept.append(torch.empty(gib << 30, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError as error:
            answer.append(str(error))
        answer.append([len(torch.cuda.memory_snapshot()), torch.cuda.memory_reserved() >> 30])
    for gib in (20, 20, 20, 30):
        allocate(gib)
    kept.pop()
    torch.cuda.empty_cache()
    allocate(30)
    kept.clear()
    torch.cuda.empty_cache()
    runtime, address = ctypes.CDLL("libcudart.so.13"), ctypes.c_void_p()
    assert runtime.cudaMallocManaged(ctypes.byref(address), ctypes.c_size_t(1 << 30), 1) == 0
    ctypes.memset(address, 7, 4096)
    answer.append([ctypes.string_at(address, 4).hex(), torch.cuda.mem_get_info()[0] >> 20])
    assert runtime.cudaFree(address) == 0
    print(json.dumps(answer))
"""


@pytest.mark.parametrize("expandable", [False, True])
def test_torch_runs_out_of_memory_and_recovers(home: Path, start: Start, expandable: bool) -> None:
    """With torch's own error; a segment that may grow does so, and shrinks; managed memory is the host's."""
    with Machine(home, "h100-80g") as machine:
        program = start(machine, ALLOCATES, PYTORCH_ALLOC_CONF=f"expandable_segments:{expandable}")
        *held, error, after_error, later, managed = program.answer()
        segments = [1, 1, 1] if expandable else [1, 2, 3]
        assert held == [[segments[0], 20], [segments[1], 40], [segments[2], 60]]
        assert error.startswith(
            "CUDA out of memory. Tried to allocate 30.00 GiB. GPU 0 has a total capacity of 79.19 GiB"
        )
        # after a segment that could not grow, torch begins another
        assert (after_error, later) == ([segments[2], 60], [2 if expandable else 3, 70])
        assert managed == ["07070707", 81089 - 400]


def test_what_others_take_is_not_the_context(home: Path, start: Start) -> None:
    """The driver is asked for what this process holds; what the device holds in all counts where it keeps quiet."""
    beside = """
        from autofit.trial.machine import nvml
        from autofit.trial.measure import meter
        kept = torch.zeros(2**28, device="cuda")
        print(meter.beside_allocator(0), flush=True)
        input()
        print(meter.beside_allocator(0))
        nvml.own_bytes = lambda: None
        print(meter.beside_allocator(0))
    """
    with Machine(home, "h100-80g") as machine:
        asks = start(machine, beside)
        assert asks.line() == str(cards.CONTEXT_BYTES)
        machine.take_memory(0, 5 * GIB)
        asks.go_on()
        assert [asks.line(), asks.line()] == [str(cards.CONTEXT_BYTES), str(cards.CONTEXT_BYTES + 5 * GIB)]


def test_kernels_are_those_of_the_card(home: Path, start: Start) -> None:
    """A card for which torch has no code is refused in its own words; one whose driver is too old, too."""
    launches = "import warnings; warnings.simplefilter('default'); torch.zeros(4, device='cuda') + 1"
    with Machine(home, "v100-16g") as machine:
        said = start(machine, launches).stdout.read()
        assert "no kernel image is available for execution on the device" in said
        assert "Tesla V100-SXM2-16GB which is of compute capability (CC) 7.0" in said
        refused = start(machine, "from autofit.trial.machine import detection as site; site.detect()").stdout.read()
        assert "has no kernels for Tesla V100-SXM2-16GB: CUDA 13.0 begins at compute capability 7.5" in refused
    with Machine(home, "h100-80g", driver_version=12040) as machine:
        assert (
            "The NVIDIA driver on your system is too old (found version 12040)"
            in start(machine, launches).stdout.read()
        )


def test_a_missing_function_is_named(home: Path, start: Start) -> None:
    """With the library that asks for it, in the program's standard error."""
    with Machine(home, "h100-80g") as machine:
        shares = start(machine, "torch.zeros(4, device='cuda').untyped_storage()._share_cuda_()")
        said = shares.stdout.read()
        assert re.search(r"emulated card: cudaIpcGetMemHandle is not emulated; \S+/libc10_cuda.so asks for it", said)


def test_no_virtual_memory(home: Path, start: Start) -> None:
    """As under WSL2: expandable segments fail, and others do not."""
    program = """
        import json
        try:
            answer = torch.ones(4, device="cuda").numel()
        except RuntimeError as error:
            answer = str(error)
        print(json.dumps(answer))
    """
    with Machine(home, "rtx-4090:no-vmm") as machine:
        assert start(machine, program).answer() == 4
        failed = start(machine, program, PYTORCH_ALLOC_CONF="expandable_segments:True").answer()
        assert failed.startswith("CUDA driver error: operation not supported")


FAULTY = """
    import json
    x = torch.zeros(4, device="cuda")
    print("ready")
    input()
    answer = []
    for _ in range(4):
        try:
            x += 1
            torch.cuda.synchronize()
            answer.append("works")
        except RuntimeError as error:
            answer.append(str(error).splitlines()[0])
    print(json.dumps(answer))
"""


@pytest.mark.parametrize(
    ("code", "words"),
    [(214, "uncorrectable ECC error encountered"), (700, "an illegal memory access was encountered")],
)
def test_an_error_stays_with_the_process_that_meets_it(home: Path, start: Start, code: int, words: str) -> None:
    """From the launch that was asked for; the driver counts those of memory, and other processes go on."""
    counts = """
        pynvml.nvmlInit()
        print(pynvml.nvmlDeviceGetTotalEccErrors(pynvml.nvmlDeviceGetHandleByIndex(0), 1, 0))
    """
    with Machine(home, "h100-80g") as machine:
        meets, spared = start(machine, FAULTY), start(machine, FAULTY)
        assert (meets.line(), spared.line()) == ("ready", "ready")
        machine.error(0, code, after_launches=2)
        meets.go_on()
        assert meets.answer() == ["works", "works", f"CUDA error: {words}", f"CUDA error: {words}"]
        spared.go_on()
        assert spared.answer() == ["works"] * 4
        assert start(machine, counts).answer() == (code == 214)


def test_a_card_fails_to_allocate(home: Path, start: Start) -> None:
    """From the allocation that was asked for, until it is told to stop."""
    program = """
        import json
        answer = []
        for mib in (100, 200, 300):
            try:
                answer.append(torch.empty(mib << 20, dtype=torch.uint8, device="cuda").numel() >> 20)
            except torch.OutOfMemoryError:
                print("out of memory")
                input()
            torch.cuda.empty_cache()
        print(json.dumps(answer))
    """
    with Machine(home, "h100-80g") as machine:
        machine.fail_allocation(0, at=2)
        allocates = start(machine, program)
        assert allocates.line() == "out of memory"
        machine.fail_allocation(0, at=0)
        allocates.go_on()
        assert allocates.answer() == [100, 300]


def test_a_card_is_taken_away(home: Path, start: Start) -> None:
    """CUDA and NVML say so, each in its way."""
    looks = """
        pynvml.nvmlInit()
        try:
            pynvml.nvmlDeviceGetHandleByIndex(0)
        except pynvml.NVMLError as error:
            print(error)
    """
    with Machine(home, "h100-80g") as machine:
        program = start(machine, FAULTY)
        assert program.line() == "ready"
        machine.take_away(0)
        program.go_on()
        assert set(program.answer()) == {"CUDA error: CUDA-capable device(s) is/are busy or unavailable"}
        assert start(machine, looks).line() == "GPU is lost"


def test_a_driver_hangs(home: Path, start: Start) -> None:
    """A program that waits for the card waits until it is killed."""
    with Machine(home, "h100-80g") as machine:
        program = start(machine, FAULTY)
        assert program.line() == "ready"
        machine.hang(0)
        program.go_on()
        assert not program.ends_within(0.5)
        machine.hang(0, False)
        assert program.answer() == ["works"] * 4


def test_a_card_is_throttled(home: Path, start: Start) -> None:
    """As NVML shows it."""
    looks = """
        import json
        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        clocks = [pynvml.nvmlDeviceGetClockInfo(card, 1), pynvml.nvmlDeviceGetMaxClockInfo(card, 1)]
        print(json.dumps([pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(card), *clocks]))
    """
    with Machine(home, "h100-80g") as machine:
        machine.throttle(0, reasons=0x40, clock_mhz=600)
        assert start(machine, looks).answer() == [0x40, 600, 1980]


def test_time_is_that_of_the_device(home: Path, start: Start) -> None:
    """Work on one device takes none on another, and times of two devices are not compared."""
    program = """
        import json
        def timed(device, work):
            with torch.cuda.device(device):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                work()
                end.record()
                return begin, end
        fast, slow = (torch.zeros(2**28, device=device) for device in ("cuda:0", "cuda:1"))
        both = timed(0, lambda: fast.add_(1)), timed(1, lambda: slow.add_(1)), timed(1, lambda: fast.add_(1))
        answer = [begin.elapsed_time(end) for begin, end in both]
        try:
            both[0][0].elapsed_time(both[1][1])
        except RuntimeError as error:
            answer.append(str(error).splitlines()[0])
        print(json.dumps(answer))
    """
    with Machine(home, "h100-80g", "t4") as machine:
        fast, slow, none, refused = start(machine, program).answer()
        assert 8 < slow / fast < 12  # 3,350 and 320 GB/s
        assert none == 0
        assert "resource handle" in refused


def test_ranks_are_split_by_colour(home: Path, start: Start) -> None:
    """And ordered by their keys, as NCCL does."""
    program = r"""
        import ctypes
        nccl = ctypes.CDLL("libnccl.so.2")
        class Id(ctypes.Structure):
            _fields_ = [("internal", ctypes.c_char * 128)]
        one, world, group, count, place = Id(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        nccl.ncclGetUniqueId(ctypes.byref(one))
        rank = next((rank for rank in range(1, 4) if os.fork() == 0), 0)
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
        assert nccl.ncclCommInitRank(ctypes.byref(world), 4, one, rank) == 0
        color, key = [(7, 2), (7, 1), (-1, 0), (3, 0)][rank]
        assert nccl.ncclCommSplit(world, color, key, ctypes.byref(group), None) == 0
        if group:
            nccl.ncclCommCount(group, ctypes.byref(count))
            nccl.ncclCommUserRank(group, ctypes.byref(place))
        os.write(1, f"{rank} {count.value} {place.value if group else None}\n".encode())
        os._exit(0)
    """
    with Machine(home, *["h100-80g"] * 4) as machine:
        lines = start(machine, program).stdout.read().splitlines()
        assert sorted(lines) == ["0 2 1", "1 2 0", "2 0 None", "3 1 0"]


TWO_RANKS = r"""
    import ctypes
    nccl = ctypes.CDLL("libnccl.so.2")
    class Id(ctypes.Structure):
        _fields_ = [("internal", ctypes.c_char * 128)]
    one, world = Id(), ctypes.c_void_p()
    nccl.ncclGetUniqueId(ctypes.byref(one))
    rank = int(os.fork() == 0)
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    assert nccl.ncclCommInitRank(ctypes.byref(world), 2, one, rank) == 0
    def reduce(count):
        sent = ctypes.c_void_p(torch.zeros(count, device="cuda").data_ptr())
        return nccl.ncclAllReduce(sent, sent, ctypes.c_size_t(count), 7, 0, world, None)
"""


def test_ranks_that_send_different_sizes_are_told(home: Path, start: Start) -> None:
    program = f'{TWO_RANKS}    os.write(1, f"{{rank}}: {{reduce(8)}} {{reduce(8 + rank)}}\\n".encode()); os._exit(0)'
    with Machine(home, "h100-80g", "h100-80g") as machine:
        said = start(machine, program).stdout.read()
    assert re.findall(r"^(\d: .*)$", said, re.MULTILINE) in (["0: 0 5", "1: 0 5"], ["1: 0 5", "0: 0 5"])
    assert "differ in collective 1" in said


def test_a_rank_that_does_not_come_is_waited_for(home: Path, start: Start) -> None:
    program = f"""{TWO_RANKS}
    os.write(1, f"{{rank}}\\n".encode())
    if rank == 0:
        reduce(8)
        os.write(1, b"reduced")
    else:
        input()
    """
    with Machine(home, "h100-80g", "h100-80g") as machine:
        waits = start(machine, program)
        assert sorted([waits.line(), waits.line()]) == ["0", "1"]
        assert not waits.ends_within(0.5)


def test_unknown_cards() -> None:
    """One line says what is known."""
    with pytest.raises(UsageError, match="unknown emulated card 'h100': did you mean h200 or h100-80g"):
        described("h100", 0)
    with pytest.raises(UsageError, match=r"unknown trait of h100-80g '1g.11gb': did you mean 1g.10gb"):
        Machine(Path("/nowhere"), "h100-80g:1g.11gb")
    with pytest.raises(UsageError, match="8 cards and instances at most, and these are 9"):
        Machine(Path("/nowhere"), *["t4"] * 9)
    with pytest.raises(UsageError, match="no emulated card is built in /nowhere: make emulated-card"):
        Machine(Path("/nowhere"), "t4")


def test_the_card_is_small() -> None:
    """At most 1,500 lines of C, so that it can be read."""
    sources = [*Path(build.__file__).parent.glob("*.[ch]")]
    assert sum(len(source.read_text().splitlines()) for source in sources) <= 1500


def test_a_torch_of_another_cuda(home: Path, tmp_path: Path) -> None:
    """Is not built for."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.0+cu126'\ncuda: Optional[str] = '12.6'\n")
    with pytest.raises(
        SystemExit, match=r"torch 2.9.0\+cu126 is built for CUDA 12.6, and the headers are those of CUDA 13.0"
    ):
        build.check_version(tmp_path, home / "headers")


def test_as_a_command(home: Path) -> None:
    """The command takes signals, and its status is returned."""
    program = (
        "import os; print(os.getpid(), os.path.exists(os.environ['EMULATED_CARDS']), flush=True); input(); exit(3)"
    )
    command = [sys.executable, cards.__file__, "--home", str(home), "t4", sys.executable, "-c", program]
    for is_stopped in (False, True):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None and running.stdin is not None
            assert running.stdout.readline().split() == [str(running.pid), "True"]
            if is_stopped:
                running.terminate()
            else:
                print(3, file=running.stdin, flush=True)
            assert running.wait() == (-signal.SIGTERM if is_stopped else 3)
