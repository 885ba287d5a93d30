"""Finished seeds on disk, one file each: more seeds never train those again that there are, nor does a killed run."""

import ast
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
import shutil
import sys
from collections.abc import Collection
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import jaxrl_llm
from jaxrl_llm.distributed import hosts
from jaxrl_llm.errors import from_callbacks
from jaxrl_llm.experiment import arms, loop, results
from jaxrl_llm.experiment.durable import Keeping
from jaxrl_llm.experiment.evidence import fingerprints
from jaxrl_llm.experiment.results import ArmResult, Results
from jaxrl_llm.run.records import record
from jaxrl_llm.train import checkpoint, seed_axis
from jaxrl_llm.train.plan import Plan

# settings of how a run is made, which its numbers do not depend on: one that was stopped goes on with more of them
OF_THE_RUN = {
    "env_processes",
    *(f"endpoint_{x}" for x in ("requests", "tokens", "concurrency", "timeout_s", "patience_s")),
}
FOLDER = pathlib.Path("runs") / "seeds"  # below the working directory
# seeds of one compiled program, what a killed run loses at most; side by side they cost hardly more than one
IN_TURN, SIDE_BY_SIDE = 8, 64


@lru_cache(maxsize=1)
def _library() -> str:
    """Of all sources of this library."""
    root = pathlib.Path(jaxrl_llm.__file__).parent
    return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(root.rglob("*.py")))).hexdigest()


