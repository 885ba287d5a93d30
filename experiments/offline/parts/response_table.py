"""A table of judged responses to training problems, and the methods that learn from it and from nothing else.

A method is ``(settings, bench) -> Method``: which rows it draws, what they lose. The parameters are ``{"model": policy,
"critic": a second decoder, "value": head}``, of a method without a critic ``{"model": policy}``.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import step_search
from jaxrl_llm import logprobs, reduce
from jaxrl_llm.data import formats
from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import curricula, recipes
from jaxrl_llm.experiment.recipes import Bench
from jaxrl_llm.losses import bellman, distill, preference
from jaxrl_llm.losses.supervised import sft_loss
from jaxrl_llm.metrics import calibration
from jaxrl_llm.models import heads
from jaxrl_llm.rollout.keys import sample_keys
from jaxrl_llm.train.methods import builders
from jaxrl_llm.types import Key, Metrics, Params

VALIDATION = 128  # training problems that no table holds, for the choice of a learning rate
AT_ONCE = 64  # problems whose responses are drawn at once
SHOWN = 64  # held-out problems whose responses a critic is held against


class Table(NamedTuple):
    """Responses with their rewards; members of a group answer the same problem."""

    tokens: Int[Array, "N T"]
    segment_ids: Int[Array, "N T"]
    positions: Int[Array, "N T"]
    mask: Bool[Array, "N T"]
    reward: Float[Array, " N"]


class Pairs(NamedTuple):
    """A right and a wrong response to the same problem, row for row."""

    chosen: Table
    rejected: Table


class Method(NamedTuple):
    """What learns from a table.

    ``rows(table, group_size)`` is what minibatches are drawn from, as many rows as the table; ``loss(params,
    reference, batch, total)`` what they lose; ``whole(batch)`` what that divides by, or None for a loss of ``(params,
    reference, batch)`` that takes its minibatch whole.
    """

    rows: Callable[[Table, int], Any]
    loss: Callable[..., tuple[Array, Metrics]]
    whole: Callable[[Any], Any] | None
    critic: bool = False


def problems_of(settings: Any) -> int:
    """How many training problems a table has.

    Raises:
      UserError: where there are too few beside those that choose the learning rate.
    """
    found = recipes.bench(settings)
    left = found.train.tokens.shape[0] - min(VALIDATION, found.train.tokens.shape[0] // 2)
    if left < 1:
        raise UserError(f"--data {settings.data}: one training problem is too few for a table; give more rows")
    return min(settings.table_problems, left)


def draw_table(settings: Any, policy: Params, key: Key) -> Table:
    """``group_size`` responses of the policy to each of ``table_problems`` training problems, judged.

    They are drawn some problems at a time; where the bench judges text, by callback.
    """
    found = recipes.bench(settings)
    count, size = problems_of(settings), settings.group_size
    held = min(VALIDATION, found.train.tokens.shape[0] // 2)
    rollout, score = recipes.rollout_of(settings, found), curricula.train_score(found)
    chosen = jax.random.permutation(jax.random.fold_in(key, 0), found.train.tokens.shape[0] - held)[:count]

    def some(ids: Array) -> Table:
        rows = rollout(policy, found.train.tokens[ids], found.train.valid[ids], sample_keys(key, 1, ids, size), ids)
        rewards = score(jax.tree.map(lambda x: x[rows.problem_ids], found.train.answers), rows)
        kept = Table(rows.tokens, rows.segment_ids, rows.positions, rows.mask & rewards.valid[:, None], rewards.value)
        return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), kept)

    drawn = builders.in_row_parts(some, chosen.astype(jnp.int32), at_once=AT_ONCE)
    return jax.tree.map(lambda x: x.reshape(count * size, *x.shape[2:]), drawn)


class Logged(NamedTuple):
    """Responses from a file: of each prompt the same number, a group; shorter groups are filled up in turn."""

    table: Table
    group_size: int


@lru_cache(maxsize=2)
def _logged(identity: tuple, spec: str, group_size: int, new_tokens: int) -> Logged:
    settings = recipes.OnlineSettings(**dict(identity))
    found, chat = recipes.bench(settings), settings.chat
    rows, _ = formats.read_rewarded(spec)
    tokenizer, columns = found.model.tokenizer, found.train.tokens.shape[1]
    held = min(VALIDATION, found.train.tokens.shape[0] // 2)
    others = [(found.heldout.tokens, found.heldout.valid), (found.train.tokens[-held:], found.train.valid[-held:])]
    hidden = {
        tuple(row[real].tolist())
        for tokens, valid in others[: 1 + bool(held)]
        for row, real in zip(np.asarray(tokens), np.asarray(valid), strict=True)
    }
    groups: dict[tuple[int, ...], list[tuple[list[int], float]]] = {}
    for prompt, response, reward in rows:
        asked, said = tuple(encode_prompt(tokenizer, prompt, chat=chat)), tokenizer.encode(response)
        if len(asked) <= columns and len(said) < new_tokens and asked not in hidden:
            groups.setdefault(asked, []).append(([*said, tokenizer.eos_ids[0]], reward))
    if not groups:
        raise UserError(
            f"--logged {spec}: no row has a prompt of at most {columns} tokens that is not held out, and a response of "
            f"less than {new_tokens}; give rows like those of --data, or raise --max-new-tokens"
        )
    size = min(group_size, max(map(len, groups.values())))
    kept = sum(min(size, len(group)) for group in groups.values())
    print(
        f"{spec}: {kept} of {len(rows)} responses to {len(groups)} prompts; those that are held out, too "
        f"long, or more than --group-size {group_size} of a prompt are left out", flush=True,
    )  # fmt: skip
    tokens = np.full((len(groups) * size, columns + new_tokens), tokenizer.pad_id, np.int32)
    segments, mask = np.zeros(tokens.shape, np.int32), np.zeros(tokens.shape, bool)
    rewards = np.zeros(len(tokens), np.float32)
    for k, (asked, group) in enumerate(groups.items()):
        for j in range(size):
            row, (said, reward) = k * size + j, group[j % len(group)]
            rewards[row], ends = reward, columns + len(said)
            tokens[row, columns - len(asked) : columns], tokens[row, columns:ends] = asked, said
            segments[row, columns - len(asked) : ends], mask[row, columns:ends] = 1, True
    positions = np.maximum(np.cumsum(segments, axis=1) - 1, 0).astype(np.int32)
    return Logged(Table(*map(jnp.asarray, (tokens, segments, positions, mask, rewards))), size)


def logged(settings: Any) -> Logged:
    """The responses of ``--logged``, a file of ``prompt``, ``response`` and ``reward``, without prompts held out.

    Raises:
      UserError: for a file that cannot be read, or no row of which can train.
    """
    return _logged(recipes.bench_identity(settings), settings.logged, settings.group_size, settings.max_new_tokens)


def draw_logged(settings: Any, key: Key) -> Table:
    """The logged responses to ``table_problems`` of their prompts."""
    table, size = logged(settings)
    groups = table.reward.shape[0] // size
    chosen = jax.random.permutation(key, groups)[: settings.table_problems]
    rows = (chosen[:, None] * size + jnp.arange(size)[None, :]).reshape(-1)
    return jax.tree.map(lambda x: x[rows], table)


def as_drawn(table: Table, group_size: int) -> Table:
    """Every response as it is."""
    return table


def scrambled(table: Table, group_size: int) -> Table:
    """Within each problem the rewards of other responses: credit without meaning, at the same rates of success.

    Each response has the reward of the one half a group further on.
    """
    moved = jnp.roll(table.reward.reshape(-1, group_size), group_size // 2, axis=1)
    return table._replace(reward=moved.reshape(-1))


def cycled(keep: Bool[Array, " N"]) -> Int[Array, " N"]:
    """The kept rows again and again, as many as all rows are; row 0 where none is kept.

    >>> cycled(jnp.array([False, True, False, True])).tolist()
    [1, 3, 1, 3]
    """
    order = jnp.argsort(~keep, stable=True)
    count = jnp.maximum(jnp.sum(keep.astype(jnp.int32)), 1)
    return order[jnp.arange(keep.shape[0], dtype=jnp.int32) % count]


def right_ones(table: Table, group_size: int) -> Table:
    """The right responses; where there are none, nothing is masked in."""
    right = table.reward > 0.5
    rows = cycled(right)
    kept = jax.tree.map(lambda x: x[rows], table)
    return kept._replace(mask=kept.mask & right[rows][:, None])


def paired(table: Table, group_size: int) -> Pairs:
    """The k-th right response to a problem beside its k-th wrong one, from the start again where one kind runs out."""
    right = (table.reward > 0.5).reshape(-1, group_size)
    begin = jnp.arange(right.shape[0], dtype=jnp.int32)[:, None] * group_size
    good, bad = (begin + jax.vmap(cycled)(x) for x in (right, ~right))
    mixed = jnp.any(right, axis=1) & ~jnp.all(right, axis=1)
    # as many pairs of a problem as its rarer kind has members
    fewer = jnp.minimum(jnp.sum(right, axis=1), jnp.sum(~right, axis=1))
    there = mixed[:, None] & (jnp.arange(group_size)[None, :] < fewer[:, None])
    rows = cycled(there.reshape(-1))
    sides = [jax.tree.map(lambda x, at=at: x[at.reshape(-1)[rows]], table) for at in (good, bad)]
    keep = there.reshape(-1)[rows][:, None]
    return Pairs(*(side._replace(mask=side.mask & keep) for side in sides))


def every_token(ends: Bool[Array, "B T"], mask: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """Every token is a step."""
    return mask


def one_step(ends: Bool[Array, "B T"], mask: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """The whole response is a step."""
    return bellman.first_tokens(mask)


@lru_cache(maxsize=4)
def _enders(decode: Callable, size: int, text: str) -> tuple[int, ...]:
    return tuple(token for token in range(size) if text in decode([token]))


def step_ids(found: Bench, text: str) -> tuple[int, ...]:
    """The tokens that end a step: those with the text in them.

    Raises:
      UserError: where no token has it.
    """
    tokenizer = found.model.tokenizer
    ids = _enders(tokenizer.decode, tokenizer.vocab_size, text)
    if not text or not ids:
        raise UserError(f"--step-end {text!r}: no token of this model has it; give what ends a step of its reasoning")
    return ids


def critic_values(found: Bench, params: Params, rows: Any) -> Float[Array, "B T"]:
    """The critic's value of the state in which each token is chosen."""
    hidden = found.model.policy.hidden(params["critic"], rows.tokens, rows.positions, rows.segment_ids)
    return heads.state_values(params["value"], hidden, rows.segment_ids)


