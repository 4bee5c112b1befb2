"""The role of one of a launcher's processes: run the comparison, become the agent of its node, or leave."""

from __future__ import annotations

import os

from ..config.options import Options
from ..launch.host_connections import agent_words
from ..system import job


def runs_comparison(options: Options) -> bool:
    """Return whether this process runs the comparison; if so, it takes over the ranks of the others.

    On the other nodes of torchrun or DeepSpeed's launcher, the first process becomes the agent of its node and does not
    return. Raises UsageError or PreflightError if the nodes cannot be used.
    """
    os.environ.update(options.variables)
    is_first = job.rank_of_process(os.environ) == 0
    # Before take_over_job, which removes the variables that describe the nodes.
    nodes = job.find_nodes(os.environ) if options.hostfile is None else None
    # A dry run waits for no other node: the launcher's variables say how many ranks they have.
    if nodes is not None and options.dry_run and is_first:
        job.assume_nodes(nodes)
    elif nodes is not None and is_first:
        job.connect_nodes(nodes)
    elif nodes is not None and nodes.is_first_of_node and not options.dry_run:
        # The agent starts ranks, which must not inherit the variables of this process's own rank.
        job.take_over_job(os.environ, has_hosts=True)
        job.join_first_node(nodes, agent_words(), os.environ)
    if is_first:
        job.take_over_job(os.environ, has_hosts=options.hostfile is not None or nodes is not None)
    return is_first
