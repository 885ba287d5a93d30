"""Losses of preference pairs over sequence log-probabilities (sums, or means where a paper says so).

Arguments in a fixed order: chosen, rejected, then the reference's. Unreduced ``[B]``; ``aux`` has the margin of
implicit rewards and whether the chosen response wins. ``vrpo_loss`` takes margins: with a judge as control variate it
has less variance, and is unbiased where the judge is right.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import reduce
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


def _smoothed(h: Array, label_smoothing: float) -> Array:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing} must lie in [0, 0.5)")
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(h) - label_smoothing * jax.nn.log_sigmoid(-h)


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
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    h = beta * (won - lost)
    return _terms(_smoothed(h, label_smoothing), h)


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
    label_smoothing: float = 0.0,
) -> PairTerms:
    """SimPO: ``-log sigmoid(beta (chosen - rejected) - gamma)`` over *mean* token log-probs, no reference.

    ``label_smoothing = e``: ``(1 - e) L(h - gamma) + e L(gamma - h)``, as in TRL's CPOTrainer.

    From "SimPO", arXiv:2405.14734, eq. 6.
    """
    _check_beta(beta)
    chosen, rejected = _float(chosen_mean_logp, rejected_mean_logp)
    h = beta * (chosen - rejected)
    return _terms(_smoothed(h - gamma, label_smoothing), h)


def cpo_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.1,
    likelihood_weight: float = 1.0,
    label_smoothing: float = 0.0,
) -> PairTerms:
    """CPO: ``-log sigmoid(beta (chosen - rejected)) - likelihood_weight chosen``: no reference, plus NLL.

    ``label_smoothing = e``: ``(1 - e) L(h) + e L(-h)`` in the first term, as in TRL's CPOTrainer.

    From "Contrastive Preference Optimization", arXiv:2401.08417, eqs. 5 and 6.
    """
    _check_beta(beta)
    chosen, rejected = _float(chosen_logp, rejected_logp)
    h = beta * (chosen - rejected)
    return _terms(_smoothed(h, label_smoothing) - likelihood_weight * chosen, h)


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


def length_normalised_dpo_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    chosen_tokens: Float[Array, " B"],
    rejected_tokens: Float[Array, " B"],
    *,
    beta: float = 5.0,
) -> PairTerms:
    """DPO of log-ratios per token: ``-log sigmoid(beta (r_w / |y_w| - r_l / |y_l|))``, ``r = logp - ref_logp``.

    A pair is not won by a long response alone. ``chosen_tokens`` and ``rejected_tokens`` are lengths, at least 1.

    From "Tulu 3: Pushing Frontiers in Open Language Model Post-Training", arXiv:2411.15124, eq. 6 (its ``beta``), and
    TRL's DPOTrainer (``sigmoid_norm``).

    >>> import jax.numpy as jnp
    >>> w, y, z = jnp.array([-4.0]), jnp.array([-6.0]), jnp.zeros(1)
    >>> terms = length_normalised_dpo_loss(w, y, z, z, jnp.array([4.0]), jnp.array([3.0]), beta=1.0)
    >>> round(float(terms.loss[0]), 4)  # -1 against -2 a token
    0.3133
    """
    _check_beta(beta)
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    lengths = (jnp.maximum(x.astype(jnp.float32), 1.0) for x in (chosen_tokens, rejected_tokens))
    h = beta * (won / next(lengths) - lost / next(lengths))
    return _terms(-jax.nn.log_sigmoid(h), h)


def exo_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 1e-3,
) -> PairTerms:
    """EXO on pairs: ``KL(q || p)`` of the policy's choice ``q = sigmoid(h)`` and the label ``p = 1 - label_smoothing``.

    ``q (log q - log(1 - e)) + (1 - q) (log(1 - q) - log e)``, ``h = beta (r_w - r_l)``. DPO descends the other
    direction, ``KL(p || q)``. It is 0 exactly at ``q = 1 - e``: a pair won by more is pulled back.

    From "Towards Efficient Exact Optimization of Language Model Alignment", arXiv:2402.00856, eq. 16.

    >>> import jax.numpy as jnp
    >>> z = jnp.zeros(1)
    >>> round(float(exo_loss(z, z, z, z, label_smoothing=0.1).loss[0]), 4)
    0.5108
    """
    _check_beta(beta)
    if not 0 < label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing} must lie in (0, 0.5): the divergence from a sure label is infinite"
        )
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    h = beta * (won - lost)
    right, wrong = jax.nn.log_sigmoid(h), jax.nn.log_sigmoid(-h)
    loss = jnp.exp(right) * (right - math.log1p(-label_smoothing)) + jnp.exp(wrong) * (
        wrong - math.log(label_smoothing)
    )
    return _terms(loss, h)


def nca_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.1,
) -> PairTerms:
    """NCA on pairs: ``-log sigmoid(b r_w) - 1/2 log sigmoid(-b r_w) - 1/2 log sigmoid(-b r_l)``.

    Each reward is anchored at 0, so that the likelihood of the chosen response does not fall with that of the rejected.

    From "Noise Contrastive Alignment of Language Models with Explicit Rewards", arXiv:2402.05369, section 4, for pairs
    (``alpha`` to 0), as in TRL's DPOTrainer (``nca_pair``).

    >>> import jax.numpy as jnp
    >>> z = jnp.zeros(1)
    >>> round(float(nca_loss(z, z, z, z).loss[0]), 4)  # 2 log 2
    1.3863
    """
    _check_beta(beta)
    won, lost = (beta * x for x in _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp))
    loss = -jax.nn.log_sigmoid(won) - 0.5 * jax.nn.log_sigmoid(-won) - 0.5 * jax.nn.log_sigmoid(-lost)
    return _terms(loss, won - lost)


def bco_loss(
    logp: Float[Array, " B"],
    ref_logp: Float[Array, " B"],
    desirable: Bool[Array, " B"],
    shift: Float[Array, ""],
    *,
    beta: float = 0.1,
) -> PairTerms:
    """BCO on single judged responses: ``-log sigmoid(r - shift)`` or ``-log sigmoid(shift - r)``.

    ``r = beta (logp - ref_logp)``. A classifier of desirable responses whose logit is the implicit reward. ``shift =
    0`` on both responses of a pair is TRL's ``bco_pair``. No gradient to the shift.

    Args:
      shift: mean of ``r`` over responses of both kinds, a running mean in the paper
        (``rewards.shaping.RunningMoments``).

    From "Binary Classifier Optimization for Large Language Model Alignment", arXiv:2404.04656, section 4. Differs from
    the paper in that weights of undesirable responses (its matching of the underlying distribution) are the caller's.

    >>> import jax.numpy as jnp
    >>> terms = bco_loss(jnp.array([2.0, 2.0]), jnp.zeros(2), jnp.array([True, False]), jnp.float32(0.5), beta=0.5)
    >>> [round(float(x), 4) for x in terms.loss]  # r - shift = 0.5
    [0.4741, 0.9741]
    """
    _check_beta(beta)
    logp, ref_logp = _float(logp, ref_logp)
    reward = beta * (logp - jax.lax.stop_gradient(ref_logp)) - jax.lax.stop_gradient(shift.astype(jnp.float32))
    value = jnp.where(desirable, 1.0, -1.0) * reward
    return _terms(-jax.nn.log_sigmoid(value), value)


def apo_zero_unpaired_loss(
    logp: Float[Array, " B"], ref_logp: Float[Array, " B"], desirable: Bool[Array, " B"], *, beta: float = 0.1
) -> PairTerms:
    """APO-zero on single judged responses: ``1 - sigmoid(beta r)`` or ``sigmoid(beta r)``, ``r = logp - ref_logp``.

    The two terms of ``apo_zero_loss``, each on its own response.

    From "Anchored Preference Optimization", arXiv:2408.06266, eq. 5 and TRL's KTOTrainer (``apo_zero_unpaired``).

    >>> import jax.numpy as jnp
    >>> terms = apo_zero_unpaired_loss(jnp.zeros(2), jnp.zeros(2), jnp.array([True, False]))
    >>> terms.loss.tolist()
    [0.5, 0.5]
    """
    _check_beta(beta)
    logp, ref_logp = _float(logp, ref_logp)
    value = jnp.where(desirable, beta, -beta) * (logp - jax.lax.stop_gradient(ref_logp))
    return _terms(1 - jax.nn.sigmoid(value), value)


def _of_equal_rank(x: Array, others: Array) -> Array:
    """The member of ``others`` that has the rank of each member of ``x``: optimal transport in one dimension."""
    return jnp.sort(others)[jnp.argsort(jnp.argsort(x, stable=True), stable=True)]


def aot_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairTerms:
    """AOT on pairs: ``-log sigmoid(beta (u_(k) - v_(k)))`` over the sorted margins of policy ``u`` and reference ``v``.

    ``u = chosen - rejected``, ``v = ref_chosen - ref_rejected``. The k-th smallest margin of the policy is to exceed
    the k-th smallest of the reference: dominance of the distribution, not pair by pair. Row i holds the term of the
    rank of ``u_i``. The batch matters: reduce all rows together.

    From "Distributional Preference Alignment of LLMs via Optimal Transport", arXiv:2406.05882, section 3 (paired), as
    in TRL's DPOTrainer (``aot``).

    >>> import jax.numpy as jnp
    >>> z, u, v = jnp.zeros(2), jnp.array([3.0, 1.0]), jnp.array([0.0, 2.0])  # 3 meets 2, 1 meets 0
    >>> aot_loss(u, z, v, z, beta=1.0).aux["margin"].tolist()
    [1.0, 1.0]
    """
    _check_beta(beta)
    chosen, rejected, ref_chosen, ref_rejected = _float(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    own = chosen - rejected
    h = beta * (own - _of_equal_rank(own, jax.lax.stop_gradient(ref_chosen - ref_rejected)))
    return _terms(_smoothed(h, label_smoothing), h)


def aot_unpaired_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PairTerms:
    """AOT without pairs: ``-log sigmoid(beta (r_w(k) - r_l(k)))`` over the sorted log-ratios of both kinds.

    The chosen and the rejected of a row need not answer one prompt. Row i holds the term of the rank of its chosen
    response; the batch matters.

    From arXiv:2406.05882, section 3 (unpaired), as in TRL's DPOTrainer (``aot_unpaired``).

    >>> import jax.numpy as jnp
    >>> z, w, y = jnp.zeros(2), jnp.array([3.0, 1.0]), jnp.array([0.0, 2.0])
    >>> aot_unpaired_loss(w, y, z, z, beta=1.0).aux["margin"].tolist()
    [1.0, 1.0]
    """
    _check_beta(beta)
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    h = beta * (won - _of_equal_rank(won, lost))
    return _terms(_smoothed(h, label_smoothing), h)


def discopop_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.05,
    tau: float = 0.05,
) -> PairTerms:
    """DiscoPOP (log-ratio modulated): ``(1 - m) (-log sigmoid(h)) + m exp(-h)``, ``m = sigmoid(h / tau)``.

    Logistic on lost pairs, exponential on won ones. Near ``h = 0`` it is not convex. ``tau < 1`` keeps it finite.

    From "Discovering Preference Optimization Algorithms with and for Large Language Models", arXiv:2406.08414, eq. 5.

    >>> import jax.numpy as jnp
    >>> z = jnp.zeros(1)
    >>> round(float(discopop_loss(z, z, z, z).loss[0]), 4)  # (log 2 + 1) / 2
    0.8466
    """
    _check_beta(beta)
    if not 0 < tau < 1:
        raise ValueError(f"tau={tau} must lie in (0, 1)")
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    h = beta * (won - lost)
    exponential = jnp.exp(-h + jax.nn.log_sigmoid(h / tau))  # as one exponent: e^-h alone overflows on lost pairs
    return _terms(jax.nn.sigmoid(-h / tau) * -jax.nn.log_sigmoid(h) + exponential, h)


def reverse_kl_slope(log_ratio: Float[Array, " B"]) -> Float[Array, " B"]:
    """``f'(t) = log t`` (and a constant) of ``f_dpo_loss`` with ``log t = logp - ref_logp``: DPO itself."""
    return log_ratio.astype(jnp.float32)


