"""Pairwise judges of toy preferences: a decoder that reads a prompt and two responses and says which is better."""

from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from experiments.parts.preference_task import Preferences
from jaxrl_llm import reduce
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.losses.ranking import verdict_loss
from jaxrl_llm.models import heads
from jaxrl_llm.train import offline
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.plan import tabled
from jaxrl_llm.types import Key, Metrics, Params

ASK = toy.VOCABULARY + 2  # behind the two verdicts: the question
WIDTH = 64
WORLD = strings.make_world(
    toy.VOCABULARY + 3, toy.PROMPT_TOKENS + 2 * toy.RESPONSE_TOKENS + 1, 1, width=WIDTH, layers=2, heads=4
)


def _hidden(model: Params, prompts: Array, first: Array, second: Array) -> Array:
    asked = jnp.concatenate([prompts, first, second, jnp.full((prompts.shape[0], 1), ASK, jnp.int32)], axis=1)
    positions = jnp.broadcast_to(jnp.arange(asked.shape[1], dtype=jnp.int32)[None, :], asked.shape)
    return WORLD.policy.hidden(model, asked, positions, jnp.ones_like(asked))[:, -1]


def offset(prompts: Array) -> Array:
    """A constant of each prompt within 3 of 0: Bradley-Terry leaves it open, so a scalar reward may have any.

    >>> import jax.numpy as jnp
    >>> [round(float(x), 3) for x in offset(jnp.array([[0, 0, 0, 0], [1, 2, 3, 0]]))]
    [0.0, 0.985]
    """
    weights = jnp.asarray([1.0, 3.0, 5.0, 7.0])
    return 3.0 * jnp.sin(2.3 * jnp.sum(prompts.astype(jnp.float32) * weights[None, :], axis=1))


def anchor_response(prompts: Array) -> Array:
    """A fixed answer to each prompt: every other token good, the others neutral; its true reward is 6."""
    column = jnp.arange(toy.RESPONSE_TOKENS, dtype=jnp.int32)[None, :]
    kind = jnp.where(column % 2 == 0, prompts[:, :1], (prompts[:, :1] + 2) % 4)
    return toy.FIRST + kind + 4 * (column % 5)


STRINGS = toy.STRINGS._replace(
    judging=toy.Judging(
        WORLD.policy, _hidden, WIDTH, (toy.VOCABULARY, toy.VOCABULARY + 1),
        # the same decoder as a model of single responses: what every judge was before it was one
        WORLD._replace(
            prompt_tokens=toy.PROMPT_TOKENS, response_tokens=toy.RESPONSE_TOKENS, end=toy.VOCABULARY + 3
        ),
        anchor_response, offset,
    )
)  # fmt: skip


def generated(task: Preferences, judge: Params, prompts: Array, first: Array, second: Array) -> Array:
    """Score of "the first": difference of the logits of the two verdict tokens, ``[N]``."""
    logits = task.judging.policy.unembed(judge["model"], task.judging.hidden(judge["model"], prompts, first, second))
    return logits[:, task.judging.verdicts[0]] - logits[:, task.judging.verdicts[1]]


def discriminated(task: Preferences, judge: Params, prompts: Array, first: Array, second: Array) -> Array:
    """The same from a linear head on the last hidden state."""
    hidden = task.judging.hidden(judge["model"], prompts, first, second)
    return heads.apply_head(judge["head"], hidden[:, None])[:, 0, 0]


def pairwise_terms(score: Callable[..., Array], params: Params, batch: toy.Pairs, consistency: float) -> Array:
    """The verdict loss of a pairwise score in both orders, ``[B]``."""
    prompts, won, lost = batch
    both = score(params, jnp.tile(prompts, (2, 1)), jnp.concatenate([won, lost]), jnp.concatenate([lost, won]))
    return verdict_loss(*jnp.split(both, 2), consistency=consistency).loss


def scalar_terms(score: Callable[..., Array], params: Params, batch: toy.Pairs, consistency: float) -> Array:
    """Bradley-Terry, ``[B]``: a difference of scalars has no order to be inconsistent about."""
    return -jax.nn.log_sigmoid(score(params, *batch))


def fit(
    task: Preferences,
    score: Callable[..., Array], terms: Callable[..., Array], model: Params, pairs: toy.Pairs, key: Key, *, steps: int,
    consistency: float, rows_per_step: int = 64,
) -> Params:  # fmt: skip
    """A judge ``{"model", "head"}`` that starts from a trained ``model`` and reads labelled pairs."""

    def loss(params, extras, batch):
        return reduce.scalars(terms(partial(score, task), params, batch, consistency)), {}

    first = {"model": model, "head": heads.init_head(task.judging.width, key, scale=task.judging.width**-0.5)}
    method = Offline(tabled, make_uniform(), rows_per_step, loss, optax.adam(task.world.rate or 2e-3))
    state = offline.init_state(method, first, jax.random.fold_in(key, 1), extras={"rows": pairs})
    return offline.scan_steps(method, state, steps)[0].params


