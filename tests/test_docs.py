"""README and docs: the flags page matches the parsers, commands parse, links lead to files, outputs are real."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from ds_bench.analysis.row import COLUMNS
from ds_bench.cli import arguments, commands
from ds_bench.records import schema

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))


def test_generated_files_are_up_to_date(subtests: pytest.Subtests) -> None:
    for script, function, page in (
        ("make_flags_page.py", "flags_page", "docs/flags.md"),
        ("make_axes_page.py", "axes_page", "docs/axes.md"),
        ("make_modules_page.py", "modules_page", "docs/modules.md"),
        ("make_keywords.py", "keywords_stub", "ds_bench/keywords.pyi"),
        ("make_recipe_schema.py", "schema_text", "docs/recipe.schema.json"),
    ):
        with subtests.test(script):
            made = runpy.run_path(str(ROOT / "scripts" / script))[function]()
            assert (ROOT / page).read_text(encoding="utf-8") == made, f"run scripts/{script}"


def test_every_command_of_readme_and_docs_parses() -> None:
    parsed = 0
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if words[:3] == ["python", "-m", "ds_bench"]:
                    commands.parse(words[3:])
                elif words[:1] == ["ds-compare"]:
                    commands.parse(words[1:])
                elif words[:2] == ["python", "zero_stage_comparison.py"]:
                    arguments.parse("zero", words[1], words[2:])
                elif words[:2] == ["python", "offload_comparison.py"]:
                    arguments.parse("offload", words[1], words[2:])
                else:
                    continue
                parsed += 1
    assert parsed > 10


def test_links_lead_to_files_and_headings_that_exist() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]*(?:#[^)\s]*)?)\)", page.read_text(encoding="utf-8")):
            path, _, heading = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if "://" in target or (file.is_dir() and not heading):
                continue
            is_page = file.is_file() and file.suffix == ".md"
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if is_page else []
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}
            if not file.is_file() or (heading and heading not in anchors):
                broken.append((page.name, target))
    assert broken == []


def test_outputs_of_readme_and_docs_are_what_their_commands_print(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = runpy.run_path(str(ROOT / "scripts" / "make_docs_outputs.py"))
    monkeypatch.setenv("COLUMNS", outputs["WIDTH"])
    for page in outputs["PAGES"]:
        with subtests.test(page.name):
            assert page.read_text(encoding="utf-8") == outputs["page_text"](page), "run scripts/make_docs_outputs.py"


def test_each_command_has_its_output_below_it_or_a_comment_that_says_what_it_needs(subtests: pytest.Subtests) -> None:
    """Such as ``# trains``; outputs are compared above, and the example scripts train in tests/integration."""
    outputs = runpy.run_path(str(ROOT / "scripts" / "make_docs_outputs.py"))
    ours = re.compile(
        r"^(?:ds-compare |python (?:-m ds_bench|\w+_comparison))(?!.* -- train_\w+\.py)(?!.* # ).*$", re.MULTILINE
    )
    for page in outputs["PAGES"]:
        text = page.read_text(encoding="utf-8")
        shown = [command for command, *_ in outputs["examples"](text)]
        blocks = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
        with subtests.test(page.name):
            assert [line for line in ours.findall(blocks) if outputs["OURS"].sub("", line) not in shown] == []


EXAMPLES = {
    "ZeRO-1: torch": "profiles.txt",
    '{"step"': "zero1_steps.jsonl",
}
"""How a measured example in docs begins → the committed file that it shows."""


@pytest.mark.parametrize("beginning", EXAMPLES)
def test_measured_examples_are_lines_of_committed_results(
    beginning: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a JSON file, the lines that ``report`` prints today, so that the form is today's too."""
    source = ROOT / "results/reference/cpu_2cores_2026-11-22" / EXAMPLES[beginning]
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".json":
        monkeypatch.setenv("COLUMNS", "160")
        assert commands.main(["report", str(source), "--verbose"]) == 0
        text = capsys.readouterr().out
    shown = {line.strip() for line in text.splitlines()} | {"", "…"}
    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        if block.startswith(beginning)
    ]
    assert blocks, "the example is gone from the docs"
    for block in blocks:
        assert [line for line in block.splitlines() if line.strip() not in shown] == []


def test_the_checked_file_has_the_findings_that_the_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "own_work.md").read_text(encoding="utf-8").partition("### Check a file")[2]
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0], encoding="utf-8")
    assert commands.main(["check", "ds_config.json"]) == 1
    assert f"```\n{capsys.readouterr().out}```" in page


def test_every_flat_column_is_defined() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    phases, actions = "|".join(schema.MEMORY_PHASES), "|".join(schema.CHECKPOINT_ACTIONS)
    patterns = {
        "cpu_<phase>_": rf"cpu_({phases})_(?=peak|end)",
        "checkpoint_<action>_": rf"checkpoint_({actions})_",
        "ledger_<tier>_<category>_gb": r"ledger_.*_gb",
    }
    missing = []
    for column in COLUMNS:
        name = column
        for general, pattern in patterns.items():
            name = re.sub(f"^{pattern}", general, name)
        if f"`{name}`" not in page:
            missing.append(column)
    assert missing == []
