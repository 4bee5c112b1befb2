"""The command lines people type: what parses, what it means, and the one line for what cannot be meant."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import pytest

from ds_bench.cli.arguments import build_parser, parse
from ds_bench.config.options import Family, Options
from ds_bench.errors import UsageError
from ds_bench.planner import with_row_names
from tests.support import fakes

BOTH: dict[str, Any] = {
    "--model": "gpt2",
    "--batch-size": 4,
    "--common-batch": False,
    "--seq-length": None,
    "--grad-accum": 1,
    "--num-steps": 20,
    "--warmup-steps": 5,
    "--precision": "auto",
    "--activation-checkpointing": False,
    "--checkpoint": False,
    "--checkpoint-path": None,
    "--optimizer": None,
    "--seed": 42,
    "--dropout": None,
    "--model-factory": None,
    "--trust-remote-code": False,
    "--strategies": None,
    "--configs": None,
    "--keep-batch": False,
    "--nvme-path": None,
    "--repeats": 1,
    "--axis": [],
    "--relative-to": None,
    "--goal": "balanced",
    "--export": None,
    "--num-gpus": None,
    "--accelerator": "auto",
    "--launcher": "auto",
    "--hostfile": None,
    "--include": None,
    "--exclude": None,
    "--host-command": None,
    "--env": [],
    "--master-addr": None,
    "--master-port": None,
    "--cpu-memory-limit": None,
    "--gpu-memory-limit": None,
    "--peak-tflops": None,
    "--vocab-size": None,
    "--data": None,
    "--data-dtype": None,
    "--data-workers": None,
    "--data-pin-memory": False,
    "--data-prefetch": 2,
    "--ds-config": None,
    "--set": [],
    "--profile": (),
    "--profile-steps": 2,
    "--profile-ranks": (0,),
    "--nsys-start": -1,
    "--nsys-end": -1,
    "--output-dir": Path("results"),
    "--timeout": 3600.0,
    "--stall-timeout": 600.0,
    "--resume": None,
    "--retry": "",
    "--shard": None,
    "--skip-predicted-oom": False,
    "--force": False,
    "--dry-run": False,
    "--print-recipe": False,
    "--format": "table",
    "--quiet": False,
    "--verbose": False,
    "--strict": False,
    "--monitor": None,
    "--local_rank": None,
    "--local-rank": None,
}
OWN: dict[Family, dict[str, Any]] = {"zero": {"--stages": None}, "offload": {"--stage": 3}}


@pytest.mark.parametrize("family", ["zero", "offload"])
def test_the_flag_set_and_its_defaults_are_frozen(family: Family) -> None:
    """A flag that changes its name or its default breaks what people have written down."""
    actions = [a for a in build_parser(family, "x")._actions if not isinstance(a, argparse._HelpAction)]
    assert {name: action.default for action in actions for name in action.option_strings} == {**BOTH, **OWN[family]}


def test_each_script_has_its_own_rows_where_no_flag_names_one() -> None:
    assert (zero("").stages, zero("").strategies) == ((0, 1, 2, 3), ())
    assert (offload("").stages, offload("").strategies) == ((), ("none", "cpu_optimizer", "cpu_full"))
    assert (zero("--strategies zero3_offload").stages, zero("--stages 2").strategies) == ((), ())


@pytest.mark.parametrize("family", ["zero", "offload"])
def test_every_flag_that_is_shown_has_a_help_text(family: Family) -> None:
    assert [action.option_strings for action in build_parser(family, "x")._actions if not action.help] == []


def zero(line: str) -> Options:
    return parse("zero", "zero_stage_comparison.py", shlex.split(line))


def offload(line: str) -> Options:
    return parse("offload", "offload_comparison.py", shlex.split(line))


# ------------------------------------------------------------------ lines that people type, word for word


def test_the_line_gpt2_with_batch_4() -> None:
    options = zero("--model gpt2 --batch-size 4")
    assert (options.model, options.batch_size, options.stages) == ("gpt2", 4, (0, 1, 2, 3))


def test_the_line_llama_2_with_batch_2() -> None:
    options = zero("--model meta-llama/Llama-2-7b-hf --batch-size 2")
    assert (options.model, options.batch_size) == ("meta-llama/Llama-2-7b-hf", 2)


def test_the_line_opt_with_everything() -> None:
    options = zero("--model facebook/opt-1.3b --batch-size 8 --seq-length 512 --num-steps 50 --stages 0 1 2 3")
    assert (options.model, options.batch_size, options.seq_length) == ("facebook/opt-1.3b", 8, 512)
    assert (options.num_steps, options.stages) == (50, (0, 1, 2, 3))


def test_the_line_with_more_steps() -> None:
    options = zero("--warmup-steps 10 --num-steps 50")
    assert (options.warmup_steps, options.num_steps, options.model) == (10, 50, "gpt2")


def test_the_line_offload_with_three_strategies() -> None:
    options = offload("--model gpt2 --batch-size 4 --strategies none cpu_optimizer cpu_full")
    assert options.strategies == ("none", "cpu_optimizer", "cpu_full")
    assert options.nvme_path is None


def test_the_line_offload_with_a_disk() -> None:
    options = offload(
        "--model meta-llama/Llama-2-7b-hf --batch-size 2 --nvme-path DIR --strategies none cpu_optimizer cpu_full nvme"
    )
    assert options.strategies == ("none", "cpu_optimizer", "cpu_full", "nvme")
    assert options.nvme_path == Path("DIR")


def test_the_shell_loops_over_gpt2_sizes(subtests: pytest.Subtests) -> None:
    for model in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        with subtests.test(model):
            assert offload(f"--model {model}").model == zero(f"--model {model}").model == model


# ------------------------------------------------------------------ flags by meaning


def test_no_flags_at_all_mean_the_documented_defaults() -> None:
    options = zero("")
    assert (options.model, options.batch_size, options.grad_accum) == ("gpt2", 4, 1)
    assert (options.num_steps, options.warmup_steps, options.output_dir) == (20, 5, Path("results"))
    assert options.seq_length is None  # 512, or fewer where the model has fewer: see test_plan
    assert offload("").strategies == ("none", "cpu_optimizer", "cpu_full")


def test_a_strategy_or_stage_named_twice_is_run_once_in_the_order_named() -> None:
    assert zero("--stages 2 0 2 0 1").stages == (2, 0, 1)
    assert offload("--strategies cpu_full none cpu_full").strategies == ("cpu_full", "none")


def test_settings_keep_their_order_and_repetition_since_the_last_one_decides() -> None:
    assert zero("--set a=1 --set a=2 --set a=1").set == ({"a": 1}, {"a": 2}, {"a": 1})


def test_a_retry_list_is_split_at_commas_and_trimmed() -> None:
    assert zero("--resume r --retry 'Timeout, OOM (host),,'").retry == ("Timeout", "OOM (host)")


def test_limits_in_gb_are_powers_of_two() -> None:
    options = zero("--cpu-memory-limit 1.5 --gpu-memory-limit 40")
    assert options.cpu_memory_limit_bytes == 1.5 * 2**30
    assert options.gpu_memory_limit_bytes == 40 * 2**30
    assert zero("").cpu_memory_limit_bytes is None


def test_a_model_of_ones_own_goes_under_its_own_name() -> None:
    options = zero("--model-factory my.models:build")
    assert (options.model, options.model_factory) == ("my.models:build", "my.models:build")


@pytest.mark.parametrize("flag", ["--local_rank=3", "--local-rank 3"])
def test_the_flag_a_launcher_adds_is_accepted_and_means_nothing(flag: str) -> None:
    assert zero(flag) == zero("")


@pytest.mark.parametrize("line", ["--help", "-h"])
def test_help_ends_well_and_shows_defaults_and_exit_codes(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        zero(line)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "default: 20" in text
    assert "130 interrupted" in text
    assert "local_rank" not in text


def test_options_cannot_be_changed_afterwards() -> None:
    options = zero("")
    with pytest.raises(AttributeError):
        options.model = "other"  # type: ignore[misc]


# ------------------------------------------------------------------ what cannot be meant


def test_a_bad_value_is_one_line_with_flag_value_and_remedy(subtests: pytest.Subtests) -> None:
    for line, flag, value in (
        ("--batch-size 0", "--batch-size", "'0'"),
        ("--batch-size -4", "--batch-size", "'-4'"),
        ("--batch-size 2.5", "--batch-size", "'2.5'"),
        ("--batch-size many", "--batch-size", "'many'"),
        ("--batch-size ''", "--batch-size", "''"),
        ("--seq-length 0", "--seq-length", "'0'"),
        ("--num-steps 0", "--num-steps", "'0'"),
        ("--warmup-steps -1", "--warmup-steps", "'-1'"),
        ("--grad-accum 0", "--grad-accum", "'0'"),
        ("--repeats 0", "--repeats", "'0'"),
        ("--num-gpus 0", "--num-gpus", "'0'"),
        ("--seed -1", "--seed", "'-1'"),
        ("--dropout 1", "--dropout", "'1'"),
        ("--stages 4", "--stages", "4"),
        ("--stages two", "--stages", "two"),
        ("--stages", "--stages", ""),
        ("--precision fp8", "--precision", "fp8"),
        ("--optimizer adamw", "--optimizer", "adamw"),
        ("--accelerator tpu", "--accelerator", "tpu"),
        ("--launcher slurm", "--launcher", "slurm"),
        ("--timeout 0", "--timeout", "'0'"),
        ("--timeout nan", "--timeout", "'nan'"),
        ("--timeout inf", "--timeout", "'inf'"),
        ("--stall-timeout soon", "--stall-timeout", "'soon'"),
        ("--cpu-memory-limit -1", "--cpu-memory-limit", "'-1'"),
        ("--gpu-memory-limit 0", "--gpu-memory-limit", "'0'"),
        ("--peak-tflops x", "--peak-tflops", "'x'"),
        ("--profile trace", "--profile", "trace"),
        ("--profile-steps 51", "--profile-steps", "'51'"),
        ("--profile-ranks -1", "--profile-ranks", "'-1'"),
        ("--model-factory models.build", "--model-factory", "'models.build'"),
        ("--model-factory :build", "--model-factory", "':build'"),
        ("--format csv", "--format", "csv"),
        ("--nvme-path ''", "--nvme-path", "an empty text is no path"),
        ("--output-dir ''", "--output-dir", "an empty text is no path"),
        ("--configs a.json ''", "--configs", "an empty text is no path"),
        ("--checkpoint-path ' '", "--checkpoint-path", "an empty text is no path"),
        ("--model", "--model", ""),
        ("--batch_size 4", "--batch_size", "4"),
        ("--batch 4", "--batch", "4"),
        ("--strategies cpu", "--strategies", "cpu"),
        ("gpt2", "gpt2", ""),
    ):
        with subtests.test(line):
            with pytest.raises(UsageError) as caught:
                zero(line)
            text = str(caught.value)
            assert flag in text
            assert value in text
            assert "see zero_stage_comparison.py --help" in text
            assert "\n" not in text
            assert caught.value.exit_code == 2


def test_a_strategy_that_does_not_exist_is_a_usage_error(subtests: pytest.Subtests) -> None:
    for line in ("--strategies cpu", "--strategies", "--stage 0", "--stages 0"):
        with subtests.test(line), pytest.raises(UsageError, match=r"offload_comparison\.py --help"):
            offload(line)


def test_two_flags_that_contradict_each_other_are_refused_with_the_way_out(subtests: pytest.Subtests) -> None:
    for line, said, remedy in (
        ("--quiet --verbose", "--quiet and --verbose together", "give one of them"),
        ("--retry OOM", "--retry without --resume", "add --resume RUN_DIR"),
        ("--launcher warm --hostfile h", "--launcher warm works on one node", "drop --hostfile"),
        ("--profile-steps 3", "--profile-steps or --profile-ranks without --profile", "add --profile torch"),
        (
            "--nsys-start 24",
            "record steps 24 to 26, but steps 0 to 24 are warm-up and measured",
            "more --profile-steps",
        ),
        ("--nsys-start 99", "--nsys-start 99 is beyond the last step, 26: steps 0 to 24 are", "more --profile-steps"),
        ("--nsys-end 27", "profilers observe 25 to 26", "more --profile-steps"),
        ("--nsys-start 26 --nsys-end 25", "record steps 26 to 25", "among these"),
    ):
        with subtests.test(line):
            with pytest.raises(UsageError) as caught:
                zero(line)
            assert said in str(caught.value)
            assert remedy in caught.value.remedy


def test_a_flag_is_never_guessed_from_its_beginning() -> None:
    """With abbreviations, adding a flag would change what an old line means."""
    with pytest.raises(UsageError, match="unrecognized arguments: --num-step"):
        zero("--num-step 5")


def test_the_fakes_go_the_same_way() -> None:
    assert fakes.options("zero", "--batch-size", "3").batch_size == 3


def test_a_row_may_be_named_by_its_strategy_or_its_stage() -> None:
    for text in ("2", "zero2", "ZeRO-2", "stage 2"):
        options = with_row_names(zero(f"--relative-to '{text}' --export '{text}'"))
        assert (options.relative_to, options.export) == ("zero2", "zero2")
    assert with_row_names(offload("--relative-to cpu_full")).relative_to == "cpu_full"


def test_a_row_that_is_not_compared_is_refused_with_those_that_are(subtests: pytest.Subtests) -> None:
    for options, rows in (
        (zero("--stages 1 2 --relative-to 0"), "one of zero1, zero2"),
        (zero("--export fastest"), "one of zero0, zero1, zero2, zero3"),
        (offload("--export nvme"), "one of none, cpu_optimizer, cpu_full"),
        (zero("--strategies ddp --stages 1 --export ddp"), "torch's own engine"),
    ):
        with subtests.test(rows=rows), pytest.raises(UsageError, match=rows):
            with_row_names(options)


def test_the_row_that_an_nvme_path_adds_can_be_exported(tmp_path: Path) -> None:
    assert with_row_names(offload(f"--nvme-path {tmp_path} --export nvme")).export == "nvme"


def test_a_misspelling_is_answered_with_what_was_meant(subtests: pytest.Subtests) -> None:
    for line, meant in (
        ("--bach-size 2", "--batch-size"),
        ("--stage 2", "--stages"),
        ("--precision bf61", "bf16"),
        ("--optimizer adamw", "AdamW"),
        ("--goal balance", "balanced"),
    ):
        with subtests.test(line):
            with pytest.raises(UsageError) as caught:
                parse("zero", "zero_stage_comparison.py", line.split())
            assert caught.value.remedy == f"did you mean {meant}? see zero_stage_comparison.py --help"


def test_a_window_for_nsys_adds_its_profiler_and_may_be_among_the_steps_after_the_measured_ones() -> None:
    asked = zero("--profile torch,torch --profile-steps 4 --nsys-start 26 --nsys-end 27").inspection
    assert (asked.profiles, list(asked.nsys_window(25))) == (("torch", "nsys"), [26, 27])
    assert list(zero("--profile nsys").inspection.nsys_window(25)) == [25, 26]


def test_values_of_a_list_may_be_separated_by_commas() -> None:
    assert parse("zero", "z", ["--stages", "1,2", "3"]).stages == (1, 2, 3)
    assert parse("offload", "o", ["--strategies", "none,cpu_full"]).strategies == ("none", "cpu_full")
    with pytest.raises(UsageError, match="--stages 7 is none of 0, 1, 2, 3"):
        parse("zero", "z", ["--stages", "1,7"])
