"""MLPs computed for one part of the tokens after the other: the same loss and gradients, and only inputs are kept."""

from __future__ import annotations

import pytest
import torch

from ds_bench.worker.tiled_mlp import count_tiles, install_tiled_mlp
from tests.worker.test_losses import FAMILIES, build, train_once


@pytest.mark.deepspeed
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "opt"])
def test_loss_and_gradients_are_those_of_the_model_and_less_is_kept(family: str) -> None:
    usual, gradients, kept = train_once(build(family), 1.0)
    model = build(family)
    install_tiled_mlp(model)
    other, other_gradients, other_kept = train_once(model, 0.25)
    assert other == pytest.approx(usual, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, rtol=1e-4, atol=1e-7)
    assert other_kept < kept - 2 * 3 * 50 * 4 * 64  # of two layers, one tensor of the inner width at least


def test_parts_grow_with_the_sequence() -> None:
    assert [count_tiles(length, 4096) for length in (512, 4 * 4096, 4 * 4096 + 1)] == [4, 4, 5]


def test_a_model_without_an_mlp_is_refused() -> None:
    with pytest.raises(TypeError, match="OPTForCausalLM has no module whose class is named as an MLP"):
        install_tiled_mlp(build("opt"))
