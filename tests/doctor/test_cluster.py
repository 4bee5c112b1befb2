"""The checks of several hosts before the first trial. Agents are children of the test; other hosts are made up."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from ds_bench.analysis.comparison import comparison_caveats
from ds_bench.analysis.row import make_run
from ds_bench.config.caveat_texts import CaveatKind
from ds_bench.config.hosts import SRUN, SSH
from ds_bench.config.spec import Placement
from ds_bench.doctor import checks, cluster
from ds_bench.doctor.findings import SystemAccess
from ds_bench.errors import PreflightError
from ds_bench.launch.host_connections import Hosts, agent_words
from ds_bench.launch.ops import OpState
from ds_bench.prediction.trial_predictions import MemoryCapacity
from ds_bench.system.environment import Environment, read_environment
from ds_bench.system.gpu_state import GpuFacts, GpuInventory
from tests.support import fakes

H100 = GpuFacts(index=0, name="NVIDIA H100", memory_total_bytes=80 * 2**30, compute_capability=(9, 0))
PACKAGES = {"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.1.0"}
HERE = Environment(hostname="a", logical_cores=8, python_version="3.12.1", cpu_model="X", packages=PACKAGES)
TWO = Placement(accelerator="cpu", num_gpus=2, hostfile="/hosts", hosts=(("a", 1), ("b", 1)), host_command=SSH)


class MadeUpHosts:
    """Stands for connections; ``answers`` to any request, by the name in the hostfile."""

    def __init__(self, **answers: Any) -> None:
        self.names, self._answers, self.python = tuple(answers), answers, None

    def request_all(self, _what: str, **_: object) -> Mapping[str, Any]:
        return self._answers


def checked(placement: Placement = TWO, local: Environment = HERE, **environments: Environment) -> Environment:
    return cluster.environment_with_hosts(cast(Any, MadeUpHosts(**environments)), placement, local)


def on(name: str, **changes: Any) -> Environment:
    return replace(HERE, **{"hostname": name, **changes})


DIFFERENCES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"packages": {**PACKAGES, "torch": "2.11.0"}}, "torch 2.13.0 on a, 2.11.0 on b. "),
    ({"packages": {**PACKAGES, "nvidia-nccl-cu12": "2.27"}}, "NCCL none on a, 2.27 on b. "),
    ({"torch_cuda_version": "13.0"}, "CUDA none on a, 13.0 on b. "),
    ({"python_version": "3.11.7", "packages": {**PACKAGES, "deepspeed": "0.18.0"}},
     "Python 3.12.1 on a, 3.11.7 on b; deepspeed 0.19.8 on a, 0.18.0 on b. "),
    ({"hostname": "a"}, "a and b both call themselves a: "),
)  # fmt: skip


def test_hosts_that_agree_are_kept_in_the_order_of_their_ranks_and_others_refused_in_one_line() -> None:
    found = checked(b=on("b", cpu_model="Y"), a=HERE)
    assert [each.hostname for each in found.hosts] == ["b", "a"]
    for changes, said in DIFFERENCES:
        with pytest.raises(PreflightError) as caught:
            checked(a=HERE, b=on("b", **changes))
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
    # The host that starts the ranks needs the same versions, even if it trains nothing.
    login = on("login", packages={**PACKAGES, "torch": "2.11.0"})
    with pytest.raises(PreflightError, match=r"torch 2\.13\.0 on a, b, 2\.11\.0 on this host"):
        checked(a=HERE, b=on("b"), local=login)


def test_gpus_are_of_one_kind_and_as_many_as_ranks() -> None:
    cards = replace(TWO, accelerator="cuda", num_gpus=3, hosts=(("a", 2), ("b", 1)))
    a = on("a", gpus=(H100, H100))
    assert len(checked(cards, a, a=a, b=on("b", gpus=(H100,))).hosts) == 2
    with pytest.raises(PreflightError, match="GPU NVIDIA H100 on a, NVIDIA A100 on b"):
        checked(cards, a, a=a, b=on("b", gpus=(replace(H100, name="NVIDIA A100"),)))
    with pytest.raises(PreflightError, match="a has 1 GPUs for 2 ranks"):
        checked(cards, a, a=on("a", gpus=(H100,)), b=on("b", gpus=(H100,)))


def test_gpus_are_those_of_the_slots_that_have_ranks() -> None:
    """Two of the six cards of each host: only these are checked, reported and counted for memory."""
    six = tuple(replace(H100, index=number, uuid=f"GPU-{number}") for number in range(6))
    busy = [replace(six[0], memory_total_bytes=2**30, other_processes=((7, None),)), *six[1:5]]
    a, b = on("a", gpus=six), on("b", gpus=(*busy, replace(six[5], other_processes=((9, None),))))
    four = replace(TWO, accelerator="cuda", num_gpus=4, hosts=(("a", 2), ("b", 2)), include="a:4,5@b:4,5")
    known = checked(four, a, a=a, b=b)
    with pytest.raises(PreflightError, match=r"b has 5 GPUs for 2 ranks in slots 4, 5\. "):
        checked(four, a, a=a, b=replace(b, gpus=six[:5]))
    assert MemoryCapacity.from_environment(known, four).gpu_bytes == H100.memory_total_bytes
    told = comparison_caveats([[make_run(fakes.success(fakes.trial(on=four)))]], [known])
    others = [each.values for each in told if each.kind is CaveatKind.OTHER_PROCESS]
    assert others == [{"gpu": "GPU 5 on b", "processes": 1}]
    system = SystemAccess(read_gpus=lambda: GpuInventory(gpus=b.gpus), environ={})
    found = checks.run_plan_checks(four, [], slots=four.slots_of("b"), system=system)
    memory = [each.name for each in found if each.name.startswith("GPU ") and each.name.endswith(" memory")]
    assert memory == ["GPU 4 memory", "GPU 5 memory"]


def test_memory_is_that_of_the_smallest_host_and_unknown_before_the_hosts_are() -> None:
    placement = replace(TWO, num_gpus=3, hosts=(("a", 2), ("b", 1)), cpu_memory_limit_bytes=5)
    known = checked(a=on("a", host_memory_bytes=100), b=on("b", host_memory_bytes=90, cgroup_memory_limit_bytes=80))
    assert MemoryCapacity.from_environment(HERE, placement).node_bytes is None
    capacity = MemoryCapacity.from_environment(known, placement)
    assert (capacity.node_bytes, capacity.host_bytes) == (80, 2 * 5)


def test_op_is_ready_where_it_is_on_every_host() -> None:
    failed = OpState(op="CPUAdamBuilder", ready=False, reason="no compiler")
    ready = OpState(op="CPUAdamBuilder", ready=True)
    for states in ({"a": ready, "b": failed}, {"b": failed, "a": ready}):
        hosts = MadeUpHosts(**{name: {"CPUAdamBuilder": state} for name, state in states.items()})
        (state,) = cluster.build_ops(cast(Any, hosts), TWO, [], lambda _text: None).values()
        assert (state.ready, state.reason) == (False, "on b: no compiler")


def test_every_host_runs_the_checks_of_its_own_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Through a real agent, on this host."""
    monkeypatch.setattr(cluster, "command_on_host", lambda _template, _host, words: words)
    place = fakes.placement(hosts=(("here", 1),), hostfile="/not/there", host_command=SSH, nvme_path="/proc")
    with cluster.connected_hosts(place) as connections:
        environment = cluster.environment_with_hosts(connections, place, read_environment())
        found = cluster.check_hosts(connections, place, [fakes.offload("nvme")], environment, 2**60)
    names = {finding.name: finding for finding in found}
    assert names["here: host memory"].level != "ok"  # an exabyte is needed
    assert "--nvme-path /proc cannot be written" in names["here: NVMe path"].text
    with pytest.raises(PreflightError, match="cannot use here: "), cluster.naming_lost_host():
        connections.request_all("environment")
    # Of a user's script it is the script's interpreter that must have the packages, on every host.
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    bare.chmod(0o755)
    lacks = pytest.raises(PreflightError, match=r"cannot use here: the script's .* no torch and no deepspeed")
    with cluster.connected_hosts(place, str(bare)) as connections, lacks:
        cluster.environment_with_hosts(connections, place, read_environment())


