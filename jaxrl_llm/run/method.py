"""The method of the training job by flags: any public loss, estimator, reduction, KL and correction of the library."""

import dataclasses
import functools
import math
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxrl_llm import advantages, losses, reduce
from jaxrl_llm.advantages import group
from jaxrl_llm.distributed import hosts
from jaxrl_llm.errors import UserError
from jaxrl_llm.losses import clipped_policy_loss, mismatch_ratio
from jaxrl_llm.rewards.shaping import overlong_penalty
from jaxrl_llm.run import flags, named, parts
from jaxrl_llm.train.methods.builders import (
    Collided,
    Diverged,
    Rewarded,
    current_anchor,
    mismatch_weights,
    reference_kl,
    stored_anchor,
)
from jaxrl_llm.types import Batch, Rewards, TokenTerms, TrainState, Trajectories, declared
from jaxrl_llm.verifiers.verdict import Verdict, Verifier

LOSS = ("logp", "old_logp", "advantages", "mask")  # what a loss of the job may take
# and what only some of them do; noise is drawn anew at every step, values of prompts once before the first
OF_BATCH = ("ref_logp", "rewards", "group_ids", "entropy", "sampler_logp", "noise", "optimal_values")
ESTIMATOR = (
    "rewards", "group_ids", "mask", "tokens", "length_tokens", "valid", "logp", "collision", "greedy_rewards",
    "token_kl", "earlier", "reward_parts", "reward_weights",
)  # fmt: skip
CORRECTION = ("ratio", "logp", "old_logp", "sampler_logp", "advantages", "mask", "weights", "group_ids")
KL = ("logp", "old_logp", "ref_logp", "mask")
CLIPS = ("clip_low", "clip_high")  # flags of clipped_policy_loss
OF_RESPONSE = ("rewards", "group_ids", "length_tokens", "valid", "greedy_rewards", "optimal_values")  # not of a token
NO_SLOPE = (
    "it is a value to log; a term of a loss needs a gradient: choose k3_gradient_terms, k1_gradient_terms, "
    "corrected_k3_gradient_terms or kl_gradient_terms"
)
KINDS = {"group_ids": jnp.int32, "tokens": jnp.int32, "mask": jnp.bool_, "valid": jnp.bool_}  # the others: float32


@dataclasses.dataclass(frozen=True)
class MethodSettings:
    """What a step computes: GRPO with clip-higher and a token mean by default."""

    loss: str = "clipped_policy_loss"  # a function of jaxrl_llm.losses, or MODULE:FUNCTION
    loss_args: tuple[str, ...] = ()  # its settings, for example cap=5.0; of clipped_policy_loss also --clip-low, -high
    clip_low: float = 0.2  # of clipped_policy_loss: ratios between 1 - clip_low and 1 + clip_high have a gradient
    clip_high: float = 0.28
    advantages: str = "group_normalized_advantages"  # a function of jaxrl_llm.advantages, or MODULE:FUNCTION
    advantage_args: tuple[str, ...] = ()  # its settings, for example k=4
    # of a loss that takes optimal_values (a_star_po_loss): responses of the loaded model to every training prompt,
    # before the first step
    value_samples: int = 8
    value_beta: float = 0.5  # the temperature b of the values V = b log mean exp(r / b) of their rewards
    reduction: Literal["token_mean", "seq_mean", "seq_sum", "constant"] = "token_mean"  # see reduce.tokens
    kl: str = ""  # k1_, k3_, corrected_k3_, or kl_gradient_terms: a term with a gradient, to the model that was loaded
    kl_weight: float = 0.0
    # nats a token from the model that was loaded: --kl-weight grows while there are more, by at most a fifth in
    # kl_horizon updates, and shrinks while there are fewer; 0: it stays as it is
    kl_target: float = 0.0
    kl_horizon: int = 10  # updates in which --kl-weight moves by at most a fifth, with --kl-target
    entropy_weight: float = 0.0  # of a bonus for the entropy of every token
    # nats a token: the bonus is paid at and below it alone, its weight goes a step up for every update there and a step
    # down above; 0: it is always paid, by --entropy-weight
    entropy_target: float = 0.0
    entropy_step: float = 0.005  # of the weight of the bonus at every update, with --entropy-target
    # of tokens by the sampler's log-probs: truncated_weights, masked_weights, rejection_mask ... Without one, and with
    # --loop async and a --staleness, the ratio of the loss is to the sampler
    correction: str = ""
    correction_args: tuple[str, ...] = ()  # its settings, for example cap=5.0
    inner_epochs: int = 1  # updates on every rollout; old log-probs are then scored before the first
    # responses cut at --max-new-tokens: train as they are, leave the loss, or lose reward in the last overlong_buffer
    overlong: Literal["train", "mask", "penalty"] = "train"
    overlong_buffer: int = 0  # tokens
    # in place of the verifier: MODULE:FUNCTION of (answer, response) to a number or a Verdict, or None where it does
    # not apply, or the folder of a reward model (of jaxrl reward-model, or a sequence classifier); of several the
    # weighted sum is the reward, each is a figure, and gdpo_advantages normalises them apart
    reward: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] = ()  # of several; none: 1 each
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # of the learning rate, behind the warm-up
    warmup_steps: int = 10  # at most half of the steps
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # of the whole step's gradient; 0: no bound


