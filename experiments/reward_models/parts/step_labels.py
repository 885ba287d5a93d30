"""Arithmetic chains with labels for every written step: the tables, the figures, and a model that likes to repeat.

A critic is a language model: it starts as the loaded model, reads problem and solution, and writes one verdict a step.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings
from experiments.reward_models.parts import steps as reader
from experiments.reward_models.parts import text_lines
from experiments.reward_models.parts.steps import Steps
from jaxrl_llm import reduce
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.recipes import Bench, OnlineSettings
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.run import parts
from jaxrl_llm.train import offline
from jaxrl_llm.train.methods import actor_critic, episode_methods, supervised
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.online import Online
from jaxrl_llm.train.plan import Plan, Stage
from jaxrl_llm.types import Key, Params, Policy, Responses, Rewards, Trajectories


class Stepped(NamedTuple):
    """What it takes to label the steps of a bench: ``label(rows, heldout)``, and the tokens that end a step."""

    label: Callable[[Trajectories | Responses, bool], tuple[Steps, Bool[Array, "B T"]]]
    separators: tuple[int, ...]


def reference_steps(problem: Problem) -> list[str]:
    """The texts of the right steps.

    >>> reference_steps(chain.from_parts([3, 5, 4], "+*", 11))
    ['3+5=8', '8*4=10']
    """
    return problem.solution.rsplit("#", 1)[0].split(",")


def make_stepped(settings: OnlineSettings) -> Stepped:
    """The labels of ``bench(settings)``: of chains, or of problems of one's own with worked solutions.

    Equal settings share one.

    Raises:
      UserError: for rows without a worked solution.
    """
    return _stepped(recipes.bench_identity(settings))


@lru_cache(maxsize=8)
def _stepped(identity: tuple) -> Stepped:
    settings = OnlineSettings(**dict(identity))
    if settings.data != "chain" and settings.data in parts.TASKS:
        raise UserError(
            f"--data {settings.data}: the right steps are not known; use --data chain, or rows of your own with worked "
            "solutions"
        )
    if settings.data != "chain":
        return Stepped(*text_lines.make_label(settings))
    encode, levels = recipes.bench(settings).model.tokenizer.encode, settings.levels or None
    sizes = {"train": settings.train_problems, "heldout": settings.eval_problems}
    made = {split: tables.make_split(chain, split=split, n=n, seed=0, levels=levels) for split, n in sizes.items()}
    hashed = {
        split: jnp.asarray(reader.hash_table(encode, [reference_steps(p) for p in problems]))
        for split, problems in made.items()
    }
    separator, mark = encode(",")[0], encode("#")[0]

    def label(rows, heldout):
        found = reader.read_steps(rows, separator=separator, mark=mark)
        return found, reader.right_steps(found, hashed["heldout" if heldout else "train"][rows.problem_ids])

    return Stepped(label, (separator,))


def label(
    stepped: Stepped, rows: Trajectories | Responses, *, heldout: bool = False
) -> tuple[Steps, Bool[Array, "B T"]]:
    """The steps of each response and, at their ends, whether each is one of the reference's (repeats are, too)."""
    return stepped.label(rows, heldout)


def step_scores(
    stepped: Stepped, rows: Trajectories, *, most: int
) -> tuple[Steps, Float[Array, "B K"], Bool[Array, "B K"]]:
    """``label`` as one number a step: 1 right, 0 wrong; and which steps there are."""
    found, right = label(stepped, rows)
    scores, valid = reader.per_step(right.astype(jnp.float32), found, most=most)
    return found, scores, valid


def make_figures(settings: OnlineSettings):
    """Steps of a response, the share of them that are right, and that repeat an earlier one: a ``more`` of plans."""
    return _figures(recipes.bench_identity(settings))


@lru_cache(maxsize=8)
def _figures(identity: tuple):
    stepped = _stepped(identity)

    def more(found: Bench):
        def figures(rows: Trajectories | Responses, rewards: Rewards) -> dict[str, Array]:
            steps, right = label(stepped, rows, heldout=True)
            again = reader.repeated_steps(steps)

            def share(which, of):
                total = jnp.maximum(jnp.sum(of.astype(jnp.float32)), 1.0)
                return jnp.sum((which & of).astype(jnp.float32)) / total

            good = steps.ends & (rewards.value > 0.5)[:, None]
            return {
                "eval/steps": reduce.scalars(steps.count.astype(jnp.float32)),
                "eval/right_steps": share(right, steps.ends),
                "eval/right_steps_of_right": share(right, good),
                "eval/repeated_steps": share(again, steps.ends),
            }

        return figures

    return more


