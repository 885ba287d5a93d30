"""Log-probabilities and entropies aligned with the token that they describe: the only place with a shift by one."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

SCORED = "scored"  # what a ``scored`` of ``chunked`` keeps of each token for its backward pass


def _check_temperature(temperature: float) -> None:
    if isinstance(temperature, int | float) and temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive; for greedy decoding take the arg-max instead")


def _scaled(logits: Array, temperature: float | Array) -> Array:
    return logits.astype(jnp.float32) / temperature


def _before(logits: Array, temperature: float | Array, segment_ids: Array | None) -> Array:
    """Scaled logits of all positions but the last; 0 where no token follows, so that a NaN there has no gradient."""
    scaled = _scaled(logits[:, :-1], temperature)
    return scaled if segment_ids is None else jnp.where(_follows(segment_ids)[:, 1:, None], scaled, 0.0)


def _pick(logits: Array, targets: Array) -> Array:
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def _entropy(logits: Array) -> Array:
    """Entropy in nats; a token of probability 0 (logit -inf) adds 0 and no gradient."""
    logp = jax.nn.log_softmax(logits, axis=-1)
    possible = jnp.isfinite(logp)
    safe = jnp.where(possible, logp, 0.0)
    return -jnp.sum(jnp.where(possible, jnp.exp(safe) * safe, 0.0), axis=-1)


def mean_logprob(logits: Float[Array, "*A V"]) -> Float[Array, "*A"]:
    """Mean log-probability over the tokens whose logits are finite: a ``figure`` of ``chunked``."""
    possible = jnp.isfinite(logits)
    count = jnp.sum(possible.astype(jnp.float32), axis=-1)
    mean = jnp.sum(jnp.where(possible, logits, 0.0), axis=-1) / jnp.maximum(count, 1.0)
    return mean - jax.nn.logsumexp(logits, axis=-1)


def _follows(segment_ids: Array) -> Array:
    """Whether the token before is of the same segment; False in padding."""
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
    return (segment_ids == before) & (segment_ids > 0)


def _aligned(values: Float[Array, "B S"], segment_ids: Int[Array, "B T"] | None) -> Float[Array, "B T"]:
    """Puts the value that position t-1 predicts for token t at index t; the first token of a segment gets 0."""
    values = jnp.pad(values, ((0, 0), (1, 0)))
    if segment_ids is None:
        return values
    return jnp.where(_follows(segment_ids), values, 0.0)


def align(outputs: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Moves what position ``t - 1`` says (logits or hidden states) to index ``t``, the token that it produces.

    Index 0 is produced by nothing and gets zeros; it, and the first token of every packed segment, lie outside any
    mask. For losses that need whole distributions (``losses.distill``).
    """
    return jnp.pad(outputs[:, :-1], ((0, 0), (1, 0), (0, 0)))


