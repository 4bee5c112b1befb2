"""What reaches a terminal: nothing that steers it, nothing that it cannot show."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ds_bench.system.terminal import (
    can_encode,
    escape_controls,
    ignoring_broken_stderr,
    print_json,
    to_ascii,
)


@given(st.text())
def test_plain_text_holds_no_control_character(text: str) -> None:
    assert not [sign for sign in escape_controls(text) if ord(sign) < 32 or 127 <= ord(sign) < 160]


def test_what_would_steer_a_terminal_is_spelled_out_and_what_it_lacks_is_shown_in_ascii() -> None:
    shown = {
        "gpt2": "gpt2",
        "red\x1b[31m": "red\\x1b[31m",
        "two\nlines": "two lines",
        "abc\u202ecba": "abc\\x202ecba",
        "✅ Größe": "✅ Größe",
    }
    assert {text: escape_controls(text) for text in shown} == shown
    assert to_ascii("❌ OOM — 12 ± 3 → 4 ≈ 5 −6 … 漢") == "[failed] OOM - 12 +/- 3 -> 4 ~ 5 -6 ... ?"
    assert [can_encode(text, io.StringIO()) for text in ("plain", "±")] == [True, False], "without an encoding: ASCII"


@given(st.text(), st.sampled_from(["ascii", "latin-1", "utf-8"]))
@example("✅ Größe", "latin-1")
def test_json_is_read_back_from_a_stream_of_any_encoding(text: str, encoding: str) -> None:
    output = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(output, encoding=encoding, newline="\n")) as stream:
        print_json(json.dumps({"text": text}, indent=1, ensure_ascii=False))
        stream.flush()
        assert json.loads(output.getvalue().decode(encoding)) == {"text": text}


@pytest.mark.parametrize("reader", ["gone", "full"])
def test_progress_that_nobody_reads_any_more_is_dropped(reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    if reader == "full":
        write_end = os.open("/dev/full", os.O_WRONLY)
    with os.fdopen(write_end, "w", buffering=1, encoding="utf-8") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        with ignoring_broken_stderr():
            print("progress", file=sys.stderr, flush=True)
            print("and more of it", file=sys.stderr, flush=True)
            assert os.fstat(stream.fileno()).st_rdev == Path(os.devnull).stat().st_rdev
        assert sys.stderr is stream


def test_output_whose_reader_is_gone_is_dropped_without_a_word() -> None:
    """As in ``report | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ds_bench", "axes"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
