"""Trains the trials of a file for two steps on simulated cards, and writes what the engines allocated.

    python tests/support/engine_events.py FOLDER      (with the variables of ``simulated_card.write_plans``)

FOLDER/trials.pickle holds the trials, each of two ranks. The events of rank R of trial N go to N.R.json, as in
``CardMemory.events``, with the name of each phase as a list where it begins. Ranks are forked from one process, which
has imported everything that they need.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import deepspeed
import torch
from simulated_card.memory import CARD

from ds_bench.config.spec import Trial
from ds_bench.worker import (
    engine,
    library_versions,
    model,
    preload,  # noqa: F401 - imports once what every rank needs
    training_loop,
)

RANKS = 2
STEPS = 2


def train(trial: Trial, folder: Path, number: int, rank: int) -> None:
    """Build and train the model as a rank of the package does, and write its events."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    device = engine.select_device(trial.placement)
    rendezvous = f"file://{folder}/store{number}"
    deepspeed.init_distributed("nccl", auto_mpi_discovery=False, init_method=rendezvous, rank=rank, world_size=RANKS)
    CARD.events = []

    def begin(phase: str, _step: int = 0) -> None:
        assert CARD.events is not None
        CARD.events.append((phase,))

    begin("build")
    # Skip drawing the weights: DeepSpeed has no part in it.
    drawn = mock.patch("transformers.integrations.deepspeed.initialize_weights_zero3")
    adapters = mock.patch.object(model, "draw_matrix", lambda _name, shape, *_: torch.empty(shape, device="cpu"))
    with library_versions.no_init_weights(), drawn, adapters, mock.patch.object(model, "reinitialize_weights"):
        kind = trial.configuration.engine
        built = model.build_model(trial.workload, dict(trial.ds_config), device, lambda: None, kind)
    for parameter in built.module.parameters():
        getattr(parameter, "ds_tensor", parameter).data.normal_(std=0.02)
    begin("initialize")
    trained = engine.create_engine(
        kind, built.module, dict(trial.ds_config), device, None, trial.workload, lambda: None
    )
    begin("between")
    tokens = torch.randint(100, (trial.workload.batch_size, trial.workload.seq_length), device=device)
    batches = [{"input_ids": tokens, "labels": tokens}]
    trainer = training_loop.Trainer(trained, batches, "cuda", SimpleNamespace(beat=begin))  # type: ignore[arg-type]
    for _ in range(STEPS):
        trainer.step()
    (folder / f"{number}.{rank}.json").write_text(json.dumps(CARD.events))


def main(folder: Path) -> int:
    trials = pickle.loads((folder / "trials.pickle").read_bytes())  # noqa: S301 - written by the test
    for number, trial in enumerate(trials):
        ranks = []
        for rank in range(RANKS):
            if (process := os.fork()) == 0:
                try:
                    train(trial, folder, number, rank)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            ranks.append(process)
        if sum(os.waitpid(process, 0)[1] for process in ranks):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
