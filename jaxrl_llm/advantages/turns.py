"""Credit of the turns of episodes: turns in the same situation, strata of episodes, progress of each turn.

Turns are the columns of ``[B, K]`` arrays; ``valid`` says which of them were taken (and count).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.advantages.group import group_normalized_advantages, group_sum
from jaxrl_llm.advantages.returns import discounted_returns


def _cells(first: Array, second: Array) -> Array:
    """Ids in ``[0, N)``, equal where both labels are equal; by sorting, so that ``N`` may be large."""
    order = jnp.lexsort((second, first))
    ahead, behind = (first[order], second[order]), (first[order][:-1], second[order][:-1])
    new = (ahead[0][1:] != behind[0]) | (ahead[1][1:] != behind[1])
    runs = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(new.astype(jnp.int32))])
    return jnp.zeros(first.shape, jnp.int32).at[order].set(runs)


def _anchors(identity: Array, group_ids: Array, valid: Array) -> Array:
    """Ids of anchor groups of all turns ``[B * K]``; turns that do not count are in none of the others'."""
    rows = group_ids.shape[0]
    owner = jnp.where(valid, group_ids.astype(jnp.int32)[:, None], rows)
    return _cells(owner.reshape(-1), identity.astype(jnp.int32).reshape(-1))


def anchor_sizes(
    identity: Int[Array, "B K"], group_ids: Int[Array, " B"], valid: Bool[Array, "B K"]
) -> Float[Array, "B K"]:
    """How many turns of the group were taken in the same situation, itself counted; 0 where no turn was taken.

    >>> import jax.numpy as jnp
    >>> anchor_sizes(jnp.array([[7, 8], [7, 9]]), jnp.array([0, 0]), jnp.ones((2, 2), bool)).tolist()
    [[2.0, 1.0], [2.0, 1.0]]
    """
    same = _anchors(identity, group_ids, valid)
    sizes = group_sum(valid.astype(jnp.float32).reshape(-1), same).reshape(valid.shape)
    return jnp.where(valid, sizes, 0.0)


def anchor_advantages(
    returns: Float[Array, "B K"],
    identity: Int[Array, "B K"],
    group_ids: Int[Array, " B"],
    valid: Bool[Array, "B K"],
    *,
    normalise: Callable[..., Array] = group_normalized_advantages,
) -> Float[Array, "B K"]:
    """``A_S = (G_k - mean_S) / std_S`` over all turns ``S`` of a group that were taken in the same situation.

    Whenever and in whichever episode they were taken, repeats within an episode included. A situation met once, or one
    of equal returns, gives exactly 0.

    Args:
      returns: what each turn led to, for example ``rollout.turns.multi_turn.returns_to_go``.
      identity: equal for states that are the same situation.
      normalise: ``(rewards, ids, valid=)``; ``group.dr_grpo_advantages`` does not divide by the deviation.

    From "Group-in-Group Policy Optimization for LLM Agent Training" (GiGPO), arXiv:2505.10978, section 4.2.

    >>> import jax.numpy as jnp
    >>> returns, seen = jnp.array([[9.5, 10.0], [0.0, 0.0]]), jnp.array([[0, 1], [0, 2]])
    >>> a = anchor_advantages(returns, seen, jnp.array([0, 0]), jnp.ones((2, 2), bool))
    >>> [[round(float(x), 4) for x in row] for row in a]
    [[0.7071, 0.0], [-0.7071, 0.0]]
    """
    flat = jnp.where(valid, returns.astype(jnp.float32), 0.0).reshape(-1)
    found = normalise(flat, _anchors(identity, group_ids, valid), valid=valid.reshape(-1))
    return jnp.where(valid, found.reshape(valid.shape), 0.0)


