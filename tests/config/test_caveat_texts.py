"""The closed set of caveats: every kind can be put into words, stored and read back."""

from __future__ import annotations

import json
from dataclasses import asdict
from string import Formatter

import pytest

from ds_bench.config.caveat_texts import Caveat, CaveatKind, as_caveat, note
from ds_bench.records import json_files

DISQUALIFYING = """
all_steps_skipped cpu_busy cpu_quota does_not_train failed first_loss_far frozen_weights_changed loss_differs
loss_not_finite loss_of_format_differs not_synchronized nothing_reached_disk nothing_swapped nvme_in_memory
other_offload other_engine other_optimizer other_parameters other_tokens trained_differently trained_wrongly
""".split()


def sample(kind: CaveatKind) -> Caveat:
    """A caveat of that kind with a value for each name in its template."""
    fields = [(name, spec) for _, name, spec, _ in Formatter().parse(kind.template) if name is not None]
    return Caveat(kind, {str(name): 0.5 if spec else f"<{name}>" for name, spec in fields})


def test_a_caveat_is_stored_as_kind_and_values_and_read_back() -> None:
    written = [note("hung at exit"), *(sample(kind) for kind in CaveatKind if kind is not CaveatKind.NOTE)]
    stored = json_files.json_text([asdict(each) for each in written])
    assert [json_files.build(Caveat, each) for each in json.loads(stored)] == written
    assert len({*written, *written}) == len(written)
    swap = {"host": "h", "swapped": 1}
    assert len({Caveat(CaveatKind.SWAP_USED, swap), Caveat(CaveatKind.SWAP_USED, dict(reversed(swap.items())))}) == 1
    assert as_caveat("hung at exit") == written[0]
    assert sorted(each.kind.value for each in written if each.kind.disqualifies) == sorted(DISQUALIFYING)
    disk = Caveat(CaveatKind.DISK_BOUND, {"wait": 0.0123, "other": 1.5}).text
    assert disk == "disk-bound: a step waits 12.3 ms for the disk; everything else takes 1,500.0 ms"
    assert "3.00 GB" in Caveat(CaveatKind.SWAP_USED, {"host": "the host", "swapped": 3 * 2**30}).text
    with pytest.raises(ValueError, match="near_capacity"):
        Caveat(CaveatKind.NEAR_CAPACITY, {})