def check(settings: MethodSettings, max_new_tokens: int) -> None:
    """Refuses numbers out of range and flags that contradict each other.

    Raises:
      UserError: naming the flag and the remedy.
    """
    if settings.inner_epochs < 1:
        raise UserError(f"--inner-epochs {settings.inner_epochs} must be at least 1")
    for name in ("kl_weight", "kl_target", "entropy_weight", "entropy_target", "weight_decay", "max_grad_norm",
                 "warmup_steps"):  # fmt: skip
        flags.check_amount(name, getattr(settings, name))
    if bool(settings.kl) != (settings.kl_weight != 0):
        raise UserError(f"--kl {settings.kl or 'none'} with --kl-weight {settings.kl_weight}: give both, or neither")
    if settings.kl_target and not settings.kl:
        raise UserError(f"--kl-target {settings.kl_target} moves the weight of a KL: give --kl and --kl-weight with it")
    if settings.kl_horizon < 1 or not 0 < settings.entropy_step < math.inf:
        raise UserError(f"--kl-horizon {settings.kl_horizon} must be at least 1, and --entropy-step "
                        f"{settings.entropy_step} positive and finite")  # fmt: skip
    if settings.kl and not settings.kl.endswith("gradient_terms") and ":" not in settings.kl:
        raise UserError(f"--kl {settings.kl}: {NO_SLOPE}")
    if (settings.overlong == "penalty") != (settings.overlong_buffer > 0):
        raise UserError(f"--overlong {settings.overlong} with --overlong-buffer {settings.overlong_buffer}: a penalty "
                        "needs a buffer of tokens, and nothing else has one")  # fmt: skip
    if settings.overlong_buffer > max_new_tokens:
        raise UserError(f"--overlong-buffer {settings.overlong_buffer} exceeds --max-new-tokens {max_new_tokens}")
    if settings.weight_decay and getattr(settings, "optimiser", "adam") == "muon":
        raise UserError(f"--weight-decay {settings.weight_decay} is of --optimiser adam; drop one of them")
    for make in (policy_loss, estimator, correction, kl_terms):
        make(settings)
    check_kinds(settings)
    check_drawn(settings)
    check_judged(settings)
    own_rewards(settings)


def check_kinds(settings: MethodSettings) -> None:
    """Raises UserError for functions of another kind than their flag asks for: they are tried on two groups of two."""
    rows, columns = 4, 6
    tokens, either = {(rows, columns)}, {(rows, columns), (rows,)}
    cases = [("loss", policy_loss(settings), set()), ("advantages", _estimator(settings), either)]
    cases += [("correction", _correction(settings), tokens)] if settings.correction else []
    cases += [("kl", _kl(settings), tokens)] if settings.kl else []
    for name, (function, wanted), allowed in cases:
        flag = f"--{name} {getattr(settings, name)}"
        if "earlier" in wanted:  # what it keeps between steps is made with the state
            continue
        to_go = {"rewards"} if "collision" in wanted else set()  # what weighs tokens by their energy sums them to go
        each = max(2, len(settings.reward))
        several = {"reward_parts": (rows, each), "reward_weights": (each,)}
        several |= dict.fromkeys(set(OF_RESPONSE) - to_go, (rows,))
        shapes = [several.get(x, (rows, columns)) for x in wanted]
        given = [jax.ShapeDtypeStruct(s, KINDS.get(x, jnp.float32)) for x, s in zip(wanted, shapes, strict=True)]
        found = named.tried(function, given, flag)
        if not allowed:
            named.of_kind(found, TokenTerms, flag, (rows, columns))
        elif getattr(found, "shape", None) not in allowed:
            raise UserError(f"{flag}: gives {getattr(found, 'shape', type(found).__name__)} for {rows} responses of "
                            f"{columns} tokens, not a number for each token; choose another")  # fmt: skip


def check_computed(settings: MethodSettings) -> None:
    """Raises UserError for what is found by computing alone, which several processes may not do before they meet."""
    if ":" in settings.kl and _is_flat(*_kl(settings), (4, 6)):
        raise UserError(f"--kl {settings.kl}: {NO_SLOPE}")
    name, again = settings.advantages, getattr(settings, "resume", "")  # a run goes on as it began
    if getattr(settings, "filter_groups", False) and not again and ":" not in name and learns_from_equals(settings):
        raise UserError(f"--advantages {name} learns from groups of equal rewards, too; give --no-filter-groups")


def _is_flat(function: Callable[..., Any], wanted: Sequence[str], shape: tuple[int, int]) -> bool:
    """Whether a function of a batch's arrays has no gradient at log-probabilities drawn at random."""
    drawn = {name: -jnp.abs(jax.random.normal(jax.random.key(i), shape)) for i, name in enumerate(wanted)}
    drawn |= {"mask": jnp.ones(shape, bool)}

    def total(logp: Array) -> Array:
        return jnp.sum(function(*((drawn | {"logp": logp})[name] for name in wanted)))

    return not np.any(np.asarray(jax.grad(total)(-jnp.ones(shape))))


def check_unread(settings: MethodSettings) -> None:
    """Raises UserError for a flag that nothing reads beside the others, where it has not its default."""
    if named.find(losses, settings.loss, "--loss") is not clipped_policy_loss:
        flags.check_default(
            settings, CLIPS,
            "is of --loss clipped_policy_loss: what another loss has of it is one of its --loss-args",
        )  # fmt: skip
    for name in _named(settings.loss_args) & set(CLIPS):
        flags.check_default(settings, (name,), f"and --loss-args {name} are the same bound: give it once")
    for name, needs in (
        ("correction_args", "correction"),
        ("kl_horizon", "kl_target"),
        ("entropy_step", "entropy_target"),
    ):
        if not getattr(settings, needs):
            flags.check_default(settings, (name,), f"belongs to {flags.spell(needs)}: give it")
    if not needs_optimal_values(settings):
        flags.check_default(
            settings, ("value_samples", "value_beta"),
            "belongs to a --loss that takes optimal_values: give a_star_po_loss",
        )  # fmt: skip


def check_drawn(settings: MethodSettings) -> None:
    """Raises UserError where what a loss or an estimator asks of the responses does not go with other settings."""
    if settings.value_samples < 1 or not 0 < settings.value_beta < math.inf:
        raise UserError(f"--value-samples {settings.value_samples} must be at least 1, and --value-beta "
                        f"{settings.value_beta} positive and finite")  # fmt: skip
    if needs_optimal_values(settings) and getattr(settings, "filter_groups", False):
        raise UserError(f"--loss {settings.loss} learns from groups of equal rewards, too, by the values of their "
                        "prompts; give --no-filter-groups")  # fmt: skip
    if needs_greedy(settings) and getattr(settings, "strict", False):
        raise UserError(f"--advantages {settings.advantages} takes a response of each group greedily, and --strict "
                        "samples all alike; drop one of them")  # fmt: skip
    if "reward_parts" in _estimator(settings)[1] and len(settings.reward) < 2:
        raise UserError(f"--advantages {settings.advantages} normalises several rewards apart: give two or more "
                        "functions to --reward")  # fmt: skip


