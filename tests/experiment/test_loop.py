"""One arm for all its seeds: the fused and the host loop agree, stages follow each other, curves are complete."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.experiment import Stage, loop
from jaxrl_llm.experiment.durable import Keeping, SeedRun
from jaxrl_llm.run.stop import Stop
from tests import close
from tests.experiment import tiny

SETTINGS = tiny.Settings(steps=6, eval_every=3, warm_steps=2)


@functools.cache
def fused():
    return loop.run_arm(tiny.build(SETTINGS), SETTINGS, [0, 1, 2])


def _equal(left, right):
    assert set(left.curves) == set(right.curves)
    for name, curve in left.curves.items():
        assert curve["step"] == right.curves[name]["step"]
        close.assert_near(curve["values"], right.curves[name]["values"], err_msg=name)
    assert (left.tokens, left.rollouts, left.updates) == (right.tokens, right.rollouts, right.updates)


@pytest.mark.parametrize("where", ["host", "mesh"])
def test_the_host_loop_gives_what_the_fused_one_gives(where):
    plan = tiny.build(SETTINGS)._replace(on_host=where == "host")
    _equal(loop.run_arm(plan, SETTINGS, [0, 1, 2], mesh="data=2" * (where == "mesh")), fused())


def test_a_python_verifier_gives_the_same_as_its_twin_on_the_device():
    plan = tiny.build(SETTINGS)
    method, calls = plan.stages[1].method, []

    def host_score(trajectories):
        calls.append(1)
        wanted = method.problems.answers["wanted"][trajectories.problem_ids]
        return method.score({"wanted": wanted}, trajectories)

    found = loop.run_arm(plan._replace(on_host=True, host_score=host_score), SETTINGS, [0])
    assert len(calls) == 6
    for name, curve in found.curves.items():
        close.assert_near(curve["values"], fused().curves[name]["values"][:1], err_msg=name)


@pytest.mark.parametrize("on_host", [False, True])
def test_what_belongs_to_a_seed_is_what_that_seed_runs(on_host):
    """Seed k begins from a table of k: the same numbers as its own plan alone, joined in the order of the seeds."""
    plan = tiny.build(tiny.Settings(steps=2, eval_every=1))._replace(on_host=on_host)
    first = plan.init(None)

    def of_seed(plan, seed):
        return plan._replace(init=lambda key: jax.tree.map(lambda x: x + seed * x**2, first))

    settings = tiny.Settings(steps=2, eval_every=1)
    found = loop.run_arm(plan._replace(of_seed=of_seed), settings, [0, 2])
    alone = [loop.run_arm(of_seed(plan, seed), settings, [seed]) for seed in (0, 2)]
    for name, curve in found.curves.items():
        close.assert_near(curve["values"], [one.curves[name]["values"][0] for one in alone], err_msg=name)
    assert found.seeds == [0, 2] and found.rollouts == alone[0].rollouts
    assert found.metrics != loop.run_arm(plan, settings, [0, 2]).metrics


def test_stages_follow_each_other_in_one_count_of_steps():
    found = fused()
    # measured before, after imitation, then every three steps of practice
    assert found.curves["eval/accuracy"]["step"] == [0, 2, 5, 8]
    assert found.curves["reward/mean"]["step"] == [5, 8]
    assert found.curves["tokens/trained"]["step"] == [2]
    assert found.updates == 8 and found.rollouts == 6 * 4 * 4
    generated = np.asarray(found.curves["tokens/generated"]["values"])  # means over stretches of three steps
    assert found.tokens == int(generated.mean(0).sum() * 3 + 2 * 2)


def test_one_step_that_was_skipped_ends_no_seed():
    """An infinite gradient is as undefined as one that is NaN, also in a log, which has null for both."""
    curves = loop._Curves()
    curves.train(3, {"grad/norm": np.array([[1.0, np.inf, 3.0], [np.inf, np.nan, -np.inf]])})
    np.testing.assert_array_equal(curves.last()["grad/norm"], [2.0, np.nan])


def test_a_figure_that_is_measured_too_stays_what_was_measured():
    """Training rewards of the same step came after it, so that a rate was not chosen by what validates the arm."""
    curves = loop._Curves()
    curves.measure(0, {"reward/mean": np.array([0.1, 0.2])})
    for step in (2, 4):
        curves.measure(step, {"reward/mean": np.array([0.25, 0.5])})
        curves.train(step, {"reward/mean": np.ones((2, 3)), "loss/total": np.zeros((2, 3))})
    assert curves.points["reward/mean"].keys() == {0, 2, 4} and curves.points["loss/total"].keys() == {2, 4}
    for found in (curves.last(), curves.final(1)):
        assert found["reward/mean"].tolist() == [0.25, 0.5] and found["loss/total"].tolist() == [0.0, 0.0]


def test_curves_end_in_the_final_metrics_and_seeds_differ():
    found = fused()
    for name, curve in found.curves.items():
        assert np.shape(curve["values"]) == (3, len(curve["step"]))
        np.testing.assert_array_equal(np.asarray(curve["values"])[:, -1], found.metrics[name])
    assert len(set(found.metrics["reward/mean"])) == 3
    assert np.isfinite(found.values if hasattr(found, "values") else found.metrics["eval/accuracy"]).all()


def test_the_last_stretch_may_be_shorter():
    settings = tiny.Settings(steps=4, eval_every=3)
    found = loop.run_arm(tiny.build(settings), settings, [0, 1])
    assert found.curves["eval/accuracy"]["step"] == [0, 3, 4] and found.updates == 4


@pytest.mark.parametrize("on_host", [False, True])
def test_a_stage_of_many_cheap_steps_is_measured_when_it_says(on_host):
    settings = tiny.Settings(steps=4, eval_every=1, warm_steps=5)
    plan = tiny.build(settings)._replace(on_host=on_host)
    warm, practice = plan.stages
    seldom = plan._replace(stages=(warm._replace(eval_every=5), practice))
    found, often = (loop.run_arm(one, settings, [0]) for one in (seldom, plan))
    assert found.curves["eval/accuracy"]["step"] == [0, 5, 6, 7, 8, 9]
    assert often.curves["eval/accuracy"]["step"] == list(range(10))
    assert loop.evaluations(seldom, 1) == 5 and loop.evaluations(plan, 1) == 9
    # the training is the same, and never measured more often than the settings ask for
    assert found.metrics["eval/accuracy"] == often.metrics["eval/accuracy"]
    often = plan._replace(stages=(warm._replace(eval_every=1), practice))
    assert loop.evaluations(often, 5) == loop.evaluations(plan, 5)


def test_the_second_stage_starts_from_the_first_ones_parameters_with_its_own_extras():
    plan = tiny.build(SETTINGS)

    def extras(params, key):
        return {"start": params["table"]}

    def remember(state, batch, trajectories, rewards):
        return state.extras

    def measure(params, key):
        return {"eval/norm": jnp.sqrt(jnp.sum(params["table"] ** 2))}

    online = plan.stages[1].method._replace(remember=remember)
    plan = plan._replace(stages=(plan.stages[0], Stage(online, 1, extras)), measure=measure)
    states = []
    for point in SeedRun(plan, 3, "", Keeping()).run(0, Stop()):
        states.append(point)
    norms = [float(p[2]["eval/norm"]) for p in states]
    assert [p[0] for p in states] == [0, 2, 3] and len(set(norms)) == 3


def test_the_first_parameters_survive_every_seed():
    plan = tiny.build(SETTINGS)._replace(on_host=True)
    first = np.asarray(plan.init(None)["table"]).copy()
    loop.run_arm(plan, SETTINGS, [0, 1])
    np.testing.assert_array_equal(np.asarray(plan.init(None)["table"]), first)
