"""docs/API.md holds every public name with its docstring."""

import ast
import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
_SPEC = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
make_api = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(make_api)
REGENERATE = "docs/API.md is old; write it again with: python docs/make_api.py"


def test_every_public_name_has_a_docstring():
    bare = [name for name, node in make_api.names() if not ast.get_docstring(node)]
    bare += [name for name, tree in make_api.modules().items() if not ast.get_docstring(tree)]
    assert not bare, f"no docstring: {', '.join(bare)}"


def test_no_public_name_is_missing():
    page = (ROOT / "docs" / "API.md").read_text()
    lines = {line.partition("(")[0] for line in page.splitlines()}
    last = {name: ".".join(name.split(".")[-2:]) for name, _ in make_api.names()}
    missing = [name for name, end in last.items() if not {f"### {end}", end} & lines]
    assert not missing, f"{', '.join(missing)} missing; {REGENERATE}"


def test_page_is_up_to_date():
    if (ROOT / "docs" / "API.md").read_text() != make_api.render():
        pytest.fail(REGENERATE)


def test_docstring_becomes_markdown():
    node = ast.parse(
        'def f(x: int, *, y: float = 1.0) -> int:\n    """Adds.\n\n    Args:\n      x: a count,\n        whole.\n\n'
        '    Raises:\n      ValueError: never.\n\n    >>> f(1)\n    2\n    """\n'
    ).body[0]
    assert make_api.signature(node) == "f(x: int, *, y: float=1.0) -> int"
    want = "Adds.\n\n**Args**\n\n- `x`: a count,\n  whole.\n\n**Raises**\n\n- `ValueError`: never.\n\n"
    assert make_api.text(node) == want + "```python\n>>> f(1)\n2\n```"
    short = ast.parse("class Row(NamedTuple):\n    a: int\n    b: float = 0.0  # half\n").body[0]
    assert make_api.signature(short) == "class Row(NamedTuple)\n    a: int\n    b: float = 0.0"
