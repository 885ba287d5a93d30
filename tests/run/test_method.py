"""The method of the training job by flags: every public loss and estimator by name, and the default unchanged."""

import dataclasses
import inspect
import json
import math
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import advantages, logprobs, losses
from jaxrl_llm.advantages import group
from jaxrl_llm.errors import UserError
from jaxrl_llm.jobs import grpo
from jaxrl_llm.jobs.grpo import build, cli, count_microbatches, opened
from jaxrl_llm.losses import clipped_policy_loss
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.run import method, named, options, parts
from jaxrl_llm.run.settings import Settings, check
from jaxrl_llm.train import online
from jaxrl_llm.train.methods.builders import current_anchor, make_estimate, score_tokens, stored_anchor, with_collision
from jaxrl_llm.types import Batch, Rewards, TokenTerms, TrainState, Trajectories
from jaxrl_llm.verifiers.verdict import Verdict
from tests import close
from tests.close import doubles, singles

RNG = np.random.default_rng(0)
SHAPE = (4, 6)
MASK = jnp.asarray(np.arange(6)[None, :] > np.array([1, 2, 1, 3])[:, None])
ENTROPY = jnp.asarray(RNG.random(SHAPE) * 2, jnp.float32)
LOGP, OLD, SAMPLER, REF, VALUES = (jnp.asarray(RNG.normal(size=SHAPE) - 2, jnp.float32) for _ in range(5))
IDS = jnp.asarray([0, 0, 1, 1], jnp.int32)
TINY_ROWS = (
    "--data", "chain", "--prompts-per-step", "4", "--group-size", "3", "--max-new-tokens", "8", "--train-problems",
    "16", "--eval-problems", "8", "--eval-samples", "2",
)  # fmt: skip
BOTH = ("tests.run.test_method:_by_length", "tests.run.test_method:brief")


def of(**changes):
    return dataclasses.replace(Settings(), **changes)


def rows():
    zeros = jnp.zeros(SHAPE, jnp.int32)
    return Trajectories(zeros, zeros + 1, zeros, MASK, SAMPLER, jnp.asarray([False, True, False, False]), IDS, IDS, {})


REWARDS = Rewards(jnp.asarray([1.0, 0.0, 1.0, 1.0]), jnp.ones((4,), bool))


def test_the_default_is_grpo_with_clip_higher():
    settings = of()
    found = method.token_loss(settings, stored_anchor)(LOGP, ENTROPY, _batch())
    wanted = clipped_policy_loss(LOGP, OLD, VALUES, MASK, clip_low=settings.clip_low, clip_high=settings.clip_high)
    np.testing.assert_array_equal(np.asarray(found.loss), np.asarray(wanted.loss))
    plain = group.per_token(group.group_normalized_advantages(REWARDS.value, IDS, valid=REWARDS.valid), MASK)
    np.testing.assert_array_equal(np.asarray(method.estimator(settings)(rows(), REWARDS)), np.asarray(plain))
    assert method.correction(settings) is None and method.extra_terms(settings) is None
    assert method.moved_weights(settings) is None and method.first_weights(settings) == {}
    assert not method.needs_reference(settings) and not method.needs_collision(settings)
    schedule, before = (
        method.learning_rate(settings, 650),
        optax.schedules.warmup_cosine_decay_schedule(0.0, settings.learning_rate, 10, 651),
    )
    assert [float(schedule(k)) for k in (0, 5, 10, 400, 650)] == [float(before(k)) for k in (0, 5, 10, 400, 650)]


def _policy_losses():
    for name in losses.__all__:
        function = getattr(losses, name)
        wanted = named.arrays(function) if inspect.isfunction(function) else ()
        if name.endswith("_loss") and {"logp", "mask"} <= set(wanted) <= {*method.LOSS, *method.OF_BATCH}:
            if not any(x is inspect.Parameter.empty for x in named.settings(function).values()):
                yield name


@pytest.mark.parametrize("name", sorted(_policy_losses()))
def test_every_policy_loss_is_reached_by_its_name(name):
    settings = of(loss=name)
    more = method.row_extras(settings)({"optimal_values": jnp.full((4,), 0.25)}, rows(), REWARDS)
    terms = method.token_loss(settings, stored_anchor)(LOGP, ENTROPY, _batch(**more))
    assert np.isfinite(np.asarray(terms.loss)).all() and np.any(np.asarray(terms.loss) != 0)


def test_there_are_many_losses():
    known = "gspo_loss gmpo_loss sapo_loss cispo_loss vespo_loss topr_loss gvpo_loss"
    assert set(known.split()) <= set(_policy_losses())


def test_a_loss_of_groups_sees_their_rewards():
    """GVPO by its definition: of the shaped rewards of the groups, and of the policy before the update."""
    settings = of(loss="gvpo_loss", loss_args=("beta=0.5",), overlong="penalty", overlong_buffer=3, max_new_tokens=4)
    shaped = method.shaped_rewards(settings, rows(), REWARDS)
    assert np.any(np.asarray(shaped) != np.asarray(REWARDS.value))
    batch = _batch(**method.row_extras(settings)({}, rows(), REWARDS))
    found = method.token_loss(settings, stored_anchor)(LOGP, ENTROPY, batch)
    want = losses.gvpo_loss(LOGP, OLD, shaped, IDS, MASK, beta=0.5)
    np.testing.assert_array_equal(np.asarray(found.loss), np.asarray(want.loss))
    assert method.needs_reference(of(loss="agro_loss", loss_args=("beta=0.1",))) and not method.needs_reference(
        settings
    )


@pytest.mark.parametrize("name", ["optimal_token_advantages", "optimal_trained_token_advantages"])
def test_the_optimal_baseline_knows_the_distribution_of_every_token(name):
    """Its arrays are of the policy before the update, at the temperature of the samples."""
    settings = of(advantages=name)
    model = options.open_model(Settings(model="nano"))
    tokens = jnp.asarray(RNG.integers(3, 20, SHAPE), jnp.int32)
    column = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), SHAPE)
    drawn = rows()._replace(tokens=tokens, positions=column)
    assert method.needs_collision(settings)
    estimate = with_collision(make_estimate)(model.policy, method.estimator(settings), temperature=0.7)
    found = estimate(model.params, {}, drawn, REWARDS).advantages
    logits = model.policy.unembed(model.params, model.policy.hidden(model.params, tokens, column, column * 0 + 1))
    logp = logprobs.token_logprobs(logits, tokens, temperature=0.7)
    collision = logprobs.token_collision(logits, temperature=0.7)
    want = getattr(advantages, name)(advantages.at_last_token(REWARDS.value, MASK), logp, collision, IDS, MASK)
    # energies are at least 1 - 2 p + p^2 of some token, and weigh returns of size 1
    close.assert_same_sums(found, np.where(MASK, want, 0.0), close.forward_sums(model.config, 6), magnitude=10.0)
    assert np.any(np.asarray(found) != 0)