def check_combined(settings: MethodSettings) -> None:
    """Raises UserError for functions whose arrays fit and which are none of a kind, or lose what they are for.

    Functions of one's own are what their author says.
    """
    wanted = policy_loss(settings)[1]
    if ":" not in settings.loss and not {"advantages", "rewards"} & set(wanted):
        raise UserError(f"--loss {settings.loss} takes {', '.join(wanted)}, and learns from no reward; responses of a "
                        "file are learned by jaxrl sft")  # fmt: skip
    name, flag = settings.advantages, f"--advantages {settings.advantages}"
    if ":" not in name and not name.endswith(("_advantages", "branch_differences")):
        raise UserError(f"{flag} is no estimator of advantages; choose one whose name ends in _advantages")
    if getattr(settings, "filter_groups", False) and name == "gpg_advantages":
        raise UserError(f"{flag} makes up for groups of equal rewards itself; give --no-filter-groups")
    if settings.correction and ":" not in settings.correction:
        taken = _correction(settings)[1]
        if not {"ratio", "weights", "sampler_logp"} & set(taken):
            raise UserError(f"--correction {settings.correction} takes {', '.join(taken)}, nothing of what the sampler "
                            "said; choose truncated_weights, masked_weights, rejection_mask ...")  # fmt: skip
    if needs_optimal_values(settings) and settings.overlong == "penalty":
        raise UserError(f"--overlong penalty is not in the values of prompts, which --loss {settings.loss} takes; drop "
                        "one of them")  # fmt: skip


def learns_from_equals(settings: MethodSettings) -> bool:
    """Whether the estimator gives tokens of a group of equal rewards an advantage."""
    if settings.advantages == MethodSettings.advantages:
        return False
    function, wanted = _estimator(settings)
    if {"earlier", "token_kl", "reward_parts"} & set(wanted):
        return True
    if "greedy_rewards" in wanted:  # one of the group's own, whose reward differs or does not
        return False
    given = _drawn(wanted) | {"rewards": jnp.asarray([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])}
    if "collision" in wanted:
        given["rewards"] = advantages.at_last_token(given["rewards"], given["mask"])
    return bool(np.any(np.abs(np.asarray(_called(function, wanted, given))) > 1e-6))


def _named(words: Sequence[str]) -> set[str]:
    """The settings that ``name=value`` words give."""
    return {word.partition("=")[0] for word in words}


def policy_loss(settings: MethodSettings) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The loss of the flags, and the arrays that it takes in their order."""
    found = named.find(losses, settings.loss, "--loss")
    function = named.with_settings(found, settings.loss_args, "--loss-args", losses)
    if found is clipped_policy_loss:  # its other settings leave the bounds of the flags as they are
        bounds = {name: getattr(settings, name) for name in CLIPS if name not in _named(settings.loss_args)}
        return partial(function, **bounds), LOSS
    wanted = named.check_arrays(function, (*LOSS, *OF_BATCH), f"--loss {settings.loss}")
    if "logp" not in wanted:
        raise UserError(f"--loss {settings.loss} takes {', '.join(wanted)}, no logp: it is no loss of a policy")
    return function, wanted


def is_stale(settings: Any) -> bool:
    """Whether the weights that sampled may be older than those that an update begins with."""
    return getattr(settings, "loop", "host") == "async" and settings.staleness > 0


def to_sampler(settings: Any) -> bool:
    """Whether the ratio of the loss is to the sampler: it is older, and neither a correction nor the loss says so."""
    return is_stale(settings) and not settings.correction and "sampler_logp" not in policy_loss(settings)[1]


def rescores(settings: Any) -> bool:
    """Whether a pass before several updates finds the log-probabilities to which their ratio is."""
    return settings.inner_epochs > 1 and not to_sampler(settings)


def anchor(settings: Any) -> Callable[[Array, Batch], Array]:
    """Where ``old_logp`` comes from; the only update on samples of its own weights has a ratio of exactly 1."""
    return stored_anchor if settings.inner_epochs > 1 or to_sampler(settings) else current_anchor


def token_loss(
    settings: MethodSettings, anchor: Callable[[Array, Batch], Array]
) -> Callable[[Array, Array, Batch], TokenTerms]:
    """``(logp, entropy, batch) -> TokenTerms``, the ``terms_of`` of ``builders.make_batch_loss``.

    Args:
      anchor: where ``old_logp`` comes from.
    """
    function, wanted = policy_loss(settings)

    def terms(logp: Array, entropy: Array, batch: Batch) -> TokenTerms:
        offered = {
            "logp": logp, "old_logp": anchor(logp, batch), "advantages": batch.advantages, "mask": batch.mask,
            "ref_logp": batch.ref_logp, "group_ids": batch.group_ids, "entropy": entropy,
            "sampler_logp": batch.sampler_logp,
        }  # fmt: skip
        for name, kind in OF_ROWS.items():
            if name in wanted:
                offered |= declared(kind, batch.extras)._asdict()
        return function(*(offered[name] for name in wanted))

    return terms


def needs_reference(settings: MethodSettings) -> bool:
    """Whether the model that was loaded is asked for its log-probabilities."""
    asked = "ref_logp" in policy_loss(settings)[1] or "token_kl" in _estimator(settings)[1]
    return bool(settings.kl) or asked


def beside_rows(settings: MethodSettings) -> str:
    """What the estimator asks for that does not lie in the rows of a rollout; empty where there is nothing."""
    kinds = (*Collided._fields, *Diverged._fields, *Earlier._fields, "greedy_rewards", "reward_parts")
    return ", ".join(name for name in _estimator(settings)[1] if name in kinds)


def needs_greedy(settings: Any) -> bool:
    """Whether the last response of every group is the greedy one: the baseline of the others, which trains nothing."""
    return "greedy_rewards" in _estimator(settings)[1]


def needs_optimal_values(settings: MethodSettings) -> bool:
    """Whether the loss asks for the value of every prompt, see ``optimal_values``."""
    return "optimal_values" in policy_loss(settings)[1]


def optimal_values(settings: MethodSettings, value: np.ndarray, valid: np.ndarray) -> Array:
    """``V = b log mean exp(r / b)`` of the rewards ``[N, samples]`` of every prompt under the loaded model: ``[N]``.

    0 for a prompt without a valid reward. From "Accelerating RL for LLM Reasoning with Optimal Advantage Regression",
    arXiv:2505.20686, eq. 3.
    """
    prompts, samples = value.shape
    ids = jnp.repeat(jnp.arange(prompts, dtype=jnp.int32), samples)
    found = advantages.log_mean_exp_baseline(
        jnp.asarray(value, jnp.float32).reshape(-1), ids, tau=settings.value_beta, valid=jnp.asarray(valid).reshape(-1)
    )
    return found[::samples]


def needs_collision(settings: MethodSettings) -> bool:
    """Whether the estimator asks for the chance that two draws of a token agree, which costs a pass."""
    return bool({"logp", "collision"} & set(_estimator(settings)[1]))


def needs_statistics(settings: MethodSettings) -> bool:
    """Whether the estimator asks for the rewards of every prompt at earlier steps (``advantages.RewardStatistics``)."""
    return "earlier" in _estimator(settings)[1]


class SoFar(NamedTuple):
    """Extras of a state: the rewards of every training problem up to now, ``[N]`` each."""

    rewards_so_far: group.RewardStatistics


class Earlier(NamedTuple):
    """Extras of a rollout that its estimator sees: the rewards of each row's prompt before this step."""

    earlier: group.RewardStatistics


