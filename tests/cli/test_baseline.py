"""``baseline save`` and ``baseline check`` on runs as they lie on disk: lines, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_bench.cli.baseline import check_command, save_command
from ds_bench.errors import UsageError
from ds_bench.records import schema
from ds_bench.records.schema import TrialRecord
from tests.support import fakes

NAME = "tiny/zero1/seq128"


def ran(seconds: float = 0.1, stage: int = 1, repeat: int = 0, **changes: Any) -> TrialRecord:
    """A successful trial on a card; ``seconds``: of each step."""
    trial = fakes.trial(fakes.zero(stage), on=fakes.placement(accelerator="cuda"), repeat=repeat)
    return fakes.success(trial, step_seconds=[seconds] * 10, **changes)


def failed(status: str = schema.OOM, stage: int = 1) -> TrialRecord:
    return fakes.failure(fakes.trial(fakes.zero(stage), on=fakes.placement(accelerator="cuda")), status)


def run(folder: Path, *records: TrialRecord, **changes: Any) -> Path:
    """A run folder with these records."""
    return fakes.write_run(folder, records, **changes).folder


@pytest.fixture
def saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Baselines of one run at 0.1 s a step."""
    path = tmp_path / "baselines.json"
    save_command([run(tmp_path / "before", ran())], path, None)
    capsys.readouterr()
    return path


