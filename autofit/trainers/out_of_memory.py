"""The text of an out-of-memory error: what torch says of the card's memory, and in which phase of training it came."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autofit.core.document import Document
from autofit.core.errors import UsageError
from autofit.core.units import GIB, MIB, format_bytes, parse_bytes
from autofit.core.workload import Effect

_SIZE = r"(\d+(?:\.\d+)?\s*(?:[KMGT]iB|bytes))"
_PARTS = {
    "requested": (rf"[Tt]ried to allocate {_SIZE}", r"tried to allocate (\d+ bytes)", rf"Unable to allocate {_SIZE}"),
    "capacity": (rf"total capac[a-z]* of {_SIZE}", rf"{_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"{_SIZE} free"),
    "allocated": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "unallocated": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"{_SIZE} reserved in total by PyTorch",),
    "process": (rf"this process has {_SIZE} memory in use",),
}
"""What torch writes (c10/cuda/CUDACachingAllocator.cpp), since 2.1 and before; and numpy, of the host's memory."""
_OTHER_PROCESS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_FRAME = re.compile(r'File "[^"]+", line \d+, in \S+')
_OTHER_FRAME = re.compile(r"(?<![^\s│])([^\s│]+\.py)(?::\d+,?)? in (?:[\w<>]+\.)*(\w+)")
"""A frame as IPython and rich print it, where functions may be named with their class."""
_PHASES = (
    ("evaluation", r"in (?:evaluate|evaluation_loop|prediction_step|prediction_loop)\b"),
    ("saving", r"in (?:_?save_model|_save_checkpoint|save_pretrained|save_state)\b"),
    (
        "optimizer",
        r'/(?:optim|optimizers?)/\S+", line \d+, in (?:_?step|update|_init_group|_multi_tensor|_fused)|clip_grad',
    ),
    ("backward", r"in (?:backward|_engine_run_backward|unpack_hook|recompute_fn)\b|\.backward\("),
    ("forward", r"in (?:forward|compute_loss)\b|\.compute_loss\("),
    (
        "loading",
        r"in (?:from_pretrained|_load_pretrained_model|load_model|load_state_dict|_move_model_to_device)\b",
    ),
)
"""Each phase, with the frames that only it has; the first that is found counts, as a backward pass may recompute."""
_OUTSIDE_OF_STEPS = ("loading", "evaluation", "saving")
_STEP = re.compile(r"in training_step\b")
MUCH = 0.02
"""Share of the card that is worth a word where it is reserved and unused: less is what any training leaves."""
MUCH_BYTES = 512 * MIB
"""Least that is worth a word on any card; what is known of a process to within less is taken to be exact."""
MOST_CONTEXT_BYTES = 1 * GIB
"""Most that a CUDA context and the libraries' workspaces take outside of torch's allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedOutOfMemory(Document):
    """What an error's text says; None for what it does not say."""

    requested_bytes: int | None
    capacity_bytes: int | None
    """The card's memory, as torch counts it."""
    free_bytes: int | None
    allocated_bytes: int | None
    unallocated_bytes: int | None
    """Reserved by torch's allocator, and not in use."""
    process_bytes: int | None
    """What the process that failed held, its context and libraries included."""
    others: Mapping[str, int] = field(hash=False)
    """Process id -> bytes that another process held. Empty where torch does not know its own process, as in a container
    with ids of its own: it then names itself like the others."""
    phase: str | None
    """`loading`, `forward`, `backward`, `optimizer`, `evaluation` or `saving`."""
    in_step: bool = True
    """Whether it came in a training step: false of another phase, and where the text has frames and none of a step."""
    on_host: bool = False
    """Whether it is the host's memory that ran out."""
    killed: bool = False
    """Whether all that is known is that the process was killed."""
    lacking_bytes: int = 0
    """By how much the run exceeds the card, by its file: fragmentation explains no more than was unused; 0 without."""

    @property
    def needed_bytes(self) -> int | None:
        """What tensors needed at least: what was in use, with what was asked for beside it; None where the text does
        not say, or says it of something else than a step."""
        if self.on_host or not self.in_step:
            return None
        if self.allocated_bytes is None or self.requested_bytes is None:
            return None
        return self.allocated_bytes + self.requested_bytes

    @property
    def elsewhere_bytes(self) -> int:
        """What other processes hold of the card; 0 where that is not sure."""
        if None in (self.capacity_bytes, self.free_bytes, self.allocated_bytes, self.unallocated_bytes):
            return self._named_bytes
        training_bytes, least = self.process_bytes, MUCH_BYTES
        if training_bytes is None:
            reserved_bytes = self.allocated_bytes + self.unallocated_bytes  # type: ignore[operator]
            training_bytes, least = reserved_bytes + MOST_CONTEXT_BYTES, MOST_CONTEXT_BYTES
        other_bytes = self.capacity_bytes - self.free_bytes - training_bytes  # type: ignore[operator]
        return other_bytes if other_bytes - self._named_bytes > least else self._named_bytes

    @property
    def _named_bytes(self) -> int:
        """What the other processes that the text names hold: a desktop is none of them."""
        return sum(self.others.values())

    @property
    def findings(self) -> tuple[str, ...]:
        """What the error means, one sentence each."""
        sentences = [
            f"Process {pid} holds {format_bytes(size)} of the card beside this training (nvidia-smi shows it)."
            for pid, size in self.others.items()
        ]
        if unnamed_bytes := self.elsewhere_bytes - self._named_bytes:
            known = "these processes" if self.others else "this training"
            sentences.append(
                f"About {format_bytes(unnamed_bytes)} of the card is in use outside of {known}: look for another "
                "process (nvidia-smi)."
            )
        request, spare = self.requested_bytes, self.unallocated_bytes
        enough = max(request or 0, MUCH_BYTES, MUCH * (self.capacity_bytes or 0), self.lacking_bytes)
        if request is not None and spare is not None and spare >= enough:
            sentences.append(
                f"{format_bytes(spare)} was reserved and unused, and {format_bytes(request)} was asked for: memory is "
                "fragmented. Set PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF for older torch)."
            )
        if self.on_host:
            sentences.append(_KILLED if self.killed else "The host's memory ran out, not the card's.")
        if self.phase in _MEANING:
            sentences.append(_MEANING[self.phase])
        return tuple(sentences)

    @property
    def what_helps(self) -> Mapping[Effect, str]:
        """What helps where nothing is known but the error, by what it does to the training."""
        return _HELP["host"] if self.on_host else _HELP.get(self.phase or "", _HELP["step"])

    def alone_json(self) -> dict[str, Any]:
        """The answer where it is all there is."""
        return {"traceback": self.to_json(), "helps": {effect.label: what for effect, what in self.what_helps.items()}}

    def to_json(self) -> dict[str, Any]:
        return {**Document.to_json(self), "elsewhere_bytes": self.elsewhere_bytes, "findings": list(self.findings)}


