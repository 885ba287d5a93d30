"""Removing a behaviour by editing a few gate rows along a linear probe (model surgery).

Paper:     Wang et al., "Model Surgery: Modulating LLM's Behavior Via Simple Parameter Editing", arXiv:2407.08770.
Claim:     shifting the gate rows most inversely aligned with a behaviour probe removes most of the behaviour without
           training and keeps other abilities; random rows or directions do not.
Equations: v: direction of a logistic probe on the mean last hidden state of rude against polite responses; the k rows
           of all gates with the largest -cos(W_g[l, j], s v) become W_g[l, j] + s alpha v; s in {1, -1}, the class that
           v is taken to point to, is the one with fewer rude tokens on validation prompts, for every arm by itself.
           aligned: largest +cos(W_g[l, j], s v); random_rows; random_direction: of the length of v; steering: hidden -
           s v at inference; dpo: polite over rude.
Left out:  several behaviours in sequence; the paper's alpha is tuned, here it is swept.
Expect:    eval/removed, the share of the rude tokens that an edit takes away: surgery > random_rows by 0.1, above 0.5
           (the paper: up to 0.9), > random_direction by 0.1; eval/gold of surgery within 0.5 of none.
Measure:   share of rude tokens, the share of them that is gone, true reward without them, perplexity of polite text; a
           base of which half the data is rude. Only dpo has updates. The dose is not monotone in the record: half of
           alpha adds rude tokens, twice of it takes most of them and of the true reward; aligned takes as many.
           probe/accuracy is of the 512 responses that fit 32 numbers; over rows of one's own it is of held-out ones.
           The bed is invalid unless probe/accuracy is 0.8.
Run:       python -m experiments.preference.model_surgery; with --model DIR --data FILE on a model and rows of your own:
           probe, validation and edit are of training rows, and the edited model is written to a folder
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from experiments.parts import preference_strings, strings
from experiments.parts import preference_task as toy
from experiments.parts.preference_task import Preferences
from experiments.preference.parts import conduct, surgery
from jaxrl_llm import experiment
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses import preference


@dataclasses.dataclass(frozen=True)
class Settings(recipes.Settings):
    """A quarter of the rows are edited; the paper edits one in twenty of a far wider model."""

    steps: int = 60
    eval_every: int = 60
    learning_rate: float = 1e-3
    reference_steps: int = 300
    edit: Callable | None = conduct.operated
    alpha: float = 1.0
    rows: int = 16
    share: float = 0.05  # of the gate rows, over rows of one's own: the paper's
    stages: int = 0


SMOKE = {"steps": 1, "eval_every": 1, "reference_steps": 2}
ARMS = {
    "none": {"edit": None},
    "surgery": {},
    "surgery_half": {"alpha": 0.5},
    "surgery_twice": {"alpha": 2.0},
    "aligned": {"edit": conduct.on_aligned_rows},
    "random_rows": {"edit": conduct.on_random_rows},
    "random_direction": {"edit": conduct.in_a_random_direction},
    "steering": {"edit": conduct.steered},
    "dpo": {"edit": None, "stages": 1},
}
# without a probe that tells rude from polite there is no direction; a tenth of the rude tokens is the claim's margin
BED = experiment.Bed(judges=(("surgery", "probe/accuracy", 0.8),))
D_STAR = {"eval/removed": 0.1}
METRICS = ("eval/removed", "eval/rude", "eval/gold", "eval/perplexity", "probe/accuracy")


def make_pairs(task: Preferences, params, key):
    """Polite over rude responses to the same prompts."""
    prompts = task.draw_prompts(jax.random.fold_in(key, 0), 256)
    none = jnp.zeros((256,), bool)
    both = [task.draw_politeness(jax.random.fold_in(key, k), prompts, rude) for k, rude in ((1, none), (2, ~none))]
    return toy.Pairs(prompts, *both), jnp.ones((256,), bool)


def edited(task: Preferences, settings: Settings, params, key):
    """The policy after its edit with the better sign, its probe from before, the accuracy on its rows, and a key.

    Over rows of one's own an edit is of ``share`` of all gate rows.
    """
    probe, seen = conduct.politeness_probe(task, params["policy"], jax.random.fold_in(key, 0))
    chosen, keys = params["policy"], [jax.random.fold_in(key, k) for k in (1, 2, 3)]
    if settings.edit is not None:
        count = settings.rows if task.world.start is None else share_of_rows(chosen, settings.share)
        both = [settings.edit(chosen, s * settings.alpha * probe.direction, keys[0], count) for s in (1.0, -1.0)]
        rude = [conduct.politeness(task, x, keys[1])["eval/rude"] for x in both]
        chosen = jax.tree.map(lambda a, b: jnp.where(rude[0] <= rude[1], a, b), *both)
    return chosen, probe, seen, keys[2]


def share_of_rows(policy, share: float) -> int:
    """How many gate rows a share of all of them is, at least one."""
    layers, _, width = surgery.gates(policy).shape
    return max(1, round(share * layers * width))


def removal(task: Preferences, policy, reference, key):
    """What is said after the edit, and how much of the rude tokens is gone."""
    found = conduct.politeness(task, policy, key)
    before = conduct.politeness(task, reference, key)["eval/rude"]
    return found | {"eval/removed": 1.0 - found["eval/rude"] / jnp.maximum(before, 1e-6)}


def measure(task: Preferences, settings: Settings, params, key):
    """Fits the probe on the parameters as they are, edits them with the better sign, and measures."""
    policy, _, seen, key = edited(task, settings, params, key)
    return removal(task, policy, params["reference"], key) | {"probe/accuracy": seen}


def operated(task: Preferences, settings: Settings, params, key):
    """The parameters after the edit, with its probe beside them: what is measured and exported over rows."""
    policy, probe, *_ = edited(task, settings, params, key)
    return params | {"policy": policy, "probe": probe}


def measure_operated(task: Preferences, params, key):
    """``measure`` of what ``operated`` made; the probe is held against responses to prompts that are held out."""
    right = conduct.probe_accuracy(task, params["reference"], params["probe"], jax.random.fold_in(key, 0))
    found = removal(task, params["policy"], params["reference"], jax.random.fold_in(key, 1))
    return found | {"probe/accuracy": right}


def build(settings: Settings, task: Preferences = toy.STRINGS) -> experiment.Plan:
    """Nothing is trained but the arm that learns from pairs."""
    if settings.lora:
        raise UserError(f"--lora {settings.lora}: this paper edits the weights, which an adapter leaves alone; drop it")
    stage = preference_strings.preference_stage(
        task, partial(preference.dpo_loss, beta=0.1), partial(make_pairs, task), steps=settings.steps, rows_per_step=32,
        learning_rate=settings.learning_rate,
    )  # fmt: skip
    start = preference_strings.make_start(
        task, reference_steps=settings.reference_steps, behaviour=task.draw_mixed_company
    )
    stages = (stage,) * settings.stages
    if task.world.start is None:
        return experiment.Plan(start, stages, strings.bound(measure, task, settings))
    surgery.gates(task.world.start())  # a model without gates is refused before anything is trained
    return experiment.Plan(
        start, stages, strings.bound(measure_operated, task), finish=strings.bound(operated, task, settings)
    )


def claim(results: experiment.Results) -> experiment.Claim:
    """Surgery removes about half of the rude tokens, more than edits at random, and keeps the true reward."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/removed", "surgery", "random_rows", by=0.1),
        experiment.above(results, "eval/removed", "surgery", 0.5),
        experiment.greater(results, "eval/removed", "surgery", "random_direction", by=0.1),
        experiment.close(results, "eval/gold", "surgery", "none", within=0.5),
    )


if __name__ == "__main__":
    experiment.main(__name__)
