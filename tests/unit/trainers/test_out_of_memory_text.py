"""The text of torch's out-of-memory errors, of every version that people still paste."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autofit.catalog.hardware import cards_of_size
from autofit.core.errors import UsageError
from autofit.core.units import GIB, MIB
from autofit.trainers.out_of_memory import read_traceback

NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which {free} is free. {processes}Of the allocated memory {allocated} is allocated by PyTorch, and "
    "{unallocated} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
ALONE = NEW.format(
    free="300.00 MiB",
    processes="Including non-PyTorch memory, this process has 23.30 GiB memory in use. ",
    allocated="21.90 GiB",
    unallocated="900.00 MiB",
)
SHARED = NEW.format(
    free="1.02 GiB",
    processes="Process 4242 has 8.10 GiB memory in use. Including non-PyTorch memory, this process has 14.50 GiB "
    "memory in use. ",
    allocated="13.60 GiB",
    unallocated="400.00 MiB",
)
FRAGMENTED = NEW.format(free="1.02 GiB", processes="", allocated="16.10 GiB", unallocated="5.90 GiB")
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 14.76 GiB total capacity; 13.20 GiB already "
    "allocated; 9.75 MiB free; 13.70 GiB reserved in total by PyTorch)"
)
MISSPELT = ALONE.replace("capacity", "capacty")


def frame(path: str, function: str) -> str:
    return f'  File "/site-packages/{path}", line 7, in {function}\n    something()\n'


TRAIN = frame("transformers/trainer.py", "train") + frame("transformers/trainer.py", "training_step")
FORWARD = frame("torch/nn/modules/module.py", "_call_impl") + frame("transformers/models/llama.py", "forward")


@pytest.mark.parametrize("text", [ALONE, MISSPELT, ALONE.replace(" ", "\n", 40)])
def test_todays_message_is_read(text: str) -> None:
    result = read_traceback(text)
    assert (result.requested_bytes, result.capacity_bytes) == (int(3.91 * GIB), int(23.64 * GIB))
    assert (result.free_bytes, result.allocated_bytes) == (300 * MIB, int(21.9 * GIB))
    assert (result.unallocated_bytes, result.elsewhere_bytes, result.phase) == (900 * MIB, 0, None)
    assert result.findings == ()


def test_the_message_before_torch_2_is_read() -> None:
    result = read_traceback(OLD)
    assert (result.requested_bytes, result.capacity_bytes) == (20 * MIB, int(14.76 * GIB))
    assert (result.allocated_bytes, result.unallocated_bytes) == (int(13.2 * GIB), int(13.7 * GIB) - int(13.2 * GIB))
    assert result.findings[0].startswith("512 MiB was reserved and unused")


def test_another_process_is_named_with_what_it_holds() -> None:
    result = read_traceback(SHARED)
    assert result.elsewhere_bytes == int(8.1 * GIB) and result.others == {"4242": int(8.1 * GIB)}
    assert result.findings[0].startswith("Process 4242 holds 8.10 GiB of the card")


def test_a_desktop_that_is_no_process_of_torchs_is_in_use_beside_those_that_are_named() -> None:
    text = SHARED.replace("8.10 GiB", "300.00 MiB")
    result = read_traceback(text)
    assert result.elsewhere_bytes == pytest.approx((23.64 - 1.02 - 14.5) * GIB, abs=1)
    named, unnamed = result.findings
    assert "Process 4242 holds 300 MiB" in named and "7.83 GiB of the card is in use outside of these" in unnamed


@pytest.mark.parametrize(("process", "elsewhere"), [("17.60 GiB", 0.0), ("14.50 GiB", 3.1)])
def test_what_the_process_holds_beside_its_tensors_is_no_other_process(process: str, elsewhere: float) -> None:
    """NCCL's buffers and the context may take several GiB."""
    held = f"Including non-PyTorch memory, this process has {process} memory in use. "
    text = NEW.format(free="6.04 GiB", processes=held, allocated="12.00 GiB", unallocated="100.00 MiB")
    result = read_traceback(text)
    assert result.elsewhere_bytes == pytest.approx(elsewhere * GIB, abs=1)
    assert any("another process" in finding for finding in result.findings) is bool(elsewhere)


