"""Parts of experiments over running sums: the model, and its accuracy with a cue that fits or not."""

import jax
import jax.numpy as jnp

from experiments.parts import running_sums_task as toy
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.types import Key, Metrics, Params

WORLD = strings.make_world(toy.VOCABULARY, toy.PROMPT_TOKENS, toy.RESPONSE_TOKENS, width=48, heads=4)


def measure(params: Params, key: Key) -> Metrics:
    """Accuracy on plain problems, and where the cue fits and where it is broken."""
    found = {}
    for k, (name, share) in enumerate((("eval/cued", 1.0), ("eval/broken", 0.0))):
        prompts = toy.cued(jax.random.fold_in(key, 2 * k), 256, share)
        drawn = strings.sample(WORLD, params, prompts, jax.random.fold_in(key, 2 * k + 1))
        found[name] = reduce.scalars(toy.right(prompts, drawn).astype(jnp.float32))
    return found | {"eval/accuracy": 0.5 * (found["eval/cued"] + found["eval/broken"])}
