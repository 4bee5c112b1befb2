"""What a trial leaves outside its folder is private, is found again by name, and is removed and nothing else."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ds_bench.config.spec import Trial
from ds_bench.launch.scratch import (
    new_scratch_id,
    remove_abandoned,
    remove_abandoned_folders,
    remove_scratch,
    swap_folder,
    temporary_folder_variables,
)
from ds_bench.records.rank_files import Assignment
from ds_bench.system.processes import start_ticks
from tests.support import fakes

NAMESPACE = Path("/proc/self/ns/pid").stat().st_ino


def swapping(nvme_path: Path | None) -> Trial:
    path = None if nvme_path is None else str(nvme_path)
    return fakes.trial(fakes.offload("nvme"), on=fakes.placement(nvme_path=path))


def assignment(**changes: object) -> Assignment:
    made = Assignment(trial=fakes.trial(), rendezvous=None, scratch_id="123456789")
    return replace(made, **changes)  # type: ignore[arg-type]


def dead_pid() -> int:
    """The process id of a process that has ended and was collected."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_scratch_ids_are_nine_digits_so_that_they_pass_for_a_port_and_differ() -> None:
    ids = {new_scratch_id() for _ in range(200)}
    assert len(ids) == 200
    assert all(each.isdecimal() and len(each) == 9 for each in ids)


# ------------------------------------------------------------------ the swap folder


def test_the_swap_folder_lies_on_the_disk_and_carries_host_process_and_trial(tmp_path: Path) -> None:
    folder = swap_folder(swapping(tmp_path), "123456789")
    me = f"{os.getpid()}-{start_ticks(os.getpid())}"
    assert folder == str(tmp_path / f"ds_bench_swap.{socket.gethostname()}.{NAMESPACE}.{me}.123456789")


def test_two_trials_never_share_a_swap_folder(tmp_path: Path) -> None:
    trial = swapping(tmp_path)
    assert swap_folder(trial, new_scratch_id()) != swap_folder(trial, new_scratch_id())


def test_a_trial_that_swaps_nothing_gets_no_folder(tmp_path: Path) -> None:
    on = fakes.placement(nvme_path=str(tmp_path))
    assert swap_folder(fakes.trial(fakes.offload("cpu_full"), on=on), "1") is None
    assert swap_folder(swapping(None), "1") is None


def test_a_trial_whose_config_was_edited_to_swap_gets_one(tmp_path: Path) -> None:
    """Else its swap path would be empty, and DeepSpeed would swap into whatever folder it stands in."""
    named_otherwise = replace(fakes.offload("nvme"), name="zero3", label="ZeRO-3")
    edited = fakes.trial(named_otherwise, on=fakes.placement(nvme_path=str(tmp_path)))
    assert swap_folder(edited, "1") is not None


# ------------------------------------------------------------------ removing one's own


