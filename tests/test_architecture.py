"""The house: imports go down only, array code stands alone, every module is reached, nothing fails silently."""

import ast
import collections
import functools
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "jaxrl_llm").rglob("*.py"))
PAPERS = sorted(
    p for p in (ROOT / "experiments").rglob("*.py") if p.name != "__init__.py" and "parts" not in p.parts
)  # one paper, one file, the template, and what trains the base models
PARTS = sorted(p for p in (ROOT / "experiments").rglob("parts/*.py") if p.name != "__init__.py")
# From the ground up; a folder, or a file of the root, imports what stands before it and never what stands behind it.
ORDER = (
    "errors", "types", "logprobs", "reduce", "curriculum", "metrics", "advantages", "losses", "rewards",
    "sandbox", "models", "data", "verifiers", "distributed", "tools", "rollout", "envs", "train", "planning",
    "asynchronous", "run", "experiment", "jobs", "__main__",
)  # fmt: skip
ROOT_FILES = {"__init__", "__main__", "errors", "types", "logprobs", "reduce"}
CORE = ("types", "logprobs", "reduce", "curriculum", "metrics", "advantages", "losses", "rewards")
PLAIN = ("jax", "jaxtyping", "numpy", "typing", "collections", "functools", "math")  # all that the core may import
FOLDER = 16  # files
# Arrays in, arrays out: their callers are users, each function is in a public list and in the contract tables.
PUBLIC = ("curriculum", "metrics", "advantages", "losses", "rewards")
COMMANDS = (
    "__main__",
    "sandbox.__main__",
    "sandbox.inside",
    "sandbox.kernel",
    "verifiers.worker",
    "envs.worker",
    "experiment.__main__",
)


def _name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(p): p for p in [*FILES, *PAPERS, *PARTS]}


def _room(name):
    return name.split(".")[1] if "." in name else "__init__"