def test_ranks_that_could_not_meet_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(TWO, master_addr="127.0.0.1")
    with Hosts(["a", "b"], lambda _name: agent_words()) as both, socket.create_server(("", 0)) as other:
        both.connect()
        cluster.require_connections(both, here)
        in_use = r"a cannot listen on 127\.0\.0\.1 port \d+: Address already in use "
        with pytest.raises(PreflightError, match=in_use):
            cluster.require_connections(both, replace(here, master_port=other.getsockname()[1]))
        monkeypatch.setattr(both.connections[0], "request", lambda *_, **__: 1)  # as if it listened at port 1
        with pytest.raises(PreflightError, match=r"b cannot connect to a at 127\.0\.0\.1 port 1: Connection refused"):
            cluster.require_connections(both, replace(here, master_port=1))


def test_every_host_must_reach_every_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall between the second and the third host would stop the ranks as surely as one before the first."""
    here = replace(TWO, num_gpus=3, hosts=(("a", 1), ("b", 1), ("c", 1)), master_addr="127.0.0.1")
    with Hosts(["a", "b", "c"], lambda _name: agent_words()) as hosts:
        hosts.connect()
        cluster.require_connections(hosts, here)
        last, allowed = hosts.connections[2], iter((True, False))
        send = last.send_request

        def to_the_first_only(what: str, **values: Any) -> Any:
            if what == "connect" and not next(allowed):
                values["port"] = 1
            return send(what, **values)

        monkeypatch.setattr(last, "send_request", to_the_first_only)
        with pytest.raises(PreflightError, match="c cannot connect to b at "):
            cluster.require_connections(hosts, here)


def test_doctor_checks_the_hosts_of_a_hostfile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = [sys.executable, "-c", "raise SystemExit('ssh: no route to host')"]
    commands = {"here": agent_words(), "gone": gone}
    monkeypatch.setattr(cluster, "command_on_host", lambda _template, host, _words: commands[host])
    monkeypatch.setattr(cluster, "find_program", lambda _name: "/usr/bin/x")
    path = tmp_path / "hosts"
    for text, level, said in (
        ("here slots=1\n", "ok", "here: reached, same versions"),
        ("here slots=1\ngone slots=1\n", "problem", "cannot use gone: ssh: no route to host"),
    ):
        path.write_text(text)
        found = {each.name: each for each in checks.run_all_checks(SystemAccess(), hostfile=path)["Hosts"]}
        assert (found["hosts"].level, found["hosts"].text) == (level, said)


def test_every_way_to_a_host_has_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for each program, first on PATH, writes its words down and fails."""
    for name in ("ssh", "srun", "kubectl"):
        script = f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/{name}.words\necho refused >&2; exit 1\n'
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program, *others = agent_words()
    every_gpu = [program, "-u", "CUDA_VISIBLE_DEVICES", *others]
    for command, hostfile, remedy, words in (
        (SSH, "/hosts", "`ssh a true` work.*leave the host out with --exclude", [shlex.join(every_gpu)]),
        (SRUN, None, "`srun .*--nodelist=a .* true` work.*with sbatch --exclude", [program, *others]),
        ("kubectl exec -i {host} --", "/hosts", "`kubectl exec -i a -- true` work", ["a", "--", *every_gpu]),
    ):
        place = replace(TWO, hostfile=hostfile, host_command=command, hosts=(("a", 1),))
        refused = pytest.raises(PreflightError, match=rf"cannot use a: refused\. .*{remedy}")
        with refused, cluster.connected_hosts(place):
            pass
        told = (tmp_path / f"{command.split()[0]}.words").read_text().splitlines()
        assert told[-len(words) :] == words
        assert ("BatchMode=yes" in told) == (command == SSH)
    missing = pytest.raises(PreflightError, match=r"nothing is not installed on this host. Put .*--host-command")
    with missing, cluster.connected_hosts(replace(TWO, host_command="nothing {host}")):
        pass
