"""The contract of every file in ``experiments/<family>/``: its text, its arms, its record, and a real smoke run."""

import importlib
import pathlib

import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, cli, doctor, recipes, results

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = sorted(
    p for p in (ROOT / "experiments").glob("*/*.py") if not (p.name.startswith("_") or p.parent.name == "parts")
)
TEMPLATE = ROOT / "experiments" / "_template.py"


def _name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _ids(path):
    return str(path.relative_to(ROOT / "experiments").with_suffix(""))


def _smoke_settings(module, arm):
    base = arms.preset(module, smoke=True, model=module.Settings().model)
    return arms.resolve(module, base, (arm,))[arm]


def test_experiments_are_found():
    assert any(path.stem == "dr_grpo" for path in FILES)
    assert all((path.parent / "__init__.py").is_file() for path in FILES), "a family is a package"
    stems = [path.stem for path in FILES]
    assert len(set(stems)) == len(stems), "one system, one file"


DEFAULT = ("policy_gradient/dr_grpo",)  # what traces and compiles is slow for all the others


def _slow_but_for_one():
    return [p if _ids(p) in DEFAULT else pytest.param(p, marks=pytest.mark.slow) for p in [*FILES, TEMPLATE]]


@pytest.mark.parametrize("path", [*FILES, TEMPLATE], ids=_ids)
def test_contract(path):
    findings = doctor.examine_text(importlib.import_module(_name(path)))
    assert not [str(f) for f in findings if f.problem]
    assert {"docstring", "slots"} <= {f.check for f in findings}


def second(module):
    """The arm that stands for a file where one has to: mostly the paper's method, behind its baseline."""
    return [*module.ARMS][min(1, len(module.ARMS) - 1)]


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=_ids)
def test_an_arm_traces(path):
    """The least that every file has to do; first of the slow tests, of which a bounded time reaches few behind it."""
    module = importlib.import_module(_name(path))
    arm = second(module)
    assert arms.trace(module.build(_smoke_settings(module, arm)))


@pytest.mark.parametrize("path", _slow_but_for_one(), ids=_ids)
def test_arms_trace_and_differ(path):
    findings = doctor.check_arms(importlib.import_module(_name(path)))
    assert not [str(f) for f in findings if f.problem]
    assert "arms differ" in {f.check for f in findings}


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=_ids)
def test_updates_differ_and_the_claim_reads_results(path):
    findings = doctor.check_claim(importlib.import_module(_name(path)))
    assert not [str(f) for f in findings if f.problem]
    assert {f.check for f in findings} == {"updates differ", "claim on made-up results"}


@pytest.mark.parametrize("path", _slow_but_for_one(), ids=_ids)
def test_smoke_run_of_two_arms(path, tmp_path):
    module = importlib.import_module(_name(path))
    chosen = list(module.ARMS)[:2]
    found = cli.run(module, ["--smoke", "--arm", *chosen, "--out", str(tmp_path)])
    record, read = results.read(tmp_path / "results.json")
    assert list(record["arms"]) == list(found.arms) == chosen
    assert (tmp_path / "plot.png").is_file() and (tmp_path / "table.md").is_file()
    for name, arm in read.arms.items():
        trained = bool(module.build(_smoke_settings(module, name)).stages)  # without a stage it is measured only
        assert arm.seeds == [0, 1] and (arm.updates > 0) == trained
        missing = set(module.METRICS) - set(arm.metrics)
        assert not missing, f"{name} does not measure {missing}"
        for metric in ("loss/total", "grad/norm"):
            assert np.isfinite(arm.metrics.get(metric, [0.0])).all(), f"{name}: {metric} {arm.metrics[metric]}"


def test_every_record_belongs_to_an_experiment():
    recorded = {p.relative_to(ROOT / "results").with_suffix("") for p in (ROOT / "results").glob("*/*.json")}
    known = {p.relative_to(ROOT / "experiments").with_suffix("") for p in FILES}
    others = ("pretrain_base", "quickstart", "benchmarks", "compare", "sweeps", "beds", "atlas")
    of_papers = {p.with_name(p.name.partition("@")[0]) for p in recorded if p.parts[0] not in others}
    assert of_papers <= known  # name@bed is the record on another bed


def _embedded_settings():
    """Settings of embedded arms that ask the generators for different problems, by where they stand."""
    found = {}
    for path in FILES:
        if "recipes.bench(" not in path.read_text():
            continue
        module = importlib.import_module(_name(path))
        settings = arms.preset(module, smoke=False, model=module.Settings().model)
        for name, one in arms.resolve(module, settings, ()).items():
            if not one.data:  # problems that are made by the file itself
                continue
            asked = (one.data, one.levels, one.train_problems, one.eval_problems)
            found.setdefault(asked, (f"{_ids(path)}: {name}", one))
    return found.values()


def test_solutions_that_are_imitated_fit_into_a_smoke_run():
    """The arms behind the first two, which alone are tried above, begin with them or learn from them."""
    asked = set()
    for path in FILES:
        if "solutions_imitated" in path.read_text() or "demonstrations(" in path.read_text():
            module = importlib.import_module(_name(path))
            settings = arms.preset(module, smoke=True, model=module.Settings().model)
            for one in arms.resolve(module, settings, ()).values():
                asked.add((one.data, tuple(one.levels), one.train_problems, one.max_new_tokens))
    for data, levels, count, new in asked:
        _, valid = recipes.demonstrations(
            recipes.OnlineSettings(data=data, levels=levels, train_problems=count, max_new_tokens=new)
        )
        assert valid.shape == (count, new) and valid.any(axis=1).all()


@pytest.mark.slow
def test_generators_have_as_many_problems_as_the_embedded_settings_ask_for():
    """A smoke run takes fewer: without this a file would fail only when it is run in earnest."""
    for where, settings in _embedded_settings():
        try:
            assert len(recipes.solved_problems(settings)) == settings.train_problems
        except UserError as error:
            pytest.fail(f"{where}: {error}; set train_problems or eval_problems in EMBEDDED")