_ON_DEVICE = re.compile(r"out of memory(?!: Killed process)|OutOfMemoryError|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED")
_REFUSAL = re.compile("tried to allocate|unable to allocate", re.IGNORECASE)
"""Where the figures of a message begin."""
_ON_HOST = re.compile(
    r"^(?:\[rank\d+\]: *)?(?:[\w.]+\.)?(?:_Array)?MemoryError\b"  # Python's, numpy's
    r"|Cannot allocate memory|out of shared memory",  # the system's, of DataLoader's workers
    re.MULTILINE,
)
_BY_SIGNAL = re.compile(
    r"^Killed$"
    r"|^\[\d+\][ +-]+(?:\d+ +)?[Kk]illed\b|: line \d+: +\d+ Killed\b"  # shells, of a job and of a script's line
    r"|exitcode *: *-9\b|exit code:? 137\b|<Signals\.SIGKILL: 9>|Signal 9 \(SIGKILL\)|is killed by signal: Killed"
    r"|[Oo]ut of memory: Killed process"  # the kernel's log
    r"|OOMKilled|\boom_kill event",  # Kubernetes, Slurm
    re.MULTILINE,
)
_KILLED = "The process was killed, most likely because the host's memory ran out (`dmesg` says so), not the card's."
_MEANING = {
    "loading": "It failed while the weights were loaded, before any step.",
    "forward": "It failed in the forward pass.",
    "backward": "It failed in the backward pass.",
    "optimizer": "It failed in the update: in the first step, that is when the optimizer's states are made.",
    "evaluation": "It failed in evaluation, not in training: lower the evaluation's batch size first.",
    "saving": "It failed while a checkpoint was saved, not in a step.",
}