def prefix_value(found: Bench, params: Params, tokens: Array, valid: Array) -> Float[Array, " N"]:
    """The critic's value behind each left-padded prefix; of one that is closed, where its end was chosen.

    No token is chosen behind an end, so that no value there was ever trained.
    """
    positions = jnp.maximum(jnp.cumsum(valid.astype(jnp.int32), axis=1) - 1, 0)
    hidden = found.model.policy.hidden(params["critic"], tokens, positions, valid.astype(jnp.int32))
    values = heads.token_values(params["value"], hidden[:, -2:])
    closed = jnp.isin(tokens[:, -1], jnp.asarray(found.model.tokenizer.eos_ids, jnp.int32))
    return jnp.where(closed, values[:, 0], values[:, 1])


def make_heldout_figures(settings: Any, found: Bench) -> Callable[[Params, Key], Metrics]:
    """``value_figures`` of fresh responses to problems that are held out, as ``heldout/auc_start`` and ``_middle``."""
    count = min(SHOWN, found.heldout.tokens.shape[0])
    ids = jnp.arange(count, dtype=jnp.int32)
    roll = recipes.rollout_of(settings, found, group_size=4, measured=True)
    roll = roll if found.score is None else jax.jit(roll)

    def figures(params: Params, key: Key) -> Metrics:
        table = found.heldout
        rows = roll(params["model"], table.tokens[ids], table.valid[ids], sample_keys(key, 0, ids, 4), ids)
        right = step_search.solved(found, rows, rows.mask)
        judged = Table(rows.tokens, rows.segment_ids, rows.positions, rows.mask, right)
        seen = value_figures(critic_values(found, params, rows), judged)
        return {name.replace("value/", "heldout/"): x for name, x in seen.items()}

    return figures