def shared_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    valid: Bool[Array, "B K"],
    *,
    normalise: Callable[..., Array] = group_normalized_advantages,
) -> Float[Array, "B K"]:
    """``A_i = (R_i - mean_G R) / (std_G R + eps)`` over the rollouts of a group, at every part of a rollout.

    Parts are turns, or the sub-trajectories that summaries make of a rollout. A rollout of many parts counts as much as
    one of few: over parts instead (``pooled_turn_advantages`` with ``gamma=0``) the mean leans to long rollouts. A
    rollout without any valid part counts in no baseline.

    From "Scaling LLM Multi-turn RL with End-to-end Summarization-based Context Management" (SUPO), arXiv:2510.06727,
    eq. 3.

    >>> import jax.numpy as jnp
    >>> parts = jnp.array([[True, True, True], [True, False, False]])
    >>> a = shared_advantages(jnp.array([1.0, 0.0]), jnp.array([0, 0]), parts)
    >>> [[round(float(x), 4) for x in row] for row in a]
    [[0.7071, 0.7071, 0.7071], [-0.7071, 0.0, 0.0]]
    """
    whole = normalise(rewards.astype(jnp.float32), group_ids, valid=jnp.any(valid, axis=1))
    return jnp.where(valid, whole[:, None], 0.0)


def gigpo_advantages(
    rewards: Float[Array, " B"],
    returns: Float[Array, "B K"],
    identity: Int[Array, "B K"],
    group_ids: Int[Array, " B"],
    valid: Bool[Array, "B K"],
    *,
    episode: float = 1.0,
    step: float = 1.0,
    normalise: Callable[..., Array] = group_normalized_advantages,
) -> Float[Array, "B K"]:
    """GiGPO: ``episode A_E + step A_S``, the episode's advantage in its group plus the turn's in its situation.

    ``step=0`` is GRPO at every turn. An episode without any valid turn counts in no baseline.

    Args:
      rewards: of whole episodes.
      episode: weight of the episode's advantage; 0 leaves the situations alone.

    From "Group-in-Group Policy Optimization for LLM Agent Training", arXiv:2505.10978, section 4. Differs from the
    paper in naming the episode's weight, which it sets to 1.

    >>> import jax.numpy as jnp
    >>> r, returns, seen = jnp.array([10.0, 0.0]), jnp.array([[9.5, 10.0], [0.0, 0.0]]), jnp.array([[0, 1], [0, 2]])
    >>> a = gigpo_advantages(r, returns, seen, jnp.array([0, 0]), jnp.ones((2, 2), bool))
    >>> [[round(float(x), 4) for x in row] for row in a]
    [[1.4142, 0.7071], [-1.4142, -0.7071]]
    """
    whole = shared_advantages(rewards, group_ids, valid, normalise=normalise)
    return episode * whole + step * anchor_advantages(returns, identity, group_ids, valid, normalise=normalise)


def stratified_advantages(
    rewards: Float[Array, " B"],
    group_ids: Int[Array, " B"],
    strata: Int[Array, " B"],
    *,
    blend: float = 0.8,
    valid: Bool[Array, " B"] | None = None,
    ddof: int = 0,
    eps: float = 1e-6,
) -> Float[Array, " B"]:
    """Stratified GRPO: ``blend A_stratum + (1 - blend) A_group``, each ``(r_i - mean) / (std + eps)``.

    Episodes of one prompt are compared with those of the same structure; the group's term keeps a signal between
    strata, and the only one for an episode that is alone in its stratum, or in one of equal rewards. One stratum, or
    ``blend=0``, is ``group_normalized_advantages``.

    Args:
      strata: any labels, for example how often a tool was called.
      ddof: 0 for the population's standard deviation.

    From "Stratified GRPO" (stratified advantage normalisation for search agents). Differs from the paper in that the
    default of ``blend`` is that of a re-implementation, as the paper's is not known.

    >>> import jax.numpy as jnp
    >>> r, ids, calls = jnp.array([1.0, 1, 0, 0]), jnp.zeros(4, int), jnp.array([0, 0, 1, 1])
    >>> stratified_advantages(r, ids, calls, blend=0.5, eps=0.0).tolist()
    [0.5, 0.5, -0.5, -0.5]
    """
    if not 0 <= blend <= 1:
        raise ValueError(f"blend={blend} must lie in [0, 1]")
    cells = _cells(group_ids.astype(jnp.int32), strata.astype(jnp.int32))
    settings = {"valid": valid, "ddof": ddof, "eps": eps}
    within = group_normalized_advantages(rewards, cells, **settings)
    return blend * within + (1.0 - blend) * group_normalized_advantages(rewards, group_ids, **settings)


