"""W4S: rewards for beating earlier scores, regression weighted with them, an executor that errs as it says."""

import itertools
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import w4s
from experiments.agents.parts import meta_agent
from experiments.agents.parts import workflows as flows
from jaxrl_llm import reduce
from jaxrl_llm.advantages.selection import exponential_weights
from jaxrl_llm.advantages.turns import improvement_rewards
from jaxrl_llm.errors import UserError
from jaxrl_llm.losses.supervised import sft_loss, weighted_sft_loss
from tests import close


def test_worked_rewards_and_weights():
    scores = np.array([0.4, 0.6, 0.5, 0.55])  # the first is the seed's
    best, last = np.maximum.accumulate(scores)[:-1], scores[:-1]
    found = improvement_rewards(*(jnp.asarray(x, jnp.float32) for x in (scores[1:], last, best)))
    np.testing.assert_array_equal(found, [1.0, 0.0, 0.5])
    close.assert_printed(exponential_weights(jnp.array([1.0, 0.5, 0.0])), [12.1825, 3.4903, 1.0], 4)
    same = jnp.full((1,), 0.5)
    assert improvement_rewards(same, same, same).tolist() == [0.0]  # as good is no progress
    with pytest.raises(ValueError, match="temperature=0"):
        exponential_weights(same, temperature=0.0)
    with pytest.raises(ValueError, match="above_last=2"):
        improvement_rewards(same, same, same, above_last=2.0)


def test_regression_agrees_with_a_loop_and_equal_rewards_are_plain_imitation():
    rng = np.random.default_rng(0)
    logp, rewards = -rng.random((6, 5)), rng.choice([0.0, 0.5, 1.0], 6)
    mask = np.arange(5)[None, :] < rng.integers(1, 6, 6)[:, None]
    expected = 0.0
    for n in range(6):
        expected += np.exp(rewards[n] / 0.4) * np.mean([-logp[n, t] for t in range(5) if mask[n, t]]) / 6
    logp, mask = jnp.asarray(logp, jnp.float32), jnp.asarray(mask)

    def value(logp, rewards):
        weights = exponential_weights(rewards)
        return reduce.tokens(weighted_sft_loss(logp, weights, mask).loss, mask, mode="seq_mean")

    rewards = jnp.asarray(rewards, jnp.float32)
    close.assert_near(value(logp, rewards), expected, magnitude=0)
    plain = jax.grad(lambda x: reduce.tokens(sft_loss(x, mask).loss, mask, mode="seq_mean"))(logp)
    equal, of_rewards = jax.grad(value, argnums=(0, 1))(logp, jnp.full((6,), 0.5))
    close.assert_printed(equal, 3.4903 * plain, 4, magnitude=0)
    assert not np.asarray(of_rewards).any()


def _executor(**changes):
    good = {"steps": 4, "limit": 9, "error": 0.2, "decomposed": 0.4, "calculator": 0.3, "finds": 0.9, "alarms": 0.1}
    return flows.Executor(**{k: jnp.asarray(v) for k, v in (good | changes).items()})


BLIND, HURTS, BROKEN = {"finds": 0.5, "alarms": 0.5}, {"decomposed": 1.3}, {"calculator": 2.0}
SHORT = ["".join(x) for n in (1, 2, 3) for x in itertools.product("sdcvwW", repeat=n)]


@lru_cache
def _measured():
    """Accuracies of all programs that the tests ask for, in one compiled run: ``[text, what is changed]``."""
    asked = [(text, {}) for text in ("s", "ds", "cs", "dcs", "w", "sv", "dcsw", "c", "", "v", "s0", "s.0")]
    asked += [("sv", BLIND), ("dcsw", {"limit": 10})]
    asked += [(text, changes) for changes in (HURTS, BROKEN) for text in SHORT]
    table = jax.tree.map(lambda *x: jnp.stack(x), *(_executor(**changes) for _, changes in asked))
    programs = jnp.asarray([flows.encode(text) for text, _ in asked], jnp.int32)
    found = jax.jit(partial(flows.accuracies, items=1000))(table, programs, jax.random.key(0))
    keys = [(text, *changes) for text, changes in asked]
    return dict(zip(keys, np.asarray(found, np.float64), strict=True))


def _chains(rng, error, steps, items=4000):
    """Offsets of chains simulated step by step."""
    off = np.zeros(items, np.int64)
    for _ in range(steps):
        off = (off + np.where(rng.random(items) < error, rng.integers(1, 10, items), 0)) % 10
    return off


# three standard errors of the difference of two shares, of 1000 items and of 4000; their draws are the same everywhere
APART = 3 * np.sqrt(0.25 / 1000 + 0.25 / 4000)


