"""One page a paper, from its experiment file and its records: claim, equations, arms, figure, verdict, cost, links."""

import os
import pathlib
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from jaxrl_llm.experiment import locate, results
from jaxrl_llm.experiment.arms import Times
from jaxrl_llm.experiment.claims import Judged
from jaxrl_llm.experiment.evidence import pilot, provenance, records, systems


def section(text: str, name: str) -> str:
    """A field of a docstring, such as ``Equations:``, without its indent."""
    found = re.search(rf"^{name}:[ \t]*(.*?)(?=^[A-Z][a-z ]+:[ \t]|\Z)", text, re.MULTILINE | re.DOTALL)
    return "\n".join(line.strip() for line in found.group(1).strip().splitlines()) if found else ""


def _arms(module: ModuleType) -> list[str]:
    rows = ["| arm | changes |", "|---|---|"]
    for name, changes in module.ARMS.items():
        shown = {field: str(value) if isinstance(value, Times) else value for field, value in changes.items()}
        text = ", ".join(f"`{k}` = `{v}`" for k, v in results.plain(shown).items()) or "nothing: the settings"
        rows.append(f"| {name} | {text.replace('|', chr(92) + '|')} |")
    return rows


def _cost(record: dict[str, Any]) -> str:
    found = record["arms"].values()
    hours = sum(arm["seconds"] for arm in found) / 3600
    return f"{records.caption(record)}; {hours:.2f} hours for all {len(found)} arms"


def _curves(tuned: dict[str, Any]) -> list[str]:
    """What was tried, by arm, and what was chosen."""
    tried = list(next(iter(tuned["curves"].values())))
    lines = ["", f"| arm | {' | '.join(tried)} | chosen |", "|---" * (len(tried) + 2) + "|"]
    for arm, row in tuned["curves"].items():
        # JSON has null for a seed that diverged: then the rate was none to choose
        cells = " | ".join("diverged" if None in v else f"{sum(v) / len(v):.4g}" for v in row.values())
        chosen = f"{tuned['best'][arm]:g}"
        ends = (
            ", the last of the grid" if chosen in (tried[0], tried[-1]) else ", the best alone is the last of the grid"
        )
        lines.append(f"| {arm} | {cells} | {chosen}{ends * (arm in tuned['at_the_edge'])} |")
    if beside := tuned.get("with_the_next"):
        lines += ["", f"A rate of {', '.join(beside)} counts as the mean of what it and the next higher one reach."]
    return lines


def _unlike(record: dict[str, Any], parts: Iterable[Judged]) -> list[str]:
    """Which parts compare arms at unlike learning rates, of which not both are tuned: the rate is in what they say."""
    rates = {name: arm["settings"].get("learning_rate") for name, arm in record["arms"].items() if arm.get("updates")}
    found = []
    for part in parts:
        one, two = rates.get(part.arm), rates.get(part.than)
        if one and two and one != two and not {part.arm, part.than} <= set(record["instrument"]["tuned"]["best"]):
            found.append(f"- {part.arm} at {one:g} against {part.than} at {two:g}, in {part.metric}")
    head = [
        "",
        "Parts whose arms trained at unlike rates, of which one was not tuned, so that they compare rates, too:",
    ]
    return [*head, "", *dict.fromkeys(found)] if found else []


def _judged(record: dict[str, Any], figure: str) -> list[str]:
    """One record, with the link to its figure."""
    claim, proof = records.read_claim(record), record.get("instrument") or {}
    old = f" ({records.OLD})" if records.is_old(record) else ""
    lines = ["", f"## Verdict{records.named_bed(record)}: {claim.verdict}{old}", "", f"{claim.statement}", ""]
    words = ["**primary**", *["secondary (Holm)"] * len(claim.parts[1:])]
    for word, part in zip(words, claim.parts, strict=True):
        lines.append(f"- {word} {part.verdict}: {part}{records.less_than_claimed(part)}")
    lines += [f"- test bed: {problem}" for problem in claim.bed]
    lines += ["", f"![the parts of the claim, and the curves of all arms]({figure})", "", f"Cost: {_cost(record)}."]
    if proof:
        kept = proof.get("registered_in")
        where = f", committed in `{kept}`" if kept else ", registered in no commit of this repository"
        lines += ["", f"Registered {proof['registered_on']} as `{proof['registered']}` before the first seed "
                      f"({proof['first_seed']}){where}; earlier records of this file: {proof['tries']}; commit "
                      f"`{proof['commit']}`."]  # fmt: skip
        lines += [f"- seen before and not kept: {what}" for what in proof.get("withheld") or ()]
    if tuned := proof.get("tuned"):
        lines += ["", f"Sensitivity ({tuned['metric']}, second half of training, {tuned['seeds']} seeds of their own):",
                  *_curves(tuned)]  # fmt: skip
        if own := tuned.get("coefficient"):
            lines += ["", f"{own['field']} at these rates:", *_curves(own)]
    for near in proof.get("neighbours") or ():
        rates = ", ".join(f"{arm} {rate:g}" for arm, rate in near["rates"].items())
        lines.append(f"- at the next {near['side']} rates ({rates}): {near['verdict']}, {near['mean']:+.4g} "
                     f"[{near['low']:+.4g}, {near['high']:+.4g}] (n={near['n']})"
                     + "".join(f"; {problem}" for problem in near.get("bed") or ()))  # fmt: skip
    for one in proof.get("controls") or ():
        seen = one["bounds"]
        lines.append(f"- control {one['name']}, {one['text']}: {seen['mean']:+.4g} [{seen['low']:+.4g}, "
                     f"{seen['high']:+.4g}] (n={seen['n']})")  # fmt: skip
    if (precise := proof.get("precision")) and precise.get("sampling_share") is not None:
        low, high = precise["over_problems"]
        share = f"{precise['sampling_share']:.2f}"
        note = ", above the 0.25 of the standard: more samples would narrow the interval" if float(share) > 0.25 else ""
        lines.append(f"- of the variance of a seed's difference in accuracy the share that is sampling: {share}{note}; "
                     f"over problems [{low:+.4g}, {high:+.4g}]")  # fmt: skip
    unlike = _unlike(record, claim.parts) if proof.get("tuned") else []
    return [*lines, *unlike, "", f"Command: `{record['command']}`"]


