"""What commands print and write where all is well: tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from unit.cli.conftest import Autofit
from unit.operations.made_trials import HARDWARE, MADE, crashed, fill, make_job, make_trial, out_of_memory
from unit.operations.made_world import World

from autofit import __version__, operations
from autofit.catalog.models import names
from autofit.core.errors import EnvironmentLacks
from autofit.core.units import GIB
from autofit.operations import doctor
from autofit.operations.self_test import running
from autofit.operations.self_test.device_under_test import DeviceUnderTest
from autofit.operations.self_test.finding import Check, Finding, Verdict
from autofit.store import Store
from autofit.trial.machine import detection as site
from autofit.trial.machine.detection import detect
from autofit.trial.process.runner import TrialRunner

ASKED = ("--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "4")
SEARCH = ("search", *ASKED, "--device", "cpu", "--memory-limit", "2GiB")


def test_a_search_prints_one_document(autofit: Autofit, world: World, store_file: Path) -> None:
    done = autofit(*SEARCH, "--json")
    assert done.code == 0
    result = done.document
    assert result["trials"] == len(world.pools[0].submitted)
    assert result["recommendation"]["provenance"] == "measured"
    # Progress goes to standard error: where it is no terminal a line as a trial ends, and one as it begins.
    lines = [line for line in done.err.splitlines() if not line.startswith(("  running ", "  verifying "))]
    assert len(lines) >= result["trials"]
    assert all(" done, " in line and "out of memory" in line for line in lines)
    assert f"{result['trials']} trials done" in lines[-1]
    with Store.open(str(store_file)) as store:
        assert store.count() == result["trials"]


def test_a_search_prints_a_table_and_a_recommendation(autofit: Autofit, world: World) -> None:
    done = autofit(*SEARCH)
    assert done.code == 0
    device, _ = detect("cpu")
    verdict, cost = done.out.splitlines()[:2]
    assert verdict.startswith("Recommended: ") and "tokens/s, " in verdict and " GiB of " in verdict
    assert " trials (" in cost and "; stopped because " in cost
    assert f"Frontier of {device.name} for smollm2-135m, 128 tokens x 4 sequences a step, within " in done.out
    assert "Recommended for smollm2-135m, 128 tokens x 4 sequences a step" in done.out
    assert " of headroom" in done.out
    assert "ruled out without running" in done.out
    again = autofit(*SEARCH)
    assert again.code == 0
    assert "0 trials (0 out of memory)" in again.out
    assert len(world.pools) == 1


def test_a_search_over_numbers_of_devices(autofit: Autofit, world: World) -> None:
    arguments = (*SEARCH, "--devices", "2", "--fewer-devices")
    done = autofit(*arguments)
    assert done.code == 0, done.err
    verdict, table, best = done.out.split("\n\n", 2)
    assert verdict.startswith("Fastest with ")
    assert [line.split()[0] for line in table.splitlines()] == ["devices", "1", "2"]
    assert best.startswith("Recommended: ")
    document = autofit(*arguments, "--json").document
    assert [entry["devices"] for entry in document["by_devices"]] == [1, 2]
    refused = autofit(*SEARCH, "--devices", "3", "--fewer-devices")
    assert (refused.code, refused.out) == (2, "")
    assert "global-batch 4 is not a multiple of 3 devices" in refused.err


def test_progress_says_how_much_is_left_and_what_is_best(autofit: Autofit, world: World) -> None:
    done = autofit(*SEARCH, "--time-budget", "5m")
    last = done.err.splitlines()[-1]
    assert "tokens/s at" in last
    assert last.endswith(" left")


def test_a_dry_run_runs_nothing(autofit: Autofit, world: World, store_file: Path) -> None:
    done = autofit(*SEARCH, "--space", "smoke", "--dry-run", "--json")
    assert done.code == 0
    assert done.document["configs"] == 8
    text = autofit(*SEARCH, "--space", "smoke", "--dry-run")
    assert text.code == 0
    assert text.out.count("nothing is run") == 1 and "smoke" in text.out
    assert world.pools == []
    with Store.open(str(store_file)) as store:
        assert store.count() == 0 and store.searches() == []


def test_an_interrupt_ends_with_130_and_says_that_it_goes_on(autofit: Autofit, world: World, store_file: Path) -> None:
    def interrupt() -> None:
        if len(world.pools[0].submitted) == 4:
            raise KeyboardInterrupt

    world.on_wait = interrupt
    done = autofit(*SEARCH, "--json")
    assert (done.code, done.out) == (130, "")
    last = done.err.splitlines()[-1]
    assert last.startswith("autofit: interrupted; what was measured is stored")
    assert "Traceback" not in done.err
    world.on_wait = lambda: None
    rest = autofit(*SEARCH, "--json")
    assert rest.code == 0
    assert rest.document["answered_from_store"] == 3


def test_an_interrupted_trial_does_not_say_that_it_goes_on(
    autofit: Autofit, monkeypatch: pytest.MonkeyPatch, store_file: Path
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrialRunner, "attempt", interrupt)
    done = autofit("trial", *ASKED, "--device", "cpu", "--config", "method=lora")
    assert (done.code, done.out) == (130, "")
    assert done.err.strip() == "autofit: interrupted"


def test_a_search_whose_trials_all_crash_says_so(autofit: Autofit, world: World) -> None:
    world.special = lambda request: crashed()
    done = autofit(*SEARCH, "--max-trials", "3", "--json")
    assert (done.code, done.out) == (4, "")
    message = done.err.splitlines()[-1]
    assert "out of memory" not in message and "autofit doctor" in message
    # The reason is in the trials: what the user must know is what crashed them.
    assert "SIGSEGV" in message


def test_what_nobody_foresaw_is_no_clean_ending(autofit: Autofit, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(operations, "search", fail)
    with pytest.raises(ZeroDivisionError):
        autofit(*SEARCH)


def test_the_frontier_as_a_table(autofit: Autofit, filled: Path) -> None:
    done = autofit("frontier", *ASKED)
    assert (done.code, done.err) == (0, "")
    heading, *tables = [table.splitlines() for table in done.out.split("\n\n")]
    assert heading == ["Frontier of h100-80g for smollm2-135m, 128 tokens x 4 sequences a step, within 80.00 GiB:"]
    sizes = {"full": ["10.00", "20.00", "40.00"], "lora": ["3.00", "8.00"], "qlora": ["2.00"]}
    for table, (method, expected) in zip(tables, sizes.items(), strict=True):
        assert table[0].split() == ["memory", "tokens/s", "spread", method]
        assert [row.split()[0] for row in table[1:]] == expected
        assert all(f" {method}, " in row for row in table[1:])


def test_the_frontier_as_json(autofit: Autofit, filled: Path) -> None:
    done = autofit("frontier", *ASKED, "--json")
    assert (done.code, done.err) == (0, "")
    assert (done.document["trials"], len(done.document["points"])) == (len(MADE), 6)
    one = autofit("frontier", *ASKED, "--json", "--method", "lora").document["points"]
    assert {p["config"]["method"] for p in one} == {"lora"}
    exact = autofit("frontier", *ASKED, "--json", "--allow", "exact").document["points"]
    assert {p["config"]["precision"] for p in exact} == {"bf16-mixed"}


def test_a_frontier_of_which_nothing_was_tried_says_so(autofit: Autofit, store_file: Path) -> None:
    with Store.open(str(store_file)) as store:
        fill(store, [({"method": "full", "micro_batch": 1}, out_of_memory())])
    done = autofit("frontier", *ASKED, "--method", "lora")
    assert (done.code, done.out) == (4, "")
    assert "autofit search" in done.err and "--method lora" in done.err
    assert autofit("frontier", *ASKED, "--method", "full").code == 0


def test_a_search_says_what_it_left_out(autofit: Autofit, world: World, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "axes:\n  method: [lora]\n  rank: [8, 32]\n  attention: [sdpa, flash]\n  micro_batch: [1]\n"
    )
    arguments = (*SEARCH, "--space", "own.yaml")
    document = autofit(*arguments, "--json").document
    assert document["beyond_goal"] == 2
    assert list(document["unsupported"].values()) == [1]
    (reason,) = document["unsupported"]
    text = autofit(*arguments).out
    assert f"1 cannot work here: {reason}" in text and "2 go beyond" in text
    assert "go beyond" not in autofit(*arguments, "--allow", "training").out


def test_the_frontier_as_a_search_under_a_limit_judges_it(autofit: Autofit, filled: Path) -> None:
    with Store.open(str(filled)) as store:
        # It took 20 GiB under a limit of 80: what happens under 30 matters only to who asks about less.
        store.add(make_trial({"method": "full", "micro_batch": 2}, out_of_memory(), limit=30 * GIB))

    def sizes(*limit: str) -> list[int]:
        points = autofit("frontier", *ASKED, "--method", "full", "--json", *limit).document["points"]
        return [point["measurement"]["device_bytes"] // GIB for point in points]

    assert 20 in sizes() and 20 not in sizes("--memory-limit", "25GiB")
    rows = autofit("frontier", *ASKED, "--method", "full", "--memory-limit", "39GiB").out.splitlines()[3:]
    assert [row.split()[0] for row in rows if row.endswith(" (over the limit)")] == ["40.00"]


def test_json_is_also_an_option_of_recommend(autofit: Autofit, filled: Path) -> None:
    done = autofit("recommend", *ASKED, "--json")
    assert done.code == 0
    assert done.out == autofit("recommend", *ASKED, "--format", "json").out
    assert autofit("recommend", *ASKED, "--json", "--memory-limit", "1GiB").document["closest"]
    both = autofit("recommend", *ASKED, "--json", "--format", "trl")
    assert both.code == 2 and "--format trl was also given" in both.err


def test_charts_are_written(autofit: Autofit, filled: Path, tmp_path: Path) -> None:
    done = autofit("frontier", *ASKED, "--html", "chart.html", "--png", "chart.png", "--json")
    assert (done.code, done.err) == (0, "autofit: chart.html is written\nautofit: chart.png is written\n")
    assert done.document["trials"] == len(MADE)
    assert (tmp_path / "chart.html").read_text().lower().count("<html") == 1
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_recommendation_says_whether_it_was_run_again(autofit: Autofit, filled: Path) -> None:
    assert "repeats), measured, one run" in autofit("recommend", *ASKED).out
    with Store.open(str(filled)) as store:
        fill(store)
    assert "repeats), measured, verified by a second run" in autofit("recommend", *ASKED).out


def test_a_recommendation_for_people(autofit: Autofit, filled: Path) -> None:
    done = autofit("recommend", *ASKED, "--memory-limit", "30GiB")
    assert (done.code, done.err) == (0, "")
    assert "2,000 tokens/s" in done.out
    assert "20.00 GiB of 30.00 GiB: 10.00 GiB of headroom" in done.out
    assert "trains exactly as the plain recipe does" in done.out
    assert "faster, does not fit: 4,000 tokens/s (2.00x), 40.00 GiB, 10.00 GiB over the limit" in done.out
    assert done.out.count("other method: ") == 2
    assert "lighter: 1,000 tokens/s" in done.out


@pytest.mark.parametrize("form", ["json", "transformers", "trl", "accelerate", "deepspeed"])
def test_a_recommendation_for_a_trainer(autofit: Autofit, filled: Path, tmp_path: Path, form: str) -> None:
    done = autofit("recommend", *ASKED, "--format", form)
    assert done.code == 0
    assert done.out.endswith("\n")
    # Notes for the reader are no part of what a trainer reads.
    assert all(line.startswith("autofit: ") for line in done.err.splitlines())
    written = autofit("recommend", *ASKED, "--format", form, "-o", "answer")
    assert (written.code, written.out) == (0, "")
    assert written.err == f"{done.err}autofit: answer is written\n"
    assert (tmp_path / "answer").read_text() == done.out
    if form == "json":
        assert json.loads(done.out)["provenance"] == "measured"
    elif form == "deepspeed":
        assert json.loads(done.out)["gradient_clipping"] == 1.0
    else:
        assert "HuggingFaceTB/SmolLM2-135M" in done.out


def test_the_goal_of_a_recommendation(autofit: Autofit, filled: Path) -> None:
    done = autofit("recommend", *ASKED, "--method", "lora", "--min-rank", "64", "--format", "json")
    assert done.document["config"]["rank"] == 64
    done = autofit("recommend", *ASKED, "--allow", "exact", "--format", "json")
    assert done.document["changes_training"] == []


def test_models(autofit: Autofit) -> None:
    done = autofit("models", "--json")
    assert (done.code, done.err) == (0, "")
    assert [m["name"] for m in done.document] == list(names())
    assert all(m["parameters"] > 0 and m["source"] for m in done.document)
    table = autofit("models")
    assert "smollm2-135m" in table.out and "134,515,008" in table.out
    assert "gemma-3-4b: trained, and counted, without its vision tower" in table.out
    assert {m["name"] for m in autofit("models", "Qwen3", "--json").document} == {n for n in names() if "qwen3" in n}
    notes = {m["name"]: m["note"] for m in done.document}
    assert "text model" in notes["gemma-3-4b"] and notes["smollm2-135m"] is None


def test_hardware(autofit: Autofit) -> None:
    done = autofit("hardware", "--json")
    assert (done.code, done.err) == (0, "")
    device, stack = detect()
    assert done.document["here"] == {"hardware": device.to_json(), "stack": stack.to_json()}
    assert {"h100-80g", "a100-40g", "rtx-4090", "t4"} <= {c["name"] for c in done.document["cards"]}
    assert [card["name"] for card in autofit("hardware", "GH200", "--json").document["cards"]] == ["gh200-96g"]
    table = autofit("hardware")
    assert f"This machine: {device.name}" in table.out


def test_the_catalog_is_listed_where_this_machine_cannot_be_looked_at(
    autofit: Autofit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: str = "auto") -> None:
        raise EnvironmentLacks("torch is not installed", remedy="pip install torch")

    monkeypatch.setattr(site, "detect", fail)
    done = autofit("hardware", "--json")
    assert (done.code, done.document["here"]) == (0, None)
    assert done.err == "autofit: this machine: torch is not installed (pip install torch)\n"
    assert "h100-80g" in {c["name"] for c in done.document["cards"]}
    table = autofit("hardware")
    assert table.code == 0 and "h100-80g" in table.out
    assert table.out.endswith("This machine: torch is not installed (pip install torch)\n")


def test_spaces(autofit: Autofit) -> None:
    done = autofit("spaces", "--json")
    assert (done.code, done.err) == (0, "")
    sizes = {s["name"]: s["configs"] for s in done.document}
    assert sizes["smoke"] == 8 and sizes["single-gpu"] >= 2000
    smaller = {s["name"]: s["configs"] for s in autofit("spaces", "--global-batch", "4", "--json").document}
    assert smaller["single-gpu"] < sizes["single-gpu"]
    assert "smoke" in autofit("spaces").out


def test_spaces_of_a_batch_that_one_of_them_cannot_divide(autofit: Autofit) -> None:
    """One space without a config for this batch is no reason to say nothing of the others."""
    done = autofit("spaces", "--global-batch", "7", "--json")
    assert done.code == 0
    assert {s["name"] for s in done.document} >= {"cpu", "single-gpu", "smoke"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A doctor who believes that trials and Ray work."""
    monkeypatch.setattr(doctor, "_trial", lambda device, hardware: "a small trial ran in 1.0 s")
    monkeypatch.setattr(doctor, "_ray", lambda device: "1 worker")


