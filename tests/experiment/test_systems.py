"""The table of systems is read off records, and the committed page is up to date."""

import json
import pathlib

from jaxrl_llm.experiment import claims
from jaxrl_llm.experiment.evidence import pilot, records, systems

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_page_is_up_to_date():
    committed = (ROOT / "docs" / "SYSTEMS.md").read_text()
    assert committed == systems.render(), "run python -m jaxrl_llm.experiment pages"


def test_the_list_names_every_system_once_and_every_experiment():
    listed = systems.listed()
    assert len(listed) == 172 and len({s.slug for s in listed}) == 172
    files = {
        p.stem
        for p in (ROOT / "experiments").glob("*/*.py")
        if p.stem != "__init__" and p.parent.name not in ("parts", "beds")  # test beds are of no paper
    }
    assert files <= {s.slug for s in listed}, "add the system to experiments/systems.tsv"


FAMILIES = (
    "agents", "analysis", "curriculum", "efficiency", "offline", "policy_gradient", "preference", "reward_models",
    "search", "self_play", "systems",
)  # fmt: skip


def test_every_file_states_whether_it_has_the_whole_method():
    stated = {s.slug: s.mechanism for s in systems.listed()}
    files = {p.stem for family in FAMILIES for p in (ROOT / "experiments" / family).glob("*.py")} - {"__init__"}
    wrong = {x for x in files if stated[x] != "complete" and not stated[x].startswith("lacks ")}
    assert not wrong, "say 'complete' or 'lacks ...' in experiments/systems.tsv"


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


PART = claims.judge(claims.Part("a > b", "eval/accuracy", "a", "b", (0.1, 0.2, 0.3), d_star=0.02, planned=3), 0.05)


def _record(root, verdict, part, *, bed="", instrument=None, problem=()):
    kept = records.plain_claim(claims.Claim("it is better", verdict, part, (), problem))
    record = {"arms": {"a": {"seeds": [0, 1, 2]}, "b": {"seeds": [0, 1]}}, "claim": kept, "instrument": instrument}
    (root / "results" / "family" / f"ran{bed}.json").write_text(json.dumps(record))


def test_statuses_come_from_files_tests_and_records(tmp_path):
    root = _tree(tmp_path)
    _record(root, "contradicted", PART)
    page = systems.render(root)
    assert "5 systems: 1 contradicted (old instrument), 2 tested, 1 written, 1 not started." in page
    link, bare = "[2501.00001](https://arxiv.org/abs/2501.00001)", "not stated | none | none"
    assert f"| `none` | Title of none \\| more {link} | | | | not started |" in page
    assert f"| [`file`](../experiments/family/file.py) | Title of file \\| more {link} | {bare} | written |" in page
    assert all(f"Title of {slug} \\| more {link} | {bare} | tested |" in page for slug in ("named", "own"))
    said = "**contradicted (old instrument)**: a > b: +0.2 [-0.04841, +0.4484] (n=3, 95 % interval, d* 0.02"
    assert f"| not stated | none | old instrument | {said}" in page
    _record(root, "not judged", None)
    assert "| **not judged (old instrument)**: 2 arms, 2 seeds |" in systems.render(root)
    _record(root, "test bed invalid", PART, problem=("the baseline sleeps",))
    assert "| **test bed invalid (old instrument)**: a > b: +0.2 [" in systems.render(root)
    assert "; the baseline sleeps |" in systems.render(root)


