"""The exported files, run by the trainers themselves, beside the trials that they were exported from.

    python benchmarks/real_trainers.py OUT.jsonl [--model llama-3.2-1b] [--seq-len 2048] [--seconds 420]

For transformers and trl: full training, LoRA and QLoRA, without checkpointing and with it. Of each: one trial with the
trainer's habits, `autofit recommend --format` from its store, then the trainer with that file on random tokens. Weights
are random, too, in a folder beside OUT. OUT has what is known already; no case begins after --seconds. Cases that run
`--at-once` share the device one after another, and load their libraries meanwhile: where cores are few, their times do
not count. It needs transformers and trl, and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AUTOFIT = [sys.executable, "-m", "autofit.cli.main"]
LOSS = {"transformers": "full", "trl": "chunked"}
"""trl has no other loss than its tiled one, transformers' Trainer none but the plain one."""
CASES = [
    {"for": trainer, "method": method, "checkpointing": checkpointing}
    for method, checkpointing, trainer in product(("lora", "qlora", "full"), ("none", "full"), LOSS)
]
WARM_UP = 2
"""Steps that are not timed, as in a trial."""


def main() -> int:
    """Run what is missing; 75 while something is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument(
        "--steps", type=int, default=7, help="optimizer steps of a trainer; the first two are not timed"
    )
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--at-once", type=int, default=1, help="cases that may load their libraries while another runs")
    asked = parser.parse_args()
    if asked.steps < WARM_UP + 2:
        parser.error(f"--steps {asked.steps}: at least {WARM_UP + 2} are needed, of which two are not timed")
    if asked.at_once < 1:
        parser.error(f"--at-once {asked.at_once}: at least one case must run")
    ends = time.monotonic() + asked.seconds
    lines = asked.out.read_text().splitlines() if asked.out.exists() else []
    settings = {key: value for key, value in vars(asked).items() if key not in ("out", "seconds", "at_once")}
    known = [json.loads(line) for line in lines]
    done = [row["case"] for row in known if row["trainer"] and row.get("settings") == settings]
    cases = [case for case in CASES if case not in done]
    if not cases:
        return 0
    with tempfile.TemporaryDirectory(dir=asked.out.parent) as folder:
        source = Path(folder) / asked.model
        saved = call("save", asked.model, str(source))  # in a process that leaves nothing on the card
        if saved.returncode:
            raise SystemExit(saved.stderr)
        with ThreadPoolExecutor(asked.at_once) as pool:
            running = [pool.submit(compared, case, asked, source, ends) for case in cases]
            for found in as_completed(running):
                if (row := found.result()) is None:
                    continue
                row |= {
                    "settings": settings,
                    "at_once": asked.at_once,
                    "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
                }
                with asked.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(told(row), flush=True)
    return os.EX_TEMPFAIL if any(found.result() is None for found in running) else 0


def save(model: str, folder: str) -> None:
    """A folder with the model's architecture, random weights and a tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from autofit.catalog.models import architecture, load

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2").save_pretrained(folder)
    with alone():
        torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
        made = AutoModelForCausalLM.from_config(architecture(load(model)), dtype=torch.bfloat16)
        made.save_pretrained(folder)


@contextmanager
def alone() -> Iterator[None]:
    """The rest of this process, without a trial or another trainer on its device. The process ends with the block: its
    memory is on the card until then."""
    import torch

    from autofit.trial.machine import device_lock

    with device_lock.held(device_lock.names("cuda" if torch.cuda.is_available() else "cpu")):
        try:
            yield
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)


def compared(case: dict[str, str], asked: argparse.Namespace, source: Path, ends: float) -> dict[str, Any] | None:
    """The trial's figures and the trainer's; or what either of them said last. None if it is too late to begin."""
    if time.monotonic() > ends:
        return None
    return {"case": case} | outcomes(case, asked, source)


def outcomes(case: dict[str, str], asked: argparse.Namespace, source: Path) -> dict[str, Any]:
    """`compared`, begun in time."""
    trainer = case["for"]
    of = ["--model", str(source), "--seq-len", str(asked.seq_len), "--global-batch", str(asked.global_batch)]
    of += ["--for", trainer, "--store", str(source.parent / f"{'-'.join(case.values())}.db")]
    values = {"micro_batch": asked.micro_batch, "precision": asked.precision, "loss": LOSS[trainer]}
    values |= {key: value for key, value in case.items() if key != "for"}
    config = ",".join(f"{key}={value}" for key, value in values.items())
    trial = run(*AUTOFIT, "trial", *of, "--config", config, "--json")
    if trial.returncode:
        return {"config": config, "trial": None, "trainer": None, "said": said(trial)}
    file = source.parent / f"{'-'.join(case.values())}.{'py' if trainer == 'transformers' else 'yaml'}"
    export = run(*AUTOFIT, "recommend", *of, "--allow", "training", "--format", trainer, "--out", str(file))
    if export.returncode:
        return {"config": config, "trial": None, "trainer": None, "said": said(export)}
    real = call("train", trainer, str(file), asked.seq_len, asked.global_batch, asked.steps)
    found = None if real.returncode else json.loads(real.stdout.splitlines()[-1])
    measured = json.loads(trial.stdout)
    return {"config": config, "trial": measured, "trainer": found, "said": [] if found else said(real)}


