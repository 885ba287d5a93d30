"""Makes derived.json: what TRL, verl, OpenRLHF and papers compute for one literal batch, where none can be run here.

Run:  python -m tests.golden.make_derived   (NumPy alone)
Each function follows the definition in the peer's source at the commit below, with the peer's own order of clamps and
normalisations, in float64 and without any of this library; gradients are central differences. What no peer has follows
the paper's equation, or its released code, named beside it. ``make_peers`` calls the peers themselves, where torch and
trl are installed.
"""

import json
import math
import pathlib

import numpy as np

from tests.golden.make_peers import INPUTS, rounded

PATH = pathlib.Path(__file__).with_name("derived.json")
SEEN = {"trl": "f2cd57710 (2026-07-24)", "verl": "b178a3cd5 (2026-01-29)", "openrlhf": "3c3be623 (2026-08-13)"}
X = {k: np.asarray(v, np.float64) for k, v in INPUTS.items()}
MASK, A = X["mask"], X["sequence_advantages"][:, None]
LOGP, OLD, REF, SAMPLER = (X[k] for k in ("logp", "old_logp", "ref_logp", "sampler_logp"))
PAIR = (X["rejected"], X["ref_chosen"], X["ref_rejected"])
# other arrays of one place each, shaped by the inputs
COLLISION = np.exp(0.5 * REF)
GOLD_MEAN = np.asarray([-1.0, -0.5, -2.0, -0.25])
CHOSEN_KL, REJECTED_KL = np.asarray([0.5, 2.0, 0.1, 6.0]), np.asarray([1.5, 0.25, 0.8, 4.0])
UNTIED = np.asarray([0.0, 0.0, 0.1, 0.0])  # sorting has no derivative at a tie


def gradient(loss, at, step=1e-6):
    """Central differences of a scalar function of an array."""
    out = np.zeros_like(at)
    for i in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[i] += step
        down[i] -= step
        out[i] = (loss(up) - loss(down)) / (2 * step)
    return out


def log_sigmoid(x):
    return -np.logaddexp(0.0, -x)


def sigmoid(x):
    return np.exp(log_sigmoid(x))


def smoothed(h, e):
    return -(1 - e) * log_sigmoid(h) - e * log_sigmoid(-h)


def log_softmax(x):
    top = x.max(-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))


# --- TRL's DPOTrainer, CPOTrainer, TPOTrainer, XPOTrainer: mean over pairs, gradient by the chosen log-probabilities


def _dpo(name, chosen):  # noqa: PLR0911 - a table
    rejected, ref_chosen, ref_rejected = PAIR
    won, lost = chosen - ref_chosen, rejected - ref_rejected
    delta, beta, e = won - lost, 0.1, 0.1
    if name == "exo_pair":
        q = sigmoid(beta * delta)
        return q * (np.log(q) - math.log1p(-e)) + (1 - q) * (np.log1p(-q) - math.log(e))
    if name == "nca_pair":
        w, y = beta * won, beta * lost
        return -log_sigmoid(w) - 0.5 * log_sigmoid(-w) - 0.5 * log_sigmoid(-y)
    if name == "bco_pair":
        return -log_sigmoid(beta * won) - log_sigmoid(-beta * lost)
    if name == "sppo_hard":
        return (won - 0.5 / beta) ** 2 + (lost + 0.5 / beta) ** 2
    if name == "aot":
        return smoothed(beta * (np.sort(chosen - rejected) - np.sort(ref_chosen - ref_rejected)), e)
    if name == "aot_unpaired":
        return smoothed(beta * (np.sort(won + UNTIED) - np.sort(lost)), e)
    if name == "discopop":
        h = beta * delta
        m = sigmoid(h / 0.05)
        return -log_sigmoid(h) * (1 - m) + np.exp(-h) * m
    if name == "sigmoid_norm":
        return -log_sigmoid(beta * (won / X["chosen_length"] - lost / X["rejected_length"]))
    if name == "forward_kl":
        return -log_sigmoid(beta * (-np.exp(-won) + np.exp(-lost)))
    if name == "js_divergence":
        return -log_sigmoid(beta * (log_sigmoid(won) - log_sigmoid(lost)))
    if name == "alpha_divergence":
        return -log_sigmoid(beta * (np.exp(-0.05 * won) - np.exp(-0.05 * lost)) / -0.05)
    if name == "xpo":
        return -log_sigmoid(beta * delta) + 0.01 * np.where(np.arange(4) % 2 == 0, chosen, rejected)
    if name == "dpop":  # arXiv:2402.13228, eq. 3
        return -log_sigmoid(beta * (delta - 5.0 * np.maximum(0, ref_chosen - chosen)))
    if name == "tdpo1":  # arXiv:2404.11999, eq. 15
        return -log_sigmoid(beta * delta - (beta * REJECTED_KL - beta * CHOSEN_KL))
    if name == "tdpo2":  # eq. 18
        return -log_sigmoid(beta * delta - 0.7 * (beta * REJECTED_KL - beta * CHOSEN_KL))
    if name == "cal_dpo":  # arXiv:2412.14516, eq. 12: DPO without its beta, and both rewards regressed to +-1/2
        return -log_sigmoid(delta) + (won - 1 / (2 * beta)) ** 2 + (lost + 1 / (2 * beta)) ** 2
    raise KeyError(name)


