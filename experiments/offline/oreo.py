"""A policy and a value function learnt together from a fixed table of responses (OREO).

Paper:     Wang et al., "Offline Reinforcement Learning for LLM Multi-Step Reasoning", arXiv:2412.16145.
Claim:     soft Bellman consistency on every token gives credit to single steps without pairs of responses: it beats
           imitation of right responses and DPO on the same table, and its value function guides search at test time.
Equations: d_t = log pi - log ref at token t, D_t = sum_{i >= t} d_i, R at the end; critic: mean_t (V_t + beta sg(D_t) -
           R)^2; policy: mean_t (sg(V_t) + beta (d_t + sg(D_{t+1})) - R)^2 + alpha KL(pi || ref), exact over the
           vocabulary; both steps from the same values. step: t and d of reasoning steps; response: the first term
           alone; rejection: log-likelihood of the right responses; dpo: right and wrong ones in pairs; kto: each by
           itself, w (1 - sigmoid(+-beta (log pi / ref - z))), z the mean log-ratio of mismatched pairs, w = 1
           (kto_balanced: w of right ones so that both sides weigh alike, wrong ones per right one in the table);
           scrambled: oreo, rewards of other responses to the same problem; rounds: oreo, a second table, made and
           anchored at half of the steps; larger: rejection from four times the problems, which a bed with room must
           show.
Left out:  ALFWorld; enumerated values as an oracle: 18 tokens of a model have no table, and `larger` is the arm that a
           bed with room must show; one norm bounds the gradient of policy and critic together.
Expect:    eval/accuracy: oreo > rejection, oreo > dpo, oreo > step - 0.02, step > response, rounds > oreo; search/lift,
           beam search by V less one sample, above 0.
Measure:   held-out Countdown with three numbers, where the base starts at 0.15 and chance is 0.12; 16 responses of the
           base to each of 320 training problems, new for each seed; equal tables and updates: 200 of 64 responses read
           a table two and a half times; dpo and kto at a tenth of the learning rate, at all of which they unlearnt the
           form (0.00 in the first record). Diagnostic: area under the ROC of V at the first and at the middle token of
           responses, in training (value/) and of 256 to held-out problems (heldout/; gate 0.6). beta_low, beta_lower,
           beta_higher and beta_high: 0.1, 0.3, 3 and 10 times beta (here 0.01, 0.03, 0.3 and 1); where it is least the
           best V is near the largest reward, where it is greatest near the mean one. No knob takes what
           credit by tokens is for, long responses, to zero on 18 of them: response is one step, scrambled credit
           without meaning. In the record beams by V (0.28) beat one sample (0.26) and lose to the best of as many
           samples by V (search/gain -0.053 [-0.075, -0.032]); dpo and kto fell below the start, to 0.06 and 0.00 (kto's
           sides weigh alike where 15 % of responses are right), so that what beats them beats no rival that works.
Run:       python -m experiments.offline.oreo; with --model DIR --data FILE on a model and rows of your own, with
           --logged FILE on responses that you have: prompt, response and reward
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from experiments.offline.parts import response_table
from experiments.parts import step_search
from jaxrl_llm import experiment
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.losses import bellman
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.plan import Referred, Tabled, referred, tabled


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """The paper's values; see EMBEDDED for the small model."""

    steps: int = 1800
    learning_rate: float = 5e-6
    prompts_per_step: int = 8  # times group_size: responses of an update
    group_size: int = 16  # responses to each problem of the table
    max_new_tokens: int = 2048
    table_problems: int = 15000
    method: Callable = response_table.oreo
    starts: Callable[[Array, Array], Array] = response_table.every_token  # (ends of steps, mask) -> where one begins
    credit: Callable = response_table.as_drawn
    step_end: str = "\n"
    beta: float = 0.03
    kl_weight: float = 0.01  # alpha
    dpo_beta: float = 0.1
    of_rate: float = 1.0  # so much of the learning rate: losses of whole responses have far longer gradients
    rounds: int = 1
    logged: str = ""  # FILE of prompt, response and reward in the place of the first table; empty: own samples
    searched: int = 0  # held-out problems that are searched with the critic
    search_rounds: int = 8  # steps that the critic chooses; the rest is written at once
    step_tokens: int = 256  # the most tokens of one of them


