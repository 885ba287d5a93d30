"""The attention probabilities of a decoder, layer by layer: an auxiliary pass that keeps what training never forms."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.attention import attention, layer_mask, queries_keys_values, score_scale, visible
from jaxrl_llm.models.decoder import How, block, embed, scanned
from jaxrl_llm.models.spec import ModelConfig
from jaxrl_llm.types import Params


def attention_weights(
    q: Float[Array, "B S H K"],
    k: Float[Array, "B G C K"],
    mask: Bool[Array, "B S C"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "B H S C"]:
    """The weights that ``attention.attend`` forms, one map a query head; each row that sees a key sums to 1."""
    b, s, h, d = q.shape
    g = k.shape[1]
    rows = jnp.transpose(q.reshape(b, s, g, h // g, d), (0, 2, 3, 1, 4))
    scores = jnp.einsum("bgrsd,bgcd->bgrsc", rows, k, preferred_element_type=jnp.float32)
    scores = scores * (d**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, None, None, :, :], scores, -1e30)
    return jax.nn.softmax(scores, axis=-1).reshape(b, h, s, k.shape[2])


def attention_maps(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, "L B H T T"]:
    """Who attended to whom: ``out[l, b, h, t, s]`` is the weight of token s for token t, no gradient.

    ``T^2`` numbers a head: meant for short responses or few rows at a time.
    """
    mask, distances = visible(config, positions, segment_ids, positions, segment_ids), (positions, positions)
    numbers = {"scale": score_scale(config), "softcap": config.attention_softcap}

    def step(x, layer):
        maps = []

        def attend(normed):
            q, k, v = queries_keys_values(config, layer, normed, positions)
            maps.append(attention_weights(q, k, layer_mask(layer, mask, distances), **numbers))
            return attention(config, layer, q, k, v, mask, distances)

        x, _ = block(config, How(), layer, x, attend)
        return x, maps[0]

    params = jax.lax.stop_gradient(params)
    x = embed(config, How(), params, tokens, positions, segment_ids)
    return jax.lax.scan(step, x, scanned(config, params))[1]