def page(system: systems.System, module: ModuleType, folder: pathlib.Path, root: pathlib.Path) -> str:
    """The page of one paper.

    Args:
      folder: where it will lie, for its links.
    """
    text, family = module.__doc__ or "", pathlib.Path(module.__file__ or "").parent.name

    def link(path: pathlib.Path) -> str:
        return pathlib.PurePosixPath(os.path.relpath(path, folder)).as_posix()

    file = root / "experiments" / family / f"{system.slug}.py"
    lines = [f"# {system.title}", "", section(text, "Paper"), "", f"[`{system.slug}.py`]({link(file)})"]
    if system.arxiv:
        lines[-1] += f" · [arXiv:{system.arxiv}](https://arxiv.org/abs/{system.arxiv})"
    for name in ("Claim", "Equations", "Left out", "Expect", "Measure"):
        block = section(text, name)
        fence = ["```", block, "```"] if name == "Equations" else [block]
        lines += ["", f"## {name}", "", *fence] if block else []
    lines += ["", "## Arms", "", *_arms(module)]
    pilots = pilot.kept_at(root)
    found = systems.records_of(family, system.slug, root)
    said = systems.piloted(f"{family}/{system.slug}", pilots, found)
    lines += ["", f"Mechanism: {systems.mechanism(system)}. Pilot: {said}."]
    told = {what for record in found for what in (record.get("instrument") or {}).get("withheld") or ()}
    unkept = [what for what in provenance.withheld(root).get(f"{family}/{system.slug}", []) if what not in told]
    lines += ["", "Seen, and not kept as a record:", "", *(f"- {what}" for what in unkept)] if unkept else []
    files = [path for path in systems.record_files(family, system.slug, root) if path.is_file()]
    for path, record in zip(files, found, strict=True):
        lines += _judged(record, link(path.with_suffix(".png")))
    return "\n".join(lines) + "\n"


def write(root: pathlib.Path | None = None, out: pathlib.Path | None = None) -> list[pathlib.Path]:
    """Writes ``docs/papers/<family>/<slug>.md`` for every experiment, and an index; pages of files that are gone go.

    Returns:
      Those that were written.
    """
    from jaxrl_llm.experiment import doctor

    root = locate.root() if root is None else root
    out, written = out or root / "docs" / "papers", []
    for system in systems.listed(root):
        file = systems.experiment_file(system.slug, root)
        if file is None:
            continue
        folder = out / file.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{system.slug}.md"
        path.write_text(page(system, doctor.load(file), folder, root))
        written.append(path)
    written.append(out / "index.md")
    written[-1].write_text(index(root))
    for path in set(out.rglob("*.md")) - set(written):
        path.unlink()
    return written


def index(root: pathlib.Path) -> str:
    """All papers, and those without a record under the standard by what one would cost, the cheapest first."""
    pilots, lines, waiting = pilot.kept_at(root), [], []
    for system in systems.listed(root):
        file = systems.experiment_file(system.slug, root)
        if file is None:
            continue
        name = f"{file.parent.name}/{system.slug}"
        lines.append(f"- [{system.title}]({name}.md)")
        found = systems.records_of(*name.split("/"), root)
        if any(not records.is_old(record) for record in records.standing(found)):
            continue
        row = pilots.get(name)
        if row:
            waiting.append(
                (float(row["processor minutes of a record"]), name, "pilot", systems.piloted(name, pilots, []))
            )
        elif found:
            seconds = sum(arm["seconds"] for arm in found[0]["arms"].values())
            source = records.OLD if records.is_old(found[0]) else "withdrawn record"
            waiting.append((seconds / 60, name, source, "none"))
    table = ["| minutes | paper | from | pilot |", "|---|---|---|---|"]
    for minutes, name, source, said in sorted(waiting):
        table.append(f"| {minutes:.0f} | [{name}]({name}.md) | {source} | {said} |")
    text = (
        "To the first look, the cheapest first. From a pilot: processor minutes with controls, and with the rates that "
        "it was asked to count. From a record of the old instrument: what its arms took on the clock of its machine, a "
        "lower bound, for a record under the standard measures more and has controls."
    )
    return "\n".join(["# Papers", "", *lines, "", "## What a record would cost", "", text, "", *table]) + "\n"
