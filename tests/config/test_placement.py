"""On what a comparison runs, decided from fake cards, a fake environment and hostfiles good and bad."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_bench.config import placement
from ds_bench.config.placement import choose_precision, read_hostfile, resolve_placement
from ds_bench.config.spec import Placement
from ds_bench.errors import UsageError
from ds_bench.system import environment
from ds_bench.system.gpus import GpuFacts, GpuInventory
from tests.support import fakes


@pytest.fixture(autouse=True)
def torch_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed torch is taken for a CUDA build, whatever it is."""
    monkeypatch.setattr(environment, "torch_cuda_version", lambda: "13.0")


@pytest.fixture
def torch_for_cpu(monkeypatch: pytest.MonkeyPatch, torch_for_cuda: None) -> None:
    monkeypatch.setattr(environment, "torch_cuda_version", lambda: None)


def place(*arguments: str, cards: int = 4, capability: tuple[int, int] = (9, 0), **environ: str) -> Placement:
    return resolve_placement(fakes.options("zero", *arguments), environ, fakes.inventory(cards, capability))


# ------------------------------------------------------------------ which device, how many


def test_auto_takes_every_card_there_is() -> None:
    found = place()
    assert (found.accelerator, found.num_gpus, found.launcher) == ("cuda", 4, "warm")


def test_auto_without_a_card_is_one_rank_on_the_cpu() -> None:
    found = place(cards=0)
    assert (found.accelerator, found.num_gpus) == ("cpu", 1)


def test_auto_with_cards_but_a_torch_for_cpus_is_the_cpu(torch_for_cpu: None) -> None:
    assert place().accelerator == "cpu"


def test_cuda_asked_of_a_torch_for_cpus_is_refused(torch_for_cpu: None) -> None:
    with pytest.raises(UsageError, match=r"--accelerator cuda, but the installed torch is a CPU build \(install"):
        place("--accelerator", "cuda")


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_torch_for_rocm_is_refused_instead_of_running_on_the_cpu(
    torch_for_cpu: None, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "torch_rocm_version", lambda: "6.4.43482")
    with pytest.raises(UsageError, match=r"torch is for ROCm 6.4.43482, which is not supported"):
        place("--accelerator", asked, cards=0)
    assert place("--accelerator", "cpu", cards=0).accelerator == "cpu"


def test_cuda_asked_of_a_host_without_cards_is_refused_with_both_ways_out() -> None:
    with pytest.raises(UsageError, match=r"no GPU is visible .*CUDA_VISIBLE_DEVICES, or --accelerator cpu"):
        place("--accelerator", "cuda", cards=0)


def test_cards_hidden_from_us_are_no_cards(subtests: pytest.Subtests) -> None:
    for hidden in ("", "-1", "7"):
        with subtests.test(hidden=hidden):
            assert place(CUDA_VISIBLE_DEVICES=hidden).accelerator == "cpu"


def test_only_visible_cards_count() -> None:
    assert place(CUDA_VISIBLE_DEVICES="2,0").num_gpus == 2


def test_the_cpu_can_be_asked_for_beside_cards() -> None:
    found = place("--accelerator", "cpu", "--num-gpus", "2")
    assert (found.accelerator, found.num_gpus) == ("cpu", 2)


def test_fewer_cards_than_there_are_can_be_asked_for() -> None:
    assert place("--num-gpus", "3").num_gpus == 3


def test_more_cards_than_are_visible_are_refused_with_how_many_there_are() -> None:
    with pytest.raises(UsageError, match=r"--num-gpus 5, but 4 are visible \(give 4 or less\)"):
        place("--num-gpus", "5")
    with pytest.raises(UsageError, match="but 1 are visible"):
        place("--num-gpus", "2", CUDA_VISIBLE_DEVICES="3")


def test_on_the_cpu_any_number_of_ranks_can_be_asked_for() -> None:
    assert place("--num-gpus", "64", cards=0).num_gpus == 64


# ------------------------------------------------------------------ started under a launcher by habit


def test_a_launchers_world_size_is_the_number_of_ranks() -> None:
    assert place(WORLD_SIZE="2").num_gpus == 2
    assert place(cards=0, WORLD_SIZE="2").num_gpus == 2


def test_a_flag_beats_the_launchers_world_size() -> None:
    assert place("--num-gpus", "3", WORLD_SIZE="2").num_gpus == 3


def test_a_world_size_that_is_none_means_nothing(subtests: pytest.Subtests) -> None:
    for nonsense in ("", "0", "-2", "two", "2.0", "²"):
        with subtests.test(nonsense=nonsense):
            assert place(WORLD_SIZE=nonsense).num_gpus == 4


def test_a_world_size_beyond_the_cards_is_refused() -> None:
    with pytest.raises(UsageError, match="but 4 are visible"):
        place(WORLD_SIZE="16")


# ------------------------------------------------------------------ the hostfile


