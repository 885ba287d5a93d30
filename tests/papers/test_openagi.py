"""OpenAGI: decoding cannot leave the grammar, one candidate trains, plans earn what they restore."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents import openagi
from experiments.agents.parts import expert_plans, plan_beams, task_feedback
from experiments.parts import strings
from jaxrl_llm.experiment import arms
from jaxrl_llm.losses.policy import reinforce_loss
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rollout import grammar as grammars
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Rewards
from tests import close

TASKS, END = expert_plans.RESTORED, expert_plans.END


def _plans(*texts):
    return jnp.asarray([expert_plans.encode(t.ljust(9, "$")) for t in texts], jnp.int32)


@pytest.fixture(scope="module")
def rolled():
    """Candidates of four tasks under the grammar, and without one."""
    world, ids = expert_plans.WORLD, jnp.arange(4, dtype=jnp.int32)
    params, prompts = world.policy.init(jax.random.key(0)), jnp.asarray(expert_plans.tasks()[0][:4])

    @jax.jit
    def roll(key):
        keys = sample_keys(key, 0, ids, 16)
        return [strings.rollout(world, params, prompts, keys, samples=16, grammar=g(TASKS)) for g in
                (expert_plans.grammar, expert_plans.anything)]  # fmt: skip

    return params, *roll(jax.random.key(1))


def test_the_automaton_knows_names_kinds_and_repetitions():
    found, names = expert_plans.grammar(TASKS), expert_plans.ALPHABET

    def may(text):
        state = 0
        for c in text:
            assert names.index(c) in found.tokens[state], (text, c)
            state = int(found.following[state, found.tokens[state].tolist().index(names.index(c))])
        return {names[i] for i in found.tokens[state] if i >= 0}

    assert may("") == {"u", "t"}
    assert may("u") == set("nrsbg") and may("t") == {"c", "l"}
    assert may("ub") == {"u", "t", "$"} and may("ubu") == set("nrsg"), "no expert comes twice"
    assert may("ubtc") == {"$"}, "no expert takes text"
    assert may("ubunurus") == {"$"} and may("ub$") == {"$"}
    with pytest.raises(ValueError, match="begin another"):
        short, long = (grammars.Module(name, "a", "a") for name in ((1,), (1, 2)))
        grammars.plan_grammar([short, long], start="a", end=0, most=1)
    with pytest.raises(ValueError, match="start='b'"):
        grammars.plan_grammar([grammars.Module((1,), "a", "a")], start="b", end=0, most=1)


@pytest.mark.slow
def test_decoding_keeps_to_it_and_the_trainer_scores_what_was_drawn(rolled):
    params, kept, loose = rolled
    _, fine = expert_plans.parsed(kept.tokens[:, 5:])
    assert bool(fine.all()) and not bool(kept.truncated.any())
    assert not bool(expert_plans.parsed(loose.tokens[:, 5:])[1].all())
    for rows, grammar in ((kept, expert_plans.grammar(TASKS)), (loose, expert_plans.anything(TASKS))):
        logp, entropy = grammars.score_legal(grammar)(expert_plans.WORLD.policy, params, rows)
        close.assert_near(jnp.where(rows.mask, logp, 0.0), rows.sampler_logp)
        assert bool(jnp.isfinite(jnp.where(rows.mask, entropy, 0.0)).all())
    # the probabilities of what may come sum to 1, whatever came before
    state = grammars.states(expert_plans.grammar(TASKS), kept.tokens, kept.mask)[:, 6]
    raw = jnp.asarray(np.random.default_rng(0).normal(size=(64, len(expert_plans.ALPHABET))), jnp.float32)
    shares = jax.nn.softmax(grammars.restricted(expert_plans.grammar(TASKS), state, raw), axis=1)
    legal = grammars.legal(expert_plans.grammar(TASKS), state, len(expert_plans.ALPHABET))
    close.assert_near(jnp.sum(jnp.where(legal, shares, 0.0), axis=1), 1.0)
    assert not np.asarray(jnp.where(legal, 0.0, shares)).any()
    # no restriction is the plain score
    plain, _ = builders.score_tokens(expert_plans.WORLD.policy, params, loose)
    close.assert_near(jnp.where(loose.mask, plain, 0.0), loose.sampler_logp)


def test_one_candidate_of_each_task_trains(rolled):
    _, rows, _ = rolled
    rewards = Rewards(expert_plans.score(*strings.responses_of(expert_plans.WORLD, rows)), jnp.ones((64,), bool))
    key, likely = jax.random.key(3), np.asarray(rows.sampler_logp).sum(axis=1).reshape(4, 16).argmax(axis=1)
    extras = task_feedback.make_extras(0.0)(None, key) | {"seen": shaping.add_rewards(
        shaping.no_moments(), jnp.asarray([0.5, 0.25], jnp.float32))}  # fmt: skip
    earned = np.asarray(rewards.value, np.float64).reshape(4, 16)[np.arange(4), likely]
    mean_after = (0.75 + earned.sum()) / 6
    wanted = {"above_mean": earned - 0.375, "own_reward": earned, "mean_so_far": np.full(4, mean_after)}
    for name, values in wanted.items():
        estimate = task_feedback.make_estimate(expert_plans.WORLD.policy, getattr(task_feedback, name))
        batch = estimate({}, extras, rows, rewards)
        trains = np.asarray(batch.mask.any(axis=1)).reshape(4, 16)
        np.testing.assert_array_equal(np.argwhere(trains)[:, 1], likely)
        first = np.asarray(batch.advantages[:, 5]).reshape(4, 16)[np.arange(4), likely]
        close.assert_near(first, values)
    # all explore: any candidate, and the rewards of those that were carried out are remembered
    explored = extras | {"epsilon": jnp.float32(1.0)}
    picks = [
        task_feedback.chosen(jnp.arange(64.0), rows.group_ids, jax.random.key(k), jnp.float32(1.0)) for k in range(8)
    ]
    counts = np.asarray(picks).reshape(8, 4, 16)
    assert (counts.sum(axis=2) == 1).all() and len(set(counts.argmax(axis=2).ravel())) > 5
    remember = task_feedback.make_remember(0.9)
    state = SimpleNamespace(extras=explored)
    for _ in range(3):
        state.extras = remember(state, batch, rows, rewards)
    close.assert_near(state.extras["epsilon"], 0.9**3)
    close.assert_near(state.extras["seen"].mean, (0.75 + 3 * earned.sum()) / 14)
    for wrong in (lambda: task_feedback.make_extras(1.5), lambda: task_feedback.make_remember(2.0)):
        with pytest.raises(ValueError, match="must lie in"):
            wrong()


def test_exploration_lasts_as_long_in_a_long_run_as_in_the_released_one():
    """Of 200 updates the fortieth is the twelfth of sixty; at the rate of the released steps it would have 0.003."""
    chances = {}
    for steps in (60, 200):
        remember = task_feedback.make_remember(task_feedback.decay_of(0.9, steps))
        state = SimpleNamespace(extras=task_feedback.make_extras(0.2)(None, jax.random.key(0)))
        rows, rewards = None, Rewards(jnp.zeros((2,)), jnp.ones((2,), bool))
        batch = SimpleNamespace(mask=jnp.ones((2, 1), bool))
        for _ in range(steps // 5):
            state.extras = remember(state, batch, rows, rewards)
        chances[steps] = state.extras["epsilon"]
    # 0.2 * 0.9^12
    close.assert_printed([chances[60], chances[200]], [0.0565, 0.0565], 4, magnitude=0)
    given = arms.resolve(openagi, arms.preset(openagi, smoke=False, model=openagi.Settings().model), ())
    assert {name: s.decay for name, s in given.items() if s.decay != 0.9} == {"no_decay": 1.0}
    assert task_feedback.decay_of(1.0, 200) == 1.0
    with pytest.raises(ValueError, match="decay=-0.5 must lie"):
        task_feedback.decay_of(-0.5, 200)


def test_a_plan_that_cannot_run_becomes_less_likely():
    one = jnp.ones((1, 2), bool)
    logp = jnp.log(jnp.asarray([[0.5, 0.25]]))
    # R = -1: the loss is the log-probability itself, its descent pushes it down
    loss = lambda x: jnp.sum(reinforce_loss(x, -jnp.ones((1, 2)), one).loss)  # noqa: E731
    close.assert_near(loss(logp), np.log(0.125))
    close.assert_near(jax.grad(loss)(logp), [[1.0, 1.0]])


# --- the world


def test_plans_earn_what_they_restore():
    train, held = expert_plans.tasks()
    assert len(train) == 191 and not {tuple(x) for x in train} & {tuple(x) for x in held}
    prompts, plans = (jnp.asarray(x) for x in expert_plans.texts(40, 1.0, 0))
    rbi, rc = (jnp.asarray([expert_plans.encode(t)] * n, jnp.int32) for t, n in ((".rbi>", 8), ("..rc>", 2)))
    tried = _plans("ubur", "urub", "ub", "un", "ubtc", "uburu", "tcur", "$", "urtc", "tc")
    whole = jnp.concatenate([prompts, rbi, rc]), jnp.concatenate([plans, tried])
    right, earned, told = np.split(np.asarray(jax.jit(expert_plans.score)(*whole)), [40, 48])
    close.assert_near(right, 1.0)
    clean = expert_plans.pictures().astype(np.float64)
    blur = sum(w * np.roll(np.eye(8), k, 1) for k, w in ((0, 0.6), (1, 0.2), (-1, 0.2)))
    broken = np.stack([np.rot90(x) for x in clean]) @ blur
    back = np.stack([np.rot90(x, -1) for x in broken]) @ np.linalg.inv(blur)
    alike = [0.5 + 0.5 * np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(back, clean, strict=True)]
    close.assert_near(earned[:2], [1.0, np.mean(alike)])
    assert earned[1] < 0.99, "the order matters"
    assert (earned[4:] == -1.0).all(), "text where an image is wanted, half a name, image after text, no plan"
    assert told[0] > 0.999 > told[1] > 0.0


def test_beams_are_the_most_probable_plans():
    """Against all plans that the grammar allows, each scored by itself."""
    world, kept = expert_plans.WORLD, expert_plans.grammar(TASKS)
    params, prompts = world.policy.init(jax.random.key(3)), jnp.asarray(expert_plans.tasks()[0][:2])
    every = jnp.asarray(expert_plans.every_plan())
    assert len({tuple(row) for row in every.tolist()}) == every.shape[0] == 205 + 2 * 86
    legal = grammars.states(kept, every, jnp.ones(every.shape, bool))
    assert (np.asarray(legal) >= 0).all()
    scored = []
    for prompt in prompts:
        rows = plan_beams.as_rows(prompt[None], every[None], jnp.zeros(every.shape)[None], jnp.zeros(1, int), end=END)
        logp, _ = jax.jit(lambda rows: grammars.score_legal(kept)(world.policy, params, rows))(rows)
        scored.append(np.where(np.asarray(rows.mask), np.asarray(logp), 0.0).sum(1))
    width = every.shape[0]  # so wide that nothing is lost
    found = jax.jit(lambda: plan_beams.beams(world.policy, params, prompts, kept, width=width, new=9, end=END))()
    for k, want in enumerate(scored):
        order = np.argsort(-want, kind="stable")
        close.assert_near(np.asarray(found[1][k]).sum(1), want[order], terms=64, magnitude=16.0)
        assert {tuple(row) for row in found[0][k].tolist()} == {tuple(row) for row in every.tolist()}
    few = jax.jit(lambda: plan_beams.beams(world.policy, params, prompts, kept, width=8, new=9, end=END))()
    assert np.isfinite(few[1]).all() and (np.diff(np.asarray(few[1]).sum(2), axis=1) <= 0).all()
    rows = plan_beams.as_rows(prompts, *few, jnp.arange(2), end=END)
    logp, _ = grammars.score_legal(kept)(world.policy, params, rows)
    close.assert_near(jnp.where(rows.mask, logp, 0.0), rows.sampler_logp, terms=64, magnitude=16.0)
    # where there are fewer plans than beams the rest train nothing
    more = jax.jit(lambda: plan_beams.beams(world.policy, params, prompts, kept, width=width + 5, new=9, end=END))()
    assert not np.asarray(plan_beams.as_rows(prompts, *more, jnp.arange(2), end=END).mask)[width : width + 5].any()


def test_the_best_plan_that_does_not_read_scores_most_of_a_picture_and_solves_little():
    blind = expert_plans.blind_score()
    right = [expert_plans._written(expert_plans.right_plan(row)) for row in expert_plans.tasks()[1]]
    solved = expert_plans.score(jnp.asarray(expert_plans.tasks()[1]), jnp.asarray(right, jnp.int32))
    assert 0.4 < blind < 0.6 and float(solved.min()) > 0.999
    close.assert_printed(blind, 0.548, 3)


def test_a_plan_is_right_where_it_undoes_everything():
    """Of all plans for an image few restore it, and one that leaves the blur in is not among them."""
    held = expert_plans.tasks()[1]
    images = held[held[:, 3] == expert_plans.encode("i")[0]]
    every = expert_plans.every_plan()
    both = np.repeat(images, len(every), axis=0), np.tile(every, (len(images), 1))
    right = np.asarray(jax.jit(expert_plans.score)(*map(jnp.asarray, both))).reshape(len(images), -1) > 0.999
    assert right.sum(axis=1).min() >= 1 and right.sum(axis=1).mean() < 3
    # the best of all that do not read the task, for everything that can be wanted
    found = []
    for rows in (expert_plans.tasks()[0], held):
        pairs = np.repeat(rows, len(every), axis=0), np.tile(every, (len(rows), 1))
        found.append(np.asarray(jax.jit(expert_plans.score)(*map(jnp.asarray, pairs))).reshape(len(rows), -1) > 0.999)
    blind = 0
    for wanted in expert_plans.WANTED:
        train, there = (x[:, 3] == expert_plans.encode(wanted)[0] for x in (expert_plans.tasks()[0], held))
        blind += found[1][there][:, found[0][train].mean(axis=0).argmax()].sum()
    assert blind == 4, "0.0625 of 64 tasks"


def test_pictures_have_a_structure():
    """Neighbours are alike, which noise of the same range is not."""
    pictures = expert_plans.pictures()
    assert pictures.shape == (4, 8, 8) and pictures.min() >= np.float32(0.1) and pictures.max() <= np.float32(0.9)
    steps = np.abs(np.diff(pictures, axis=2)).mean()
    noise = np.random.default_rng(0).uniform(0.1, 0.9, pictures.shape)
    assert steps < 0.5 * np.abs(np.diff(noise, axis=2)).mean()