@functools.cache
def _imports(path):
    """Full names of what a file imports: modules of this project where they are modules, else ``module.name``."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names]
        elif isinstance(node, ast.Assign) and [getattr(x, "id", "") for x in node.targets] == ["OWN_ROWS"]:
            found.append(str(node.value.value))  # the same world over rows of one's own, opened by name
    return tuple(name if name in MODULES else _shortened(name) for name in found)


def _shortened(name):
    """The module that holds an imported name, where it is one of this project."""
    head = name.rpartition(".")[0]
    return head if head in MODULES else name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file(path):
    name = _name(path)
    room = _room(name)
    for other in _imports(path):
        if other.split(".")[0] == "experiments":
            raise AssertionError(f"the library does not know its experiments: {other}")
        if not other.startswith("jaxrl_llm."):
            assert room not in CORE or other.split(".")[0] in PLAIN, other
        elif room != "__init__" and _room(other) != room:
            assert ORDER.index(_room(other)) < ORDER.index(room), f"{name} imports upwards: {other}"
    _check_code(path)


@pytest.mark.parametrize("path", [*PAPERS, *PARTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_file_of_experiments(path):
    """A paper stands alone; a family's parts are its own, and what several families share lies in experiments/parts.

    A test bed serves a family, and may be made of the worlds of that family.
    """
    family = path.relative_to(ROOT / "experiments").parts[0]
    allowed = ("experiments.parts", f"experiments.{family}.parts", "experiments.beds")
    for other in _imports(path):
        if other.split(".")[0] == "experiments":
            of_served = family == "beds" and ".parts" in other
            assert other.startswith(allowed) or of_served, f"{path.name} imports {other}"
        assert other.split(".")[0] != "tests"
    _check_code(path)


def _check_code(path):
    tree = ast.parse(path.read_text())
    assert path.name != "utils.py"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            size = sum(isinstance(x, ast.stmt) for x in ast.walk(node)) - 1
            branches = sum(isinstance(x, ast.If | ast.For | ast.While | ast.ExceptHandler) for x in ast.walk(node))
            assert size <= 60 and branches <= 16, f"{node.name} has {size} statements and {branches} branches"
        if isinstance(node, ast.ExceptHandler):
            silent = all(isinstance(x, ast.Pass) for x in node.body)
            assert not silent, f"silent except at line {node.lineno}"


def test_the_root_and_the_folders_stay_small():
    counts = collections.Counter(p.parent for p in FILES if p.name != "__init__.py")
    assert {p.stem for p in FILES if p.parent == ROOT / "jaxrl_llm"} == ROOT_FILES
    large = {str(folder.relative_to(ROOT)): n for folder, n in counts.items() if n > FOLDER}
    assert not large, f"make a package of what belongs together: {large}"
    assert {_room(_name(p)) for p in FILES} - {"__init__"} == set(ORDER), "name a new folder in ORDER"


def _reached():
    todo, seen = [f"jaxrl_llm.{c}" for c in COMMANDS], set()
    todo += [name for name in MODULES if name.startswith("experiments.") and ".parts." not in name]
    todo += [name for name in MODULES if _room(name) in PUBLIC and name.startswith("jaxrl_llm.")]
    while todo:
        name = todo.pop()
        if name in seen or name not in MODULES:
            continue
        seen.add(name)
        todo += [name.rpartition(".")[0], *_imports(MODULES[name])]
    return seen


# Library modules that no command and no experiment reaches yet, each with what will reach it. The list only shrinks.
WAITING = {
    "experiments.systems.parts.measured_plan": "benchmarks/plans_measured.py runs it",
    "experiments.systems.parts.overlap_law": "llamarl's throughput law, pinned by its tests",
    "experiments.systems.parts.transfer_protocols": "hybridflow's protocols, pinned by its tests",
    "jaxrl_llm.train.per_device": "the fused loop of an experiment; benchmarks/fused_vs_trl.py runs it",
}


def test_every_module_is_reached():
    reached = _reached()
    dead = {name for name in MODULES if name not in reached and not MODULES[name].name == "__init__.py"}
    assert dead <= WAITING.keys(), f"wire or delete: {sorted(dead - WAITING.keys())}"
    assert not WAITING.keys() - dead, "reached now: take it off the list"


# Library modules that one experiment uses and nothing else: they belong to its parts. The list only shrinks.
LODGERS: set[str] = set()


def test_a_library_module_serves_more_than_one_paper():
    users = collections.defaultdict(set)
    for name, path in MODULES.items():
        for other in _imports(path):
            users[other].add(name)
    alone = {
        name
        for name in MODULES
        if name.startswith("jaxrl_llm.") and _room(name) not in PUBLIC and MODULES[name].name != "__init__.py"
        if len(users[name]) == 1 and next(iter(users[name])).startswith("experiments.")
    }
    assert alone <= LODGERS, f"move to experiments/<family>/parts: {sorted(alone - LODGERS)}"
    assert LODGERS <= alone, "serves others now: take it off the list"


@pytest.mark.parametrize("path", [p for p in FILES if _room(_name(p)) in CORE], ids=lambda p: str(p.relative_to(ROOT)))
def test_public_functions_of_the_core_are_documented(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_losses_need_neither_flax_nor_optax():
    names = [_name(p) for p in FILES if _room(_name(p)) in CORE]
    code = (
        "import sys, importlib\n"
        "for name in ('flax', 'optax', 'orbax', 'tyro', 'safetensors'): sys.modules[name] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr


def test_nothing_in_the_core_jits_or_makes_keys_or_averages():
    for path in FILES:
        room = _room(_name(path))
        if room in CORE and room not in ("curriculum", "metrics"):
            text = path.read_text()
            assert "jax.jit" not in text and "random.key(" not in text and "with_sharding_constraint" not in text, path
            if room in ("losses", "advantages"):
                assert "jnp.mean(" not in text, f"{path}: averages belong to reduce"


def test_one_loop_runs_every_training():
    """Who walks through the iterations of the host loop, or looks at its rollouts: the run of a seed, nobody beside."""
    calls = collections.defaultdict(set)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("iterations", "make_look", "make_host_loop"):
                calls[node.attr].add(_name(path).removeprefix("jaxrl_llm."))
    assert calls == {name: {"experiment.durable"} for name in ("iterations", "make_look", "make_host_loop")}


# Builders of one name: what differs between papers is a function that is passed to them.
BUILDERS = {
    "make_measure": 1,
    "make_arena": 1,
    "make_online": 1,
    "make_rollout": 1,
    "make_score": 0,
    "make_grpo": 1,
    "make_plan": 0,
    "setup_of": 1,
}


def test_a_builder_stands_once():
    counts = dict.fromkeys(BUILDERS, 0)
    for path in [*FILES, *PAPERS, *PARTS]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name in counts:
                counts[node.name] += 1
    assert counts == BUILDERS


def test_one_wiring_for_embedded_worlds_and_for_files():
    """Which world it is, ``train.plan.setup_of`` asks; what is built in it is said once. Where a function of an
    experiment asks whether there is ``data`` it returns that data, and builds nothing."""
    asked = set()
    for path in [*PAPERS, *PARTS]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                tests = [x.test for x in ast.walk(node) if isinstance(x, ast.If | ast.IfExp)]
                if any(ast.unparse(test).removeprefix("not ") == "settings.data" for test in tests):
                    asked.add(f"{path.stem}.{node.name}")
    assert asked == {"drc_planning.boards_of", "gigpo.similar", "tool_runs._check"}


def _switches(path):
    """Fields of ``bool`` of the settings that a file declares."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Settings"):
            fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
            yield from (x.target.id for x in fields if "bool" in ast.unparse(x.annotation))


