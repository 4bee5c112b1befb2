"""Where a result comes from, in words."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from ds_bench.analysis import provenance
from ds_bench.analysis.provenance import title
from ds_bench.analysis.row import Run, make_run
from ds_bench.system.environment import Environment
from tests.support import fakes

HOST = Environment(
    hostname="node-7",
    cpu_model="AMD EPYC 9654",
    logical_cores=16,
    physical_cores=8,
    cpu_quota_cores=2.5,
    host_memory_bytes=64 * 2**30,
    packages={"torch": "2.13.0"},
)


def test_the_command_comes_back_from_a_shell_as_it_was_typed() -> None:
    arguments = ["--model", "my model", "it's", "--set=a=$HOME", ""]
    line = provenance.command("zero", arguments)
    assert shlex.split(line) == ["python", "zero_stage_comparison.py", *arguments]
    assert provenance.command(None, arguments) == ""


def test_machine_lists_known_facts_and_each_value_of_several_hosts_once() -> None:
    facts = {
        "GPUs": "none",
        "CPU": "AMD EPYC 9654",
        "cores": "16 threads on 8 cores, quota 2.5",
        "host memory": "64.00 GB",
        "torch": "2.13.0",
    }
    assert provenance.machine(HOST) == facts
    other = replace(HOST, hostname="node-8", cpu_model="AMD EPYC 7763")
    assert provenance.machine(replace(HOST, hostname="login", cpu_model="Intel", hosts=(HOST, other))) == {
        "hosts": "node-7, node-8",
        **facts,
        "CPU": "AMD EPYC 9654 (node-7); AMD EPYC 7763 (node-8)",
    }


def test_a_title_tells_how_ranks_are_placed_on_nodes() -> None:
    def of(*slots: int, **placement: Any) -> str:
        hosts = tuple((f"node-{number}", each) for number, each in enumerate(slots))
        place = fakes.placement(num_gpus=sum(slots), hosts=hosts, **placement)
        return title([make_run(fakes.success(fakes.trial(on=place), device_name="NVIDIA H100"))])

    assert " · 2 nodes × 1 CPU rank · " in of(1, 1)
    assert " · 2 nodes × 8 × H100 · " in of(8, 8, accelerator="cuda")
    assert " · 2 nodes, 12 × H100 · " in of(8, 4, accelerator="cuda")
    assert " · 2 CPU ranks · " in of(2)


def test_what_axes_vary_is_not_said_of_all_rows() -> None:
    def row(size: int, **axis_values: str) -> Run:
        configuration = replace(fakes.zero(1), axis_values=axis_values)
        trial = fakes.trial(configuration, of=fakes.workload(batch_size=size, grad_accum=2))
        return make_run(fakes.success(trial))

    assert "micro-batch 4 × " in title([row(4), row(4, micro_batch="4")])
    varied = title([row(1, micro_batch="1", grad_accum="2"), row(4, micro_batch="4", grad_accum="2")])
    assert "each row's micro-batch × 128 tokens × 2 accumulated" in varied