def test_a_trials_swap_folder_is_removed_with_all_that_is_in_it(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    (mine / "zero_stage_3" / "rank0").mkdir(parents=True)
    (mine / "zero_stage_3" / "rank0" / "1.tensor.swp").write_bytes(b"x")
    other.mkdir()
    remove_scratch(assignment(swap_folder=str(mine)))
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_trials_meeting_file_is_removed(tmp_path: Path) -> None:
    meeting = tmp_path / "meet"
    meeting.write_text("")
    remove_scratch(assignment(rendezvous=f"file://{meeting}"))
    assert not meeting.exists()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory here")
def test_a_trials_shared_memory_is_removed_and_another_trials_is_not() -> None:
    mine, other = new_scratch_id(), new_scratch_id()
    segments = [Path(f"/dev/shm/deepspeed_allreduce_buffer_test_{number}_0") for number in (mine, other)]
    for segment in segments:
        segment.write_bytes(b"x")
    try:
        remove_scratch(assignment(scratch_id=mine))
        assert [segment.exists() for segment in segments] == [False, True]
    finally:
        for segment in segments:
            segment.unlink(missing_ok=True)


def test_what_is_gone_already_is_no_error(tmp_path: Path) -> None:
    everything = assignment(swap_folder=str(tmp_path / "a"), rendezvous=f"file://{tmp_path / 'b'}")
    remove_scratch(everything)
    remove_scratch(everything)
    remove_scratch(assignment())
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ removing what dead runs left


def abandoned(disk: Path, *, host: str | None = None, pid: int | str, kind: str = "swap") -> Path:
    folder = disk / f"ds_bench_{kind}.{host or socket.gethostname()}.{NAMESPACE}.{pid}.123456789"
    folder.mkdir()
    (folder / "1.tensor.swp").write_bytes(b"x")
    return folder


@pytest.mark.parametrize("kind", ["swap", "checkpoint"])
def test_the_folder_of_a_dead_run_is_removed(tmp_path: Path, kind: str) -> None:
    folder = abandoned(tmp_path, pid=dead_pid(), kind=kind)
    assert remove_abandoned_folders(tmp_path) == [folder.name]
    assert not folder.exists()


def test_the_folder_of_a_living_run_is_kept(tmp_path: Path) -> None:
    folder = abandoned(tmp_path, pid=os.getpid())
    assert remove_abandoned_folders(tmp_path) == []
    assert folder.exists()


def test_the_folder_of_another_host_is_kept_since_nobody_here_knows_whether_it_lives(tmp_path: Path) -> None:
    folder = abandoned(tmp_path, host="another-node", pid=dead_pid())
    assert remove_abandoned_folders(tmp_path) == []
    assert folder.exists()


@pytest.mark.parametrize("name", ["models", "ds_bench_swap", "ds_bench_swap.txt", "my_ds_bench_swap.h.1.2"])
def test_what_is_not_ours_is_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    remove_abandoned_folders(tmp_path)
    assert (tmp_path / name).exists()


def test_a_folder_whose_owner_is_no_number_is_kept(tmp_path: Path) -> None:
    folder = abandoned(tmp_path, pid="somebody")
    assert remove_abandoned_folders(tmp_path) == []
    assert folder.exists()


def test_a_host_name_with_dots_does_not_hide_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-7.cluster.example")
    dead, living = abandoned(tmp_path, pid=dead_pid()), abandoned(tmp_path, pid=os.getpid())
    assert remove_abandoned_folders(tmp_path) == [dead.name]
    assert living.exists()


def test_a_number_that_another_process_has_got_since_is_a_dead_owner(tmp_path: Path) -> None:
    reused = abandoned(tmp_path, pid=f"{os.getpid()}-1")
    living = abandoned(tmp_path, pid=f"{os.getpid()}-{start_ticks(os.getpid())}")
    assert remove_abandoned_folders(tmp_path) == [reused.name]
    assert living.exists()


# ------------------------------------------------------------------ what killed runs left in memory and /tmp

OWNER = """
import glob, os, sys, time
from pathlib import Path
from ds_bench.launch import scratch
meeting, number = Path(sys.argv[1]), sys.argv[2]
segment = Path(f"/dev/shm/deepspeed_allreduce_buffer_test_{number}_0")
scratch.note_owned(glob.escape(str(meeting)), scratch.shared_memory(number), sys.argv[3])
meeting.write_text("")
segment.write_text("")
print(flush=True)
time.sleep(100)
"""


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory here")
def test_what_a_killed_process_had_noted_is_removed_and_nothing_of_the_living_or_of_others(tmp_path: Path) -> None:
    foreign = tmp_path / "results"  # noted, but by its name nothing that a run makes for a while
    foreign.mkdir()
    numbers, files = [new_scratch_id(), new_scratch_id()], []
    owners = []
    for number in numbers:
        meeting = tmp_path / f"ds_bench_meet_{number}"
        command = [sys.executable, "-c", OWNER, str(meeting), number, str(foreign)]
        owners.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        files.append({meeting, Path(f"/dev/shm/deepspeed_allreduce_buffer_test_{number}_0")})
    stranger = Path(f"/dev/shm/deepspeed_allreduce_buffer_test_{new_scratch_id()}_0")
    stranger.write_text("")
    try:
        for owner in owners:
            assert owner.stdout is not None
            owner.stdout.readline()
        owners[0].kill()
        owners[0].wait()
        assert files[0] <= set(remove_abandoned())
        assert not any(path.exists() for path in files[0])
        assert all(path.exists() for path in (*files[1], stranger, foreign))
        assert remove_abandoned() == []
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()
        stranger.unlink()
        remove_abandoned()
    assert not any(path.exists() for path in files[1])


COMPILER = """
import os, subprocess, sys, time
from ds_bench.launch import scratch
program = "import tempfile, time; print(tempfile.mkdtemp(), flush=True); time.sleep(100)"
environment = {**os.environ, **scratch.temporary_folder_variables({}, sys.argv[1])[0]}
child = subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline().strip(), environment["TORCHINDUCTOR_CACHE_DIR"], flush=True)
time.sleep(100)
"""


def test_temporary_files_of_a_killed_compiler_are_removed_with_the_folder_of_its_run(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILER, str(tmp_path / "cache" / "ops" / "key")]
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    with run.stdout:
        compiler, temporary, cache = run.stdout.readline().split()
    for pid in (run.pid, int(compiler)):
        os.kill(pid, signal.SIGKILL)
    run.wait()
    assert Path(temporary).is_dir()
    assert tmp_path in Path(temporary).parents
    remove_abandoned()
    kept = tmp_path / "cache" / f"compiled_{os.getuid()}"
    assert [*tmp_path.iterdir(), *(tmp_path / "cache").iterdir()] == [tmp_path / "cache", kept]
    assert Path(cache).parent == kept, "what is compiled once is there for the next run"


def give_away(folder: Path) -> None:
    os.chown(folder, 54321, 54321)


@pytest.mark.parametrize("name", ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
@pytest.mark.parametrize(
    ("change", "used"),
    [
        (Path.exists, True),
        (lambda folder: folder.chmod(0o777), False),
        (lambda folder: folder.chmod(0o775), False),
        (give_away, False),
        (lambda folder: (folder.rename(folder.with_name("x")), folder.symlink_to("x"), give_away(folder)), False),
        (lambda folder: (folder.rename(folder.with_name("x")), folder.symlink_to("x")), True),
        (lambda folder: folder.rmdir(), True),
        (lambda folder: give_away(folder.parent), False),
    ],
    ids=[
        "own",
        "open to all",
        "open to a group",
        "of another user",
        "a link to such",
        "a link to one's own",
        "missing",
        "in a folder of another user",
    ],
)
def test_compiled_code_is_loaded_from_no_folder_that_another_user_can_write_to(
    name: str, change: Callable[[Path], object], used: bool, tmp_path: Path
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    asked, ops = tmp_path / "above" / "asked", tmp_path / "cache" / "ops" / "key"
    asked.mkdir(mode=0o755, parents=True)
    change(asked)
    variables, notes = temporary_folder_variables({name: str(asked)}, str(ops))
    ours = tmp_path / "cache" / f"compiled_{os.getuid()}"
    assert (Path(variables[name]) == asked.resolve()) == used
    assert (Path(variables[name]).parent == ours) != used
    assert [name in note for note in notes] == ([] if used else [True])
    for folder in {asked.resolve() if used else ours, ours}:
        assert (folder.stat().st_uid, folder.stat().st_mode & 0o022) == (os.getuid(), 0)
    give_away(ours)
    variables, _ = temporary_folder_variables({}, str(ops))
    assert Path(variables["TORCHINDUCTOR_CACHE_DIR"]).parent == Path(variables["TMPDIR"])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_note_that_another_user_left_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "pymp-precious"
    target.mkdir()
    note = Path(f"/dev/shm/ds_bench_owner.{socket.gethostname()}.{NAMESPACE}.{dead_pid()}-1")
    note.write_text(json.dumps([str(target)]) + "\n")
    os.chown(note, 54321, 54321)
    try:
        remove_abandoned()
        assert target.exists()
    finally:
        note.unlink()
