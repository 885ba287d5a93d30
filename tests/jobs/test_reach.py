"""Every public loss and estimator of rewards is reached by a command, or it is said who uses it."""

import inspect

from jaxrl_llm import advantages, losses
from jaxrl_llm.jobs import distil, dpo, online_dpo, ppo
from jaxrl_llm.run import method, named

# losses of something else than a policy's tokens or preferences, and those of one experiment's own arrays
ELSEWHERE = {
    "agro_token_loss": "experiments",
    "ascent_loss": "experiments",
    "bradley_terry_loss": "jaxrl reward-model",
    "capped_infonce_loss": "experiments",
    "chunked_forward_kl_loss": "jaxrl distil --loss forward_kl",
    "chunked_reverse_kl_loss": "jaxrl distil --loss reverse_kl",
    "gaussian_reward_loss": "experiments",
    "label_regression_loss": "experiments",
    "log_odds_loss": "experiments",
    "return_sum_loss": "experiments",
    "rover_loss": "experiments",
    "soft_policy_loss": "experiments",
    "soft_value_loss": "experiments",
    "verdict_loss": "experiments",
    "weighted_sft_loss": "experiments",
    "constraint_loss": "experiments",
}


def takes(function, offered, needs=()):
    wanted = set(named.arrays(function))
    return bool(wanted) and wanted <= set(offered) and set(needs) <= wanted


def reached(name, function):
    """The commands that take a loss by its name."""
    found = []
    if takes(function, (*method.LOSS, *method.OF_BATCH), {"logp"}):
        found.append("train --loss")
    if takes(function, (*ppo.VALUE, "logits"), {"returns"}):
        found.append("ppo --value-loss")
    if takes(function, dpo.PAIRED) or takes(function, dpo.SINGLE, {"desirable"}):
        found.append("dpo --loss")
    if name not in online_dpo.REFUSED and takes(
        function, online_dpo.OFFERED[online_dpo.kind_of(named.arrays(function))]
    ):
        found.append("online-dpo --loss")
    if takes(function, distil.OFFERED, {"teacher_logp"}) or takes(function, distil.OFFERED, set()):
        found.append("distil --loss")
    return found


def test_every_loss_is_reached_or_said_where_it_is_used():
    names = {name for name in losses.__all__ if name.endswith("_loss")}
    lost = {name for name in names if not reached(name, getattr(losses, name))} - set(ELSEWHERE)
    assert not lost, "give it to a command, or say in ELSEWHERE who uses it"
    held = {name for name in ELSEWHERE if name in names and reached(name, getattr(losses, name))}
    assert not held, "a command has it by its name"


def test_losses_of_other_libraries_are_reached():
    """What users of TRL, verl and OpenRLHF look for, each by the command that has it."""
    train = """vespo_loss topr_loss ce_gppo_loss gvpo_loss dcpo_loss bapo_loss gmpo_loss mirror_descent_loss
    a_star_po_loss clip_cov_loss kl_cov_loss"""
    pairs = """exo_loss nca_loss aot_loss discopop_loss length_normalised_dpo_loss f_dpo_loss wpo_loss alphapo_loss
    tpo_loss simpo_loss cpo_loss dpop_loss tdpo1_loss tdpo2_loss cal_dpo_loss bco_loss aot_unpaired_loss
    apo_zero_unpaired_loss"""
    online = "xpo_loss nash_md_loss sppo_loss vrpo_loss rrhf_loss pro_loss trpa_loss"
    teacher = "sdpo_loss sdft_loss iw_opd_loss gold_loss uld_loss jsd_loss sampled_self_distillation_loss minillm_loss"
    critic = "clipped_value_loss squared_value_loss categorical_value_loss"
    for name in critic.split():
        assert "ppo --value-loss" in reached(name, getattr(losses, name)), name
    for command, listed in (("train", train), ("dpo", pairs), ("online-dpo", online), ("distil", teacher)):
        for name in listed.split():
            assert f"{command} --loss" in reached(name, getattr(losses, name)), name


def test_estimators_of_other_libraries_are_reached():
    for name in ("optimal_token_advantages", "optimal_trained_token_advantages", "best_minus_second_advantages",
                 "remax_advantages", "reinforce_pp_advantages", "reinforce_pp_token_advantages",
                 "smoothed_advantages", "tempo_advantages"):  # fmt: skip
        assert takes(getattr(advantages, name), method.ESTIMATOR), name
    for name in ("gae_advantages", "length_adaptive_gae_advantages", "lambda_returns", "n_step_returns"):
        assert named.arrays(getattr(advantages, name)) == ppo.GAE, name
    for name in ("batch_normalised_weights", "self_normalised_weights", "rejection_mask", "off_policy_sequence_mask"):
        assert takes(getattr(losses, name), method.CORRECTION), name
    assert inspect.isfunction(losses.adapted_kl_coefficient)  # --kl-target
