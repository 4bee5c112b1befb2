"""The factories of examples/own_models.py, word for word except their sizes, so that they train in a second."""

from __future__ import annotations

from pathlib import Path

_SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
_SIZES = {
    "LlamaConfig()": {**_SMALL, "vocab_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 64},
    "BertConfig()": {**_SMALL, "vocab_size": 512, "max_position_embeddings": 64},
    "T5Config(decoder_start_token_id=0)": {
        "decoder_start_token_id": 0, "vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2,
        "num_heads": 4,
    },
    "ViTConfig(num_labels=1000)": {**_SMALL, "num_labels": 1000, "image_size": 32, "patch_size": 8},
}  # fmt: skip

_text = (Path(__file__).resolve().parents[2] / "examples" / "own_models.py").read_text(encoding="utf-8")
for _call, _arguments in _SIZES.items():
    _text = _text.replace(_call, f"{_call.partition('(')[0]}(**{_arguments!r})")
exec(_text)
