"""Stratified GRPO: worked numbers, a loop, its limits; the world of look-ups its experiment plays in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import stratified_grpo
from experiments.agents.parts import lookup, multi_hop
from jaxrl_llm.advantages.group import dr_grpo_advantages, group_normalized_advantages
from jaxrl_llm.advantages.turns import stratified_advantages
from tests import close

FOUR, PAIRS = jnp.zeros(4, jnp.int32), jnp.array([0, 0, 1, 1], jnp.int32)


def _found(rewards, strata, blend):
    return stratified_advantages(jnp.array(rewards), FOUR, jnp.array(strata, jnp.int32), blend=blend, eps=0.0).tolist()


def test_worked_examples():
    # strata (1, 0) and (1, 0): mean 0.5, population deviation 0.5
    assert _found([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], 1.0) == [1.0, -1.0, 1.0, -1.0]
    # equal rewards within each stratum: only the group's term is left, (1 - 0.5) / 0.5
    assert _found([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], 1.0) == [0.0, 0.0, 0.0, 0.0]
    assert _found([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], 0.0) == [1.0, 1.0, -1.0, -1.0]
    assert _found([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], 0.5) == [0.5, 0.5, -0.5, -0.5]
    # alone in a stratum
    assert _found([1.0, 0.0, 1.0, 0.5], [0, 0, 1, 2], 1.0) == [1.0, -1.0, 0.0, 0.0]


def test_one_baseline_adds_an_offset_to_each_stratum():
    """Under the group's mean an episode pays for its stratum: R - mean = (R - mean_k) + (mean_k - mean)."""
    rewards = jnp.array([1.0, 0.0, 1.0, 0.5])  # strata of means 0.5 and 0.75, the group's is 0.625
    found = dr_grpo_advantages(rewards, FOUR)
    close.assert_near(found, [0.375, -0.625, 0.375, -0.125])
    within = dr_grpo_advantages(rewards, PAIRS)
    close.assert_near(found - within, [-0.125, -0.125, 0.125, 0.125])
    # the strata's baselines have the smaller variance, by the variance of the offsets: 0.125 squared
    close.assert_printed(jnp.var(found) - jnp.var(within), 0.015625, 6)


def test_agrees_with_a_loop():
    rng = np.random.default_rng(0)
    rewards, ids, strata = rng.normal(size=24), np.arange(24) % 3, rng.integers(-1, 3, 24)
    valid = rng.random(24) < 0.8
    expected = np.zeros(24)
    for i in np.flatnonzero(valid):
        whole = rewards[valid & (ids == ids[i])]
        own = rewards[valid & (ids == ids[i]) & (strata == strata[i])]
        within = (rewards[i] - own.mean()) / own.std() if own.size > 1 else 0.0
        expected[i] = 0.3 * within + 0.7 * (rewards[i] - whole.mean()) / whole.std()
    given = jnp.asarray(rewards, jnp.float32), jnp.asarray(ids, jnp.int32), jnp.asarray(strata, jnp.int32)
    found = stratified_advantages(*given, blend=0.3, valid=jnp.asarray(valid), eps=0.0)
    close.assert_near(found, expected)
    # mean 0 and variance 1 in every stratum that has two members or more
    within = np.asarray(stratified_advantages(*given, blend=1.0, eps=0.0))
    for group in range(3):
        for stratum in range(-1, 3):
            own = within[(ids == group) & (strata == stratum)]
            if own.size > 1:
                close.assert_near([own.mean(), own.std()], [0.0, 1.0])


def test_limits():
    rewards, ids = jnp.array([1.0, 0.0, 0.25, 0.0]), jnp.array([0, 1, 0, 1], jnp.int32)
    plain = group_normalized_advantages(rewards, ids, ddof=0)
    # one stratum, or no weight on strata: GRPO
    close.assert_near(stratified_advantages(rewards, ids, FOUR), plain)
    np.testing.assert_array_equal(stratified_advantages(rewards, ids, PAIRS, blend=0.0), plain)
    with pytest.raises(ValueError, match="blend=2"):
        stratified_advantages(rewards, ids, FOUR, blend=2.0)


def test_questions_are_answered_by_looking_up():
    table = lookup.problems(20, 5)
    step = jax.jit(lookup.ENV.step)

    def act(state, character):
        return step(state, jnp.asarray([lookup.ALPHABET.index(character)], jnp.int32), jnp.int32(1))

    for i in range(20):
        task = {name: x[i] for name, x in table.answers.items()}
        hops, at, f = int(task["hops"]), int(task["start"]), np.asarray(task["table"])
        assert "".join(lookup.ALPHABET[t] for t in table.tokens[i]) == f"{hops}{'abcdef'[at]}="
        state = start = lookup.ENV.reset(jax.random.key(0), task)
        for _ in range(hops):
            answer = act(state, "abcdef"[at])
            at, state = int(f[at]), answer.state
            shown = "".join(lookup.ALPHABET[t] for t in answer.tokens)
            assert shown == f":{'abcdef'[at]}=" and not bool(answer.done) and float(answer.reward) == 0.0
        for first in (state, start):  # known, or guessed
            right, wrong = act(first, "ABCDEF"[at]), act(first, "ABCDEF"[at - 1])
            assert bool(right.done) and bool(wrong.done)
            assert (float(right.reward), float(wrong.reward)) == (1.0, 0.0)
        useless = act(state, "1")
        assert not bool(useless.done) and lookup.ALPHABET[int(useless.tokens[1])] == "_"
        assert int(lookup.ENV.identity(useless.state)) == int(lookup.ENV.identity(state))


def test_the_second_world_has_calls_that_say_nothing_of_the_answer():
    """The behaviour that the base imitates acts alike after none and after three searches; a look-up brings answers."""
    settings = stratified_grpo.Settings(domain="retrieved")
    arena = stratified_grpo.embedded(settings).tasks
    assert arena is multi_hop.make_retrieved(hops=(1, 2))
    assert stratified_grpo.embedded(stratified_grpo.Settings()).tasks is lookup.make_lookup()
    tasks = jax.tree.map(lambda x: x[:64], arena.train.answers)
    keys = jax.random.split(jax.random.key(0), 64)

    def act(task, key, searches):
        state = arena.env.reset(key, task)
        return arena.behave(state._replace(searches=searches), key)

    acts = jax.jit(jax.vmap(act, in_axes=(0, 0, None)))
    none, three = (np.asarray(acts(tasks, keys, jnp.int32(count))) for count in (0, 3))
    np.testing.assert_array_equal(none, three)
    first = [multi_hop.ALPHABET[t] for t in none[:, 0]]
    assert first.count("?") > 3 and first.count("!") > 30
