"""The table in docs/traps.md names every trap and every test file, and no other."""

import pathlib
import re

HERE = pathlib.Path(__file__).parent
TABLE = (HERE.parents[1] / "docs" / "traps.md").read_text()


def test_every_trap_has_a_row_and_its_test():
    rows = re.findall(r"^\| (\d+) .*\| (tested|part) \| `(test_trap_(\d\d)_\w+\.py)` \|$", TABLE, re.MULTILINE)
    numbers = [int(number) for number, *_ in rows]
    assert numbers == sorted(set(numbers)) and set(range(1, 41)) <= set(numbers)
    assert all(int(number) == int(inside) for number, _, _, inside in rows)
    assert {name for _, _, name, _ in rows} == {path.name for path in HERE.glob("test_trap_*.py")}


def test_every_part_says_what_is_missing_and_why():
    parts = set(re.findall(r"^\| (\d+) [^|]*\|[^|]*\| part \|", TABLE, re.MULTILINE))
    deferred = set(re.findall(r"^\| (\d+) \|", TABLE.partition("## Deferred parts")[2], re.MULTILINE))
    assert parts == deferred
