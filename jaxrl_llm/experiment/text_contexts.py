"""Contexts of text: what asks a model for a summary, what stands behind one, and how measured episodes fared."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm import reduce
from jaxrl_llm.data.chat import make_reply_encoder
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.envs.text import Given
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.turns import contexts
from jaxrl_llm.rollout.turns.contexts import Context
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.types import Trajectories

ASK = (
    "The conversation is about to be cut: you will see nothing of it but the task and what you write now. Write down "
    "all that is needed to go on: what was tried, what it showed, what is still open. Do not go on with the task yet."
)
GO_ON = "That is your summary of what happened so far. Go on with the task."


class Contexts(NamedTuple):
    """What is seen of episodes that train, and of those that are measured in a context of more summaries."""

    trained: Context
    more: Context


Sight = Callable[[Tokenizer], Contexts]


def text_context(
    tokenizer: Tokenizer, *, tokens: int | None, summaries: int, summary_tokens: int, ask: str = ASK,
    go_on: str = GO_ON, **how: Any,
) -> Context:  # fmt: skip
    """A context of text: where the tokenizer has a chat template, the model is asked by a user's message.

    The message stands behind an answer that is empty, since the world has just spoken; the summary is the answer to
    it. ``how`` are further fields of ``Context``.
    """
    if not summaries:
        return Context(tokens, **how)
    if tokenizer.chat_template is None:
        asked, behind = tokenizer.encode(f"\n{ask}\n"), tokenizer.encode(f"\n{go_on}\n")
    else:
        reply = make_reply_encoder(tokenizer)
        asked, behind = [tokenizer.eos_ids[0], *reply(ask)], reply(go_on)
    return Context(tokens, summaries, summary_tokens, tuple(asked), resume=tuple(behind), **how)


def sight(tokens: int | None, summaries: tuple[int, int], summary_tokens: int, **how: Any) -> Sight:
    """The ``sight`` of ``multi_turn_plan.hosted``: summaries so many times in training, and so many when measured.

    ``how`` is that of ``text_context``.
    """

    def seen(tokenizer: Tokenizer) -> Contexts:
        parts = {"tokens": tokens, "summary_tokens": summary_tokens, **how}
        return Contexts(*(text_context(tokenizer, summaries=count, **parts) for count in summaries))

    return seen


def checked(seen: Contexts, found: Sequence[Given], turns: int) -> int:
    """Columns of the longest sub-trajectory, prompt included, or of the longest episode where all of it is seen.

    Raises:
      UserError: where a prompt and a summary do not leave room.
    """
    width = max(part.problems.tokens.shape[1] for part in found)
    for context in seen:
        try:
            contexts.check(context, width)
        except ValueError as error:
            raise UserError(f"the context is too small: {error}; the longest prompt has {width}") from error
    return max(contexts.widest(context, found[0].env, prompt_tokens=width, turns=turns) for context in seen)


def figures(rows: Trajectories, more: Trajectories, *, enough: float) -> dict[str, Array]:
    """Of measured episodes in the context of training and in that of more summaries; names as in ``toy_ledger``."""
    here, there = (episode_methods.figures(found, enough=enough)["eval/success"] for found in (rows, more))
    return {
        "eval/more": there,
        "eval/gained": there - here,
        "eval/summaries": reduce.scalars(contexts.summaries_of(more).astype(jnp.float32)),
        "eval/context": jnp.max(contexts.context_sizes(more)).astype(jnp.float32),
        "eval/overlong": reduce.scalars(rows.truncated.astype(jnp.float32)),
    }
