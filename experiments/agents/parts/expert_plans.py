"""Plans of expert modules that restore a picture: the text names what was done to it, the plan undoes it in order.

The prompt ``.rbi>`` says: rotated, then blurred; wanted is the image. Damages are ``n`` (negative), ``r`` (rotated),
``s`` (shifted), ``b`` (blurred) and ``g`` (darkened); wanted are ``i`` (the image), ``c`` (a caption: the means of its
rows) or ``l`` (a label: the means of its columns). A plan is a chain of experts with names of two tokens and an end:
``ubur$`` sharpens, then turns back; ``tc`` and ``tl`` tell caption and label and give text, which no expert takes.

A plan runs on four pictures. Its score is ``(1 + r) / 2``, ``r`` the correlation of what it gives with what is wanted
from the undamaged picture; -1 for a plan that cannot be run or gives the wrong kind.
"""

import itertools
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.advantages.selection import best_members
from jaxrl_llm.rollout import grammar as grammars
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.types import Key, Params, Rewards, Trajectories

OWN_ROWS = "experiments.agents.parts.text_plans"  # opens ``Tasks`` of one's own
ALPHABET = ".nrsbgiclut>$"
DAMAGES, WANTED = "nrsbg", "icl"
EXPERTS = ("un", "ur", "us", "ub", "ug", "tc", "tl")  # the first five undo, the last two tell
MOST, SIDE, PICTURES = 4, 8, 4  # modules of a plan; pixels of a side; pictures of a task
END = ALPHABET.index("$")
WORLD = strings.make_world(len(ALPHABET), 5, 2 * MOST + 1, end=END, layers=2)
_BLUR = sum(w * np.roll(np.eye(SIDE), k, 1) for k, w in ((0, 0.6), (1, 0.2), (-1, 0.2)))
_SHARPEN = np.linalg.inv(_BLUR)


def encode(text: str) -> list[int]:
    """One token a character.

    >>> encode(".nr")
    [0, 1, 2]
    """
    return [ALPHABET.index(c) for c in text]


@lru_cache(maxsize=1)
def pictures() -> Float[np.ndarray, "N S S"]:
    """The undamaged pictures, in [0.1, 0.9]: three boxes of one brightness each before a slope."""
    rng, found = np.random.default_rng(2), []
    down, across = np.mgrid[0:SIDE, 0:SIDE] / (SIDE - 1)
    for _ in range(PICTURES):
        first, second = rng.uniform(0.05, 0.2, 2)
        picture = 0.2 + first * down + second * across
        for _ in range(3):
            high, wide = rng.integers(2, 5, 2)
            top, left = rng.integers(0, SIDE - high + 1), rng.integers(0, SIDE - wide + 1)
            picture[top : top + high, left : left + wide] = rng.uniform(0.1, 0.9)
        found.append(picture)
    return np.clip(found, 0.1, 0.9).astype(np.float32)


def _damaged(images: Array) -> Array:
    """Each damage done to ``[..., S, S]``: a new leading axis of 5."""
    turned, moved = jnp.rot90(images, 1, (-2, -1)), jnp.roll(images, 3, -1)
    return jnp.stack([1.0 - images, turned, moved, images @ jnp.asarray(_BLUR, jnp.float32), images**2])


def _undone(images: Array) -> Array:
    """What each of the five experts makes of it."""
    turned, moved = jnp.rot90(images, -1, (-2, -1)), jnp.roll(images, -3, -1)
    roots = jnp.sqrt(jnp.maximum(images, 0.0))
    return jnp.stack([1.0 - images, turned, moved, images @ jnp.asarray(_SHARPEN, jnp.float32), roots])


class Tasks(NamedTuple):
    """Tasks that chains of experts solve: those of ``RESTORED``, or one's own.

    ``prompts() -> (train, heldout)``; ``kept()`` is the grammar of plans whose kinds chain, ``loose()`` leaves it (None
    where any token may come); ``score(answers, rows)`` judges plans of training tasks, ``heldout_score`` those of
    held-out ones; ``base(settings)`` is the ``init`` of a plan, ``worked(shots)`` draws from so many worked plans;
    ``blind()`` is what the best plan scores that does not read its task.
    """

    world: strings.World
    prompts: Callable[[], tuple[Any, Any]]
    kept: Callable[[], grammars.Grammar]
    loose: Callable[[], grammars.Grammar | None]
    score: Callable[[Any, Trajectories], Rewards]
    heldout_score: Callable[[Any, Trajectories], Rewards]
    base: Callable[[Any], Callable[[Key], Params]]
    worked: Callable[[int], Callable[[Key, int], tuple[Array, Array]]]
    blind: Callable[[], float]


def grammar(task: Tasks) -> grammars.Grammar:
    """Decoding that keeps to plans whose kinds chain."""
    return task.kept()


def anything(task: Tasks) -> grammars.Grammar | None:
    """Decoding that may leave the grammar."""
    return task.loose()


