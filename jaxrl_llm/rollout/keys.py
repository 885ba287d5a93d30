"""Random keys folded from (run, step, prompt, sample): the same for any batch layout, mesh or restart."""

import jax
from jaxtyping import Array, Int

from jaxrl_llm.types import Key


def sample_keys(run_key: Key, step: Int[Array, ""] | int, problem_ids: Int[Array, " P"], group_size: int) -> Key:
    """One key per sequence, ``[P * group_size]``, samples of a prompt side by side.

    Sample ``i`` of prompt ``j`` at a step depends on nothing else: not on the batch it shares, nor on its row.
    """
    step_key = jax.random.fold_in(run_key, step)

    def of_prompt(problem):
        prompt_key = jax.random.fold_in(step_key, problem)
        return jax.vmap(lambda i: jax.random.fold_in(prompt_key, i))(jax.numpy.arange(group_size))

    return jax.vmap(of_prompt)(problem_ids).reshape(-1)
