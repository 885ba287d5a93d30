"""What is not finite: rewards are errors that name their row, updates are left out and counted, too many end a run."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.asynchronous import conductor, threads
from jaxrl_llm.asynchronous.limits import Limits, Sizes, Stuck
from jaxrl_llm.asynchronous.roles import make_program
from jaxrl_llm.asynchronous.workers import Threads
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import loop as arms
from jaxrl_llm.experiment.results import Results
from jaxrl_llm.train import checkpoint, fused, host, online, skipped
from jaxrl_llm.train.skipped import SKIPPED, NotFinite, Streak
from jaxrl_llm.train.step import make_update
from jaxrl_llm.types import Rewards, TrainState
from tests import close
from tests.asynchronous import programs
from tests.experiment import tiny
from tests.models_for_tests import small_config


def quadratic(params, batch):
    """Pulls weights to 1; what ``batch`` holds multiplies the loss."""
    return jnp.sum((params["w"] - 1.0) ** 2) * jnp.sum(batch["scale"]), {}


def state_of(tx):
    params = {"w": jnp.asarray([0.0, 3.0])}
    return TrainState(params, tx.init(params), jnp.zeros((), jnp.int32), jax.random.key(0), (), {"ema": params})


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])  # the last: its square is infinite, the gradient is not
@pytest.mark.parametrize("most_norm", [None, 1.0])
def test_a_bad_update_leaves_nothing_behind(bad, most_norm):
    tx = optax.adam(0.1)
    update = jax.jit(make_update(quadratic, tx, max_grad_norm=most_norm, ema_decay=0.9))
    good, poisoned = {"scale": jnp.ones(1)}, {"scale": jnp.full(1, bad)}
    first, figures = update(state_of(tx), good)
    assert figures[SKIPPED] == 0.0
    second, figures = update(first, poisoned)
    assert figures[SKIPPED] == 1.0 and not np.isfinite(figures["grad/norm"])
    jax.tree.map(np.testing.assert_array_equal, second._replace(key=0), first._replace(key=0))
    third, figures = update(second, good)
    direct, _ = update(first, good)
    assert figures[SKIPPED] == 0.0 and np.any(np.asarray(third.params["w"] != first.params["w"]))
    jax.tree.map(np.testing.assert_array_equal, third._replace(key=0), direct._replace(key=0))


def test_only_updates_in_a_row_count_and_seeds_count_apart():
    streak = Streak(most=3)
    for step, value in enumerate([1, 1, 0, 1, 1, 0.5], 1):
        streak.see({SKIPPED: float(value)}, step)
    with pytest.raises(NotFinite, match="step 9: 3 updates in a row"):
        streak.see({SKIPPED: np.ones(3), "loss/total": np.full(3, np.nan)}, 9)
    Streak(most=0).see({SKIPPED: np.ones(99)}, 99)
    both = Streak(most=3)
    both.see({SKIPPED: np.array([[1, 0], [1, 1]])}, 2)
    with pytest.raises(NotFinite, match=r"step 3 \(seeds 1 of the arm\)"):
        both.see({SKIPPED: np.array([[1, 1], [1, 1]]), "grad/norm": np.full((2, 2), np.inf)}, 4)


def broken_at(first):
    """The small program; from step ``first`` on its losses are NaN."""

    def estimate(params, extras, trajectories, rewards):
        batch = programs.ESTIMATE()(params, extras, trajectories, rewards)
        return batch._replace(extras=batch.extras | {"step": extras["step"]})

    def loss(params, batch):
        value, figures = programs.method().loss(params, batch)
        return jnp.where(batch.extras["step"] >= first, jnp.nan, 1.0) * value, figures

    def remember(state, *_):
        return {"step": state.extras["step"] + 1}

    return programs.method()._replace(estimate=estimate, loss=loss, remember=remember, microbatches=1)


def start():
    return programs.start()._replace(extras={"step": jnp.zeros((), jnp.int32)})


def after_two():
    """Parameters of two good steps."""
    return host.run(host.make_host_loop(programs.method(), programs.judge), programs.start(), 2)[0].params


def equal(found, want):
    jax.tree.map(np.testing.assert_array_equal, found, want)


def test_host_loop_stops_with_the_last_good_weights():
    loop = host.make_host_loop(broken_at(2), programs.judge, most_skipped=3)
    seen = []
    with pytest.raises(NotFinite, match=r"step 5: 3 updates in a row .*loss/total nan.*--most-skipped"):
        for iteration in host.iterations(loop, start(), 99):
            seen.append(iteration.metrics[SKIPPED])
            params = jax.tree.map(np.asarray, iteration.state.params)
    assert seen == [0, 0, 1, 1, 1]
    equal(params, after_two())


def test_streaming_stops_too():
    loop = host.make_host_loop(broken_at(2), programs.judge, most_skipped=3)
    with pytest.raises(NotFinite, match="step 5: 3 updates in a row"):
        threads.run(loop, start(), 99, staleness=1)


def test_fused_loop_goes_on_from_good_weights_and_counts():
    method = broken_at(2)._replace(score=programs.method().score)
    state, metrics = fused.run(method, start(), 5)
    assert metrics[SKIPPED].tolist() == [0, 0, 1, 1, 1]
    want, figures = fused.run(programs.method(), programs.start(), 2)
    world = small_config(vocab_size=programs.toy.VOCABULARY, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16)
    sums, size = close.gradient_sums(world, 4, 9), float(figures["grad/norm"].max())
    close.assert_same_descent(state.params, want.params, 0.5, 2, sums, gradient=size)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_an_asynchronous_run_stops_too(tmp_path):
    def build():
        return make_program(broken_at(2), start, programs.judge)

    with pytest.raises(NotFinite, match="step 5: 3 updates in a row"):
        conductor.run(Threads(), build, 99, folder=str(tmp_path), sizes=Sizes(staleness=0), limits=Limits(skipped=3))
    state = checkpoint.restore(checkpoint.latest(tmp_path), start())
    equal(state.params, after_two())


def infinite(rows):
    """Pays infinity in the third row."""
    found = programs.judge(rows)
    return found._replace(value=np.where(np.arange(len(found.value)) == 2, np.inf, found.value))


def test_a_reward_that_is_not_finite_names_row_and_verifier(tmp_path):
    words = r"reward of row 2, problem \d+ is inf, from tests\.train\.test_skipped\.infinite"
    loop = host.make_host_loop(programs.method(), infinite)
    with pytest.raises(UserError, match=words):
        host.run(loop, programs.start(), 1)
    with pytest.raises(UserError, match=words):
        threads.run(loop, programs.start(), 1)

    def build():
        return make_program(programs.method(), programs.start, infinite)

    with pytest.raises(UserError, match=words) as caught:
        conductor.run(Threads(), build, 1, folder=str(tmp_path), sizes=Sizes(staleness=0), limits=Limits(tries=2))
    assert not isinstance(caught.value, Stuck)


def test_an_invalid_reward_may_be_anything():
    rewards = Rewards(np.array([math.nan, 1.0]), np.array([False, True]))
    skipped.check_rewards(rewards, np.arange(2), "nobody")
    loop = host.make_host_loop(programs.method(), lambda rows: infinite(rows)._replace(valid=np.arange(4) != 2))
    state, history = host.run(loop, programs.start(), 1)
    assert history[0][SKIPPED] == 0 and all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_a_score_that_is_no_number_does_not_stay_in_a_curriculum():
    value, valid = online._prompt_means(programs.method(), Rewards(jnp.array([1.0, jnp.nan, 0, 1]), jnp.ones(4, bool)))
    assert value.tolist() == [1.0, 0.5] and valid.tolist() == [True, True]


def test_an_arm_stops_and_names_its_seed():
    settings = tiny.Settings(steps=6, eval_every=3, warm_steps=2)
    plan = tiny.build(settings)
    stage = plan.stages[1]

    def loss(params, batch):
        value, figures = stage.method.loss(params, batch)
        return value * jnp.inf, figures

    broken = stage._replace(method=stage.method._replace(loss=loss))
    plan = plan._replace(stages=(plan.stages[0], broken))
    for on_host in (False, True):
        with pytest.raises(NotFinite, match=r"step 6 \(seeds 0.* of the arm\): 4 updates in a row"):
            arms.run_arm(plan._replace(on_host=on_host), settings, [0, 1], most_skipped=4)
    found = arms.run_arm(plan, settings, [0, 1])  # a diverged seed is a failure of its arm, not of the run
    assert found.metrics[SKIPPED] == [1.0, 1.0] and Results({"arm": found}).diverged("arm") == {0, 1}


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    tx = optax.sgd(0.1)
    state = state_of(tx)
    checkpoint.save(tmp_path, state)
    bad = state._replace(step=jnp.ones((), jnp.int32), params={"w": jnp.asarray([0.0, jnp.inf])})
    with pytest.raises(UserError, match="no checkpoint at step 1: w of the parameters is not finite"):
        checkpoint.save(tmp_path, bad)
    assert checkpoint.latest(tmp_path).name == "step_00000000"
    json.loads((checkpoint.latest(tmp_path) / "manifest.json").read_text())