def _reference_free(name, chosen):
    rejected = X["rejected_mean"]
    if name == "simpo_smoothed":
        return smoothed(0.3 * (chosen - rejected - 0.6 / 0.3), 0.2)
    if name == "cpo_smoothed":
        return smoothed(0.3 * (chosen - rejected), 0.2)
    if name == "alphapo":
        reward = [(1 - np.exp(x) ** -0.25) / 0.25 for x in (chosen, rejected)]
        return -log_sigmoid(2.0 * (reward[0] - reward[1] - 0.5 / 2.0))
    if name == "tpo_l":
        return -log_sigmoid(2.0 * (chosen - rejected - 0.5 / 2.0)) - 0.7 * GOLD_MEAN
    raise KeyError(name)


def pairs():
    names = ("exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "discopop", "sigmoid_norm",
             "forward_kl", "js_divergence", "alpha_divergence", "xpo", "dpop", "tdpo1", "tdpo2", "cal_dpo")  # fmt: skip
    for name in names:
        yield name, lambda x, n=name: _dpo(n, x).mean(), X["chosen"]
    for name in ("simpo_smoothed", "cpo_smoothed", "alphapo", "tpo_l"):
        yield name, lambda x, n=name: _reference_free(n, x).mean(), X["chosen_mean"]
    good = np.arange(4) < 2
    reward = 0.1 * (X["chosen"] - X["ref_chosen"])
    yield (
        "apo_zero_unpaired",
        lambda x: np.where(good, 1 - sigmoid(0.1 * (x - X["ref_chosen"])), sigmoid(0.1 * (x - X["ref_chosen"]))).mean(),
        X["chosen"],
    )
    shift = reward.mean()  # the first update of TRL's running mean is the batch's
    yield (
        "bco_unpaired",
        lambda x: -log_sigmoid(np.where(good, 1, -1) * (0.1 * (x - X["ref_chosen"]) - shift)).mean(),
        X["chosen"],
    )


# --- TRL's GRPOTrainer and its experimental trainers: of log-probabilities [B, T]


def vespo(logp):
    log_w = np.clip((np.clip(LOGP - OLD, -20, 20) * MASK).sum(1, keepdims=True), math.log(1e-8), 20)
    k, lam = np.where(A >= 0, 2.0, 3.0), np.where(A >= 0, 3.0, 2.0)
    phi = np.exp(lam + k * log_w - lam * np.exp(log_w))
    return (-phi * A * logp * MASK).sum() / MASK.sum()


def bias_corrected_kl(logp):
    k3 = np.exp(REF - logp) - (REF - logp) - 1
    return (np.exp(logp - OLD) * k3 * MASK).sum() / MASK.sum()


def a2po(logp):
    gap = 0.2 * ((logp - REF) * MASK).sum(1) - (X["rewards"] - X["greedy_rewards"])
    return (gap**2).mean()


def nash_md(logp):
    chance = sigmoid(X["rewards"])
    ratio = LOGP - REF
    return (0.1 * (ratio * logp * MASK).sum(1) - (chance - 0.5) * (logp * MASK).sum(1)).mean()


