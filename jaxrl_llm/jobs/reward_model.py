"""A reward model from preferences: a head on the last hidden state, by the Bradley-Terry loss.

Run: jaxrl reward-model --model DIR --data FILE.jsonl [--format plain|hh-rlhf|ultrafeedback|tldr]
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.curriculum.epochs import make_epochs
from jaxrl_llm.distributed.compiler_options import options_of
from jaxrl_llm.experiment.claims import open_claim
from jaxrl_llm.jobs import rows
from jaxrl_llm.jobs.dpo import CHUNK
from jaxrl_llm.losses import bradley_terry_loss
from jaxrl_llm.models import heads
from jaxrl_llm.run import options
from jaxrl_llm.run.method import adamw, in_epochs
from jaxrl_llm.train.methods.supervised import SupervisedRows
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.plan import Plan, Stage


@dataclasses.dataclass(frozen=True)
class Settings(rows.RowSettings):
    """Bradley-Terry with a margin where the rows have one."""

    format: rows.PairFormat = "plain"  # the columns of a file
    centering: float = 0.0  # weight of (r_chosen + r_rejected)^2, which keeps rewards near 0
    margin_scale: float = 0.0  # of the rows' margins in the loss


EMBEDDED = {"steps": 80, "eval_every": 40, "learning_rate": 1e-3, "max_new_tokens": 96, "train_rows": 1024}
SMOKE = {"steps": 2, "eval_every": 2, "rows_per_step": 4, "train_rows": 64, "eval_rows": 8}
ARMS = {"reward_model": {}}
METRICS = ("eval/accuracy", "eval/margin")
SEEDS, EXPORT = 1, "always"


def rewards_of(policy, params, some: SupervisedRows):
    """The reward of every row ``[B]``."""
    return heads.rewards_of(policy, params["model"], params["reward"], some)


def measure_of_rewards(policy, first: SupervisedRows, second: SupervisedRows):
    """The share of held-out pairs whose chosen response has the higher reward, and the mean difference."""
    score = jax.jit(lambda params, some: rewards_of(policy, params, some), compiler_options=options_of())

    def measure(params, key):
        count, margins = first.tokens.shape[0], []
        for begin in range(0, count, CHUNK):
            ids = np.minimum(np.arange(begin, begin + min(CHUNK, count)), count - 1)
            ends = [
                np.asarray(score(params, jax.tree.map(lambda x, at=ids: x[at], t)), np.float64) for t in (first, second)
            ]
            margins.append((ends[0] - ends[1])[: count - begin])
        margin = np.concatenate(margins)
        return rows.of_margins(margin)

    return measure


def build(settings: Settings) -> Plan:
    """One stage of minibatches of pairs; the head starts at zero, the model trains with it."""
    model = options.open_model(settings)  # whose weights nobody else has
    kept, held = rows.held_out(rows.pairs(settings, settings.format), settings.eval_rows, settings.data)
    size = min(settings.rows_per_step, len(kept))
    settings = in_epochs(settings, len(kept), size)
    both = rows.encoded(model, [*kept, *held], settings, "chosen", "rejected")
    train, test = (
        [jax.tree.map(lambda x, part=part: x[part], t) for t in both]
        for part in (slice(len(kept)), slice(len(kept), None))
    )
    margins = settings.margin_scale * np.asarray([pair.margin for pair in kept], np.float32)
    margins = margins if settings.rows_in == "host" else jnp.asarray(margins)
    policy = model.policy

    def loss(params, extras, part, total):
        ends = [rewards_of(policy, params, part[name]) for name in ("chosen", "rejected")]
        terms = bradley_terry_loss(*ends, margin=part["margin"], centering=settings.centering)
        value = jnp.sum(terms.loss) / total
        right = jnp.sum((ends[0] > ends[1]).astype(jnp.float32)) / total
        tokens = sum(jnp.sum(part[name].mask.astype(jnp.float32)) for name in ("chosen", "rejected"))
        return value, {"pairs/loss": value, "pairs/accuracy": right, "tokens/trained": tokens}

    table = {"chosen": train[0], "rejected": train[1], "margin": margins}
    method = Offline(
        rows=lambda extras: table,
        sampler=make_epochs(None),
        rows_per_step=size,
        loss=loss,
        tx=adamw(settings, settings.steps),
        max_grad_norm=settings.max_grad_norm or None,
        whole=lambda part: jnp.asarray(part["margin"].shape[0], jnp.float32),
    )

    method = rows.fed(method, table, settings)

    def init(key):
        return {"model": model.params, "reward": heads.init_head(model.config.hidden_size, key, scale=0.0)}

    return Plan(init, (Stage(method, settings.steps),), measure_of_rewards(policy, *test), on_host=True, model=model,
                gives=True)  # fmt: skip


def claim(results):  # a job claims nothing, and says so by having no text
    return open_claim("")
