"""Micro-batches: random tokens, a factory's own, and a file's sequences, each once and every rank its own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ds_bench.worker import training_loop
from ds_bench.worker.batches import LoadedBatches, TokenReader, coprime_step
from tests.support import fakes
from tests.support.batches import batches

SEQUENCES, LENGTH = 60, 5


def test_random_tokens_depend_on_seed_and_rank_and_lie_inside_the_vocabulary() -> None:
    first, second = batches(count=2)
    again, of_rank, of_seed = (batches(**changes)[0]["input_ids"] for changes in ({}, {"rank": 1}, {"seed": 2}))
    ids = first["input_ids"]
    assert torch.equal(ids, again)
    assert not any(torch.equal(ids, other) for other in (second["input_ids"], of_rank, of_seed))
    assert (ids.shape, first["labels"] is ids) == ((3, 5), True)
    assert 0 <= int(ids.min()) <= int(ids.max()) < 11


def test_batches_of_a_factorys_own_are_cast_differ_by_rank_and_are_not_more_than_fit() -> None:
    def images(batch_size: int, _seq_length: int, generator: torch.Generator) -> training_loop.Batch:
        return {"pixels": torch.randn(batch_size, 2**23, generator=generator), "labels": torch.arange(batch_size)}

    made, other = batches(images, count=64), batches(images, count=1, rank=1)
    assert len(made) == 6  # 48 MB each in bf16: 256 MB are passed with the sixth
    assert (made[0]["pixels"].dtype, made[0]["labels"].dtype) == (torch.bfloat16, torch.int64)
    assert not torch.equal(made[0]["pixels"], other[0]["pixels"])
    with pytest.raises(ValueError, match="3 samples"):
        batches(lambda *_asked: {"x": torch.zeros(2, 3)})
    with pytest.raises(TypeError, match="dict of tensors"):
        batches(lambda *_asked: torch.zeros(3, 3))  # type: ignore[arg-type, return-value]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """60 sequences whose ids show their place, and less than one more sequence."""
    file = tmp_path / "ids.bin"
    numpy.arange(SEQUENCES * LENGTH + 3, dtype="<u2").tofile(file)
    return file


def reader(path: Path, rank: int = 0, ranks: int = 2, *, vocabulary: int = 1000, **changes: Any) -> TokenReader:
    values = {"data_path": str(path), "data_dtype": "uint16", "data_tokens": SEQUENCES * LENGTH + 3}
    workload = fakes.workload(seq_length=LENGTH, **{**values, **changes})
    return TokenReader(workload, batch_size=3, vocabulary=vocabulary, data_rank=rank, data_parallel_size=ranks)


def test_every_sequence_comes_once_before_any_again_however_many_ranks_share_them(path: Path) -> None:
    readers, single = [reader(path, rank) for rank in (0, 1)], reader(path, 0, 1)
    numbers = [place for number in range(10) for each in readers for place in each.sequence_numbers(number)]
    assert sorted(numbers) == list(range(SEQUENCES))
    assert readers[0].sequence_numbers(10) == readers[0].sequence_numbers(0)
    assert [place for number in range(20) for place in single.sequence_numbers(number)] == numbers
    # No sequence follows its neighbor.
    assert min(abs(a - b) for a, b in itertools.pairwise(numbers)) > SEQUENCES // 5
    assert reader(path, seed=7).sequence_numbers(0) != readers[0].sequence_numbers(0)
    for count in (1, 2, 3, 97, 1000):
        assert sorted(place * coprime_step(count) % count for place in range(count)) == list(range(count))


def test_a_batch_holds_the_ids_of_its_sequences_and_a_data_loader_keeps_their_order(path: Path) -> None:
    own = reader(path)
    batch = own(4)
    first = own.sequence_numbers(4)[0] * LENGTH
    assert batch["input_ids"].dtype == torch.int64
    assert batch["input_ids"][0].tolist() == list(range(first, first + LENGTH))
    assert torch.equal(batch["labels"], batch["input_ids"])
    for workers in (0, 2):
        loaded = LoadedBatches(fakes.workload(data_workers=workers), lambda: own, torch.device("cpu"))
        for number in range(5):
            assert torch.equal(next(loaded)["input_ids"], own(number)["input_ids"])
        assert loaded.wait_seconds > 0


def test_another_file_than_was_checked_and_ids_that_the_model_lacks_are_errors(path: Path) -> None:
    with pytest.raises(ValueError, match=r"has 606 bytes on .*, but the plan found 20$"):
        reader(path, data_tokens=10)
    for smaller in ({"vocabulary": 50}, {"vocab_size": 50}):
        with pytest.raises(ValueError, match="beyond the 50 ids"):
            [reader(path, **smaller)(number) for number in range(10)]  # type: ignore[arg-type]