def iw_opd(logp):
    gap = (REF - OLD) * MASK
    size = np.abs(gap)
    weight = 1 + 0.5 * (1 - (size.cumsum(1) - size) / np.maximum(size.sum(1, keepdims=True), 1e-8))
    return (-logp * weight * gap * MASK).sum() / MASK.sum()


def self_distillation_sampled(logp):
    ratio = np.minimum(np.exp(LOGP - OLD), 2.0)
    return (((LOGP - REF) * logp * ratio * MASK).sum(1) / MASK.sum(1)).mean()


def geo_mean(logp):
    """verl's geo_mean with cliprange_low 0.1 and cliprange_high 0.27, and token-mean over sequences."""
    log, sign = logp - OLD, np.sign(A)
    used = sign * np.minimum(sign * log, sign * np.clip(log, -0.1, 0.27))
    ratio = np.exp((used * MASK).sum(1) / (MASK.sum(1) + 1e-8))
    return (-A[:, 0] * ratio).mean()


# --- papers whose losses of tokens no peer has


def topr(logp):
    """arXiv:2503.14286, section 3: the ratio of the response, cut to [0, 1], for negative ones alone."""
    ratio = np.exp(((LOGP - OLD) * MASK).sum(1, keepdims=True))
    weight = np.where(A > 0, 1.0, np.clip(ratio, 0.0, 1.0))
    return (-weight * A * logp * MASK).sum() / MASK.sum()


def ce_gppo(logp):
    """arXiv:2509.20712, its four cases: gradients beta (1 - eps) and beta (1 + eps) beyond the bounds."""
    total = 0.0
    for b, t in zip(*np.nonzero(MASK), strict=True):
        ratio, at, a = np.exp(logp[b, t] - OLD[b, t]), np.exp(LOGP[b, t] - OLD[b, t]), A[b, 0]
        if at < 0.8 and a < 0:
            ratio = 0.75 * 0.8 / at * ratio
        elif at > 1.28 and a > 0:
            ratio = 0.5 * 1.28 / at * ratio
        total -= ratio * a
    return total / MASK.sum()


def gvpo(logp):
    """arXiv:2504.19599, section 3: the square of both sides' distances from their means, by G - 1; mean of groups."""
    log, losses = ((logp - OLD) * MASK).sum(1), []
    for g in (0, 1):
        rows = X["group_ids"] == g
        gap = 0.3 * (log[rows] - log[rows].mean()) - (X["rewards"][rows] - X["rewards"][rows].mean())
        losses.append(0.5 * (gap**2).sum() / (rows.sum() - 1))
    return np.mean(losses)


def _clipped(logp, low, high):
    ratio = np.exp(logp - OLD)
    return (np.maximum(-A * ratio, -A * np.clip(ratio, low, high)) * MASK).sum() / MASK.sum()


def dcpo(logp):
    """arXiv:2509.02333, section 3.1: |p - q| p <= eps q^2, solved for p / q."""
    q = np.exp(OLD)
    low = [[(x + math.sqrt(max(x * x - 4 * 0.16 * x, 0.0))) / (2 * x) for x in row] for row in q]
    high = [[min((x + math.sqrt(x * x + 4 * 0.2 * x)) / (2 * x), 10.0) for x in row] for row in q]
    return _clipped(logp, np.asarray(low), np.asarray(high))


def _bapo_search():
    """arXiv:2510.18927, its algorithm: bounds widen until positive tokens have their share."""
    ratio, low, high = np.exp(LOGP - OLD), 0.6, 1.2
    while True:
        good = (np.minimum(ratio, high) * A * MASK)[np.broadcast_to(A > 0, MASK.shape)].sum()
        bad = -(np.maximum(ratio, low) * A * MASK)[np.broadcast_to(A < 0, MASK.shape)].sum()
        if good >= 0.84 * bad or high >= 3.0 - 1e-9:
            return low, high
        low, high = (low + 0.05, high) if low < 0.9 - 1e-9 else (low, high + 0.05)


def bapo(logp):
    return _clipped(logp, *_bapo_search())


TOKENS = (vespo, bias_corrected_kl, a2po, nash_md, iw_opd, self_distillation_sampled, geo_mean, topr, ce_gppo, gvpo,
          dcpo, bapo)  # fmt: skip


