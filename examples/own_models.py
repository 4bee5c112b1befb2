"""Models for `--model-factory own_models:build_NAME` (docs/own_work.md)."""

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)


def build_lora():
    """LoRA adapters on a Llama model; the rest is frozen."""
    from peft import LoraConfig, get_peft_model

    model = LlamaForCausalLM(LlamaConfig())
    return get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def build_bert():
    """A masked language model, which guesses 15 % of the tokens."""
    model = BertForMaskedLM(BertConfig())

    def make_batch(batch_size, seq_length, generator):
        ids = torch.randint(model.config.vocab_size, (batch_size, seq_length), generator=generator)
        masked = torch.rand(ids.shape, generator=generator) < 0.15
        return {"input_ids": ids.masked_fill(masked, 103), "labels": ids.masked_fill(~masked, -100)}

    return model, make_batch


def build_classifier():
    """A classifier on a frozen encoder."""
    model = BertForSequenceClassification(BertConfig())
    model.bert.requires_grad_(False)

    def make_batch(batch_size, seq_length, generator):
        ids = torch.randint(model.config.vocab_size, (batch_size, seq_length), generator=generator)
        return {"input_ids": ids, "labels": torch.randint(2, (batch_size,), generator=generator)}

    return model, make_batch


def build_t5():
    """An encoder-decoder whose target is a quarter as long as its source."""
    model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0))

    def make_batch(batch_size, seq_length, generator):
        source = torch.randint(model.config.vocab_size, (batch_size, seq_length), generator=generator)
        target = torch.randint(model.config.vocab_size, (batch_size, seq_length // 4), generator=generator)
        return {"input_ids": source, "labels": target}

    return model, make_batch


def build_vit():
    """A vision transformer: a sample is an image, and the sequence length does not matter."""
    model = ViTForImageClassification(ViTConfig(num_labels=1000))

    def make_batch(batch_size, _seq_length, generator):
        side = model.config.image_size
        pixels = torch.randn(batch_size, 3, side, side, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(1000, (batch_size,), generator=generator)}

    return model, make_batch