def token_logprobs(
    logits: Float[Array, "B T V"],
    tokens: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T"]:
    """Log-probability of every token given the tokens before it.

    ``out[b, t] = log softmax(logits[b, t-1] / temperature)[tokens[b, t]]``, ``out[b, 0] = 0``, in float32.

    Args:
      logits: what the model returned for the same ``tokens``.
      temperature: divides the logits in float32, as the sampler did.
      segment_ids: packing; the first token of every segment and all padding (id 0) get 0.

    >>> import jax.numpy as jnp
    >>> logits = jnp.log(jnp.array([[[0.25, 0.75], [0.5, 0.5]]]))
    >>> [round(float(x), 4) for x in token_logprobs(logits, jnp.array([[0, 1]]))[0]]
    [0.0, -0.2877]
    """
    _check_temperature(temperature)
    return _aligned(_pick(_before(logits, temperature, segment_ids), tokens[:, 1:]), segment_ids)


def token_entropy(
    logits: Float[Array, "B T V"], *, temperature: float = 1.0, segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
    """Entropy (nats) of the distribution that *produced* the token at each index; column 0 is 0.

    ``out[b, t] = H(softmax(logits[b, t-1] / temperature))``.
    """
    _check_temperature(temperature)
    return _aligned(_entropy(_before(logits, temperature, segment_ids)), segment_ids)


def token_collision(
    logits: Float[Array, "B T V"], *, temperature: float = 1.0, segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
    """``sum_v p_v^2`` of the distribution that *produced* the token at each index; column 0 is 0.

    The chance that two draws agree; what ``losses.preference.wpo_weights`` and the optimal token baseline
    (``advantages.baseline``) need of a distribution besides the token's own probability.

    >>> import jax.numpy as jnp
    >>> p = jnp.array([[[0.5, 0.5], [0.9, 0.1]]])
    >>> [round(float(x), 4) for x in token_collision(jnp.log(p))[0]]
    [0.0, 0.5]
    """
    _check_temperature(temperature)
    return _aligned(collision(_before(logits, temperature, segment_ids)), segment_ids)


def collision(logits: Float[Array, "*N V"]) -> Float[Array, "*N"]:
    """``sum_v p_v^2`` of each distribution; in ``chunked`` as ``figure``."""
    return jnp.exp(jax.nn.logsumexp(2.0 * logits, axis=-1) - 2.0 * jax.nn.logsumexp(logits, axis=-1))


def mean_logprobs(
    logits: Float[Array, "B T V"], *, temperature: float = 1.0, segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, "B T"]:
    """Mean over the vocabulary of the log-probabilities from which the token at each index was chosen; column 0 is 0.

    ``out[b, t] = mean_v log softmax(logits[b, t-1] / temperature)[v]`` over tokens with finite logits: under a
    *uniform* policy the expected log-probability (``losses.bellman``).
    """
    _check_temperature(temperature)
    return _aligned(mean_logprob(_before(logits, temperature, segment_ids)), segment_ids)


def chunked(
    hidden: Float[Array, "B T D"],
    unembed: Callable[..., Array],
    tokens: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    chunk: int = 128,
    segment_ids: Int[Array, "B T"] | None = None,
    beside: Int[Array, "B T"] | None = None,
    figure: Callable[[Array], Array] | None = None,
    scored: Callable[..., tuple[Array, Array]] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """``(token_logprobs, token_entropy)`` from hidden states, ``chunk`` time steps at a time.

    ``[B, T, V]`` never exists, forward or backward: each chunk of logits is recomputed in the backward pass.
    Hidden states of padding must be finite: their values are replaced, but a NaN would enter the gradient.

    Args:
      hidden: final hidden states of the same ``tokens``.
      unembed: hidden states ``[..., D]`` to logits ``[..., V]``.
      chunk: time steps whose logits exist at once.
      beside: a number of each time step that ``unembed`` gets, too: ``unembed(hidden, beside)``.
      figure: what is taken of the scaled logits ``[..., V]`` in place of the entropy, for example ``collision``.
      scored: ``(hidden [B, S, D], targets [B, S], temperature) -> (logp, entropy)`` in the place of ``unembed`` where
        nothing is ``beside`` and no other ``figure`` is asked for: ``Policy.scored`` with its parameters.
    """
    _check_temperature(temperature)
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 time step")
    steps = tokens.shape[1] - 1
    size = min(chunk, max(steps, 1))
    count = -(-steps // size)
    pad = count * size - steps

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(SCORED))
    def score(h: Array, targets: Array, *more: Array) -> tuple[Array, Array]:
        if scored is not None and beside is None and figure is None:
            return scored(h, targets, temperature)
        logits = _scaled(unembed(h, *more), temperature)
        return _pick(logits, targets), (figure or _entropy)(logits)

    h = jnp.pad(hidden[:, :-1], ((0, 0), (0, pad), (0, 0)))
    given = [tokens[:, 1:], *([] if beside is None else [beside[:, :-1]])]
    given = [jnp.pad(x, ((0, 0), (0, pad))) for x in given]
    if count == 1:
        logp, entropy = score(h, *given)
    else:
        parts = (
            jnp.moveaxis(h.reshape(h.shape[0], count, size, h.shape[2]), 1, 0),
            *(jnp.moveaxis(x.reshape(h.shape[0], count, size), 1, 0) for x in given),
        )
        _, (logp, entropy) = jax.lax.scan(lambda _, part: (None, score(*part)), None, parts)
        logp, entropy = (jnp.moveaxis(x, 0, 1).reshape(h.shape[0], count * size) for x in (logp, entropy))
    return _aligned(logp[:, :steps], segment_ids), _aligned(entropy[:, :steps], segment_ids)
