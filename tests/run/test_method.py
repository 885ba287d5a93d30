"""The method of the training job by flags: every public loss and estimator by name, and the default unchanged."""

import dataclasses
import inspect
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import advantages, losses
from jaxrl_llm.advantages import group
from jaxrl_llm.errors import UserError
from jaxrl_llm.jobs.grpo import cli
from jaxrl_llm.losses import clipped_policy_loss
from jaxrl_llm.run import method, named
from jaxrl_llm.run.settings import Settings, check
from jaxrl_llm.types import Batch, Rewards, Trajectories

RNG = np.random.default_rng(0)
SHAPE = (4, 6)
MASK = jnp.asarray(np.arange(6)[None, :] > np.array([1, 2, 1, 3])[:, None])
LOGP, OLD, SAMPLER, REF, VALUES = (jnp.asarray(RNG.normal(size=SHAPE) - 2, jnp.float32) for _ in range(5))
IDS = jnp.asarray([0, 0, 1, 1], jnp.int32)


def of(**changes):
    return dataclasses.replace(Settings(), **changes)


def rows():
    zeros = jnp.zeros(SHAPE, jnp.int32)
    return Trajectories(zeros, zeros + 1, zeros, MASK, SAMPLER, jnp.asarray([False, True, False, False]), IDS, IDS, {})


REWARDS = Rewards(jnp.asarray([1.0, 0.0, 1.0, 1.0]), jnp.ones((4,), bool))


def test_the_default_is_grpo_with_clip_higher():
    settings = of()
    found = method.token_loss(settings)(LOGP, OLD, VALUES, MASK)
    wanted = clipped_policy_loss(LOGP, OLD, VALUES, MASK, clip_low=settings.clip_low, clip_high=settings.clip_high)
    np.testing.assert_array_equal(np.asarray(found.loss), np.asarray(wanted.loss))
    plain = group.per_token(group.group_normalized_advantages(REWARDS.value, IDS, valid=REWARDS.valid), MASK)
    np.testing.assert_array_equal(np.asarray(method.estimator(settings)(rows(), REWARDS)), np.asarray(plain))
    assert method.correction(settings) is None and method.kl_terms(settings) is None
    schedule, before = (
        method.learning_rate(settings, 650),
        optax.schedules.warmup_cosine_decay_schedule(0.0, settings.learning_rate, 10, 651),
    )
    assert [float(schedule(k)) for k in (0, 5, 10, 400, 650)] == [float(before(k)) for k in (0, 5, 10, 400, 650)]


def _policy_losses():
    for name in losses.__all__:
        function = getattr(losses, name)
        if inspect.isfunction(function) and named.arrays(function) == method.LOSS:
            if not any(x is inspect.Parameter.empty for x in named.settings(function).values()):
                yield name


@pytest.mark.parametrize("name", sorted(_policy_losses()))
def test_every_policy_loss_is_reached_by_its_name(name):
    terms = method.token_loss(of(loss=name))(LOGP, OLD, VALUES, MASK)
    assert np.isfinite(np.asarray(terms.loss)).all() and np.any(np.asarray(terms.loss) != 0)


def test_there_are_many_losses():
    assert {"gspo_loss", "gmpo_loss", "sapo_loss", "cispo_loss", "vespo_loss", "topr_loss"} <= set(_policy_losses())


@pytest.mark.parametrize(
    "name",
    ["rloo_advantages", "dr_grpo_advantages", "opo_advantages", "gpg_advantages", "lite_ppo_advantages",
     "reinforce_pp_baseline_advantages", "best_minus_second_advantages", "centred_token_advantages"],
)  # fmt: skip
def test_estimators_are_reached_by_their_names(name):
    values = method.estimator(of(advantages=name))(rows(), REWARDS)
    assert values.shape == SHAPE and np.any(np.asarray(values) != 0)


def test_settings_of_a_function_are_words():
    tight = method.token_loss(of(loss="clipped_policy_loss", loss_args=("clip_low=0.0", "clip_high=0.0")))
    loose = method.token_loss(of())
    assert not np.allclose(
        np.asarray(tight(LOGP, OLD, VALUES, MASK).loss), np.asarray(loose(LOGP, OLD, VALUES, MASK).loss)
    )
    assert "pass_at_k_advantages" in advantages.__all__
    values = method.estimator(of(advantages="pass_at_k_advantages", advantage_args=("k=2",)))(rows(), REWARDS)
    assert values.shape == SHAPE


def _batch():
    fields = {name: None for name in Batch._fields}
    arrays = {"mask": MASK, "old_logp": OLD, "sampler_logp": SAMPLER, "ref_logp": REF, "advantages": VALUES}
    return Batch(**fields | arrays)


