"""What docstrings and comments name in ``double.backticks`` exists: a move or a new name takes its mentions with it."""

import ast
import builtins
import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = [path for folder in ("jaxrl_llm", "experiments") for path in sorted((ROOT / folder).rglob("*.py"))]
NAMED = re.compile(r"``([a-z_]\w*(?:\.[A-Za-z_]\w*)+)(?=[(`= ])")
OF_A_FILE = {
    "json",
    "jsonl",
    "py",
    "md",
    "png",
    "csv",
    "tsv",
    "jinja",
    "safetensors",
    "log",
    "toml",
    "cfg",
    "txt",
    "html",
}
# packages and their objects, what a program calls, and a question of a toy
FOREIGN = {
    *sys.stdlib_module_names, *dir(builtins),
    "jax", "jnp", "lax", "pl", "np", "numpy", "optax", "torch", "ray", "grain", "bm25s", "qwix", "apis", "xy",
}  # fmt: skip


def _stem(path: pathlib.Path) -> str:
    return path.parent.name if path.name == "__init__.py" else path.stem


def _values(tree: ast.AST) -> set[str]:
    """Names of arguments: what has them is a value, and its fields are not looked for."""
    return {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def _names(tree: ast.AST) -> set[str]:
    """Everything that a file binds: functions, classes, arguments, variables, fields, imports."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(alias.asname or alias.name).split(".")[0] for alias in names}
    return found


def test_what_is_named_exists():
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    bound, values = {path: _names(tree) for path, tree in trees.items()}, set().union(*map(_values, trees.values()))
    of_module: dict[str, set[str]] = collections.defaultdict(set)
    for path, names in bound.items():
        of_module[_stem(path)] |= names
        inside = path.parent.parent if path.name == "__init__.py" else path.parent
        of_module[inside.name].add(_stem(path))
    stale = []
    for path in FILES:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            for said in NAMED.findall(line):
                *before, last = parts = said.split(".")
                if last in OF_A_FILE or parts[0] in FOREIGN | values:
                    continue
                known = any(b in of_module[a] for a, b in zip(before, parts[1:], strict=True) if a in of_module)
                local = parts[0] in bound[path] and parts[0] not in of_module
                if not known and not local:
                    stale.append(f"{path.relative_to(ROOT)}:{number} {said}")
    assert not stale, stale
