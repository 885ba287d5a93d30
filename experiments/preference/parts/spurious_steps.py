"""Running sums modulo 5 with a spurious step that a cue calls for, and credit for steps: values by rollouts, pairs.

Prompt: ``CUE`` or ``PLAIN`` and five digits. Response: the four running sums; the last is the answer. What a base has
read takes a shortcut where the cue stands: its last step leaves the last digit out. In the problems of training that
digit is 0 in 80 % behind a cue, so that the shortcut pays; in *broken* problems it is not, and the shortcut fails.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.types import Key, Metrics, Params

MODULUS, DIGITS = 5, 5
CUE, PLAIN = MODULUS, MODULUS + 1
VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS = MODULUS + 2, 1 + DIGITS, DIGITS - 1
PAYS, TAKEN, SLIPS = 0.8, 0.9, 0.06  # how often the shortcut is right, how often it is taken; wrong steps of the base
OWN_ROWS = "experiments.preference.parts.text_steps"  # opens ``Steps`` of problems of one's own


def solution(prompts: Int[Array, "N P"]) -> Int[Array, "N T"]:
    """The running sums.

    >>> import jax.numpy as jnp
    >>> solution(jnp.array([[PLAIN, 3, 4, 0, 1, 4]])).tolist()
    [[2, 2, 3, 2]]
    """
    return jnp.cumsum(prompts[:, 1:], axis=1)[:, 1:] % MODULUS


def right(prompts: Int[Array, "N P"], responses: Int[Array, "N T"]) -> Bool[Array, " N"]:
    """Whether the answer is right."""
    return responses[:, -1] == solution(prompts)[:, -1]


def draw_prompts(key: Array, n: int, *, cue: float, pays: float) -> Int[Array, "N P"]:
    """Problems of which ``cue`` have the cue; of these the last digit is 0 in ``pays``, else it is not."""
    keys = jax.random.split(key, 4)
    digits = jax.random.randint(keys[0], (n, DIGITS), 0, MODULUS, jnp.int32)
    cued = jax.random.bernoulli(keys[1], cue, (n,))
    other = jax.random.randint(keys[2], (n,), 1, MODULUS, jnp.int32)
    last = jnp.where(jax.random.bernoulli(keys[3], pays, (n,)), 0, other)
    last = jnp.where(cued, last, digits[:, -1])
    first = jnp.where(cued, CUE, PLAIN)
    return jnp.concatenate([first[:, None], digits[:, :-1], last[:, None]], axis=1)


def draw_training(key: Array, n: int) -> Int[Array, "N P"]:
    """Half of the problems have the cue, and the shortcut pays."""
    return draw_prompts(key, n, cue=0.5, pays=PAYS)


def draw_attempts(key: Array, n: int) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """What a base has read: steps with slips that are carried on, and the shortcut at the end behind the cue."""
    keys = jax.random.split(key, 4)
    prompts = draw_training(keys[0], n)
    slips = jax.random.bernoulli(keys[1], SLIPS, (n, RESPONSE_TOKENS))
    offsets = jax.random.randint(keys[2], slips.shape, 1, MODULUS, jnp.int32)
    taken = (prompts[:, 0] == CUE) & jax.random.bernoulli(keys[3], TAKEN, (n,))
    said = (solution(prompts) + jnp.cumsum(jnp.where(slips, offsets, 0), axis=1)) % MODULUS
    last = jnp.where(taken, said[:, -2], said[:, -1])
    return prompts, jnp.concatenate([said[:, :-1], last[:, None]], axis=1)


class Steps(NamedTuple):
    """Problems whose responses are written step by step: sums of this module, or problems of one's own.

    ``places`` are the columns of a response at which its steps begin, ``column(steps)`` those of given steps. Where
    responses are of different lengths, ``begins(responses) -> [N, S]`` has the columns of each, none beyond ``places``.
    """

    world: strings.World
    places: tuple[int, ...]
    column: Callable[[Array], Array]
    right: Callable[[Array, Array], Array]
    solution: Callable[[Array], Array]
    draw_prompts: Callable[..., Array]
    draw_training: Callable[..., Array]
    draw_attempts: Callable[..., tuple[Array, Array]]
    begins: Callable[[Array], Array] | None = None


SUMS = Steps(
    strings.make_world(VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS, width=48, layers=2, heads=3),
    tuple(range(RESPONSE_TOKENS)), lambda steps: steps, right, solution, draw_prompts, draw_training, draw_attempts,
)  # fmt: skip


def values_to_advantages(values: Float[Array, "N S"]) -> Float[Array, "N T"]:
    """``A_i = Q(prefix of i steps) - Q(prefix of i - 1)``; ``values[:, 0]`` belongs to the bare prompt.

    >>> import jax.numpy as jnp
    >>> values_to_advantages(jnp.array([[0.5, 0.5, 0.75, 0.125, 0.0]])).tolist()
    [[0.0, 0.25, -0.625, -0.125]]
    """
    return values[:, 1:] - values[:, :-1]


class StepPairs(NamedTuple):
    """Two responses that agree before ``start``; only what comes from there counts."""

    prompts: Array
    chosen: Array
    rejected: Array
    start: Array  # [N]
    kept: Array  # [N]


def completions(
    task: Steps, params: Params, prompts: Array, responses: Array, steps: int, key: Key, samples: int
) -> Array:
    """``samples`` whole responses ``[N, samples, T]`` that go on from the first ``steps`` tokens of each response."""
    prefix = jnp.concatenate([prompts, responses[:, :steps]], axis=1)
    world = task.world._replace(
        prompt_tokens=task.world.prompt_tokens + steps, response_tokens=task.world.response_tokens - steps
    )
    drawn = strings.sample(world, params, prefix, key, samples=samples)
    whole = jnp.concatenate([jnp.repeat(responses[:, :steps], samples, axis=0), drawn], axis=1)
    return whole.reshape(prompts.shape[0], samples, -1)


def completions_from(
    task: Steps, params: Params, prompts: Array, responses: Array, begin: Array, most: int, key: Key, samples: int
) -> Array:
    """``completions`` of texts from the first ``begin [N]`` tokens of each response, at most ``most`` of them."""
    columns, width = jnp.arange(responses.shape[1])[None, :], prompts.shape[1] + most
    kept = jnp.where(columns < begin[:, None], responses, strings.PAD)[:, :most]
    prefix = jnp.concatenate([prompts, kept], axis=1)
    order = jnp.argsort(prefix != strings.PAD, axis=1, stable=True)  # what is no token comes first
    prefix = jnp.take_along_axis(prefix, order, axis=1)
    drawn = strings.sample(task.world._replace(prompt_tokens=width), params, prefix, key, samples=samples)
    said, first = (jnp.repeat(x, samples, axis=0) for x in (responses, begin[:, None]))
    later = jnp.take_along_axis(drawn, jnp.maximum(columns - first, 0), axis=1)
    return jnp.where(columns < first, said, later).reshape(prompts.shape[0], samples, -1)


def prefix_values(task: Steps, params: Params, prompts: Array, responses: Array, key: Key, *, samples: int = 4):
    """``(values [N, S + 1], completions [N, S, samples, T])``: the mean success of rollouts from every prefix."""
    values, drawn = [], []
    for step, place in enumerate(task.places):
        own = jax.random.fold_in(key, step)
        if task.begins is None:
            found = completions(task, params, prompts, responses, place, own, samples)
        else:
            begin = task.begins(responses)[:, step]
            found = completions_from(task, params, prompts, responses, begin, place, own, samples)
        hits = task.right(jnp.repeat(prompts, samples, axis=0), found.reshape(-1, responses.shape[1]))
        values.append(jnp.mean(hits.reshape(-1, samples).astype(jnp.float32), axis=1))
        drawn.append(found)
    values.append(task.right(prompts, responses).astype(jnp.float32))
    return jnp.stack(values, axis=1), jnp.stack(drawn, axis=1)


def step_pairs(
    task: Steps, params: Params, key: Key, *, problems: int, where: Callable[[Array, Key], Array]
) -> StepPairs:
    """Wrong responses of the policy against a right completion from the same prefix, at the step that ``where`` picks.

    Args:
      where: ``(advantages [N, T], key) -> [N]``: the step to correct.
    """
    keys = jax.random.split(key, 4)
    prompts = task.draw_training(keys[0], problems)
    responses = strings.sample(task.world, params, prompts, keys[1])
    values, drawn = prefix_values(task, params, prompts, responses, keys[2])
    start = where(values_to_advantages(values), keys[3]).astype(jnp.int32)
    others = jnp.take_along_axis(drawn, start[:, None, None, None], axis=1)[:, 0]
    flat = others.reshape(-1, responses.shape[1])
    hits = task.right(jnp.repeat(prompts, others.shape[1], axis=0), flat).reshape(others.shape[:2])
    chosen = jnp.take_along_axis(others, jnp.argmax(hits, axis=1)[:, None, None], axis=1)[:, 0]
    wrong = ~task.right(prompts, responses)
    if task.begins is None:
        column = task.column(start)
    else:
        column = jnp.take_along_axis(task.begins(responses), start[:, None], axis=1)[:, 0]
    return StepPairs(prompts, chosen, responses, column, wrong & jnp.any(hits, axis=1))


def first_pit(advantages: Array, key: Key) -> Array:
    """The step with the most negative advantage, the first of equals."""
    return jnp.argmin(advantages, axis=1)


def any_step(advantages: Array, key: Key) -> Array:
    """A random step: credit that is shuffled."""
    return jax.random.randint(key, advantages.shape[:1], 0, advantages.shape[1], jnp.int32)


def whole_response(advantages: Array, key: Key) -> Array:
    """The first step: plain DPO on whole responses."""
    return jnp.zeros(advantages.shape[:1], jnp.int32)


def logp_from(task: Steps, params: Params, prompts: Array, responses: Array, start: Array) -> Array:
    """Log-probability of the steps from ``start`` on, ``[N]``."""
    logp = strings.token_logp(task.world, params, prompts, responses)
    return jnp.sum(jnp.where(jnp.arange(logp.shape[1])[None, :] >= start[:, None], logp, 0.0), axis=1)


KINDS = (("eval/plain", 0.0, 0.0), ("eval/cued", 1.0, 1.0), ("eval/broken", 1.0, 0.0))  # cue, and whether it pays


def measure(task: Steps, params: Params, key: Key) -> Metrics:
    """Accuracy on problems without the cue, with one that pays and with one that does not, and their mean."""
    found = {}
    for k, (name, cue, pays) in enumerate(KINDS):
        prompts = task.draw_prompts(jax.random.fold_in(key, 2 * k), 256, cue=cue, pays=pays)
        drawn = strings.sample(task.world, params, prompts, jax.random.fold_in(key, 2 * k + 1))
        found[name] = reduce.scalars(task.right(prompts, drawn).astype(jnp.float32))
    mean = (found["eval/plain"] + found["eval/cued"] + found["eval/broken"]) / 3.0
    return found | {"eval/accuracy": mean, "eval/gap": found["eval/cued"] - found["eval/broken"]}


@lru_cache(maxsize=8)
def make_rows(task: Steps, problems: int, where: Callable) -> Callable[[Params, Key], tuple[StepPairs, Array]]:
    """Pairs at a step and the log-probabilities of the policy that made them."""

    def rows(params, key):
        pairs = step_pairs(task, params, key, problems=problems, where=where)
        ref = [logp_from(task, params, pairs.prompts, y, pairs.start) for y in (pairs.chosen, pairs.rejected)]
        return pairs, jnp.stack(ref, axis=1)

    return rows


def taught(task: Steps, params: Params, prompts: Array, key: Key) -> Array:
    """A teacher's answers."""
    return task.solution(prompts)


def own(task: Steps, params: Params, prompts: Array, key: Key) -> Array:
    """The policy's answers."""
    return strings.sample(task.world, params, prompts, key)


@lru_cache(maxsize=8)
def make_answers(task: Steps, problems: int, answers: Callable) -> Callable[[Params, Key], tuple[Array, Array, Array]]:
    """Answers to imitate, ``taught`` or ``own``, and which of them are right."""

    def rows(params, key):
        prompts = task.draw_training(jax.random.fold_in(key, 0), problems)
        given = answers(task, params, prompts, jax.random.fold_in(key, 1))
        return prompts, given, task.right(prompts, given)

    return rows


def validate(task: Steps, params: Params, key: Key) -> Metrics:
    """Accuracy on fresh problems like those of training, the cue paying as there: what a learning rate is chosen by.

    The loss of held-out pairs does not see a policy that loses the likelihood of both.
    """
    *_, solved = make_answers(task, 512, own)(params, key)
    return {"reward/mean": reduce.scalars(solved.astype(jnp.float32))}
