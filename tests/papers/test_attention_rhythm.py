"""Attention rhythm: its printed map, and what each arm amplifies."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.policy_gradient import attention_rhythm
from experiments.policy_gradient.attention_rhythm import random_credit, within_reach
from jaxrl_llm.advantages import attention
from jaxrl_llm.experiment import Results, recipes
from jaxrl_llm.experiment.evidence import beds
from jaxrl_llm.train.online import init_state, iterate
from tests import close
from tests.experiment import made

MAP = jnp.array([[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.3, 0.5, 0], [0.4, 0.1, 0.1, 0.4]]])
MASK = jnp.ones((1, 4), bool)
WAAD = attention.backward_distance(MAP, MASK, window=2)
FAI = attention.forward_influence(MAP, MASK, low=1)


def test_printed_map():
    close.assert_near(WAAD[0], [0, 0.5, 0.7, 1.1])
    close.assert_printed(FAI[0], [0.3667, 0.2, 0.1, 0.0], 4)


def test_credit_of_each_arm():
    """40 % of four tokens are two: differences .5, .2, .4, 0 choose 0 and 2; influence chooses 0 and 1."""
    numbers = {"fraction": 0.4, "amplify": 1.5}
    close.assert_near(attention.local_credit(WAAD, FAI, MASK, **numbers)[0], [1.5, 1, 1.5, 1], magnitude=0)
    close.assert_near(attention.anchor_credit(WAAD, FAI, MASK, **numbers)[0], [1.5, 1.5, 1, 1], magnitude=0)
    # anchor 1 looks less far back than the mean .575, so half of its bonus goes to 0, which has all it may have
    close.assert_near(attention.rhythm_credit(WAAD, FAI, MASK, **numbers)[0], [1.5, 1.25, 1, 1], magnitude=0)
    for credit in (attention.local_credit, attention.anchor_credit, attention.rhythm_credit, random_credit):
        plain = credit(WAAD, FAI, MASK, fraction=0.4, amplify=1.0)
        np.testing.assert_array_equal(plain, jnp.ones((1, 4)))  # no amplification: GRPO


def test_the_lot_draws_as_many_tokens_and_others_for_another_batch():
    mask = jnp.arange(20)[None] < jnp.array([20, 10, 5])[:, None]
    waad = jnp.asarray(np.random.default_rng(0).random((3, 20)), jnp.float32)
    first, again = (random_credit(waad, waad, mask, fraction=0.4, amplify=1.5) for _ in range(2))
    assert jnp.sum(first > 1, axis=1).tolist() == [8, 4, 2]
    np.testing.assert_array_equal(first, again)
    assert (random_credit(waad * 1.1, waad, mask, fraction=0.4, amplify=1.5) != first).any()


def test_anchors_near_a_planned_token_against_a_loop():
    """Marks outside the response count for nobody, and nobody outside it is near one."""
    drawn = np.random.default_rng(1)
    marks, mask = drawn.random((6, 15)) < 0.2, np.arange(15)[None] < np.arange(9, 15)[:, None]
    mask[:, :2] = False
    want = np.zeros((6, 15), bool)
    for row, column in np.argwhere(mask):
        near = range(max(column - 2, 0), min(column + 3, 15))
        want[row, column] = any(marks[row, k] and mask[row, k] for k in near)
    found = np.asarray(within_reach(jnp.asarray(marks), jnp.asarray(mask)))
    np.testing.assert_array_equal(found, want)
    assert 0.2 < found[mask].mean() < 0.9


def test_the_bed_asks_for_planned_tokens_that_open_steps():
    """The lift over all tokens is what the gate reads: 0.21 beside 0.14 passes, 0.16 beside 0.14 does not."""
    for opening, passes in ((0.21, True), (0.16, False)):
        one = made.arm([opening - 0.14] * 3, metric="attention/opening_lift")
        problems = beds.judges_at_chance(Results({"coupled": one}), attention_rhythm.BED)
        assert (not problems) == passes


def test_figures_of_a_step():
    """What training says of the rhythm: the gate's metric and coupling beside that of marks by lot, all shares."""
    small = attention_rhythm.EMBEDDED | attention_rhythm.SMOKE | {"max_new_tokens": 18}
    (stage,) = attention_rhythm.build(attention_rhythm.Settings(**small)).stages
    params = jax.tree.map(jnp.copy, recipes.bench(attention_rhythm.Settings(**small)).model.params)
    found = jax.jit(lambda s: iterate(stage.method, s)[1])(init_state(stage.method, params, jax.random.key(0)))
    share = {name: float(found[f"attention/{name}"]) for name in (
        "opening", "opening_base", "opening_lift", "coupling", "coupling_chance", "overlap")}  # fmt: skip
    assert share["opening_lift"] == close.singles(share["opening"] - share["opening_base"])
    assert 0 < share["opening_base"] < 0.5 < share["coupling_chance"] <= 1 and 0 < share["coupling"] <= 1
    assert 0 < share["overlap"] < 1
