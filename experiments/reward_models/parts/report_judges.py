"""Judges that write reports on pairs of answers: how they start, how a report is rewarded, and what it is worth.

The judge is a decoder made on the spot; its first training data are the reports of a careless judge.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings
from experiments.reward_models.parts import judge_pairs as toy
from experiments.reward_models.parts import judgements
from experiments.reward_models.parts.judge_pairs import Reports
from jaxrl_llm import reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.losses import kl
from jaxrl_llm.losses.policy import clipped_policy_loss
from jaxrl_llm.losses.supervised import sft_loss
from jaxrl_llm.models import heads
from jaxrl_llm.rollout import given_responses
from jaxrl_llm.rollout.generate import generate
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train import seed_axis
from jaxrl_llm.train.methods import builders
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.plan import Stage, keep_reference, referred, tabled
from jaxrl_llm.types import Key, Params, Rewards, Trajectories


@lru_cache(maxsize=8)
def make_start(
    task: Reports,
    *,
    steps: int,
    draw: Callable[..., Any] = toy.draw_reports,
    skilled: tuple[int, Callable[..., Any]] | None = None,
) -> Callable[[Key], Params]:
    """The ``init`` of a plan: a judge trained on careless reports, and a fresh judge of judgements.

    Args:
      skilled: steps on right reports before that, and ``draw`` of these; one model for all seeds, as a pretrained one
        would be. Reports with slips alone teach their form and no arithmetic: such a judge is at chance where an
        answer must be worked out.
      draw: ``(task, key, n) -> prompts and reports``; of a task in words its own first reports, where it has some,
        and nothing is trained where it has none.
    """
    if task.first is not None:
        base = strings.make_base(task.world, task.first, steps=steps, table=1024)
    elif task.read is not None:
        base = partial(strings.first_params, task.world)
    else:
        rest = {"learning_rate": 1e-3, "start": partial(skilled_judge, task, *skilled)} if skilled else {}
        base = strings.make_base(task.world, strings.bound(draw, task), steps=steps, **rest)
    return lambda key: {"judge": base(key), "meta": init_meta(task, jax.random.fold_in(key, 7))}


@lru_cache(maxsize=2)
def _skilled(task: Reports, steps: int, draw: Callable[..., Any]) -> Params:
    table = min(2**17, 64 * steps)  # no more than are read
    numbers = {"steps": steps, "table": table, "learning_rate": 1e-3}  # at 3e-3 it learns nothing
    base = strings.make_base(task.world, strings.bound(draw, task), **numbers)
    return jax.jit(base)(jax.random.key(17))


def skilled_judge(task: Reports, steps: int, draw: Callable[..., Any]) -> Params:
    """A judge trained on right reports: after 4,000 steps 0.9 to 1 of its checks are right. Computed once."""
    with jax.core.eval_context():  # also while a program that uses it is traced
        return _skilled(task, steps, draw)


def supervised_stage(task: Reports, draw: Callable[..., Any], **numbers: Any) -> Stage:
    """More supervised training of ``params["judge"]``; ``numbers`` are those of ``strings.supervised_stage``."""
    stage = strings.supervised_stage(task.world, strings.bound(draw, task), **numbers)
    inner = stage.method.loss
    return stage._replace(method=stage.method._replace(loss=lambda params, *rest: inner(params["judge"], *rest)))


def rl_stage(
    task: Reports,
    reward: Callable[[Reports, Array, Array, Array, Array], Array],
    *,
    steps: int,
    prompts_per_step: int,
    group_size: int,
    learning_rate: float,
    kl_weight: float,
    advantages: Callable[..., Array] = group.group_normalized_advantages,
    world: strings.World | None = None,
) -> Stage:
    """Policy gradient of ``params["judge"]`` on ``reward(task, tagged, scored, scores, prompts) -> [B]``.

    A k3 penalty pulls to the judge that the stage begins with.

    Args:
      advantages: ``(rewards, group_ids, *, valid) -> [B]``.
    """
    world = world or task.world
    inner = builders.make_estimate(world.policy, builders.per_response(advantages), reference=referred)
    loss = builders.make_policy_loss(
        world.policy, clipped_policy_loss, diagnostics=builders.reference_kl,
        extra_terms=lambda logp, entropy, batch: kl_weight * kl.k3_gradient_terms(logp, batch.ref_logp, batch.mask),
    )  # fmt: skip
    online = strings.learned_from_prompts(
        world, task.draw_prompts(jax.random.key(31), 1024), score_by_report(task, reward, world),
        estimate=lambda params, *rest: inner(params["judge"], *rest),
        loss=lambda params, batch: loss(params["judge"], batch), actor=lambda state: state.params["judge"],
        tx=optax.adam(task.world.rate or learning_rate), prompts_per_step=prompts_per_step, group_size=group_size,
    )  # fmt: skip
    return Stage(online, steps, lambda params, key: keep_reference(params["judge"], key))


def score_by_report(
    task: Reports, reward: Callable[[Reports, Array, Array, Array, Array], Array], world: strings.World
) -> Callable[[Any, Trajectories], Rewards]:
    """The ``score`` slot from ``reward(task, tagged, scored, scores, prompts) -> [B]``."""

    def score(answers: Any, rows: Trajectories) -> Rewards:
        prompts, responses = strings.responses_of(world, rows)
        value = reward(task, *toy.read_report(task, responses), prompts)
        return Rewards(value, jnp.ones(value.shape, bool))

    return score


def judged(
    task: Reports,
    params: Params,
    prompts: Int[Array, "N P"],
    key: Key,
    *,
    samples: int = 1,
    temperature: float = 1.0,
    world: strings.World | None = None,
) -> tuple[Bool[Array, "N S"], Float[Array, "N S 2"]]:
    """``(read, scores)`` of so many reports on each pair; scores that cannot be read are 0 and 0."""
    said = strings.sample(world or task.world, params, prompts, key, samples=samples, temperature=temperature)
    _, scored, scores = toy.read_report(task, said)
    return scored.reshape(-1, samples), scores.reshape(-1, samples, 2)


def figures(task: Reports, params: Params, key: Key, *, pairs: int = 256) -> dict[str, Array]:
    """Agreement with gold on fresh pairs (better, worse, equal), apart for those that need reasoning, and by the same
    judgement of both orders."""
    prompts = task.draw_prompts(jax.random.fold_in(key, 0), pairs)
    gold, hard = task.gold_scores(prompts), task.reasoned(prompts)
    read, scores = (x[:, 0] for x in judged(task, params["judge"], prompts, jax.random.fold_in(key, 1)))
    _, other = (x[:, 0] for x in judged(task, params["judge"], task.swapped(prompts), jax.random.fold_in(key, 2)))
    right = (read & judgements.three_way(scores, gold)).astype(jnp.float32)
    return {
        "eval/accuracy": reduce.scalars(right),
        "eval/reasoned": reduce.scalars(right, hard),
        "eval/surface": reduce.scalars(right, ~hard),
        "eval/consistent": reduce.scalars(judgements.three_way(scores, other[:, ::-1]).astype(jnp.float32)),
        "eval/readable": reduce.scalars(read.astype(jnp.float32)),
    }


# ------------------------------------------------------------------ rejected samples, trusted samples


def rejection_stage(
    task: Reports,
    *, steps: int, prompts: int = 1024, samples: int = 3, rows_per_step: int = 64, learning_rate: float = 1e-3,
    gold: Callable[[Array], Array] | None = None, hints: int = 0,
) -> Stage:  # fmt: skip
    """Rejective fine-tuning of ``params["judge"]``: its own right reports on pairs that are not too easy (all right).

    From "Inference-Time Scaling for Generalist Reward Modeling" (SPCT), arXiv:2504.02495, section 3.2.

    Args:
      hints: samples of a pair that had no right one, drawn with a hint which answer is the best; the right ones are
        learnt behind the prompt without it.
    """

    def tried(judge, shown, true, key, count):
        """Reports on each pair as it is shown, ``[N count, T]``, and which are right, ``[N, count]``."""
        world = task.world._replace(prompt_tokens=shown.shape[1])
        said = strings.sample(world, judge, shown, key, samples=count)
        _, scored, scores = toy.read_report(task, said)
        true = jnp.repeat(true, count, axis=0)
        right = scored & judgements.picks_best(scores, true) & judgements.decided(true)  # a tie has no best
        return said, right.reshape(-1, count)

    def extras(params, key):
        def learnt(said, right, count):
            return jnp.repeat(asked, count, axis=0), said, right.reshape(-1).astype(jnp.float32)

        asked = task.draw_prompts(jax.random.fold_in(key, 0), prompts)
        true = (gold or task.gold_scores)(asked)
        said, right = tried(params["judge"], asked, true, jax.random.fold_in(key, 1), samples)
        rows = learnt(said, right & ~jnp.all(right, axis=1, keepdims=True), samples)
        if not hints:
            return {"rows": rows}
        told = task.hinted(asked, jnp.argmax(true, axis=1).astype(jnp.int32))
        said, again = tried(params["judge"], told, true, jax.random.fold_in(key, 2), hints)
        more = learnt(said, again & ~jnp.any(right, axis=1, keepdims=True), hints)
        return {"rows": tuple(jnp.concatenate(x) for x in zip(rows, more, strict=True))}

    def loss(params, extras, batch):
        asked, said, weight = batch
        mask = strings.counted(said, task.words.end) & (weight > 0)[:, None]
        logp = strings.token_logp(task.world, params["judge"], asked, said)
        value = reduce.tokens(sft_loss(logp, mask).loss, mask)
        return value, {"tokens/trained": jnp.sum(mask.astype(jnp.float32)), "fit/kept": reduce.scalars(weight)}

    method = Offline(tabled, make_uniform(), rows_per_step, loss, optax.adam(task.world.rate or learning_rate))
    return Stage(method, steps, extras)


def init_meta(task: Reports, key: Key) -> Params:
    """A judge of judgements: a decoder with one number behind the whole report."""
    first, second = jax.random.split(key)
    model = task.world.policy.init(first)
    return {"model": model, "head": heads.init_head(heads.width_of(task.world.policy.hidden, model), second)}


def meta_logits(
    task: Reports, meta: Params, prompts: Int[Array, "N P"], responses: Int[Array, "N T"]
) -> Float[Array, " N"]:
    """How sure the judge of judgements is that a report is right; of many texts a batch at a time."""
    if task.world.start is not None and prompts.shape[0] > strings.AT_ONCE:
        one = strings.bound(meta_logits, task)
        return jax.lax.map(lambda row: one(meta, row[0][None], row[1][None])[0], (prompts, responses),
                           batch_size=strings.AT_ONCE)  # fmt: skip
    rows = strings.whole(task.world, prompts, responses)
    hidden = task.world.policy.hidden(meta["model"], rows.tokens, rows.positions, rows.segment_ids)
    return heads.apply_head(meta["head"], strings.last_hidden(task.world, hidden, rows))[:, 0, 0]


def meta_stage(
    task: Reports,
    *, steps: int, prompts: int = 1024, samples: int = 2, rows_per_step: int = 64, learning_rate: float = 3e-3,
    gold: Callable[[Array], Array] | None = None,
) -> Stage:  # fmt: skip
    """Trains ``params["meta"]`` on samples of ``params["judge"]`` and whether they are right."""

    def extras(params, key):
        asked = task.draw_prompts(jax.random.fold_in(key, 0), prompts)
        said = strings.sample(task.world, params["judge"], asked, jax.random.fold_in(key, 1), samples=samples)
        asked = jnp.repeat(asked, samples, axis=0)
        _, scored, scores = toy.read_report(task, said)
        true = (gold or task.gold_scores)(asked)
        return {"rows": (asked, said, scored & judgements.picks_best(scores, true), judgements.decided(true))}

    def loss(params, extras, batch):
        asked, said, right, apart = batch
        value = reduce.scalars(judgements.meta_loss(meta_logits(task, params["meta"], asked, said), right), apart)
        return value, {"fit/loss": value}

    method = Offline(tabled, make_uniform(), rows_per_step, loss, optax.adam(task.world.rate or learning_rate))
    return Stage(method, steps, extras)


# ------------------------------------------------------------------ forced second thoughts


VERDICT_TOKENS = 5  # two scores, each behind its mark, and the end


def _followed(
    tokens: Int[Array, "N L"], valid: Bool[Array, "N L"], word: int, rows: Bool[Array, " N"]
) -> tuple[Array, Array]:
    """``word`` behind the texts of ``rows``, nothing behind the others."""
    column = jnp.full(rows.shape, word, tokens.dtype)[:, None]
    both = jnp.concatenate([tokens, column], axis=1), jnp.concatenate([valid, rows[:, None]], axis=1)
    return given_responses.left_padded(*both)


def thought_again(
    task: Reports, params: Params, prompts: Int[Array, "N P"], key: Key, *, rounds: int, round_tokens: int = 7
) -> tuple[Int[Array, "N L"], Bool[Array, "N L"], Int[Array, " N"], Bool[Array, " N"]]:
    """Budget forcing: each time the judge closes its thoughts, ``WAIT`` is put in their place, up to ``rounds`` times.

    The judge ends every segment itself, so that nothing is added to a report without any (``rounds=0``). Nothing is
    forced where a whole round more would leave no room for the verdict in ``task.long``.

    Returns the prompts with all thoughts, closed at last, the tokens that were thought, and whether they were closed:
    thoughts that end otherwise, or not in time, stay as they are.

    From "J1: Exploring Simple Test-Time Scaling for LLM-as-a-Judge", arXiv:2505.11875 (the hook of "s1",
    arXiv:2501.19393).

    Args:
      round_tokens: of another round, its ``WAIT`` included.
    """
    most = task.long.response_tokens - VERDICT_TOKENS  # tokens up to the one that closes the thoughts
    tokens, valid = jnp.maximum(prompts, 0), prompts != strings.PAD
    spent, closed = jnp.zeros(prompts.shape[:1], jnp.int32), jnp.ones(prompts.shape[:1], bool)
    ids = jnp.arange(prompts.shape[0], dtype=jnp.int32)
    for k in range(rounds + 1):
        going = closed
        if k:
            going = closed & (spent + round_tokens < most)
            tokens, valid = _followed(tokens, valid, task.words.wait, going)
            spent = spent + going.astype(jnp.int32)
        rows = generate(
            task.long.policy, params, tokens, valid, sample_keys(key, k, ids, 1), group_size=1,
            max_new_tokens=most - k, eos_ids=(task.words.close, task.words.end), pad_id=task.words.end,
            early_exit=seed_axis.in_turn(),
        )  # fmt: skip
        new = rows.mask & going[:, None]
        new = new & (spent[:, None] + jnp.cumsum(new.astype(jnp.int32), axis=1) <= most)
        said = new & (rows.tokens != task.words.close) & (rows.tokens != task.words.end)
        closed = jnp.where(going, jnp.any(new & (rows.tokens == task.words.close), axis=1), closed)
        spent = spent + jnp.sum(said.astype(jnp.int32), axis=1)
        tokens, valid = given_responses.left_padded(rows.tokens, (rows.segment_ids > 0) & ~rows.mask | said)
        tokens, valid = (x[:, -(prompts.shape[1] + most) :] for x in (tokens, valid))  # no text is longer
    return *_followed(tokens, valid, task.words.close, closed), spent, closed


def forced_scores(
    task: Reports, params: Params, prompts: Int[Array, "N P"], key: Key, *, rounds: int
) -> tuple[Bool[Array, " N"], Float[Array, "N 2"], Float[Array, " N"]]:
    """``(read, scores, tokens thought)`` of a judge that had to think again so many times."""
    thoughts = thought_again(task, params, prompts, jax.random.fold_in(key, 0), rounds=rounds)
    tokens, valid, spent, closed = thoughts
    ids = jnp.arange(prompts.shape[0], dtype=jnp.int32)
    rows = generate(
        task.long.policy, params, tokens, valid, sample_keys(key, 99, ids, 1), group_size=1,
        max_new_tokens=VERDICT_TOKENS, eos_ids=(task.words.end,), pad_id=task.words.end,
        early_exit=seed_axis.in_turn(),
    )  # fmt: skip
    verdict = rows.tokens[:, tokens.shape[1] :]
    # the thoughts are whatever they are: the report is read as if they were empty
    head = jnp.broadcast_to(jnp.asarray([[task.words.open, task.words.close]], jnp.int32), (prompts.shape[0], 2))
    _, scored, scores = toy.read_report(task, jnp.concatenate([head, verdict], axis=1))
    read = scored & closed
    return read, jnp.where(read[:, None], scores, 0.0), spent.astype(jnp.float32)
