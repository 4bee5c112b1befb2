"""Where a result comes from, in words."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

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


@given(st.lists(st.text(min_size=1), max_size=5))
def test_the_command_comes_back_from_a_shell_as_it_was_typed(arguments: list[str]) -> None:
    line = provenance.command("zero", arguments)
    assert shlex.split(line) == ["python", "zero_stage_comparison.py", *arguments]


def test_an_unknown_family_has_no_command() -> None:
    assert provenance.command(None, ["--model", "gpt2"]) == ""


def test_facts_that_are_not_known_are_left_out() -> None:
    facts = provenance.machine(HOST)
    assert facts == {
        "GPUs": "none",
        "CPU": "AMD EPYC 9654",
        "cores": "16 threads on 8 cores, quota 2.5",
        "host memory": "64.00 GB",
        "torch": "2.13.0",
    }
    assert provenance.one_line(HOST).startswith("GPUs none · CPU AMD EPYC 9654 · ")


def test_of_several_hosts_a_fact_is_told_once_or_with_those_that_have_it() -> None:
    other = replace(HOST, hostname="node-8", cpu_model="AMD EPYC 7763")
    facts = provenance.machine(replace(HOST, hostname="login", cpu_model="Intel", hosts=(HOST, other)))
    assert (facts["hosts"], facts["torch"]) == ("node-7, node-8", "2.13.0")
    assert facts["CPU"] == "AMD EPYC 9654 (node-7); AMD EPYC 7763 (node-8)"


def test_a_title_tells_how_ranks_lie_on_nodes() -> None:
    def of(*slots: int, **placement: Any) -> str:
        hosts = tuple((f"node-{number}", each) for number, each in enumerate(slots))
        place = fakes.placement(num_gpus=sum(slots), hosts=hosts, **placement)
        return title([make_run(fakes.success(fakes.trial(on=place), device_name="NVIDIA H100"), None, None)])

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
    assert "each row's micro-batch × " in varied
    assert "tokens × 2 accumulated" in varied
