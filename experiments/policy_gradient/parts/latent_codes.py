"""Latent actions: a policy over a few codes, and a frozen world model that turns state and code into a token (CoLA).

Parameters are ``{"model": the frozen language model, "inverse", "codes", "merge", "policy"}``. Alignment as everywhere:
the code at index t is the one that brings about token t, so the policy sees the state before it and the inverse model
the state after it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.types import Key, Params, Policy

TRAINED_BY_REWARD = "policy"  # all else stays as the world was learned


def _dense(key: Key, inputs: int, outputs: int, scale: float = 1.0) -> Array:
    return scale * inputs**-0.5 * jax.random.normal(key, (inputs, outputs), jnp.float32)


def init_latent(model: Params, width: int, key: Key, *, codes: int = 64, hidden: int = 64) -> Params:
    """The tree of a latent-action model around a language model of hidden size ``width``.

    The last matrices begin small: the world model starts as the language model, the policy almost uniform.

    Raises:
      ValueError: for fewer than two codes.
    """
    if codes < 2:
        raise ValueError(f"codes={codes} must be at least 2: one code is no choice")
    keys = iter(jax.random.split(key, 7))

    def mlp(inputs, outputs):
        return {"in": _dense(next(keys), inputs, hidden), "out": _dense(next(keys), hidden, outputs, 0.1)}

    return {
        "model": model,
        "inverse": mlp(width, codes),
        "merge": mlp(2 * width, width),
        "policy": mlp(width, codes),
        "codes": 0.5 * jax.random.normal(next(keys), (codes, width), jnp.float32),
    }


def _mlp(layer: Params, x: Array) -> Array:
    return jax.nn.silu(x.astype(jnp.float32) @ layer["in"]) @ layer["out"]


def inverse_logits(params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T K"]:
    """Which code brought about the token at each index: read from the state after it, at training time only."""
    return _mlp(params["inverse"], jax.lax.stop_gradient(hidden))


def policy_logits(params: Params, before: Float[Array, "... D"]) -> Float[Array, "... K"]:
    """The policy over codes in a state."""
    return _mlp(params["policy"], jax.lax.stop_gradient(before))


def straight_through(
    logits: Float[Array, "B T K"], noise: Float[Array, "B T K"], *, temperature: float = 2.0
) -> Float[Array, "B T K"]:
    """One-hot choice of ``argmax(logits + noise)`` with the gradient of ``softmax((logits + noise) / temperature)``.

    With Gumbel noise a draw from the softmax, with zeros the most likely code.

    >>> import jax.numpy as jnp
    >>> straight_through(jnp.array([[[0.0, 3.0, 1.0]]]), jnp.zeros((1, 1, 3))).tolist()
    [[[0.0, 1.0, 0.0]]]
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive")
    noisy = logits.astype(jnp.float32) + noise
    soft = jax.nn.softmax(noisy / temperature, axis=-1)
    hard = jax.nn.one_hot(jnp.argmax(noisy, axis=-1), logits.shape[-1], dtype=jnp.float32)
    return jax.lax.stop_gradient(hard - soft) + soft


