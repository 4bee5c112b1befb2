"""Micro-batches of a file: each sequence once, every rank its own, the same in every row."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ds_bench.worker.data_loader import LoadedBatches
from ds_bench.worker.token_reader import TokenReader, coprime_step
from tests.support import fakes

SEQUENCES, LENGTH = 60, 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """60 sequences whose ids tell their place, and a rest of less than a sequence."""
    file = tmp_path / "ids.bin"
    numpy.arange(SEQUENCES * LENGTH + 3, dtype="<u2").tofile(file)
    return file


def reader(path: Path, rank: int = 0, ranks: int = 2, *, vocabulary: int = 1000, **changes: Any) -> TokenReader:
    values = {"data_path": str(path), "data_dtype": "uint16", "data_tokens": SEQUENCES * LENGTH + 3}
    workload = fakes.workload(seq_length=LENGTH, **{**values, **changes})
    return TokenReader(workload, batch_size=3, vocabulary=vocabulary, data_rank=rank, data_parallel_size=ranks)


def test_every_sequence_comes_once_before_any_again_and_every_rank_has_its_own(path: Path) -> None:
    readers = [reader(path, rank) for rank in (0, 1)]
    numbers = [place for number in range(10) for each in readers for place in each.sequence_numbers(number)]
    assert sorted(numbers) == list(range(SEQUENCES))
    assert readers[0].sequence_numbers(10) == readers[0].sequence_numbers(0)
    jumps = [abs(a - b) for a, b in itertools.pairwise(numbers)]
    assert min(jumps) > SEQUENCES // 5  # no sequence follows its neighbour
    assert reader(path, seed=7).sequence_numbers(0) != readers[0].sequence_numbers(0)


def test_a_batch_holds_the_ids_of_its_sequences_and_labels_are_the_same_ids(path: Path) -> None:
    own = reader(path)
    batch = own(4)
    first = own.sequence_numbers(4)[0] * LENGTH
    assert batch["input_ids"].dtype == torch.int64
    assert batch["input_ids"][0].tolist() == list(range(first, first + LENGTH))
    assert torch.equal(batch["labels"], batch["input_ids"])


def test_one_rank_reads_what_two_read_together(path: Path) -> None:
    alone, pair = reader(path, 0, 1), [reader(path, rank) for rank in (0, 1)]
    together = [place for number in range(4) for each in pair for place in each.sequence_numbers(number)]
    assert [place for number in range(8) for place in alone.sequence_numbers(number)] == together


def test_another_file_than_was_checked_and_ids_that_the_model_lacks_are_errors(path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 606 bytes on .*, where the plan found 20$"):
        reader(path, data_tokens=10)
    with pytest.raises(ValueError, match="beyond the 50 ids"):
        [reader(path, vocabulary=50)(number) for number in range(10)]
    with pytest.raises(ValueError, match="beyond the 40 ids"):
        [reader(path, vocab_size=40)(number) for number in range(10)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_keeps_the_order_whatever_its_workers(workers: int, path: Path) -> None:
    own = reader(path)
    workload = fakes.workload(data_workers=workers)
    loaded = LoadedBatches(workload, lambda: own, torch.device("cpu"))
    for number in range(5):
        assert torch.equal(next(loaded)["input_ids"], own(number)["input_ids"])
    assert loaded.wait_seconds > 0


def test_the_step_from_one_sequence_to_the_next_visits_all(subtests: pytest.Subtests) -> None:
    for count in (1, 2, 3, 10, 97, 1000):
        with subtests.test(count=count):
            assert sorted(place * coprime_step(count) % count for place in range(count)) == list(range(count))
