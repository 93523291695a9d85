"""Turns what a child left behind into a typed outcome."""

from __future__ import annotations

import errno
import os
import re
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from autofit.core.errors import in_one_line
from autofit.core.outcome import Crashed, Outcome, OutOfMemory, TimedOut
from autofit.core.units import GIB, MIB, format_bytes
from autofit.trial.limits.control_groups import numbers
from autofit.trial.measure import process_memory

_DEVICE_REQUEST = re.compile(r"^.*out of memory\. Tried to allocate ([\d.]+) (bytes|[KMGT]iB).*$", re.MULTILINE)
"""The line with which torch's allocator refuses, in the message of any exception that carries it."""
_CPU_REQUEST = re.compile(r"you tried to allocate (\d+) bytes")
_UNITS = {"bytes": 1, "KiB": 1024, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}
NO_ROOM_BYTES = 64 * MIB
"""With less than this left, an ambiguous failure counts as out of memory: oneDNN's scratch space is a few MiB."""


def _sign(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


_HOST = _sign(
    "can't allocate memory|cannot allocate memory|not enough memory|failed to allocate memory"
    "|std::bad_alloc|could not create a memory object"
)
"""Messages of torch, oneDNN, glibc and Python when a host allocation fails."""
_AMBIGUOUS = _sign("could not (create|execute) a primitive")
"""oneDNN reports this when its own allocation fails, and also for operations that it does not support."""
_ON_STDERR = _sign(f"{_HOST.pattern}|memoryerror|thread creation failed|out of memory")
_DEVICE_ALONE = _sign(
    r"(cuda|hip) driver error: out of memory|triton error \[(cuda|hip)\]: out of memory"
    r"|error out of memory at line \d+ in file"  # bitsandbytes, which then exits
    r"|cuda api failed with status 2\b"  # bitsandbytes: cudaErrorMemoryAllocation
    "|cudnn_status_alloc_failed|device_allocation_failed"  # cuDNN 8 and 9
)
"""These mean the device's memory and nothing else, in an exception and on standard error."""
_DEVICE = _sign(f"{_DEVICE_ALONE.pattern}|(cuda|hip) (error: )?out of memory|cublas_status_alloc_failed")
"""On standard error, these count as the device's. CUDA reports page-locked host memory that it could not get in the
same words: where a process left nothing else, nothing tells the two apart."""
_DRIVER = _sign("out of memory|cublas_status_alloc_failed")
"""Messages of CUDA and cuBLAS when an allocation outside torch's allocator fails."""
_HANDLE = _sign("(cublas|cudnn|cusolver)_status_not_initialized")
"""Errors when creating a library's handle on a full device, though they have other causes too."""
_FAULT = _sign(
    "no (cuda|rocm)-capable device is detected|no cuda gpus are available"
    "|cuda unknown error|(cuda|hip) error: unknown error|cuda driver initialization failed"
    r"|cuda-capable device(\(s\) is/are|s are) busy or unavailable"
    "|uncorrectable (ecc|nvlink) error|gpu is lost|driver shutting down|system not yet initialized"
)
"""Messages of CUDA and HIP when the device or its driver fails, or another process has it to itself (CUDA runtime API,
cudaError). An illegal access, an unspecified launch failure, which mostly is one too, and a failed assertion on the
device are not among them: those are faults of what runs there."""
DEVICE_GONE = "the device is gone"
"""The beginning of the reason where the driver no longer answers for a device."""
NO_KERNELS = "has no kernels for"
"""Part of the reason where the installed torch was not built for the device."""
LATE_LOADED_BYTES = 2 * GIB
"""Kernels that libraries load after the context is created take a few hundred MiB; more is another process's."""
LAUNCH = "launch"
"""The phase of a user's program that has not yet reported to its trial."""
HOW_TO_REPORT = (
    "add callbacks=[autofit.TrainerCallback()] to the Trainer, or call autofit.step() after each optimizer step"
)
STOPPED = "stopped, because another rank had failed"

_DISK_FULL = errno.ENOSPC, errno.EDQUOT


class OverLimit(Exception):
    """The trial's memory exceeds its limit, though no allocation failed."""


class DeviceBusy(Exception):
    """Other processes hold device memory that the trial was promised."""


def memory_failure(error: BaseException, phase: str, *, host_is_device: bool) -> OutOfMemory | Crashed | None:
    """The outcome for `error` if memory is its cause; None for any other error."""
    if isinstance(error, OverLimit):
        return OutOfMemory(reason=str(error), phase=phase)
    if isinstance(error, DeviceBusy):
        return Crashed(reason=str(error), phase=phase, transient=True)
    return (
        _by_torchs_allocator(error, phase)
        or _by_the_host(error, phase, host_is_device=host_is_device)
        or _by_the_driver(error, phase, host_is_device=host_is_device)
    )


def _by_torchs_allocator(error: BaseException, phase: str) -> OutOfMemory | Crashed | None:
    import torch

    text = str(error)
    match = _DEVICE_REQUEST.search(text)
    if isinstance(error, torch.OutOfMemoryError) or match:  # torch.compile wraps it in an error of its own
        if (missing := _taken_by_others()) > LATE_LOADED_BYTES:
            reason = f"other processes took {format_bytes(missing)} of the device while the trial ran"
            return Crashed(reason=reason, phase=phase, transient=True)
        requested = int(float(match[1]) * _UNITS[match[2]]) if match else None
        return OutOfMemory(reason=_first_line(match[0] if match else text), phase=phase, requested_bytes=requested)
    line = _last_line(text, _DEVICE_ALONE)
    return None if line is None else OutOfMemory(reason=line, phase=phase)


def _by_the_host(error: BaseException, phase: str, *, host_is_device: bool) -> OutOfMemory | None:
    text, room = str(error), process_memory.room()
    ambiguous = _AMBIGUOUS.search(text) and room is not None and room < NO_ROOM_BYTES
    if not (isinstance(error, MemoryError) or _HOST.search(text) or ambiguous):
        return None
    match = _CPU_REQUEST.search(text)
    requested = int(match[1]) if match else None
    reason = _first_line(text or "MemoryError")
    return OutOfMemory(reason=reason, phase=phase, requested_bytes=requested, host=not host_is_device)


def _by_the_driver(error: BaseException, phase: str, *, host_is_device: bool) -> OutOfMemory | None:
    """The outcome for what the driver, or a library for its handle, could not get."""
    if not isinstance(error, RuntimeError):
        return None
    text, free = str(error), None if host_is_device else _device_free()
    # Libraries' handles, workspaces and kernels are of that order.
    device_is_full = free is None or free < 512 * MIB
    if _DRIVER.search(text):
        # With room on the device, what CUDA failed to get is page-locked host memory.
        return OutOfMemory(reason=_first_line(text), phase=phase, host=not host_is_device and not device_is_full)
    if free is not None and device_is_full and _HANDLE.search(text):
        return OutOfMemory(reason=_first_line(text), phase=phase)
    return None


def device_failure(error: BaseException, phase: str) -> Crashed | None:
    """The outcome for `error` if the device itself has failed, or torch was not built for it: neither says anything
    about the config. None for any other error."""
    if _has_no_kernel_image(error) and (reason := _why_no_kernels()):
        return Crashed(reason=reason, phase=phase, transient=True)
    if _FAULT.search(str(error)):
        return Crashed(reason=f"the device has failed: {_first_line(str(error))}", phase=phase, transient=True)
    return None


def disk_failure(error: BaseException, phase: str, stderr: str) -> Crashed | None:
    """The outcome for `error` if the disk is full, which says nothing about the config; None for any other error."""
    causes = [error, error.__cause__, None if error.__suppress_context__ else error.__context__]
    is_full = any(isinstance(cause, OSError) and cause.errno in _DISK_FULL for cause in causes)
    if is_full or any(os.strerror(code) in str(error) for code in _DISK_FULL):
        return Crashed(reason=in_one_line(error), phase=phase, stderr_tail=stderr, transient=True)
    return None


def _has_no_kernel_image(error: BaseException) -> bool:
    """Whether a kernel was begun that has no code for the device (cudaErrorNoKernelImageForDevice and
    hipErrorNoBinaryForGpu are 209)."""
    return getattr(error, "error_code", None) == 209 or "no kernel image is available" in str(error)


def _why_no_kernels() -> str | None:
    """What the installed torch lacks for the current device; None if torch's kernels run, and only those of another
    library that the config chose do not."""
    import torch

    try:
        torch.zeros(1, device="cuda").add_(1)  # the error leaves the device usable
    except RuntimeError as error:
        if not _has_no_kernel_image(error):
            return None
        major, minor = torch.cuda.get_device_capability()
        return (
            f"torch {torch.__version__} {NO_KERNELS} {torch.cuda.get_device_name()} "
            f"(compute capability {major}.{minor}; it has {', '.join(torch.cuda.get_arch_list())}): "
            "install another build (TORCH_INDEX)"
        )
    return None


def device_gone(why: str, outcome: Outcome, phase: str) -> Crashed:
    """The outcome of a trial that ended with `outcome`, not a measurement, on a device that no longer answers."""
    evidence = getattr(outcome, "stderr_tail", "") or getattr(outcome, "reason", "")
    return Crashed(reason=f"{DEVICE_GONE}: {why}", phase=phase, stderr_tail=evidence, transient=True)


def _device_free() -> int | None:
    """Bytes that the driver could still allocate on the current device; None where it does not say."""
    import torch

    with suppress(Exception):  # an error may have left the device unusable
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return int(torch.cuda.mem_get_info()[0])
    return None


def _taken_by_others() -> int:
    """Bytes that the allocator was allowed to take but the device no longer had, beside what others held before."""
    import torch

    with suppress(Exception):  # as above
        free, total = torch.cuda.mem_get_info()
        share = torch.cuda.get_per_process_memory_fraction()
        # A limit leaves out the context and what others hold; where there is none, both count as taken.
        allowed = int(share * total) if share < 1.0 else total - process_memory.device_bytes_taken_before
        return allowed - torch.cuda.memory_reserved() - free - process_memory.paged_bytes()
    return 0


def ended_without_result(
    *,
    status: int,
    phase: str,
    room: int | None,
    stderr: str,
    kernel_oom_kills: int | None,
    host_is_device: bool,
    short_bytes: int = 0,
) -> OutOfMemory | Crashed:
    """The outcome of a child that ended on its own without a result.

    `status` is the exit status, or minus the signal's number, as `os.waitstatus_to_exitcode` gives it;
    `kernel_oom_kills` counts the processes that the kernel killed for memory meanwhile, None where it keeps no count;
    `room` is what was left of the memory limit when the phase began, in bytes; and `short_bytes` is how far the host
    fell short of the memory limits of all ranks when this one began, because others held memory.
    """
    crashed = partial(Crashed, phase=phase, stderr_tail="\n".join(stderr.splitlines()[-20:]))
    host = not host_is_device
    device_line = _last_line(stderr, _DEVICE)
    memory_line = device_line or _last_line(stderr, _ON_STDERR)
    fault_line = next((line for line in stderr.splitlines() if _FAULT.search(line)), None)
    if fault_line is not None and status != -signal.SIGKILL and memory_line is None:
        return crashed(reason=f"the device has failed: {fault_line.strip()[:500]}", transient=True)
    name = None
    if status < 0:
        with suppress(ValueError):  # most real-time signals have no name
            name = signal.Signals(-status).name
        name = name or f"signal {-status}"
    if name == "SIGKILL":
        return _killed(kernel_oom_kills, short_bytes, phase, host=host)
    if status != 0 and memory_line is not None:
        return OutOfMemory(reason=memory_line, phase=phase, signal=name, host=host and device_line is None)
    if name is None:
        return crashed(reason=f"the trial's process exited with status {status} and no result", exit_code=status)
    if room is not None and room < NO_ROOM_BYTES:
        # Much native code does not survive a failed allocation.
        reason = f"the trial's process died of {name} with {max(0, room)} bytes left of its memory limit"
        return OutOfMemory(reason=reason, phase=phase, signal=name, host=host)
    # So the C++ runtime begins the message of an exception that nobody caught, before it aborts.
    message = _last_line(stderr, _sign(r"^\s*what\(\):")) if name == "SIGABRT" else None
    return crashed(reason=f"the trial's process died of {name}{f': {message}' if message else ''}", signal=name)


def _killed(kernel_oom_kills: int | None, short_bytes: int, phase: str, *, host: bool) -> OutOfMemory | Crashed:
    """The outcome of a child that died of SIGKILL, which the kernel sends when memory runs out, as anybody may."""
    crashed = partial(Crashed, phase=phase, signal="SIGKILL", transient=True)
    if kernel_oom_kills == 0:
        return crashed(reason="the trial was killed, but not by the kernel's out-of-memory killer")
    if short_bytes > 0:
        return crashed(
            reason=f"the kernel killed the trial: the host ran out of memory; {format_bytes(short_bytes)} of what the "
            "limit allows were already taken when it began, by other ranks or other processes: name less with "
            "--memory-limit"
        )
    why = "the kernel killed the trial" if kernel_oom_kills else "the trial was killed, probably by the kernel"
    return OutOfMemory(reason=f"{why}: the host is out of memory", phase=phase, signal="SIGKILL", host=host)


def timed_out(*, deadline_seconds: float, phase: str, interrupted: bool = False, **fields: Any) -> TimedOut:
    """The outcome of a child that was killed at its deadline, or when the user interrupted it; `fields` are the
    other fields of the outcome."""
    how = "interrupted" if interrupted else "not finished"
    reason = f"{how} after {round(deadline_seconds, 1):g} s, in phase {phase}"
    if phase == LAUNCH:
        reason += f", without a word from the program: {HOW_TO_REPORT}"
    return TimedOut(reason=reason, deadline_seconds=deadline_seconds, phase=phase, **fields)


def stopped(phase: str) -> Crashed:
    """The outcome of a child that was stopped because another rank of its group had failed."""
    return Crashed(reason=f"{STOPPED}, in phase {phase}", phase=phase, transient=True)


def kernel_oom_kills() -> int | None:
    """Processes that the kernel has killed for memory so far in this control group, or else on this machine; None where
    it does not say."""
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        with suppress(OSError, KeyError):
            return numbers(path)["oom_kill"]
    return None


def kills_since(before: int | None) -> int | None:
    """How many processes the kernel has killed for memory since the count was `before`; None where that is None."""
    return None if before is None else (kernel_oom_kills() or 0) - before


def _first_line(text: str) -> str:
    return text.splitlines()[0][:500] if text else "out of memory"


def _last_line(text: str, sign: re.Pattern[str]) -> str | None:
    lines = (line.strip()[:500] for line in reversed(text.splitlines()) if sign.search(line))
    return next(lines, None)
