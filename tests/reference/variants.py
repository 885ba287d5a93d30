"""Float64 loops of losses and estimators, one pair, token or group at a time, written from the formulas."""

import math

import numpy as np


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x):
    return math.exp(log_sigmoid(x))


def logistic(h, e=0.0):
    return -(1 - e) * log_sigmoid(h) - e * log_sigmoid(-h)


# --- one pair: log-ratios w of the chosen response and y of the rejected one


def exo(w, y, beta, e):
    chance = [sigmoid(beta * (w - y)), sigmoid(beta * (y - w))]
    return sum(q * math.log(q / p) for q, p in zip(chance, (1 - e, e), strict=True))


def nca(w, y, beta):
    return logistic(beta * w) + (logistic(-beta * w) + logistic(-beta * y)) / 2


def discopop(w, y, beta, tau):
    h = beta * (w - y)
    share = sigmoid(h / tau)
    return (1 - share) * logistic(h) + share * math.exp(-h)


def f_dpo(w, y, beta, divergence):
    slope = {
        "reverse": lambda u: u,
        "forward": lambda u: -math.exp(-u),
        "jensen_shannon": lambda u: math.log(math.exp(u) / (1 + math.exp(u))),
        "alpha": lambda u: math.exp(u) ** (0.5 - 1) / (0.5 - 1),
    }[divergence]
    return logistic(beta * (slope(w) - slope(y)))


def dpop(w, y, beta, penalty):
    return logistic(beta * (w - y - penalty * max(0.0, -w)))


def tdpo(w, y, beta, chosen_kl, rejected_kl, alpha):
    return logistic(beta * (w - y - alpha * (rejected_kl - chosen_kl)))


def cal_dpo(w, y, beta, weight):
    return logistic(w - y) + weight * ((w - 1 / (2 * beta)) ** 2 + (y + 1 / (2 * beta)) ** 2)


def alphapo(chosen, rejected, beta, gamma, alpha):
    reward = [(1 - math.exp(x) ** (-alpha)) / alpha for x in (chosen, rejected)]
    return logistic(beta * (reward[0] - reward[1]) - gamma)


def aot(own, others, beta, e):
    """The k-th smallest of ``own`` against the k-th smallest of ``others``, at the place of the former."""
    out = np.zeros(len(own))
    for i in range(len(own)):
        rank = sum(x < own[i] for x in own)
        out[i] = logistic(beta * (own[i] - sorted(others)[rank]), e)
    return out


# --- one token


def ce_gppo_slope(ratio, advantage, low, high, low_weight, high_weight):
    """Of the loss by the token's log-probability."""
    if advantage > 0 and ratio > 1 + high:
        return -high_weight * (1 + high) * advantage
    if advantage < 0 and ratio < 1 - low:
        return -low_weight * (1 - low) * advantage
    return -ratio * advantage


def clipped(ratio, advantage, low, high):
    return -min(ratio * advantage, min(max(ratio, low), high) * advantage)


def dcpo_bounds(old, low, high, most):
    q = math.exp(old)
    below = 0.5 + 0.5 * math.sqrt(max(1 - 4 * low / q, 0))
    return below, min(0.5 + 0.5 * math.sqrt(1 + 4 * high / q), most)


def bapo_bounds(tokens, low, high, step, target):
    """``tokens``: (ratio, advantage) of all. The lower bound rises first, then the upper one."""

    def share(a, b):
        positive = sum(min(r, b) * x for r, x in tokens if x > 0)
        negative = sum(max(r, a) * -x for r, x in tokens if x < 0)
        return positive / negative

    a, b = low[0], high[0]
    while share(a, b) < target and a < low[1] - 1e-9:
        a = min(a + step, low[1])
    while share(a, b) < target and b < high[1] - 1e-9:
        b = min(b + step, high[1])
    return a, b


# --- one sequence: a list of log ratios of its trained tokens


def vespo_weight(logs, advantage, power, decay):
    w = math.exp(sum(logs))
    k, rate = (power[0], decay[0]) if advantage >= 0 else (power[1], decay[1])
    return w**k * math.exp(rate * (1 - w))


def topr_weight(logs, advantage, cap):
    return 1.0 if advantage > 0 else min(math.exp(sum(logs)), cap)


def gvpo(logs, rewards, beta):
    """Of one group: ``logs`` has the sum of each member; the sum over the group by ``G - 1``."""
    n, total = len(rewards), 0.0
    for i in range(n):
        gap = beta * (logs[i] - sum(logs) / n) - (rewards[i] - sum(rewards) / n)
        total += gap**2 / 2
    return total / (n - 1)


def opd_weights(gaps, gamma):
    sizes = [abs(g) for g in gaps]
    return [1 + gamma * (1 - sum(sizes[:t]) / sum(sizes)) for t in range(len(sizes))]


def minillm_advantages(gaps, gamma, normalised):
    found = []
    for t in range(len(gaps)):
        weights = [gamma ** (s - t) for s in range(t, len(gaps))]
        total = sum(w * g for w, g in zip(weights, gaps[t:], strict=True))
        found.append(total / sum(weights) if normalised else total)
    return found


def gae(rewards, values, end, lam):
    """Of one response without discount: the sum of its later errors, each by a further factor ``lam``."""
    following = [*values[1:], end]
    errors = [r + f - v for r, f, v in zip(rewards, following, values, strict=True)]
    return [sum(lam ** (j - t) * errors[j] for j in range(t, len(errors))) for t in range(len(errors))]


# --- one group


def best_minus_second(rewards, std):
    order = sorted(rewards, reverse=True)
    gap = order[0] - order[1]
    return [(gap / (np.std(rewards, ddof=1) if std else 1) if r == order[0] else 0.0) for r in rewards]


def optimal_token(rows):
    """``rows``: of each member a list of (reward, probability, collision) of its trained tokens."""
    out = []
    for i, row in enumerate(rows):
        out.append([])
        for k in range(len(row)):
            number = weight = 0.0
            for other in rows:
                if len(other) > k:
                    energy = sum(1 - 2 * p + c for _, p, c in other[: k + 1])
                    number, weight = number + energy * sum(r for r, _, _ in other[k:]), weight + energy
            out[i].append(sum(r for r, _, _ in row[k:]) - number / weight)
    return out


def smoothed(rewards, steps, mean, deviation):
    """DCPO: the advantages of one group after ``steps`` earlier ones with these statistics, and the new statistics."""
    now, m, s = steps + 1, np.mean(rewards), np.std(rewards, ddof=1)
    all_mean = (steps * mean + m) / now
    all_s = math.sqrt((steps * deviation**2 + s**2 + steps / now * (m - mean) ** 2) / now)
    out = []
    for r in rewards:
        new, total = ((r - m) / s if s > 0 else 0.0), ((r - all_mean) / all_s if all_s > 0 else 0.0)
        out.append(min((steps * new + total) / now, (new + steps * total) / now, key=abs))
    return out, all_mean, all_s
