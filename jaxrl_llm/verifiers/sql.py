"""Queries judged by what they return from an SQLite database: execution accuracy of Spider and BIRD.

A query may only read: the file is opened immutable, an authorizer refuses everything but selecting, and rows, time,
memory and text are bounded. Run it in a ``pool.VerifierPool`` (jobs do): then a fault in SQLite ends no training.
"""

import itertools
import pathlib
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jaxrl_llm.verifiers.verdict import Verdict

WALL_S = 5.0  # of one query
TIMEOUT_S = 3 * WALL_S  # of an item in a pool: two queries and room
MAX_ROWS = 10_000
MAX_CHARACTERS = 20_000
MAX_ORDERS = 5_000  # of columns that are tried
HEAP_MB = 256
_FENCED = re.compile(r"```[ \t]*(?:sql|sqlite|SQL)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_MAY = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_NEVER = {"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"}

Rows = list[tuple[Any, ...]]


def prepare() -> None:
    """Nothing is slow to load; that it is there sends jobs to a pool of processes."""


def extract(response: str) -> str:
    """The query in a response: its last fenced block, else all of the text, up to the first semicolon that ends it.

    >>> extract("It is\\n```sql\\nSELECT 1;\\n```")
    'SELECT 1'
    """
    text = response[-MAX_CHARACTERS:]
    blocks = _FENCED.findall(text)
    text = (blocks[-1] if blocks else text).strip()
    for end in (m.start() for m in re.finditer(";", text)):
        if sqlite3.complete_statement(text[: end + 1]):
            return text[:end].strip()
    return text


def _authorize(action: int, first: Any, second: Any, *_: Any) -> int:
    allowed = action in _MAY and str(second).lower() not in _NEVER
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def run(database: str, query: str, *, wall_s: float = WALL_S) -> Rows:
    """The rows of a query that only reads.

    Raises:
      sqlite3.Error: for a query that is wrong, refused, or runs out of time or memory.
      OverflowError: for more than ``MAX_ROWS`` rows.
    """
    connection = sqlite3.connect(f"{pathlib.Path(database).absolute().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        connection.execute(f"PRAGMA hard_heap_limit={HEAP_MB << 20}")
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1 << 24)
        connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_CHARACTERS)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_authorizer(_authorize)
        end = time.monotonic() + wall_s
        connection.set_progress_handler(lambda: time.monotonic() > end, 10_000)
        rows = connection.execute(query).fetchmany(MAX_ROWS + 1)
    finally:
        connection.close()
    if len(rows) > MAX_ROWS:
        raise OverflowError(f"more than {MAX_ROWS} rows")
    return rows


def same_set(found: Sequence[tuple], wanted: Sequence[tuple]) -> bool:
    """BIRD's rule: the same rows, whatever their order and number.

    >>> same_set([(1,), (2,), (2,)], [(2,), (1,)])
    True
    """
    return set(found) == set(wanted)


def same_bag(found: Sequence[tuple], wanted: Sequence[tuple], *, ordered: bool = False) -> bool:
    """Spider's rule: each row as often, in the same order if ``ordered``, up to the order of columns.

    At most ``MAX_ORDERS`` orders of columns are tried, of those under which every column holds the same values.

    From "Semantic Evaluation for Text-to-SQL with Distilled Test Suites", arXiv:2010.02840, on one database.

    >>> same_bag([("a", 1), ("b", 2)], [(2, "b"), (1, "a")]), same_bag([(1,), (2,)], [(2,), (1,)], ordered=True)
    (True, False)
    """
    if len(found) != len(wanted):
        return False
    if not found:
        return True
    width = len(wanted[0])
    if len(found[0]) != width:
        return False
    ours = [Counter(column) for column in zip(*found, strict=True)]
    theirs = [Counter(column) for column in zip(*wanted, strict=True)]
    choices = [[j for j in range(width) if ours[j] == want] for want in theirs]
    target = list(wanted) if ordered else Counter(wanted)
    orders = (o for o in itertools.product(*choices) if len(set(o)) == width)
    for order in itertools.islice(orders, MAX_ORDERS):
        rows = [tuple(row[j] for j in order) for row in found]
        if (rows if ordered else Counter(rows)) == target:
            return True
    return False


@lru_cache(maxsize=4096)
def _wanted(database: str, query: str) -> Rows:
    return run(database, query)


def verify(answer: dict[str, Any], response: str) -> Verdict:
    """1 where the response's query returns what the reference query does, else 0.

    Invalid where the reference itself fails, or the database does.

    Args:
      answer: ``database`` (a path), ``value`` (the reference query) and ``rule``: ``"bag"`` (``same_bag``, ordered
        where the reference orders) or ``"set"`` (``same_set``).
    """
    database, reference = answer["database"], answer["value"]
    try:
        wanted = _wanted(database, reference)
    except (sqlite3.Error, OverflowError) as error:
        return Verdict(0.0, False, f"the reference fails: {error}")
    query = extract(response)
    if not query:
        return Verdict(0.0, True, "no query")
    try:
        found = run(database, query)
    except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError, ValueError) as error:
        return Verdict(0.0, True, f"the query fails: {error}")
    if answer["rule"] == "set":
        right = same_set(found, wanted)
    else:
        right = same_bag(found, wanted, ordered=bool(re.search(r"\border\s+by\b", reference, re.IGNORECASE)))
    return Verdict(1.0, True, "") if right else Verdict(0.0, True, f"{len(found)} rows that differ from {len(wanted)}")
