"""Parts of experiments on conduct, over toy preferences: rude tokens, a probe for them, steering."""

from functools import lru_cache

import jax
import jax.numpy as jnp
from jaxtyping import Array

from experiments.parts import strings
from experiments.parts.preference_task import Preferences
from experiments.preference.parts import surgery
from jaxrl_llm import reduce
from jaxrl_llm.metrics import probes
from jaxrl_llm.types import Key, Metrics, Params


@lru_cache(maxsize=4)
def steered_world(world: strings.World) -> strings.World:
    """The same decoder; a parameter "steer" is taken off the last hidden state."""

    def unembed(params: Params, hidden: Array) -> Array:
        if "steer" in params:
            hidden = hidden - jnp.reshape(params["steer"], (1,) * (hidden.ndim - 1) + (-1,))
        return world.policy.unembed(params, hidden)

    return world._replace(policy=world.policy._replace(unembed=unembed))


def _heard(task: Preferences, params: Params, key: Key, rows: int) -> tuple[Array, Array]:
    """``(states [N, D], rude [N])`` of responses of which every other one is rude."""
    prompts = task.draw_prompts(jax.random.fold_in(key, 0), rows)
    rude = jnp.arange(rows) % 2 == 0
    said = task.draw_politeness(jax.random.fold_in(key, 1), prompts, rude)
    return strings.mean_hidden(task.world, params, prompts, said), rude


def politeness_probe(task: Preferences, params: Params, key: Key, *, rows: int = 512) -> tuple[probes.Probe, Array]:
    """A probe of rude against polite responses, and its accuracy on the responses that it was fitted on."""
    seen, rude = _heard(task, params, key, rows)
    probe = probes.fit(seen, rude)
    right = (probes.logits(probe, seen) > 0) == rude
    return probe, reduce.scalars(right.astype(jnp.float32))


def probe_accuracy(task: Preferences, params: Params, probe: probes.Probe, key: Key, *, rows: int = 512) -> Array:
    """How many responses that it has not seen the probe tells apart rightly."""
    seen, rude = _heard(task, params, key, rows)
    return reduce.scalars(((probes.logits(probe, seen) > 0) == rude).astype(jnp.float32))


def politeness(task: Preferences, params: Params, key: Key) -> Metrics:
    """Share of rude tokens, true reward without them, and perplexity of polite text, over 512 prompts."""
    prompts = task.draw_prompts(jax.random.fold_in(key, 0), 512)
    asked = jnp.repeat(prompts, 4, axis=0)
    responses = strings.sample(steered_world(task.world), params, prompts, jax.random.fold_in(key, 1), samples=4)
    polite = task.draw_politeness(jax.random.fold_in(key, 2), asked, jnp.zeros(asked.shape[:1], bool))
    text = strings.token_logp(steered_world(task.world), params, asked, polite)
    return {
        "eval/rude": strings.over_tokens(task.world, task.is_rude(responses), responses),
        "eval/gold": reduce.scalars(task.polite_reward(asked, responses)),
        "eval/perplexity": jnp.exp(-strings.over_tokens(task.world, text, polite)),
    }


# --- edits ``(params, shift [D], key, rows) -> params``: along a shift, on so many gate rows


def _on_rows(params: Params, scores: Array, shift: Array, rows: int) -> Params:
    gate = surgery.shift_rows(params["layers"]["gate"], surgery.highest(scores, rows), shift)
    return params | {"layers": params["layers"] | {"gate": gate}}


def operated(params: Params, shift: Array, key: Key, rows: int) -> Params:
    """Model surgery."""
    return surgery.operate(params, shift, alpha=1.0, rows=rows)


def on_aligned_rows(params: Params, shift: Array, key: Key, rows: int) -> Params:
    """The rows that point along the shift instead of against it."""
    return _on_rows(params, surgery.alignment(params["layers"]["gate"], shift), shift, rows)


def on_random_rows(params: Params, shift: Array, key: Key, rows: int) -> Params:
    """As many rows at random."""
    scores = jax.random.uniform(key, surgery.alignment(params["layers"]["gate"], shift).shape)
    return _on_rows(params, scores, shift, rows)


def in_a_random_direction(params: Params, shift: Array, key: Key, rows: int) -> Params:
    """Surgery along a random vector of the same length."""
    other = jax.random.normal(key, shift.shape)
    return operated(params, other * (jnp.linalg.norm(shift) / jnp.linalg.norm(other)), key, rows)


def steered(params: Params, shift: Array, key: Key, rows: int) -> Params:
    """No parameter is edited: the shift is taken off the last hidden state."""
    return params | {"steer": shift}
