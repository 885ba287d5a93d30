"""AMFT: the mixed loss has the two pure ones as its ends; the worked meta-gradient; what travels with the batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.parts import start_rates
from experiments.policy_gradient import amft
from experiments.policy_gradient.parts import balance, large_numbers
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.tasks import countdown
from jaxrl_llm.experiment import Results, recipes
from jaxrl_llm.experiment.evidence import beds
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.types import Rewards
from tests import close
from tests.close import doubles, singles
from tests.experiment import made

BASE = dataclasses.replace(amft.Settings(), **amft.EMBEDDED | amft.SMOKE | {"elsewhere": None})


def test_worked_meta_gradient():
    """L_RL = (th - 2)^2 / 2, L_SFT = th^2 / 2, U = -(th' - 2)^2 / 2, th = 1, eta = 0.1, mu = 0.5: -0.2, mu falls."""
    theta, mu, eta = jnp.float32(1.0), 0.5, 0.1
    own, theirs = theta - 2.0, theta
    after = theta - eta * ((1 - mu) * own + mu * theirs)
    assert float(after) == doubles(1.0)
    slope = balance.meta_gradient({"th": -(after - 2.0)}, {"th": theirs - own}, learning_rate=eta)
    assert float(slope) == singles(-0.2)
    assert float(balance.moved(balance.first_balance({}, 0.9), slope, jnp.float32(1.0)).share) == singles(0.88)


def test_numbers_out_of_distribution_are_none_that_the_base_has_read_and_the_gain_is_over_the_base():
    settings = recipes.OnlineSettings(data="countdown", levels=(3,), max_new_tokens=18, train_problems=16,
                                      eval_problems=8)  # fmt: skip
    found = amft.with_large_numbers(settings)
    numbers = np.asarray(found.heldout.answers["numbers"])[:, :3]
    assert numbers.shape == (8, 3) and numbers.min() >= 1 and numbers.max() <= 25
    assert (numbers > countdown.MAX_NUMBER).sum(axis=1).tolist() == [1] * 8
    tokens, valid = recipes.demonstrations(dataclasses.replace(settings, train_problems=64))
    assert tokens.shape == valid.shape == (64, 18)
    assert all(len(p.solution) < 18 for p in tables.draw_split(large_numbers, levels=(3,), split="train", seed=0, n=99))
    # right in half of the samples of each problem, where the start solves 1 in 4 and 3 in 4
    rates = jnp.array([0.25, 0.25, 0.75, 0.75])
    assert float(start_rates.gain(Rewards(jnp.array([1.0, 0.0, 1.0, 0.0]), jnp.ones(4, bool)), rates)) == 0
    measure = recipes.make_measure(settings, amft.with_large_numbers, amft.with_gain)
    seen = jax.jit(measure)(found.model.params, jax.random.key(0))
    assert abs(float(seen["eval/gain"])) <= 1
    base = float(seen["eval/accuracy"] - seen["eval/gain"])  # of 8 problems with 16 samples
    close.assert_near(base * 128, round(base * 128), magnitude=128.0)


def test_the_bed_is_invalid_where_imitation_does_not_carry_over():
    for gained, faults in ((0.03, 0), (0.0, 1)):
        results = Results({"sft": made.arm([gained, gained], metric="ood/gain")})
        assert len(beds.judges_at_chance(results, amft.BED)) == faults


@pytest.mark.slow
def test_ends_of_the_mixture_are_the_pure_gradients():
    online = amft.build(BASE).stages[0].method
    bench, ids = recipes.bench(BASE), jnp.arange(2, dtype=jnp.int32)
    params = bench.model.params
    rows = online.rollout(
        params, bench.train.tokens[ids], bench.train.valid[ids], sample_keys(jax.random.key(0), 0, ids, 2), ids
    )
    rewards = online.score(jax.tree.map(lambda x: x[rows.problem_ids], bench.train.answers), rows)
    rewards = rewards._replace(value=jnp.array([1.0, 0.0, 0.0, 0.0]))

    def gradient(share):
        extras = {"balance": balance.first_balance(params, share)}
        batch = online.estimate(params, extras, rows, rewards)
        return jax.grad(lambda p: online.loss(p, batch)[0])(params), batch

    (own, batch), (theirs, _), (mixed, _) = gradient(0.0), gradient(1.0), gradient(0.25)
    jax.tree.map(lambda a, b, c: close.assert_near(c, 0.75 * a + 0.25 * b), own, theirs, mixed)
    # demonstrations of the drawn prompts: their text, not the sampled one
    tokenizer, gold = bench.model.tokenizer, batch.extras["gold"]
    tokens, valid = recipes.demonstrations(BASE)
    want = tokenizer.decode([int(t) for t in tokens[1][valid[1]]])
    assert tokenizer.decode([int(t) for t in gold.tokens[2][gold.mask[2]]]) == want
    # no imitation: its part has no say, whatever the demonstration
    spoiled = batch._replace(extras=batch.extras | {"gold": gold._replace(tokens=jnp.ones_like(gold.tokens))})
    same = jax.grad(lambda p: online.loss(p, spoiled)[0])(params)
    jax.tree.map(np.testing.assert_array_equal, same, own)
