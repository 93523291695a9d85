"""Bring what the emulated machine needs, and build its libraries.

    python build.py --home FOLDER [--compiler cc]

`pins.txt` says which wheels: a CUDA build of torch, Triton, and headers. They come from the package index; none of
CUDA's libraries does, but for the assembler and CUPTI that Triton brings, which nothing loads. Every function that
torch and bitsandbytes ask of those gets one: those of the C files beside this one; those of `nothing.txt`, which
succeed without doing anything; and for the rest one that says its name and fails. Each library is built under the
name that CUDA has for it, so that nothing need be told of it but the path to look in.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

HERE = Path(__file__).parent
INCLUDE = Path("nvidia", "cu13", "include")
SHARED = "libemulated.so"
SHARED_SOURCES = ("machine", "memory", "kernels", "facts")
SOURCES = {
    "libcudart": "runtime",
    "libcuda": "driver",
    "libnvidia-ml": "nvml",
    "libcublas": "products",
    "libcublasLt": "products_lt",
    "libnccl": "nccl",
}
"""The C file that a library has, beside what is made here."""
UNVERSIONED = {
    r"nccl\w+": "libnccl.so.2",
    r"nvshmem\w+": "libnvshmem_host.so.3",
    r"cusparseLt\w+": "libcusparseLt.so.0",
    r"cuFile\w+": "libcufile.so.0",
    r"cu[A-Z]\w+": "libcuda.so.1",
}
"""Whose function it is that a library asks for by its name alone."""
MADE = re.compile(r"cu\w+(Create\w*|Instantiate\w*|Module(Load\w*|GetFunction)|Library(LoadData|GetKernel))(?<!Plan)")
"""What makes a handle, which its caller may look into."""
ALWAYS: dict[str, tuple[str, ...]] = {
    "libcuda.so.1": (
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemRetainAllocationHandle",
        "cuMemGetAllocationPropertiesFromHandle",
    ),
    "libnvidia-ml.so.1": ("nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetNvLinkRemotePciInfo_v2"),
    "libcurand.so.10": (),
    "libnccl.so.2": (),
}
"""Libraries and functions that are looked for by name: torch demands that these are there (c10/cuda/driver_api.h)."""
NOT_SUPPORTED = {"libnvidia-ml": 3}
"""What a function answers that is not emulated: NVML_ERROR_NOT_SUPPORTED, and for all others cudaErrorNotSupported."""
CANNOT_BE_HAD = 3
"""The exit code where a wheel, or a compiler, is not to be had here."""
SOURCES_DIGEST = "sources.sha256"
"""A file beside the libraries that says what they were built from."""


def main() -> None:
    """Bring and build everything, and print what was built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, required=True, help="the folder for all of it")
    parser.add_argument("--compiler", default="cc")
    asked = parser.parse_args()
    site, headers, out = asked.home / "site", asked.home / "headers", asked.home / "lib"
    if shutil.which(asked.compiler) is None:
        print(f"there is no C compiler {asked.compiler}: install one, or name another with --compiler", file=sys.stderr)
        sys.exit(CANNOT_BE_HAD)
    bring(asked.home)
    check_version(site, headers)
    out.mkdir(parents=True, exist_ok=True)
    flags = [asked.compiler, "-shared", "-fPIC", "-O1", "-w", f"-I{headers / INCLUDE}", f"-I{HERE}"]
    run([*flags, *(f"{HERE / name}.c" for name in SHARED_SOURCES), f"-Wl,-soname,{SHARED}", "-o", out / SHARED])
    for library, (names, is_versioned) in sorted(wanted([*libraries(site), *of_bitsandbytes()]).items()):
        build(library, names, is_versioned, flags, out)
        print(f"{library}: {len(names)} functions asked for")
    (out / SOURCES_DIGEST).write_text(digest())


def digest() -> str:
    """Of everything that the libraries are made from, but for the wheels."""
    sources = sorted(path for path in HERE.iterdir() if path.suffix in (".c", ".h", ".txt") or path.name == "build.py")
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def check_version(site: Path, headers: Path) -> None:
    """End with a clear line if torch is built for another CUDA than the headers, whose structures would differ."""
    torch, cuda = (said(site / "torch" / "version.py", rf"^{name}\b.*= '(.+)'") for name in ("__version__", "cuda"))
    version = int(said(headers / INCLUDE / "cuda_runtime_api.h", r"#define CUDART_VERSION +(\d+)"))
    ours = f"{version // 1000}.{version % 1000 // 10}"
    if cuda != ours:
        raise SystemExit(
            f"torch {torch} is built for CUDA {cuda}, and the headers are those of CUDA {ours}: see pins.txt"
        )


def said(file: Path, pattern: str) -> str:
    """What a file says at the first match."""
    found = re.search(pattern, file.read_text(), re.MULTILINE)
    return found[1] if found else "unknown"


