"""Writes docs/API.md from the docstrings: ``python docs/make_api.py``.

The source is read, not imported: signatures stand as they were written, and nothing needs to be installed.
"""

import ast
import functools
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "API.md"
Definition = ast.FunctionDef | ast.ClassDef


@functools.cache
def modules(root: pathlib.Path = ROOT) -> dict[str, ast.Module]:
    """Every module of the library by its dotted name, in the order of the names."""
    found = {}
    for path in sorted((root / "jaxrl_llm").rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        if tree.body and not name.rpartition(".")[2].startswith("_"):  # most packages have an empty __init__
            found[name] = tree
    return dict(sorted(found.items()))


def public(body: list[ast.stmt]) -> list[Definition]:
    """Functions and classes without a leading underscore."""
    return [node for node in body if isinstance(node, Definition) and not node.name.startswith("_")]


def names(root: pathlib.Path = ROOT) -> Iterator[tuple[str, Definition]]:
    """Every public function, class and method by its dotted name."""
    for module, tree in modules(root).items():
        for node in public(tree.body):
            yield f"{module}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from ((f"{module}.{node.name}.{method.name}", method) for method in public(node.body))


def signature(node: Definition) -> str:
    """The head of a function; of a class its name, bases and fields."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        fields = [f"    {ast.unparse(part)}" for part in node.body if isinstance(part, ast.AnnAssign)]
        return "\n".join([f"class {node.name}({bases})" if bases else f"class {node.name}", *fields])
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{node.name}({ast.unparse(node.args)}){result}"
    if len(line) <= 100:
        return line
    given = node.args
    plain = given.posonlyargs + given.args
    shown = [ast.unparse(a) for a in plain]
    for k, value in enumerate(reversed(given.defaults), 1):
        shown[-k] += f" = {ast.unparse(value)}"
    if given.vararg or given.kwonlyargs:
        shown.append(f"*{ast.unparse(given.vararg)}" if given.vararg else "*")
    for argument, value in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        shown.append(ast.unparse(argument) + (f" = {ast.unparse(value)}" if value else ""))
    shown += [f"**{ast.unparse(given.kwarg)}"] if given.kwarg else []
    return "\n".join([f"{node.name}(", *(f"    {part}," for part in shown), f"){result}"])


def text(node: Definition | ast.Module) -> str:
    """A docstring as Markdown: sections become lists, examples become code."""
    lines, section, example = [], False, False
    for line in (ast.get_docstring(node) or "").splitlines():
        if not example and line.lstrip().startswith(">>>"):
            example = True
            lines.append("```python")
        if example and not line.strip():
            example = False
            lines.append("```")
        if example:
            lines.append(line)
        elif line in ("Args:", "Returns:", "Raises:", "Yields:"):
            section = True
            lines += [f"**{line[:-1]}**", ""]
        elif section and line and not line.startswith(" "):
            section = False
            lines.append(line)
        elif section:
            item = re.match(r"  (\w[\w ,]*): (.*)", line)
            lines.append(f"- `{item[1]}`: {item[2]}" if item else line[2:])
        else:
            lines.append(line)
    return "\n".join([*lines, "```"] if example else lines)


def render(root: pathlib.Path = ROOT) -> str:
    """The whole page."""
    trees = modules(root)
    page = ["# Every public name", "", "Written by `python docs/make_api.py` from the docstrings; do not edit.", ""]
    page += ["Conventions of arrays, masks and alignment: [jaxrl_llm.types](#jaxrl_llmtypes).", ""]
    page += ["| Module | |", "|---|---|"]
    for name, tree in trees.items():
        first = (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        page.append(f"| [{name}](#{name.replace('.', '')}) | {first} |")
    for name, tree in trees.items():
        page += ["", f"## {name}", "", text(tree)]
        for node in public(tree.body):
            page += ["", f"### {name.rpartition('.')[2]}.{node.name}", "", "```python", signature(node), "```", ""]
            page.append(text(node))
            for method in public(node.body) if isinstance(node, ast.ClassDef) else ():
                page += ["", "```python", f"{node.name}.{signature(method)}", "```", "", text(method)]
    lines = [line.rstrip() for line in "\n".join(page).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


if __name__ == "__main__":
    OUT.write_text(render())
    print(f"{OUT}: {sum(1 for _ in names())} names")
