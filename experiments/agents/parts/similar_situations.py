"""Situations that look alike as one: turns of a group whose observations share most tokens, in order (GiGPO)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.rollout.turns.multi_turn import turns_of
from jaxrl_llm.types import Key, Trajectories

NOTHING = -1  # in the place of a token where less was shown


def shown(rows: Trajectories, *, width: int) -> Int[Array, "B K W"]:
    """The last ``width`` tokens read before each action, to the right; ``NOTHING`` where there are fewer.

    The first turn reads the prompt, any other the answer to the action before it.
    """
    found = turns_of(rows)
    turn, turns = found.turn, found.taken.shape[1]
    read = (turn >= 0) & ~rows.mask & (rows.segment_ids > 0)
    of_turn = read[:, :, None] & (turn[:, :, None] == jnp.arange(turns, dtype=jnp.int32)[None, None, :])  # [B, T, K]
    behind = jnp.sum(of_turn, axis=1, keepdims=True) - jnp.cumsum(of_turn, axis=1)  # tokens of the turn still to come
    mine = jnp.take_along_axis(behind, jnp.clip(turn, 0, turns - 1)[:, :, None], axis=2)[:, :, 0].astype(jnp.int32)
    place = jnp.where(read & (mine < width), width - 1 - mine, width)  # beyond the end: dropped
    empty = jnp.full((turn.shape[0], turns, width), NOTHING, jnp.int32)
    lines = jnp.broadcast_to(jnp.arange(turn.shape[0], dtype=jnp.int32)[:, None], turn.shape)
    return empty.at[lines, jnp.clip(turn, 0, turns - 1), place].set(rows.tokens.astype(jnp.int32), mode="drop")


def likeness(first: Int[Array, " W"], second: Int[Array, " W"]) -> Float[Array, ""]:
    """``2 LCS(a, b) / (|a| + |b|)``, LCS the length of the longest common subsequence; 1 for two empty texts.

    ``NOTHING`` is no token. A row of the table of LCS is the running maximum of ``max(up, diagonal + equal)``.

    >>> import jax.numpy as jnp
    >>> a, b = jnp.array([5, 6, 7, 8]), jnp.array([-1, 5, 7, 8])  # 5 7 8 is common: 6 / 7
    >>> round(float(likeness(a, b)), 4), float(likeness(a, a))
    (0.8571, 1.0)
    """
    there, seen = first != NOTHING, second != NOTHING

    def line(above: Array, token: Array) -> tuple[Array, None]:
        equal = ((second == token) & seen & (token != NOTHING)).astype(jnp.int32)
        diagonal = jnp.pad(above[:-1], (1, 0)) + equal
        return jax.lax.cummax(jnp.maximum(above, diagonal)), None

    table, _ = jax.lax.scan(line, jnp.zeros(second.shape, jnp.int32), first)
    total = jnp.sum(there) + jnp.sum(seen)
    return jnp.where(total > 0, 2.0 * table[-1].astype(jnp.float32) / jnp.maximum(total, 1).astype(jnp.float32), 1.0)


def clusters(
    texts: Int[Array, "B K W"], group_ids: Int[Array, " B"], valid: Bool[Array, "B K"], *, least: float
) -> Int[Array, "B K"]:
    """Equal numbers for turns of a group that look alike: each joins the first leader it is like, or becomes one.

    Turns are met episode by episode. Turns that do not count lead nobody.

    Args:
      least: likeness to a leader that suffices; 1 joins equal texts only, 0 whole groups.

    From "Group-in-Group Policy Optimization for LLM Agent Training", arXiv:2505.10978, on situations that never recur
    exactly. Differs from the released code in the longest common subsequence for Python's matching blocks, which are
    found greedily and are never more.

    >>> import jax.numpy as jnp
    >>> texts = jnp.array([[[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 9], [5, 5, 5, 5]]])
    >>> clusters(texts, jnp.array([0, 0]), jnp.ones((2, 2), bool), least=0.75).tolist()
    [[0, 1], [0, 3]]
    """
    if not 0 <= least <= 1:
        raise ValueError(f"least={least} must lie in [0, 1], a share of the tokens")
    flat, counted = texts.reshape(-1, texts.shape[2]), valid.reshape(-1)
    owner = jnp.repeat(group_ids, valid.shape[1], total_repeat_length=counted.shape[0])
    index = jnp.arange(counted.shape[0], dtype=jnp.int32)

    def meet(leads: Array, i: Array) -> tuple[Array, Array]:
        alike = jax.vmap(likeness, (None, 0))(flat[i], flat) >= least - 1e-6
        joined = leads & alike & (owner == owner[i])
        found = jnp.any(joined)
        new = counted[i] & ~found
        return leads | (new & (index == i)), jnp.where(found, jnp.argmax(joined).astype(jnp.int32), i)

    _, found = jax.lax.scan(meet, jnp.zeros(counted.shape, bool), index)
    return found.reshape(valid.shape)


def clusters_in_groups(
    texts: Int[Array, "B K W"], group_ids: Int[Array, " B"], valid: Bool[Array, "B K"], *, least: float, size: int
) -> Int[Array, "B K"]:
    """``clusters`` of rows whose groups lie one after another: a turn is compared with those of its group alone.

    Groups are gone through side by side, so that neither the comparisons of a turn nor the turns that wait for each
    other grow with the number of groups.

    Args:
      size: rows of a group.
    """
    if texts.shape[0] % size:
        raise ValueError(f"size={size} does not divide the {texts.shape[0]} rows; give the rows of a group")
    parts = tuple(x.reshape(-1, size, *x.shape[1:]) for x in (texts, group_ids, valid))
    found = jax.vmap(lambda *part: clusters(*part, least=least))(*parts)
    first = jnp.arange(found.shape[0], dtype=jnp.int32) * (size * valid.shape[1])
    return (found + first[:, None, None]).reshape(valid.shape)


def shuffled(
    situations: Int[Array, "B K"], group_ids: Int[Array, " B"], valid: Bool[Array, "B K"], key: Key
) -> Int[Array, "B K"]:
    """The situations of a group's turns, dealt anew among them: sets of the same sizes, of turns drawn at random.

    A control of groups by situation. Turns that do not count keep theirs.

    >>> import jax, jax.numpy as jnp
    >>> seen, there = jnp.array([[1, 1, 7], [2, 3, 7]]), jnp.array([[True, True, False]] * 2)
    >>> sorted(shuffled(seen, jnp.array([0, 0]), there, jax.random.key(0))[:, :2].reshape(-1).tolist())
    [1, 1, 2, 3]
    """
    flat, counted = situations.reshape(-1), valid.reshape(-1)
    owner = jnp.repeat(group_ids, valid.shape[1], total_repeat_length=counted.shape[0])
    placed = jnp.lexsort((~counted, owner))  # the turns that count, group by group
    drawn = jnp.lexsort((jax.random.uniform(key, flat.shape), ~counted, owner))  # the same, in an order of chance
    return jnp.where(counted, flat.at[placed].set(flat[drawn]), flat).reshape(situations.shape)
