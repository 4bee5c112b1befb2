"""The page in a real headless Chromium, opened from disk. Skipped where chromedriver is missing.

The copy button is checked by pasting with the keyboard into a text area added for that. With and without the
browser's clipboard interface, so that the old way by a selection is tried too.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ds_bench.records.schema import OOM, Outcome
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
    """The browser in a tab of its own, which has nothing of the screens, media and scripts that other tests set."""
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
    from selenium.webdriver.common.by import By

    return driver.find_element(By.XPATH, f"//th/button[normalize-space()='{heading}']")


def test_it_opens_without_a_word_on_the_console_and_asks_for_nothing_but_itself(opened: Opened) -> None:
    driver = opened(samples.report(samples.zero_comparison()), samples.report(samples.offload_comparison()))
    assert driver.get_log("browser") == []
    assert [url for url in requests(driver) if not url.startswith("data:")] == [driver.current_url]


def test_the_logs_above_would_have_shown_a_request(driver: Any, tmp_path: Path) -> None:
    """Guards the guard: a log that records nothing would pass it."""
    path = tmp_path / "asks.html"
    path.write_text("<!DOCTYPE html><title>x</title><img src='missing.png'>")
    driver.get(path.as_uri())
    assert (tmp_path / "missing.png").as_uri() in requests(driver)
    assert "ERR_FILE_NOT_FOUND" in str(driver.get_log("browser"))


def test_a_script_in_a_label_or_a_config_does_not_run(opened: Opened) -> None:
    row = samples.row(EVIL, samples.run(fakes.zero(0), 0.1))
    other = samples.row(f"{EVIL}2", samples.run(fakes.zero(1), 0.2, peak=4))
    driver = opened(samples.report(samples.comparison(row, other), title="harmless", notes=(EVIL,)))
    assert driver.title == "harmless"
    assert driver.execute_script("return document.querySelectorAll('img, main script').length") == 0
    assert driver.get_log("browser") == []


def test_the_table_sorts_by_number_both_ways_with_missing_values_last(opened: Opened) -> None:
    driver = opened(samples.report(samples.zero_comparison()))
    before = column(driver, "Tokens/s")
    assert before[-1] == "—"
    button(driver, "Tokens/s").click()
    rising = column(driver, "Tokens/s")
    button(driver, "Tokens/s").click()
    falling = column(driver, "Tokens/s")

    def values(cells: list[str]) -> list[int]:
        return [int(cell.replace(",", "")) for cell in cells[:-1]]

    assert values(rising) == sorted(values(before))
    assert values(falling) == sorted(values(before), reverse=True)
    assert rising[-1] == falling[-1] == "—"
    assert button(driver, "Tokens/s").find_element("xpath", "..").get_attribute("aria-sort") == "descending"


def test_numbers_of_different_lengths_sort_as_numbers(opened: Opened) -> None:
    """As words, 1,240 would stand before 311."""
    driver = opened(samples.report(samples.offload_comparison()))
    button(driver, "Step\u00a0ms").click()
    assert column(driver, "Step\u00a0ms") == ["311", "882", "1,240", "2,900"]


def test_only_one_column_says_that_it_is_sorted(opened: Opened) -> None:
    driver = opened(samples.report(samples.zero_comparison()))
    for heading in ("Tokens/s", "Strategy"):
        button(driver, heading).click()
    marks = driver.execute_script(
        "return [...document.querySelectorAll('[aria-sort]')].map((h) => h.getAttribute('aria-sort'))"
    )
    assert marks.count("none") == len(marks) - 1
    assert driver.find_element("id", "said").get_attribute("textContent") == "Sorted by Strategy, ascending."


def pasted(driver: Any) -> str:
    """What the clipboard holds, by pasting it with the keyboard."""
    from selenium.webdriver.common.keys import Keys

    driver.execute_script(
        "const area = document.createElement('textarea'); area.id = 'paste'; document.body.append(area)"
    )
    area = driver.find_element("id", "paste")
    area.send_keys(Keys.CONTROL, "v")
    text: str = area.get_property("value")
    return text


@pytest.mark.parametrize("clipboard", [True, False], ids=["clipboard", "no clipboard interface"])
def test_the_copy_button_copies_the_configuration_shown(opened: Opened, driver: Any, clipboard: bool) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    if not clipboard:
        driver.execute_cdp_cmd(
            "Page.addScriptToEvaluateOnNewDocument",
            {"source": "Object.defineProperty(Navigator.prototype, 'clipboard', {get: () => undefined})"},
        )
    opened(samples.report(samples.zero_comparison()))
    assert driver.execute_script("return navigator.clipboard !== undefined") is clipboard
    row = 2 if clipboard else 1  # another one, as the clipboard is that of the whole browser
    driver.find_elements("css selector", "details.config summary")[row].click()
    copy = driver.find_element("css selector", f"[data-copies='s1-config-{row + 1}']")
    copy.click()
    WebDriverWait(driver, 10).until(lambda _: copy.text == "Copied")
    ran = samples.zero_comparison().rows[row].summaries[-1].record.trial.ds_config
    assert json.loads(pasted(driver)) == ran


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


def test_enter_on_a_heading_sorts_and_keeps_the_focus(opened: Opened) -> None:
    from selenium.webdriver.common.keys import Keys

    driver = opened(samples.report(samples.zero_comparison()))
    heading = button(driver, "Tokens/s")
    heading.send_keys(Keys.ENTER)
    assert column(driver, "Strategy")[0] == "ZeRO-3"
    assert driver.switch_to.active_element == heading


def luminance(driver: Any) -> float:
    colour = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    red, green, blue = (int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return (red + green + blue) / 765


def test_dark_mode_is_dark_and_light_mode_is_light(opened: Opened) -> None:
    driver = opened(samples.report(samples.zero_comparison()))
    seen = {}
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        seen[scheme] = luminance(driver)
    assert seen["light"] > 0.9
    assert seen["dark"] < 0.2


@pytest.mark.parametrize("name", ["plain", "long words", "many"])
def test_a_phone_never_scrolls_the_page_sideways(opened: Opened, driver: Any, name: str) -> None:
    screen = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    reports = {
        "plain": samples.report(samples.offload_comparison()),
        "long words": samples.report(
            samples.zero_comparison(), title="x" * 300, notes=("y" * 500,), sources=("z" * 300,)
        ),
        "many": samples.report(samples.many_rows(40)),
    }
    opened(reports[name])
    driver.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    widths = driver.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert widths == [360, 360]


def with_failures() -> samples.ComparisonReport:
    """Four rows, one of them recommended, and rows that ran out of memory, by measurement and by prediction."""
    rows = samples.zero_comparison().rows[:4]
    known = samples.failed(fakes.zero(2), requested_bytes=50 * fakes.GB, free_bytes=4 * fakes.GB)
    trial = replace(known.record.trial, prediction=fakes.prediction(gpu={"activations": 300 * fakes.GB}))
    foreseen = replace(known, record=replace(known.record, trial=trial, outcome=Outcome(status=OOM)))
    failures = (samples.row("ZeRO-2, micro-batch 16", known), samples.row("ZeRO-2, micro-batch 64", foreseen))
    chosen = samples.recommendation(key="ZeRO-2")
    return samples.report(samples.comparison(*rows, *failures), recommendation=chosen)


PAGES = {
    "zero": lambda: samples.report(samples.zero_comparison()),
    "offload": lambda: samples.report(samples.offload_comparison()),
    "cpu": lambda: samples.report(samples.cpu_comparison()),
    "out of memory": with_failures,
    "many": lambda: samples.report(samples.many_rows(20)),
}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [360, 1400])
def test_no_text_of_a_chart_covers_another_or_is_cut_off(opened: Opened, driver: Any, name: str, width: int) -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    opened(PAGES[name]())
    charts = driver.execute_script(
        """return [...document.querySelectorAll("svg.chart")].map((svg) => {
          const box = (e) => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
          return [box(svg), [...svg.querySelectorAll("text")].map((e) => [e.textContent.trim(), ...box(e)])];
        });"""
    )
    assert charts
    for (left, top, right, bottom), texts in charts:
        for index, (text, *box) in enumerate(texts):
            assert max(left - box[0], top - box[1], box[2] - right, box[3] - bottom) < 1, text
            assert box[3] - box[1] > 9, text
            letters = 0.5 * (box[3] - box[1])  # which are less high than the line
            for other, *place in texts[index + 1 :]:
                across = min(box[2], place[2]) - max(box[0], place[0])
                down = min(box[3], place[3]) - max(box[1], place[1])
                assert across <= 0 or down <= letters, (text, other)


@pytest.mark.parametrize("width", [360, 1400])
def test_a_table_that_goes_on_beyond_its_edge_shows_a_shadow_there_until_it_was_scrolled_to(
    opened: Opened, driver: Any, width: int
) -> None:
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    full = samples.zero_comparison()
    columns = "table of one column more than there is room for, " * 3
    opened(samples.report(replace(full, rows=(replace(full.rows[0], label=columns), *full.rows[1:]))))

    def edge() -> float:
        """The mean brightness of the last pixels of the table's frame."""
        picture = driver.find_element("css selector", ".scroll:has(.results)").screenshot_as_png
        pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("L"))
        return float(np.median(pixels[:-20, -6:-2]))

    before = edge()
    driver.execute_script("document.querySelector('.scroll:has(.results)').scrollLeft = 1e6")
    assert edge() > before + 30