@pytest.mark.parametrize(
    "name",
    ["rloo_advantages", "dr_grpo_advantages", "opo_advantages", "gpg_advantages", "lite_ppo_advantages",
     "reinforce_pp_baseline_advantages", "best_minus_second_advantages", "centred_token_advantages"],
)  # fmt: skip
def test_estimators_are_reached_by_their_names(name):
    values = method.estimator(of(advantages=name))(rows(), REWARDS)
    assert values.shape == SHAPE and np.any(np.asarray(values) != 0)


def test_the_last_response_of_a_group_is_the_greedy_baseline():
    """ReMax: rewards less that of the greedy response, which trains nothing; without its verdict nothing does."""
    settings = of(advantages="remax_advantages")
    assert method.needs_greedy(settings) and not method.needs_greedy(of())
    rewards = Rewards(jnp.asarray([1.0, 0.25, 0.5, 0.0]), jnp.asarray([True, True, True, False]))
    values = method.estimator(settings)(rows(), rewards)
    np.testing.assert_array_equal(np.asarray(values), np.where(MASK, np.array([0.75, 0.0, 0.0, 0.0])[:, None], 0.0))
    assert method.keep(settings, None)(rows(), rewards).tolist() == [True, False, True, False]
    both = of(advantages="remax_advantages", overlong="mask")
    assert method.keep(both, lambda t, r: r.value > 0.6)(rows(), rewards).tolist() == [True, False, False, False]


def test_greedy_responses_are_those_of_temperature_0():
    model = options.open_model(Settings(model="nano"))
    tokens, ids = jnp.asarray([[5, 6], [7, 8]], jnp.int32), jnp.arange(2, dtype=jnp.int32)
    drawn = {}
    for name, heat, size, last in (("mixed", 1.5, 3, True), ("plain", 1.5, 3, False), ("greedy", 0.0, 1, False)):
        rollout = parts.make_rollout(model, group_size=size, max_new_tokens=6, temperature=heat, greedy_last=last)
        keys = sample_keys(jax.random.key(0), 0, ids, size)
        drawn[name] = np.asarray(rollout(model.params, tokens, tokens > 0, keys, ids).tokens).reshape(2, size, -1)
    np.testing.assert_array_equal(drawn["mixed"][:, 2:], drawn["greedy"])
    np.testing.assert_array_equal(drawn["mixed"][:, :2], drawn["plain"][:, :2])
    assert np.any(drawn["plain"][:, 2:] != drawn["greedy"])


def test_the_penalty_of_tokens_is_of_the_policy_that_drew_them():
    """REINFORCE++ with the divergence from the model that was loaded, here another one, at each token."""
    settings = of(advantages="reinforce_pp_token_advantages", advantage_args=("kl_weight=0.3",))
    model = options.open_model(Settings(model="nano"))
    other = jax.tree.map(lambda x: 1.1 * x, model.params)
    assert method.needs_reference(settings)
    tokens = jnp.asarray(RNG.integers(3, 20, SHAPE), jnp.int32)
    drawn = rows()._replace(tokens=tokens, positions=jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), SHAPE))
    estimate = make_estimate(model.policy, method.estimator(settings), reference=lambda extras: extras["reference"])
    found = estimate(model.params, {"reference": other}, drawn, REWARDS)
    gap = jnp.where(MASK, SAMPLER - found.ref_logp, 0.0)
    want = advantages.reinforce_pp_token_advantages(REWARDS.value, gap, MASK, kl_weight=0.3)
    np.testing.assert_array_equal(np.asarray(found.advantages), np.asarray(want))
    free = advantages.reinforce_pp_token_advantages(REWARDS.value, 0 * gap, MASK, kl_weight=0.3)
    assert np.any(np.asarray(free) != np.asarray(want))


def test_rewards_of_earlier_steps_are_remembered_by_prompt():
    """DCPO: two steps by the function itself; a prompt whose rewards failed has not had its step."""
    settings = of(advantages="smoothed_advantages")
    first = method.first_weights(settings, 3)
    drawn = rows()._replace(problem_ids=jnp.asarray([2, 2, 0, 0]))
    failed = Rewards(jnp.asarray([1.0, 0.0, 1.0, 1.0]), jnp.asarray([True, True, False, False]))
    state = TrainState((), (), jnp.int32(1), None, (), first)
    after = method.moved_weights(settings)(state, _batch(), drawn, failed)["rewards_so_far"]
    assert after.steps.tolist() == [0.0, 0.0, 1.0] and after.mean.tolist() == [0.0, 0.0, 0.5]
    nothing = group.RewardStatistics(*(jnp.zeros(4) for _ in range(3)))
    _, earlier = group.smoothed_advantages(failed.value, IDS, nothing, valid=failed.valid)
    close.assert_near(after.deviation[2], earlier.deviation[0])
    extras = {"rewards_so_far": after}
    seen = drawn._replace(extras=method.shown(settings)(extras, drawn))
    same = Rewards(jnp.ones(4), jnp.ones(4, bool))
    known = group.RewardStatistics(*(x.at[2:].set(0.0) for x in earlier))
    want, _ = group.smoothed_advantages(same.value, IDS, known)
    found = method.estimator(settings)(seen, same)
    np.testing.assert_array_equal(np.asarray(found), np.where(MASK, np.asarray(want)[:, None], 0.0))
    assert np.all(np.asarray(want)[:2] > 0), "all right now, which it was not before"
    both = drawn._replace(problem_ids=jnp.asarray([1, 1, 1, 1]))  # the end of an epoch and the start of the next
    after = method.moved_weights(settings)(state, _batch(), both, Rewards(failed.value, failed.valid | True))
    assert after["rewards_so_far"].mean.tolist() == [0.0, 1.0, 0.0]
    written = jax.make_jaxpr(lambda r: method.statistics_after(settings, first, both, r))(same)
    assert not any(x.primitive.name == "scatter" for x in written.eqns), "one of two values by chance"
    assert method.shown(of()) is None


def test_noise_is_drawn_anew_at_every_step():
    settings = of(loss="clip_cov_loss")
    first, same, other = (
        method.row_extras(settings)({}, rows()._replace(sampler_logp=x), REWARDS)["noise"]
        for x in (SAMPLER, SAMPLER, LOGP)
    )
    np.testing.assert_array_equal(np.asarray(first), np.asarray(same))
    assert np.any(np.asarray(first) != np.asarray(other)) and len(np.unique(first)) == first.size
    assert np.all((np.asarray(first) >= 0) & (np.asarray(first) < 1))


