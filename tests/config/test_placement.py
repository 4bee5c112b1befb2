"""Where a comparison runs, decided from fake GPUs, a fake environment and hostfiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_bench.config import placement
from ds_bench.config.hosts import SRUN, SSH
from ds_bench.config.placement import choose_precision, resolve_placement
from ds_bench.config.spec import Placement
from ds_bench.errors import UsageError
from ds_bench.system import environment
from ds_bench.system.gpu_state import GpuFacts, GpuInventory
from tests.support import fakes


@pytest.fixture(autouse=True)
def torch_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch is installed counts as a CUDA build."""
    monkeypatch.setattr(environment, "torch_built_for", {"cuda": "13.0"}.get)


def place(*arguments: str, cards: int = 4, capability: tuple[int, int] = (9, 0), **environ: str) -> Placement:
    return resolve_placement(fakes.options("zero", *arguments), environ, fakes.inventory(cards, capability))


def test_accelerator_and_ranks_follow_flags_environment_and_visible_gpus() -> None:
    for flags, cards, environ, expected in (
        ("", 4, {}, ("cuda", 4)),
        ("", 0, {}, ("cpu", 1)),
        ("--accelerator cpu --num-gpus 2", 4, {}, ("cpu", 2)),
        ("--num-gpus 3", 4, {"WORLD_SIZE": "2"}, ("cuda", 3)),
        ("--num-gpus 64", 0, {}, ("cpu", 64)),
        ("", 4, {"WORLD_SIZE": "2"}, ("cuda", 2)),
        ("", 0, {"WORLD_SIZE": "2"}, ("cpu", 2)),
        ("", 4, {"WORLD_SIZE": "²"}, ("cuda", 4)),
        ("", 4, {"WORLD_SIZE": "0"}, ("cuda", 4)),
        ("", 4, {"CUDA_VISIBLE_DEVICES": "2,0"}, ("cuda", 2)),
        ("", 4, {"CUDA_VISIBLE_DEVICES": ""}, ("cpu", 1)),
    ):
        found = place(*flags.split(), cards=cards, **environ)
        assert (found.accelerator, found.num_gpus) == expected, (flags, environ)
    launchers = [place("--launcher", name).launcher for name in ("auto", "warm", "deepspeed")]
    assert launchers == ["warm", "warm", "deepspeed"]
    limits = place("--cpu-memory-limit", "2", "--gpu-memory-limit", "0.5")
    assert (limits.cpu_memory_limit_bytes, limits.gpu_memory_limit_bytes) == (2 * 2**30, 2**29)


def test_gpus_that_are_not_there_are_refused(subtests: pytest.Subtests) -> None:
    for flags, cards, environ, message in (
        ("--accelerator cuda", 0, {}, r"no GPU is visible\. .*CUDA_VISIBLE_DEVICES, or use --accelerator cpu"),
        ("--num-gpus 2", 4, {"CUDA_VISIBLE_DEVICES": "3"}, r"the machine has 1 visible GPU\. Give 1 or fewer"),
        ("", 4, {"WORLD_SIZE": "16"}, "16 processes were started, but the first sees 4 GPUs"),
        ("--gpu-memory-limit 1", 0, {}, "Use --cpu-memory-limit on a CPU"),
    ):
        with subtests.test(flags, environ=environ), pytest.raises(UsageError, match=message):
            place(*flags.split(), cards=cards, **environ)


def test_a_torch_without_cuda_runs_on_the_cpu_unless_cuda_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "torch_built_for", {}.get)
    assert place().accelerator == "cpu"
    with pytest.raises(UsageError, match=r"--accelerator cuda, but no torch for CUDA is installed\. Install"):
        place("--accelerator", "cuda")
    monkeypatch.setattr(environment, "torch_built_for", {"hip": "6.4.43482"}.get)
    with pytest.raises(UsageError, match=r"torch is for ROCm 6.4.43482, which is not supported"):
        place("--accelerator", "auto", cards=0)
    assert place("--accelerator", "cpu", cards=0).accelerator == "cpu"


def test_a_hostfile_gives_the_ranks_and_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n")
    found = place("--hostfile", "hosts", "--nvme-path", "swap", "--num-gpus", "16")
    assert (found.num_gpus, found.launcher, found.host_command) == (16, "deepspeed", SSH)
    assert (found.hostfile, found.nvme_path) == (str(tmp_path.resolve() / "hosts"), str(tmp_path.resolve() / "swap"))
    with pytest.raises(UsageError, match=r"--num-gpus 8, but the hostfile has 16 slots\. Leave --num-gpus out; --incl"):
        place("--hostfile", "hosts", "--num-gpus", "8")