def merged(params: Params, before: Float[Array, "... D"], action: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """The state that the language model's own head reads: ``s + merge(s, e)`` for a code's embedding e."""
    before = before.astype(jnp.float32)
    return before + _mlp(params["merge"], jnp.concatenate([before, action], axis=-1))


def code_usage(logits: Float[Array, "B T K"]) -> Float[Array, "B T"]:
    """``sum_k p_k log p_k``: minus the entropy of the inverse model's choice, ``-log K`` for an even one.

    A small multiple of it keeps codes in use. From "Controlling Large Language Model with Latent Actions",
    arXiv:2503.21383, section 3.

    >>> import jax.numpy as jnp
    >>> round(0.001 * float(code_usage(jnp.zeros((1, 1, 64)))[0, 0]), 6)
    -0.004159
    """
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.sum(jnp.exp(logp) * logp, axis=-1)


def _worlds(
    policy: Policy, frozen: Params, before: Float[Array, "... D"], codes: Float[Array, "K D"], sharpness: float
) -> Float[Array, "... K V"]:
    """``log W(v | s, k)`` of some codes."""
    wide = jnp.broadcast_to(before[..., None, :], (*before.shape[:-1], *codes.shape))
    states = merged(frozen, wide, jnp.broadcast_to(codes, wide.shape))
    return jax.nn.log_softmax(sharpness * policy.unembed(frozen["model"], states), axis=-1)


def _in_parts(codes: int, states: int, vocabulary: int, most: int) -> int:
    """The largest divisor of the codes whose logits, for so many states, are at most ``most`` numbers."""
    fits = [n for n in range(1, codes + 1) if codes % n == 0 and n * states * vocabulary <= most]
    return max(fits, default=1)


def token_logits(
    policy: Policy,
    params: Params,
    before: Float[Array, "... D"],
    *,
    sharpness: float = 1.0,
    most_logits: int = 2**27,
) -> Float[Array, "... V"]:
    """``log sum_k pi(k | s) W(v | s, k)``: the chance of each token, whatever code brings it about.

    ``W`` is the world model, its logits times ``sharpness``: large for (almost) greedy decoding. Gradients reach the
    policy over codes alone. Sampling a code and then its token draws from this distribution.

    Args:
      most_logits: that exist at once, of as many codes as so many allow and at least one.
    """
    if sharpness <= 0:
        raise ValueError(f"sharpness={sharpness} must be positive")
    frozen = jax.lax.stop_gradient({k: v for k, v in params.items() if k != TRAINED_BY_REWARD})
    before = jax.lax.stop_gradient(before.astype(jnp.float32))
    chances = jax.nn.log_softmax(policy_logits(params, before), axis=-1)
    codes = frozen["codes"]
    count, width = codes.shape
    size = _in_parts(count, before[..., 0].size, policy.vocab_size, most_logits)

    @jax.checkpoint
    def of(codes: Array, chances: Array) -> Array:
        world = _worlds(policy, frozen, before, codes, sharpness)
        possible = jnp.isfinite(world)
        joint = chances[..., None] + jnp.where(possible, world, -1e30)
        return jnp.where(possible[..., 0, :], jax.nn.logsumexp(joint, axis=-2), -jnp.inf)

    if size == count:
        return of(codes, chances)
    parts = codes.reshape(-1, size, width), jnp.moveaxis(chances.reshape(*chances.shape[:-1], -1, size), -2, 0)
    first = of(*(x[0] for x in parts))
    rest = jax.tree.map(lambda x: x[1:], parts)
    return jax.lax.scan(lambda total, part: (jnp.logaddexp(total, of(*part)), None), first, rest)[0]


def code_logp(
    params: Params, before: Float[Array, "B T D"], chosen: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """``(log pi(k | s), entropy)`` of the codes chosen in each state; gradients reach the policy over codes alone."""
    chances = jax.nn.log_softmax(policy_logits(params, before), axis=-1)
    entropy = -jnp.sum(jnp.exp(chances) * chances, axis=-1)
    return jnp.take_along_axis(chances, chosen[:, :, None], axis=-1)[:, :, 0], entropy


def drawn_codes(
    policy: Policy,
    params: Params,
    before: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    key: Key,
    *,
    sharpness: float = 1.0,
) -> Int[Array, "B T"]:
    """Codes that brought about given tokens: a draw from ``pi(k | s) W(token | s, k) / sum_j``, no gradient.

    A token drawn from ``token_logits`` and a code drawn here are together a code drawn from the policy and a token
    drawn from the world model under it: what the method trains on. One code is unembedded at a time.
    """
    frozen = jax.lax.stop_gradient(params)
    before = jax.lax.stop_gradient(before.astype(jnp.float32))
    chances = jax.nn.log_softmax(policy_logits(frozen, before), axis=-1)

    def of(code: Array) -> Array:
        world = _worlds(policy, frozen, before, code[None], sharpness)[..., 0, :]
        return jnp.take_along_axis(world, tokens[:, :, None], axis=-1)[:, :, 0]

    likelihood = jnp.moveaxis(jax.lax.map(of, frozen["codes"]), 0, -1)
    joint = jnp.where(jnp.isfinite(likelihood), chances + likelihood, -1e30)
    return jax.random.categorical(key, joint, axis=-1).astype(jnp.int32)


def make_latent_policy(policy: Policy, *, sharpness: float = 1.0) -> Policy:
    """The latent-action model as a ``Policy`` of tokens: every rollout, score and loss takes it.

    From "Controlling Large Language Model with Latent Actions" (CoLA), arXiv:2503.21383. Differs from the paper in
    multilayer perceptrons where it has transformer layers. Its log-probabilities are those of tokens, over all codes
    that bring them about; the method itself trains on the codes drawn, see ``drawn_codes``.
    """

    def hidden(params, tokens, positions, segment_ids):
        return policy.hidden(jax.lax.stop_gradient(params["model"]), tokens, positions, segment_ids)

    def extend(params, cache, tokens, positions, segment_ids, column):
        return policy.extend(params["model"], cache, tokens, positions, segment_ids, column)

    def unembed(params, hidden):
        return token_logits(policy, params, hidden, sharpness=sharpness)

    return policy._replace(hidden=hidden, extend=extend, unembed=unembed, scored=None, unstack=None)
