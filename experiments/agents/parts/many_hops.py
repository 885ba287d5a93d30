"""The questions of ``toy_multihop`` with one to five hops, made from short ones, and an answer that refuses them.

A question of one hop grows by injection: the entity that it starts from is replaced by a description, "the x of b",
which implies it alone, so that the answer stays and one hop comes in front. ``!..`` answers that the question is
invalid, which none of them is.
"""

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.agents.parts import multi_hop
from experiments.agents.parts.arena import Arena, make_arena, make_heldout
from experiments.agents.parts.multi_hop import ALPHABET, ANSWER, DOT, ENTITY, RELATIONS, SEARCH
from jaxrl_llm import reduce
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rollout.turns.multi_turn import turns_of
from jaxrl_llm.types import Key, Params, Problems, Rewards, Trajectories

HOPS, MANY, TURNS = 5, 4, 8  # at most; from here on it is many; actions of an episode


def injected(task: dict[str, Array], relation: Int[Array, ""]) -> dict[str, Array]:
    """The question with its first entity replaced by "the ``relation`` of", one hop more and the same answer.

    The last place of the table of relations must be free. From "Beyond Ten Turns: Unlocking Long-Horizon Agentic Search
    with Large-Scale Asynchronous RL", arXiv:2508.07976, section 3 (injection). Differs from the paper in that the
    description is one fact, which holds of one entity by the making of the documents; there a language model checks it.
    """
    subject = jnp.argmax(task["objects"][relation] == task["start"]).astype(jnp.int32)
    relations = jnp.concatenate([relation[None].astype(jnp.int32), task["relations"][:-1]])
    return task | {"start": subject, "relations": relations, "hops": task["hops"] + 1}


def problems(count: int, seed: int, hops: tuple[int, ...]) -> Problems:
    """Questions of one hop, each made longer until it has its number of ``hops``, these in turn."""
    short = multi_hop.problems(count, seed, (1,), most=HOPS)
    wanted = jnp.asarray(np.resize(hops, count), jnp.int32)
    drawn = jnp.asarray(np.random.default_rng(seed + 1000).integers(0, RELATIONS, (count, HOPS - 1)), jnp.int32)

    def grown(task: dict[str, Array], relations: Array, number: Array) -> tuple[dict[str, Array], Array]:
        for k in range(HOPS - 1):
            longer, more = injected(task, relations[k]), task["hops"] < number
            task = {name: jnp.where(more, longer[name], x) for name, x in task.items()}
        return task, multi_hop.prompt(task)

    answers, tokens = jax.jit(jax.vmap(grown))(short.answers, drawn, wanted)
    return Problems(tokens, jnp.ones(tokens.shape, bool), answers, answers["hops"])


def refuses(actions: Int[Array, "... 3"]) -> Bool[Array, "..."]:
    """The answer that the question is invalid."""
    return (actions[..., 0] == ANSWER) & jnp.all(actions[..., 1:] == DOT, axis=-1)


def well_formed(actions: Int[Array, "... 3"]) -> Bool[Array, "..."]:
    """A search, an answer, or a refusal."""
    return multi_hop.well_formed(actions) | refuses(actions)


def search_rewards(
    score: Float[Array, " B"], formed: Bool[Array, " B"], refused: Bool[Array, " B"], *, refused_reward: float = -0.5
) -> Float[Array, " B"]:
    """``score`` where every turn is well formed, else 0; ``refused_reward`` for calling a good question invalid.

    From arXiv:2508.07976 and its published code.

    >>> import jax.numpy as jnp
    >>> formed, refused = jnp.array([True, False, True]), jnp.array([False, False, True])
    >>> [round(float(x), 4) for x in search_rewards(jnp.array([0.8, 0.8, 0.0]), formed, refused)]
    [0.8, 0.0, -0.5]
    """
    return jnp.where(refused, refused_reward, shaping.graded_rewards(score, formed, wrong_reward=0.0))


def score(tasks: dict[str, Array], rows: Trajectories) -> Rewards:
    """The ``score`` of episodes: F1 of the answer, and ``search_rewards``."""
    played, found = multi_hop.read(tasks, rows, well_formed), turns_of(rows)
    refused = found.done & jnp.any(refuses(multi_hop.actions_of(rows, found)), axis=1)
    return Rewards(search_rewards(played.f1, played.formed, refused), found.valid)


def make_behaviour(skill: float) -> Callable[[multi_hop.Question, Key], Array]:
    """Acts as it should with this chance; else searches or answers anything, refuses, or breaks the form."""

    def behave(state: multi_hop.Question, key: Key) -> Array:
        wise, kind, content = jax.random.split(key, 3)
        chance, words = jax.random.uniform(kind), jax.random.randint(content, (2,), ENTITY, len(ALPHABET))
        first = jnp.where(chance < 0.5, SEARCH, jnp.where(chance < 0.9, ANSWER, DOT))
        rest = jnp.where((chance >= 0.7) & (chance < 0.9), DOT, words)
        other = jnp.concatenate([first[None], rest]).astype(jnp.int32)
        return jnp.where(jax.random.uniform(wise) < skill, multi_hop.next_action(state), other)

    return behave


@lru_cache(maxsize=2)
def make_many_hops(*, skill: float = 0.7) -> Arena:
    """A decoder of two layers, 512 questions of one to five hops to train on, and 60 that are not."""
    env = multi_hop.make_env()
    every = tuple(range(1, HOPS + 1))
    tasks = problems(512, 0, every), problems(60, 1, every)
    return make_arena(env, *tasks, make_behaviour(skill), words=len(ALPHABET), turns=TURNS)


def measure(
    arena: Arena, params: Params, key: Key, *, samples: int, more: Callable[[Array, Key], dict[str, Array]]
) -> dict[str, Array]:
    """``samples`` episodes of every held-out question: F1, exact answers, form and searches, also of many hops.

    Args:
      more: further figures, of the number of turns of each episode; arms with the same function share the program.
    """
    heldout = make_heldout(arena, samples=samples)
    held, rows = arena.heldout, heldout(params, key)
    played = multi_hop.read(jax.tree.map(lambda x: x[rows.problem_ids], held.answers), rows, well_formed)
    figures = {name: x.astype(jnp.float32) for name, x in played._asdict().items()}
    many = held.level[rows.problem_ids] >= MANY
    shown = {f"eval/{name}": reduce.scalars(x) for name, x in figures.items()}
    shown |= {f"eval/{name}_many": reduce.scalars(figures[name], many) for name in ("f1", "exact", "searches")}
    turns = jnp.sum(turns_of(rows).taken.astype(jnp.int32), axis=1)
    return shown | more(turns, jax.random.fold_in(key, 1))
