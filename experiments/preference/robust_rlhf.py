"""Preference optimisation with an auxiliary judge that corrects for a misspecified reward (VRPO).

Paper:     Ye et al., "Robust Reinforcement Learning from Human Feedback for Large Language Models Fine-Tuning",
           arXiv:2504.03784.
Claim:     where people's choices follow no reward, a judge as control variate gives DPO less variance and a better
           policy, and a useless judge does little harm.
Equations: L = phi(h) - [g phi(h) + (1 - g) phi(-h)] + g* phi(h*) + (1 - g*) phi(-h*); h the margin of a labelled pair,
           g the judge's probability of its label, h*, g* of a pair drawn from the reference; phi = -log sig (ramp:
           relu(1 - h) - relu(-0.5 - h)). vrpo_true: the law itself; vrpo: a reward model; vrpo_half: 1/2; vrpo_self:
           sig(h) of a copy of the policy from the start of each half. rm, rm_vrpo, rm_vrpo_true: two stages, a reward
           model r by the same loss with h = r(y1) - r(y2) (rm: phi(h) alone), then PPO on r - 0.05 log(pi / pi_ref).
Left out:  sizes beyond a small decoder.
Expect:    table/mse and table/variance: vrpo_true < dpo and vrpo < dpo; eval/gold at eval/kl 4: vrpo_true > dpo;
           vrpo_half within 0.5 of dpo; the gain in error grows with the flips (0, 20 and 35 %).
Measure:   eight tables of pairs are drawn afresh and each gives a gradient of the arm's loss at the reference:
           table/mse is their mean squared distance to the gradient of the expected loss (2048 pairs, the law itself in
           the place of labels), table/variance that to their own mean, both over the squared length of the former;
           eval/gold: true reward on fresh prompts; two halves of 128 labels each from P = (1 - 2 f) sig(gold gap +
           cycle) + f, f = 0.2, where the cycle (1, 0, -1 by the first tokens modulo 3) has no reward; the reward model
           read 128 more. Equal updates, and labels but for the rm arms, in which PPO has the place of the second half;
           vrpo also reads two unlabelled responses a prompt.
Run:       python -m experiments.preference.robust_rlhf
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from experiments.parts.preference_task import Preferences
from jaxrl_llm import experiment, reduce
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import preference
from jaxrl_llm.models import heads

BETA, CYCLE = 0.1, 1.0
TABLES, POPULATION = 8, 2048
PAIRS_AT_ONCE = 32  # of texts, where a gradient is measured
BETA_KL, PPO_UPDATES = 0.05, 2


# Judges ``(task, params, flip_rate, prompts, first, second) -> P(first wins) [N]``.


def by_reward_model(task: Preferences, params, flip_rate, *rows):
    return preference_strings.judged(task, params, *rows)


def by_law(task: Preferences, params, flip_rate, *rows):
    return task.chance(*rows, flip_rate=flip_rate, cycle=CYCLE)


def by_nothing(task, params, flip_rate, prompts, *both):
    return jnp.full(prompts.shape[:1], 0.5, jnp.float32)


def no_judge(margin):
    """Maximum likelihood of the labels: ``phi(h)``."""
    return preference.PairTerms(preference.logistic(margin), {"accuracy": (margin > 0).astype(jnp.float32)})


def by_copy(task: Preferences, params, flip_rate, *rows):
    return jax.nn.sigmoid(preference_strings.margins(task, params, *rows, beta=BETA))


def directly(settings: "Settings", task: Preferences) -> experiment.Plan:
    """Two halves with data of their own; a frozen copy as judge is renewed between them."""

    def loss(params, extras, batch):
        terms, logp = terms_of(task, settings, params["policy"], batch)
        return reduce.scalars(terms.loss), {
            "pair/accuracy": reduce.scalars(terms.aux["accuracy"]),
            "pair/chosen_drift": reduce.scalars(logp[:, 0] - batch[2][:, 0]),
            "tokens/trained": jnp.asarray(float(batch[1].size), jnp.float32),
        }

    stage = pair_table_stage(settings, task, loss)
    return experiment.Plan(start_of(settings, task), (stage, stage), strings.bound(measure, task, settings))


def by_reward(settings: "Settings", task: Preferences) -> experiment.Plan:
    """A reward model from the same pairs, then PPO against it."""

    def loss(params, extras, batch):
        terms = reward_terms(task, settings, params["fitted"], batch)
        return reduce.scalars(terms.loss), {
            "pair/accuracy": reduce.scalars(terms.aux["accuracy"]),
            "tokens/trained": jnp.asarray(float(batch[1].size), jnp.float32),
        }

    online = preference_strings.ppo_stages(
        task, strings.bound(fitted_reward, task), steps=max(1, settings.steps // PPO_UPDATES), beta=BETA_KL,
        learning_rate=settings.policy_rate, updates_per_rollout=PPO_UPDATES, critic_steps=settings.critic_steps,
    )  # fmt: skip
    init = strings.bound(with_fitted, task, start_of(settings, task))
    stages = (pair_table_stage(settings, task, loss), *online)
    return experiment.Plan(init, stages, strings.bound(measure_reward, task, settings))


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """Sizes for the small model; beta is the paper's."""

    steps: int = 60  # of each half: beyond, all arms are over-optimised
    eval_every: int = 10
    learning_rate: float = 3e-4
    reference_steps: int = 200
    reward_steps: int = 100
    critic_steps: int = preference_strings.CRITIC_STEPS
    pairs: int = 128
    pairs_per_step: int = 32
    pair_loss: Callable | None = None  # of labelled pairs alone
    judge: Callable = by_reward_model
    phi: Callable = preference.logistic
    flip_rate: float = 0.2
    form: Callable[..., experiment.Plan] = directly
    policy_rate: float = 1e-3  # of PPO