# --- TRL's self-distillation and GOLD: of logits [B, T, V]


def _divergence(s, t, alpha):
    if alpha == 1:
        return (np.exp(s) * (s - t)).sum(-1)
    m = np.logaddexp(s + math.log(1 - alpha), t + math.log(alpha))
    return alpha * (np.exp(t) * (t - m)).sum(-1) + (1 - alpha) * (np.exp(s) * (s - m)).sum(-1)


def _self_distillation(logits, alpha, k=None, tail=False):
    s, t = log_softmax(logits), log_softmax(X["teacher_logits"])
    mask = X["logits_mask"]
    if k is not None:
        top = np.argsort(-log_softmax(X["logits"]), axis=-1, kind="stable")[..., :k]
        s, t = (np.take_along_axis(x, top, -1) for x in (s, t))
        if tail:
            s, t = (np.concatenate([x, np.log(1 - np.exp(x).sum(-1, keepdims=True))], -1) for x in (s, t))
        else:
            s, t = (log_softmax(x) for x in (s, t))
    ratio = np.minimum(np.exp(np.asarray([[0.1, -0.3, 1.5], [0.0, 0.4, 0.0]])), 2.0)
    each = _divergence(s, t, alpha) * ratio
    return ((each * mask).sum(1) / mask.sum(1)).mean()


def gold_hybrid(logits):
    """Student tokens 0 and 2 are teacher tokens 1 and 3; beta 0.3; weights by overlap."""
    p, q = np.exp(log_softmax(logits)), np.exp(log_softmax(X["teacher_logits"]))
    s, t = p[..., [0, 2]], q[..., [1, 3]]
    m = 0.3 * t + 0.7 * s
    matched = (0.3 * t * np.log(t / m) + 0.7 * s * np.log(s / m)).sum(-1)
    rest = np.abs(np.sort(p[..., [1, 3]], -1) - np.sort(q[..., [0, 2]], -1)).sum(-1)
    mask = X["logits_mask"]
    return ((2 / 4 * matched + 2 / 4 * rest) * mask).sum() / mask.sum()


# a text of four bytes and one of three, by both tokenizers: bytes and ids of the tokens
OWN, OTHER = (([1, 2, 1], [0, 2, 3]), ([2, 1], [1, 0])), (([2, 1, 1], [1, 3, 0]), ([1, 1, 1], [2, 0, 1]))


def _piece_chances(logits, ids, groups):
    """``uld_token_merge_strategy="bayesian"``: the last token's distribution, times the chances of those before it."""
    p = np.exp(log_softmax(logits))
    return np.asarray([p[g[-1]] * np.prod([max(p[k, ids[k]], 1e-8) for k in g[:-1]]) for g in groups])


def _groups(own, other):
    """``_align_by_byte_offsets``."""
    ends = [np.cumsum(x).tolist() for x in (own, other)]
    both, found, before = [e for e in ends[0] if e in ends[1]], ([], []), 0
    for end in both:
        for side in (0, 1):
            found[side].append([k for k, e in enumerate(ends[side]) if before < e <= end])
        before = end
    return found


def aligned(logits, hybrid):
    """``_compute_distillation_loss`` of two texts; hybrid: student tokens 0 and 2 are teacher tokens 1 and 3."""
    losses = []
    for b in (0, 1):
        (sizes, ids), (others, other_ids) = OWN[b], OTHER[b]
        groups, other_groups = _groups(sizes, others)
        p = _piece_chances(logits[b], ids, groups)
        q = _piece_chances(X["teacher_logits"][b], other_ids, other_groups)
        if not hybrid:
            losses.append(np.abs(np.sort(p, -1) - np.sort(q, -1)).sum() / len(p))
            continue
        s, t = p[:, [0, 2]], q[:, [1, 3]]
        m = 0.3 * t + 0.7 * s
        matched = (0.3 * t * np.log(t / m) + 0.7 * s * np.log(s / m)).sum() / len(p)
        rest = np.abs(np.sort(p[:, [1, 3]], -1) - np.sort(q[:, [0, 2]], -1)).sum() / len(p)
        losses.append(2 / 4 * matched + 2 / 4 * rest)
    return np.mean(losses)