@pytest.mark.usefixtures("quick")
def test_a_healthy_machine(autofit: Autofit) -> None:
    done = autofit("doctor", "--device", "cpu", "--json")
    assert (done.code, done.err) == (0, "")
    states = {c["name"]: c["state"] for c in done.document}
    assert {"device", "torch", "transformers", "store", "disk", "trial", "ray"} <= set(states)
    assert set(states.values()) <= {"ok", "optional"}
    assert "ray" not in {c["name"] for c in autofit("doctor", "--no-ray", "--json").document}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("arguments", "name", "part"),
    [
        (("--store", "a-file/store.db"), "store", "a-file"),
        (("--store", "ftp://x"), "store", "not supported"),
        (("--device", "mps"), "device", "mps"),
    ],
)
def test_what_is_missing_ends_the_doctor_with_4(
    autofit: Autofit, tmp_path: Path, arguments: tuple[str, ...], name: str, part: str
) -> None:
    (tmp_path / "a-file").write_text("no folder")
    done = autofit("doctor", "--device", "cpu", *arguments, "--json")
    assert (done.code, done.err) == (4, "")
    missing = {c["name"]: c for c in done.document if c["state"] == "missing"}
    assert set(missing) == {name}
    assert part in missing[name]["found"]
    assert missing[name]["remedy"]


