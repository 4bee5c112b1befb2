"""From flags to ordered trials, and every request that cannot be meant refused before any work."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench import planner, runner
from ds_bench.config.caveats import Caveat, CaveatKind, as_caveat
from ds_bench.config.deepspeed_config import MakeConfig
from ds_bench.config.identity import work_key
from ds_bench.config.options import Options
from ds_bench.config.spec import Placement, Strategy, Trial
from ds_bench.doctor import disk
from ds_bench.errors import UsageError
from ds_bench.launch import ops
from ds_bench.launch.ops import OpState
from ds_bench.models.lookup import ResolvedModel
from ds_bench.prediction import trial_predictions
from ds_bench.records import json_files
from ds_bench.system import environment
from tests.support import fakes
from tests.support.real_trials import ROOT

BROKEN_FUSED = {ops.FUSED_ADAM: OpState(op=ops.FUSED_ADAM, ready=False, reason="no nvcc")}


def trials(
    options: Options,
    *,
    on: Placement | None = None,
    make: MakeConfig = fakes.make_config,
    states: Mapping[str, OpState] | None = None,
    of: ResolvedModel | None = None,
) -> list[Trial]:
    on = on or fakes.placement(nvme_path=None if options.nvme_path is None else str(options.nvme_path))
    choice = of or fakes.resolved_model()
    builder = planner.ConfigurationBuilder(options=options, make_config=make, model=choice, placement=on)
    rows = [builder.build(row, options.batch_size) for row in planner.requested_rows(options)]
    made = planner.make_trials(options, choice, on, rows)
    return planner.complete(made, planner.RunFacts(op_states=states or {}, largest_parameter=choice.largest_parameter))


def config_of(*arguments: str, make: MakeConfig = fakes.make_config) -> dict[str, Any]:
    """The configuration of the only trial that these flags give."""
    (trial,) = trials(fakes.options("zero", "--stages", "3", *arguments), make=make)
    return dict(trial.ds_config)


# ------------------------------------------------------------------ order


def order(*arguments: str) -> list[list[int]]:
    """Stages in the order of running, round by round."""
    rounds: dict[int, list[int]] = {}
    for trial in trials(fakes.options("zero", *arguments)):
        mine = rounds.setdefault(trial.repeat, [])
        assert trial.round_position == len(mine)
        mine.append(trial.configuration.stage)
    return list(rounds.values())


@settings(deadline=None)
@given(
    stages=st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True),
    repeats=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_rounds_after_the_first_are_shuffled_by_the_seed(stages: list[int], repeats: int, seed: int) -> None:
    """An order does not depend on the number of rounds, so that a resumed run keeps the one it began with."""
    flags = "--stages", *map(str, stages), "--seed", str(seed)
    rounds = order(*flags, "--repeats", str(repeats))
    assert rounds[0] == stages
    assert all(sorted(each) == sorted(stages) for each in rounds)
    assert rounds == order(*flags, "--repeats", "9")[:repeats]


def test_no_row_is_early_late_or_always_in_the_same_place() -> None:
    """Two random orders of four rows share one place on average; the best of the orders that are tried shares fewer."""
    shuffled = [order("--repeats", "3", "--seed", str(seed)) for seed in range(200)]
    places = [sum(each.index(stage) for rounds in shuffled for each in rounds) / 600 for stage in range(4)]
    assert places == pytest.approx([1.5] * 4, abs=0.35)
    assert sum(a == b for first, second, _ in shuffled for a, b in zip(first, second, strict=True)) / 200 < 0.3
    # A row has each of the others in front of it: what one leaves behind, as heat, is left to all.
    before = {(a, b) for _, *later in shuffled for each in later for a, b in itertools.pairwise(each)}
    assert before == set(itertools.permutations(range(4), 2))


def test_trial_ids_sort_in_the_order_of_running_and_are_unique() -> None:
    ids = [trial.trial_id for trial in trials(fakes.options("zero", "--repeats", "3"))]
    assert ids == sorted(ids)
    assert len(set(ids)) == 12
    assert ids[0] == "00_zero0_r0"
    assert trials(fakes.options("zero"))[0].trial_id == "00_zero0"


def test_no_two_trials_of_a_plan_share_a_key() -> None:
    made = trials(fakes.options("zero", "--repeats", "3"))
    assert len({work_key(trial) for trial in made}) == len(made)


# ------------------------------------------------------------------ strategies


def names(*arguments: str) -> list[str]:
    return [row.name for row in planner.requested_rows(fakes.options("offload", *arguments))]


def test_a_path_appends_nvme_where_it_is_not_named() -> None:
    assert names("--nvme-path", "/d") == ["none", "cpu_optimizer", "cpu_full", "nvme"]


def test_nvme_without_a_path_is_refused_with_both_ways_out() -> None:
    with pytest.raises(UsageError, match=r"--strategies nvme needs a disk \(add --nvme-path DIR, or leave nvme out\)"):
        names("--strategies", "none", "nvme")


def test_strategies_by_name_follow_the_stages_in_a_comparison_of_stages() -> None:
    both = fakes.options("zero", "--stages", "3", "--strategies", "cpu_optimizer", "zero2_offload")
    assert [row.name for row in planner.requested_rows(both)] == ["zero3", "cpu_optimizer", "zero2_offload"]
    twice = fakes.options("zero", "--stages", "3", "--strategies", "zero3")
    assert [row.name for row in planner.requested_rows(twice)] == ["zero3"]
    alone = fakes.options("zero", "--strategies", "zero3_offload")
    (trial,) = trials(alone)
    assert trial.configuration.layout == (3, "cpu", "cpu")


def test_two_names_of_one_configuration_are_refused() -> None:
    with pytest.raises(UsageError, match="none and zero3 are the same configuration, ZeRO-3"):
        names("--strategies", "none", "zero3")


# ------------------------------------------------------------------ rows that cannot run


def test_what_deepspeed_would_not_do_is_a_row_with_a_reason_and_the_others_stay() -> None:
    made = trials(fakes.options("offload", "--stage", "2"))
    refused = {trial.configuration.name: trial.unsupported for trial in made}
    assert refused["none"] is None
    assert refused["cpu_optimizer"] is None
    assert "use stage 3" in (refused["cpu_full"] or "")


def test_a_row_whose_op_does_not_build_is_unsupported_with_reason_and_remedy(subtests: pytest.Subtests) -> None:
    for op, name, reason, remedy in (
        (ops.CPU_ADAM, "cpu_optimizer", "g++ is missing", "install a C++ compiler"),
        (ops.ASYNC_IO, "nvme", "async_io requires the dev libaio .so object", "install libaio's headers"),
        (ops.ASYNC_IO, "nvme", ops.NO_TOOLKIT, "install the CUDA toolkit"),
        (ops.ASYNC_IO, "nvme", "CalledProcessError: error: a template", "see the build log"),
    ):
        with subtests.test(op=op, name=name, remedy=remedy):
            states = {op: OpState(op=op, ready=False, reason=reason)}
            options = fakes.options("offload", "--strategies", "none", name, "--nvme-path", "/d")
            refused = {trial.configuration.name: trial.unsupported for trial in trials(options, states=states)}
            assert refused["none"] is None
            assert f"{reason}; {remedy}" in (refused[name] or "")


def test_too_little_space_for_swapping_refuses_that_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_gb = shutil.disk_usage(tmp_path)._replace(free=2**30)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _path: one_gb)
    options = fakes.options("offload", "--model", "gpt2", "--nvme-path", str(tmp_path))
    checked, _folder = runner.with_nvme_folder(planner.make_run_plan([options], fakes.make_config, fakes.machine()))
    refused = {trial.configuration.name: trial.unsupported or "" for trial in checked.trials}
    assert refused.pop("nvme") == (
        f"--nvme-path {tmp_path} has 1.00 GB free, and swapping gpt2 needs about 2.09 GB; "
        "free some space, or give another disk"
    )
    assert set(refused.values()) == {""}


def test_bf16_on_a_card_without_it_is_unsupported_in_every_row() -> None:
    volta = fakes.placement(accelerator="cuda", supported_precisions=("fp16", "fp32"))
    made = trials(fakes.options("zero", "--precision", "bf16"), on=volta)
    assert all("use --precision fp32" in (trial.unsupported or "") for trial in made)
    assert {trial.workload.precision for trial in trials(fakes.options("zero"), on=volta)} == {"fp16"}


# ------------------------------------------------------------------ torch's AdamW instead of DeepSpeed's


def test_a_fused_adam_that_does_not_build_is_replaced_and_said() -> None:
    gpu = fakes.placement(accelerator="cuda")
    (trial,) = trials(fakes.options("zero", "--stages", "1"), on=gpu, states=BROKEN_FUSED)
    assert trial.ds_config["optimizer"]["params"]["torch_adam"] is True
    assert Caveat(CaveatKind.TORCH_ADAM, {"reason": "no nvcc"}) in trial.caveats
    assert trial.unsupported is None


# ------------------------------------------------------------------ caveats known before running


def test_what_is_known_of_the_disk_is_said_of_the_rows_that_use_it_only() -> None:
    options = fakes.options("offload", "--nvme-path", "/d")
    checked = (
        planner.make_run_plan([options], fakes.make_config, fakes.machine())
        .plans[0]
        .with_facts(nvme_caveat="it is an overlay")
    )
    said = {trial.configuration.name: trial.caveats for trial in checked.trials}
    assert said == {"none": (), "cpu_optimizer": (), "cpu_full": (), "nvme": ("it is an overlay",)}


def test_a_row_that_is_not_what_its_columns_say_says_so(subtests: pytest.Subtests) -> None:
    for arguments, said in (
        (
            ['--set=zero_optimization.offload_optimizer={"device": "cpu"}'],
            "ran optimizer offload cpu",
        ),
        (["--set", 'zero_optimization.offload_param={"device": "cpu"}'], "ran parameter offload cpu"),
        (["--set", "fp16.enabled=true", "--precision", "bf16"], "ran precision fp16"),
        (["--set", "bf16.enabled=false", "--precision", "bf16"], "ran precision fp32"),
    ):
        with subtests.test(arguments=arguments):
            (trial,) = trials(fakes.options("zero", "--stages", "3", *arguments))
            assert len(trial.caveats) == 1
            assert said in as_caveat(trial.caveats[0]).text


def test_a_stage_changed_in_the_config_is_refused_since_it_would_mislabel_the_row() -> None:
    with pytest.raises(UsageError, match=r"ZeRO-3 sets zero_optimization\.stage to 1 .*--stages"):
        trials(fakes.options("zero", "--stages", "3", "--set", "zero_optimization.stage=1"))


def test_a_row_that_is_what_its_columns_say_says_nothing(subtests: pytest.Subtests) -> None:
    for precision, family in product(("bf16", "fp16", "fp32"), ("zero", "offload")):
        with subtests.test(precision=precision, family=family):
            assert {t.caveats for t in trials(fakes.options(family, "--precision", precision))} == {()}


# ------------------------------------------------------------------ sequence length


def test_a_sequence_beyond_the_models_positions_is_refused_with_what_is_allowed() -> None:
    options = fakes.options("zero", "--seq-length", "1025")
    with pytest.raises(
        UsageError, match=r"--seq-length 1025 is beyond the 1024 positions of gpt2 \(give 1024 or less\)"
    ):
        planner.make_workload(options, fakes.resolved_model("gpt2"), fakes.placement())


def test_the_default_sequence_is_512_or_the_positions_where_there_are_fewer() -> None:
    assert planner.resolve_seq_length(None, fakes.resolved_model("gpt2")) == 512
    assert planner.resolve_seq_length(None, fakes.resolved_model(max_positions=64)) == 64
    assert planner.resolve_seq_length(None, fakes.resolved_model(max_positions=None)) == 512


# ------------------------------------------------------------------ --ds-config


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "overlay.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ('{"a": 1,}', "remove comments and trailing commas"),
        ("// hello\n{}", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("3", "is not a JSON object"),
        ("", "is not JSON"),
        ('{"train_batch_size": "auto"}', 'train_batch_size is "auto"'),
        ('{"zero_optimization": {"reduce_bucket_size": "auto"}}', 'zero_optimization.reduce_bucket_size is "auto"'),
        ('{"gradient_cliping": 1}', "did you mean gradient_clipping"),
        ('{"gradient_clipping": NaN}', "cannot be written as JSON"),
        ('{"gradient_clipping": 1e999}', "cannot be written as JSON"),
    ],
)
def test_a_config_file_that_cannot_be_meant_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        config_of("--ds-config", write(tmp_path, text))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not JSON"):
        config_of("--ds-config", str(tmp_path / "f"))


@pytest.mark.parametrize("path", ["missing.json", "."])
def test_a_config_file_that_is_not_there_is_refused_by_its_name(tmp_path: Path, path: str) -> None:
    with pytest.raises(UsageError, match=r"--ds-config .*give a readable JSON file") as caught:
        config_of("--ds-config", str(tmp_path / path))
    assert str(tmp_path / path) in str(caught.value)


def test_a_config_file_is_laid_over_every_row_and_a_setting_over_that(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"gradient_clipping": 0.5, "zero_optimization": {"reduce_bucket_size": 9}}))
    options = fakes.options("zero", "--ds-config", path, "--set", "gradient_clipping=0.1")
    made = trials(options)
    assert {trial.ds_config["gradient_clipping"] for trial in made} == {0.1}
    assert {trial.ds_config["zero_optimization"]["reduce_bucket_size"] for trial in made} == {9}
    assert [trial.ds_config["zero_optimization"]["stage"] for trial in made] == [0, 1, 2, 3]


# ------------------------------------------------------------------ --set


def test_the_last_of_two_settings_decides_whatever_came_between() -> None:
    assert config_of("--set", "gradient_clipping=1", "--set", "gradient_clipping=2")["gradient_clipping"] == 2
    again = [f"--set=gradient_clipping={value}" for value in (1, 2, 1)]
    assert config_of(*again)["gradient_clipping"] == 1


@pytest.mark.parametrize("more", [[], ["--set", "zero_optimization.reduce_scatter=false"]])
def test_a_setting_of_null_takes_the_key_out(more: list[str]) -> None:
    """The more so when another setting touches the same block: null must not be lost on the way."""
    assert "gradient_clipping" not in config_of(*more, "--set", "gradient_clipping=null")
    zero = config_of(*more, "--set", "zero_optimization.overlap_comm=null")["zero_optimization"]
    assert "overlap_comm" not in zero


def test_a_null_in_the_file_takes_the_key_out_too(tmp_path: Path) -> None:
    path = write(tmp_path, '{"gradient_clipping": null}')
    assert "gradient_clipping" not in config_of("--ds-config", path, "--set", "steps_per_print=5")


def test_a_setting_that_is_none_is_refused(subtests: pytest.Subtests) -> None:
    for setting in ("", "gradient_clipping", "=1", "zero_optimization..stage=1"):
        with subtests.test(setting), pytest.raises(UsageError, match=r"is not key\.path=value"):
            config_of("--set", setting)


def test_a_setting_that_would_be_ignored_or_break_a_file_is_refused(subtests: pytest.Subtests) -> None:
    for setting, said in (
        ("bf17.enabled=true", "bf17: .*does not know"),
        ("bf16=true", "not an object"),
        ("optimizer=SGD", "not an object"),
        ("gradient_clipping=NaN", "cannot be written as JSON"),
        ("gradient_clipping=Infinity", "cannot be written as JSON"),
    ):
        with subtests.test(setting), pytest.raises(UsageError, match=said):
            config_of("--set", setting)


def test_another_micro_batch_makes_the_total_anew() -> None:
    config = config_of("--batch-size", "4", "--set", "train_micro_batch_size_per_gpu=6")
    assert (config["train_micro_batch_size_per_gpu"], config["train_batch_size"]) == (6, 6)
    config = config_of("--set", "gradient_accumulation_steps=3")
    assert (config["gradient_accumulation_steps"], config["train_batch_size"]) == (3, 12)


def test_a_total_that_contradicts_the_micro_batch_is_refused_wherever_each_was_given(tmp_path: Path) -> None:
    path = write(tmp_path, '{"train_batch_size": 16}')
    with pytest.raises(UsageError, match="train_batch_size 16 is neither"):
        config_of("--ds-config", path, "--set", "train_micro_batch_size_per_gpu=3")
    with pytest.raises(UsageError, match="train_batch_size 5 is neither"):
        config_of("--set", "train_batch_size=5")


# ------------------------------------------------------------------ the user's own function


def test_an_edit_of_the_users_function_is_in_every_trial() -> None:
    def edited(strategy: Strategy, batch_size: int, grad_accum: int = 1) -> dict[str, Any]:
        config = fakes.make_config(strategy, batch_size, grad_accum)
        config["zero_optimization"]["reduce_bucket_size"] = 50_000_000
        return config

    made = trials(fakes.options("zero", "--repeats", "2"), make=edited)
    assert {trial.ds_config["zero_optimization"]["reduce_bucket_size"] for trial in made} == {50_000_000}


def test_the_users_function_is_given_the_flags() -> None:
    given_: list[tuple[str, int, int]] = []

    def spy(strategy: Strategy, batch_size: int, grad_accum: int = 1) -> dict[str, Any]:
        given_.append((strategy.name, batch_size, grad_accum))
        return fakes.make_config(strategy, batch_size, grad_accum)

    trials(fakes.options("zero", "--stages", "0", "2", "--batch-size", "8", "--grad-accum", "2"), make=spy)
    assert given_ == [("zero0", 8, 2), ("zero2", 8, 2)]


PASTED = """
def create_deepspeed_config(stage: int, batch_size: int, gradient_accumulation_steps: int = 1) -> Dict[str, Any]:
    config: Dict[str, Any] = {
        "train_batch_size": batch_size * gradient_accumulation_steps,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "fp16": {"enabled": False},
        "zero_optimization": {"overlap_comm": False, "reduce_bucket_size": 5e8},
    }
    return config
