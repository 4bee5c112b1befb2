"""What a trial leaves outside its folder holds its owner's name, is found by it, and is removed; nothing else is."""

from __future__ import annotations

import multiprocessing.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from ds_bench.config.spec import Trial
from ds_bench.launch import scratch
from ds_bench.launch.scratch import new_scratch_id, owner, remove_abandoned, remove_scratch, swap_folder
from ds_bench.records.rank_files import HOST_FOLDER_PREFIX, Assignment
from tests.support import fakes

PRINT_OWNER = "from ds_bench.launch.scratch import owner; print(owner())"


def test_only_a_trial_that_swaps_has_a_swap_folder_of_its_own(tmp_path: Path) -> None:
    def swapping(nvme_path: Path | None) -> Trial:
        path = None if nvme_path is None else str(nvme_path)
        return fakes.trial(fakes.offload("nvme"), on=fakes.placement(nvme_path=path))

    assert swap_folder(swapping(tmp_path), "123456789") == str(tmp_path / f"ds_bench_swap.{owner()}.123456789")
    on = fakes.placement(nvme_path=str(tmp_path))
    assert swap_folder(fakes.trial(fakes.offload("cpu_full"), on=on), "1") is None
    assert swap_folder(swapping(None), "1") is None
    # Else its swap path would be empty, and DeepSpeed would swap into the current folder.
    edited = fakes.trial(replace(fakes.offload("nvme"), name="zero3", label="ZeRO-3"), on=on)
    assert swap_folder(edited, "1") is not None