def test_a_container_in_which_torch_takes_itself_for_another_process_has_none() -> None:
    held = "Process 3321 has 21.52 GiB memory in use. "
    text = NEW.format(free="2.11 GiB", processes=held, allocated="20.62 GiB", unallocated="437.52 MiB")
    result = read_traceback(text)
    assert (result.elsewhere_bytes, result.others, result.findings) == (0, {}, ())


def test_fragmentation_is_seen() -> None:
    (message,) = read_traceback(FRAGMENTED).findings
    assert "expandable_segments:True" in message and "5.90 GiB" in message


def test_little_that_is_unused_is_no_fragmentation() -> None:
    """A training that lacks 70 GiB is not saved by 1 GiB, though a small tensor would have had room in it."""
    text = FRAGMENTED.replace("3.91 GiB", "112.00 MiB").replace("23.64", "79.25").replace("16.10", "77.61")
    assert read_traceback(text.replace("5.90", "1.06")).findings == ()
    fragmented = read_traceback(text.replace("5.90", "4.00"))
    assert "fragmented" in fragmented.findings[0]
    assert replace(fragmented, lacking_bytes=5 * GIB).findings == ()
    without_capacity = (
        "CUDA out of memory. Tried to allocate 2.00 MiB. Of the allocated memory 4.00 GiB is allocated by PyTorch, and "
        "12.00 MiB is reserved by PyTorch but unallocated."
    )
    assert read_traceback(without_capacity).findings == ()


def test_a_text_that_ends_at_the_call_of_a_backward_pass_failed_there() -> None:
    call = TRAIN + "    self.accelerator.backward(loss, **kwargs)\n"
    assert read_traceback(call + ALONE).phase == "backward"
    assert read_traceback(TRAIN + ALONE).phase is None


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (TRAIN + FORWARD, "forward"),
        (TRAIN + frame("torch/autograd/graph.py", "_engine_run_backward"), "backward"),
        (TRAIN + frame("torch/utils/checkpoint.py", "recompute_fn") + FORWARD, "backward"),
        (frame("transformers/trainer.py", "train") + frame("torch/optim/adamw.py", "_init_group"), "optimizer"),
        (frame("transformers/trainer.py", "train") + frame("bitsandbytes/optim/optimizer.py", "step"), "optimizer"),
        (
            frame("transformers/trainer.py", "train") + frame("transformers/trainer.py", "evaluation_loop") + FORWARD,
            "evaluation",
        ),
        (frame("transformers/trainer.py", "train") + frame("transformers/trainer.py", "_save_checkpoint"), "saving"),
        (frame("transformers/modeling_utils.py", "from_pretrained"), "loading"),
        (
            frame("transformers/trainer.py", "__init__") + frame("transformers/trainer.py", "_move_model_to_device"),
            "loading",
        ),
        (frame("mine.py", "main"), None),
    ],
)
def test_the_frames_say_the_phase(frames: str, phase: str | None) -> None:
    result = read_traceback(f"Traceback (most recent call last):\n{frames}{ALONE}")
    assert result.phase == phase
    assert len(result.findings) == (phase is not None)


NOTEBOOK = "File /x/{path}:4154, in {name}(self, dataset, **kwargs)\n   4150 start = 0\n-> 4154 output = something(\n"
OLDER_NOTEBOOK = "/x/{path} in {name}(self, dataset, **kwargs)\n   4153 \n-> 4154 output = something(\n"
BOXED = "│ /x/{path}:487 in {name}                                                   │\n│ ❱ 487 │   something() │\n"


@pytest.mark.parametrize("form", [NOTEBOOK, OLDER_NOTEBOOK, BOXED])
@pytest.mark.parametrize(
    ("path", "name", "phase"),
    [
        ("transformers/trainer.py", "Trainer.evaluation_loop", "evaluation"),
        ("torch/autograd/__init__.py", "backward", "backward"),
        ("torch/optim/adamw.py", "AdamW.step", "optimizer"),
        ("transformers/trainer.py", "Trainer.train", None),
    ],
)
def test_notebooks_and_boxes_have_frames_too(form: str, path: str, name: str, phase: str | None) -> None:
    result = read_traceback(
        form.format(path="transformers/trainer.py", name="train") + form.format(path=path, name=name) + ALONE
    )
    assert result.phase == phase
    assert (result.needed_bytes is None) is (phase in ("evaluation", None))


