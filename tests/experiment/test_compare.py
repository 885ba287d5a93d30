"""Methods of one family on one task and budget."""

import json
import re
import types

import numpy as np
import pytest

from experiments.parts import rare_search
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import __main__ as commands
from jaxrl_llm.experiment import compare, doctor, locate
from jaxrl_llm.experiment.evidence import beds, tuning
from jaxrl_llm.experiment.results import Results
from tests import close
from tests.experiment import tiny
from tests.experiment.made import arm


def _rising(start, ends):
    """Four evaluations that rise in equal steps."""
    values = np.linspace(np.full(len(ends), start), ends, 4)
    return arm(list(ends), curve={step: list(row) for step, row in enumerate(values)})


@pytest.mark.slow
def test_two_methods_share_task_budget_and_measurement(tmp_path, capsys):
    found = compare.compare("policy_gradient", ["--smoke", "--methods", "dr_grpo", "--out", str(tmp_path)])
    assert list(found.arms) == ["dr_grpo.grpo", "dr_grpo.dr_grpo"]
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["family"] == "policy_gradient" and record["left_out"] == {}
    assert record["command"].startswith("python -m jaxrl_llm.experiment compare policy_gradient --smoke")
    assert re.fullmatch(r"[0-9a-f]{12}\+?|", record["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["made_on"])
    for one in found.arms.values():
        assert (one.rollouts, one.updates, one.seeds) == (3 * 2 * 2, 3, [0, 1])
        assert one.settings["data"] == "countdown" and one.settings["levels"] == [3]
        assert set(compare.METRICS) <= set(one.metrics)
    assert record["arms"]["dr_grpo.grpo"]["settings"]["reduction"] == "seq_mean"
    assert record["arms"]["dr_grpo.dr_grpo"]["settings"]["reduction"] == "constant"
    table = (tmp_path / "table.md").read_text()
    assert (tmp_path / "plot.png").is_file() and "dr_grpo.grpo" in table
    assert "test bed invalid: eval/accuracy of dr_grpo.grpo: 2 evaluations show no learning" in table
    assert [part["arm"] for part in record["parts"]] == ["dr_grpo.dr_grpo"] and record["tail"] == 1
    compare.compare("policy_gradient", ["--smoke", "--methods", "dr_grpo:dr_grpo", "--out", str(tmp_path)])
    assert capsys.readouterr().out.count("taken from") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "poetry"], "no family 'poetry' with experiments; the families are "),
        (["compare", "policy_gradient", "--methods", "dr_grp"], "--methods dr_grp: the experiments of policy_gradient"),
        (["compare", "policy_gradient", "--methods", "dr_grpo:x"], "--methods dr_grpo:x: the arms of dr_grpo are grpo"),
        (["compare", "policy_gradient", "--baseline", "dr_grpo:y"], "--baseline dr_grpo:y: the arms of dr_grpo are"),
        (["compare", "policy_gradient", "--step", "3"], "unknown argument '--step'; did you mean --steps?"),
        (["compare", "policy_gradient", "--seeds", "0"], "--seeds 0 must be at least 1"),
        (["compare", "policy_gradient", "--smoke", "--record"], "--record keeps whole runs only: drop --smoke or"),
        (["compare", "policy_gradient", "--bed", "sandpit"], "--bed sandpit: the test beds are judged_pairs, "),
        (["compare", "policy_gradient", "--bed=sub_goals"], "--bed sub_goals has no problems to sample and verify"),
        (["compare", "policy_gradient", "--bed", "sparse_search", "--data", "a.jsonl"], "drop it, or --data a.jsonl"),
        (["compare", "policy_gradient", "--tune", "1e-4", "2e-4"], "needs at least three different learning rates"),
        (["compare"], "usage: "),
    ],
)
def test_mistakes_are_one_line(words, said, capsys):
    assert commands.main(words) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_numbers_are_those_of_the_bed_and_then_of_the_flags():
    """The family's bed, another that is asked for, none for rows of one's own; a whole comparison measures widely."""
    common = compare.read_common("policy_gradient", [])
    preset = rare_search.EMBEDDED
    assert {name: getattr(common, name) for name in preset if name != "eval_problems"} == {
        name: value for name, value in preset.items() if name != "eval_problems"
    }
    assert (common.bed, common.eval_samples) == ("sparse_search", 4) and common.eval_problems >= 192
    other = compare.read_common("policy_gradient", ["--bed", "long_reasoning", "--steps=7"])
    assert (other.bed, other.levels, other.steps) == ("long_reasoning", (6,), 7)
    assert compare.read_common("policy_gradient", ["--data", "rows.jsonl"]).bed == ""
    assert compare.read_common("efficiency", ["--smoke"]).bed == "long_reasoning"


