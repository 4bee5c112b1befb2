"""Copies what the ranks of a running trial report to ``steps.jsonl`` and TensorBoard files."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from pathlib import Path

from ..config.spec import Trial
from ..records.json_files import json_line
from ..records.schema import measured_values
from ..records.step_files import STEPS_FILE, StepFileReader, StepSample, TensorBoardFile, TrialStep


class StepMonitor:
    """Writes a line for each step that every rank has finished."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        ranks = range(trial.placement.num_gpus)
        self._readers = [StepFileReader(folder, rank) for rank in ranks]
        self._unwritten: list[deque[tuple[int, StepSample]]] = [deque() for _ in ranks]
        self._file = (folder / STEPS_FILE).open("ab")
        self.problem: str | None = None
        """Why steps are missing from the files; None if they are all there."""
        self._event_file = TensorBoardFile(folder) if trial.inspection.monitor == "tensorboard" else None

    def update(self) -> None:
        """Write the steps finished since the last call. A full disk ends the monitor, not the trial."""
        if self.problem is not None:
            return
        try:
            for reader, samples in zip(self._readers, self._unwritten, strict=True):
                # Each time, because a rank's file keeps only its last steps.
                samples.extend(reader.new_samples())
            while all(self._unwritten):
                number = max(samples[0][0] for samples in self._unwritten)
                if any(samples[0][0] < number for samples in self._unwritten):  # a rank's sample was missed
                    for samples in self._unwritten:
                        if samples[0][0] < number:
                            samples.popleft()
                    continue
                step = _trial_step(
                    number, [samples.popleft()[1] for samples in self._unwritten], self._readers[0].tokens_per_step
                )
                self._file.write(json_line(step) + b"\n")
                if self._event_file is not None:
                    self._event_file.add_scalars(step.shown_values, step.step, step.time)
            self._file.flush()
            if self._event_file is not None:
                self._event_file.flush()
        except OSError as error:
            self.problem = f"--monitor could not write all steps: {error.strerror or error}"

    def close(self) -> None:
        """Write what is left, close the files, and remove the ranks' files."""
        self.update()
        for reader in self._readers:
            reader.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._file.close()
        if self._event_file is not None:
            with contextlib.suppress(OSError):
                self._event_file.close()


def _trial_step(number: int, samples: list[StepSample], tokens_per_step: int) -> TrialStep:
    # The step lasts until the slowest rank ends it.
    seconds = max(sample.seconds for sample in samples)
    losses = [sample.loss for sample in samples if sample.loss is not None]
    return TrialStep(
        step=number,
        phase="measured" if samples[0].measured else "warmup",
        time=max(sample.time for sample in samples),
        seconds=seconds,
        tokens_per_second=tokens_per_step / seconds if seconds > 0 else None,
        # Each rank has the loss of its own part of the batch, so the mean needs all of them.
        loss=math.fsum(losses) / len(losses) if len(losses) == len(samples) else None,
        **{
            # The fullest GPU runs out first; the ranks of a host share its memory.
            name: max(measured_values(samples, name), default=None)
            for name in ("gpu_allocated_bytes", "gpu_reserved_bytes", "gpu_peak_bytes")
        },
        host_resident_bytes=sum(sample.host_resident_bytes or 0 for sample in samples) or None,
    )
