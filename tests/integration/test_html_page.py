"""The page in a real headless Chromium, opened from disk. Skipped where chromedriver is missing."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support import fakes
from tests.support import sample_reports as samples

pytestmark = pytest.mark.browser

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1280,900"
)
EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser with its console and its network traffic recorded."""
    chromedriver, chromium = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if chromedriver is None or chromium is None:
        pytest.skip("no chromedriver or no Chromium")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(chromedriver, env={**os.environ}))
    started.set_page_load_timeout(60)
    yield started
    started.quit()


@pytest.fixture
def driver(browser: Any) -> Iterator[Any]:
    """The browser in a new tab, without the screens, media and scripts that other tests set."""
    first = browser.current_window_handle
    browser.switch_to.new_window("tab")
    for kind in ("browser", "performance"):  # what was recorded is forgotten with that
        browser.get_log(kind)
    yield browser
    browser.close()
    browser.switch_to.window(first)


Opened = Callable[..., Any]


@pytest.fixture
def opened(driver: Any, tmp_path: Path) -> Opened:
    """Writes a page and opens it from disk."""

    def go(*reports: samples.ComparisonReport) -> Any:
        path = tmp_path / "report.html"
        path.write_text(samples.page(*reports), encoding="utf-8")
        driver.get(path.as_uri())
        return driver

    return go


def requests(driver: Any) -> list[str]:
    """Addresses that the page asked for; not what the browser loads for its own start page."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [entry["request"]["url"] for entry in asked if entry["documentURL"] == driver.current_url]


def column(driver: Any, heading: str) -> list[str]:
    """The column's cells from top to bottom."""
    found: list[str] = driver.execute_script(
        """const table = document.querySelector("table.results");
        const at = [...table.tHead.rows[0].cells].findIndex((c) => c.textContent.trim() === arguments[0]);
        return [...table.tBodies[0].rows].map((row) => row.cells[at].textContent.trim());""",
        heading,
    )
    return found


def button(driver: Any, heading: str) -> Any:
    return driver.find_element("xpath", f"//th/button[normalize-space()='{heading}']")


def show(driver: Any, *, width: int = 1280, scheme: str = "light", media: str = "screen") -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def test_the_page_asks_for_nothing_shows_its_charts_and_runs_no_foreign_script(opened: Opened) -> None:
    row = samples.row(EVIL, samples.run(fakes.zero(0), 0.1))
    other = samples.row(f"{EVIL}2", samples.run(fakes.zero(1), 0.2, peak=4))
    evil = samples.report(samples.comparison(row, other), title="harmless", notes=(EVIL,))
    driver = opened(evil, samples.report(samples.offload_comparison(), title="harmless"))
    assert driver.title == "2 comparisons · harmless"
    assert driver.get_log("browser") == []
    assert [url for url in requests(driver) if not url.startswith("data:")] == [driver.current_url]
    images = driver.execute_script("return [...document.images].map((one) => [one.className, one.naturalWidth > 0])")
    assert len(images) >= 9
    assert {tuple(one) for one in images} == {("chart", True)}


def test_the_logs_above_would_have_shown_a_request(driver: Any, tmp_path: Path) -> None:
    """Guards the guard: a log that records nothing would pass it."""
    path = tmp_path / "asks.html"
    path.write_text("<!DOCTYPE html><title>x</title><img src='missing.png'>")
    driver.get(path.as_uri())
    assert (tmp_path / "missing.png").as_uri() in requests(driver)
    assert "ERR_FILE_NOT_FOUND" in str(driver.get_log("browser"))


def test_the_table_sorts_by_number_both_ways_with_missing_values_last(opened: Opened) -> None:
    from selenium.webdriver.common.keys import Keys

    driver = opened(samples.report(samples.zero_comparison()))
    before = column(driver, "Tokens/s")
    button(driver, "Tokens/s").click()
    rising = column(driver, "Tokens/s")
    button(driver, "Tokens/s").send_keys(Keys.ENTER)
    falling = column(driver, "Tokens/s")
    assert driver.switch_to.active_element == button(driver, "Tokens/s")

    def values(cells: list[str]) -> list[int]:
        return [int(cell.replace(",", "")) for cell in cells[:-1]]

    assert values(rising) == sorted(values(before))
    assert values(falling) == sorted(values(before), reverse=True)
    assert before[-1] == rising[-1] == falling[-1] == "—"
    button(driver, "Strategy").click()
    marks = [heading.get_attribute("aria-sort") for heading in driver.find_elements("css selector", "[aria-sort]")]
    assert [mark for mark in marks if mark != "none"] == ["ascending"]
    assert driver.find_element("id", "said").get_attribute("textContent") == "Sorted by Strategy, ascending."
    opened(samples.report(samples.offload_comparison()))
    button(driver, "Step\u00a0ms").click()  # as words, 1,241.8 would come before 310.5
    assert column(driver, "Step\u00a0ms") == ["310.5", "881.6", "1,241.8", "2,896.4"]


