"""What an estimate takes for granted because no trace can show it."""

from __future__ import annotations

import math
from dataclasses import replace

from autofit.catalog.models import shape
from autofit.core.device.hardware import compute_capability
from autofit.core.device.probe import CONTEXT, Probe
from autofit.core.lattice import Config
from autofit.core.units import MIB, format_bytes, round_up
from autofit.estimate.footprint import Footprint
from autofit.estimate.time.guessed_rates import tf32_speedup
from autofit.estimate.time.transfers import why_no_host_link
from autofit.techniques import Job, unsupported
from autofit.techniques.axes.attention import attention_format, keeps_scores
from autofit.techniques.axes.optimizer import kind_of
from autofit.techniques.axes.precision import in_tf32
from autofit.techniques.axes.sharding import gathers_weights
from autofit.techniques.job import ranks_per_host
from autofit.techniques.quantisation import BYTES_PER_WEIGHT, SINGLE_BYTES_PER_WEIGHT
from autofit.techniques.selective import budget

ASSUMED = "assumed"
"""In a stack, the version of a package that is taken to be installed where the job runs."""
PACKAGES = (
    ("loss", "fused", "liger_kernel"),
    ("kernels", "liger", "liger_kernel"),
    ("attention", "flash", "flash_attn"),
)
"""(axis, value, field of the stack): the kernel that a value runs is the package's."""
CONTEXT_BYTES = 400 * 1024**2
"""What a CUDA context and its kernels are taken to need where no trial or probe has shown it: reports speak of 300 MB
and more."""
SEEN_CONTEXT_BYTES = {"9.0": 830 * 1024**2}
"""By compute capability, where cards have shown it: an H200 and an H100 with CUDA 13 had 812 to 830 MiB
(benchmarks/recorded)."""
CONTEXT_ERROR = SEEN_CONTEXT_BYTES["9.0"] - CONTEXT_BYTES
"""By how much `CONTEXT_BYTES` may be off on other cards."""
COMPILE_ERROR = 0.15
"""Relative error that compilation adds to a predicted time: the most by which a predicted speedup was off, of six
configs on a processor and two on an H100 (test_real_card.py)."""

UNCOMPILED = (
    "compile=true is predicted as without it: what torch compiles of these layers cannot be traced, so memory and time "
    "may differ"
)


def assumptions(footprint: Footprint, job: Job) -> tuple[str, ...]:
    """One sentence for each thing that a footprint takes for granted."""
    config, error = footprint.config, footprint.borrowed_error
    if footprint.untraced is not None:
        needs = f"to fit, it needs a limit {footprint.memory_error:.0%} above this; time is not predicted"
        return f"by formula, not traced ({footprint.untraced}): {needs}", *of_any_step(config, job)
    borrowed = (of_borrowed(error),) if error else ()
    return *of_trace(config, job, uncompiled=footprint.uncompiled), *borrowed


