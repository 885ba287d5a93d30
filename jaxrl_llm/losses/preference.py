"""Losses of preference pairs over sequence log-probabilities (sums, or means where a paper says so).

Arguments in a fixed order: chosen, rejected, then the reference's. Unreduced ``[B]``; ``aux`` has the margin of
implicit rewards and whether the chosen response wins. ``vrpo_loss`` takes margins: with a judge as control variate it
has less variance, and is unbiased where the judge is right.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.types import PairTerms


def _check_beta(beta: float) -> None:
    if beta <= 0:
        raise ValueError(f"beta={beta} must be positive")


def _terms(loss: Array, margin: Array) -> PairTerms:
    margin = jax.lax.stop_gradient(margin)
    return PairTerms(loss, {"margin": margin, "accuracy": (margin > 0).astype(jnp.float32)})


def _float(*arrays: Array) -> tuple[Array, ...]:
    return tuple(x.astype(jnp.float32) for x in arrays)


def _margins(chosen: Array, rejected: Array, ref_chosen: Array, ref_rejected: Array) -> tuple[Array, Array]:
    """Log-ratios of chosen and rejected against a fixed reference."""
    chosen, rejected, ref_chosen, ref_rejected = _float(chosen, rejected, ref_chosen, ref_rejected)
    ref_chosen, ref_rejected = jax.lax.stop_gradient((ref_chosen, ref_rejected))
    return chosen - ref_chosen, rejected - ref_rejected


def dpo_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairTerms:
    """DPO: ``-log sigmoid(beta ((chosen - ref_chosen) - (rejected - ref_rejected)))``.

    ``label_smoothing = e`` is conservative DPO: ``(1 - e) L(h) + e L(-h)``.

    From "Direct Preference Optimization", arXiv:2305.18290, eq. 7; smoothing from Mitchell's cDPO note.

    >>> import jax.numpy as jnp
    >>> z = jnp.zeros(1)
    >>> round(float(dpo_loss(z, z, z, z).loss[0]), 4)
    0.6931
    """
    _check_beta(beta)
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing} must lie in [0, 0.5)")
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    h = beta * (won - lost)
    loss = -(1 - label_smoothing) * jax.nn.log_sigmoid(h) - label_smoothing * jax.nn.log_sigmoid(-h)
    return _terms(loss, h)


def robust_dpo_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.1,
    flip_rate: float = 0.1,
) -> PairTerms:
    """rDPO: ``((1 - e) L(h) - e L(-h)) / (1 - 2 e)``, ``L = -log sigmoid``: DPO's loss without the bias of flips.

    In expectation over labels flipped with probability ``flip_rate = e`` it is ``dpo_loss`` of the true labels. It is
    not bounded below: a pair that is won by far is pushed further.

    From "Provably Robust DPO: Aligning Language Models with Noisy Feedback", arXiv:2403.00409, section 3.

    >>> import jax.numpy as jnp
    >>> z = jnp.zeros(1)
    >>> round(float(robust_dpo_loss(z, z, z, z).loss[0]), 4)
    0.6931
    """
    _check_beta(beta)
    if not 0 <= flip_rate < 0.5:
        raise ValueError(f"flip_rate={flip_rate} must lie in [0, 0.5)")
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    h = beta * (won - lost)
    true, flipped = -jax.nn.log_sigmoid(h), -jax.nn.log_sigmoid(-h)
    return _terms(((1 - flip_rate) * true - flip_rate * flipped) / (1 - 2 * flip_rate), h)


def hinge_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.1,
) -> PairTerms:
    """``max(0, 1 - beta h)``, ``h`` the difference of log-ratios: a pair won by ``1 / beta`` trains nothing.

    Without a reference (zeros) it is SLiC's calibration loss with margin ``1 / beta``, times ``beta``.

    From "Statistical Rejection Sampling Improves Preference Optimization", arXiv:2309.06657, section 3.2 (hinge-norm);
    SLiC-HF: arXiv:2305.10425, eq. 1.

    >>> import jax.numpy as jnp
    >>> z = jnp.zeros(2)
    >>> hinge_loss(jnp.array([5.0, 20.0]), z, z, z).loss.tolist()
    [0.5, 0.0]
    """
    _check_beta(beta)
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    h = beta * (won - lost)
    return _terms(jnp.maximum(1 - h, 0.0), h)


def ipo_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    tau: float = 0.1,
) -> PairTerms:
    """IPO: ``(h - 1 / (2 tau))^2`` with ``h`` the difference of log-ratios.

    From "A General Theoretical Paradigm to Understand Learning from Human Preferences", arXiv:2310.12036, eq. 17.
    Log-probabilities are sums there; some implementations take means per token: pass those to get their form.
    """
    if tau <= 0:
        raise ValueError(f"tau={tau} must be positive")
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    return _terms((won - lost - 1 / (2 * tau)) ** 2, tau * (won - lost))


def kto_loss(
    logp: Float[Array, " B"],
    ref_logp: Float[Array, " B"],
    desirable: Bool[Array, " B"],
    kl: Float[Array, ""],
    *,
    beta: float = 0.1,
    weight_desirable: float = 1.0,
    weight_undesirable: float = 1.0,
) -> PairTerms:
    """KTO on single judged responses: ``w_d (1 - sigmoid(beta (r - z)))`` or ``w_u (1 - sigmoid(beta (z - r)))``.

    ``r = logp - ref_logp``; ``z = max(0, kl)``, the batch's estimate of KL(pi || ref) from mismatched pairs, without
    gradient.

    From "KTO: Model Alignment as Prospect Theoretic Optimization", arXiv:2402.01306, eq. 8.
    """
    _check_beta(beta)
    logp, ref_logp = _float(logp, ref_logp)
    reward = logp - jax.lax.stop_gradient(ref_logp)
    baseline = jnp.maximum(jax.lax.stop_gradient(kl.astype(jnp.float32)), 0.0)
    sign = jnp.where(desirable, 1.0, -1.0)
    weight = jnp.where(desirable, weight_desirable, weight_undesirable)
    value = sign * beta * (reward - baseline)
    return _terms(weight * (1 - jax.nn.sigmoid(value)), value)


def orpo_loss(
    chosen_mean_logp: Float[Array, " B"],
    rejected_mean_logp: Float[Array, " B"],
    *,
    weight: float = 0.1,
) -> PairTerms:
    """ORPO: ``-chosen - weight log sigmoid(log odds(chosen) - log odds(rejected))`` over *mean* token log-probs.

    ``log odds(p) = log p - log(1 - p)``. No reference.

    From "ORPO: Monolithic Preference Optimization without Reference Model", arXiv:2403.07691, eqs. 6 and 7.
    """
    chosen, rejected = _float(chosen_mean_logp, rejected_mean_logp)

    def log_odds(logp: Array) -> Array:
        # log(1 - e^logp) without cancellation; a log-prob of 0 is kept off the pole
        logp = jnp.minimum(logp, -1e-6)
        return logp - jnp.log(-jnp.expm1(logp))

    difference = log_odds(chosen) - log_odds(rejected)
    return _terms(-chosen - weight * jax.nn.log_sigmoid(difference), difference)


def simpo_loss(
    chosen_mean_logp: Float[Array, " B"],
    rejected_mean_logp: Float[Array, " B"],
    *,
    beta: float = 2.0,
    gamma: float = 1.0,
) -> PairTerms:
    """SimPO: ``-log sigmoid(beta (chosen - rejected) - gamma)`` over *mean* token log-probs, no reference.

    From "SimPO", arXiv:2405.14734, eq. 6.
    """
    _check_beta(beta)
    chosen, rejected = _float(chosen_mean_logp, rejected_mean_logp)
    h = beta * (chosen - rejected)
    return _terms(-jax.nn.log_sigmoid(h - gamma), h)


def cpo_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.1,
    likelihood_weight: float = 1.0,
) -> PairTerms:
    """CPO: ``-log sigmoid(beta (chosen - rejected)) - likelihood_weight chosen``: no reference, plus NLL.

    From "Contrastive Preference Optimization", arXiv:2401.08417, eqs. 5 and 6.
    """
    _check_beta(beta)
    chosen, rejected = _float(chosen_logp, rejected_logp)
    h = beta * (chosen - rejected)
    return _terms(-jax.nn.log_sigmoid(h) - likelihood_weight * chosen, h)


def apo_zero_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.1,
) -> PairTerms:
    """APO-zero: ``(1 - sigmoid(beta r_w)) + sigmoid(beta r_l)``: raise the chosen, lower the rejected.

    From "Anchored Preference Optimization", arXiv:2408.06266, eq. 5. For pairs whose chosen response is better than
    the model's own.
    """
    _check_beta(beta)
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    return _terms(1 - jax.nn.sigmoid(beta * won) + jax.nn.sigmoid(beta * lost), beta * (won - lost))


def apo_down_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.1,
) -> PairTerms:
    """APO-down: ``sigmoid(beta r_w) + (1 - sigmoid(beta (r_w - r_l)))``: lower both, the rejected more.

    From "Anchored Preference Optimization", arXiv:2408.06266, eq. 6. For pairs worse than the model's own responses.
    """
    _check_beta(beta)
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    return _terms(jax.nn.sigmoid(beta * won) + 1 - jax.nn.sigmoid(beta * (won - lost)), beta * (won - lost))


def rpo_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.01,
    eta: float = 0.005,
    baseline_logp: Float[Array, " B"] | None = None,
) -> PairTerms:
    """RPO: ``L_DPO(beta) - eta beta log pi(a0 | x)`` with *sum* log-probabilities; ``a0`` is the chosen response.

    From "Provably Mitigating Overoptimization in RLHF: Your SFT Loss is Implicitly an Adversarial Regularizer",
    arXiv:2405.16436, eq. 4.4 with chosen responses as the baseline policy. See ``rpo_mean_loss`` for a second form.

    Args:
      baseline_logp: log-probabilities of responses ``a0`` of another baseline policy, for example the reference.
    """
    terms = dpo_loss(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, beta=beta)
    baseline = chosen_logp if baseline_logp is None else baseline_logp
    return terms._replace(loss=terms.loss - eta * beta * baseline.astype(jnp.float32))


def rpo_mean_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    chosen_tokens: Float[Array, " B"],
    *,
    beta: float = 0.5,
    weight: float = 0.2,
) -> PairTerms:
    """``L_DPO(beta) - weight chosen_logp / chosen_tokens``: the second released form of RPO, on the mean per token.

    Its scale is not that of ``rpo_loss``: ``weight = eta beta T`` agrees for responses of ``T`` tokens.

    From arXiv:2405.16436 and its released code; an empty response adds nothing.

    >>> import jax.numpy as jnp
    >>> z, w = jnp.zeros(1), jnp.array([-40.0])
    >>> round(float(rpo_mean_loss(w, w, w, w, jnp.array([20.0])).loss[0]), 4)
    1.0931
    """
    terms = dpo_loss(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, beta=beta)
    mean = chosen_logp.astype(jnp.float32) / jnp.maximum(chosen_tokens.astype(jnp.float32), 1.0)
    return terms._replace(loss=terms.loss - weight * mean)


def logistic(margin: Float[Array, " B"]) -> Float[Array, " B"]:
    """``-log sigmoid(h)``: the loss of DPO."""
    return -jax.nn.log_sigmoid(margin.astype(jnp.float32))


def ramp(margin: Float[Array, " B"]) -> Float[Array, " B"]:
    """``relu(1 - h) - relu(-0.5 - h)``: bounded, 1.5 below -0.5 and 0 above 1.

    >>> import jax.numpy as jnp
    >>> ramp(jnp.array([0.0, 2.0, -0.5, -2.0])).tolist()
    [1.0, 0.0, 1.5, 1.5]
    """
    h = margin.astype(jnp.float32)
    return jax.nn.relu(1.0 - h) - jax.nn.relu(-0.5 - h)


def vrpo_loss(
    margin: Float[Array, " B"],
    judged: Float[Array, " B"],
    fresh_margin: Float[Array, " B"],
    fresh_judged: Float[Array, " B"],
    *,
    phi: Callable[[Array], Array] = logistic,
) -> PairTerms:
    """``phi(h) - [g phi(h) + (1 - g) phi(-h)] + g* phi(h*) + (1 - g*) phi(-h*)``.

    ``h`` is the margin of a labelled pair, its winner first, ``g`` the judge's probability of that label; ``h*`` and
    ``g*`` belong to an unlabelled pair of the reference policy. Where the judge is right the first three terms have
    mean 0, where the pairs are drawn alike the last two do: unbiased if either holds. No gradient reaches the judge.

    From "Robust Reinforcement Learning from Human Feedback for Large Language Models Fine-Tuning" (VRPO),
    arXiv:2504.03784, section 4; ``ramp`` is the ``phi`` of its published code.

    >>> import jax.numpy as jnp
    >>> terms = vrpo_loss(jnp.array([1.0]), jnp.array([0.7]), jnp.array([-0.5]), jnp.array([0.4]))
    >>> round(float(terms.loss[0]), 4)
    0.3741
    """
    g, fresh = (jax.lax.stop_gradient(x.astype(jnp.float32)) for x in (judged, fresh_judged))
    known = phi(margin) - (g * phi(margin) + (1.0 - g) * phi(-margin))
    free = fresh * phi(fresh_margin) + (1.0 - fresh) * phi(-fresh_margin)
    shown = jax.lax.stop_gradient(margin.astype(jnp.float32))
    return PairTerms(known + free, {"margin": shown, "accuracy": (shown > 0).astype(jnp.float32)})
