"""docs/foreign-code.md names every function of another package that the library calls, and no other."""

import ast
import pathlib
import re
import subprocess
import sys
import types

import pytest

from jaxrl_llm.run.records import track

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "foreign-code.md").read_text()
FILES = [path for folder in ("jaxrl_llm", "experiments") for path in sorted((ROOT / folder).rglob("*.py"))]
# They take arrays, trees of arrays and annotations; none of them is ever handed text.
OF_ARRAYS = {
    "jax", "jaxlib", "numpy", "optax", "flax", "orbax", "ml_dtypes", "jaxtyping", "chex", "qwix", "safetensors",
}  # fmt: skip
OWN = {"jaxrl_llm", "experiments", "tests"}
LOADERS = {"extra_module", "import_module"}


def _foreign(name: str) -> bool:
    top = name.partition(".")[0]
    return top not in OWN | OF_ARRAYS and top not in sys.stdlib_module_names


def _loaded(node: ast.AST) -> str | None:
    """The package that an expression loads by its name."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in LOADERS:
        first = node.args[0]
        if isinstance(first, ast.Constant):
            return str(first.value)
        if isinstance(first, ast.JoinedStr) and isinstance(first.values[0], ast.Constant):
            return str(first.values[0].value).rstrip(".")
    return None


def _bound(tree: ast.AST) -> dict[str, str]:
    """Local names and what of another package they stand for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    makers = {
        f.name: package
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef)
        for r in ast.walk(f)
        if isinstance(r, ast.Return) and r.value is not None and (package := _loaded(r.value))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            package = _loaded(node.value)
            if package is None and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
                package = makers.get(node.value.func.id)
            if package is not None:
                names[node.targets[0].id] = package
    return {name: target for name, target in names.items() if _foreign(target)}


def _dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(parts)])


def uses(path: pathlib.Path) -> set[str]:
    """What of other packages a file names, as dotted names."""
    tree = ast.parse(path.read_text())
    names = _bound(tree)
    found = {_loaded(node) for node in ast.walk(tree)} - {None}
    attributes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in attributes:
            found.add(_dotted(node, names))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    found = {name for name in found if name and _foreign(name)}
    # of a package that is only loaded, what is done with it follows
    return {name for name in found if "." in name or not any(x.startswith(name + ".") for x in found)}


def _rows(title: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    part = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def _named(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


SEEING = {name for row in _rows("Functions that see model text") for name in _named(row[0])}
NEVER = {name for row in _rows("Packages that never see model text") for name in _named(row[0])}


def test_the_page_names_what_is_called_and_nothing_else():
    called = {name for path in FILES for name in uses(path)}
    packages = {name.partition(".")[0] for name in called}
    unlisted = sorted(
        name
        for name in called - SEEING
        # exceptions take no text of a model
        if name.partition(".")[0] not in NEVER and not name.endswith(("Error", "Exception"))
    )
    assert not unlisted, f"docs/foreign-code.md: say what these do with model text, and where they run: {unlisted}"
    assert not SEEING - called, f"docs/foreign-code.md names what nothing calls: {sorted(SEEING - called)}"
    assert not NEVER - packages - OF_ARRAYS, f"nothing uses {sorted(NEVER - packages - OF_ARRAYS)}"
    assert not {name.partition(".")[0] for name in SEEING} & NEVER
    assert NEVER >= OF_ARRAYS


def test_every_function_has_its_words_and_its_place():
    rows = _rows("Functions that see model text")
    assert len(rows) > 20
    for row in rows:
        assert len(row) == 3 and all(row), row
        for name in _named(row[0]):
            if name.startswith(("reasoning_gym", "math_verify", "sympy")):
                assert row[2].startswith("sandbox"), f"{name} may execute what it reads"


@pytest.mark.parametrize(
    "source, wanted",
    [
        ("import math_verify as m\nm.parse(1)", {"math_verify.parse"}),
        ("from sqlglot import parse_one\nparse_one(text)", {"sqlglot.parse_one"}),
        ("def f():\n    import a.b\n    return a.b.c(text)", {"a.b.c"}),
        ("x = extra_module('bm25s', 'search needs', 'tasks')\nx.tokenize(text)", {"bm25s.tokenize"}),
        ("def _t():\n    return extra_module('textworld', 'u', 'e')\ny = _t()\ny.start(p)", {"textworld.start"}),
        ("extra_module('reasoning_gym', 'u', 'e')", {"reasoning_gym"}),
        ("import os, json\nimport jax\nos.path.join(json.dumps(1))", set()),
    ],
)
def test_the_walk_sees_every_way_to_call(tmp_path, source, wanted):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert wanted <= uses(path) and {name.partition(".")[0] for name in uses(path)} == {
        name.partition(".")[0] for name in wanted
    }


def test_only_the_sandboxed_modules_import_what_may_execute():
    """In the trainer's process neither the scorers nor SymPy are even imported."""
    code = (
        "import sys\n"
        "from jaxrl_llm.verifiers import gym, math\n"
        "made = gym.problems('string_insertion', 1, 0)\n"
        "assert gym.verify(made.answers[0], made.solutions[0]).value == 1.0\n"
        "assert math.verify({'value': '1/2'}, '$0.5$').value == 1.0\n"
        "assert not {'reasoning_gym', 'math_verify', 'sympy', 'latex2sympy2_extended'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_page_of_model_text_is_escaped(tmp_path, monkeypatch):
    shown = []
    run = types.SimpleNamespace(log=lambda values, step: shown.append(values), finish=lambda: None)
    package = types.SimpleNamespace(init=lambda **_: run, Html=lambda text: text)
    monkeypatch.setitem(sys.modules, "wandb", package)
    track.open_trackers(["wandb"], tmp_path).text(1, "rollout", "<script>alert(1)</script>")
    assert shown == [{"rollout": "<pre>&lt;script&gt;alert(1)&lt;/script&gt;</pre>"}]