def bring(home: Path) -> None:
    """Unpack the wheels of `pins.txt` that are not there yet: torch into `site`, of the others the headers alone."""
    for pin in (HERE / "pins.txt").read_text().split():
        done = home / "done" / pin
        if done.exists():
            continue
        wheels = home / "wheels" / pin
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        try:
            run([*pip, "--dest", wheels, pin])
        except SystemExit as failed:
            print(f"{pin} cannot be had: {failed}", file=sys.stderr)
            sys.exit(CANNOT_BE_HAD)
        (wheel,) = wheels.glob("*.whl")
        is_header = pin.startswith("nvidia")
        with zipfile.ZipFile(wheel) as packed:
            folder = home / ("headers" if is_header else "site")
            for entry in packed.infolist():
                if not is_header or "/include/" in entry.filename:
                    packed.extract(entry, folder)
                    if entry.external_attr >> 16 & 0o100:  # Triton's assembler is a program
                        (folder / entry.filename).chmod(0o755)
        shutil.rmtree(wheels)
        done.parent.mkdir(parents=True, exist_ok=True)
        done.touch()


def of_bitsandbytes() -> list[Path]:
    """Its library for the CUDA version that is emulated; none where it is not installed."""
    spec = importlib.util.find_spec("bitsandbytes")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    return [] if folder is None else sorted(folder.glob("libbitsandbytes_cuda130.so"))


def wanted(asking: Iterable[Path]) -> dict[str, tuple[set[str], bool]]:
    """By library of CUDA's, the functions that are asked for, and whether with the library's name as their version."""
    names: dict[str, set[str]] = defaultdict(set, {library: set(few) for library, few in ALWAYS.items()})
    versioned = set()
    for library in asking:
        for symbol in undefined(library):
            name, _, version = symbol.partition("@")
            version = version.lstrip("@")
            if version.startswith(("libcu", "libnv")):
                names[version].add(name)
                versioned.add(version)
            elif (owner := next((o for p, o in UNVERSIONED.items() if re.fullmatch(p, name)), None)) is not None:
                names[owner].add(name)
    return {library: (found, library in versioned) for library, found in names.items()}


def libraries(site: Path) -> list[Path]:
    """Those that may ask for something."""
    return [path for path in site.rglob("*.so*") if path.is_file()]


def undefined(library: Path) -> list[str]:
    """The functions that a library leaves to others."""
    shown = run(["nm", "-D", "--undefined-only", library])
    return [line.split()[-1] for line in shown.splitlines()]


def build(library: str, names: set[str], is_versioned: bool, flags: list[str], out: Path) -> None:
    """One library, linked to the shared one."""
    stem = library.split(".so")[0]
    made, versions, ours = out / f"{library}.c", out / f"{library}.map", out / f"{library}.o"
    own: set[str] = set()
    if stem in SOURCES:
        run([*flags, "-c", HERE / f"{SOURCES[stem]}.c", "-o", ours])
        own = {line.split()[-1] for line in run(["nm", "--defined-only", "--extern-only", ours]).splitlines()}
    names = names | {name for name in patterns()[stem] if name.isidentifier()}  # some are looked for by name alone
    functions = "".join(map(text(stem), sorted(names - own)))
    made.write_text(f"#include <stdlib.h>\nvoid lacking(const char *, void *);\n{functions}")
    node = {"libnvshmem_host": "NVSHMEM"}.get(stem, library if is_versioned else "")
    versions.write_text(f"{node} {{ global: *; }};\n")
    named = [f"-Wl,-soname,{library}", f"-Wl,--version-script={versions}"]
    linked = [f"-L{out}", "-lemulated", "-Wl,-rpath,$ORIGIN", *named]
    run([*flags, made, *([ours] if own else []), *linked, "-ldl", "-o", out / library])
    ours.unlink(missing_ok=True)


def text(stem: str) -> Callable[[str], str]:
    """What makes the C text of a function of a library."""
    nothing = patterns()[stem]

    def of(name: str) -> str:
        if any(re.fullmatch(pattern, name) for pattern in nothing):
            if MADE.fullmatch(name):
                return f"int {name}(void **made) {{ *made = calloc(1, 4096); return 0; }}\n"
            return f"int {name}(void) {{ return 0; }}\n"
        failure = NOT_SUPPORTED.get(stem, 801)
        return f'int {name}(void) {{ lacking("{name}", __builtin_return_address(0)); return {failure}; }}\n'

    return of


def patterns() -> Mapping[str, list[str]]:
    """`nothing.txt`, by library."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in (HERE / "nothing.txt").read_text().splitlines():
        if not line.startswith("#"):
            stem, _, names = line.partition(":")
            found[stem] += names.split()
    return found


def run(command: list[object]) -> str:
    """What a program prints; its errors end this one."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
