"""The contract of an experiment file: its text, its slots, its arms and its committed record, checked in seconds."""

import ast
import dataclasses
import importlib
import math
import pathlib
import re
import sys
from types import ModuleType
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, cli, results
from jaxrl_llm.experiment.cli import command_name
from jaxrl_llm.experiment.evidence import certificates, fingerprints, records, rehearsal, store, verdicts
from jaxrl_llm.experiment.own_rows import tasks
from jaxrl_llm.run.records.record import versions as now_versions

FIELDS = ("Paper", "Claim", "Equations", "Left out", "Expect", "Measure", "Run")
SEEDS = 8
KL_VALUES = ("k1", "k2", "k3", "absolute")


class Finding(NamedTuple):
    """One check; ``problem`` says what is wrong and what helps, and is empty where nothing is."""

    check: str
    problem: str

    def __str__(self) -> str:
        return f"problem  {self.check}: {self.problem}" if self.problem else f"ok       {self.check}"


def load(path: str | pathlib.Path) -> ModuleType:
    """Imports an experiment file by its place in its packages.

    Raises:
      UserError: when it is no Python file.
    """
    file = pathlib.Path(path).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{path} is no Python file; give for example experiments/policy_gradient/dr_grpo.py")
    root = file.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


def check_docstring(module: ModuleType) -> str:
    """What the docstring lacks."""
    text = module.__doc__ or ""
    missing = [name for name in FIELDS if not re.search(rf"^{name}: +\S", text, re.MULTILINE)]
    if missing:
        return f"lacks {', '.join(f'{name}:' for name in missing)}; compare experiments/_template.py"
    if not re.search(rf"^Run: +{re.escape(command_name(module))}\b", text, re.MULTILINE):
        return f"Run: must say {command_name(module)}"
    return ""


def check_losses(path: pathlib.Path) -> str:
    """Values of a KL that stand in arithmetic: in a loss they have no gradient, so that the term is not there.

    They are for metrics: as a value of a dictionary, also by way of a name.
    """
    tree = ast.parse(path.read_text())
    dead: set[str] = set()
    found = []

    def tainted(node: ast.AST) -> bool:
        if isinstance(node, ast.Dict):
            return False
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_kl = isinstance(node.func.value, ast.Name) and node.func.value.id == "kl"
            if of_kl and node.func.attr in KL_VALUES:
                return True
        if isinstance(node, ast.Name) and node.id in dead:
            return True
        return any(tainted(child) for child in ast.iter_child_nodes(node))

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and tainted(node.value):
            dead |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.BitOr) and tainted(node):
            found.append(f"line {node.lineno}")
    why = "adds a KL value, which has no gradient, to something; a loss takes kl.kl_gradient_terms or its kin"
    return f"{', '.join(dict.fromkeys(found))} {why}" if found else ""


def check_slots(module: ModuleType) -> str:
    """Which module-level names are missing."""
    try:
        arms.check_slots(module)
    except ValueError as error:
        return str(error)
    method = getattr(module, "METHOD", "")
    if method and method not in module.ARMS:
        return f"METHOD = {method!r} is no arm; the arms are {', '.join(module.ARMS)}"
    return "ARMS has no arm" if not module.ARMS else ""


def check_settings(module: ModuleType) -> str:
    """Fields that mean something else than in a base class, and a smoke run of too many responses."""
    kinds = [c for c in module.Settings.__mro__ if dataclasses.is_dataclass(c)]
    for field, kind in module.Settings.__dict__.get("__annotations__", {}).items():
        for base in kinds[1:]:
            if base.__dict__.get("__annotations__", {}).get(field, kind) != kind:
                return f"{field} is {kind} here and {base.__annotations__[field]} in {base.__name__}; rename it"
    try:
        smoke = arms.preset(module, smoke=True, model="")  # a model of one's own takes nothing from EMBEDDED
    except UserError as error:
        return f"{error}; correct the name in SMOKE"
    rows = getattr(smoke, "prompts_per_step", 0) * getattr(smoke, "group_size", 1)
    return f"SMOKE leaves {rows:,} responses a step; set prompts_per_step and group_size there" if rows > 256 else ""


