"""Claims as code: one primary part with a smallest effect of interest, secondary parts beside it.

Every part compares arms over paired seeds. A seed that diverged counts as a failure, never as none: of the arm that the
claim is about it has what speaks most against the claim of all that any seed of either arm reached (of a share 0, or 1
where the claim is of less), of its rival the worst by the metric's own direction. Seeds without a value that did not
diverge are left out, and counted.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.experiment.evidence import verdicts
from jaxrl_llm.experiment.evidence.along import Along
from jaxrl_llm.experiment.evidence.verdicts import Bounds
from jaxrl_llm.experiment.results import Results

# parts of names of metrics where less is better, so that the failure of a rival is a maximum
LESS_IS_BETTER = (
    "tokens", "ece", "brier", "perplexity", "gap", "hours", "violations", "mse", "variance", "inconsistency",
    "false_positives", "eval/attack", "eval/cost", "shift/drop", "agreement/entropy", "degenerate_fraction",
    "eval/share", "eval/length", "weight_spread", "pool/unsound",
)  # fmt: skip


class Part(NamedTuple):
    """One comparison over paired seeds, and what a verdict on it needs.

    ``values`` are the differences of the seeds as the text names them; ``sign`` turns them in the paper's direction,
    ``by`` is the margin beyond which the paper puts them. ``kind`` is ``difference``, ``share`` (from a share of what
    the rival has: near zero it is the threshold that is met, and not an effect that is missing), ``level`` (one arm
    against a number) or ``same`` (no difference beyond ``by``).
    """

    text: str
    metric: str
    arm: str
    than: str
    values: tuple[float, ...]
    sign: int = 1
    by: float = 0.0
    kind: str = "difference"
    d_star: float = math.nan  # the smallest effect of interest by rule; NaN: the rule says nothing
    looks: tuple[int, ...] = ()
    diverged: int = 0
    planned: int = 0  # seeds that ran, also those without a value
    short: int = 0  # runs of both arms that end before the budget at which they are compared
    idle: int = 0  # runs of an arm that makes no updates, which cannot spend it
    along: Along | None = None  # where on their curves they are compared; None: at a step, or at the end
    fallen: bool = False  # the rival ends worse than it began: what is ahead of it need not be good


class Judged(NamedTuple):
    """A part with its interval and verdict, as a record keeps it; numbers are those that the text names."""

    text: str
    metric: str
    arm: str
    than: str
    verdict: str
    mean: float
    low: float
    high: float
    n: int
    level: float  # of the interval: its coverage is one minus this
    d_star: float
    sign: int
    by: float
    kind: str
    improvement: float
    diverged: int
    small: bool  # beyond zero, yet by less than d*
    short: int = 0  # runs of both arms that end before the budget of the text, and count with their last value
    budget: str = ""  # the curve along which the arms are compared, up to ``spent``; empty: at a step, or at the end
    spent: float = math.nan
    fallen: bool = False  # the rival ends worse than it began, and no gate of the bed says so
    undefined: int = 0  # seeds that ran, and are not among the ``n``, as one of the two arms has no value there
    idle: int = 0  # runs of an arm that makes no updates: it spends nothing, and is not among those that end before

    def __str__(self) -> str:
        interval = f"{self.mean:+.4g} [{self.low:+.4g}, {self.high:+.4g}]"
        cover = f"{100 * (1 - self.level):.3g} % interval"
        d_star = "" if math.isnan(self.d_star) else f", {'below ' * self.small}d* {self.d_star:.3g}"
        failed = f", {self.diverged} diverged" if self.diverged else ""
        failed += f", {self.undefined} without a value" if self.undefined else ""
        runs = 2 * (self.n + self.undefined) - self.idle  # all were asked, also those without a value
        ends = f", {self.short} of {runs} runs end before that, at their last value" if self.short else ""
        fell = f", {self.than} {'below' if self.sign > 0 else 'above'} its start" if self.fallen else ""
        better = f"better in {self.improvement:.2f}"
        return f"{self.text}: {interval} (n={self.n}, {cover}{d_star}, {better}{failed}{ends}{fell})"


class Claim(NamedTuple):
    """What the paper says, restated for this experiment, and what came out.

    Without a primary part nothing was judged, and the statement says why. ``bed``: what is wrong with the test bed;
    where anything is, the verdict is that and not what the parts say.
    """

    statement: str
    verdict: str
    primary: Judged | None = None
    secondary: tuple[Judged, ...] = ()
    bed: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Judged, ...]:
        """The primary part and the secondary ones."""
        return (() if self.primary is None else (self.primary,)) + self.secondary


def _is_share(results: Results, metric: str) -> bool:
    """Whether all that was ever measured under this name lies in [0, 1]."""
    found = [v for arm in results.arms.values() for v in arm.metrics.get(metric, [])]
    curves = [arm.curves[metric]["values"] for arm in results.arms.values() if metric in arm.curves]
    flat = np.concatenate([np.ravel(np.asarray(x, float)) for x in [found, *curves]])
    flat = flat[np.isfinite(flat)]
    return bool(flat.size and flat.min() >= 0.0 and flat.max() <= 1.0)


def rule(results: Results, metric: str, baseline: str) -> float:
    """The smallest effect of interest: what was fixed for this metric, else 25 % of what the baseline gains."""
    if metric in results.d_star:
        return results.d_star[metric]
    found = verdicts.smallest_effect(_gain(results, metric, baseline), _is_share(results, metric))
    return found if found > 0 else math.nan


def _gain(results: Results, metric: str, baseline: str) -> float:
    """What an arm gains from its start to its end; 0 where no curve says it."""
    curve = results.arms[baseline].curves.get(metric) if baseline in results.arms else None
    if curve is None or len(curve["step"]) < 2:
        return 0.0
    values = np.asarray(curve["values"], float)
    gain = float(np.nanmean(values[:, -1]) - np.nanmean(values[:, 0]))
    return gain if math.isfinite(gain) else 0.0


def of_a_loss(results: Results, primary: Judged, baseline: str) -> str:
    """What is wrong with the smallest effect by rule: it is a quarter of what the baseline loses. Or nothing.

    It loses where it goes against the paper's direction. Nothing of a loss so small that the least of a share is more,
    nor of a claim that is no difference of two arms.
    """
    gain = _gain(results, primary.metric, baseline)
    if primary.kind != "difference" or primary.than in ("", primary.arm) or primary.sign * gain >= 0:
        return ""
    if rule(results, primary.metric, baseline) <= verdicts.smallest_effect(0.0, _is_share(results, primary.metric)):
        return ""
    way = "falls" if gain < 0 else "rises"
    return (
        f"{primary.metric} of {baseline} {way} by {abs(gain):.3g}, away from what is claimed, and a quarter of a loss "
        "is no smallest effect of interest: state D_STAR in the file"
    )


def _worst(metric: str, sign: int, *values: np.ndarray) -> tuple[float, float]:
    """What a failure counts as, of the arm and of its rival: an end of the finite values of all.

    Args:
      sign: of the claim. That of the arm lies where the claim does not want it, whatever the metric: one that the list
        above does not know would have its best value there.
    """
    found = np.concatenate(values)
    found = found[np.isfinite(found)]
    if not found.size:
        return math.nan, math.nan
    least, most = float(found.min()), float(found.max())
    share, less = 0 <= least and most <= 1, any(word in metric for word in LESS_IS_BETTER)
    least, most = (0.0 if share else least), (1.0 if share and not less else most)
    return (most if sign < 0 else least), (most if less else least)


def _paired(
    results: Results, metric: str, arms: Sequence[str], steps: Sequence[int | Along | None], *, filled: bool = True,
    sign: int = 1,
) -> tuple:  # fmt: skip
    """Values of two arms on the seeds that both have, failures filled in; how many failed; how many ran.

    What was measured before training failed stands: the start of an arm that is compared with its own end.

    Args:
      filled: False: so does all of it, as the start of a rise.
      sign: -1 where the claim is that the first arm has less.
    """
    seeds = [s for s in results.arms[arms[0]].seeds if s in results.arms[arms[1]].seeds]
    values = [results.at_seeds(arm, metric, seeds, step=step) for arm, step in zip(arms, steps, strict=True)]
    worst, count = _worst(metric, sign, *values), 0
    late = [step if isinstance(step, int) else math.inf for step in steps]
    for k, arm in enumerate(arms):
        failed = np.isin(seeds, list(results.diverged(arm)))
        count += int(failed.sum()) if k == 0 or arm != arms[0] else 0
        if filled and not (arms[0] == arms[1] and late[k] < max(late)):
            values[k] = np.where(failed, worst[k], values[k])
    return values[0], values[1], count, len(seeds)


def _made(results: Results, text: str, metric: str, arm: str, than: str, differences: np.ndarray, **more) -> Part:
    fine = np.isfinite(differences)
    d_star = rule(results, metric, than or arm)
    return Part(text, metric, arm, than, tuple(differences[fine].tolist()), d_star=d_star, looks=results.looks, **more)


def _difference(
    results: Results, metric: str, arm: str, other: str, step, text: str, *, share: float = 1.0, **more
) -> Part:
    both = step if isinstance(step, tuple) else (step, step)
    steps = [s if s is None or isinstance(s, Along) else int(s) for s in both]
    sign = more.get("sign", 1)
    left, right, diverged, planned = _paired(results, metric, (arm, other), steps, sign=sign)
    seeds = [seed for seed in results.arms[arm].seeds if seed in results.arms[other].seeds]
    ends = sum(results.short(name, at, seeds) for name, at in zip((arm, other), steps, strict=True))
    more |= {"diverged": diverged, "planned": planned, "short": ends}
    more["along"] = step if isinstance(step, Along) else None
    more["idle"] = sum(len(seeds) for name in (arm, other) if more["along"] and not results.arms[name].updates)
    one_way = more.get("kind", "share") == "share"  # what is ahead of a rival that fell need not be good
    more["fallen"] = arm != other and one_way and _fallen(results, metric, other, seeds, right, sign)
    return _made(results, f"{metric}{_at(step)}, {text}", metric, arm, other, left - share * right, **more)


def _fallen(results: Results, metric: str, arm: str, seeds: list[int], ends: np.ndarray, sign: int) -> bool:
    """Whether an arm is read where the whole 95 % interval of its gain lies on the wrong side of zero."""
    curve = results.arms[arm].curves.get(metric)
    if curve is None or curve["step"][0] != 0:
        return False
    gains = sign * (ends - results.at_seeds(arm, metric, seeds, step=0))
    found = verdicts.bounds(gains[np.isfinite(gains)])
    return found.n > 1 and found.high < 0


def _at(step) -> str:
    if step is None:
        return ""
    if isinstance(step, Along):
        return f" at {step}" if not step.mean else f" over {step}"
    steps = [int(s) for s in step] if isinstance(step, tuple) else [int(step)]
    return f" at steps {steps[0]} and {steps[1]}" if len(steps) == 2 else f" at step {steps[0]}"


def greater(results: Results, metric: str, arm: str, than: str, *, by: float = 0.0, step=None) -> Part:
    """``metric`` of ``arm`` exceeds that of ``than`` by more than ``by``, seeds paired.

    Args:
      step: compare the curves at this step, at ``(step of arm, step of than)``, or where ``along.at`` and
        ``along.up_to`` say; None: the final values.
    """
    return _difference(results, metric, arm, than, step, f"{arm} - {than} > {by:g}", by=by)


def smaller(results: Results, metric: str, arm: str, than: str, *, by: float = 0.0, step=None) -> Part:
    """``metric`` of ``arm`` is below that of ``than`` by more than ``by``; otherwise as ``greater``."""
    return _difference(results, metric, arm, than, step, f"{arm} - {than} < {0 - by:g}", by=by, sign=-1)


def greater_than_share(results: Results, metric: str, arm: str, than: str, *, share: float, step=None) -> Part:
    """``metric`` of ``arm`` exceeds a share of what ``than`` has, seed by seed; ``step`` as in ``greater``.

    A margin that is a share of the rival's mean (``by=0.4 * mean``) is a number without an error, and another one for
    every further seed: of ``arm - share * than`` the interval holds both.
    """
    more = {"share": share, "kind": "share"}
    return _difference(results, metric, arm, than, step, f"{arm} - {share:g} of {than} > 0", **more)


def smaller_than_share(results: Results, metric: str, arm: str, than: str, *, share: float, step=None) -> Part:
    """``metric`` of ``arm`` is below a share of what ``than`` has; otherwise as ``greater_than_share``."""
    more = {"share": share, "kind": "share", "sign": -1}
    return _difference(results, metric, arm, than, step, f"{arm} - {share:g} of {than} < 0", **more)


def close(results: Results, metric: str, arm: str, to: str, *, within: float, step=None) -> Part:
    """``metric`` of the two arms differs by less than ``within`` (equivalence: the whole interval lies inside)."""
    return _difference(results, metric, arm, to, step, f"|{arm} - {to}| < {within:g}", by=within, kind="same")


def grows_more(
    results: Results, metric: str, arm: str, than: str, *, start: int, end: int | None = None, share: float = 1.0
) -> Part:
    """``metric`` of ``arm`` rises from step ``start`` to ``end`` (None: the last) by more than that of ``than``.

    Args:
      share: by more than so much of the other's rise, seed by seed.
    """
    last, other, diverged, planned = _paired(results, metric, (arm, than), (end, end))
    first, before, _, _ = _paired(results, metric, (arm, than), (start, start), filled=False)
    text = f"{metric}, rise of {arm} - {'' if share == 1 else f'{share:g} '}rise of {than} since step {start} > 0"
    rises = (last - first) - share * (other - before)
    return _made(results, text, metric, arm, than, rises, diverged=diverged, planned=planned)


def keeps(results: Results, metric: str, arm: str, *, share: float, start: int, end: int | None = None) -> Part:
    """``metric`` of ``arm`` at ``end`` (None: the last step) exceeds a share of what it was at ``start``, by seed."""
    last, _, diverged, planned = _paired(results, metric, (arm, arm), (end, end))
    first, _, _, _ = _paired(results, metric, (arm, arm), (start, start), filled=False)
    text = f"{metric}, {arm} - {share:g} of it at step {start} > 0"
    return _made(results, text, metric, arm, arm, last - share * first, diverged=diverged, planned=planned)


def gains_more(results: Results, metric: str, other: str, arm: str, than: str, *, step=None) -> Part:
    """``arm`` is ahead of ``than`` by more in ``metric`` than in the metric ``other``: differences of differences."""
    pairs = [_paired(results, name, (arm, than), (step, step), sign=s) for name, s in ((metric, 1), (other, -1))]
    (a, b, diverged, planned), (c, d, _, _) = pairs
    text = f"{metric}{_at(step)}, ({arm} - {than}) less that of {other} > 0"
    return _made(results, text, metric, arm, than, (a - b) - (c - d), diverged=diverged, planned=planned)


def exceeds_own(results: Results, metric: str, other: str, arm: str, *, step: tuple[int | None, int | None]) -> Part:
    """``metric`` of an arm at one step exceeds its own ``other`` metric at another; None: the final values."""
    late = [math.inf if at is None else at for at in step]
    (left, _, diverged, planned), (right, _, _, _) = (
        _paired(results, name, (arm, arm), (at, at), filled=when == max(late), sign=sign)
        for name, at, when, sign in zip((metric, other), step, late, (1, -1), strict=True)
    )
    text = f"{metric}{_at(step[0])} - {other}{_at(step[1])}, {arm} > 0"
    return _made(results, text, metric, arm, arm, left - right, diverged=diverged, planned=planned)


def steadier(results: Results, metric: str, arm: str, than: str, *, step=None) -> Part:
    """``metric`` of ``arm`` varies less over seeds than that of ``than``: smaller distances to the arm's own median.

    The distances of Brown and Forsythe's test of equal variances, seeds paired; ``step`` as in ``greater``.
    """
    left, right, diverged, planned = _paired(results, metric, (arm, than), (step, step))
    apart = [np.abs(x - np.nanmedian(x)) for x in (left, right)]
    text = f"{metric}{_at(step)}, spread of {arm} - spread of {than} < 0"
    return _made(results, text, metric, arm, than, apart[0] - apart[1], sign=-1, diverged=diverged, planned=planned)


def above(results: Results, metric: str, arm: str, level: float, *, step: int | None = None) -> Part:
    """``metric`` of one arm lies above a fixed number; ``step`` as in ``greater``."""
    return _alone(results, metric, arm, level, step, ">", 1)


def below(results: Results, metric: str, arm: str, level: float, *, step: int | None = None) -> Part:
    """``metric`` of one arm lies below a fixed number; otherwise as ``above``."""
    return _alone(results, metric, arm, level, step, "<", -1)


def _alone(results: Results, metric: str, arm: str, level: float, step: int | None, relation: str, sign: int) -> Part:
    values, _, diverged, planned = _paired(results, metric, (arm, arm), (step, step), sign=sign)
    text = f"{metric}{_at(step)}, {arm} {relation} {level:g}"
    more = {"sign": sign, "kind": "level", "by": sign * level, "diverged": diverged, "planned": planned}
    return _made(results, text, metric, arm, "", values, **more)


def _two_sided(part: Part) -> float:
    """The p value of Holm's order: of no effect beyond the margin, or of ``same`` on the other side of its margin.

    What lies within is held against a difference as large as the margin, what lies beyond against one as small.
    """
    values = np.asarray(part.values)
    if part.kind == "same":
        found = [verdicts.bounds(part.by + s * values) for s in (1, -1)]  # within both distances are positive
        beyond = [f.p for f in found if f.mean <= 0]
        return max(beyond) if beyond else max(f.p for f in found)
    return verdicts.bounds(part.sign * values - part.by).p


def judge(part: Part, level: float, *, rejected: bool = True) -> Judged:
    """A part with its interval at this level and the verdict that follows.

    Args:
      rejected: False where Holm's procedure stopped before this part: then neither direction is said.
    """
    found: Bounds = verdicts.bounds(part.values, level)
    d_star = part.d_star
    low, high = sorted((part.sign * found.low, part.sign * found.high)) if found.n > 1 else (math.nan, math.nan)
    if part.kind == "same":
        verdict = verdicts.decide_same(low, high, part.by)
    else:
        verdict = verdicts.decide(low - part.by, high - part.by, 0.0)
        if verdict == verdicts.UNDECIDED and part.kind == "difference" and -d_star < low and high < d_star:
            verdict = verdicts.NO_EFFECT  # of zero, whatever the margin
    if not rejected and verdict in (verdicts.SUPPORTED_HERE, verdicts.CONTRADICTED):
        verdict = verdicts.UNDECIDED
    better = np.asarray(part.values) - (part.sign * part.by if part.kind == "level" else 0.0)
    share = verdicts.improvement(better, part.sign)
    small = verdict == verdicts.SUPPORTED_HERE and part.kind == "difference" and part.sign * found.mean < d_star
    return Judged(
        part.text, part.metric, part.arm, part.than, verdict, found.mean, found.low, found.high, found.n, found.level,
        d_star, part.sign, part.by, part.kind, share, part.diverged, bool(small),
        part.short, part.along.budget if part.along else "", part.along.level if part.along else math.nan,
        part.fallen, max(part.planned - found.n, 0), part.idle,
    )  # fmt: skip


def conclude(statement: str, primary: Part, *secondary: Part) -> Claim:
    """The verdict is that of the primary part alone; the secondary ones carry Holm's correction.

    The smallest effect of interest is what the file states as ``D_STAR`` (by metric), else 25 % of what the baseline
    gains, at least 0.02 of a share.

    Args:
      primary: the paper's headline in the paper's direction. What the paper calls better is tested as better: a
        negative margin ("not worse by") is no primary part.

    Raises:
      ValueError: for a primary part with a negative margin.
    """
    if primary.kind == "difference" and primary.by < 0:
        raise ValueError(f"primary part {primary.text!r}: 'not worse by' is no headline; test better as better (by=0)")
    level = verdicts.level_at(primary.planned, primary.looks)
    first = judge(primary, level)
    return Claim(statement, first.verdict, first, corrected(secondary, level))


def corrected(parts: Sequence[Part], level: float = verdicts.ALPHA) -> tuple[Judged, ...]:
    """Parts of which none comes first, with Holm's correction over all of them."""
    levels = verdicts.holm([_two_sided(part) for part in parts], level)
    return tuple(judge(part, x, rejected=yes) for part, (x, yes) in zip(parts, levels, strict=True))


def open_claim(statement: str) -> Claim:
    """What is said when there is nothing to judge: arms are missing, or it was a smoke run."""
    return Claim(statement, verdicts.NOT_JUDGED)


def gated(claim: Claim, metric: str, arm: str) -> Claim:
    """The claim on a bed of which this metric of this arm is held against the gates.

    Where that is the rival of the primary part in the claimed metric, whether it falls is theirs to say.
    """
    if claim.primary is None or (metric, arm) != (claim.primary.metric, claim.primary.than):
        return claim
    return claim._replace(primary=claim.primary._replace(fallen=False))


def on_bed(claim: Claim, problems: Sequence[str]) -> Claim:
    """The claim after its test bed was looked at: where that does not work, the parts decide nothing."""
    if not problems or claim.primary is None:
        return claim
    return claim._replace(verdict=verdicts.INVALID, bed=tuple(problems))
