"""``ds_bench.run`` in programs as users write them, with real DeepSpeed processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_bench.system import processes
from tests.support.real_trials import ROOT

RUN = 'ds_bench.run(model="tiny", batch_size=1, seq_length=16, warmup_steps=1, accelerator="cpu", output_dir="out", {})'
SCRIPT = f"""
import json, sys, threading
print("started")
import ds_bench

first = {RUN.format("num_steps=1, stages=0")}
results = [first]
thread = threading.Thread(target=lambda: results.append({RUN.format("num_steps=1, stages=1")}))
thread.start()
thread.join()
statuses = [list(result.to_dataframe()["status"]) for result in results]
print(json.dumps([statuses, "torch" in sys.modules]))
"""
"""Without ``if __name__ == "__main__"``, twice in one process, the second time in another thread."""


def start(folder: Path, text: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, str(script)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_a_script_without_a_guard_runs_once_and_its_runs_leave_nothing_behind(tmp_path: Path) -> None:
    process = start(tmp_path, SCRIPT)
    before = processes.descendants()
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    started, answer = output.splitlines()
    assert started == "started"
    assert json.loads(answer) == [[["✅ Success"], ["✅ Success"]], False]
    assert processes.descendants() <= before


@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_ctrl_c_ends_the_ranks_and_keeps_the_rows_that_had_finished(tmp_path: Path) -> None:
    process = start(tmp_path, f"import ds_bench\n{RUN.format('num_steps=100000, stages=[0, 1], timeout=600')}")
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out/runs/*/trials/*/rank0.beat")) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    started = processes.descendants(process.pid)
    process.send_signal(signal.SIGINT)  # only to the program, as a notebook's kernel gets it
    _, errors = process.communicate(timeout=60)
    (folder,) = tmp_path.glob("out/runs/*")
    assert process.returncode != 0
    assert errors.splitlines()[-1] == f"KeyboardInterrupt: continue with ds_bench.run(resume={str(folder)!r})"
    (record,) = (folder / "records.jsonl").read_text().splitlines()
    assert json.loads(record)["outcome"]["status"] == "Interrupted"
    assert len(started) > 2
    assert not any(map(processes.is_alive, started))


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_a_notebook_shows_the_table_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    cells = [
        "import ds_bench",
        f"result = {RUN.format('num_steps=1, stages=0')}",
        "result",
        f"_ = {RUN.format('num_steps=1, stages=1, progress=True')}",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    _, quiet, shown, progress = (cell.outputs for cell in notebook.cells)
    assert quiet == []
    assert "ZeRO-0" in shown[0]["data"]["text/html"]
    assert shown[0]["data"]["text/plain"] == "<ds_bench.Result: 1 row, recommended: ZeRO-0>"
    assert "[1/1] ZeRO-1" in "".join(output["text"] for output in progress)