def forward_kl_slope(log_ratio: Float[Array, " B"]) -> Float[Array, " B"]:
    """``-1 / t``: covers what the reference does. Held where a response is e^40 times rarer than in the reference."""
    return -jnp.exp(jnp.minimum(-log_ratio.astype(jnp.float32), 40.0))


def jensen_shannon_slope(log_ratio: Float[Array, " B"]) -> Float[Array, " B"]:
    """``log(t / (1 + t))``: between the two; bounded above by 0."""
    return jax.nn.log_sigmoid(log_ratio.astype(jnp.float32))


def alpha_divergence_slope(log_ratio: Float[Array, " B"], *, alpha: float = 0.5) -> Float[Array, " B"]:
    """``t^(alpha - 1) / (alpha - 1)``: the reverse KL's for alpha to 1 (up to a constant), the forward KL's at 0.

    >>> import jax.numpy as jnp
    >>> float(alpha_divergence_slope(jnp.log(jnp.array([4.0])), alpha=0.5)[0])
    -1.0
    """
    if alpha == 1:
        raise ValueError("alpha=1 is the reverse KL: use reverse_kl_slope")
    return jnp.exp(jnp.minimum((alpha - 1) * log_ratio.astype(jnp.float32), 40.0)) / (alpha - 1)


def f_dpo_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.1,
    slope: Callable[[Array], Array] = jensen_shannon_slope,
) -> PairTerms:
    """f-DPO: ``-log sigmoid(beta (f'(t_w) - f'(t_l)))``, ``t = pi / ref``: DPO under another divergence.

    Args:
      slope: ``f'`` as a function of ``log t``, up to a constant: ``reverse_kl_slope`` (DPO), ``forward_kl_slope``,
        ``jensen_shannon_slope`` or ``alpha_divergence_slope``.

    From "Beyond Reverse KL: Generalizing Direct Preference Optimization with Diverse Divergence Constraints",
    arXiv:2309.16240, section 4, with the constants that TRL's DPOTrainer drops (``f_divergence_type``).

    >>> import jax.numpy as jnp
    >>> w, z = jnp.log(jnp.array([3.0])), jnp.zeros(1)
    >>> round(float(f_dpo_loss(w, z, z, z, beta=1.0).loss[0]), 4)  # log(3/4) - log(1/2)
    0.5108
    """
    _check_beta(beta)
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    h = beta * (slope(won) - slope(lost))
    return _terms(-jax.nn.log_sigmoid(h), h)