def test_values_of_prompts_are_soft_maxima_of_their_rewards():
    """b log mean exp(r / b), of the valid ones; each row carries that of its prompt."""
    settings = of(loss="a_star_po_loss", value_beta=0.5)
    value, valid = (
        np.array([[1.0, 0.0], [0.0, 9.0], [3.0, 3.0]]),
        np.array([[True, True], [True, False], [False, False]]),
    )
    found = method.optimal_values(settings, value, valid)
    close.assert_near(found, [0.5 * np.log((np.exp(2.0) + 1) / 2), 0.0, 0.0])
    drawn = rows()._replace(problem_ids=jnp.asarray([2, 0, 1, 0]))
    more = method.row_extras(settings)({"optimal_values": jnp.asarray([5.0, 6.0, 7.0])}, drawn, REWARDS)
    assert more["optimal_values"].tolist() == [7.0, 5.0, 6.0, 5.0]
    terms = method.token_loss(of(loss="a_star_po_loss", loss_args=("beta=0.1",)), stored_anchor)
    found = terms(LOGP, ENTROPY, _batch(**more)).loss
    want = losses.a_star_po_loss(LOGP, REF, more["rewards"], more["optimal_values"], MASK, beta=0.1).loss
    np.testing.assert_array_equal(np.asarray(found), np.asarray(want))


def test_settings_of_a_function_are_words():
    tight = of(loss="clipped_policy_loss", loss_args=("clip_low=0.0", "clip_high=0.0"))
    each = [method.token_loss(x, stored_anchor)(LOGP, ENTROPY, _batch()).loss for x in (tight, of())]
    assert np.any(np.asarray(each[0]) != np.asarray(each[1]))
    assert "pass_at_k_advantages" in advantages.__all__
    values = method.estimator(of(advantages="pass_at_k_advantages", advantage_args=("k=2",)))(rows(), REWARDS)
    assert values.shape == SHAPE


def test_other_settings_of_the_clipped_loss_leave_its_bounds():
    """A ratio of 1.25 lies between 1 + 0.2, the bound of the function, and 1 + 0.28, that of the job."""
    one, said = jnp.ones((1, 1)), "are the same bound: give it once, or drop"
    for changes, cut in (
        ({}, 0.0),
        ({"loss_args": ("dual_clip=3.0",)}, 0.0),
        ({"loss_args": ("dual_clip=3.0",), "clip_high": 0.2}, 1.0),
        ({"loss_args": ("dual_clip=3.0", "clip_high=0.2")}, 1.0),
        ({"loss_args": ("clip_low=0.1",)}, 0.0),
    ):
        settings = of(**changes)
        check(settings)
        loss, wanted = method.policy_loss(settings)
        assert wanted == method.LOSS
        terms = loss(jnp.log(1.25 * one), 0.0 * one, one, one > 0)
        assert float(terms.aux["clipped"][0, 0]) == cut, changes
    with pytest.raises(UserError, match=f"--clip-high 0.3 and --loss-args clip_high {said} --clip-high"):
        check(of(clip_high=0.3, loss_args=("clip_high=0.2",)))
    with pytest.raises(UserError, match="--clip-high 0.3 is of --loss clipped_policy_loss: what another loss has"):
        check(of(clip_high=0.3, loss="gspo_loss", loss_args=("clip_high=0.2",)))


def _batch(**extras):
    fields = {name: None for name in Batch._fields}
    arrays = {"mask": MASK, "old_logp": OLD, "sampler_logp": SAMPLER, "ref_logp": REF, "advantages": VALUES}
    return Batch(**fields | arrays | {"group_ids": IDS, "extras": extras})


@pytest.mark.parametrize(
    "name", ["truncated_weights", "masked_weights", "batch_normalised_weights", "self_normalised_weights"]
)
def test_corrections_are_weights_of_tokens(name):
    weights = method.correction(of(correction=name))(LOGP, LOGP, _batch())
    assert weights.shape == SHAPE and np.isfinite(np.asarray(weights)).all()


@pytest.mark.parametrize("correction", ["", "truncated_weights"])
def test_a_lighter_sampler_is_corrected_by_the_policy_before_the_updates(correction):
    """After one of several the tokens have 8/5 and 3/5 of their chance: that is the ratio of the loss, counted once."""
    half = jnp.log(jnp.asarray([[0.5, 0.5]]))
    batch = _batch()._replace(mask=jnp.ones((1, 2), bool), old_logp=half, sampler_logp=half - jnp.log(1.25))
    moved = jnp.log(jnp.asarray([[0.8, 0.3]]))
    several = of(rollout_weights="int8", correction=correction, inner_epochs=2)
    close.assert_near(method.correction(several)(moved, moved, batch), [[1.25, 1.25]])
    one = of(rollout_weights="int8", correction=correction)  # the policy of the only update is that of the sampler
    close.assert_near(method.correction(one)(moved, moved, batch._replace(old_logp=None)), [[2.0, 0.75]])


def test_weights_that_a_group_shares_are_those_of_whole_responses():
    """By hand: responses twice and half as likely share 4 : 1, however their tokens came to it."""
    ones = jnp.ones((2, 2), bool)
    batch = _batch()._replace(mask=ones, group_ids=jnp.zeros(2, jnp.int32), sampler_logp=jnp.full((2, 2), -2.0))
    drift = jnp.log(jnp.asarray([[4.0, 0.5], [0.25, 2.0]]))
    shared = of(correction="self_normalised_weights")
    close.assert_near(method.correction(shared)(drift - 2.0, drift, batch), [[1.6, 1.6], [0.4, 0.4]], terms=8)
    whole = of(correction="batch_normalised_weights", correction_args=("level=sequence",))
    close.assert_near(method.correction(whole)(drift - 2.0, drift, batch), [[1.6, 1.6], [0.4, 0.4]], terms=8)


def test_samples_of_older_weights_have_a_ratio_to_the_sampler():
    """Unless a correction, or the loss itself, makes up for them; what has made up for them is counted once."""
    late = {"loop": "async", "staleness": 2}
    assert method.anchor(of()) is method.anchor(of(loop="async", staleness=0)) is current_anchor
    assert method.anchor(of(**late)) is stored_anchor and not method.rescores(of(**late, inner_epochs=2))
    assert method.rescores(of(inner_epochs=2)) and method.anchor(of(inner_epochs=2)) is stored_anchor
    for own in ({"correction": "truncated_weights"}, {"loss": "decoupled_policy_loss"}):
        assert method.anchor(of(**late, **own)) is current_anchor
        assert method.rescores(of(**late, **own, inner_epochs=2))
    assert method.correction(of(**late, rollout_weights="int8")) is None
    assert method.correction(of(loss="decoupled_policy_loss", rollout_weights="int8")) is None
    kl = {"kl": "corrected_k3_gradient_terms", "kl_weight": 1.0}
    found = method.kl_terms(of(**late, **kl))(LOGP, ENTROPY, _batch())
    want = losses.corrected_k3_gradient_terms(LOGP, SAMPLER, REF, MASK)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(want))
    assert "older weights" in " ".join(method.told(of(**late))) and not method.told(of())


