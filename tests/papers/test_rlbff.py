"""RLBFF: log-odds of two words, principles with their signs, and the consensus of annotators."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.parts import strings
from experiments.reward_models import rlbff
from experiments.reward_models.parts import attribute_rewards, principle_critic, principles
from experiments.reward_models.parts import attribute_text as text
from jaxrl_llm.errors import UserError
from jaxrl_llm.losses.reward import log_odds_loss
from tests import close

LANGUAGE = principles.LANGUAGE


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
    scores = np.asarray(principles.qualities(LANGUAGE, prompts, replies))
    for quality, cut in enumerate(principles.CUTS):
        wanted, unwanted = (
            principles.satisfied(
                LANGUAGE, prompts, replies, jnp.broadcast_to(jnp.array([[quality, sign]], jnp.int32), (400, 2))
            )
            for sign in (principles.WANTED, principles.UNWANTED)
        )
        np.testing.assert_array_equal(wanted, scores[:, quality] > cut)
        np.testing.assert_array_equal(unwanted, ~(scores[:, quality] > cut))
        assert 0.1 < float(wanted.mean()) < 0.9  # a judgement that says something
    drawn = {tuple(row) for row in np.asarray(principles.draw_principles(jax.random.key(1), 2000)).tolist()}
    assert len(drawn) == 10 and not drawn & set(principles.HELD_OUT)


def test_consensus_spans_and_balance_against_loops():
    rng = np.random.default_rng(0)
    phrases = rng.normal(size=(60, 3, 4)) * 0.4 + rng.normal(size=(60, 1, 4)) * 2
    verdicts = rng.choice([principles.YES, principles.NO, principles.PARTLY], (60, 3), p=[0.7, 0.2, 0.1])
    found = principles.consensus(jnp.asarray(phrases, jnp.float32), jnp.asarray(verdicts, jnp.int32))
    expected = []
    for row, words in zip(phrases, verdicts.tolist(), strict=True):
        near = min(a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a in row for b in row)
        expected.append(near >= 0.8 and len(set(words)) == 1 and words[0] != principles.PARTLY)
    assert found.tolist() == expected and 5 < sum(expected) < 55
    label, kept = rng.random(50) < 0.7, rng.random(50) < 0.6
    chosen = np.asarray(principles.balanced(jnp.asarray(label), jnp.asarray(kept)))
    least = min((label & kept).sum(), (~label & kept).sum())
    assert not (chosen & ~kept).any() and (chosen & label).sum() == (chosen & ~label).sum() == least
    for side in (label & kept, ~label & kept):
        np.testing.assert_array_equal(np.flatnonzero(side)[:least], np.flatnonzero(chosen & side))


def test_phrases_of_one_meaning_are_near_and_of_the_other_sign_opposite():
    every = jnp.asarray([(q, w) for q in range(6) for w in (0, 1)], jnp.int32)
    many = jnp.stack([principles.vectors(principles.in_words(every, k)) for k in range(6)], axis=1)  # [12, 6, 8]
    near = np.asarray(jnp.einsum("aid,bjd->abij", many, many))
    for a, b in itertools.product(range(12), repeat=2):
        if a == b:
            assert near[a, b].min() >= 0.8, "the threshold of the filter knows them as one"
        else:
            assert near[a, b].max() < 0.6
    assert near[0, 1].max() < -0.8


@pytest.mark.slow
def test_consensus_makes_labels_cleaner():
    found = principles.draw_judgements(LANGUAGE, jax.random.key(0), 6000)
    named, words, prompts, replies, label, weight = found
    np.testing.assert_array_equal(principles.read_back(words), named)
    truth = np.asarray(principles.satisfied(LANGUAGE, prompts, replies, named))
    right, kept = np.asarray(label > 0.5) == truth, np.asarray(weight > 0)
    assert 0.15 < kept.mean() < 0.4, "three must agree on principle and verdict, and the span must have been written"
    assert right[kept].mean() > 0.95 > 0.8 > right.mean() > 0.55
    close.assert_near(np.asarray(label)[kept].mean(), 0.5)
    loose = principles.draw_judgements(LANGUAGE, jax.random.key(0), 500, keep=principles.anyhow)
    assert float(loose[5].mean()) > 0.6


def judged(task, key, n):
    """Annotators of whom every other one is wrong, and of whom a third is kept."""
    prompts, replies = task.draw_behaviour(key, n)
    principle = principles.draw_principles(key, n)
    row = jnp.arange(n)
    label = principles.satisfied(task, prompts, replies, principle) ^ (row % 2 == 0)
    words = principles.in_words(principle, row)
    return principle, words, prompts, replies, label.astype(jnp.float32), (row % 3 == 0).astype(jnp.float32)


def test_reports_and_what_they_earn():
    """A report says the annotators' label, right or wrong; its level agrees and is else drawn."""
    key = jax.random.key(0)
    asked, reports, kept = principle_critic.draw_reports(LANGUAGE, judged, key, 3000)
    given = judged(LANGUAGE, jax.random.fold_in(key, 0), 3000)
    yes, readable = principle_critic.said(LANGUAGE, reports)
    words, first = np.asarray(asked[:, -2:]) - 32, LANGUAGE.reading.first
    assert first == 32
    assert readable.all() and (np.asarray(reports[:, 3]) == principles.CRITIC.end).all()
    np.testing.assert_array_equal(words, given[1])
    np.testing.assert_array_equal(yes, np.asarray(given[4]) > 0.5)
    np.testing.assert_array_equal(kept, np.arange(3000) % 3 == 0)
    quality = words[:, 1] // principles.SYNONYMS
    np.testing.assert_array_equal(reports[:, 0], first + principles.SYNONYMS * quality)
    wanted = (words[:, 0] - principles.SIGNS) // principles.SIGN_WORDS == principles.WANTED
    levels = np.asarray(reports[:, 1]) - first - principles.LEVEL
    np.testing.assert_array_equal(yes, (levels / 4 > np.array(principles.CUTS)[quality]) == wanted)
    high = (quality == 1) & (np.asarray(yes) == wanted)  # polite: levels 2, 3 and 4 of which each is as likely
    for level in (2, 3, 4):
        close.assert_share((levels[high] == level).mean(), 1 / 3, int(high.sum()))
    np.testing.assert_array_equal(  # every other annotator is wrong, and the truth says so
        principle_critic.truly(LANGUAGE, asked, reports), np.arange(3000) % 2 == 1
    )
    label, odds = jnp.asarray([True, True, False]), jnp.log(jnp.asarray([4.0, 4.0, 4.0]))
    said = jnp.asarray([[35, 60, 54, 62], [35, 60, 55, 62], [35, 62, 62, 62]], jnp.int32)
    assert principle_critic.matches(LANGUAGE, odds, said, label).tolist() == [1.0, 0.0, 0.0]
    close.assert_near(principle_critic.shaded(LANGUAGE, odds, said, label), [-0.2, -0.2, -1.0])