@pytest.mark.parametrize("clipboard", [True, False], ids=["clipboard", "no clipboard interface"])
def test_the_copy_button_copies_the_configuration_shown(opened: Opened, driver: Any, clipboard: bool) -> None:
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    if not clipboard:
        driver.execute_cdp_cmd(
            "Page.addScriptToEvaluateOnNewDocument",
            {"source": "Object.defineProperty(Navigator.prototype, 'clipboard', {get: () => undefined})"},
        )
    opened(samples.report(samples.zero_comparison()))
    assert driver.execute_script("return navigator.clipboard !== undefined") is clipboard
    row = 2 if clipboard else 1  # another row, since tabs share the clipboard
    driver.find_elements("css selector", "details.config summary")[row].click()
    copy = driver.find_element("css selector", f"[data-copies='s1-config-{row + 1}']")
    copy.click()
    WebDriverWait(driver, 10).until(lambda _: copy.text == "Copied")
    driver.execute_script("document.body.append(document.createElement('textarea'))")
    area = driver.find_element("css selector", "textarea")
    area.send_keys(Keys.CONTROL, "v")
    ran = samples.zero_comparison().rows[row].runs[-1].trial.ds_config
    assert json.loads(area.get_property("value")) == ran


def test_the_keyboard_reaches_everything_and_shows_where_it_is(opened: Opened) -> None:
    from selenium.webdriver.common.keys import Keys

    driver = opened(samples.report(samples.zero_comparison()))
    seen = []
    for _ in range(120):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        where = driver.execute_script(
            """const e = document.activeElement; const s = getComputedStyle(e);
            return [e.tagName, e.className, e.textContent.trim().slice(0, 40), s.outlineStyle, s.outlineWidth];"""
        )
        if where[0] == "BODY":
            break
        seen.append(where)
    names = [text for _, _, text, _, _ in seen]
    assert names[0] == "Skip to the results"
    order = [names.index(name) for name in ("Strategy", "Tokens/s", "Copy")]
    assert order == sorted(order)
    assert any(kind == "scroll" for _, kind, _, _, _ in seen)
    assert sum(tag == "SUMMARY" for tag, *_ in seen) >= 5
    assert all(style != "none" and width != "0px" for *_, style, width in seen)


def test_page_and_charts_follow_the_color_scheme(opened: Opened) -> None:
    """A chart has dark text on light paper and light text on dark paper: its darkest and lightest pixels differ."""
    driver = opened(samples.report(samples.zero_comparison()))
    for scheme in ("light", "dark"):
        show(driver, scheme=scheme)
        picture = driver.find_element("css selector", "img.chart").screenshot_as_png
        pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("L"))
        paper = np.median(pixels)
        assert (paper > 230) if scheme == "light" else (paper < 50)
        assert np.abs(pixels.astype(float) - paper).max() > 180


def test_nothing_is_wider_than_a_phone_or_a_sheet_of_paper(opened: Opened, driver: Any) -> None:
    """A4 at 96 dots per inch, less two margins of half an inch."""
    long_words = {"title": "x" * 300, "notes": ("y" * 500,), "sources": ("z" * 300,)}
    show(driver, width=360)
    opened(samples.report(samples.offload_comparison()), samples.report(samples.zero_comparison(), **long_words))
    driver.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    widths = driver.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert widths == [360, 360]
    show(driver, width=698, media="print")
    opened(samples.report(samples.zero_comparison(), recommendation=samples.recommendation(key="ZeRO-2")))
    ends = driver.execute_script(
        "return [...document.querySelectorAll('figure, table')].map((e) => e.getBoundingClientRect().right)"
    )
    assert len(ends) > 7
    assert max(ends) <= 698


def test_a_comparison_prints_on_three_pages_and_a_sweep_folds(opened: Opened, driver: Any) -> None:
    for of in ([samples.many_rows(40)], [samples.zero_comparison()] * 4):
        opened(*[replace(samples.report(each), facts=("gpt2", f"point {n}")) for n, each in enumerate(of)])
        printed = driver.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})
        assert 1 <= len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(printed["data"]))) <= 3
        assert 900 < driver.execute_script("return document.documentElement.scrollHeight") < 4000