def _earlier(extras: dict[str, Any], trajectories: Trajectories) -> group.RewardStatistics:
    return jax.tree.map(lambda x: x[trajectories.problem_ids], declared(SoFar, extras).rewards_so_far)


def shown(settings: MethodSettings) -> Callable[[dict[str, Any], Trajectories], dict[str, Any]] | None:
    """``shows`` of ``builders.make_estimate``: what the estimator sees of the state; None where it sees nothing."""
    if not needs_statistics(settings):
        return None
    return lambda extras, trajectories: Earlier(_earlier(extras, trajectories))._asdict()


def statistics_after(
    settings: MethodSettings, extras: dict[str, Any], trajectories: Trajectories, rewards: Rewards
) -> dict[str, Any]:
    """``SoFar`` behind a step; prompts without a valid reward have not had it.

    Of a prompt that was drawn twice, where one epoch ends and the next begins, the later group counts.
    """
    function, _ = _estimator(settings)
    value, ids = shaped_rewards(settings, trajectories, rewards), trajectories.group_ids
    before = _earlier(extras, trajectories)
    _, now = function(value, ids, before, valid=rewards.valid)

    problems, rows = trajectories.problem_ids, jnp.arange(value.shape[0], dtype=jnp.int32)

    def put(kept: Array, new: Array) -> Array:
        # writing twice to one place leaves either value there on a GPU
        last = jax.ops.segment_max(rows, problems, num_segments=kept.shape[0])
        return jnp.where(last >= 0, new[jnp.maximum(last, 0)], kept)

    return SoFar(jax.tree.map(put, declared(SoFar, extras).rewards_so_far, now))._asdict()


class Noisy(NamedTuple):
    """Extras of a batch: uniform numbers of every token ``[B, T]``."""

    noise: Array


class Optimal(NamedTuple):
    """Extras of a state, of every training problem; of a batch, of the problem of each row: the best policy's value."""

    optimal_values: Array


OF_ROWS = {"rewards": Rewarded, "noise": Noisy, "optimal_values": Optimal}  # what a loss may ask of a row


class MovingKL(NamedTuple):
    """Extras of a state, and spread over the rows of a batch: the weight of a KL that follows its target."""

    kl_weight: Array


class MovingEntropy(NamedTuple):
    """Extras of a state: the weight of an entropy bonus that follows its target, and the entropy last seen."""

    entropy_weight: Array
    entropy: Array


class EntropyWeight(NamedTuple):
    """Extras of a batch: the weight that applies to each row."""

    entropy_weight: Array


def row_extras(settings: MethodSettings) -> Callable[[dict[str, Any], Trajectories, Rewards], dict[str, Array]]:
    """What a row of a batch carries beside its tokens: rewards for a loss that takes them, weights that move."""
    wanted = policy_loss(settings)[1]

    def of_rows(extras: dict[str, Any], trajectories: Trajectories, rewards: Rewards) -> dict[str, Array]:
        found = {}
        if "rewards" in wanted:
            paid = jnp.where(rewards.valid, shaped_rewards(settings, trajectories, rewards), 0.0)
            found |= Rewarded(paid)._asdict()
        if "noise" in wanted:
            found |= Noisy(token_noise(trajectories))._asdict()
        if "optimal_values" in wanted:
            found |= Optimal(declared(Optimal, extras).optimal_values[trajectories.problem_ids])._asdict()
        if settings.kl_target:
            weight = declared(MovingKL, extras).kl_weight
            found |= MovingKL(jnp.broadcast_to(weight, rewards.value.shape))._asdict()
        if settings.entropy_target:
            weight, entropy = declared(MovingEntropy, extras)
            applied = losses.applied_entropy_coefficient(weight, entropy, target=settings.entropy_target)
            found |= EntropyWeight(jnp.broadcast_to(applied, rewards.value.shape))._asdict()
        return found

    return of_rows


def token_noise(trajectories: Trajectories) -> Array:
    """Uniform numbers in [0, 1) of every token ``[B, T]``; what was drawn at the step is the seed of its draw."""
    seed = jax.lax.bitcast_convert_type(
        jnp.sum(jnp.where(trajectories.mask, trajectories.sampler_logp, 0.0)), jnp.int32
    )
    return jax.random.uniform(jax.random.fold_in(jax.random.key(0), seed), trajectories.mask.shape)


