"""The table of systems is read off records, and the committed page is up to date."""

import json
import pathlib

from jaxrl_llm.experiment import systems

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date():
    committed = (ROOT / "docs" / "SYSTEMS.md").read_text()
    assert committed == systems.render(), "run python -m jaxrl_llm.experiment systems"


def test_the_list_names_every_system_once_and_every_experiment():
    listed = systems.listed()
    assert len(listed) == 172 and len({s.slug for s in listed}) == 172
    files = {p.stem for p in (ROOT / "experiments").glob("*/*.py") if p.stem != "__init__" and p.parent.name != "parts"}
    assert files <= {s.slug for s in listed}, "add the system to experiments/systems.tsv"


def _tree(root):
    for folder in ("experiments/family", "tests/papers", "results/family", "docs"):
        (root / folder).mkdir(parents=True)
    rows = [f"family\t{slug}\tTitle of {slug} | more\t2501.00001" for slug in ("none", "file", "named", "own", "ran")]
    (root / "experiments" / "systems.tsv").write_text("\n".join(["family\tslug\ttitle\tarxiv", *rows]) + "\n")
    for slug in ("file", "named", "own", "ran"):
        (root / "experiments" / "family" / f"{slug}.py").write_text("")
    (root / "tests" / "test_all.py").write_text("from experiments.family import other, named\n'the file loop'\n")
    (root / "tests" / "papers" / "test_own.py").write_text("")
    return root


def _record(root, verdict, parts):
    claim = {"verdict": verdict, "confidence": 0.9666, "parts": parts}
    record = {"arms": {"a": {"seeds": [0, 1, 2]}, "b": {"seeds": [0, 1]}}, "claim": claim}
    (root / "results" / "family" / "ran.json").write_text(json.dumps(record))


def test_statuses_come_from_files_tests_and_records(tmp_path):
    root = _tree(tmp_path)
    _record(root, "not reproduced", [{}])
    page = systems.render(root)
    assert "5 systems: 1 not reproduced, 2 tested, 1 written, 1 not started." in page
    link = "[2501.00001](https://arxiv.org/abs/2501.00001)"
    assert f"| `none` | Title of none \\| more {link} | not started |" in page
    assert f"| [`file`](../experiments/family/file.py) | Title of file \\| more {link} | written |" in page
    assert f"Title of named \\| more {link} | tested |" in page and f"Title of own \\| more {link} | tested |" in page
    assert "| **not reproduced** (2 arms, 2 seeds, confidence 0.97) |" in page
    _record(root, "inconclusive", [])
    assert "| **run** (2 arms, 2 seeds) |" in systems.render(root)


def test_write_puts_the_page_where_the_test_looks(tmp_path):
    root = _tree(tmp_path)
    assert systems.write(root) == root / "docs" / "SYSTEMS.md"
    assert (root / "docs" / "SYSTEMS.md").read_text() == systems.render(root)
