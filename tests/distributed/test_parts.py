"""Every axis of a mesh, dense and with experts: the loss, log-probabilities and gradients of one device."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import logprobs
from jaxrl_llm.distributed import mesh as meshes
from jaxrl_llm.distributed import rules
from jaxrl_llm.distributed.model_parallel import make_attend, make_experts
from jaxrl_llm.models import attention, mlp
from jaxrl_llm.models.decoder import make_policy
from jaxrl_llm.models.spec import Experts
from jaxrl_llm.rollout.generate import generate
from tests import close
from tests.models_for_tests import small_config

CONFIGS = {
    "dense": small_config("qwen3"),
    "windows": small_config("gemma2"),
    "experts": small_config("qwen3_moe", experts=Experts(8, 2, 8, normalise=True)),
    "tied_experts": small_config("qwen3_moe", experts=Experts(8, 3, 8), tie_embeddings=True),
}
ALL = [s for s in itertools.product(*[(1, 2, 4, 8)] * 5) if np.prod(s) <= 8]  # of one, two, four and eight devices
QUICK = [
    ("dense", (2, 1, 1, 2, 2)), ("windows", (1, 4, 2, 1, 1)),
    ("experts", (2, 1, 2, 1, 2)), ("experts", (1, 2, 2, 2, 1)),
    ("tied_experts", (1, 2, 4, 1, 1)),
]  # fmt: skip
SLOW = [(kind, shape) for kind in ("dense", "experts") for shape in ALL if (kind, shape) not in QUICK]
SLOW += [("windows", (1, 1, 1, 8, 1)), ("tied_experts", (1, 1, 2, 1, 4))]


def _mesh(shape):
    return meshes.parse_mesh(",".join(f"{a}={n}" for a, n in zip(meshes.AXES, shape, strict=True)))


def _policy(kind, mesh=None):
    if mesh is None:
        return make_policy(CONFIGS[kind])
    return make_policy(
        CONFIGS[kind], place=rules.make_place(mesh), attend_fn=make_attend(mesh, attention.attend),
        experts_fn=make_experts(mesh), remat=True,
    )  # fmt: skip


def _batch():
    """Eight rows of eight: dense, padded on either side, two sequences packed."""
    tokens = np.random.default_rng(0).integers(0, 24, (8, 8))
    segments = np.ones((8, 8), np.int32)
    segments[1, :3], segments[2, 5:], segments[3, 4:] = 0, 0, 2
    positions = np.stack(
        [np.concatenate([np.arange((row == s).sum()) for s in dict.fromkeys(row)]) for row in segments]
    )
    return {"tokens": tokens.astype(np.int32), "positions": positions.astype(np.int32), "segments": segments}


def _loss(policy):
    def loss(params, batch):
        hidden = policy.hidden(params, batch["tokens"], batch["positions"], batch["segments"])
        logp, _ = logprobs.chunked(
            hidden, lambda h: policy.unembed(params, h), batch["tokens"], chunk=3, segment_ids=batch["segments"]
        )
        return -jnp.mean(logp), logp

    return jax.value_and_grad(loss, has_aux=True)


@functools.cache
def _alone(kind):
    policy = _policy(kind)
    params = policy.init(jax.random.key(1))
    return params, jax.jit(_loss(policy))(params, _batch())


def _check(kind, shape):
    params, ((value, logp), gradient) = _alone(kind)
    mesh = _mesh(shape)
    step = jax.jit(_loss(_policy(kind, mesh)))
    (value_, logp_), gradient_ = step(rules.shard(params, mesh), rules.shard_batch(_batch(), mesh))
    forward = close.forward_sums(CONFIGS[kind], 8)
    close.assert_same_sums(value_, value, forward + logp.size)
    close.assert_same_sums(logp_, logp, forward)
    close.assert_same_sums(gradient_, gradient, close.gradient_sums(CONFIGS[kind], 8, 8))


@pytest.mark.parametrize(("kind", "shape"), QUICK)
def test_any_mesh_gives_the_one_device_step(kind, shape):
    _check(kind, shape)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape"), SLOW)
def test_every_mesh_gives_the_one_device_step(kind, shape):
    _check(kind, shape)


def _sampled(policy, params):
    prompts = jnp.asarray(_batch()["tokens"][:4, :4])
    return jax.jit(
        lambda params: generate(
            policy, params, prompts, jnp.ones_like(prompts, bool), jax.random.split(jax.random.key(5), 8), group_size=2,
            max_new_tokens=6, eos_ids=(1,),
        )
    )(params)  # fmt: skip


@functools.cache
def _samples(kind):
    return _sampled(_policy(kind), _alone(kind)[0])


SAMPLED = [("experts", (1, 2, 2, 1, 2)), ("dense", (1, 2, 1, 2, 2))]
SAMPLED += [pytest.param(k, s, marks=pytest.mark.slow) for k in ("dense", "experts") for s in ALL
            if (k, s) not in SAMPLED]  # fmt: skip


@pytest.mark.parametrize(("kind", "shape"), SAMPLED)
def test_the_same_samples_on_a_mesh(kind, shape):
    mesh, want = _mesh(shape), _samples(kind)
    got = _sampled(_policy(kind, mesh), rules.shard(_alone(kind)[0], mesh))
    np.testing.assert_array_equal(got.tokens, want.tokens)
    close.assert_same_sums(got.sampler_logp, want.sampler_logp, close.forward_sums(CONFIGS[kind], 10))


def test_each_device_holds_its_experts():
    params, _ = _alone("experts")
    held = rules.shard(params, _mesh((1, 2, 4, 1, 1)))["layers"]["experts_up"].addressable_shards[0].data
    assert held.shape == (2, 2, 8, 8)  # layers, 8 experts / 4, 16 / 2, inner width


def test_experts_that_do_not_divide():
    mesh = _mesh((1, 1, 4, 1, 1))
    layer = {"experts_up": jnp.zeros((6, 4, 4))}
    with pytest.raises(ValueError, match="expert=4 does not divide the 6 experts"):
        make_experts(mesh)(
            jax.nn.silu, layer, jnp.zeros((8, 4)), jnp.zeros((8, 2)), jnp.zeros((8, 2), jnp.int32)
        )  # fmt: skip


def test_tokens_that_do_not_divide_are_computed_alone():
    mesh = _mesh((1, 1, 4, 1, 1))
    rng = np.random.default_rng(0)
    layer = {f"experts_{n}": jnp.asarray(rng.normal(size=(8, 4, 4)), jnp.float32) for n in ("gate", "up", "down")}
    x, weights = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 4), (3, 2)))
    chosen = jnp.asarray(rng.integers(0, 8, (3, 2)), jnp.int32)
    got = make_experts(mesh)(jax.nn.silu, layer, x, weights, chosen)
    np.testing.assert_array_equal(got, mlp.grouped_experts(jax.nn.silu, layer, x, weights, chosen))


@pytest.mark.parametrize("spec", ["fsdp=8", "fsdp=4,expert=2", "fsdp=2,expert=2,tensor=2"])
def test_hidden_states_are_collected_for_one_chunk_at_a_time(spec):
    """Never those of all chunks, of which each would be collected as often as there are chunks."""
    mesh, chunks, chunk = meshes.parse_mesh(spec), 5, 16
    policy = _policy("experts", mesh)
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    placed = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, rules.shardings(shapes, mesh)
    )
    rows = jax.ShapeDtypeStruct((8, chunks * chunk + 1), jnp.int32, sharding=meshes.batch_sharding(mesh))

    def scores(params, tokens):
        hidden = policy.hidden(params, tokens, jnp.zeros_like(tokens), jnp.ones_like(tokens))
        return logprobs.chunked(hidden, lambda h: policy.unembed(params, h), tokens, chunk=chunk)

    text = jax.jit(scores).lower(placed, rows).compile().as_text()
    width = CONFIGS["experts"].hidden_size
    collected = re.findall(rf"= f32\[([\d,]*){chunk},{width}\]\S* all-gather\(", text)
    counts = [int(np.prod([int(n) for n in dims.split(",") if n])) for dims in collected]
    assert counts and max(counts) <= 8, "rows of a chunk"