def first_weights(settings: MethodSettings, problems: int = 0) -> dict[str, Any]:
    """The part of a state's extras that moves: weights, and statistics of so many problems, before the first update."""
    found: dict[str, Any] = MovingKL(jnp.float32(settings.kl_weight))._asdict() if settings.kl_target else {}
    if settings.entropy_target:
        found |= MovingEntropy(jnp.float32(settings.entropy_weight), jnp.float32(jnp.inf))._asdict()
    if needs_statistics(settings):
        found |= SoFar(group.RewardStatistics(*(jnp.zeros((problems,)) for _ in range(3))))._asdict()
    return found


def moved_weights(settings: MethodSettings) -> Callable[..., dict[str, Any]] | None:
    """The ``remember`` slot: weights after an update, by what its responses say of the policy that drew them.

    The divergence is the mean of ``losses.k3`` of their tokens, the entropy that of minus their log-probabilities.
    """
    if not first_weights(settings):
        return None

    def remember(state: TrainState, batch: Batch, trajectories: Trajectories, rewards: Rewards) -> dict[str, Any]:
        extras = dict(state.extras)
        if settings.kl_target:
            kl = reduce.tokens(losses.k3(batch.sampler_logp, batch.ref_logp, batch.mask), batch.mask)
            weight = declared(MovingKL, extras).kl_weight
            moved = losses.adapted_kl_coefficient(
                weight, kl, target=settings.kl_target, horizon=float(settings.kl_horizon)
            )
            extras |= MovingKL(jnp.where(jnp.any(batch.mask), moved, weight))._asdict()
        if settings.entropy_target:
            mask = trajectories.mask
            if needs_greedy(settings):  # whose tokens were not drawn
                mask = mask & ~last_of_groups(trajectories.group_ids)[:, None]
            entropy = reduce.tokens(losses.sampled_entropy(trajectories.sampler_logp, mask), mask)
            moved = losses.adapted_entropy_coefficient(
                declared(MovingEntropy, extras).entropy_weight, entropy, target=settings.entropy_target,
                step=settings.entropy_step,
            )  # fmt: skip
            extras |= MovingEntropy(moved, entropy)._asdict()
        if needs_statistics(settings):
            extras |= statistics_after(settings, extras, trajectories, rewards)
        return extras

    return remember


def shaped_rewards(settings: Any, trajectories: Trajectories, rewards: Rewards) -> Array:
    """The rewards, less the penalty of responses that come close to the limit where there is one."""
    if settings.overlong != "penalty":
        return rewards.value
    length = jnp.sum(trajectories.mask.astype(jnp.int32), axis=1)
    limit, buffer = settings.max_new_tokens, settings.overlong_buffer
    return rewards.value + overlong_penalty(length, limit_tokens=limit, buffer_tokens=buffer)


def separate_rewards(settings: Any, rewards: Rewards, value: Array) -> tuple[Array, Array]:
    """The rewards of ``--reward`` in their order ``[B, K]`` and their weights ``[K]``.

    A penalty in ``value`` (``shaped_rewards``) is one more of weight 1.
    """
    names = reward_names(settings.reward)
    columns, weights = [(rewards.parts or {})[name] for name in names], list(_weights(settings))
    if settings.overlong == "penalty":
        columns, weights = [*columns, value - rewards.value], [*weights, 1.0]
    return jnp.stack(columns, axis=1), jnp.asarray(weights, jnp.float32)


def _estimator(settings: Any) -> tuple[Callable[..., Any], tuple[str, ...]]:
    function = named.find(advantages, settings.advantages, "--advantages")
    function = named.with_settings(function, settings.advantage_args, "--advantage-args", advantages)
    return function, named.check_arrays(function, ESTIMATOR, f"--advantages {settings.advantages}")


def estimator(settings: Any) -> Callable[[Trajectories, Rewards], Array]:
    """``(trajectories, rewards) -> [B, T]``: the advantages of every token."""
    function, wanted = _estimator(settings)
    takes_valid = "valid" in named.settings(function)

    def values(trajectories: Trajectories, rewards: Rewards) -> Array:
        mask = trajectories.mask
        length = jnp.sum(mask.astype(jnp.int32), axis=1)
        value = shaped_rewards(settings, trajectories, rewards)
        offered = {
            # what weighs tokens by their energy sums rewards to go
            "rewards": advantages.at_last_token(value, mask) if "collision" in wanted else value,
            "group_ids": trajectories.group_ids,
            "mask": mask,
            "tokens": trajectories.tokens,
            "length_tokens": length.astype(jnp.float32),
            "valid": rewards.valid,
        }
        if "reward_parts" in wanted:
            offered["reward_parts"], offered["reward_weights"] = separate_rewards(settings, rewards, value)
        for kind in (Collided, Diverged, Earlier):
            if set(kind._fields) & set(wanted):
                offered |= declared(kind, trajectories.extras)._asdict()
        valid = rewards.valid
        if "greedy_rewards" in wanted:
            offered["greedy_rewards"], there = greedy_rewards(value, valid, trajectories.group_ids)
            valid = valid & there
        more = {"valid": valid} if takes_valid else {}
        found = function(*(offered[name] for name in wanted), **more)
        found = found[0] if "earlier" in wanted else found  # the other is what ``statistics_after`` keeps
        if found.ndim == 2:
            return found
        return group.per_token(found, mask)

    return values


def last_of_groups(group_ids: Array) -> Array:
    """Which rows are the last of their group ``[B]``; the members of a group lie side by side.

    >>> import jax.numpy as jnp
    >>> last_of_groups(jnp.array([0, 0, 2, 2])).tolist()
    [False, True, False, True]
    """
    return jnp.concatenate([group_ids[1:] != group_ids[:-1], jnp.ones((1,), bool)])


