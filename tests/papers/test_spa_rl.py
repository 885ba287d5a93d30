"""SPA-RL: contributions that sum to the return, rewards of turns, what changed the situation."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from experiments.agents import spa_rl
from experiments.agents.parts import arena as arenas
from experiments.agents.parts import errands, progress_estimator
from jaxrl_llm.advantages import turns
from jaxrl_llm.advantages.returns import gae_advantages
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms
from jaxrl_llm.losses.reward import return_sum_loss
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train import offline
from jaxrl_llm.train.plan import Setup
from jaxrl_llm.types import Rewards, Trajectories
from tests import close

ALL = jnp.ones((1, 3), bool)


class Rows(NamedTuple):
    """Of episodes only what ``contributions`` shall say of them."""

    tokens: Array


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


def _walked(task, actions):
    """The situations before each action on three by three cells, what each was paid, and what is taken after it."""
    env = errands.make_env(side=3, places=len(task["places"]))
    state = env.reset(jax.random.key(0), {name: jnp.asarray(x, jnp.int32) for name, x in task.items()})
    seen, paid, taken = [], [], []
    for action in actions:
        seen.append(int(env.identity(state)))
        answer = env.step(state, jnp.asarray([errands.LEFT + errands.ACTIONS.index(action)], jnp.int32), jnp.int32(1))
        state = answer.state
        paid.append(float(answer.reward))
        taken.append(int(state.taken))
    return seen, paid, taken


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
    # from the middle up and left to the corner 0, take; two down to 6, take
    task = {"agent": 4, "places": (0, 6)}
    seen, paid, _ = _walked(task, "ultddt")
    found = errands.progress(*_turns([seen], [paid]), places=2)
    close.assert_near(found, [[0.0, 0.0, 0.5, 0.0, 0.0, 0.5, 0.0, 0.0]], magnitude=0)
    # taking where nothing is, taking again, coming back; and one out of turns, whose last action nothing follows
    played = [_walked(task, actions) for actions in ("tultttrl", "ultrlddt", "ulrldudt", "ult")]
    found = np.asarray(errands.progress(*_turns(*([p[i] for p in played] for i in (0, 1))), places=2))
    expected = np.zeros((4, 8))
    for b, (_, rewards, taken) in enumerate(played):
        before = 0
        for k, now in enumerate(taken):
            unseen = k == len(taken) - 1 and not rewards[k]
            expected[b, k], before = 0.0 if unseen else (now - before) / 2, now
    close.assert_near(found, expected, magnitude=0)
    close.assert_near(found.sum(1), [0.5, 1.0, 0.0, 0.0], magnitude=0)


def test_walking_outweighs_the_task_at_the_papers_weight_alone():
    """What a whole episode that leads nowhere is paid for its steps, beside 1 for the task."""
    base = arms.preset(spa_rl, smoke=False, model=spa_rl.Settings().model)
    resolved = arms.resolve(spa_rl, base, ())
    given = {name: s.grounding for name, s in resolved.items()}
    assert (given["spa"], given["beta_10"], given["strong"]) == (0.01, 0.1, 0.5)
    lost = Rewards(jnp.zeros((1,)), jnp.ones((1,), bool))
    pays = {name: bool(s.pays(lost)[0]) for name, s in resolved.items()}
    most = {name: beta * errands.make_errands().turns * pays[name] for name, beta in given.items()}
    assert {name for name, paid in most.items() if paid == 0} == {"ppo", "no_grounding", "won", "strong_won"}
    assert (given["won"], given["strong_won"]) == (0.01, 0.5)
    assert {name for name, paid in most.items() if paid >= 0.25} == {"beta_10", "strong"}
    assert 1 < most["beta_10"] < most["strong"]
    assert spa_rl.Settings().grounding == 0.5 and base.grounding <= 0.01
    scale = {name: s.grounding for name, s in arms.resolve(spa_rl, spa_rl.Settings(), ()).items()}
    assert (scale["spa"], scale["beta_10"], scale["strong"]) == (0.5, 5.0, 25.0)


def test_grounding_pays_in_won_episodes_alone_where_the_arm_says_so(monkeypatch):
    """Two episodes that walk once and then stand still; the first one wins. What PPO is given, by hand."""
    found, _ = _turns([[1, 2, 2], [1, 2, 2]], [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    place = jnp.where(found.taken, jnp.arange(8, dtype=jnp.int32)[None, :], 0)
    found = found._replace(end=place, turn=place)
    none, one = jnp.zeros((2, 8), jnp.int32), jnp.zeros((2,), jnp.int32)
    rows = Trajectories(
        none, none, none, found.taken, jnp.zeros((2, 8)), ~found.done, one, one,
        extras={f"turns/{name}": value for name, value in found._asdict().items()},
    )  # fmt: skip
    rewards, given = Rewards(jnp.array([1.0, 0.0]), jnp.ones((2,), bool)), {}

    def kept(tasks, settings, *, token_rewards, **slots):
        given[settings.pays] = token_rewards(None, {}, rows, rewards)

    monkeypatch.setattr(spa_rl.episode_methods, "make_ppo", kept)
    monkeypatch.setattr(spa_rl, "setup_of", lambda *given: Setup(None, None, None))
    terminal = spa_rl.Settings(attribute=spa_rl.terminal, grounding=0.25)
    for pays in (spa_rl.everywhere, spa_rl.successes):
        spa_rl.build(dataclasses.replace(terminal, pays=pays))
    rest = [0.0] * 5
    won, lost = [0.25, 0.0, 1.25, *rest], [0.25, 0.0, 0.25, *rest]  # the last turn counts as grounded
    assert given[spa_rl.everywhere].tolist() == [won, lost]
    assert given[spa_rl.successes].tolist() == [won, [0.0] * 8]


def test_credit_is_half_where_nothing_is_told_apart_and_one_for_the_oracle(monkeypatch):
    """``eval/credit`` of an estimator that says 0, of one that says what the oracle does, and of its opposite."""
    played = [_walked({"agent": 4, "places": (0, 6, 8, 2)}, actions) for actions in ("ultddtrr", "ultddtrr", "ult")]
    found, taken = _turns(*([p[i] for p in played] for i in (0, 1)))
    rows = arenas.Trajectories(
        tokens=jnp.ones(taken.shape, jnp.int32), segment_ids=taken.astype(jnp.int32),
        positions=jnp.zeros(taken.shape, jnp.int32), mask=taken, sampler_logp=jnp.zeros(taken.shape),
        truncated=jnp.ones(3, bool), group_ids=jnp.arange(3), problem_ids=jnp.zeros(3, jnp.int32),
        extras={f"turns/{name}": x for name, x in found._asdict().items()},
    )  # fmt: skip
    told = errands.progress(found, taken, places=errands.PLACES)
    assert float(jnp.sum(told)) == 4 / errands.PLACES
    monkeypatch.setattr(arenas, "make_heldout", lambda arena, **named: lambda params, key: rows)
    for said, credit in ((jnp.zeros_like(told), 0.5), (told, 1.0), (-3.0 * told, 0.0)):
        monkeypatch.setattr(progress_estimator, "contributions", lambda arena, params, rows, said=said: said)
        seen = spa_rl.measure(None, {"progress": None}, jax.random.key(0), samples=1)
        assert float(seen["eval/credit"]) == credit and float(seen["eval/success"]) == 0.0


def test_credit_of_a_world_without_known_places_orders_whole_episodes(monkeypatch):
    """By what all turns of an episode sum to, in pieces of two episodes of which the last is half full."""
    said = jnp.asarray([[0.5, 0.4], [0.4, 0.4], [0.1, 0.0]])
    monkeypatch.setattr(progress_estimator, "contributions", lambda place, params, part: part.tokens)
    rows = Rows(said)
    for won, credit in (([1.0, 0.0, 0.0], 1.0), ([0.0, 1.0, 0.5], 0.5)):
        found = Rewards(jnp.asarray(won), jnp.ones(3, bool))
        monkeypatch.setattr(multi_turn, "episode_rewards", lambda answers, rows, found=found: found)
        assert float(spa_rl.told_apart(None, {"progress": None}, rows, chunk=2)["eval/credit"]) == credit


def test_a_second_model_is_there_only_where_it_is_fitted(monkeypatch):
    """With rows of one's own: arms that ask nothing of an estimator carry none, nor moments of it."""
    given = {}
    arena = errands.make_errands()
    opened = Setup(arena, None, None, tables={"rollout": arenas.arena_episodes(arena, arena.train, group_size=1)})
    monkeypatch.setattr(spa_rl.multi_turn_plan, "hosted", lambda settings, **parts: given.update(parts) or opened)
    base = arms.preset(spa_rl, smoke=False, model=spa_rl.Settings().model)
    for name, settings in arms.resolve(spa_rl, base, ()).items():
        if name == "oracle":
            continue
        given.clear()
        plan = spa_rl.build(dataclasses.replace(settings, data="webshop:none"))
        fitted = settings.attribute is spa_rl.learned
        assert (given["start"] is progress_estimator.with_estimator, "told" in given) == (fitted, fitted), name
        assert len(plan.stages) == 1 + fitted, name


