"""Training on groups of earlier rollouts: a ring of the newest groups, drawn by chance in the place of fresh ones."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.cache import EXPERTS
from jaxrl_llm.train.refill import Pool, empty_pool
from jaxrl_llm.types import Batch, Key, Params, Rewards, TrainState, Trajectories

REPLAY = "replay"  # its name in ``state.extras``


class Replayed(NamedTuple):
    """Extras of a batch: 1 where a row is of a stored group."""

    replayed: Array


class Replay(NamedTuple):
    """The newest ``C`` groups; ``pool.kept`` is True where one has been written."""

    pool: Pool
    cursor: Int[Array, ""]  # the group that is overwritten next
    key: Key


def empty_replay(groups: int, group_size: int, width: int, key: Key) -> Replay:
    """A ring of ``groups`` groups of sequences of ``width`` columns, nothing in it."""
    if groups < 1:
        raise ValueError(f"groups={groups} must be at least 1")
    return Replay(empty_pool(groups * group_size, width), jnp.zeros((), jnp.int32), key)


def _grouped(tree: Any, group_size: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, group_size, *x.shape[1:]), tree)


def _flat(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def stored(replay: Replay, trajectories: Trajectories, rewards: Rewards, group_size: int) -> Replay:
    """With the groups of a rollout in the place of the oldest ones.

    Raises:
      ValueError: for more groups than the ring holds.
    """
    bare = trajectories._replace(extras=replay.pool.trajectories.extras)  # what waits has none
    fresh = _grouped(Pool(bare, rewards, jnp.ones_like(rewards.valid)), group_size)
    ring = _grouped(replay.pool, group_size)
    count, size = fresh.kept.shape[0], ring.kept.shape[0]
    if count > size:
        raise ValueError(f"a rollout has {count} groups and the replay holds {size}; make it larger")
    places = (replay.cursor + jnp.arange(count, dtype=jnp.int32)) % size
    pool = _flat(jax.tree.map(lambda old, new: old.at[places].set(new), ring, fresh))
    return Replay(pool, (replay.cursor + count) % size, jax.random.fold_in(replay.key, 1))


def group_weights(pool: Pool, group_size: int, inverse_temperature: float) -> Float[Array, " C"]:
    """Log-weights of stored groups: ``inverse_temperature * mean reward``, minus infinity for empty places."""
    value = jnp.mean(pool.rewards.value.reshape(-1, group_size), axis=1)
    there = jnp.all(pool.kept.reshape(-1, group_size), axis=1)
    return jnp.where(there, inverse_temperature * value, -jnp.inf)


def signatures(trajectories: Trajectories) -> Int[Array, "B 2"]:
    """Two 32-bit hashes of the response tokens of every row, in their order; equal responses have equal ones."""
    order = jnp.where(trajectories.mask, jnp.cumsum(trajectories.mask.astype(jnp.int32), axis=1), 0)
    width = trajectories.tokens.shape[1] + 1
    tokens = jnp.where(trajectories.mask, trajectories.tokens + 1, 0).astype(jnp.uint32)
    found = []
    for k in (3, 5):  # sums of products with fixed numbers of each place, modulo 2^32
        factor = jax.random.bits(jax.random.key(k), (width,), jnp.uint32) | jnp.uint32(1)
        found.append(jnp.sum(tokens * factor[order], axis=1, dtype=jnp.uint32))
    return jax.lax.bitcast_convert_type(jnp.stack(found, axis=1), jnp.int32)


def first_of_equals(pool: Pool) -> Bool[Array, " R"]:
    """Rows of the pool that are no copy, of the same prompt, of a row before them; none of an empty place."""
    marks, problems = signatures(pool.trajectories), pool.trajectories.problem_ids
    same = jnp.all(marks[:, None] == marks[None, :], axis=2) & (problems[:, None] == problems[None, :])
    earlier = jnp.tril(jnp.ones(same.shape, bool), -1) & pool.kept[None, :]
    return pool.kept & ~jnp.any(same & earlier, axis=1)


def of_prompts(
    pool: Pool, problems: Int[Array, " P"], group_size: int, key: Key, inverse_temperature: float
) -> tuple[Int[Array, "P G"], Bool[Array, "P G"]]:
    """``group_size`` stored responses to each prompt, without replacement and without copies: ``(rows, there)``.

    A prompt's responses of all its stored rollouts are drawn by a softmax of ``inverse_temperature`` times their
    rewards, at 0 evenly. Where it has fewer, ``there`` is False.
    """
    own = first_of_equals(pool)[None, :] & (pool.trajectories.problem_ids[None, :] == problems[:, None])
    noise = jax.random.gumbel(key, own.shape, jnp.float32)
    score = jnp.where(own, inverse_temperature * pool.rewards.value[None, :] + noise, -jnp.inf)
    best, rows = jax.lax.top_k(score, group_size)
    return rows.astype(jnp.int32), jnp.isfinite(best)


def mixed(
    replay: Replay,
    trajectories: Trajectories,
    rewards: Rewards,
    group_size: int,
    *,
    on_policy: float,
    inverse_temperature: float = 0.0,
) -> tuple[Trajectories, Rewards, Array]:
    """Each fresh group stays with probability ``on_policy``, else stored responses to one prompt take its place.

    Which are stored comes third. A stored prompt is drawn, then its responses, from all its rollouts in the ring and
    each only once, see ``of_prompts``; where there are fewer than a group the rest is invalid and its mask empty.

    From "Trajectory Balance with Asynchrony", arXiv:2503.18929. Differs from the paper in that the ring has one
    capacity for all prompts.

    Args:
      inverse_temperature: above 0, prompts of high mean reward and responses of high reward are drawn more often.
    """
    weights = group_weights(replay.pool, group_size, inverse_temperature)
    count = rewards.value.shape[0] // group_size
    coin, draw = jax.random.split(replay.key)
    some = jnp.any(jnp.isfinite(weights))
    old = (jax.random.uniform(coin, (count,)) >= on_policy) & some
    places = jax.random.categorical(draw, jnp.where(some, weights, 0.0), shape=(count,))
    problems = replay.pool.trajectories.problem_ids[places * group_size]
    picked, there = of_prompts(replay.pool, problems, group_size, jax.random.fold_in(draw, 1), inverse_temperature)
    stored_rows = jnp.repeat(old, group_size, total_repeat_length=count * group_size)

    def choose(new, kept):
        return jnp.where(stored_rows.reshape(-1, *[1] * (new.ndim - 1)), kept[picked.reshape(-1)], new)

    ring, extras = replay.pool, dict(trajectories.extras)
    if EXPERTS in extras:  # of stored rows nobody kept who computed them: the trainer's own router chooses
        extras[EXPERTS] = jnp.where(stored_rows[:, None, None], -1, extras[EXPERTS])
    bare = trajectories._replace(extras=ring.trajectories.extras)
    rows, judged = jax.tree.map(choose, (bare, rewards), (ring.trajectories, ring.rewards))
    real = ~stored_rows | there.reshape(-1)
    ids = jnp.repeat(jnp.arange(count, dtype=jnp.int32), group_size, total_repeat_length=count * group_size)
    rows = rows._replace(
        extras=extras,
        group_ids=ids,
        problem_ids=jnp.where(stored_rows, jnp.repeat(problems, group_size), rows.problem_ids),
        mask=rows.mask & real[:, None],
    )
    return rows, judged._replace(valid=judged.valid & real), stored_rows


def make_replay(
    estimate: Callable[..., Batch], group_size: int, *, on_policy: float, inverse_temperature: float = 0.0
) -> dict[str, Callable]:
    """The slots ``estimate`` and ``remember`` of an ``Online`` that trains on fresh and stored groups.

    ``Replayed`` in the extras of a batch says which rows are stored ones. The stage's ``extras`` put ``empty_replay``
    under ``REPLAY``.

    Raises:
      ValueError: for a share outside 0 to 1.
    """
    if not 0 <= on_policy <= 1:
        raise ValueError(f"on_policy={on_policy} must lie in [0, 1]: the share of fresh groups")
    share = {"on_policy": on_policy, "inverse_temperature": inverse_temperature}

    def replayed(params: Params, extras: dict[str, Any], trajectories: Trajectories, rewards: Rewards) -> Batch:
        rows, judged, old = mixed(extras[REPLAY], trajectories, rewards, group_size, **share)
        batch = estimate(params, extras, rows, judged)
        return batch._replace(extras=batch.extras | Replayed(old)._asdict())

    def remember(state: TrainState, batch: Batch, trajectories: Trajectories, rewards: Rewards) -> dict[str, Any]:
        return state.extras | {REPLAY: stored(state.extras[REPLAY], trajectories, rewards, group_size)}

    return {"estimate": replayed, "remember": remember}