# ``chat`` says how rows of one's own are written, for every arm alike: it is no variation of a method.
OF_ROWS = {
    f"experiments.{name}": {"chat"} for name in ("parts.text_rows", "parts.text_problems", "agents.parts.text_plans")
}


def test_an_arm_names_a_function_not_a_switch():
    found = {_name(p): set(_switches(p)) for p in [*PAPERS, *PARTS]}
    assert {name: fields for name, fields in found.items() if fields} == OF_ROWS


def _of_extras(node):
    return getattr(node, "attr", getattr(node, "id", "")) == "extras"


def _is_undeclared(node):
    """Whether extras are read by a string: ``extras["x"]``, ``extras[f"x/{y}"]``, ``extras.get(...)``."""
    if isinstance(node, ast.Subscript) and _of_extras(node.value):
        return isinstance(node.slice, ast.JoinedStr) or isinstance(getattr(node.slice, "value", None), str)
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr == "get" and _of_extras(called.value)


# Names that a module keeps as constants, of what may be there or not; they are read where they are made.
BY_CONSTANT = {
    "jaxrl_llm.jobs.dpo": 1,  # REFERENCE
    "jaxrl_llm.rollout.generate": 1,  # EXPERTS
    "jaxrl_llm.rollout.turns.multi_turn": 1,  # turns/<field>, of the NamedTuple that is read
    "jaxrl_llm.train.methods.packed": 1,  # LAYOUT
}


def test_extras_are_declared():
    """What a method keeps in extras it declares as a NamedTuple, and reads by ``types.declared``."""
    found = collections.Counter()
    for path in [*FILES, *PAPERS, *PARTS]:
        found[_name(path)] += sum(_is_undeclared(node) for node in ast.walk(ast.parse(path.read_text())))
    assert +found == BY_CONSTANT


# Public names of the library that are no words of docs/words.md. The list only shrinks; names of data sets are theirs.
OTHER_WORDS = {"world", "worlds", "bench", "place", "arena", "crew", "hand", "heard", "said", "relayout", "regroup"}
NAMED = {
    "distributed.rules.make_place", "envs.retry_question.Place", "envs.tool_question.Place", "experiment.cli.said",
    "experiment.evidence.certificates.said", "experiment.evidence.pilot.said", "experiment.multi_turn_plan.open_place",
    "planning.reshard_cost.Place", "planning.schedule.Place", "run.bench",
    "run.bench.Bench", "run.bench.bench", "run.bench.bench_identity",
}  # fmt: skip