def test_slots_are_selected_as_deepspeed_selects_them(tmp_path: Path, subtests: pytest.Subtests) -> None:
    runner = pytest.importorskip("deepspeed.launcher.runner")
    path = tmp_path / "hosts"
    path.write_text("a slots=4\nb slots=4\nc slots=2\n")
    pool = {"a": 4, "b": 4, "c": 2}
    for include, exclude, hosts, text in (
        ("", "", (("a", 4), ("b", 4), ("c", 2)), None),
        ("c@a:3,0", "", (("a", 2), ("c", 2)), "a:0,3@c:0,1"),
        ("a:0@a:1,1", "", (("a", 2),), "a:0,1"),
        ("", "b@c:1", (("a", 4), ("c", 1)), "a:0,1,2,3@c:0"),
    ):
        flags = ["--include", include] if include else ["--exclude", exclude] if exclude else []
        found = place("--hostfile", str(path), *flags)
        with subtests.test(flags):
            assert (found.hosts, found.include) == (hosts, text)
            assert (found.num_nodes, found.num_gpus) == (len(hosts), sum(slots for _, slots in hosts))
            slots = runner.parse_inclusion_exclusion(pool, include, exclude)
            assert {name: len(numbers) for name, numbers in slots.items()} == dict(found.hosts)
            assert runner.parse_inclusion_exclusion(pool, found.include or "", "") == slots


def test_wrong_flags_for_several_hosts_are_refused_in_one_line(tmp_path: Path, subtests: pytest.Subtests) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=4\nb slots=1\n")
    for flags, message in (
        (("--include", "a", "--exclude", "b"), "include and exclude cannot be combined. Give only one"),
        (("--include", "a:4"), "include 'a:4': no slot 4 on a. Its slots are 0 to 3"),
        (("--include", "a:0,"), "'a:0,' is not a host with slots. Write: HOST@HOST:SLOT,SLOT"),
        (("--include", "a\nb"), "no host 'a\\nb' in the hostfile. Choose from a, b"),
        (("--include=-oProxyCommand=x",), "no host '-oProxyCommand=x' in the hostfile"),
        (("--exclude", "a@b"), "exclude 'a@b' leaves no slot"),
        (("--master-addr=-oProxyCommand=x",), "--master-addr '-oProxyCommand=x' is not a host or address"),
        (("--host-command", "ssh 'y"), "No closing quotation. Close the quotation mark"),
        (("--host-command", "{host}"), "does not say where the host's name goes"),
        (("--host-command", "ssh {host}\n"), "has a control character"),
        (("--env", "A B=1"), "--env 'A B' is not a variable. Write NAME or NAME=VALUE"),
        (("--env", "NOWHERE"), "Export NOWHERE, or give NOWHERE=VALUE"),
        (("--env", "HF_TOKEN=hf_secret"), "Export HF_TOKEN and give only its name"),
    ):
        with subtests.test(flags), pytest.raises(UsageError) as error:
            place("--hostfile", str(path), *flags)
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    for flag, value in (("--include", "a"), ("--master-port", "1"), ("--host-command", "ssh {host}")):
        with subtests.test(flag), pytest.raises(UsageError, match=rf"{flag} without --hostfile\. Add --hostfile FILE"):
            place(flag, value)


def test_number_formats_are_those_of_the_oldest_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = {(7, 5): ("fp16", "fp32"), (8, 0): ("bf16", "fp16", "fp32")}
    assert {capability: place(capability=capability).supported_precisions for capability in formats} == formats
    cards = GpuInventory(gpus=tuple(GpuFacts(index=index, compute_capability=(9 - 2 * index, 0)) for index in (0, 1)))
    unknown, options = GpuInventory(gpus=(GpuFacts(index=0),)), fakes.options("zero")
    assert [
        resolve_placement(options, environ, inventory).supported_precisions[0]
        for inventory, environ in ((cards, {}), (cards, {"CUDA_VISIBLE_DEVICES": "0"}), (unknown, {}))
    ] == ["fp16", "bf16", "bf16"]
    for has, supported in ((False, ("bf16", "fp32")), (True, ("bf16", "fp16", "fp32"))):
        monkeypatch.setattr(placement, "_cpu_has_fp16", lambda has=has: has)
        assert place(cards=0).supported_precisions == supported
    # A requested format is never replaced: a silent fallback would be a wrong label.
    without_bf16 = fakes.placement(supported_precisions=("fp16", "fp32"))
    assert [choose_precision(asked, without_bf16) for asked in ("auto", "bf16")] == ["fp16", "bf16"]


@pytest.mark.parametrize(
    ("flags", "tasks", "cards", "world_size", "ranks"),
    [
        ((), "1(x2)", 0, "", (1, 1)),
        ((), "1(x2)", 4, "", (4, 4)),
        ((), "2,1", 4, "3", (2, 1)),  # the tasks of srun
        ((), "1(x2)", 4, "4", (2, 2)),  # torchrun, started by srun once on each node
        (("--num-gpus", "6"), "1(x2)", 4, "", (3, 3)),
    ],
)
def test_the_nodes_of_a_slurm_job_are_its_hosts(
    flags: tuple[str, ...], tasks: str, cards: int, world_size: str, ranks: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho a b\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "[a-b]", "SLURM_TASKS_PER_NODE": tasks, "WORLD_SIZE": world_size}
    found = place(*flags, cards=cards, **job)
    assert found.hosts == (("a", ranks[0]), ("b", ranks[1]))
    assert (found.num_gpus, found.launcher, found.hostfile) == (sum(ranks), "deepspeed", None)
    assert found.host_command == SRUN
    with pytest.raises(UsageError, match="a multiple of 2, or use one node: srun --nodes=1 --ntasks=1"):
        place("--num-gpus", "1", cards=cards, **job)