def test_the_executor_errs_as_its_chains_do():
    rng, found = np.random.default_rng(0), _measured()
    for text, error in (("s", 0.2), ("ds", 0.08), ("cs", 0.06), ("dcs", 0.024)):
        assert abs(found[text,] - np.mean(_chains(rng, error, 4) == 0)) < APART
    # three votes
    votes = np.stack([np.eye(10)[_chains(rng, 0.2, 4)] for _ in range(3)]).sum(0)
    majority = np.argmax(votes + 0.5 * rng.random(votes.shape), axis=1)
    assert abs(found["w",] - np.mean(majority == 0)) < APART
    # verified: what is rejected is solved again
    first, again = _chains(rng, 0.2, 4), _chains(rng, 0.2, 4)
    rejected = rng.random(4000) < np.where(first == 0, 0.1, 0.9)
    assert abs(found["sv",] - np.mean(np.where(rejected, again, first) == 0)) < APART
    assert found["sv",] > found["s",] + 0.1
    # a blind verifier is worth no more than solving
    assert abs(found["sv", "finds", "alarms"] - found["s",]) < APART


def test_what_cannot_be_run_scores_nothing():
    found = _measured()
    assert found["dcsw",] == 0.0 and found["dcsw", "limit"] > 0.9  # costs 10
    assert found["c",] == 0.0 and found["",] == 0.0 and found["v",] == 0.0  # nothing was solved
    assert found["s0",] == 0.0 and found["s.0",] > 0.3  # no letter of the language; behind the end it is not read


def test_a_harder_bed_has_longer_chains_and_lower_limits(monkeypatch):
    hard = flows.executors(64, 1, limits=(3, 4), chains=(7, 9))
    assert set(np.asarray(hard.limit).tolist()) == {3, 4} and set(np.asarray(hard.steps).tolist()) == {7, 8, 9}
    plain = flows.executors(64, 1)
    assert set(np.asarray(plain.limit).tolist()) == {4, 6, 9} and set(np.asarray(plain.steps).tolist()) == {3, 4, 5, 6}
    np.testing.assert_array_equal(plain.limit, flows.executors(64, 1, limits=(4, 6, 9), chains=(3, 6)).limit)
    for wrong in ({"limits": (10,)}, {"limits": ()}, {"chains": (6, 3)}, {"chains": (3, 10)}):
        with pytest.raises(UserError, match="numbers of 1 to 9"):
            flows.executors(4, 1, **wrong)
    met = []
    monkeypatch.setattr(w4s.workflows, "executors", lambda count, seed, **given: met.append(given) or plain)
    w4s.embedded(w4s.Settings(limits=(3, 4), chains=(7, 9)))
    assert met == [{"limits": (3, 4), "chains": (7, 9)}]


def test_the_right_workflow_depends_on_the_executor():
    """The best of all short programs is far better than the seed, and another one for another executor."""
    for change, wanted, useless in (("decomposed", "c", "d"), ("calculator", "d", "c")):
        scores = {text: _measured()[text, change] for text in SHORT}
        best = max(scores, key=scores.get)
        assert wanted in best and useless not in best
        assert scores[best] > 0.85 and scores["s"] < 0.6


@lru_cache
def _found():
    """Five turns of three searches, two candidates each."""
    table = flows.executors(3, 5)
    play = {"turns": 5, "candidates": 2}
    return jax.jit(lambda key: meta_agent.search(flows.scribble, table, key, **play))(jax.random.key(0))


def test_searches_show_what_was_chosen_and_pay_every_candidate():
    found, rows = _found(), np.arange(3)
    best, last = np.asarray(found.start), np.asarray(found.start)
    told = [flows.told(jnp.asarray([flows.encode("s")] * 3, jnp.int32), found.start, found.start)]
    for i in range(5):
        scores = np.asarray(found.scores[i])
        expected = np.where(scores > best[:, None], 1.0, np.where(scores > last[:, None], 0.5, 0.0))
        np.testing.assert_array_equal(found.rewards[i], expected)
        # the last entries, the newest at the end; empty places before them
        window = np.stack([np.zeros((3, flows.ENTRY), int)] * flows.WINDOW + [np.asarray(x) for x in told])[
            -flows.WINDOW :
        ]
        np.testing.assert_array_equal(found.contexts[i, :, 3:], window.transpose(1, 0, 2).reshape(3, -1))
        chosen = scores.argmax(1)
        np.testing.assert_array_equal(found.chosen[i], chosen)
        told.append(flows.told(found.programs[i][rows, chosen], jnp.asarray(scores[rows, chosen]), jnp.asarray(last)))
        last = scores[rows, chosen]
        best = np.maximum(best, last)
    table = meta_agent.samples_of(found)
    assert table.rewards.shape == (30,) and table.programs.shape == (30, flows.LENGTH)
    np.testing.assert_array_equal(table.contexts[2 * 3 * 4 + 3], found.contexts[4, 1])
    # an archive shows entries that exist, in their order, each once
    for count in (1, 2, 8):
        places = np.asarray(meta_agent.archive(jax.random.key(2), jnp.int32(count), 8, 16))
        shown = [row[row >= 0] for row in places]
        assert all(len(x) == min(count, flows.WINDOW) and (np.diff(x) > 0).all() and (x < count).all() for x in shown)


