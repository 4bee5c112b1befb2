"""Adapters and frozen parameters, by flags: what is trained, by name."""

from __future__ import annotations

import pytest

from ds_bench.config.trained_parameters import Lora, parse_lora, read_choice
from ds_bench.errors import UsageError
from ds_bench.models import presets
from ds_bench.models.architectures import read_architecture
from ds_bench.prediction.formula_profile import formula_profile
from ds_bench.prediction.model_profile import NothingTrainedError


def test_rank_and_modules_are_read() -> None:
    assert (parse_lora("16"), parse_lora("8:q_proj,v_proj")) == (Lora(16), Lora(8, ("q_proj", "v_proj")))
    for text in ("", "0", "r16", "16:", "16:q_proj,", "-1", "1.5"):
        with pytest.raises(ValueError, match=r"rank|module"):
            parse_lora(text)


def test_adapters_of_a_7b_model_have_the_published_number_of_parameters() -> None:
    """39,976,960 on all linear modules at rank 16, and 4,194,304 on q_proj and v_proj at rank 8 (peft's own count)."""
    preset = presets.find_preset("meta-llama/Llama-2-7b-hf")
    assert preset is not None
    llama = read_architecture("llama", {**preset.config, "model_type": "llama"})
    trained = {text: formula_profile(llama, read_choice(text, None)).parameters for text in ("16", "8:q_proj,v_proj")}
    assert trained == {"16": 39_976_960, "8:q_proj,v_proj": 4_194_304}
    profile = formula_profile(llama, read_choice(None, "embed_tokens,layers.0.self_attn"))
    assert profile.frozen_parameters == 32_000 * 4096 + 4 * 4096 * 4096
    # A frozen module gets no adapter.
    both = formula_profile(llama, read_choice("16:q_proj", "layers.0."))
    assert both.parameters == 31 * 16 * (4096 + 4096)
    for choice, problem in {("4:qproj", None): "no such module", (None, "vision"): "no such parameter"}.items():
        with pytest.raises(UsageError, match=problem) as caught:
            formula_profile(llama, read_choice(*choice))
        assert "q_proj" in caught.value.remedy
    with pytest.raises(NothingTrainedError):
        formula_profile(llama, read_choice(None, "*"))
