"""What a record rests on: the code, the day, the tries before it, and what was fixed before its first seed."""

import datetime
import hashlib
import inspect
import json
import pathlib
import subprocess
from types import ModuleType
from typing import Any

from jaxrl_llm.experiment import results

TRY = 100  # seeds of the first record start at 0, those of the next try at 100, and so on


def _git(root: pathlib.Path, *words: str) -> str:
    """What git says in a folder; empty where it fails, as outside a repository."""
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def commit(root: pathlib.Path) -> str:
    """The commit of the sources, with a plus sign where files differ from it; empty outside a repository."""
    head = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ":(top)*.py") if head else ""
    return head[:12] + "+" * bool(changed)


def today() -> str:
    """The day, in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def made(root: pathlib.Path) -> dict[str, str]:
    """``commit`` and ``made_on`` of numbers that are kept now; their command stands beside them.

    Args:
      root: a folder of the sources.
    """
    return {"commit": commit(root), "made_on": today()}


def registered(module: ModuleType, resolved: dict[str, Any], d_star: dict[str, float], looks: tuple[int, ...]) -> str:
    """A hash of the claim's source, d*, bed, looks and every arm's settings: taken before the first seed.

    Args:
      looks: the numbers of seeds at which the claim is looked at; more seeds than were registered are another look,
        which the level of the first one does not allow.
    """
    fields = {
        name: results.plain({k: v for k, v in vars(settings).items() if k != "mesh"})
        for name, settings in resolved.items()
    }
    bed = results.plain(getattr(module, "BED", None))
    whole = [inspect.getsource(module.claim), results.plain(d_star), bed, list(looks), fields]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]


def withheld(root: pathlib.Path) -> dict[str, list[str]]:
    """What was seen of runs whose record was not kept, by ``family/slug``: each counts as a try."""
    path, found = root / "results" / "withheld.tsv", {}
    for line in path.read_text().splitlines()[1:] if path.is_file() else ():
        name, what = line.split("\t")
        found.setdefault(name, []).append(what)
    return found


def register(path: pathlib.Path, row: dict[str, Any]) -> None:
    """Adds a registration to the table of all, one line each; the same one on another day changes nothing.

    The same claim and settings on other seeds are another registration: those of a run that was seen and withheld do
    not count again.

    Args:
      path: of the table, ``results/registered.tsv``.
      row: ``name`` (``family/slug``), ``registered`` (the hash), ``on`` (the day), ``first seed`` and what else.
    """
    lines = path.read_text().splitlines() if path.is_file() else ["\t".join(row)]
    line = "\t".join(str(value) for value in row.values())

    def same(kept: str) -> list[str]:
        name, hashed, _day, seed, *_ = kept.split("\t")
        return [name, hashed, seed]

    if not any(same(kept) == same(line) for kept in lines):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([*lines, line]) + "\n")


def row_of(path: pathlib.Path, name: str, registration: str, first_seed: int) -> str:
    """How the line of a registration begins, up to its first seed; empty where the table has none of these three."""
    for line in path.read_text().splitlines()[1:] if path.is_file() else ():
        kept, hashed, day, seed, *_ = line.split("\t")
        if (kept, hashed, seed) == (name, registration, str(first_seed)):
            return "\t".join((kept, hashed, day, seed))
    return ""


def registered_in(path: pathlib.Path, name: str, registration: str, first_seed: int) -> str:
    """The commit that brought a registration into the table; empty where none did.

    Args:
      path: of the table.
      name: ``family/slug``.
      registration: the hash.
      first_seed: the same claim and settings on other seeds are another registration.
    """
    row = row_of(path, name, registration, first_seed)
    if not row:
        return ""
    found = _git(path.parent, "log", "--format=%H", "--diff-filter=AM", "-S", row, "--", path.name).split()
    return found[-1][:12] if found else ""


def whole_history(root: pathlib.Path) -> bool:
    """Whether all commits are there: of a shallow clone, or a wheel, nobody can say what no commit holds."""
    return _git(root, "rev-parse", "--is-shallow-repository") == "false"


def first_seed(earlier: dict[str, Any] | None, registration: str, *, unkept: int = 0) -> tuple[int, int]:
    """``(first seed, earlier records of this file)``: fresh seeds after any change of claim or settings.

    Args:
      earlier: the committed record, if any; one of the old instrument counts as a try.
      unkept: runs that were seen and not recorded, see ``withheld``; those before the record are among its tries.
    """
    proof = (earlier or {}).get("instrument") or {}
    if proof.get("registered") == registration:
        return proof["first_seed"], proof["tries"]
    counted = len(proof.get("withheld") or ()) if "withheld" in proof else unkept if proof else 0
    tries = (proof.get("tries", 0) + 1 if earlier is not None else 0) + max(unkept - counted, 0)
    return TRY * tries, tries
