"""MUA-RL: digests of databases, what the user must be told, pass^k, and the shop its experiment plays in."""

from functools import partial
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import mua_rl
from experiments.agents.parts import arena as arenas
from experiments.agents.parts import end_state, retail
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.metrics.intervals import pass_hat_k
from tests import close


def test_digests():
    first = {"orders": {"1": {"tags": {"new", "paid"}, "size": 3}, "2": {"tags": set(), "size": 4.0}}, "open": True}
    second = {"open": True, "orders": {"2": {"size": 4.0, "tags": set()}, "1": {"size": 3, "tags": {"paid", "new"}}}}
    assert end_state.state_digest(first) == end_state.state_digest(second)
    second["orders"]["1"]["size"] = 5
    changed = end_state.state_digest(second)
    second["orders"]["1"]["size"] = 3
    assert changed != end_state.state_digest(first) == end_state.state_digest(second)
    different = [1, 1.0, True, "1", None, [1], {1}, {"1": 1}, {1: 1}, [[1], 1], [1, [1]], "[int1]", {"a,b": 1}]
    assert len({end_state.state_digest(x) for x in different}) == len(different)
    with pytest.raises(ValueError, match="a object in the state"):
        end_state.state_digest([object()])


def test_what_the_user_must_be_told():
    assert end_state.says_all(["1,234"], ["That is 1,234 dollars"]) and end_state.says_all(["1,234"], ["1234"])
    assert end_state.says_all(["1234", "LAPTOP"], ["a laptop", "for 1,234"]) and not end_state.says_all(["12"], ["1 2"])
    gold = {"a": 1}
    assert end_state.judge_end({"a": 1}, gold, ["It costs 5."], ["5"]).value == 1.0
    assert end_state.judge_end({"a": 1}, gold, [], ["5"]).reason == "the user was not told everything"
    wrong = end_state.judge_end({"a": 2}, gold, ["It costs 5."], ["5"])
    assert wrong.value == 0.0 and wrong.valid


def test_pass_hat_k():
    assert pass_hat_k(np.array([3]), 4, 2).tolist() == [0.5]
    for n in (4, 7):
        for k in (1, 3, n):
            want = [comb(c, k) / comb(n, k) for c in range(n + 1)]
            close.assert_near(pass_hat_k(np.arange(n + 1), n, k), want, magnitude=0)
            close.assert_near(pass_hat_k(jnp.arange(n + 1, dtype=jnp.float32), n, k), want)
    with pytest.raises(ValueError, match="k=5"):
        pass_hat_k(np.array([3]), 4, 5)


# --- the shop

STEP = jax.jit(retail.make_env().step)
EXCHANGE = {
    "sizes": jnp.array([0, 1, 2]), "prices": jnp.array([3, 2, 1]), "order": jnp.int32(1), "size": jnp.int32(2),
    "final": jnp.int32(2), "gold": jnp.array([0, 2, 2]), "cancel": jnp.array(False), "open": jnp.array(False),
}  # fmt: skip
CANCEL = EXCHANGE | {"cancel": jnp.array(True), "gold": jnp.array([0, -1, 2])}
FICKLE = EXCHANGE | {"final": jnp.int32(3), "gold": jnp.array([0, 3, 2])}


def talk(desk, step, task, actions):
    """What was answered, and what the last action paid if it ended the talk."""
    state, told = desk.make_env().reset(jax.random.key(0), task), ""
    for text in actions.split():
        answer = step(state, jnp.asarray(desk.encode(text), jnp.int32), jnp.int32(3))
        state, told = answer.state, told + desk.ALPHABET[int(answer.tokens[0])]
    return told, float(answer.reward) if bool(answer.done) else None


_talk = partial(talk, retail, STEP)