def test_only_what_cannot_be_run_is_written_anew():
    """By hand: the first runs at once, the second at its second repair, the third never."""
    table = jax.tree.map(lambda x: jnp.stack([x] * 3), _executor(limit=4))
    first = jnp.asarray([flows.encode(x) for x in ("ds", "dcsw", "wW")], jnp.int32)
    drafts = [("c", "dW", "WW"), ("w", "cs", "W"), ("v", "w", "WWW")]
    read = []

    def propose(contexts, key, samples):
        assert samples == 1
        read.append(["".join(flows.ALPHABET[int(t)] for t in row) for row in contexts])
        return jnp.asarray([flows.encode(x) for x in drafts[len(read) - 1]], jnp.int32)

    seed = flows.told(jnp.asarray([flows.encode("s")] * 3, jnp.int32), jnp.full(3, 0.4), jnp.full(3, 0.4))
    contexts = flows.contexts(table, jnp.stack([jnp.zeros_like(seed)] * 2 + [seed], axis=1))
    given = contexts, first, jnp.array([0.4, 0.4, 0.0]), jax.random.key(0)
    found = meta_agent.repaired(propose, table, *given, repairs=3)
    said = ["".join(flows.ALPHABET[int(t)] for t in row).rstrip(".") for row in found]
    assert said == ["ds", "cs", "WWW"] and len(read) == 3
    # the broken attempts stand at the end of what is read, with nothing scored: it fell, or there was nothing before
    assert read[0][1] == "44:" + "_" * 8 + "s.....4=" + "dcsw..0-" and read[0][2][-8:] == "wW....0="
    assert read[1][1] == "44:" + "s.....4=" + "dcsw..0-" + "dW....0-"
    assert (meta_agent.repaired(propose, table, *given, repairs=0) == first).all() and len(read) == 3


def test_more_programs_run_where_they_may_be_repaired():
    table = flows.executors(64, 5)

    def runs(repairs):
        play = {"turns": 2, "candidates": 2, "repairs": repairs}
        found = jax.jit(lambda key: meta_agent.search(flows.scribble, table, key, **play))(jax.random.key(0))
        fine = jax.vmap(jax.vmap(lambda p: flows.can_run(table, p), in_axes=1))(found.programs)
        return float(fine.mean())

    assert runs(3) > runs(0) + 0.1


def test_context_as_text():
    entry = flows.told(jnp.asarray([flows.encode("dcs")], jnp.int32), jnp.array([0.65]), jnp.array([0.4]))
    table = jax.tree.map(lambda x: x[None], _executor())
    context = flows.contexts(table, jnp.stack([jnp.zeros_like(entry)] * 2 + [entry], axis=1))
    assert "".join(flows.ALPHABET[int(t)] for t in context[0]) == "49:" + "_" * 16 + "dcs...6+"


def test_only_the_last_turn_trains():
    batch = meta_agent.samples_of(_found())

    @jax.jit
    def both(key):
        params = flows.WORLD.policy.init(key)
        whole = jnp.concatenate([batch.contexts, batch.programs], axis=1)
        positions = jnp.broadcast_to(jnp.arange(whole.shape[1], dtype=jnp.int32)[None], whole.shape)
        hidden = flows.WORLD.policy.hidden(params, whole, positions, jnp.ones_like(whole))
        logp = jax.nn.log_softmax(flows.WORLD.policy.unembed(params, hidden))
        return meta_agent.regression(params, batch, exponential_weights)[0], logp

    value, logp = both(jax.random.key(0))
    logp, expected = np.asarray(logp, np.float64), []
    for n, program in enumerate(np.asarray(batch.programs)):
        size = list(program).index(flows.STOP) + 1
        terms = [-logp[n, flows.PROMPT + t - 1, program[t]] for t in range(size)]
        expected.append(np.exp(float(batch.rewards[n]) / 0.4) * np.mean(terms))
    close.assert_near(value, np.mean(expected), magnitude=0)
