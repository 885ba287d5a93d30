"""The table of all systems, from records alone: experiment files, tests that name them, committed results."""

import collections
import json
import pathlib
import re
from typing import Any, NamedTuple

from jaxrl_llm.experiment.evidence import pilot, records, verdicts

ROOT = pathlib.Path(__file__).resolve().parents[3]
STATUSES = ("not started", "written", "tested")
HEADER = """# Systems

Made by `python -m jaxrl_llm.experiment pages` from the files of this repository; a test compares. Nothing here is
typed but *mechanism*, which is stated in `experiments/systems.tsv`: whether the file has the whole method of its
paper, or what it lacks. *pilot*: whether two minutes of training say that a record could show an effect, and its
estimated processor minutes up to the first look (`results/pilots.tsv`). *record*: of the standard, of the old
instrument, or none; *not tuned*: arms of the primary part of one of them trained at a rate that nobody chose by
trying. *written*: there is an experiment file; *tested*: a test of its own names it, beyond the contract that every
file passes. A verdict is what the one primary part of a claim, as code, says of the committed record: *supported*
(beyond zero in the paper's direction, on two tasks or base models), *supported here* (on one; a second one, `--bed
NAME`, costs processor hours and has not been run, or shows no effect), *contradicted* (beyond zero in the other
direction; of a claim with a margin: short of it), *no practical effect* (the whole interval within d*, the smallest
effect of interest), *undecided* (also of two records of which one supports and one contradicts), *test bed invalid*
(the baseline does not learn, unlearns, or leaves no room: whatever the parts say).
*withdrawn* verdicts do not stand, for the reason given. *old instrument*: the record was made before the standard
(narrow evaluation, eight seeds, no tuning, nothing fixed before the first seed) and was judged again without runs. A
verdict speaks of the small embedded model and task of that record, and of nothing larger. *Embedded only*: takes
neither a model nor rows of one's own, for the reason given.
"""


class System(NamedTuple):
    """One row of ``experiments/systems.tsv``; ``arxiv`` is empty where the paper's number is not known.

    ``mechanism``: ``complete``, or what the file lacks of its paper's method; empty where nobody has looked.
    """

    family: str
    slug: str
    title: str
    arxiv: str
    mechanism: str = ""


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