def test_an_unknown_device_is_wrong_usage_for_the_doctor_too(autofit: Autofit) -> None:
    done = autofit("doctor", "--device", "gpu", "--no-ray")
    assert (done.code, done.out) == (2, "")
    assert "unknown device 'gpu'" in done.err


def test_a_self_test_that_shows_a_defect_ends_with_4_and_its_remedy(
    autofit: Autofit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(tested: DeviceUnderTest, until: float) -> Finding:
        return Finding(verdict=Verdict.FAILED, reason="the kernel does not load", remedy="pip install the-kernel")

    check = Check(name="attention=flash", shows="Whether it trains.", run=failing, technique=True)
    monkeypatch.setattr(running, "checks", lambda kind: (check,))
    done = autofit("doctor", "--self-test", "--device", "cpu", "--out", "report.json")
    assert done.code == 4
    assert "0 of 1 techniques work; attention=flash failed." in done.out
    assert "autofit: attention=flash: pip install the-kernel" in done.err
    (found,) = json.loads(Path("report.json").read_text())["checks"]
    assert (found["verdict"], found["reason"]) == ("failed", "the kernel does not load")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--out", "absent/report.json"), "absent/report.json cannot be written"),
        (("--time-limit", "2"), "duration '2' has no unit"),
        (("--device", "gpu"), "unknown device 'gpu'"),
    ],
)
def test_what_is_asked_wrongly_of_a_self_test(autofit: Autofit, options: tuple[str, str], message: str) -> None:
    done = autofit("doctor", "--self-test", "--device", "cpu", *options)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


