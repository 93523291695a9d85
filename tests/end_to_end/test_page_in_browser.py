"""The page in a real browser: what only happens there. Without Chromium it is skipped, unless AUTOFIT_NEEDS_BROWSER is
set."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import playwright.sync_api as playwright
import pytest
from leases import submit
from unit.export import tiny_sft
from unit.operations.made_trials import HARDWARE, MODEL, fill, fits, make_job, make_trial

from autofit.api.app import create_app
from autofit.core.errors import StoreError
from autofit.operations import WorkloadOptions
from autofit.store import Lease, Store

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not os.environ.get("AUTOFIT_NEEDS_BROWSER"),
    reason="Chromium is not installed: apt-get install chromium",
)

playwright.expect.set_options(timeout=120_000)  # milliseconds: however busy the machine is

TOKEN = "correct-horse-battery-staple"
QUERY = f"model={MODEL}&seq_len=128&global_batch=4&hardware=h100-80g"
EVERY = ("/", f"/frontier?{QUERY}", f"/hardware?{QUERY}", "/point/5", "/point/4", "/calculator", "/searches")


def estimate(function: Any, *arguments: Any, **named: Any) -> dict[str, Any]:
    """In place of the estimating process: a GiB for each sequence of the micro-batch."""
    call = partial(function, *arguments, **named)
    taken = call.args[1].get("micro_batch", 1) * 2**30
    return {
        "fits": True, "hardware": call.keywords["hardware"], "device_bytes": taken, "memory_limit_bytes": 24 * 2**30,
        "headroom_bytes": 24 * 2**30 - taken, "tokens_per_second": None, "relative_error": None,
        "breakdown": {"weights": taken}, "advice": [], "lightest": None,
    }  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with ten trials."""
    with Store.open(str(tmp_path / "store.db")) as opened:
        fill(opened)
        yield opened


@pytest.fixture
def server(store: Store) -> Iterator[str]:
    """The address of a server on this machine that anyone may read."""
    import uvicorn

    app = create_app(store, token=TOKEN, closed=False, loopback=True)
    for process in (app.state.estimating, app.state.predicting):
        process.call, process.warm = estimate, lambda: None
    serving = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=serving.run)
    thread.start()
    while not serving.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{serving.servers[0].sockets[0].getsockname()[1]}"
    serving.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def complaints() -> list[str]:
    """What a page complains of."""
    return []


@pytest.fixture
def browser(chromium: Any, server: str, complaints: list[str]) -> Iterator[Any]:
    """A page that may complain of nothing, and ask nobody else."""
    context = chromium.new_context(base_url=server, permissions=["clipboard-read", "clipboard-write"])
    context.set_default_timeout(120_000)
    page = context.new_page()
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: None if is_own(request.url, server) else complaints.append(request.url))
    page.on("dialog", lambda dialog: dialog.accept())
    yield page
    context.close()
    assert complaints == []