def hostfile(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "hosts"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_hostfile_is_hosts_and_slots_with_comments_and_blanks(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "# cluster\n\n  node-1   slots=8  # first\nnode-2\tslots=4\n")
    assert read_hostfile(path) == {"node-1": 8, "node-2": 4}


@pytest.mark.parametrize(
    "line",
    ["node-2", "node-2 8", "node-2 slots=", "node-2 slots=0", "node-2 slots=-1", "node-2 slots=8 slots=8",
     "node-2 slots=eight", "node-2 slots = 8", "node-1 slots=8", "node-2 slots=²", "node-2 gpus=8"],
)  # fmt: skip
def test_a_bad_line_of_a_hostfile_is_refused_by_number_and_text(tmp_path: Path, line: str) -> None:
    path = hostfile(tmp_path, f"node-1 slots=8\n\n{line}\n")
    with pytest.raises(UsageError) as caught:
        read_hostfile(path)
    assert f"{path}, line 3: {line!r}" in str(caught.value)
    assert "write: host slots=N, each host once" in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# nobody\n"])
def test_a_hostfile_of_nobody_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="names no host"):
        read_hostfile(hostfile(tmp_path, text))


def test_a_hostfile_that_is_not_text_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 1"):
        read_hostfile(hostfile(tmp_path, b"\xff\xfe\x00\x80"))


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_hostfile_that_cannot_be_read_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"--hostfile .*give a readable file"):
        read_hostfile(tmp_path / name)


def test_a_hostfile_gives_the_ranks_and_takes_deepspeeds_launcher(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "a slots=8\nb slots=8\n")
    found = place("--hostfile", str(path))
    assert (found.num_gpus, found.launcher, found.hostfile) == (16, "deepspeed", str(path))
    assert place("--hostfile", str(path), "--num-gpus", "16").num_gpus == 16