def moved(identity: Int[Array, "B K"], valid: Bool[Array, "B K"]) -> Bool[Array, "B K"]:
    """Turns whose action changed the situation: the next turn's is another; the last turn of an episode counts.

    Args:
      valid: a leading stretch of each row: the turn in front of a hole would count as the last one.

    >>> import jax.numpy as jnp
    >>> moved(jnp.array([[4, 4, 5, 0]]), jnp.array([[True, True, True, False]])).tolist()
    [[False, True, True, False]]
    """
    following = jnp.pad(identity[:, 1:], ((0, 0), (0, 1)))
    more = jnp.pad(valid[:, 1:], ((0, 0), (0, 1)))
    return valid & (~more | (following != identity))


def terminal_progress(rewards: Float[Array, " B"], valid: Bool[Array, "B K"]) -> Float[Array, "B K"]:
    """The whole reward at the last valid turn."""
    later = jnp.cumsum(valid[:, ::-1].astype(jnp.int32), axis=1)[:, ::-1]
    return jnp.where(valid & (later == 1), rewards.astype(jnp.float32)[:, None], 0.0)


def uniform_progress(rewards: Float[Array, " B"], valid: Bool[Array, "B K"]) -> Float[Array, "B K"]:
    """``R / K`` at each of the ``K`` valid turns.

    >>> import jax.numpy as jnp
    >>> uniform_progress(jnp.array([1.0]), jnp.array([[True, True, False]])).tolist()
    [[0.5, 0.5, 0.0]]
    """
    count = jnp.maximum(jnp.sum(valid.astype(jnp.float32), axis=1), 1.0)
    return jnp.where(valid, (rewards.astype(jnp.float32) / count)[:, None], 0.0)


def spa_rewards(
    progress: Float[Array, "B K"],
    grounded: Bool[Array, "B K"],
    valid: Bool[Array, "B K"],
    *,
    weight: float = 1.0,
    grounding: float = 0.5,
) -> Float[Array, "B K"]:
    """SPA: ``weight c_k + grounding g_k``, the reward of each turn from its progress and whether it could be executed.

    Args:
      progress: estimated contributions, which sum to the return where ``losses.reward.return_sum_loss`` is 0.
      grounded: the action was executable, for example ``moved``.

    From "SPA-RL: Reinforcing LLM Agents via Stepwise Progress Attribution", arXiv:2505.20732.

    >>> import jax.numpy as jnp
    >>> found = spa_rewards(jnp.array([[0.2, 0.3, 0.5]]), jnp.array([[True, False, True]]), jnp.ones((1, 3), bool))
    >>> [round(float(x), 4) for x in found[0]]
    [0.7, 0.3, 1.0]
    """
    fused = weight * progress.astype(jnp.float32) + grounding * grounded.astype(jnp.float32)
    return jnp.where(valid, fused, 0.0)


def next_valid(valid: Bool[Array, "B K"]) -> Int[Array, "B K"]:
    """The column of the next valid turn after each column, ``K`` where none follows.

    >>> import jax.numpy as jnp
    >>> next_valid(jnp.array([[True, False, True]])).tolist()
    [[2, 2, 3]]
    """
    turns = valid.shape[1]
    at = jnp.where(valid, jnp.arange(turns, dtype=jnp.int32), turns)
    return jnp.pad(jax.lax.cummin(at, axis=1, reverse=True)[:, 1:], ((0, 0), (0, 1)), constant_values=turns)


def information_gain_rewards(
    chance: Float[Array, "B K"],
    rewards: Float[Array, " B"],
    valid: Bool[Array, "B K"],
    *,
    information: float = 1.0,
    outcome: float = 1.0,
) -> Float[Array, "B K"]:
    """IGPO: ``information (p_{k+1} - p_k)`` at each turn but the last, which gets ``outcome R``; of valid turns alone.

    Args:
      chance: ``p_k``, the probability the policy gives to the right answer before it acts in turn ``k`` (of several
        tokens their geometric mean).

    From "Information Gain-based Policy Optimization" (IGPO), arXiv:2510.14967. Differs from the paper in naming the two
    weights.

    >>> import jax.numpy as jnp
    >>> chance, all_ = jnp.array([[0.125, 0.125, 0.5]]), jnp.ones((1, 3), bool)
    >>> information_gain_rewards(chance, jnp.array([1.0]), all_).tolist()
    [[0.0, 0.375, 1.0]]
    """
    turns, later = chance.shape[1], next_valid(valid)
    chance = jnp.where(valid, chance.astype(jnp.float32), 0.0)
    gained = jnp.take_along_axis(chance, jnp.minimum(later, turns - 1), axis=1) - chance
    last = outcome * rewards.astype(jnp.float32)[:, None]
    return jnp.where(valid, jnp.where(later < turns, information * gained, last), 0.0)


