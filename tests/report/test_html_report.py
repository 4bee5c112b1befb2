"""The page as text: complete, self-contained, escaped. tests/integration/test_html_page.py has a real browser."""

from __future__ import annotations

import base64
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from ds_bench.analysis.load_results import flat_run
from ds_bench.config.caveat_texts import Caveat, CaveatKind, note
from ds_bench.errors import UsageError
from ds_bench.recommend.message_templates import Fact
from ds_bench.recommend.recommendation import recommend
from ds_bench.report import html_report
from ds_bench.system import environment
from ds_bench.system.environment import Environment
from ds_bench.system.gpu_state import GpuFacts
from tests.support import fakes
from tests.support import sample_reports as samples

EVIL = "<script>alert(1)</script>"
QUOTES = "a\"b'c</style></script></svg><!-- ]]> {{ 7*7 }} {% raw %}"
VOID = {"meta", "link", "br", "img"}


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

    def values(self, attribute: str, tag: str | None = None) -> list[str]:
        """The values of an attribute, in order."""
        return [own[attribute] or "" for name, own in self.elements if attribute in own and tag in (None, name)]

    def text(self) -> str:
        return " ".join(data for tag, data in self.texts if tag not in ("script", "style"))


def page_of(*reports: samples.ComparisonReport) -> Page:
    return Page(samples.page(*reports))


FAILED = samples.comparison(samples.row("ZeRO-0", samples.failed(fakes.zero(0))))


@pytest.mark.parametrize("of", [samples.offload_comparison(), FAILED, samples.comparison()])
def test_a_page_is_well_formed_and_self_contained_and_every_reference_resolves(of: samples.Comparison) -> None:
    source = samples.page(samples.report(of), samples.report(of))
    page = Page(source)
    assert page.unbalanced == page.open == []
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    links = [link for link in page.values("href") if link.startswith("#")]
    asked = {*" ".join(page.values("aria-labelledby")).split(), *(link[1:] for link in links)}
    assert asked
    assert asked | {*filter(None, page.values("data-copies"))} <= set(ids)
    addresses = [*page.values("src"), *page.values("action"), *page.values("href"), *page.values("srcset")]
    assert all(each.startswith(("#", "data:,", "data:image/svg+xml;")) for each in addresses)
    drawings = [base64.b64decode(each).decode() for each in re.findall(r'base64,([^"]+)', source)]
    for text in (source, *drawings):
        assert re.findall(r"@import|@font-face|url\((?!#)|<script src|href=\"http", text) == []


def test_text_from_users_models_and_machines_is_escaped(subtests: pytest.Subtests) -> None:
    for evil in (EVIL, QUOTES, "\x1b[31mred\x00\ud800\u202egnirts"):
        with subtests.test(ascii(evil)):
            plain, doubt = samples.cpu_comparison(), note(evil)
            trial = fakes.trial(fakes.zero(0), of=fakes.workload(model=evil), ds_config={evil: evil})
            failure = samples.make_run(fakes.failure(trial, error=evil, details=evil, status=evil), None, None)
            rows = [replace(row, label=f"{evil}{n}", caveats=(doubt,)) for n, row in enumerate(plain.rows)]
            rows.append(samples.row(evil, failure, differences=(evil,)))
            report = samples.report(
                replace(plain, rows=tuple(rows), baseline=rows[0], caveats=(doubt,)),
                title=evil,
                recommendation=samples.recommendation(choice=evil, headline=Fact("invalid", {"text": evil})),
                notes=(evil,),
                commands=(evil,),
                environments=(fakes.environment(cpu_model=evil, packages={evil: evil}),),
                sources=(evil,),
            )
            source = samples.page(report, generated=evil)
            page = Page(source)
            tags = [tag for tag, _ in page.elements]
            assert (tags.count("script"), tags.count("style"), page.unbalanced) == (1, 1, [])
            assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)
            shown = re.sub("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\u202a-\u202e]", "\ufffd", evil)
            assert page.text().count(shown) > 20
            source.encode()


def test_a_page_of_a_run_reads_as_it_should(snapshot: SnapshotAssertion) -> None:
    """All text of a page with a recommended row, caveats, a failed row, charts and numbers."""
    chosen = samples.recommendation(key="ZeRO-2")
    source = samples.page(samples.report(samples.zero_comparison(), recommendation=chosen))
    page = Page(source)
    lines = [line.strip() for line in page.text().splitlines()]
    assert "\n".join([*filter(None, lines), "", *page.values("alt", "img")]) == snapshot
    assert source.count('<tr class="recommended">') == 1
    # A missing value has an empty sort key.
    keys = set(page.values("data-key", "td"))
    assert "" in keys
    assert not {"None", "nan", "—"} & keys


TIE: dict[str, Any] = {
    "headline": Fact("tie", {"choice": "ZeRO-2", "rows": "ZeRO-2 and ZeRO-1"}),
    "undecided": ("ZeRO-2", "ZeRO-1"),
}


def test_only_a_decided_page_has_a_green_box_and_a_star(subtests: pytest.Subtests) -> None:
    for changes, tag in (({}, None), (TIE, "start here"), ({"disturbed": ("ZeRO-2",)}, "provisional")):
        with subtests.test(tag=tag, changes=changes):
            answer = samples.recommendation(key="ZeRO-2", **changes)
            source, green = samples.page(samples.report(samples.zero_comparison(), recommendation=answer)), tag is None
            assert ('class="recommendation decided"' in source, "★" in source) == (green, green)
            assert source.count('<tr class="recommended">') == green
            tags = re.findall('<span class="tag">(.*?)</span>', source)
            assert tags == ["baseline", *([tag] if tag else [])]


