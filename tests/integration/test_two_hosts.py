"""Runs on two hosts: namespaces of this machine, joined by a virtual link, each with its own sshd and host name."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.real_trials import ROOT
from tests.support.two_hosts import NoHostsError, TwoHosts, make_two_hosts, namespace_members

pytestmark = [pytest.mark.deepspeed]

MakeHosts = Callable[..., TwoHosts]


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[MakeHosts]:
    """Makes the hosts of a test, which ends them."""
    with ExitStack() as stack:

        def make(*, shared_file_system: bool = True) -> TwoHosts:
            try:
                return stack.enter_context(make_two_hosts(tmp_path, shared_file_system=shared_file_system))
            except NoHostsError as error:
                pytest.skip(f"no hosts can be made here: {error}")

        yield make


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether something became true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_the_hosts_are_two_and_end_with_the_process_that_made_them(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts = make_hosts(shared_file_system=False)
    shown = hosts.a.run(["ssh", "node-b", "hostname; hostname -I; touch /tmp/own"]).stdout.split()
    assert shown[:2] == ["node-b", "192.0.2.2"]
    assert "/tmp/own" in hosts.b.temporary_files() - hosts.a.temporary_files()
    assert not hosts.b.path(hosts.hostfile).exists()
    hosts.b.stop_sshd()
    assert "refused" in hosts.a.run(["ssh", "node-b", "true"], check=False).stderr
    inner = tmp_path / "inner"
    inner.mkdir()
    program = (
        "import sys, time, pathlib; from tests.support.two_hosts import make_two_hosts\n"
        "with make_two_hosts(pathlib.Path(sys.argv[1]), shared_file_system=True) as hosts:\n"
        "    hosts.a.start(['ssh', 'node-b', 'sleep 600']); time.sleep(1)\n"
        "    print(hosts.a.pid, hosts.b.pid, flush=True); time.sleep(600)\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", program, inner], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    with maker.stdout:
        spaces = [Path(f"/proc/{pid}/ns/pid").readlink() for pid in maker.stdout.readline().split()]
    assert all(len(namespace_members(space)) > 2 for space in spaces)
    maker.kill()
    maker.wait()
    assert wait_until(lambda: not any(namespace_members(space) for space in spaces), 5)