_HELP: Mapping[str, Mapping[Effect, str]] = {
    "host": {
        Effect.EXACT: "fewer dataloader_num_workers, a dataset that is streamed or mapped from its file, no offloading "
        "to the CPU, less in a checkpoint (save_only_model: true), a higher memory limit of the container or job",
    },
    "loading": {
        Effect.EXACT: "sharding over several GPUs (FSDP, or DeepSpeed stage 3); a smaller batch does not help, nor "
        "does checkpointing",
        Effect.NUMERICS: "weights in 16 bits (dtype=torch.bfloat16) if they are in fp32",
        Effect.TRAINING: "QLoRA (load_in_4bit: true)",
    },
    "optimizer": {
        Effect.EXACT: "sharding over several GPUs (FSDP, or DeepSpeed from stage 1 on), states on the host (its "
        "offload_optimizer); a smaller batch does not help, nor does checkpointing",
        Effect.NUMERICS: "weights in 16 bits (dtype=torch.bfloat16), optim=adamw_bnb_8bit",
        Effect.TRAINING: "LoRA, QLoRA",
    },
    "evaluation": {
        Effect.EXACT: "a smaller per_device_eval_batch_size (8 unless it is set; axolotl's eval_batch_size); "
        "prediction_loss_only: true without a compute_metrics; eval_accumulation_steps: 1 with one",
    },
    "saving": {
        Effect.EXACT: "state_dict_type: SHARDED_STATE_DICT in fsdp_config, or with DeepSpeed stage 3 "
        "stage3_gather_16bit_weights_on_model_save: false in zero_optimization",
    },
    "step": {
        Effect.EXACT: "a smaller per_device_train_batch_size with more gradient_accumulation_steps, "
        "gradient_checkpointing, use_liger_kernel",
        Effect.NUMERICS: "weights in 16 bits (dtype=torch.bfloat16), optim=adamw_bnb_8bit",
        Effect.TRAINING: "LoRA, QLoRA",
    },
}
"""What helps by what ran out, or by the phase in which it did."""


def read_traceback(text: str) -> ReportedOutOfMemory:
    """What the text of an error says. Raises `UsageError` for text in which no memory has run out."""
    flat = " ".join(text.split())
    on_device = _ON_DEVICE.search(flat) is not None
    on_host = "DefaultCPUAllocator" in flat or (_ON_HOST.search(text) is not None and not on_device)
    killed = not on_host and not on_device and _BY_SIGNAL.search(text) is not None
    if not (on_device or on_host or killed):
        raise UsageError("this text says of no memory that it ran out: looked for 'out of memory' or 'Killed'")
    # Of several ranks that failed, the last is read.
    figures = flat[max((refusal.start() for refusal in _REFUSAL.finditer(flat)), default=len(flat)) :]
    sizes = {name: _size(figures, patterns) for name, patterns in _PARTS.items()}
    allocated, unallocated = sizes["allocated"], sizes["unallocated"]
    if unallocated is None and sizes["reserved"] is not None and allocated is not None:
        unallocated = max(0, sizes["reserved"] - allocated)
    text = _OTHER_FRAME.sub(r'File "\1", line 0, in \2', text)
    phase = _phase(text)
    is_of_step = _STEP.search(text) is not None if phase is None else phase not in _OUTSIDE_OF_STEPS
    return ReportedOutOfMemory(
        requested_bytes=sizes["requested"],
        capacity_bytes=sizes["capacity"],
        free_bytes=sizes["free"],
        allocated_bytes=allocated,
        unallocated_bytes=unallocated,
        process_bytes=sizes["process"],
        others={} if sizes["process"] is None else {p: _bytes(size) for p, size in _OTHER_PROCESS.findall(figures)},
        phase=phase,
        in_step=is_of_step or _FRAME.search(text) is None,
        on_host=on_host or killed,
        killed=killed,
    )


def _size(text: str, patterns: tuple[str, ...]) -> int | None:
    match = next((match for pattern in patterns if (match := re.search(pattern, text))), None)
    return None if match is None else _bytes(match[1])


def _bytes(size: str) -> int:
    number = size.replace("bytes", "B")
    return parse_bytes(number) if not re.fullmatch(r"0+(\.0+)?\s*\w+", number) else 0


def _phase(text: str) -> str | None:
    if _FRAME.search(text) is None:
        return None
    return next((phase for phase, pattern in _PHASES if re.search(pattern, text)), None)
