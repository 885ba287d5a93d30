"""The parts of a latent-action model as layers of a transformer: those of the library's decoder, over its states.

A part is a decoder whose tokens are states: its table of embeddings is the states of the language model, its head says
one number of each code. It so sees all states before, where a perceptron sees one.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from experiments.policy_gradient.parts.latent_codes import Form
from jaxrl_llm.models.decoder import init_params, make_policy
from jaxrl_llm.models.layers import rms_norm
from jaxrl_llm.models.mlp import dense
from jaxrl_llm.models.spec import ModelConfig
from jaxrl_llm.types import Key, Params


def part_config(config: ModelConfig, *, codes: int, layers: int) -> ModelConfig:
    """The shape of a part: layers as the language model's own, dense, with rotary positions, and a head for codes.

    >>> gpt = ModelConfig("gpt2", 50, 8, 16, 6, 2, 2, 4, norm="layer", learned_positions=True, tie_embeddings=True)
    >>> part = part_config(gpt, codes=16, layers=2)
    >>> part.num_layers, part.vocab_size, part.learned_positions, part.tie_embeddings
    (2, 16, False, False)
    """
    return dataclasses.replace(
        config, num_layers=layers, vocab_size=codes, padded_vocab_size=codes, tie_embeddings=False,
        scale_embedding=False, learned_positions=False, rotary_dim=0, windows=(), final_softcap=None, experts=None,
    )  # fmt: skip


def init_merge(config: ModelConfig, layers: int, width: int, key: Key) -> Params:
    """The layers of the world model: gated feed-forward parts that read a state beside the embedding of a code."""
    keys, inner = jax.random.split(key, 3), config.intermediate_size
    shapes = {"gate": (2 * width, inner), "up": (2 * width, inner), "down": (inner, width)}
    drawn = {
        name: config.initializer_range * jax.random.normal(k, (layers, *shape), jnp.float32)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return drawn | {"norm": jnp.ones((layers, width), jnp.float32)}


def merged_by_layers(
    config: ModelConfig, merge: Params, text: Float[Array, "... D"], action: Float[Array, "... D"]
) -> Float[Array, "... D"]:
    """``s <- s + down(act(gate [norm s; e]) * up [norm s; e])`` for every layer of the world model, from the text's s.

    From "Controlling Large Language Model with Latent Actions" (CoLA), arXiv:2503.21383, as released: layers without
    attention, for what was read before is in the state. Differs in the norm, which is before every layer here and
    behind the last one there, so that the world model begins as the language model.
    """
    state = text
    for layer in range(merge["norm"].shape[0]):
        own = {name: x[layer] for name, x in merge.items()}
        beside = jnp.concatenate([rms_norm(state, own["norm"], config.rms_norm_eps), action], axis=-1)
        state = state + dense(config, own, beside)
    return state


def transformers(config: ModelConfig, *, codes: int, layers: int) -> Form:
    """Parts of so many layers each: inverse model and policy over codes attend, the world model's do not.

    Args:
      config: of the language model; the layers have its shape.

    Raises:
      ValueError: for less than one layer.
    """
    if layers < 1:
        raise ValueError(f"layers={layers} must be at least 1; PERCEPTRONS have none")
    shape = part_config(config, codes=codes, layers=layers)
    decoder, gated = make_policy(shape), dataclasses.replace(shape, gated_mlp=True)

    def init_part(width: int, codes: int, key: Key) -> Params:
        return {name: x for name, x in init_params(shape, key).items() if name != "embed"}

    def over(part: Params, hidden: Array) -> tuple[Params, Array]:
        rows = jnp.arange(hidden.shape[0] * hidden.shape[1], dtype=jnp.int32).reshape(hidden.shape[:2])
        return part | {"embed": jax.lax.stop_gradient(hidden).astype(jnp.float32).reshape(-1, hidden.shape[2])}, rows

    def beside(hidden: Array, own: Array) -> Array:
        return jnp.concatenate([hidden.astype(jnp.float32), own], axis=-1)

    def read(part, hidden, positions, segment_ids):
        return decoder.unembed(part, decoder.hidden(*over(part, hidden), positions, segment_ids))

    def states(part, hidden, positions, segment_ids):
        return beside(hidden, decoder.hidden(*over(part, hidden), positions, segment_ids))

    def extend(part, cache, hidden, positions, segment_ids, column):
        part, rows = over(part, hidden)
        own, cache = decoder.extend(part, cache, rows, positions, segment_ids, column)
        return beside(hidden, own), cache

    return Form(
        init_part=init_part,
        init_merge=partial(init_merge, gated, layers),
        read=read,
        states=states,
        chances=lambda part, states: decoder.unembed(part, states[..., config.hidden_size :]),
        merged=partial(merged_by_layers, gated),
        init_cache=decoder.init_cache,
        extend=extend,
        repeat_cache=decoder.repeat_cache,
    )
