"""The words of a recommendation: one template for each kind of fact, and settings as flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..system import invocation
from ..units import format_template


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that a recommendation says: a kind, its values, and the settings to run with next."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values for the names in the template of the kind; a value may be another fact, or a list of labels."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Option or key of the DeepSpeed configuration → value for the next run: ``{flags}`` in the template."""

    def __str__(self) -> str:
        lists = {name: format_list(value) for name, value in self.values.items() if isinstance(value, list)}
        values = {**self.values, **lists, "flags": flags(self.settings)}
        return format_template(TEMPLATES[self.kind], values)


_SHARED_MEMORY = "give the container more shared memory: --shm-size=8g or --ipc=host (docker), or a larger /dev/shm"
# fmt: off
TEMPLATES: Mapping[str, str] = {
    # The headline and why.
    "use": "Use {choice}: {why}.",
    "use_longest": "Use {choice}: it trains sequences of {tokens:,} tokens, the longest; {why}.",
    "tie": "Too close to call between {rows}. Start with {choice}, the simplest.",
    "tie_for_memory": "Too close to call between {rows}. Start with {choice}, which needs less memory.",
    "disturbed_tie": "Provisional: the CPU was busy during the run, and {rows} are too close to call. Start with "
    "{choice}; run again when the CPU is idle.",
    "disturbed": "Provisional: the CPU was busy during the run. {choice} {looks}; run again when the CPU is idle.",
    "provisional": "After {runs}, a lead below {lead} may be chance.",
    "only": "the only {row} that can be recommended",
    "least_memory": "least {memory} of {count} {row}s",
    "nearly_least_memory": "least {memory} of {count} {row}s, within 3 % of others",
    "less_memory": "{share:percent0} of {best}'s speed with {saved:gigabytes} less {memory}{runs}",
    "offloads_less": "within 3 % of the fastest, {best}, and offloads less",
    "simplest": "the simplest of {count} {row}s that are tied for speed",
    "only_with_optimizer": "the only {row}{with_optimizer}",
    "fastest_with_room": "fastest {row}{with_optimizer} under 95 % of {capacity}{ahead}{runs}",
    "fastest_that_fits": "fastest {row} that fits{ahead}{runs}",
    "fastest": "fastest of {count} {row}s{all_with_optimizer}{ahead}{runs}",
    # Why there is no choice.
    "other_pass": "Only passes without an optimizer step were timed, so no configuration can be recommended.",
    "no_rows": "Nothing was run, so no row can be recommended.",
    "none_compares": "No row can be recommended: the rows are not comparable with each other.",
    "none_valid": "No row can be recommended: the rows that trained have no valid figures.",
    "none_trained": "No row trained: {counts}.",
    # Numbers and certainty.
    "numbers": "{choice}: {speed} {unit} with {memory}",
    "other_optimizers": "speed does not decide between {choice} and rows with a different optimizer: {rows}",
    # The other rows.
    "faster_left_out": "{row} is {lead} faster but left out: {reason}.",
    "faster_optimizer": "{row} is {lead} faster, with a different optimizer ({optimizer}): not compared by speed.",
    "faster_takes_more": "{row} is {lead} faster but takes {more:gigabytes} more.",
    "faster_offloads_more": "{row} is {lead} faster and offloads more.",
    "left_out": "{row} is left out: {reason}",
    "more_left_out": "{count} more left out",
    "not_comparable": "it is not comparable with the others ({differences})",
    "reference": "it is torch's own engine, a reference and not a DeepSpeed configuration",
    "invalid": "{text}",
    "other_training": "{text}",
    "ran_out": "{count} of its {runs} runs ran out of memory or disk",
    "too_full": "{fraction:percent} of {capacity}, above 95 %",
    "too_short": "it trained sequences of {tokens:,} tokens at most",
    "slower": "{share:percent} slower than {best}",
    "slower_with_other_memory": "{share:percent} slower than {best}, with {saved}",
    "tied_with_other_memory": "tied with {best}, with {saved}",
    # What to try.
    "decide": "{command}",
    "decide_again": "the same command with {flags}",
    "run_idle": "the same command when the CPU is idle",
    "try": "{flags}",
    "try_gpu": "the same command where there is a GPU",
    "caveat": "{remedy}",
    "larger_batch": "there is room for more: try micro-batch {size} (about {share:percent0} of the card)",
    "change": "{what} (predicted {sizes})",
    "change_that_trained": "{what} (predicted {sizes}; it trained here)",
    "smallest_change": "smallest change predicted to fit: {change}, starting from {row}",
    "smallest_tight_change": "smallest change that may fit, but tightly: {change}, starting from {row}",
    "try_change": "try {change}",
    "not_enough": "no change is predicted to be enough; the one that frees most is {change}; try it with {resorts}",
    "try_resorts": "try {resorts}",
    "resorts": "try {resorts}: no other change is predicted to fit",
    "try_unknown": "try {resorts} (how much each would free is unknown)",
    "over_limit": "{row} is {excess:bytes} over 95 % of the card: {change}",
    "more_failures": "{rows} failed: the table has their causes",
    # How rows failed, and what to do.
    "short": "at least {missing:bytes} short",
    "short_in_pieces": "{requested:bytes} requested with {free:bytes} free, but not in one block",
    "short_of_unknown": "{requested:bytes} requested; free memory is unknown",
    "short_unknown": "by an unknown amount",
    "oom": "{rows}: out of {pool} memory{where}, {short}{host}; {action}",
    "failed": "{rows}: {how}{where} ({cause}); {action}",
    "fragmented": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower --batch-size",
    "disk_full": "free space on the full disk",
    "swap_disk_full": "free {need} on the swap disk, give a different --nvme-path, or try cpu_full",
    "timeout": "raise the limit that was reached (--timeout or --stall-timeout), or run fewer than {steps} steps "
    "(--num-steps, --warmup-steps); if a trial hung, read the stacks of its ranks (rank*.stacks next to the logs)",
    "timeout_at_start": "raise --timeout or --stall-timeout: training had not begun, so fewer steps do not help",
    "timeout_at_start_of_hosts": "raise --timeout or --stall-timeout (training had not begun, so fewer steps do not "
    "help), or name the interface between the hosts (export NCCL_SOCKET_IFNAME=…)",
    "killed": "check what killed the trial (scheduler limits, dmesg), then rerun it with --resume and --retry Killed",
    "crashed": f"read the end of the log, rebuild the ops ({invocation.command('ops')}), then run only that row",
    "crashed_script": "read the end of the log (report RUN --verbose shows its path)",
    "unsupported": "do what each row's message suggests, or choose another configuration",
    "skipped": "try a smaller micro-batch, more GPUs, a shorter --seq-length or a smaller model",
    "resume": "{command}",
    "interrupted": "continue with --resume RUN_DIR: rows are missing",
    "no_engine": "train with the engine that deepspeed.initialize returns, in the process that was started (with "
    "Accelerate, unset ACCELERATE_USE_CPU); the log shows how the script ended",
    "other_engine": "give --engine the name of an engine that the script makes",
    "ended_early": "let the script train for more steps, or lower --warmup-steps and --num-steps",
    "exited": "read the end of the log (report RUN --verbose shows its path)",
    "exception": "read the traceback in the log (report RUN --verbose shows its path)",
    "nvme_exception": "read the traceback in the log; check that --nvme-path is a writable folder on a real disk with "
    "{need} free",
    "shared_memory": _SHARED_MEMORY,
    "bus_error": f"most often /dev/shm is full; {_SHARED_MEMORY}",
    "pinned_memory": "leave host memory unpinned: --axis pin_memory=false",
    "memlock": "raise the limit on locked memory: ulimit -l unlimited (limits.conf; UsePAM yes for sshd)",
    "peer_access": "set NCCL_P2P_DISABLE=1: these GPUs cannot access each other's memory",
    "fabric_manager": "start the GPUs' fabric manager: systemctl start nvidia-fabricmanager",
    "gathered_views": "use DeepSpeed 0.19 or later, ZeRO-3 or one rank: before 0.19 several CPU ranks cannot gather "
    "parameters at ZeRO-1 and ZeRO-2 with a recent torch",
    "collective_timeout": "check the logs for what the late ranks did last; for a mixture of experts at ZeRO-3 name "
    "its expert block in zero_optimization.leaf_module.classes",
}
# fmt: on


