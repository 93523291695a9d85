"""Which failures are want of memory, whose memory it was, and which say nothing about the config."""

from __future__ import annotations

import errno

import pytest
import torch
from unit.trial.fake_cuda import TOTAL, install_cuda

from autofit.core.outcome import Crashed, OutOfMemory
from autofit.core.units import GIB, MIB
from autofit.trial.limits.host_memory import host_shortage
from autofit.trial.measure.meter import CudaMeter
from autofit.trial.process import classify
from autofit.trial.process.classify import (
    DeviceBusy,
    OverLimit,
    device_failure,
    disk_failure,
    ended_without_result,
    memory_failure,
)

CUDA_TEXT = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 23.44 GiB\nmore"


def on_gpu(error: Exception) -> OutOfMemory | Crashed | None:
    return memory_failure(error, "backward", host_is_device=False)


def died(
    status: int, stderr: str = "", *, kernel_oom_kills: int | None = 0, on_cpu: bool = False, short_bytes: int = 0
) -> OutOfMemory | Crashed:
    """The outcome of a child that ended so in its backward pass."""
    return ended_without_result(
        status=status,
        phase="backward",
        room=None,
        stderr=stderr,
        kernel_oom_kills=kernel_oom_kills,
        host_is_device=on_cpu,
        short_bytes=short_bytes,
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError(CUDA_TEXT), "CUDA out of memory."),
        (
            RuntimeError(f"backend='inductor' raised:\nOutOfMemoryError: {CUDA_TEXT}"),
            "OutOfMemoryError: CUDA out of memory.",
        ),
    ],
)
def test_the_allocators_refusal_also_inside_the_compilers_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    fake = install_cuda(monkeypatch)
    CudaMeter().enforce(8 * GIB)
    fake.use(allocated=7 * GIB)
    outcome = on_gpu(error)
    assert isinstance(outcome, OutOfMemory)
    # There is room on the card beyond the limit, but it is not the host that has none.
    assert (outcome.phase, outcome.requested_bytes, outcome.host) == ("backward", 3 * GIB // 2, False)
    assert outcome.reason.startswith(reason) and "\n" not in outcome.reason


def test_torch_tells_what_share_of_the_card_is_allowed() -> None:
    assert callable(torch.cuda.get_per_process_memory_fraction), "else the memory that others took would go unnoticed"


def test_the_allocators_refusal_because_others_took_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install_cuda(monkeypatch)
    CudaMeter().enforce(20 * GIB)
    fake.use(allocated=7 * GIB)
    fake.others_take(10 * GIB)
    outcome = on_gpu(torch.OutOfMemoryError(CUDA_TEXT))
    assert isinstance(outcome, Crashed) and outcome.transient
    assert "other processes took" in outcome.reason


@pytest.mark.parametrize(("later", "kind"), [(0, OutOfMemory), (4 * GIB, Crashed)])
def test_what_others_held_before_was_not_taken_meanwhile(
    monkeypatch: pytest.MonkeyPatch, later: int, kind: type[OutOfMemory | Crashed]
) -> None:
    """As on an AMD card that has a desktop, too: nothing says who holds what, and no limit is set."""
    fake = install_cuda(monkeypatch, others=3 * GIB, nvml=False)
    CudaMeter().enforce(TOTAL)
    fake.use(allocated=TOTAL - 4 * GIB - later)
    fake.others_take(later)
    assert isinstance(on_gpu(torch.OutOfMemoryError(CUDA_TEXT)), kind)


def test_a_full_disk_is_not_the_configs_fault() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/tmp/kernel.so")
    wrapped = RuntimeError("inductor failed")
    wrapped.__cause__ = full
    for error in (full, wrapped, RuntimeError("OSError: [Errno 122] Disk quota exceeded: '/home/user/.triton'")):
        outcome = disk_failure(error, "forward", "where")
        assert outcome is not None and outcome.transient and outcome.stderr_tail == "where", error
    handled = ValueError("hidden size 3 is no multiple of 2")
    handled.__context__, handled.__suppress_context__ = full, True
    for error in (handled, PermissionError(errno.EACCES, "Permission denied", "/home/user/.triton")):
        assert disk_failure(error, "forward", "where") is None, "others may do without"


@pytest.mark.parametrize(("used", "host"), [(1 * GIB, True), (TOTAL - 1000 * MIB, False)])
def test_cuda_out_of_memory_beside_the_allocator(monkeypatch: pytest.MonkeyPatch, used: int, host: bool) -> None:
    fake = install_cuda(monkeypatch)
    CudaMeter()
    fake.use(allocated=used)
    fake.load_kernels(200 * MIB)
    outcome = on_gpu(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."))
    assert isinstance(outcome, OutOfMemory) and outcome.host is host


@pytest.mark.parametrize("sign", ["CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED"])
def test_no_handle_on_a_full_device_is_want_of_memory(monkeypatch: pytest.MonkeyPatch, sign: str) -> None:
    fake = install_cuda(monkeypatch)
    CudaMeter()
    error = RuntimeError(f"CUDA error: {sign} when calling `cublasCreate(handle)`")
    assert on_gpu(error) is None
    fake.use(allocated=TOTAL - 600 * MIB)
    assert isinstance(on_gpu(error), OutOfMemory)


OF_THE_DEVICE = [
    "Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUDA API failed with status 2",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
]


@pytest.mark.parametrize("message", OF_THE_DEVICE)
@pytest.mark.parametrize("status", [1, -6])
def test_words_that_mean_the_devices_memory_alone(monkeypatch: pytest.MonkeyPatch, message: str, status: int) -> None:
    install_cuda(monkeypatch)  # a card with room: its state decides nothing here
    CudaMeter()
    raised = on_gpu(RuntimeError(f"while it trained\n{message}\nmore"))
    left = died(status, f"begins\n{message}\nterminate called")
    for outcome in (raised, left):
        assert isinstance(outcome, OutOfMemory) and not outcome.host, outcome
        assert outcome.reason == message


@pytest.mark.parametrize(
    "message",
    [
        "CUDA API failed with status 209",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "Error invalid argument at line 380 in file /src/csrc/pythonInterface.cpp",
    ],
)
def test_other_words_of_the_same_libraries_are_a_crash(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    install_cuda(monkeypatch)
    left = died(1, message)
    assert on_gpu(RuntimeError(message)) is None and isinstance(left, Crashed)


def no_kernel_image() -> RuntimeError:
    error = RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")
    error.error_code = 209  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize("torch_has_some", [False, True])
def test_torch_without_kernels_for_the_card_is_not_the_configs_fault(
    monkeypatch: pytest.MonkeyPatch, torch_has_some: bool
) -> None:
    def zeros(*sizes: int, device: str) -> torch.Tensor:
        if not torch_has_some:
            raise no_kernel_image()
        return torch.ones(*sizes)

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    failure = device_failure(no_kernel_image(), "build")
    if torch_has_some:  # it is another library, which the config chose, that has none
        assert failure is None
        return
    assert failure is not None and failure.transient
    assert failure.reason == (
        "torch 2.12.0 has no kernels for Tesla V100 (compute capability 7.0; it has sm_75, sm_80): "
        "install another build (TORCH_INDEX)"
    )


def test_what_nobody_caught_is_told_of_an_abort() -> None:
    stderr = "terminate called after throwing an instance of 'c10::Error'\n  what():  the ring is broken\nFrame #0\n"
    outcome = died(-6, stderr)
    assert isinstance(outcome, Crashed) and not outcome.transient
    assert outcome.reason == "the trial's process died of SIGABRT: what():  the ring is broken"


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    outcome = died(-40)
    assert isinstance(outcome, Crashed) and outcome.signal == "signal 40"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_host_memory_is_not_the_devices(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    install_cuda(monkeypatch)
    on_card, on_cpu = on_gpu(error), memory_failure(error, "build", host_is_device=True)
    assert isinstance(on_card, OutOfMemory) and on_card.host
    assert isinstance(on_cpu, OutOfMemory) and not on_cpu.host


def test_what_the_meter_says() -> None:
    over, busy = on_gpu(OverLimit("9 of 8 GiB")), on_gpu(DeviceBusy("others hold 5 GiB"))
    assert isinstance(over, OutOfMemory) and over.reason == "9 of 8 GiB"
    assert isinstance(busy, Crashed) and busy.transient


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes cannot be multiplied"), ValueError("out of memory"), KeyError()]
)
def test_other_errors_are_not_memory(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    install_cuda(monkeypatch)
    assert on_gpu(error) is None


@pytest.mark.parametrize(
    ("message", "transient"),
    [
        ("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be ...", True),
        ("CUDA error: unspecified launch failure", False),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("Error no CUDA-capable device is detected at line 62 in file /src/csrc/ops.cu", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: device-side assert triggered", False),
    ],
)
def test_a_fault_of_the_device_is_not_the_configs(message: str, transient: bool) -> None:
    raised = device_failure(RuntimeError(message), "backward")
    assert (raised is not None and raised.transient) == transient
    left = died(1, f"\n{message}\n")
    assert isinstance(left, Crashed) and left.transient == transient
    assert not transient or left.reason.startswith("the device has failed: ")


def test_a_kill_that_the_kernel_booked() -> None:
    outcome = died(-9, kernel_oom_kills=1)
    assert isinstance(outcome, OutOfMemory) and outcome.host and outcome.signal == "SIGKILL"


def test_a_kill_that_nobody_booked() -> None:
    assert isinstance(died(-9, kernel_oom_kills=None), OutOfMemory)
    outcome = died(-9, kernel_oom_kills=0)
    assert isinstance(outcome, Crashed) and outcome.transient


def test_a_kill_because_others_held_the_host() -> None:
    outcome = died(-9, kernel_oom_kills=1, short_bytes=3 * GIB)
    assert isinstance(outcome, Crashed) and outcome.transient
    assert "3.00 GiB of what the limit allows were already taken" in outcome.reason


@pytest.mark.parametrize("status", [1, -6])
@pytest.mark.parametrize(
    ("stderr", "host"),
    [
        ("[Rank 0] Watchdog caught: CUDA error: out of memory\nterminate called", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("terminate called after throwing an instance of 'std::bad_alloc'", True),
        ("cc1: out of memory allocating 65536 bytes", True),
    ],
)
def test_whose_memory_a_death_without_a_result_was_about(status: int, stderr: str, host: bool) -> None:
    on_card, on_processor = died(status, stderr), died(status, stderr, on_cpu=True)
    assert isinstance(on_card, OutOfMemory) and on_card.host is host
    assert isinstance(on_processor, OutOfMemory) and not on_processor.host


@pytest.mark.parametrize(
    ("ranks", "available", "short"), [(1, 8, 0), (1, 3, 5), (2, 16, 0), (2, 11, 5), (2, 6, 10), (4, 6, 26)]
)
def test_a_host_that_is_short_of_all_ranks_limits_says_nothing_of_the_config(
    ranks: int, available: int, short: int
) -> None:
    short_bytes = host_shortage(8 * GIB, ranks, available * GIB)
    assert short_bytes == short * GIB
    assert isinstance(died(-9, kernel_oom_kills=1, short_bytes=short_bytes), Crashed if short else OutOfMemory)


def test_without_the_kernels_word_nothing_is_short() -> None:
    assert host_shortage(8 * GIB, 1, None) == 0


def test_kernel_books_are_read_where_there_are_any() -> None:
    booked = classify.kernel_oom_kills()
    assert booked is None or booked >= 0