@pytest.mark.parametrize(
    ("flags", "hosts", "include"),
    [
        ((), (("a", 4), ("b", 4), ("c", 2)), None),
        (("--include", "c@a:3,0"), (("a", 2), ("c", 2)), "a:0,3@c:0,1"),
        (("--include", "a:0@a:1,1"), (("a", 2),), "a:0,1"),
        (("--exclude", "b@c:1"), (("a", 4), ("c", 1)), "a:0,1,2,3@c:0"),
    ],
)
def test_slots_are_selected_as_deepspeed_selects_them(
    flags: tuple[str, ...], hosts: tuple[tuple[str, int], ...], include: str | None, tmp_path: Path
) -> None:
    path = hostfile(tmp_path, "a slots=4\nb slots=4\nc slots=2\n")
    found = place("--hostfile", str(path), *flags)
    assert (found.hosts, found.include) == (hosts, include)
    assert (found.num_nodes, found.num_gpus) == (len(hosts), sum(slots for _, slots in hosts))
    runner = pytest.importorskip("deepspeed.launcher.runner")
    text = {"--include": "inclusion", "--exclude": "exclusion"}
    given = {"inclusion": "", "exclusion": "", **({text[flags[0]]: flags[1]} if flags else {})}
    pool = {"a": 4, "b": 4, "c": 2}
    slots = runner.parse_inclusion_exclusion(pool, **given)
    assert {name: len(numbers) for name, numbers in slots.items()} == dict(found.hosts)
    assert runner.parse_inclusion_exclusion(pool, found.include or "", "") == slots


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--include", "a", "--exclude", "b"), "--include and --exclude together (give one"),
        (("--include", "d"), "--include 'd': no host 'd' in the hostfile (one of a, b)"),
        (("--include", "a:4"), "--include 'a:4': no slot 4 on a (a has slots 0 to 3)"),
        (("--exclude", "b:1"), "--exclude 'b:1': no slot 1 on b (b has slot 0 alone)"),
        (("--include", "a:0,"), "'a:0,' is no host with slots (write: HOST@HOST:SLOT,SLOT)"),
        (("--include", "a:-1"), "'a:-1' is no host with slots"),
        (("--include", ""), "no host '' in the hostfile"),
        (("--include", "a\nb"), "no host 'a\\nb' in the hostfile"),
        (("--include=-oProxyCommand=x",), "no host '-oProxyCommand=x' in the hostfile"),
        (("--exclude", "a@b"), "--exclude 'a@b' leaves no slot"),
        (("--master-addr=-oProxyCommand=x",), "--master-addr '-oProxyCommand=x' is no host or address"),
        (("--master-addr", "a;b"), "--master-addr 'a;b' is no host or address"),
        (("--master-addr", "a\nb"), "--master-addr 'a\\nb' is no host or address"),
        (("--host-command", "ssh 'y"), "No closing quotation (close the quotation mark)"),
        (("--host-command", "{host}"), "does not say where the host's name goes"),
        (("--host-command", "ssh host"), "does not say where the host's name goes"),
        (("--host-command", "ssh {host}\n"), "does not say where the host's name goes"),
        (("--env", "A B=1"), "--env 'A B' is no variable (write NAME or NAME=VALUE)"),
        (("--env", "HF_TOKEN=hf_secret"), "(export HF_TOKEN and give --env HF_TOKEN)"),
    ],
)
def test_what_deepspeeds_launcher_could_not_start_is_refused_in_one_line(
    flags: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    path = hostfile(tmp_path, "a slots=4\nb slots=1\n")
    with pytest.raises(UsageError) as error:
        place("--hostfile", str(path), *flags)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_flag_for_several_nodes_needs_a_hostfile(subtests: pytest.Subtests) -> None:
    for flags in (
        ("--include", "a"), ("--exclude", "a"), ("--master-addr", "a"), ("--master-port", "1"),
        ("--host-command", "ssh {host}"),
    ):  # fmt: skip
        with (
            subtests.test(flags=flags),
            pytest.raises(UsageError, match=rf"{flags[0]} without --hostfile \(add --hostfile FILE"),
        ):
            place(*flags)


def test_a_number_of_gpus_against_the_hostfile_is_refused(tmp_path: Path) -> None:
    path = hostfile(tmp_path, "a slots=8\nb slots=8\n")
    with pytest.raises(
        UsageError, match=r"--num-gpus 8, but the hostfile has 16 slots \(leave --num-gpus out; --include"
    ):
        place("--hostfile", str(path), "--num-gpus", "8")


def test_the_launcher_asked_for_is_taken() -> None:
    assert place("--launcher", "deepspeed").launcher == "deepspeed"
    assert place("--launcher", "warm").launcher == "warm"


# ------------------------------------------------------------------ what is passed on


def test_paths_are_made_absolute_since_ranks_may_start_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hostfile(tmp_path, "a slots=1\n")
    found = place("--nvme-path", "swap", "--hostfile", "hosts")
    assert found.nvme_path == str(tmp_path.resolve() / "swap")
    assert found.hostfile == str(tmp_path.resolve() / "hosts")


def test_limits_are_passed_on_in_bytes() -> None:
    found = place("--cpu-memory-limit", "2", "--gpu-memory-limit", "0.5")
    assert (found.cpu_memory_limit_bytes, found.gpu_memory_limit_bytes) == (2 * 2**30, 2**29)


# ------------------------------------------------------------------ number formats


def test_bf16_begins_with_ampere() -> None:
    formats = {
        (7, 0): ("fp16", "fp32"),
        (7, 5): ("fp16", "fp32"),
        (8, 0): ("bf16", "fp16", "fp32"),
        (9, 0): ("bf16", "fp16", "fp32"),
    }
    assert {capability: place(capability=capability).supported_precisions for capability in formats} == formats


def test_the_oldest_of_several_cards_decides() -> None:
    cards = [GpuFacts(index=0, compute_capability=(9, 0)), GpuFacts(index=1, compute_capability=(7, 0))]
    options, inventory = fakes.options("zero"), GpuInventory(gpus=tuple(cards))
    assert "bf16" not in resolve_placement(options, {}, inventory).supported_precisions
    assert "bf16" in resolve_placement(options, {"CUDA_VISIBLE_DEVICES": "0"}, inventory).supported_precisions


def test_a_card_that_does_not_tell_is_not_taken_for_an_old_one() -> None:
    inventory = GpuInventory(gpus=(GpuFacts(index=0),))
    assert resolve_placement(fakes.options("zero"), {}, inventory).supported_precisions[0] == "bf16"


@pytest.mark.parametrize(("has", "formats"), [(False, ("bf16", "fp32")), (True, ("bf16", "fp16", "fp32"))])
def test_a_cpu_trains_in_fp16_only_with_the_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, has: bool, formats: tuple[str, ...]
) -> None:
    monkeypatch.setattr(placement, "_cpu_has_fp16", lambda: has)
    assert place(cards=0).supported_precisions == formats


def test_a_precision_asked_for_is_never_exchanged_for_another() -> None:
    """Where the device lacks it, the row says Unsupported: a silent fallback would be a wrong label."""
    chosen = {
        ("auto", ("bf16", "fp16", "fp32")): "bf16",
        ("auto", ("fp16", "fp32")): "fp16",
        ("auto", ("fp32",)): "fp32",
        ("fp32", ("bf16", "fp16", "fp32")): "fp32",
        ("fp16", ("bf16", "fp16", "fp32")): "fp16",
        ("bf16", ("fp16", "fp32")): "bf16",
        ("fp16", ("bf16", "fp32")): "fp16",
    }
    assert {
        (asked, supported): choose_precision(asked, fakes.placement(supported_precisions=supported))
        for asked, supported in chosen
    } == chosen


# ------------------------------------------------------------------ a Slurm job of several nodes


@pytest.mark.parametrize(
    ("flags", "tasks", "cards", "world_size", "ranks"),
    [
        ((), "1(x2)", 0, "", (1, 1)),
        ((), "2,1", 0, "", (2, 1)),
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
    placement = place(*flags, cards=cards, **job)
    assert placement.hosts == (("a", ranks[0]), ("b", ranks[1]))
    assert (placement.num_gpus, placement.launcher, placement.hostfile) == (sum(ranks), "deepspeed", None)
    with pytest.raises(UsageError, match="a multiple of 2, or use one node: srun --nodes=1 --ntasks=1"):
        place("--num-gpus", "1", cards=cards, **job)