def record_files(family: str, slug: str, root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """Where the records of one paper lie: on the file's own bed first, which may not be there, then on others."""
    folder = root / "results" / family
    return [folder / f"{slug}.json", *sorted(folder.glob(f"{slug}@*.json"))]


def records_of(family: str, slug: str, root: pathlib.Path = ROOT) -> list[dict[str, Any]]:
    """The committed records of one paper: on the file's own bed first, then on others."""
    files = record_files(family, slug, root)
    return [json.loads(path.read_text()) for path in files if path.is_file()]


def verdict_of(found: list[dict[str, Any]]) -> str:
    """The verdict over all records; those of the old instrument count only where there is no other."""
    fresh = [record for record in found if not records.is_old(record)]
    said = [record["claim"]["verdict"] for record in fresh or found[:1]]
    return verdicts.across(said)


def effect(record: dict[str, Any]) -> str:
    """What the primary part says in numbers, and what is wrong with the bed."""
    claim = records.read_claim(record)
    seeds = min(len(arm["seeds"]) for arm in record["arms"].values())
    if claim.primary is None:
        return f"{len(record['arms'])} arms, {seeds} seeds"
    said = f"{claim.primary}{records.less_than_claimed(claim.primary)}".replace("|", "\\|")
    return said + "".join(f"; {problem}" for problem in claim.bed[:1])


def status(system: System, tests: dict[pathlib.Path, str], root: pathlib.Path = ROOT) -> tuple[str, str]:
    """The status of a system and what it rests on.

    Args:
      tests: the text of every test file.
    """
    file = experiment_file(system.slug, root)
    if file is None:
        return "not started", ""
    found = records_of(file.parent.name, system.slug, root)
    if not found:
        return ("tested" if _has_test(file.parent.name, system.slug, tests) else "written"), ""
    old = f" ({records.OLD})" if all(map(records.is_old, found)) else ""
    return f"{verdict_of(found)}{old}", "; ".join(map(effect, found))


def embedded_only(file: pathlib.Path) -> str:
    """Why an experiment takes neither a model nor rows of one's own; empty where it does."""
    found = re.search(r'^EMBEDDED_ONLY = "(.*)"$', file.read_text(), re.MULTILINE)
    return found[1] if found else ""


def mechanism(system: System) -> str:
    """What is stated of the method of a file."""
    return system.mechanism.replace("|", "\\|") or "not stated"


def piloted(name: str, rows: dict[str, dict[str, str]], found: list[dict[str, Any]]) -> str:
    """What the pilot of ``family/slug`` said: of the table of pilots, else of a record of the standard that stands."""
    if name in rows:
        row = rows[name]
        minutes = f"{row['processor minutes of a record']} min"
        return f"says no ({minutes}): {row['problem']}".replace("|", "\\|") if row["problem"] else f"passes ({minutes})"
    said = [(record.get("instrument") or {}).get("pilot") for record in records.standing(found)]
    if not any(said):
        return "none"
    problem = next(one for one in said if one)["problems"][:1]
    return f"says no: {problem[0]}".replace("|", "\\|") if problem else "passes"


def recorded(found: list[dict[str, Any]]) -> str:
    """Which records there are: under the standard, of the old instrument, or none."""
    fresh = [record for record in found if not records.is_old(record)]
    if fresh:
        kind = "under the standard, not tuned" if any(map(records.untuned, fresh)) else "under the standard"
        return f"{len(fresh)} {kind}" if len(fresh) > 1 else kind
    return records.OLD if found else "none"


def _row(system: System, state: str, basis: str, root: pathlib.Path, pilots: dict[str, dict[str, str]]) -> str:
    file = experiment_file(system.slug, root)
    name = f"`{system.slug}`" if file is None else f"[`{system.slug}`](../{file.relative_to(root)})"
    link = f" [{system.arxiv}](https://arxiv.org/abs/{system.arxiv})" if system.arxiv else ""
    said = f"**{state}**: {basis}" if basis else state
    if file is not None and (why := embedded_only(file)):
        said += f"; embedded only: {why}"
    title = system.title.replace("|", "\\|")
    if file is None:
        return f"| {name} | {title}{link} | | | | {said} |"
    found = records_of(file.parent.name, system.slug, root)
    there = f"{piloted(f'{file.parent.name}/{system.slug}', pilots, found)} | {recorded(found)}"
    return f"| {name} | {title}{link} | {mechanism(system)} | {there} | {said} |"


def certified(root: pathlib.Path = ROOT) -> list[str]:
    """The certificates of test beds as a table; nothing where there is none."""
    rows = []
    for path in sorted((root / "results" / "beds").glob("*.certificate.json")):
        kept = json.loads(path.read_text())
        state = "certified" if kept["certified"] else "not certified"
        metric, file = kept["metric"], f"experiments/beds/{kept['bed']}.py"
        doses = ", ".join(f"{row['dose']:g}: {row['mean']:.3f}" for row in kept["dose_response"]) or "none"
        controls = "; ".join(
            f"{one['name']} {one['bounds']['mean']:+.3f} [{one['bounds']['low']:+.3f}, {one['bounds']['high']:+.3f}]"
            for one in kept["controls"]
        )
        problem = "".join(f"; {text}" for text in kept["problems"][:1])
        rows.append(
            f"| [`{kept['bed']}`](../{file}) | {kept['knob']} | {kept['base'][metric]:.3f} to {kept['end']:.3f} | "
            f"{doses} | {controls} | **{state}** on {kept['seeds']} seeds{problem} |"
        )
    if not rows:
        return []
    head = "Made by `python -m jaxrl_llm.experiment certify`: the healthy arm, the response to the dose, the controls."
    columns = "| bed | knob | healthy, start to end | mean by dose | controls | certificate |"
    return ["", "## Test beds", "", head, "", columns, "|---|---|---|---|---|---|", *rows]


def bases(root: pathlib.Path = ROOT) -> list[str]:
    """What the base models can do before any reinforcement learning, by task and level; nothing without a record."""
    models = {path.stem: json.loads(path.read_text()) for path in (root / "results" / "pretrain_base").glob("*.json")}
    models = dict(sorted(models.items(), key=lambda item: (item[1]["parameters"], item[0])))
    if not models:
        return []

    def cell(name: str, task: str, level: str) -> str:
        found = models[name]["accuracy"].get(task)
        found = found["levels"].get(level) if found and level else found
        if not found:
            return ""
        one, many = found["pass@1"], found["pass@8"]
        return f"{one['mean']:.2f} [{one['low']:.2f}, {one['high']:.2f}], {many['mean']:.2f} (n={one['n']})"

    tasks = {task: found["levels"] for model in models.values() for task, found in model["accuracy"].items()}
    rows = []
    for task, levels in tasks.items():
        for level in ("", *levels):
            cells = " | ".join(cell(name, task, level) for name in models)
            rows.append(f"| {task} | {level or 'all'} | {cells} |")
    head = "Made by `python -m experiments.pretrain_base`: pass@1 with its interval over problems, and pass@8, before"
    names = " | ".join(f"{name} ({model['parameters']:,} parameters)" for name, model in models.items())
    columns = f"| task | level | {names} |\n|---|---|{'---|' * len(models)}"
    return ["", "## Base models", "", head + "\nany reinforcement learning.", "", columns, *rows]


def render(root: pathlib.Path = ROOT) -> str:
    """The whole page as Markdown."""
    tests = {path: path.read_text() for path in sorted((root / "tests").rglob("*.py"))}
    systems, pilots = listed(root), pilot.kept_at(root)
    states = {system.slug: status(system, tests, root) for system in systems}
    tally = collections.Counter(state for state, _ in states.values())
    known = [*verdicts.VERDICTS, *(f"{v} ({records.OLD})" for v in verdicts.VERDICTS), *reversed(STATUSES)]
    total = ", ".join(f"{tally[name]} {name}" for name in known if tally[name])
    lines = [HEADER, f"{len(systems)} systems: {total}."]
    for family in dict.fromkeys(system.family for system in systems):
        lines += ["", f"## {family.replace('_', ' ').capitalize()}", ""]
        lines += ["| system | paper | mechanism | pilot | record | status |", "|---|---|---|---|---|---|"]
        lines += [_row(s, *states[s.slug], root, pilots) for s in systems if s.family == family]
    return "\n".join([*lines, *certified(root), *bases(root)]) + "\n"


def write(root: pathlib.Path = ROOT) -> pathlib.Path:
    """Writes ``docs/SYSTEMS.md``."""
    path = root / "docs" / "SYSTEMS.md"
    path.write_text(render(root))
    return path