def test_a_page_states_each_fact_once() -> None:
    """Also where the answer, the notes and the pairs of rows overlap."""
    busy = Caveat(CaveatKind.CPU_BUSY, {"other": 1.5, "cores": 2})
    full = samples.cpu_comparison()
    rows = tuple(replace(row, caveats=(busy,)) for row in full.rows)
    of = replace(full, rows=rows, baseline=rows[0])
    text = page_of(samples.report(of, recommendation=recommend(of))).text()
    assert text.count(busy.text) == 1
    decided = replace(samples.zero_comparison(), caveats=(Caveat(CaveatKind.CPU_ACCELERATOR),))
    answer = recommend(decided)
    page = page_of(samples.report(decided, recommendation=answer)).text()
    assert page.count(str(answer.headline)) == 1
    assert answer.cost is not None
    assert str(answer.cost) not in page  # the headline states it


def test_points_of_a_sweep_are_folded_in_groups_each_with_its_answer() -> None:
    def point(*facts: str, **changes: Any) -> samples.ComparisonReport:
        answer = samples.recommendation(key="ZeRO-2", **changes)
        return replace(samples.report(samples.zero_comparison(), recommendation=answer), facts=facts)

    facts = (("gpt2", "bf16", "micro-batch 4"), ("tiny", "bf16", "micro-batch 4"), ("gpt2", "bf16", "micro-batch 8"))
    sweep = [point(*facts[0]), point(*facts[1], **TIE), point(*facts[2])]
    page = page_of(*sweep)
    assert [text.strip() for tag, text in page.texts if tag == "h2"][-3:-1] == ["gpt2", "tiny"]
    points = [attributes for tag, attributes in page.elements if tag == "details" and attributes.get("class") == "part"]
    assert [(one["id"], "open" in one) for one in points] == [("s1", False), ("s3", False), ("s2", False)]
    assert "".join(text for tag, text in page.texts if tag == "h1") == "3 comparisons · bf16"
    names = [text for tag, text in page.texts if tag == "strong" and text.startswith(("?", "★"))]
    assert names == ["★ micro-batch 4", "★ micro-batch 8", "? micro-batch 4"]
    assert page.text().count(str(sweep[0].recommendation.headline)) == 2


def test_cpu_runs_hide_gpu_columns_and_failed_runs_have_no_charts() -> None:
    page = page_of(samples.report(samples.cpu_comparison(), title="tiny on CPUs"))
    headings = [data for tag, data in page.texts if tag in ("button", "figcaption")]
    assert "Host memory by category" in headings
    assert not any(word in heading for heading in headings for word in ("GPU", "card", "evice"))
    failed = page_of(samples.report(FAILED))
    assert failed.values("alt", "img") == []
    assert "asked 2.00 GB" in failed.text()
    assert "losses per step." in page_of(samples.report(samples.flat_comparison())).text()


def test_a_caveat_is_numbered_once_with_its_rows() -> None:
    doubt = Caveat(CaveatKind.NOT_STEADY)
    full = samples.zero_comparison()
    rows = tuple(replace(row, caveats=(doubt,)) for row in full.rows[:2]) + full.rows[2:]
    text = page_of(samples.report(replace(full, rows=rows))).text()
    assert text.count(doubt.text) == 1
    assert "ZeRO-0, ZeRO-1:" in text


def test_the_configuration_shown_is_the_one_that_ran_or_none() -> None:
    source = samples.page(samples.report(samples.zero_comparison()))
    configs = re.findall(r'<pre id="s1-config-\d+" tabindex="0">(.*?)</pre>', source, re.DOTALL)
    ran = [row.runs[-1].trial.ds_config for row in samples.zero_comparison().rows]
    assert [json.loads(html.unescape(one)) for one in configs] == ran
    flat = flat_run(samples.run(fakes.zero(2), 0.1).row)
    page = page_of(samples.report(samples.comparison(samples.row("ZeRO-2", flat))))
    assert "DeepSpeed configurations" not in page.text()


def test_large_results_make_small_pages_that_say_what_is_left_out() -> None:
    source = samples.page(samples.report(samples.many_rows(200, num_steps=1000)))
    assert len(source.encode()) < 3 * 2**20
    for count in (8, 16):
        assert f"{count} of 200 rows are drawn: the baseline and the fastest." in source
    assert source.count('<th scope="row" data-key="zero-') == 200


def test_each_comparison_names_its_own_machines() -> None:
    def host(*gpus: str) -> Environment:
        return fakes.environment(gpus=tuple(GpuFacts(index=index, name=name) for index, name in enumerate(gpus)))

    page = page_of(
        samples.report(samples.cpu_comparison(), environments=(host("H100"), host("H100 NVL"), host("H100"))),
        samples.report(samples.cpu_comparison(), environments=(host("A100"),)),
        samples.report(samples.cpu_comparison(), environments=()),
    )
    assert page.values("id", "details") == ["s1", "s2", "s3"]
    first, second, third, _ = re.split(r"Made from", re.sub(r"\s+", " ", page.text()))
    assert (first.count("H100"), "H100 NVL" in first, "A100" in first) == (2, True, False)
    assert "A100" in second
    assert "The environment is not known" in third
    assert "No results were given." in page_of().text()
    assert "Nothing was measured." in page_of(samples.report(samples.comparison())).text()
    # One machine and one command are shown once.
    text = page_of(*[samples.report(FAILED)] * 2).text()
    assert text.count("AMD EPYC 9654") == text.count("zero_stage_comparison.py") == 1


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda _name: None)
    with pytest.raises(UsageError, match="an HTML page: the package jinja2 is not installed"):
        html_report.render_page([], "now")
