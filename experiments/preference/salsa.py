"""An average of independently fine-tuned models as the reference of RLHF (SALSA).

Paper:     Chegini et al., "SALSA: Soup-based Alignment Learning for Stronger Adaptation in RLHF", arXiv:2411.01798.
Claim:     a reference that is the average of two fine-tuned models lets the policy move further and earn more than one
           of them does.
Equations: ref = alpha theta_a + (1 - alpha) theta_b, leaf by leaf; theta_a and theta_b: the same pre-trained model
           tuned on the same data in other order. PPO (critic, GAE, clip) from theta_a on r(x, y) - beta log(pi /
           pi_ref), beta 0.1 (ref_a_low, salsa_low: 0.02). Prompts with 3 as second token are in no training of
           policy or reward model: ood/gold.
Left out:  the map of rewards in the plane of three models: soup and its parents are its corners.
Expect:    eval/gold: salsa > ref_a, salsa > broken (average with an unrelated start); eval/kl salsa > ref_a (the policy
           moves further at one beta); ood/gold: salsa > ref_a; eval/gold salsa_low > ref_a_low.
Measure:   true reward on uniform prompts, of which a quarter have the 3 that no training saw (eval/gold), and on those
           with it alone (ood/gold); reward model of 65536 labels, 10 % flipped
           (gate: rm/accuracy 0.8, rm/within 0.5). soup and parent are not trained. eval/kl is to theta_a. The
           secondary part at eval/kl 4 asks whether the gain is more than a longer way. Equal updates and rollouts.
Run:       python -m experiments.preference.salsa [--world lists, where an item counts once]
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp

from experiments.parts import preference_strings, shopping_lists, strings
from experiments.parts import preference_task as toy
from experiments.parts.preference_task import Preferences
from jaxrl_llm import experiment, reduce
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.models import heads
from jaxrl_llm.models.merging import soup
from jaxrl_llm.train import offline


def from_a(start, anchor):
    """The policy starts as theta_a."""
    return start


def from_reference(start, anchor):
    """The policy starts as its reference."""
    return lambda key: start(key) | {"policy": anchor(start(key))}


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """alpha is the paper's; beta is one of its range."""

    steps: int = 100
    eval_every: int = 20
    learning_rate: float = 1e-3
    reference_steps: int = 150
    tuning_steps: int = 100
    reward_steps: int = 1000
    labels: int = 65536  # that the reward model reads
    beta: float = 0.1
    weights: tuple[float, ...] = (0.5, 0.5, 0.0, 0.0)  # of theta_a, theta_b, theta_c and an unrelated start
    begin: Callable = from_a  # where the policy starts
    critic_steps: int = preference_strings.CRITIC_STEPS
    stages: int = 1  # 0: only measured


SMOKE = {"steps": 2, "eval_every": 2, "reference_steps": 2, "tuning_steps": 2, "reward_steps": 2, "labels": 64,
         "critic_steps": 1}  # fmt: skip
ARMS = {
    "ref_a": {"weights": (1.0, 0.0, 0.0, 0.0)},
    "salsa": {},
    "ref_b": {"weights": (0.0, 1.0, 0.0, 0.0)},
    "salsa_25": {"weights": (0.25, 0.75, 0.0, 0.0)},
    "salsa_75": {"weights": (0.75, 0.25, 0.0, 0.0)},
    "soup_of_3": {"weights": (0.333333, 0.333333, 0.333334, 0.0)},
    "broken": {"weights": (0.5, 0.0, 0.0, 0.5)},
    "ref_a_low": {"weights": (1.0, 0.0, 0.0, 0.0), "beta": 0.02},
    "salsa_low": {"beta": 0.02},
    "from_soup": {"begin": from_reference},
    "soup": {"begin": from_reference, "stages": 0},
    "parent": {"weights": (1.0, 0.0, 0.0, 0.0), "begin": from_reference, "stages": 0},
}
WORLDS = {"strings": toy.STRINGS, "lists": shopping_lists.LISTS}
METRICS = ("eval/gold", "ood/gold", "eval/proxy", "eval/kl", "eval/soup_kl", "rm/accuracy", "rm/within")
CURVES = ("eval/gold", "ood/gold", "eval/proxy", "eval/kl", "eval/soup_kl", "reward/mean", "policy/entropy")
BED = experiment.Bed(judges=(("salsa", "rm/accuracy", 0.8), ("salsa", "rm/within", 0.5)))
NAMES = ("a", "b", "c", "other")


def flipped(task: Preferences, key, n: int) -> toy.Pairs:
    """Labelled pairs on the prompts of training."""
    pairs = task.draw_pairs(key, n, flip_rate=0.1)
    return pairs._replace(prompts=task.seen(pairs.prompts))