def test_what_was_saved_passes_its_own_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = tmp_path / "baselines.json", run(tmp_path / "out", ran(), ran(stage=2))
    assert save_command([folder], path, 0.1) == 0
    assert list(json.loads(path.read_text())) == [NAME, "tiny/zero2/seq128"]
    assert (
        "saved tiny/zero1/seq128: 5,120 tokens/s, peak GPU memory 8.00 GB, tolerance 10.0 %" in capsys.readouterr().out
    )
    assert check_command([folder], path, False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert NAME in lines[0]
    assert lines[-1] == "2 compared, 0 regressed"


def test_a_slower_run_is_a_regression_with_exit_code_3(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 0.1 s → 0.12 s: 5120 → 4266.7 tokens/s, -16.7 %
    assert check_command([run(tmp_path / "after", ran(0.12))], saved, False) == 3
    out = capsys.readouterr().out
    assert "regression: tokens/s 4,267 against 5,120 (-16.7 %), beyond the tolerance of 5.0 %" in out
    assert out.splitlines()[-1] == "1 compared, 1 regressed"


def test_more_memory_is_a_regression_too(saved: Path, tmp_path: Path) -> None:
    assert check_command([run(tmp_path / "after", ran(gpu_peak_bytes=9 * fakes.GB))], saved, False) == 3


def test_a_row_that_no_longer_runs_is_a_regression(saved: Path, tmp_path: Path) -> None:
    assert check_command([run(tmp_path / "after", failed())], saved, False) == 3


def test_json_tells_failed_for_every_entry(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_command([run(tmp_path / "after", ran(0.12), ran(stage=2))], saved, True) == 3
    data = json.loads(capsys.readouterr().out)
    assert data["failed"] == [NAME, "tiny/zero2/seq128"]
    slow, new = data["entries"]
    assert slow["name"] == NAME
    assert slow["failed"] is True
    assert slow["comparable"] is True
    assert slow["regressions"] == ["throughput"]
    assert slow["throughput_ratio"] == pytest.approx(0.1 / 0.12)
    assert "beyond the tolerance" in slow["message"]
    assert (new["failed"], new["comparable"], new["has_baseline"]) == (True, True, False)


def test_a_row_without_a_baseline_fails_the_check_unless_that_is_left_out(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "after", ran(stage=3))
    assert check_command([folder], saved, False) == 3
    capsys.readouterr()
    assert check_command([folder], saved, False, ["regression", "missing"]) == 0
    out = capsys.readouterr().out
    assert "tiny/zero3/seq128: no baseline of this name" in out
    assert out.splitlines()[-1] == "0 compared, 0 regressed; 1 without a baseline"


def test_a_gate_that_could_compare_nothing_is_not_passed(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = fakes.environment(cpu_model="another")
    with pytest.raises(UsageError, match="nothing was checked") as caught:
        check_command([run(tmp_path / "after", ran(0.5), on=elsewhere)], saved, True)
    assert caught.value.exit_code == 2
    data = json.loads(capsys.readouterr().out)  # printed all the same
    assert data["failed"] == []
    assert data["not_comparable"] == [NAME]
    assert data["entries"][0]["passed"] is None


def test_one_row_that_compares_is_enough_to_pass_and_the_others_are_said(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ran(stage=2, optimizer_class="SGD")
    save_command([run(tmp_path / "two", ran(stage=2))], saved, None)
    assert check_command([run(tmp_path / "after", ran(), other)], saved, False) == 0
    out = capsys.readouterr().out
    assert "not comparable with the baseline: optimizer SGD against AdamW" in out
    assert out.splitlines()[-1] == "1 compared, 0 regressed; 1 not comparable"


def test_repeats_are_runs_of_one_entry_and_tested_against_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baselines.json"
    before = [ran(seconds, repeat=number) for number, seconds in enumerate((0.09, 0.1, 0.13))]
    after = [ran(seconds, repeat=number) for number, seconds in enumerate((0.09, 0.11, 0.14))]
    save_command([run(tmp_path / "before", *before)], path, None)
    assert len(json.loads(path.read_text())[NAME]["tokens_per_sec_runs"]) == 3
    with pytest.raises(UsageError, match="noise hides a regression in every row"):
        check_command([run(tmp_path / "after", *after)], path, False)
    assert "beyond the tolerance of 5.0 % but inside the noise" in capsys.readouterr().out


def runs(folder: Path, *seconds: float) -> Path:
    """One row whose runs take these seconds a step."""
    return run(folder, *[ran(each, repeat=number) for number, each in enumerate(seconds)])


def test_a_pass_that_rests_on_noise_alone_is_not_shown_as_a_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of 0.03, 0.3 and 3 s a step against steady 0.1 s: the median is a third of the speed.

    Logs 2.303 apart: variance 2.303² = 5.302, /3 = 1.767, root 1.329; t(0.975; 2) = 4.303 gives 5.720 on the logs, so
    a fall to e^-5.720 = 0.33 % of the speed and less would show: changes below 99.7 % do not.
    """
    path = tmp_path / "baselines.json"
    save_command([runs(tmp_path / "before", 0.1, 0.1, 0.1)], path, None)
    capsys.readouterr()
    noisy = runs(tmp_path / "after", 0.03, 0.3, 3.0)
    with pytest.raises(UsageError, match="noise hides a regression in every row"):
        check_command([noisy], path, False)
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"noisy: {NAME}: passed: tokens/s 1,707 against 5,120 (-66.7 %)")
    assert "cannot see changes below 99.7 %" in first
    assert last == "1 compared, 0 regressed; 1 too noisy to judge"
    assert check_command([noisy], path, True, ["noisy"]) == 3
    assert json.loads(capsys.readouterr().out)["entries"][0]["noisy"] is True


def test_quiet_runs_within_the_tolerance_pass_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baselines.json"
    save_command([runs(tmp_path / "before", 0.1, 0.1005, 0.0995)], path, None)
    said = capsys.readouterr()
    assert "warning" not in said.err
    assert check_command([runs(tmp_path / "after", 0.1, 0.1005, 0.0995)], path, False) == 0
    out = capsys.readouterr().out
    assert "✅" in out
    assert "noisy" not in out


def test_a_row_faster_by_more_than_its_noise_is_not_noisy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four times the speed, runs 10 % apart: a regression is ruled out, however wide the interval."""
    path = tmp_path / "baselines.json"
    save_command([runs(tmp_path / "before", 0.36, 0.4, 0.44)], path, None)
    assert check_command([runs(tmp_path / "after", 0.09, 0.1, 0.11)], path, False) == 0
    assert "noisy" not in capsys.readouterr().out


def test_a_regression_larger_than_the_noise_is_a_regression_and_not_noisy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baselines.json"
    save_command([runs(tmp_path / "before", 0.09, 0.1, 0.11)], path, None)
    assert check_command([runs(tmp_path / "after", 0.36, 0.4, 0.44)], path, False) == 3
    out = capsys.readouterr().out
    assert "noisy" not in out
    assert out.splitlines()[-1] == "1 compared, 1 regressed"


def test_a_baseline_of_runs_that_vary_is_saved_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """512 tokens in 0.09, 0.1 and 0.11 s: 5689, 5120, 4655 tokens/s; deviation 518 of a mean of 5155 is 10.1 %."""
    assert save_command([runs(tmp_path / "out", 0.09, 0.1, 0.11)], tmp_path / "baselines.json", None) == 0
    warning, _ = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {NAME}: tokens/s of its 3 runs varies by 10.1 %")


def test_several_results_count_as_runs_of_one_entry(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    folders = [run(tmp_path / f"out{number}", ran(0.1 + number / 1000)) for number in range(3)]
    save_command(folders, path, None)
    assert len(json.loads(path.read_text())[NAME]["tokens_per_sec_runs"]) == 3


def test_failed_rows_are_not_saved_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "baselines.json"
    save_command([run(tmp_path / "out", failed(stage=0), ran())], path, None)
    assert list(json.loads(path.read_text())) == [NAME]
    assert "not saved tiny/zero0/seq128: OOM: OOM in backward" in capsys.readouterr().out


def test_a_row_with_a_loss_that_is_not_finite_is_no_baseline(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    with pytest.raises(UsageError, match="nothing was saved"):
        save_command([run(tmp_path / "out", ran(losses=(None,) * 12))], path, None)
    assert not path.exists()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_row_with_a_loss_that_is_not_finite_does_not_pass_its_check(
    as_json: bool, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_command([run(tmp_path / "out", ran(losses=(None,) * 12))], saved, as_json) == 3
    out = capsys.readouterr().out
    assert "loss is not finite" in out
    assert '"status"' in out if as_json else "1 regressed" in out


def test_a_row_that_had_failed_when_it_was_to_be_saved_and_fails_still_needs_no_baseline(tmp_path: Path) -> None:
    path, folder = tmp_path / "baselines.json", run(tmp_path / "out", ran(), failed(stage=0))
    save_command([folder], path, None)
    assert check_command([folder], path, False) == 0


def test_a_flat_json_alone_is_saved_and_checked_like_its_run(tmp_path: Path) -> None:
    path, copied = tmp_path / "baselines.json", tmp_path / "copied.json"
    stored = fakes.write_run(tmp_path / "out", [ran()])
    copied.write_text(stored.json_path.read_text())
    assert save_command([copied], path, None) == 0
    assert check_command([stored.folder], path, False) == 0
    assert check_command([copied], path, False) == 0
    assert check_command([run(tmp_path / "after", ran(0.2))], path, False) == 3


def test_a_row_that_a_saved_run_had_and_the_result_lacks_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baselines.json"
    save_command([run(tmp_path / "before", ran(), ran(stage=2))], path, None)
    other = fakes.trial(fakes.zero(1), on=fakes.placement(accelerator="cuda"), of=fakes.workload(seq_length=64))
    save_command(
        [run(tmp_path / "elsewhere", fakes.success(other), family="offload")], path, None
    )  # of another run: not expected
    fewer = run(tmp_path / "after", ran())
    capsys.readouterr()
    assert check_command([fewer], path, False) == 3
    out = capsys.readouterr().out
    assert "❌ tiny/zero2/seq128: missing: the result has no such row" in out
    assert out.splitlines()[-1] == "1 compared, 0 regressed; 1 missing"
    assert check_command([fewer], path, False, ["regression", "unmatched"]) == 0
    entries = json.loads(path.read_text())  # a file written before runs were kept
    path.write_text(json.dumps({name: {**entry, "run_id": None} for name, entry in entries.items()}))
    assert check_command([fewer], path, False) == 3


def test_a_flat_json_that_does_not_tell_its_machine_is_no_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "copied.json"
    rows = json.loads(fakes.write_run(tmp_path / "out", [ran()]).json_path.read_text())
    copied.write_text(json.dumps([{**row, "cpu_logical_cores": None} for row in rows]))
    with pytest.raises(UsageError, match="nothing was saved"):
        save_command([copied], tmp_path / "baselines.json", None)
    assert "its hardware and versions are not known; give its run folder" in capsys.readouterr().out


def test_two_rows_of_one_name_are_not_saved_over_each_other(tmp_path: Path) -> None:
    path, trial = tmp_path / "baselines.json", ran().trial
    other = fakes.trial(fakes.zero(1), on=trial.placement, ds_config={**trial.ds_config, "gradient_clipping": 0.5})
    folder = run(tmp_path / "out", ran(), fakes.success(other))
    with pytest.raises(UsageError, match=f"two rows are called {NAME}"):
        save_command([folder], path, None)
    assert not path.exists()


def test_a_missing_file_of_baselines_is_one_line_and_not_a_pass(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        check_command([run(tmp_path / "out", ran())], tmp_path / "typo.json", False)


def test_a_damaged_file_of_baselines_is_one_line(saved: Path, tmp_path: Path) -> None:
    saved.write_text("{")
    with pytest.raises(UsageError, match=r"baselines\.json"):
        check_command([run(tmp_path / "out", ran())], saved, False)


def test_a_name_that_would_steer_the_terminal_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "baselines.json"
    trial = fakes.trial(fakes.zero(1), of=fakes.workload(model="a\x1b[2Jb", model_source="hub"))
    folder = run(tmp_path / "out", fakes.success(trial))
    save_command([folder], path, None)
    check_command([folder], path, False)
    assert "\x1b" not in capsys.readouterr().out