def _named(node: ast.AST, package: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The dotted names that an import, or a text, may be of: of ``from a import b`` both ``a`` and ``a.b``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # as OWN_ROWS does
        return [tuple(node.value.split("."))] if re.fullmatch(r"\w+(\.\w+)+", node.value) else []
    if isinstance(node, ast.Import):
        return [tuple(alias.name.split(".")) for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    above = package[: len(package) - node.level + 1] if node.level else ()
    start = (*above, *(node.module.split(".") if node.module else ()))
    return [start, *((*start, alias.name) for alias in node.names)]


@lru_cache
def _sources(file: pathlib.Path) -> bytes:
    """Of a file, and of what it reaches by imports within the package that holds it; this library counts elsewhere."""
    root = file.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    found: dict[pathlib.Path, bytes] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = path.read_bytes()
        package = path.relative_to(root).parent.parts
        for name in (name for node in ast.walk(ast.parse(found[path])) for name in _named(node, package)):
            if name[:1] != package[:1] or name[0] == jaxrl_llm.__name__:
                continue
            parents = [root.joinpath(*name[:k], "__init__.py") for k in range(1, len(name) + 1)]
            waiting += filter(pathlib.Path.is_file, [*parents, root.joinpath(*name).with_suffix(".py")])
    return b"".join(found[path] for path in sorted(found))


def in_python(plan: Plan) -> bool:
    """Whether Python computes something of a run: rewards, episodes, or what belongs to each seed."""
    return plan.on_host or plan.world is not None or plan.of_seed is not None


def code(module: ModuleType, plan: Plan, traced: list[Any]) -> str:
    """A hash of the code that an arm reaches.

    Of compiled arms the traced programs with their constants (problems, weights, settings): moving or renaming what
    computes the same does not change it. What Python computes during a run is not traced: there all sources count, of
    this library and of what the file reaches by imports in its own package, as the parts of its family.
    """
    program = fingerprints.fingerprint(plan, traced)
    if not in_python(plan):
        return program[:16]
    own = hashlib.sha256(_sources(pathlib.Path(module.__file__ or "").resolve())).hexdigest()
    return hashlib.sha256(f"{program}|{own}|{_library()}".encode()).hexdigest()[:16]


def named_outside(settings: Any) -> list[str]:
    """Hashes of rows, models and modules of one's own that settings name: what a name stands for may change.

    Of ``MODULE:FUNCTION`` the text of that module counts, not of those that it imports in turn. Folders count where
    they are ``data``, or hold a model that judges, teaches or rewards; ``model`` itself is the start of the program.
    """
    found = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        words = value if isinstance(value, tuple) else (value,)
        for word in (part for text in words if isinstance(text, str) for part in text.split(",")):
            found += _hash_of(word, rows=field.name.endswith("data"), models=field.name != "model")
    return found


def _hash_of(word: str, *, rows: bool, models: bool) -> list[str]:
    """Of the file that a word names, alone, with a weight, a split or a kind; nothing where it names none.

    Args:
      rows: folders without a model count.
      models: those with one do.
    """
    begin, _, end = word.partition(":")
    loaded = sys.modules.get(begin)
    if end and hasattr(loaded, end) and getattr(loaded, "__file__", None):
        return [_digest(pathlib.Path(loaded.__file__))]
    for name in filter(None, (word, word.rpartition("@")[0], word.rpartition(":")[0], end)):
        path = pathlib.Path(name)
        with contextlib.suppress(OSError):  # a text too long for a name of a file
            if path.is_file():
                return [_digest(path)]
            if path.is_dir() and (models if (path / "config.json").is_file() else rows):
                files = [p for p in sorted(path.rglob("*")) if p.is_file()]
                each = [f"{p.relative_to(path)} {_digest(p)}" for p in files]
                return [hashlib.sha256("\n".join(each).encode()).hexdigest()]
    return []


def _digest(path: pathlib.Path) -> str:
    """SHA-256 of a file, read once for all arms of a command that name it as it stands."""
    stat = path.stat()
    return _digest_of(path.absolute(), stat.st_size, stat.st_mtime_ns)


@lru_cache
def _digest_of(path: pathlib.Path, size: int, changed_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def identity(
    module: ModuleType, settings: Any, plan: Plan, traced: list[Any], *, tail: int = 1, control: str = ""
) -> str:
    """Changes with everything that a finished seed of an arm depends on; arms of two files may share one.

    Args:
      settings: of the arm, also where the plan is that of a control of it.
      control: the word of a control that is another plan than the arm. What Python computes of it no trace shows, so
        that the word alone tells it from the arm.
    """
    whole = [code(module, plan, traced), settings.eval_every, tail, sorted(record.versions().items())]
    if any(stage.eval_every for stage in plan.stages):
        whole.append([stage.eval_every for stage in plan.stages])
    if plan.on_host or plan.world is not None:
        shaping = [f.name for f in dataclasses.fields(settings) if f.name not in OF_THE_RUN]
        whole.append(results.plain({name: getattr(settings, name) for name in shaping}))
        whole += named_outside(settings)
    if control and in_python(plan):
        whole.append(f"control {control}")
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]


def _read(path: pathlib.Path) -> ArmResult | None:
    """A stored seed; None where there is none, or half of one."""
    try:
        return results.read_arm(json.loads(path.read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _write(ran: ArmResult, files: list[pathlib.Path]) -> None:
    for k, path in enumerate(files):
        path.parent.mkdir(parents=True, exist_ok=True)
        record.write_json(path, results.plain(dataclasses.asdict(results.of_seed(ran, k))))


def _clear(folder: pathlib.Path) -> None:
    """Empties the folder of an arm; UserError, and nothing is gone, where another process trains one of its seeds.

    The locks stay: in the place of one that was removed another process could lock a second file of the same name.
    """
    with contextlib.ExitStack() as stack:
        seeds = {path.parent for path in folder.glob("*/.lock")}
        for seed in sorted(seeds):
            stack.enter_context(checkpoint.locked(seed))
        there = [path for path in folder.glob("*") if path not in seeds]
        for path in there + [path for seed in seeds for path in seed.iterdir() if path.name != ".lock"]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def seeds_of(
    plan: Plan,
    settings: Any,
    seeds: list[int],
    folder: pathlib.Path,
    *,
    fresh: bool = False,
    trained: Collection[int] = (),
    tail: int = 1,
    keeping: Keeping | None = None,
    most_skipped: int = 0,
) -> tuple[ArmResult, int]:
    """One arm for these seeds, the missing ones trained and stored one by one; and how many were there already.

    Args:
      folder: of this arm alone; it has one file a seed.
      fresh: train all of them again.
      trained: but these, which the same command has trained: those of an earlier look.
      keeping: of an arm that runs on the host, see ``loop.run_arm``.
      most_skipped: as in ``loop.run_arm``.
    """
    files = {seed: folder / f"{seed}.json" for seed in seeds}
    stored = [seed for seed in seeds if not fresh or seed in trained]
    there = {seed: one for seed in stored if (one := _read(files[seed])) is not None}
    missing = [seed for seed in seeds if seed not in there]
    if fresh and not trained and keeping is not None and keeping.folder is not None:
        hosts.by_first("fresh seeds", partial(_clear, keeping.folder))
    at_once = IN_TURN if seed_axis.in_turn() else SIDE_BY_SIDE
    for begin in range(0, len(missing), at_once):
        chunk = missing[begin : begin + at_once]
        ran = loop.run_arm(
            plan, settings, chunk, mesh=settings.mesh, tail=tail, keeping=keeping, most_skipped=most_skipped
        )
        hosts.by_first("seeds", partial(_write, ran, [files[seed] for seed in chunk]))
    found = {seed: there.get(seed) or _read(path) for seed, path in files.items()}
    own = results.plain({f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)})
    joined = results.join([found[seed] for seed in seeds])  # type: ignore[list-item]
    return dataclasses.replace(joined, settings=own), len(there)


def identities(
    module: ModuleType, resolved: dict[str, Any], built: dict[str, Plan], *, tail: int = 1
) -> dict[str, str]:
    """``identity`` of every arm."""
    return {
        name: identity(module, settings, built[name], arms.trace(built[name]), tail=tail)
        for name, settings in resolved.items()
    }


@from_callbacks()
def run_arms(options: Any, resolved, built, identities: dict[str, str], seeds: list[int], folder: pathlib.Path, *,
             tail: int = 1, keepings: dict[str, Keeping | None] | None = None,
             trained: Collection[int] = ()) -> Results:  # fmt: skip
    """Every arm in turn; a finished seed is stored at once and taken up again by the next run.

    Args:
      options: with ``fresh``.
      identities: see ``identity``; arms that share one share their seeds.
      folder: of the store.
      keepings: by arm, of those that run on the host.
      trained: see ``seeds_of``.
    """
    found: dict[str, ArmResult] = {}
    for k, (name, settings) in enumerate(resolved.items(), 1):
        print(f"arm {name} ({k}/{len(resolved)}), {len(seeds)} seeds", flush=True)
        keeping, own = (keepings or {}).get(name), identities[name]
        if keeping is not None:  # who is late or early changes what an asynchronous run computes
            own += "" if keeping.staleness is None else f"-async{keeping.staleness}"
            own += "" if keeping.planner is None else f"-{keeping.planner.__name__}"  # another order of sums
            keeping = keeping._replace(identity=own)
        place = folder / own
        most = getattr(options, "most_skipped", 0)  # of comparisons and sweeps there is no such flag
        found[name], there = seeds_of(
            built[name], settings, seeds, place, fresh=options.fresh, trained=trained, tail=tail, keeping=keeping,
            most_skipped=most,
        )  # fmt: skip
        if there:
            print(f"arm {name}: {there} of {len(seeds)} seeds taken from {place}", flush=True)
    return Results(found)
