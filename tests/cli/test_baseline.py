"""``baseline save`` and ``baseline check`` on stored runs: verdicts, lines, JSON, JUnit and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_bench.cli.baseline import check_command, save_command
from ds_bench.errors import UsageError
from ds_bench.records import schema
from ds_bench.records.schema import TrialRecord
from tests.support import fakes

NAME = "tiny/zero1/seq128"
CARD = fakes.placement(accelerator="cuda")
Write = Callable[..., Path]


def ran(*seconds: float, stage: int = 1, **changes: Any) -> list[TrialRecord]:
    """One run for each of ``seconds``, the time of each step; 0.1 s without one."""
    return [
        fakes.success(fakes.trial(fakes.zero(stage), on=CARD, repeat=number), step_seconds=[each] * 10, **changes)
        for number, each in enumerate(seconds or (0.1,))
    ]


def failed(stage: int = 1) -> list[TrialRecord]:
    return [fakes.failure(fakes.trial(fakes.zero(stage), on=CARD), schema.OOM)]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a run folder with these records."""
    count = iter(range(99))

    def run(*records: list[TrialRecord], **changes: Any) -> Path:
        rows = [each for several in records for each in several]
        return fakes.write_run(tmp_path / f"run{next(count)}", rows, **changes).folder

    return run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "baselines.json"


def loss_is_lost(stage: int = 1) -> list[TrialRecord]:
    return ran(stage=stage, losses=(None,) * 12)


WIDE = (0.03, 0.3, 3.0)
CHECKS: dict[str, tuple[list[list[TrialRecord]], list[list[TrialRecord]], int | None, str]] = {
    # what was saved, what is checked, exit code (None: nothing could be judged), the last line
    "itself": ([ran(), ran(stage=2)], [ran(), ran(stage=2)], 0, "2 compared, 0 regressed"),
    "slower": ([ran()], [ran(0.12)], 3, "1 compared, 1 regressed"),
    "more memory": ([ran()], [ran(gpu_peak_bytes=9 * fakes.GB)], 3, "1 compared, 1 regressed"),
    "no longer runs": ([ran()], [failed()], 3, "1 compared, 1 regressed"),
    "loss is not finite": ([ran()], [loss_is_lost()], 3, "1 compared, 1 regressed"),
    "missing row": ([ran(), ran(stage=2)], [ran()], 3, "1 compared, 0 regressed; 1 missing"),
    "row without a baseline": ([ran()], [ran(), ran(stage=3)], 3, "1 compared, 0 regressed; 1 without a baseline"),
    "failed before and after": ([ran(), failed(0)], [ran(), failed(0)], 0, "1 compared, 0 regressed; "),
    "one row does not compare": (
        [ran(), ran(stage=2)],
        [ran(), ran(stage=2, optimizer_class="SGD")],
        0,
        "1 compared, 0 regressed; 1 not comparable",
    ),
    "quiet repeats": ([ran(0.1, 0.1005, 0.0995)], [ran(0.1, 0.1005, 0.0995)], 0, "1 compared, 0 regressed"),
    "slower inside the noise": (
        [ran(0.09, 0.1, 0.13)],
        [ran(0.09, 0.11, 0.14)],
        None,
        "1 compared, 0 regressed; 1 too noisy to judge",
    ),
    "a pass that rests on noise": ([ran(0.1, 0.1, 0.1)], [ran(*WIDE)], None, "1 compared, 0 regressed; 1 too noisy"),
    # Four times the speed, runs 10 % apart: a regression is ruled out, however wide the interval.
    "faster beyond the noise": ([ran(0.36, 0.4, 0.44)], [ran(0.09, 0.1, 0.11)], 0, "1 compared, 0 regressed"),
    "slower beyond the noise": ([ran(0.09, 0.1, 0.11)], [ran(0.36, 0.4, 0.44)], 3, "1 compared, 1 regressed"),
}


@pytest.mark.parametrize("case", CHECKS)
def test_check_compares_each_row_with_its_baseline(
    case: str, write: Write, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after, code, last = CHECKS[case]
    assert save_command([write(*before)], path, None) == 0
    capsys.readouterr()
    result = write(*after)
    if code is None:
        with pytest.raises(UsageError, match="noise hides a regression in every row"):
            check_command([result], path, False)
    else:
        assert check_command([result], path, False) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)


def test_reasons_left_out_of_fail_on_do_not_fail(write: Write, path: Path) -> None:
    save_command([write(ran(), ran(stage=2))], path, None)
    result = write(ran(), ran(stage=3))
    for reasons, code in ((["regression"], 0), (["missing"], 3), (["unmatched"], 3)):
        assert check_command([result], path, False, reasons) == code
    save_command([write(ran(0.1, 0.1, 0.1))], path, None)
    assert check_command([write(ran(*WIDE))], path, False, ["noisy"]) == 3


