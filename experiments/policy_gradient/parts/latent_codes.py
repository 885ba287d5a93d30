"""Latent actions: a policy over a few codes, and a frozen world model that turns state and code into a token (CoLA).

Parameters are ``{"model": the frozen language model, "inverse", "codes", "merge", "policy"}``. Alignment as everywhere:
the code at index t is the one that brings about token t, so the policy sees the state before it and the inverse model
the state after it. What the three parts are made of is a ``Form``.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.train.methods.builders import in_row_parts, rows_within
from jaxrl_llm.types import Cache, Key, Params, Policy

TRAINED_BY_REWARD = "policy"  # all else stays as the world was learned


def _dense(key: Key, inputs: int, outputs: int, scale: float = 1.0) -> Array:
    return scale * inputs**-0.5 * jax.random.normal(key, (inputs, outputs), jnp.float32)


class Form(NamedTuple):
    """What the parts of a latent-action model are made of, as pure functions; ``K`` codes, states of size ``D``.

    * ``init_part(width, codes, key) -> part``: a part that says one number of each code.
    * ``init_merge(width, key) -> merge``: the layers of the world model.
    * ``read(part, hidden, positions, segment_ids) -> [B, T, K]``: what such a part says after each token.
    * ``states(part, hidden, positions, segment_ids) -> [B, T, W]``: the states of the language model, and behind them
      those in which the policy over codes chooses; ``W = D`` where it has none of its own.
    * ``chances(part, states[..., W]) -> [..., K]``: logits of the policy over codes.
    * ``merged(merge, text[..., D], action[..., D]) -> [..., D]``: the state that the language model's head reads.
    * ``init_cache``, ``extend(part, cache, hidden, positions, segment_ids, column) -> (states, cache)`` and
      ``repeat_cache``: what the policy over codes keeps while tokens are drawn, as those of a ``Policy``.
    """

    init_part: Callable[[int, int, Key], Params]
    init_merge: Callable[[int, Key], Params]
    read: Callable[..., Array]
    states: Callable[..., Array]
    chances: Callable[[Params, Array], Array]
    merged: Callable[[Params, Array, Array], Array]
    init_cache: Callable[[int, int], Cache]
    extend: Callable[..., tuple[Array, Cache]]
    repeat_cache: Callable[[Cache, int], Cache]


def _init_perceptron(width: int, codes: int, key: Key, *, hidden: int = 64) -> Params:
    first, last = jax.random.split(key)
    return {"in": _dense(first, width, hidden), "out": _dense(last, hidden, codes, 0.1)}


def _perceptron(layer: Params, x: Array) -> Array:
    return jax.nn.silu(x.astype(jnp.float32) @ layer["in"]) @ layer["out"]


PERCEPTRONS = Form(
    init_part=_init_perceptron,
    init_merge=lambda width, key: _init_perceptron(2 * width, width, key),
    read=lambda part, hidden, positions, segment_ids: _perceptron(part, hidden),
    states=lambda part, hidden, positions, segment_ids: hidden,
    chances=_perceptron,
    merged=lambda merge, text, action: text + _perceptron(merge, jnp.concatenate([text, action], axis=-1)),
    init_cache=lambda batch, length: {},
    extend=lambda part, cache, hidden, positions, segment_ids, column: (hidden, cache),
    repeat_cache=lambda cache, repeats: cache,
)  # one hidden layer each, which sees one state


def init_latent(model: Params, width: int, key: Key, *, codes: int = 64, form: Form = PERCEPTRONS) -> Params:
    """The tree of a latent-action model around a language model of hidden size ``width``.

    The last matrices begin small: the world model starts as the language model, the policy almost uniform.

    Raises:
      ValueError: for fewer than two codes.
    """
    if codes < 2:
        raise ValueError(f"codes={codes} must be at least 2: one code is no choice")
    inverse, merge, acting, table = jax.random.split(key, 4)
    return {
        "model": model,
        "inverse": form.init_part(width, codes, inverse),
        "merge": form.init_merge(width, merge),
        "policy": form.init_part(width, codes, acting),
        "codes": 0.5 * jax.random.normal(table, (codes, width), jnp.float32),
    }


def text_of(params: Params, states: Float[Array, "... W"]) -> Float[Array, "... D"]:
    """The language model's own part of the states that a ``Form`` makes, without a gradient."""
    return jax.lax.stop_gradient(states[..., : params["codes"].shape[1]].astype(jnp.float32))


