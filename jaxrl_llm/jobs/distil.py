"""On-policy distillation: the student's own responses, pulled towards one teacher or the mean of several.

Run: jaxrl distil --model STUDENT --teacher DIR [--teacher DIR2] --data FILE.jsonl [--loss reverse_kl]
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jaxrl_llm import reduce
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.claims import open_claim
from jaxrl_llm.losses import distill
from jaxrl_llm.run import parts
from jaxrl_llm.run.method import learning_rate
from jaxrl_llm.train.methods.builders import make_estimate, score_tokens
from jaxrl_llm.train.plan import Plan
from jaxrl_llm.types import Batch, Policy, Rewards, TokenTerms


@dataclasses.dataclass(frozen=True)
class Settings(recipes.OnlineSettings):
    """Every update draws prompts, samples a response to each, and moves it towards the teachers' distributions."""

    teacher: tuple[str, ...] = ()  # Hugging Face folders with the student's vocabulary, or tiny or nano
    # reverse_kl, forward_kl: of whole distributions, some columns at a time; top_k: over the student's likeliest;
    # sampled: of the sampled tokens alone
    loss: Literal["reverse_kl", "forward_kl", "top_k", "sampled"] = "reverse_kl"
    top: int = 64  # tokens of top_k
    data: str = "chain"
    steps: int = 200
    learning_rate: float = 1e-5
    group_size: int = 1
    prompts_per_step: int = 32
    max_new_tokens: int = 512
    weight_decay: float = 0.0
    warmup_steps: int = 10
    schedule: Literal["cosine", "linear", "constant"] = "cosine"


EMBEDDED = {
    "teacher": ("tiny",), "levels": (2, 3), "steps": 20, "eval_every": 10, "learning_rate": 3e-4, "max_new_tokens": 32,
    "train_problems": 512, "eval_problems": 64, "eval_samples": 2,
}  # fmt: skip
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 2, "max_new_tokens": 6, "train_problems": 16, "eval_problems": 8,
    "eval_samples": 2,
}  # fmt: skip
ARMS = {"distil": {}}
METRICS = ("eval/accuracy", "eval/tokens", "distil/kl")
SEEDS, EXPORT = 1, "always"
CHUNK = 128  # columns whose distributions exist at once


def open_teachers(settings: Settings, student: parts.Model) -> list[parts.Model]:
    """The teachers, on the student's mesh.

    Raises:
      UserError: without one, or for one of another vocabulary.
    """
    if not settings.teacher:
        raise UserError("--teacher names no model; give the folder of a model with the student's vocabulary")
    found = []
    for name in settings.teacher:
        model = parts.load_model(name, mesh=student.mesh, compute_dtype=jnp.dtype(settings.compute))
        if model.tokenizer.vocab_size != student.tokenizer.vocab_size:
            raise UserError(f"--teacher {name} has {model.tokenizer.vocab_size} tokens and the student "
                            f"{student.tokenizer.vocab_size}; choose a teacher of the student's family")  # fmt: skip
        found.append(model)
    return found


def _mixture(teachers: list[parts.Model], given: list[Any]) -> tuple[Callable[[Any], Array], Any]:
    """``(hidden -> logits, hidden)`` of the mean of the teachers' distributions; hidden states side by side."""
    sizes = [model.config.hidden_size for model in teachers]

    def unembed(hidden: Array) -> Array:
        begin, logp = 0, []
        for model, params, size in zip(teachers, given, sizes, strict=True):
            part = jax.lax.dynamic_slice_in_dim(hidden, begin, size, axis=-1)
            logp.append(jax.nn.log_softmax(model.policy.unembed(params, part).astype(jnp.float32), axis=-1))
            begin += size
        return jax.nn.logsumexp(jnp.stack(logp), axis=0) - jnp.log(jnp.float32(len(logp)))

    def hidden(batch: Batch) -> Array:
        each = (
            model.policy.hidden(params, batch.tokens, batch.positions, batch.segment_ids).astype(jnp.float32)
            for model, params in zip(teachers, given, strict=True)
        )
        return jnp.concatenate(list(each), axis=-1)

    return unembed, hidden


def teacher_logp(teachers: list[parts.Model], batch: Batch, temperature: float) -> Array:
    """The log of the mean of the teachers' probabilities of the sampled tokens ``[B, T]``."""
    each = [score_tokens(m.policy, m.params, batch, temperature=temperature)[0] for m in teachers]
    return jax.lax.stop_gradient(jax.nn.logsumexp(jnp.stack(each), axis=0) - jnp.log(jnp.float32(len(each))))


def make_terms(settings: Settings, policy: Policy, teachers: list[parts.Model]) -> Callable[[Any, Batch], TokenTerms]:
    """``(params, batch) -> TokenTerms`` of the chosen divergence.

    The distributions of column ``t`` are those of token ``t + 1``: the mask moves one column to the left.
    """
    if settings.loss == "sampled":

        def sampled(params, batch):
            logp, _ = score_tokens(policy, params, batch, temperature=settings.temperature)
            return distill.sampled_reverse_kl_loss(
                logp, teacher_logp(teachers, batch, settings.temperature), batch.mask
            )

        return sampled
    unembed, hidden_of = _mixture(teachers, [m.params for m in teachers])

    def whole(params, batch):
        before = jnp.pad(batch.mask[:, 1:], ((0, 0), (0, 1)))
        mine = policy.hidden(params, batch.tokens, batch.positions, batch.segment_ids)
        other = jax.lax.stop_gradient(hidden_of(batch))
        if settings.loss == "top_k":
            logits = policy.unembed(params, mine) / settings.temperature
            terms = distill.top_k_distillation_loss(
                logits, unembed(other) / settings.temperature, before, k=settings.top
            )
        else:
            chosen = {"reverse_kl": distill.chunked_reverse_kl_loss, "forward_kl": distill.chunked_forward_kl_loss}
            terms = chosen[settings.loss](
                mine, lambda h: policy.unembed(params, h), other, unembed, before,
                temperature=settings.temperature, chunk=CHUNK,
            )  # fmt: skip
        # back to the column of the token
        return jax.tree.map(lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0))), terms)

    return whole


def build(settings: Settings) -> Plan:
    """One online stage without rewards: the loss asks the teachers."""
    bench = recipes.bench(settings)
    policy = bench.model.policy
    terms_of = make_terms(settings, policy, open_teachers(settings, bench.model))

    def nothing(trajectories, rewards):
        return jnp.zeros(trajectories.mask.shape, jnp.float32)

    def loss(params, batch):
        terms = terms_of(params, batch)
        value = reduce.tokens(terms.loss, batch.mask, total=batch.total)
        return value, {
            "distil/kl": value,
            "tokens/trained": jnp.sum(batch.mask.astype(jnp.float32)),
        }

    def unjudged(answers, trajectories):
        count = trajectories.tokens.shape[0]
        return Rewards(jnp.zeros((count,), jnp.float32), jnp.ones((count,), bool))

    online = recipes.make_online(
        settings,
        bench,
        estimate=make_estimate(policy, nothing, temperature=settings.temperature),
        loss=loss,
        score=unjudged,
        tx=optax.adamw(learning_rate(settings, settings.steps), weight_decay=settings.weight_decay),
    )
    plan = recipes.one_stage(settings, bench, online)
    return plan._replace(on_host=True, host_score=None if bench.score is not None else lambda t: unjudged({}, t))


def claim(results):  # a job claims nothing, and says so by having no text
    return open_claim("")
