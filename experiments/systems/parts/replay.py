"""Training on groups of earlier rollouts: a ring of the newest groups, drawn by chance in the place of fresh ones."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.train.refill import Pool, empty_pool
from jaxrl_llm.types import Batch, Key, Params, Rewards, TrainState, Trajectories

REPLAY = "replay"  # its name in ``state.extras``


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
    fresh = _grouped(Pool(trajectories, rewards, jnp.ones_like(rewards.valid)), group_size)
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


def mixed(
    replay: Replay,
    trajectories: Trajectories,
    rewards: Rewards,
    group_size: int,
    *,
    on_policy: float,
    inverse_temperature: float = 0.0,
) -> tuple[Trajectories, Rewards, Array]:
    """Each fresh group stays with probability ``on_policy``, else a stored one takes its place; and which are stored.

    From "Trajectory Balance with Asynchrony", arXiv:2503.18929. Differs from the paper in that a draw is
    a prompt with all its stored responses, not responses one by one, and that the ring is common to all prompts.

    Args:
      inverse_temperature: above 0, groups of high mean reward are drawn more often.
    """
    weights = group_weights(replay.pool, group_size, inverse_temperature)
    fresh, ring = _grouped((trajectories, rewards), group_size), _grouped(replay.pool, group_size)
    count = fresh[1].value.shape[0]
    coin, draw = jax.random.split(replay.key)
    some = jnp.any(jnp.isfinite(weights))
    old = (jax.random.uniform(coin, (count,)) >= on_policy) & some
    places = jax.random.categorical(draw, jnp.where(some, weights, 0.0), shape=(count,))

    def choose(new, kept):
        return jnp.where(old.reshape(-1, *[1] * (new.ndim - 1)), kept[places], new)

    rows, judged = _flat(jax.tree.map(choose, fresh, (ring.trajectories, ring.rewards)))
    ids = jnp.repeat(jnp.arange(count, dtype=jnp.int32), group_size, total_repeat_length=count * group_size)
    return rows._replace(group_ids=ids), judged, jnp.repeat(old, group_size, total_repeat_length=count * group_size)


def make_replay(
    estimate: Callable[..., Batch], group_size: int, *, on_policy: float, inverse_temperature: float = 0.0
) -> dict[str, Callable]:
    """The slots ``estimate`` and ``remember`` of an ``Online`` that trains on fresh and stored groups.

    ``batch.extras["replayed"]`` says which rows are stored ones. The stage's ``extras`` put ``empty_replay`` under
    ``REPLAY``.

    Raises:
      ValueError: for a share outside 0 to 1.
    """
    if not 0 <= on_policy <= 1:
        raise ValueError(f"on_policy={on_policy} must lie in [0, 1]: the share of fresh groups")
    share = {"on_policy": on_policy, "inverse_temperature": inverse_temperature}

    def replayed(params: Params, extras: dict[str, Any], trajectories: Trajectories, rewards: Rewards) -> Batch:
        rows, judged, old = mixed(extras[REPLAY], trajectories, rewards, group_size, **share)
        batch = estimate(params, extras, rows, judged)
        return batch._replace(extras=batch.extras | {"replayed": old})

    def remember(state: TrainState, batch: Batch, trajectories: Trajectories, rewards: Rewards) -> dict[str, Any]:
        return state.extras | {REPLAY: stored(state.extras[REPLAY], trajectories, rewards, group_size)}

    return {"estimate": replayed, "remember": remember}
