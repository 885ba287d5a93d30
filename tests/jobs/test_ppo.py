"""PPO as a command: its critic learns, and advantages are any of rewards and values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import advantages, losses
from jaxrl_llm.__main__ import main
from jaxrl_llm.advantages import whiten
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli
from jaxrl_llm.jobs import ppo
from jaxrl_llm.models import heads
from jaxrl_llm.run import options
from jaxrl_llm.train.methods import actor_critic
from jaxrl_llm.train.methods.builders import score_tokens
from jaxrl_llm.types import Rewards, Trajectories
from tests import close


def surrogate(logp, old_logp, advantages, mask):
    """No loss: an array, not TokenTerms."""
    return -advantages * jnp.exp(logp - old_logp)


def run(out, *words):
    found = cli.run(ppo, ["--smoke", "--seeds", "1", "--out", str(out), *words])
    return next(iter(found.arms.values()))


@pytest.mark.parametrize(
    "words",
    [
        ("--gae", "length_adaptive_gae_advantages", "--gae-args", "alpha=0.5", "--inner-epochs", "2"),
        *(pytest.param(words, marks=pytest.mark.slow) for words in (
            ("--gae", "n_step_returns", "--gae-args", "steps=4"), ("--loss", "gspo_loss"),
            ("--gae", "lambda_returns", "--reward", "tests.jobs.test_online_dpo:even"), ("--lora", "2"),
            ("--kl-weight", "0.1", "--lora", "2"), ("--imitation", "0.1", "--inner-epochs", "2"),
            ("--value-loss", "squared_value_loss"), ("--critic-warmup", "2", "--inner-epochs", "2"),
            ("--value-loss", "categorical_value_loss", "--value-args", "low=0", "high=1", "targets=hl_gauss",
             "--value-bins", "7"),
        )),
    ],
    ids="-".join,
)  # fmt: skip
def test_two_steps(words, tmp_path):
    found = run(tmp_path, *words)
    assert np.isfinite(found.metrics["loss/total"]).all() and found.metrics["grad/norm"][0] > 0
    assert (tmp_path / "seeds" / "ppo" / "seed_0" / "model" / "heads.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gae", "rloo_advantages"], "choose gae_advantages"),
        (["--gae", "n_step_returns"], "needs --gae-args steps="),
        (["--loss", "reinforce_loss"], "PPO takes a loss of logp, old_logp"),
        (["--inner-epochs", "0"], "--inner-epochs 0 must be at least 1"),
        (["--value-loss", "categorical_value_loss"], "needs --value-args low=... high=..."),
        (["--value-loss", "categorical_value_loss", "--value-args", "low=1", "high=0"], "low the smaller"),
        (["--imitation", "-0.1"], "--imitation -0.1 must not be negative"),
        (["--kl-weight", "-0.1"], "--kl-weight -0.1 must not be negative"),
        (["--critic-warmup", "-1"], "--critic-warmup -1 must not be negative"),
        (["--critic-learning-rate", "0"], "--critic-learning-rate 0.0 positive"),
        (["--value-loss", "reinforce_loss"], "takes logp, advantages, which this command has not"),
        (["--value-loss", "clipped_value_los"], "did you mean clipped_value_loss"),
        (
            ["--value-loss", "top_tokens", "--value-args", "fraction=0.5", "--plan"],
            "--value-loss top_tokens: gives no TokenTerms, as a loss of tokens does",
        ),
        (
            ["--value-loss", "expected_values", "--value-args", "low=0", "high=1", "--plan"],
            "--value-loss expected_values: gives no TokenTerms",
        ),
        (["--loss", f"{__name__}:surrogate"], f"--loss {__name__}:surrogate: gives no TokenTerms"),
        (["--gae", "n_step_returns", "--gae-args", "steps=2.5"], "--gae-args steps=2.5: 2.5 is no whole number"),
        (["--gae", "n_step_returns", "--gae-args", "steps=[1]"], "--gae-args steps=[1]: [1] is no number"),
        (["--value-args", "clip=[1]"], "--value-args clip=[1]: [1] is no value such as 0.2"),
        (["--value-loss", "categorical_value_loss", "--value-args", "low=[1]", "high=2"], "low=[1]: [1] is no number"),
        (["--loss-args", "dual_clip=[1]"], "--loss-args dual_clip=[1]: [1] is no number"),
        (["--loss", "bapo_loss", "--loss-args", "low=3"], "--loss-args low=3: 3 is no value such as (0.6, 0.9)"),
        (["--loss", "bapo_loss", "--loss-args", "low=(3,)"], "low=(3,): (3,) is no value such as (0.6, 0.9)"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["ppo", "--smoke", "--out", str(tmp_path), *words])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and error.count("\n") == 1


@pytest.mark.slow
def test_the_critic_learns_alone_before_the_policy_moves(tmp_path):
    changes = {"critic_warmup": 3, "critic_learning_rate": 1e-3, "value_loss": "categorical_value_loss",
               "value_args": ("low=0", "high=1"), "value_bins": 7}  # fmt: skip
    plan = ppo.build(dataclasses.replace(ppo.Settings(), **ppo.EMBEDDED | ppo.SMOKE | changes))
    assert [(stage.steps, stage.method.trained) for stage in plan.stages] == [(3, "value"), (2, "")]
    found = run(tmp_path, "--critic-warmup", "3", "--critic-learning-rate", "1e-3")
    assert found.curves["loss/total"]["step"][-1] == 5 and found.updates == 5
    unmoved = [row[:2] for name, curve in found.curves.items() if name.startswith("eval/") for row in curve["values"]]
    assert all(first == second for first, second in unmoved), "measured at 0 and at step 2 of the warm-up"


@pytest.mark.parametrize("more", [(), ("--kl-weight", "0.1", "--inner-epochs", "4", "--learning-rate", "1e-2")])
def test_a_limit_holds_for_the_sampler_and_not_for_the_updates(more, tmp_path):
    found = run(tmp_path / "run", "--most-gap", "0.001", *more)  # which no step exceeds, or the run would stop
    assert found.metrics["kl/sampler_max"][0] > 0 and ("policy/kl/ref" in found.metrics) == bool(more)
    with pytest.raises(UserError, match=r"step 1: the sampler's log-probabilities are up to .* nats off"):
        run(tmp_path / "far", "--most-gap", "1e-12", *more)


def test_advantages_are_those_that_were_named():
    """VAPO's, of the critic's values of these rows, whitened; targets are Monte Carlo returns."""
    model = options.open_model(ppo.Settings(model="nano"))
    tokens = jax.random.randint(jax.random.key(0), (4, 9), 3, 20, jnp.int32)
    column = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), tokens.shape)
    there = column < 3 + jnp.asarray([6, 2, 4, 5])[:, None]
    mask, ids = there & (column >= 3), jnp.arange(4, dtype=jnp.int32)
    rows = Trajectories(tokens, there.astype(jnp.int32), column, mask, jnp.where(mask, -1.0, 0.0), ids > 9, ids, ids)
    rewards = Rewards(jnp.asarray([1.0, 0.0, 0.5, 1.0]), jnp.ones(4, bool))
    head = heads.init_head(model.config.hidden_size, jax.random.key(1), scale=0.1)
    params = {"model": model.params, "value": head}
    *_, values, _ = actor_critic.score_with_values(model.policy, params, rows)
    gae = advantages.length_adaptive_gae_advantages
    batch = actor_critic.make_value_estimate(model.policy, gae=gae)(params, {}, rows, rewards)
    want, targets = gae(advantages.at_last_token(rewards.value, mask), values, jnp.zeros(4), mask)
    np.testing.assert_array_equal(batch.advantages, whiten.whitened_tokens(want, mask))
    np.testing.assert_array_equal(batch.extras["returns"], targets)
    plain = actor_critic.make_value_estimate(model.policy)(params, {}, rows, rewards)
    assert np.any(np.asarray(plain.advantages) != np.asarray(batch.advantages))


def drawn(*ends):
    """The model, and rows of two tokens of a prompt and responses that end there."""
    tokens = jax.random.randint(jax.random.key(0), (len(ends), max(ends)), 3, 20, jnp.int32)
    column = jnp.broadcast_to(jnp.arange(max(ends), dtype=jnp.int32), tokens.shape)
    mask, ids = (column >= 2) & (column < jnp.asarray(ends)[:, None]), jnp.arange(len(ends), dtype=jnp.int32)
    rows = Trajectories(tokens, column * 0 + 1, column, mask, jnp.where(mask, -1.0, 0.0), ids > 9, ids, ids)
    return options.open_model(ppo.Settings(model="nano")), rows


def test_a_kl_to_the_start_is_taken_off_every_reward():
    """Returns of a policy that left its reference, by a loop in float64; at the reference nothing is taken off."""
    model, rows = drawn(6, 5)
    rewards = Rewards(jnp.asarray([1.0, 0.25]), jnp.ones(2, bool))
    params = {"model": model.params, "value": heads.init_head(model.config.hidden_size, jax.random.key(1))}
    logp, _ = score_tokens(model.policy, model.params, rows)
    for sampled, weight in ((rows.sampler_logp, 0.5), (jnp.where(rows.mask, logp, 0.0), 0.5)):
        own = rows._replace(sampler_logp=sampled)
        estimate = actor_critic.make_value_estimate(
            model.policy, lam=1.0, reference=lambda params, extras: extras["start"], kl_weight=weight
        )
        batch = estimate(params, {"start": model.params}, own, rewards)
        want = np.zeros((2, 6))
        for row, last in ((0, 6), (1, 5)):
            still = float(rewards.value[row])
            for t in range(last - 1, 1, -1):
                still -= weight * (float(sampled[row, t]) - float(logp[row, t]))
                want[row, t] = still
        np.testing.assert_allclose(batch.extras["returns"], want, rtol=0, atol=close.bound(16, 8.0))
        np.testing.assert_array_equal(batch.ref_logp, logp)
        figure = actor_critic.reference_kl(batch, {})["policy/kl/ref"]
        assert figure == 0.0, "the policy before the updates is its reference here"
    assert np.asarray(batch.extras["returns"])[np.asarray(rows.mask)].tolist() == [1.0] * 4 + [0.25] * 3


def test_a_bonus_of_entropy_is_a_part_of_the_policys_loss():
    """A term of the loss: its mean over the tokens of the policy, times its weight, is what the loss has less."""
    model, rows = drawn(6, 4)
    params = {"model": model.params, "value": heads.init_head(model.config.hidden_size, jax.random.key(1))}
    rewards = Rewards(jnp.asarray([1.0, 0.25]), jnp.ones(2, bool))
    batch = actor_critic.make_value_estimate(model.policy)(params, {}, rows, rewards)
    _, entropy = score_tokens(model.policy, model.params, rows)
    extra = lambda logp, entropy, batch: 0.5 * losses.entropy_bonus_terms(entropy, batch.mask)  # noqa: E731
    plain, bonus = (actor_critic.make_actor_critic_loss(model.policy, extra_terms=x) for x in (None, extra))
    less = plain(params, batch)[0] - bonus(params, batch)[0]
    want = 0.5 * sum(float(entropy[k, t]) for k in range(2) for t in range(6) if rows.mask[k, t]) / 6
    close.assert_same_sums(less, want, close.forward_sums(model.config, 6), magnitude=4.0)


def test_right_responses_are_imitated():
    """VAPO's term: the mean of -log pi over the tokens of right responses, whatever parts a batch is cut into."""
    model, rows = drawn(8, 5, 7, 6)
    params = {"model": model.params, "value": heads.init_head(model.config.hidden_size, jax.random.key(1))}
    rewards = Rewards(jnp.asarray([1.0, 0.25, 1.0, 1.0]), jnp.asarray([True, True, True, False]))
    batch = actor_critic.make_value_estimate(model.policy, row_extras=ppo.right_ones)(params, {}, rows, rewards)
    logp, _ = score_tokens(model.policy, model.params, rows)
    plain, more = (
        actor_critic.make_actor_critic_loss(model.policy, extra_terms=x) for x in (None, ppo.imitation_terms(0.1))
    )
    want = -np.mean([float(logp[k, t]) for k in (0, 2) for t in range(8) if rows.mask[k, t]])
    added = more(params, batch)[0] - plain(params, batch)[0]
    close.assert_same_sums(added, 0.1 * want, close.forward_sums(model.config, 8), magnitude=8.0)
    parts = [
        jax.tree.map(lambda x, k=k: x[k : k + 2], batch._replace(total=jnp.stack([batch.total] * 4))) for k in (0, 2)
    ]
    parts = [part._replace(total=batch.total) for part in parts]
    halves = sum(more(params, part)[0] - plain(params, part)[0] for part in parts)
    close.assert_same_sums(halves, 0.1 * want, close.forward_sums(model.config, 8), magnitude=8.0)
    slope = jax.grad(lambda p: more(p, batch)[0] - plain(p, batch)[0])(params)
    moved = jax.tree.map(lambda x, g: x - 1e-2 * g, params, slope)["model"]
    after, _ = score_tokens(model.policy, moved, rows)
    assert float(jnp.sum(jnp.where(rows.mask, after - logp, 0.0)[jnp.asarray([0, 2])])) > 0, "they become likelier"
    none = ppo.right_ones({}, {}, rows, rewards._replace(value=jnp.zeros(4)))["share"]
    assert none.tolist() == [0.0] * 4, "where nothing is right nothing is imitated"


