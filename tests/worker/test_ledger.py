"""The ledger: storages and swap files counted once, by category."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import torch

from ds_bench.worker import ledger


def test_a_storage_is_counted_once_however_many_tensors_show_it() -> None:
    count = ledger.StorageCounter()
    base = torch.zeros(1000)
    count.claim("parameters", [base, base[10:20], base.view(10, 100)])
    count.claim("other", [base[5:]])
    assert count.ledger == {"cpu": {"parameters": 4000}}


def test_activations_are_what_autograd_saves_without_the_parameters() -> None:
    layer = torch.nn.Linear(10, 10, bias=False)
    data = torch.randn(7, 10)
    result, tiers = ledger.count_activations(lambda: (layer(data).exp() * 2).sum(), layer.parameters())
    assert result.requires_grad
    assert tiers == {"cpu": data.nbytes + 7 * 10 * 4}  # the input of the product and the result of exp
    gathered = layer.weight.detach().requires_grad_()  # as at stage 3, where passes see other tensors
    _, tiers = ledger.count_activations(lambda: data.requires_grad_() @ gathered, layer.parameters())
    assert tiers == {"cpu": data.nbytes}


def test_the_peak_of_two_ledgers_is_taken_cell_by_cell() -> None:
    first, second = {"cpu": {"a": 1, "b": 5}}, {"cpu": {"a": 3}, "gpu": {"c": 2}}
    assert ledger.largest_by_category(first, second) == {"cpu": {"a": 3, "b": 5}, "gpu": {"c": 2}}


def test_a_tensor_that_a_thread_is_about_to_drop_is_not_counted() -> None:
    """gloo's threads drop a collective's tensors only once they get the interpreter's lock."""
    held, may_drop = threading.Event(), threading.Event()

    def hold() -> None:
        tensor = torch.zeros(25_000_000)
        held.set()
        may_drop.wait()
        del tensor

    module = torch.nn.Linear(2, 2)
    engine = SimpleNamespace(module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # no other thread runs unless this one waits
    try:
        may_drop.set()
        count = ledger.count_storages(engine)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert count.ledger["cpu"]["parameters"] == 24
    assert count.ledger["cpu"].get("other", 0) < 100_000_000


def test_swap_files_are_counted_by_rank_and_category(tmp_path: Path) -> None:
    for path, size in {"optimizer/rank0/1": 100, "bfloat16params/rank0/0_param": 10, "optimizer/rank1/1": 7}.items():
        file = tmp_path / "zero_stage_3" / f"{path}.tensor.swp"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * size)
    assert ledger.swapped_bytes(str(tmp_path), 0) == {"optimizer_states": 100, "parameters": 10}
