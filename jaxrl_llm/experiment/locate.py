"""Where the experiments lie: beside the package in a checkout, inside it in an installed wheel; ``jaxrl run SLUG``."""

import difflib
import os
import pathlib
import sys
from collections.abc import Sequence

import jaxrl_llm
from jaxrl_llm.errors import UserError

USAGE = "usage: jaxrl run SLUG [--help], for example jaxrl run dr_grpo --smoke"


def root() -> pathlib.Path:
    """The folder that holds ``experiments``."""
    package = pathlib.Path(jaxrl_llm.__file__).resolve().parent
    shipped = package / "_checkout"
    return shipped if (shipped / "experiments").is_dir() else package.parent


def experiment_files() -> dict[str, pathlib.Path]:
    """Every experiment by its slug."""
    files = sorted((root() / "experiments").glob("*/*.py"))
    return {path.stem: path for path in files if not (path.stem.startswith("_") or path.parent.name == "parts")}


def find(word: str) -> pathlib.Path:
    """The file of ``dr_grpo``, ``policy_gradient/dr_grpo``, ``experiments.policy_gradient.dr_grpo`` or a path.

    Raises:
      UserError: where there is none; names the nearest.
    """
    if word.endswith(".py"):
        path = pathlib.Path(word)
        found = path if path.is_file() else root() / path
    else:
        files = experiment_files()
        *_, slug = word.replace(".", "/").split("/")
        near = difflib.get_close_matches(slug, files, 1)
        if slug not in files:
            hint = f"did you mean {near[0]}?" if near else "docs/SYSTEMS.md lists all"
            raise UserError(f"no experiment {word!r}; {hint}" if files else "this installation has no experiments")
        found = files[slug]
    if not found.is_file():
        raise UserError(f"{word} does not exist; give a slug (dr_grpo) or experiments/FAMILY/SLUG.py")
    return found


def run(arguments: Sequence[str]) -> int:
    """``jaxrl run SLUG [flags]``: what ``python -m experiments.FAMILY.SLUG [flags]`` does in a checkout."""
    from jaxrl_llm.experiment import cli, doctor  # which need jax: not for a list of names

    if not arguments or arguments[0] in ("--help", "-h"):
        print(f"{USAGE}\nexperiments: {', '.join(experiment_files())}")
        return 0 if arguments else 2
    try:
        path = find(arguments[0])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    module = doctor.load(path)
    folders = [str(root()), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)  # workers that it starts import it by name
    cli.main(module.__name__, list(arguments[1:]))
    return 0