def of_trace(config: Config, job: Job, *, uncompiled: bool = False) -> tuple[str, ...]:
    """What the trace of `config` takes for granted; `uncompiled` as in `Footprint`."""
    sentences, ranks = [], ranks_per_host(job)
    moves = config["offload"] != "none" or config["checkpointing"] == "offload"
    if job.hardware.kind == "cpu":
        sentences.append(_kept_by_the_heap(config))
    if config["compile"] is True:
        sentences.append(UNCOMPILED if uncompiled else _of_compiler(job))
    if config["checkpointing"] == "offload":
        sentences.append(
            "checkpointing=offload copies activations at three quarters of the host link's nominal bandwidth, with no "
            "computation meanwhile"
        )
    if config["sharding"] != "none":
        sentences.append(
            f"sharding={config['sharding']} communicates within one machine, at three quarters of its links' nominal "
            "bandwidth, and never waits for another rank"
        )
    if config["sharding"] == "ddp" and job.hardware.kind == "cuda":  # torch's NCCL watchdog looks 10 times a second
        sentences.append(
            "in the second step DDP makes its gradient buckets anew: what NCCL still holds of the first ones, reduced "
            "in the last 0.1 s, is left out, at most one copy of the gradients"
        )
    if job.workload.eval_batch is not None and gathers_weights(config):
        sentences.append("what is gathered of sharded or offloaded weights to evaluate is left out")
    if config["offload"] != "none":
        optimizers = f"the optimizers of its {ranks} ranks together" if ranks > 1 else "the optimizer"
        sentences.append(
            f"offload={config['offload']} copies at three quarters of the host link's nominal bandwidth, and the "
            f"host's memory serves {optimizers} at 50 GB/s"
        )
    if moves:
        sentences += _of_hosts(job)
    if (moves or config["sharding"] != "none") and (why := why_no_host_link(job.hardware)) is not None:
        sentences.append(f"the link to the host is PCIe 4.0 x16, because {why}")
    if config["offload"] == "nvme":
        shared = f", which the {ranks} ranks of a machine share" if ranks > 1 else ""
        sentences.append(f"offload=nvme reads 7 and writes 5 GB/s, as one drive on PCIe 4.0 does{shared}")
    if kind_of(config).paged:
        sentences.append(
            f"optimizer={config['optimizer']} keeps its states on the device; what a full one has no room for goes to "
            "the host and back in every step, at three quarters of the link's nominal bandwidth"
        )
    if job.hardware.kind == "cuda":
        sentences += _of_cuda_kernels(config, job)
        if job.expandable_segments is None:  # not every platform has them (`trial.measure.meter.CudaMeter`)
            sentences.append(
                "CUDA's allocator has the expandable segments that trials ask for: no trial on "
                f"{job.hardware.name} has shown it, and without them fragmentation differs and is mostly higher"
            )
    return (*sentences, *of_any_step(config, job))


def of_any_step(config: Config, job: Job) -> tuple[str, ...]:
    """What is assumed of `config` however its memory is computed, by a trace or by formula."""
    scales = (of_scales(job),) if config["method"] == "qlora" else ()
    if job.hardware.kind != "cuda":
        return scales
    context = (
        f"the CUDA context takes {format_bytes(context_bytes(job))}: it depends on the card, the driver and the "
        f"kernels in use, and nothing has shown it on {job.hardware.name}"
    )
    return *scales, *(() if job.context_bytes is not None else (context,)), *_of_packages(config, job)


def as_probed(job: Job, probe: Probe | None) -> Job:
    """The job with the context that a probe found, where no trial has shown it."""
    size = None if probe is None else probe.figures.get(CONTEXT)
    return job if size is None or job.context_bytes is not None else replace(job, context_bytes=rounded_context(size))


def rounded_context(size: float) -> int:
    """A context's bytes as estimates take them: up to the next 16 MiB, so that a few kernels more change none."""
    return round_up(math.ceil(size), 16 * MIB)


def context_bytes(job: Job) -> int:
    """What the context takes on the job's hardware: as was shown there, or assumed."""
    if job.hardware.kind != "cuda":
        return 0
    if job.context_bytes is not None:
        return job.context_bytes
    # An emulated card's context is nobody's.
    seen = None if job.hardware.is_emulated else SEEN_CONTEXT_BYTES.get(job.hardware.capability or "")
    return seen or CONTEXT_BYTES


def context_error(job: Job) -> int:
    """By how many bytes `context_bytes` may be off: where it is a guess, and nothing has shown it."""
    is_guess = job.hardware.kind == "cuda" and job.context_bytes is None and context_bytes(job) == CONTEXT_BYTES
    return CONTEXT_ERROR if is_guess else 0


def of_scales(job: Job) -> str:
    """What is assumed of the scales of weights in 4 bits."""
    more = shape(job.model).linear_parameters * (SINGLE_BYTES_PER_WEIGHT - BYTES_PER_WEIGHT)
    return (
        "method=qlora has double quantisation (bnb_4bit_use_double_quant, off by default in transformers and trl): "
        f"without it, all weights together take {format_bytes(round(more))} more"
    )


