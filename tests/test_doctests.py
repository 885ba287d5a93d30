"""The examples in docstrings are true: those of the library, of the experiments and of their parts."""

import doctest
import importlib
import inspect
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# in processes of their own; tests/sandbox/test_sandbox.py runs what is here
ELSEWHERE = ("jaxrl_llm.sandbox.pool",)
FILES = [path for folder in ("jaxrl_llm", "experiments") for path in sorted((ROOT / folder).rglob("*.py"))]
FILES = [path for path in FILES if path.stem != "__init__" and ">>>" in path.read_text()]
NAMES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES]


def _own(place, name, above):
    """Functions and classes that a module, or a class of it, defines, by name; what it only holds is left out."""
    for key, value in vars(place).items():
        # the shape checks wrap every function: the finder must see what is inside
        plain = inspect.unwrap(value) if callable(value) else None
        if (inspect.isfunction(plain) or inspect.isclass(plain)) and plain.__module__ == name:
            yield f"{above}.{key}", plain
            if inspect.isclass(plain):
                yield from _own(plain, name, f"{above}.{key}")


def _examples():
    finder = doctest.DocTestFinder(recurse=False)
    for name in (name for name in NAMES if name not in ELSEWHERE):
        module = importlib.import_module(name)
        for called, plain in _own(module, name, name):
            if ">>>" in (plain.__doc__ or ""):
                yield from finder.find(plain, called, module=False, globs=dict(vars(module)))


EXAMPLES = list(_examples())
SLOW = ("jaxrl_llm.verifiers.math.verify",)  # starts a process that loads SymPy


def _marked(example):
    return pytest.param(example, marks=pytest.mark.slow if example.name in SLOW else (), id=example.name)


@pytest.mark.parametrize("example", map(_marked, EXAMPLES))
def test_example(example):
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(example)
    assert result.attempted and not result.failed


def test_there_are_examples():
    """Of every file that has one: a docstring that the walk does not reach would be true of nothing."""
    reached = {example.name.rpartition(".")[0] for example in EXAMPLES}
    missed = [name for name in NAMES if name not in ELSEWHERE and not any(r.startswith(name) for r in reached)]
    assert missed == [] and len(EXAMPLES) >= 300
