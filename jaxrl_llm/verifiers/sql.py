"""Queries judged by what they return from an SQLite database: execution accuracy of Spider and BIRD.

A query may only read: the file is opened immutable, an authorizer refuses everything but selecting, and rows, time,
memory and text are bounded. It runs in a sealed process of its own (``sandbox.pool.Sandbox.call_fresh``), which sees
the folder of the database and nothing else. What a query exhausts by itself is its own fault and wrong; a verdict is
invalid only where the reference fails, the database cannot be read or the sandbox fails.
"""

import itertools
import pathlib
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jaxrl_llm.sandbox import values
from jaxrl_llm.sandbox.pool import Sandbox
from jaxrl_llm.sandbox.records import Called, Limits
from jaxrl_llm.verifiers.fences import blocks, written_in
from jaxrl_llm.verifiers.verdict import Verdict

CPU_S = 5.0  # of one query
MAX_ROWS = 10_000
MAX_CHARACTERS = 20_000
MAX_WORK = 3_000_000  # values that are compared, over all orders of columns that are tried
HEAP_MB = 256
# the wall clock only ends what gets no processor, which it has eight times as long for: a query waits for nothing else
LIMITS = Limits(cpu_s=CPU_S + 1.0, wall_s=10.0, memory_mb=1024, output_bytes=32 << 20)
TIMEOUT_S = 250.0  # of an item in a pool: two queries and room; the limits above end them long before
SANDBOXES = 4  # folders of databases that are kept ready
_SEMICOLONS = 100  # that are tried as the end of a query
_MAY = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_NEVER = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}
_FAILURES = ("wall", "broken")  # of a call, which say nothing about the query
_sandboxes: dict[str, Sandbox] = {}
_lock = threading.Lock()

Rows = list[tuple[Any, ...]]


def prepare() -> None:
    """Nothing is slow to load; that it is there sends jobs to a pool of processes."""


def extract(response: str) -> str:
    """The query in a response: its last fenced block, else all of the text, up to the first semicolon that ends it.

    Blocks in SQL count first, then those without a language.

    >>> extract("It is\\n```sql\\nSELECT 1;\\n```")
    'SELECT 1'
    """
    text = response[-MAX_CHARACTERS:]
    text = (written_in("sql|sqlite|sqlite3", blocks(text)) or [text])[-1].strip()
    for found in itertools.islice(re.finditer(";", text), _SEMICOLONS):
        try:
            whole = sqlite3.complete_statement(text[: found.end()])
        except ValueError:  # text that SQLite does not take, as the query will show
            break
        if whole:
            return text[: found.start()].strip()
    return text


def _authorize(action: int, first: Any, second: Any, *_: Any) -> int:
    allowed = action in _MAY and str(second).lower() not in _NEVER
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _open(database: str, cpu_s: float) -> sqlite3.Connection:
    """A connection that only reads, and that has read already."""
    connection = sqlite3.connect(f"{pathlib.Path(database).as_uri()}?mode=ro&immutable=1", uri=True)
    connection.execute(f"PRAGMA hard_heap_limit={HEAP_MB << 20}")
    connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    connection.text_factory = lambda raw: raw.decode(errors="replace")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 24)
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_CHARACTERS)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.set_authorizer(_authorize)
    end = time.process_time() + cpu_s
    connection.set_progress_handler(lambda: time.process_time() > end, 10_000)
    return connection


def _rows(connection: sqlite3.Connection, query: str) -> tuple[Rows, int]:
    """The rows of a query, and how many columns they have or would have."""
    asked = connection.execute(query)
    if asked.description is None:  # a comment, or nothing at all: no rows would equal those of an empty answer
        raise ValueError("no query")
    rows = asked.fetchmany(MAX_ROWS + 1)
    if len(rows) > MAX_ROWS:
        raise OverflowError(f"more than {MAX_ROWS} rows")
    return rows, len(asked.description)


def _no_object(value: Any) -> int:
    raise TypeError(f"SQLite returned a {type(value).__name__}")


def read(database: str, query: str, cpu_s: float) -> dict[str, Any]:
    """In the sandbox: the ``rows`` of a query (by ``values.encode``) and their ``columns``, or what ``failed``."""
    try:
        rows, columns = _rows(_open(database, cpu_s), query)
        return {"rows": values.encode(rows, _no_object), "columns": columns}
    except (sqlite3.Error, sqlite3.Warning, OverflowError, ValueError) as error:
        return {"failed": str(error)}


def compare(database: str, query: str, cpu_s: float, wanted: Any, columns: int, rule: str) -> dict[str, Any]:
    """In the sandbox: whether a query is ``right``, or what ``failed``.

    Args:
      wanted: encoded rows.
      columns: of them; they tell apart what has no rows, except by ``set``.
      rule: ``set``, ``bag`` or ``ordered``.
    """
    connection = _open(database, cpu_s)
    try:
        found, width = _rows(connection, query)
    except (sqlite3.Error, sqlite3.Warning, OverflowError, ValueError) as error:
        return {"failed": str(error)}
    rows = values.decode(wanted, lambda number: number)
    if rule == "set":
        right = same_set(found, rows)
    else:
        right = width == columns and same_bag(found, rows, ordered=rule == "ordered")
    return {"right": right, "rows": len(found)}


def same_set(found: Sequence[tuple], wanted: Sequence[tuple]) -> bool:
    """BIRD's rule: the same rows, whatever their order and number.

    >>> same_set([(1,), (2,), (2,)], [(2,), (1,)])
    True
    """
    return set(found) == set(wanted)


