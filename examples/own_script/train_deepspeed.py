"""Plain DeepSpeed: the configuration is the first argument."""

import sys

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

data = torch.randint(0, 512, (100, 4, 64), generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=512))
engine, *_ = deepspeed.initialize(model=model, config=sys.argv[1], model_parameters=model.parameters())
for ids in data.to(engine.device):
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