def wpo_weights(
    logp: Float[Array, "B T"], collision: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, " B"]:
    """``exp(mean_t (logp_t - log sum_v pi_v^2))``: how likely a response is under the trained policy. No gradient.

    Near 1 for a response of its own, near 0 for one that it would not write; an empty mask gives 1. The weight of a
    pair is the product of both responses' (``wpo_loss``).

    Args:
      collision: ``sum_v pi_v^2`` of each next-token distribution (``logprobs.token_collision``).

    From "WPO: Enhancing RLHF with Weighted Preference Optimization", arXiv:2406.11827, eq. 2 and its sampled alignment.

    >>> import jax.numpy as jnp
    >>> p = jnp.array([[0.5, 0.2]])
    >>> round(float(wpo_weights(jnp.log(p), jnp.array([[0.5, 0.4]]), jnp.ones((1, 2), bool))[0]), 4)  # sqrt(1 * 0.5)
    0.7071
    """
    logp = jnp.where(mask, logp.astype(jnp.float32), 0.0)
    collision = jnp.where(mask, jnp.maximum(collision.astype(jnp.float32), 1e-30), 1.0)
    return jax.lax.stop_gradient(jnp.exp(reduce.sequences(logp - jnp.log(collision), mask, mode="mean")))


def wpo_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    weights: Float[Array, " B"],
    *,
    beta: float = 0.1,
) -> PairTerms:
    """WPO: DPO's loss of each pair times ``weights``, the product of both ``wpo_weights``; no gradient through them.

    From "WPO: Enhancing RLHF with Weighted Preference Optimization", arXiv:2406.11827, eq. 2.

    >>> import jax.numpy as jnp
    >>> z = jnp.zeros(1)
    >>> round(float(wpo_loss(z, z, z, z, jnp.array([0.5])).loss[0]), 4)
    0.3466
    """
    terms = dpo_loss(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, beta=beta)
    return terms._replace(loss=jax.lax.stop_gradient(weights.astype(jnp.float32)) * terms.loss)