def _of_packages(config: Config, job: Job) -> list[str]:
    needed = [(axis, package) for axis, value, package in PACKAGES if config.get(axis) == value]
    return [
        f"{axis}={config[axis]} finds {package.replace('_', '-')} installed where it trains: here it is not"
        for axis, package in needed
        if getattr(job.stack, package) == ASSUMED
    ]


def _of_cuda_kernels(config: Config, job: Job) -> list[str]:
    sentences = []
    major, attended = int(compute_capability(job.hardware.capability) or 0), attention_format(config, job)
    if config["attention"] == "sdpa" and attended != "fp32" and major in (9, 10):
        # check_prefer_cudnn_attention in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
        sentences.append(
            f"attention=sdpa may run in cuDNN's kernel on compute capability {job.hardware.capability}: its workspace "
            "is not documented, and is taken to be as large as flash attention's"
        )
        if budget(config) < 1:
            sentences.append(
                f"checkpointing={config['checkpointing']}: where cuDNN's kernel runs, torch recomputes attention as if "
                "that took no time, so a step may take longer than predicted"
            )
    if config["attention"] == "sdpa" and keeps_scores(config, job):
        refused = unsupported(config.replace(attention="efficient"), job)
        sentences.append(
            f"torch has no fused attention for the heads of {job.model.name} in {attended} on "
            f"{job.hardware.name}: the scores of all pairs of tokens are kept, which takes memory and time"
            + ("" if refused else "; attention=efficient repeats keys and is spared that")
        )
    if in_tf32(config):
        times = tf32_speedup(job.hardware)
        speed = f"{times:.3g} times as fast as in fp32, by the data sheet" if times > 1 else "no faster than in fp32"
        sentences.append(f"products in TF32 are taken to be {speed}: no probe measures them")
    if config["sharding"] != "none":
        sentences.append(f"sharding={config['sharding']}: what NCCL allocates for itself on each device is left out")
    return sentences


def _of_compiler(job: Job) -> str:
    """The figures are those of memory/compiled-cpu-zen4-2c-smollm2-135m.jsonl and emulated-compiled/ in
    benchmarks/recorded; a test compares them."""
    compared = (
        "6 configs that trained on a processor, memory was 0.97 to 1.09 times the predicted"
        if job.hardware.kind == "cpu"
        else "41 configs that trained on emulated cards, memory was 0.92 to 1.02 times the predicted; a first run "
        "tunes kernels, which may take more"
    )
    return (
        "compile=true is predicted from the graphs that torch makes of each layer; the time of setting it up is left "
        f"out: of {compared}"
    )


def _of_hosts(job: Job) -> list[str]:
    ranks = job.workload.devices
    if not job.hardware.host_memory_bytes:
        return ["the host has enough memory: how much it has is not known"]
    together = ranks_per_host(job)
    if together == 1 < ranks:
        return [f"each of the {ranks} ranks has a host's memory to itself, as none was seen that has two devices"]
    if together < ranks:
        return [f"{together} of the {ranks} ranks share a host's memory: no host was seen that has more devices"]
    return []


def _kept_by_the_heap(config: Config) -> str:
    """The figures are those of estimate-cpu.json in benchmarks/recorded, of sharding those of
    cpu-zen5-2c-sharded-memory.json; a test compares them."""
    kept = "how much freed memory the C library keeps is an average over trials"
    if config["sharding"] != "none":
        return (
            f"{kept} of one rank: of 10 predictions for two ranks half were off by more than 4 %, and those for zero3 "
            "and fsdp were 13 to 38 % too low"
        )
    if config["offload"] != "none":
        return f"{kept}: of 27 with offload half were off by less than 4 %, and the worst by 18 %"
    return f"{kept}: half of them were off by less than 3 %, and the worst by 37 %"


def of_borrowed(error: float) -> str:
    """What is assumed of memory without a replay (`Footprint.borrowed_error`)."""
    return (
        "the allocator's fragmentation is that of a similar config, or left out of one that does not fit, so the "
        f"memory may be up to {error:.0%} higher: `autofit estimate` replays the allocator for the config itself"
    )
