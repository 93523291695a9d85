"""What the server answers: the documents of the design, key by key, from a store of hand-made trials."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from jobs import model_in
from unit.operations.made_trials import GIB, MADE, MODEL, fits, make_job, make_trial, out_of_memory

from autofit.api.app import create_app
from autofit.operations import WorkloadOptions
from autofit.store import Store

WORKLOAD = {"model": MODEL, "seq_len": 128, "global_batch": 4}

TRIAL_KEYS = {"outcome", "config", "hardware", "stack", "workload"}
TRIAL_KEYS_BESIDES = {"memory_limit_bytes", "seconds", "recorded_at", "trial_id"}
MEASUREMENT_KEYS = {
    *("tokens_per_second", "step_seconds", "mfu", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes"),
    *("host_peak_bytes", "phase_peaks", "loss", "steps", "setup_seconds"),
}
MEASUREMENT_KEYS_BESIDES = {
    *("host_baseline_bytes", "losses", "reference_loss", "overhead_seconds", "leak_bytes_per_step"),
    *("expandable_segments", "stopped_early", "gradient_norms", "setup_peak_bytes", "ranks", "plain_gradient_norm"),
}
FRONTIER_KEYS = {"hardware", "workload", "stack", "points", "trials", "out_of_memory"}
POINT_KEYS = {"config", "measurement", "trial_id"}
RECOMMENDATION_KEYS = {*("config", "provenance", "measurement", "headroom_bytes", "changes_training", "alternatives")}
RECOMMENDATION_KEYS_BESIDES = {
    *("verified", "contradictory", "trial_id", "memory_limit_bytes", "hardware", "workload", "stack")
}
ALTERNATIVE_KEYS = {*POINT_KEYS, "role", "over_limit_bytes", "speedup"}


def get(client: TestClient, path: str, **query: Any) -> Any:
    """The JSON of a request that succeeds."""
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def test_a_recommendation_has_the_designs_keys(client: TestClient) -> None:
    answer = get(client, "/v1/recommendation", **WORKLOAD)
    assert set(answer) == RECOMMENDATION_KEYS | RECOMMENDATION_KEYS_BESIDES
    assert set(answer["measurement"]) == MEASUREMENT_KEYS | MEASUREMENT_KEYS_BESIDES
    assert set(answer["measurement"]["step_seconds"]) == {"median", "p95", "relative_spread"}
    assert set(answer["measurement"]["loss"]) == {"first", "last"}
    assert answer["provenance"] == "measured"
    assert all(set(a) == ALTERNATIVE_KEYS for a in answer["alternatives"])


def test_the_fastest_of_the_most_faithful_method_is_recommended(client: TestClient) -> None:
    answer = get(client, "/v1/recommendation", **WORKLOAD)
    assert answer["config"]["method"] == "full"
    assert answer["measurement"]["tokens_per_second"] == 4000.0
    assert answer["memory_limit_bytes"] == 80 * GIB
    assert answer["headroom_bytes"] == 40 * GIB
    assert answer["changes_training"] == ["precision=bf16 instead of bf16-mixed changes numerical precision"]


@pytest.mark.parametrize(
    ("limit", "method", "speed"),
    [
        (f"{40 * GIB - 1}B", "full", 2000.0),
        ("40GiB", "full", 4000.0),
        ("9.9GiB", "lora", 2600.0),
        ("2.5GiB", "qlora", 700.0),
    ],
)
def test_a_memory_limit_decides(client: TestClient, limit: str, method: str, speed: float) -> None:
    answer = get(client, "/v1/recommendation", **WORKLOAD, memory_limit=limit)
    assert (answer["config"]["method"], answer["measurement"]["tokens_per_second"]) == (method, speed)
    assert answer["headroom_bytes"] == answer["memory_limit_bytes"] - answer["measurement"]["device_bytes"] >= 0


def test_the_alternatives_of_a_recommendation(client: TestClient) -> None:
    answer = get(client, "/v1/recommendation", **WORKLOAD, memory_limit="30GiB")
    alternatives = {(a["role"], a["config"]["method"]): a for a in answer["alternatives"]}
    faster = alternatives["faster, does not fit", "full"]
    assert (faster["over_limit_bytes"], faster["speedup"]) == (10 * GIB, 2.0)
    lighter = alternatives["lighter", "full"]
    assert (lighter["over_limit_bytes"], lighter["speedup"]) == (-20 * GIB, 0.5)
    assert alternatives["other method", "lora"]["measurement"]["tokens_per_second"] == 2600.0
    assert alternatives["other method", "qlora"]["measurement"]["tokens_per_second"] == 700.0
    assert len(alternatives) == len(answer["alternatives"]) == 4


def test_a_goal_decides(client: TestClient) -> None:
    exact = get(client, "/v1/recommendation", **WORKLOAD, allow="exact")
    assert exact["measurement"]["tokens_per_second"] == 2000.0
    assert exact["changes_training"] == []
    assert get(client, "/v1/recommendation", **WORKLOAD, method="qlora")["measurement"]["tokens_per_second"] == 700.0
    assert get(client, "/v1/recommendation", **WORKLOAD, method="lora")["config"]["rank"] == 8
    assert get(client, "/v1/recommendation", **WORKLOAD, method="lora", min_rank=9)["config"]["rank"] == 64
    high = get(client, "/v1/recommendation", **WORKLOAD, min_rank=64, memory_limit="9GiB")
    assert high["measurement"]["tokens_per_second"] == 2500.0


def test_the_frontier_has_the_designs_keys(client: TestClient) -> None:
    answer = get(client, "/v1/frontier", **WORKLOAD)
    assert set(answer) == {*FRONTIER_KEYS, "contradictory"}
    assert all(set(point) == POINT_KEYS for point in answer["points"])
    assert (answer["trials"], answer["out_of_memory"]) == (len(MADE), 1)


def test_the_frontier_is_sorted_by_memory(client: TestClient) -> None:
    points = get(client, "/v1/frontier", **WORKLOAD)["points"]
    sizes = [(p["config"]["method"], p["measurement"]["device_bytes"] // GIB) for p in points]
    assert sizes == [("qlora", 2), ("lora", 3), ("lora", 8), ("full", 10), ("full", 20), ("full", 40)]


def test_the_frontier_within_a_goal(client: TestClient) -> None:
    exact = get(client, "/v1/frontier", **WORKLOAD, allow="exact")["points"]
    assert {p["config"]["precision"] for p in exact} == {"bf16-mixed"}
    high = get(client, "/v1/frontier", **WORKLOAD, min_rank=64)["points"]
    assert {p["config"].get("rank") for p in high} == {None, 64}
    # A dominated config comes back where what beats it is not allowed.
    both = get(client, "/v1/frontier", **WORKLOAD, method="full", allow="exact")["points"]
    assert [p["measurement"]["device_bytes"] // GIB for p in both] == [10, 20]


def test_the_frontier_as_a_search_under_a_limit_judges_it(client: TestClient, store: Store) -> None:
    """A trial that ran out under 30 GiB, of a config that took 20 under 80, matters only to who asks about less."""
    store.add(make_trial({"method": "full", "micro_batch": 2}, out_of_memory(), limit=30 * GIB))
    sizes_by_limit = [
        [p["measurement"]["device_bytes"] // GIB for p in get(client, "/v1/frontier", **WORKLOAD, **limit)["points"]]
        for limit in ({}, {"memory_limit": "25GiB"})
    ]
    assert [20 in sizes for sizes in sizes_by_limit] == [True, False]


def test_a_model_in_other_letters_is_the_same(client: TestClient) -> None:
    assert get(client, "/v1/frontier", **{**WORKLOAD, "model": "SmolLM2-135M"})["trials"] == len(MADE)


def test_a_model_beside_the_catalog_is_answered_by_its_name(client: TestClient, store: Store, tmp_path: Path) -> None:
    folder = model_in(tmp_path / "tiny")
    options = WorkloadOptions(model=str(folder), seq_len=128, global_batch=4)
    job = options.job((store.hardware()[0], store.trials()[0].stack))
    store.add(make_trial({}, fits(1, 900), job=job))
    query = {**WORKLOAD, "model": "tiny"}
    assert get(client, "/v1/recommendation", **query)["workload"] == job.workload.to_json()
    assert get(client, "/v1/frontier", **query)["trials"] == 1
    other = client.get("/v1/frontier", params={**query, "seq_len": 64})
    assert (other.status_code, "measured: seq-len 128" in other.json()["detail"]) == (404, True)
    # A name, never a path: that would let a client read the server's files.
    assert client.get("/v1/frontier", params={**query, "model": str(folder)}).status_code == 400


def test_trials_have_the_designs_keys(client: TestClient) -> None:
    answer = get(client, "/v1/trials")
    assert set(answer) == {"trials", "total", "next"}
    by_outcome = {trial["outcome"]: trial for trial in answer["trials"]}
    fitting, failed, crash = by_outcome["fits"], by_outcome["out_of_memory"], by_outcome["crashed"]
    assert set(fitting) == TRIAL_KEYS | TRIAL_KEYS_BESIDES | {"measurement"}
    assert set(fitting["measurement"]) == MEASUREMENT_KEYS | MEASUREMENT_KEYS_BESIDES
    evidence = {"reason", "phase", "requested_bytes", "signal", "host"}
    assert set(failed) == TRIAL_KEYS | TRIAL_KEYS_BESIDES | evidence
    assert (failed["phase"], failed["requested_bytes"]) == ("backward", 2 * GIB)
    assert set(crash) == TRIAL_KEYS | TRIAL_KEYS_BESIDES | {
        *("reason", "phase", "signal", "exit_code", "stderr_tail", "transient", "worker_lost")
    }


def test_trials_are_paged_newest_first(client: TestClient) -> None:
    whole = get(client, "/v1/trials")
    assert whole["total"] == len(whole["trials"]) == len(MADE)
    ids = [trial["trial_id"] for trial in whole["trials"]]
    assert ids == sorted(ids, reverse=True)
    pages = [get(client, "/v1/trials", limit=4)]
    while pages[-1]["next"] is not None:
        pages.append(get(client, "/v1/trials", limit=4, before=pages[-1]["next"]))
    assert [len(page["trials"]) for page in pages] == [4, 4, len(MADE) - 8]
    assert [trial["trial_id"] for page in pages for trial in page["trials"]] == ids
    assert {page["total"] for page in pages} == {len(MADE)}
    assert get(client, "/v1/trials", before=1) == {"trials": [], "total": len(MADE), "next": None}


def test_trials_of_a_model_and_an_outcome(client: TestClient, store: Store) -> None:
    other = WorkloadOptions(model="qwen3-8b", seq_len=2048, global_batch=16)
    job = other.job((store.hardware()[0], store.trials()[0].stack))
    store.add(make_trial({}, fits(60, 900), job=job))
    assert get(client, "/v1/trials", model="qwen3-8b")["total"] == 1
    assert get(client, "/v1/trials", model=MODEL)["total"] == len(MADE)
    habits = make_job(WorkloadOptions(model=MODEL, seq_len=128, global_batch=4, trainer="trl", eval_batch=2))
    store.add(make_trial({"method": "lora"}, fits(2.0, 100.0), job=habits))
    assert [get(client, "/v1/trials", **{"for": "trl", "eval_batch": n})["total"] for n in (2, 3)] == [1, 0]
    answer = get(client, "/v1/trials", model=MODEL, outcome="out_of_memory")
    assert (answer["total"], [t["outcome"] for t in answer["trials"]]) == (1, ["out_of_memory"])


def test_no_trial_is_of_a_model_that_no_database_can_name(url: str) -> None:
    with Store.open(url) as store:
        client = TestClient(create_app(store), raise_server_exceptions=False)
        assert get(client, "/v1/trials", model="\0")["total"] == 0
        assert client.get("/v1/frontier", params={"model": "\0"}).status_code == 400


def test_trials_of_a_workload_and_hardware(client: TestClient, store: Store) -> None:
    (card,), stack = store.hardware(), store.trials()[0].stack
    other = replace(card, name="t4", device_name="Tesla T4")
    same = {"seq_len": 128, "global_batch": 4}
    for changed in ({}, {"seed": 7}, {"devices": 2}, {"lora_dropout": 0.25}, {"seq_len": 256}):
        options = WorkloadOptions(model=MODEL, **{**same, **changed})
        store.add(make_trial({}, fits(6, 900), job=options.job((other, stack))))
    assert get(client, "/v1/trials")["total"] == len(MADE) + 5
    assert get(client, "/v1/trials", hardware="T4")["total"] == 5
    assert get(client, "/v1/trials", hardware="h100-80g")["total"] == len(MADE)
    assert get(client, "/v1/trials", **same, seed=0, devices=1, lora_dropout=0)["total"] == len(MADE) + 1
    assert get(client, "/v1/trials", global_batch=8) == {"trials": [], "total": 0, "next": None}
    for name, value in (("seed", 7), ("devices", 2), ("lora_dropout", 0.25), ("seq_len", 256)):
        (trial,) = get(client, "/v1/trials", **{name: value})["trials"]
        assert (trial["workload"][name], trial["hardware"]["name"]) == (value, "t4")


def test_trials_of_sequences_with_lengths(client: TestClient, store: Store) -> None:
    options = WorkloadOptions.of(model=MODEL, seq_len=128, global_batch=4, lengths=[30, 60, 128])
    added = store.add(make_trial({}, fits(6, 900), job=make_job(options)))
    (trial,) = get(client, "/v1/trials", lengths="60,30,128")["trials"]
    assert (trial["trial_id"], trial["workload"]["lengths"]) == (added.trial_id, [30, 60, 128])
    assert get(client, "/v1/trials", lengths="30,60,512", seq_len=128)["total"] == 1, "longer ones are cut"
    assert get(client, "/v1/trials", lengths="30,60")["total"] == 0
    assert client.get("/v1/trials", params={"lengths": "30,"}).status_code == 400