def said(process: subprocess.CompletedProcess[str]) -> list[str]:
    """Its last words."""
    return (process.stdout + process.stderr).splitlines()[-5:]


def call(name: str, *given: str | int) -> subprocess.CompletedProcess[str]:
    """A function of this program, in a process of its own."""
    return run(sys.executable, "-c", f"import runpy; runpy.run_path({__file__!r})[{name!r}](*{given!r})")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """The command, with this checkout's package."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return subprocess.run(command, env=environment, text=True, capture_output=True)


def train(trainer: str, file: str, seq_len: int, global_batch: int, steps: int) -> None:
    """Run the trainer with its file; print what it took as JSON."""
    import datasets  # noqa: F401  # what a trainer imports counts neither for it nor against it
    import torch  # noqa: F401
    import trl  # noqa: F401
    from transformers import Trainer  # noqa: F401

    with alone():
        print(json.dumps(trained(trainer, file, seq_len, global_batch, steps)))


def trained(trainer: str, file: str, seq_len: int, global_batch: int, steps: int) -> dict[str, Any]:
    """What the trainer took."""
    import torch
    from transformers import TrainerCallback

    made_by = {"transformers": from_script, "trl": from_yaml}[trainer]
    words = torch.randint(64, (steps * global_batch, seq_len), generator=torch.Generator().manual_seed(0))
    on_card = torch.cuda.is_available()
    before = resident("VmRSS")
    made = made_by(file, words, steps)
    made.args.output_dir = str(Path(file).with_suffix(""))

    began: list[float] = []

    class Clock(TrainerCallback):
        """Notes when each step begins."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if on_card:
                torch.cuda.synchronize()
            began.append(time.perf_counter())

    made.add_callback(Clock())
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    if on_card:
        torch.cuda.reset_peak_memory_stats()
    made.train()
    seconds = statistics.median(after - earlier for earlier, after in pairwise(began[WARM_UP:]))
    found: dict[str, Any] = {"step_seconds": seconds, "tokens_per_second": global_batch * seq_len / seconds}
    if on_card:
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    else:
        found["peak_reserved_bytes"] = resident("VmHWM") - before
    found["losses"] = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return found


def resident(key: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def prepared(args: Any, steps: int) -> Any:
    """What is the user's own: a learning rate, and how long."""
    args.learning_rate, args.lr_scheduler_type = 1e-5, "constant"
    args.max_steps, args.save_strategy = steps, "no"
    args.logging_strategy, args.logging_steps, args.disable_tqdm = "steps", 1, True
    return args


def from_script(file: str, words: Any, steps: int) -> Any:
    """The Trainer of the exported script."""
    names = runpy.run_path(file)
    prepared(names["training_args"], steps)
    return names["make_trainer"]([{"input_ids": row, "labels": row} for row in words])


def from_yaml(file: str, words: Any, steps: int) -> Any:
    """The trainer that `trl sft --config FILE` makes."""
    import trl
    from datasets import Dataset

    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig))
    _, args, model = parser.parse_args_and_config(["--config", file, "--learning_rate", "1e-5"])
    args.model_init_kwargs = {"attn_implementation": model.attn_implementation, "dtype": model.dtype}
    return trl.SFTTrainer(
        model=model.model_name_or_path,
        args=prepared(args, steps),
        train_dataset=Dataset.from_dict({"input_ids": words.tolist()}),
        quantization_config=trl.get_quantization_config(model),
        peft_config=trl.get_peft_config(model),
    )


def told(row: dict[str, Any]) -> str:
    """One line."""
    name = " ".join(row["case"].values())
    if not row["trial"] or not row["trainer"]:
        return f"{name}: {row['said']}"
    trial, real = row["trial"]["measurement"], row["trainer"]
    parts = [f"{key} {real[key] / trial[key] - 1:+.1%}" for key in trial if key in real and key in LINE]
    return f"{name}: trainer beside trial: " + ", ".join(parts)


LINE = ("tokens_per_second", "peak_allocated_bytes", "peak_reserved_bytes")

if __name__ == "__main__":
    sys.exit(main())