@pytest.mark.slow
def test_the_odds_of_a_verdict_are_read_behind_the_report():
    critic = principles.CRITIC.policy.init(jax.random.key(0))
    asked, reports, _ = principle_critic.draw_reports(LANGUAGE, judged, jax.random.key(1), 6)
    odds = principle_critic.verdict_odds(LANGUAGE, critic, asked, reports)
    logp = []
    for word in (principles.YES, principles.NO):
        said = reports.at[:, principle_critic.VERDICT].set(32 + word)
        logp.append(strings.token_logp(principles.CRITIC, critic, asked, said)[:, principle_critic.VERDICT])
    close.assert_near(odds, logp[0] - logp[1])
    # what stands in the place of the verdict and behind it does not matter; the level before it does
    close.assert_near(principle_critic.verdict_odds(LANGUAGE, critic, asked, reports.at[:, 2:].set(3)), odds)
    other = principle_critic.verdict_odds(LANGUAGE, critic, asked, reports.at[:, 1].set(32 + principles.LEVEL))
    assert float(jnp.abs(other - odds).max()) > 1e-3
    params = {"generative": critic}
    one = principle_critic.proxy(1, 0)(LANGUAGE, params, asked[:, :3], asked[:, 3:15])
    many = principle_critic.proxy(1, 0, samples=3)(LANGUAGE, params, asked[:, :3], asked[:, 3:15])
    assert one.shape == many.shape == (6,) and np.isfinite(many).all()