def test_methods_are_held_against_the_baseline_on_a_bed_that_learns():
    """Eight seeds: a method that is above all, one that is below, one that is level, by Holm over the three."""
    rng = np.random.default_rng(0)
    noise = 0.01 * rng.normal(size=(4, 8))
    ends = {"base": 0.4, "above": 0.5, "below": 0.3, "level": 0.4}
    found = Results({name: _rising(0.1, end + noise[k]) for k, (name, end) in enumerate(ends.items())})
    parts, wrong = compare.judged(found, beds.Bed())
    assert wrong == [] and [part.verdict for part in parts] == ["supported here", "contradicted", "no practical effect"]
    close.assert_near(parts[0].d_star, 0.25 * (0.3 + noise[0].mean()))
    assert sorted(part.level for part in parts)[0] == 0.05 / 3
    for name, one in found.arms.items():
        one.settings["learning_rate"] = {"above": 2e-4}.get(name, 1e-4)
    lines = compare.verdict_table(parts, found, ["level"]).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| above", "| level", "| below"]
    assert "supported here | 0.0002 |" in lines[2] and "| 0.0001, an end of the grid |" in lines[3]
    flat = Results({name: _rising(0.4, 0.4 + noise[k]) for k, name in enumerate(ends)})
    assert "not four standard errors" in compare.judged(flat, beds.Bed())[1][0]


def test_a_method_that_holds_at_no_rate_is_left_out(monkeypatch, tmp_path):
    """All others ran for hours; without the baseline there is nothing to compare."""

    def tuned_by(common, module, name, folder):
        if name in fails:
            raise tuning.NoRate(f"arm {name} diverges")
        return {"best": {name: 0.1}}, f"settings of {name}", plan

    plan, fails = tiny.build(tiny.Settings(steps=2)), {"wild"}
    monkeypatch.setattr(compare, "tuned_by", tuned_by)
    modules = {name: (tiny, name) for name in ("base", "wild", "calm")}
    resolved, built, left_out = dict.fromkeys(modules), dict.fromkeys(modules, plan), {}
    tuned = compare.tune_all(compare.Common(), modules, resolved, built, left_out, tmp_path)
    assert list(tuned) == list(built) == ["base", "calm"] and left_out == {"wild": "arm wild diverges"}
    assert resolved == {"base": "settings of base", "calm": "settings of calm"}
    fails.add("base")
    with pytest.raises(UserError, match="arm base diverges"):
        compare.tune_all(compare.Common(), modules, resolved, built, left_out, tmp_path)


def test_the_method_is_named_or_found():
    assert compare.method_arm(tiny) == "method"
    other = types.ModuleType("family.warm")
    other.ARMS = {"base": {}, "first": {}, "warm": {}}
    assert compare.method_arm(other) == "warm"
    other.METHOD = "first"
    assert compare.method_arm(other) == "first"


def test_an_experiment_with_other_settings_says_why():
    with pytest.raises(UserError, match="no problems to sample and verify"):
        compare.prepare(tiny, "method", compare.Common())


@pytest.mark.parametrize("family", ["policy_gradient", "efficiency", "curriculum"])
def test_every_family_has_a_baseline_and_every_experiment_its_method(family):
    """A baseline of another file than its own method, and no method that is the first arm, the baseline of its file."""
    common = compare.first_settings(family, smoke=True)
    (module, arm), *methods = compare.chosen(family, (), common.baseline)
    assert arm in ("grpo", "unlimited") and len(methods) == len(compare.experiments_of(family))
    for module, arm in methods:
        assert arm != next(iter(module.ARMS)) or arm == module.__name__.split(".")[-1], f"{module.__name__}: {arm}"


def test_a_method_is_the_arm_that_its_claim_is_about():
    """Of the pilots, which name the arms of every claim: kimi_k15 claims something of its length penalty alone."""
    rows = (line.split("\t") for line in (locate.root() / "results" / "pilots.tsv").read_text().splitlines()[1:])
    claimed = {row[0]: row[2].split(" - ")[0] for row in rows}
    found = {}
    for family in ("policy_gradient", "efficiency", "curriculum"):
        for slug, path in compare.experiments_of(family).items():
            found[f"{family}/{slug}"] = compare.method_arm(doctor.load(path))
    others = {name for name in found.keys() & claimed.keys() if found[name] != claimed[name]}
    assert others == {"policy_gradient/kimi_k15"}


def test_stages_share_the_steps():
    plan = tiny.build(tiny.Settings(steps=6, warm_steps=2))
    imitation, practice = plan.stages

    def steps(*numbers, of):
        stages = (imitation, *(practice._replace(steps=n) for n in numbers))
        return [stage.steps for stage in compare.shortened(plan._replace(stages=stages), of).stages]

    assert steps(40, 40, 40, of=60) == [2, 20, 20, 20]
    assert steps(64, 32, of=48) == [2, 32, 16]
    assert steps(5, 1, of=2) == [2, 1, 1]
    assert steps(30, of=60) == [2, 30]
    with pytest.raises(UserError, match="--steps 1 is less than one"):
        steps(2, 2, of=1)