def check_arms(module: ModuleType) -> list[Finding]:
    """Builds and traces every arm with the smoke settings: nothing is run or compiled."""
    found, prints = [], {}
    try:
        base = arms.preset(module, smoke=True, model=module.Settings().model)
        resolved = arms.resolve(module, base, ())
    except UserError as error:
        return [Finding("settings", f"{error}; correct the name in EMBEDDED, SMOKE or ARMS")]
    for name, settings in resolved.items():
        copy, reads = arms.watched(settings)
        plan = module.build(copy)
        try:
            traced = arms.trace(plan)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            found.append(Finding(f"arm {name} traces", f"{type(error).__name__}: {line}"))
            continue
        found.append(Finding(f"arm {name} traces", ""))
        if plan.on_host:  # what Python reads while it judges text is not known without running it
            continue
        unread = [field for field in module.ARMS[name] if field not in reads | {"eval_every"}]
        text = f"{', '.join(unread)} changes nothing; use or drop it" if unread else ""
        found.append(Finding(f"arm {name} reads its settings", text))
        prints.setdefault(fingerprints.fingerprint(plan, traced), []).append(name)
    same = [names for names in prints.values() if len(names) > 1]
    text = "; ".join(" and ".join(names) for names in same)
    found.append(Finding("arms differ", f"{text} compute the same; drop one or use its setting" if same else ""))
    return found


def check_claim(module: ModuleType) -> list[Finding]:
    """Whether the arms update their parameters in different ways, and whether the claim reads made-up results."""
    try:
        base = arms.preset(module, smoke=True, model=module.Settings().model)
        resolved = arms.resolve(module, base, ())
        built = {name: module.build(settings) for name, settings in resolved.items()}
    except UserError as error:
        return [Finding("claim", f"{error}; correct the name in EMBEDDED, SMOKE or ARMS")]
    text = "; ".join(" and ".join(names) for names in fingerprints.same_updates(built))
    why = f"{text} update the parameters in the same way: what differs feeds metrics alone" if text else ""
    return [Finding("updates differ", why), Finding("claim on made-up results", _rehearsed(module, resolved, built))]


def _rehearsed(module: ModuleType, resolved: dict[str, Any], built: dict[str, Any]) -> str:
    try:
        rehearsal.rehearse(module, resolved, built)
    except UserError as error:
        return str(error)
    return ""


def check_record(module: ModuleType) -> str:
    """Whether the committed record belongs to this file: the same arms, enough seeds, the claim's own verdict."""
    path = arms.record_path(module)
    record, found = results.read(path)
    renew = f"run {command_name(module)} --record"
    name = f"{path.parent.name}/{path.stem}"
    if reason := records.reason_withdrawn(path, record):  # it speaks of what the file was
        standing = record["claim"]["verdict"] != verdicts.WITHDRAWN or record["claim"]["bed"][:1] != [reason]
        return f"withdrawn, and not marked so; run python -m jaxrl_llm.experiment rejudge {name}" if standing else ""
    # an arm that the file has won since is in no figure of the record, and takes nothing from those that are
    known = [arm for arm in module.ARMS if arm in record["arms"]]
    if list(record["arms"]) != known:
        return f"{path.name} has the arms {', '.join(record['arms'])}, the file {', '.join(module.ARMS)}; {renew}"
    base = _base_of(module, record)
    for arm in known:
        changes, kept = arms.changed(base, module.ARMS[arm]), record["arms"][arm]["settings"]
        moved = [field for field, value in changes.items() if not results.same(kept.get(field), results.plain(value))]
        if moved:
            return f"arm {arm} was recorded with another {', '.join(moved)}; {renew}"
    fewest = min(len(arm.seeds) for arm in found.arms.values())
    if fewest < SEEDS and not getattr(module, "FEWER_SEEDS", ""):
        return f"{fewest} seeds; {renew} with {SEEDS}, or state the reason as FEWER_SEEDS"
    claim = records.judge_again(module, record, found)["claim"]
    again = f"python -m jaxrl_llm.experiment rejudge {name}"
    if claim["verdict"] != record["claim"]["verdict"]:
        return f"recorded as {record['claim']['verdict']}, the claim now says {claim['verdict']}; run {again}"
    if claim["statement"] != record["claim"]["statement"]:
        return f"the claim's statement has changed; run {again}"
    if not _as_kept(record["claim"], claim):
        return f"the parts of the claim say something else now; run {again}"
    return "" if path.with_suffix(".png").is_file() else f"no plot beside {path.name}; {renew}"