def make_step_plan(settings: OnlineSettings, found: Bench, stages: Sequence[Stage]) -> Plan:
    """``curricula.make_single_turn_plan`` with the figures of steps, also where the host judges."""
    plan = curricula.make_single_turn_plan(settings, found, stages, more=make_figures(settings))
    if found.score is not None:
        return plan
    numbers = settings.temperature, settings.eval_samples
    return plan._replace(measure=_measured_on_host(recipes.bench_identity(settings), *numbers))


@lru_cache(maxsize=8)
def _measured_on_host(identity: tuple, temperature: float, samples: int):
    settings = OnlineSettings(**dict(identity))
    found = recipes.bench(settings)
    rollout = recipes.rollout_of(settings, found, group_size=samples, temperature=temperature, measured=True)
    of_bench = jax.jit(rollout), found.heldout, found.heldout_score, samples
    return partial(recipes.measure_on_host, *of_bench, more=_figures(identity)(found))


def repeating(problem: Problem, times: int) -> str:
    """The solution with its last step written ``times`` more often.

    >>> repeating(chain.from_parts([3, 5], "+", 11), 2)
    '3+5=8,3+5=8,3+5=8#8'
    """
    steps = reference_steps(problem)
    return ",".join([*steps, *[steps[-1]] * times]) + f"#{problem.answer['value']}"


def warm_stage(
    settings: OnlineSettings, found: Bench, problems: Sequence[Problem], *, steps: int, most_repeats: int = 2
) -> Stage:
    """Supervised steps on solutions that repeat their last step 0 to ``most_repeats`` times, as often each.

    Of rows of one's own at the rate of the settings: the rate of the embedded model would ruin loaded weights.
    """
    rng, rate = np.random.default_rng(0), 1e-3 if settings.data == "chain" else settings.learning_rate
    if found.score is None:
        texts = [text_lines.repeating(p, int(rng.integers(most_repeats + 1))) for p in problems]
        rows = recipes.with_texts(settings, found, problems, texts)
    else:
        pairs = [(p.prompt, repeating(p, int(rng.integers(most_repeats + 1)))) for p in problems]
        width = max(len(a) + len(b) for a, b in pairs) + 2
        rows = supervised.supervised_rows(found.model, pairs, width=width)
    method = supervised.make_supervised(found.model.policy, rows, rows_per_step=32, tx=optax.adam(rate))
    return Stage(method, steps)


def make_ppo(
    settings: OnlineSettings, found: Bench, token_rewards: Callable[..., Array], *, kl_weight: float = 0.0
) -> Online:
    """PPO with a value head and Monte Carlo returns of ``token_rewards(params, extras, rows, rewards) -> [B, T]``.

    Args:
      kl_weight: of the KL to the policy in the stage's extras, see ``episode_methods.model_for``, in the reward of
        every token; 0: no reference.
    """
    policy, temperature = found.model.policy, settings.temperature
    return recipes.make_online(
        settings,
        found,
        estimate=actor_critic.make_value_estimate(
            policy,
            token_rewards=token_rewards,
            lam=1.0,
            temperature=temperature,
            **episode_methods.restrained(kl_weight),
        ),
        loss=actor_critic.make_actor_critic_loss(policy, temperature=temperature),
        tx=optax.adam(settings.learning_rate),
        actor=recipes.model_of,
    )


def of_model(method: Offline) -> Offline:
    """The same stage for parameters ``{"model": ..., heads}``."""
    return method._replace(loss=lambda params, *rest: method.loss(params["model"], *rest))


def final_hidden(policy: Policy, params: Params, rows: Trajectories) -> Float[Array, "B T D"]:
    """Hidden states at every token, for a head of a process reward."""
    return jax.lax.stop_gradient(policy.hidden(params, rows.tokens, rows.positions, rows.segment_ids))


# --- critics that are language models


class Critic(NamedTuple):
    """A critic's world, and its words: a step is right, is wrong, and what stands between solution and verdicts."""

    world: strings.World
    right: int
    wrong: int
    cue: int


def make_critic(settings: OnlineSettings, found: Bench, *, most: int) -> Critic:
    """The critic of solutions of a bench, with the loaded model's vocabulary and weights to start from.

    Raises:
      UserError: where problem, solution and verdicts are more than the model's context.
    """
    model = found.model
    width = found.train.tokens.shape[1] + settings.max_new_tokens + 1
    if width + most + 1 > model.config.max_positions:
        raise UserError(
            f"a critic reads and writes {width + most + 1} tokens, the model's context has "
            f"{model.config.max_positions}; lower --max-new-tokens, or take another --model"
        )
    wrong, right, cue = (model.tokenizer.encode(text)[-1] for text in ("1", "0", "#"))
    world = strings.World(
        model.policy, width, most + 1, model.tokenizer.eos_ids[0], start=lambda: model.params,
        rate=0.0 if settings.data == "chain" else settings.learning_rate, ends=tuple(model.tokenizer.eos_ids),
    )  # fmt: skip
    return Critic(world, right, wrong, cue)