"""


@pytest.mark.parametrize("left_out", [(), ("train_batch_size",), ("zero_optimization",)])
def test_the_usual_snippet_pasted_into_the_script_works(left_out: tuple[str, ...], tmp_path: Path) -> None:
    """Without imports of its annotations, without a micro-batch, without a stage."""
    text = (ROOT / "zero_stage_comparison.py").read_text()
    start, end = text.index("def create_deepspeed_config"), text.index("def _by_strategy")
    script = tmp_path / "zero_stage_comparison.py"
    pasted = PASTED
    for key in left_out:
        pasted = pasted.replace("    return config", f"    del config[{key!r}]\n    return config")
    script.write_text(f"{text[:start]}{pasted}\n\n{text[end:]}")
    flags = "--model tiny --batch-size 2 --grad-accum 3 --num-gpus 2 --accelerator cpu --dry-run"
    done = subprocess.run(
        [sys.executable, script, *flags.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r'"train_batch_size": (\d+)', done.stdout) == ["12"] * 4
    assert re.findall(r'"train_micro_batch_size_per_gpu": (\d+)', done.stdout) == ["2"] * 4
    assert re.findall(r'"gradient_accumulation_steps": (\d+)', done.stdout) == ["3"] * 4
    assert re.findall(r'"stage": (\d)', done.stdout) == ["0", "1", "2", "3"]


def test_a_nested_key_that_deepspeed_refuses_is_named_before_any_trial(subtests: pytest.Subtests) -> None:
    for setting, said in (
        ("zero_optimization.overlap_com=true", "zero_optimization.overlap_com: .*did you mean overlap_comm"),
        ("zero_optimization.offload_param.pin=true", "zero_optimization.offload_param.pin: .*has buffer_count"),
        ("bf16.enable=true", "bf16.enable: .*did you mean enabled"),
        ("optimizer.params.lrr=3", "optimizer.params.lrr: .* takes no argument lrr.*did you mean lr"),
        ("zero_optimization.overlap_comm=often", "zero_optimization.overlap_comm: .*valid boolean"),
    ):
        with subtests.test(setting), pytest.raises(UsageError, match=said):
            config_of("--set", setting)


def test_a_function_that_returns_no_dict_is_refused(subtests: pytest.Subtests) -> None:
    for returned in (None, [], "config.json"):
        with (
            subtests.test(returned=returned),
            pytest.raises(UsageError, match=f"create_deepspeed_config returned {type(returned).__name__}"),
        ):
            trials(fakes.options("zero"), make=lambda *_, returned=returned: returned)


def test_a_function_that_returns_what_no_file_can_hold_is_refused_before_any_work(subtests: pytest.Subtests) -> None:
    def odd(strategy: Strategy, batch_size: int, grad_accum: int = 1) -> dict[str, Any]:
        return {**fakes.make_config(strategy, batch_size, grad_accum), "scheduler": {"params": value}}

    for value in ({1, 2}, object(), float("nan"), Path("/x")):
        with subtests.test(value=value), pytest.raises(UsageError, match="cannot be written as JSON"):
            trials(fakes.options("zero"), make=odd)


def test_one_dict_returned_for_every_stage_is_not_changed_by_planning() -> None:
    shared = fakes.make_config(fakes.zero(1), 4)
    before = json.dumps(shared)
    trials(fakes.options("zero", "--stages", "1", "--set", "gradient_clipping=9"), make=lambda *_: shared)
    assert json.dumps(shared) == before


def test_a_trial_keeps_its_config_through_json_even_if_the_function_used_tuples() -> None:
    def tuples(strategy: Strategy, batch_size: int, grad_accum: int = 1) -> dict[str, Any]:
        config = fakes.make_config(strategy, batch_size, grad_accum)
        config["optimizer"]["params"]["betas"] = (0.9, 0.95)
        return config

    (trial,) = trials(fakes.options("zero", "--stages", "1"), make=tuples)
    assert json_files.parse(Trial, json.dumps(trial.to_dict()).encode()) == trial


# ------------------------------------------------------------------ the workload


def test_the_workload_is_what_the_flags_say_and_the_same_in_every_trial() -> None:
    options = fakes.options(
        "zero", "--batch-size", "2", "--grad-accum", "3", "--num-steps", "7", "--warmup-steps", "0", "--seed", "5",
        "--seq-length", "64", "--precision", "fp32", "--activation-checkpointing", "--trust-remote-code",
    )  # fmt: skip
    workloads = [trial.workload for trial in trials(options)]
    assert all(work == workloads[0] for work in workloads)
    work = workloads[0]
    assert (work.batch_size, work.grad_accum, work.num_steps, work.warmup_steps, work.seed) == (2, 3, 7, 0, 5)
    assert (work.seq_length, work.precision) == (64, "fp32")
    assert work.activation_checkpointing
    assert work.trust_remote_code


# ------------------------------------------------------------------ completed by the op builds


def test_rows_that_lose_fused_adam_are_predicted_with_the_optimizer_that_they_then_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "torch_cuda_version", lambda: "12.8")
    options = fakes.options("offload", "--strategies", "none", "cpu_optimizer", "--seq-length", "16")
    capacity = trial_predictions.MemoryCapacity(gpu_bytes=None, host_bytes=None)
    profile = trial_predictions.profile_model(fakes.resolved_model(), 16, "cuda", dropout=0.0)
    assert not isinstance(profile, trial_predictions.Unpredicted)
    before = (
        planner.make_run_plan([options], fakes.make_config, fakes.machine(cards=2))
        .plans[0]
        .with_facts(profile=profile, memory=capacity)
    )
    assert before.with_facts(op_states={}).trials == before.trials
    on_torch, offloaded = before.with_facts(op_states=BROKEN_FUSED).trials
    assert offloaded == before.trials[1]
    assert on_torch.ds_config["optimizer"]["params"]["torch_adam"] is True
    again = trial_predictions.attach_predictions([on_torch], profile, capacity, skip=False)
    assert again == [on_torch]


def test_a_row_whose_op_is_missing_loses_its_prediction() -> None:
    options = fakes.options("offload", "--strategies", "none", "cpu_optimizer")
    capacity = trial_predictions.MemoryCapacity(gpu_bytes=None, host_bytes=None)
    profile = trial_predictions.profile_model(fakes.resolved_model(), 16, "cpu", dropout=0.0)
    predicted = (
        planner.make_run_plan([options], fakes.make_config, fakes.machine())
        .plans[0]
        .with_facts(profile=profile, memory=capacity)
    )
    missing = {ops.CPU_ADAM: OpState(op=ops.CPU_ADAM, ready=False, reason="no g++")}
    kept, lost = predicted.with_facts(op_states=missing).trials
    assert kept == predicted.trials[0]
    assert (lost.prediction, lost.unsupported is None) == (None, False)


def test_only_rows_that_would_train_with_fused_adam_are_said_to_train_without_it() -> None:
    options = fakes.options("zero", "--stages", "2", "--axis", "optimizer=torch_adamw,lion,muon")
    plan = planner.make_run_plan([options], fakes.make_config, fakes.machine()).plans[0]
    config = {**plan.trials[0].ds_config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    adamw = replace(plan.trials[0], ds_config=config)
    missing = planner.RunFacts(op_states=BROKEN_FUSED)
    (changed,) = planner.complete([adamw], missing)
    assert changed.ds_config["optimizer"]["params"]["torch_adam"] is True
    assert changed.caveats[-1] == Caveat(CaveatKind.TORCH_ADAM, {"reason": "no nvcc"})
    assert len(plan.trials) == 3
    assert planner.complete(plan.trials, missing) == plan.trials


def axis_rows_of(*arguments: str) -> dict[str, Trial]:
    return {trial.configuration.name: trial for trial in trials(fakes.options("zero", *arguments))}


def test_an_axis_makes_a_row_of_each_value_where_it_acts() -> None:
    rows = axis_rows_of("--stages", "0", "2", "--axis", "overlap_comm=true,false")
    assert list(rows) == ["zero0", "zero2+overlap_comm=true", "zero2+overlap_comm=false"]
    on = rows["zero2+overlap_comm=true"]
    assert on.ds_config["zero_optimization"]["overlap_comm"] is True
    assert (on.configuration.label, on.configuration.source) == ("ZeRO-2, overlap_comm on", "axis")
    assert on.configuration.axis_values == {"overlap_comm": "true"}
    assert json_files.parse(Trial, json.dumps(on.to_dict()).encode()) == on


def test_a_value_that_deepspeed_would_stop_at_is_an_unsupported_row_beside_the_others() -> None:
    rows = axis_rows_of("--stages", "2", "--axis", "bf16_states=off,master,all")
    reasons = {name.partition("=")[2]: trial.unsupported for name, trial in rows.items()}
    assert (reasons["off"], reasons["all"]) == (None, None)
    assert "need the optimizer offloaded" in (reasons["master"] or "")


def test_axes_of_the_workload_change_it_and_the_batch_agrees() -> None:
    rows = axis_rows_of("--stages", "2", "--axis", "micro_batch=1,3", "--axis", "grad_accum=2")
    trial = rows["zero2+micro_batch=3+grad_accum=2"]
    assert (trial.workload.batch_size, trial.workload.grad_accum) == (3, 2)
    assert trial.ds_config["train_batch_size"] == 3 * 2 * trial.placement.num_gpus
    precision = axis_rows_of("--stages", "1", "--axis", "precision=fp32,bf16")["zero1+precision=fp32"]
    assert precision.workload.precision == "fp32"
    assert not precision.caveats


def test_a_flag_or_setting_of_what_an_axis_sets_is_refused_before_anything_is_looked_up() -> None:
    for arguments, says in (
        (["--axis", "grad_accum=1,2", "--grad-accum", "4"], "--axis grad_accum and --grad-accum set the same"),
        (["--axis", "micro_batch=1,2", "--batch-size", "auto"], "--axis micro_batch and --batch-size set the same"),
        (["--axis", "prefetch=1,2", "--set", "zero_optimization.stage3_prefetch_bucket_size=1"], "both set"),
        (["--axis", "pin_memory=true,false"], "pin_memory acts only in rows of stage 1, 2 and 3 that offload"),
    ):
        with pytest.raises(UsageError, match=says):
            planner.axis_notes(fakes.options("zero", *arguments))


def test_a_setting_that_offloads_every_row_lets_an_offload_axis_act() -> None:
    offload = "zero_optimization.offload_optimizer.device=cpu"
    options = fakes.options("zero", "--stages", "2", "--set", offload, "--axis", "pin_memory=true,false")
    assert planner.axis_notes(options) == []
    rows = {trial.configuration.name: trial for trial in trials(options)}
    block = rows["zero2+pin_memory=false"].ds_config["zero_optimization"]["offload_optimizer"]
    assert block["pin_memory"] is False


def test_rows_that_train_alike_are_one_and_a_line_says_so() -> None:
    made = trials(fakes.options("zero", "--stages", "1", "--axis", "buffers=default", "--axis", "overlap_comm=false"))
    twin = replace(made[0], configuration=replace(made[0].configuration, name="twin", label="Twin"))
    label = made[0].configuration.label
    assert planner._equal_rows([*made, twin]) == {"twin": f"twin trains exactly as {label} does and is left out"}
    other = replace(twin, configuration=replace(twin.configuration, variables={"DS_PIN_MEMORY_BACKEND": "native"}))
    assert planner._equal_rows([*made, other]) == {}
    assert work_key(other) != work_key(twin)