def test_the_oracle_of_rows_of_ones_own_is_refused():
    """Identities there are hashes of texts: what is left of them would be paid as if it were a place."""
    settings = dataclasses.replace(spa_rl.Settings(), **spa_rl.ARMS["oracle"], data="webshop:none")
    said = (
        "--data webshop:none: arm oracle .* give --arm ppo spa no_grounding grounding_only uniform beta_10 strong won "
        "strong_won$"
    )
    with pytest.raises(UserError, match=said):
        spa_rl.build(settings)


@pytest.mark.slow
def test_the_estimator_learns_to_sum_to_returns():
    """On rows of the arena: the error falls below the variance of the returns, which a constant would leave."""
    arena = errands.make_errands(side=4, places=4, turns=6)
    stage = progress_estimator.fit_stage(arena, steps=120, table=64, learning_rate=3e-3)
    params = progress_estimator.with_estimator(arenas.make_base(arena, steps=30)(jax.random.key(0)), jax.random.key(0))
    ids = jnp.arange(32, dtype=jnp.int32)
    rows = jax.jit(arenas.arena_episodes(arena, arena.train, group_size=1))(
        params["model"], arena.train.tokens[:32], arena.train.valid[:32], sample_keys(jax.random.key(1), 0, ids, 1), ids
    )
    said = progress_estimator.contributions(arena, params["progress"], rows)
    assert said.shape == (32, 6) and not np.asarray(said).any()  # the head starts at 0
    # as if the world had paid for every 'r': what the estimator can see at the end of each action
    steps = jnp.take_along_axis(rows.tokens, multi_turn.turns_of(rows).end, axis=1)
    right = (steps == errands.LEFT + errands.ACTIONS.index("r")) & multi_turn.turns_of(rows).taken
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