@pytest.mark.parametrize("name", ["truncated_weights", "masked_weights", "batch_normalised_weights"])
def test_corrections_are_weights_of_tokens(name):
    weights = method.correction(of(correction=name))(LOGP, LOGP, _batch())
    assert weights.shape == SHAPE and np.isfinite(np.asarray(weights)).all()


def test_a_mask_corrects_as_zeros_and_ones():
    settings = of(correction="rejection_mask", correction_args=("most=1.0",))
    weights = np.asarray(method.correction(settings)(LOGP, LOGP, _batch()))
    assert set(np.unique(weights)) <= {0.0, 1.0}


def test_the_divergence_has_a_gradient():
    import jax

    for name in ("k3_gradient_terms", "k1_gradient_terms", "corrected_k3_gradient_terms", "kl_gradient_terms"):
        terms = method.kl_terms(of(kl=name, kl_weight=0.5))
        slope = jax.grad(lambda x, f=terms: jnp.sum(jnp.where(MASK, f(x, x, _batch()), 0.0)))(LOGP)
        assert np.any(np.asarray(slope) != 0), name


def test_overlong_responses_leave_or_pay():
    assert method.keep(of(overlong="mask"), None)(rows(), REWARDS).tolist() == [True, False, True, True]
    assert method.keep(of(), None) is None
    penal = method.estimator(of(overlong="penalty", overlong_buffer=3, max_new_tokens=4))(rows(), REWARDS)
    assert not np.allclose(np.asarray(penal), np.asarray(method.estimator(of())(rows(), REWARDS)))


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_schedules_warm_up_first(schedule):
    rate = method.learning_rate(of(schedule=schedule, learning_rate=1.0, warmup_steps=4), 20)
    assert float(rate(0)) == 0.0 and float(rate(4)) == pytest.approx(1.0)
    assert float(rate(20)) == pytest.approx(1.0 if schedule == "constant" else 1 / 17, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": "gspo_los"}, "did you mean gspo_loss"),
        ({"loss": "dpo_loss"}, "takes chosen_logp"),
        ({"loss_args": ("gamma=1",)}, "the settings of clipped_policy_loss are clip_low=0.2"),
        ({"advantages": "pass_at_k_advantages"}, "needs --advantage-args k="),
        ({"kl": "k3", "kl_weight": 0.1}, "is a value to log"),
        ({"kl": "k3_gradient_terms"}, "--kl-weight 0.0: give both"),
        ({"kl_weight": 0.1}, "give both, or neither"),
        ({"inner_epochs": 0}, "--inner-epochs 0"),
        ({"overlong": "penalty"}, "needs a buffer"),
        ({"overlong": "penalty", "overlong_buffer": 99}, "exceeds --max-new-tokens 28"),
        ({"weight_decay": -1.0}, "--weight-decay -1.0"),
        ({"reward": "nothing"}, None),
        ({"optimiser": "muon", "weight_decay": 0.1}, "is of --optimiser adam"),
    ],
)
def test_mistakes_are_named(changes, said):
    if said is None:
        with pytest.raises(UserError, match="is no MODULE:FUNCTION"):
            method.own_reward(changes["reward"])
        return
    with pytest.raises(UserError, match=said):
        check(of(**changes))


def test_a_run_with_everything_changed(tmp_path, monkeypatch):
    """GSPO with leave-one-out, a KL, two updates a rollout and a reward of one's own; resumed with the same flags."""
    (tmp_path / "mine.py").write_text("def reward(answer, response):\n    return 1.0 if '=' in response else 0.25\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [
        "--data", "chain", "--prompts-per-step", "4", "--group-size", "4", "--max-new-tokens", "8", "--train-problems",
        "32", "--eval-problems", "8", "--eval-samples", "2", "--steps", "2", "--out", str(tmp_path / "run"), "--loss",
        "gspo_loss", "--loss-args", "clip_low=3e-4", "--advantages", "rloo_advantages", "--reduction", "seq_mean",
        "--kl", "k3_gradient_terms", "--kl-weight", "0.01", "--correction", "truncated_weights", "--inner-epochs", "2",
        "--schedule", "constant", "--weight-decay", "0.01", "--reward", "mine:reward", "--no-filter-groups",
    ]  # fmt: skip
    assert cli(words) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["grad/norm"] > 0 for line in lines)
    assert all(0.25 <= line["reward/mean"] <= 1.0 for line in lines)
    assert cli(["--resume", str(tmp_path / "run"), "--steps", "3"]) == 0
