"""The commands ``run``, which runs a recipe's comparison at every point of its sweep, and ``model-size``.

Flags override the recipe, and no recipe is needed: ``run --model tiny --strategies all``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import axis_rows, recipe_file
from ..config.deepspeed_config import paths_of
from ..config.deepspeed_keys import top_level_keys
from ..config.options import OPTIONS, Options
from ..config.recipe import PATHS, Recipe, Values, check_recipe, config_maker, options_of
from ..config.recipe_file import RecipeText
from ..config.sweep import MAX_TRIALS, Point, Sweep, find_sweep
from ..config.training_script import reject_workload_keys
from ..errors import UsageError
from ..records.run_folder import RunFolder
from ..system import invocation, terminal
from ..system.redaction import REDACTED, redacted_arguments
from .arguments import split_names
from .commands import SIZES

_RUN_FLAGS = ("resume", "shard", "dry_run", "format", "quiet", "verbose", "strict")


def run_command(
    *,
    recipe: Path | None = None,
    config: Path | None = None,
    settings: Sequence[str] = (),
    budget: float | None = None,
    yes: bool = False,
    typed: Sequence[str] = (),
    begun: Callable[[Path], None] = lambda _folder: None,
    **flags: Any,
) -> int:
    """Run a recipe and return the exit code. ``flags``: the scripts' flags that were typed.

    ``typed``: the words of the command line. ``begun``: see ``runner.run_comparison``.
    """
    if None not in (recipe, config):
        raise UsageError(f"two recipes: {recipe} and --config {config}", remedy="give one recipe")
    recipe = recipe or config
    text, stored_arguments = _recipe_text(recipe, typed, flags)
    for path, value in _given_values(settings, flags):
        text = recipe_file.with_value(text, path, value)
    if "script" in flags and not flags["script"]:
        raise UsageError("-- without a script", remedy="give -- SCRIPT.py and its arguments")
    if text.data.get("script"):
        flag_of_path = {path: OPTIONS[name].flag or path for name, path in PATHS.items() if name in flags}
        reject_workload_keys([path for path, value in paths_of(text.data) if value is not None], flag_of_path)
    sweep = find_sweep(text)
    if "print_recipe" in flags:
        check_recipe(text, sweep.data_of(sweep.first_point))
        terminal.print_text(recipe_file.yaml_text(text.data).rstrip())
        return 0
    run_flags = {name: flags[name] for name in _RUN_FLAGS if name in flags}
    run_flags |= {
        "budget": budget,
        "retry": split_names(flags.get("retry", "")),
        # With a recipe, errors name its keys instead of flags that the user has not typed.
        "typed": None if recipe is None else frozenset(flags),
    }
    points, first = _points(text, sweep, run_flags, allow_many=yes)
    if "resume" in flags and recipe is None:
        from ..analysis.provenance import flags_to_repeat, resume_command

        # The folder may come from somebody else, so it must neither run code nor reach other machines.
        again = {*flags, *(setting.partition("=")[0] for setting in settings)}
        repeated = [flags_to_repeat(each) for each in points]
        needed = {name: words for each in repeated for name, words in each.items() if name not in again}
        if needed:
            # Points of a sweep may need different flags, which only a recipe can give.
            same = all(each == repeated[0] for each in repeated)
            remedy = str(resume_command(points[0], flags["resume"])) if same else _resume_command(flags["resume"])
            raise UsageError(
                f"--resume {flags['resume']}: a run folder may not run code or reach other machines on its own; this "
                f"one requests {', '.join(map(shlex.join, needed.values()))}",
                remedy=f"if you trust it, give {'them' if same else 'its recipe'} again: {remedy}",
            )
    # Imported here, since printing a recipe needs neither.
    from .script import runs_comparison

    if not runs_comparison(points[0]):
        # Another process of the launcher runs the comparison.
        return 0
    from ..runner import run_comparison

    # A closed standard error (2>&1 | head) must not end a run that may take hours.
    with terminal.ignoring_broken_stderr():
        arguments = redacted_arguments(stored_arguments)
        return run_comparison(points, config_maker(first), arguments, text.to_stored(), begun)


def _points(
    text: RecipeText, sweep: Sweep, run_flags: dict[str, Any], *, allow_many: bool
) -> tuple[list[Options], Values]:
    """Return the Options of every point and the recipe of the first.

    Raises UsageError for more than ``MAX_TRIALS`` trials, unless ``allow_many``.
    """

    def options_at(point: Point) -> tuple[Values, Options]:
        recipe = check_recipe(text, sweep.data_of(point))
        return recipe, options_of(recipe, text.folder, point=tuple(point.items()), **run_flags).checked()

    # Make only the first point and count its rows, to refuse a sweep that is too large before making all its points.
    first, options = options_at(sweep.first_point)
    from ..planning.requested_rows import requested_rows, with_files

    # All points have the same files.
    options = with_files(options)
    run_flags |= {"files": options.files, "file_lines": options.file_lines, "base_file": options.base_file}
    trials = sweep.max_points * len(requested_rows(options)) * options.repeats
    if trials > MAX_TRIALS and not allow_many:
        problem = f"this recipe makes {trials:,} trials: {sweep.max_points:,} points, each with every row and repeat"
        raise UsageError(problem, remedy="shorten its lists, or add --yes if that is intended")
    return [options_at(point)[1] for point in sweep.points()], first


def _given_values(settings: Sequence[str], flags: Mapping[str, Any]) -> list[tuple[recipe_file.KeyPath, Any]]:
    """Return the key path and value of every flag that overrides the recipe, ``--set`` last."""
    given: list[tuple[recipe_file.KeyPath, Any]] = []
    for name, path in PATHS.items():
        if name in flags:
            if name == "seq_length":  # a recipe may have it in either place
                given.append((("dataset", "seq_len"), None))
            given.append((tuple(path.split(".")), _from_current_folder(name, flags[name])))
    for axis in axis_rows.read_axes(flags.get("axes", ())):
        given.append((("axes", axis[0].axis_name), [value.text for value in axis]))
    for keys, value in map(recipe_file.parse_setting, settings):
        # Remedies name DeepSpeed's keys in the form of the scripts' --set.
        of_deepspeed = keys[0] in top_level_keys() and keys[0] not in Recipe.model_fields
        given.append((("configurations", "deepspeed", *keys) if of_deepspeed else keys, value))
    return given


def _from_current_folder(name: str, value: Any) -> Any:
    """Return a flag's value as it would appear in a recipe.

    Paths in a recipe are relative to its folder, paths in a flag to the current folder.
    """
    if isinstance(value, tuple):
        return [_from_current_folder(name, item) for item in value]
    if isinstance(value, Path):
        return str(value.absolute() if name in ("hostfile", "configs", "data", "base_config") else value)
    return value


# ------------------------------------------------------------------ what a run keeps of its recipe


def _recipe_text(recipe: Path | None, typed: Sequence[str], flags: dict[str, Any]) -> tuple[RecipeText, Sequence[str]]:
    """Return the recipe and the arguments to store with the run: on ``--resume``, those that it began with.

    A resumed shard stays that shard unless ``flags`` name one; otherwise the trials of all other shards would run too.
    """
    given = RecipeText(name="", folder=Path(), data={}) if recipe is None else recipe_file.read_recipe(recipe)
    if (folder := flags.get("resume")) is None:
        return given, typed
    earlier = RunFolder.open(folder).load_run()
    if earlier.shard is not None:
        flags.setdefault("shard", earlier.shard)
    stored = earlier.recipe
    if not isinstance(stored.get("values"), dict):
        raise UsageError(
            f"--resume {folder} was started by a comparison script", remedy="use the script that started it"
        )
    if recipe is not None:
        return given, earlier.arguments
    # The placeholder would make the run continue with a different value than it began with.
    if REDACTED in str(stored):
        raise UsageError(
            f"--resume {folder}: values that may be credentials were not kept",
            remedy=f"give its recipe again: {_resume_command(folder)}",
        )
    return RecipeText.of_stored(stored), earlier.arguments


def _resume_command(folder: Path) -> str:
    return invocation.command("run", "RECIPE", "--resume", str(folder))


# ------------------------------------------------------------------ model-size

_KEYS_OF_SIZES = {
    "context_length": "training.seq_len",
    "batch_size": "training.local_batch_size",
    "measure_steps": "training.steps",
    "warmup_steps": "training.warmup_steps",
    "precision": "training.precision",
    "device": "launch.accelerator",
    "timeout": "launch.timeout",
    "output_dir": "output.dir",
    "output": "output.csv",
}
"""Flag of ``model-size`` → the recipe key that it sets."""


def time_sizes(
    *, model_size: Sequence[str] | None, model_sizes: Sequence[str] | None, pass_type: Sequence[str], dry_run: bool,
    **flags: Any,
) -> int:  # fmt: skip
    """Run the recipe that the flags of ``model-size`` describe. Return the exit code.

    Every combination of a size and a pass type is a point of a sweep, with one trial.
    """
    names = [f"size-{size.lower()}" for size in dict.fromkeys(model_size or model_sizes or SIZES[:1])]
    passes = list(dict.fromkeys(pass_type))
    values: dict[str, Any] = {
        "model.name": names if len(names) > 1 else names[0],
        "training.pass_type": passes if len(passes) > 1 else passes[0],
        # One row on one rank at stage 0, where nothing is sharded or communicated.
        "configurations.stages": [0],
        "launch.num_gpus": 1,
        **({"training.synchronized": False} if flags["no_sync"] else {}),
        **({"launch.force": True} if flags["force"] else {}),
        **{key: flags[flag] for flag, key in _KEYS_OF_SIZES.items() if flags[flag] is not None},
    }
    settings = [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()]
    typed = [word for setting in settings for word in ("--set", setting)]
    run_flags: dict[str, Any] = {"dry_run": True} if dry_run else {}
    return run_command(settings=settings, typed=typed, yes=True, **run_flags)