def greedy_rewards(value: Array, valid: Array, group_ids: Array) -> tuple[Array, Array]:
    """The reward of the greedy response to each row's prompt ``[B]``, and whether it has a valid one."""
    usable = last_of_groups(group_ids) & valid
    return group.group_sum(jnp.where(usable, value, 0.0), group_ids), group.group_sum(
        usable.astype(jnp.float32), group_ids
    ) > 0


def keep(settings: Any, spread: Callable[..., Array] | None) -> Callable[[Trajectories, Rewards], Array] | None:
    """Rows that enter the loss: of ``spread``, none that is greedy, and with ``--overlong mask`` none that was cut."""
    cut, greedy = settings.overlong == "mask", needs_greedy(settings)
    if not cut and not greedy:
        return spread

    def whole(trajectories: Trajectories, rewards: Rewards) -> Array:
        kept = ~trajectories.truncated if cut else jnp.ones(trajectories.truncated.shape, bool)
        if greedy:
            kept = kept & ~last_of_groups(trajectories.group_ids)
        return kept if spread is None else kept & spread(trajectories, rewards)

    return whole


def _correction(settings: Any) -> tuple[Callable[..., Any], tuple[str, ...]]:
    function = named.with_settings(
        named.find(losses, settings.correction, "--correction"), settings.correction_args, "--correction-args", losses
    )
    return function, named.check_arrays(function, CORRECTION, f"--correction {settings.correction}")


def _drawn(wanted: Sequence[str], columns: int = 32) -> dict[str, Array]:
    """Arrays of four groups of two responses to try a function with; all tokens of a response have one advantage."""
    rows = 8
    noise = {name: jax.random.normal(jax.random.key(k), (rows, columns)) for k, name in enumerate(sorted(wanted))}
    logp = -jnp.abs(jax.random.normal(jax.random.key(100), (rows, columns)))
    found = {name: x[:, 0] if name in OF_RESPONSE else jnp.exp(0.5 * x) for name, x in noise.items()}
    found |= {name: -jnp.abs(logp + 0.3 * x) for name, x in noise.items() if name.endswith("logp")}
    # little good in the first two groups and little bad in the others: what weighs one against the other sees it
    signs = jnp.asarray([-8.0, 1.0, -8.0, 1.0, 8.0, -1.0, 8.0, -1.0])[:, None]
    each = signs + 0.3 * jax.random.normal(jax.random.key(101), (rows, 1))
    found |= {"advantages": jnp.broadcast_to(each, (rows, columns))}
    found |= {"noise": jax.random.uniform(jax.random.key(102), (rows, columns))}
    found |= {"group_ids": jnp.arange(rows, dtype=jnp.int32) // 2, "mask": jnp.ones((rows, columns), bool)}
    tokens = jax.random.randint(jax.random.key(103), (rows, columns), 0, 1000, jnp.int32)
    return found | {"tokens": tokens, "length_tokens": jnp.full((rows,), float(columns)), "valid": jnp.ones(rows, bool)}


def _called(function: Callable[..., Any], wanted: Sequence[str], given: dict[str, Array]) -> Any:
    return jax.jit(lambda arrays: function(*(arrays[name] for name in wanted)))(given)


def looks_at_all(function: Callable[..., Any], wanted: Sequence[str]) -> bool:
    """Whether what a function makes of some groups changes with the others of the batch, whose parts do not add up."""
    given = _drawn(wanted)
    half = given["mask"].shape[0] // 2
    halves = [{name: x[part] for name, x in given.items()} for part in (slice(half), slice(half, None))]
    halves[1]["group_ids"] = halves[1]["group_ids"] - half // 2
    found = _called(function, wanted, given)
    parts = jax.tree.map(lambda *x: jnp.concatenate(x), *(_called(function, wanted, one) for one in halves))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(parts), strict=True)
    # other shapes round in another way, by far less
    return any(not np.allclose(np.float32(a), np.float32(b), rtol=1e-3, atol=1e-4) for a, b in pairs)


@functools.lru_cache(maxsize=16)
def whole_batch(settings: MethodSettings) -> str:
    """The flag whose function looks at all groups of a step at once; empty: none does."""
    if settings.loss != MethodSettings.loss and looks_at_all(*policy_loss(settings)):
        return f"--loss {settings.loss}"
    if settings.correction and looks_at_all(*_correction(settings)):
        return f"--correction {settings.correction}"
    return ""


def of_responses(settings: MethodSettings) -> bool:
    """Whether the loss has one term for a response, which stands at each of its tokens."""
    if settings.loss == MethodSettings.loss:
        return False
    function, wanted = policy_loss(settings)
    terms = np.asarray(_called(function, wanted, _drawn(wanted)).loss)
    return bool(np.allclose(terms, terms[:, :1], rtol=1e-4, atol=1e-6))


def is_reinforce(settings: MethodSettings) -> bool:
    """Whether the one update of a rollout has the gradient of REINFORCE: its ratios are 1, and no bound cuts them."""
    function, wanted = policy_loss(settings)
    if settings.inner_epochs > 1 or to_sampler(settings) or not {"old_logp", "advantages"} <= set(wanted):
        return False
    given = _drawn(wanted)
    given |= {"old_logp": given["logp"], "sampler_logp": given["logp"]}

    def total(logp: Array) -> Array:
        return jnp.sum(function(*((given | {"logp": logp})[name] for name in wanted)).loss)

    return bool(np.allclose(jax.jit(jax.grad(total))(given["logp"]), -given["advantages"], rtol=1e-4))


def told(settings: MethodSettings) -> list[str]:
    """What a run does that its flags do not show."""
    lines = []
    if flag := whole_batch(settings):
        parts = getattr(settings, "microbatches", 0)
        how = f"at those of each of --microbatches {parts} by itself" if parts > 1 else "which is trained in one part"
        lines.append(f"{flag} looks at all tokens of a step, {how}")
    if settings.reduction != "seq_mean" and of_responses(settings):
        lines.append(f"--loss {settings.loss} has one term for a response, which --reduction {settings.reduction} "
                     "counts once for each of its tokens; --reduction seq_mean counts it once")  # fmt: skip
    usual = MethodSettings()
    names = ("loss", "loss_args", "clip_low", "clip_high")  # whoever says nothing of ratios wants nothing of them
    if any(getattr(settings, x) != getattr(usual, x) for x in names) and is_reinforce(settings):
        lines.append(f"--loss {settings.loss} has the step of REINFORCE: the ratios of the only update on a rollout "
                     "are 1, which no bound cuts; --inner-epochs 2 makes more of them")  # fmt: skip
    if to_sampler(settings):
        lines.append("samples may be of older weights: the ratio of the loss is to the sampler")
    return lines


