"""The variables of ``--env`` in the process that runs the comparison."""

from __future__ import annotations

import os

import pytest

from tests.support.scripted_run import ScriptedRun


def test_variables_of_env_hold_for_the_ranks_and_are_given_again_on_resume(
    scripted: ScriptedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINE", "old")
    given = ("--env", "MINE=a=b", "--env", "ONLY_NAMED")
    assert scripted.run("--stages", "0", *given) == 0
    assert os.environ["MINE"] == "a=b"
    assert "ONLY_NAMED" not in os.environ
    (trial,) = scripted.launcher.launched
    assert trial.placement.forwarded_variables == ("MINE", "ONLY_NAMED")
    assert scripted.resume() == 2
    assert "say again: --env MINE=a=b --env ONLY_NAMED" in capsys.readouterr().err
    assert scripted.resume(*given) == 0
