"""Arenas: a world of turns, a decoder made on the spot, a base that imitates a scripted behaviour, a measurement.

Everything is compiled, so that all arms and seeds of an experiment over episodes take minutes. A behaviour is a
function ``behave(state, key) -> action [A]`` of one state of the world.
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from experiments.agents.parts import swapped_weights
from experiments.parts import strings
from jaxrl_llm import reduce
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.rollout.turns import multi_turn
from jaxrl_llm.train import offline, seed_axis
from jaxrl_llm.train.methods import episode_methods
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.plan import Setup, tabled
from jaxrl_llm.types import Key, Params, Policy, Problems, Rewards, Trajectories


# compared by identity: an arena is made once, and caches of what is built on it find it by itself
@dataclasses.dataclass(frozen=True, eq=False)
class Arena:
    """A world of episodes with tasks that are trained on and tasks that are not."""

    policy: Policy
    env: multi_turn.Env
    train: Problems
    heldout: Problems
    turns: int  # at most, in one episode
    behave: Callable[[Any, Key], Array]
    end_ids: tuple[int, ...] = ()  # tokens that end an action before it has full length

    @property
    def new_tokens(self) -> int:
        """Columns after the prompt that always suffice."""
        return self.turns * (self.env.action_tokens + self.env.observation_tokens)

    def slots(self, group_size: int) -> dict[str, Any]:
        """What ``episode_methods.learned_from_episodes`` takes from an embedded env: its compiled rollout."""
        rollout = arena_episodes(self, self.train, group_size=group_size)
        return {"rollout": rollout, "whole_batch": "its world is embedded and small"}


@lru_cache(maxsize=32)
def _decoder(words: int, prompt: int, new: int, layers: int) -> Policy:
    return strings.make_world(words, prompt, new, layers=layers).policy


def make_arena(
    env: multi_turn.Env, train: Problems, heldout: Problems, behave: Callable[[Any, Key], Array], *, words: int,
    turns: int, layers: int = 2, end_ids: tuple[int, ...] = (),
) -> Arena:  # fmt: skip
    """A world of episodes with a decoder made on the spot, which has room for its prompts and all its turns.

    Worlds of one size share the decoder, and with it what is compiled of it.

    Args:
      words: of the alphabet.
      behave: what a base imitates, ``behave(state, key) -> action [A]``.
    """
    room = turns * (env.action_tokens + env.observation_tokens)
    policy = _decoder(words, train.tokens.shape[1], room, layers)
    return Arena(policy, env, train, heldout, turns, behave, end_ids)


def drawn_apart(
    draw: Callable[[int, int], Problems], identify: Callable[[Problems], np.ndarray], *, train: int, heldout: int
) -> tuple[Problems, Problems]:
    """Tasks to train on, and tasks to be measured on that ask nothing which any of the others asks.

    Of all that may be asked a hash holds a fifth back, whoever draws it: two draws from a small space would share much.

    Args:
      draw: ``(count, seed) -> tasks``; one seed for each of the two tables.
      identify: what a task asks, as one number: tasks that ask the same have the same.

    Raises:
      ValueError: where sixteen draws for each task do not give enough.
    """
    tables = []
    with jax.ensure_compile_time_eval():  # also where what uses the tables is traced
        for seed, (count, back) in enumerate(((train, False), (heldout, True))):
            drawn = draw(16 * count, seed)
            tables.append(first_of(drawn, held_by_hash(identify(drawn)) == back, count))
    return tables[0], tables[1]


def held_by_hash(numbers: Int[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
    """Whether what a number stands for is held back for the measurement, which one in five is."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
    return mixed % np.uint64(5) == 0


def first_of(drawn: Problems, wanted: Bool[np.ndarray, " N"], count: int) -> Problems:
    """The first ``count`` of the tasks that are wanted.

    Raises:
      ValueError: where there are fewer.
    """
    rows = np.flatnonzero(wanted)[:count]
    if len(rows) < count:
        raise ValueError(f"{len(rows)} of {len(wanted)} draws are of the part of which {count} are wanted")
    return jax.tree.map(lambda x: x[rows], drawn)


def skilled(
    expert: Callable[[Any], Array], anything: Callable[[Key], Array], skill: float
) -> Callable[[Any, Key], Array]:
    """A behaviour that acts as the expert with the chance ``skill``, and else does anything."""

    def behave(state: Any, key: Key) -> Array:
        wise, other = jax.random.split(key)
        return jnp.where(jax.random.uniform(wise) < skill, expert(state), anything(other)).astype(jnp.int32)

    return behave


def shortened(arena: Arena, turns: int) -> Arena:
    """The same world and decoder with episodes of ``turns`` turns at most.

    Raises:
      UserError: for more turns than the decoder has room for.
    """
    if not 1 <= turns <= arena.turns:
        raise UserError(f"--turns {turns} must lie in [1, {arena.turns}], the turns that this world has room for")
    # the same arena where nothing changes, so that what was made for it is found again
    return arena if turns == arena.turns else dataclasses.replace(arena, turns=turns)