def flags(settings: Mapping[str, Any]) -> str:
    """Settings as flags: ``--batch-size 2 --stages 0 3``, ``--set KEY=VALUE``."""
    parts = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if "." in name:
            parts.append(f"--set {name}={value}")
        elif value is True:
            parts.append(flag)
        else:
            values = value if isinstance(value, list | tuple) else [value]
            parts.append(" ".join([flag, *map(str, values)]))
    return " ".join(parts)


def format_list(labels: Sequence[str], most: int | None = None) -> str:
    """``A, B and C``; if there are more than ``most``, the first ones and how many more there are."""
    if most is not None and len(labels) > most:
        labels = [*labels[: most - 1], f"{len(labels) - most + 1} more"]
    return " and ".join([", ".join(labels[:-1]), labels[-1]]) if len(labels) > 1 else labels[0]


def runs_of_each(counts: Sequence[int]) -> str:
    """``one run each``, ``2 runs each``, ``only one run of some rows``: the runs of each row."""
    fewest = min(counts)
    runs = "one run" if fewest == 1 else f"{fewest} runs"
    return f"{runs} each" if fewest == max(counts) else f"only {runs} of some rows"


def two_digits(fraction: float) -> str:
    """``0.4 %``, ``13 %``, ``340 %``."""
    percent = float(f"{100 * fraction:.2g}")
    return f"{percent:,.0f} %" if percent >= 10 else f"{percent:g} %"