SMOKE = {"steps": 1, "eval_every": 1, "reference_steps": 2, "reward_steps": 2, "pairs": 8, "pairs_per_step": 4,
         "critic_steps": 1}  # fmt: skip
DPO = {"pair_loss": partial(preference.dpo_loss, beta=BETA)}
ARMS = {
    "dpo": DPO,
    "vrpo": {},
    "vrpo_true": {"judge": by_law},
    "vrpo_half": {"judge": by_nothing},
    "vrpo_self": {"judge": by_copy},
    "vrpo_ramp": {"phi": preference.ramp},
    "robust_dpo": {"pair_loss": partial(preference.robust_dpo_loss, beta=BETA, flip_rate=0.2)},
    "ipo": {"pair_loss": partial(preference.ipo_loss, tau=BETA)},
    "dpo_clean": DPO | {"flip_rate": 0.0},
    "vrpo_clean": {"judge": by_law, "flip_rate": 0.0},
    "dpo_noisy": DPO | {"flip_rate": 0.35},
    "vrpo_noisy": {"judge": by_law, "flip_rate": 0.35},
    "rm": {"form": by_reward, "pair_loss": no_judge},
    "rm_vrpo": {"form": by_reward},
    "rm_vrpo_true": {"form": by_reward, "judge": by_law},
}
D_STAR = {"table/mse": 0.3}  # a tenth of the relative error of DPO's gradient
METRICS = ("table/mse", "table/variance", "eval/gold", "eval/kl", "eval/unseen")
CURVES = (*METRICS, "pair/accuracy", "pair/chosen_drift")


@lru_cache(maxsize=16)
def make_rows(task: Preferences, pairs: int, judge: Callable, flip_rate: float):
    """Labelled pairs and pairs of the reference ``[N, 4, T]``, their log-probabilities and judgements."""

    def rows(params, key):
        known = task.draw_pairs(key, pairs, flip_rate=flip_rate, cycle=CYCLE)
        keys = jax.random.split(jax.random.fold_in(key, 1), 2)
        drawn = [strings.sample(task.world, params["reference"], known.prompts, k) for k in keys]
        four = [known.chosen, known.rejected, *drawn]
        ref = [strings.sum_logp(task.world, params["reference"], known.prompts, x) for x in four]
        judged = [judge(task, params, flip_rate, known.prompts, *four[k : k + 2]) for k in (0, 2)]
        return known.prompts, *(jnp.stack(x, axis=1) for x in (four, ref, judged))

    return rows


def terms_of(task: Preferences, settings: Settings, policy, batch):
    """The arm's loss of rows, and their log-probabilities ``[N, 4]``."""
    prompts, four, ref, judged = batch
    flat = strings.sum_logp(task.world, policy, jnp.repeat(prompts, 4, axis=0), four.reshape(-1, four.shape[2]))
    logp, wins = flat.reshape(-1, 4), settings.pair_loss
    if wins is not None:
        return wins(*logp.T[:2], *ref.T[:2]), logp
    h, fresh = (BETA * ((logp - ref)[:, k] - (logp - ref)[:, k + 1]) for k in (0, 2))
    return preference.vrpo_loss(h, judged[:, 0], fresh, judged[:, 1], phi=settings.phi), logp


def expected_loss(task: Preferences, settings: Settings, policy, params, key):
    """What the arm's loss of labelled pairs is in the mean over labels: the law weighs both of them."""
    pairs = task.draw_pairs(key, POPULATION)
    return reduce.scalars(expected_losses(task, settings, policy, params, tuple(pairs)))


