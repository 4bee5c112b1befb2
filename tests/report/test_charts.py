"""Pictures as files: a PNG and an SVG per chart, whatever the labels hold."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

from ds_bench.report.charts import save_plots
from tests.support import fakes
from tests.support import sample_reports as samples

PNG = b"\x89PNG\r\n\x1a\n"


def test_every_picture_is_a_png_and_an_svg(tmp_path: Path) -> None:
    paths = save_plots(samples.section(samples.offload_comparison()), tmp_path / "new" / "plots")
    names = "throughput ledger-gpu ledger-cpu ledger-nvme pareto-device pareto-host steps phases losses"
    assert [path.name for path in paths] == [f"{name}.{form}" for name in names.split() for form in ("png", "svg")]
    for path in paths:
        content = path.read_bytes()
        if path.suffix == ".png":
            assert content.startswith(PNG)
            assert len(content) > 10_000
        else:
            assert ElementTree.fromstring(content).tag.endswith("svg")


def test_an_svg_needs_no_font(tmp_path: Path) -> None:
    save_plots(samples.section(samples.cpu_comparison()), tmp_path)
    source = (tmp_path / "throughput.svg").read_text()
    assert "font-family" not in source
    assert "<text" not in source


def test_sections_get_numbers_so_that_none_overwrites_another(tmp_path: Path) -> None:
    two = [samples.section(samples.flat_comparison()), samples.section(samples.flat_comparison())]
    names = {path.name for path in save_plots(two, tmp_path)}
    assert {"01_throughput.png", "02_throughput.png"} <= names
    assert len(names) == 8


def test_the_same_numbers_give_the_same_svg(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        save_plots(samples.section(samples.flat_comparison()), tmp_path / folder)
    assert (tmp_path / "a/throughput.svg").read_bytes() == (tmp_path / "b/throughput.svg").read_bytes()


def test_labels_that_mean_something_to_mathtext_xml_or_no_font_are_plain_text(tmp_path: Path) -> None:
    evil = r"$\frac{<script>&\x $^_日本" + "\n\x1b" + "x" * 300
    row = samples.row(evil, samples.run(fakes.zero(0), 0.1))
    other = samples.row("_hidden", samples.run(fakes.zero(1), 0.2, peak=4))
    paths = save_plots(samples.section(samples.comparison(row, other), title=evil), tmp_path)
    for path in paths:
        if path.suffix == ".svg":
            ElementTree.fromstring(path.read_bytes())
    assert len(paths) == 12


def test_dots_that_take_no_part_look_different(tmp_path: Path) -> None:
    full = samples.flat_comparison()
    odd = replace(full.results[1], differences=("torch 2.13.0 against 2.11.0",))
    for name, of in (("plain", full), ("odd", replace(full, results=(full.results[0], odd)))):
        save_plots(samples.section(of), tmp_path / name)
    assert (tmp_path / "odd/pareto-device.svg").read_bytes() != (tmp_path / "plain/pareto-device.svg").read_bytes()


def test_nothing_is_written_where_nothing_succeeded(tmp_path: Path) -> None:
    failed = samples.comparison(samples.row("ZeRO-0", samples.failed(fakes.zero(0))))
    assert save_plots(samples.section(failed), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_of_many_rows_is_drawn_within_what_can_be_read(tmp_path: Path) -> None:
    assert len(save_plots(samples.section(samples.many_rows(60)), tmp_path)) == 12
