"""Which runs can be resumed: the same machine, workload and placement, whichever version began them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.errors import UsageError
from ds_bench.records.resume import require_same_machine, require_same_workload
from ds_bench.records.run_folder import RunFolder
from tests.support import fakes

TRIAL = fakes.trial(fakes.zero(2))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return fakes.write_run(tmp_path, [fakes.success(TRIAL)])


def edit(run: RunFolder, change: Callable[[dict[str, Any]], object]) -> None:
    file = run.folder / "run.json"
    facts = json.loads(file.read_text())
    change(facts)
    file.write_text(json.dumps(facts))


def test_only_the_same_workload_and_placement_can_be_resumed_with_more_rows(run: RunFolder) -> None:
    require_same_workload(run, [TRIAL, fakes.trial(fakes.zero(3))], ())
    larger = replace(TRIAL, workload=replace(TRIAL.workload, batch_size=64))
    require_same_workload(run, [larger], ("batch_size",))  # which a search sets
    for asked, what in ((larger, "workload"), (fakes.trial(on=fakes.placement(num_gpus=7)), "placement")):
        with pytest.raises(UsageError, match=f"a different {what} from the one it began with"):
            require_same_workload(run, [asked], ())


def test_a_run_whose_trials_cannot_be_read_is_refused(run: RunFolder) -> None:
    edit(run, lambda facts: facts["trials"][0].update(workload=7))
    with pytest.raises(UsageError, match=r"run\.json: trials\[0\]\.workload is 7"):
        require_same_workload(run, [TRIAL], ())


def test_another_machine_and_one_that_is_not_known_are_refused(run: RunFolder) -> None:
    require_same_machine(run, fakes.environment())
    with pytest.raises(UsageError, match="other hardware or versions"):
        require_same_machine(run, replace(fakes.environment(), cpu_model="another"))
    edit(run, lambda facts: facts.update(environment={"hostname": 3}))
    with pytest.raises(UsageError, match=r"run\.json: environment\.hostname is 3"):
        require_same_machine(run, fakes.environment())
    edit(run, lambda facts: facts.pop("environment"))
    with pytest.raises(UsageError, match="has no readable environment"):
        require_same_machine(run, fakes.environment())
