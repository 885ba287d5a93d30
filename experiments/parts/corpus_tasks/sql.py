"""Toy SQL: a request about one table becomes a query.

``sql t(a,b,c) sum b if a>3=>`` gives ``SELECT sum(b) FROM t WHERE a>3``.
"""

import numpy as np

from jaxrl_llm.data.problem import Problem

LEVELS = (1, 2, 3)  # clauses: select, + condition, + order
_COLUMNS = "abcde"


def make(rng: np.random.Generator, level: int) -> Problem:
    """Draws a request of ``level`` clauses over a table of three columns."""
    if level not in LEVELS:
        raise ValueError(f"level={level} clauses is not one of {LEVELS}")
    table = "tuvw"[rng.integers(4)]
    columns = sorted(_COLUMNS[i] for i in rng.permutation(5)[:3])
    column, other, order = (columns[i] for i in rng.integers(0, 3, 3))
    function = ("", "sum", "max", "min", "count")[rng.integers(5)]
    if level == 3:
        function = ""
    request = f"{function} {column}".strip()
    query = f"SELECT {function}({column}) FROM {table}" if function else f"SELECT {column} FROM {table}"
    if level >= 2:
        sign, number = "<>="[rng.integers(3)], int(rng.integers(0, 10))
        request += f" if {other}{sign}{number}"
        query += f" WHERE {other}{sign}{number}"
    if level == 3:
        down = rng.random() < 0.5
        request += f" by {order} {'down' if down else 'up'}"
        query += f" ORDER BY {order}{' DESC' if down else ''}"
    prompt = f"sql {table}({','.join(columns)}) {request}=>"
    return Problem("sql", prompt, query, {"value": query, "table": table, "columns": columns}, level, prompt)
