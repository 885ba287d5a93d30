"""Float64 loops over tokens, written from the formulas and not from the library."""

import math

import numpy as np


def each(mask, function):
    """``function(b, t)`` at every masked token, 0 elsewhere."""
    out = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[b, t]:
                out[b, t] = function(b, t)
    return out


def weights(old, sampler, mask, level):
    """Ratio of the token, of the sequence, or its geometric mean."""
    out = np.zeros(mask.shape)
    for b in range(mask.shape[0]):
        logs = [old[b, t] - sampler[b, t] for t in range(mask.shape[1]) if mask[b, t]]
        for t in range(mask.shape[1]):
            if mask[b, t]:
                log = {
                    "token": old[b, t] - sampler[b, t],
                    "sequence": sum(logs),
                    "geometric": sum(logs) / max(len(logs), 1),
                }[level]
                out[b, t] = math.exp(log)
    return out


def effective_fraction(values, mask):
    kept = [values[b, t] for b, t in zip(*np.nonzero(mask), strict=True)]
    return sum(kept) ** 2 / (len(kept) * sum(w * w for w in kept))


KL = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
    "absolute": abs,
}


def covariance(logp, advantages, mask):
    where = list(zip(*np.nonzero(mask), strict=True))
    mean_logp = sum(logp[i] for i in where) / len(where)
    mean_a = sum(advantages[i] for i in where) / len(where)
    return each(mask, lambda b, t: (logp[b, t] - mean_logp) * (advantages[b, t] - mean_a))


def clipped_value(value, old, target, clip):
    near = old + min(max(value - old, -clip), clip)
    return max((value - target) ** 2, (near - target) ** 2) / 2


def two_hot(target, low, high, bins):
    out, width = [0.0] * bins, (high - low) / (bins - 1)
    target = min(max(target, low), high)
    for k in range(bins):
        out[k] = max(0.0, 1 - abs(target - (low + k * width)) / width)  # a tent around each centre
    return out


def hl_gauss(target, low, high, bins, sigma):
    width = (high - low) / (bins - 1)
    target = min(max(target, low), high)

    def below(x):
        return 0.5 * (1 + math.erf((x - target) / (sigma * math.sqrt(2))))

    mass = [below(low + (k + 0.5) * width) - below(low + (k - 0.5) * width) for k in range(bins)]
    return [m / sum(mass) for m in mass]


def cross_entropy(target, logits):
    z = max(logits) + math.log(sum(math.exp(x - max(logits)) for x in logits))
    return -sum(p * (x - z) for p, x in zip(target, logits, strict=True))
