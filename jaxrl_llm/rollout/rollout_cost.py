"""What a rollout cost where its rows do not show it: responses thrown away, and places that were left empty."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_llm.types import Trajectories

RESPONSES, TOKENS = "cost/responses", "cost/tokens"  # names in ``Trajectories.extras``, both [B]


def response_tokens(rows: Trajectories) -> Float[Array, " B"]:
    """How many tokens of each row the policy chose."""
    return jnp.sum(rows.mask.astype(jnp.float32), axis=1)


def with_cost(rows: Trajectories, responses: Float[Array, " B"], tokens: Float[Array, " B"]) -> Trajectories:
    """The rows with the number of responses, and of their tokens, that were generated for the place of each.

    Figures of a run count these in the place of the rows and their masks, so that a method that draws again, or writes
    what it throws away, does not look as cheap as one that does not.
    """
    return rows._replace(extras=rows.extras | {RESPONSES: responses, TOKENS: tokens})
