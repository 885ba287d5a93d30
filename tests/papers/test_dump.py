"""DUMP: upper confidence bounds on the mean absolute advantage of each distribution."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.curriculum import dump
from experiments.curriculum.parts import bandit
from experiments.curriculum.parts.categories import spending
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.results import Results
from jaxrl_llm.types import Rewards
from tests import close
from tests.experiment import made


def _state(learnability, visits, window=1):
    rows = jnp.repeat(jnp.asarray(learnability)[:, None], window, axis=1)
    return bandit.WindowState(rows, jnp.full(len(visits), window), jnp.asarray(visits, jnp.float32))


def test_worked_scores_and_probabilities():
    state = _state([0.8, 0.2], [99, 99])
    close.assert_printed(bandit.ucb_scores(state), [1.12537, 0.52537], 5)
    arms = bandit.make_ucb(window=1, temperature=0.1)
    close.assert_printed(arms.probs(state), [0.99753, 0.00247], 5)
    rare = bandit.ucb_scores(_state([0.8, 0.2, 0.5], [1000, 100, 10]))
    close.assert_printed(rare, [0.91837, 0.57265, 1.62920], 5)
    assert int(jnp.argmax(rare)) == 2
    close.assert_near(bandit.ucb_scores(state, explore=0.0), [0.8, 0.2])


def test_starts_uniform_and_zeros_lower_the_mean():
    arms = bandit.make_ucb(window=4, group_size=8)
    state = arms.init(3)
    close.assert_near(arms.probs(state), 1 / 3)
    state = arms.learn(state, jnp.array([0, 0]), jnp.array([0.9, 0.9]), jnp.ones(2))
    before = bandit.ucb_scores(state, explore=0.0)[0]
    state = arms.learn(state, jnp.array([0, 0]), jnp.zeros(2), jnp.ones(2))  # two groups of equal rewards
    close.assert_near([before, bandit.ucb_scores(state, explore=0.0)[0]], [0.9, 0.45])
    assert state.visits.tolist() == [32.0, 0.0, 0.0]


def test_agrees_with_a_loop_over_windows():
    rng = np.random.default_rng(0)
    arms = bandit.make_ucb(window=3, temperature=0.5, group_size=4)
    state, windows, visits = arms.init(3), [[], [], []], np.zeros(3)
    for _ in range(5):
        category, signal, weight = rng.integers(0, 3, 4), rng.random(4), (rng.random(4) < 0.8).astype(float)
        for c, s, w in zip(category, signal, weight, strict=True):
            if w:
                windows[c] = ([s] + windows[c])[:3]
                visits[c] += 4
        signal[weight == 0] = np.nan
        args = jnp.asarray(category), jnp.asarray(signal, jnp.float32), jnp.asarray(weight, jnp.float32)
        state = arms.learn(state, *args)
        scores = [np.mean(w) if w else 0.0 for w in windows]
        scores = np.array(scores) + np.sqrt(2 * np.log(max(1, visits.sum()) + 1) / (visits + 1))
        close.assert_near(bandit.ucb_scores(state), scores, magnitude=0)
        chances = np.exp(scores / 0.5) / np.exp(scores / 0.5).sum()
        close.assert_near(arms.probs(state), chances, magnitude=0)
    assert state.visits.tolist() == visits.tolist()


def test_invalid_settings():
    with pytest.raises(ValueError, match="window=0"):
        bandit.make_ucb(window=0)
    with pytest.raises(ValueError, match="temperature=0.0"):
        bandit.make_ucb(temperature=0.0)


def test_spending_by_distribution_adds_up_to_the_step():
    """Rows 4 and 6 of three categories; row 5 belongs to none."""
    slots = spending(np.array([0, 2, 1]), rows=np.array([1, 4, 6]))
    ids = jnp.asarray([4, 4, 6, 5, 9, 1, 1, 1], jnp.int32)
    category = slots["row_extras"]({}, types.SimpleNamespace(problem_ids=ids), None)["category"]
    assert category.tolist() == [2, 2, 1, -1, -1, 0, 0, 0]
    batch = types.SimpleNamespace(extras={"category": category})
    found = slots["figures"](batch, {})
    assert {k: float(x) for k, x in found.items()} == {"drawn/0": 0.375, "drawn/1": 0.125, "drawn/2": 0.25}


@pytest.mark.parametrize("share", ["impossible", "solved"])
def test_made_targets_are_refused_where_the_old_ones_judge(share, monkeypatch):
    """A bench that judges text does so by its own targets, so that nothing was impossible and nothing said so."""
    settings = dump.Settings(**dump.EMBEDDED | dump.SMOKE | {"impossible": 0.0, "solved": 0.0, share: 0.25})
    found = recipes.bench(settings)
    monkeypatch.setattr(recipes, "bench", lambda settings: found._replace(score=None))
    with pytest.raises(UserError, match="are for Countdown targets that are judged on the device"):
        dump.build(settings)


@pytest.mark.parametrize(("impossible", "solved"), [(0.6, 0.6), (0.0, 1.5), (-0.1, 0.2), (0.5, 0.5)])
def test_shares_that_leave_no_real_problem_are_refused(impossible, solved):
    settings = dump.Settings(**dump.EMBEDDED | dump.SMOKE | {"impossible": impossible, "solved": solved})
    with pytest.raises(UserError, match=f"--impossible {impossible:g} --solved {solved:g}: both are shares"):
        dump.build(settings)


def test_what_all_responses_solve_is_first_and_what_none_does_last(monkeypatch):
    """Eight distributions; the six between them keep their targets and the order of their levels."""
    settings = dump.Settings(**dump.EMBEDDED | dump.SMOKE | {"impossible": 0.25, "solved": 0.25})
    seen = []
    monkeypatch.setattr(dump, "spending", lambda categories: seen.append(categories) or spending(categories))
    method, train = dump.build(settings).stages[0].method, recipes.bench(settings).train
    batch = types.SimpleNamespace(extras={"category": jnp.zeros((4,), jnp.int32)})
    drawn = list(method.figures(batch, {}))
    assert drawn == [f"drawn/{k}" for k in range(8)] and set(drawn) <= set(dump.CURVES)
    (category,), target = seen, np.asarray(method.problems.answers["target"])
    assert set(target[category == 0].tolist()) == {dump.ALL} and set(target[category == 7].tolist()) == {dump.NONE}
    real = (category > 0) & (category < 7)
    np.testing.assert_array_equal(target[real], np.asarray(train.answers["target"])[real])
    assert (np.asarray(train.level)[real] == 2 + (category[real] - 1) // 2).all()


def test_every_response_reaches_the_solved_target():
    """Rewards of the judge are 0 and 1; the target that all reach pays 1, whatever was said."""
    judged = dump.lenient(lambda answers, rows: Rewards(jnp.array([0.0, 1.0, 0.0, 0.0]), jnp.ones(4, bool)))
    found = judged({"target": jnp.array([12, 30, dump.NONE, dump.ALL])}, None)
    assert found.value.tolist() == [0.0, 1.0, 0.0, 1.0] and found.valid.all()


def test_the_claim_says_what_may_be_spent_where_nothing_is_learnt():
    """1/8 is a distribution's share of uniform draws; 0.1 of both seeds is below it, 0.2 is not."""
    values = {m: [0.3, 0.31] for m in dump.METRICS} | {"drawn/7": [0.1, 0.1001], "drawn/0": [0.2, 0.2001]}
    found = dump.claim(Results({name: dataclasses.replace(made.arm([0.0, 0.0]), metrics=values) for name in dump.ARMS}))
    parts = {part.metric: part for part in found.secondary}
    assert parts["drawn/7"].text.endswith("dump < 0.125") and parts["drawn/0"].by == parts["drawn/7"].by == -0.125
    assert parts["drawn/7"].verdict == "supported here" and parts["drawn/0"].verdict == "contradicted"
    assert found.primary.metric == "eval/accuracy" and "reward/mean" not in parts
