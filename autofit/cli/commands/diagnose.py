"""`autofit diagnose`: a trainer's own file, and what runs out of memory in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autofit.cli import options
from autofit.cli.arguments import size
from autofit.cli.output import print_json
from autofit.cli.waiting import Waiting
from autofit.core.errors import UsageError


def diagnose(
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Your file: of axolotl, LLaMA-Factory or trl sft, or TrainingArguments as JSON."),
    ] = None,
    hardware: options.Hardware = "auto",
    traceback: Annotated[
        Path | None, typer.Option("--traceback", help="A file with the text of the out-of-memory error; - reads it.")
    ] = None,
    trainer: Annotated[
        str | None,
        typer.Option("--trainer", help="axolotl, llamafactory, trl or transformers, if the file could be another's."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="What the file's model is built like, if that cannot be looked up; see estimate."),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            parser=options.whole_tokens,
            metavar="<int>",
            help="Tokens of the longest sequence, instead of the file's.",
        ),
    ] = None,
    devices: Annotated[int | None, typer.Option("--devices", help="GPUs that share the training.")] = None,
    memory_limit: options.MemoryLimit = None,
    also: Annotated[
        str | None, typer.Option("--also", help="axis=value,... that the file does not say, or that you know better.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also print every diff, and the defaults that were assumed.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Say whether the training that a trainer's own file asks for fits, and what to change in it.

    Nothing runs and nothing is downloaded but the model's config.json, if the catalog lacks it.

    \b
    Examples:
      autofit diagnose --config qlora.yml --hardware rtx-4090
      autofit diagnose --config sft.yaml --hardware a100-80g --devices 8 --json
      autofit diagnose --config args.json --model qwen3-8b --seq-len 2048 --also method=lora,rank=16 --hardware l4
      autofit diagnose --config qlora.yml --traceback error.txt
    """
    from autofit import operations, techniques
    from autofit.cli.text.diagnosis import changes_text, diagnosis_text, error_text
    from autofit.operations.diagnosing.diagnose import advised, read_case, verdict

    failure = None if traceback is None else operations.read_traceback(read_text(traceback))
    if config is None:
        if failure is None:
            raise UsageError("nothing to diagnose: give your trainer's --config, or the --traceback of an error")
        print_json(failure.alone_json()) if as_json else print(error_text(failure))
        return
    user = operations.DiagnosisRequest(
        hardware=hardware,
        trainer=trainer,
        model=model,
        seq_len=seq_len,
        devices=devices,
        memory_limit_bytes=size(memory_limit),
        also={} if also is None else techniques.parse(also),
        failure=failure,
    )
    with Waiting():
        case = read_case(config, user)
        diagnosis = verdict(case)
    if not as_json:
        print(diagnosis_text(diagnosis, verbose=verbose), flush=True)
    with Waiting("changes tried") as waiting:
        diagnosis = advised(case, waiting)
    print_json(diagnosis.to_json()) if as_json else print(f"\n{changes_text(diagnosis, verbose=verbose)}")
    raise typer.Exit(0 if diagnosis.fits else 3)


def read_text(path: Path) -> str:
    """The text of a file, or of standard input for `-`, in UTF-8 or UTF-16. Raises `UsageError`."""
    import codecs
    import sys

    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    in_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = data.decode("utf-16" if in_utf16 else "utf-8-sig", errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")  # a progress bar begins its line anew