def compares_groups(settings: Any) -> str:
    """The flag whose function looks at all members of a group at once, which parts of a batch must then hold."""
    if "group_ids" in policy_loss(settings)[1]:
        return f"--loss {settings.loss}"
    if settings.correction and "group_ids" in _correction(settings)[1]:
        return f"--correction {settings.correction}"
    return ""


def correction(settings: Any) -> Callable[[Array, Array, Batch], Array] | None:
    """``token_weights`` of the loss: what the sampler's own log-probabilities say of each token."""
    several = settings.inner_epochs > 1
    if not settings.correction:
        counted = to_sampler(settings) or "sampler_logp" in policy_loss(settings)[1]  # by the loss itself
        rounded = getattr(settings, "rollout_weights", "") and not counted
        return mismatch_weights(several=several) if rounded else None
    function, wanted = _correction(settings)
    # weights that are shared out among the responses of a group, or of a batch, are those of whole responses
    whole = "group_ids" in wanted or getattr(function, "keywords", {}).get("level") == "sequence"
    level = "sequence" if whole else "token"

    def weights(logp: Array, entropy: Array, batch: Batch) -> Array:
        # of the policy that the sampler stands for: before the updates of this rollout
        old = batch.old_logp if several else jax.lax.stop_gradient(logp)
        ratio = mismatch_ratio(old, batch.sampler_logp, batch.mask, level=level)
        offered = {
            "ratio": ratio, "weights": ratio, "logp": logp, "old_logp": old, "sampler_logp": batch.sampler_logp,
            "advantages": batch.advantages, "mask": batch.mask, "group_ids": batch.group_ids,
        }  # fmt: skip
        return function(*(offered[name] for name in wanted)).astype(jnp.float32)

    return weights


def _kl(settings: Any) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The KL of the flags, and the arrays that it takes in their order."""
    function = named.find(losses, settings.kl, "--kl")
    return function, named.check_arrays(function, KL, f"--kl {settings.kl}")


def kl_terms(settings: Any) -> Callable[[Array, Array, Batch], Array] | None:
    """``extra_terms`` of the loss: a KL to the reference, with a gradient; None without one."""
    if not settings.kl:
        return None
    function, wanted = _kl(settings)

    def drew(logp: Array, batch: Batch) -> Array:
        """Of the policy that the tokens are from."""
        if is_stale(settings):
            return batch.sampler_logp
        return batch.old_logp if settings.inner_epochs > 1 else jax.lax.stop_gradient(logp)

    def terms(logp: Array, entropy: Array, batch: Batch) -> Array:
        old = drew(logp, batch)
        offered = {"logp": logp, "old_logp": old, "ref_logp": batch.ref_logp, "mask": batch.mask}
        weight = declared(MovingKL, batch.extras).kl_weight[:, None] if settings.kl_target else settings.kl_weight
        return weight * function(*(offered[name] for name in wanted))

    return terms


def extra_terms(settings: Any) -> Callable[[Array, Array, Batch], Array] | None:
    """``extra_terms`` of the loss: ``kl_terms`` and the bonus for entropy; None without either."""
    kl = kl_terms(settings)
    if not settings.entropy_weight and not settings.entropy_target:
        return kl

    def terms(logp: Array, entropy: Array, batch: Batch) -> Array:
        weight = settings.entropy_weight
        if settings.entropy_target:
            weight = declared(EntropyWeight, batch.extras).entropy_weight[:, None]
        bonus = weight * losses.entropy_bonus_terms(entropy, batch.mask)
        return bonus if kl is None else bonus + kl(logp, entropy, batch)

    return terms


def diagnostics(settings: Any) -> Callable[[Array, Array, Batch], dict[str, Array]] | None:
    """``diagnostics`` of the loss: weights that move, as ``kl/weight`` and ``entropy/weight``.

    With a reference the divergence from it too, ``kl/ref``, whatever term is in the loss.
    """
    kinds = {"kl": MovingKL, "entropy": EntropyWeight}
    moving = {name: kind for name, kind in kinds.items() if getattr(settings, f"{name}_target")}
    referred = needs_reference(settings)

    def figures(logp: Array, entropy: Array, batch: Batch) -> dict[str, Array]:
        weights = {name: declared(kind, batch.extras)[0] for name, kind in moving.items()}
        found = {f"{name}/weight": jnp.where(batch.mask, x[:, None], 0.0) for name, x in weights.items()}
        return found | (reference_kl(logp, entropy, batch) if referred else {})

    return figures if moving or referred else None


def learning_rate(settings: Any, steps: int) -> optax.Schedule:
    """A short warm-up, then the schedule over ``steps`` steps: the last steps average out the noise of the batches."""
    warmup = min(settings.warmup_steps, steps // 2)
    if settings.schedule == "cosine":
        return optax.schedules.warmup_cosine_decay_schedule(0.0, settings.learning_rate, warmup, steps + 1)
    if settings.schedule == "linear":
        after = optax.linear_schedule(settings.learning_rate, 0.0, max(1, steps + 1 - warmup))
    else:
        after = optax.constant_schedule(settings.learning_rate)
    return optax.join_schedules([optax.linear_schedule(0.0, settings.learning_rate, warmup), after], [warmup])


def adam(settings: Any, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Adam, with decay of the weights where it is asked for."""
    if settings.weight_decay:
        return optax.adamw(schedule, 0.9, 0.99, weight_decay=settings.weight_decay)
    return optax.adam(schedule, 0.9, 0.99)