def draw_pretraining(task: Preferences, key, n: int):
    """The behaviour, on the prompts of training."""
    prompts, responses = task.draw_behaviour(key, n)
    return task.seen(prompts), responses


def draw_chosen(task: Preferences, key, n: int):
    """What the fine-tuned models are tuned on: the preferred of two responses."""
    pairs = flipped(task, key, n)
    return pairs.prompts, pairs.chosen


def unrelated(task: Preferences, key):
    """A start that has nothing in common with the others: of loaded weights the same numbers in another order."""
    fresh = task.world.policy.init(key)
    if task.world.start is None:
        return fresh
    leaves, tree = jax.tree.flatten(fresh)
    keys = jax.random.split(key, len(leaves))
    mixed = [jax.random.permutation(k, x.reshape(-1)).reshape(x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, mixed)


@lru_cache(maxsize=4)
def make_models(task: Preferences, reference_steps: int, tuning_steps: int, reward_steps: int, labels: int):
    """Three models tuned from one, an unrelated one, and the reward model."""
    pretrain = strings.make_base(task.world, partial(draw_pretraining, task), steps=reference_steps)
    tuning = strings.make_supervised(task.world, 64, 1e-3)

    def init(key):
        base, data = pretrain(key), jax.random.fold_in(key, 1)
        rows = {"rows": draw_chosen(task, data, 1024)}

        def tuned(order):
            state = offline.init_state(tuning, base, jax.random.fold_in(key, 2 + order), extras=rows)
            return offline.scan_steps(tuning, state, tuning_steps)[0].params

        found = {name: tuned(k) for k, name in enumerate(NAMES[:3])}
        found["other"] = unrelated(task, jax.random.fold_in(key, 5))
        reward = preference_strings.fit_reward(
            task, base, flipped(task, data, labels), jax.random.fold_in(key, 6), steps=reward_steps
        )
        copies = {name: jax.tree.map(jnp.copy, found["a"]) for name in ("policy", "reference")}
        value = heads.init_head(task.width, key)
        return found | copies | {"reward": reward, "value": value}

    return init


@lru_cache(maxsize=16)
def make_anchor(weights: tuple[float, ...]):
    """The reference of an arm."""
    return lambda params: soup([params[name] for name in NAMES], weights)


def measure(task: Preferences, weights: tuple[float, ...], params, key):
    """``measure_within``, the true reward on prompts that no training had, and the distance to the average."""
    prompts = task.draw_prompts(jax.random.fold_in(key, 20), 128)
    strange = task.strange(prompts)
    found = preference_strings.measure_within(task, params, key)
    for k, (name, asked) in enumerate((("ood/gold", strange), ("seen", task.seen(prompts)))):
        drawn = strings.sample(task.world, params["policy"], asked, jax.random.fold_in(key, 21 + k))
        if name == "ood/gold":
            found[name] = reduce.scalars(task.gold_reward(asked, drawn))
            continue
        anchor = make_anchor(weights)(params)
        found["eval/soup_kl"] = strings.drift(task.world, params["policy"], anchor, asked, drawn)
    return found


def build(settings: Settings, task: Preferences = toy.STRINGS) -> experiment.Plan:
    """One online stage with the arm's reference; without steps the start is only measured."""
    if settings.lora:
        raise UserError(f"--lora {settings.lora}: this paper averages whole models, which adapters are not; drop it")
    start = make_models(task, settings.reference_steps, settings.tuning_steps, settings.reward_steps, settings.labels)
    anchor = make_anchor(settings.weights)
    stages = preference_strings.ppo_stages(
        task, partial(preference_strings.proxy, task), steps=settings.steps, beta=settings.beta,
        learning_rate=settings.learning_rate, anchor=anchor, critic_steps=settings.critic_steps,
        prompts=task.seen(task.draw_prompts(jax.random.key(0), 1024)),
    )  # fmt: skip
    return experiment.Plan(
        settings.begin(start, anchor), stages * settings.stages, strings.bound(measure, task, settings.weights)
    )


def claim(results: experiment.Results) -> experiment.Claim:
    """With the average as its reference the policy moves further and earns more than with one model."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/gold", "salsa", "ref_a"),
        experiment.greater(results, "eval/gold", "salsa", "broken"),
        experiment.greater(results, "eval/kl", "salsa", "ref_a"),
        experiment.greater(results, "ood/gold", "salsa", "ref_a"),
        experiment.greater(results, "eval/gold", "salsa_low", "ref_a_low"),
        experiment.greater(results, "eval/gold", "salsa", "ref_a", step=experiment.at("eval/kl", 4.0)),
    )


if __name__ == "__main__":
    experiment.main(__name__)