def test_frames_of_no_known_phase_say_nothing_of_a_step() -> None:
    """Without frames, or with those of a step alone, what was needed is taken to be what a step needs."""
    assert read_traceback(frame("mine.py", "main") + ALONE).needed_bytes is None
    assert (
        read_traceback(ALONE).needed_bytes
        == read_traceback(TRAIN + ALONE).needed_bytes
        == int(21.9 * GIB) + int(3.91 * GIB)
    )


@pytest.mark.parametrize(
    "after", ["ERROR: training ran out of memory, see above", "torch.AcceleratorError: CUDA error: out of memory"]
)
def test_the_figures_are_those_of_the_last_message_that_has_some(after: str) -> None:
    assert read_traceback(f"{ALONE}\n{after}\n") == read_traceback(ALONE)


def test_of_several_ranks_the_last_is_read() -> None:
    assert read_traceback(f"{OLD}\n[rank1]: {ALONE}").capacity_bytes == int(23.64 * GIB)


def test_the_hosts_memory_is_another_matter() -> None:
    text = "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
    result = read_traceback(text)
    assert (result.on_host, result.requested_bytes) == (True, 4096)
    assert result.findings == ("The host's memory ran out, not the card's.",)


@pytest.mark.parametrize(
    "text",
    [
        "step 3\nKilled\n",
        "ChildFailedError: exitcode  : -9 (pid: 4)",
        "OOMKilled",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.",
        "[1]    1234 killed     python train.py",
        "./train.sh: line 3:  1234 Killed                  python train.py",
        "subprocess.CalledProcessError: Command '['python', 'train.py']' died with <Signals.SIGKILL: 9>.",
        "RuntimeError: DataLoader worker (pid 123) is killed by signal: Killed. ",
        "[12.3] Out of memory: Killed process 4567 (python) total-vm:1kB, anon-rss:1kB",
        "[12.3] Memory cgroup out of memory: Killed process 4567 (python) total-vm:1kB, anon-rss:1kB",
        "torch.distributed.elastic: traceback : Signal 9 (SIGKILL) received by PID 4567",
    ],
)
def test_a_killed_process_most_likely_lacked_the_hosts_memory(text: str) -> None:
    result = read_traceback(text)
    assert result.on_host and result.killed and result.needed_bytes is None
    assert "most likely because the host's memory ran out" in result.findings[0]


@pytest.mark.parametrize(
    ("text", "requested"),
    [
        (frame("mine.py", "main") + "MemoryError\n", None),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 3.00 GiB for an array", 3 * GIB),
        ("OSError: [Errno 12] Cannot allocate memory", None),
        ("RuntimeError: DataLoader worker is killed by signal: Bus error. Workers are out of shared memory.", None),
    ],
)
def test_errors_of_the_hosts_memory_are_sure(text: str, requested: int | None) -> None:
    result = read_traceback(text)
    assert (result.on_host, result.killed, result.requested_bytes, result.needed_bytes) == (
        True,
        False,
        requested,
        None,
    )


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\nKilled\n",
    ],
)
def test_a_message_without_figures_is_one_too(text: str) -> None:
    result = read_traceback(text)
    assert (result.capacity_bytes, result.needed_bytes, result.on_host) == (None, None, False)


def test_what_a_step_needed_is_what_was_in_use_and_asked_for() -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory 4.00 GiB is allocated by PyTorch"
    assert read_traceback(text).needed_bytes == 6 * GIB
    saving = f'File "/x/transformers/trainer.py", line 1, in save_model\n{text}'
    assert read_traceback(saving).needed_bytes is None


@pytest.mark.parametrize("text", ["", "ValueError: no", "Segmentation fault", "the job was killed by its owner"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="says of no memory that it ran out"):
        read_traceback(text)


def test_a_capacity_names_cards() -> None:
    assert {card.name for card in cards_of_size(int(23.64 * GIB))} >= {"rtx-4090", "rtx-3090"}
    assert cards_of_size(3 * GIB) == ()