@pytest.mark.slow
def test_a_phrase_as_a_vector_turns_with_its_sign():
    params = {"reward": attribute_rewards.init_reward(LANGUAGE, jax.random.key(0), outputs=principles.WIDTH)}
    prompts, replies = text.draw_behaviour(jax.random.key(1), 5)
    found = np.asarray(attribute_rewards.scores(LANGUAGE, params["reward"], prompts, replies), np.float64)
    words = principles.named(2, principles.WANTED, 5)
    expected = (found * np.asarray(principles.vectors(words), np.float64)).sum(1)
    wanted, unwanted = (
        principles.matched_score(LANGUAGE, params, prompts, replies, quality=2, wanted=w) for w in (0, 1)
    )
    close.assert_near(wanted, expected)
    close.assert_near(unwanted, -expected)


@pytest.mark.slow
def test_the_reader_hears_the_principle():
    params = {"reader": principles.READER.policy.init(jax.random.key(0))}
    prompts, replies = text.draw_behaviour(jax.random.key(1), 5)
    one, other = (principles.score(LANGUAGE, params, prompts, replies, quality=q) for q in (0, 1))
    against = principles.score(LANGUAGE, params, prompts, replies, quality=0, wanted=principles.UNWANTED)
    assert (one != other).all() and (one != against).all()
    named = jnp.zeros((5, 2), jnp.int32)
    rows = (named, principles.in_words(named), prompts, replies, jnp.ones(5), jnp.zeros(5))
    value, _ = principles.judgement_loss(LANGUAGE, params, rows)
    assert float(value) == 0.0  # nothing kept


@pytest.mark.slow
def test_rankings_of_an_oracle():
    def oracle(quality, wanted):
        sign = jnp.where(wanted == principles.WANTED, 1.0, -1.0)
        return lambda task, params, prompts, replies: (
            sign * principles.qualities(LANGUAGE, prompts, replies)[:, quality]
        )

    found = principles.ranking(LANGUAGE, None, jax.random.key(0), proxy_of=oracle)
    assert {k: float(v) for k, v in found.items()} == {
        "rank/known": 1.0,
        "rank/held_out": 1.0,
        "rank/longer_is_worse": 1.0,
    }
    found = principles.worth_ranking(LANGUAGE, None, jax.random.key(0), proxy_of=oracle)
    assert {k: float(v) for k, v in found.items()} == {"rank/worth": 1.0, "rank/worth_longer_is_worse": 1.0}
    turned = principles.worth_ranking(
        LANGUAGE, None, jax.random.key(0), proxy_of=lambda quality, wanted: oracle(quality, principles.UNWANTED)
    )
    assert {k: float(v) for k, v in turned.items()} == {"rank/worth": 0.0, "rank/worth_longer_is_worse": 0.0}
    deaf = principles.ranking(LANGUAGE, None, jax.random.key(0), proxy_of=lambda quality, wanted: oracle(5, 0))
    assert float(deaf["rank/known"]) < 0.8


