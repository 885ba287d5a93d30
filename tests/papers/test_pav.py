"""Process advantage verifiers: provers, progress that telescopes, and a head that learns chances of success."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reward_models.parts import progress_verifier
from jaxrl_llm.advantages import process
from jaxrl_llm.experiment import recipes
from jaxrl_llm.rollout import given_responses
from tests import close


def test_worked_best_of():
    close.assert_printed(process.best_of(jnp.array([[0.2, 0.5]]), 4), [[0.5904, 0.9375]], 4)
    close.assert_near(process.best_of(jnp.array([[0.2, 0.5]]), 1), [[0.2, 0.5]])
    with pytest.raises(ValueError, match="samples=0"):
        process.best_of(jnp.array([[0.2]]), 0)


def test_progress_telescopes():
    rng = np.random.default_rng(0)
    after, before = jnp.asarray(rng.random((5, 4)), jnp.float32), jnp.asarray(rng.random(5), jnp.float32)
    count = np.array([4, 1, 2, 0, 3])
    valid = jnp.asarray(np.arange(4)[None, :] < count[:, None])
    found = process.progress(jnp.where(valid, after, jnp.nan), before, valid)
    last = np.where(count > 0, np.asarray(after)[np.arange(5), count - 1], before)
    close.assert_near(found.sum(1), last - np.asarray(before))
    # a constant added to all of the prover's values leaves every step but the first alone
    moved = process.progress(after + 0.3, before + 0.3, valid)
    close.assert_near(moved, np.where(valid, found, 0.0))
    # too strong a prover sees no progress anywhere
    strong = progress_verifier.make_progress(4096)(0.2 + 0.7 * after, 0.2 + 0.7 * before, valid)
    assert float(jnp.abs(strong).max()) < 1e-3


def test_rewards_of_the_arms():
    after, before, valid = jnp.array([[0.2, 0.6]]), jnp.array([0.1]), jnp.array([[True, True]])
    close.assert_near(progress_verifier.make_progress(1)(after, before, valid), [[0.1, 0.4]])
    close.assert_near(progress_verifier.success_itself(after, before, valid), [[0.2, 0.6]])
    assert not progress_verifier.no_process(after, before, valid).any()


def test_soft_labels():
    logits, rates = jnp.array([0.0, 2.0, 5.0]), jnp.array([0.25, 1 / (1 + np.exp(-2.0)), 0.9])
    weight = jnp.array([1.0, 1.0, 0.0])
    slope = jax.grad(progress_verifier.soft_label_loss)(logits, rates, weight)
    close.assert_near(slope, [0.125, 0.0, 0.0])  # (sigmoid - rate) / count


@pytest.mark.slow
def test_prefixes_and_their_measured_success():
    settings = recipes.OnlineSettings(levels=(1,), train_problems=6, eval_problems=4, max_new_tokens=14)
    found = recipes.bench(settings)
    tokens, valid = recipes.demonstrations(settings)
    roll = recipes.rollout_of_model(found.model, group_size=1, max_new_tokens=14, temperature=1.0)
    ids = jnp.arange(6, dtype=jnp.int32)
    rows = roll(found.model.params, found.train.tokens, found.train.valid, jax.random.split(jax.random.key(0), 6), ids)
    rows = given_responses.with_responses(rows, jnp.ones(6, bool), tokens, valid)
    # up to the mark: what is left is to write the answer down
    mark = found.model.tokenizer.encode("#")[0]
    until = jnp.cumsum((rows.tokens == mark) & rows.mask, axis=1)
    keep = rows.mask & ((until == 0) | ((rows.tokens == mark) & (until == 1)))
    prompts, there, response = progress_verifier.prefix_prompts(rows, keep, pad_id=found.model.tokenizer.pad_id)
    decode = found.model.tokenizer.decode
    for k in range(6):
        whole = decode([int(t) for t in np.asarray(prompts[k])[np.asarray(there[k])]])
        assert whole.endswith("#") and "=>" in whole
        assert decode([int(t) for t in np.asarray(prompts[k])[np.asarray(response[k])]]) == whole.split("=>")[1]
    near = progress_verifier.measured_success(found, settings, rows, keep, completions=4)
    far = progress_verifier.measured_success(found, settings, rows, rows.mask & False, completions=4)
    assert float(near.mean()) > float(far.mean()) and float(near.mean()) > 0.8
