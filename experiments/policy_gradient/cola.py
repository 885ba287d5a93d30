"""Reinforcement over a few latent actions of a frozen language model (CoLA).

Paper:     Jia et al., "Controlling Large Language Model with Latent Actions", arXiv:2503.21383.
Claim:     with a policy over 64 learned codes, and a world model that turns state and code into a token, RL is more
           accurate than over tokens, responses are more diverse, and what the language model knew elsewhere is kept.
Equations: inverse model: code of token t from the state after it, straight-through Gumbel softmax; world model:
           -log W(token | s, code) + 0.001 sum p log p; policy: imitates the codes, then GRPO on log pi(k | s) of the
           codes k that were drawn, with 0.001 KL to where it began, all else frozen. The inverse model and the policy
           are layers of a transformer, the world model feed-forward layers on state and code, as released;
           perceptrons: one hidden layer each, which sees one state. marginal: GRPO on log sum_k pi(k | s)
           W(token | s, k); token: GRPO on the language model; no_usage: without the 0.001 term; random_codes: even
           policy, untrained. search (MCTS-Q): after RL, Q(s, k) by double Q-learning on rollouts of the policy; of the
           texts that may go on, that of largest V + 0.7 prior sqrt(N_parent) / (N + 1) gets a child for each of its
           likeliest codes, whose edge goes on greedily where (Q - 0.99 max Q')^2 < 0.01; values are backed up from
           greedily completed responses; eval/best_of: as many drawn responses instead. Of search the verifier judges
           every response on the way; learned_reward: a part like Q, of one number at the last token, learned as
           log-odds of being right from judged responses to training problems, says what a response is worth, in the
           tree and among draws, and the verifier judges the answer alone. tuned: before RL, policy and world model
           learn the solutions of the rewarded task under the inverse model's codes, which stay.
Left out:  a code is drawn behind its token, from pi(k | s) W(token | s, k): the same pairs.
Expect:    eval/kept: since the start cola loses less than token (learning the codes alone brings more of the chains
           than token has, which is no merit of RL over codes); eval/distinct: cola > token; eval/accuracy: cola >
           token - 0.02; eval/search_gain, eval/searched - eval/best_of: above 0 in search, though drawing has as many
           responses and more tokens (a first look before training, with a Q that knows nothing: 0.47 against 0.73, so
           the opposite would be no surprise).
Measure:   held-out Countdown; every seed draws and learns its own codes, from solutions of Countdown and of arithmetic
           chains; eval/kept is the mean log-probability of held-out chains, on which nothing was rewarded, and its part
           compares rises since the start, not arms at one KL: that of cola is over codes, that of token over tokens;
           eval/searched is the share of problems whose answer by search is right, eval/reward_auroc how well the reward
           parts right draws from wrong ones (1 of a verifier); 8 seeds, equal rollouts and updates of the policy.
           Random legal steps are right for 0.12, ceiling 1.
Run:       python -m experiments.policy_gradient.cola
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax

from experiments.policy_gradient.parts import latent_code_rewards as code_rewards
from experiments.policy_gradient.parts import latent_code_search as searching
from experiments.policy_gradient.parts import latent_code_tasks as codes
from experiments.policy_gradient.parts import latent_code_training as code_training
from experiments.policy_gradient.parts import latent_code_values as code_values
from experiments.policy_gradient.parts import latent_codes
from jaxrl_llm import experiment
from jaxrl_llm.advantages import group
from jaxrl_llm.data.tasks import chain, countdown
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Params

Q_KEY, REWARD_KEY = 0x51, 0x52  # folded into a seed's key, with no number of a stage


def trained(plan):
    """The policy over codes learns."""
    return plan


def even(plan):
    """All codes are equally likely, and nothing is trained."""

    def init(key):
        params = plan.init(key)
        return params | {"policy": jax.tree.map(jnp.zeros_like, params["policy"])}

    return plan._replace(init=init, stages=())


def on_tokens(settings: "Settings", found: recipes.Bench) -> tuple[dict, dict]:
    """GRPO on the probability of the tokens: slots of the method, and what its stage keeps."""
    policy, temperature = found.model.policy, settings.temperature
    return {
        "estimate": builders.make_estimate(policy, ADVANTAGES, temperature=temperature),
        "loss": builders.make_policy_loss(policy, clipped_policy_loss, temperature=temperature),
        "trained": latent_codes.TRAINED_BY_REWARD if settings.codes else "",
    }, {}


def on_codes(settings: "Settings", found: recipes.Bench) -> tuple[dict, dict]:
    """GRPO on the probability of the codes that were drawn, with a KL to where it began."""
    if settings.temperature != 1.0:
        raise UserError(
            f"--temperature {settings.temperature:g}: a drawn code belongs to a token drawn at 1; drop the flag"
        )
    slots = code_training.make_code_slots(
        recipes.bench(settings).model.policy, ADVANTAGES, partial(clipped_policy_loss, clip_low=0.2, clip_high=0.2),
        sharpness=settings.sharpness, kl_weight=settings.kl, form=codes.form_of(settings, how_of(settings)),
    )  # fmt: skip
    return slots, {"extras": code_training.keep_policy}


def policy_alone(settings: "Settings", found: recipes.Bench, plan: experiment.Plan) -> experiment.Plan:
    """Nothing is searched at test time."""
    return plan


def by_tree(
    settings: "Settings", found: recipes.Bench, plan: experiment.Plan, judge: searching.Judge = searching.verified
) -> experiment.Plan:
    """A further stage learns Q, and held-out problems are answered by a search with it (MCTS-Q), or by drawing."""
    form, model = codes.form_of(settings, how_of(settings)), recipes.bench(settings).model

    def init(key):
        part = form.init_part(model.config.hidden_size, settings.codes, jax.random.fold_in(key, Q_KEY))
        return plan.init(key) | {"q": part}

    slots = code_values.make_q_slots(model.policy, form, sharpness=settings.sharpness, gamma=settings.gamma)
    tx = optax.adam(settings.q_rate)
    learn = recipes.make_online(settings, found, tx=tx, policy_params=all_of, **slots)
    stages = (*plan.stages, experiment.Stage(learn, settings.q_steps, code_values.keep_earlier))
    answers = [
        by(settings, how_of(settings), search_of(settings), judge)
        for by in (searching.by_search, searching.by_sampling)
    ]
    return plan._replace(init=init, stages=stages, measure=searching.compared(plan.measure, *answers))


def by_learned_reward(settings: "Settings", found: recipes.Bench, plan: experiment.Plan) -> experiment.Plan:
    """The same with a reward that one more stage learns from judged responses to training problems.

    Search and draws know what it says of a response; the verifier judges the one that is given.
    """
    form, model = codes.form_of(settings, how_of(settings)), recipes.bench(settings).model

    def init(key):
        part = form.init_part(model.config.hidden_size, 1, jax.random.fold_in(key, REWARD_KEY))
        return plan.init(key) | {"reward": part}

    slots = code_rewards.make_reward_slots(model.policy, form)
    tx = optax.adam(settings.reward_rate)
    learn = recipes.make_online(settings, found, tx=tx, policy_params=all_of, **slots)
    stages = (*plan.stages, experiment.Stage(learn, settings.reward_steps))
    return by_tree(settings, found, plan._replace(init=init, stages=stages), searching.learned)


ADVANTAGES = builders.per_response(group.group_normalized_advantages)


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 300
    codes: int = 64  # 0: a policy over tokens
    layers: int = 4  # of each of the three parts; 0: perceptrons
    usage: float = 0.001  # weight of the term that keeps codes in use
    sharpness: float = 4.0  # factor of the world model's logits
    learn_steps: int = 10000  # of the world model
    tune_steps: int = 0  # of policy and world model on the rewarded task alone, the codes as they are
    then: Callable[[experiment.Plan], experiment.Plan] = trained
    learn: Callable[..., tuple[dict, dict]] = on_codes  # or on_tokens, whatever code brought them about
    kl: float = 0.001  # weight of the KL of the policy over codes to its start
    # how a held-out problem is answered beside: or by_tree, by_learned_reward
    answer: Callable[..., experiment.Plan] = policy_alone
    q_steps: int = 300  # updates of Q, after the policy's
    q_rate: float = 1e-3
    reward_steps: int = 300  # updates of a learned reward, before those of Q
    reward_rate: float = 1e-3
    gamma: float = 0.99  # of Q, and of values in the tree
    rounds: int = 32  # of a search; in each, one text gets all its children
    first_children: int = 5  # of the prompt
    children: int = 4  # of any other text
    stretch: int = 64  # tokens that an edge goes on where Q has no doubt


EMBEDDED = {
    "data": "countdown", "levels": (3,), "steps": 120, "eval_every": 30, "prompts_per_step": 6, "max_new_tokens": 18,
    "learning_rate": 3e-4, "eval_problems": 64, "train_problems": 1024, "codes": 16, "layers": 1,
    "learn_steps": 400, "q_steps": 60, "reward_steps": 60, "rounds": 8, "first_children": 4, "children": 3,
    "stretch": 4,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 18, "train_problems": 16,
    "eval_problems": 8, "eval_samples": 4, "codes": 3, "learn_steps": 2,
    "q_steps": 2, "reward_steps": 2, "rounds": 2, "first_children": 2, "children": 2, "stretch": 4,
}  # fmt: skip
ARMS = {
    "token": {"codes": 0, "learn": on_tokens}, "cola": {}, "marginal": {"learn": on_tokens}, "no_usage": {"usage": 0.0},
    "random_codes": {"then": even}, "perceptrons": {"layers": 0}, "search": {"answer": by_tree},
    "tuned": {"tune_steps": 200}, "learned_reward": {"answer": by_learned_reward},
}  # fmt: skip
BED = experiment.Bed(chance=0.12)
METRICS = ("eval/accuracy", "eval/pass@4", "eval/distinct", "eval/kept", "eval/tokens")
CURVES = (
    *METRICS,
    "eval/searched",
    "eval/search_tokens",
    "eval/reward_auroc",
    "q/error",
    "outcome/accuracy",
    "reward/mean",
    "policy/entropy",
    "codes/used",
    "grad/norm",
)


SOURCES = ((countdown, (3,)), (chain, (1, 2)))  # what codes are learned from; the second earns no reward


def all_of(params: Params) -> Params:
    """The policy over codes reads every part of its parameters."""
    return params


def how_of(settings: Settings) -> codes.Codes:
    """The codes of an arm."""
    return codes.Codes(settings.codes, settings.layers, settings.sharpness)


def search_of(settings: Settings) -> searching.Search:
    """The numbers of a search."""
    return searching.Search(
        rounds=settings.rounds, first=settings.first_children, then=settings.children, stretch=settings.stretch,
        gamma=settings.gamma,
    )  # fmt: skip


def build(settings: Settings) -> experiment.Plan:
    """One online stage of GRPO; the arm says over what, and what is asked of the policy it leaves."""
    how = how_of(settings)
    found = codes.over_codes(settings, how)

    numbers = {"steps": settings.learn_steps, "tune_steps": settings.tune_steps, "usage": settings.usage}
    over_codes = codes.learned_codes(settings, SOURCES, how, **numbers) if settings.codes else None

    slots, more = settings.learn(settings, found)
    tx = optax.adam(settings.learning_rate)
    online = recipes.make_online(settings, found, tx=tx, policy_params=all_of, **slots)
    plan = recipes.one_stage(settings, found, online, **more)
    plan = plan._replace(init=over_codes or plan.init, measure=codes.measure_of_codes(settings, SOURCES[1:], how))
    return settings.then(settings.answer(settings, found, plan))


def claim(results: experiment.Results) -> experiment.Claim:
    """Over codes more of the other task is kept and responses differ more, at no less than 0.02 of the accuracy; a
    search with a learned Q finds more than as many draws."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/distinct", "cola", "token"),
        experiment.grows_more(results, "eval/kept", "cola", "token", start=0),
        experiment.greater(results, "eval/accuracy", "cola", "token", by=-0.02),
        experiment.above(results, "eval/search_gain", "search", 0.0),
        experiment.above(results, "eval/search_gain", "learned_reward", 0.0),
    )


if __name__ == "__main__":
    experiment.main(__name__)
