"""SPA-RL: contributions that sum to the return, rewards of turns, what changed the situation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import keydoor, keydoor_arena, progress_estimator
from jaxrl_llm.advantages import turns
from jaxrl_llm.advantages.returns import gae_advantages
from jaxrl_llm.losses.reward import return_sum_loss
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train import offline
from tests import close

ALL = jnp.ones((1, 3), bool)


def test_worked_rewards_and_loss():
    found = turns.spa_rewards(jnp.array([[0.2, 0.3, 0.5]]), jnp.array([[True, False, True]]), ALL)
    close.assert_near(found, [[0.7, 0.3, 1.0]])
    # a turn that was not taken has none
    short = turns.spa_rewards(jnp.array([[0.2, 0.3, jnp.nan]]), ALL, jnp.array([[True, True, False]]))
    close.assert_near(short, [[0.7, 0.8, 0.0]])
    given = jnp.array([[0.2, 0.3, 9.0]]), jnp.array([1.0]), jnp.array([[True, True, False]])
    close.assert_near(return_sum_loss(*given).loss, [0.25])
    # d/dc (sum - 1)^2 = 2 (0.5 - 1) at each turn that was taken
    slope = jax.grad(lambda c: jnp.sum(return_sum_loss(c, *given[1:]).loss))(given[0])
    close.assert_near(slope, [[-1.0, -1.0, 0.0]])


def test_agrees_with_a_loop():
    rng = np.random.default_rng(0)
    steps, rewards, seen = rng.normal(size=(7, 5)), rng.normal(size=7), rng.integers(0, 2, (7, 5))
    count = rng.integers(1, 6, 7)
    loss, fused, even = np.zeros(7), np.zeros((7, 5)), np.zeros((7, 5))
    for i in range(7):
        loss[i] = (sum(steps[i, : count[i]]) - rewards[i]) ** 2
        for k in range(count[i]):
            last = k == count[i] - 1
            fused[i, k] = 0.7 * steps[i, k] + 0.2 * float(last or seen[i, k + 1] != seen[i, k])
            even[i, k] = rewards[i] / count[i]
    valid, c = jnp.asarray(np.arange(5)[None, :] < count[:, None]), jnp.asarray(steps, jnp.float32)
    r, identity = jnp.asarray(rewards, jnp.float32), jnp.asarray(seen, jnp.int32)
    close.assert_near(return_sum_loss(c, r, valid).loss, loss)
    found = turns.spa_rewards(c, turns.moved(identity, valid), valid, weight=0.7, grounding=0.2)
    close.assert_near(found, fused)
    close.assert_near(turns.uniform_progress(r, valid), even)
    # every attribution is a division of the same return
    for divided in (turns.uniform_progress(r, valid), turns.terminal_progress(r, valid)):
        close.assert_near(jnp.sum(divided, axis=1), rewards)
        close.assert_near(return_sum_loss(divided, r, valid).loss, np.zeros(7))
    assert (np.count_nonzero(turns.terminal_progress(r, valid), axis=1) == 1).all()


def test_terminal_progress_without_grounding_is_the_reward_at_the_end():
    """The limit where SPA is PPO: with one reward at the last turn, GAE at lambda 1 gives every turn the return."""
    found = turns.spa_rewards(turns.terminal_progress(jnp.array([1.0]), ALL), ALL, ALL, grounding=0.0)
    assert found.tolist() == [[0.0, 0.0, 1.0]]
    advantages, _ = gae_advantages(found, jnp.zeros((1, 3)), jnp.zeros((1,)), ALL, lam=1.0)
    assert advantages.tolist() == [[1.0, 1.0, 1.0]]


def _walked(cells, agent, key, door, actions):
    """The situations before each action of one corridor, as the world numbers them, and what each action was paid."""
    env = keydoor.make_env(keydoor_arena.encode, (), height=1, width=cells)
    start = {"agent": agent, "key": key, "door": door}
    place = env.reset(jax.random.key(0), {name: jnp.int32(cell) for name, cell in start.items()})
    seen, paid, after = [], [], []
    for action in actions:
        seen.append(int(env.identity(place)))
        answer = env.step(place, jnp.asarray(keydoor_arena.encode(action), jnp.int32), jnp.int32(1))
        place, held = answer.state, bool(answer.state.held)
        paid.append(float(answer.reward))
        # the sub-goals by hand, from the places alone
        here = 1 if int(place.agent) == int(place.key) else 0
        after.append(4 if answer.done else (3 if abs(int(place.agent) - door) == 1 else 2) if held else here)
    return seen, paid, after


def _turns(seen, paid):
    """Episodes of up to eight turns."""
    table = np.zeros((2, len(seen), 8))
    for b in range(len(seen)):
        table[0, b, : len(seen[b])], table[1, b, : len(paid[b])] = seen[b], paid[b]
    taken = jnp.asarray(np.arange(8)[None, :] < np.array([len(x) for x in seen])[:, None])
    identity, none = jnp.asarray(table[0], jnp.int32), jnp.zeros(taken.shape, jnp.int32)
    reward, all_ = jnp.asarray(table[1], jnp.float32), taken[:, 0]
    return multi_turn.Turns(none, none, taken, reward, identity, all_, all_), taken


def test_the_oracle_pays_for_sub_goals():
    # A . K . . D: two steps to the key, pick, two steps beside the door, open
    seen, paid, _ = _walked(6, 0, 2, 5, "rrprro")
    found = keydoor_arena.subgoal_progress(*_turns([seen], [paid]))
    close.assert_near(found, [[0.0, 0.25, 0.25, 0.0, 0.25, 0.25, 0.0, 0.0]], magnitude=0)
    # back and forth is paid once; the key beside the door is two sub-goals at once; out of turns
    walks = [(6, 0, 2, 5, "rrlrpp"), (6, 3, 4, 5, "rpo"), (6, 0, 4, 5, "lrrrrplr")]
    played = [_walked(*walk) for walk in walks]
    found = np.asarray(keydoor_arena.subgoal_progress(*_turns(*([p[i] for p in played] for i in (0, 1)))))
    expected = np.zeros((3, 8))
    for b, (_, paid, after) in enumerate(played):
        best = 0
        for k, now in enumerate(after):
            last = k == len(after) - 1
            reached = best if last and not paid[k] else max(best, now)  # nothing is seen behind the last action
            expected[b, k], best = (reached - best) / 4, reached
    close.assert_near(found, expected)
    close.assert_near(found.sum(1), [0.5, 1.0, 0.75], magnitude=0)


@pytest.mark.slow
def test_the_estimator_learns_to_sum_to_returns():
    """On rows of the arena: the error falls below the variance of the returns, which a constant would leave."""
    arena = keydoor_arena.make_keydoor(cells=4, turns=6, skill=0.7)
    stage = progress_estimator.fit_stage(arena, steps=120, table=64, learning_rate=3e-3)
    params = progress_estimator.make_start(arena, base_steps=2)(jax.random.key(0))
    ids = jnp.arange(9, dtype=jnp.int32)
    rows = arenas.arena_episodes(arena, arena.train, group_size=1)(
        params["model"], arena.train.tokens, arena.train.valid, sample_keys(jax.random.key(1), 0, ids, 1), ids
    )
    said = progress_estimator.contributions(arena, params["progress"], rows)
    assert said.shape == (9, 6) and not np.asarray(said).any()  # the head starts at 0
    # as if the world had paid for every 'r': what the estimator can see at the end of each action
    steps = jnp.take_along_axis(rows.tokens, multi_turn.turns_of(rows).end, axis=1)
    right = (steps == keydoor_arena.encode("r")[0]) & multi_turn.turns_of(rows).taken
    turned = rows._replace(extras=rows.extras | {"turns/reward": right.astype(jnp.float32)})
    step = jax.jit(lambda p: jax.value_and_grad(lambda q: stage.method.loss(q, {}, turned)[0])(p))
    first, slope = step(params)
    assert float(first) > 0.0
    assert not any(np.asarray(x).any() for x in jax.tree.leaves((slope["model"], slope["value"])))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slope))
    state = offline.init_state(stage.method, params, jax.random.key(2), extras={"rows": turned})
    _, metrics = offline.make_run(stage.method, 80)(state)
    total = np.asarray(right).sum(1)
    assert float(metrics["fit/error"][-10:].mean()) < 0.5 * total.var() + 1e-3