def log_information_gain_rewards(
    chance: Float[Array, "B K"],
    rewards: Float[Array, " B"],
    valid: Bool[Array, "B K"],
    *,
    information: float = 1.0,
    outcome: float = 1.0,
    floor: float = 1e-6,
) -> Float[Array, "B K"]:
    """``information_gain_rewards`` with gains of the logarithm, ``information (log p_{k+1} - log p_k)``.

    A turn that doubles the chance is worth the same wherever it starts, where the difference of the probabilities
    counts the last doublings most. Of an answer of several tokens it is the mean gain of a token's log-probability.

    Args:
      floor: smaller chances count as this one, which bounds the reward of a turn.

    An ablation of "Information Gain-based Policy Optimization" (IGPO), arXiv:2510.14967.

    >>> import jax.numpy as jnp
    >>> chance, all_ = jnp.array([[0.125, 0.125, 0.5]]), jnp.ones((1, 3), bool)
    >>> found = log_information_gain_rewards(chance, jnp.array([1.0]), all_)
    >>> [round(float(x), 4) for x in found[0]]
    [0.0, 1.3863, 1.0]
    """
    if not 0 < floor < 1:
        raise ValueError(f"floor={floor} must lie in (0, 1), a probability that is not 0")
    logs = jnp.log(jnp.clip(jnp.where(valid, chance.astype(jnp.float32), 1.0), floor))
    return information_gain_rewards(logs, rewards, valid, information=information, outcome=outcome)


def improvement_rewards(
    scores: Float[Array, " B"], previous: Float[Array, " B"], best: Float[Array, " B"], *, above_last: float = 0.5
) -> Float[Array, " B"]:
    """RLAO: 1 for a turn that scores more than all before it, 0.5 for more than only the last one, else 0.

    Args:
      previous: the score of the last turn; ``best``: the highest so far; both count what was given at the start.

    From "Weak-for-Strong: Training Weak Meta-Agent to Harness Strong Executors", arXiv:2504.04785, section 3.

    >>> import jax.numpy as jnp
    >>> scores = jnp.array([0.6, 0.5, 0.55])  # after a start of 0.4
    >>> improvement_rewards(scores, jnp.array([0.4, 0.6, 0.5]), jnp.array([0.4, 0.6, 0.6])).tolist()
    [1.0, 0.0, 0.5]
    """
    if not 0 <= above_last <= 1:
        raise ValueError(f"above_last={above_last} must lie in [0, 1], the rewards of no progress and of a new best")
    return jnp.where(scores > best, 1.0, jnp.where(scores > previous, above_last, 0.0)).astype(jnp.float32)


def pooled_turn_advantages(
    rewards: Float[Array, "B K"],
    group_ids: Int[Array, " B"],
    valid: Bool[Array, "B K"],
    *,
    gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Array, "B K"]:
    """``A_k = sum_{j >= k} gamma^(j - k) (r_j - mean) / (std + eps)``, over all turns of all episodes of the group.

    With one turn an episode it is ``group_normalized_advantages``; equal rewards give exactly 0.

    From "Information Gain-based Policy Optimization" (IGPO), arXiv:2510.14967. Differs from the released code, which
    subtracts the mean at the same token position from discounted returns and does not divide.

    >>> import jax.numpy as jnp
    >>> r, ids = jnp.array([[1.0, 1.0], [0.0, 0.0]]), jnp.array([0, 0])
    >>> pooled_turn_advantages(r, ids, jnp.ones((2, 2), bool), gamma=0.5, ddof=0, eps=0.0).tolist()
    [[1.5, 1.0], [-1.5, -1.0]]
    """
    flat = jnp.where(valid, rewards.astype(jnp.float32), 0.0).reshape(-1)
    owner = jnp.broadcast_to(group_ids[:, None], valid.shape).reshape(-1)
    own = group_normalized_advantages(flat, owner, valid=valid.reshape(-1), ddof=ddof, eps=eps).reshape(valid.shape)
    return discounted_returns(own, valid, gamma=gamma)
