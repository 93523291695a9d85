"""What `autofit doctor` checks: everything a trial needs, each with the command that fixes it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from autofit import __version__
from autofit.core.device.hardware import Hardware, Stack
from autofit.core.distribution import install, stranger
from autofit.core.document import Document
from autofit.core.errors import AutofitError, EnvironmentLacks
from autofit.core.units import GIB, format_bytes
from autofit.planning.requests import WorkloadOptions
from autofit.training.prerequisites import native_ops
from autofit.trial.machine.detection import detect, version


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Document):
    """One thing that was looked at."""

    name: str
    state: str
    """`ok`; `optional`: absent, and not asked for; `missing`: absent, or broken; `skipped`."""
    found: str
    remedy: str = ""


def examine(
    *,
    store: str | None,
    device: str,
    with_ray: bool,
    build_ops: bool = False,
    portable: bool = False,
    quick: bool = False,
) -> list[Check]:
    """Check everything that a search needs on this machine; never raises for anything missing.

    With `build_ops`, DeepSpeed's native operations are compiled first, a minute each, if `portable` for other
    processors too; whatever then prevents every offload is missing. If `quick`, what takes seconds is skipped.
    """
    package = _package()
    try:
        hardware, stack = detect(device)
    except EnvironmentLacks as error:
        return [package, Check(name="device", state="missing", found=error.message, remedy=error.remedy)]
    found = f"{hardware.name}: {hardware.device_name}, {format_bytes(hardware.memory_bytes)}"
    checks = [
        package,
        Check(name="device", state="ok", found=found),
        *libraries(hardware, stack, offload=build_ops),
        *(_operation(name, build_ops, portable) for name in native_ops.operations() if stack.deepspeed is not None),
        _attempt("store", lambda: _store(store), "check --store or AUTOFIT_STORE"),
        _disk(),
    ]
    lasting = {"trial": (lambda: _trial(device, hardware), "the message says which library fails")}
    if with_ray:
        lasting["ray"] = (lambda: _ray(device), install())
    if quick:
        skipped = "not checked, because it takes long"
        return checks + [Check(name=name, state="skipped", found=skipped) for name in lasting]
    return checks + [_attempt(name, *check) for name, check in lasting.items()]


def _package() -> Check:
    if (error := stranger()) is not None:
        return Check(name="autofit", state="missing", found=error.message, remedy=error.remedy)
    return Check(name="autofit", state="ok", found=__version__)


def libraries(hardware: Hardware, stack: Stack, *, offload: bool = False) -> list[Check]:
    """The libraries that training and searching on `hardware` use; with `offload`, DeepSpeed is needed."""
    versions: dict[str, Any] = stack.to_json() | {name: version(name) for name in ("optuna", "sqlalchemy", "alembic")}
    required = ("torch", "transformers", "peft", "bitsandbytes", "optuna", "sqlalchemy", "alembic")
    rows = [(name, True, install()) for name in required] + [("deepspeed", offload, install())]
    if hardware.kind == "cuda":
        rows.append(("liger_kernel", False, install("cuda")))
        # Its build imports torch, which an isolated one lacks.
        rows.append(("flash_attn", False, install("flash", options="--no-build-isolation ")))
    return [
        Check(name=name, state="ok", found=found)
        if (found := versions[name])
        else Check(name=name, state="missing" if needed else "optional", found="not installed", remedy=remedy)
        for name, needed, remedy in rows
    ]


def _operation(name: str, build: bool, portable: bool = False) -> Check:
    """One of DeepSpeed's native operations, which only configs that offload need."""
    title = f"deepspeed {name}"
    try:
        if build:
            native_ops.build(name, portable=portable)
        hindrance = native_ops.hindrance(name)
        if hindrance is None and native_ops.is_built(name):
            return Check(name=title, state="ok", found="compiled")
    except EnvironmentLacks as error:
        hindrance = error
    if hindrance is not None:
        state = "missing" if build and name in native_ops.OF_EVERY_OFFLOAD else "optional"
        return Check(name=title, state=state, found=hindrance.message, remedy=hindrance.remedy)
    return Check(name=title, state="optional", found="not compiled", remedy=native_ops.COMMAND)


def _attempt(name: str, check: Callable[[], str], remedy: str) -> Check:
    try:
        return Check(name=name, state="ok", found=check())
    except (AutofitError, OSError, ImportError) as error:
        return Check(name=name, state="missing", found=str(error), remedy=getattr(error, "remedy", remedy))


def _store(url: str | None) -> str:
    """What the store holds. A missing one is not created here: the first search does that."""
    from autofit.store import NoStore, Store, place

    try:
        with Store.open(url, create=False) as opened:
            return f"{opened.count()} trials"
    except NoStore:
        path = place(url)
    if path is None:
        return "none yet in this database: the first search creates it"
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise EnvironmentLacks(
            f"no store can be created at {path}: {folder} is not a writable folder",
            remedy="name another store with --store or AUTOFIT_STORE",
        )
    return f"none yet at {path}: the first search creates it"


def _disk() -> Check:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    found = f"{format_bytes(free)} free in {folder}"
    if free >= GIB:
        return Check(name="disk", state="ok", found=found)
    return Check(name="disk", state="missing", found=found, remedy=f"free some space in {folder}")


def _trial(device: str, hardware: Hardware) -> str:
    """The smallest real trial, which shows that child processes start, train and report."""
    from autofit.core.outcome import Fits
    from autofit.operations.single_trial import trial
    from autofit.techniques import complete
    from autofit.techniques.axes.precision import has_bf16

    precision = "bf16" if has_bf16(hardware) else "fp16-mixed"
    options = WorkloadOptions(model="smollm2-135m", seq_len=16, global_batch=1)
    done = trial(options, complete({"precision": precision, "method": "lora"}), device=device)
    if not isinstance(done.outcome, Fits):
        raise EnvironmentLacks(f"a small trial ended with {done.outcome.kind}", remedy=done.outcome.reason)
    return f"a small trial ran in {done.seconds:.1f} s"


def _ray(device: str) -> str:
    from autofit.workers.ray_pool import RayPool

    with closing(RayPool(device=device)) as pool:
        hardware, _ = pool.site()
        return f"{pool.size} worker on {hardware.name}"
