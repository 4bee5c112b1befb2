"""The preloaded server of warm launch is killed at every moment of a trial. Its ranks do without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from ds_bench.launch import warm_launcher
from ds_bench.system import processes
from tests.support import fakes
from tests.support.real_trials import ROOT, SHORT, SUPPORT


def test_a_server_that_is_killed_costs_the_trial_that_runs_and_no_later_one(tmp_path: Path) -> None:
    path = os.pathsep.join(map(str, (SUPPORT, ROOT)))
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "warm_stub.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *ended, why = json.loads(done.stdout)
    assert ended == ["Success", "Killed", "Killed", "Success", "Success", "Success", "Crashed"]
    beginning, _, reason = why.partition(": ")
    assert beginning == "the preloaded server cannot be forked"
    # Killed before or after it answered: each is a true reason.
    assert reason.startswith(("it died every time it was started", "the preloaded server did not start"))
    assert done.stderr == ""


def test_a_server_that_is_still_loading_ends_with_the_program_that_started_it() -> None:
    lines = ("warm_launcher.start_server({'DS_ACCELERATOR': 'cpu'})", "print(warm_launcher._server()._forkserver_pid)")
    program = "; ".join(("from ds_bench.launch import warm_launcher", *lines))
    pid = int(subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, cwd=ROOT).stdout)
    end = time.monotonic() + 10
    while processes.is_alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not processes.is_alive(pid)


def test_variables_of_env_reach_ranks_of_a_server_that_an_earlier_run_started(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(warm_launcher, "run_trial", lambda *_, environment, **__: seen.append(environment))
    monkeypatch.setattr(warm_launcher, "_ensure_tracker", lambda: None)
    monkeypatch.setattr(warm_launcher.WarmLauncher, "_server_is_alive", lambda _: True)
    launcher = warm_launcher.WarmLauncher({"MINE": "b", "OTHER": "c"}, SHORT)
    on = fakes.placement(forwarded_variables=("MINE", "ONLY_NAMED"))
    launcher.launch(fakes.trial(on=on), Path(), lambda _: None)
    assert seen[0].items() >= {"MINE": "b"}.items()
    assert not seen[0].keys() & {"OTHER", "ONLY_NAMED"}


def test_a_server_started_with_other_variables_of_env_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_launcher, "run_trial", lambda *_, **__: None)
    monkeypatch.setattr(warm_launcher, "_ensure_tracker", lambda: None)
    monkeypatch.setattr(warm_launcher.WarmLauncher, "_server_is_alive", lambda self: self._server_pid is not None)
    started: list[int] = []

    def prepare(self: warm_launcher.WarmLauncher) -> None:
        started.append(len(started))
        self._server_pid = len(started)

    monkeypatch.setattr(warm_launcher.WarmLauncher, "prepare", prepare)
    monkeypatch.setattr(warm_launcher, "_forget_server", lambda: None)
    monkeypatch.setattr(warm_launcher, "_forwarded_to", {})
    server = None
    for value, servers in (("a", 1), ("a", 1), ("b", 2), (None, 3)):
        launcher = warm_launcher.WarmLauncher({} if value is None else {"MINE": value}, SHORT)
        launcher._server_pid = server  # a new launcher finds the server of this process
        on = fakes.placement(forwarded_variables=() if value is None else ("MINE",))
        launcher.launch(fakes.trial(on=on), Path(), lambda _: None)
        server = launcher._server_pid
        assert len(started) == servers, value


def test_a_server_started_before_the_checks_of_a_run_that_is_refused_is_not_used_with_other_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next run in this process could not tell which variables its libraries have read."""
    server = types.SimpleNamespace(_forkserver_pid=None, set_forkserver_preload=lambda _: None)
    server.ensure_running = lambda: setattr(server, "_forkserver_pid", 7)
    monkeypatch.setattr(warm_launcher, "_server", lambda: server)
    monkeypatch.setattr(warm_launcher, "_ensure_tracker", lambda: None)
    monkeypatch.setattr(warm_launcher, "_forwarded_to", {})
    warm_launcher.start_server({"MINE": "a", "OTHER": "c"}, fakes.placement(forwarded_variables=("MINE",)))
    warm_launcher.start_server({"MINE": "b"}, fakes.placement(forwarded_variables=("MINE",)))  # it runs already
    assert warm_launcher._forwarded_to == {7: {"MINE": "a"}}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
