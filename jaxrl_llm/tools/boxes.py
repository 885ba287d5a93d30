"""The tools that agents of papers call: programs in the sandbox, a database that is read, search, a calculator."""

import ast
import atexit
import contextlib
import json
import operator
import pathlib
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from jaxrl_llm.data import databases
from jaxrl_llm.errors import DataError, UserError, extra_module
from jaxrl_llm.sandbox.pool import Sandbox
from jaxrl_llm.sandbox.records import Ran
from jaxrl_llm.tools import mcp_servers, pages, schema
from jaxrl_llm.tools.calls import Toolbox, joined, of_functions
from jaxrl_llm.verifiers import sql

SHOWN = 3  # documents of a search
ROWS = 50  # of a query
MOST = 4000  # characters of an answer
_DIGITS, _BITS = 300, 1000  # of a number: a float holds it
_CALCULATED = re.compile(r"[0-9a-fA-FxXoO_.+\-*/%()\s]*")  # of words Python would warn on the way, on the run's stderr
_OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}  # fmt: skip


def _one_text(name: str, about: str, argument: str) -> schema.Tool:
    kind = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return schema.tool(name, about, kind)


def python_box(run: Callable[[str], Ran]) -> Toolbox:
    """``python(code)``: what a program prints, or the end of its error; a sandbox without an answer is no refusal.

    Args:
      run: of a ``sandbox.pool.Sandbox``.
    """

    def python(code: str) -> str:
        ran = run(code)
        if ran.status == "broken":
            raise RuntimeError(ran.stderr)
        if ran.status != "ok":
            raise ValueError(f"{ran.status}: {ran.stderr.strip()[-MOST:]}")
        return ran.stdout[:MOST]

    return of_functions(
        [(_one_text("python", "Runs a Python program by itself; returns what it prints.", "code"), python)]
    )


def database_box(path: pathlib.Path) -> Toolbox:
    """``query(sql)`` and ``tables()`` of an SQLite file, which can only be read; bounds are those of ``verifiers.sql``.

    Raises:
      UserError: where it is no database.
    """
    path = path.resolve()  # the sandbox shows the folder of the file itself, not that of a link to it
    try:
        made = databases.schema(path)
    except ValueError as error:
        raise UserError(f"the database {path}: {error}; give an SQLite file") from error

    def query(sql_text: str) -> str:
        rows = sql.run(str(path), sql_text)
        shown = "\n".join(json.dumps(row, ensure_ascii=False, default=repr) for row in rows[:ROWS])
        left = f"\n... {len(rows) - ROWS} more rows" if len(rows) > ROWS else ""
        return (shown[:MOST] + left) or "no rows"

    return of_functions(
        [
            (_one_text("query", "Answers an SQL query over the database.", "sql"), lambda **given: query(given["sql"])),
            (schema.tool("tables", "The statements that made the tables."), lambda: made[:MOST]),
        ]
    )


def documents(path: pathlib.Path) -> list[str]:
    """The texts of a corpus: JSON lines with ``contents`` (as Pyserini and FlashRAG have them) or ``title``, ``text``.

    Raises:
      UserError: where there is no such file.
      DataError: naming the line that is none.
    """
    found = [_document(row, where) for where, row in pages.corpus_rows(path)]
    if not found:
        raise DataError(f"{path} holds no documents")
    return found


def _document(texts: dict[str, Any], where: str) -> str:
    parts = [texts["contents"]] if "contents" in texts else [texts.get("title", ""), texts.get("text")]
    if not all(isinstance(part, str) for part in parts):
        raise DataError(f"{where}: needs contents, or title and text, as texts")
    return "\n".join(part for part in parts if part)


def bm25(texts: Sequence[str], **settings: Any) -> Callable[[str, int], Iterable[int]]:
    """``(query, n) -> numbers`` of the ``n`` texts that fit best, by bm25s.

    Args:
      settings: of ``bm25s.BM25``, for example ``k1`` and ``b``.

    Raises:
      UserError: without the package.
    """
    bm25s = extra_module("bm25s", "search needs", "tasks", ", or give a search")
    split = partial(bm25s.tokenize, stopwords="en", show_progress=False)
    index = bm25s.BM25(**settings)
    index.index(split(list(texts)), show_progress=False)

    def search(query: str, count: int) -> list[int]:
        words = split(query)
        if not words.vocab:
            return []
        found, scores = index.retrieve(words, k=min(count, len(texts)), show_progress=False)
        return [int(k) for k, score in zip(found[0], scores[0], strict=True) if score > 0]

    return search


def search_box(texts: Sequence[str], find: Callable[[str, int], Iterable[int]], *, count: int = SHOWN) -> Toolbox:
    """``search(query)``: the texts that fit a query best, the best first.

    Args:
      find: ``bm25(texts)``, or what asks an index elsewhere.
    """

    def search(query: str) -> str:
        shown = [f"[{place}] {texts[k]}" for place, k in enumerate(find(query, count), start=1)]
        return "\n".join(shown) or "nothing was found"

    return of_functions([(_one_text("search", "Searches the documents by words.", "query"), search)])