def value_figures(values: Float[Array, "B T"], batch: Table) -> Metrics:
    """How well values tell right from wrong responses at their first and at their middle token (area under the ROC)."""
    place = jnp.cumsum(batch.mask.astype(jnp.int32), axis=1)
    length = jnp.sum(batch.mask.astype(jnp.int32), axis=1, keepdims=True)
    found = {}
    for name, at in (("start", jnp.minimum(length, 1)), ("middle", (length + 1) // 2)):
        here = batch.mask & (place == at)
        value = jnp.sum(jnp.where(here, values, 0.0), axis=1)
        # of a batch with one kind only there is none: half, as of a guess
        area = calibration.auroc(jax.nn.sigmoid(value), batch.reward > 0.5, jnp.any(here, axis=1))
        found[f"value/auc_{name}"] = jnp.where(jnp.isfinite(area), area, 0.5)
    return found


def oreo(settings: Any, found: Bench) -> Method:
    """A policy and a critic drawn towards soft Bellman consistency on every step of every response."""
    policy, beta = found.model.policy, settings.beta
    ends = jnp.zeros((found.model.config.padded_vocab_size,), bool)
    ends = ends.at[jnp.asarray(step_ids(found, settings.step_end), jnp.int32)].set(True)

    def loss(params: Params, reference: Params, batch: Table, total: Array) -> tuple[Array, Metrics]:
        places = (batch.tokens, batch.positions, batch.segment_ids)
        hidden = policy.hidden(params["model"], *places)
        anchor = jax.lax.stop_gradient(policy.hidden(reference, *places))
        here, there = partial(policy.unembed, params["model"]), partial(policy.unembed, reference)
        logp, entropy = logprobs.chunked(hidden, here, batch.tokens, segment_ids=batch.segment_ids)
        ref_logp, _ = logprobs.chunked(anchor, there, batch.tokens, segment_ids=batch.segment_ids)
        ref_logp = jax.lax.stop_gradient(ref_logp)
        values = critic_values(found, params, batch)
        starts = settings.starts(ends[batch.tokens], batch.mask)
        judged = (batch.reward, starts, batch.mask)
        actor = bellman.soft_policy_loss(logp, ref_logp, values, *judged, beta=beta)
        critic = bellman.soft_value_loss(values, logp, ref_logp, batch.reward, batch.mask, beta=beta)
        shift = (logprobs.align(hidden), here, logprobs.align(anchor), there, batch.mask)
        kl = distill.chunked_reverse_kl_loss(*shift)
        mean = partial(reduce.tokens, mode="seq_mean", total=total)
        parts = mean(actor.loss, starts), mean(critic.loss, starts), mean(kl.loss, batch.mask)
        stopped = jax.lax.stop_gradient((critic.aux["residual"], values, entropy))
        figures = {
            "bellman/policy_loss": parts[0], "bellman/value_loss": parts[1], "kl/ref": parts[2],
            "bellman/residual": mean(stopped[0], starts), "policy/entropy": mean(stopped[2], batch.mask),
        }  # fmt: skip
        # shares of the whole, so that figures of parts of a minibatch add up
        share = responses(batch) / jnp.maximum(total, 1.0)
        figures |= {name: share * x for name, x in value_figures(stopped[1], batch).items()}
        return parts[0] + parts[1] + settings.kl_weight * parts[2], figures | trained(batch)

    return Method(settings.credit, loss, responses, critic=True)


def response_tokens(batch: Table) -> Array:
    """How many tokens of a minibatch train, as a divisor."""
    return reduce.denominator(batch.mask, mode="token_mean")


def responses(batch: Table) -> Array:
    """How many responses of a minibatch train."""
    return reduce.denominator(batch.mask, mode="seq_mean")


def trained(*sides: Table) -> Metrics:
    """How many tokens a minibatch trains."""
    return {"tokens/trained": sum(jnp.sum(side.mask.astype(jnp.float32)) for side in sides)}


def rejection(settings: Any, found: Bench) -> Method:
    """Imitation of the right responses."""

    def loss(params: Params, reference: Params, batch: Table, total: Array) -> tuple[Array, Metrics]:
        logp, entropy = builders.score_tokens(found.model.policy, params["model"], batch)
        value = reduce.tokens(sft_loss(logp, batch.mask).loss, batch.mask, total=total)
        shown = {"policy/entropy": reduce.tokens(jax.lax.stop_gradient(entropy), batch.mask, total=total)}
        return value, {"sft/loss": value} | shown | trained(batch)

    return Method(right_ones, loss, response_tokens)


def dpo(settings: Any, found: Bench) -> Method:
    """A right response preferred to a wrong one of the same problem."""

    def total_logp(params: Params, rows: Table) -> Array:
        logp, _ = builders.score_tokens(found.model.policy, params, rows)
        return reduce.sequences(logp, rows.mask)

    def loss(params: Params, reference: Params, batch: Pairs, total: Array) -> tuple[Array, Metrics]:
        own = [total_logp(params["model"], side) for side in batch]
        anchors = jax.lax.stop_gradient([total_logp(reference, side) for side in batch])
        terms = preference.dpo_loss(*own, *anchors, beta=settings.dpo_beta)
        there = jnp.any(batch.chosen.mask, axis=1)
        value = jnp.sum(jnp.where(there, terms.loss, 0.0)) / jnp.maximum(total, 1.0)
        return value, {"dpo/loss": value} | trained(*batch)

    return Method(paired, loss, lambda batch: responses(batch.chosen))


def mismatched(batch: Table, *, prompt: int) -> Table:
    """The prompt of each row, its first ``prompt`` columns, with the response of the next one."""

    def crossed(x: Array) -> Array:
        return jnp.concatenate([x[:, :prompt], jnp.roll(x, -1, axis=0)[:, prompt:]], axis=1)

    tokens, segments, mask = (crossed(x) for x in (batch.tokens, batch.segment_ids, batch.mask))
    positions = jnp.maximum(jnp.cumsum(segments, axis=1) - 1, 0)
    return batch._replace(tokens=tokens, segment_ids=segments, positions=positions, mask=mask)


def _kto_terms(settings: Any, found: Bench) -> Callable[..., tuple[Array, Array, Array]]:
    """``(params, reference, table) -> (losses, which of them count, z)`` of ``kto``."""
    prompt = found.train.tokens.shape[1]

    def ratios(params: Params, reference: Params, rows: Table) -> tuple[Array, Array]:
        both = (builders.score_tokens(found.model.policy, weights, rows)[0] for weights in (params["model"], reference))
        own, anchor = (reduce.sequences(logp, rows.mask) for logp in both)
        return own, jax.lax.stop_gradient(anchor)

    def terms(params: Params, reference: Params, batch: Table) -> tuple[Array, Array, Array]:
        crossed, there = mismatched(batch, prompt=prompt), jnp.any(batch.mask, axis=1)
        other = ratios(jax.lax.stop_gradient(params), reference, crossed)
        gap = reduce.scalars(other[0] - other[1], jnp.any(crossed.mask, axis=1))
        own, anchor = ratios(params, reference, batch)
        losses = preference.kto_loss(own, anchor, batch.reward > 0.5, gap, beta=settings.dpo_beta).loss
        return losses, there, gap

    return terms


def kto(settings: Any, found: Bench) -> Method:
    """Right responses desirable, wrong ones not, each by itself; ``z`` is the mean log-ratio of mismatched pairs."""
    terms = _kto_terms(settings, found)

    def loss(params: Params, reference: Params, batch: Table) -> tuple[Array, Metrics]:
        losses, there, gap = terms(params, reference, batch)
        value = reduce.scalars(losses, there)
        return value, {"kto/loss": value, "kto/gap": gap} | trained(batch)

    return Method(as_drawn, loss, None)


class Weighed(NamedTuple):
    """Responses, and how much each of them counts."""

    table: Table
    weight: Float[Array, " N"]


def sides_alike(table: Table, group_size: int) -> Weighed:
    """Wrong responses count 1, right ones as often as there are more wrong ones, so that both sides weigh alike.

    ``w_d n_d = w_u n_u``, the lower end of what is advised in "KTO: Model Alignment as Prospect Theoretic
    Optimization", arXiv:2402.01306, section 4.2. Where there are no right ones, or no wrong ones, all count 1.
    """
    right, there = table.reward > 0.5, jnp.any(table.mask, axis=1)
    good, bad = (jnp.sum((x & there).astype(jnp.float32)) for x in (right, ~right))
    more = jnp.where((good > 0) & (bad > 0), bad / jnp.maximum(good, 1.0), 1.0)
    return Weighed(table, jnp.where(right, more, 1.0))


def balanced_kto(settings: Any, found: Bench) -> Method:
    """``kto`` with ``sides_alike``."""
    terms = _kto_terms(settings, found)

    def loss(params: Params, reference: Params, batch: Weighed) -> tuple[Array, Metrics]:
        losses, there, gap = terms(params, reference, batch.table)
        value = reduce.scalars(batch.weight * losses, there)
        return value, {"kto/loss": value, "kto/gap": gap} | trained(batch.table)

    return Method(sides_alike, loss, None)


@lru_cache(maxsize=8)
def _validation(identity: tuple, temperature: float) -> Callable[[Params, Key], Metrics]:
    settings = recipes.OnlineSettings(**dict(identity))
    found = recipes.bench(settings)
    held = min(VALIDATION, found.train.tokens.shape[0] // 2)
    rollout = recipes.rollout_of(settings, found, group_size=2, temperature=temperature, measured=True)
    ids = jnp.arange(found.train.tokens.shape[0] - held, found.train.tokens.shape[0], dtype=jnp.int32)
    score = curricula.train_score(found)

    def validate(params: Params, key: Key) -> Metrics:
        keys = sample_keys(key, 0, ids, 2)
        rows = rollout(params["model"], found.train.tokens[ids], found.train.valid[ids], keys, ids)
        rewards = score(jax.tree.map(lambda x: x[rows.problem_ids], found.train.answers), rows)
        return {"reward/mean": reduce.scalars(rewards.value, rewards.valid)}

    return validate


def make_validation(settings: Any) -> Callable[[Params, Key], Metrics]:
    """``reward/mean`` of fresh samples on training problems that no table holds: what a learning rate is chosen by."""
    return _validation(recipes.bench_identity(settings), settings.temperature)
