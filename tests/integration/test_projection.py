"""A projection held against what is measured: two hosts on a link of one rate, projected to another rate."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ds_bench import load
from tests.support.real_trials import ROOT
from tests.support.two_hosts import NoHostsError, TwoHosts, make_two_hosts

pytestmark = [pytest.mark.deepspeed]

RATES = (100, 25)
"""Of the link, in Mbit/s: communication is most of a step."""


def measure(hosts: TwoHosts, megabits_per_second: int) -> Path:
    """Stage 1 over both hosts, with its communication timed; the folder of the run."""
    hosts.shape_link(megabits_per_second=megabits_per_second)
    name = f"out{megabits_per_second}"
    sizes = ("--batch-size", "2", "--seq-length", "32", "--num-steps", "5", "--warmup-steps", "1")
    command = [sys.executable, ROOT / "zero_stage_comparison.py", "--accelerator", "cpu", "--hostfile", hosts.hostfile]
    command += ["--model", "tiny", "--stages", "1", *sizes, "--profile", "comms", "--output-dir", hosts.folder / name]
    done = hosts.a.run(command, env=hosts.variables, seconds=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (hosts.folder.parent / "shared" / name / "runs").iterdir()  # as this machine sees the folder
    return run


@pytest.mark.slow
@pytest.mark.alone
def test_a_measured_step_is_projected_to_a_link_of_another_rate(tmp_path: Path) -> None:
    try:
        with make_two_hosts(tmp_path, shared_file_system=True) as hosts:
            runs = {rate: measure(hosts, rate) for rate in RATES}
    except NoHostsError as error:
        pytest.skip(f"no hosts can be made here: {error}")
    for rate, other in (RATES, RATES[::-1]):
        ((found,), (truth,)) = (
            report.rows
            for run, inter in ((runs[rate], f"eth:{other / 1000}"), (runs[other], None))
            for report in load(run).project([2], inter=inter)
        )
        assert found.projection is not None
        assert truth.measured is not None
        assert truth.measured.communication_seconds is not None
        low, high = (seconds / truth.measured.step_seconds - 1 for seconds in found.projection.step_seconds.bounds)
        of_communication = found.projection.communication_seconds / truth.measured.communication_seconds - 1
        print(
            f"{rate} → {other} Mbit/s: step {truth.measured.step_seconds * 1000:.0f} ms, projected {low:+.1%} … "
            f"{high:+.1%}; communication {truth.measured.communication_seconds * 1000:.0f} ms, {of_communication:+.1%}"
        )
        assert abs(of_communication) < 0.25
        if other < rate:  # on the faster link all else weighs more, and differs from run to run on a busy machine
            assert max(low, -high, 0.0) < 0.25