def calculate(expression: str) -> str:
    """The value of an expression of numbers and ``+ - * / // % **``, exactly; long decimals in twelve digits.

    >>> calculate("(3 + 4) * 2 ** 3"), calculate("1 / 4"), calculate("1 / 3")
    ('56', '0.25', '0.333333333333')

    Raises:
      ValueError: for anything else, a division by zero, or a number of more than ``_DIGITS`` digits.
    """
    expression = expression.strip()
    if len(expression) > MOST:
        raise ValueError(f"an expression of {len(expression)} characters; give at most {MOST}")
    if not _CALCULATED.fullmatch(expression):
        raise ValueError("only numbers and + - * / // % ** can be calculated")
    try:
        tree = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{schema.shortened(expression)} is no expression") from error
    value = _value(tree, 64, partial(ast.get_source_segment, expression))
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _value(node: Any, deep: int, written: Callable[[Any], str]) -> Fraction:
    if deep == 0:
        raise ValueError("the expression is too deep")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _moderate(Fraction(node.value) if type(node.value) is int else _decimal(written(node)))
    operation = _OPERATIONS.get(type(getattr(node, "op", None)))
    if operation is None or not isinstance(node, ast.BinOp | ast.UnaryOp):
        raise ValueError("only numbers and + - * / // % ** can be calculated")
    if isinstance(node, ast.UnaryOp):
        return operation(_value(node.operand, deep - 1, written))
    left, right = (_value(side, deep - 1, written) for side in (node.left, node.right))
    if operation is operator.pow:
        if right.denominator != 1:
            raise ValueError("a power needs a whole exponent")
        larger = max(abs(left.numerator), left.denominator)  # at least 2 ** (its bits - 1)
        if (larger.bit_length() - 1) * abs(right) > _BITS:
            raise ValueError(f"a number has more than {_DIGITS} digits")
        right = int(right)
    try:
        return _moderate(Fraction(operation(left, right)))
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error


def _decimal(text: str) -> Fraction:
    """The number that is written, which a float would round."""
    mantissa, _, exponent = text.replace("_", "").lower().partition("e")
    if exponent and abs(int(exponent)) > _DIGITS:
        raise ValueError(f"a number has more than {_DIGITS} digits")
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0)


def _moderate(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**_DIGITS:
        raise ValueError(f"a number has more than {_DIGITS} digits")
    return value


def calculator_box() -> Toolbox:
    """``calculate(expression)``, see the function of that name."""
    about = "Calculates an expression of numbers and + - * / // % **."
    return of_functions([(_one_text("calculate", about, "expression"), calculate)])


def mcp_box(command: str) -> Toolbox:
    """The tools of an MCP server that this process starts and ends with itself, see ``mcp_servers``.

    Raises:
      UserError: for a command that cannot be read, or a server that does not start.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(f"--tools mcp={command}: {error}; write the command as a shell takes it") from error
    holder = contextlib.ExitStack()
    try:
        box = holder.enter_context(mcp_servers.connect(words))
    except UserError as error:
        raise UserError(f"--tools mcp={command}: {error}") from error
    atexit.register(holder.close)
    return box


def split_names(names: str) -> list[str]:
    """Tools at the commas before a known one: the command of an MCP server may have commas of its own.

    >>> split_names("calculator,mcp=serve --list a,b,python")
    ['calculator', 'mcp=serve --list a,b', 'python']
    """
    return re.split(r",(?=(?:python|calculator)(?:,|$)|(?:search|pages|database|mcp)=)", names)


def opened(names: str, *, reader: pages.Reader = pages.by_words) -> Toolbox:
    """``python,calculator,search=CORPUS.jsonl,pages=CORPUS.jsonl,database=FILE.sqlite,mcp=COMMAND``: any of them.

    Args:
      names: with commas between.
      reader: who reads the pages of ``pages``.

    Raises:
      UserError: for another name, or a file or server that does not serve.
    """
    found = []
    for name in split_names(names):
        tool, _, source = name.partition("=")
        if tool == "python" and not source:
            found.append(python_box(Sandbox().run))
        elif tool == "calculator" and not source:
            found.append(calculator_box())
        elif tool == "search" and source:
            texts = documents(pathlib.Path(source))
            found.append(search_box(texts, bm25(texts)))
        elif tool == "pages" and source:
            corpus = pages.read_corpus(pathlib.Path(source))
            found.append(pages.pages_box(corpus, bm25([f"{page.title}\n{page.text}" for page in corpus]), reader))
        elif tool == "database" and source:
            found.append(database_box(pathlib.Path(source)))
        elif tool == "mcp" and source:
            found.append(mcp_box(source))
        else:
            known = "python, calculator, search=CORPUS.jsonl, pages=CORPUS.jsonl, database=FILE.sqlite or mcp=COMMAND"
            raise UserError(f"--tools {names}: {name!r} is no tool; choose {known}")
    return joined(found)