LOGITS = {
    "uld_aligned": lambda x: aligned(x, False),
    "gold_aligned": lambda x: aligned(x, True),
    "sdpo_reverse": lambda x: _self_distillation(x, 1),
    "sdft_jsd": lambda x: _self_distillation(x, 0.5),
    "sdft_top_2": lambda x: _self_distillation(x, 0.5, k=2),
    "sdpo_top_2_tail": lambda x: _self_distillation(x, 1, k=2, tail=True),
    "gold_hybrid": gold_hybrid,
}


# --- arrays: verl's advantages and rollout correction, TRL's weights


def optimal_token_baseline(mask, compact):
    scores, out = np.zeros((6, 4)), np.zeros((6, 4))
    for b in range(6):
        scores[b, np.flatnonzero(mask[b])[-1]] = X["rewards"][b]
    returns = (scores * mask)[:, ::-1].cumsum(1)[:, ::-1]
    w = ((1 - 2 * np.exp(OLD) + COLLISION) * mask).cumsum(1)
    for g in (0, 1):
        rows = np.flatnonzero(X["group_ids"] == g)
        places = {b: [t for t in range(4) if mask[b, t]] for b in rows}
        for b in rows:
            for k, t in enumerate(places[b]):
                if compact:
                    peers = [(c, places[c][k]) for c in rows if len(places[c]) > k]
                else:
                    peers = [(c, t) for c in rows if mask[c, t]]
                baseline = sum(returns[i] * w[i] for i in peers) / sum(w[i] for i in peers)
                if compact and len(peers) == 1:  # handle_zero_tail
                    baseline = 0.0
                out[b, t] = returns[b, t] - baseline
    return out


def grpo_passk():
    out = np.zeros(6)
    for g in (0, 1):
        rows = np.flatnonzero(X["group_ids"] == g)
        order = rows[np.argsort(-X["rewards"][rows])]
        first, second = X["rewards"][order[:2]]
        out[order[0]] = (first - second) / (X["rewards"][rows].std(ddof=1) + 1e-6)
    return out


def rejection(distance, over, most):
    log = OLD - SAMPLER
    each = 0.5 * log**2 if distance == "k2" else np.exp(log) - 1 - log
    if over == "token":
        return ((each <= most) * MASK).astype(float)
    if over == "max":
        of = np.where(MASK > 0, each, -np.inf).max(1)
    else:
        of = (each * MASK).sum(1) / (MASK.sum(1) if over == "mean" else 1)
    return ((of <= most)[:, None] * MASK).astype(float)


def normalised(level):
    log = (OLD - SAMPLER) if level == "token" else ((OLD - SAMPLER) * MASK).sum(1, keepdims=True) * np.ones((1, 4))
    weights = np.minimum(np.exp(log) * MASK, 2.0)
    if level == "token":
        return weights / (weights.sum() / MASK.sum())
    return weights / ((weights.sum(1) / MASK.sum(1)).mean())


def off_policy_mask():
    drift = ((SAMPLER - LOGP) * MASK).sum(1, keepdims=True) / MASK.sum(1, keepdims=True)
    return ((A >= 0) | (drift <= -0.08)) * MASK


def wpo_pair_weight():
    weights = np.exp((((LOGP - np.log(COLLISION)) * MASK).sum(1)) / MASK.sum(1))
    return weights[:3] * weights[3:]


def ld_logp():
    place = MASK.cumsum(1)
    shared = np.asarray([2, 1, 2, 1, 3, 3])[:, None]
    return (LOGP * MASK * np.where(place <= shared, 1.0, 0.4)).sum(1)


def adaptive():
    kl = [0.2 * (1 + np.clip(x / 6.0 - 1, -0.2, 0.2) * 256 / 10000) for x in (12.0, 6.3, 0.0)]
    coefficient, out = 0.01, []
    for entropy in (0.1, 0.15, 0.4, 0.5, 0.6):
        coefficient = min(coefficient + 0.004, 0.015) if entropy <= 0.2 else max(coefficient - 0.004, 0.002)
        out.append(coefficient)
    return kl + out


def self_normalised():
    """Mahmood et al. 2014, eq. 2, over the sequences of a group."""
    ratio, out = np.exp(((OLD - SAMPLER) * MASK).sum(1)), np.zeros(6)
    for g in (0, 1):
        rows = X["group_ids"] == g
        out[rows] = ratio[rows] * rows.sum() / ratio[rows].sum()
    return out[:, None] * MASK


