"""Agreement with TRL, verl and OpenRLHF on one batch: numbers in tests/golden/peers.json, made by make_peers.py.

Every stored value of a peer appears here, also those that differ: the comment says how. Losses agree in value and in
gradient. Differences of definition that all cases share: verl whitens with the sample variance and 1e-8 under the
root, OpenRLHF with the population variance, TRL divides by the standard deviation plus 1e-4.
"""

import json
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm import logprobs, reduce
from jaxrl_llm.advantages import group, returns, whiten
from jaxrl_llm.losses import correction, distill, entropy, kl, policy, preference, reward, sequence, supervised, value
from tests import close

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "peers.json").read_text())
IN = {
    k: jnp.asarray(v, jnp.int32 if k in ("group_ids", "tokens") else bool if "mask" in k else jnp.float32)
    for k, v in GOLDEN["inputs"].items()
}
LOGP, OLD, REF, SAMPLER, MASK = (IN[k] for k in ("logp", "old_logp", "ref_logp", "sampler_logp", "mask"))
A = group.per_token(IN["sequence_advantages"], MASK)
REWARDS, IDS = IN["rewards"], IN["group_ids"]
NONE = jnp.zeros(4)  # no reference
PAIR = (IN["rejected"], IN["ref_chosen"], IN["ref_rejected"])
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
TOKEN = {"mode": "token_mean"}
CONSTANT = {"mode": "constant", "length_tokens": 10}


def _token(loss, at="logp", mask=MASK, **mode):
    """A loss of the current policy's log-probabilities (or of values), reduced."""
    return at, lambda x: reduce.tokens(loss(x), mask, **(mode or TOKEN))


def _policy(loss, weights=None, **mode):
    scale = jnp.ones_like(A) if weights is None else weights
    return _token(lambda x: scale * loss(x, OLD, A, MASK).loss, **mode)


def _pair(loss, at="chosen"):
    return at, lambda x: reduce.scalars(loss(x).loss)


def _weights(level="token", **options):
    return correction.mismatch_ratio(OLD, SAMPLER, MASK, level=level, **options)


def _bonus(x):
    """TRL's bonus is a mean over tokens; the stored entropies are the negative of the reference's log-probabilities."""
    return policy.clipped_policy_loss(x, OLD, A, MASK, **CLIP).loss + 0.01 * entropy.entropy_bonus_terms(-REF, MASK)


def _kept(x):
    """DeepSeek-V3.2: a sequence of negative advantage counts while its mean log ratio to the sampler is small."""
    drift = sequence.sequence_log_ratio(OLD, x, MASK, mode="mean")
    keep = (A >= 0) | (jax.lax.stop_gradient(drift) <= 0.05)
    return jnp.where(keep, policy.clipped_policy_loss(x, OLD, A, MASK, **CLIP).loss, 0.0)


def _kto(x):
    difference = IN["kl_logp"] - IN["kl_ref_logp"]
    anchor, desirable = jnp.concatenate([IN["ref_chosen"], IN["ref_rejected"]]), jnp.arange(8) < 4
    terms = preference.kto_loss(x, anchor, desirable, reduce.scalars(difference), beta=0.1, weight_undesirable=1.33)
    return reduce.scalars(terms.loss)


def _ipo_per_token(x):
    """TRL divides log-ratios by the lengths: pass means to get it."""
    chosen, rejected = IN["chosen_length"], IN["rejected_length"]
    means = x / chosen, PAIR[0] / rejected, PAIR[1] / chosen, PAIR[2] / rejected
    return preference.ipo_loss(*means, tau=0.1)


CLIPPED = partial(policy.clipped_policy_loss, **CLIP)
GSPO = partial(sequence.gspo_loss, clip_low=0.1, clip_high=0.15)
GSPO_TOKEN = partial(sequence.gspo_token_loss, clip_low=0.1, clip_high=0.15)
SEQ_MEAN, SEQ_SUM = {"mode": "seq_mean"}, {"mode": "seq_sum"}
NEAR = correction.masked_weights(_weights("geometric"), MASK, low=0.8, high=1.25) > 0