def test_the_critic_learns_by_the_loss_that_was_named():
    """Its metrics are those of the loss by hand: of values, or of a distribution whose mean is the value."""
    model = options.open_model(ppo.Settings(model="nano"))
    tokens = jax.random.randint(jax.random.key(0), (2, 6), 3, 20, jnp.int32)
    column = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), tokens.shape)
    mask, ids = column >= 2, jnp.arange(2, dtype=jnp.int32)
    rows = Trajectories(tokens, column * 0 + 1, column, mask, jnp.where(mask, -1.0, 0.0), ids > 9, ids, ids)
    rewards = Rewards(jnp.asarray([1.0, 0.25]), jnp.ones(2, bool))
    for words, bins in (({"value_loss": "squared_value_loss"}, 1),
                        ({"value_loss": "categorical_value_loss", "value_args": ("low=-1", "high=2")}, 5)):  # fmt: skip
        worth, read = ppo.value_loss(ppo.Settings(value_bins=bins, **words))
        head = heads.init_head(model.config.hidden_size, jax.random.key(1), outputs=bins, scale=0.1)
        params = {"model": model.params, "value": head}
        batch = actor_critic.make_value_estimate(model.policy, read=read)(params, {}, rows, rewards)
        hidden = model.policy.hidden(model.params, tokens, column, rows.segment_ids)
        said = jnp.pad(heads.apply_head(head, hidden)[:, :-1], ((0, 0), (1, 0), (0, 0)))
        values = said[:, :, 0] if bins == 1 else losses.expected_values(said, low=-1.0, high=2.0).at[:, 0].set(0.0)
        close.assert_same_sums(batch.extras["values"], values, close.forward_sums(model.config, 6))
        returns = batch.extras["returns"]
        if bins == 1:
            want = losses.squared_value_loss(said[:, :, 0], returns, mask)
        else:
            want = losses.categorical_value_loss(said, returns, mask, low=-1.0, high=2.0)
        loss = actor_critic.make_actor_critic_loss(model.policy, value_loss=worth, read=read, value_weight=1.0)
        none = actor_critic.make_actor_critic_loss(model.policy, value_loss=worth, read=read, value_weight=0.0)
        found = loss(params, batch)[0] - none(params, batch)[0]
        close.assert_same_sums(found, jnp.sum(want.loss) / 8, close.forward_sums(model.config, 6), magnitude=4.0)