def same_bag(found: Sequence[tuple], wanted: Sequence[tuple], *, ordered: bool = False) -> bool:
    """Spider's rule: each row as often, in the same order if ``ordered``, up to the order of columns.

    Columns are matched one by one, and an order of columns is given up as soon as its first ones differ as rows; the
    search ends as "not the same" after ``MAX_WORK`` values.

    From "Semantic Evaluation for Text-to-SQL with Distilled Test Suites", arXiv:2010.02840, on one database.

    >>> same_bag([("a", 1), ("b", 2)], [(2, "b"), (1, "a")]), same_bag([(1,), (2,)], [(2,), (1,)], ordered=True)
    (True, False)
    """
    if len(found) != len(wanted):
        return False
    if not found:
        return True
    ours, theirs = list(zip(*found, strict=True)), list(zip(*wanted, strict=True))
    if ordered or len(ours) != len(theirs):
        return Counter(ours) == Counter(theirs)
    counts = [Counter(column) for column in ours]
    choices = [[j for j, count in enumerate(counts) if count == Counter(column)] for column in theirs]
    columns = sorted(range(len(theirs)), key=lambda i: len(choices[i]))  # those with the fewest choices first
    start = ([0] * len(found),) * 2  # rows that are equal so far have equal numbers
    return _match(ours, [(theirs[i], choices[i]) for i in columns], frozenset(), start, [MAX_WORK])


def _match(ours: list, left: list, used: frozenset, numbers: tuple[list, list], work: list[int]) -> bool:
    """Whether unused columns of ours can be paired with all that are left of theirs.

    Args:
      left: of theirs, each with the columns of ours that hold the same values.
      numbers: of each row of ours and of theirs, which other rows it equals in the columns that are paired.
      work: how many values may still be looked at.
    """
    if not left:
        return True
    (wanted, choices), tried = left[0], set()
    for j in choices:
        if j in used or ours[j] in tried:  # columns that are equal throughout are one choice
            continue
        tried.add(ours[j])
        work[0] -= 2 * len(wanted)
        if work[0] < 0:
            return False
        names: dict[tuple, int] = {}
        finer = tuple(
            [names.setdefault(pair, len(names)) for pair in zip(old, column, strict=True)]
            for old, column in zip(numbers, (ours[j], wanted), strict=True)
        )
        same = Counter(finer[0]) == Counter(finer[1])
        if same and _match(ours, left[1:], used | {j}, finer, work):
            return True
    return False


def _call(function: str, database: str, *given: Any) -> Called:
    path = pathlib.Path(database).resolve()  # the folder that is shown holds the file itself, not a link to it
    if not path.is_file():
        return Called("broken", None, f"unable to open {database}: there is no such file", 0.0)
    # Spider and BIRD keep each database in a folder of its name, and these side by side
    folder = str(path.parent.parent if path.parent.name == path.stem else path.parent)
    with _lock:
        sandbox = _sandboxes.pop(folder, None)
        if sandbox is None:
            while len(_sandboxes) >= SANDBOXES:  # the one that was not asked for longest
                _sandboxes.pop(next(iter(_sandboxes))).close()
            # files of this user alone are read as this user
            sandbox = Sandbox(workers=1, limits=LIMITS, modules=(__name__,), readable=[folder], without=["other_user"])
        _sandboxes[folder] = sandbox
    return sandbox.call_fresh(f"{__name__}:{function}", str(path), *given)


def _read(database: str, query: str, cpu_s: float) -> dict[str, Any]:
    """What ``read`` gives, or the exceptions of ``run``."""
    called = _call("read", database, query, cpu_s)
    if called.status in _FAILURES:
        raise RuntimeError(called.reason)
    if called.status != "ok" or "failed" in called.value:
        raise ValueError(called.reason or called.value["failed"])
    return called.value


def run(database: str, query: str, *, cpu_s: float = CPU_S) -> Rows:
    """The rows of a query that only reads.

    Raises:
      ValueError: for a query that is none, wrong, refused, returns more than ``MAX_ROWS`` rows, or exhausts its limits.
      RuntimeError: where the sandbox fails or the database is not there.
    """
    return values.decode(_read(database, query, cpu_s)["rows"], lambda number: number)


@lru_cache(maxsize=1024)
def _wanted(database: str, query: str) -> tuple[Any, int]:
    """The encoded rows of a reference, and their columns."""
    said = _read(database, query, CPU_S)
    return said["rows"], said["columns"]


def verify(answer: dict[str, Any], response: str) -> Verdict:
    """1 where the response's query returns what the reference query does, else 0.

    Invalid where the reference itself fails, or the database does.

    Args:
      answer: ``database`` (a path), ``value`` (the reference query) and ``rule``: ``"bag"`` (``same_bag``, ordered
        where the reference orders) or ``"set"`` (``same_set``).
    """
    database, reference = answer["database"], answer["value"]
    try:
        wanted, columns = _wanted(database, reference)
    except (ValueError, RuntimeError) as error:
        return Verdict(0.0, False, f"the reference fails: {error}")
    query = extract(response)
    if not query:
        return Verdict(0.0, True, "no query")
    rule = answer["rule"]
    if rule == "bag" and re.search(r"\border\s+by\b", reference, re.IGNORECASE):
        rule = "ordered"
    called = _call("compare", database, query, CPU_S, wanted, columns, rule)
    if called.status in _FAILURES:
        return Verdict(0.0, False, called.reason)
    if called.status != "ok":
        return Verdict(0.0, True, f"the query fails: it {called.reason.splitlines()[-1]}")
    if "failed" in called.value:
        return Verdict(0.0, True, f"the query fails: {called.value['failed']}")
    right, count = called.value["right"], called.value["rows"]
    return Verdict(1.0, True, "") if right else Verdict(0.0, True, f"{count} rows that differ from {len(wanted) - 1}")
