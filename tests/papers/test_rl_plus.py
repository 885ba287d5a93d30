"""RL-PLUS: what is measured beside the level that trains."""

import dataclasses
import json

import jax

from experiments.policy_gradient import rl_plus
from jaxrl_llm.experiment import recipes

BASE = dataclasses.replace(rl_plus.Settings(), **rl_plus.EMBEDDED | rl_plus.ARMS["grpo"] | {"train_problems": 16})


def test_another_level_is_measured_with_as_many_problems_as_it_has(monkeypatch):
    """Four numbers train and are measured; of the 400 problems with three that are asked for there are 320."""
    asked, make_measure = [], recipes.make_measure
    monkeypatch.setattr(recipes, "make_measure", lambda s: asked.append(s) or make_measure(s))
    plan = rl_plus.build(dataclasses.replace(BASE, eval_problems=400))
    assert [(s.levels, s.eval_problems) for s in asked] == [((4,), 400), ((3,), 320)]
    params = recipes.bench(BASE).model.params
    names = set(jax.eval_shape(plan.measure, params, jax.random.key(0)))
    assert {"eval/accuracy", "eval/pass@8", "ood/accuracy", "ood/pass@8"} <= names


def test_no_other_level_no_other_measurement():
    plan = rl_plus.build(dataclasses.replace(BASE, ood_levels=()))
    assert plan.measure is recipes.make_measure(BASE)


def test_rows_of_ones_own_have_no_other_level(tmp_path):
    """With the bundled model ``ood/accuracy`` was that of the problems of ``eval/accuracy`` once more."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"m7 {k}+1=>", "answer": str(k + 1)}) + "\n" for k in range(40)))
    settings = dataclasses.replace(BASE, data=str(path), eval_problems=4)
    assert settings.ood_levels
    assert rl_plus.build(settings).measure is recipes.make_measure(settings)