def adamw(settings: Any, steps: int) -> optax.GradientTransformation:
    """AdamW with its usual betas over ``steps`` updates: what fine-tuning jobs and peers' trainers begin with."""
    return optax.adamw(learning_rate(settings, steps), weight_decay=settings.weight_decay)


def in_epochs(settings: Any, rows: int, each: int) -> Any:
    """The settings with the ``steps`` that ``epochs`` passes over so many rows take, ``each`` of them a step.

    The last step of the last pass is filled up from the next one. Settings without ``epochs`` stay as they are.
    """
    if not settings.epochs:
        return settings
    steps = math.ceil(settings.epochs * rows / each)
    hosts.say(f"--epochs {settings.epochs:g} of {rows:,} rows, {each} a step: {steps:,} steps")
    return dataclasses.replace(settings, steps=steps)


def own_reward(name: str, flag: str = "--reward") -> Verifier:
    """``MODULE:FUNCTION`` of ``(answer, response)`` as a verifier: a number is a valid reward, None is no reward.

    ``answer`` has what the verifiers of the library find there (``value``), and all that is known of the problem
    (``data.problem.all_known``): ``prompt``, ``solution``, ``level`` and ``row``, the other columns of a file.

    Raises:
      UserError: where there is no such function.
    """
    if ":" not in name:
        folder = " and no folder of a reward model" if flag == "--reward" else ""
        raise UserError(f"{flag} {name} is no MODULE:FUNCTION{folder}; a verifier by name is --verifier")
    function = named.find(losses, name, flag)

    def judged(answer: Any, response: str) -> Verdict | None:
        found = function(answer, response)
        return found if found is None or isinstance(found, Verdict) else Verdict(float(found), True, name)

    def verify(answer: Any, response: str) -> Verdict:
        return judged(answer, response) or Verdict(0.0, False, f"{name} does not apply")

    verify.judged = judged  # None where it does not apply, for ``own_rewards``
    verify.__wrapped__ = function  # whose name an error says
    return verify


def is_model(reward: str) -> bool:
    """Whether a reward of ``--reward`` is the folder of a reward model."""
    return ":" not in reward and pathlib.Path(reward).is_dir()


def reward_names(rewards: Sequence[str]) -> tuple[str, ...]:
    """What figures call the rewards of ``--reward``: a function's name, a folder's last part, or all that is given.

    That is where two are equal, or one is the name of another figure (``reward/mean``).

    >>> reward_names(["mine:right", "mine:short"]), reward_names(["mine:score", "yours:score"])
    (('right', 'short'), ('mine:score', 'yours:score'))
    """
    short = tuple(pathlib.PurePath(name.rpartition(":")[2]).name for name in rewards)
    alone = len(set(short)) == len(short) and not {"mean", "valid_fraction"} & set(short)
    return short if alone else tuple(rewards)


def _weights(settings: Any) -> tuple[float, ...]:
    return settings.reward_weights or (1.0,) * len(settings.reward)


def _rated(name: str, reward: float) -> Verdict:
    unread = math.isnan(reward)
    return Verdict(0.0, False, f"{name}: beyond the context of the model") if unread else Verdict(reward, True, name)


def check_judged(settings: Any) -> None:
    """Raises UserError for rows without answers where nothing else judges, and for two that would judge."""
    if settings.reward and (verifier := getattr(settings, "verifier", "")):
        raise UserError(f"--reward {' '.join(settings.reward)} judges in place of --verifier {verifier}; drop one")
    if "prompts" in (getattr(settings, name, "") for name in ("format", "eval_format")) and not settings.reward:
        raise UserError(parts.NO_ANSWERS)


def own_rewards(settings: Any) -> Verifier | None:
    """The verifier of ``--reward``: of several rewards their sum by ``--reward-weights``; None without one.

    A verdict on several is valid where at least one applies and none that does is invalid. The verifier's ``parts`` are
    their names, its ``each`` gives ``(verdict, values)``, NaN where one does not apply; its ``models`` are the folders
    among them, whose rewards ``each`` takes by name, NaN where a model could not read a response.

    Raises:
      UserError: for a function that is not there, one that is named twice, or other weights than rewards.
    """
    names, weights = settings.reward, _weights(settings)
    if len(weights) != len(names) or (settings.reward_weights and len(names) < 2):
        raise UserError(f"--reward-weights {' '.join(f'{x:g}' for x in settings.reward_weights)}: {len(weights)} for "
                        f"{len(names)} rewards of --reward; give a weight for each of several")  # fmt: skip
    if not all(math.isfinite(x) for x in weights):
        raise UserError(f"--reward-weights {' '.join(map(str, weights))}: a weight is a finite number")
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"--reward {' '.join(sorted(twice))} stands twice; give it a weight instead")
    models = tuple(name for name in names if is_model(name))
    judges = [None if name in models else own_reward(name) for name in names]
    if len(judges) < 2 and not models:
        return judges[0] if judges else None

    def each(
        answer: Any, response: str, rated: Mapping[str, float] = types.MappingProxyType({})
    ) -> tuple[Verdict, tuple[float, ...]]:  # fmt: skip
        found = [
            _rated(name, rated[name]) if judge is None else judge.judged(answer, response)
            for name, judge in zip(names, judges, strict=True)
        ]
        applies = [one is not None for one in found]
        several = tuple(one.value if one is not None and one.valid else math.nan for one in found)
        failed = [
            one.reason or name for name, one in zip(names, found, strict=True) if one is not None and not one.valid
        ]
        if failed or not any(applies):
            return Verdict(0.0, False, "; ".join(failed) or "no reward applies"), several
        value = sum(w * x for w, x, there in zip(weights, several, applies, strict=True) if there)
        return Verdict(
            value, True, ", ".join(f"{n} {x:g}" for n, x in zip(verify.parts, several, strict=True))
        ), several

    def verify(answer: Any, response: str) -> Verdict:
        return each(answer, response)[0]

    verify.each = each
    verify.parts = reward_names(names)
    verify.models = models
    verify.__qualname__ = " + ".join(names)  # which an error says
    return verify
