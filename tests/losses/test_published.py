"""Numbers that other libraries' definitions give for one batch: verl, TRL and OpenRLHF where they define the same.

The literals were computed in float64 by the public functions of verl (``core_algos``: ``compute_policy_loss_*``,
``agg_loss``). TRL's ``GRPOTrainer._compute_loss`` and OpenRLHF's ``PolicyLoss`` agree with them except as noted.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.losses import policy, sequence
from tests import close

# ratios 1.4918 0.8187 0.9048 (masked); 0.5488 1.4918 0.9512 3.3201
LOGP = jnp.array([[-0.8, -0.9, -2.1, -0.1], [-1.5, -1.2, -0.35, -1.0]])
OLD = jnp.array([[-1.2, -0.7, -2.0, -0.4], [-0.9, -1.6, -0.3, -2.2]])
ADVANTAGES = jnp.array([[1.5] * 4, [-0.5] * 4])
MASK = jnp.array([[True, True, True, False], [True, True, True, True]])

CASES = {
    # vanilla: clip 0.2 and 0.28, clip_ratio_c 3.  TRL: epsilon, epsilon_high, delta = 3
    "dual_clip_3": (
        partial(policy.clipped_policy_loss, clip_low=0.2, clip_high=0.28, dual_clip=3.0),
        "token_mean",
        -0.1976893,
        [[0, -0.175442, -0.193894, 0], [0, 0.106559, 0.067945, 0]],
    ),
    "dual_clip_1.4": (
        partial(policy.clipped_policy_loss, clip_low=0.2, clip_high=0.28, dual_clip=1.4),
        "token_mean",
        -0.3185339,
        [[0, -0.175442, -0.193894, 0], [0, 0, 0.067945, 0]],
    ),
    # OpenRLHF's PolicyLoss (token level) and TRL without delta; = the first case with -3.3201 * -0.5 for -3 * -0.5
    "clip_higher": (
        partial(policy.clipped_policy_loss, clip_low=0.2, clip_high=0.28),
        "token_mean",
        -0.1748238,
        [[0, -0.175442, -0.193894, 0], [0, 0.106559, 0.067945, 0.237151]],
    ),
    # verl's gspo is GSPO-token; sequence ratios e^(0.1/3) = 1.033895 and e^(0.95/4) = 1.268075
    "gspo_token": (
        partial(sequence.gspo_token_loss, clip_low=0.3, clip_high=0.4),
        "seq_mean",
        -0.4584026,
        [[-0.258474, -0.258474, -0.258474, 0], [0.079255] * 4],
    ),
    # TRL's importance_sampling_level="sequence"
    "gspo": (
        partial(sequence.gspo_loss, clip_low=0.3, clip_high=0.4),
        "seq_mean",
        -0.4584026,
        [[-0.258474, -0.258474, -0.258474, 0], [0.079255] * 4],
    ),
    # narrower: 1.0339 > 1.03 is cut, (-1.5 * 1.03 + 0.5 * 1.268075) / 2
    "gspo_cut": (
        partial(sequence.gspo_loss, clip_low=0.3, clip_high=0.03),
        "seq_mean",
        -0.4554813,
        [[0, 0, 0, 0], [0.079255] * 4],
    ),
    "gmpo": (
        partial(sequence.gmpo_loss, clip_low=0.3, clip_high=0.3),
        "seq_mean",
        -0.4082905,
        [[0, -0.25, -0.25, 0], [0, 0.085427, 0.085427, 0.085427]],
    ),
    # TRL names the absolute cap: epsilon_high = 1.28
    "cispo": (
        partial(policy.cispo_loss, clip_low=1.0, clip_high=0.28),
        "token_mean",
        0.5007786,
        [[-0.274286, -0.175442, -0.193894, 0], [0.039201, 0.091429, 0.067945, 0.091429]],
    ),
    "sapo": (
        partial(policy.sapo_loss, tau_positive=1.0, tau_negative=1.05),
        "seq_mean",
        -0.976146,
        [[-0.351281, -0.20301, -0.225698, 0], [0.032446, 0.087289, 0.059413, 0.06141]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(name):
    loss, mode, value, gradient = CASES[name]
    got = jax.value_and_grad(lambda x: reduce.tokens(loss(x, OLD, ADVANTAGES, MASK).loss, MASK, mode=mode))(LOGP)
    close.assert_printed(got[0], value, 7)
    close.assert_printed(got[1], gradient, 6)


def test_clip_fractions():
    """verl reports the two kinds apart (2/7 and 1/7 with c = 3); here they are one: gradient lost, 3/7.

    GMPO and CISPO: verl counts 4/7 and 3/7 tokens outside the window on either side; of GMPO's only 2 lost their
    gradient (0.4 with A > 0, -0.6 with A < 0).
    """
    for name, want in {"dual_clip_3": 3 / 7, "clip_higher": 2 / 7, "cispo": 3 / 7, "gmpo": 2 / 7, "sapo": 0.0}.items():
        terms = CASES[name][0](LOGP, OLD, ADVANTAGES, MASK)
        close.assert_near(reduce.tokens(terms.aux["clipped"], MASK), want, err_msg=name)


TERMS = jnp.array([[1.0, 2.0, 4.0, 9.0], [8.0, 16.0, 32.0, 64.0]])


@pytest.mark.parametrize(
    "options, want",
    [
        ({"mode": "token_mean"}, 18.142857),  # verl token-mean; TRL bnpo and dapo
        ({"mode": "seq_sum"}, 63.5),  # verl seq-mean-token-sum
        ({"mode": "seq_mean"}, 16.166667),  # verl seq-mean-token-mean; TRL grpo (which also counts empty rows)
        ({"mode": "constant", "length_tokens": 10}, 6.35),  # verl seq-mean-token-sum-norm, factor 10; TRL dr_grpo
        ({"mode": "constant", "length_tokens": 10, "total": 1.0}, 12.7),  # verl before it divided by the rows too
    ],
)
def test_reductions(options, want):
    close.assert_relative(reduce.tokens(TERMS, MASK, **options), want)
