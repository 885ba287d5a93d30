"""The list of dear tests names tests that are there, and is what its rule makes of measured seconds."""

import pathlib
import re

from tests import dear

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_every_name_is_a_test():
    names = dear.LIST.read_text().splitlines()
    assert names == sorted(set(names)) and names
    gone = []
    for name in names:
        file, _, function = name.partition("::")
        function = function.partition("[")[0]
        text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
        if not re.search(rf"^def {re.escape(function)}\(", text, re.MULTILINE):
            gone.append(name)
    assert not gone, "run python -m tests.dear JUNIT.xml again, or drop the lines"


def test_the_dearest_wait_and_every_file_keeps_one():
    seconds = {"a.py::one": 8.0, "a.py::two": 1.0, "b.py::one": 5.0, "a.py::three": 2.0}
    assert dear.chosen(seconds, stays=0.5) == ["a.py::one"]  # 8 of 16
    assert dear.chosen(seconds, stays=0.4) == ["a.py::one", "a.py::three"]  # that of b.py is its only one
    assert dear.chosen(seconds, stays=1.0) == [] == dear.chosen({}, stays=0.5)


def test_seconds_are_read_from_a_report(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "import pytest\n\n\n@pytest.mark.slow\n@pytest.mark.parametrize('x', [1])\ndef test_proof(x): ...\n\n\n"
        "@pytest.mark.parametrize('x', [1, pytest.param(2, marks=pytest.mark.slow)])\ndef test_quick(x): ...\n"
    )
    cases = "".join(
        f'<testcase classname="tests.test_a" name="{name}" time="{time}">{inside}</testcase>'
        for name, time, inside in (
            ("test_proof[1]", 9.0, ""), ("test_quick[1]", 2.5, ""), ("test_quick[2]", 0.1, "<skipped/>"),
        )
    )  # fmt: skip
    report = tmp_path / "junit.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    monkeypatch.chdir(tmp_path)
    assert dear.measured(str(report)) == {"tests/test_a.py::test_quick[1]": 2.5}