def test_the_job_finds_how_far_the_weights_have_moved():
    """Tokens that their sampler gave half of the chance which they have now: AIPO weighs them by 2."""
    small = {"data": "chain", "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4, "train_problems": 8,
             "eval_problems": 4, "eval_samples": 2, "filter_groups": False}  # fmt: skip
    ratios = []
    for late in ({}, {"loop": "async", "staleness": 1}):
        plan = build(opened(of(**small, **late, loss="aipo_loss")), None)
        one = plan.stages[0].method
        state = online.init_state(one, plan.init(jax.random.key(0)), jax.random.key(0))
        drawn = online.begin(one, state).trajectories
        drawn = drawn._replace(sampler_logp=drawn.sampler_logp - jnp.where(drawn.mask, jnp.log(2.0), 0.0))
        rewards = Rewards(jnp.asarray([1.0, 0.0, 1.0, 0.0]), jnp.ones(4, bool))
        batch = one.estimate(state.params, {}, drawn, rewards)
        ratios.append(float(one.loss(state.params, batch)[1]["policy/ratio"]))
    columns = drawn.tokens.shape[1]
    assert ratios[0] == doubles(1.0)
    close.assert_same_sums(ratios[1], 2.0, close.forward_sums(plan.model.config, columns), magnitude=10.0)


WHOLE = ("bapo_loss", "kl_cov_loss", "clip_cov_loss")


@pytest.mark.parametrize("name", [*WHOLE, "gspo_loss", "gvpo_loss"])
def test_what_looks_at_all_tokens_of_a_step_is_not_trained_in_parts(name):
    settings = of(loss=name)
    assert count_microbatches(settings, None) == (1 if name in WHOLE else 16)
    assert any("looks at all tokens of a step, which is trained in one part" in x for x in method.told(settings)) == (
        name in WHOLE
    )
    asked = of(loss=name, microbatches=4)  # an update that one part is too large for
    assert count_microbatches(asked, None) == 4
    assert any("--microbatches 4 by itself" in x for x in method.told(asked)) == (name in WHOLE)


def test_a_mean_over_the_batch_is_not_taken_of_parts():
    assert method.whole_batch(of(correction="batch_normalised_weights")) == "--correction batch_normalised_weights"
    assert not method.whole_batch(of(correction="self_normalised_weights"))
    assert not method.whole_batch(of(correction="truncated_weights"))


def test_a_run_says_that_one_term_of_a_response_counts_by_its_length():
    said = "--loss gspo_loss has one term for a response, which --reduction token_mean counts once for each of its"
    assert any(said in line for line in method.told(of(loss="gspo_loss")))
    for quiet in (of(loss="gspo_loss", reduction="seq_mean", inner_epochs=2), of(loss="cispo_loss", inner_epochs=2)):
        assert not method.told(quiet)


def test_a_run_says_that_ratios_of_one_update_are_never_cut():
    """Bounds of any kind, and a penalty of what has moved; a loss that drops tokens, or regresses, is another step."""
    said = "has the step of REINFORCE: the ratios of the only update"
    for one in ({"loss": "gspo_loss"}, {"loss": "kl_cov_loss"}, {"clip_high": 0.5}):
        assert any(said in line for line in method.told(of(**one)))
        for more in ({"inner_epochs": 2}, {"loop": "async", "staleness": 1}):
            assert not any(said in line for line in method.told(of(**one, **more)))
    for other in ("clip_cov_loss", "mirror_descent_loss", "reinforce_loss"):
        assert not any(said in line for line in method.told(of(loss=other)))


def test_words_are_choices_and_infinity():
    sums, each = (of(correction="rejection_mask", correction_args=("most=3.0", f"over={x}")) for x in ("sum", "token"))
    far = [np.asarray(method.correction(x)(LOGP, LOGP, _batch())) for x in (sums, each)]
    assert np.any(far[0] != far[1])
    open_ended = method.policy_loss(of(loss="aipo_loss", loss_args=("cap=inf",)))[0]
    assert open_ended.keywords == {"cap": math.inf}


def test_a_mask_corrects_as_zeros_and_ones():
    settings = of(correction="rejection_mask", correction_args=("most=1.0",))
    weights = np.asarray(method.correction(settings)(LOGP, LOGP, _batch()))
    assert set(np.unique(weights)) <= {0.0, 1.0}


def test_the_divergence_has_a_gradient():
    for name in ("k3_gradient_terms", "k1_gradient_terms", "corrected_k3_gradient_terms", "kl_gradient_terms"):
        terms = method.kl_terms(of(kl=name, kl_weight=0.5))
        slope = jax.grad(lambda x, f=terms: jnp.sum(jnp.where(MASK, f(x, x, _batch()), 0.0)))(LOGP)
        assert np.any(np.asarray(slope) != 0), name


def test_overlong_responses_leave_or_pay():
    assert method.keep(of(overlong="mask"), None)(rows(), REWARDS).tolist() == [True, False, True, True]
    assert method.keep(of(), None) is None
    penal = method.estimator(of(overlong="penalty", overlong_buffer=3, max_new_tokens=4))(rows(), REWARDS)
    assert np.any(np.asarray(penal) != np.asarray(method.estimator(of())(rows(), REWARDS)))


def test_the_weight_of_the_divergence_follows_its_target():
    """By hand: k3 of the sampler's tokens, a tenth of a clipped error, and the terms with the weight of the state."""
    settings = of(kl="k3_gradient_terms", kl_weight=0.5, kl_target=100.0)
    extras = method.first_weights(settings)
    assert {k: float(x) for k, x in extras.items()} == {"kl_weight": 0.5}
    more = method.row_extras(settings)(extras, rows(), REWARDS)
    moving, fixed = (
        method.extra_terms(s)(LOGP, ENTROPY, _batch(**more)) for s in (settings, of(kl=settings.kl, kl_weight=0.5))
    )
    np.testing.assert_array_equal(np.asarray(moving), np.asarray(fixed))
    assert np.asarray(method.diagnostics(settings)(LOGP, ENTROPY, _batch(**more))["kl/weight"])[0, 3] == 0.5
    for one in (settings, of(kl=settings.kl, kl_weight=0.5)):  # what it follows is a figure, with a target or without
        batch = _batch(**more)
        shown = method.diagnostics(one)(LOGP, ENTROPY, batch)["kl/ref"]
        np.testing.assert_array_equal(np.asarray(shown), np.asarray(losses.k3(LOGP, batch.ref_logp, batch.mask)))
        assert np.any(np.asarray(shown) > 0)
    assert method.diagnostics(of()) is None
    state = TrainState((), (), jnp.int32(1), None, (), extras)
    low = method.moved_weights(settings)(state, _batch(**more), rows(), REWARDS)
    close.assert_near(low["kl_weight"], 0.5 * (1 - 0.2 / 10))
    kl = float(np.mean(np.asarray(losses.k3(SAMPLER, REF, MASK))[np.asarray(MASK)]))
    near = of(kl="k3_gradient_terms", kl_weight=0.5, kl_target=kl / 1.1)
    close.assert_near(method.moved_weights(near)(state, _batch(), rows(), REWARDS)["kl_weight"], 0.5 * 1.01, terms=24)
    nothing = method.moved_weights(near)(state, _batch()._replace(mask=MASK & False), rows(), REWARDS)
    assert float(nothing["kl_weight"]) == 0.5, "an update without a token says nothing of the divergence"