def test_mechanism_pilot_and_record_have_columns(tmp_path):
    root = _tree(tmp_path)
    table = root / "experiments" / "systems.tsv"
    lines = [f"{line}\tlacks a critic" if "\town\t" in line else line for line in table.read_text().splitlines()]
    table.write_text("\n".join(lines) + "\n")
    found = {"method": "a", "baseline": "b", "metric": "eval/accuracy", "floor": 0.1, "end": 0.5, "d_star": 0.1,
             "noise": 0.02, "seen_before": float("nan"), "processor_seconds": 60.0, "programs": 2}  # fmt: skip
    rows = root / "results" / "pilots.tsv"
    pilot.keep(rows, "family/own", found | {"problems": ["the baseline sleeps"]}, arms_of_record=8)
    pilot.keep(rows, "family/file", found | {"problems": [], "processor_seconds": 30.0}, arms_of_record=8)
    again = {"problems": [], "processor_seconds": 0.1}
    pilot.keep(rows, "family/file", found | again, arms_of_record=12)  # its seeds were in the store
    kept = pilot.kept_rows(rows)
    assert list(kept) == ["family/file", "family/own"], "the cheapest first"
    assert kept["family/file"]["processor seconds"] == "30" and kept["family/file"]["seen before"] == ""
    page = systems.render(root)
    assert " | lacks a critic | says no (16 min): the baseline sleeps | none | tested |" in page
    assert " | not stated | passes (12 min) | none | written |" in page
    proof = {"pilot": {"problems": ["no room"]}}
    _record(root, "supported here", PART, instrument=proof)
    _record(root, "supported here", PART, bed="@other", instrument=proof)
    assert " | says no: no room | 2 under the standard | **supported**" in systems.render(root)


def test_two_beds_make_a_claim_supported_and_the_old_instrument_does_not_count(tmp_path):
    root, new = _tree(tmp_path), {"tries": 1}
    _record(root, "contradicted", PART)
    _record(root, "supported here", PART, bed="@countdown", instrument=new)
    assert "| **supported here**: a > b" in systems.render(root)
    _record(root, "supported here", PART, instrument=new)
    assert "| **supported**: a > b" in systems.render(root)
    _record(root, "contradicted", PART, instrument=new)
    assert "| **undecided**: a > b" in systems.render(root)


def test_write_puts_the_page_where_the_test_looks(tmp_path):
    root = _tree(tmp_path)
    assert systems.write(root) == root / "docs" / "SYSTEMS.md"
    assert (root / "docs" / "SYSTEMS.md").read_text() == systems.render(root)


def test_certificates_of_beds_are_on_the_page(tmp_path):
    root = _tree(tmp_path)
    assert "## Test beds" not in systems.render(root)
    (root / "results" / "beds").mkdir()
    control = {"name": "scrambled", "bounds": {"mean": 0.01, "low": -0.01, "high": 0.03}}
    kept = {
        "bed": "stale", "knob": "lag", "metric": "eval/accuracy", "base": {"eval/accuracy": 0.15}, "end": 0.26,
        "certified": False, "problems": ["control again, x: too wide"], "seeds": 8, "controls": [control],
        "dose_response": [{"dose": 0.0, "mean": 0.26}, {"dose": 8.0, "mean": 0.17}],
    }  # fmt: skip
    (root / "results" / "beds" / "stale.certificate.json").write_text(json.dumps(kept))
    page = systems.render(root)
    assert "| lag | 0.150 to 0.260 | 0: 0.260, 8: 0.170 | scrambled +0.010 [-0.010, +0.030] |" in page
    assert "**not certified** on 8 seeds; control again, x: too wide |" in page


def test_what_base_models_can_do_is_on_the_page(tmp_path):
    root = _tree(tmp_path)
    assert systems.bases(root) == []
    (root / "results" / "pretrain_base").mkdir()

    def of(one, many):
        return {"pass@1": {"mean": one, "low": 0.1, "high": 0.3, "n": 64}, "pass@8": {"mean": many}}

    for name, size, tasks in (("wide", 2000, {"sums": 0.25, "maps": 0.5}), ("slim", 1000, {"sums": 0.2})):
        accuracy = {task: of(one, 0.75) | {"levels": {"3": of(one / 2, 0.5)}} for task, one in tasks.items()}
        kept = {"parameters": size, "accuracy": accuracy}
        (root / "results" / "pretrain_base" / f"{name}.json").write_text(json.dumps(kept))
    page = systems.render(root)
    assert "| task | level | slim (1,000 parameters) | wide (2,000 parameters) |" in page
    assert "| sums | all | 0.20 [0.10, 0.30], 0.75 (n=64) | 0.25 [0.10, 0.30], 0.75 (n=64) |" in page
    assert "| maps | 3 |  | 0.25 [0.10, 0.30], 0.50 (n=64) |" in page