def arena_episodes(arena: Arena, problems: Problems, *, group_size: int, temperature: float = 1.0):
    """Episodes of tasks of one table, in the form that is fast for many seeds (see ``train.seed_axis``)."""
    return multi_turn.make_episodes(
        arena.policy, arena.env, problems.answers, group_size=group_size, max_turns=arena.turns,
        max_new_tokens=arena.new_tokens, end_ids=arena.end_ids, temperature=temperature, early_exit=seed_axis.in_turn(),
    )  # fmt: skip


def trained_episodes(arena: Arena, settings: Any) -> Callable[..., Trajectories]:
    """Groups of episodes of training tasks as ``settings.trained(rows, prompt_tokens=...)`` shows them to the loss."""
    played = arena_episodes(arena, arena.train, group_size=settings.group_size)

    def rollout(params: Params, tokens: Array, *rest: Any) -> Trajectories:
        return settings.trained(played(params, tokens, *rest), prompt_tokens=tokens.shape[1])

    return rollout


def swapping_actor(arena: Arena, *, lag: int, group_size: int) -> dict[str, Callable]:
    """Slots of ``Online``: weights are swapped while episodes run, from those of ``lag`` updates ago to the newest.

    They change after equal numbers of columns, so that a long episode comes from several versions. The rows say of each
    token how old its weights are, see ``swapped_weights``; the stage's ``extras`` are ``recipes.lagged_extras(lag)``.
    """
    slots, policy = recipes.lagged_actor(lag), arena.policy
    version_of = partial(
        swapped_weights.in_even_parts, first=arena.train.tokens.shape[1], columns=arena.new_tokens, versions=lag + 1
    )
    if lag:
        slots["actor"] = recipes.behaviour_of  # all versions, oldest first
        policy = swapped_weights.swapping_policy(policy, version_of)
    play = arena_episodes(dataclasses.replace(arena, policy=policy), arena.train, group_size=group_size)
    return slots | {"rollout": lambda *given: swapped_weights.with_staleness(play(*given), version_of, lag)}


def make_heldout(arena: Arena, *, samples: int, part: str = "") -> Callable[[Params, Key], Trajectories]:
    """``(params, key) -> episodes``: ``samples`` of every held-out task, side by side.

    Args:
      part: where the policy lies in the parameters, if they hold more.
    """
    held = arena.heldout
    rollout = arena_episodes(arena, held, group_size=samples)

    def episodes_of(params, key):
        ids = jnp.arange(held.tokens.shape[0], dtype=jnp.int32)
        model = params[part] if part else params
        return rollout(model, held.tokens, held.valid, sample_keys(key, 0, ids, samples), ids)

    return episodes_of


def play(arena: Arena, key: Key, rows: int) -> Trajectories:
    """``rows`` episodes of training tasks played by the behaviour."""
    env, problems = arena.env, arena.train
    ends = jnp.asarray(arena.end_ids, jnp.int32)
    ids = jax.random.randint(key, (rows,), 0, problems.tokens.shape[0], jnp.int32)

    def one(key: Key, task: Any):
        def turn(carry, k):
            state, alive = carry
            action = arena.behave(state, jax.random.fold_in(key, k + 1)).astype(jnp.int32)
            ended = jnp.any(action[:, None] == ends[None, :], axis=1).astype(jnp.int32)
            acted = jnp.cumsum(ended) - ended == 0  # up to the first end token
            answer = env.step(state, action, jnp.sum(acted.astype(jnp.int32)))
            shown = jnp.arange(env.observation_tokens, dtype=jnp.int32) < answer.count
            tokens = jnp.concatenate([action, answer.tokens.astype(jnp.int32)])
            used = jnp.concatenate([acted & alive, shown & alive & ~answer.done])
            return (answer.state, alive & ~answer.done), (tokens, used)

        start = env.reset(jax.random.fold_in(key, 0), task), jnp.ones((), bool)
        (_, unfinished), (tokens, used) = jax.lax.scan(turn, start, jnp.arange(arena.turns, dtype=jnp.int32))
        acting = jnp.arange(tokens.shape[1], dtype=jnp.int32) < env.action_tokens
        acting = jnp.broadcast_to(acting[None, :], tokens.shape).reshape(-1)
        # what was not said leaves no gap
        order = jnp.argsort(~used.reshape(-1), stable=True)
        return tokens.reshape(-1)[order], used.reshape(-1)[order], acting[order], unfinished

    keys = jax.random.split(jax.random.fold_in(key, 1), rows)
    tokens, used, acting, unfinished = jax.vmap(one)(keys, jax.tree.map(lambda x: x[ids], problems.answers))
    prompts, there = problems.tokens[ids], problems.valid[ids]
    used = jnp.concatenate([there, used], axis=1)
    mask = jnp.concatenate([jnp.zeros_like(there), acting], axis=1)
    count = jnp.cumsum(used.astype(jnp.int32), axis=1)
    return Trajectories(
        tokens=jnp.where(used, jnp.concatenate([prompts, tokens], axis=1), 0),
        segment_ids=used.astype(jnp.int32),
        positions=jnp.where(used, count - 1, 0),
        mask=mask & used,
        sampler_logp=jnp.zeros(mask.shape, jnp.float32),
        truncated=unfinished,
        group_ids=jnp.arange(rows, dtype=jnp.int32),
        problem_ids=ids,
    )


