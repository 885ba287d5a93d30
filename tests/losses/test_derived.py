"""Agreement with TRL, verl, OpenRLHF and papers, none of them installed: numbers of tests/golden/derived.json.

Every stored value appears here, value and gradient (the stored gradients are differences, without autodiff).
"""

import json
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.advantages import baseline, group, returns
from jaxrl_llm.data.pieces import agreed_pieces
from jaxrl_llm.losses import correction, distill, entropy, kl, off_policy, policy, preference, ranking, sequence
from tests import close
from tests.golden.make_derived import CHOSEN_KL, COLLISION, GOLD_MEAN, OTHER, OWN, REJECTED_KL, UNTIED
from tests.losses.test_peers import GOLDEN as _PEERS
from tests.losses.test_peers import IN, LOGP, MASK, OLD, REF, SAMPLER, A

DERIVED = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "derived.json").read_text())
IDS, REWARDS = IN["group_ids"], IN["rewards"]
PAIR = (IN["rejected"], IN["ref_chosen"], IN["ref_rejected"])
GOOD = jnp.arange(4) < 2
OLD_DISTILL = jnp.asarray([[0.1, -0.3, 1.5], [0.0, 0.4, 0.0]])  # log ratios of the student to the one that sampled
COLLISIONS, GOLD = jnp.asarray(COLLISION, jnp.float32), jnp.asarray(GOLD_MEAN, jnp.float32)


def _pairs(function, **settings):
    return "chosen", lambda x: reduce.scalars(function(x, *PAIR, **settings).loss)


def _free(function, **settings):
    return "chosen_mean", lambda x: reduce.scalars(function(x, IN["rejected_mean"], **settings).loss)


def _tokens(loss, mode="token_mean"):
    return "logp", lambda x: reduce.tokens(loss(x), MASK, mode=mode)


def _from_reference(x):
    """XPO: the reference wrote the chosen response of even pairs, the rejected one of odd ones."""
    written = jnp.where(jnp.arange(4) % 2 == 0, x, IN["rejected"])
    return reduce.scalars(preference.xpo_loss(x, *PAIR, written, alpha=0.01).loss)


def _sppo(x):
    won = ranking.sppo_loss(x, IN["ref_chosen"], jnp.ones(4), eta=10.0).loss
    return reduce.scalars(won + ranking.sppo_loss(IN["rejected"], IN["ref_rejected"], jnp.zeros(4), eta=10.0).loss)


def _bco_pair(x):
    won = preference.bco_loss(x, IN["ref_chosen"], jnp.ones(4, bool), jnp.float32(0)).loss
    zeros = jnp.zeros(4, bool)
    return reduce.scalars(won + preference.bco_loss(IN["rejected"], IN["ref_rejected"], zeros, jnp.float32(0)).loss)


def _distill(loss, **settings):
    mask = IN["logits_mask"]

    def value(x):
        zeros = jnp.zeros_like(OLD_DISTILL)
        terms = loss(x, IN["teacher_logits"], OLD_DISTILL, zeros, mask, **settings)
        return reduce.tokens(terms.loss, mask, mode="seq_mean")

    return "logits", value


def _gold(x):
    student, teacher = (jax.nn.log_softmax(y, axis=-1) for y in (x, IN["teacher_logits"]))
    ids = jnp.asarray([0, 2]), jnp.asarray([1, 3])
    return reduce.tokens(distill.gold_loss(student, teacher, IN["logits_mask"], *ids, beta=0.3).loss, IN["logits_mask"])


def _aligned(loss, **settings):
    """Both texts by their pieces; a mean over pieces, then over texts."""

    def value(x):
        each = []
        for b, ((sizes, ids), (others, other_ids)) in enumerate(zip(OWN, OTHER, strict=True)):
            pieces = np.asarray(agreed_pieces(sizes, others))
            sides = ((x, ids, pieces[:, :2]), (IN["teacher_logits"], other_ids, pieces[:, 2:]))
            merged = []
            for logits, tokens, spans in sides:
                logits = logits[b : b + 1, : len(tokens)]
                logp = jax.nn.log_softmax(logits, axis=-1)[:, jnp.arange(len(tokens)), jnp.asarray(tokens)]
                merged.append(distill.merged_log_probs(logits, logp, jnp.asarray(spans)[None]))
            each.append(jnp.mean(loss(*merged, jnp.ones((1, len(pieces)), bool), **settings).loss))
        return jnp.mean(jnp.stack(each))

    return "logits", value


def _gold_of_pieces(student, teacher, mask):
    return distill.gold_loss(student, teacher, mask, jnp.asarray([0, 2]), jnp.asarray([1, 3]), beta=0.3)


