"""From flags to ordered trials; a request that cannot run is refused before any work."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_bench import runner
from ds_bench.config.caveat_texts import Caveat, CaveatKind, as_caveat
from ds_bench.config.deepspeed_config import MakeConfig
from ds_bench.config.identity import work_key
from ds_bench.config.options import Options
from ds_bench.config.spec import Placement, Strategy, Trial
from ds_bench.doctor import disk
from ds_bench.errors import UsageError
from ds_bench.launch import ops
from ds_bench.launch.ops import OpState
from ds_bench.models import lookup
from ds_bench.models.lookup import ResolvedModel
from ds_bench.planning import requested_rows, trial_planner
from ds_bench.prediction import trial_predictions
from ds_bench.system import environment
from tests.support import fakes

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
    builder = requested_rows.ConfigurationBuilder(options=options, make_config=make, model=choice, placement=on)
    rows = [builder.build(row, options.batch_size) for row in requested_rows.requested_rows(options)]
    facts = trial_planner.RunFacts(op_states=states or {}, largest_parameter=choice.largest_parameter)
    return trial_planner.complete(trial_planner.make_trials(options, choice, on, rows), facts)


def config_of(*arguments: str, make: MakeConfig = fakes.make_config) -> dict[str, Any]:
    """The configuration of the only trial that these flags give."""
    (trial,) = trials(fakes.options("zero", "--stages", "3", *arguments), make=make)
    return dict(trial.ds_config)


def reasons(made: list[Trial]) -> dict[str, str]:
    """Row → why it cannot run, of the rows that cannot."""
    return {trial.configuration.name: trial.unsupported for trial in made if trial.unsupported}


def plan_of(options: Options, cards: int = 0) -> trial_planner.Plan:
    return trial_planner.make_run_plan([options], fakes.make_config, fakes.machine(cards=cards)).plans[0]


# ------------------------------------------------------------------ order


def order(*arguments: str) -> list[list[int]]:
    """Stages in the order of running, round by round."""
    rounds: dict[int, list[int]] = {}
    for trial in sorted(trials(fakes.options("zero", *arguments)), key=lambda trial: trial.trial_id):
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
def test_several_rounds_are_shuffled_by_the_seed_and_a_single_one_is_not(
    stages: list[int], repeats: int, seed: int
) -> None:
    """An order does not depend on the number of rounds, so a resumed run keeps the one it began with."""
    flags = "--stages", *map(str, stages), "--seed", str(seed)
    rounds = order(*flags, "--repeats", str(repeats))
    assert all(sorted(each) == sorted(stages) for each in rounds)
    assert rounds == ([stages] if repeats == 1 else order(*flags, "--repeats", "9")[:repeats])


def test_no_row_is_early_late_or_always_in_the_same_place() -> None:
    """Two random orders of four rows share one place on average; the best of the orders that are tried shares fewer."""
    shuffled = [order("--repeats", "3", "--seed", str(seed)) for seed in range(200)]
    places = [sum(each.index(stage) for rounds in shuffled for each in rounds) / 600 for stage in range(4)]
    assert places == pytest.approx([1.5] * 4, abs=0.35)
    assert sum(a == b for first, second, _ in shuffled for a, b in zip(first, second, strict=True)) / 200 < 0.3
    # A run of one round ran as written, and may be continued.
    assert sum(a == b for _, second, _ in shuffled for a, b in zip(range(4), second, strict=True)) / 200 < 0.7
    # A row has each of the others in front of it: what one leaves behind, as heat, affects all.
    before = {(a, b) for _, *later in shuffled for each in later for a, b in itertools.pairwise(each)}
    assert before == set(itertools.permutations(range(4), 2))


def test_trials_run_in_the_order_of_their_ids_and_keys_are_unique() -> None:
    options = fakes.options("zero", "--stages", "2", "0", "1", "--repeats", "3")
    plan = trial_planner.make_run_plan([options], fakes.make_config, fakes.machine())
    ids = [trial.trial_id for trial in plan.trials]
    assert ids == sorted(ids)
    assert (len(set(ids)), len({work_key(trial) for trial in plan.trials})) == (9, 9)
    assert trials(fakes.options("zero"))[0].trial_id == "00_zero0"


# ------------------------------------------------------------------ rows


def test_rows_are_stages_then_strategies_each_once(subtests: pytest.Subtests) -> None:
    for family, line, names in (
        ("offload", "--nvme-path /d", ["none", "cpu_optimizer", "cpu_full", "nvme"]),
        ("zero", "--stages 3 --strategies cpu_optimizer zero2_offload", ["zero3", "cpu_optimizer", "zero2_offload"]),
        ("zero", "--stages 3 --strategies zero3", ["zero3"]),
    ):
        with subtests.test(line):
            assert [row.name for row in requested_rows.requested_rows(fakes.options(family, *line.split()))] == names
    for line, said in (
        ("--strategies none nvme", r"--strategies nvme needs a disk\. Add --nvme-path DIR, or leave nvme out"),
        ("--strategies none zero3", "none and zero3 are the same configuration, ZeRO-3"),
    ):
        with subtests.test(line), pytest.raises(UsageError, match=said):
            requested_rows.requested_rows(fakes.options("offload", *line.split()))


def test_a_row_that_cannot_run_has_a_reason_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    refused = reasons(trials(fakes.options("offload", "--stage", "2")))
    assert refused.keys() == {"cpu_full"}
    assert "use stage 3" in refused["cpu_full"]
    for op, name, reason, remedy in (
        (ops.CPU_ADAM, "cpu_optimizer", "g++ is missing", "install a C++ compiler"),
        (ops.ASYNC_IO, "nvme", "async_io requires the dev libaio .so object", "install libaio's headers"),
        (ops.ASYNC_IO, "nvme", ops.NO_TOOLKIT, "install the CUDA toolkit"),
    ):
        with subtests.test(op=op, remedy=remedy):
            states = {op: OpState(op=op, ready=False, reason=reason)}
            options = fakes.options("offload", "--strategies", "none", name, "--nvme-path", "/d")
            refused = reasons(trials(options, states=states))
            assert f"{reason}; {remedy}" in refused[name]
            assert "none" not in refused
    volta = fakes.placement(accelerator="cuda", supported_precisions=("fp16", "fp32"))
    assert len(reasons(trials(fakes.options("zero", "--precision", "bf16"), on=volta))) == 4
    assert {trial.workload.precision for trial in trials(fakes.options("zero"), on=volta)} == {"fp16"}
    one_gb = shutil.disk_usage(tmp_path)._replace(free=2**30)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _path: one_gb)
    options = fakes.options("offload", "--model", "gpt2", "--nvme-path", str(tmp_path))
    checked, _folder = runner.with_nvme_folder(
        trial_planner.make_run_plan([options], fakes.make_config, fakes.machine())
    )
    assert reasons(list(checked.trials)) == {
        "nvme": f"--nvme-path {tmp_path} has 1.00 GB free, and swapping gpt2 needs about 2.09 GB; "
        "free some space, or give another disk"
    }


def test_a_row_that_differs_from_its_name_says_so(subtests: pytest.Subtests) -> None:
    for arguments, said in (
        (['--set=zero_optimization.offload_optimizer={"device": "cpu"}'], "optimizer offload was cpu"),
        (["--set", 'zero_optimization.offload_param={"device": "cpu"}'], "parameter offload was cpu"),
        (["--set", "bf16.enabled=false", "--precision", "bf16"], "ran in fp32"),
    ):
        with subtests.test(arguments=arguments):
            (trial,) = trials(fakes.options("zero", "--stages", "3", *arguments))
            (caveat,) = trial.caveats
            assert said in as_caveat(caveat).text
    for precision, family in product(("bf16", "fp16", "fp32"), ("zero", "offload")):
        assert {t.caveats for t in trials(fakes.options(family, "--precision", precision))} == {()}


def test_the_workload_is_what_the_flags_say() -> None:
    line = (
        "--batch-size 2 --grad-accum 3 --num-steps 7 --warmup-steps 0 --seed 5 --seq-length 64 --precision fp32 "
        "--activation-checkpointing --trust-remote-code"
    )
    given_ = {
        "batch_size": 2, "grad_accum": 3, "num_steps": 7, "warmup_steps": 0, "seed": 5, "seq_length": 64,
        "precision": "fp32", "activation_checkpointing": True, "trust_remote_code": True,
    }  # fmt: skip
    for trial in trials(fakes.options("zero", *line.split())):
        assert {name: getattr(trial.workload, name) for name in given_} == given_
    for positions, length in ((1024, 512), (64, 64), (None, 512)):
        assert trial_planner.resolve_seq_length(None, fakes.resolved_model(max_positions=positions)) == length
    with pytest.raises(UsageError, match=r"--seq-length 1025 is beyond the 1024 positions of gpt2. Give 1024 or less"):
        trial_planner.resolve_seq_length(1025, fakes.resolved_model("gpt2"))


# ------------------------------------------------------------------ --ds-config, --set and the user's function


def write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "overlay.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_settings_replace_the_file_and_the_file_every_row(tmp_path: Path, subtests: pytest.Subtests) -> None:
    path = write(tmp_path, json.dumps({"gradient_clipping": 0.5, "zero_optimization": {"reduce_bucket_size": 9}}))
    made = trials(fakes.options("zero", "--ds-config", path, "--set", "gradient_clipping=0.1"))
    assert {trial.ds_config["gradient_clipping"] for trial in made} == {0.1}
    assert {trial.ds_config["zero_optimization"]["reduce_bucket_size"] for trial in made} == {9}
    assert [trial.ds_config["zero_optimization"]["stage"] for trial in made] == [0, 1, 2, 3]
    null = write(tmp_path, '{"gradient_clipping": null}')
    micro, total, accumulation = "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"
    for line, values in (
        ("--set gradient_clipping=1 --set gradient_clipping=2 --set gradient_clipping=1", {"gradient_clipping": 1}),
        ("--set gradient_clipping=null", {"gradient_clipping": None}),
        # null is not lost where another setting touches the same block.
        ("--set zero_optimization.reduce_scatter=false --set zero_optimization.overlap_comm=null", {}),
        (f"--ds-config {null} --set steps_per_print=5", {"gradient_clipping": None}),
        (f"--batch-size 4 --set {micro}=6", {micro: 6, total: 6}),
        (f"--set {accumulation}=3", {accumulation: 3, total: 12}),
    ):
        with subtests.test(line):
            config = config_of(*line.split())
            assert {name: config.get(name) for name in values} == values
            assert ("overlap_comm" in config["zero_optimization"]) == ("overlap_comm" not in line)


def test_a_configuration_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for overlay, setting, said in (
        ("{", None, "is not JSON"),
        ('{"a": 1,}', None, "Remove comments and trailing commas"),
        (b"\xff\xfe\x00", None, "is not JSON"),
        (
            '{"zero_optimization": {"reduce_bucket_size": "auto"}}',
            None,
            'zero_optimization.reduce_bucket_size is "auto"',
        ),
        ('{"gradient_clipping": 1e999}', None, "cannot be written as JSON"),
        ('{"train_batch_size": 16}', "train_micro_batch_size_per_gpu=3", "train_batch_size 16 is not"),
        (None, "gradient_clipping", "is not key.path=value"),
        (None, "zero_optimization..stage=1", "is not key.path=value"),
        (None, "zero_optimization.stage=1", "ZeRO-3 sets zero_optimization.stage to 1"),
        (None, "optimizer=SGD", "not an object"),
        (None, "optimizer.params.lrr=3", "Did you mean lr"),
        (None, "zero_optimization.overlap_comm=often", "valid boolean"),
    ):
        with subtests.test(overlay=overlay, setting=setting):
            flags = [] if overlay is None else ["--ds-config", write(tmp_path, overlay)]
            with pytest.raises(UsageError) as caught:
                config_of(*flags, *([] if setting is None else ["--set", setting]))
            assert said in str(caught.value)
            assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"--ds-config .*missing\.json: No such file"):
        config_of("--ds-config", str(tmp_path / "missing.json"))


def test_what_was_left_out_of_a_folder_of_configurations_is_said(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('{"zero_optimization":')
    (tmp_path / "good.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert any("torn.json" in line for line in plan_of(fakes.options("zero", "--configs", str(tmp_path))).lines)


def test_an_unknown_model_is_named_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_ask_child", lambda *_: {"error": "OSError: none"})
    options = replace(fakes.options("zero"), model="nosuch")
    of_recipe = replace(options, family="recipe", typed=frozenset())
    for asked, place in ((options, ""), (of_recipe, r" \(model\.name\)")):
        with pytest.raises(UsageError, match=rf"^Unknown model 'nosuch'{place}: "):
            plan_of(asked)


def test_every_trial_has_what_the_users_function_returns() -> None:
    """It gets the flags; tuples become lists, and the dict that it returns is not changed."""
    given_: list[tuple[str, int, int]] = []
    returned: list[dict[str, Any]] = []

    def edited(strategy: Strategy, batch_size: int, grad_accum: int = 1) -> dict[str, Any]:
        given_.append((strategy.name, batch_size, grad_accum))
        config = fakes.make_config(strategy, batch_size, grad_accum)
        config["optimizer"]["params"]["betas"] = (0.9, 0.95)
        returned.append(config)
        return config

    flags = ("--stages", "0", "2", "--batch-size", "8", "--grad-accum", "2", "--set", "gradient_clipping=9")
    made = trials(fakes.options("zero", *flags, "--repeats", "2"), make=edited)
    assert given_ == [("zero0", 8, 2), ("zero2", 8, 2)]
    assert [trial.ds_config["optimizer"]["params"]["betas"] for trial in made] == [[0.9, 0.95]] * 4
    assert all(config["gradient_clipping"] != 9 for config in returned)


def test_a_function_may_leave_batch_and_stage_out_but_must_return_a_configuration(subtests: pytest.Subtests) -> None:
    base = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "train_batch_size": 6}
    options = fakes.options("zero", "--batch-size", "2", "--grad-accum", "3", "--num-gpus", "2")
    for config in (base, {**base, "zero_optimization": {"overlap_comm": False}}):
        for stage, trial in enumerate(
            trials(options, on=fakes.placement(num_gpus=2), make=lambda *_, c=config: dict(c))
        ):
            made = trial.ds_config
            batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
            assert (made["zero_optimization"]["stage"], *(made[key] for key in batch)) == (stage, 12, 2, 3)
    values: list[Any] = [None, {**base, "scheduler": {"params": {1, 2}}}, {**base, "gradient_clipping": float("nan")}]
    for value in values:
        said = "cannot be written as JSON" if isinstance(value, dict) else f"returned {type(value).__name__}"
        with subtests.test(value=value), pytest.raises(UsageError, match=said):
            trials(fakes.options("zero", "--stages", "0"), make=lambda *_, value=value: value)


def test_adapters_that_cannot_be_read_are_refused_before_anything_starts(subtests: pytest.Subtests) -> None:
    for text in ("abc16x", "16:", "99999"):
        with subtests.test(text), pytest.raises(UsageError, match=f"^--lora '{text}' is not a rank"):
            trials(fakes.options("zero", "--lora", text))


# ------------------------------------------------------------------ completed by later facts


def test_facts_complete_the_rows_that_they_concern() -> None:
    offloading = plan_of(fakes.options("offload", "--nvme-path", "/d")).with_facts(nvme_caveat="it is an overlay")
    said = {trial.configuration.name: trial.caveats for trial in offloading.trials}
    assert said == {"none": (), "cpu_optimizer": (), "cpu_full": (), "nvme": ("it is an overlay",)}
    # Only a row that would train with FusedAdam trains without it.
    plan = plan_of(fakes.options("zero", "--stages", "2", "--axis", "optimizer=torch_adamw,lion,muon"))
    config = {**plan.trials[0].ds_config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    broken = trial_planner.RunFacts(op_states=BROKEN_FUSED)
    (changed,) = trial_planner.complete([replace(plan.trials[0], ds_config=config)], broken)
    assert changed.ds_config["optimizer"]["params"]["torch_adam"] is True
    assert changed.caveats[-1] == Caveat(CaveatKind.TORCH_ADAM, {"reason": "no nvcc"})
    assert changed.unsupported is None
    assert len(plan.trials) == 3
    assert trial_planner.complete(plan.trials, broken) == plan.trials


def test_variables_of_env_reach_the_ranks_over_what_this_program_sets() -> None:
    options = fakes.options("zero", "--env", "NCCL_SOCKET_IFNAME=eth0", "--env", "MINE=a=b", "--env", "NAMED")
    options = replace(options, env=(*options.env, "PATH=/own"))  # this program puts the interpreter's before it
    machine = replace(fakes.machine(), variables={"NAMED": "own"})
    variables = trial_planner.make_run_plan([options], fakes.make_config, machine).variables
    assert (variables["NCCL_SOCKET_IFNAME"], variables["GLOO_SOCKET_IFNAME"], variables["MINE"]) == (
        "eth0",
        "lo",
        "a=b",
    )
    assert "NAMED" not in variables
    assert variables["PATH"] != "/own"


def test_predictions_follow_the_state_of_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that loses FusedAdam is predicted with torch's AdamW; one that cannot run loses its prediction."""
    monkeypatch.setattr(environment, "torch_built_for", {"cuda": "12.8"}.get)
    options = fakes.options("offload", "--strategies", "none", "cpu_optimizer", "--seq-length", "16", "--num-gpus", "1")
    capacity = trial_predictions.MemoryCapacity(gpu_bytes=None, host_bytes=None)
    profile = trial_predictions.profile_model(fakes.resolved_model(), 16, "cuda", dropout=0.0)
    assert not isinstance(profile, trial_predictions.Unpredicted)
    before = plan_of(options, cards=2).with_facts(profile=profile, memory=capacity)
    assert before.with_facts(op_states={}).trials == before.trials
    on_torch, offloaded = before.with_facts(op_states=BROKEN_FUSED).trials
    assert offloaded == before.trials[1]
    assert on_torch.ds_config["optimizer"]["params"]["torch_adam"] is True
    assert on_torch.prediction != before.trials[0].prediction  # its step takes temporary memory
    assert trial_predictions.attach_predictions([on_torch], profile, capacity, skip=False) == [on_torch]
    missing = {ops.CPU_ADAM: OpState(op=ops.CPU_ADAM, ready=False, reason="no g++")}
    kept, lost = before.with_facts(op_states=missing).trials
    assert kept == before.trials[0]
    assert (lost.prediction, lost.unsupported is None) == (None, False)