@lru_cache(maxsize=1)
def _chained() -> grammars.Grammar:
    kinds = [("image", "image")] * len(DAMAGES) + [("image", "text")] * 2
    modules = [grammars.Module(tuple(encode(name)), *kind) for name, kind in zip(EXPERTS, kinds, strict=True)]
    return grammars.plan_grammar(modules, start="image", end=END, most=MOST)


@lru_cache(maxsize=1)
def _free() -> grammars.Grammar:
    return grammars.free(len(ALPHABET))


@lru_cache(maxsize=1)
def tasks() -> tuple[Int[np.ndarray, "N P"], Int[np.ndarray, "M P"]]:
    """``(train, heldout)`` prompts: all chains of one to three different damages with everything that can be wanted."""
    chains = [c for n in (1, 2, 3) for c in itertools.permutations(DAMAGES, n)]
    texts = ["".join(c).rjust(3, ".") + wanted + ">" for c in chains for wanted in WANTED]
    rows = np.asarray([encode(t) for t in texts], np.int32)[np.random.default_rng(0).permutation(len(texts))]
    return rows[64:], rows[:64]


def right_plan(prompt: np.ndarray) -> list[str]:
    """The experts that undo the damages, the last one first, and tell what is wanted.

    >>> right_plan(np.asarray(encode(".rbc>")))
    ['ub', 'ur', 'tc']
    """
    text = "".join(ALPHABET[i] for i in prompt)
    told = [] if text[3] == "i" else ["t" + text[3]]
    return ["u" + c for c in reversed(text[:3].replace(".", ""))] + told


def _written(plan: list[str]) -> list[int]:
    text = "".join(plan)[: 2 * MOST]
    return encode(text.ljust(2 * MOST + 1, "$"))


@lru_cache(maxsize=8)
def texts(count: int, skill: float, seed: int) -> tuple[Int[np.ndarray, "N P"], Int[np.ndarray, "N T"]]:
    """``(prompts, plans)`` of training tasks: each expert the right one by ``skill``, else any; ``skill=1`` solves.

    Below 1, one token in twenty is any token at all.
    """
    rng = np.random.default_rng(seed)
    train, _ = tasks()
    prompts = train[rng.permutation(len(train))[:count]] if skill == 1 else train[rng.integers(0, len(train), count)]
    plans = []
    for prompt in prompts:
        plan = [e if rng.random() < skill else EXPERTS[rng.integers(len(EXPERTS))] for e in right_plan(prompt)]
        plans.append(_written(plan))
    found = np.asarray(plans, np.int32)
    noise = (rng.random(found.shape) < 0.05 * (skill < 1)) & (found != END)
    return prompts, np.where(noise, rng.integers(0, END, found.shape), found).astype(np.int32)


@lru_cache(maxsize=8)
def make_draw(count: int, skill: float, seed: int):
    """The ``draw`` of ``strings.make_base`` from ``texts``."""
    prompts, plans = (jnp.asarray(x) for x in texts(count, skill, seed))

    def draw(key: Key, n: int) -> tuple[Array, Array]:
        ids = jax.random.randint(key, (n,), 0, prompts.shape[0], jnp.int32)
        return prompts[ids], plans[ids]

    return draw


def parsed(plans: Int[Array, "N T"]) -> tuple[Int[Array, "N M"], Bool[Array, " N"]]:
    """The experts of each plan by number, -1 behind its end, and whether it can be run: names, kinds, and an end."""
    table = np.full((len(ALPHABET), len(ALPHABET)), -1, np.int32)
    for i, name in enumerate(EXPERTS):
        table[tuple(encode(name))] = i
    there = jnp.cumsum((plans == END).astype(jnp.int32), axis=1) == 0
    first, second = (slice(k, 2 * MOST, 2) for k in (0, 1))
    found = jnp.asarray(table)[plans[:, first], plans[:, second]]
    named = (found >= 0) | ~there[:, first]
    told = (found >= len(DAMAGES)) & there[:, first]
    after = jnp.cumsum(told.astype(jnp.int32), axis=1) - told.astype(jnp.int32) > 0
    chains = jnp.all(~(after & there[:, first]), axis=1)  # nothing takes text
    # an odd number of tokens is caught by the names: the end is no second half of one
    fine = jnp.all(named, axis=1) & chains & there[:, 0] & ~there[:, -1]
    return jnp.where(there[:, first], found, -1), fine


def _alike(found: Array, wanted: Array) -> Array:
    """``(1 + correlation) / 2`` over the last axis."""
    one, other = (x - jnp.sum(x, axis=-1, keepdims=True) / x.shape[-1] for x in (found, wanted))
    sizes = jnp.sqrt(jnp.sum(one**2, axis=-1) * jnp.sum(other**2, axis=-1))
    return 0.5 + 0.5 * jnp.sum(one * other, axis=-1) / jnp.maximum(sizes, 1e-6)