def test_trial_removes_what_it_has_created_and_locks_that_its_ranks_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, other = new_scratch_id(), new_scratch_id()
    assert (number != other, number.isdecimal()) == (True, True), "it passes for a port"
    ops = tmp_path / "ops"
    assignment = Assignment(
        trial=fakes.trial(),
        rendezvous=f"file://{tmp_path / 'meet'}",
        scratch_id=number,
        swap_folder=str(tmp_path / "swap"),
        checkpoint_folder=str(tmp_path / "checkpoint"),
        environment={"TORCH_EXTENSIONS_DIR": str(ops)},
    )
    scratch.create_scratch(assignment)
    (tmp_path / "swap" / "1.tensor.swp").write_bytes(b"x")
    segments = [Path(f"/dev/shm/deepspeed_allreduce_buffer_test_{each}_0") for each in (number, other)]
    for path in (*segments, ops / "held" / "lock", ops / "left" / "lock"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    try:
        with (ops / "held" / "lock").open():
            remove_scratch(assignment)
            remove_scratch(assignment)
            assert [segment.exists() for segment in segments] == [False, True]
            left = {path for path in tmp_path.rglob("*") if path.is_file() or path.parent == tmp_path}
            assert left == {ops, ops / "held" / "lock"}
    finally:
        segments[1].unlink()

    def no_lease(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr("fcntl.fcntl", no_lease)  # as on a network file system: an old lock is stale
    assert scratch.remove_stale_locks(ops) == []
    os.utime(ops / "held" / "lock", (1000, 1000))
    assert scratch.remove_stale_locks(ops) == [ops / "held" / "lock"]
    scratch.create_scratch(assignment)
    monkeypatch.setattr(
        scratch, "remove_stale_locks", Mock(side_effect=PermissionError)
    )  # of another user, who shares it
    remove_scratch(assignment)
    assert [*tmp_path.iterdir()] == [ops]


# ------------------------------------------------------------------ removing what killed runs left


def test_sweep_removes_what_belongs_to_ended_processes_of_this_host_and_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, me = subprocess.check_output([sys.executable, "-c", PRINT_OWNER], text=True).strip(), owner()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    reused = me.rpartition("-")[0] + "-1"  # another process has this id by now
    elsewhere = f"00000000.{dead.partition('.')[2]}"
    names = "ds_bench_swap.{}.1", "ds_bench_checkpoint.{}.1", "tmp/ds_bench_meet.{}.1", "tmp/ds_bench_tmp.{}.abc"
    for who in (dead, reused, me, elsewhere, "models", "my"):
        for name in names:
            (tmp_path / name.format(who)).mkdir(parents=True)
    for who in (dead, me):
        folder = tmp_path / "tmp" / f"{HOST_FOLDER_PREFIX}0_{who[-3:]}"
        folder.mkdir()
        (folder / scratch.OWNER_FILE).write_text(who)
    segments = [Path(f"/dev/shm/deepspeed_allreduce_buffer_0_ds_bench_meet.{who}.1_1_0") for who in (dead, me)]
    for segment in segments:
        segment.touch()
    foreign = tmp_path / f"ds_bench_swap.{dead}.2"
    foreign.mkdir()
    if os.getuid() == 0:
        os.chown(foreign, 54321, 54321)
    (tmp_path / f"ds_bench_swap.{dead}.3").symlink_to(tmp_path / "tmp")  # only the link is removed
    before = {*tmp_path.rglob("*"), *segments}
    try:
        remove_abandoned(tmp_path)
        expected = {tmp_path / name.format(who) for name in names for who in (dead, reused)}
        expected |= {segments[0], tmp_path / f"ds_bench_swap.{dead}.3"}
        gone = {path for path in before if not path.exists() and not path.is_symlink()}
        host_folder = tmp_path / "tmp" / f"{HOST_FOLDER_PREFIX}0_{dead[-3:]}"
        assert gone - {foreign} == expected | {host_folder, host_folder / scratch.OWNER_FILE}
        assert foreign.exists() == (os.getuid() == 0)
    finally:
        for segment in segments:
            segment.unlink(missing_ok=True)


def test_owner_in_another_process_namespace_is_not_taken_for_dead() -> None:
    command = ["unshare", "--pid", "--mount-proc", "--fork", sys.executable, "-c", PRINT_OWNER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip("no namespaces for this user")
    assert done.stdout.partition(".")[0] != owner().partition(".")[0]


# ------------------------------------------------------------------ temporary files and compiled code


def give_away(folder: Path) -> None:
    os.chown(folder, 54321, 54321)


def link_to(folder: Path, change: Callable[[Path], object]) -> None:
    folder.rename(folder.with_name("x"))
    folder.symlink_to("x")
    change(folder)


@pytest.mark.parametrize(
    ("change", "used"),
    [
        (Path.exists, True),
        (lambda folder: folder.chmod(0o777), False),
        (lambda folder: folder.chmod(0o775), False),
        (give_away, False),
        (lambda folder: link_to(folder, give_away), False),
        (lambda folder: link_to(folder, Path.exists), True),
        (lambda folder: folder.rmdir(), True),
        (lambda folder: give_away(folder.parent), False),
    ],
    ids=["own", "all", "group", "other user", "link to such", "link to own", "missing", "in other user's"],
)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_no_compiled_code_is_loaded_from_a_folder_that_another_user_can_write_to(
    change: Callable[[Path], object], used: bool, tmp_path: Path
) -> None:
    asked, ops = tmp_path / "above" / "asked", tmp_path / "cache" / "ops" / "key"
    asked.mkdir(mode=0o755, parents=True)
    change(asked)
    name = "TRITON_CACHE_DIR"
    variables, notes = scratch.temporary_folder_variables({name: str(asked)}, str(ops))
    ours, temporary = tmp_path / "cache" / f"compiled_{os.getuid()}", Path(variables["TMPDIR"])
    assert temporary.name.startswith(f"ds_bench_tmp.{owner()}.")
    assert multiprocessing.util.get_temp_dir() == str(temporary), "sockets of multiprocessing"
    assert Path(variables[name]) == (asked.resolve() if used else ours / "triton")
    assert [name in note for note in notes] == ([] if used else [True])
    for folder in {asked.resolve() if used else ours, ours}:
        assert (folder.stat().st_uid, folder.stat().st_mode & 0o022) == (os.getuid(), 0)
    give_away(ours)
    variables, _ = scratch.temporary_folder_variables({}, str(ops))
    assert Path(variables["TORCHINDUCTOR_CACHE_DIR"]).parent == temporary
