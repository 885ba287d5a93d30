"""Preferences of the policy's own responses: drawn while it trains, judged, and trained on by any loss on preferences.

Run: jaxrl online-dpo --model DIR --data FILE.jsonl [--loss dpo_loss] [--reward MODULE:FUNCTION | --verifier NAME]

Every update draws ``--group-size`` responses to each prompt and judges them as ``jaxrl train`` does. What a loss takes
says what is made of them:

* pairs (``dpo_loss``, ``ipo_loss``, ``xpo_loss`` ...): a response of the first half of a group and that at its place in
  the second half; the higher reward is chosen, a tie trains nothing;
* single responses (``kto_loss``, ``bco_loss``): desirable above ``--desirable``;
* chances to win (``sppo_loss``, ``nash_md_loss``): against the other responses, or against the partner's;
* rankings (``rrhf_loss``, ``pro_loss``, ``trpa_loss``): of the group, best first;
* margins beside a judge (``vrpo_loss``): half of the pairs are labelled by the rewards, of the others and of those
  labels ``--judge`` gives the chance, which is a half where it has no verdict on one of the two.

``--partner`` draws the second half of a group: the policy, the reference (``xpo_loss``), or the geometric mixture of
both (``nash_md_loss``).
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxrl_llm import losses, reduce
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import recipes
from jaxrl_llm.experiment.claims import open_claim
from jaxrl_llm.jobs import dpo, scoring
from jaxrl_llm.jobs.dpo import REFERENCE, Summed
from jaxrl_llm.jobs.scoring import DrawnSettings, judged, with_reward
from jaxrl_llm.models.cache import EXPERTS
from jaxrl_llm.rollout.mixture import mixture_policy
from jaxrl_llm.run import bench, flags, lora_state, named
from jaxrl_llm.run.method import adamw, in_epochs, own_reward
from jaxrl_llm.train.methods.builders import make_estimate, score_tokens
from jaxrl_llm.train.methods.supervised import SupervisedRows
from jaxrl_llm.train.plan import Plan, Referred, keep_reference, reference_of, referred, with_whole_reference
from jaxrl_llm.train.step import trained_part
from jaxrl_llm.types import Batch, PairTerms, Params, Rewards, TokenTerms, Trajectories, declared

POLICY = "policy"
OFFERED = {  # what a loss of each kind may take
    "pairs": (*dpo.PAIRED, "ref_sample_logp"),
    "single": dpo.SINGLE,
    "chances": ("logp", "ref_logp", "win_chance", "mask"),
    "rankings": ("mean_logp", "logp", "mean_log_ratio", "levels", "group_ids"),
    "margins": ("margin", "judged", "fresh_margin", "fresh_judged"),
}
WHOLE = "its rows know of each other"  # why parts of a batch do not add up
REFUSED = {name: "it sorts the margins of a whole batch, of which a tie cannot be left out; jaxrl dpo has it for files"
           for name in ("aot_loss", "aot_unpaired_loss")}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Settings(DrawnSettings):
    """DPO on pairs of the policy's own responses, or another loss on preferences."""

    loss: str = "dpo_loss"  # a function of jaxrl_llm.losses, or MODULE:FUNCTION
    loss_args: tuple[str, ...] = ()  # its settings, for example beta=0.05
    # in place of the verifier: MODULE:FUNCTION of (answer, response) to a number or a Verdict, or the folder of a
    # reward model; of several the sum
    reward: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] = ()  # of several; none: 1 each
    judge: str = ""  # MODULE:FUNCTION of (answer, response) to a score: the second opinion of vrpo_loss
    # who draws the second half of a group; empty: as the loss has it, the policy for most
    partner: Literal["", "policy", "reference", "mixture"] = ""
    share: float = 0.5  # of the reference in the mixture
    # the chance that one response wins: sigmoid(sharpness (reward - reward of the other)); 0: 1, a half or 0
    sharpness: float = 0.0
    beta: float = 0.1  # of margins, for a loss that takes them as they are (vrpo_loss)
    desirable: float = 0.5  # a single response is desirable above this reward
    new_reference: int = 0  # steps after which the policy becomes the reference, again and again; 0: never
    # LD-DPO: the weight, 0 to 1, of what a response has beyond the length of the other one of its pair; 1: DPO
    length_desensitised: float = 1.0
    learning_rate: float = 5e-7
    group_size: int = 2
    max_grad_norm: float = 1.0  # of the whole step's gradient; 0: no bound


