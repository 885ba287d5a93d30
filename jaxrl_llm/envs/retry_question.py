"""Questions of ``--data`` asked again after every wrong answer, with one fixed feedback (unary feedback)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxrl_llm import reduce
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rollout.host.env import TextEnv, TextStepResult, text_identity
from jaxrl_llm.rollout.turns.multi_turn import marks_of, turns_of
from jaxrl_llm.types import Problems, Rewards, Trajectories
from jaxrl_llm.verifiers.answers import final_part
from jaxrl_llm.verifiers.verdict import Verifier

AGAIN = "Your answer is wrong. Try again."
MOST_TURNS = 5  # how far success is followed
RIGHT = 0.5  # a verdict above it


class Place(NamedTuple):
    """Of an episode: what its answers are judged by, and the answers so far."""

    answer: Any
    said: tuple[str, ...] = ()


def retry_env(verify: Verifier) -> TextEnv:
    """A right answer ends the episode and pays 1; a wrong one is answered ``AGAIN``. A mark names the answer."""

    def step(place: Place, text: str) -> TextStepResult:
        found, said = verify(place.answer, text), " ".join(final_part(text).split()).lower()
        after = place._replace(said=(*place.said, said))
        right = found.valid and found.value > RIGHT
        return TextStepResult(
            after, AGAIN, float(right), right, found.valid, reason="" if found.valid else found.reason,
            mark=text_identity(said),
        )  # fmt: skip

    return TextEnv(lambda seed, task: Place(task), step, lambda place: text_identity(repr(place)))


def answers_of(rows: Trajectories) -> tuple[Int[Array, "B K"], Bool[Array, "B K"]]:
    """The number of every turn's answer, equal for equal texts, and whether there is one."""
    return marks_of(rows), turns_of(rows).taken


def figures_of(
    rows: Trajectories, rewards: Rewards, answers: Callable[[Trajectories], tuple[Array, Array]], *, turns: int
) -> dict[str, Array]:
    """``eval/success@k``: right within k = 1 to ``turns`` turns; turns used, all of failures; share of new answers."""
    found = turns_of(rows)
    used = jnp.sum(found.taken.astype(jnp.int32), axis=1)
    found_by = {
        f"eval/success@{k}": reduce.scalars((found.done & (used <= k)).astype(jnp.float32), rewards.valid)
        for k in range(1, turns + 1)
    }
    return found_by | {
        "eval/answers": reduce.scalars(used.astype(jnp.float32), rewards.valid),
        "eval/distinct": reduce.scalars(shaping.distinct_share(*answers(rows)), rewards.valid),
    }


def figures(rows: Trajectories, rewards: Rewards, problems: Problems) -> dict[str, Array]:
    """``figures_of`` measured episodes of questions in text."""
    return figures_of(rows, rewards, answers_of, turns=MOST_TURNS)