def is_own(address: str, server: str) -> bool:
    return address.startswith((f"{server}/", "data:", "blob:"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", EVERY)
def test_a_narrow_screen_shows_all(browser: Any, path: str, scheme: str) -> None:
    browser.set_viewport_size({"width": 360, "height": 640})
    browser.emulate_media(color_scheme=scheme)
    browser.goto(path)
    browser.wait_for_load_state("networkidle")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is (scheme == "light")
    browser.keyboard.press("Tab")
    assert browser.evaluate("document.activeElement.textContent") == "Skip to the content"
    unnamed = "[...document.querySelectorAll('input, select')].filter(e => e.type !== 'hidden' && !e.labels.length"
    assert browser.evaluate(f"{unnamed} && !e.ariaLabel).length") == 0


def test_the_limit_is_dragged_typed_and_moved_by_keys(browser: Any) -> None:
    browser.goto(f"/frontier?{QUERY}")
    verdict = browser.locator(".verdict b")
    assert "4,000 tokens/s" in verdict.inner_text()
    line = browser.locator("#chart .shapelayer path").first
    line.scroll_into_view_if_needed()
    box, plot = line.bounding_box(), browser.locator("#chart .bglayer .bg, #chart .plotbg rect").first.bounding_box()
    share = 30 / 80 * (box["x"] - plot["x"])  # the line stands at 80 GiB
    middle = plot["y"] + plot["height"] / 3
    browser.mouse.move(box["x"] + box["width"] / 2, middle)
    browser.mouse.down()
    browser.mouse.move(plot["x"] + share, middle, steps=5)
    browser.mouse.up()
    playwright.expect(verdict).to_contain_text("2,000 tokens/s")
    browser.wait_for_url("**memory_limit=*")
    assert 25 < float(browser.locator("#limit").input_value().removesuffix("GiB")) < 35
    browser.locator("#limit").fill("12GiB")
    browser.keyboard.press("Enter")
    playwright.expect(verdict).to_contain_text("1,000 tokens/s")
    browser.locator("#limit-range").focus()
    browser.keyboard.press("End")
    playwright.expect(verdict).to_contain_text("4,000 tokens/s")


def test_the_calculator_answers_while_one_types(browser: Any) -> None:
    browser.goto("/calculator")
    answer = browser.locator("#estimate .verdict")
    playwright.expect(answer).to_contain_text("4.00 GiB of 24.00 GiB")
    browser.get_by_label("Micro batch").fill("7")
    playwright.expect(answer).to_contain_text("7.00 GiB of 24.00 GiB")
    playwright.expect(browser.locator("#estimate")).to_contain_text("No single change is clearly faster")


def test_an_export_is_copied(browser: Any) -> None:
    browser.goto("/point/5")
    browser.get_by_text("json", exact=True).click()
    browser.get_by_role("button", name="Copy").click()
    playwright.expect(browser.get_by_role("button", name="Copied")).to_be_visible()
    assert '"trial_id": 5' in browser.evaluate("navigator.clipboard.readText()")


def test_an_export_is_copied_and_trained_by_its_trainer(browser: Any, store: Store, tmp_path: Path) -> None:
    """The file as copied, but for its model, which is large."""
    hardware = replace(HARDWARE, name="cpu-8c", kind="cpu", device_name="a processor", capability=None)
    job = make_job(WorkloadOptions(model=MODEL, seq_len=16, global_batch=4), hardware=hardware)
    kept = store.add(make_trial({"method": "lora", "micro_batch": 2, "precision": "fp32"}, fits(2, 500), job=job))
    browser.goto(f"/point/{kept.trial_id}")
    browser.get_by_text("trl", exact=True).click()
    browser.get_by_role("button", name="Copy").click()
    playwright.expect(browser.get_by_role("button", name="Copied")).to_be_visible()
    file = tmp_path / "sft.yaml"
    file.write_text(browser.evaluate("navigator.clipboard.readText()"))
    args, model = tiny_sft.parse(file, "--model_name_or_path", tiny_sft.save_tiny_llama(str(tmp_path / "tiny")))
    trainer = tiny_sft.train(args, model, tmp_path, steps=2)
    assert trainer.state.global_step == 2
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape == (2, 16)


def test_a_price_gives_a_cost(browser: Any) -> None:
    browser.goto(f"/hardware?{QUERY}")
    browser.get_by_label("Price of one h100-80g for an hour").fill("3.60")
    browser.keyboard.press("Tab")
    playwright.expect(browser.locator("#rows")).to_contain_text("0.25")
    browser.wait_for_url("**price.h100-80g=3.60*")


def test_a_search_is_started_watched_and_cancelled(browser: Any, store: Store) -> None:
    browser.goto(f"/login?next=/searches%3F{QUERY.replace('&', '%26')}")
    browser.get_by_label("Token").fill(TOKEN)
    browser.keyboard.press("Enter")
    browser.get_by_role("button", name="Start").click()
    state = browser.locator("#state")
    playwright.expect(state).to_contain_text("waits for a free runner with h100-80g")
    store.add(store.trials()[1], lease=claimed(store))
    playwright.expect(browser.locator("#live tbody")).to_contain_text("20 GiB")
    playwright.expect(state).to_contain_text("running")
    playwright.expect(state).to_contain_text("1 trial,")
    browser.get_by_role("button", name="Cancel").click()
    playwright.expect(state).to_contain_text("cancelled")
    playwright.expect(browser.locator("#live tbody tr")).to_have_count(1)


def test_a_search_is_watched_to_its_end_though_the_store_goes_away(
    browser: Any, store: Store, complaints: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    search_id, rows = submit(store, store.trials()[0]), browser.locator("#live tbody tr")
    browser.goto(f"/searches/{search_id}")
    lease = claimed(store)
    store.add(store.trials()[1], lease=lease)
    playwright.expect(rows).to_have_count(1)

    def refused() -> Any:
        return browser.expect_response(lambda answer: answer.url.endswith("/events") and answer.status == 503)

    with monkeypatch.context() as away:
        with refused():
            away.setattr(store, "search", fails)
        with refused():  # the page itself has asked anew
            playwright.expect(rows).to_have_count(1)
        playwright.expect(rows).to_have_count(1)
    assert f"the events of search {search_id} break off: the store is gone" in caplog.text
    store.add(store.trials()[2], lease=lease)
    store.queue.end(lease, "succeeded", None)
    playwright.expect(rows).to_have_count(2)
    playwright.expect(browser.locator("#state")).to_contain_text("succeeded")
    assert [text for text in complaints if "503" not in text] == []
    complaints.clear()


def fails(*arguments: object) -> None:
    raise StoreError("the store is gone", remedy="mend it")


def test_a_click_on_a_point_shows_it(browser: Any) -> None:
    browser.goto(f"/frontier?{QUERY}")
    points = browser.locator("#chart .scatterlayer .trace", has=browser.locator(".js-line")).locator(".point")
    points.first.hover(force=True)  # what Plotly draws over them takes the mouse
    playwright.expect(browser.locator("#chart .hoverlayer .hovertext")).to_be_visible()
    browser.mouse.down()
    browser.mouse.up()
    browser.wait_for_url("**/point/*")
    playwright.expect(browser.locator("main")).to_contain_text("1,000 tokens/s in")


def claimed(store: Store) -> Lease:
    lease = store.queue.claim("a:1:0")
    assert lease is not None
    return lease