@pytest.mark.slow
def test_a_score_that_hears_no_principle_cannot_rank_by_both_forms():
    """The truth about worth is right of worth alone; of known principles no single score is right in more than 0.6."""

    def found(score):
        heard = {}
        for rank in (principles.ranking, principles.worth_ranking):
            heard |= rank(LANGUAGE, None, jax.random.key(0), proxy_of=lambda quality, wanted: score, rows=2000)
        return {name: float(x) for name, x in heard.items()}

    worth = found(lambda task, params, prompts, replies: principles.qualities(LANGUAGE, prompts, replies)[:, 5])
    assert worth["rank/worth"] == worth["rank/worth_longer_is_worse"] == 1.0 > worth["rank/longer_is_worse"]
    both = found(
        lambda task, params, prompts, replies: (
            10.0 * principles.qualities(LANGUAGE, prompts, replies)[:, 1]
            + principles.qualities(LANGUAGE, prompts, replies)[:, 3]
        )
    )
    # the second knows both qualities of which only the wanted form is known, and has no more
    assert worth["rank/known"] < 0.6 and 0.5 < both["rank/known"] < 0.6
    assert both["rank/held_out"] < 0.2, "the better it knows them, the worse it does where they are unwanted"


def test_pairs_of_bradley_terry_are_ordered_by_worth():
    pairs = rlbff.draw_ordered(LANGUAGE, jax.random.key(0), 3000)
    worth = [np.asarray(LANGUAGE.utility(pairs.prompts, x)) for x in (pairs.first, pairs.second)]
    apart = worth[0] != worth[1]
    close.assert_share((worth[0] > worth[1])[apart].mean(), 0.8, int(apart.sum()))


def test_the_generative_judge_has_the_labels_and_updates_of_the_others():
    """Two stages share the labels and the updates of one; what they learn from follows the seed."""
    small = {"base_steps": 1, "judgements": 64, "fit_steps": 7, "critic_steps": 3, "judge": "generative"}
    stages = rlbff.build(rlbff.Settings(**small)).stages
    assert [stage.steps for stage in stages] == [4, 3, 60]
    asked = [np.asarray(stages[1].extras(None, jax.random.key(seed))["asked"]) for seed in (0, 1)]
    reports = stages[0].extras(None, jax.random.key(0))["rows"]
    assert asked[0].shape[0] == reports[0].shape[0] == 32 and (asked[0] != asked[1]).any()
    with pytest.raises(UserError, match="critic_steps=8: they are among the fit_steps=7.*take fewer"):
        rlbff.build(rlbff.Settings(**small | {"critic_steps": 8}))


def test_loaded_weights_learn_at_their_own_rate():
    """Adam's first step is its rate: imitation of reports and the likelihood of rewards take that of the world."""
    one = jnp.ones(1)

    def first_step(stage):
        with jax.numpy_dtype_promotion("standard"):
            return -float(stage.method.tx.update(one, stage.method.tx.init(one), one)[0][0])

    critic, world = LANGUAGE.reading.critic._replace(rate=1e-5), LANGUAGE.world._replace(rate=1e-5)
    loaded = LANGUAGE._replace(world=world, reading=LANGUAGE.reading._replace(critic=critic))
    for task, rate in ((LANGUAGE, 3e-3), (loaded, 1e-5)):
        imitated = principle_critic.warm_stage(task, judged, steps=1, table=4, rows_per_step=64, learning_rate=3e-3)
        rewarded = attribute_rewards.taught_stage(task, steps=1, replies=4)
        close.assert_printed(first_step(imitated), rate, 7, magnitude=rate)
        close.assert_printed(first_step(rewarded), rate, 7, magnitude=rate)


def test_questions_are_the_kept_judgements_again_and_again():
    asked, labels = principle_critic.draw_labelled(LANGUAGE, judged, jax.random.key(3), 7)
    given = judged(LANGUAGE, jax.random.key(3), 7)
    every = np.concatenate([given[2], given[3], 32 + np.asarray(given[1])], axis=1)
    np.testing.assert_array_equal(asked, every[[0, 3, 6, 0, 3, 6, 0]])
    np.testing.assert_array_equal(labels, np.asarray(given[4])[[0, 3, 6, 0, 3, 6, 0]] > 0.5)