def before_each(states: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
    """The state in which the token at each index was chosen; 0 before the first."""
    return jnp.pad(states[:, :-1], ((0, 0), (1, 0), (0, 0)))


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


def world_logp(
    policy: Policy, form: Form, frozen: Params, text: Float[Array, "... D"], codes: Float[Array, "K D"],
    sharpness: float,
) -> Float[Array, "... K V"]:  # fmt: skip
    """``log W(v | s, k)`` of codes, by their embeddings, in states of the language model."""
    wide = jnp.broadcast_to(text[..., None, :], (*text.shape[:-1], *codes.shape))
    states = form.merged(frozen["merge"], wide, jnp.broadcast_to(codes, wide.shape))
    return jax.nn.log_softmax(sharpness * policy.unembed(frozen["model"], states), axis=-1)


def _in_parts(codes: int, states: int, vocabulary: int, most: int) -> int:
    """The largest divisor of the codes whose logits, for so many states, are at most ``most`` numbers."""
    fits = [n for n in range(1, codes + 1) if codes % n == 0 and n * states * vocabulary <= most]
    return max(fits, default=1)


def token_logits(
    policy: Policy,
    params: Params,
    before: Float[Array, "... W"],
    *,
    sharpness: float = 1.0,
    most_logits: int = 2**27,
    form: Form = PERCEPTRONS,
) -> Float[Array, "... V"]:
    """``log sum_k pi(k | s) W(v | s, k)``: the chance of each token, whatever code brings it about.

    ``W`` is the world model, its logits times ``sharpness``: large for (almost) greedy decoding. Gradients reach the
    policy over codes alone. Sampling a code and then its token draws from this distribution.

    Args:
      before: states as ``form`` makes them.
      most_logits: that exist at once, of as many codes as so many allow and at least one.
    """
    if sharpness <= 0:
        raise ValueError(f"sharpness={sharpness} must be positive")
    frozen = jax.lax.stop_gradient({k: v for k, v in params.items() if k != TRAINED_BY_REWARD})
    text = text_of(params, before)
    chances = jax.nn.log_softmax(form.chances(params["policy"], before), axis=-1)
    codes = frozen["codes"]
    count, width = codes.shape
    size = _in_parts(count, text[..., 0].size, policy.vocab_size, most_logits)

    @jax.checkpoint
    def of(codes: Array, chances: Array) -> Array:
        world = world_logp(policy, form, frozen, text, codes, sharpness)
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
    params: Params, before: Float[Array, "B T W"], chosen: Int[Array, "B T"], *, form: Form = PERCEPTRONS
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """``(log pi(k | s), entropy)`` of the codes chosen in each state; gradients reach the policy over codes alone."""
    chances = jax.nn.log_softmax(form.chances(params["policy"], before), axis=-1)
    entropy = -jnp.sum(jnp.exp(chances) * chances, axis=-1)
    return jnp.take_along_axis(chances, chosen[:, :, None], axis=-1)[:, :, 0], entropy


def drawn_codes(
    policy: Policy,
    params: Params,
    before: Float[Array, "B T W"],
    tokens: Int[Array, "B T"],
    key: Key,
    *,
    sharpness: float = 1.0,
    most_logits: int = 2**27,
    form: Form = PERCEPTRONS,
) -> Int[Array, "B T"]:
    """Codes that brought about given tokens: a draw from ``pi(k | s) W(token | s, k) / sum_j``, no gradient.

    A token drawn from ``token_logits`` and a code drawn here are together a code drawn from the policy and a token
    drawn from the world model under it: what the method trains on. One code is unembedded at a time.

    Args:
      most_logits: that exist at once, of so many states.
    """
    frozen = jax.lax.stop_gradient(params)
    text, before = text_of(params, before), jax.lax.stop_gradient(before)
    chances = jax.nn.log_softmax(form.chances(frozen["policy"], before), axis=-1)

    def of(some: tuple[Array, Array]) -> Array:
        text, tokens = some

        def under(code: Array) -> Array:
            world = world_logp(policy, form, frozen, text, code[None], sharpness)[..., 0, :]
            return jnp.take_along_axis(world, tokens[:, None], axis=-1)[:, 0]

        return jnp.moveaxis(jax.lax.map(under, frozen["codes"]), 0, -1)

    flat = text.reshape(-1, text.shape[-1]), tokens.reshape(-1)
    at_once = rows_within(most_logits, policy.vocab_size)
    likelihood = in_row_parts(of, flat, at_once=at_once).reshape(chances.shape)
    joint = jnp.where(jnp.isfinite(likelihood), chances + likelihood, -1e30)
    return jax.random.categorical(key, joint, axis=-1).astype(jnp.int32)


def make_latent_policy(policy: Policy, *, sharpness: float = 1.0, form: Form = PERCEPTRONS) -> Policy:
    """The latent-action model as a ``Policy`` of tokens: every rollout, score and loss takes it.

    From "Controlling Large Language Model with Latent Actions" (CoLA), arXiv:2503.21383. Its log-probabilities are
    those of tokens, over all codes that bring them about; the method itself trains on the codes drawn, see
    ``drawn_codes``. Its hidden states are the states of the form; its cache is that of the language model and that of
    the policy over codes.
    """

    def hidden(params, tokens, positions, segment_ids):
        found = policy.hidden(jax.lax.stop_gradient(params["model"]), tokens, positions, segment_ids)
        return form.states(params["policy"], found, positions, segment_ids)

    def extend(params, cache, tokens, positions, segment_ids, column):
        where = positions, segment_ids, column
        found, of_model = policy.extend(params["model"], cache["model"], tokens, *where)
        states, of_codes = form.extend(params["policy"], cache["policy"], found, *where)
        return states, {"model": of_model, "policy": of_codes}

    def unembed(params, states):
        return token_logits(policy, params, states, sharpness=sharpness, form=form)

    return policy._replace(
        hidden=hidden,
        extend=extend,
        unembed=unembed,
        init_cache=lambda batch, length: {
            "model": policy.init_cache(batch, length),
            "policy": form.init_cache(batch, length),
        },
        repeat_cache=lambda cache, repeats: {
            "model": policy.repeat_cache(cache["model"], repeats),
            "policy": form.repeat_cache(cache["policy"], repeats),
        },
        scored=None,
        unstack=None,
        grow_cache=None,
        hidden_groups=None,
        hidden_pages=None,
        experts=None,
    )
