"""Shards as real processes side by side: they take turns on the processors, and are read as one result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from ds_bench.cli.report import build_reports
from tests.support.real_trials import ROOT

RECIPE = """
model: {name: tiny}
training: {seq_len: [16, 32], local_batch_size: 1, steps: 2, warmup_steps: 1}
configurations: {stages: [0, 1]}
launch: {accelerator: cpu, num_gpus: 1}
"""


@pytest.mark.deepspeed
@pytest.mark.usefixtures("built_ops")
def test_two_shards_started_side_by_side_take_turns_and_are_read_as_one_result(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(RECIPE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_BENCH_LOCK_DIR": str(tmp_path)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "ds_bench", "run", "sweep.yaml", "--shard", f"{number}/2"],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in (1, 2)
    ]
    ended = [(run, *run.communicate(timeout=300)) for run in runs]
    assert [run.returncode for run, _, _ in ended] == [0, 0], ended
    waited = [errors for _, _, errors in ended if "waiting for processors" in errors]
    pids = [str(run.pid) for run in runs]
    assert len(waited) == 1
    assert any(f"which process {pid} uses" in waited[0] for pid in pids)
    folders = sorted((tmp_path / "results" / "runs").glob("*of2"))
    spans = []
    for folder in folders:
        records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
        starts = [datetime.fromisoformat(record["started_at"]) for record in records]
        spans.append((starts[0], starts[-1] + timedelta(seconds=records[-1]["wall_seconds"])))
    first, second = sorted(spans)
    assert first[1] <= second[0] + timedelta(seconds=1)  # starts are stored in whole seconds
    reports = build_reports(folders)
    assert [(r.comparison.rows[0].label, len(r.comparison.rows)) for r in reports] == [("ZeRO-0", 2)] * 2
    assert not list(tmp_path.glob("ds_bench_lock_*"))