def _told(images: Array) -> Array:
    """Everything that can be wanted of ``[N, S, S]``, in one size: the image, caption and label ``[3, N, S * S]``."""
    flat = images.reshape(*images.shape[:-2], -1)
    means = (jnp.repeat(jnp.sum(images, axis=axis) / SIDE, SIDE, axis=-1) for axis in (-1, -2))
    return jnp.stack([flat, *means])


def _run(prompt: Array, modules: Array) -> tuple[Array, Array]:
    clean = jnp.asarray(pictures())
    images = clean
    for k in range(3):
        done = prompt[k] - encode("n")[0]
        images = jnp.where(done >= 0, _damaged(images)[jnp.clip(done, 0, 4)], images)
    gives = jnp.int32(0)
    for k in range(MOST):
        module = modules[k]
        undoes = (module >= 0) & (module < len(DAMAGES))
        images = jnp.where(undoes, _undone(images)[jnp.clip(module, 0, 4)], images)
        gives = jnp.where(module >= len(DAMAGES), module - len(DAMAGES) + 1, gives)
    wanted = prompt[3] - encode("i")[0]
    alike = _alike(_told(images)[gives], _told(clean)[wanted])
    return jnp.sum(alike) / PICTURES, (gives > 0) == (wanted > 0)


def score(prompts: Int[Array, "N P"], plans: Int[Array, "N T"]) -> Float[Array, " N"]:
    """What each plan earns."""
    modules, fine = parsed(plans)
    found, kind = jax.vmap(_run)(prompts, modules)
    return jnp.where(fine & kind, found, -1.0)


@lru_cache(maxsize=1)
def every_plan() -> Int[np.ndarray, "N T"]:
    """All plans that chain, no expert twice."""
    undo, tell = EXPERTS[: len(DAMAGES)], EXPERTS[len(DAMAGES) :]
    chains = [chain for n in range(MOST + 1) for chain in itertools.permutations(undo, n)]
    found = [list(c) for c in chains if c] + [[*c, t] for c in chains if len(c) < MOST for t in tell]
    return np.asarray([_written(plan) for plan in found], np.int32)


@lru_cache(maxsize=1)
def blind_score() -> float:
    """What the best plans score on held-out tasks that know what is wanted and not what was done to the picture.

    One plan for each wanted kind, the best on the training tasks.
    """
    plans, (train, held) = every_plan(), tasks()
    with jax.core.eval_context():  # also while a program that uses it is traced
        each, total = jax.jit(score), 0.0
        for wanted in WANTED:
            here, there = (rows[rows[:, 3] == encode(wanted)[0]] for rows in (train, held))
            pairs = np.repeat(here, len(plans), axis=0), np.tile(plans, (len(here), 1))
            scores = np.asarray(each(*map(jnp.asarray, pairs))).reshape(len(here), len(plans))
            best = np.tile(plans[scores.mean(axis=0).argmax()], (len(there), 1))
            total += float(np.asarray(each(jnp.asarray(there), jnp.asarray(best))).sum())
    return total / held.shape[0]


RESTORED = Tasks(
    world=WORLD,
    prompts=tasks,
    kept=_chained,
    loose=_free,
    score=strings.score_of(WORLD, score),
    heldout_score=strings.score_of(WORLD, score),
    base=lambda settings: strings.make_base(WORLD, make_draw(4096, 0.5, 0), steps=settings.base_steps),
    worked=lambda shots: make_draw(shots, 1.0, 1),
    blind=blind_score,
)


@lru_cache(maxsize=8)
def _roller(task: Tasks, decoding: Callable[[Tasks], Any], samples: int) -> Callable[..., Trajectories]:
    """Compiled once where what is measured is no program of its own, which is so of text."""

    def roll(params, prompts, keys):
        return strings.rollout(task.world, params, prompts, keys, samples=samples, grammar=decoding(task))

    return roll if task.world.start is None else jax.jit(roll)


def measure(
    task: Tasks, decoding: Callable[[Tasks], Any], params: Params, key: Key, *, samples: int = 8
) -> dict[str, Array]:
    """Held-out tasks, of ``samples`` plans the most probable: its score, the share that can be run, that is right.

    Args:
      decoding: ``grammar`` or ``anything``.
    """
    with jax.core.eval_context():
        prompts = jnp.asarray(task.prompts()[1])
        rows_of = jnp.arange(prompts.shape[0], dtype=jnp.int32)
    rows = _roller(task, decoding, samples)(params, prompts, sample_keys(key, 0, rows_of, samples))
    earned = task.heldout_score({}, rows).value
    best = best_members(jnp.sum(rows.sampler_logp, axis=1), rows.group_ids)
    return {
        "eval/score": reduce.scalars(earned, best),
        "eval/above_blind": reduce.scalars(earned, best) - task.blind(),
        "eval/valid": reduce.scalars((earned >= 0).astype(jnp.float32), best),
        "eval/right": reduce.scalars((earned > 0.999).astype(jnp.float32), best),
    }