@pytest.mark.usefixtures("quick")
def test_a_library_that_is_absent(autofit: Autofit, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware, stack = detect("cpu")
    without = type(stack)(**{**stack.to_json(), "peft": None, "deepspeed": None})
    monkeypatch.setattr(doctor, "detect", lambda device: (hardware, without))
    done = autofit("doctor", "--device", "cpu", "--json")
    assert done.code == 4
    states = {c["name"]: (c["state"], c["remedy"]) for c in done.document}
    assert states["peft"] == ("missing", "pip install autofit-llm")
    assert states["deepspeed"] == ("optional", "pip install autofit-llm")
    building = autofit("doctor", "--device", "cpu", "--build-ops", "--json").document
    assert {c["name"] for c in building if c["state"] == "missing"} == {"peft", "deepspeed"}


def test_ray_that_is_absent(autofit: Autofit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_trial", lambda device, hardware: "a small trial ran in 1.0 s")
    monkeypatch.setitem(sys.modules, "ray", None)  # what makes `import ray` fail as if it were not installed
    done = autofit("doctor", "--device", "cpu", "--json")
    assert (done.code, done.err) == (4, "")
    (missing,) = [c for c in done.document if c["state"] == "missing"]
    assert (missing["name"], missing["remedy"]) == ("ray", "pip install autofit-llm, or use --in-place")


def test_the_store_travels(autofit: Autofit, filled: Path, tmp_path: Path) -> None:
    assert autofit("db", "check").code == 0
    report = autofit("db", "check", "--json")
    assert (report.code, report.err) == (0, "")
    exported = autofit("db", "export", "trials.jsonl")
    assert (exported.code, exported.out) == (0, f"{len(MADE)} trials written to trials.jsonl\n")
    imported = autofit("db", "import", "trials.jsonl", "--store", "other.db")
    assert (imported.code, imported.out) == (0, f"{len(MADE)} trials added, 0 were there already\n")
    again = autofit("db", "import", "trials.jsonl", "--store", "other.db")
    assert again.out == f"0 trials added, {len(MADE)} were there already\n"
    answer = autofit("recommend", *ASKED, "--format", "json").document
    imported_answer = autofit("recommend", *ASKED, "--format", "json", "--store", "other.db").document
    assert answer["measurement"] == imported_answer["measurement"]


def test_a_store_is_brought_to_the_newest_schema(autofit: Autofit, store_file: Path) -> None:
    done = autofit("db", "upgrade")
    assert done.code == 0
    assert done.out.startswith("the store is at schema ")
    assert store_file.exists()


def test_version(autofit: Autofit) -> None:
    done = autofit("--version")
    assert (done.code, done.out, done.err) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("command", ["--version", "hardware --json"], ids=["little to print", "much to print"])
def test_a_reader_who_leaves_is_no_error(store_file: Path, command: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "autofit.cli.main", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "AUTOFIT_STORE": str(store_file)},
    ) as started:
        assert started.stdout is not None and started.stderr is not None
        started.stdout.close()
        errors = started.stderr.read()
    assert (started.returncode, errors) == (0, "")


@pytest.mark.parametrize(("host", "is_said"), [(GIB // 4, True), (GIB, False)])
def test_a_recommendation_says_where_its_checkpoints_exceed_the_hosts_memory(
    autofit: Autofit, store_file: Path, host: int, is_said: bool
) -> None:
    """All that is saved of the recommended config are 135 million weights in fp32."""
    with Store.open(str(store_file)) as store:
        fill(store, job=make_job(hardware=replace(HARDWARE, host_memory_bytes=host)))
    words = "recommend --model smollm2-135m --seq-len 128 --global-batch 4 --method full --memory-limit 30GiB"
    for form in ("", " --format trl --anyway"):
        done = autofit(words + form)
        assert done.code == 0, done.err
        assert ("checkpoints: saving one takes" in done.out) is is_said