def expected_losses(task: Preferences, settings: Settings, policy, params, rows):
    """``expected_loss`` of each pair, ``[N]``."""
    ref = [strings.sum_logp(task.world, params["reference"], rows[0], x) for x in rows[1:]]
    own = [strings.sum_logp(task.world, policy, rows[0], x) for x in rows[1:]]
    if settings.pair_loss is None:
        h = BETA * (own[0] - ref[0] - own[1] + ref[1])
        won, lost = settings.phi(h), settings.phi(-h)
    else:
        won, lost = settings.pair_loss(*own, *ref).loss, settings.pair_loss(*own[::-1], *ref[::-1]).loss
    first = by_law(task, params, settings.flip_rate, *rows)
    return first * won + (1.0 - first) * lost


def first_reward(task: Preferences, reference):
    """A reward model that has read nothing: the reference under a head of its own."""
    return {"model": reference, "head": heads.init_head(task.width, jax.random.key(17), scale=task.width**-0.5)}


def with_fitted(task: Preferences, start: Callable, key):
    params = start(key)
    return params | {"fitted": jax.tree.map(jnp.copy, first_reward(task, params["reference"]))}


def fitted_reward(task: Preferences, params, prompts, responses):
    """Of the model that the arm has trained; ``params["reward"]`` is the judge's."""
    return preference_strings.reward_of(task, params["fitted"], prompts, responses)


def reward_terms(task: Preferences, settings: Settings, fitted, batch):
    """The arm's loss of rows for a reward model."""
    prompts, four, _, judged = batch
    asked = jnp.repeat(prompts, 4, axis=0)
    found = preference_strings.reward_of(task, fitted, asked, four.reshape(-1, four.shape[2])).reshape(-1, 4)
    h, fresh = found[:, 0] - found[:, 1], found[:, 2] - found[:, 3]
    if settings.pair_loss is not None:
        return settings.pair_loss(h)
    return preference.vrpo_loss(h, judged[:, 0], fresh, judged[:, 1], phi=settings.phi)


def expected_reward_loss(task: Preferences, settings: Settings, fitted, params, key):
    """As ``expected_loss``, of a reward model."""
    pairs = task.draw_pairs(key, POPULATION)
    return reduce.scalars(expected_reward_losses(task, settings, fitted, params, tuple(pairs)))


def expected_reward_losses(task: Preferences, settings: Settings, fitted, params, rows):
    """``expected_reward_loss`` of each pair, ``[N]``."""
    h = jnp.subtract(*(preference_strings.reward_of(task, fitted, rows[0], x) for x in rows[1:]))
    first = by_law(task, params, settings.flip_rate, *rows)
    return first * settings.phi(h) + (1.0 - first) * settings.phi(-h)


def measure(task: Preferences, settings: Settings, params, key):
    """``measure_parts``, and error and variance of the arm's gradient over tables drawn afresh."""
    return preference_strings.measure_parts(task, params, key) | table_figures(
        task, settings, params, key, params["reference"], terms_of_policy, expected_loss, expected_losses
    )


def measure_reward(task: Preferences, settings: Settings, params, key):
    """The same of the reward model's gradient, and how well it orders fresh pairs."""
    at = first_reward(task, params["reference"])
    found = table_figures(task, settings, params, key, at, reward_terms, expected_reward_loss, expected_reward_losses)
    quality = preference_strings.reward_quality(
        task, params | {"reward": params["fitted"]}, jax.random.fold_in(key, 32)
    )
    fitted = {name.replace("rm/", "fitted/"): value for name, value in quality.items()}
    return preference_strings.measure_parts(task, params, key) | found | fitted


def terms_of_policy(task: Preferences, settings: Settings, policy, batch):
    return terms_of(task, settings, policy, batch)[0]


def table_figures(
    task: Preferences, settings: Settings, params, key, at, terms: Callable, expected: Callable, each: Callable
):  # fmt: skip
    """``gradient_figures`` of the arm's loss over tables drawn afresh.

    Args:
      expected: loss of the population, and ``each`` that of given pairs.
    """
    if task.world.start is not None:
        return table_figures_of_texts(task, settings, params, key, at, terms, each)
    rows = make_rows(task, settings.pairs, settings.judge, settings.flip_rate)

    def gradient(k):
        batch = rows(params, k)
        return jax.grad(lambda p: reduce.scalars(terms(task, settings, p, batch).loss))(at)

    keys = jax.random.split(jax.random.fold_in(key, 30), TABLES)
    found = jax.lax.map(gradient, keys)
    true = jax.grad(lambda p: expected(task, settings, p, params, jax.random.fold_in(key, 31)))(at)
    return gradient_figures(found, true)


