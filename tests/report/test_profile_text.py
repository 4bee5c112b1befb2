"""Profiles in every form of the report, as text that opens nothing; the command for Nsight Systems."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

from ds_bench.records.schema import Profile
from ds_bench.report import profile_text
from ds_bench.report.terminal_report import print_report, render_markdown
from tests.support import fakes
from tests.support import sample_reports as samples

EVIL = "<b>aten::mm</b> ```\x1b[31m"
PROFILE = Profile(name="torch", files=("trials/00_zero1/profiles/torch_rank0.txt",), lines=("CPU ms/step", EVIL))


def test_every_form_of_the_report_has_the_last_runs_profiles_and_escapes_them() -> None:
    runs = [samples.run(fakes.zero(1), 0.5, repeat=repeat, profiles=(PROFILE,)) for repeat in range(2)]
    report = samples.report(
        samples.comparison(samples.row("ZeRO-1", *runs), samples.row("ZeRO-2", samples.run(fakes.zero(2), 0.5)))
    )
    stream = io.StringIO()
    print_report(report, stream, verbose=True)
    forms = {"table": stream.getvalue(), "markdown": render_markdown(report), "page": samples.page(report)}
    for name, text in forms.items():
        assert text.count("ZeRO-1: torch, rank 0") == 1, name
        assert text.count(PROFILE.files[0]) == 1, name
        assert "\x1b" not in text, name
    assert "<b>aten" not in forms["page"]
    assert f"````text\nCPU ms/step\n{EVIL[:-5]}" in forms["markdown"]  # longer than any fence in the text


def test_the_line_at_the_end_of_a_run_counts_the_files_that_are_there(tmp_path: Path) -> None:
    assert profile_text.files_line([samples.run(fakes.zero(1), 0.5)], tmp_path) is None
    path = tmp_path / PROFILE.files[0]
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 2048)
    line = profile_text.files_line([samples.run(fakes.zero(1), 0.5, profiles=(PROFILE,))], tmp_path)
    assert line == f"Profiles: 1 file, 2.00 KB, in {tmp_path}/trials/*/profiles"


def test_the_command_for_nsys_repeats_the_run_with_ranks_that_it_can_record() -> None:
    arguments = ["--model", "gpt2", "--set", "a=b c", "--profile", "nsys"]
    command = profile_text.nsys_command("zero", arguments, {})
    assert command is not None
    words = shlex.split(command)
    assert words[:2] == ["nsys", "profile"]
    assert "--capture-range=cudaProfilerApi" in words
    run = ["python", "zero_stage_comparison.py", *arguments, "--launcher", "deepspeed"]
    assert words[words.index("python") :] == run
    assert profile_text.nsys_command("zero", arguments, {"NSYS_PROFILING_SESSION_ID": "1"}) is None
