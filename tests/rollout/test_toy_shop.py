"""The shop of pages: by hand, its rule of payment, plans that always succeed, catalogues that can be searched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.agents.parts import arena as arenas
from experiments.agents.parts import shop

STEP, IDENTITY = jax.jit(shop.ENV.step), jax.jit(shop.ENV.identity)
SHELF = [  # kind, trait, price, two colours
    [2, 2, 0, 0, 1], [1, 1, 3, 0, 2], [1, 1, 2, 1, 0], [0, 1, 0, 0, 1], [1, 3, 1, 0, 3], [1, 1, 0, 2, 3],
    [3, 0, 0, 0, 1], [0, 0, 0, 0, 1],
]  # fmt: skip
TASK = {"wanted": jnp.array([1, 1, 0, 2], jnp.int32), "shelf": jnp.array(SHELF, jnp.int32)}  # bxR2
START = shop.ENV.reset(jax.random.key(0), TASK)


def visit(actions):
    """What was answered, and what the last action paid if it ended the visit."""
    state, told = START, []
    for text in actions.split():
        answer = STEP(state, jnp.asarray(shop.encode(text), jnp.int32), jnp.int32(3))
        state = answer.state
        told.append("".join(shop.ALPHABET[k] for k in answer.tokens[: int(answer.count)]))
    return " ".join(told), round(float(answer.reward), 3) if bool(answer.done) else None


@pytest.mark.parametrize(
    ("actions", "told", "paid"),
    [
        ("Sbx I2. OR. Y..", "=125 bx2GR = !", 1.0),
        ("Sbx I2. Y..", "=125 bx2GR !", 0.667),  # no colour was chosen
        ("Sbx I1. OR. Y..", "=125 bx3RV = !", 0.667),  # too dear
        ("Sbx I5. OV. Y..", "=125 bx0VK = !", 0.667),  # another colour
        ("Sbz I4. OR. Y..", "=412 bz1RK = !", 0.667),  # another trait
        ("Sax I3. OR. Y..", "=371 ax0RG = !", 0.0),  # another kind
        ("I2. Y.. B.. OR.", "! ! ! !", None),  # nothing is listed or open yet
        ("Sbx Sbx I0. I2. I1. OV.", "=125 ! ! bx2GR ! !", None),
        ("Sbx I1. OR. B.. I2. B.. B.. Sax", "=125 bx3RV = = bx2GR = = =371", None),
        ("Sbx I2. OR. B.. I2. Y..", "=125 bx2GR = = bx2GR !", 0.667),  # what was chosen is forgotten
        ("___ Sxb S5x SbR I2R", "! ! ! ! !", None),
    ],
)
def test_visits(actions, told, paid):
    assert visit(actions) == (told, paid)


def test_situations():
    def after(*actions):
        state = START
        for text in actions:
            state = STEP(state, jnp.asarray(shop.encode(text), jnp.int32), jnp.int32(3)).state
        return int(IDENTITY(state))

    assert after("Sbx", "B..") == after() == after("Y..")
    assert (
        len({after(), after("Sbx"), after("Sbx", "I2."), after("Sbx", "I2.", "OR."), after("Sbx", "I2.", "B..")}) == 5
    )


def test_who_knows_the_pages_always_buys_the_right_thing():
    arena = shop.make_arena(skill=1.0)
    table = arena.heldout

    def play(task):
        def turn(carry, _):
            state, paid, done, turns = carry
            answer = shop.ENV.step(state, shop.expert(state), jnp.int32(3))
            paid = jnp.where(done, paid, paid + answer.reward)
            return (answer.state, paid, done | answer.done, turns + (~done).astype(jnp.int32)), None

        start = shop.ENV.reset(jax.random.key(0), task), jnp.float32(0.0), jnp.array(False), jnp.int32(0)
        (_, paid, _, turns), _ = jax.lax.scan(turn, start, None, arena.turns)
        return paid, turns

    paid, turns = jax.jit(jax.vmap(play))(table.answers)
    np.testing.assert_allclose(paid, 1.0)
    assert 4 <= turns.min() and turns.max() <= arena.turns and set(table.level.tolist()) == {1, 2, 3}
    prompts = {tuple(x) for x in np.asarray(arena.train.answers["shelf"]).reshape(512, -1).tolist()}
    assert not prompts & {tuple(x) for x in np.asarray(table.answers["shelf"]).reshape(64, -1).tolist()}
    rows = jax.jit(lambda key: arenas.play(arena, key, 8))(jax.random.key(1))
    assert not rows.truncated.any() and rows.mask.any(axis=1).all()