def table_figures_of_texts(task: Preferences, settings: Settings, params, key, at, terms: Callable, each: Callable):
    """``table_figures`` in the memory of three gradients and of some pairs: a loaded model may be large."""
    rows = make_rows(task, settings.pairs, settings.judge, settings.flip_rate)
    pairs = tuple(task.draw_pairs(jax.random.fold_in(key, 31), POPULATION))
    true = gradient_in_parts(lambda p, part: each(task, settings, p, params, part), at, pairs)

    def add(seen, k):
        found = gradient_in_parts(lambda p, part: terms(task, settings, p, part).loss, at, rows(params, k))
        off = jax.tree.map(jnp.subtract, found, true)
        return (jax.tree.map(jnp.add, seen[0], off), seen[1] + square(off)), None

    first = jax.tree.map(jnp.zeros_like, true), jnp.zeros((), jnp.float32)
    (total, squares), _ = jax.lax.scan(add, first, jax.random.split(jax.random.fold_in(key, 30), TABLES))
    size, mean = jnp.maximum(square(true), 1e-20), jax.tree.map(lambda x: x / TABLES, total)
    return {
        "table/mse": squares / TABLES / size,
        "table/variance": (squares - TABLES * square(mean)) / (TABLES - 1) / size,
    }


def gradient_in_parts(losses: Callable, at, rows):
    """The gradient of the mean of ``losses(at, rows) -> [N]``, some rows after the others."""
    count = jax.tree.leaves(rows)[0].shape[0]
    part = max(n for n in range(1, PAIRS_AT_ONCE + 1) if count % n == 0)
    apart = jax.tree.map(lambda x: x.reshape(count // part, part, *x.shape[1:]), rows)

    def add(total, some):
        found = jax.grad(lambda p: jnp.sum(losses(p, some)) / count)(at)
        return jax.tree.map(jnp.add, total, found), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, at), apart)[0]


def square(tree):
    """The sum of all squares."""
    return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(tree))


def gradient_figures(found, true):
    """``table/mse`` and ``table/variance`` of stacked gradients ``[K, ...]``, relative to the true one."""
    count = jax.tree.leaves(found)[0].shape[0]
    size = jnp.maximum(square(true), 1e-20)
    off = jax.tree.map(lambda x, t: x - t[None], found, true)
    spread = jax.tree.map(lambda x: x - jnp.mean(x, axis=0, keepdims=True), found)
    return {
        "table/mse": square(off) / count / size,
        "table/variance": square(spread) / (count - 1) / size,
    }


def start_of(settings: Settings, task: Preferences) -> Callable:
    """The reference, and the judge's reward model from labels of its own."""
    sizes = {"reference_steps": settings.reference_steps, "reward_steps": settings.reward_steps, "labels": 128}
    labels = partial(task.draw_pairs, flip_rate=settings.flip_rate, cycle=CYCLE)
    return preference_strings.make_start(task, **sizes, draw_pairs=labels)


def pair_table_stage(settings: Settings, task: Preferences, loss: Callable) -> experiment.Stage:
    """A stage on labelled pairs and pairs of the reference."""
    return strings.table_stage(
        make_rows(task, settings.pairs, settings.judge, settings.flip_rate), loss, steps=settings.steps,
        rows_per_step=settings.pairs_per_step, learning_rate=settings.learning_rate,
    )  # fmt: skip


def build(settings: Settings, task: Preferences = toy.STRINGS) -> experiment.Plan:
    """Pairs train the policy, or a reward model that PPO follows."""
    return settings.form(settings, task)


def claim(results: experiment.Results) -> experiment.Claim:
    """With a judge the gradient of DPO has a smaller error and variance over tables, and the policy is better."""
    fixed = experiment.at("eval/kl", 4.0)
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.smaller(results, "table/mse", "vrpo_true", "dpo"),
        experiment.smaller(results, "table/variance", "vrpo_true", "dpo"),
        experiment.smaller(results, "table/mse", "vrpo", "dpo"),
        experiment.smaller(results, "table/mse", "vrpo_noisy", "dpo_noisy"),
        experiment.smaller(results, "table/mse", "vrpo_clean", "dpo_clean"),
        experiment.greater(results, "eval/gold", "vrpo_true", "dpo", step=fixed),
        experiment.close(results, "eval/gold", "vrpo_half", "dpo", within=0.5, step=fixed),
    )


if __name__ == "__main__":
    experiment.main(__name__)
