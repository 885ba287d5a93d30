"""Toy preferences whose responses differ in length, for judges that like long ones: a penalty, explorers, judges.

``END`` (30) ends a response; what is good is as in ``preference_task``, and people prefer longer responses by
``LIKING`` a token, which is worth nothing.
"""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from experiments.parts.preference_task import Preferences
from experiments.preference.parts import pair_judges
from jaxrl_llm import reduce
from jaxrl_llm.curriculum import pairs as pair_choice
from jaxrl_llm.types import Key, Metrics, Params

END, SHORTEST, LIKING = 30, 3, 0.5


def lengths(responses: Int[Array, "N T"]) -> Float[Array, " N"]:
    """Tokens before the end.

    >>> lengths(jnp.array([[4, 5, END, END], [4, 5, 6, 7]])).tolist()
    [2.0, 4.0]
    """
    return jnp.sum((jnp.cumsum((responses == END).astype(jnp.int32), axis=1) == 0).astype(jnp.float32), axis=1)


def truth(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Float[Array, " N"]:
    """The worth of what is said, a token of the *share* that is good, up to six of them: length alone earns nothing.

    ``6 (good - bad) / max(length, 1)``, bad and good as in ``preference_task.gold_reward``.

    >>> asked = jnp.array([[2, 0, 1, 3]])
    >>> [float(truth(asked, jnp.array([x]))[0]) for x in ([6, 10, END, END], [6, 5, 10, 4], [6, 10, 6, 10])]
    [6.0, 3.0, 6.0]
    """
    said = jnp.cumsum((responses == END).astype(jnp.int32), axis=1) == 0
    real = said & (responses >= toy.FIRST) & (responses != toy.STYLE)
    kinds = [jnp.sum((real & (responses % 4 == (prompts[:, :1] + k) % 4)).astype(jnp.float32), axis=1) for k in (0, 1)]
    return 6.0 * (kinds[0] - kinds[1]) / jnp.maximum(lengths(responses), 1.0)


def draw_responses(key: Key, prompts: Int[Array, "N P"]) -> Int[Array, "N T"]:
    """Those of ``preference_task`` without a style, cut after 3 to 12 tokens."""
    plain = toy.draw_responses(jax.random.fold_in(key, 0), prompts)
    plain = jnp.where(plain == toy.STYLE, toy.FIRST + (prompts[:, :1] + 2) % 4, plain)
    shape = (prompts.shape[0], 1)
    size = jax.random.randint(jax.random.fold_in(key, 1), shape, SHORTEST, toy.RESPONSE_TOKENS + 1, jnp.int32)
    return jnp.where(jnp.arange(toy.RESPONSE_TOKENS)[None, :] < size, plain, END)


def draw_behaviour(key: Key, n: int) -> tuple[Array, Array]:
    """Prompts and one response to each."""
    prompts = toy.draw_prompts(jax.random.fold_in(key, 0), n)
    return prompts, draw_responses(jax.random.fold_in(key, 1), prompts)


def draw_pairs(key: Key, n: int) -> toy.Pairs:
    """Labels of people: Bradley-Terry on the truth plus ``LIKING`` a token, a tenth flipped."""
    keys = jax.random.split(key, 4)
    prompts = toy.draw_prompts(keys[0], n)
    first, second = draw_responses(keys[1], prompts), draw_responses(keys[2], prompts)
    gap = truth(prompts, first) - truth(prompts, second) + LIKING * (lengths(first) - lengths(second))
    wins = (jax.random.uniform(keys[3], (n,)) < 0.8 * jax.nn.sigmoid(gap) + 0.1)[:, None]
    return toy.Pairs(prompts, jnp.where(wins, first, second), jnp.where(wins, second, first))


def liked(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Float[Array, " N"]:
    """What people go by: the truth plus ``LIKING`` a token."""
    return truth(prompts, responses) + LIKING * lengths(responses)


STRINGS = pair_judges.STRINGS._replace(
    world=toy.STRINGS.world._replace(end=END), gold_reward=truth, liked=liked, lengths=lengths,
    draw_responses=draw_responses, draw_behaviour=draw_behaviour, draw_pairs=draw_pairs,
)  # fmt: skip


@lru_cache(maxsize=8)
def make_start(
    task: Preferences, kind: str, *, reference_steps: int, reward_steps: int
) -> Callable[[Key], dict[str, Params]]:
    """Policy, reference and a judge of ``kind`` (``bt``: a scalar reward; ``generative``: of pairs) of 8192 labels."""
    base = strings.make_base(task.world, task.draw_behaviour, steps=reference_steps)
    judge = pair_judges.make_judge(
        task,
        kind,
        steps=reward_steps,
        pretrained_steps=reference_steps,
        draw_pairs=task.draw_pairs,
        behaviour=task.draw_behaviour,
    )

    def init(key):
        reference = base(key)
        return {"policy": reference, "reference": jax.tree.map(jnp.copy, reference), "judge": judge(key)}

    return init


def penalised(
    task: Preferences, scores: Float[Array, "P K"], responses: Int[Array, "P K T"], *, weight: float
) -> Float[Array, "P K"]:
    """``r(x, y) - weight |y|``.

    From "RLHF Workflow: From Reward Modeling to Online RLHF", arXiv:2405.07863, section 3.2.

    >>> from experiments.parts.preference_task import STRINGS
    >>> task = STRINGS._replace(lengths=lengths)
    >>> penalised(task, jnp.array([[1.0, 2.0]]), jnp.array([[[4, END, END], [4, 5, 6]]]), weight=0.5).tolist()
    [[0.5, 0.5]]
    """
    size = task.lengths(responses.reshape(-1, responses.shape[2])).reshape(scores.shape)
    return scores - weight * size


def by_scalar(
    task: Preferences, judge: Params, prompts: Int[Array, "P N"], drawn: Int[Array, "P K T"]
) -> Float[Array, "P K"]:
    """The reward of each response."""
    p, k, t = drawn.shape
    return pair_judges.scalar(task, judge, jnp.repeat(prompts, k, axis=0), drawn.reshape(p * k, t)).reshape(p, k)


def by_round_robin(
    task: Preferences, judge: Params, prompts: Int[Array, "P N"], drawn: Int[Array, "P K T"]
) -> Float[Array, "P K"]:
    """How many of the others each response beats by the pairwise judge, both orders heard."""
    p, k, t = drawn.shape
    first = jnp.repeat(drawn, k, axis=1).reshape(p * k * k, t)
    second = jnp.tile(drawn, (1, k, 1)).reshape(p * k * k, t)
    said = pair_judges.generated(task, judge, jnp.repeat(prompts, k * k, axis=0), first, second)
    return pair_choice.round_robin_wins(jax.nn.sigmoid(said).reshape(p, k, k))


def own_samples(task: Preferences, params: dict[str, Params], prompts: Array, key: Key, samples: int) -> Array:
    """All candidates from the policy of the moment, ``[P, K, T]``."""
    drawn = strings.sample(task.world, params["policy"], prompts, key, samples=samples)
    return drawn.reshape(prompts.shape[0], samples, -1)


def explored(task: Preferences, params: dict[str, Params], prompts: Array, key: Key, samples: int) -> Array:
    """Candidates of several explorers in equal shares: the policy, cooler and hotter, and the first checkpoint.

    From arXiv:2405.07863, section 3.1 (exploration by temperatures and by older checkpoints).

    Raises:
      ValueError: for a number of samples that four do not divide.
    """
    who = (("policy", 1.0), ("policy", 0.7), ("policy", 1.3), ("reference", 1.0))
    if samples % len(who):
        raise ValueError(f"samples={samples} must be a multiple of {len(who)}, the number of explorers")
    share = samples // len(who)
    parts = [
        strings.sample(task.world, params[name], prompts, jax.random.fold_in(key, k), samples=share, temperature=warmth)
        for k, (name, warmth) in enumerate(who)
    ]
    return jnp.concatenate([x.reshape(prompts.shape[0], share, -1) for x in parts], axis=1)


def measure(task: Preferences, params: dict[str, Params], key: Key) -> Metrics:
    """Truth and length of samples on fresh prompts, their distance to the reference, and the judge on fresh pairs."""
    number = preference_strings.evaluated(task)
    prompts = jnp.repeat(task.draw_prompts(jax.random.fold_in(key, 0), number), 4, axis=0)
    drawn = strings.sample(task.world, params["policy"], prompts[::4], jax.random.fold_in(key, 1), samples=4)
    return {
        "eval/gold": reduce.scalars(task.gold_reward(prompts, drawn)),
        "eval/length": reduce.scalars(task.lengths(drawn)),
        "eval/kl": strings.drift(task.world, params["policy"], params["reference"], prompts, drawn),
    }


def judge_accuracy(task: Preferences, score: Callable, params: dict[str, Params], key: Key) -> Metrics:
    """``judge/accuracy`` on fresh pairs by what people like, which the judge was to learn."""
    keys = jax.random.split(key, 3)
    prompts = task.draw_prompts(keys[0], 256)
    both = task.draw_responses(keys[1], prompts), task.draw_responses(keys[2], prompts)
    worth = [task.liked(prompts, x) for x in both]
    right = (score(task, params["judge"], prompts, *both) > 0) == (worth[0] > worth[1])
    return {"judge/accuracy": reduce.scalars(right.astype(jnp.float32), worth[0] != worth[1])}
