"""Methods of one family on one task and budget."""

import json
import types

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import __main__ as commands
from jaxrl_llm.experiment import compare
from tests.experiment import tiny


@pytest.mark.slow
def test_two_methods_share_task_budget_and_measurement(tmp_path, capsys):
    found = compare.compare("policy_gradient", ["--smoke", "--methods", "dr_grpo", "--out", str(tmp_path)])
    assert list(found.arms) == ["dr_grpo.grpo", "dr_grpo.dr_grpo"]
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["family"] == "policy_gradient" and record["left_out"] == {}
    for arm in found.arms.values():
        assert (arm.rollouts, arm.updates, arm.seeds) == (3 * 2 * 2, 3, [0, 1])
        assert arm.settings["data"] == "countdown" and arm.settings["levels"] == [3]
        assert set(compare.METRICS) <= set(arm.metrics)
    assert record["arms"]["dr_grpo.grpo"]["settings"]["reduction"] == "seq_mean"
    assert record["arms"]["dr_grpo.dr_grpo"]["settings"]["reduction"] == "constant"
    assert (tmp_path / "plot.png").is_file() and "dr_grpo.grpo" in (tmp_path / "table.md").read_text()
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
        (["compare"], "usage: "),
    ],
)
def test_mistakes_are_one_line(words, said, capsys):
    assert commands.main(words) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


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