@pytest.mark.parametrize(
    ("task", "actions", "told", "paid"),
    [
        (EXCHANGE, "mo. ms. Xb2 me.", "b2=k", 1.0),
        (EXCHANGE, "mo. ms. Xb3 Xb2 me.", "b2==k", 1.0),  # set right in time
        (EXCHANGE, "mo. ms. Xb3 me.", "b2=k", 0.0),
        (EXCHANGE, "mo. Cb. Xb2 me.", "b=!k", 0.0),  # a cancelled order is no more
        (EXCHANGE, "Xb. === ms.", "!!2", None),
        (CANCEL, "mo. ms. Lb. Cb. m2. me.", "bk2=kk", 1.0),
        (CANCEL, "mo. Lb. Cb. me.", "b2=k", 0.0),  # not told what comes back
        (CANCEL, "mo. Lb. Cb. m1. me.", "b2=kk", 0.0),
        (FICKLE, "mo. ms. Xb2 me. Xb3 me.", "b2=3=k", 1.0),
        (FICKLE, "mo. ms. Xb2 me. me.", "b2=3k", 0.0),
        (FICKLE, "ms. mo. mo. Xb3 me.", "23b=k", 1.0),  # at the next word, whatever it asks
        (EXCHANGE | {"open": jnp.array(True)}, "mo. ms. Xb2 me.", "kk=k", 1.0),
    ],
)
def test_talks(task, actions, told, paid):
    assert _talk(task, actions) == (told, paid)


def test_writing_and_undoing_is_the_same_situation():
    env = retail.make_env()
    start = env.reset(jax.random.key(0), EXCHANGE)

    def after(*actions):
        state = start
        for text in actions:
            state = STEP(state, jnp.asarray(retail.encode(text), jnp.int32), jnp.int32(3)).state
        return int(env.identity(state))

    assert after("Xb3", "Xb1") == after() != after("Xb3")


def test_a_plan_of_what_was_said_always_succeeds():
    arena = retail.make_retail(skill=1.0)

    def play(task):
        def turn(carry, _):
            state, alive = carry
            answer = arena.env.step(state, retail.expert(state).astype(jnp.int32), jnp.int32(3))
            return (answer.state, alive & ~answer.done), jnp.where(alive, answer.reward, 0.0)

        start = arena.env.reset(jax.random.key(0), task), jnp.ones((), bool)
        return jnp.sum(jax.lax.scan(turn, start, None, retail.TURNS)[1])

    paid = jax.jit(jax.vmap(play))
    assert np.asarray(paid(arena.train.answers)).all() and np.asarray(paid(arena.heldout.answers)).all()
    levels = np.bincount(np.asarray(arena.heldout.level))
    assert levels.shape == (3,) and levels.min() > 2
    # a bonus for calls does not depend on the end
    eager = retail.make_env(bonus=0.1)
    answer = eager.step(
        eager.reset(jax.random.key(0), CANCEL), jnp.asarray(retail.encode("Lb."), jnp.int32), jnp.int32(3)
    )
    close.assert_near(answer.reward, 0.1, magnitude=0)


def test_only_the_agent_is_trained():
    """The words of user and tools have no gradient; where everybody counts, they do."""
    arena = retail.make_retail(skill=1.0)
    rows = jax.jit(lambda key: arenas.play(arena, key, 4))(jax.random.key(0))
    acting = np.asarray(rows.mask)[:, 3:].reshape(4, -1, 4)
    used = np.asarray(rows.segment_ids)[:, 3:].reshape(4, -1, 4) > 0
    np.testing.assert_array_equal(acting[..., :3], used[..., :3])
    assert not acting[..., 3].any() and not np.asarray(rows.mask)[:, :3].any()
    both = np.asarray(mua_rl.everybody(arena.new_tokens, rows).mask)[:, 3:].reshape(4, -1, 4)
    np.testing.assert_array_equal(both, used)
    logp = jnp.full(rows.mask.shape, -0.5)
    for trained, count in ((mua_rl.agent_only, acting.sum()), (mua_rl.everybody, used.sum())):
        mask = trained(arena.new_tokens, rows).mask
        slope = jax.grad(lambda x, m=mask: jnp.sum(clipped_policy_loss(x, logp, jnp.ones_like(x), m).loss))(logp)
        close.assert_near(slope, np.where(mask, -1.0, 0.0))
        assert int(np.count_nonzero(slope)) == count
