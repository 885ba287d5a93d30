"""Queries judged by their rows; nothing but reading, in bounded time, memory and rows."""

import os
import pathlib
import sqlite3

import pytest

from jaxrl_llm.sandbox.records import Called
from jaxrl_llm.tools import boxes
from jaxrl_llm.verifiers import sql
from jaxrl_llm.verifiers.pool import VerifierPool

COUNT = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r)"  # without end
PEOPLE = [("ann", 30, "x"), ("bob", 25, "y"), ("cat", 25, "x")]


@pytest.fixture(scope="module", autouse=True)
def impatient():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sql, "CPU_S", 0.3)
        patch.setattr(sql, "LIMITS", sql.LIMITS._replace(cpu_s=1.0))
        patch.setattr(sql, "_sandboxes", {})  # of these limits
        yield


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    path = tmp_path_factory.mktemp("db") / "people 100% #1?.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE people (name TEXT, age INTEGER, team TEXT)")
    connection.executemany("INSERT INTO people VALUES (?, ?, ?)", PEOPLE)
    connection.commit()
    connection.close()
    return str(path)


def _ask(database, reference, response, rule="bag"):
    return sql.verify({"database": database, "value": reference, "rule": rule}, response)


@pytest.mark.parametrize(
    ("reference", "response", "value"),
    [
        ("SELECT name FROM people", "SELECT name FROM people WHERE age > 0", 1.0),
        ("SELECT name FROM people", "I think:\n```sql\nSELECT p.name FROM people AS p;\n```\ndone", 1.0),
        ("SELECT name FROM people", "```SQL\r\nSELECT name FROM people\r\n```\r\ngives\n```\n| ann |\n```", 1.0),
        ("SELECT name FROM people", "```bash\nsqlite3\n```\nand\n```sqlite3\nSELECT name FROM people\n```", 1.0),
        ("SELECT name FROM people", "SELECT name FROM people; DROP TABLE people", 1.0),
        ("SELECT name FROM people WHERE name=';'", "SELECT name FROM people WHERE name=';'; --", 1.0),
        ("SELECT name, age FROM people", "SELECT age, name FROM people", 1.0),
        ("SELECT name FROM people ORDER BY name", "SELECT name FROM people ORDER BY name DESC", 0.0),
        ("SELECT name FROM people", "SELECT name FROM people ORDER BY name DESC", 1.0),
        ("SELECT team FROM people", "SELECT DISTINCT team FROM people", 0.0),
        ("SELECT name FROM people", "SELECT nme FROM people", 0.0),
        ("SELECT name FROM people", "it cannot be known", 0.0),
        ("SELECT name FROM people", "", 0.0),
        ("SELECT name FROM people WHERE age > 90", "SELECT team FROM people WHERE age > 80", 1.0),
        ("SELECT name FROM people WHERE age > 90", "SELECT name, age FROM people WHERE age > 90", 0.0),
        ("SELECT name FROM people WHERE age > 90", "-- I do not know", 0.0),
        ("SELECT name FROM people WHERE age > 90", "/* I do not know */", 0.0),
    ],
)
def test_spiders_rule(database, reference, response, value):
    verdict = _ask(database, reference, response)
    assert (verdict.value, verdict.valid) == (value, True), verdict.reason
    assert bool(verdict.reason) == (value == 0.0)


def test_birds_rule_ignores_order_and_number_of_rows_but_not_that_of_columns(database):
    assert _ask(database, "SELECT team FROM people", "SELECT DISTINCT team FROM people", "set").value == 1.0
    assert _ask(database, "SELECT name FROM people ORDER BY name", "SELECT name FROM people", "set").value == 1.0
    assert _ask(database, "SELECT name, age FROM people", "SELECT age, name FROM people", "set").value == 0.0


def test_a_comment_is_no_query(database):
    for rule in ("bag", "set"):
        judged = _ask(database, "SELECT name FROM people WHERE age > 90", "-- I do not know", rule)
        assert judged == (0.0, True, "the query fails: no query")
    assert not _ask(database, "-- nothing", "-- nothing").valid
    with pytest.raises(ValueError, match="no query"):
        sql.run(database, "-- nothing")


def test_a_database_behind_a_link_is_read_where_it_lies(database, tmp_path):
    (tmp_path / "linked.sqlite").symlink_to(database)
    link = tmp_path / "linked.sqlite"
    assert len(sql.run(str(link), "SELECT name FROM people")) == 3
    assert _ask(str(link), "SELECT name FROM people", "SELECT name FROM people").value == 1.0
    asked = boxes.database_box(link).run("query", {"sql": "SELECT name FROM people WHERE age > 25"})
    assert asked == ('["ann"]', False, True)


def test_columns_are_matched_by_whole_rows():
    crossed = [(1, 2), (2, 1), (1, 1), (2, 2)]
    assert sql.same_bag(crossed, crossed[::-1]) and not sql.same_bag([(1, 2), (2, 1)], [(1, 1), (2, 2)])
    assert not sql.same_bag([(1,)], [(1, 1)]) and not sql.same_bag([(1,)], [(1,), (1,)])
    assert sql.same_bag([(3, 1, 2)], [(1, 2, 3)], ordered=True)
    wide = [tuple(range(9)), tuple(range(1, 10))]
    assert sql.same_bag([row[::-1] for row in wide], wide)