# ------------------------------------------------------------------ axes


def axis_rows_of(*arguments: str) -> dict[str, Trial]:
    return {trial.configuration.name: trial for trial in trials(fakes.options("zero", *arguments))}


def test_an_axis_makes_a_row_of_each_value_where_it_acts() -> None:
    rows = axis_rows_of("--stages", "0", "2", "--axis", "overlap_comm=true,false")
    assert list(rows) == ["zero0", "zero2+overlap_comm=true", "zero2+overlap_comm=false"]
    on = rows["zero2+overlap_comm=true"]
    assert on.ds_config["zero_optimization"]["overlap_comm"] is True
    assert (on.configuration.label, on.configuration.source) == ("ZeRO-2, overlap_comm on", "axis")
    assert on.configuration.axis_values == {"overlap_comm": "true"}
    states = axis_rows_of("--stages", "2", "--axis", "bf16_states=off,master,all")
    refused = reasons(list(states.values()))
    assert refused.keys() == {"zero2+bf16_states=master"}
    assert "need the optimizer offloaded" in refused["zero2+bf16_states=master"]


def test_axes_of_the_workload_change_it_and_the_batch_agrees() -> None:
    rows = axis_rows_of("--stages", "2", "--axis", "micro_batch=1,3", "--axis", "grad_accum=2")
    trial = rows["zero2+micro_batch=3+grad_accum=2"]
    assert (trial.workload.batch_size, trial.workload.grad_accum) == (3, 2)
    assert trial.ds_config["train_batch_size"] == 3 * 2 * trial.placement.num_gpus