def accuracy(task: Preferences, score: Callable[..., Array], judge: Params, key: Key) -> Metrics:
    """Accuracy in both orders and swap inconsistency on fresh pairs ordered by the true reward."""
    pairs = task.draw_pairs(key, 256)
    gap = task.gold_reward(pairs.prompts, pairs.chosen) - task.gold_reward(pairs.prompts, pairs.rejected)
    scores = score(task, judge, pairs.prompts, pairs.chosen, pairs.rejected)
    swapped = score(task, judge, pairs.prompts, pairs.rejected, pairs.chosen)
    right = 0.5 * (((scores > 0) == (gap > 0)).astype(jnp.float32) + ((swapped < 0) == (gap > 0)).astype(jnp.float32))
    off = jnp.abs(jax.nn.sigmoid(scores) + jax.nn.sigmoid(swapped) - 1.0)
    return {"judge/accuracy": reduce.scalars(right, gap != 0), "judge/inconsistency": reduce.scalars(off)}


def scalar(task: Preferences, judge: Params, prompts: Array, responses: Array) -> Array:
    """A Bradley-Terry reward at the last token, ``[N]``."""

    def read(prompts, responses):
        rows = strings.whole(task.judging.alone, prompts, responses)
        hidden = task.judging.policy.hidden(judge["model"], *rows)
        return heads.sequence_rewards(judge["head"], hidden, rows.segment_ids)

    return strings.in_pieces(task.judging.alone, read, prompts, responses)


def bradley_terry(task: Preferences, judge: Params, prompts: Array, first: Array, second: Array) -> Array:
    """A scalar reward model as a pairwise score: it has no position to prefer."""
    return scalar(task, judge, prompts, first) - scalar(task, judge, prompts, second)


KINDS = {  # name: score, its loss, weight of consistency
    "bt": (bradley_terry, scalar_terms, 0.0),
    "generative": (generated, pairwise_terms, 1.0),
    "no_consistency": (generated, pairwise_terms, 0.0),
    "discriminative": (discriminated, pairwise_terms, 1.0),
}


def make_judge(
    task: Preferences, kind: str, *, steps: int, pretrained_steps: int, draw_pairs: Callable, behaviour: Callable
) -> Callable:
    """``(key) -> judge``: all kinds start from one model of the behaviour and read the same 8192 labels."""
    score, terms, consistency = KINDS[kind]
    base = strings.make_base(task.judging.alone, behaviour, steps=pretrained_steps)

    def made(key):
        labels = draw_pairs(jax.random.fold_in(key, 10), 8192)
        sizes = {"steps": steps, "consistency": consistency}
        return fit(task, score, terms, base(jax.random.fold_in(key, 19)), labels, jax.random.fold_in(key, 20), **sizes)

    return made


def labelled(task: Preferences, key: Key, n: int) -> toy.Pairs:
    """Pairs of the behaviour with a tenth of the labels flipped."""
    return task.draw_pairs(key, n, flip_rate=0.1)


@lru_cache(maxsize=8)
def make_start(task: Preferences, kind: str, reference_steps: int, judge_steps: int):
    """The reference, the head of a critic, and the arm's judge."""
    base = preference_strings.make_start(task, reference_steps=reference_steps)
    judge = make_judge(
        task,
        kind,
        steps=judge_steps,
        pretrained_steps=reference_steps,
        draw_pairs=strings.bound(labelled, task),
        behaviour=task.draw_behaviour,
    )

    def init(key):
        value = heads.init_head(task.width, key)
        return base(key) | {"judge": judge(key), "value": value}

    return init


def measure(task: Preferences, judge: str, params, key):
    """The policy against the truth, its judge against the truth."""
    found = preference_strings.measure_parts(task, params, key, evaluated=preference_strings.evaluated(task))
    prompts = task.draw_prompts(jax.random.fold_in(key, 5), 256)
    drawn = strings.sample(task.world, params["policy"], prompts, jax.random.fold_in(key, 6))
    better = task.gold_reward(prompts, drawn) > task.gold_reward(prompts, task.judging.anchor_response(prompts))
    found["eval/beats_anchor"] = reduce.scalars(better.astype(jnp.float32))
    return found | accuracy(task, KINDS[judge][0], params["judge"], jax.random.fold_in(key, 7))
