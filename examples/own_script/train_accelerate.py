"""Accelerate, with the configuration from `--accelerate-env`."""

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

accelerator = Accelerator(mixed_precision="bf16")
ids = torch.randint(0, 512, (4096, 64), generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=512))
loader = torch.utils.data.DataLoader(ids, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for batch in loader:
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
    optimizer.step()
    optimizer.zero_grad()