def test_the_bonus_for_entropy_is_paid_below_its_target():
    fixed = method.extra_terms(of(entropy_weight=0.1))(LOGP, ENTROPY, _batch())
    np.testing.assert_array_equal(np.asarray(fixed), np.asarray(0.1 * jnp.where(MASK, -ENTROPY, 0.0)))
    entropy = float(np.mean(-np.asarray(SAMPLER)[np.asarray(MASK)]))
    for target, want, paid in ((2 * entropy, 0.105, 0.105), (entropy / 2, 0.095, 0.0)):
        settings = of(entropy_weight=0.1, entropy_target=target)
        first = method.first_weights(settings)
        assert float(method.row_extras(settings)(first, rows(), REWARDS)["entropy_weight"][0]) == 0.0
        state = TrainState((), (), jnp.int32(1), None, (), first)
        after = method.moved_weights(settings)(state, _batch(), rows(), REWARDS)
        close.assert_near(after["entropy_weight"], want)
        close.assert_near(after["entropy"], entropy, terms=24, magnitude=entropy)
        more = method.row_extras(settings)(after, rows(), REWARDS)
        close.assert_near(more["entropy_weight"], [paid] * 4)
        terms = method.extra_terms(settings)(LOGP, ENTROPY, _batch(**more))
        close.assert_near(terms, paid * np.where(MASK, -np.asarray(ENTROPY), 0.0))


def test_greedy_responses_say_nothing_of_the_entropy():
    settings = of(entropy_weight=0.1, entropy_target=1.0, advantages="remax_advantages")
    said = jnp.asarray([[-2.0], [-0.5], [-4.0], [-0.5]])  # the last of two is greedy
    drawn = rows()._replace(sampler_logp=jnp.where(MASK, said, 0.0))
    state = TrainState((), (), jnp.int32(1), None, (), method.first_weights(settings))
    assert float(method.moved_weights(settings)(state, _batch(), drawn, REWARDS)["entropy"]) == 3.0, (
        "2 and 4, 4 tokens each"
    )


def mean_of_all(logp, old_logp, advantages, mask):
    """A loss whose mean is taken already."""
    return TokenTerms(-jnp.mean(logp * advantages), {})


def of_settings(a, *, cap: float | None = 0.5, pair: tuple[float, ...] = (1.0, 2.0), names=("a", "b"), k: int = 2):
    """A function whose settings have defaults of several kinds."""
    return a


def of_texts(a, *, cap: "float | None" = 0.5, k: "int" = 2):
    """One whose annotations are texts."""
    return a


def of_unknown(a, *, cap: "Nowhere" = 0.5):  # noqa: F821
    return a


def test_a_setting_may_be_whatever_its_annotation_allows():
    words = ["cap=None", "pair=(1, 2, 3)", "names=('c',)", "k=3"]
    found = named.with_settings(of_settings, words, "--loss-args", losses)
    assert found.keywords == {"cap": None, "pair": (1, 2, 3), "names": ("c",), "k": 3}
    assert named.with_settings(of_texts, ["cap=None"], "--loss-args", losses).keywords == {"cap": None}
    assert named.with_settings(of_unknown, ["cap=2"], "--loss-args", losses).keywords == {"cap": 2}
    with pytest.raises(UserError, match=r"--loss-args k=2.5: 2.5 is no whole number"):
        named.with_settings(of_texts, ["k=2.5"], "--loss-args", losses)


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_schedules_warm_up_first(schedule):
    rate = method.learning_rate(of(schedule=schedule, learning_rate=1.0, warmup_steps=4), 20)
    assert float(rate(0)) == 0.0 and float(rate(4)) == doubles(1.0)
    close.assert_near(rate(20), 1.0 if schedule == "constant" else 1 / 17)


def whole_kl(logp, ref_logp, mask):
    """A user's own, of the whole batch."""
    return jnp.sum(jnp.where(mask, logp - ref_logp, 0.0))


