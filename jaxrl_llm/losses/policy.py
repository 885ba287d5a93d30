"""Token-level policy losses: unreduced, float32, zero outside the mask.

Arguments in a fixed order: ``logp`` (gradient), ``old_logp`` (anchor), ``advantages``, ``mask``. No gradient enters
the anchors or the advantages. Masked entries are replaced before any arithmetic, so a NaN there is harmless.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm import reduce
from jaxrl_llm.types import TokenTerms

MAX_LOG_RATIO = 20.0  # e^20 is 4.9e8: far past any clip, and still finite in float32 products


def masked(mask: Bool[Array, "B T"], *arrays: Float[Array, "B T"]) -> tuple[Float[Array, "B T"], ...]:
    """Each array in float32 with 0 outside the mask.

    Raises:
      ValueError: for an array of another shape than the mask, which would broadcast (a square batch hides it).
    """
    reduce.check_tokens(mask, *arrays)
    return tuple(jnp.where(mask, x.astype(jnp.float32), 0.0) for x in arrays)


def log_ratio(logp: Float[Array, "B T"], anchor: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """``logp - stop_gradient(anchor)``, clamped to +-20 so that its exponential stays finite.

    Beyond the clamp (a token ``e^20`` times as likely as before) value stays and gradient is zero.
    """
    difference = logp.astype(jnp.float32) - jax.lax.stop_gradient(anchor).astype(jnp.float32)
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def reinforce_loss(logp: Float[Array, "B T"], advantages: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> TokenTerms:
    """Score-function policy gradient: ``-A_t logp_t``.

    From "Simple statistical gradient-following algorithms for connectionist reinforcement learning" (Williams, 1992).

    >>> import jax.numpy as jnp
    >>> terms = reinforce_loss(jnp.array([[-0.5]]), jnp.array([[2.0]]), jnp.array([[True]]))
    >>> float(terms.loss[0, 0])
    1.0
    """
    logp, advantages = masked(mask, logp, advantages)
    return TokenTerms(-jax.lax.stop_gradient(advantages) * logp, {})


def clipped_policy_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenTerms:
    """PPO's clipped surrogate: ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)``, ``rho = exp(logp - old)``.

    With ``dual_clip = c`` the loss of a token with A < 0 is at most ``-c A``.

    ``aux``: ``ratio``, and ``clipped``, 1 exactly where clipping removed the gradient.

    From "Proximal Policy Optimization Algorithms", arXiv:1707.06347, eq. 7; asymmetric bounds ("clip-higher") from
    "DAPO", arXiv:2503.14476, eq. 8; dual clip from "Mastering Complex Control in MOBA Games", arXiv:1912.09729, eq. 4.

    >>> import jax.numpy as jnp
    >>> logp, old = jnp.log(jnp.array([[0.6]])), jnp.log(jnp.array([[0.4]]))
    >>> round(float(clipped_policy_loss(logp, old, jnp.array([[2.0]]), jnp.array([[True]])).loss[0, 0]), 4)
    -2.4
    """
    if not 0 <= clip_low < 1:
        raise ValueError(f"clip_low={clip_low} must lie in [0, 1)")
    if clip_high < 0:
        raise ValueError(f"clip_high={clip_high} must not be negative")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} must be greater than 1, or None")
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    advantages = jax.lax.stop_gradient(advantages)
    ratio = jnp.exp(log_ratio(logp, old_logp))
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    surrogate = jnp.minimum(ratio * advantages, bounded * advantages)
    # strictly outside the bound on the side where the minimum takes the constant
    clipped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    if clip_low == 0 or clip_high == 0:  # at a ratio of 1 clip and minimum share their gradients out
        surrogate = jnp.where(clipped, jax.lax.stop_gradient(surrogate), ratio * advantages)
    if dual_clip is not None:
        floor = dual_clip * advantages
        cut = (advantages < 0) & (surrogate < floor)
        surrogate = jnp.where(cut, floor, surrogate)
        clipped = clipped | cut
    aux = {"ratio": jnp.where(mask, ratio, 0.0), "clipped": jnp.where(mask, clipped, False).astype(jnp.float32)}
    return TokenTerms(-jnp.where(mask, surrogate, 0.0), aux)


def cispo_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 1.0,
    clip_high: float = 2.0,
) -> TokenTerms:
    """CISPO: REINFORCE with a clipped, stop-gradient importance weight; no token loses its gradient.

    ``-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logp``. ``clip_low = 1`` leaves the lower side open.

    ``aux``: ``ratio``, and ``clipped``, 1 where the weight was bounded, whatever the sign of the advantage: the
    gradient of such a token is smaller, not gone.

    From "MiniMax-M1", arXiv:2506.13585, eqs. 4 and 5. Differs from the paper in the default ``clip_high``, which it
    says is tuned without giving it.
    """
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(f"clip_low={clip_low} must lie in [0, 1] and clip_high={clip_high} must not be negative")
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    ratio = jnp.exp(log_ratio(logp, old_logp))
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages)
    cut = (ratio > 1 + clip_high) | (ratio < 1 - clip_low)
    aux = {"ratio": jnp.where(mask, ratio, 0.0), "clipped": (cut & mask).astype(jnp.float32)}
    return TokenTerms(-jnp.where(mask, weight * logp, 0.0), aux)


def sapo_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> TokenTerms:
    """SAPO: a smooth gate instead of a clip: ``-(4 / tau) sigmoid(tau (rho - 1)) A``.

    At ``rho = 1`` the gradient is that of REINFORCE; it fades on both sides, faster for A < 0 (``tau_negative``).

    ``aux``: ``ratio``, and ``clipped``, always 0: no token is cut.

    From "Soft Adaptive Policy Optimization", arXiv:2511.20347, eq. 5.
    """
    if tau_positive <= 0 or tau_negative <= 0:
        raise ValueError(f"tau_positive={tau_positive} and tau_negative={tau_negative} must be positive")
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    advantages = jax.lax.stop_gradient(advantages)
    ratio = jnp.exp(log_ratio(logp, old_logp))
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    gate = 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0))
    aux = {"ratio": jnp.where(mask, ratio, 0.0), "clipped": jnp.zeros_like(ratio)}
    return TokenTerms(-jnp.where(mask, gate * advantages, 0.0), aux)


def bounded_surrogate(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: Float[Array, "..."] | float,
    high: Float[Array, "..."] | float,
) -> TokenTerms:
    """``-min(rho A, clip(rho, low, high) A)`` with bounds of the ratio that may differ by token.

    ``aux``: ``ratio``, and ``clipped``, 1 exactly where clipping removed the gradient.
    """
    ratio, advantages = (jnp.where(mask, x.astype(jnp.float32), 0.0) for x in (ratio, advantages))
    advantages = jax.lax.stop_gradient(advantages)
    cut = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    bounded = jax.lax.stop_gradient(jnp.clip(ratio, low, high)) * advantages
    surrogate = jnp.where(cut, bounded, ratio * advantages)  # a minimum would share its gradient out at a bound
    return TokenTerms(-jnp.where(mask, surrogate, 0.0), {"ratio": ratio, "clipped": (cut & mask).astype(jnp.float32)})


def ce_gppo_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    low_weight: float = 0.75,
    high_weight: float = 1.0,
) -> TokenTerms:
    """CE-GPPO: PPO whose clipped tokens keep a gradient of fixed size, ``weight * bound * A grad logp``.

    Beyond a bound ``-w b rho / sg(rho) A`` with ``(w, b) = (low_weight, 1 - clip_low)`` for A < 0 and
    ``(high_weight, 1 + clip_high)`` for A > 0; PPO's surrogate elsewhere. Weights of 0 are ``clipped_policy_loss``
    (in gradient).

    ``aux``: ``ratio``, and ``clipped``, 1 where the ratio lies beyond its bound: the gradient is bounded there, not
    gone.

    From "CE-GPPO: Coordinating Entropy via Gradient-Preserving Clipping Policy Optimization in Reinforcement Learning",
    arXiv:2509.20712, eq. 8 (v5; the gradient: eq. 10), and its released code, whose weights these are; without the
    code's dual clip. Differs from the paper in naming two clips, there one.

    >>> import jax, jax.numpy as jnp
    >>> logp, old, one = jnp.log(jnp.array([[0.8]])), jnp.log(jnp.array([[0.4]])), jnp.ones((1, 1))
    >>> slope = jax.grad(lambda x: ce_gppo_loss(x, old, one, one > 0, high_weight=0.5).loss[0, 0])(logp)
    >>> round(float(slope[0, 0]), 4)  # the ratio 2 is beyond 1.2: -0.5 * 1.2
    -0.6
    """
    if not 0 <= clip_low < 1 or clip_high < 0:
        raise ValueError(f"clip_low={clip_low} must lie in [0, 1) and clip_high={clip_high} must not be negative")
    if low_weight < 0 or high_weight < 0:
        raise ValueError(f"low_weight={low_weight} and high_weight={high_weight} must not be negative")
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    advantages = jax.lax.stop_gradient(advantages)
    ratio = jnp.exp(log_ratio(logp, old_logp))
    below, above = (ratio < 1 - clip_low) & (advantages < 0), (ratio > 1 + clip_high) & (advantages > 0)
    kept = jnp.where(below, low_weight * (1 - clip_low), high_weight * (1 + clip_high))
    beside = kept * jnp.exp(logp - jax.lax.stop_gradient(logp))  # the bound's value, with the gradient of logp
    used = jnp.where(below | above, beside, ratio)
    aux = {"ratio": jnp.where(mask, ratio, 0.0), "clipped": ((below | above) & mask).astype(jnp.float32)}
    return TokenTerms(-jnp.where(mask, used * advantages, 0.0), aux)


def dcpo_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 0.16,
    clip_high: float = 0.2,
    most: float = 10.0,
) -> TokenTerms:
    """DCPO: the clipped surrogate with bounds that widen for tokens that were unlikely when drawn.

    ``low = (1 + sqrt(max(1 - 4 clip_low / q, 0))) / 2``, ``high = min((1 + sqrt(1 + 4 clip_high / q)) / 2, most)`` with
    ``q = exp(old_logp)``: the change of the probability itself is bounded, ``|p - q| rho <= clip``.

    ``aux``: as ``bounded_surrogate``.

    From "DCPO: Dynamic Clipping Policy Optimization", arXiv:2509.02333, section 3.1, and its released code (``most``).
    Its advantages are ``advantages.group.smoothed_advantages``.

    >>> import jax.numpy as jnp
    >>> old, one = jnp.log(jnp.array([[0.9, 0.1]])), jnp.ones((1, 2))
    >>> terms = dcpo_loss(old + 1.0, old, one, one > 0)  # the ratio e is cut at 1.1872 and at 2
    >>> [round(float(x), 4) for x in terms.loss[0]]
    [-1.1872, -2.0]
    """
    if clip_low < 0 or clip_high < 0 or most <= 1:
        raise ValueError(f"clip_low={clip_low}, clip_high={clip_high} must not be negative and most={most} exceed 1")
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    ratio = jnp.exp(log_ratio(logp, old_logp))
    inverse = jnp.exp(jnp.minimum(jax.lax.stop_gradient(-old_logp), MAX_LOG_RATIO))
    low = 0.5 + 0.5 * jnp.sqrt(jnp.maximum(1.0 - 4.0 * clip_low * inverse, 0.0))
    high = jnp.minimum(0.5 + 0.5 * jnp.sqrt(1.0 + 4.0 * clip_high * inverse), most)
    return bounded_surrogate(ratio, advantages, mask, low=low, high=high)


def bapo_bounds(
    ratio: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: tuple[float, float] = (0.6, 0.9),
    high: tuple[float, float] = (1.2, 3.0),
    step: float = 0.05,
    target: float = 0.4,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """BAPO's bounds of the ratio: the first at which a batch's positive tokens weigh ``target`` of its negative ones.

    The weight of a kind is ``sum |clip(rho) A|`` with ``min(rho, high)`` where A >= 0 and ``max(rho, low)`` where A <
    0. From the first of ``low`` and ``high`` on, the lower bound rises in steps to its last value, then the upper one;
    if none suffices both stay at their last values. No gradient; of all tokens of the step together.

    From "BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via Balanced Policy Optimization with Adaptive
    Clipping", arXiv:2510.18927, eq. 8 and algorithm 1, with the order and the sums of its released code. Differs from
    the paper in that the lower bound rises first, there the upper one, with steps of their own; that ``target`` is of
    the negative tokens, there of all; and that tokens are not weighted by the probability with which they were drawn.
    """
    if not 0 <= low[0] <= low[1] <= 1 <= high[0] <= high[1]:
        raise ValueError(
            f"low={low} and high={high} must be two pairs in order, the first at most 1, the second at least 1"
        )
    if step <= 0 or target < 0:
        raise ValueError(f"step={step} must be positive and target={target} must not be negative")
    lows = [min(low[0] + i * step, low[1]) for i in range(math.ceil((low[1] - low[0]) / step - 1e-6) + 1)]
    highs = [min(high[0] + i * step, high[1]) for i in range(math.ceil((high[1] - high[0]) / step - 1e-6) + 1)]
    tried_low = jnp.asarray(lows + [low[1]] * (len(highs) - 1), jnp.float32)
    tried_high = jnp.asarray([high[0]] * len(lows) + highs[1:], jnp.float32)
    ratio, advantages = jax.lax.stop_gradient(masked(mask, ratio, advantages))
    up, down = jnp.maximum(advantages, 0.0), jnp.maximum(-advantages, 0.0)
    positive = jax.lax.map(lambda bound: jnp.sum(jnp.minimum(ratio, bound) * up), tried_high)
    negative = jax.lax.map(lambda bound: jnp.sum(jnp.maximum(ratio, bound) * down), tried_low)
    enough = positive >= target * negative
    chosen = jnp.where(jnp.any(enough), jnp.argmax(enough), enough.shape[0] - 1)
    return tried_low[chosen], tried_high[chosen]


def bapo_loss(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: tuple[float, float] = (0.6, 0.9),
    high: tuple[float, float] = (1.2, 3.0),
    step: float = 0.05,
    target: float = 0.4,
) -> TokenTerms:
    """BAPO: the clipped surrogate between ``bapo_bounds`` of the batch; arguments as there.

    ``aux``: as ``bounded_surrogate``, and the bounds ``low`` and ``high`` at each token.

    From "BAPO", arXiv:2510.18927, algorithm 1, line 20, and its released code, without the code's dual clip. Differs
    from the paper in the search for the bounds, as ``bapo_bounds`` says.

    >>> import jax.numpy as jnp
    >>> old, a = jnp.zeros((1, 2)), jnp.array([[1.0, -8.0]])
    >>> terms = bapo_loss(jnp.log(jnp.array([[5.0, 1.0]])), old, a, a != 0, target=0.25)
    >>> round(float(terms.aux["low"][0, 0]), 4), round(float(terms.aux["high"][0, 0]), 4)  # 2 of 8 is a quarter
    (0.9, 2.0)
    """
    logp, old_logp, advantages = masked(mask, logp, old_logp, advantages)
    ratio = jnp.exp(log_ratio(logp, old_logp))
    bounds = bapo_bounds(ratio, advantages, mask, low=low, high=high, step=step, target=target)
    terms = bounded_surrogate(ratio, advantages, mask, low=bounds[0], high=bounds[1])
    shown = {name: jnp.where(mask, bound, 0.0) for name, bound in zip(("low", "high"), bounds, strict=True)}
    return TokenTerms(terms.loss, terms.aux | shown)