EMBEDDED = scoring.EMBEDDED | {"learning_rate": 1e-4, "group_size": 4}
SMOKE = {
    "steps": 2, "eval_every": 2, "prompts_per_step": 8, "max_new_tokens": 16, "train_problems": 32, "eval_problems": 8,
    "eval_samples": 2,
}  # fmt: skip
ARMS = {"online_dpo": {}}
METRICS = ("eval/accuracy", "eval/tokens", "preferences/kept")
SEEDS, EXPORT = 1, "always"


# what a loss of each kind has one number for
UNITS = {"pairs": "pairs", "margins": "labelled pairs", "single": "responses", "chances": "responses",
         "rankings": "groups or responses"}  # fmt: skip


class Method(NamedTuple):
    """A loss on preferences, and what is made of responses for it."""

    loss: Callable[..., Any]
    kind: str  # of ``OFFERED``
    wanted: tuple[str, ...]
    partner: str
    how: Summed


def kind_of(wanted: Sequence[str]) -> str:
    """Of what a loss is, by what it takes.

    >>> kind_of(("chosen_logp", "rejected_logp")), kind_of(("logp", "ref_logp", "win_chance"))
    ('pairs', 'chances')
    """
    marks = {"win_chance": "chances", "desirable": "single", "judged": "margins", "levels": "rankings",
             "mean_logp": "rankings"}  # fmt: skip
    return next((kind for mark, kind in marks.items() if mark in wanted), "pairs")


def method_of(settings: Settings) -> Method:
    """The loss of the flags.

    Raises:
      UserError: for one that this command cannot give what it takes, or flags that do not fit it.
    """
    loss = named.with_settings(named.find(losses, settings.loss, "--loss"), settings.loss_args, "--loss-args", losses)
    if settings.loss in REFUSED:
        raise UserError(f"--loss {settings.loss}: {REFUSED[settings.loss]}")
    kind = kind_of(named.arrays(loss))
    wanted = named.check_arrays(loss, OFFERED[kind], f"--loss {settings.loss}")
    usual = "reference" if "ref_sample_logp" in wanted else "policy"
    if kind == "chances" and "mask" in wanted:
        usual = "mixture"
    partner = settings.partner or usual
    if "ref_sample_logp" in wanted and partner != "reference":
        raise UserError(f"--partner {partner}: --loss {settings.loss} takes a response of the policy and one of the "
                        "reference; drop the flag")  # fmt: skip
    if kind == "rankings" and partner != POLICY:
        raise UserError(f"--partner {partner}: --loss {settings.loss} ranks responses of one policy; drop the flag")
    _check_numbers(settings, kind, wanted, partner)
    return Method(loss, kind, wanted, partner, Summed(settings.temperature, dpo.how_summed(settings, wanted).alpha))


def _check_numbers(settings: Settings, kind: str, wanted: Sequence[str], partner: str) -> None:
    least = 4 if kind == "margins" else 2
    if settings.group_size % least:
        raise UserError(f"--group-size {settings.group_size}: --loss {settings.loss} takes groups of a multiple of "
                        f"{least} responses")  # fmt: skip
    if bool(settings.judge) != (kind == "margins"):
        raise UserError(f"--judge {settings.judge or 'none'} with --loss {settings.loss}: vrpo_loss takes a second "
                        "opinion, and nothing else does; give both, or neither")  # fmt: skip
    if not 0 <= settings.share <= 1:
        raise UserError(f"--share {settings.share} must lie in [0, 1]")
    for name in ("sharpness", "new_reference"):
        if getattr(settings, name) < 0:
            raise UserError(f"{flags.spell(name)} {getattr(settings, name)} must not be negative")
    if settings.new_reference and "chosen_kl" in wanted:
        raise UserError(f"--new-reference {settings.new_reference}: --loss {settings.loss} measures against the model "
                        "that was loaded; drop the flag")  # fmt: skip
    if partner == "mixture" and (settings.slots or settings.rollout_weights or settings.lora):
        raise UserError("--partner mixture samples from two models at once: drop --slots, --rollout-weights and "
                        "--lora, or choose --partner policy or reference")  # fmt: skip


