import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.methods import packed
from jaxrl_llm.train.methods.builders import make_policy_loss, score_tokens
from jaxrl_llm.train.methods.shared_prompt import share_prompts
from jaxrl_llm.types import Batch
from tests import close
from tests.models_for_tests import ALL_FAMILIES, small_config, small_model

PROMPTS, GROUP, WIDTH, NEW = 3, 4, 5, 6


def rollout(policy, params):
    """Ragged left-padded prompts, responses that end early and ones that do not."""
    ids = jnp.arange(PROMPTS, dtype=jnp.int32)
    tokens = jax.random.randint(jax.random.key(3), (PROMPTS, WIDTH), 2, 20)
    valid = jnp.arange(WIDTH)[None] >= jnp.array([[0], [2], [4]])
    keys = sample_keys(jax.random.key(4), 0, ids, GROUP)
    return generate(
        policy, params, tokens, valid, keys, group_size=GROUP, max_new_tokens=NEW, eos_ids=(1, 5, 9), problem_ids=ids
    )


ALWAYS = ("gemma3_text",)  # windows; the others when there is time


@pytest.mark.parametrize(
    "family", [f if f in ALWAYS else pytest.param(f, marks=pytest.mark.slow) for f in ALL_FAMILIES]
)
def test_log_probabilities_entropies_and_gradients_are_those_of_whole_rows(family):
    policy, params, _ = small_model(family)
    rows = packed.without_record(rollout(policy, params))  # a mixture chooses its experts anew, as for rows of a host
    assert 0 < rows.mask.sum() < PROMPTS * GROUP * NEW  # some responses end, and are padded
    share = share_prompts(GROUP, NEW)
    weight = jnp.where(rows.mask, jax.random.normal(jax.random.key(5), rows.mask.shape), 0.0)

    def value(score):
        def f(params):
            logp, entropy = score(policy, params, rows, temperature=0.7)
            return jnp.sum(weight * (logp + 0.3 * entropy)), (logp, entropy)

        return jax.jit(jax.value_and_grad(f, has_aux=True))(params)

    (_, whole), whole_grads = value(score_tokens)
    (_, shared), shared_grads = value(share)
    for a, b in zip(whole, shared, strict=True):
        close.assert_same_forward(jnp.where(rows.mask, b, 0), jnp.where(rows.mask, a, 0), family, temperature=0.7)
    assert not shared[0][:, :WIDTH].any()
    close.assert_same_sums(shared_grads, whole_grads, close.gradient_sums(small_config(family), *rows.mask.shape))


@pytest.mark.slow
def test_what_cannot_share_is_scored_in_full():
    policy, params, _ = small_model()
    rows = jax.tree.map(lambda x: x[:7] if x.ndim else x, rollout(policy, params))  # no whole groups
    found, _ = share_prompts(GROUP, NEW)(policy, params, rows)
    np.testing.assert_array_equal(found, score_tokens(policy, params, rows)[0])
    whole = rollout(policy, params)
    found, _ = share_prompts(GROUP, NEW)(policy._replace(hidden_groups=None), params, whole)
    np.testing.assert_array_equal(found, score_tokens(policy, params, whole)[0])


def test_a_mixture_whose_experts_were_recorded_is_scored_in_full_with_them():
    policy, params, _ = small_model("qwen3_moe")
    rows = rollout(policy, params)
    others = {packed.EXPERTS: (packed.recorded(rows)[packed.EXPERTS] + 1) % 4}  # of four experts
    for asked in (rows, rows._replace(extras=rows.extras | others)):
        found, _ = share_prompts(GROUP, NEW)(policy, params, asked)
        np.testing.assert_array_equal(found, score_tokens(policy, params, asked)[0])
    chosen, _ = share_prompts(GROUP, NEW)(policy, params, packed.without_record(rows))
    assert np.abs(np.where(rows.mask, found - chosen, 0)).max() > 0.01  # what others said is another number
    assert not chosen[:, :WIDTH].any()


@pytest.mark.slow
def test_the_loss_takes_it():
    policy, params, _ = small_model()
    rows = rollout(policy, params)
    zeros = jnp.zeros(rows.mask.shape, jnp.float32)
    batch = Batch(
        tokens=rows.tokens, segment_ids=rows.segment_ids, positions=rows.positions, mask=rows.mask,
        advantages=jnp.where(rows.mask, 1.0, zeros), old_logp=rows.sampler_logp, sampler_logp=rows.sampler_logp,
        ref_logp=zeros, group_ids=rows.group_ids, total=jnp.sum(rows.mask.astype(jnp.float32)), extras={},
    )  # fmt: skip
    plain = make_policy_loss(policy, clipped_policy_loss)
    shared = make_policy_loss(policy, clipped_policy_loss, score=share_prompts(GROUP, NEW))
    value, metrics = shared(params, batch)
    sums = close.forward_sums(small_config(), rows.mask.shape[1]) + rows.mask.size
    close.assert_same_sums(value, plain(params, batch)[0], sums, magnitude=1.0)  # a mean of ratios of 1
    largest = float(jnp.abs(rows.sampler_logp).max())
    assert metrics["kl/sampler_max"] < close.bound(sums, largest)


def test_mistakes():
    policy, params, _ = small_model()
    with pytest.raises(ValueError, match="group_size=0"):
        share_prompts(0, 4)
    with pytest.raises(ValueError, match="hold no prompt before 11 new tokens"):
        share_prompts(GROUP, WIDTH + NEW)(policy, params, rollout(policy, params))
