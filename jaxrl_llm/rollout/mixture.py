"""Two models that sample as one: the geometric mixture of their next-token distributions."""

import jax.numpy as jnp

from jaxrl_llm.errors import UserError
from jaxrl_llm.losses.ranking import geometric_mixture
from jaxrl_llm.types import Policy

MEMBERS = ("policy", "reference")


def mixture_policy(policy: Policy, width: int, *, share: float = 0.5) -> Policy:
    """The policy that draws from ``pi^(1 - share) ref^share``: parameters are ``{"policy": ..., "reference": ...}``.

    Both members read every token, each in a cache of its own; their hidden states lie side by side.

    From "Nash Learning from Human Feedback", arXiv:2312.00886, section 7.

    Args:
      policy: of both members.
      width: of their hidden states.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} must lie in [0, 1]")
    if policy.experts is not None:
        raise UserError("experts are recorded of each token, and of two models there are two records: "
                        "choose --partner policy or reference")  # fmt: skip

    def side_by_side(parts):
        return jnp.concatenate([x.astype(jnp.float32) for x in parts], axis=-1)

    def hidden(params, tokens, positions, segment_ids):
        return side_by_side([policy.hidden(params[name], tokens, positions, segment_ids) for name in MEMBERS])

    def unembed(params, states):
        parts = jnp.split(states, [width], axis=-1)
        logits = (policy.unembed(params[name], part) for name, part in zip(MEMBERS, parts, strict=True))
        return geometric_mixture(*logits, share=share)

    def extend(params, cache, *columns):
        found = {name: policy.extend(params[name], cache[name], *columns) for name in MEMBERS}
        return side_by_side([states for states, _ in found.values()]), {name: x for name, (_, x) in found.items()}

    return Policy(
        init=lambda key: {name: policy.init(key) for name in MEMBERS},
        hidden=hidden,
        unembed=unembed,
        init_cache=lambda batch, length: {name: policy.init_cache(batch, length) for name in MEMBERS},
        extend=extend,
        repeat_cache=lambda cache, repeats: {name: policy.repeat_cache(x, repeats) for name, x in cache.items()},
        vocab_size=policy.vocab_size,
        unstack=lambda params: {name: policy.for_steps(params[name]) for name in MEMBERS},
        grow_cache=policy.grow_cache
        and (lambda cache, repeats, length: {name: policy.grow_cache(x, repeats, length) for name, x in cache.items()}),
    )
