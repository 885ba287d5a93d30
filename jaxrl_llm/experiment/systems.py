"""The table of all systems, from records alone: experiment files, tests that name them, committed results."""

import json
import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
STATUSES = ("not started", "written", "tested", "run", "inconclusive", "not reproduced", "reproduced")
HEADER = """# Systems

Made by `python -m jaxrl_llm.experiment systems` from the files of this repository; a test compares. A status is read
off a record, never typed: *written*: there is an experiment file; *tested*: a test of its own names it, beyond the
contract that every file passes; *run*: a record without a judged claim; *reproduced*, *not reproduced* and
*inconclusive*: what the claim, as code, says of the committed record. A verdict speaks of the small embedded model and
task of that record, and of nothing larger.
"""


class System(NamedTuple):
    """One row of ``experiments/systems.tsv``; ``arxiv`` is empty where the paper's number is not known."""

    family: str
    slug: str
    title: str
    arxiv: str


def listed(root: pathlib.Path = ROOT) -> list[System]:
    """All systems, in the order of the list."""
    lines = (root / "experiments" / "systems.tsv").read_text().splitlines()[1:]
    return [System(*line.split("\t")) for line in lines]


def experiment_file(slug: str, root: pathlib.Path = ROOT) -> pathlib.Path | None:
    """Where the experiment of a system is, in whatever family folder."""
    files = sorted((root / "experiments").glob(f"*/{slug}.py"))
    return next((file for file in files if file.parent.name != "parts"), None)


def _has_test(family: str, slug: str, tests: dict[pathlib.Path, str]) -> bool:
    named = re.compile(rf"experiments[./]{family}[./]{slug}\b|from experiments\.{family} import [^\n]*\b{slug}\b")
    return any(path.stem == f"test_{slug}" or named.search(text) for path, text in tests.items())


def status(system: System, tests: dict[pathlib.Path, str], root: pathlib.Path = ROOT) -> tuple[str, str]:
    """The status of a system and what it rests on.

    Args:
      tests: the text of every test file.
    """
    file = experiment_file(system.slug, root)
    if file is None:
        return "not started", ""
    family = file.parent.name
    record = root / "results" / family / f"{system.slug}.json"
    if record.is_file():
        found = json.loads(record.read_text())
        seeds = min(len(arm["seeds"]) for arm in found["arms"].values())
        basis = f"{len(found['arms'])} arms, {seeds} seeds"
        claim = found["claim"]
        if not claim["parts"]:
            return "run", basis
        return claim["verdict"], f"{basis}, confidence {claim['confidence']:.2f}"
    return ("tested" if _has_test(family, system.slug, tests) else "written"), ""


def _row(system: System, state: str, basis: str, root: pathlib.Path) -> str:
    file = experiment_file(system.slug, root)
    name = f"`{system.slug}`" if file is None else f"[`{system.slug}`](../{file.relative_to(root)})"
    link = f" [{system.arxiv}](https://arxiv.org/abs/{system.arxiv})" if system.arxiv else ""
    said = f"**{state}** ({basis})" if basis else state
    title = system.title.replace("|", "\\|")
    return f"| {name} | {title}{link} | {said} |"


def render(root: pathlib.Path = ROOT) -> str:
    """The whole page as Markdown."""
    tests = {path: path.read_text() for path in sorted((root / "tests").rglob("*.py"))}
    systems = listed(root)
    states = {system.slug: status(system, tests, root) for system in systems}
    counts = {name: sum(state == name for state, _ in states.values()) for name in STATUSES}
    total = ", ".join(f"{count} {name}" for name, count in reversed(counts.items()) if count)
    lines = [HEADER, f"{len(systems)} systems: {total}."]
    for family in dict.fromkeys(system.family for system in systems):
        lines += ["", f"## {family.replace('_', ' ').capitalize()}", "", "| system | paper | status |", "|---|---|---|"]
        lines += [_row(s, *states[s.slug], root) for s in systems if s.family == family]
    return "\n".join(lines) + "\n"


def write(root: pathlib.Path = ROOT) -> pathlib.Path:
    """Writes ``docs/SYSTEMS.md``."""
    path = root / "docs" / "SYSTEMS.md"
    path.write_text(render(root))
    return path