EMBEDDED = {
    "data": "countdown", "levels": (3,), "train_problems": 1408, "table_problems": 320, "steps": 200, "eval_every": 5,
    "prompts_per_step": 4, "max_new_tokens": 18, "learning_rate": 1e-4, "eval_problems": 192, "step_end": ",",
    "beta": 0.1, "search_rounds": 1, "step_tokens": 9,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6, "table_problems": 4,
    "train_problems": 16, "eval_problems": 8, "eval_samples": 4,
}  # fmt: skip
ARMS = {
    "rejection": {"method": response_table.rejection},
    "oreo": {"searched": 64},
    "step": {"starts": bellman.starts_after},
    "response": {"starts": response_table.one_step},
    "dpo": {"method": response_table.dpo, "of_rate": 0.1},
    "kto": {"method": response_table.kto, "of_rate": 0.1},
    "kto_balanced": {"method": response_table.balanced_kto, "of_rate": 0.1},
    "scrambled": {"credit": response_table.scrambled},
    "rounds": {"rounds": 2},
    "beta_low": {"beta": experiment.Times(0.1)},
    "beta_lower": {"beta": experiment.Times(0.3)},
    "beta_higher": {"beta": experiment.Times(3)},
    "beta_high": {"beta": experiment.Times(10)},
    "larger": {"method": response_table.rejection, "table_problems": experiment.Times(4)},
}
METHOD = "oreo"
METRICS = ("eval/accuracy", "eval/pass@4", "eval/tokens")
CURVES = (*METRICS, "heldout/auc_start", "heldout/auc_middle", "bellman/residual", "kl/ref", "policy/entropy")
BED = experiment.Bed(
    metric="eval/accuracy", chance=0.12, positive="larger", judges=(("oreo", "heldout/auc_middle", 0.6),)
)


def build(settings: Settings) -> experiment.Plan:
    """A table of the policy's own responses, then updates on nothing else; again for every further round."""
    found = recipes.bench(settings)
    method = settings.method(settings, found)

    def with_table(params, table, group_size):
        reference = jax.tree.map(jnp.copy, params["model"])
        return Referred(reference)._asdict() | Tabled(method.rows(table, group_size))._asdict()

    def sampled(params, key):
        return with_table(params, response_table.draw_table(settings, params["model"], key), settings.group_size)

    def from_log(params, key):
        return with_table(params, response_table.draw_logged(settings, key), response_table.logged(settings).group_size)

    offline = Offline(
        rows=tabled,
        sampler=make_uniform(),
        rows_per_step=settings.prompts_per_step * settings.group_size,
        loss=lambda params, extras, batch, *total: method.loss(params, referred(extras), batch, *total),
        tx=optax.adam(settings.of_rate * settings.learning_rate),
        whole=method.whole,
    )
    tables = [from_log if settings.logged and k == 0 else sampled for k in range(settings.rounds)]
    stages = [experiment.Stage(offline, settings.steps // settings.rounds, extras) for extras in tables]
    plan = curricula.make_single_turn_plan(settings, found, stages)._replace(
        validate=response_table.make_validation(settings)
    )
    plan = recipes.with_heads(found, plan, **({"value": 1} if method.critic else {}))
    return with_critic(settings, found, plan) if method.critic else plan


def with_critic(settings: Settings, found: recipes.Bench, plan: experiment.Plan) -> experiment.Plan:
    """The plan with a second decoder under the head, held-out figures of it, and search where problems are searched."""
    init, measure = plan.init, plan.measure

    def both(key):
        params = init(key)
        return params | {"critic": jax.tree.map(jnp.copy, params["model"])}

    heldout = response_table.make_heldout_figures(settings, found)

    def judged(params, key):
        return measure(params, key) | heldout(params, jax.random.fold_in(key, 2))

    if not settings.searched:
        return plan._replace(init=both, measure=judged)
    worth, ends = partial(response_table.prefix_value, found), response_table.step_ids(found, settings.step_end)
    step = max(1, min(settings.step_tokens, settings.max_new_tokens // (settings.search_rounds + 1)))
    search = step_search.make_figures(
        found, worth, separators=ends, problems=min(settings.searched, found.heldout.tokens.shape[0]),
        new_tokens=settings.max_new_tokens, step_tokens=step, rounds=settings.search_rounds,
    )  # fmt: skip

    def searching(params, key):
        return judged(params, key) | search(params, params["model"], jax.random.fold_in(key, 1))

    return plan._replace(init=both, measure=searching)


def claim(results: experiment.Results) -> experiment.Claim:
    """Soft Bellman consistency on every token beats imitation of right responses, and its values guide a search."""
    return experiment.conclude(
        " ".join(claim.__doc__.split()),
        experiment.greater(results, "eval/accuracy", "oreo", "rejection"),
        experiment.greater(results, "eval/accuracy", "oreo", "dpo"),
        experiment.greater(results, "eval/accuracy", "oreo", "step", by=-0.02),
        experiment.greater(results, "eval/accuracy", "step", "response"),
        experiment.greater(results, "eval/accuracy", "rounds", "oreo"),
        experiment.above(results, "search/lift", "oreo", 0.0),
    )


if __name__ == "__main__":
    experiment.main(__name__)
