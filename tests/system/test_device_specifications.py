"""Memory of GPUs by their names: every way that a GPU is written, and no guesses."""

from __future__ import annotations

import pytest

from ds_bench.errors import UsageError
from ds_bench.system import device_specifications

GB = 2**30
GPUS = {
    "80GB": 80, "24GiB": 24, "79.1": 79.1, " 16 gb ": 16, "H100": 79.1, "nvidia a100 80GB": 79.1, "4090": 23.5,
    "NVIDIA H100 PCIe": 79.1, "NVIDIA H100 NVL": 93.0, "NVIDIA H200 NVL": 139.8, "H100-80GB": 79.1, "H100-SXM5": 79.1,
    "NVIDIA A100-PCIE-40GB": 39.4, "Tesla V100-SXM2-32GB": 31.7, "NVIDIA RTX A6000": 47.4,
    "NVIDIA RTX 6000 Ada Generation": 47.4, "L40S-48GB": 44.4, "AMD Instinct MI300X": 192.0,
}  # fmt: skip
REFUSED = {
    "A100": "may be A100-40GB or A100-80GB",
    "A100-SXM4": "may be A100-40GB or A100-80GB",
    "MI300": "may be MI300X",
    "H100-96GB": "not a known GPU",  # there is one, but not the H100 of the table
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": "not a known GPU",  # a slice is not the card
    "H300": "H200",
    "9" * 400: "10,000 GB",
    **dict.fromkeys(("nan", "", "-5GB", "0GB", "80TB", "80GB 80GB"), "80GB"),
}


def test_gpu_is_a_name_or_a_size() -> None:
    found = {text: device_specifications.memory_bytes(text) / GB for text in GPUS}
    assert found == {text: pytest.approx(size, rel=1e-9) for text, size in GPUS.items()}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40])
def test_gpu_that_is_not_certain_is_not_guessed(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        device_specifications.memory_bytes(text)
    assert REFUSED[text] in str(caught.value)
    assert "\n" not in str(caught.value)
