"""The Transformers Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
set_seed(arguments.seed)
ids = torch.randint(0, 512, (4096, 64))
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=512))
Trainer(model, arguments, train_dataset=[{"input_ids": each, "labels": each} for each in ids]).train()