def test_lines_give_figures_and_what_noise_hides(write: Write, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0.1 s → 0.12 s: 5120 → 4266.7 tokens/s, -16.7 %.

    Steady 0.1 s against 0.03, 0.3 and 3 s: logs 2.303 apart have variance 5.302, /3 = 1.767, root 1.329; t(0.975; 2) =
    4.303 gives 5.720 on the logs, so a fall to e^-5.720 = 0.33 % of the speed and less would show.
    """
    folder = write(ran(), failed(0))
    save_command([folder], path, 0.1)
    out = capsys.readouterr().out
    assert f"saved {NAME}: 5,120 tokens/s, peak GPU memory 8.00 GB, tolerance 10.0 %" in out
    assert "not saved tiny/zero0/seq128: OOM: OOM in backward" in out
    check_command([write(ran(0.12))], path, False)
    assert "tokens/s 4,267 against 5,120 (-16.7 %), beyond the tolerance of 10.0 %" in capsys.readouterr().out
    save_command([write(ran(0.1, 0.1, 0.1))], path, None)
    with pytest.raises(UsageError):
        check_command([write(ran(*WIDE))], path, False)
    assert "cannot see changes below 99.7 %" in capsys.readouterr().out


def test_json_holds_every_entry(write: Write, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_command([write(ran())], path, None)
    capsys.readouterr()
    assert check_command([write(ran(0.12), ran(stage=2))], path, True) == 3
    data = json.loads(capsys.readouterr().out)
    assert data["failed"] == [NAME, "tiny/zero2/seq128"]
    slow, new = data["entries"]
    assert (slow["name"], slow["failed"], slow["comparable"], slow["regressions"]) == (NAME, True, True, ["throughput"])
    assert slow["throughput_ratio"] == pytest.approx(0.1 / 0.12)
    assert (new["failed"], new["comparable"], new["has_baseline"]) == (True, True, False)


def test_a_check_that_compares_nothing_does_not_pass(
    write: Write, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_command([write(ran())], path, None)
    capsys.readouterr()
    with pytest.raises(UsageError, match="nothing was checked") as caught:
        check_command([write(ran(0.5), on=fakes.environment(cpu_model="another"))], path, True)
    assert caught.value.exit_code == 2
    data = json.loads(capsys.readouterr().out)  # printed all the same
    assert (data["failed"], data["not_comparable"], data["entries"][0]["passed"]) == ([], [NAME], None)
    with pytest.raises(UsageError, match="no such file"):
        check_command([write(ran())], tmp_path / "typo.json", False)
    path.write_text("{")
    with pytest.raises(UsageError, match=r"baselines\.json"):
        check_command([write(ran())], path, False)


def test_rows_of_another_run_are_not_expected(write: Write, path: Path) -> None:
    save_command([write(ran(), ran(stage=2))], path, None)
    other = fakes.trial(fakes.zero(1), on=CARD, of=fakes.workload(seq_length=64))
    save_command([write([fakes.success(other)], family="offload")], path, None)
    assert check_command([write(ran(), ran(stage=2))], path, False) == 0
    entries = json.loads(path.read_text())  # a file written before runs were kept
    path.write_text(json.dumps({name: {**entry, "run_id": None} for name, entry in entries.items()}))
    assert check_command([write(ran())], path, False) == 3


def test_several_results_are_runs_of_one_entry_and_varying_runs_are_warned_of(
    write: Write, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """512 tokens in 0.09, 0.1 and 0.11 s: 5689, 5120, 4655 tokens/s; deviation 518 of a mean of 5155 is 10.1 %."""
    save_command([write(ran(each)) for each in (0.09, 0.1, 0.11)], path, None)
    assert len(json.loads(path.read_text())[NAME]["tokens_per_sec_runs"]) == 3
    warning, _ = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {NAME}: tokens/s of its 3 runs varies by 10.1 %")


def test_rows_that_cannot_be_baselines_leave_no_file(write: Write, path: Path, tmp_path: Path) -> None:
    rows = json.loads(fakes.write_run(tmp_path / "flat", ran()).json_path.read_text())
    (tmp_path / "no_machine.json").write_text(json.dumps([{**row, "cpu_logical_cores": None} for row in rows]))
    for result in (write(loss_is_lost()), tmp_path / "no_machine.json"):
        with pytest.raises(UsageError, match="nothing was saved"):
            save_command([result], path, None)
    trial = ran()[0].trial
    other = fakes.trial(fakes.zero(1), on=CARD, ds_config={**trial.ds_config, "gradient_clipping": 0.5})
    with pytest.raises(UsageError, match=f"two rows are called {NAME}"):
        save_command([write(ran(), [fakes.success(other)])], path, None)
    assert not path.exists()


def test_a_flat_json_is_saved_and_checked_like_its_run(write: Write, path: Path, tmp_path: Path) -> None:
    stored = fakes.write_run(tmp_path / "out", ran())
    copied = tmp_path / "copied.json"
    copied.write_text(stored.json_path.read_text())
    assert save_command([copied], path, None) == 0
    assert check_command([stored.folder], path, False) == check_command([copied], path, False) == 0
    assert check_command([write(ran(0.2))], path, False) == 3


def test_names_cannot_steer_the_terminal(write: Write, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = fakes.trial(fakes.zero(1), of=fakes.workload(model="a\x1b[2Jb", model_source="hub"))
    folder = write([fakes.success(trial)])
    save_command([folder], path, None)
    check_command([folder], path, False)
    assert "\x1b" not in capsys.readouterr().out