TOP_TAIL = partial(distill.top_k_distillation_loss, k=2, tail=True)
SHIFT = 0.1 * jnp.sum(IN["chosen"] - IN["ref_chosen"]) / 4
KLS = {
    "chosen_kl": jnp.asarray(CHOSEN_KL, jnp.float32), "rejected_kl": jnp.asarray(REJECTED_KL, jnp.float32)
}  # fmt: skip
CHANCE = jax.nn.sigmoid(REWARDS)
LOSSES = {
    "exo_pair": _pairs(preference.exo_loss, label_smoothing=0.1),
    "nca_pair": _pairs(preference.nca_loss),
    "bco_pair": ("chosen", _bco_pair),
    "sppo_hard": ("chosen", _sppo),
    "aot": _pairs(preference.aot_loss, label_smoothing=0.1),
    "aot_unpaired": (
        "chosen",
        lambda x: reduce.scalars(
            preference.aot_unpaired_loss(x + jnp.asarray(UNTIED, jnp.float32), *PAIR, label_smoothing=0.1).loss
        ),
    ),
    "discopop": _pairs(preference.discopop_loss, beta=0.1),
    "sigmoid_norm": (
        "chosen",
        lambda x: reduce.scalars(
            preference.length_normalised_dpo_loss(x, *PAIR, IN["chosen_length"], IN["rejected_length"], beta=0.1).loss
        ),
    ),
    "forward_kl": _pairs(preference.f_dpo_loss, slope=preference.forward_kl_slope),
    "js_divergence": _pairs(preference.f_dpo_loss, slope=preference.jensen_shannon_slope),
    "alpha_divergence": _pairs(
        preference.f_dpo_loss, slope=partial(preference.alpha_divergence_slope, alpha=0.95)
    ),
    "xpo": ("chosen", _from_reference),
    "dpop": _pairs(preference.dpop_loss, beta=0.1, penalty=5.0),
    "tdpo1": _pairs(preference.tdpo1_loss, **KLS),
    "tdpo2": _pairs(preference.tdpo2_loss, **KLS, alpha=0.7),
    "cal_dpo": _pairs(preference.cal_dpo_loss),
    "simpo_smoothed": _free(preference.simpo_loss, beta=0.3, gamma=0.6, label_smoothing=0.2),
    "cpo_smoothed": _free(preference.cpo_loss, beta=0.3, likelihood_weight=0.0, label_smoothing=0.2),
    "alphapo": _free(preference.alphapo_loss, beta=2.0, gamma=0.5, alpha=0.25),
    "tpo_l": (
        "chosen_mean",
        lambda x: reduce.scalars(
            preference.tpo_loss(x, IN["rejected_mean"], GOLD, beta=2.0, gamma=0.5, likelihood_weight=0.7).loss
        ),
    ),
    "apo_zero_unpaired": (
        "chosen",
        lambda x: reduce.scalars(preference.apo_zero_unpaired_loss(x, IN["ref_chosen"], GOOD).loss),
    ),
    "bco_unpaired": (
        "chosen",
        lambda x: reduce.scalars(preference.bco_loss(x, IN["ref_chosen"], GOOD, SHIFT).loss),
    ),
    "vespo": _tokens(lambda x: sequence.vespo_loss(x, OLD, A, MASK).loss),
    "bias_corrected_kl": _tokens(lambda x: kl.corrected_k3_gradient_terms(x, OLD, REF, MASK)),
    "a2po": _tokens(
        lambda x: off_policy.a_star_po_loss(x, REF, REWARDS, IN["greedy_rewards"], MASK, beta=0.2).loss, "seq_mean"
    ),
    "nash_md": _tokens(lambda x: ranking.nash_md_loss(x, REF, CHANCE, MASK).loss, "seq_sum"),
    "iw_opd": _tokens(lambda x: distill.iw_opd_loss(x, REF, OLD, MASK).loss),
    "self_distillation_sampled": _tokens(
        lambda x: distill.sampled_self_distillation_loss(x, REF, OLD, MASK).loss, "seq_mean"
    ),
    "geo_mean": _tokens(
        lambda x: sequence.gmpo_loss(x, OLD, A, MASK, clip_low=0.1, clip_high=0.27).loss, "seq_mean"
    ),
    "topr": _tokens(lambda x: off_policy.topr_loss(x, OLD, A, MASK).loss),
    "ce_gppo": _tokens(lambda x: policy.ce_gppo_loss(x, OLD, A, MASK, clip_high=0.28, high_weight=0.5).loss),
    "gvpo": _tokens(lambda x: off_policy.gvpo_loss(x, OLD, REWARDS, IDS, MASK, beta=0.3).loss, "seq_mean"),
    "dcpo": _tokens(lambda x: policy.dcpo_loss(x, OLD, A, MASK).loss),
    "bapo": _tokens(lambda x: policy.bapo_loss(x, OLD, A, MASK, target=0.84).loss),
    "sdpo_reverse": _distill(distill.sdpo_loss),
    "sdft_jsd": _distill(distill.sdft_loss),
    "sdft_top_2": _distill(distill.sdft_loss, k=2),
    "sdpo_top_2_tail": _distill(distill.sdpo_loss, divergence=TOP_TAIL),
    "gold_hybrid": ("logits", _gold),
    "uld_aligned": _aligned(distill.uld_loss),
    "gold_aligned": _aligned(_gold_of_pieces),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_loss(name):
    at, loss = LOSSES[name]
    got, want = jax.value_and_grad(loss)(IN[at]), DERIVED["losses"][name]
    close.assert_near(got[0], want["loss"])
    close.assert_near(got[1], want["gradient"])


SCORES = returns.at_last_token(REWARDS, MASK)
HOLE = IN["hole_mask"]
REJECT = partial(correction.rejection_mask, OLD, SAMPLER, MASK)
RATIO = partial(correction.mismatch_ratio, OLD, SAMPLER, MASK)


def _optimal(function, mask, **settings):
    return function(returns.at_last_token(REWARDS, mask), OLD, COLLISIONS, IDS, mask, **settings)


def _adaptive():
    step = {"target": 6.0, "horizon": 10000.0, "steps": 256.0}
    out = [kl.adapted_kl_coefficient(jnp.float32(0.2), jnp.float32(x), **step) for x in (12.0, 6.3, 0.0)]
    coefficient = jnp.float32(0.01)
    for seen in (0.1, 0.15, 0.4, 0.5, 0.6):
        coefficient = entropy.adapted_entropy_coefficient(
            coefficient, jnp.float32(seen), target=0.2, step=0.004, low=0.002, high=0.015
        )
        out.append(coefficient)
    return jnp.stack(out)


def _smoothed(steps):
    """The second group's rewards as those of one prompt, which had the first group's before."""
    mean, deviation = (jnp.full(3, f(IN["rewards"][:3])) for f in (jnp.mean, partial(jnp.std, ddof=1)))
    earlier = group.RewardStatistics(jnp.full(3, float(steps)), mean, deviation)
    return group.smoothed_advantages(REWARDS[3:], jnp.zeros(3, jnp.int32), earlier)[0]


ARRAYS = {
    "self_normalised": lambda: correction.self_normalised_weights(RATIO(level="sequence"), IDS, MASK),
    "vapo": lambda: returns.length_adaptive_gae_advantages(SCORES, IN["values"], jnp.zeros(6), MASK, alpha=0.4),
    "bapo_bounds": lambda: policy.bapo_bounds(jnp.exp(LOGP - OLD), A, MASK, target=0.84),
    "dcpo_advantages": lambda: _smoothed(1),
    "dcpo_third": lambda: _smoothed(2),
    "optimal_token_baseline": lambda: _optimal(baseline.optimal_token_advantages, MASK),
    "tir_optimal_token_baseline": lambda: _optimal(baseline.optimal_trained_token_advantages, HOLE),
    "grpo_passk": lambda: group.best_minus_second_advantages(REWARDS, IDS),
    "token_k2": lambda: REJECT(most=0.05, distance=correction.k2_distance, over="token"),
    "token_k3": lambda: REJECT(most=0.05, over="token"),
    "seq_sum_k3": lambda: REJECT(most=0.1, over="sum"),
    "seq_mean_k2": lambda: REJECT(most=0.05, distance=correction.k2_distance, over="mean"),
    "seq_max_k3": lambda: REJECT(most=0.1, over="max"),
    "batch_normalised_token": lambda: correction.batch_normalised_weights(
        correction.truncated_weights(RATIO(), MASK), MASK
    ),
    "batch_normalised_sequence": lambda: correction.batch_normalised_weights(
        correction.truncated_weights(RATIO(level="sequence"), MASK), MASK, level="sequence"
    ),
    "off_policy_mask": lambda: correction.off_policy_sequence_mask(LOGP, SAMPLER, A, MASK, most=-0.08),
    "wpo_pair_weight": lambda: (lambda w: w[:3] * w[3:])(preference.wpo_weights(LOGP, COLLISIONS, MASK)),
    "ld_logp": lambda: preference.length_desensitised_logp(LOGP, MASK, jnp.asarray([2, 1, 2, 1, 3, 3]), alpha=0.4),
    "adaptive": _adaptive,
}


@pytest.mark.parametrize("name", ARRAYS)
def test_array(name):
    got = np.asarray(ARRAYS[name](), np.float32)
    close.assert_near(got, DERIVED["arrays"][name])


def test_the_selections_select():
    """No stored mask keeps everything or nothing: a bound on the wrong side would be seen."""
    for name in ("token_k2", "token_k3", "seq_sum_k3", "seq_mean_k2", "seq_max_k3", "off_policy_mask"):
        kept = np.asarray(DERIVED["arrays"][name])[np.asarray(MASK)]
        assert 0 < kept.sum() < kept.size, name


def test_every_stored_value_is_compared_and_the_inputs_are_those_of_the_peers():
    assert set(DERIVED["losses"]) == set(LOSSES) and set(DERIVED["arrays"]) == set(ARRAYS)
    assert set(_PEERS["inputs"]) >= {"logp", "old_logp", "logits", "chosen"}