LOSSES = {
    "trl": {
        "grpo": _policy(CLIPPED, **SEQ_MEAN),
        "bnpo": _policy(CLIPPED),
        "dapo": _policy(CLIPPED, total=jnp.sum(MASK.astype(jnp.float32)), **TOKEN),
        "dr_grpo": _policy(CLIPPED, **CONSTANT),
        "grpo_k3": _token(
            lambda x: CLIPPED(x, OLD, A, MASK).loss + 0.1 * kl.k3_gradient_terms(x, REF, MASK), **SEQ_MEAN
        ),
        "capped_ratio": _policy(partial(CLIPPED, dual_clip=1.3)),  # TRL's two-sided clip: a ratio above 1.3 is 1.3
        "gspo": _policy(GSPO, **SEQ_MEAN),
        "cispo": _policy(partial(policy.cispo_loss, clip_low=1.0, clip_high=0.28)),
        "sapo": _policy(policy.sapo_loss, **SEQ_MEAN),
        "truncated": _policy(CLIPPED, correction.truncated_weights(_weights(), MASK, cap=2.0)),
        "entropy_bonus": _token(_bonus),
        "off_policy_mask": _token(_kept),
        "dpo": _pair(lambda x: preference.dpo_loss(x, *PAIR)),
        "hinge": _pair(lambda x: preference.hinge_loss(x, *PAIR)),
        "robust": _pair(lambda x: preference.robust_dpo_loss(x, *PAIR, flip_rate=0.2)),
        "ipo_per_token": _pair(_ipo_per_token),
        "apo_zero": _pair(lambda x: preference.apo_zero_loss(x, *PAIR)),
        "apo_down": _pair(lambda x: preference.apo_down_loss(x, *PAIR)),
        "cpo_preference": _pair(lambda x: preference.cpo_loss(x, PAIR[0], beta=0.3, likelihood_weight=0.0)),
        "cpo_hinge": _pair(lambda x: preference.hinge_loss(x, PAIR[0], NONE, NONE, beta=0.3)),
        "simpo": _pair(
            lambda x: preference.simpo_loss(x, IN["rejected_mean"], beta=0.3, gamma=0.6), at="chosen_mean"
        ),
        # TRL adds the mean NLL of all chosen tokens, ours that of each sequence: without it they are one
        "orpo_odds": (
            "chosen_mean",
            lambda x: reduce.scalars(preference.orpo_loss(x, IN["rejected_mean"], weight=0.25).loss + x),
        ),
        "kto": ("both", _kto),
        "reward": _pair(lambda x: reward.bradley_terry_loss(x, IN["rejected_mean"]), at="chosen_mean"),
        "reward_margin_centred": _pair(
            lambda x: reward.bradley_terry_loss(x, IN["rejected_mean"], margin=IN["margin"], centering=0.01),
            at="chosen_mean",
        ),
        "forward_kl": _token(
            lambda x: distill.forward_kl_loss(x, IN["teacher_logits"], IN["logits_mask"]).loss,
            at="logits", mask=IN["logits_mask"],
        ),
        "jsd": _token(
            lambda x: distill.jsd_loss(x, IN["teacher_logits"], IN["logits_mask"], beta=0.3).loss,
            at="logits", mask=IN["logits_mask"],
        ),
        "reverse_kl": _token(
            lambda x: distill.reverse_kl_loss(x, IN["teacher_logits"], IN["logits_mask"], temperature=2.0).loss,
            at="logits", mask=IN["logits_mask"],
        ),
    },
    "verl": {
        "clip_higher": _policy(CLIPPED),
        "clip_higher_corrected": _policy(CLIPPED, correction.truncated_weights(_weights(), MASK, cap=2.0)),
        "dual_clip": _policy(partial(CLIPPED, dual_clip=1.3)),
        "dual_clip_seq_sum": _policy(partial(CLIPPED, dual_clip=1.3), **SEQ_SUM),
        "gspo": _policy(GSPO_TOKEN, **SEQ_MEAN),
        "sapo": _policy(policy.sapo_loss, **SEQ_MEAN),
        "reinforce": _token(lambda x: policy.reinforce_loss(x, A, MASK).loss),
        "cispo": _policy(partial(policy.cispo_loss, clip_low=1.0, clip_high=0.28)),
        "gmpo": _policy(partial(sequence.gmpo_loss, clip_low=0.32, clip_high=0.32), **SEQ_MEAN),
        "clip_cov": _token(  # all tokens of the window are drawn, so the draw does not matter
            lambda x: entropy.clip_cov_loss(
                x, OLD, A, MASK, jnp.zeros_like(A), fraction=1.0, low=0.2, high=5.0, **CLIP
            ).loss
        ),
        "kl_cov": _token(lambda x: entropy.kl_cov_loss(x, OLD, A, MASK, fraction=0.2, coefficient=0.5).loss),
        "value_clipped": _token(
            lambda x: value.clipped_value_loss(x, IN["old_values"], IN["returns"], MASK, clip=0.2).loss, at="values"
        ),
    },
    "openrlhf": {
        "clip_higher": _policy(CLIPPED),
        "clip_higher_seq_mean": _policy(CLIPPED, **SEQ_MEAN),
        "dual_clip": _policy(partial(CLIPPED, dual_clip=1.3)),
        "gspo": _policy(GSPO, **SEQ_MEAN),
        "truncated": _policy(CLIPPED, correction.truncated_weights(_weights(), MASK, cap=2.0)),
        "icepop": _policy(CLIPPED, correction.masked_weights(_weights(), MASK, low=0.5, high=2.0)),
        # the geometric mean selects sequences; the weights themselves are not truncated there
        "sequence_masked": _policy(CLIPPED, jnp.where(NEAR, _weights(), 0.0)),
        "value_clipped": _token(
            lambda x: value.clipped_value_loss(x, IN["old_values"], IN["returns"], MASK, clip=0.2).loss, at="values"
        ),
        "value_squared": _token(lambda x: value.squared_value_loss(x, IN["returns"], MASK).loss, at="values"),
        "sft": _token(lambda x: supervised.sft_loss(x, MASK).loss),
        "sft_seq_mean": _token(lambda x: supervised.sft_loss(x, MASK).loss, **SEQ_MEAN),
        "dpo": _pair(lambda x: preference.dpo_loss(x, *PAIR)),
        "dpo_conservative": _pair(lambda x: preference.dpo_loss(x, *PAIR, label_smoothing=0.2)),
        "ipo": _pair(lambda x: preference.ipo_loss(x, *PAIR)),
        "reward": _pair(lambda x: reward.bradley_terry_loss(x, IN["rejected_mean"]), at="chosen_mean"),
        "reward_margin": _pair(
            lambda x: reward.bradley_terry_loss(x, IN["rejected_mean"], margin=IN["margin"]), at="chosen_mean"
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("peer, name", [(p, n) for p, cases in LOSSES.items() for n in cases])
def test_loss(peer, name):
    at, loss = LOSSES[peer][name]
    start = jnp.concatenate([IN["chosen"], IN["rejected"]]) if at == "both" else IN[at]
    got, want = jax.value_and_grad(loss)(start), GOLDEN[peer][name]
    close.assert_near(got[0], want["loss"])
    close.assert_near(got[1], want["gradient"])


def _rows(values):
    return group.per_token(values, MASK)


SCORES = returns.at_last_token(REWARDS, MASK)
PENALISED = kl.kl_in_reward(SCORES, LOGP, REF, MASK, coefficient=0.1)
GAE = returns.gae_advantages(IN["returns"], IN["values"], jnp.zeros(6), MASK, gamma=0.97, lam=0.9)
HOLE = IN["hole_mask"]
GAE_HOLE = returns.gae_advantages(IN["returns"], IN["values"], jnp.zeros(6), HOLE, gamma=0.97, lam=0.9)
# the root of a variance near 1 plus 1e-8 and the deviation plus 1e-8 agree to 1e-8
sample_whitened = partial(whiten.whitened_tokens, ddof=1)
# informative groups over all sequences here; verl counts the sequences whose reward is not 0, whatever their group
VERL_ALPHA = 6 / 5


def _entropy(logits):
    return logprobs.token_entropy(jnp.concatenate([logits, logits[:, -1:]], 1))[:, 1:]


def _token_logprobs():
    """Peers pass logits of the same index; here the logits before a token say its probability."""
    logits = jnp.concatenate([IN["logits"], IN["logits"][:, -1:]], 1)
    return logprobs.token_logprobs(logits, jnp.pad(IN["tokens"], ((0, 0), (1, 0))))[:, 1:]


ARRAYS = {
    "verl": {
        "grpo": _rows(group.group_normalized_advantages(REWARDS, IDS)),
        "dr_grpo": _rows(group.dr_grpo_advantages(REWARDS, IDS)),
        "rloo": _rows(group.rloo_advantages(REWARDS, IDS)),
        "opo": _rows(group.opo_advantages(REWARDS, IDS, jnp.sum(MASK.astype(jnp.float32), axis=1))),
        "remax": _rows(group.remax_advantages(REWARDS, IN["greedy_rewards"])),
        "gpg": VERL_ALPHA * _rows(group.gpg_advantages(REWARDS, IDS)),
        # reinforce_pp_token_advantages takes the population's deviation: OpenRLHF's, below
        "reinforce_pp": sample_whitened(returns.discounted_returns(PENALISED, MASK), MASK),
        # centred by group, then whitened over tokens (reinforce_pp_baseline_advantages: over sequences)
        "reinforce_pp_baseline": sample_whitened(_rows(group.dr_grpo_advantages(REWARDS, IDS)), MASK),
        "gae_whitened": sample_whitened(GAE[0], MASK),
        "gae_returns": GAE[1],
        "gae_hole_whitened": sample_whitened(GAE_HOLE[0], HOLE),
        "gae_hole_returns": GAE_HOLE[1],
        "kl_k1": kl.k1(LOGP, REF, MASK),
        "kl_k2": kl.k2(LOGP, REF, MASK),
        "kl_k3": kl.k3(LOGP, REF, MASK),
        "kl_abs": kl.absolute(LOGP, REF, MASK),
        "kl_in_reward": PENALISED,
        "entropy": _entropy(IN["logits"]),
        "entropy_loss": reduce.tokens(_entropy(IN["logits"]), IN["logits_mask"]),
        "token_logprobs": _token_logprobs(),
        "truncated_token": correction.truncated_weights(_weights(), MASK, cap=2.0),
        "truncated_sequence": correction.truncated_weights(_weights("sequence"), MASK, cap=2.0),
        "reduce_token-mean": reduce.tokens(IN["values"], MASK),
        "reduce_seq-mean-token-sum": reduce.tokens(IN["values"], MASK, mode="seq_sum"),
        "reduce_seq-mean-token-mean": reduce.tokens(IN["values"], MASK, mode="seq_mean"),
        # verl divides by the length alone, TRL's dr_grpo and ours by the number of sequences too
        "reduce_seq-mean-token-sum-norm": 6 * reduce.tokens(IN["values"], MASK, **CONSTANT),
    },
    "openrlhf": {
        "rloo": _rows(group.rloo_advantages(REWARDS, IDS)),
        "dr_grpo": _rows(group.dr_grpo_advantages(REWARDS, IDS)),
        "group_norm": _rows(group.group_normalized_advantages(REWARDS, IDS, eps=1e-9)),
        "reinforce_baseline": whiten.whitened_tokens(_rows(group.dr_grpo_advantages(REWARDS, IDS)), MASK),
        "reinforce": whiten.reinforce_pp_token_advantages(
            REWARDS, kl.k1(LOGP, REF, MASK), MASK, kl_weight=0.1
        ),
        "gae": whiten.whitened_tokens(
            returns.gae_advantages(PENALISED, IN["values"], jnp.zeros(6), MASK, gamma=1.0, lam=0.9)[0], MASK
        ),
        "kl_k1": kl.k1(LOGP, REF, MASK),
        "kl_k2": kl.k2(LOGP, REF, MASK),
        "kl_k3": kl.k3(LOGP, REF, MASK),
        "kl_in_reward": PENALISED,
    },
    "trl": {
        "entropy": _entropy(IN["logits"]),
        "token_logprobs": _token_logprobs(),
        "sft_logits": reduce.tokens(supervised.sft_loss(_token_logprobs(), IN["logits_mask"]).loss, IN["logits_mask"]),
    },
}  # fmt: skip


@pytest.mark.parametrize("peer, name", [(p, n) for p, cases in ARRAYS.items() for n in cases])
def test_array(peer, name):
    close.assert_near(ARRAYS[peer][name], GOLDEN[peer][name])


def test_every_stored_value_is_compared():
    for peer in LOSSES:
        assert set(GOLDEN[peer]) == set(LOSSES[peer]) | set(ARRAYS[peer]), peer
