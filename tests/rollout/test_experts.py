"""The experts that computed a sampled token compute it in the trainer as well."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.models import lora
from jaxrl_llm.models.cache import EXPERTS
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.mlp import load_figures, route
from jaxrl_llm.models.spec import Experts
from jaxrl_llm.rollout.generate import generate, go_on
from jaxrl_llm.rollout.slots import generate_in_slots
from jaxrl_llm.run import lora_state, parts
from jaxrl_llm.train import packing
from jaxrl_llm.train.methods.builders import make_estimate, make_policy_loss, score_tokens
from jaxrl_llm.train.methods.packed import without_record
from jaxrl_llm.train.methods.prefixes import prefix_trees
from jaxrl_llm.train.step import accumulate
from jaxrl_llm.types import Rewards
from tests import close
from tests.models_for_tests import small_config, small_model

WIDTH, NEW, GROUP = 5, 8, 4
CONFIG = small_config("qwen3_moe")
PER_TOKEN = CONFIG.num_layers * CONFIG.experts.per_token
PROMPTS = jnp.array([[0, 0, 7, 8, 4], [9, 3, 1, 6, 2], [0, 4, 4, 1, 3]], jnp.int32)


@functools.cache
def other():
    """Weights a little off: a sampler in other numerics, whose router often decides otherwise."""
    _, params, _ = small_model("qwen3_moe")
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape) * jnp.std(x), params)


@functools.cache
def sampled(how="plain"):
    policy, params, _ = small_model("qwen3_moe")
    settings = {"group_size": GROUP, "max_new_tokens": NEW, "eos_ids": (2, 5)}
    keys = jax.random.split(jax.random.key(3), 3 * GROUP)
    more = {"stages": {"cache_stages": 2, "row_stages": 2}, "slots": {"slots": 5}}.get(how, {})
    run = generate_in_slots if how == "slots" else generate
    run = jax.jit(functools.partial(run, policy, **settings, **more))
    return run(other() if how == "other" else params, PROMPTS, PROMPTS > 0, keys)


def read(rows):
    """Which tokens the sampler has read: all but the last ones."""
    return np.asarray(rows.segment_ids > 0) & (np.arange(WIDTH + NEW) < WIDTH + NEW - 1)


@pytest.mark.parametrize("how", ["stages", "slots"])
def test_every_rollout_records_the_same(how):
    plain, rows = sampled(), sampled(how)
    np.testing.assert_array_equal(rows.tokens, plain.tokens)
    assert rows.extras[EXPERTS].shape == (12, WIDTH + NEW, PER_TOKEN) and rows.extras[EXPERTS].dtype == jnp.int8
    # a row's last token is read by the one rollout and not by the other
    last = np.asarray(plain.segment_ids[:, 1:] == 0) & np.asarray(plain.segment_ids[:, :-1] > 0)
    there = read(plain) & ~np.pad(last, ((0, 0), (0, 1)))
    np.testing.assert_array_equal(rows.extras[EXPERTS][there], plain.extras[EXPERTS][there])
    assert (np.asarray(plain.extras[EXPERTS])[there] >= 0).all()
    assert len(np.unique(np.asarray(plain.extras[EXPERTS])[there])) == CONFIG.experts.number


def test_what_was_recorded_is_what_the_trainer_would_choose():
    """Under the same weights and numbers: replayed or not, the same log-probabilities."""
    policy, params, _ = small_model("qwen3_moe")
    rows = sampled()
    score = jax.jit(lambda rows: score_tokens(policy, params, rows)[0])
    with_, without = score(rows), score(without_record(rows))
    close.assert_same_forward(jnp.where(rows.mask, with_, 0), jnp.where(rows.mask, without, 0), "qwen3_moe")
    close.assert_same_forward(jnp.where(rows.mask, with_, 0), rows.sampler_logp, "qwen3_moe")


def test_replayed_experts_compute_the_tokens():
    """Rows of another sampler: its experts are taken, in layouts as well, forward and backward; -1 chooses anew."""
    policy, params, _ = small_model("qwen3_moe")
    rows = sampled("other")
    estimate = make_estimate(policy, lambda rows, rewards: jnp.where(rows.mask, 1.0, 0.0))
    batch = estimate(params, {}, rows, Rewards(jnp.ones(12), jnp.ones(12, bool)))
    assert EXPERTS in batch.extras
    slot = make_policy_loss(policy, clipped_policy_loss)
    run = jax.jit(lambda batch: accumulate(slot, params, batch, 1))
    grads, value, metrics = run(batch)
    found = packing.rows_of(jax.tree.map(np.asarray, batch))
    for layout in (packing.packed_rows(found), prefix_trees(found, block=4)):
        laid = run(batch._replace(extras=batch.extras | {packing.LAYOUT: layout}))
        sums = close.gradient_sums(CONFIG, *batch.mask.shape)
        close.assert_same_sums(laid[0], grads, sums)
        close.assert_same_sums(laid[1], value, sums, magnitude=5.0)
    chosen = batch.extras[EXPERTS]
    again = run(batch._replace(extras={EXPERTS: jnp.full_like(chosen, -1)}))[2]
    free = run(batch._replace(extras={}))[2]
    assert again["kl/sampler_mean"] == free["kl/sampler_mean"] != metrics["kl/sampler_mean"]


def test_replayed_experts_compute_the_tokens_beside_an_adapter():
    """With its base or without, as they stand and in layouts: the scores of the merged model."""
    plain, base, _ = small_model("qwen3_moe")
    spec, rows = lora.Lora(2, targets=lora.targets_of(CONFIG)), sampled("other")
    thin = lora.init(CONFIG, spec, jax.random.key(0))
    thin = {name: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape) for name, x in thin.items()}
    policy = lora.make_policy(plain, CONFIG, spec)
    model = parts.Model(None, policy, {"base": base, "lora": thin}, CONFIG, None)
    alone = lora_state.adapter_alone(model)
    planned = packing.rows_of(jax.tree.map(np.asarray, rows))
    want = score_tokens(plain, lora.merge(base, thin, spec.scale), rows)[0]
    for layout in (None, packing.packed_rows(planned), prefix_trees(planned, block=4)):
        laid = {} if layout is None else {packing.LAYOUT: jax.tree.map(jnp.asarray, packing.only_part(layout))}
        given = rows._replace(extras=rows.extras | laid)
        for one in (model, alone):
            found = score_tokens(one.policy, one.params, given)[0]
            close.assert_same_forward(jnp.where(rows.mask, found, 0), jnp.where(rows.mask, want, 0), "qwen3_moe")


def test_a_sampler_in_bfloat16_is_exact_but_for_its_rounding():
    """Its experts replayed in bfloat16: what is left is the rounding that dense families have as well."""
    _, params, _ = small_model("qwen3_moe")
    policy = make_policy(CONFIG, compute_dtype=jnp.bfloat16)
    prompts = jax.random.randint(jax.random.key(1), (16, WIDTH), 2, 20)
    keys = jax.random.split(jax.random.key(2), 64)
    run = functools.partial(generate, policy, group_size=4, max_new_tokens=24, eos_ids=(1,))
    rows = jax.jit(run)(params, prompts, prompts > 0, keys)
    score = jax.jit(
        lambda rows: jnp.abs(jnp.where(rows.mask, score_tokens(policy, params, rows)[0], 0) - rows.sampler_logp)
    )
    replayed, free = score(rows), score(without_record(rows))
    assert float(replayed.max()) < 0.5 * float(free.max())


def test_parts_of_a_rollout_record_what_was_read():
    policy, params, _ = small_model("qwen3_moe")
    keys = jax.random.split(jax.random.key(3), 12)
    settings = {"eos_ids": (2, 5)}
    begin = functools.partial(generate, policy, group_size=GROUP, max_new_tokens=3, **settings)
    first = jax.jit(begin)(params, PROMPTS, PROMPTS > 0, keys)
    then = functools.partial(go_on, policy, done=3, max_new_tokens=NEW - 3, **settings)
    rows = jax.jit(then)(params, first, keys)
    there = np.asarray(rows.segment_ids > 0)[:, 1:] & np.asarray(rows.segment_ids > 0)[:, :-1]  # one follows
    found, want = (np.asarray(x.extras[EXPERTS])[:, :-1][there] for x in (rows, sampled()))
    np.testing.assert_array_equal(found, want)


def test_route_by_hand():
    logits = jnp.log(jnp.array([[0.1, 0.6, 0.2, 0.1], [0.1, 0.6, 0.2, 0.1]]))
    weights, chosen = route(Experts(4, 2, 8, normalise=True), logits, jnp.array([[0, 2], [-1, -1]], jnp.int8))
    np.testing.assert_array_equal(chosen, [[0, 2], [1, 2]])
    close.assert_relative(weights, [[1 / 3, 2 / 3], [0.75, 0.25]])
    slope = jax.grad(lambda x: route(Experts(4, 2, 8), x, jnp.array([[0, 2], [0, 2]]))[0][0, 0])(logits)
    close.assert_near(slope[0], [0.09, -0.06, -0.02, -0.01])  # p0 (1 - p0), -p0 pj
    assert not slope[1].any()


def test_load_by_hand():
    chosen = jnp.array([[[0, 1, 2, 3], [0, 1, 2, 3], [0, 2, -1, -1], [3, 3, 3, 3]]], jnp.int8)  # two layers
    valid = jnp.array([[True, True, True, False]])
    figures = load_figures(chosen, valid, Experts(4, 2, 8))
    # layer 0: 3, 2, 1, 0 of 6; layer 1: 0, 0, 2, 2 of 4
    assert float(figures["experts/load_max"]) == 2.0 and float(figures["experts/unused"]) == 3 / 8