def length_desensitised_logp(
    logp: Float[Array, "B T"], mask: Bool[Array, "B T"], shared_tokens: Int[Array, " B"], *, alpha: float = 0.5
) -> Float[Array, " B"]:
    """LD-DPO: the log-probability of the first ``shared_tokens`` trained tokens, and ``alpha`` times that of the rest.

    ``shared_tokens`` is the length of the shorter response of the pair: what exceeds it counts less. Pass the results
    of policy and reference to ``dpo_loss``; ``alpha = 1`` is DPO, 0 cuts both to one length.

    From "Length Desensitization in Direct Preference Optimization", arXiv:2409.06411, and TRL's DPOTrainer
    (``ld_alpha``).

    >>> import jax.numpy as jnp
    >>> mask = jnp.array([[False, True, True, True]])
    >>> length_desensitised_logp(jnp.array([[-9.0, -1.0, -2.0, -4.0]]), mask, jnp.array([2])).tolist()
    [-5.0]
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha} must lie in [0, 1]")
    place = jnp.cumsum(mask.astype(jnp.int32), axis=1)
    share = jnp.where(place <= shared_tokens[:, None], 1.0, alpha)
    return reduce.sequences(jnp.where(mask, share * jnp.where(mask, logp.astype(jnp.float32), 0.0), 0.0), mask)


def alphapo_loss(
    chosen_mean_logp: Float[Array, " B"],
    rejected_mean_logp: Float[Array, " B"],
    *,
    beta: float = 2.5,
    gamma: float = 0.25,
    alpha: float = 0.25,
) -> PairTerms:
    """AlphaPO: SimPO with the reward ``(1 - p^-alpha) / alpha`` of the mean probability ``p = exp(mean logp)``.

    ``-log sigmoid(beta (r_w - r_l) - gamma)``. ``alpha`` to 0 is ``simpo_loss``; above it, a response that is unlikely
    moves more.

    From "AlphaPO: Reward Shape Matters for LLM Alignment", arXiv:2501.03884, and TRL's CPOTrainer (``alpha``). Differs
    from the paper in ``gamma``, which it gives as a share of ``beta``.

    >>> import jax.numpy as jnp
    >>> w, y = jnp.log(jnp.array([0.25])), jnp.log(jnp.array([0.0625]))
    >>> float(alphapo_loss(w, y, beta=1.0, gamma=0.0, alpha=0.5).aux["margin"][0])  # (1 - 2)/0.5 - (1 - 4)/0.5
    4.0
    """
    _check_beta(beta)
    if alpha == 0:
        raise ValueError("alpha=0 is simpo_loss")
    chosen, rejected = _float(chosen_mean_logp, rejected_mean_logp)
    reward = (-jnp.expm1(jnp.minimum(-alpha * x, 40.0)) / alpha for x in (chosen, rejected))
    h = beta * (next(reward) - next(reward))
    return _terms(-jax.nn.log_sigmoid(h - gamma), h)


def tpo_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    gold_mean_logp: Float[Array, " B"],
    *,
    beta: float = 0.01,
    gamma: float = 0.0,
    likelihood_weight: float = 1.0,
) -> PairTerms:
    """TPO: ``-log sigmoid(beta (chosen - rejected) - gamma) - likelihood_weight gold``.

    A third, gold response is imitated; no reference. With *mean* log-probabilities and ``gamma > 0`` it is TPO-L.

    Args:
      gold_mean_logp: mean log-probability per token of the best response to the prompt.

    From "Triple Preference Optimization", arXiv:2405.16681, and TRL's TPOTrainer. Differs from TRL in that each gold
    response counts alike, whatever its length.

    >>> import jax.numpy as jnp
    >>> z = jnp.zeros(1)
    >>> round(float(tpo_loss(z, z, jnp.array([-2.0]), likelihood_weight=0.5).loss[0]), 4)
    1.6931
    """
    _check_beta(beta)
    chosen, rejected, gold = _float(chosen_logp, rejected_logp, gold_mean_logp)
    h = beta * (chosen - rejected)
    return _terms(-jax.nn.log_sigmoid(h - gamma) - likelihood_weight * gold, h)


def xpo_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    ref_sample_logp: Float[Array, " B"],
    *,
    beta: float = 0.1,
    alpha: float = 1e-5,
) -> PairTerms:
    """XPO: DPO's loss plus ``alpha log pi(y')`` of a response ``y'`` that the reference wrote: optimism.

    The policy is paid to find the reference's responses unlikely, so that it explores.

    Args:
      ref_sample_logp: the *policy's* log-probability of the reference's response, which is one of the pair.

    From "Exploratory Preference Optimization", arXiv:2405.21046, algorithm 1.

    >>> import jax.numpy as jnp
    >>> z = jnp.zeros(1)
    >>> round(float(xpo_loss(z, z, z, z, jnp.array([-10.0]), alpha=0.01).loss[0]), 4)
    0.5931
    """
    terms = dpo_loss(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, beta=beta)
    return terms._replace(loss=terms.loss + alpha * ref_sample_logp.astype(jnp.float32))


def dpop_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.3,
    penalty: float = 50.0,
) -> PairTerms:
    """DPO-positive: ``-log sigmoid(beta (r_w - r_l - penalty max(0, -r_w)))``, ``r = logp - ref_logp``.

    While the chosen response is less likely than under the reference, raising it counts ``1 + penalty`` times.

    From "Smaug: Fixing Failure Modes of Preference Optimisation with DPO-Positive", arXiv:2402.13228, eq. 3.

    >>> import jax.numpy as jnp
    >>> z = jnp.zeros(1)
    >>> float(dpop_loss(jnp.array([-1.0]), jnp.array([-2.0]), z, z, beta=1.0, penalty=3.0).aux["margin"][0])
    -2.0
    """
    _check_beta(beta)
    if penalty < 0:
        raise ValueError(f"penalty={penalty} must not be negative")
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    h = beta * (won - lost - penalty * jnp.maximum(-won, 0.0))
    return _terms(-jax.nn.log_sigmoid(h), h)


def tdpo1_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    chosen_kl: Float[Array, " B"],
    rejected_kl: Float[Array, " B"],
    *,
    beta: float = 0.1,
) -> PairTerms:
    """TDPO1: ``-log sigmoid(beta (r_w - r_l - (D_l - D_w)))`` with the sequential forward KL ``D`` of each response.

    Args:
      chosen_kl: ``D_w = sum_t KL(ref || pi)`` over the next-token distributions along the chosen response, with
        gradient: ``reduce.sequences(distill.forward_kl_loss(logits, ref_logits, mask).loss, mask)``.
      rejected_kl: ``D_l``, likewise.

    From "Token-level Direct Preference Optimization", arXiv:2404.11999, eq. 15.

    >>> import jax.numpy as jnp
    >>> z = jnp.zeros(1)
    >>> float(tdpo1_loss(z, z, z, z, jnp.array([3.0]), jnp.array([1.0]), beta=1.0).aux["margin"][0])
    2.0
    """
    _check_beta(beta)
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    chosen_kl, rejected_kl = _float(chosen_kl, rejected_kl)
    h = beta * (won - lost - (rejected_kl - chosen_kl))
    return _terms(-jax.nn.log_sigmoid(h), h)


def tdpo2_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    chosen_kl: Float[Array, " B"],
    rejected_kl: Float[Array, " B"],
    *,
    beta: float = 0.1,
    alpha: float = 0.5,
) -> PairTerms:
    """TDPO2: ``-log sigmoid(beta (r_w - r_l - alpha (D_l - sg(D_w))))``: no gradient through the chosen response's KL.

    Arguments as in ``tdpo1_loss``.

    From "Token-level Direct Preference Optimization", arXiv:2404.11999, eq. 18.

    >>> import jax.numpy as jnp
    >>> z = jnp.zeros(1)
    >>> float(tdpo2_loss(z, z, z, z, jnp.array([3.0]), jnp.array([1.0]), beta=1.0).aux["margin"][0])
    1.0
    """
    chosen_kl = jax.lax.stop_gradient(chosen_kl)
    scaled = (alpha * x.astype(jnp.float32) for x in (chosen_kl, rejected_kl))
    return tdpo1_loss(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, *scaled, beta=beta)


def cal_dpo_loss(
    chosen_logp: Float[Array, " B"],
    rejected_logp: Float[Array, " B"],
    ref_chosen_logp: Float[Array, " B"],
    ref_rejected_logp: Float[Array, " B"],
    *,
    beta: float = 0.1,
    weight: float = 1.0,
) -> PairTerms:
    """Cal-DPO: ``-log sigmoid(r_w - r_l) + weight ((r_w - 1/(2 beta))^2 + (r_l + 1/(2 beta))^2)``.

    ``r = logp - ref_logp`` is held on the scale of rewards of +-1/2 instead of growing without bound.

    From "Cal-DPO: Calibrated Direct Preference Optimization for Language Model Alignment", arXiv:2412.14516; its
    released code takes ``weight = 0.5`` and no reference.

    >>> import jax.numpy as jnp
    >>> w, y, z = jnp.array([5.0]), jnp.array([-5.0]), jnp.zeros(1)
    >>> round(float(cal_dpo_loss(w, y, z, z).loss[0]), 6)  # calibrated: log(1 + e^-10) is left
    4.5e-05
    """
    _check_beta(beta)
    won, lost = _margins(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    goal = 0.5 / beta
    return _terms(-jax.nn.log_sigmoid(won - lost) + weight * ((won - goal) ** 2 + (lost + goal) ** 2), won - lost)


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
