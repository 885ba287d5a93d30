"""Judges of free answers: a large one that errs now and then, and generative ones that read and write token strings.

A generative verifier is a small decoder. It reads modulus, answer and reference digit by digit and writes its verdict,
at once or behind its work, the canonical form of both numbers. It is trained on the log of another judge, with a key of
the run's own: every seed has its own verifier.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from experiments.parts import strings
from experiments.reward_models.parts import free_answers
from jaxrl_llm.data.tasks import chain
from jaxrl_llm.experiment import curricula
from jaxrl_llm.experiment.recipes import OnlineSettings
from jaxrl_llm.train.methods import builders, episode_methods
from jaxrl_llm.train.plan import Stage
from jaxrl_llm.types import Batch, Key, Metrics, Params, declared

KINDS = 10  # token of the first modulus; digits are their own tokens
YES, NO, ODD = range(KINDS + len(chain.MODULI), KINDS + len(chain.MODULI) + 3)  # ODD is no verdict and cannot be read
VOCABULARY, PROMPT_TOKENS, WORK_TOKENS = ODD + 1, 5, 4
WORKED = strings.make_world(VOCABULARY, PROMPT_TOKENS, WORK_TOKENS + 1, width=48, layers=2, heads=3)
DIRECT = WORKED._replace(response_tokens=1)
SHOWN = 99  # the largest number that two digits show; larger ones are cut to it


class Log(NamedTuple):
    """What generative judges read and write.

    ``pairs(value, answers) -> [B, K]`` are an answer and its reference, of which ``question`` makes the prompt and
    ``work`` what is written before the verdict; ``draw(key, n, error_rate) -> (pairs, verdicts)`` is another judge's
    log. A verdict is one of three tokens, the last of which cannot be read.
    """

    worked: strings.World
    direct: strings.World
    verdicts: tuple[int, int, int]
    pairs: Callable[[Array, dict[str, Array]], Array]
    question: Callable[[Array], Array]
    work: Callable[[Array], Array]
    draw: Callable[..., tuple[Array, Array]]


class Verifier(NamedTuple):
    """``fit(key) -> net`` is called once a seed; ``judge(net, value, answered, answers) -> [B]`` in [0, 1].

    ``passes``, of the same arguments, tells what it says yes to; None: what ``judge`` gives more than a half.
    """

    fit: Callable[[Key], Params]
    judge: Callable[[Params, Array, Array, dict[str, Array]], Array]
    passes: Callable[[Params, Array, Array, dict[str, Array]], Array] | None = None


def without_fitting(judge: Callable[..., Array]) -> Verifier:
    """A rule, or the truth, as a verifier."""
    return Verifier(
        lambda key: {"none": jnp.zeros((1,), jnp.float32)}, lambda net, *rest: judge(*rest).astype(jnp.float32)
    )


def draw_judgements(key: Key, n: int, *, error_rate: float) -> tuple[Int[Array, "N 3"], Bool[Array, " N"]]:
    """``(answer, reference, modulus) [N, 3]`` of all qualities, and the verdicts of ``large_judge(error_rate)``.

    They are wrong on a fixed share of all pairs, so that who learns from them can learn where that judge errs.
    """
    keys = jax.random.split(key, 3)
    modulus = jnp.asarray(chain.MODULI, jnp.int32)[jax.random.randint(keys[0], (n,), 0, len(chain.MODULI))]
    numbers = jax.random.randint(keys[1], (n, 2), 0, 1 << 20, jnp.int32) % modulus[:, None]
    coins = jax.random.bernoulli(keys[2], 0.5, (3, n)).astype(jnp.int32)
    reference = numbers[:, 0] + modulus * coins[0]
    answer = jnp.where(coins[1] > 0, numbers[:, 0], numbers[:, 1]) + modulus * coins[2]
    truth = (answer - reference) % modulus == 0
    mixed = free_answers.marked(answer, {"reference": reference, "modulus": modulus})
    return jnp.stack([answer, reference, modulus], axis=1), truth ^ free_answers.mistaken(mixed, error_rate)


def _digits(numbers: Int[Array, " N"]) -> Int[Array, "N 2"]:
    shown = jnp.clip(numbers, 0, SHOWN)
    return jnp.stack([shown // 10, shown % 10], axis=1)


def question(pairs: Int[Array, "N 3"]) -> Int[Array, "N 5"]:
    """What the verifier reads: the modulus, the answer and the reference.

    >>> question(jnp.array([[13, 2, 11]])).tolist() == [[KINDS + 2, 1, 3, 0, 2]]
    True
    """
    kind = jnp.argmax(pairs[:, 2:] == jnp.asarray(chain.MODULI, jnp.int32)[None, :], axis=1).astype(jnp.int32)
    return jnp.concatenate([KINDS + kind[:, None], _digits(pairs[:, 0]), _digits(pairs[:, 1])], axis=1)


def work(pairs: Int[Array, "N 3"]) -> Int[Array, "N 4"]:
    """The canonical forms of answer and reference, two digits each.

    >>> work(jnp.array([[13, 2, 11]])).tolist()
    [[0, 2, 0, 2]]
    """
    return jnp.concatenate([_digits(pairs[:, k] % pairs[:, 2]) for k in (0, 1)], axis=1)


def _pairs(value: Array, answers: dict[str, Array]) -> Array:
    return jnp.stack([value, answers["reference"], answers["modulus"]], axis=1)


DIGITS = Log(WORKED, DIRECT, (YES, NO, ODD), _pairs, question, work, draw_judgements)


OWN_EXAMPLES = 4000  # judged pairs of rows of one's own, where no number is given


def examples_of(settings: OnlineSettings, free: free_answers.FreeBench, published: int) -> int:
    """How many judged pairs a generative judge learns from: ``--examples``, or where it is 0 what fits the rows.

    The verifier of one's own rows judges every pair on the host before training begins.
    """
    if settings.examples or free.log is None:
        return settings.examples or published
    print(f"the judge learns from {OWN_EXAMPLES:,} pairs of answers of {settings.data}, each judged by its verifier; "
          f"the paper's number is --examples {published}", flush=True)  # fmt: skip
    return OWN_EXAMPLES


def log_of(free: free_answers.FreeBench) -> Log:
    """What the judges of a bench read and write."""
    return DIGITS if free.log is None else free.log


def draw_log(
    key: Key, n: int, *, error_rate: float, worked: bool, log: Log = DIGITS
) -> tuple[Int[Array, "N P"], Int[Array, "N T"]]:
    """A judge's log as text to imitate; 3 % of the verdicts cannot be read.

    With work the verdict follows from the work, which is right but for ``error_rate`` of the verdicts.
    """
    pairs, verdict = log.draw(jax.random.fold_in(key, 0), n, error_rate=error_rate)
    odd = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.03, (n,))
    yes, no, other = log.verdicts
    said = jnp.where(odd, other, jnp.where(verdict, yes, no)).astype(jnp.int32)[:, None]
    return log.question(pairs), jnp.concatenate([log.work(pairs), said], axis=1) if worked else said


def verdicts(
    net: Params, pairs: Int[Array, "N K"], *, worked: bool, log: Log = DIGITS
) -> tuple[Float[Array, " N"], Float[Array, " N"], Int[Array, "N W"]]:
    """``(P(yes), P(no), what was written before)``: the work is written greedily, the verdict is not drawn."""
    world, prompts = (log.worked, log.question(pairs)) if worked else (log.direct, log.question(pairs))
    written = jnp.zeros((pairs.shape[0], 0), jnp.int32)
    if worked:
        written = strings.sample(world, net, prompts, jax.random.key(0), temperature=0.0)[:, :-1]
    chances = []
    for word in log.verdicts[:2]:
        said = jnp.concatenate([written, jnp.full((pairs.shape[0], 1), word, jnp.int32)], axis=1)
        chances.append(jnp.exp(strings.token_logp(world, net, prompts, said)[:, -1]))
    if world.start is not None:  # work that ends has no verdict behind it
        ended = jnp.any(written == world.end, axis=1)
        chances = [jnp.where(ended, 0.0, x) for x in chances]
    return *chances, written


def says_yes(yes: Float[Array, " B"], no: Float[Array, " B"]) -> Bool[Array, " B"]:
    """Where yes is the likeliest of three words: yes, no, and what is neither.

    >>> import jax.numpy as jnp
    >>> says_yes(jnp.array([0.4, 0.3, 0.3]), jnp.array([0.3, 0.4, 0.3])).tolist()
    [True, False, False]
    """
    return (yes >= no) & (yes >= 1.0 - yes - no)


def soft_judgement(yes: Float[Array, " B"], no: Float[Array, " B"], *, renormalise: bool = False) -> Float[Array, " B"]:
    """``P(yes)`` where the judge says yes, ``1 - P(no)`` where it says no, 0 where it says neither (the likeliest).

    Args:
      renormalise: over the two words only; then both are ``P(yes)``.

    From "Crossing the Reward Bridge: Expanding RL with Verifiable Rewards Across Diverse Domains", arXiv:2503.23829,
    section 3.

    >>> import jax.numpy as jnp
    >>> both = jnp.array([0.7, 0.2, 0.1]), jnp.array([0.2, 0.7, 0.1])
    >>> [[f"{x:.3f}" for x in soft_judgement(*both, renormalise=r)] for r in (False, True)]
    [['0.700', '0.300', '0.000'], ['0.778', '0.222', '0.000']]
    """
    passes, fails = says_yes(yes, no), (no > yes) & (no >= 1.0 - yes - no)
    if renormalise:
        both = jnp.maximum(yes + no, 1e-9)
        yes, no = yes / both, no / both
    return jnp.where(passes, yes, jnp.where(fails, 1.0 - no, 0.0))


def make_generative(
    examples: int, *, error_rate: float, worked: bool, soft: bool, steps: int = 400, log: Log = DIGITS
) -> Verifier:
    """A verifier that imitates the log of a judge, by its word (1 for yes) or by how sure it is (``soft_judgement``).

    Args:
      worked: it writes both canonical forms first.

    From "General-Reasoner: Advancing LLM Reasoning Across All Domains", arXiv:2505.14652, section 3 (with work), and
    "Crossing the Reward Bridge", arXiv:2503.23829, section 3 (soft). Differs from both papers in the size of the
    verifier, a decoder of some thirty thousand parameters, and in its log, which a script writes.
    """
    world = log.worked if worked else log.direct

    def draw(key, n):
        return draw_log(key, n, error_rate=error_rate, worked=worked, log=log)

    def chances(net, value, answers):
        return verdicts(net, log.pairs(value, answers), worked=worked, log=log)[:2]

    def passes(net, value, answered, answers):
        return says_yes(*chances(net, value, answers)) & answered

    def judge(net, value, answered, answers):
        if not soft:
            return passes(net, value, answered, answers).astype(jnp.float32)
        return jnp.where(answered, soft_judgement(*chances(net, value, answers)), 0.0)

    return Verifier(strings.make_base(world, draw, steps=steps, table=examples), judge, passes if soft else None)


def large_judge(
    error_rate: float,
    *,
    equivalent: Callable[..., Array] = free_answers.equivalent,
    marked: Callable[..., Array] = free_answers.marked,
) -> Callable[..., Array]:
    """The truth, but for a fixed share of answers and references on which it is wrong."""

    def judge(value, answered, answers):
        verdict = equivalent(value, answered, answers) ^ free_answers.mistaken(marked(value, answers), error_rate)
        return (verdict & answered).astype(jnp.float32)

    return judge


def agreement(passed: Bool[Array, " B"], right: Bool[Array, " B"]) -> dict[str, Array]:
    """``judge/accuracy``, and of what passes the share that is wrong, ``judge/false_positives`` (0 where none does).

    >>> import jax.numpy as jnp
    >>> found = agreement(jnp.array([True, True, False, False]), jnp.array([True, False, False, True]))
    >>> {k: float(v) for k, v in found.items()}
    {'judge/accuracy': 0.5, 'judge/false_positives': 0.5}
    """
    count = jnp.maximum(jnp.sum(passed.astype(jnp.float32)), 1.0)
    return {
        "judge/accuracy": jnp.sum((passed == right).astype(jnp.float32)) / passed.shape[0],
        "judge/false_positives": jnp.sum((passed & ~right).astype(jnp.float32)) / count,
    }


def balanced(passed: Bool[Array, " B"], right: Bool[Array, " B"], answered: Bool[Array, " B"]) -> dict[str, Array]:
    """``judge/balanced``, of answers: the mean of the shares of right ones that pass and of wrong ones that do not.

    One who always says yes has a half, however good the answers are. Where all are of one kind its share is the mean;
    responses without an answer, which no judge sees, do not count.

    >>> import jax.numpy as jnp
    >>> right, yes = jnp.array([True, True, True, False]), jnp.ones(4, bool)
    >>> float(balanced(yes, right, yes)["judge/balanced"]), float(agreement(yes, right)["judge/accuracy"])
    (0.5, 0.75)
    """
    found = []
    for kind, agrees in ((right & answered, passed), (~right & answered, ~passed)):
        count = jnp.sum(kind.astype(jnp.float32))
        found.append((jnp.sum((kind & agrees).astype(jnp.float32)) / jnp.maximum(count, 1.0), count > 0))
    kinds = sum(there.astype(jnp.float32) for _, there in found)
    return {"judge/balanced": sum(share for share, _ in found) / jnp.maximum(kinds, 1.0)}


class Verified(NamedTuple):
    """Extras of a state: the parameters of a verifier."""

    verifier: Any


class Passed(NamedTuple):
    """Extras of a batch: which responses the verifier passes, which are right, and which give an answer at all."""

    passed: Bool[Array, " B"]
    right: Bool[Array, " B"]
    answered: Bool[Array, " B"]


def figures_of(batch: Batch, metrics: Metrics) -> Metrics:
    """The ``figures`` of a stage whose batches have ``Passed``: ``agreement`` and ``balanced``."""
    seen = declared(Passed, batch.extras)
    return agreement(seen.passed, seen.right) | balanced(*seen)


def judged_stage(
    settings: OnlineSettings, free: free_answers.FreeBench, verifier: Verifier, *, advantages: Callable[..., Array],
    worth: Callable[..., Array] | None = None, kl_weight: float = 0.0, **slots: Any,
) -> Stage:  # fmt: skip
    """GRPO's loss on what a verifier of the seed's own says; ``reward/mean`` of its curves is the truth.

    Args:
      worth: ``(said, value, answered, answers) -> [B]`` the reward; default: what the verifier says.
      kl_weight: of k3 to the policy that the stage begins with; 0: no reference is kept.
    """
    policy = free.bench.model.policy

    def estimate(params, extras, rows, rewards):
        answers = jax.tree.map(lambda x: x[rows.problem_ids], free.bench.train.answers)
        read = free.read(rows)
        net = declared(Verified, extras).verifier
        said = jax.lax.stop_gradient(verifier.judge(net, *read, answers))
        value = said if worth is None else worth(said, *read, answers)
        right = free.equivalent(*read, answers)

        def seen(extras, rows, rewards):
            passed = said > 0.5 if verifier.passes is None else verifier.passes(net, *read, answers)
            return Passed(passed, right, read[1])._asdict()

        inner = builders.make_estimate(
            policy, builders.per_response(advantages), temperature=settings.temperature,
            row_extras=seen,
            **episode_methods.against(kl_weight),
        )  # fmt: skip
        return inner(params, extras, rows, rewards._replace(value=value))

    online = curricula.make_single_turn_grpo(
        settings, free.bench, estimate=estimate, score=free_answers.score_by_judge(free, free.equivalent),
        figures=figures_of, kl_weight=kl_weight, **slots,
    )  # fmt: skip
    kept = episode_methods.reference_for(kl_weight)
    return Stage(online, settings.steps, lambda params, key: Verified(verifier.fit(key))._asdict() | kept(params, key))
