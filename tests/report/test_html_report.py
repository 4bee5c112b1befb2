"""The page as text: complete, self-contained, escaped; a real browser is in test_html_browser."""

from __future__ import annotations

import html
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ds_bench.analysis.caveats import Caveat, CaveatKind
from ds_bench.errors import UsageError
from ds_bench.report import html_report
from ds_bench.report.html_report import round_numbers
from ds_bench.system import optional_packages
from ds_bench.system.environment import Environment
from ds_bench.system.gpus import GpuFacts
from tests.support import fakes
from tests.support import sample_reports as samples

EVIL = "<script>alert(1)</script>"
QUOTES = "a\"b'c</style></script></svg><!-- ]]> {{ 7*7 }} {% raw %}"
VOID = {"meta", "link", "path", "rect", "circle", "polygon", "br"}


class Page(HTMLParser):
    """Elements with attributes, in order; text by element; and whether every element is closed in turn."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def count(self, tag: str) -> int:
        return sum(1 for name, _ in self.elements if name == tag)

    def text(self) -> str:
        return " ".join(data for tag, data in self.texts if tag not in ("script", "style"))


def page_of(*reports: samples.ComparisonReport) -> Page:
    return Page(samples.page(*reports))


def drawings(source: str) -> list[str]:
    return re.findall(r'<svg role="img".*?</svg>', source, re.DOTALL)


ALL = {
    "zero": samples.zero_comparison,
    "offload": samples.offload_comparison,
    "cpu": samples.cpu_comparison,
    "flat": samples.flat_comparison,
    "one row": lambda: samples.comparison(samples.row("ZeRO-0", samples.run(fakes.zero(0), 0.1))),
    "all failed": lambda: samples.comparison(samples.row("ZeRO-0", samples.failed(fakes.zero(0)))),
    "no rows": lambda: samples.comparison(),
}


def test_a_page_is_well_formed_and_its_ids_are_unique(subtests: pytest.Subtests) -> None:
    for name in ALL:
        with subtests.test(name):
            page = page_of(samples.report(ALL[name]()), samples.report(ALL[name]()))
            ids = Counter(attributes["id"] for _, attributes in page.elements if "id" in attributes)
            assert page.unbalanced == []
            assert page.open == []
            assert [one for one, count in ids.items() if count > 1] == []


def test_what_refers_to_an_id_finds_it(subtests: pytest.Subtests) -> None:
    for name in ALL:
        with subtests.test(name):
            page = page_of(samples.report(ALL[name]()), samples.report(ALL[name]()))
            ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
            asked = [
                target
                for _, attributes in page.elements
                for target in [
                    *(attributes.get("aria-labelledby") or "").split(),
                    *re.findall(
                        r"#([\w-]+)\)?",
                        attributes.get("href") or attributes.get("clip-path") or attributes.get("style") or "",
                    ),
                    *filter(None, [attributes.get("data-copies")]),
                ]
            ]
            assert asked
            assert set(asked) <= ids


def test_nothing_is_asked_of_the_network() -> None:
    source = samples.page(samples.report(samples.zero_comparison()))
    page = Page(source)
    addresses = [
        value
        for _, attributes in page.elements
        for key, value in attributes.items()
        if key in ("src", "href", "action")
    ]
    assert {value for value in addresses if value and not value.startswith("#")} == {"data:,"}
    assert re.findall(r"https?:|@import|@font-face|url\((?!#)", source) == []


def test_text_from_users_models_and_machines_is_only_text(subtests: pytest.Subtests) -> None:
    for evil in (EVIL, QUOTES, "\x1b[31mred\x00\ud800\u202egnirts", "&amp;lt;b&gt;"):
        with subtests.test(evil=evil):
            plain = samples.zero_comparison()
            doubt = Caveat(kind=CaveatKind.NOTE, text=evil, next_step=evil)
            work = fakes.workload(model=evil)
            trial = fakes.trial(fakes.zero(0), of=work, ds_config={evil: evil})
            failure = samples.summary.summarise(fakes.failure(trial, error=evil, details=evil, status=evil), None, None)
            rows = [replace(row, label=f"{evil}{n}", caveats=(doubt,)) for n, row in enumerate(plain.rows)]
            rows.append(samples.row(evil, failure, differences=(evil,)))
            comparison = replace(plain, rows=tuple(rows), baseline=rows[0], caveats=(doubt,))
            report = samples.report(
                comparison,
                title=evil,
                recommendation=samples.recommendation(choice=evil, reason=evil, next_steps=(evil,)),
                notes=(evil,),
                commands=(evil,),
                environments=(fakes.environment(cpu_model=evil, packages={evil: evil}),),
                sources=(evil,),
            )
            source = samples.page(report, generated=evil)
            harmless = samples.page(samples.report(plain))
            page = Page(source)
            assert page.count("script") == Page(harmless).count("script") == 1
            assert page.count("style") == 1
            assert page.unbalanced == []
            assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)
            shown = re.sub("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\u202a-\u202e]", "\ufffd", evil)
            assert page.text().count(shown) > 20
            source.encode()


def test_a_template_in_a_model_name_is_not_run() -> None:
    page = page_of(samples.report(samples.zero_comparison(), title="{{ 7*7 }}"))
    assert "{{ 7*7 }}" in page.text()
    assert "49" not in [data.strip() for tag, data in page.texts if tag in ("h1", "h2")]


def test_every_chart_is_xml_with_a_title_and_a_description_that_names_its_rows() -> None:
    source = samples.page(samples.report(samples.offload_comparison()))
    found = drawings(source)
    assert len(found) == 9  # throughput, three tiers, two Pareto plots, step times, phases, losses
    for drawing in found:
        root = ElementTree.fromstring(drawing)
        title, description = root[0], root[1]
        assert (title.tag, description.tag) == ("title", "desc")
        assert root.attrib["aria-labelledby"] == f"{title.attrib['id']} {description.attrib['id']}"
        assert "ZeRO-3 + NVMe optimizer and parameters" in (description.text or "")


def test_the_card_is_drawn_in_the_device_ledger_and_the_host_in_the_other() -> None:
    source = samples.page(samples.report(samples.offload_comparison()))
    device, host, disk = (one for one in drawings(source) if "by category</title>" in one)
    assert "card 80.0 GB" in device
    assert "host 64.0 GB" in host
    assert "card" not in disk
    assert "host" not in disk.split("</desc>")[1]


def test_a_run_without_a_gpu_shows_no_gpu_anywhere() -> None:
    page = page_of(samples.report(samples.cpu_comparison(), title="tiny on CPUs"))
    headings = [data for tag, data in page.texts if tag == "button"]
    captions = [data for tag, data in page.texts if tag == "figcaption"]
    assert not any("GPU" in heading or "card" in heading for heading in headings)
    assert "Host memory by category" in captions
    assert not any("evice" in caption for caption in captions)


def test_rows_that_all_failed_are_a_table_and_a_sentence_and_no_chart() -> None:
    source = samples.page(samples.report(ALL["all failed"]()))
    assert drawings(source) == []
    text = Page(source).text()
    assert "No row succeeded, so there is nothing to draw." in text
    assert "✗ OOM" in text
    assert "asked 2.00 GB" in text


def test_rows_without_series_leave_charts_out_and_say_so() -> None:
    page = page_of(samples.report(samples.flat_comparison()))
    captions = [data for tag, data in page.texts if tag == "figcaption"]
    assert captions == ["Throughput against device memory", "Throughput", "Device memory", "Host memory"]
    for missing in ("No memory by category", "No step times", "No phases", "No losses"):
        assert missing in page.text()


def test_the_page_begins_with_speed_against_memory_and_marks_the_recommended_row_everywhere() -> None:
    chosen = samples.recommendation(key="ZeRO-2")
    source = samples.page(samples.report(samples.zero_comparison(), recommendation=chosen))
    assert "Throughput against device memory</title>" in source.split("<table")[0]
    assert source.count('<tr class="recommended">') == 1
    assert re.findall(r'<th scope="row" data-key="zero-2">.*?</span>', source)
    assert all("★ ZeRO-2" in drawing.split("</desc>")[1] for drawing in drawings(source))


def test_cells_have_three_significant_digits_and_the_exact_number_behind_them() -> None:
    rounded = {
        "1,241.8": "1,240",
        "16,626 to 19,966": "16,600 to 20,000",
        "[0.98, 1.01]": "[0.98, 1.01]",
        "−17.80 GB": "−17.8 GB",
        "0.99x": "0.99x",
        "100.4 %": "100 %",
        "—": "—",
    }
    assert {text: round_numbers(text) for text in rounded} == rounded
    assert (round_numbers("2,025", 2024.9), round_numbers("2,025", 2025.1)) == ("2,020", "2,030")
    assert (round_numbers("58.25", 58.246), round_numbers("58.25", 58.254)) == ("58.2", "58.3")
    assert '<td data-key="58.2" title="58.20">58.2</td>' in re.sub(
        r'data-key="\d{6,}"', 'data-key="58.2"', samples.page(samples.report(samples.zero_comparison()))
    )


def test_a_cell_of_any_unit_is_rounded_once_as_the_charts_are() -> None:
    """58.254 GB are 58.25 in the exact text and 58.3 in a chart; so are 123.46 ms 123.5 and 123."""
    whole = samples.zero_comparison()
    size = int(58.254 * samples.GB)
    row = replace(whole.rows[0], mean_step_seconds=0.12346, gpu_peak_bytes=size, gpu_difference_bytes=-size)
    source = samples.page(samples.report(replace(whole, rows=(row,), baseline=None)))
    shown = dict(re.findall(r'<td data-key="[^"]*" title="([^"]*)">([^<]*)</td>', source))
    assert {exact: shown.get(exact) for exact in ("123.5", "58.25", "−58.25 GB")} == {
        "123.5": "123",
        "58.25": "58.3",
        "−58.25 GB": "−58.3 GB",
    }


def test_four_rows_are_less_than_150_kilobytes() -> None:
    assert len(samples.page(samples.report(samples.offload_comparison())).encode()) < 150_000


def test_no_reports_and_no_rows_are_said() -> None:
    assert "There are no results." in page_of().text()
    assert "There are no rows." in page_of(samples.report(samples.comparison())).text()


def test_a_missing_value_is_a_dash_with_an_empty_sort_key() -> None:
    page = page_of(samples.report(samples.zero_comparison()))
    keys = [attributes["data-key"] for tag, attributes in page.elements if tag == "td" and "data-key" in attributes]
    assert "" in keys
    assert not any(key in ("None", "nan", "—") for key in keys)
    assert "None" not in page.text()


def test_a_caveat_is_numbered_once_with_its_kind_its_rows_and_its_next_step() -> None:
    doubt = Caveat(kind=CaveatKind.NOT_STEADY, text="drifts by 9 %", next_step="use more --warmup-steps")
    full = samples.zero_comparison()
    rows = tuple(replace(row, caveats=(doubt,)) for row in full.rows[:2]) + full.rows[2:]
    text = page_of(samples.report(replace(full, rows=rows))).text()
    assert text.count("drifts by 9 %") == 1
    assert "ZeRO-0, ZeRO-1:" in text
    assert "not steady" in text
    assert "Next: use more --warmup-steps" in text


def test_a_note_that_a_caveat_says_already_is_not_said_twice() -> None:
    said = "one GPU: stages 1 to 3 partition nothing"
    page = page_of(samples.report(samples.zero_comparison(), notes=(said,)))
    assert page.text().count(said) == 1


def test_the_configuration_shown_is_the_one_that_ran() -> None:
    source = samples.page(samples.report(samples.zero_comparison()))
    configs = re.findall(r'<pre id="s1-config-\d+" tabindex="0">(.*?)</pre>', source, re.DOTALL)
    ran = [row.summaries[-1].record.trial.ds_config for row in samples.zero_comparison().rows]
    assert [json.loads(html.unescape(one)) for one in configs] == ran


def test_two_hundred_rows_of_a_thousand_steps_stay_below_three_megabytes_and_say_what_is_left_out() -> None:
    source = samples.page(samples.report(samples.many_rows(200, num_steps=1000)))
    assert len(source.encode()) < 3 * 2**20
    text = Page(source).text()
    assert "8 of 200 rows are drawn: the baseline and the fastest." in text
    assert "40 of 200 rows are drawn: the baseline and the fastest." in text
    assert source.count('<th scope="row">ZeRO-') >= 200


def test_several_models_stand_side_by_side_with_links_to_each() -> None:
    page = page_of(
        samples.report(samples.zero_comparison(), title="gpt2"),
        samples.report(samples.zero_comparison(), title="opt"),
    )
    assert [attributes["href"] for tag, attributes in page.elements if tag == "a"][1:3] == ["#s1", "#s2"]


def host(*gpus: str) -> Environment:
    return fakes.environment(gpus=tuple(GpuFacts(index=index, name=name) for index, name in enumerate(gpus)))


def test_comparisons_of_two_machines_each_show_their_own() -> None:
    page = page_of(
        samples.report(samples.zero_comparison(), environments=(host("H100"), host("H100 NVL"), host("H100"))),
        samples.report(samples.zero_comparison(), environments=(host("A100"),)),
    )
    first, second, both = re.split(r"Made from", re.sub(r"\s+", " ", page.text()))
    assert first.count("H100") == 2
    assert "H100 NVL" in first
    assert "A100" not in first
    assert "A100" in second
    assert "each says its own above" in both
    assert page.unbalanced == []


def test_a_machine_and_a_command_of_all_comparisons_are_shown_once() -> None:
    text = page_of(*[samples.report(samples.zero_comparison())] * 2).text()
    assert text.count("AMD EPYC 9654") == text.count("zero_stage_comparison.py") == 1


def test_a_comparison_of_an_unknown_machine_says_so_among_others() -> None:
    known = samples.report(samples.zero_comparison(), "known")
    unknown = samples.report(samples.flat_comparison(), "unknown", environments=())
    assert page_of(known, unknown).text().count("The environment is not known") == 1


def test_a_configuration_that_nobody_knows_is_not_shown_as_the_one_that_ran() -> None:
    told = samples.run(fakes.zero(2), 0.1)
    least = replace(told.record.trial, ds_config={"zero_optimization": {"stage": 2}})
    flat = replace(told, record=replace(told.record, trial=least))
    page = page_of(samples.report(samples.comparison(samples.row("ZeRO-2", flat))))
    assert "DeepSpeed configurations" not in page.text()
    assert [at for _, at in page.elements if "config" in (at.get("data-copies") or "")] == []


def test_the_baseline_says_nothing_of_itself() -> None:
    page = page_of(samples.report(samples.zero_comparison()))
    assert "0 B" not in page.text()
    assert "not tested" not in page.text()


def test_one_failed_run_of_three_is_told_in_the_status() -> None:
    strategy = fakes.zero(1)
    row = samples.row("ZeRO-1", samples.run(strategy, 0.1), samples.failed(strategy), samples.run(strategy, 0.1))
    assert "✗ OOM (1 of 3)" in page_of(samples.report(samples.comparison(row))).text()


def test_without_the_packages_of_a_page_one_line_says_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_packages, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="an HTML page: the package jinja2 is not installed"):
        html_report.render_page([], "now")
