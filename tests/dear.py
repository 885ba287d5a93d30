"""Which tests are dear: ``python -m tests.dear JUNIT.xml`` writes ``tests/dear.txt``, read by ``conftest.py``.

The list is what has to wait, behind the others and with the tests marked slow, for the rest to take the share of the
time that is wanted; at least one test of every file stays. Measure with

    python -m pytest -n 2 --slow --junitxml=JUNIT.xml

on a quiet machine with an empty compile cache; tests that carry the marker themselves are no part of the list.
"""

import collections
import pathlib
import re
import sys
import xml.etree.ElementTree as ET

LIST = pathlib.Path(__file__).with_name("dear.txt")
STAYS = 0.17  # of the seconds of all tests: a quarter of an hour on two cores


def chosen(seconds: dict[str, float], stays: float = STAYS) -> list[str]:
    """The dearest tests, by their ids, without which the others take at most ``stays`` of the whole.

    >>> chosen({"a.py::one": 8.0, "a.py::two": 1.0, "b.py::one": 5.0, "a.py::three": 2.0}, stays=0.5)
    ['a.py::one']
    """
    left, total = sum(seconds.values()), sum(seconds.values())
    there = collections.Counter(name.partition("::")[0] for name in seconds)
    found = []
    for name, time in sorted(seconds.items(), key=lambda item: -item[1]):
        file = name.partition("::")[0]
        if left <= stays * total:
            break
        if there[file] > 1:
            there[file], left = there[file] - 1, left - time
            found.append(name)
    return sorted(found)


def measured(report: str) -> dict[str, float]:
    """Seconds of the tests that ran, by their ids, without those that carry the marker."""
    seconds = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        name = case.get("name", "")
        skipped = any(part.tag == "skipped" for part in case)
        if not skipped and not _marked(file, name.partition("[")[0]):
            seconds[f"{file}::{name}"] = float(case.get("time") or 0)
    return seconds


def _marked(file: str, function: str) -> bool:
    """Whether the marker stands right before the function; one among its parameters counts as none."""
    text = pathlib.Path(file).read_text() if pathlib.Path(file).is_file() else ""
    return (
        re.search(rf"^@pytest\.mark\.slow\n(?:[@ )\]].*\n)*def {re.escape(function)}\(", text, re.MULTILINE) is not None
    )


if __name__ == "__main__":
    names = chosen(measured(sys.argv[1]))
    LIST.write_text("".join(f"{name}\n" for name in names))
    print(f"{len(names)} tests in {LIST}")