@lru_cache(maxsize=16)
def make_base(
    arena: Arena,
    *,
    steps: int,
    table: int = 1024,
    rows_per_step: int = 64,
    learning_rate: float = 3e-3,
    played: Callable[[Arena, Key, int], Trajectories] = play,
) -> Callable[[Key], Params]:
    """The ``init`` of a plan: a decoder that imitates the behaviour's actions. Every arm starts from it.

    Args:
      played: the episodes to imitate, ``table`` of them.
    """

    def loss(params, extras, rows):
        logp, _ = score_tokens(arena.policy, params, rows)
        value = -reduce.tokens(jnp.where(rows.mask, logp, 0.0), rows.mask)
        return value, {"tokens/trained": jnp.sum(rows.mask.astype(jnp.float32))}

    method = Offline(tabled, make_uniform(), rows_per_step, loss, optax.adam(learning_rate))

    def init(key):
        first, data, run = jax.random.split(key, 3)
        state = offline.init_state(method, arena.policy.init(first), run, extras={"rows": played(arena, data, table)})
        return offline.scan_steps(method, state, steps)[0].params

    return init


@lru_cache(maxsize=16)
def make_valued_base(arena: Arena, *, steps: int) -> Callable[[Key], Params]:
    """``with_value`` of a base: the ``init`` of a plan that trains with a critic."""
    base = make_base(arena, steps=steps)
    return lambda key: episode_methods.with_value(base(key), key)


def of_episodes(held: Problems, rows: Trajectories) -> dict[str, Array]:
    """The share of episodes that succeeds, their turns, reward, distinct situations.

    ``eval/turns`` counts those of successes; ``eval/revisits`` is the share of turns in a situation seen before,
    ``eval/moved`` that of turns which changed it.
    """
    return episode_methods.figures(rows)


def measure(
    arena: Arena,
    params: Params,
    key: Key,
    *,
    samples: int,
    part: str = "",
    figures: Callable[[Problems, Trajectories], dict[str, Array]] = of_episodes,
    more: Callable[[Trajectories, Rewards], dict[str, Array]] | None = None,
) -> dict[str, Array]:
    """``samples`` episodes of every held-out task, as figures; ``strings.bound`` makes it the ``measure`` of a plan.

    Args:
      part: where the policy lies in the parameters, if they hold more.
      figures: of the held-out tasks and their episodes, samples of a task side by side; like ``more`` a function that
        is made once, so that arms share the program.
      more: further figures of the same episodes and their rewards.
    """
    rows = make_heldout(arena, samples=samples, part=part)(params, key)
    found = figures(arena.heldout, rows)
    return found if more is None else found | more(rows, multi_turn.episode_rewards({}, rows))


def make_setup(
    arena: Arena,
    *,
    steps: int,
    valued: bool = False,
    slots: dict[str, Any] | None = None,
    **measured: Any,
) -> Setup:
    """An arena as the setup of an experiment: a base of so many steps, and ``measure`` with ``measured`` bound.

    Args:
      valued: with the value head of a critic beside the policy, which is then the part ``model``.
      slots: of the method here, in the place of the arena's.
    """
    base = (make_valued_base if valued else make_base)(arena, steps=steps)
    found = strings.bound(measure, arena, part="model" if valued else "", **measured)
    return Setup(arena, base, found, slots=slots or {})


def answer_chances(arena: Arena, params: Params, rows: Trajectories, answers: Int[Array, " B"]) -> Float[Array, "B K"]:
    """The probability of one token, the right answer, before each action of one token; 0 where none was taken."""
    hidden = arena.policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids)
    turns = multi_turn.turns_of(rows)
    before = jnp.maximum(turns.end - 1, 0)[:, :, None]
    logp = jax.nn.log_softmax(arena.policy.unembed(params, jnp.take_along_axis(hidden, before, axis=1)), axis=2)
    index = jnp.broadcast_to(answers[:, None, None], before.shape)
    chance = jnp.exp(jnp.take_along_axis(logp, index, axis=2)[:, :, 0])
    return jax.lax.stop_gradient(jnp.where(turns.taken, chance, 0.0))