def logged_kl(logp, ref_logp, mask):
    """A user's own, without a gradient."""
    return jnp.where(mask, jax.lax.stop_gradient(logp) - ref_logp, 0.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": "gspo_los"}, "did you mean gspo_loss"),
        ({"loss": "dpo_loss"}, "takes chosen_logp"),
        ({"loss_args": ("gamma=1",)}, "the settings of clipped_policy_loss are clip_low=0.2"),
        ({"advantages": "pass_at_k_advantages"}, "needs --advantage-args k="),
        ({"kl": "k3", "kl_weight": 0.1}, "it is a value to log"),
        ({"kl": f"{__name__}:whole_kl", "kl_weight": 0.1}, r"--kl \S+:whole_kl: gives \(\) for 4 responses of 6"),
        ({"kl": f"{__name__}:logged_kl", "kl_weight": 0.1}, r"--kl \S+:logged_kl: it is a value to log"),
        ({"kl": "k3_gradient_terms"}, "--kl-weight 0.0: give both"),
        ({"kl_weight": 0.1}, "give both, or neither"),
        ({"inner_epochs": 0}, "--inner-epochs 0"),
        ({"kl_target": 0.1}, "give --kl and --kl-weight with it"),
        ({"kl_target": -0.1}, "--kl-target -0.1 must not be negative"),
        ({"kl_horizon": 0}, "--kl-horizon 0 must be at least 1"),
        ({"entropy_weight": -1.0}, "--entropy-weight -1.0 must not be negative"),
        ({"overlong": "penalty"}, "needs a buffer"),
        ({"overlong": "penalty", "overlong_buffer": 99}, "exceeds --max-new-tokens 28"),
        ({"weight_decay": -1.0}, "--weight-decay -1.0"),
        ({"reward": ("nothing",)}, "--reward nothing is no MODULE:FUNCTION"),
        ({"reward": ("nothing:at_all",)}, "--reward nothing:at_all: No module named"),
        ({"reward": BOTH, "reward_weights": (1.0,)}, "--reward-weights 1: 1 for 2 rewards of --reward"),
        ({"reward": BOTH[:1], "reward_weights": (2.0,)}, "give a weight for each of several"),
        ({"reward_weights": (2.0,)}, "--reward-weights 2: 1 for 0 rewards"),
        ({"reward": BOTH, "reward_weights": (1.0, math.nan)}, "--reward-weights 1.0 nan: a weight is a finite number"),
        ({"reward": BOTH * 2}, "stands twice; give it a weight instead"),
        ({"advantages": "gdpo_advantages", "filter_groups": False}, "normalises several rewards apart: give two or"),
        ({"refill": "drop", "filter_groups": False}, "drop it, or --no-filter-groups"),
        ({"refill": "drop", "loop": "async"}, "--refill drop waits for rollouts of the weights that train"),
        ({"refill": "keep", "entropy_target": 0.1}, "--entropy-target 0.1 moves a weight at every step"),
        ({"refill": "keep", "advantages": "remax_advantages"}, "remax_advantages asks for greedy_rewards of the roll"),
        ({"loss": "a_star_po_loss"}, "give --no-filter-groups"),
        ({"loss": "a_star_po_loss", "value_samples": 0}, "--value-samples 0 must be at least 1"),
        ({"value_beta": 0.0}, "--value-beta 0.0 positive"),
        ({"advantages": "remax_advantages", "strict": True, "layout": ""}, "--strict samples all alike"),
        ({"advantages": "reinforce_pp_token_advantages"}, "needs --advantage-args kl_weight="),
        ({"loss_args": ("clip_low=nan",)}, "--loss-args clip_low=nan: nan is no value such as 0.2"),
        ({"loss_args": ("clip_low=",)}, "--loss-args clip_low=: nothing is no value such as 0.2"),
        ({"weight_decay": math.nan}, "--weight-decay nan must be finite"),
        ({"weight_decay": math.inf}, "--weight-decay inf must be finite"),
        ({"max_grad_norm": math.nan}, "--max-grad-norm nan must be finite"),
        ({"kl": "k3_gradient_terms", "kl_weight": math.nan}, "--kl-weight nan must be finite"),
        ({"kl": "k3_gradient_terms", "kl_weight": math.inf}, "--kl-weight inf must be finite"),
        ({"kl": "k3_gradient_terms", "kl_weight": -5.0}, "--kl-weight -5.0 must not be negative"),
        ({"kl_target": math.nan}, "--kl-target nan must be finite"),
        ({"entropy_weight": math.nan}, "--entropy-weight nan must be finite"),
        ({"entropy_target": math.nan}, "--entropy-target nan must be finite"),
        ({"entropy_step": math.nan}, "--entropy-step nan positive and finite"),
        ({"value_beta": math.inf}, "--value-beta inf positive and finite"),
        ({"loss": "gspo_loss", "clip_low": 0.1}, "--clip-low 0.1 is of --loss clipped_policy_loss: what another"),
        ({"loss_args": ("clip_high=0.1",), "clip_high": 0.3}, "--clip-high 0.3 .* or drop --clip-high"),
        ({"correction_args": ("cap=5.0",)}, "--correction-args cap=5.0 belongs to --correction: give it, or drop"),
        ({"kl_horizon": 20}, "--kl-horizon 20 belongs to --kl-target: give it, or drop --kl-horizon"),
        ({"entropy_step": 0.1}, "--entropy-step 0.1 belongs to --entropy-target: give it, or drop --entropy-step"),
        ({"value_samples": 2}, "--value-samples 2 belongs to a --loss that takes optimal_values"),
        ({"value_beta": 2.0}, "--value-beta 2.0 belongs to a --loss that takes optimal_values"),
        ({"staleness": 3}, "--staleness 3 belongs to --loop async: give it, or drop --staleness"),
        ({"workers": "threads:8"}, "--workers threads:8 belongs to --loop async: give it, or drop --workers"),
        ({"optimiser": "muon", "weight_decay": 0.1}, "is of --optimiser adam"),
        ({"loss": "token_ratio"}, "--loss token_ratio: gives no TokenTerms"),
        (
            {"loss": f"{__name__}:mean_of_all"},
            rf"--loss {__name__}:mean_of_all: gives a loss of \(\), not of \(4, 6\), one number for each token; leave",
        ),
        ({"loss": "sft_loss"}, "--loss sft_loss takes logp, mask, and learns from no reward"),
        ({"advantages": "group_spread"}, "--advantages group_spread is no estimator of advantages"),
        ({"advantages": "log_mean_exp_baseline", "advantage_args": ("tau=1.0",)}, "is no estimator of advantages"),
        ({"advantages": "signed_advantages"}, "learns from groups of equal rewards, too; give --no-filter-groups"),
        ({"advantages": "smoothed_advantages"}, "learns from groups of equal rewards, too; give --no-filter-groups"),
        ({"advantages": "gpg_advantages"}, "makes up for groups of equal rewards itself; give --no-filter-groups"),
        ({"correction": "token_covariance"}, "takes logp, advantages, mask, nothing of what the sampler said"),
        ({"correction": "rejection_mask", "correction_args": ("most=1.0", "over=every")}, "over='every' is not one of"),
        (
            {"loss": "a_star_po_loss", "filter_groups": False, "overlong": "penalty", "overlong_buffer": 4},
            "--overlong penalty is not in the values of prompts",
        ),
        ({"correction": "cispo_loss"}, "--correction cispo_loss: gives TokenTerms for 4 responses of 6 tokens, not a"),
        ({"advantages": "discounted_returns"}, "--advantages discounted_returns: does not take the arrays of a"),
        ({"advantages": "prefix_values"}, "--advantages prefix_values: gives tuple for 4 responses"),
        (
            {"loss": "gvpo_loss", "microbatches": 64},
            "--microbatches 64 would cut groups, whose members --loss gvpo_loss",
        ),
        (
            {"correction": "self_normalised_weights", "microbatches": 512},
            "members --correction self_normalised_weights compares; give a divisor of --prompts-per-step 32",
        ),
    ],
)
def test_mistakes_are_named(changes, said):
    with pytest.raises(UserError, match=said):
        check(of(**changes))
        method.check_computed(of(**changes))


def test_a_check_touches_no_device():
    """Processes find each other after it, which JAX refuses once anything was computed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    changes = {"loss": "bapo_loss", "advantages": "rloo_advantages", "correction": "batch_normalised_weights",
               "kl": "jaxrl_llm.losses.kl:k3_gradient_terms", "kl_weight": 0.1}  # fmt: skip
    program = f"""