@pytest.mark.parametrize(
    "attack",
    [
        "INSERT INTO people VALUES ('eve', 1, 'z')",
        "DROP TABLE people",
        "ATTACH DATABASE '/etc/passwd' AS p",
        "PRAGMA table_info(people)",
        "SELECT load_extension('x')",
        "SELECT readfile('/etc/passwd')",
        "VACUUM INTO '/tmp/copied.sqlite'",
        "CREATE TEMP TABLE t AS SELECT 1",
        f"{COUNT} SELECT n FROM r",
        f"{COUNT} SELECT count(*) FROM r",
        "SELECT hex(zeroblob(1000000000))",
        f"{COUNT} SELECT group_concat(hex(randomblob(99999))) FROM r",
        "SELECT " + "(" * 5000 + "1" + ")" * 5000,
        "SELECT '" + "x" * 30_000,
        "SELECT \x00 1",
        "SELECT 1;\x00",
        "SELECT '\ud800';",
        f"{COUNT} SELECT zeroblob(16000000) FROM r LIMIT 9000",
        "SELECT instr(zeroblob(16000000), zeroblob(8000000) || x'01')",
        "SELECT replace(hex(zeroblob(4000000)), '0', 'aaaa')",
        "SELECT printf('%.*c', 16000000, 'x') LIKE '%x%x%x%x%x%x%x%x%y'",
        "SELECT " + "abs(" * 900 + "1" + ")" * 900,
        "SELECT ?",
        ";" * 19_000 + "'",
        "```" + " " * 19_000 + "x",
    ],
)
def test_attacks_earn_nothing_and_change_nothing(database, attack):
    """What a query exhausts by its own doing is wrong, not invalid; the next one is judged as before."""
    before = os.stat(database)
    verdict = _ask(database, "SELECT name FROM people", attack)
    assert (verdict.value, verdict.valid) == (0.0, True)
    assert verdict.reason.startswith(("the query fails", "1 rows", "no query"))
    assert os.stat(database).st_mtime_ns == before.st_mtime_ns
    assert _ask(database, "SELECT name FROM people", "SELECT name FROM people").value == 1.0


def test_what_is_not_the_models_failure_is_invalid(database, tmp_path):
    assert not _ask(database, "SELECT x FROM people", "SELECT 1").valid
    assert "unable to open" in _ask(str(tmp_path / "none.sqlite"), "SELECT 1", "SELECT 1").reason


def test_orders_of_columns_are_searched_without_end_in_sight():
    """Twelve equal columns have 12! orders; columns of the same values in other rows are told apart early."""
    equal = [(k,) * 12 for k in range(50)]
    assert sql.same_bag(equal, equal[::-1])
    assert not sql.same_bag([(*row[:11], -row[11]) for row in equal], equal)
    turned = [tuple((i + 7 * j) % 40 for j in range(12)) for i in range(40)]
    assert sql.same_bag([row[::-1] for row in turned], turned[::-1])
    crossed = [(*row[:10], row[11], row[10]) for row in turned[:20]] + turned[20:]
    assert not sql.same_bag(crossed, turned)
    # two orders of bits that no single column tells apart: given up, which is not the same
    bits = [tuple(i >> j & 1 for j in range(12)) for i in range(4096)]
    assert not sql.same_bag([(*row[:11], row[10]) for row in bits], bits)


@pytest.mark.parametrize("status", ["wall", "broken"])
def test_a_busy_machine_says_nothing_about_a_query(database, monkeypatch, status):
    reference = "SELECT name FROM people"
    assert _ask(database, reference, reference).value == 1.0  # from here on the rows of the reference are known
    monkeypatch.setattr(sql.Sandbox, "call_fresh", lambda *_: Called(status, None, "got no processor", 9.0))
    assert _ask(database, reference, reference) == (0.0, False, "got no processor")


def test_a_few_folders_are_kept_ready(database, tmp_path, monkeypatch):
    monkeypatch.setattr(sql, "_sandboxes", {})
    for k in range(sql.SANDBOXES + 1):
        path = tmp_path / f"{k}" / "people" / "people.sqlite"  # as Spider and BIRD have it
        path.parent.mkdir(parents=True)
        path.write_bytes(pathlib.Path(database).read_bytes())
        assert len(sql.run(str(path), "SELECT * FROM people")) == 3
    assert list(sql._sandboxes) == [str(tmp_path / str(k)) for k in range(1, sql.SANDBOXES + 1)]
    for sandbox in sql._sandboxes.values():
        sandbox.close()


@pytest.mark.timeout(120)
def test_in_a_pool(database):
    answer = {"database": database, "value": "SELECT name FROM people", "rule": "bag"}
    with VerifierPool(workers=1, timeout_s=sql.TIMEOUT_S) as pool:
        found = pool.judge(sql.verify, [answer, answer], ["SELECT name FROM people", "SELECT 1"]).verdicts
    assert [(v.value, v.valid) for v in found] == [(1.0, True), (0.0, True)]
