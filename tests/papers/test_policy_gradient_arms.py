"""Arms of policy gradients that change one piece of a loss, and what a guess earns on the tasks they are tried on."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.policy_gradient import nsr, rec_offpolicy, steer_entropy
from jaxrl_llm.data.tasks import chain, countdown
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import off_policy, token_choice
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Rewards, Trajectories
from tests import close

GUESSED = 6000  # problems that chance is counted on


def test_a_right_sample_may_weigh_a_twentieth():
    arm = nsr.ARMS["w_twentieth"]["advantages"]
    found = arm(jnp.array([1.0, 0.0, 1.0]), jnp.zeros(3, jnp.int32), valid=jnp.array([True, True, False]))
    close.assert_near(found, [0.05, -1.0, 0.0])


def test_steer_without_the_clip_weighs_what_is_not_clipped():
    """A ratio of 3 on a token to be made likelier: PPO stops at 1.2, this arm at 100."""
    arm, old = steer_entropy.ARMS["steer_no_clip"], jnp.log(jnp.array([[0.3]]))
    logp, one, mask = jnp.log(jnp.array([[0.9]])), jnp.ones((1, 1)), jnp.ones((1, 1), bool)
    close.assert_near(arm["loss"](logp, old, one, mask).loss, [[-3.0]])
    close.assert_near(steer_entropy.Settings().loss(logp, old, one, mask).loss, [[-1.2]])
    close.assert_near(arm["loss"](logp - 9.0, old, -one, mask).loss, [[0.01]])
    assert arm["weights"] is token_choice.steer_weights


def test_the_wide_clip_and_the_ratio_of_a_sequence():
    ratio = jnp.array([[0.3, 0.5, 0.9, 2.5, 3.5]])
    keep = rec_offpolicy.ARMS["wide"]["keep"]
    assert keep(ratio, jnp.ones((1, 5)))[0].tolist() == [True, True, True, True, False]
    assert keep(ratio, -jnp.ones((1, 5)))[0].tolist() == [False, True, True, True, True]
    # ratios of 2 and 1/2: their geometric mean is 1, within bounds that the first token alone is beyond
    logp, old = jnp.log(jnp.array([[0.4, 0.1]])), jnp.log(jnp.array([[0.2, 0.2]]))
    given = logp, old, jnp.ones((1, 2)), jnp.ones((1, 2), bool)
    of_sequence = off_policy.rec_loss(*given, ratio_of=rec_offpolicy.ARMS["gspo"]["ratio_of"])
    assert of_sequence.aux["clipped"].tolist() == [[0.0, 0.0]]
    assert off_policy.rec_loss(*given).aux["clipped"].tolist() == [[1.0, 0.0]]


def test_gspo_averages_over_tokens_and_then_over_sequences():
    """On the sampler's own policy: a right response of two tokens and a wrong one of six, each half of the loss."""
    mask = np.zeros((2, 12), bool)
    mask[0, 4:6], mask[1, 4:10] = True, True
    found = {}
    for arm in ("one_side", "gspo"):
        changes = rec_offpolicy.EMBEDDED | rec_offpolicy.SMOKE | rec_offpolicy.ARMS[arm]
        settings = rec_offpolicy.Settings(**changes | {"prompts_per_step": 1})
        bench = recipes.bench(settings)
        params, lines = bench.model.params, jnp.zeros(2, jnp.int32)
        grid = jnp.ones((2, 12), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
        tokens = bench.train.tokens[0, -1] * grid
        rows = Trajectories(tokens, grid, positions, jnp.asarray(mask), jnp.zeros(grid.shape), lines > 0, lines, lines)
        logp, _ = jax.jit(lambda p, r, policy=bench.model.policy: builders.score_tokens(policy, p, r))(params, rows)
        rows = rows._replace(sampler_logp=jnp.where(rows.mask, logp, 0.0))
        (stage,) = rec_offpolicy.build(settings).stages
        batch = stage.method.estimate(params, {}, rows, Rewards(jnp.array([1.0, 0.0]), jnp.ones(2, bool)))
        found[arm] = float(jax.jit(stage.method.loss)(params, batch)[0])
    terms = np.where(mask, -np.array([[0.5], [-0.5]]) * np.asarray(logp), 0.0)
    sums = close.singles(terms.sum() / 8, terms=400, magnitude=np.abs(terms).max())
    means = close.singles((terms[0].sum() / 2 + terms[1].sum() / 6) / 2, terms=400, magnitude=np.abs(terms).max())
    assert found == {"one_side": sums, "gspo": means} and found["one_side"] != means


@pytest.mark.parametrize(
    "name",
    [
        f"policy_gradient.{slug}"
        for slug in (
            "amft", "attention_rhythm", "cola", "critique_coder", "critique_grpo", "empo", "kimi_k15", "memory_r",
            "pf_ppo", "rl_plus", "rlgf", "rover", "verl_rank",
        )
    ] + ["efficiency.concise_rl", "efficiency.hawkeye", "efficiency.l2s_merging"],
)  # fmt: skip
def test_the_chance_of_a_bed_is_what_its_task_gives_to_a_guess(name):
    """Of Countdown random legal steps, of arithmetic chains the commonest answer, which is 0 for every modulus."""
    module = importlib.import_module(f"experiments.{name}")
    settings = module.Settings(**module.EMBEDDED)
    rng, right = np.random.default_rng(7), 0
    for k in range(GUESSED):
        level = settings.levels[k % len(settings.levels)]
        if settings.data == "countdown":
            problem = countdown.make(rng, level)
            right += countdown.attempt(rng, problem.answer["numbers"])[1] == problem.answer["target"]
        else:
            right += chain.make(rng, level).answer["value"] == 0
    close.assert_share(right / GUESSED, module.BED.chance, GUESSED)
