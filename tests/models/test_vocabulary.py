"""Log-probabilities without logits: the kernel in interpret mode against all logits at once, alone and in a decoder."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import logprobs
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import model_parallel, rules
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.models import attention
from jaxrl_llm.models.cache import DeviceLayout
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.kernels import attention_kernels, vocabulary
from jaxrl_llm.models.kernels.grouped import grouped
from jaxrl_llm.models.kernels.vocabulary import Head
from jaxrl_llm.models.layers import wide_product
from jaxrl_llm.models.lora import Lora
from jaxrl_llm.models.lora import make_policy as adapt
from jaxrl_llm.train.methods.builders import make_policy_loss, score_tokens
from jaxrl_llm.types import Batch
from tests import close
from tests.models_for_tests import small_config

KERNEL = attention_kernels.make_sums("pallas", platform="cpu")


def _case(tied=True, size=300, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (150, 24), dtype)
    table = jax.random.normal(keys[1], (size, 24) if tied else (24, size), dtype)
    return hidden, table, jax.random.randint(keys[2], (150,), 0, 290)


@pytest.mark.parametrize(
    "head", [Head(300, True), Head(290, True, 3.0, 0.7), Head(290, False), Head(300, False, None, 2.0)]
)
def test_the_kernel_is_the_reference(head):
    """The last blocks of tokens and of the vocabulary are not full, and the table is longer than the vocabulary."""
    given = _case(head.tied)
    want = vocabulary.sums_of_logits(head, *given)
    got = vocabulary.sums_by_kernel(head, *given, tokens=128, words=128, interpret=True)
    for name, a, b in zip(want._fields, got, want, strict=True):
        close.assert_near(a, b, terms=24 + 300, err_msg=name)
    hidden, table, targets = given
    logits = hidden @ (table.T if head.tied else table)
    logits = logits if head.softcap is None else head.softcap * jnp.tanh(logits / head.softcap)
    logp = jax.nn.log_softmax(logits[:, : head.vocab] / head.temperature)
    of_target, entropy = vocabulary.logp_and_entropy(got)
    close.assert_near(of_target, jnp.take_along_axis(logp, targets[:, None], 1)[:, 0], terms=24 + 300)
    close.assert_near(entropy, -jnp.sum(jnp.exp(logp) * logp, axis=1), terms=24 + 2 * 300)


def test_in_bfloat16():
    given = _case(dtype=jnp.bfloat16)
    want = vocabulary.sums_of_logits(Head(290, True), *given)
    got = vocabulary.sums_by_kernel(Head(290, True), *given, tokens=128, words=128, interpret=True)
    for a, b in zip(got, want, strict=True):
        close.assert_near(a, b, terms=24 + 300)


def test_parts_of_the_vocabulary_add_up():
    """One part holds nothing but padding."""
    hidden, table, targets = _case(size=400)
    mesh = meshes.parse_mesh("data=2,fsdp=4", jax.devices()[:8])
    want = vocabulary.sums_of_logits(Head(290, True), hidden, table, targets)
    run = model_parallel.make_sums(mesh, KERNEL)
    rows = (hidden.reshape(10, 15, 24), table, targets.reshape(10, 15))
    for given, size in ((rows, 400), ((rows[0], table[:399], rows[2]), 399)):  # 399 do not divide: all on every device
        assert given[1].shape[0] == size
        got = jax.jit(lambda *x: run(Head(290, True), *x))(*given)
        for a, b in zip(got, want, strict=True):
            close.assert_near(a.reshape(-1), b, terms=24 + 400)


def _batch(tokens):
    shape, ones = tokens.shape, jnp.ones(tokens.shape, jnp.float32)
    advantages = ones * jnp.arange(1.0, 9.0)[:, None]
    positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
    mask = jnp.arange(shape[1]) >= 3
    return Batch(
        tokens, jnp.ones(shape, jnp.int32), positions, jnp.broadcast_to(mask, shape), advantages,
        -4 * ones, -4 * ones, -4 * ones, jnp.zeros(shape[:1], jnp.int32), jnp.float32(40.0), {},
    )  # fmt: skip


@pytest.mark.parametrize(("family", "spec"), [("qwen3", ""), ("gemma2", ""), ("llama", "data=2,fsdp=2,tensor=2")])
def test_a_decoder_scores_and_learns_as_it_does_by_its_logits(family, spec):
    """Values, entropies and all gradients, of the loss and of the entropy; on a mesh the vocabulary is split."""
    config = small_config(family)
    plain = make_policy(config)
    params = plain.init(jax.random.key(1))
    options = {"sums_fn": KERNEL}
    if spec:
        mesh = meshes.parse_mesh(spec)
        options = model_parallel.on_mesh(mesh, attention.attend, grouped, sums_fn=KERNEL)
    policy = make_policy(config, **options)
    batch = _batch(jax.random.randint(jax.random.key(2), (8, 11), 0, config.vocab_size))

    def loss(policy):
        def score(*given, **settings):
            return score_tokens(*given, **settings, chunk=4)

        return make_policy_loss(
            policy, clipped_policy_loss, temperature=0.9, score=score,
            extra_terms=lambda logp, entropy, batch: -0.3 * entropy,
        )  # fmt: skip

    def run(policy, params):
        return jax.jit(jax.value_and_grad(loss(policy), has_aux=True))(params, batch)

    (want, _), slopes = run(plain, params)
    (got, metrics), found = run(policy, rules.shard(params, mesh) if spec else params)
    close.assert_near(got, want, terms=close.forward_sums(config, 11) + 88)
    assert metrics["policy/entropy"] > 0
    close.assert_same_sums(found, slopes, close.gradient_sums(config, 8, 11))


def test_no_logits_are_written_forward():
    """Of all that the scores' program makes nothing has the size of a chunk's logits."""
    config = small_config("qwen3", vocab_size=1024)
    policy = make_policy(config, sums_fn=KERNEL)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    batch = _batch(jnp.ones((8, 11), jnp.int32))
    text = {name: str(jax.make_jaxpr(lambda p, who=who: score_tokens(who, p, batch, chunk=5))(params))
            for name, who in (("kernel", policy), ("plain", make_policy(config)))}  # fmt: skip
    assert "8,5,1024" in text["plain"] and "8,5,1024" not in text["kernel"]


def test_an_adapter_is_scored_by_the_kernel_and_logits_with_something_beside_are_not():
    config = small_config("qwen3")
    alone, lora = make_policy(config, sums_fn=KERNEL), Lora(rank=2)
    policy, plain = adapt(alone, config, lora), adapt(make_policy(config), config, lora)
    params = plain.init(jax.random.key(3))
    batch = _batch(jnp.arange(88, dtype=jnp.int32).reshape(8, 11) % config.vocab_size)
    want, got = (score_tokens(who, params, batch)[0] for who in (plain, policy))
    close.assert_same_forward(got, want, config)

    def refuse(*given):
        raise AssertionError("scored")

    hidden = jnp.ones((8, 11, config.hidden_size))

    def unembed(h, *beside):
        return policy.unembed(params, h)

    beside = logprobs.chunked(hidden, unembed, batch.tokens, beside=batch.tokens, scored=refuse)[0]
    np.testing.assert_array_equal(beside, logprobs.chunked(hidden, unembed, batch.tokens)[0])


@pytest.mark.parametrize("tied", [True, False])
def test_slopes_of_logits_are_as_short_as_the_hidden_states(tied):
    """In bfloat16 both products of the backward pass are of bfloat16; the table's gradient adds up in float32."""
    hidden, table, _ = _case(tied, 40)
    slopes = jax.random.normal(jax.random.key(5), (150, 40))
    short = hidden.astype(jnp.bfloat16)
    out, pull = jax.vjp(lambda x, t: wide_product(x, t, tied), short, table)
    of_hidden, of_table = pull(slopes)
    assert (out.dtype, of_hidden.dtype, of_table.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    x, t, g = (np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (hidden, table, slopes))
    flat = t if tied else t.T
    close.assert_same_sums(out, x @ flat.T, 24)
    close.assert_same_sums(of_table, g.T @ x if tied else x.T @ g, 150)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(np.asarray(of_hidden, np.float64), g @ flat, rtol=eps, atol=eps)
    program = str(
        jax.make_jaxpr(lambda x, t: jax.vjp(lambda x, t: wide_product(x, t, tied), x, t)[1](slopes))(short, table)
    )
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert len(products) == 3 and not re.search(r"f32\[[\d,]+\] = dot_general.* f32", program)


@pytest.mark.parametrize("rows, asked, want", [(4, 4096, 1024), (64, 4096, 128), (4, 0, 128)])
def test_logits_of_enough_tokens_exist_at_once(rows, asked, want):
    policy = make_policy(small_config(), layout=DeviceLayout(6, scored=asked))
    assert policy.steps_at_once(rows, 128) == want
