"""The rows of the contract: every public function of losses, advantages, shaping and reduce, or why it has none.

A key is ``module.function``, or ``module.function:variant``. A new function needs a line here; most need only
``Row()``.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm import reduce
from jaxrl_llm.advantages import effective_rank, group, pools
from jaxrl_llm.losses import correction, distill, mixed, off_policy, policy, preference
from jaxrl_llm.rewards import shaping
from jaxrl_llm.types import TokenTerms
from tests.contract.engine import Row

TERMS = Row(gradient=("logp",), packed=True)
SEQUENCE = Row(gradient=("logp",))
SEGMENTED = Row(gradient=("logp",), packed=True, optional=("segment_ids",))
BATCH_TERMS = Row(gradient=("logp",), rows="batch", packed=True)
PAIRS = Row(gradient=("chosen_logp", "rejected_logp"))
MEAN_PAIRS = Row(gradient=("chosen_mean_logp", "rejected_mean_logp"))
NOTHING = Row(gradient=())  # a weight, a choice or a value to look at: no gradient at all
TOKENWISE = Row(gradient=(), packed=True)
BATCHWISE = Row(gradient=(), rows="batch", packed=True)
DISTILL = Row(gradient=("student_logits",), packed=True)
BINARY = {"rewards": np.asarray([1.0, 0, 0, 1, 0, 1, 0, 0])}
CHANCES = np.random.default_rng(3).uniform(0.05, 0.6, (8, 6))
SPANS = np.stack([np.tile([0, 1, 3, 5, 0], (8, 1)), np.tile([1, 3, 5, 6, 0], (8, 1))], axis=-1)
RATIO = Row(gradient=None, packed=True, zero_outside=False)

PROMPT = "columns outside the mask are the prompt, which tokens look back to; response_maps leaves it out"
LOOKS_BACK = {"outside": PROMPT, "padded": PROMPT}


def _head(width: int, seed: int):
    weights = jnp.asarray(np.random.default_rng(seed).normal(size=(width, 7)), jnp.float32)
    return lambda hidden: hidden.astype(jnp.float32) @ weights


CHUNKED = Row(
    settings={"student_unembed": _head(4, 1), "teacher_unembed": _head(2, 2), "chunk": 4},
    gradient=("student_hidden",), packed=True,
)  # fmt: skip


def _in_chunks(
    student_logits: Float[Array, "B T V"], teacher_logits: Float[Array, "B T V"], mask: Bool[Array, "B T"]
) -> TokenTerms:
    """Four columns of six at a time."""
    return distill.chunked_terms(
        lambda keep, *logits: distill.jsd_loss(*logits, keep), mask, student_logits, teacher_logits, chunk=4
    )


def _masked(logp: Float[Array, "B T"], advantages: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> tuple:
    return policy.masked(mask, logp, advantages)


def _combined(
    logp: Float[Array, "B T"],
    old_logp: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    outside: Bool[Array, " B"],
    mask: Bool[Array, "B T"],
) -> TokenTerms:
    own = mixed.ratio_loss(logp, old_logp, advantages, mask)
    return mixed.combined(own, mixed.probability_loss(logp, old_logp, advantages, mask), outside)


def _add_rewards(
    rewards: Float[Array, " B"], mean: Float[Array, ""], *, valid: Bool[Array, " B"] | None = None
) -> shaping.RunningMoments:
    old = shaping.RunningMoments(jnp.float32(5), mean.astype(jnp.float32), jnp.float32(2))
    return shaping.add_rewards(old, rewards, valid=valid)


def _normalized(rewards: Float[Array, " B"]) -> Float[Array, " B"]:
    moments = shaping.RunningMoments(jnp.float32(5), jnp.float32(0.3), jnp.float32(2))
    return shaping.normalized_rewards(rewards, moments)


def _averages() -> effective_rank.RankAverages:
    return effective_rank.RankAverages(jnp.asarray([3.0, 0.5, 0.1], jnp.float32), jnp.ones((), bool))


def _deviations(figures: Float[Array, "B 3"]) -> Float[Array, "B 3"]:
    return effective_rank.deviations(figures, _averages())


def _updated(figures: Float[Array, "B 3"]) -> effective_rank.RankAverages:
    return effective_rank.updated_averages(_averages(), figures)


def _metrics(entropy: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> dict:
    return reduce.metrics({"entropy": entropy}, mask, prefix="policy")


def _smoothed(
    rewards: Float[Array, " B"], group_ids: Int[Array, " B"], *, valid: Bool[Array, " B"] | None = None
) -> tuple:
    one = jnp.ones(rewards.shape, jnp.float32)
    return group.smoothed_advantages(rewards, group_ids, group.RewardStatistics(2 * one, 0.1 * one, one), valid=valid)


def _matrix(seed: int):
    return np.random.default_rng(seed).normal(size=(8, 7))


def _balanced_exit(positive: Int[Array, "P R"], negative: Int[Array, "P R"]) -> Bool[Array, "P R"]:
    return pools.make_balanced_exit(4)(positive, negative)


def _beliefs(rng):
    return rng.dirichlet(np.ones(7), (8, 5))


def _leading(rng):
    return np.arange(12)[None, :] < rng.integers(3, 13, (8, 1))


ROWS = {
    # --- policy losses
    "losses.policy.masked": Row(through=_masked, gradient=("logp", "advantages"), packed=True),
    "losses.policy.log_ratio": RATIO._replace(gradient=("logp",)),
    "losses.policy.reinforce_loss": TERMS,
    "losses.policy.clipped_policy_loss": TERMS,
    "losses.policy.clipped_policy_loss:clip_higher": TERMS._replace(settings={"clip_high": 0.28}),
    "losses.policy.clipped_policy_loss:dual_clip": TERMS._replace(settings={"dual_clip": 1.2}),
    "losses.policy.cispo_loss": TERMS,
    "losses.policy.sapo_loss": TERMS,
    "losses.policy.bounded_surrogate": TERMS._replace(gradient=("ratio",), settings={"low": 0.8, "high": 1.2}),
    "losses.policy.ce_gppo_loss": TERMS,
    "losses.policy.dcpo_loss": TERMS,
    "losses.policy.bapo_bounds": BATCHWISE,
    "losses.policy.bapo_loss": BATCH_TERMS,
    "losses.sequence.gspo_loss": SEGMENTED,
    "losses.sequence.gspo_token_loss": SEGMENTED,
    "losses.sequence.gmpo_loss": SEGMENTED,
    "losses.sequence.gmpo_loss:unequal": SEGMENTED._replace(settings={"clip_low": 0.2, "clip_high": 0.4}),
    "losses.sequence.vespo_loss": SEGMENTED,
    "losses.sequence.loop_loss": SEGMENTED,
    "losses.sequence.sequence_log_ratio": SEGMENTED._replace(zero_outside=False),
    "losses.sequence.sequence_log_ratio:mean": SEGMENTED._replace(zero_outside=False, settings={"mode": "mean"}),
    "losses.off_policy.token_ratio": RATIO._replace(gradient=("logp",)),
    "losses.off_policy.mean_ratio": RATIO._replace(gradient=("logp",), packed=False),
    "losses.off_policy.sequence_ratio": RATIO._replace(gradient=("logp",), packed=False),
    "losses.off_policy.gvpo_loss": SEQUENCE._replace(gradient=("logp", "rewards")),
    "losses.off_policy.a_star_po_loss": SEQUENCE._replace(settings={"beta": 0.5}),
    "losses.off_policy.topr_loss": SEQUENCE,
    "losses.off_policy.topr_loss:token": TERMS._replace(settings={"ratio_of": off_policy.token_ratio}),
    "losses.off_policy.keep_all": RATIO,
    "losses.off_policy.keep_one_side": RATIO,
    "losses.off_policy.keep_two_sides": RATIO,
    "losses.off_policy.keep_ring": RATIO,
    "losses.off_policy.unweighted": RATIO,
    "losses.off_policy.importance_weights": RATIO,
    "losses.off_policy.advantage_weights": RATIO,
    "losses.off_policy.rec_loss": TERMS,
    "losses.off_policy.rec_loss:ring": TERMS._replace(
        settings={"keep": off_policy.keep_ring, "weigh": off_policy.importance_weights}
    ),
    "losses.off_policy.rec_loss:mean_ratio": SEQUENCE._replace(settings={"ratio_of": off_policy.mean_ratio}),
    "losses.off_policy.mirror_descent_loss": SEQUENCE,
    "losses.off_policy.regularised_rewards": SEQUENCE._replace(settings={"beta": 0.1}, gradient=("logp", "rewards")),
    "losses.off_policy.agro_loss": SEQUENCE._replace(settings={"beta": 0.1}, gradient=("logp", "rewards")),
    "losses.off_policy.agro_token_loss": SEQUENCE._replace(settings={"beta": 0.1}, gradient=("logp", "rewards")),
    "losses.off_policy.trajectory_balance_loss": SEQUENCE._replace(
        settings={"beta": 0.5}, gradient=("logp", "rewards")
    ),
    "losses.off_policy.aipo_loss": TERMS._replace(settings={"cap": 1.5}),
    "losses.off_policy.decoupled_policy_loss": TERMS._replace(settings={"cap": 1.5}),
    "losses.off_policy.agro_sampling_terms": SEQUENCE._replace(settings={"beta": 0.1}),
    "losses.mixed.ratio_loss": TERMS,
    "losses.mixed.probability_loss": TERMS,
    "losses.mixed.shaped_probability_loss": TERMS,
    "losses.mixed.mixture_ratio": RATIO._replace(gradient=("logp",)),
    "losses.mixed.exploration_factor": RATIO._replace(gradient=()),
    "losses.mixed.mixture_loss": TERMS,
    "losses.mixed.combined": TERMS._replace(through=_combined, packed=False),
    "losses.bellman.next_values": Row(gradient=("mean_logp", "old_mean_logp")),
    "losses.bellman.rover_loss": SEQUENCE,
    "losses.bellman.uniform_policy_values": Row(settings={"actions": 3}),
    "losses.bellman.sums_from": Row(gradient=("terms",)),
    "losses.bellman.first_tokens": NOTHING,
    "losses.bellman.starts_after": NOTHING,
    "losses.bellman.soft_value_loss": Row(gradient=("values",)),
    "losses.bellman.soft_policy_loss": SEQUENCE,
    # --- entropy and KL
    "losses.entropy.entropy_bonus_terms": TERMS._replace(gradient=("entropy",)),
    "losses.entropy.targeted_entropy_terms": BATCH_TERMS._replace(gradient=("entropy",)),
    "losses.entropy.sampled_entropy": TOKENWISE,
    "losses.entropy.adapted_entropy_coefficient": NOTHING._replace(
        settings={"target": 0.5}, inputs={"coefficient": 0.2, "entropy": 0.4}
    ),
    "losses.entropy.applied_entropy_coefficient": NOTHING._replace(
        settings={"target": 0.5}, inputs={"coefficient": 0.2, "entropy": 0.4}
    ),
    "losses.entropy.token_covariance": BATCHWISE,
    "losses.entropy.clip_cov_keep": BATCHWISE._replace(settings={"fraction": 0.2, "low": 0.0}),
    "losses.entropy.kl_cov_select": BATCHWISE._replace(settings={"fraction": 0.2}),
    "losses.entropy.clip_cov_loss": BATCH_TERMS._replace(settings={"fraction": 0.2, "low": 0.0}),
    "losses.entropy.kl_cov_loss": BATCH_TERMS._replace(settings={"fraction": 0.2}),
    "losses.entropy.entropy_guided_weights": NOTHING,
    "losses.entropy.entropy_guided_sequence_weights": NOTHING,
    "losses.entropy.live_members": NOTHING,
    "losses.kl.k1": TOKENWISE,
    "losses.kl.k2": TOKENWISE,
    "losses.kl.k3": TOKENWISE,
    "losses.kl.absolute": TOKENWISE,
    "losses.kl.k1_gradient_terms": TERMS,
    "losses.kl.kl_gradient_terms": TERMS,
    "losses.kl.corrected_k3_gradient_terms": TERMS,
    "losses.kl.adapted_kl_coefficient": NOTHING._replace(
        settings={"target": 0.5, "horizon": 10.0}, inputs={"coefficient": 0.2, "kl": 0.52}
    ),
    "losses.kl.weighted_kl_gradient_terms": TERMS,
    "losses.kl.k3_gradient_terms": TERMS,
    "losses.kl.kl_in_reward": TERMS._replace(settings={"coefficient": 0.1}, gradient=("rewards",)),
    "losses.token_choice.top_tokens": BATCHWISE._replace(settings={"fraction": 0.2}),
    "losses.token_choice.top_tokens:exact": BATCHWISE._replace(settings={"fraction": 0.2, "exact": True}),
    "losses.token_choice.entropy_change": TOKENWISE,
    "losses.token_choice.steer_weights": BATCHWISE._replace(gradient=None),
    "losses.token_choice.steer_linear_weights": BATCHWISE._replace(gradient=None),
    # --- values, preferences, rewards, distillation, SFT
    "losses.value.squared_value_loss": TERMS._replace(gradient=("values",)),
    "losses.value.clipped_value_loss": TERMS._replace(gradient=("values",)),
    "losses.value.two_hot": Row(settings={"low": -2.0, "high": 2.0, "bins": 5}, packed=True),
    "losses.value.hl_gauss": Row(settings={"low": -2.0, "high": 2.0, "bins": 5}, packed=True),
    "losses.value.expected_values": Row(settings={"low": -2.0, "high": 2.0}, gradient=("logits",), packed=True),
    "losses.value.categorical_value_loss": TERMS._replace(settings={"low": -2.0, "high": 2.0}, gradient=("logits",)),
    "losses.preference.dpo_loss": PAIRS,
    "losses.preference.dpo_loss:conservative": PAIRS._replace(settings={"label_smoothing": 0.1}),
    "losses.preference.robust_dpo_loss": PAIRS,
    "losses.preference.hinge_loss": PAIRS,
    "losses.preference.ipo_loss": PAIRS,
    "losses.preference.kto_loss": SEQUENCE,
    "losses.preference.orpo_loss": MEAN_PAIRS,
    "losses.preference.simpo_loss": MEAN_PAIRS,
    "losses.preference.cpo_loss": PAIRS,
    "losses.preference.apo_zero_loss": PAIRS,
    "losses.preference.apo_down_loss": PAIRS,
    "losses.preference.rpo_loss": PAIRS,
    "losses.preference.rpo_loss:baseline": PAIRS._replace(
        optional=("baseline_logp",), gradient=("chosen_logp", "rejected_logp", "baseline_logp")
    ),
    "losses.preference.rpo_mean_loss": PAIRS._replace(gradient=(*PAIRS.gradient, "chosen_tokens")),
    "losses.preference.simpo_loss:smoothed": MEAN_PAIRS._replace(settings={"label_smoothing": 0.1}),
    "losses.preference.cpo_loss:smoothed": PAIRS._replace(settings={"label_smoothing": 0.1}),
    "losses.preference.length_normalised_dpo_loss": PAIRS._replace(
        gradient=(*PAIRS.gradient, "chosen_tokens", "rejected_tokens")
    ),
    "losses.preference.exo_loss": PAIRS,
    "losses.preference.nca_loss": PAIRS,
    "losses.preference.bco_loss": SEQUENCE._replace(inputs={"shift": 0.3}),
    "losses.preference.apo_zero_unpaired_loss": SEQUENCE,
    "losses.preference.aot_loss": PAIRS._replace(rows="batch"),
    "losses.preference.aot_unpaired_loss": PAIRS._replace(rows="batch"),
    "losses.preference.discopop_loss": PAIRS,
    "losses.preference.reverse_kl_slope": Row(gradient=("log_ratio",)),
    "losses.preference.forward_kl_slope": Row(gradient=("log_ratio",)),
    "losses.preference.jensen_shannon_slope": Row(gradient=("log_ratio",)),
    "losses.preference.alpha_divergence_slope": Row(gradient=("log_ratio",)),
    "losses.preference.f_dpo_loss": PAIRS,
    "losses.preference.f_dpo_loss:forward": PAIRS._replace(settings={"slope": preference.forward_kl_slope}),
    "losses.preference.wpo_weights": NOTHING._replace(inputs={"collision": CHANCES}),
    "losses.preference.wpo_loss": PAIRS,
    "losses.preference.length_desensitised_logp": SEQUENCE,
    "losses.preference.alphapo_loss": MEAN_PAIRS,
    "losses.preference.tpo_loss": PAIRS._replace(gradient=(*PAIRS.gradient, "gold_mean_logp")),
    "losses.preference.xpo_loss": PAIRS._replace(gradient=(*PAIRS.gradient, "ref_sample_logp")),
    "losses.preference.dpop_loss": PAIRS,
    "losses.preference.tdpo1_loss": PAIRS._replace(gradient=(*PAIRS.gradient, "chosen_kl", "rejected_kl")),
    "losses.preference.tdpo2_loss": PAIRS._replace(gradient=(*PAIRS.gradient, "rejected_kl")),
    "losses.preference.cal_dpo_loss": PAIRS,
    "losses.reward.label_regression_loss": Row(gradient=("predicted", "targets"), optional=("labelled",)),
    "losses.reward.gaussian_reward_loss": Row(gradient=("mean", "log_deviation", "target")),
    "losses.reward.log_odds_loss": Row(gradient=("yes_logit", "no_logit", "label")),
    "losses.reward.bradley_terry_loss": PAIRS._replace(
        gradient=("chosen_reward", "rejected_reward"), settings={"centering": 0.1}
    ),
    "losses.reward.bradley_terry_loss:margin": PAIRS._replace(
        gradient=None, optional=("margin",), inputs={"margin": np.arange(8.0)}
    ),
    "losses.reward.return_sum_loss": Row(gradient=("steps", "rewards")),
    "losses.preference.logistic": Row(gradient=("margin",)),
    "losses.preference.ramp": Row(gradient=("margin",)),
    "losses.preference.vrpo_loss": Row(gradient=("margin", "fresh_margin")),
    "losses.ranking.verdict_loss": Row(gradient=("forward", "backward")),
    "losses.ranking.win_probability": Row(gradient=("forward", "backward")),
    "losses.ranking.win_logit": Row(gradient=("forward", "backward")),
    "losses.ranking.trpa_loss": Row(gradient=("mean_log_ratio",), rows="batch"),
    "losses.ranking.rrhf_loss": Row(gradient=("mean_logp", "logp")),
    "losses.ranking.pro_loss": Row(gradient=("mean_logp", "logp")),
    "losses.ranking.sppo_loss": SEQUENCE._replace(settings={"eta": 4.0}),
    "losses.ranking.nash_md_loss": SEQUENCE,
    "losses.ranking.geometric_mixture": Row(
        gradient=("logits", "ref_logits"), inputs={"logits": _matrix(1), "ref_logits": _matrix(2)}
    ),
    "losses.supervised.ascent_loss": SEQUENCE,
    "losses.supervised.npo_loss": SEQUENCE,
    "losses.contrastive.pooled": Row(gradient=("weights", "features")),
    "losses.contrastive.cosines": Row(rows="batch"),
    "losses.contrastive.capped_infonce_loss": Row(gradient=("samples",), rows="batch"),
    "losses.distill.forward_kl_loss": DISTILL,
    "losses.distill.reverse_kl_loss": DISTILL,
    "losses.distill.jsd_loss": DISTILL,
    "losses.distill.chunked_forward_kl_loss": CHUNKED,
    "losses.distill.chunked_reverse_kl_loss": CHUNKED,
    "losses.distill.sampled_reverse_kl_loss": TERMS,
    "losses.distill.top_k_distillation_loss": DISTILL._replace(settings={"k": 3}),
    "losses.distill.top_k_distillation_loss:tail": DISTILL._replace(settings={"k": 3, "tail": True}),
    "losses.distill.sdpo_loss": DISTILL,
    "losses.distill.sdft_loss": DISTILL._replace(settings={"k": 5}),
    "losses.distill.sampled_self_distillation_loss": TERMS,
    "losses.distill.iw_opd_loss": SEQUENCE,
    "losses.distill.minillm_loss": SEQUENCE,
    "losses.distill.chunked_terms": DISTILL._replace(through=_in_chunks),
    "losses.distill.span_log_probs": Row(gradient=("logp",), inputs={"spans": SPANS}),
    "losses.distill.merged_log_probs": Row(gradient=("logits", "logp"), inputs={"spans": SPANS}),
    "losses.distill.uld_loss": Row(gradient=("student_log_probs",), packed=True),
    "losses.distill.gold_loss": Row(
        gradient=("student_log_probs",),
        inputs={"student_ids": np.arange(3), "teacher_ids": np.arange(4, 7)},
    ),
    "losses.supervised.sft_loss": TERMS,
    "losses.supervised.weighted_sft_loss": SEQUENCE,
    # --- corrections
    "losses.correction.mismatch_ratio": TOKENWISE,
    "losses.correction.mismatch_ratio:sequence": TOKENWISE._replace(
        settings={"level": "sequence"}, optional=("segment_ids",)
    ),
    "losses.correction.mismatch_ratio:geometric": TOKENWISE._replace(
        settings={"level": "geometric"}, optional=("segment_ids",)
    ),
    "losses.correction.truncated_weights": TOKENWISE,
    "losses.correction.masked_weights": TOKENWISE,
    "losses.correction.off_policy_sequence_mask": NOTHING._replace(settings={"most": 0.1}),
    "losses.correction.k2_distance": RATIO._replace(gradient=("log_ratio",)),
    "losses.correction.k3_distance": RATIO._replace(gradient=("log_ratio",)),
    "losses.correction.rejection_mask": NOTHING._replace(settings={"most": 0.5}),
    "losses.correction.rejection_mask:token": TOKENWISE._replace(settings={"most": 0.5, "over": "token"}),
    "losses.correction.rejection_mask:mean": NOTHING._replace(
        settings={"most": 0.5, "over": "mean", "distance": correction.k2_distance}
    ),
    "losses.correction.batch_normalised_weights": BATCHWISE,
    "losses.correction.batch_normalised_weights:sequence": NOTHING._replace(
        rows="batch", settings={"level": "sequence"}
    ),
    "losses.correction.self_normalised_weights": NOTHING,
    "losses.correction.effective_sample_fraction": Row(rows="batch", packed=True),
    # --- advantages
    "advantages.group.group_sum": Row(),
    "advantages.group.group_spread": Row(),
    "advantages.group.from_lowest": Row(),
    "advantages.group.per_token": Row(),
    "advantages.group.group_normalized_advantages": Row(),
    "advantages.group.dr_grpo_advantages": Row(),
    "advantages.group.rloo_advantages": Row(),
    "advantages.group.hardness_weighted_advantages": Row(inputs=BINARY),
    "advantages.group.per_label_advantages": Row(),
    "advantages.group.gdpo_advantages": Row(rows="batch"),
    "advantages.group.informative_groups": Row(settings={"low": 0.2, "high": 0.8}, inputs=BINARY),
    "advantages.group.widest_groups": Row(settings={"share": 0.5}, rows="batch"),
    "advantages.group.gpg_advantages": Row(rows="batch"),
    "advantages.group.opo_advantages": Row(),
    "advantages.group.remax_advantages": Row(),
    "advantages.group.batch_whitened": Row(rows="batch"),
    "advantages.group.reinforce_pp_advantages": Row(rows="batch"),
    "advantages.group.reinforce_pp_baseline_advantages": Row(rows="batch"),
    "advantages.group.lite_ppo_advantages": Row(rows="batch"),
    "advantages.group.pass_at_k_advantages": Row(settings={"k": 2}, inputs=BINARY),
    "advantages.group.best_minus_second_advantages": Row(),
    "advantages.group.smoothed_advantages": Row(through=_smoothed),
    "advantages.baseline.optimal_token_advantages": NOTHING._replace(
        inputs={"collision": CHANCES}, optional=("weights",)
    ),
    "advantages.baseline.optimal_trained_token_advantages": NOTHING._replace(
        inputs={"collision": CHANCES}, optional=("weights",)
    ),
    "advantages.group.mean_within": Row(settings={"low": 0.2, "high": 0.8}, inputs=BINARY),
    "advantages.process.clipped_steps": Row(),
    "advantages.process.delta_steps": Row(),
    "advantages.process.plain_steps": Row(),
    "advantages.process.majority": Row(),
    "advantages.process.unanimous": Row(),
    "advantages.process.average": Row(),
    "advantages.process.credited": Row(),
    "advantages.process.group_token_normalized": Row(),
    "advantages.process.best_of": Row(settings={"samples": 4}),
    "advantages.process.progress": Row(),
    "advantages.constrained.violation": Row(inputs={"chance": CHANCES}),
    "advantages.constrained.constraint_loss": Row(inputs={"chance": CHANCES}, gradient=("chance",)),
    "advantages.constrained.lagrangian_advantages": Row(inputs={"multiplier": 0.7}),
    "advantages.constrained.dual_ascent": Row(inputs={"multiplier": 0.7}),
    "advantages.off_policy.log_mean_exp_baseline": Row(settings={"tau": 0.5}),
    "advantages.off_policy.opmd_advantages": Row(settings={"tau": 0.5}),
    "advantages.off_policy.asymre_advantages": Row(),
    "advantages.off_policy.balanced_members": Row(inputs=BINARY),
    "advantages.off_policy.red_drop_advantages": Row(
        inputs=BINARY, leaves_out={"permuted": "of equal rewards the earlier rows stay: documented"}
    ),
    "advantages.pools.positive_exit": Row(),
    "advantages.pools.make_balanced_exit": Row(through=_balanced_exit),
    "advantages.pools.never_exit": Row(),
    "advantages.pools.rounds_drawn": Row(settings={"per_round": 4}),
    "advantages.pools.balanced_counts": Row(settings={"keep": 4}),
    "advantages.pools.earliest": Row(),
    "advantages.pools.pool_advantages": Row(
        zero_outside=False,
        leaves_out={
            "outside": "responses outside the members get an advantage, too: from the members' mean",
        },
    ),  # fmt: skip
    "advantages.pools.pool_advantages:std": Row(
        settings={"std": True}, leaves_out={"outside": "as without std", "gradient": "as without std"}
    ),
    "advantages.pools.cumulative_advantage": Row(settings={"rollouts": 8}),
    "advantages.pools.equal_treatment": Row(settings={"peak": 2.0}),
    "advantages.pools.hardness_weighted": Row(settings={"peak": 2.0}),
    "advantages.pools.no_extra": Row(settings={"peak": 2.0}),
    "advantages.pools.extra_rollouts": Row(settings={"rollouts": 8, "most": 32}),
    "advantages.prefix_tree.prefix_values": Row(zero_outside=False),
    "advantages.prefix_tree.branch_differences": Row(),
    "advantages.prefix_tree.tempo_advantages": Row(),
    "advantages.returns.gae_advantages": NOTHING,
    "advantages.returns.length_adaptive_gae_advantages": NOTHING._replace(settings={"alpha": 0.5}),
    "advantages.returns.lambda_returns": NOTHING,
    "advantages.returns.discounted_returns": NOTHING,
    "advantages.returns.n_step_returns": NOTHING._replace(settings={"steps": 2}),
    "advantages.returns.at_last_token": Row(),
    "advantages.returns.terminal_advantages": NOTHING,
    "advantages.returns.length_pressure": Row(settings={"lam": 0.9}),
    "advantages.selection.best_members": Row(),
    "advantages.selection.worst_members": Row(),
    "advantages.selection.best_weights": Row(),
    "advantages.selection.best_worst_weights": Row(),
    "advantages.selection.best_random_weights": Row(),
    "advantages.selection.power_weights": Row(),
    "advantages.selection.exponential_weights": Row(gradient=None),
    "advantages.selection.equal_weights": Row(),
    "advantages.selection.expected_counts": Row(rows="batch"),
    "advantages.selection.resampled": Row(
        rows="batch", leaves_out={"permuted": "its results are the numbers of rows, drawn along the cumulative sum"}
    ),
    "advantages.selection.reliability": Row(rows="batch"),
    "advantages.selection.shortest_right": Row(),
    "advantages.selection.longer_rejected": Row(),
    "advantages.sign.right_samples": Row(inputs=BINARY),
    "advantages.sign.wrong_samples": Row(inputs=BINARY),
    "advantages.sign.signed_advantages": Row(inputs=BINARY),
    "advantages.turns.anchor_sizes": Row(),
    "advantages.turns.anchor_advantages": Row(),
    "advantages.turns.shared_advantages": Row(),
    "advantages.turns.gigpo_advantages": Row(),
    "advantages.turns.stratified_advantages": Row(),
    "advantages.turns.moved": Row(),
    "advantages.turns.terminal_progress": Row(),
    "advantages.turns.uniform_progress": Row(),
    "advantages.turns.spa_rewards": Row(),
    "advantages.turns.information_gain_rewards": Row(),
    "advantages.turns.log_information_gain_rewards": Row(),
    "advantages.turns.improvement_rewards": Row(),
    "advantages.turns.pooled_turn_advantages": Row(),
    "advantages.beliefs.right_belief": Row(inputs={"beliefs": _beliefs}),
    "advantages.beliefs.log_right_belief": Row(inputs={"beliefs": _beliefs}),
    "advantages.beliefs.certainty": Row(inputs={"beliefs": _beliefs}),
    "advantages.beliefs.level_rewards": NOTHING._replace(inputs={"before": _beliefs, "after": _beliefs}),
    "advantages.beliefs.shaped_rewards": NOTHING._replace(inputs={"before": _beliefs, "after": _beliefs}),
    "advantages.beliefs.information_rewards": NOTHING._replace(inputs={"before": _beliefs, "after": _beliefs}),
    "advantages.whiten.whitened_tokens": Row(rows="batch", packed=True),
    "advantages.whiten.reweighted_tokens": Row(rows="batch"),
    "advantages.whiten.reinforce_pp_token_advantages": Row(rows="batch", gradient=(), settings={"kl_weight": 0.1}),
    "advantages.whiten.centred_token_advantages": BATCHWISE._replace(packed=False),
    "advantages.attention.response_maps": Row(),
    "advantages.attention.attention_spans": Row(rows="batch", leaves_out=LOOKS_BACK),
    "advantages.attention.local_and_global": Row(rows="batch", leaves_out=LOOKS_BACK),
    "advantages.attention.backward_distance": Row(leaves_out=LOOKS_BACK),
    "advantages.attention.forward_influence": Row(),
    "advantages.attention.top_of_each": Row(settings={"fraction": 0.3}),
    "advantages.attention.preplan_tokens": Row(),
    "advantages.attention.amplified": Row(packed=True),
    "advantages.attention.coupled_credit": Row(),
    "advantages.attention.local_credit": Row(),
    "advantages.attention.anchor_credit": Row(),
    "advantages.attention.rhythm_credit": Row(),
    "advantages.effective_rank.rank_of_singular_values": Row(),
    "advantages.effective_rank.rank_of_hidden_states": NOTHING,
    "advantages.effective_rank.growth": Row(inputs={"valid": _leading}),
    "advantages.effective_rank.rank_figures": NOTHING._replace(settings={"stride": 2}),
    "advantages.effective_rank.updated_averages": Row(through=_updated, rows="batch"),
    "advantages.effective_rank.deviations": Row(through=_deviations),
    "advantages.effective_rank.rank_bonus": Row(),
    "advantages.effective_rank.shaped_advantages": Row(),
    # --- shaping and reductions
    "rewards.shaping.overlong_penalty": Row(settings={"limit_tokens": 4, "buffer_tokens": 3}),
    "rewards.shaping.length_reward": Row(),
    "rewards.shaping.cosine_length_reward": Row(settings={"limit_tokens": 4}),
    "rewards.shaping.group_extremes": Row(),
    "rewards.shaping.linear_length_penalty": Row(settings={"limit_tokens": 4}),
    "rewards.shaping.target_length_penalty": Row(),
    "rewards.shaping.clipped_rewards": Row(settings={"low": -0.5, "high": 0.5}),
    "rewards.shaping.add_rewards": Row(through=_add_rewards, rows="batch"),
    "rewards.shaping.normalized_rewards": Row(through=_normalized),
    "rewards.shaping.answered_rewards": Row(),
    "rewards.shaping.limited_rewards": Row(settings={"limit_tokens": 2}),
    "rewards.shaping.excess_length_penalty": Row(),
    "rewards.shaping.verified_rewards": Row(),
    "rewards.shaping.early_rewards": Row(gradient=("rewards",)),
    "rewards.shaping.distinct_share": Row(),
    "rewards.shaping.repetition_penalty": Row(),
    "rewards.shaping.execution_rewards": Row(),
    "rewards.shaping.multi_tool_rewards": Row(),
    "rewards.shaping.graded_rewards": Row(),
    "reduce.tokens": Row(gradient=("terms",), rows="batch", packed=True),
    "reduce.tokens:seq_mean": Row(
        gradient=("terms",), rows="batch", packed=True, optional=("segment_ids",), settings={"mode": "seq_mean"}
    ),
    "reduce.tokens:seq_sum": Row(
        gradient=("terms",), rows="batch", packed=True, optional=("segment_ids",), settings={"mode": "seq_sum"}
    ),
    "reduce.tokens:constant": Row(
        gradient=("terms",),
        rows="batch",
        packed=True,
        optional=("segment_ids",),
        settings={"mode": "constant", "length_tokens": 6},
    ),  # fmt: skip
    **{
        f"reduce.denominator:{mode}": Row(rows="batch", packed=True, optional=("segment_ids",), settings={"mode": mode})
        for mode in reduce.MODES
    },
    "reduce.sequences": Row(gradient=("terms",)),
    "reduce.sequences:mean": Row(gradient=("terms",), settings={"mode": "mean"}),
    "reduce.segments": Row(gradient=("terms",), packed=True, zero_outside=False),
    "reduce.segments:sum": Row(gradient=("terms",), packed=True, zero_outside=False, settings={"mode": "sum"}),
    "reduce.scalars": Row(rows="batch"),
    "reduce.metrics": Row(through=_metrics, gradient=(), rows="batch", packed=True),
}

# public functions without a row
EXEMPT = {
    "reduce.check_tokens": "it only refuses shapes, see tests/traps/test_trap_40_shapes.py",
    "reduce.check_rows": "it only refuses shapes, see tests/traps/test_trap_40_shapes.py",
    "advantages.turns.next_valid": "columns and no values; those of its callers have rows",
    "rewards.shaping.no_moments": "a constant without arguments",
    "advantages.effective_rank.no_averages": "a constant without arguments",
}