def test_an_axis_is_refused_where_it_acts_in_no_row_or_a_flag_sets_the_same() -> None:
    for line, says in (
        ("--axis grad_accum=1,2 --grad-accum 4", "axis grad_accum and --grad-accum set the same thing"),
        ("--axis micro_batch=1,2 --batch-size auto", "axis micro_batch and --batch-size set the same thing"),
        ("--axis prefetch=1,2 --set zero_optimization.stage3_prefetch_bucket_size=1", "both set"),
        ("--axis pin_memory=true,false", "pin_memory applies only to rows of stages 1, 2 and 3"),
    ):
        with pytest.raises(UsageError, match=says):
            requested_rows.axis_notes(fakes.options("zero", *line.split()))
    # A setting that offloads every row lets an offload axis act.
    offload = "zero_optimization.offload_optimizer.device=cpu"
    options = fakes.options("zero", "--stages", "2", "--set", offload, "--axis", "pin_memory=true,false")
    assert requested_rows.axis_notes(options) == []
    rows = {trial.configuration.name: trial for trial in trials(options)}
    block = rows["zero2+pin_memory=false"].ds_config["zero_optimization"]["offload_optimizer"]
    assert block["pin_memory"] is False


def test_rows_that_train_alike_are_one_and_a_line_says_so() -> None:
    made = trials(fakes.options("zero", "--stages", "1", "--axis", "buffers=default", "--axis", "overlap_comm=false"))
    twin = replace(made[0], configuration=replace(made[0].configuration, name="twin", label="Twin"))
    assert requested_rows.equal_rows([*made, twin]) == {"twin": made[0].configuration}
    other = replace(twin, configuration=replace(twin.configuration, variables={"DS_PIN_MEMORY_BACKEND": "native"}))
    assert requested_rows.equal_rows([*made, other]) == {}
    assert work_key(other) != work_key(twin)