def test_on_paper_there_is_one_column_and_nothing_is_wider_than_the_sheet(opened: Opened, driver: Any) -> None:
    """A4 at 96 dots per inch, less two margins of half an inch."""
    screen = {"width": 698, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    opened(with_failures())
    driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    boxes = driver.execute_script(
        """return [...document.querySelectorAll("figure, table")].map((e) => {
          const r = e.getBoundingClientRect(); return [e.tagName, r.left, r.top, r.right, r.bottom];
        });"""
    )
    figures = [box for box in boxes if box[0] == "FIGURE"]
    assert len(figures) == 7
    assert len({left for _, left, *_ in figures}) == 1
    assert all(above[4] <= below[2] for above, below in itertools.pairwise(figures))
    assert max(right for _, _, _, right, _ in boxes) <= 698
    unfolded = driver.execute_script("return document.querySelectorAll('details.config[open]').length")
    assert unfolded == 1


def test_text_has_enough_contrast_in_both_schemes(opened: Opened) -> None:
    """WCAG AA: 4.5 to 1 for body text, on the page and on the panel."""
    driver = opened(samples.report(samples.zero_comparison()))
    script = """const s = getComputedStyle(document.documentElement);
        return ["--ink", "--faint", "--link", "--bad", "--page", "--panel"].map((n) => s.getPropertyValue(n).trim());"""
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        *inks, page, panel = driver.execute_script(script)
        for ink in inks:
            for paper in (page, panel):
                assert contrast(ink, paper) >= 4.5, (scheme, ink, paper)


def contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio of two ``#rrggbb`` colours."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)
