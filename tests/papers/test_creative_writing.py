"""Adversarial principles: who learns in a duel, what labelled examples change, and the strict judge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models import creative_writing
from experiments.reward_models.parts import adversarial_rules as rules
from experiments.reward_models.parts import attribute_rewards
from experiments.reward_models.parts import attribute_text as text
from tests import close


def _held(stamps):
    return [int(k) for k in np.argsort(np.asarray(stamps)) if stamps[k] > 0]


def test_worked_duels():
    start = rules.started((0, 2))
    fooled = rules.duel(start, jnp.array(5))
    assert set(_held(fooled.rules)) == {0, 2, 5} and not fooled.avoided.any()
    seen = rules.duel(fooled, jnp.array(5))
    assert _held(seen.avoided) == [5] and _held(seen.rules) == _held(fooled.rules)
    with pytest.raises(ValueError, match="without rules"):
        rules.started(())


def test_at_most_ten_of_fifty_rules_and_the_oldest_goes():
    assert len(rules.RULES) == 50 > rules.MOST == 10
    stamps = rules.started((7,)).rules
    for k, rule in enumerate(range(10, 22)):
        stamps = rules.learnt(stamps, jnp.array(rule), jnp.array(2 + k))
    assert _held(stamps) == list(range(12, 22))
    again = rules.learnt(stamps, jnp.array(15), jnp.array(99))
    assert (again == stamps).all()


def test_reflection_adds_and_drops():
    relevant = [k for k, (quality, level) in enumerate(rules.RULES) if text.NAMES[quality] == "relevant"]
    scores = jnp.array([1.0, 1.0, 0.1, 1.0, 1.0])
    taught = rules.reflected(rules.started((0,)), scores, jnp.array(False))
    # of the rules on the worst quality the one that asks for least: relevant >= 0.15
    assert _held(taught.rules) == [0, relevant[1]] and rules.RULES[relevant[1]][1] == 0.15
    assert _held(rules.reflected(taught, scores, jnp.array(True)).rules) == [0]  # it was good after all: the rule goes
    assert _held(rules.reflected(taught, scores, jnp.array(False)).rules) == _held(taught.rules)  # called bad already
    perfect = rules.reflected(rules.started((0,)), jnp.ones(5), jnp.array(False))
    assert _held(perfect.rules) == [0], "what breaks no rule explains nothing"


def test_play_differs_by_seed_and_reflection_drops_the_strict_ones():
    games = jax.jit(
        lambda key, n: rules.play(text.LANGUAGE, key, (2, 12), rounds=4, duels=12, examples=3 * n).rules,
        static_argnums=1,
    )
    found = [np.asarray(games(jax.random.key(seed), 0)) > 0 for seed in (0, 1)]
    assert all(x.sum() == rules.MOST for x in found) and (found[0] != found[1]).any()
    assert _held(rules.play(text.LANGUAGE, jax.random.key(0), (2, 12), rounds=0).rules) == [2, 12]
    strict = np.asarray([level for _, level in rules.RULES])
    kept = np.stack([np.asarray(games(jax.random.key(seed), 4)) > 0 for seed in range(8)])
    wild = np.stack([np.asarray(games(jax.random.key(seed), 0)) > 0 for seed in range(8)])
    mean = [np.mean([strict[row].mean() for row in rows if row.any()]) for rows in (kept, wild)]
    assert mean[0] < mean[1], "examples of good replies take out the rules that ask too much"


def test_a_detector_reads_what_its_reader_sees():
    scores = jnp.array([[1.0, 0.5, 0.5, 0.5, 0.9], [1.0, 0.0, 0.5, 0.5, 0.9]])
    assert rules.strict_label(scores).tolist() == [True, False]  # any defect: 0
    chosen = jnp.zeros(50, bool).at[jnp.array([0, 12, 13])].set(True)
    close.assert_near(rules.kept_share(scores, chosen), [1.0, 1 / 3])
    assert rules.kept_share(scores, chosen & ~chosen).tolist() == [1.0, 1.0]
    prompts, replies = text.draw_behaviour(jax.random.key(0), 6)
    reward = attribute_rewards.init_reward(text.LANGUAGE, jax.random.key(1), outputs=5)
    params = {"reward": reward, "rules": chosen.astype(jnp.float32)}
    read = jnp.clip(attribute_rewards.scores(text.LANGUAGE, reward, prompts, replies), 0.0, 1.0)
    close.assert_near(rules.detector(text.LANGUAGE, params, prompts, replies), rules.kept_share(read, chosen))


@pytest.mark.slow
def test_labels_order_pairs():
    pairs = rules.draw_labelled_pairs(text.LANGUAGE, jax.random.key(0), 400, error_rate=0.0, strict=True)
    first, second = (rules.strict_label(text.attributes(pairs.prompts, x)) for x in (pairs.first, pairs.second))
    assert not (second & ~first).any() and (first & ~second).any()


# --- labels of agents that look up and debate


def test_worked_retrieval_and_debate():
    known = jnp.array([[0.0] * 5, [0.5] * 5, [1.0] * 5])
    close.assert_near(rules.retrieved(jnp.array([[0.1, 0.9, 0.8]]), known, nearest=2), [[0.75] * 5])
    first = jnp.array([[0.9, 0.9, 0.1, 0.9, 0.3]])
    again = jnp.broadcast_to(jnp.array([0.9, 0.9, 0.6, 0.9, 0.0]), (1, 4, 5))
    # charged: the third (0.35), the fifth (0.15), the fifth again (0.1, settled), the third again (1.3 / 3, settled)
    stands, argued = rules.debated(first, again)
    assert stands.tolist() == [[False, False, False, False, True]] and argued.tolist() == [[0, 0, 2, 0, 2]]
    none, nobody = rules.debated(first, again[:, :0])
    assert none.tolist() == [[False, False, True, False, False]] and not nobody.any()


def test_a_debate_is_a_running_mean_of_what_was_argued():
    rng = np.random.default_rng(0)
    opinions, readings = rng.random((30, 5)), rng.random((30, 12, 5))
    stands, argued = rules.debated(jnp.asarray(opinions, jnp.float32), jnp.asarray(readings, jnp.float32), level=0.4)
    for row in range(30):
        heard = [[x] for x in opinions[row]]
        for reading in readings[row]:
            still = [k for k in range(5) if len(heard[k]) < 3]
            if still:
                worst = min(still, key=lambda k: np.mean(heard[k]))
                heard[worst].append(reading[worst])
        assert argued[row].tolist() == [len(x) - 1 for x in heard] == [2] * 5  # ten rounds settle all of them
        assert stands[row].tolist() == [bool(np.mean(x) < 0.4) for x in heard]


def test_similarity_is_the_cosine_of_counts():
    _, replies = text.draw_behaviour(jax.random.key(3), 12)
    found = np.asarray(rules.similarity(text.LANGUAGE, replies, replies[:5]))
    said = [[t for t in row if t != text.END] for row in np.asarray(replies).tolist()]
    counts = np.array([[row.count(t) for t in range(text.VOCABULARY)] for row in said], float)
    norm = np.linalg.norm(counts, axis=1)
    want = (counts @ counts[:5].T) / (norm[:, None] * norm[None, :5])
    close.assert_near(found, want, terms=text.VOCABULARY)
    empty = jnp.full((1, text.RESPONSE_TOKENS), text.END)
    assert not rules.similarity(text.LANGUAGE, empty, replies).any()


def test_debates_err_less_than_first_readings():
    prompts, replies = text.draw_behaviour(jax.random.key(0), 2000)
    asked, known = text.draw_behaviour(jax.random.key(1), 64)
    store = known, text.attributes(asked, known)
    true = rules.strict_label(text.attributes(prompts, replies))

    def errors(**sizes):
        said = rules.debated_label(text.LANGUAGE, jax.random.key(2), prompts, replies, store, **sizes)
        return float((said != true).mean())

    many, none, exact = errors(rounds=6), errors(rounds=0), errors(noise=0.0, trust=0.0)
    assert exact == 0.0 < many < none - 0.02


def test_rounds_of_play_are_one_loop_of_the_program():
    def equations(rounds):
        traced = jax.make_jaxpr(lambda key: rules.play(text.LANGUAGE, key, (2, 12), rounds=rounds).rules)
        return len(traced(jax.random.key(0)).eqns)

    assert equations(3) == equations(30)


def test_every_kind_of_labels_orders_its_pairs_otherwise():
    def first(arm):
        settings = creative_writing.Settings(**creative_writing.ARMS[arm])
        sizes = {"rounds": settings.arguments, "trust": settings.trust}
        return np.asarray(rules.draw_debated_pairs(text.LANGUAGE, jax.random.key(0), 200, **sizes).first)

    arms = [first(arm) for arm in ("rm_debate", "no_retrieval", "one_reading")]
    assert all((arms[i] != arms[j]).any() for i in range(3) for j in range(i))
