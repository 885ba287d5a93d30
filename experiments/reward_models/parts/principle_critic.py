"""The generative judge of principles: it names the quality, says how far the reply has it, and answers yes or no.

A report is the quality's first word, one of five levels, the verdict and the end. A warm start imitates reports with
errors; GRPO then learns from labels alone. The score of a reply is the log-odds of the verdict after a report of its
own, or the mean over several.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings
from experiments.reward_models.parts import principles
from experiments.reward_models.parts.attribute_text import Replies
from jaxrl_llm.advantages.group import group_normalized_advantages
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Key, Params, Rewards, Trajectories

VERDICT = 2  # place in the report


def ask(
    task: Replies, words: Int[Array, "N 2"], prompts: Int[Array, "N P"], replies: Int[Array, "N T"]
) -> Int[Array, "N Q"]:
    """Prompt and reply, then the principle."""
    return jnp.concatenate([prompts, replies, task.reading.first + words], axis=1)


def write(
    task: Replies, principle: Int[Array, "N 2"], level: Int[Array, " N"], yes: Bool[Array, " N"]
) -> Int[Array, "N R"]:
    """A report.

    >>> write(principles.LANGUAGE, jnp.array([[1, 0]]), jnp.array([3]), jnp.array([True])).tolist()
    [[35, 60, 54, 62]]
    """
    name, first = principles.SYNONYMS * principle[:, 0], task.reading.first
    verdict = jnp.where(yes, principles.YES, principles.NO)
    end = jnp.full_like(name, task.reading.critic.end)
    return jnp.stack([first + name, first + principles.LEVEL + level, first + verdict, end], axis=1)


def draw_reports(task: Replies, key: Key, n: int, *, error_rate: float = 0.3) -> tuple[Array, Array, Array]:
    """``(asked, reports, kept)``: levels are guessed at the rate; the verdict follows the level that was written."""
    keys = jax.random.split(key, 5)
    prompts, replies = task.draw_behaviour(keys[0], n)
    principle = principles.draw_principles(keys[1], n)
    words = principles.in_words(principle, jax.random.randint(keys[2], (n,), 0, 6, jnp.int32))
    score = jnp.take_along_axis(principles.qualities(task, prompts, replies), principle[:, :1], axis=1)[:, 0]
    level = jnp.round(score * (principles.LEVELS - 1)).astype(jnp.int32)
    guess = jax.random.randint(keys[3], (n,), 0, principles.LEVELS, jnp.int32)
    level = jnp.where(jax.random.bernoulli(keys[4], error_rate, (n,)), guess, level)
    cut = jnp.asarray(task.reading.cuts, jnp.float32)[principle[:, 0]]
    has = level.astype(jnp.float32) / (principles.LEVELS - 1) > cut
    reports = write(task, principle, level, has ^ (principle[:, 1] == principles.UNWANTED))
    return ask(task, words, prompts, replies), reports, jnp.ones((n,), bool)


def warm_stage(task: Replies, *, steps: int, table: int = 2048) -> Stage:
    """Imitation of reports."""
    loss = strings.make_imitation(task.reading.critic, "generative")
    return strings.table_stage(_reports(task, table), loss, steps=steps, rows_per_step=64, learning_rate=3e-3)


@lru_cache(maxsize=4)
def _reports(task: Replies, rows: int) -> Callable[[Params, Key], tuple[Array, ...]]:
    return lambda params, key: draw_reports(task, key, rows)


def verdict_odds(
    task: Replies, critic: Params, asked: Int[Array, "N Q"], reports: Int[Array, "N R"]
) -> Float[Array, " N"]:
    """``logit(yes) - logit(no)`` where the verdict stands, behind what the report says before it."""
    world, first = task.reading.critic, task.reading.first
    rows = strings.whole(world, asked, reports)
    hidden = world.policy.hidden(critic, rows.tokens, rows.positions, rows.segment_ids)
    logits = world.policy.unembed(critic, hidden[:, asked.shape[1] + VERDICT - 1]).astype(jnp.float32)
    return logits[:, first + principles.YES] - logits[:, first + principles.NO]


def said(task: Replies, reports: Int[Array, "N R"]) -> tuple[Bool[Array, " N"], Bool[Array, " N"]]:
    """``(yes, readable)`` of reports."""
    verdict = reports[:, VERDICT] - task.reading.first
    return verdict == principles.YES, (verdict == principles.YES) | (verdict == principles.NO)


def matches(
    task: Replies, odds: Float[Array, " N"], reports: Int[Array, "N R"], label: Bool[Array, " N"]
) -> Float[Array, " N"]:
    """The binary reward: 1 for the label, 0 for the other verdict or none."""
    yes, readable = said(task, reports)
    return (readable & (yes == label)).astype(jnp.float32)


def shaded(
    task: Replies, odds: Float[Array, " N"], reports: Int[Array, "N R"], label: Bool[Array, " N"]
) -> Float[Array, " N"]:
    """The graded reward ``-|l - P(yes)|``; -1 without a verdict.

    >>> odds = jnp.log(jnp.array([3.0, 3.0]))
    >>> task, none = principles.LANGUAGE, jnp.zeros((2, 2), jnp.int32)
    >>> reports = write(task, none, none[:, 0], jnp.array([True, True]))
    >>> [round(reward, 4) for reward in shaded(task, odds, reports, jnp.array([True, False])).tolist()]
    [-0.25, -0.75]
    """
    away = jnp.abs(label.astype(jnp.float32) - jax.nn.sigmoid(odds))
    return jnp.where(said(task, reports)[1], -away, -1.0)


def grpo_stage(
    task: Replies, reward: Callable[..., Array], judged: Callable[..., tuple[Array, ...]], *, steps: int,
    judgements: int, learning_rate: float, prompts_per_step: int = 16, group_size: int = 8,
) -> Stage:  # fmt: skip
    """GRPO on ``reward(task, odds, reports, label)`` over the judgements that are kept.

    Args:
      judged: ``(task, key, n)`` as ``principles.draw_judgements``.
    """
    _, words, prompts, replies, label, weight = judged(task, jax.random.key(23), judgements)
    kept = jnp.flatnonzero(weight > 0)
    asked, labels = ask(task, words, prompts, replies)[kept], label[kept] > 0.5
    world = task.reading.critic
    inner = builders.make_estimate(world.policy, builders.per_response(group_normalized_advantages))
    loss = builders.make_policy_loss(world.policy, clipped_policy_loss)

    def score(answers, rows: Trajectories) -> Rewards:
        reports = strings.responses_of(world, rows)[1]
        value = matches(task, jnp.zeros(reports.shape[:1]), reports, labels[rows.problem_ids])
        return Rewards(value, jnp.ones(value.shape, bool))

    def estimate(params, extras, rows, rewards):
        critic = params["generative"]
        questions, reports = strings.responses_of(world, rows)
        odds = jax.lax.stop_gradient(verdict_odds(task, critic, questions, reports))
        return inner(
            critic, extras, rows, rewards._replace(value=reward(task, odds, reports, labels[rows.problem_ids]))
        )

    online = strings.learned_from_prompts(
        world, asked, score, estimate=estimate, loss=lambda params, batch: loss(params["generative"], batch),
        tx=optax.adam(world.rate or learning_rate), prompts_per_step=prompts_per_step, group_size=group_size,
        actor=lambda state: state.params["generative"],
    )  # fmt: skip
    return Stage(online, steps)


def proxy(quality: int | Array, wanted: int | Array, *, samples: int = 1) -> Callable[..., Array]:
    """The ``Proxy`` of one principle: mean log-odds of the verdict behind ``samples`` reports of the judge's own."""
    return partial(_score, quality=quality, wanted=wanted, samples=samples)


def _score(task: Replies, params: Params, prompts: Array, responses: Array, *, quality, wanted, samples: int) -> Array:
    asked = ask(task, principles.named(quality, wanted, prompts.shape[0]), prompts, responses)
    reports = strings.sample(task.reading.critic, params["generative"], asked, jax.random.key(17), samples=samples)
    odds = verdict_odds(task, params["generative"], jnp.repeat(asked, samples, axis=0), reports)
    return jnp.sum(odds.reshape(-1, samples), axis=1) / samples
