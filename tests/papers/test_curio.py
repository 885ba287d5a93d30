"""CURIO: gains of belief telescope, certainty alone can be wrong, and the user model reads what the user said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import dialogue
from jaxrl_llm.advantages import beliefs
from jaxrl_llm.rollout.turns import multi_turn
from tests import close
from tests.close import doubles

ONE, FIRST = jnp.ones((1, 1), bool), jnp.array([0], jnp.int32)
EVEN, HALF = jnp.full((1, 1, 4), 0.25), jnp.array([[[0.5, 0.5, 0.0, 0.0]]])
POTENTIALS = (beliefs.right_belief, beliefs.log_right_belief, beliefs.certainty)


def _paid(reward, before=EVEN, after=HALF, **settings):
    return float(reward(before, after, FIRST, ONE, **settings)[0, 0])


def test_worked_example():
    # four types become two, the user's own among them
    found = [_paid(beliefs.shaped_rewards, potential=p) for p in POTENTIALS]
    close.assert_printed(found, [0.25, 0.6931, 0.6931], 4)
    close.assert_printed(_paid(beliefs.information_rewards), 0.6931, 4)
    found = [_paid(beliefs.level_rewards, potential=p) for p in POTENTIALS]
    close.assert_printed(found, [0.5, -0.6931, -0.6931], 4)
    # a discount: 0.9 * 0.5 - 0.25
    close.assert_near(_paid(beliefs.shaped_rewards, gamma=0.9), 0.2)
    # the user is of a type that was ruled out: only what looks at the true type takes anything off
    wrong = jnp.array([[[0.0, 0.0, 0.5, 0.5]]])
    assert _paid(beliefs.shaped_rewards, after=wrong) == -0.25
    found = _paid(beliefs.shaped_rewards, after=wrong, potential=beliefs.log_right_belief)
    close.assert_near(np.float32(found), np.float32(np.log(1e-6 / 0.25)))
    for reward in (beliefs.information_rewards, lambda *a: beliefs.shaped_rewards(*a, potential=beliefs.certainty)):
        close.assert_printed(_paid(reward, after=wrong), 0.6931, 4)
    with pytest.raises(ValueError, match="gamma=2"):
        beliefs.shaped_rewards(EVEN, HALF, FIRST, ONE, gamma=2.0)


def _drawn(seed=0, rows=6, columns=4, kinds=5):
    rng = np.random.default_rng(seed)
    path = rng.dirichlet(np.full(kinds, 0.7), (rows, columns + 1))
    count = rng.integers(1, columns + 1, rows)
    valid = np.arange(columns)[None, :] < count[:, None]
    given = [jnp.asarray(x, jnp.float32) for x in (path[:, :-1], path[:, 1:])]
    types = rng.integers(0, kinds, rows)
    return path, types, count, (*given, jnp.asarray(types, jnp.int32), jnp.asarray(valid))


def _phi(name, belief, own):
    floored = np.maximum(belief, 1e-6)
    return {
        "right_belief": belief[own], "log_right_belief": np.log(floored[own]),
        "certainty": float(np.sum(belief * np.log(floored))),
    }[name]  # fmt: skip


def test_agrees_with_a_loop():
    path, types, count, given = _drawn()
    for potential in POTENTIALS:
        level, shaped, strict = (np.zeros((6, 4)) for _ in range(3))
        for b in range(6):
            for k in range(count[b]):
                was, now = (_phi(potential.__name__, path[b, j], types[b]) for j in (k, k + 1))
                level[b, k], shaped[b, k] = now, 0.9 * now - was
                strict[b, k] = shaped[b, k] if k + 1 < count[b] else -was
        found = beliefs.level_rewards(*given, potential=potential)
        close.assert_near(found, level)
        found = beliefs.shaped_rewards(*given, potential=potential, gamma=0.9)
        close.assert_near(found, shaped)
        found = beliefs.shaped_rewards(*given, potential=potential, gamma=0.9, end=0.0)
        close.assert_near(found, strict)
    moved = np.zeros((6, 4))
    for b in range(6):
        for k in range(count[b]):
            moved[b, k] = np.sum(path[b, k + 1] * np.log(path[b, k + 1] / path[b, k]))
    close.assert_near(beliefs.information_rewards(*given), moved)


def test_gains_telescope_and_give_no_gradient():
    path, types, count, given = _drawn(1)
    rows = np.arange(6)
    first, last = path[rows, 0, types], path[rows, count, types]
    close.assert_near(jnp.sum(beliefs.shaped_rewards(*given), axis=1), last - first)
    # without a potential after the end all that is left is where the talk began: no policy is favoured
    close.assert_near(jnp.sum(beliefs.shaped_rewards(*given, end=0.0), axis=1), -first)
    # with a hole in the middle the last valid turn is still the only one without a potential after it
    even, holed = jnp.full((1, 3, 2), 0.5), jnp.array([[True, False, True]])
    assert beliefs.shaped_rewards(even, even, FIRST, holed, end=0.0).tolist() == [[0.0, 0.0, -0.5]]
    assert beliefs.shaped_rewards(even, even, FIRST, holed).tolist() == [[0.0, 0.0, 0.0]]
    found = beliefs.information_rewards(*given)
    assert float(jnp.min(found)) >= -close.near(found, found)
    for reward in (beliefs.level_rewards, beliefs.shaped_rewards, beliefs.information_rewards):
        grown = jax.grad(lambda b, a, f=reward: jnp.sum(f(b, a, *given[2:])), argnums=(0, 1))(*given[:2])
        assert not any(np.asarray(g).any() for g in grown)


# --- the world


@pytest.fixture(scope="module")
def talks():
    arena = dialogue.make_dialogue()
    return arena, jax.jit(lambda key: arenas.play(arena, key, 64))(jax.random.key(0))


def _say(arena, kind, words, key, users=dialogue.GUESTS):
    """The replies of one user, and the reward."""
    step = jax.jit(arena.env.step)
    state, replies, answer = arena.env.reset(key, {"kind": jnp.int32(kind)}), "", None
    for word in words:
        answer = step(state, jnp.asarray([users.alphabet.index(word)], jnp.int32), jnp.int32(1))
        state, replies = answer.state, replies + users.alphabet[int(answer.tokens[0])]
    return replies, float(answer.reward), bool(answer.done)


def test_questions_tell_and_suggestions_do_not(talks):
    arena, _ = talks
    reset, kind = jax.vmap(arena.env.reset, in_axes=(0, None)), jnp.int32(5)  # traits 0 and 2
    replies = np.asarray(reset(jax.random.split(jax.random.key(0), 4000), {"kind": kind}).replies)
    close.assert_share(replies.mean(axis=(0, 1)), [0.9, 0.1, 0.9, 0.95, 0.95, 0.95], replies[..., 0].size)
    # asks about every trait, recommends what the replies say: right unless one of them was wrong
    for seed in range(6):
        key = jax.random.key(seed)
        heard, _, done = _say(arena, 5, "abc", key)
        assert not done
        named = "ABCDEFGH"[sum((reply in "xyz") << i for i, reply in enumerate(heard))]
        found, reward, done = _say(arena, 5, "abc" + named, key)
        assert done and found[:3] == heard and reward == float(named == "F") == float(heard == "x2z")
    assert _say(arena, 5, ">A", jax.random.key(0)) == ("__", 0.0, True)
    assert _say(arena, 5, "aaaaa", jax.random.key(0))[2], "after the last turn the user leaves"
    with pytest.raises(ValueError, match="turns=1"):
        dialogue.make_env(dialogue.GUESTS, 1)


def test_pupils_are_told_by_what_they_answer():
    """Six types of two traits each; some questions are answered truly more often than others."""
    users = dialogue.PUPILS
    arena = dialogue.make_dialogue(users)
    columns = list(zip(*users.has, strict=True))
    assert len(set(columns)) == users.types and {sum(c) for c in columns} == {2} and sum(users.prior) == doubles(1.0)
    reset, kind = jax.vmap(arena.env.reset, in_axes=(0, None)), jnp.int32(4)  # traits 1 and 3
    replies = np.asarray(reset(jax.random.split(jax.random.key(0), 4000), {"kind": kind}).replies)
    expected = [0.05, 0.9, 0.2, 0.7, 0.95, 0.95, 0.95, 0.95]
    close.assert_share(replies.mean(axis=(0, 1)), expected, replies[..., 0].size)
    for seed in range(6):
        key = jax.random.key(seed)
        heard, _, done = _say(arena, 4, "abcd", key, users)
        assert not done and len(heard) == 4 and set(heard) <= set("wxyz1234")
        named = "ABCDEF"[int(users.guess(jnp.asarray([1 if r in "wxyz" else -1 for r in heard], jnp.int32)))]
        _, reward, done = _say(arena, 4, "abcd" + named, key, users)
        assert done and reward == float(named == "E")
        if heard == "1x3z":
            assert named == "E"


@pytest.mark.parametrize("name", dialogue.KINDS)
def test_user_models_read_the_dialogue(name):
    users = dialogue.KINDS[name]
    arena = dialogue.make_dialogue(users)
    rows = jax.jit(lambda key: arenas.play(arena, key, 64))(jax.random.key(0))
    traits, types = users.traits, users.types
    asks, suggests = users.alphabet[2 : 2 + traits], users.alphabet[2 + traits : 2 + 2 * traits]
    yes, no = users.alphabet[users.reply : users.reply + traits], users.alphabet[users.reply + traits :]
    true = [users.true] * traits if isinstance(users.true, float) else users.true
    prompt = arena.train.tokens.shape[1]
    # `play` keeps no turns: they are at every second token
    ends = prompt + 2 * jnp.broadcast_to(jnp.arange(arena.turns, dtype=jnp.int32), (64, arena.turns))
    taken = jnp.take_along_axis(rows.mask, ends, axis=1)
    blank = jnp.zeros(taken.shape, jnp.int32)
    turns = multi_turn.Turns(blank, ends, taken, blank.astype(jnp.float32), blank, taken[:, 0], taken[:, 0])
    rows = rows._replace(extras={f"turns/{name}": x for name, x in turns._asdict().items()})
    prior = np.asarray(users.prior)
    for model, suggested in ((dialogue.exact, (0.95, 0.95)), (dialogue.trusting, (0.97, 0.03))):
        before, after = model(rows, users)
        close.assert_near(before[:, 0], np.broadcast_to(prior, (64, types)))
        close.assert_near(before[:, 1:], after[:, :-1])
        for b in range(64):
            belief = prior.copy()
            for k in range(arena.turns):
                word, reply = (users.alphabet[int(rows.tokens[b, prompt + 2 * k + i])] for i in range(2))
                if bool(taken[b, k]) and word in asks + suggests and reply in yes + no:
                    trait = (asks + suggests).index(word) % traits
                    sure = (true[trait], 1 - true[trait]) if word in asks else suggested
                    for u in range(types):
                        chance = sure[0] if users.has[trait][u] else sure[1]
                        belief[u] *= chance if reply in yes else 1 - chance
                    belief /= belief.sum()
                close.assert_near(after[b, k], belief)
    assert not np.asarray(rows.mask[:, prompt + 1 :: 2]).any(), "what the user says is not trained on"
