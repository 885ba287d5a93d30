"""RLBFF: log-odds of two words, principles with their signs, and the consensus of annotators."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models.parts import attribute_text as text
from experiments.reward_models.parts import principles
from jaxrl_llm.losses.reward import log_odds_loss
from tests import close


def test_worked_log_odds():
    terms = log_odds_loss(jnp.array([2.0]), jnp.array([0.5]), jnp.array([1.0]))
    assert float(terms.aux["score"][0]) == 1.5
    close.assert_printed(jax.nn.sigmoid(terms.aux["score"][0]), 0.8176, 4)
    close.assert_printed(terms.loss[0], 0.2014, 4)
    moved = log_odds_loss(jnp.array([102.0]), jnp.array([100.5]), jnp.array([1.0]))
    close.assert_printed(moved.loss[0], 0.2014, 4)
    slope = jax.grad(lambda yes: jnp.sum(log_odds_loss(yes, jnp.array([0.5]), jnp.array([0.0])).loss))(jnp.array([2.0]))
    close.assert_printed(slope[0], 0.8176, 4)


def test_principles_and_their_signs():
    prompts, replies = text.draw_behaviour(jax.random.key(0), 400)
    scores = np.asarray(principles.qualities(prompts, replies))
    for quality, cut in enumerate(principles.CUTS):
        wanted, unwanted = (
            principles.satisfied(prompts, replies, jnp.broadcast_to(jnp.array([[quality, sign]], jnp.int32), (400, 2)))
            for sign in (principles.WANTED, principles.UNWANTED)
        )
        np.testing.assert_array_equal(wanted, scores[:, quality] > cut)
        np.testing.assert_array_equal(unwanted, ~(scores[:, quality] > cut))
        assert 0.1 < float(wanted.mean()) < 0.9  # a judgement that says something
    drawn = {tuple(row) for row in np.asarray(principles.draw_principles(jax.random.key(1), 2000)).tolist()}
    assert len(drawn) == 10 and not drawn & set(principles.HELD_OUT)


@pytest.mark.slow
def test_consensus_makes_labels_cleaner():
    votes = jnp.array([[True, True, True], [True, False, True], [False, False, False]])
    assert principles.agreed(votes).tolist() == [True, False, True]
    named, prompts, replies, label, weight = principles.draw_judgements(jax.random.key(0), 4000)
    truth = np.asarray(principles.satisfied(prompts, replies, named))
    right, kept = np.asarray(label > 0.5) == truth, np.asarray(weight > 0)
    close.assert_share(kept.mean(), 0.8**3 + 0.2**3, 4000)
    close.assert_share(right.mean(), 0.8, 4000)
    close.assert_share(right[kept].mean(), 0.8**3 / (0.8**3 + 0.2**3), kept.sum())
    assert bool((principles.draw_judgements(jax.random.key(0), 50, keep=principles.anyhow)[4] == 1).all())


@pytest.mark.slow
def test_the_reader_hears_the_principle():
    params = {"reader": principles.READER.policy.init(jax.random.key(0))}
    prompts, replies = text.draw_behaviour(jax.random.key(1), 5)
    one, other = (principles.score(params, prompts, replies, quality=q) for q in (0, 1))
    against = principles.score(params, prompts, replies, quality=0, wanted=principles.UNWANTED)
    assert (one != other).all() and (one != against).all()
    rows = (jnp.zeros((5, 2), jnp.int32), prompts, replies, jnp.ones(5), jnp.zeros(5))
    value, _ = principles.judgement_loss(params, rows)
    assert float(value) == 0.0  # nothing kept


@pytest.mark.slow
def test_rankings_of_an_oracle():
    def oracle(quality, wanted):
        sign = 1.0 if wanted == principles.WANTED else -1.0
        return lambda params, prompts, replies: sign * principles.qualities(prompts, replies)[:, quality]

    found = principles.ranking(oracle, None, jax.random.key(0))
    assert {k: float(v) for k, v in found.items()} == {
        "rank/known": 1.0,
        "rank/held_out": 1.0,
        "rank/longer_is_worse": 1.0,
    }
    deaf = principles.ranking(lambda quality, wanted: oracle(5, 0), None, jax.random.key(0))
    assert float(deaf["rank/known"]) < 0.8
