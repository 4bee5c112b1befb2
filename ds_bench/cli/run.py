"""The command ``run``: compares what a recipe asks for, at every point of its sweep.

Flags replace values of the recipe, so that a recipe is not needed: ``run --model tiny --strategies all``.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..config import recipe_file, sweep
from ..config.deepspeed_keys import top_level_keys
from ..config.options import FLAGS, Options
from ..config.recipe import PATHS, Recipe, Values, check_recipe, config_maker, options_of, yaml_text
from ..config.recipe_file import Data, RecipeText
from ..errors import DsBenchError, UsageError
from ..records.run_folder import RunFolder
from ..system import invocation, terminal
from ..system.redaction import REDACTED, redacted_arguments, redacted_config
from . import arguments
from .argument_types import split_names

_RUN_FLAGS = ("resume", "shard", "dry_run", "format", "quiet", "verbose", "strict")


def run_command(values: argparse.Namespace, begun: Callable[[Path], None] = lambda _folder: None) -> int:
    """Runs a recipe and returns the exit code. ``values``: the parsed flags, of the scripts' only those given.

    ``begun``: see ``runner.run_comparison``.
    """
    text, stored_arguments = _recipe_text(values)
    for path, value in _given_values(values):
        text = recipe_file.with_value(text, path, value)
    asked = sweep.find_sweep(text)
    # Flags over a recipe have no default (argparse.SUPPRESS): an attribute exists only where its flag was typed.
    if hasattr(values, "print_recipe"):
        check_recipe(text, asked.data_of(asked.first_point))
        terminal.print_text(yaml_text(text.data).rstrip())
        return 0
    try:
        points, recipe = _points(text, asked, values)
        if hasattr(values, "resume") and values.recipe is None:
            _require_given_again(points, values)
        # Imported here, since printing a recipe needs neither of the two.
        from .launched import runs_comparison

        if not runs_comparison(points[0]):
            # Another process of the launcher runs the comparison.
            return 0
        from ..runner import run_comparison

        # A standard error that is closed (2>&1 | head) must not end a run that may take hours.
        with terminal.ignoring_broken_stderr():
            arguments_kept = redacted_arguments(stored_arguments)
            return run_comparison(points, config_maker(recipe), arguments_kept, _stored(text), begun)
    except DsBenchError as error:
        # With a recipe, errors name its keys: a flag in the remedy would be none that the user has typed.
        raise (error if values.recipe is None else _in_words_of_recipe(error, text, values)) from None


def _in_words_of_recipe(error: DsBenchError, text: RecipeText, values: argparse.Namespace) -> DsBenchError:
    """The error with the key path of each value in place of the flag that a script has for it, unless it was typed."""

    def replace_flag(match: re.Match[str]) -> str:
        name = FLAGS.get(match["flag"], "")
        if name == "axes":
            return match[0] if hasattr(values, "axes") else f"axes.{match['word']}"
        # Flags for which PATHS has no key, or not the one that this recipe uses.
        elsewhere = {"set": "configurations.deepspeed or optimizer.params", "seq_length": _given_length(text)}
        path = elsewhere.get(name, PATHS.get(name))
        was_typed = hasattr(values, name) and name != "set"
        return match[0] if path is None or was_typed else path + match["rest"]

    problem, remedy = (_FLAG.sub(replace_flag, part) for part in (error.problem, error.remedy))
    return type(error)(problem, remedy=remedy)


_FLAG = re.compile(r"(?P<flag>--[a-z][a-z-]*[a-z])(?P<rest> (?P<word>[^ ]+)|)")


def _given_length(text: RecipeText) -> str:
    """The key path that gives the length of a sequence."""
    dataset = text.data.get("dataset")
    return "dataset.seq_len" if isinstance(dataset, dict) and "seq_len" in dataset else PATHS["seq_length"]


def _points(text: RecipeText, asked: sweep.Sweep, values: argparse.Namespace) -> tuple[list[Options], Values]:
    """Return the Options of every point and the recipe of the first.

    Raises UsageError for more trials than is usual.
    """
    flags = {name: getattr(values, name) for name in _RUN_FLAGS if hasattr(values, name)}
    flags["budget"] = values.budget
    flags["retry"] = split_names(getattr(values, "retry", ""))

    def options_at(point: sweep.Values) -> tuple[Values, Options]:
        recipe = check_recipe(text, asked.data_of(point))
        return recipe, arguments.check_options(options_of(recipe, text.folder, point=tuple(point.items()), **flags))

    # The first point is made alone and its rows are counted, so that too large a sweep is refused before all its
    # points are made.
    first, options = options_at(asked.first_point)
    from ..planner import requested_rows, with_files

    # All points have the same files.
    options = with_files(options)
    flags |= {"files": options.files, "file_lines": options.file_lines}
    rows = len(requested_rows(options))
    trials = asked.most_points * rows * options.repeats
    if trials > sweep.MOST_TRIALS and not values.yes:
        problem = f"this recipe makes {trials:,} trials: {asked.most_points:,} points, each with every row and repeat"
        raise UsageError(problem, remedy="shorten its lists, or add --yes if that is meant")
    return [options_at(point)[1] for point in asked.points()], first


def _given_values(values: argparse.Namespace) -> list[tuple[recipe_file.KeyPath, Any]]:
    """The key path and the value of every flag that replaces a value of the recipe, those of ``--set`` last."""
    given: list[tuple[recipe_file.KeyPath, Any]] = []
    for name, path in PATHS.items():
        if hasattr(values, name):
            if name == "seq_length":  # which a recipe may have in either place
                given.append((("dataset", "seq_len"), None))
            given.append((tuple(path.split(".")), _from_current_folder(name, getattr(values, name))))
    for text in getattr(values, "axes", ()):
        name, _, texts = text.partition("=")
        given.append((("axes", name), texts.split(",")))
    for keys, value in map(recipe_file.parse_setting, values.set):
        # Printed remedies name DeepSpeed's keys as --set of the scripts does.
        of_deepspeed = keys[0] in top_level_keys() and keys[0] not in Recipe.model_fields
        given.append((("configurations", "deepspeed", *keys) if of_deepspeed else keys, value))
    return given


def _from_current_folder(name: str, value: Any) -> Any:
    """The value of a flag as a recipe has it. Files that a recipe names are relative to it, those of a flag are not."""
    if isinstance(value, list):
        return [_from_current_folder(name, item) for item in value]
    if isinstance(value, Path):
        return str(value.absolute() if name in ("hostfile", "configs", "data") else value)
    return value


# ------------------------------------------------------------------ what a run keeps of its recipe


def _stored(text: RecipeText) -> Data:
    """What run.json keeps of the recipe, for ``--resume`` and reports; credentials are redacted."""
    values = {section: keys for section, keys in text.data.items() if section != "output"}
    output = text.data.get("output")
    if isinstance(output, dict):
        values["output"] = {key: value for key, value in output.items() if key != "dir"}  # the run's folder tells it
    return {"name": text.name, "folder": str(text.folder.absolute()), "values": redacted_config(values)}


def _recipe_text(values: argparse.Namespace) -> tuple[RecipeText, Sequence[str]]:
    """The recipe, and the arguments to store with the run: on ``--resume`` those that it began with."""
    given = RecipeText(name="", folder=Path(), data={})
    if values.recipe is not None:
        given = recipe_file.read_recipe(values.recipe)
    if getattr(values, "resume", None) is None:
        return given, values.typed
    earlier = RunFolder.open(values.resume).load_run()
    # A resumed shard stays that shard, unless a flag names one: otherwise it would run the trials of all others too.
    if earlier.shard is not None and not hasattr(values, "shard"):
        values.shard = earlier.shard
    stored, flags = earlier.recipe, earlier.arguments
    if not isinstance(stored.get("values"), dict):
        raise UsageError(f"--resume {values.resume} is of a script", remedy="use the script that started it")
    if values.recipe is not None:
        return given, flags
    # With the placeholder in its place the run would go on with another value than it began with.
    if REDACTED in str(stored):
        raise UsageError(
            f"--resume {values.resume}: it has values that may be credentials, which were not kept",
            remedy=f"give its recipe again: {_resume_command(values.resume)}",
        )
    return RecipeText(name="", folder=Path(str(stored.get("folder"))), data=stored["values"]), flags


def _resume_command(folder: Path) -> str:
    return invocation.command("run", "RECIPE", "--resume", str(folder))


def _require_given_again(points: Sequence[Options], values: argparse.Namespace) -> None:
    """Raises UsageError where the recipe that a run folder holds starts code or other machines.

    The folder may come from somebody else.
    """
    from ..analysis.provenance import flags_to_repeat

    needed: dict[str, list[str]] = {}
    for options in points:
        needed |= {name: words for name, words in flags_to_repeat(options).items() if not hasattr(values, name)}
    if needed:
        raise UsageError(
            f"--resume {values.resume}: a run folder alone does not start code or other machines: it asks for "
            f"{', '.join(map(shlex.join, needed.values()))}",
            remedy=f"if you trust it, give its recipe again: {_resume_command(values.resume)}",
        )
