"""The examples in the docstrings of the core are true."""

import doctest
import importlib
import inspect
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1] / "jaxrl_llm"
FILES = [ROOT / "logprobs.py", ROOT / "reduce.py", ROOT / "models" / "merging.py"]
FOLDERS = ("losses", "advantages", "rewards", "curriculum", "metrics", "envs")
FILES += sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))
FILES += sorted((ROOT.parent / "experiments").rglob("parts/*.py"))
NAMES = [".".join(p.relative_to(ROOT.parent).with_suffix("").parts) for p in FILES if p.stem != "__init__"]


def _examples():
    for name in NAMES:
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            # the shape checks wrap every function: the finder must see what is inside
            plain = inspect.unwrap(value) if callable(value) else None
            if inspect.isfunction(plain) and plain.__module__ == name and ">>>" in (plain.__doc__ or ""):
                found = doctest.DocTestFinder().find(plain, f"{name}.{key}", module=False, globs=dict(vars(module)))
                yield from found


EXAMPLES = list(_examples())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_example(example):
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example)
    assert result.attempted and not result.failed


def test_there_are_examples():
    assert len(EXAMPLES) >= 10