def vapo():
    """arXiv:2504.05118, sections 3.1 and 3.2: lambda by length for the policy, 1 for the critic; alpha 0.4."""
    out = np.zeros((2, 6, 4))
    for b in range(6):
        place = np.flatnonzero(MASK[b])
        reward = np.where(np.arange(len(place)) == len(place) - 1, X["rewards"][b], 0.0)
        value = np.append(X["values"][b, place], 0.0)
        delta = reward + value[1:] - value[:-1]
        lam = max(1 - 1 / (0.4 * len(place)), 0.0)
        for k, t in enumerate(place):
            out[0, b, t] = sum(lam ** (j - k) * delta[j] for j in range(k, len(place)))
            out[1, b, t] = reward[k:].sum()
    return out


def dcpo_advantages():
    """arXiv:2509.02333, section 3.2: two steps of one prompt's rewards; the second's advantages."""
    steps = np.stack([X["rewards"][:3], X["rewards"][3:]])
    means, spreads = steps.mean(1), steps.std(1, ddof=1)
    both = math.sqrt((spreads**2).mean() + (means[1] - means[0]) ** 2 / 4)
    new, whole = (steps[1] - means[1]) / spreads[1], (steps[1] - means.mean()) / both
    first, second = (new + whole) / 2, (new + whole) / 2
    return np.where(np.abs(first) < np.abs(second), first, second)


def dcpo_third():
    """The same with the first step counted twice before: blends of a third and two thirds."""
    steps = np.stack([X["rewards"][:3], X["rewards"][:3], X["rewards"][3:]])
    mean, variance = steps[0].mean(), steps[0].var(ddof=1)
    new_mean, new_variance = steps[2].mean(), steps[2].var(ddof=1)
    both = math.sqrt((2 * variance + new_variance + 2 / 3 * (new_mean - mean) ** 2) / 3)
    new, whole = (steps[2] - new_mean) / math.sqrt(new_variance), (steps[2] - (2 * mean + new_mean) / 3) / both
    first, second = (2 * new + whole) / 3, (new + 2 * whole) / 3
    return np.where(np.abs(first) < np.abs(second), first, second)


ARRAYS = {
    "self_normalised": self_normalised,
    "vapo": vapo,
    "bapo_bounds": _bapo_search,
    "dcpo_advantages": dcpo_advantages,
    "dcpo_third": dcpo_third,
    "optimal_token_baseline": lambda: optimal_token_baseline(MASK, False),
    "tir_optimal_token_baseline": lambda: optimal_token_baseline(X["hole_mask"], True),
    "grpo_passk": grpo_passk,
    "token_k2": lambda: rejection("k2", "token", 0.05),
    "token_k3": lambda: rejection("k3", "token", 0.05),
    "seq_sum_k3": lambda: rejection("k3", "sum", 0.1),
    "seq_mean_k2": lambda: rejection("k2", "mean", 0.05),
    "seq_max_k3": lambda: rejection("k3", "max", 0.1),
    "batch_normalised_token": lambda: normalised("token"),
    "batch_normalised_sequence": lambda: normalised("sequence"),
    "off_policy_mask": off_policy_mask,
    "wpo_pair_weight": wpo_pair_weight,
    "ld_logp": ld_logp,
    "adaptive": adaptive,
}


def main() -> None:
    cases = [*pairs(), *((f.__name__, f, LOGP) for f in TOKENS), *((n, f, X["logits"]) for n, f in LOGITS.items())]
    losses = {name: {"loss": float(f(at)), "gradient": gradient(f, at).tolist()} for name, f, at in cases}
    arrays = {name: np.asarray(f()).tolist() for name, f in ARRAYS.items()}
    out = {"seen": SEEN, "losses": rounded(losses, 8), "arrays": rounded(arrays, 8)}
    lines = (",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in part.items()) for part in out.values())
    PATH.write_text(
        "{\n" + ",\n".join(f"{json.dumps(k)}: {{\n{x}\n}}" for k, x in zip(out, lines, strict=True)) + "\n}\n"
    )
    print(PATH, len(losses), "losses", len(arrays), "arrays")


if __name__ == "__main__":
    main()