# rollouts


def halves(x: Array, group_size: int) -> tuple[Array, Array]:
    """The first and the second half of every group of rows: ``[B / 2, ...]`` each, in the order of the rows.

    >>> import jax.numpy as jnp
    >>> [part.tolist() for part in halves(jnp.arange(8), 4)]
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    groups = x.reshape(-1, group_size, *x.shape[1:])
    half = group_size // 2
    return groups[:, :half].reshape(-1, *x.shape[1:]), groups[:, half:].reshape(-1, *x.shape[1:])


def beside(first: Array, second: Array, group_size: int) -> Array:
    """What ``halves`` took apart, in groups again."""
    half = group_size // 2
    both = [x.reshape(-1, half, *x.shape[1:]) for x in (first, second)]
    return jnp.concatenate(both, axis=1).reshape(-1, *first.shape[1:])


def paired_rollout(settings: Settings, found: bench.Bench, partner: str) -> Callable[..., Trajectories]:
    """The rollout of ``{"policy": ..., "reference": ...}``: the second half of every group is the partner's."""
    size = settings.group_size
    if partner == POLICY:
        whole = recipes.rollout_of(settings, found)
        return lambda both, *given: whole(both[POLICY], *given)
    mine = its = recipes.rollout_of(settings, found, group_size=size // 2)
    if partner == "mixture":
        mixed = mixture_policy(found.model.policy, found.model.config.hidden_size, share=settings.share)
        model = found._replace(model=found.model._replace(policy=mixed))
        its = recipes.rollout_of(settings, model, group_size=size // 2)

    def rollout(both, tokens, valid, keys, problem_ids):
        own, other = halves(keys, size)
        first = mine(both[POLICY], tokens, valid, own, problem_ids)
        second = its(both if partner == "mixture" else both[REFERENCE], tokens, valid, other, problem_ids)
        if partner == "mixture":  # of which nobody recorded who computed its tokens
            first = first._replace(extras={k: x for k, x in first.extras.items() if k != EXPERTS})
        elif EXPERTS in second.extras:  # the reference's experts are not those by which the policy computes
            second = second._replace(extras=second.extras | {EXPERTS: jnp.full_like(second.extras[EXPERTS], -1)})
        return jax.tree.map(partial(beside, group_size=size), first, second)

    return rollout


# what is made of the responses


def chance(first: Array, second: Array, sharpness: float) -> Array:
    """The chance that the first reward wins: ``sigmoid(sharpness (first - second))``; of 0 sharpness 1, 1/2 or 0.

    >>> import jax.numpy as jnp
    >>> chance(jnp.array([2.0, 1.0, 0.0]), jnp.ones(3), 0.0).tolist()
    [1.0, 0.5, 0.0]
    """
    gap = first - second
    return jax.nn.sigmoid(sharpness * gap) if sharpness else 0.5 * (1.0 + jnp.sign(gap))


def win_chances(values: Array, valid: Array, group_size: int, partner: str, sharpness: float) -> Array:
    """Of every row ``[B]``: the mean chance against the valid responses of its opponents, a half without any.

    Opponents of the policy are the others of its group, or the second half of it where somebody else drew that.
    """
    value, there = values.reshape(-1, group_size), valid.reshape(-1, group_size)
    member = jnp.arange(group_size)
    meets = member[:, None] != member[None, :] if partner == POLICY else member[None, :] >= group_size // 2
    counted = (meets[None] & there[:, None, :]).astype(jnp.float32)
    chances = chance(value[:, :, None], value[:, None, :], sharpness)
    total = jnp.sum(counted, axis=2)
    return jnp.where(total > 0, jnp.sum(counted * chances, axis=2) / jnp.maximum(total, 1.0), 0.5).reshape(-1)


def kept_rows(method: Method, settings: Settings, rewards: Rewards) -> Array:
    """Which rows ``[B]`` enter the loss: those of pairs that are no tie, of groups with an order, of the policy."""
    size, valid = settings.group_size, rewards.valid
    if method.kind in ("pairs", "margins"):
        first, second = halves(rewards.value, size)
        there = jnp.logical_and(*halves(valid, size))
        kept = there & (first != second)
        if method.kind == "margins":  # the second half of the pairs has no labels that could be equal
            labelled = jnp.arange(size // 2) < size // 4
            kept = jnp.where(jnp.tile(labelled, kept.shape[0] // labelled.shape[0]), kept, there)
            both = kept.reshape(-1, 2, size // 4)
            kept = jnp.broadcast_to(jnp.all(both, axis=1, keepdims=True), both.shape).reshape(-1)
        return beside(kept, kept, size)
    if method.kind == "rankings":
        value = rewards.value.reshape(-1, size)
        spread = jnp.all(valid.reshape(-1, size), axis=1) & (jnp.max(value, axis=1) > jnp.min(value, axis=1))
        return jnp.repeat(spread, size)
    own = jnp.arange(valid.shape[0]) % size < size // 2
    return valid & own if method.kind == "chances" and method.partner != POLICY else valid


def counted(method: Method, group_size: int, kept: Array) -> Array:
    """What the sum of a loss is divided by: pairs, groups or rows of the whole step."""
    if "levels" in method.wanted:  # whose rows are shares of a mean over the pairs of all rows, see ``trpa_loss``
        return jnp.asarray(kept.shape[0], jnp.float32)
    share = {"pairs": 2, "margins": 4, "rankings": group_size}.get(method.kind, 1)
    return jnp.sum(kept.astype(jnp.float32)) / share


class Rated(NamedTuple):
    """Extras of a batch: the reward of each response."""

    reward: Array


class Preferred(NamedTuple):
    """Extras of a batch, of the whole step at each of its rows: the rows that a preference was found for."""

    kept_share: Array  # of all rows
    kept_tokens: Array  # in their responses
    kept_terms: Array  # that the loss has of them: pairs, groups or rows


class Winning(NamedTuple):
    """Extras of a batch: the chance of each response to win against another one of its group."""

    chance: Array


class Judged(NamedTuple):
    """Extras of a batch: what ``--judge`` says of each response, and whether it says anything."""

    judge: Array
    has_verdict: Array


def reward_of(batch: Batch) -> Array:
    """The reward of each response."""
    return declared(Rated, batch.extras).reward


def rows_of(batch: Batch, take: Callable[[Array], Array]) -> SupervisedRows:
    """Some rows of a batch."""
    names = ("tokens", "segment_ids", "positions", "mask")
    return SupervisedRows(**{name: take(getattr(batch, name)) for name in names})


def pairs(method: Method, size: int, policy: Any, reference: Params, params: Params, batch: Batch):
    """``(arrays of a loss on pairs, whether each pair counts)``."""
    won = jnp.greater(*halves(reward_of(batch), size))

    def side(x: Array, *, chosen: bool) -> Array:
        first, second = halves(x, size)
        return jnp.where((won == chosen).reshape(-1, *(1,) * (first.ndim - 1)), first, second)

    chosen, rejected = (rows_of(batch, partial(side, chosen=k)) for k in (True, False))
    shared, part = dpo.shared_tokens(chosen, rejected), {"chosen": chosen, "rejected": rejected}
    for name, k in (("chosen", True), ("rejected", False)):
        part[f"ref_{name}"] = dpo.summed(side(batch.ref_logp, chosen=k), part[name].mask, shared, method.how)
    found: dict[str, Array] = dpo.pair_arrays(policy, params, part, method.wanted, reference, method.how)
    found["ref_sample_logp"] = jnp.where(won, found["rejected_logp"], found["chosen_logp"])  # the reference's response
    return found, jnp.any(chosen.mask, axis=1) & jnp.any(rejected.mask, axis=1)


def margins(method: Method, settings: Settings, policy: Any, params: Params, batch: Batch):
    """``(arrays of vrpo_loss, whether each counts)``: of the pairs of a group the first half is labelled."""
    size = settings.group_size
    logp, _ = score_tokens(policy, params, batch, temperature=method.how.temperature)
    gain = reduce.sequences(logp - batch.ref_logp, batch.mask)
    first, second = halves(gain, size)
    reward, judge, known = (halves(x, size) for x in (reward_of(batch), *declared(Judged, batch.extras)))
    won = reward[0] > reward[1]
    h = settings.beta * (first - second)
    p = jnp.where(jnp.logical_and(*known), chance(*judge, settings.sharpness), 0.5)
    labelled, fresh = halves(jnp.where(won, h, -h), size // 2)[0], halves(h, size // 2)[1]
    sure, guessed = halves(jnp.where(won, p, 1.0 - p), size // 2)[0], halves(p, size // 2)[1]
    there = halves(halves(jnp.any(batch.mask, axis=1), size)[0], size // 2)[0]
    return {"margin": labelled, "judged": sure, "fresh_margin": fresh, "fresh_judged": guessed}, there


def rankings(method: Method, settings: Settings, policy: Any, params: Params, batch: Batch):
    """``(arrays of a loss on ranked responses, whether each group or row counts)``."""
    size, values = settings.group_size, reward_of(batch).reshape(-1, settings.group_size)
    logp, _ = score_tokens(policy, params, batch, temperature=method.how.temperature)
    tokens = jnp.maximum(jnp.sum(batch.mask.astype(jnp.float32), axis=1), 1.0)
    total = reduce.sequences(logp, batch.mask)
    order = jnp.argsort(-values, axis=1, stable=True)
    mean = jnp.take_along_axis((total / tokens).reshape(-1, size), order, axis=1)
    better = jnp.sum((values[:, None, :] > values[:, :, None]).astype(jnp.int32), axis=2).reshape(-1)
    there = jnp.any(batch.mask, axis=1)
    whole = jnp.repeat(jnp.all(there.reshape(-1, size), axis=1), size)  # of the other groups no two make a pair
    found = {
        "mean_logp": mean,
        "logp": jnp.take_along_axis(total.reshape(-1, size), order[:, :1], axis=1)[:, 0],
        "mean_log_ratio": (total - reduce.sequences(batch.ref_logp, batch.mask)) / tokens,
        # 1: wholly right; below it as many levels as there are better responses
        "levels": jnp.where(whole, jnp.where(reward_of(batch) >= 1.0, 1, 2 + better), 2 + size),
        "group_ids": batch.group_ids,
    }
    return found, there if "levels" in method.wanted else there[::size]


def chances(method: Method, settings: Settings, policy: Any, params: Params, batch: Batch):
    """``(arrays of a loss on the chance to win, whether each row counts)``; of tokens where the loss takes a mask."""
    logp, _ = score_tokens(policy, params, batch, temperature=method.how.temperature)
    won = declared(Winning, batch.extras).chance
    found = {"logp": logp, "ref_logp": batch.ref_logp, "mask": batch.mask, "win_chance": won}
    if "mask" not in method.wanted:
        found |= {name: reduce.sequences(found[name], batch.mask) for name in ("logp", "ref_logp")}
    return found, jnp.any(batch.mask, axis=1)


def singles(method: Method, settings: Settings, policy: Any, params: Params, batch: Batch):
    """``(arrays of a loss on single responses, whether each row counts)``."""
    there, good = jnp.any(batch.mask, axis=1), reward_of(batch) > settings.desirable
    ref = reduce.sequences(batch.ref_logp, batch.mask)
    part = {"response": rows_of(batch, lambda x: x), "ref_response": ref, "desirable": good}
    beta = named.settings(method.loss).get("beta", 0.1)
    return dpo.single_arrays(policy, params, part, beta, method.how, there), there


def make_loss(settings: Settings, method: Method, policy: Any, reference: Params):
    """The ``loss`` slot: the sum of the rows, pairs or groups of a part over those of the whole step."""
    makers = {"margins": margins, "rankings": rankings, "chances": chances, "single": singles}

    def loss(params, batch):
        if method.kind == "pairs":
            found, counts = pairs(method, settings.group_size, policy, reference, params, batch)
        else:
            found, counts = makers[method.kind](method, settings, policy, params, batch)
        terms = method.loss(*(found[name] for name in method.wanted))
        if isinstance(terms, TokenTerms):
            aux = {name: reduce.sequences(x, batch.mask, mode="mean") for name, x in terms.aux.items()}
            terms = PairTerms(reduce.sequences(terms.loss, batch.mask), aux)
        elif not isinstance(terms, PairTerms):
            terms = PairTerms(terms, {})
        shape = getattr(terms.loss, "shape", type(terms.loss).__name__)
        if shape != counts.shape:  # it would broadcast
            raise UserError(f"--loss {settings.loss}: gives {shape}, not one number for each of {counts.shape[0]} "
                            f"{UNITS[method.kind]}; choose a loss that does")  # fmt: skip
        value = jnp.sum(jnp.where(counts, terms.loss, 0.0)) / jnp.maximum(batch.total, 1.0)
        step: Preferred = jax.tree.map(lambda x: x[0], declared(Preferred, batch.extras))
        # figures of a part weigh as much as its tokens do, and these are of its pairs
        tokens = jnp.sum(batch.mask.astype(jnp.float32))
        weight = step.kept_tokens / jnp.maximum(tokens, 1.0)
        share = weight * jnp.sum(counts.astype(jnp.float32)) / jnp.maximum(step.kept_terms, 1.0)
        aux = {f"preferences/{name}": share * reduce.scalars(x, counts) for name, x in terms.aux.items()}
        return value, aux | {
            "preferences/loss": weight * value,
            "preferences/kept": step.kept_share,
            "tokens/trained": tokens,
        }

    return loss


# the plan


def make_remember(every: int, part: str = "") -> Callable[..., dict[str, Any]] | None:
    """The ``remember`` slot: the policy becomes the reference every so many steps."""
    if not every:
        return None

    def remember(state, batch, trajectories, rewards):
        now = state.step % every == 0
        current = trained_part(state.params, part)
        kept = jax.tree.map(lambda new, old: jnp.where(now, new, old), current, referred(state.extras))
        return state.extras | Referred(kept)._asdict()

    return remember


def build(settings: Settings) -> Plan:
    """One online stage on the host: responses, rewards, preferences of them, one update."""
    method = method_of(settings)
    found, measure = with_reward(settings, recipes.bench(settings))
    settings = in_epochs(settings, found.train.tokens.shape[0], settings.prompts_per_step)
    second = judged(settings, found, own_reward(settings.judge, "--judge"))[2] if settings.judge else None
    policy, size = found.model.policy, settings.group_size
    part = lora_state.PART if settings.lora else ""

    def nothing(trajectories, rewards):
        return jnp.zeros(trajectories.mask.shape, jnp.float32)

    def of_rows(extras, trajectories, rewards):
        kept = kept_rows(method, settings, rewards)
        tokens = jnp.sum((trajectories.mask & (kept & rewards.valid)[:, None]).astype(jnp.float32))
        terms = jnp.sum(kept.astype(jnp.float32)) if "levels" in method.wanted else counted(method, size, kept)
        step = Preferred(jnp.mean(kept.astype(jnp.float32)), tokens, terms)
        step = jax.tree.map(lambda x: jnp.broadcast_to(x, rewards.value.shape), step)
        more = Rated(rewards.value)._asdict() | step._asdict()
        if method.kind == "chances":
            won = win_chances(rewards.value, rewards.valid, size, method.partner, settings.sharpness)
            more |= Winning(won)._asdict()
        if second is not None:
            opinion = second({}, trajectories)
            more |= Judged(opinion.value, opinion.valid)._asdict()
        return more

    estimated = make_estimate(
        policy, nothing, temperature=settings.temperature, reference=referred,
        keep=lambda trajectories, rewards: kept_rows(method, settings, rewards), row_extras=of_rows,
    )  # fmt: skip

    def estimate(params, extras, trajectories, rewards):
        kept = kept_rows(method, settings, rewards)
        seen = with_whole_reference(params, extras, part)
        return estimated(params, seen, trajectories, rewards)._replace(total=counted(method, size, kept))

    online = recipes.make_online(
        settings,
        found,
        estimate=estimate,
        loss=make_loss(settings, method, policy, found.model.params),
        tx=adamw(settings, settings.steps),
        rollout=paired_rollout(settings, found, method.partner),
        actor=lambda state: {POLICY: state.params, REFERENCE: reference_of(state.params, state.extras, part)},
        remember=make_remember(settings.new_reference, part),
        max_grad_norm=settings.max_grad_norm or None,
        whole_batch=WHOLE if method.kind == "single" or "levels" in method.wanted else "",
    )

    def extras(params, key):
        return keep_reference(trained_part(params, part), key)

    plan = recipes.one_stage(settings, found, online, extras=extras)
    return plan._replace(on_host=True, measure=measure or plan.measure)


def claim(results):  # a job claims nothing, and says so by having no text
    return open_claim("")