import dataclasses
from jaxrl_llm.distributed import hosts
from jaxrl_llm.run.settings import Settings, check
check(dataclasses.replace(Settings(), **{changes!r}))
hosts.connect("{address},1,0")
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-500:]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def loss(logp:\n", "SyntaxError: .*never closed"),
        ("rate = 1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_cannot_be_read_is_one_line(text, said, own_module):
    own_module("mine_unread", text)
    with pytest.raises(UserError, match=f"--loss mine_unread:loss: {said}"):
        check(of(loss="mine_unread:loss"))


def test_several_hosts_are_connected_before_anything_is_computed(monkeypatch):
    """Whether a KL of one's own has a gradient is computed; the other checks only trace."""

    def computed(*given):
        raise AssertionError("a device was touched before the hosts were connected")

    found = Settings(kl=f"{__name__}:logged_kl", kl_weight=0.1, hosts="auto")
    with pytest.raises(UserError, match="it is a value to log"):
        method.check_computed(found)
    monkeypatch.setattr(method, "_is_flat", computed)
    check(found)
    connected = []
    monkeypatch.setattr(grpo.hosts, "connect", connected.append)
    with pytest.raises(AssertionError):
        grpo.main(found)
    assert connected == ["auto"]


def test_what_is_read_is_taken_and_a_run_goes_on_as_it_began():
    check(of(kl="k3_gradient_terms", kl_weight=0.1, kl_target=0.1, kl_horizon=20))
    check(of(correction="truncated_weights", correction_args=("cap=5.0",), entropy_target=1.0, entropy_step=0.1))
    check(of(loss="a_star_po_loss", loss_args=("beta=0.1",), value_samples=2, filter_groups=False, clip_low=0.2))
    check(of(loop="async", staleness=3, workers="threads:8"))
    check(of(kl_horizon=20, staleness=3, resume="run"))
    check(of(advantages="signed_advantages", filter_groups=False))
    method.check_computed(of(advantages="signed_advantages", resume="run"))
    method.check_computed(of(advantages="signed_advantages", filter_groups=False))
    method.check_computed(of(advantages="rloo_advantages", kl="jaxrl_llm.losses.kl:k3_gradient_terms", kl_weight=0.1))
    check(of(loss="gvpo_loss", microbatches=32))
    check(of(microbatches=64))  # nothing compares the members of a group


def test_a_run_with_everything_changed(tmp_path, own_module):
    """GSPO with leave-one-out, a KL, two updates a rollout and a reward of one's own; resumed with the same flags."""
    own_module("mine", "def reward(answer, response):\n    return 1.0 if '=' in response else 0.25\n")
    words = [
        "--data", "chain", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "8", "--train-problems",
        "32", "--eval-problems", "8", "--eval-samples", "2", "--steps", "2", "--out", str(tmp_path / "run"), "--loss",
        "gspo_loss", "--loss-args", "clip_low=3e-4", "--advantages", "rloo_advantages", "--reduction", "seq_mean",
        "--kl", "k3_gradient_terms", "--kl-weight", "0.01", "--correction", "truncated_weights", "--inner-epochs", "2",
        "--schedule", "constant", "--weight-decay", "0.01", "--reward", "mine:reward", "--no-filter-groups",
        "--kl-target", "0.001", "--entropy-target", "9.0",
    ]  # fmt: skip
    assert cli(words) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["grad/norm"] > 0 for line in lines)
    assert all(0.25 <= line["reward/mean"] <= 1.0 for line in lines)
    assert [line["entropy/weight"] for line in lines] == singles([0.0, 0.005], magnitude=0)
    assert lines[0]["kl/weight"] == singles(0.01, magnitude=0) != lines[1]["kl/weight"]
    assert lines[0]["kl/ref"] == singles(0.0), "of the first update of a rollout: none yet"
    assert cli(["--resume", str(tmp_path / "run"), "--steps", "3"]) == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["entropy/weight"] == singles(0.01, magnitude=0), "the weights go on from where they were"
    assert last["kl/ref"] != singles(0.0)


def _sometimes(answer, response):
    """Half of the responses or so, so that groups of three are equal now and then."""
    return float(sum(map(ord, response)) % 2)


REFILL = (*TINY_ROWS, "--steps", "6", "--schedule", "constant", "--reward", "tests.run.test_method:_sometimes")


@pytest.mark.parametrize(
    "more",
    [
        ("--refill", "drop"),
        pytest.param(("--refill", "keep", "--kl", "k3_gradient_terms", "--kl-weight", "0.1"), marks=pytest.mark.slow),
        pytest.param(("--refill", "keep", "--lora", "2", "--inner-epochs", "2"), marks=pytest.mark.slow),
        pytest.param(("--refill", "drop", "--mesh", "data=2", "--layout", "tree"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_batches_are_filled_over_steps(more, tmp_path, capsys):
    """A step without a full batch moves nothing, not even by Adam's momentum; the run goes on bit for bit."""
    words = [*REFILL, *more]
    assert cli([*words, "--out", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line["refill/trained"] for line in lines]
    assert 0.0 in trained and 1.0 in trained, trained
    for line in lines:
        assert (line["grad/norm"] > 0) == (line["refill/trained"] == 1.0) == ("policy/entropy" in line)
        assert 0.0 <= line["refill/passed"] <= 1.0
    if more[1] == "drop":
        first = trained.index(1.0)
        passed = [line["refill/passed"] for line in lines[: first + 1]]
        assert sum(passed[:-1]) < 1.0 <= sum(passed), "a batch trains as soon as it is full"
    cut = [*words[: words.index("--steps")], "--steps", "3", *words[words.index("--steps") + 2 :]]
    assert cli([*cut, "--out", str(tmp_path / "cut"), "--schedule-steps", "6"]) == 0
    assert cli(["--resume", str(tmp_path / "cut"), "--steps", "6"]) == 0
    again = [json.loads(line) for line in (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()]
    for name in ("reward/mean", "grad/norm", "refill/passed"):
        assert [line[name] for line in again] == [line[name] for line in lines], name


def brief(answer, response):
    """A second reward of the tests, which says nothing of empty responses."""
    return -len(response) / 8 if response else None


def test_several_rewards_are_one_verdict_that_keeps_its_parts():
    verify = method.own_rewards(of(reward=BOTH, reward_weights=(2.0, 0.5)))
    assert verify.parts == ("_by_length", "brief")
    assert verify.each({}, "1234") == (Verdict(0.75, True, "_by_length 0.5, brief -0.5"), (0.5, -0.5))
    assert verify({}, "1234") == verify.each({}, "1234")[0]
    verdict, each = verify.each({}, "")  # one that does not apply is left out of the sum
    assert verdict[:2] == (0.0, True) and each[0] == 0.0 and math.isnan(each[1])
    assert method.own_rewards(of()) is None
    alone = method.own_rewards(of(reward=BOTH[1:]))
    assert alone({}, "1234") == Verdict(-0.5, True, BOTH[1])
    assert not alone({}, "").valid, "no reward at all is no zero"

    def failing(answer, response):
        return Verdict(1.0, False, "the judge is away")

    sys.modules[__name__].failing = failing
    verify = method.own_rewards(of(reward=(BOTH[0], f"{__name__}:failing")))
    assert verify({}, "1234") == (0.0, False, "the judge is away")


def test_gdpo_takes_the_rewards_apart_and_a_penalty_as_one_more():
    settings = of(reward=BOTH, reward_weights=(2.0, 0.5), advantages="gdpo_advantages", filter_groups=False)
    check(settings)
    parts = {"brief": jnp.asarray([0.0, 2.0, 1.0, jnp.nan]), "_by_length": jnp.asarray([1.0, 0.0, 3.0, 1.0])}
    rewards = REWARDS._replace(parts=parts)
    order = jnp.stack([parts["_by_length"], parts["brief"]], axis=1)
    want = group.gdpo_advantages(order, IDS, jnp.asarray([2.0, 0.5]), valid=REWARDS.valid)
    np.testing.assert_array_equal(np.asarray(method.estimator(settings)(rows(), rewards)),
                                  np.asarray(group.per_token(want, MASK)))  # fmt: skip
    shaped = dataclasses.replace(settings, overlong="penalty", overlong_buffer=27)
    found, weights = method.separate_rewards(shaped, rewards, method.shaped_rewards(shaped, rows(), rewards))
    assert found.shape == (4, 3) and weights.tolist() == [2.0, 0.5, 1.0] and float(found[:, 2].min()) < 0
    with pytest.raises(UserError, match="learns from groups of equal rewards, too"):
        method.check_computed(dataclasses.replace(settings, filter_groups=True))


def test_the_rewards_of_the_page_see_the_whole_row(tmp_path, own_module):
    """docs/own-reward.md: the code that stands there, on rows with a column of their own."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "own-reward.md").read_text()
    own_module("mine", page.partition("```python\n")[2].partition("```")[0])
    rows = [{"prompt": f"{k}+1=", "answer": str(k + 1), "style": "brief" if k % 2 else "any"} for k in range(64)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = opened(of(data=str(tmp_path / "rows.jsonl"), reward=("mine:right", "mine:brief"), eval_problems=4,
                      prompts_per_step=2, group_size=2, max_new_tokens=8))  # fmt: skip
    verify, problems = found.tables.verifier, found.tables.train
    for problem in problems[:8]:
        verdict, (right, brief) = verify.each(problem.answer, problem.solution)
        brevity = problem.answer["row"] == {"style": "brief"}
        assert right == 1.0 and brevity != math.isnan(brief) and problem.answer["prompt"] == problem.prompt
        assert verdict.value == 1.0 + (brief if brevity else 0.0)


@pytest.mark.parametrize(
    "more",
    [
        ("--advantages", "gdpo_advantages"),
        pytest.param(("--loop", "async"), marks=pytest.mark.slow),
        pytest.param(
            ("--advantages", "gdpo_advantages", "--loop", "async", "--workers", "local:2"), marks=pytest.mark.slow
        ),
    ],
    ids=" ".join,
)
def test_a_run_by_several_rewards(more, tmp_path):
    """Each is a figure of every step and of every sample that was kept; their weighted sum is the reward."""
    words = [*TINY, "--reward", *BOTH, "--reward-weights", "1", "0.25", *more, "--out", str(tmp_path / "run")]
    assert cli(words) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["grad/norm"] > 0 for line in lines)
    samples = [json.loads(line) for path in sorted((tmp_path / "run").glob("*.jsonl")) for line in open(path)]
    samples = [line for line in samples if "rewards" in line]
    assert samples or "--workers" in more  # whose samples stay with the workers
    for line in samples:
        total = sum(w * line["rewards"].get(name, 0.0) for name, w in (("_by_length", 1.0), ("brief", 0.25)))
        close.assert_near(line["reward"], total)
    for line in lines:
        assert line["reward/_by_length"] > 0 > line["reward/brief"]


TINY = (*TINY_ROWS, "--steps", "2", "--no-filter-groups")


def _by_length(answer, response):
    return len(response) / 8


@pytest.mark.slow
def test_values_are_measured_once_where_a_run_begins(tmp_path, capsys):
    """A*-PO: the run that goes on has them from its checkpoint, to the bit of a run that was never ended."""
    words = [*TINY, "--loss", "a_star_po_loss", "--loss-args", "beta=0.1", "--value-samples", "2", "--reward",
             "tests.run.test_method:_by_length", "--reduction", "seq_mean", "--schedule-steps", "3"]  # fmt: skip
    assert cli([*words, "--out", str(tmp_path / "run")]) == 0
    assert "values of 16 training prompts, by 2 responses" in capsys.readouterr().out
    assert cli(["--resume", str(tmp_path / "run"), "--steps", "3"]) == 0
    assert "training prompts, by" not in capsys.readouterr().out
    assert cli([*words, "--steps", "3", "--out", str(tmp_path / "whole")]) == 0
    lines = [[json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
             for run in ("run", "whole")]  # fmt: skip
    for name in ("loss/total", "grad/norm", "policy/surrogate_error"):
        assert [line[name] for line in lines[0]] == [line[name] for line in lines[1]], name
    assert lines[0][0]["grad/norm"] > 0 and len(lines[0]) == 3


@pytest.mark.parametrize(
    "words",
    [
        ("--advantages", "remax_advantages", "--loss", "clip_cov_loss", "--loss-args", "fraction=0.2", "--slots", "6"),
        pytest.param(("--advantages", "reinforce_pp_token_advantages", "--advantage-args", "kl_weight=0.01", "--loss",
                      "kl_cov_loss"), marks=pytest.mark.slow),
        pytest.param(("--advantages", "remax_advantages", "--loop", "async"), marks=pytest.mark.slow),
        pytest.param(("--advantages", "remax_advantages", "--mesh", "data=2"), marks=pytest.mark.slow),
        pytest.param(("--advantages", "smoothed_advantages", "--loss", "dcpo_loss"), marks=pytest.mark.slow),
        pytest.param(("--advantages", "tempo_advantages"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_run_by_what_its_estimator_asks_for(words, tmp_path):
    own = ("--reward", "tests.run.test_method:_by_length")
    assert cli([*TINY, *own, *words, "--out", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["grad/norm"] > 0 for line in lines)


def test_the_reference_of_an_adapter_is_kept_without_its_base():
    """Neither the memory of a second base nor that of a checkpoint: what is scored is the model that was loaded."""
    found = grpo.opened(of(lora=2, kl="k3_gradient_terms", kl_weight=0.1, data="chain", train_problems=32,
                           eval_problems=8, prompts_per_step=2, group_size=2, max_new_tokens=6))  # fmt: skip
    (stage,) = grpo.build(found, None).stages
    params, ids = found.model.params, jnp.arange(2, dtype=jnp.int32)
    kept = stage.extras(params, jax.random.key(0))
    assert set(kept["reference"]) == {"lora"}
    drawn = sample_keys(jax.random.key(1), 0, ids, 2)
    table = found.tables.train_table
    rows = jax.jit(stage.method.rollout)(params, table.tokens[:2], table.valid[:2], drawn, ids)
    moved = params | {"lora": jax.tree.map(lambda x: x + 0.1, params["lora"])}
    rewards = Rewards(jnp.asarray([1.0, 0.0, 0.0, 1.0]), jnp.ones((4,), bool))
    batch = jax.jit(stage.method.estimate)(moved, kept, rows, rewards)
    wanted, _ = score_tokens(found.model.policy, params, rows)
    sums = close.forward_sums(found.model.config, rows.tokens.shape[1])
    close.assert_same_sums(*(jnp.where(rows.mask, x, 0.0) for x in (batch.ref_logp, wanted)), sums)
