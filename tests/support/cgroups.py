"""A root file system whose /proc and /sys describe control groups, written below a temporary folder."""

from __future__ import annotations

from pathlib import Path

V2_MOUNT = "30 24 0:26 {inside} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}\n")


def place(root: Path, own: str, mount: str = V2_MOUNT, inside: str = "/") -> None:
    write(root / "proc/self/cgroup", own)
    write(root / "proc/self/mountinfo", mount.format(inside=inside))
