"""Several results as one: what is pooled, what is kept apart, and what counts only once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench.analysis import comparison, load_results
from ds_bench.analysis.load_results import Result
from ds_bench.analysis.merge_results import ResultGroup, merge
from ds_bench.config.identity import work_key
from ds_bench.records.schema import METHOD_VERSION, SKIPPED, TrialRecord
from ds_bench.system.environment import Environment
from tests.support import fakes

HOST = fakes.environment()
CUDA = fakes.placement(accelerator="cuda", num_gpus=2)


def result(
    *entries: TrialRecord,
    on: Environment | None = HOST,
    name: str = "a.json",
    arguments: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Result:
    """A result as it is loaded; ``on`` None: without its environment."""
    return Result(
        source=Path(name),
        runs=load_results.make_runs(entries),
        environment=on,
        family="zero",
        arguments=tuple(arguments),
        notes=tuple(notes),
    )


def run(stage: int, seconds: float, repeat: int = 0, **of: object) -> TrialRecord:
    """A repeat of a ZeRO stage; its start depends on its speed, so that all runs are distinct."""
    trial = fakes.trial(fakes.zero(stage), on=CUDA, of=fakes.workload(**of), repeat=repeat)
    return replace(fakes.success(trial, step_seconds=[seconds] * 10), wall_seconds=100 * seconds)


def stages_and_repeats(group: ResultGroup) -> list[tuple[int, int]]:
    return [(entry.trial.configuration.stage, entry.trial.repeat) for entry in group.runs]


def sources(groups: Sequence[ResultGroup]) -> list[tuple[str, ...]]:
    return [tuple(map(str, group.sources)) for group in groups]


# ------------------------------------------------------------------ pooling


def test_repeats_of_two_results_are_runs_of_one_row_with_numbers_of_their_own() -> None:
    """4 x 128 tokens on each of 2 cards in 0.1 s and in 0.2 s: 10240 and 5120 tokens/s, √(10240 × 5120) = 7240.8."""
    (group,) = merge([result(run(1, 0.1)), result(run(1, 0.2), name="b.json")])
    (row,) = comparison.compare(group.runs, environments=group.environments).rows
    assert row.tokens_per_second == pytest.approx(7240.773)
    assert sources([group]) == [("a.json", "b.json")]
    first = result(run(1, 0.10), run(2, 0.11), run(1, 0.12, 1), run(2, 0.13, 1))
    # Row 2 is missing from the second result: rounds of two results are rounds of their own.
    second = result(run(1, 0.14), run(1, 0.15, 1), run(3, 0.16), name="b.json")
    (group,) = merge([first, second])
    assert stages_and_repeats(group) == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (1, 3), (3, 0)]
    assert [each.round for each in group.runs] == [0, 0, 1, 1, 2, 3, 2]


def test_rows_of_an_axis_are_in_one_table() -> None:
    plain = run(2, 0.1)
    configuration = replace(
        plain.trial.configuration,
        name="zero2+activation_checkpointing=true",
        workload_changes={"activation_checkpointing": True},
        axis_values={"activation_checkpointing": "true"},
    )
    workload = replace(plain.trial.workload, activation_checkpointing=True)
    varied = replace(plain, trial=replace(plain.trial, configuration=configuration, workload=workload), wall_seconds=9)
    for records, count in (
        ((plain, varied), 1),
        ((varied, plain), 1),
        ((plain, varied, run(2, 0.3, seq_length=64)), 2),
    ):
        assert len(merge([result(*records)])) == count


def test_a_single_result_is_handed_on_as_it_is() -> None:
    one = result(run(1, 0.1), run(2, 0.2), arguments=("--model", "tiny"), notes=("cold launch",))
    (group,) = merge([one])
    assert group.runs == one.runs
    assert group.commands == ("python zero_stage_comparison.py --model tiny",)
    assert (group.notes, group.environments) == (("cold launch",), (HOST,))


def test_notes_and_commands_of_pooled_results_are_kept_with_what_may_explain_a_spread() -> None:
    moved, same = replace(HOST, hostname="node-1"), {"arguments": ("--stages", "1"), "notes": ("cold launch",)}
    (group,) = merge([result(run(1, 0.1), **same), result(run(1, 0.2), on=moved, name="b.json", **same)])
    assert group.commands == ("python zero_stage_comparison.py --stages 1",)
    assert group.environments == (HOST, moved)
    *own, pooled = group.notes
    assert own == ["a.json: cold launch", "b.json: cold launch"]
    assert pooled.startswith("b.json is pooled with a.json")
    assert "host node-0 vs node-1" in pooled


# ------------------------------------------------------------------ kept apart


def test_a_different_workload_placement_method_or_environment_is_a_group_that_says_why(
    subtests: pytest.Subtests,
) -> None:
    for other, on, named in (
        (run(1, 0.2, model="gpt2"), HOST, "gpt2"),
        (run(1, 0.2, seq_length=64), HOST, "64 tokens"),
        (run(1, 0.2, seed=7), HOST, "seed 7 vs"),
        (fakes.success(fakes.trial(fakes.zero(1), on=replace(CUDA, num_gpus=1))), HOST, "1 × H100"),
        (replace(run(1, 0.2), method_version=99), HOST, f"measurement method 99 vs {METHOD_VERSION}"),
        (run(1, 0.2), replace(HOST, packages={**HOST.packages, "torch": "2.11.0"}), "torch 2.11.0 vs 2.13.0"),
        (run(1, 0.2), replace(HOST, gpus=fakes.inventory(cards=1).gpus), "GPUs 1 x NVIDIA H100 80GB HBM3"),
        (run(1, 0.2), None, "environment unknown"),
    ):
        with subtests.test(named):
            groups = merge([result(run(1, 0.1)), result(other, on=on, name="b.json")])
            assert sources(groups) == [("a.json",), ("b.json",)]
            assert groups[0].facts != groups[1].facts
            assert named in " ".join([*groups[1].facts, *groups[1].notes])
            if groups[1].facts[-1] == "b.json":  # nothing else in its title differs
                for group, name in zip(groups, ("b.json", "a.json"), strict=True):
                    assert group.notes[0].startswith(f"not pooled with {name}, and no ratio is given between the two")


def test_points_of_one_sweep_with_files_of_one_name_have_titles_of_their_own() -> None:
    names = ("/a/ids.bin", "/b/ids.bin", "/c/ids.bin")
    points = [run(1, seconds, data_path=name) for name, seconds in zip(names, (0.1, 0.2, 0.3), strict=True)]
    groups = merge([result(*points)])
    assert [group.facts[-2:] for group in groups] == [("data ids.bin", f"data_path {name}") for name in names]
    assert [group.notes for group in groups] == [()] * 3
    # Apart from another machine's, which has a note.
    elsewhere = replace(HOST, packages={**HOST.packages, "torch": "2.11.0"})
    groups = merge([result(*points[:2]), result(run(1, 0.4, data_path=names[0]), on=elsewhere, name="b.json")])
    assert len({group.facts for group in groups}) == 3
    assert [[note.split(",")[0] for note in group.notes] for group in groups] == [
        ["not pooled with b.json"], ["not pooled with b.json"], ["not pooled with a.json"] * 2
    ]  # fmt: skip


def test_results_without_environments_are_pooled_with_a_warning_and_not_across_cards() -> None:
    first = result(run(1, 0.1), on=None)
    (group,) = merge([first, result(run(1, 0.2), on=None, name="b.json")])
    assert any("assumed to come from one machine" in note for note in group.notes)
    elsewhere = fakes.success(run(1, 0.2).trial, step_seconds=[0.2] * 10, device_name="NVIDIA L4")
    assert len(merge([first, result(elsewhere, on=None, name="b.json")])) == 2


# ------------------------------------------------------------------ once each


def test_a_run_counts_once_in_whichever_results_it_is() -> None:
    first, second = run(1, 0.1), run(2, 0.2)
    (group,) = merge([one := result(first, second), one])
    assert group.runs == one.runs
    assert "a.json: 2 rows also in another result, counted once" in group.notes
    # Rows that were never launched have no time of their own: those of two runs are different rows.
    skipped = fakes.failure(fakes.trial(fakes.zero(3), on=CUDA), SKIPPED)
    apart = [replace(result(first), runs=load_results.make_runs([replace(skipped, wall_seconds=None)], run_id=run_id))
             for run_id in ("zero_1", "zero_2")]  # fmt: skip
    (group,) = merge(apart)
    assert len(group.runs) == 2
    # A run that was resumed adds only what its older copy lacks; the same command run again is a different run.
    again = replace(first, started_at="2026-11-21T10:30:00+00:00")
    for other, expected in ((second, [(1, 0), (2, 0)]), (again, [(1, 0), (1, 1)])):
        (group,) = merge([result(first), result(first, other, name="b.json")])
        assert stages_and_repeats(group) == expected


@pytest.mark.parametrize("flat_first", [True, False])
def test_a_flat_json_and_its_own_run_folder_count_once_and_the_records_are_kept(
    tmp_path: Path, flat_first: bool
) -> None:
    failed = replace(fakes.failure(run(3, 0.1).trial), started_at="2026-11-21T09:30:00+00:00")
    stored = fakes.write_run(tmp_path / "results", [run(1, 0.1), run(2, 0.2), failed])
    (tmp_path / "sent").mkdir()
    lonely = Path(shutil.copy(stored.json_path, tmp_path / "sent"))
    loaded = [load_results.load(path) for path in ((lonely, stored.folder) if flat_first else (stored.folder, lonely))]
    (group,) = merge(loaded)
    assert [len(entry.ranks) for entry in group.runs] == [2, 2, 0]
    assert group.sources == (stored.folder,)
    assert any("3 rows also in another result" in note for note in group.notes)


def test_groups_are_in_the_order_of_the_results_whether_flat_or_with_records() -> None:
    first, second = run(1, 0.1, seq_length=64), run(1, 0.2)
    flat = result(second, first, name="flat.json")
    flat = replace(flat, runs=tuple(load_results.flat_run(each.row) for each in flat.runs))
    groups = merge([flat, result(first, name="folder")])
    assert sources(groups) == [("flat.json",), ("folder",)]
    assert sources(merge([result(first, name="folder"), flat])) == [("folder",), ("flat.json",)]
    assert [run.has_record for group in groups for run in group.runs] == [False, True]


RUNS = st.lists(st.tuples(st.sampled_from((0, 1, 2)), st.integers(1, 40)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=30)
@given(st.lists(RUNS, min_size=1, max_size=4))
def test_whatever_is_merged_no_run_is_lost_and_none_counts_twice(files: list[list[tuple[int, int]]]) -> None:
    """Runs with the same stage and speed are the same run here, in whichever files they are."""
    results = [
        result(*(run(stage, ticks / 100) for stage, ticks in dict.fromkeys(entries)), name=f"{number}.json")
        for number, entries in enumerate(files)
    ]
    (group,) = merge(results)
    seen = [(each.trial.configuration.stage, round((each.row.avg_step_time_ms or 0) / 10)) for each in group.runs]
    assert sorted(seen) == sorted({run for entries in files for run in entries})
    if len(group.sources) > 1:
        assert len({work_key(each.trial) for each in group.runs}) == len(seen)