def _as_kept(old: Any, new: Any) -> bool:
    """Whether two claims are one, each number to a unit of the last digit kept: ties are rounded either way."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_as_kept(value, new[key]) for key, value in old.items())
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_as_kept, old, new))
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=10.0 ** (1 - results.DIGITS))
    return old == new


def check_code(module: ModuleType) -> str:
    """Behind which arms of records under the standard, also of those on other beds, present code no longer stands."""
    return "; ".join(filter(None, (_code_of(module, path) for path in _records_of(module))))


def _records_of(module: ModuleType) -> list[pathlib.Path]:
    """The committed records of a file: on its own bed first, then on others."""
    own = arms.record_path(module)
    return [path for path in (own, *sorted(own.parent.glob(f"{own.stem}@*.json"))) if path.is_file()]


def _code_of(module: ModuleType, path: pathlib.Path) -> str:
    record, _ = results.read(path)
    kept = (record.get("instrument") or {}).get("code")
    if records.reason_withdrawn(path, record):
        return ""  # it stands behind nothing
    if not kept or record["versions"] != now_versions():
        return ""  # of the old instrument nothing is known, and another jax writes its programs in other words
    module = tasks.with_task(module, record["settings"].get("world", ""))
    settings = {name: _settings_of(module, record, name) for name in kept if name in module.ARMS}
    surely, perhaps = [], []
    for name, own in settings.items():
        plan = cli.in_parts(module.build(own), own)
        if store.code(module, plan, arms.trace(plan)) != kept[name]:
            (perhaps if store.in_python(plan) else surely).append(name)
    bed = path.stem.partition("@")[2]
    where = f" on bed {bed}" if bed else ""
    renew = f"run {record['command'] if bed else command_name(module) + ' --until-decided'} --record"
    found = [f"{', '.join(surely)} would compute something else today{where}"] * bool(surely)
    found += [f"sources have changed, and part of {', '.join(perhaps)} is computed in Python: these may compute "
              f"something else today{where}"] * bool(perhaps)  # fmt: skip
    return f"stale: {'; '.join(found)}; {renew}" if found else ""


def _base_of(module: ModuleType, record: dict[str, Any]) -> Any:
    return arms.preset(module, smoke=False, model=record["settings"].get("model", module.Settings().model))


def _settings_of(module: ModuleType, record: dict[str, Any], name: str) -> Any:
    """The settings of a recorded arm: the arm of the file, with the numbers of the record."""
    own = arms.override(_base_of(module, record), module.ARMS[name], f"arm {name!r}")
    kept = record["arms"][name]["settings"]
    numbers = {
        f.name: tuple(kept[f.name]) if isinstance(kept[f.name], list) else kept[f.name]
        for f in dataclasses.fields(own)
        if f.name in kept and not callable(getattr(own, f.name))
        and not (kept[f.name] is None and isinstance(getattr(own, f.name), float))  # infinity, which JSON lacks
    }  # fmt: skip
    return dataclasses.replace(own, **numbers)


def examine_text(module: ModuleType) -> list[Finding]:
    """The checks that trace nothing."""
    found = [
        Finding("docstring", check_docstring(module)),
        Finding("losses", check_losses(pathlib.Path(module.__file__ or ""))),
        Finding("slots", check_slots(module)),
    ]
    if not found[-1].problem:
        found.append(Finding("fields and sizes", check_settings(module)))
        if arms.record_path(module).is_file():
            found.append(Finding("record", check_record(module)))
    return found


def examine(module: ModuleType) -> list[Finding]:
    """All checks of one file."""
    found = examine_text(module)
    if any(f.check == "slots" and f.problem for f in found):
        return found
    found += check_arms(module)
    if not any(f.problem for f in found):
        found += check_claim(module)
    if _records_of(module) and not any(f.problem for f in found):
        found.append(Finding("code of the record", check_code(module)))
    if certificates.path_of(module).is_file():
        found.append(Finding("certificate", certificates.stale(module)))
    return found


def doctor(path: str) -> int:
    """Prints one line a check; 1 where there is a problem, else 0."""
    try:
        module = load(path)
    except (ImportError, SyntaxError, NameError, AttributeError) as error:
        print(Finding("import", f"{type(error).__name__}: {error}"))
        return 1
    found = examine(module)
    print("\n".join(map(str, found)))
    if not any(f.check == "record" for f in found):
        print(f"no record yet: {command_name(module)} --record")
    return int(any(f.problem for f in found))
