"""The generative judge of principles: it names the quality, says how far the reply has it, and answers yes or no.

A report is the quality's first word, one of five levels, the verdict and the end. A warm start imitates reports that
say what annotators said, with a level that agrees and tells no more; GRPO then learns from such labels alone. The score
of a reply is the log-odds of the verdict after a report of its own, or the mean over several.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

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
from jaxrl_llm.types import Key, Params, declared

VERDICT = 2  # place in the report
Judgements = Callable[[Replies, Key, int], tuple[Array, ...]]  # as ``principles.draw_judgements``


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


def draw_reports(task: Replies, judged: Judgements, key: Key, n: int) -> tuple[Array, Array, Array]:
    """``(asked, reports, kept)``: the verdict is the annotators' label, the level any that agrees with it.

    Nothing here knows the true quality: a judge that writes learns from what the others learn from.
    """
    principle, words, prompts, replies, label, weight = judged(task, jax.random.fold_in(key, 0), n)
    yes = label > 0.5
    cut = jnp.asarray(task.reading.cuts, jnp.float32)[principle[:, :1]]
    above = jnp.arange(principles.LEVELS, dtype=jnp.float32)[None, :] / (principles.LEVELS - 1) > cut
    agrees = above == (yes ^ (principle[:, 1] == principles.UNWANTED))[:, None]
    level = jax.random.categorical(jax.random.fold_in(key, 1), jnp.where(agrees, 0.0, -jnp.inf)).astype(jnp.int32)
    return ask(task, words, prompts, replies), write(task, principle, level, yes), weight > 0


def warm_stage(
    task: Replies, judged: Judgements, *, steps: int, table: int, rows_per_step: int, learning_rate: float
) -> Stage:
    """Imitation of reports."""
    loss, rate = strings.make_imitation(task.reading.critic, "generative"), task.reading.critic.rate or learning_rate
    return strings.table_stage(
        _reports(task, judged, table), loss, steps=steps, rows_per_step=rows_per_step, learning_rate=rate
    )


@lru_cache(maxsize=4)
def _reports(task: Replies, judged: Judgements, rows: int) -> Callable[[Params, Key], tuple[Array, ...]]:
    return lambda params, key: draw_reports(task, judged, key, rows)


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


class Labelled(NamedTuple):
    """Extras of a state: what is asked, and what annotators said of it."""

    asked: Int[Array, "N Q"]
    labels: Bool[Array, " N"]


def draw_labelled(task: Replies, judged: Judgements, key: Key, n: int) -> Labelled:
    """``n`` questions: the judgements that are kept, again and again in their order; all where none is."""
    _, words, prompts, replies, label, weight = judged(task, key, n)
    count = jnp.sum((weight > 0).astype(jnp.int32))
    at = jnp.argsort(weight <= 0, stable=True)[jnp.arange(n, dtype=jnp.int32) % jnp.where(count > 0, count, n)]
    return Labelled(ask(task, words, prompts, replies)[at], label[at] > 0.5)


def truly(task: Replies, asked: Int[Array, "N Q"], reports: Int[Array, "N R"]) -> Float[Array, " N"]:
    """1 where the verdict of a report is the truth about the reply, which no learner sees."""
    prompts, replies, words = jnp.split(asked, (task.world.prompt_tokens, asked.shape[1] - 2), axis=1)
    truth = principles.satisfied(task, prompts, replies, principles.read_back(words - task.reading.first))
    return matches(task, jnp.zeros(truth.shape), reports, truth)


def grpo_stage(
    task: Replies, reward: Callable[..., Array], judged: Judgements, *, steps: int, judgements: int,
    learning_rate: float, prompts_per_step: int = 16, group_size: int = 8,
) -> Stage:  # fmt: skip
    """GRPO on ``reward(task, odds, reports, label)`` over the judgements that are kept, which are the seed's own.

    ``reward/mean`` of its curves is the truth.
    """
    world = task.reading.critic
    inner = builders.make_estimate(world.policy, builders.per_response(group_normalized_advantages))
    loss = builders.make_policy_loss(world.policy, clipped_policy_loss)

    def extras(params, key):
        return draw_labelled(task, judged, key, judgements)._asdict()

    def actor(state):
        return {"critic": state.params["generative"], "asked": declared(Labelled, state.extras).asked}

    def roll(own, tokens, valid, keys, problem_ids):
        asked = own["asked"][problem_ids]
        return strings.rollout(world, own["critic"], asked, keys, samples=group_size, problem_ids=problem_ids)

    def estimate(params, extras, rows, rewards):
        critic, labels = params["generative"], declared(Labelled, extras).labels[rows.problem_ids]
        questions, reports = strings.responses_of(world, rows)
        odds = jax.lax.stop_gradient(verdict_odds(task, critic, questions, reports))
        return inner(critic, extras, rows, rewards._replace(value=reward(task, odds, reports, labels)))

    online = strings.learned_from_prompts(
        world, jnp.zeros((judgements, world.prompt_tokens), jnp.int32), strings.score_of(world, partial(truly, task)),
        estimate=estimate, loss=lambda params, batch: loss(params["generative"], batch),
        tx=optax.adam(world.rate or learning_rate), prompts_per_step=prompts_per_step, group_size=group_size,
        actor=actor, rollout=roll,
    )  # fmt: skip
    return Stage(online, steps, extras)


def proxy(quality: int | Array, wanted: int | Array, *, samples: int = 1) -> Callable[..., Array]:
    """The ``Proxy`` of one principle: mean log-odds of the verdict behind ``samples`` reports of the judge's own."""
    return partial(_score, quality=quality, wanted=wanted, samples=samples)


def _score(task: Replies, params: Params, prompts: Array, responses: Array, *, quality, wanted, samples: int) -> Array:
    asked = ask(task, principles.named(quality, wanted, prompts.shape[0]), prompts, responses)
    reports = strings.sample(task.reading.critic, params["generative"], asked, jax.random.key(17), samples=samples)
    odds = verdict_odds(task, params["generative"], jnp.repeat(asked, samples, axis=0), reports)
    return jnp.sum(odds.reshape(-1, samples), axis=1) / samples