def test_public_names_are_the_words_of_the_field():
    assert (ROOT / "docs" / "words.md").is_file()
    found = set()
    for path in FILES:
        module = _name(path).removeprefix("jaxrl_llm.")
        nodes = [x for x in ast.parse(path.read_text()).body if isinstance(x, ast.FunctionDef | ast.ClassDef)]
        for full, name in [(module, path.stem), *((f"{module}.{node.name}", node.name) for node in nodes)]:
            words = {word.lower() for word in re.findall("[A-Z]?[a-z0-9]+", name)}
            found |= {full} if words & OTHER_WORDS and not name.startswith("_") else set()
    assert found == NAMED


TOLERANCES = {"atol", "rtol", "abs", "rel", "abs_tol", "rel_tol", "decimal", "significant"}
# arguments that are compared; what follows them is a tolerance
COMPARED = {"allclose": 2, "assert_allclose": 2, "assert_almost_equal": 2, "isclose": 2, "approx": 1}


def _is_number(node):
    """A number in digits that is not 0, which says "exactly", and nothing that says where it comes from."""
    try:
        return isinstance(value := eval(ast.unparse(node), {"__builtins__": {}}), int | float) and value != 0
    except NameError:
        return False


SMALL = 0.01  # nobody asks for less of anything but an error
DISTANCES = {"abs", "norm", "ptp"}


def _called(node):
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _has_bare_tolerance(node):
    """An approximate comparison with a bound in digits, or with that which its library has for everything."""
    name, given = _called(node), [keyword.value for keyword in node.keywords if keyword.arg in TOLERANCES]
    if name not in COMPARED:
        return any(_is_number(value) for value in given)
    given += node.args[COMPARED[name] :]
    told = given or any(keyword.arg is None for keyword in node.keywords)
    return not told or any(_is_number(value) for value in given)


def _has_bare_bound(node):
    """``abs(a - b) < 0.05``, ``loss < 1e-6``, ``least >= -1e-6``: a comparison by hand."""
    sides = [node.left, *node.comparators]
    for left, sign, right in zip(sides, node.ops, sides[1:], strict=False):
        if isinstance(sign, ast.Gt | ast.GtE):
            left, right = right, left
        elif not isinstance(sign, ast.Lt | ast.LtE):
            continue
        for value, other, way in ((right, left, 1), (left, right, -1)):
            number = eval(ast.unparse(value), {"__builtins__": {}}) * way if _is_number(value) else 0
            distance = any(_called(x) in DISTANCES for x in ast.walk(other) if isinstance(x, ast.Call))
            if 0 < number < (1 if distance and way == 1 else SMALL):
                return True
    return False


def _bare(text):
    nodes = list(ast.walk(ast.parse(text)))
    found = [x for x in nodes if isinstance(x, ast.Call) and _has_bare_tolerance(x)]
    return found + [x for x in nodes if isinstance(x, ast.Compare) and _has_bare_bound(x)]


def test_no_tolerance_is_a_bare_number():
    """It is derived, or follows from digits written down or from draws (``tests/close.py``), or its name says why."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = [f"{path.relative_to(ROOT)}:{node.lineno}" for path in files for node in _bare(path.read_text())]
    assert not found, f"compare by tests/close.py: {found}"


def test_bare_tolerances_are_seen():
    for text in (
        "assert a == pytest.approx(b)", "assert a == pytest.approx(b, abs=1e-3)", "np.allclose(a, b)",
        "np.testing.assert_allclose(a, b, 1e-4)", "math.isclose(a, b, rel_tol=2**-9)", "assert abs(a - b) < 0.05",
        "assert loss < 1e-6", "assert 1e-6 >= loss", "assert least >= -1e-6", "assert -1e-6 <= least",
    ):  # fmt: skip
        assert len(_bare(text)) == 1, text
    for text in (
        "np.testing.assert_allclose(a, b, rtol=0, atol=bound(8, 1.0))", "assert a == doubles(0.3)", "assert a < 0.3",
        "assert loss > 1e-3", "assert slope < -1e-2", "assert abs(a - b) < SWING", "assert 0 < a <= near(a, b)",
        "assert eps == 1e-6", "assert np.abs(moved).max() > 0.1",
    ):  # fmt: skip
        assert not _bare(text), text