def shown_to_critic(critic: Critic, rows: Trajectories) -> Int[Array, "B P"]:
    """Problem, solution and cue, filled up on the left."""
    tokens, _ = given_responses.left_padded(rows.tokens, rows.segment_ids > 0, pad_id=strings.PAD)
    return jnp.concatenate([tokens, jnp.full((tokens.shape[0], 1), critic.cue, jnp.int32)], axis=1)


def written_critique(critic: Critic, right: Float[Array, "B K"], valid: Bool[Array, "B K"]) -> Int[Array, "B W"]:
    """The critique of somebody who knows which steps are right: one word a step, then the end."""
    words = jnp.where(right > 0.5, critic.right, critic.wrong)
    return jnp.pad(jnp.where(valid, words, critic.world.end), ((0, 0), (0, 1)), constant_values=critic.world.end)


def read_critiques(
    critic: Critic, said: Int[Array, "B V W"], valid: Bool[Array, "B K"]
) -> tuple[Bool[Array, "B V K"], Bool[Array, "B V"]]:
    """``(wrong, spoke)``: the verdicts of each critique, which cannot be read unless it has one word a step, then ends.

    From "CAPO: Towards Enhancing LLM Reasoning through Generative Credit Assignment", arXiv:2508.02298, section 3: one
    pass names the wrong steps; what cannot be read abstains. Differs from the paper in the form, a verdict for each
    step in the place of the numbers of the wrong ones.

    >>> import jax.numpy as jnp
    >>> critic = Critic(strings.make_world(4, 1, 3, end=3), right=0, wrong=1, cue=2)
    >>> said = jnp.array([[[0, 1, 3], [1, 3, 3], [0, 0, 1], [2, 1, 3]]])  # of two steps: one word is few, three many
    >>> [x[0].tolist() for x in read_critiques(critic, said, jnp.array([[True, True]]))]
    [[[False, True], [False, False], [False, False], [False, False]], [True, False, False, False]]
    """
    words = said[:, :, :-1]
    known = (words == critic.right) | (words == critic.wrong)
    count = jnp.sum(valid.astype(jnp.int32), axis=1)
    after = jnp.take_along_axis(said, jnp.broadcast_to(count[:, None, None], (*said.shape[:2], 1)), axis=2)[:, :, 0]
    spoke = jnp.all(known | ~valid[:, None, :], axis=2) & (after == critic.world.end)
    return (words == critic.wrong) & valid[:, None, :] & spoke[:, :, None], spoke


def make_critic_fit(
    settings: OnlineSettings, critic: Critic, *, prompts: int, steps: int, most: int, rows_per_step: int = 32
) -> Callable[[Key], Params]:
    """``fit(key)``: the loaded model, taught the critiques of labelled samples of its own.

    Two responses to each of some training prompts. The paper's critic is a larger model that is asked as it is.
    """
    found, stepped = recipes.bench(settings), make_stepped(settings)
    roll = recipes.rollout_of(settings, found, group_size=2)
    method = strings.make_supervised(critic.world, rows_per_step, 1e-3)

    def fit(key):
        first, play, run = jax.random.split(key, 3)
        ids = jax.random.permutation(first, found.train.tokens.shape[0])[:prompts].astype(jnp.int32)
        rows = roll(
            found.model.params, found.train.tokens[ids], found.train.valid[ids], sample_keys(play, 0, ids, 2), ids
        )
        _, right, valid = step_scores(stepped, rows, most=most)
        table = {"rows": (shown_to_critic(critic, rows), written_critique(critic, right, valid))}
        state = offline.init_state(method, strings.first_params(critic.world, run), run, extras=table)
        return offline.scan_steps(method, state, steps)[0].params

    return fit


def critiques(
    critic: Critic, params: Params, rows: Trajectories, valid: Bool[Array, "B K"], key: Key, *, votes: int
) -> tuple[Bool[Array, "B V K"], Bool[Array, "B V"]]:
    """``read_critiques`` of so many critiques of each solution, drawn at temperature 1."""
    said = strings.sample(critic.world, params, shown_to_critic(critic, rows), key, samples=votes)
    wrong, spoke = read_critiques(critic, said.reshape(valid.shape[0], votes, -1), valid)
    return jax.lax.stop_gradient(wrong), jax.lax.stop_gradient(spoke)
