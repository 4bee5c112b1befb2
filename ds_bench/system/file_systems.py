"""Types of file systems: which are in memory, and which are on the network."""

from __future__ import annotations

from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs")
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "fuse", "ceph", "9p", "virtiofs")
"""How the names of network file systems begin."""


def file_system(path: Path) -> str | None:
    """Return the type of the file system that holds ``path``; None if the kernel does not show it."""
    import psutil

    try:
        mounts = [(Path(mount.mountpoint), mount.fstype) for mount in psutil.disk_partitions(all=True)]
    except OSError:
        return None
    # The deepest mount above the path holds it; of several at one place the last, which covers the others.
    holding = [mount for mount in reversed(mounts) if path.resolve().is_relative_to(mount[0])]
    return max(holding, key=lambda mount: len(mount[0].parts), default=(None, None))[1]
