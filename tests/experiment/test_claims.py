"""Claims on literal numbers: parts, margins, Holm's correction, failures, and one primary part."""

import dataclasses
import math

import numpy as np
import pytest

from jaxrl_llm.experiment import Results, at, claims, close, conclude, gains_more, greater, smaller, steadier, up_to
from jaxrl_llm.experiment.evidence import along, beds, records, verdicts
from tests import close as near_to
from tests.close import doubles
from tests.experiment.made import arm, made_module, results

NAN = math.nan
# differences 0.1, 0.2, 0.3, 0.2: mean 0.2, sd 0.0816497, t(3) = 3.182, half width 0.129905
RISES = Results({
    "base": arm([0.3, 0.4, 0.5], curve={1: [0.2, 0.3, 0.4], 2: [0.3, 0.4, 0.5]}),
    "method": arm([0.6, 0.7, 0.9], curve={1: [0.2, 0.3, 0.5], 2: [0.6, 0.7, 0.9]}),
})  # fmt: skip
CLEAR = results(base=[0.1, 0.2, 0.3, 0.4], method=[0.2, 0.4, 0.6, 0.6])


def judged(part):
    return claims.judge(part, 0.05)


def test_greater_with_its_interval():
    part = judged(greater(CLEAR, "eval/accuracy", "method", "base"))
    assert str(part) == (
        "eval/accuracy, method - base > 0: +0.2 [+0.07008, +0.3299] (n=4, 95 % interval, d* 0.02, better in 1.00)"
    )
    assert part.verdict == "supported here" and not part.small


@pytest.mark.parametrize(
    ("by", "verdict"), [(0.07, "supported here"), (0.08, "undecided"), (0.32, "undecided"), (0.34, "contradicted")]
)
def test_greater_by_a_margin(by, verdict):
    assert judged(greater(CLEAR, "eval/accuracy", "method", "base", by=by)).verdict == verdict


def test_smaller_mirrors_greater():
    for by in (0.0, 0.07, 0.08, 0.34):
        one = judged(greater(CLEAR, "eval/accuracy", "method", "base", by=by))
        other = judged(smaller(CLEAR, "eval/accuracy", "base", "method", by=by))
        assert (one.verdict, one.mean, one.improvement) == (other.verdict, -other.mean, other.improvement)
    assert judged(smaller(CLEAR, "eval/accuracy", "method", "base")).verdict == "contradicted"
    assert smaller(CLEAR, "eval/accuracy", "base", "method", by=0.05).text == "eval/accuracy, base - method < -0.05"
    assert smaller(CLEAR, "eval/accuracy", "base", "method").text.endswith("< 0")


@pytest.mark.parametrize(
    ("within", "verdict"),
    [(0.34, "supported here"), (0.3, "undecided"), (0.1, "undecided"), (0.07, "contradicted")],
)
def test_close_needs_the_whole_interval_inside(within, verdict):
    for pair in (("method", "base"), ("base", "method")):
        assert judged(close(CLEAR, "eval/accuracy", *pair, within=within)).verdict == verdict


def test_nothing_beyond_d_star_is_no_practical_effect():
    near = results(base=[0.5, 0.6, 0.7, 0.8], method=[0.505, 0.596, 0.703, 0.797])
    part = greater(near, "eval/accuracy", "method", "base")
    assert part.d_star == 0.02 and judged(part).verdict == "no practical effect"
    narrow = dataclasses.replace(near, d_star={"eval/accuracy": 0.004})
    assert judged(greater(narrow, "eval/accuracy", "method", "base")).verdict == "undecided"
    small = results(base=[0.5, 0.6, 0.7, 0.8], method=[0.505, 0.604, 0.705, 0.806])
    found = judged(greater(small, "eval/accuracy", "method", "base"))
    assert found.verdict == "supported here" and found.small and "below d* 0.02" in str(found)


def test_d_star_is_a_quarter_of_what_the_baseline_gains():
    base = arm([0.5, 0.6], curve={0: [0.1, 0.2], 9: [0.5, 0.6]})
    found = Results({"base": base, "method": arm([0.5, 0.6])})
    assert claims.rule(found, "eval/accuracy", "base") == doubles(0.1)
    long = Results({"base": arm([10.0, 12.0], metric="eval/tokens", curve={0: [20.0, 22.0], 9: [10.0, 12.0]})})
    assert claims.rule(long, "eval/tokens", "base") == doubles(2.5)
    unknown = Results({"base": arm([10.0, 12.0], metric="eval/tokens"), "m": arm([9.0, 9.0], metric="eval/tokens")})
    part = greater(unknown, "eval/tokens", "m", "base")
    assert math.isnan(part.d_star) and judged(part).verdict == "undecided", "no interval is narrow without d*"


def test_looks_widen_the_interval():
    eight = results(base=[0.1] * 8, method=[0.2, 0.3, 0.2, 0.3, 0.2, 0.3, 0.2, 0.3])
    plain = conclude("it", greater(eight, "eval/accuracy", "method", "base"))
    looked = dataclasses.replace(eight, looks=verdicts.LOOKS)
    spent = conclude("it", greater(looked, "eval/accuracy", "method", "base"))
    assert plain.primary.level == 0.05 and spent.primary.level == doubles(verdicts.levels()[0])
    assert spent.primary.low < plain.primary.low and "99 % interval" in str(spent.primary)


def test_seeds_without_a_value_are_left_out_in_pairs():
    found = results(base=[NAN, 0.1, 0.2, 0.3, 0.4, 0.5], method=[0.9, 0.2, 0.4, 0.6, 0.6, math.inf])
    part = greater(found, "eval/accuracy", "method", "base")
    assert part.values == doubles((0.1, 0.2, 0.3, 0.2)) and part.planned == 6


def test_a_diverged_seed_is_a_failure_and_not_a_gap():
    whole = results(base=[0.5] * 4, method=[0.6, 0.61, 0.59, NAN])
    whole.arms["method"].metrics["loss/total"] = [0.1, 0.1, 0.1, NAN]
    part = greater(whole, "eval/accuracy", "method", "base")
    assert part.diverged == 1 and part.values == doubles((0.1, 0.11, 0.09, -0.5))
    assert judged(part).verdict == "undecided" and "1 diverged" in str(judged(part))
    # a finite number after a divergence does not hide it
    whole.arms["method"].metrics["eval/accuracy"][3] = 0.62
    assert greater(whole, "eval/accuracy", "method", "base").values[3] == doubles(-0.5)
    # of a metric where less is better the worst is the largest: a reward model that diverged has no error of 0
    wrong = Results({n: arm(x, metric="table/mse") for n, x in (("bt", [0.5, 0.6]), ("vrpo", [0.3, NAN]))})
    wrong.arms["vrpo"].metrics["grad/norm"] = [1.0, math.inf]
    assert smaller(wrong, "table/mse", "vrpo", "bt").values == doubles((-0.2, 0.0))
    # as of lengths
    tokens = Results({n: arm([9.0, 8.0], metric="eval/tokens") for n in ("base", "method")})
    tokens.arms["method"].metrics["grad/norm"] = [1.0, math.inf]
    assert smaller(tokens, "eval/tokens", "method", "base").values == doubles((0.0, 1.0))
    # a share of the long reasoning, the spread of weights, questions that pose nothing: 0 would be the best of all
    for metric in ("eval/share", "policy/weight_spread", "pool/unsound"):
        share = Results({n: arm(x, metric=metric) for n, x in (("full", [0.9, 1.0]), ("short", [0.3, NAN]))})
        share.arms["short"].metrics["grad/norm"] = [1.0, math.inf]
        assert smaller(share, metric, "short", "full").values == doubles((-0.6, 0.0))
    length = Results({n: arm([9.0, 8.0], metric="eval/length") for n in ("base", "method")})
    length.arms["method"].metrics["grad/norm"] = [1.0, math.inf]
    assert smaller(length, "eval/length", "method", "base").values == doubles((0.0, 1.0))


def test_a_failure_never_speaks_for_the_claim():
    """Of a share that the claim wants low, 0 is the best value there is, whatever the list says of its name."""

    def failed(values, metric, *which):
        one = arm(values, metric=metric)
        one.metrics["loss/total"] = [NAN if k in which else 0.1 for k in range(len(values))]
        return one

    alone = Results({"grpo": failed([0.15] * 8, "eval/beyond", *range(8))})
    part = claims.below(alone, "eval/beyond", "grpo", 0.1)
    assert part.values == (1.0,) * 8 and judged(part).verdict == "contradicted"
    pair = Results({"a": failed([0.3, 0.4], "eval/answers", 1), "b": failed([0.5, 0.6], "eval/answers", 0)})
    assert smaller(pair, "eval/answers", "a", "b").values == doubles((0.3, 0.4)), "1 of the arm, 0 of its rival"
    assert greater(pair, "eval/answers", "a", "b").values == doubles((0.3, -0.6)), "0 of both"
    # that responses grow longer is claimed of a metric of which less is better
    long = Results({"a": failed([9.0, 7.0], "eval/tokens", 1), "b": failed([5.0, 6.0], "eval/tokens")})
    assert greater(long, "eval/tokens", "a", "b").values == doubles((4.0, -1.0))
    assert smaller(long, "eval/tokens", "a", "b").values == doubles((4.0, 3.0))
    two = Results({"a": failed([0.2, 0.3], "eval/hard", 1), "b": failed([0.1, 0.1], "eval/hard")})
    for name, values in (("a", [0.9, 0.9]), ("b", [0.9, 0.8])):
        two.arms[name].metrics["eval/easy"] = values
    # as (0 - 0.1) less (0 - 0.8) it would be ahead by 0.7
    assert gains_more(two, "eval/hard", "eval/easy", "a", "b").values == doubles((0.1, -0.3))
    own = claims.exceeds_own(two, "eval/hard", "eval/easy", "a", step=(None, None))
    assert own.values == doubles((-0.7, -1.0))


def test_seeds_without_a_value_are_counted():
    found = judged(greater(results(base=[0.1, 0.2, 0.3], method=[0.3, NAN, 0.6]), "eval/accuracy", "method", "base"))
    assert (found.n, found.undefined) == (2, 1) and ", 1 without a value)" in str(found)
    assert judged(greater(CLEAR, "eval/accuracy", "method", "base")).undefined == 0


def test_the_start_of_a_seed_that_diverged_is_no_failure():
    """What it had before training failed stands: else a loss of all that it had would count as no change."""
    one = arm([0.5, 0.6], curve={0: [0.2, 0.3], 9: [0.5, 0.6]})
    lost = arm([0.5, 0.6], curve={0: [0.2, 0.3], 9: [0.5, 0.6]})
    lost.metrics["grad/norm"], lost.curves["eval/majority"] = [1.0, NAN], {"step": [0, 9], "values": [[0.4, 0.5]] * 2}
    found = Results({"base": one, "method": lost})
    assert greater(found, "eval/accuracy", "method", "method", step=(9, 0)).values == doubles((0.3, -0.3))
    assert smaller(found, "eval/accuracy", "method", "method", step=(0, 9)).values == doubles((-0.3, 0.3))
    assert claims.keeps(found, "eval/accuracy", "method", share=0.5, start=0).values == doubles((0.4, -0.15))
    rises = claims.grows_more(found, "eval/accuracy", "method", "base", start=0)
    assert rises.values == doubles((0.0, -0.6)) and rises.diverged == 1
    own = claims.exceeds_own(found, "eval/accuracy", "eval/majority", "method", step=(9, 0))
    assert own.values == doubles((0.1, -0.4))


def test_a_rival_of_more_seeds_may_fall_below_its_start():
    """Arms of the primary part have the seeds of later looks; the others those of the first."""
    falls = [0.1, 0.12, 0.1, 0.11]
    found = Results({
        "method": arm([0.7, 0.71]), "low": arm(falls, curve={0: [0.5, 0.52, 0.51, 0.5], 9: falls}),
    })  # fmt: skip
    assert greater(found, "eval/accuracy", "method", "low").fallen


def test_a_step_that_was_not_measured_leaves_the_claim_open():
    """Results of hours are kept where flags of one's own measure at other steps than the claim names."""
    module = made_module(claim=lambda found: conclude("", greater(found, "eval/accuracy", "method", "warm", step=3)))
    curve = {0: [0.1, 0.2], 2: [0.3, 0.4]}
    found = Results({name: arm([0.3, 0.4], curve=curve) for name in module.ARMS})
    said = beds.judge(module, found, smoke=False)
    assert said.verdict == "not judged" and "no arm measures eval/accuracy at step 3" in said.statement


def test_arms_are_paired_by_seed_and_not_by_place():
    left, right = arm([0.1, 0.2, 0.3]), dataclasses.replace(arm([0.3, 0.5]), seeds=[2, 1])
    part = greater(Results({"a": left, "b": right}), "eval/accuracy", "b", "a")
    assert part.values == doubles((0.0, 0.3)) and part.planned == 2


@pytest.mark.parametrize("kept", [[NAN, NAN, NAN], [0.9, NAN, NAN]])
@pytest.mark.parametrize("compare", [greater, smaller, lambda *a: close(*a, within=1.0)])
def test_fewer_than_two_pairs_stay_open(kept, compare):
    assert judged(compare(results(a=kept, b=[0.0, 0.0, 0.0]), "eval/accuracy", "a", "b")).verdict == "undecided"


def test_curves_are_compared_at_a_step_or_at_two():
    a = arm([0.5, 0.5], curve={0: [0.0, 0.0], 10: [0.5, 0.7]})
    b = arm([0.5, 0.5], curve={0: [0.0, 0.1], 20: [0.2, 0.3]})
    found = Results({"a": a, "b": b})
    first = greater(found, "eval/accuracy", "a", "b", step=0)
    assert first.text == "eval/accuracy at step 0, a - b > 0" and first.values == doubles((0.0, -0.1))
    both = greater(found, "eval/accuracy", "a", "b", step=(10, 20))
    assert "at steps 10 and 20, a - b > 0" in both.text and both.values == doubles((0.3, 0.4))
    assert "at step 0" in close(found, "eval/accuracy", "a", "b", within=1.0, step=0).text
    with pytest.raises(KeyError, match="eval/accuracy at step 10"):
        greater(found, "eval/accuracy", "b", "a", step=10)


def test_what_was_not_recorded_is_an_error():
    with pytest.raises(KeyError, match="other"):
        greater(CLEAR, "eval/accuracy", "other", "base")
    with pytest.raises(KeyError, match="eval/length"):
        greater(CLEAR, "eval/length", "method", "base")


def test_one_arm_against_a_number():
    found = [judged(claims.above(CLEAR, "eval/accuracy", "method", level)) for level in (0.0, 9.0)]
    assert [part.verdict for part in found] == ["supported here", "contradicted"] and "method > 0" in found[0].text
    assert [part.improvement for part in found] == [1.0, 0.0]
    found = [judged(claims.below(CLEAR, "eval/accuracy", "method", level)) for level in (0.0, 9.0)]
    assert [part.verdict for part in found] == ["contradicted", "supported here"]
    assert judged(claims.above(CLEAR, "eval/accuracy", "method", 0.45)).verdict == "undecided"


def test_rises_are_compared_seed_by_seed():
    found = claims.grows_more(RISES, "eval/accuracy", "method", "base", start=1)
    assert found.values == doubles((0.3, 0.3, 0.3))
    assert judged(claims.grows_more(RISES, "eval/accuracy", "base", "method", start=1)).verdict == "contradicted"
    # the rises are 0.1, 0.1, 0.1 and 0.4, 0.4, 0.4: half of the second exceeds the first by 0.1
    half = claims.grows_more(RISES, "eval/accuracy", "base", "method", start=1, share=0.5)
    assert half.values == doubles((-0.1, -0.1, -0.1))
    assert half.text == "eval/accuracy, rise of base - 0.5 rise of method since step 1 > 0"
    assert found.text == "eval/accuracy, rise of method - rise of base since step 1 > 0"


def test_an_arm_beside_another_of_its_own_metrics():
    mine = arm([0.6, 0.7, 0.9], curve={1: [0.2, 0.3, 0.5], 2: [0.6, 0.7, 0.9]})
    mine.curves["eval/majority"] = {"step": [1, 2], "values": [[0.5, 0.6], [0.5, 0.9], [0.5, 0.9]]}
    found = claims.exceeds_own(Results({"a": mine}), "eval/accuracy", "eval/majority", "a", step=(2, 1))
    assert found.values == doubles((0.1, 0.2, 0.4))
    assert found.text == "eval/accuracy at step 2 - eval/majority at step 1, a > 0"


def test_what_is_kept_is_a_share_of_each_seeds_own():
    found = claims.keeps(RISES, "eval/accuracy", "base", share=1.2, start=1)
    assert found.values == doubles((0.3 - 0.24, 0.4 - 0.36, 0.5 - 0.48))
    assert found.text == "eval/accuracy, base - 1.2 of it at step 1 > 0"
    assert judged(claims.keeps(RISES, "eval/accuracy", "base", share=4.0, start=1)).verdict == "contradicted"


def made(values, **more):
    return claims.Part("part", "eval/accuracy", "a", "b", tuple(values), d_star=0.02, planned=len(values), **more)


def test_the_primary_part_alone_decides():
    good, bad = made([0.1, 0.11, 0.12, 0.1]), made([-0.1, -0.11, -0.12, -0.1])
    found = conclude("it holds", good, bad, bad)
    assert (found.statement, found.verdict) == ("it holds", "supported here")
    assert [part.verdict for part in found.secondary] == ["contradicted", "contradicted"]
    assert conclude("it holds", bad, good).verdict == "contradicted"


def test_secondary_parts_are_corrected_together():
    # alone p is about 0.04: with four others it is nothing
    weak = made([0.10, 0.03, 0.12, 0.04])
    assert 0.03 < verdicts.bounds(weak.values).p < 0.05
    assert conclude("it", weak).verdict == "supported here"
    assert conclude("it", weak, weak).secondary[0].verdict == "supported here"
    others = [made([0.01, -0.05, 0.03, -0.1])] * 4
    assert conclude("it", weak, weak, *others).secondary[0].verdict == "undecided"
    assert conclude("it", weak, weak, *others).secondary[0].level == doubles(0.01)


def test_a_secondary_part_of_no_difference_can_be_contradicted():
    """As a primary one can: Holm's order has a p value for either side of the margin."""
    found = results(base=[0.1, 0.2, 0.3, 0.4], method=[0.2, 0.4, 0.6, 0.6], other=[0.1, 0.21, 0.3, 0.4])
    apart = close(found, "eval/accuracy", "method", "base", within=0.02)
    alike = close(found, "eval/accuracy", "other", "base", within=0.02)
    claim = conclude("As good.", apart, apart, alike)
    assert [part.verdict for part in claim.parts] == ["contradicted", "contradicted", "supported here"]
    # 0.18 beyond the margin, of which the standard error is 0.0408: t = 4.41 of three degrees of freedom
    assert claims._two_sided(apart) == doubles(0.02164346904324615) and claims._two_sided(alike) == doubles(
        0.005986255697707058
    )
    between = close(found, "eval/accuracy", "method", "base", within=0.2)
    assert conclude("As good.", apart, between).secondary[0].verdict == "undecided"


def test_not_worse_by_is_no_headline():
    with pytest.raises(ValueError, match="test better as better"):
        conclude("it", made([0.1, 0.1], by=-0.01))
    assert conclude("it", made([0.1, 0.11]), made([0.1, 0.11], by=-0.01)).secondary[0].by == -0.01


def test_nothing_to_judge():
    assert claims.open_claim("later") == ("later", "not judged", None, (), ())
    assert claims.open_claim("later").parts == ()


def test_a_bed_that_does_not_work_is_the_verdict():
    learns = {0: [0.1, 0.12, 0.11], 5: [0.2, 0.22, 0.2], 9: [0.5, 0.51, 0.52]}
    good = Results({"base": arm([0.5, 0.51, 0.52], curve=learns), "method": arm([0.7, 0.71, 0.73])})

    def claim(found):
        return conclude("better", greater(found, "eval/accuracy", "method", "base"))

    assert beds.examined(good, claim(good)).verdict == "supported here"
    idle = {s: [0.1, 0.12, 0.11] for s in (0, 5, 9)}
    bad = Results({"base": arm([0.1, 0.12, 0.11], curve=idle), "method": arm([0.7, 0.71, 0.73])})
    found = beds.examined(bad, claim(bad))
    assert found.verdict == "test bed invalid" and "not four standard errors" in found.bed[0]
    assert found.primary.verdict == "supported here", "what the comparison said stays readable"
    # the file may name the arm that shows whether training works
    both = Results(bad.arms | {"other": good.arms["base"]})
    assert beds.examined(both, claim(both), beds.Bed(baseline="other")).verdict == "supported here"


def test_a_claim_at_a_budget_is_not_held_against_what_comes_beyond():
    """The baseline rises up to the budget at which the arms are compared, and is over-optimised after it."""
    gold = {0: [0.1, 0.12, 0.11], 5: [0.3, 0.32, 0.3], 10: [0.5, 0.51, 0.52], 15: [0.2, 0.2, 0.2]}
    spent = {0: [0.0, 0.0, 0.0], 5: [1.0, 1.0, 1.0], 10: [2.0, 2.0, 2.0], 15: [9.0, 9.0, 9.0]}

    def falling(offset):
        made = arm([0.2, 0.2, 0.2], curve={s: [x + offset for x in v] for s, v in gold.items()})
        rows = [list(row) for row in zip(*spent.values(), strict=True)]
        made.curves["eval/kl"] = {"step": list(spent), "values": rows}
        return made

    found = Results({"base": falling(0.0), "method": falling(0.2)})
    at_the_end = conclude("better", greater(found, "eval/accuracy", "method", "base"))
    assert "falls from" in beds.problems(found, at_the_end)[0]
    at_budget = conclude("better", greater(found, "eval/accuracy", "method", "base", step=along.at("eval/kl", 2.0)))
    assert beds.problems(found, at_budget) == []
    assert (at_budget.primary.budget, at_budget.primary.spent) == ("eval/kl", 2.0)
    beyond = conclude("better", greater(found, "eval/accuracy", "method", "base", step=along.at("eval/kl", 8.5)))
    assert "falls from" in beds.problems(found, beyond)[0]


def test_controls_and_judges_are_looked_at_first():
    learns = {0: [0.1, 0.12, 0.11], 5: [0.2, 0.22, 0.2], 9: [0.5, 0.51, 0.52]}
    base = arm([0.5, 0.51, 0.52], curve=learns)
    found = Results({"base": base, "method": arm([0.7, 0.71, 0.73]), "oracle": arm([0.4, 0.45, 0.4]),
                     "again": arm([0.505, 0.51, 0.515])})  # fmt: skip
    claim = conclude("better", greater(found, "eval/accuracy", "method", "base"))
    assert beds.problems(found, claim, beds.Bed(negative="again")) == []
    assert "oracle - base" in beds.problems(found, claim, beds.Bed(positive="oracle"))[0]
    assert "is not within d*" in beds.problems(found, claim, beds.Bed(negative="method"))[0]
    near_chance = beds.Bed(judges=(("again", "eval/accuracy", 0.75),))
    assert "too near chance" in beds.problems(found, claim, near_chance)[0]
    later = beds.Bed(judges=(("again", "judge/order", 0.7),))  # the file asks for it since the record was made
    assert beds.problems(found, claim, later) == [
        "judge/order of again is not in the record, which was made before it was asked for"
    ]


def test_a_rival_that_falls_below_its_start_is_named():
    """Of a secondary part, where less is better a rise; one seed in three that fell says nothing."""

    def falls(*ends):
        return arm(list(ends), curve={0: [0.5, 0.52, 0.51], 5: [0.5] * 3, 9: list(ends)})

    found = Results({"method": arm([0.7, 0.71, 0.73]), "base": falls(0.6, 0.62, 0.6), "low": falls(0.1, 0.12, 0.1),
                     "mixed": falls(0.1, 0.6, 0.55)})  # fmt: skip
    parts = [greater(found, "eval/accuracy", "method", name) for name in ("base", "low", "mixed")]
    claim = beds.examined(found, conclude("better", parts[1], *parts))
    assert [part.fallen for part in claim.parts] == [False, False, True, False], "of the primary one the gates say it"
    assert claim.bed[0].startswith("eval/accuracy of low: the baseline gains -0.40")
    assert str(claim.secondary[1]).endswith("better in 1.00, low below its start)")
    assert "its start" not in str(claim.primary) + str(claim.secondary[0]) + str(claim.secondary[2])
    less = conclude("less", parts[0], smaller(found, "eval/accuracy", "low", "base"))
    assert str(less.secondary[0]).endswith("better in 1.00, base above its start)")
    assert claim.primary.verdict == conclude("better", parts[1]).verdict == "supported here"
    assert conclude("better", parts[1]).primary.fallen, "nobody looked at the bed"


def test_of_the_primary_part_it_is_said_where_the_gates_look_elsewhere():
    """Accuracy rises, and pass@16, of which the claim is, falls in both arms."""

    def both(*many):
        made = arm([0.5, 0.51, 0.52], curve={0: [0.1, 0.12, 0.11], 5: [0.2, 0.22, 0.2], 9: [0.5, 0.51, 0.52]})
        rows = [[0.8, 0.7, end] for end in many]
        made.curves["eval/pass@16"] = {"step": [0, 5, 9], "values": rows}
        made.metrics["eval/pass@16"] = list(many)
        return made

    found = Results({"method": both(0.7, 0.71, 0.72), "base": both(0.6, 0.61, 0.6)})
    claim = conclude("more", greater(found, "eval/pass@16", "method", "base"))
    gated = beds.examined(found, claim, beds.Bed(metric="eval/accuracy"))
    assert gated.verdict == "supported here" and gated.bed == () and gated.primary.fallen
    assert str(gated.primary).endswith("better in 1.00, base below its start)")
    own = beds.examined(found, claim, beds.Bed(metric="eval/pass@16"))
    assert own.verdict == "test bed invalid" and not own.primary.fallen
    other = beds.examined(found, claim, beds.Bed(metric="eval/pass@16", baseline="method"))
    assert other.primary.fallen, "the gates look at another arm"


@pytest.mark.parametrize(
    ("still", "ends", "said", "short"),
    [
        ("base", (0.6, 0.7), "", "1 of 3 runs end before that"),  # it has nothing to spend the budget with
        ("base", (0.6, 0.6), "", "1 of 3 runs end before that"),
        ("", (0.6, 0.7), "3 of 3 runs of base", "4 of 6 runs end before that"),
    ],
)
def test_an_arm_without_updates_ends_before_no_budget(still, ends, said, short):
    def one(name, end, *spent):
        made = arm([end, end + 0.01, end + 0.02], curve={0: [0.1, 0.12, 0.11], 9: [end, end + 0.01, end + 0.02]})
        made.curves["eval/kl"] = {"step": [0, 9], "values": [[0.0, kl] for kl in spent]}
        return dataclasses.replace(made, updates=0 if name == still else 4)

    found = Results({"base": one("base", ends[0], 0.0, 0.0, 0.0), "method": one("method", ends[1], 4.0, 4.0, 3.9)})
    part = greater(found, "eval/accuracy", "method", "base", step=along.at("eval/kl", 4.0))
    problems = beds.never_there(found, judged(part))
    assert [problem.partition(" end before eval/kl 4")[0] for problem in problems] == ([said] if said else [])
    assert f", {short}, at their last value)" in str(judged(part))
    lost = judged(part)._replace(n=2, undefined=1)  # of one seed an arm has no value: it is asked all the same
    assert f", 1 without a value, {short}, at their last value)" in str(lost)
    kept = records.plain_claim(conclude("better", part))
    assert kept["primary"].get("idle") == (3 if still else None)
    assert str(records.read_claim({"claim": kept}).primary) == str(conclude("better", part).primary)


@pytest.mark.parametrize(("begins", "said"), [(4, ""), (5, "in 1 of 3 runs"), (9, "in 2 of 3 runs")])
def test_an_arm_is_read_within_its_last_stage(begins, said):
    spent = {"step": [0, 5, 9, 12], "values": [[0.0, 4.0, 1.0, 9.0], [0.0, 1.0, 4.5, 5.0], [0.0, math.nan, 2.0, 3.0]]}
    learns = {0: [0.1, 0.12, 0.11], 5: [0.2, 0.22, 0.2], 9: [0.5, 0.51, 0.52], 12: [0.6, 0.61, 0.62]}
    made = [arm([0.6, 0.61, 0.62], curve=learns), arm([0.7, 0.71, 0.73], curve=learns)]
    for one in made:
        one.curves["eval/kl"] = spent
    found = Results({"base": made[0], "method": dataclasses.replace(made[1], settings={"first_steps": begins})})
    claim = conclude("better", greater(found, "eval/accuracy", "method", "base", step=along.at("eval/kl", 4.0)))
    problems = beds.read_too_early(found, claim.primary, beds.Bed(stages=(("method", "first_steps"),)))
    wanted = f"method has spent eval/kl 4 before its last stage begins (step {begins}) {said}"
    assert problems == ([wanted] if said else [])
    assert set(problems) <= set(beds.problems(found, claim, beds.Bed(stages=(("method", "first_steps"),))))
    at_the_end = conclude("better", greater(found, "eval/accuracy", "method", "base"))
    assert beds.read_too_early(found, at_the_end.primary, beds.Bed(stages=(("method", "first_steps"),))) == []


@pytest.mark.parametrize(
    ("short", "ends", "said"),
    [
        ("base", (0.6, 0.7), "3 of 3 runs of base"),  # it might come as far
        ("method", (0.6, 0.7), ""),  # it is ahead with less
        ("method", (0.6, 0.5), "3 of 3 runs of method"),
        ("base", (0.6, 0.5), ""),
        ("base", (0.6, 0.6), "3 of 3 runs of base"),  # nor is it level at the same distance
        ("nobody", (0.6, 0.7), ""),
    ],
)
def test_what_is_behind_went_as_far_as_what_is_ahead(short, ends, said):
    def one(name, end):
        made = arm([end, end + 0.01, end + 0.02], curve={0: [0.1, 0.12, 0.11], 9: [end, end + 0.01, end + 0.02]})
        made.curves["eval/kl"] = {"step": [0, 9], "values": [[0.0, 3.0 if name == short else 4.0]] * 3}
        return made

    found = Results({"base": one("base", ends[0]), "method": one("method", ends[1])})
    claim = conclude("better", greater(found, "eval/accuracy", "method", "base", step=along.at("eval/kl", 4.0)))
    problems = beds.never_there(found, claim.primary)
    assert [problem.partition(" end before eval/kl 4")[0] for problem in problems] == ([said] if said else [])
    assert set(problems) <= set(beds.problems(found, claim))
    at_the_end = conclude("better", greater(found, "eval/accuracy", "method", "base"))
    assert beds.never_there(found, at_the_end.primary) == []


def test_a_gain_that_few_seeds_cannot_tell_is_not_yet_the_fault_of_the_bed():
    def judged(*ends, start=0.1, first=0.15, looks=verdicts.LOOKS):
        curve = {0: [start] * len(ends), 5: [first] * len(ends), 9: list(ends)}
        found = Results({"base": arm(list(ends), curve=curve), "method": arm([0.7 + e / 9 for e in ends])}, looks)
        claim = conclude("better", greater(found, "eval/accuracy", "method", "base"))
        return beds.unsure_of(found, beds.examined(found, claim), beds.Bed())

    assert judged(0.2, 0.6, 0.3, 0.5) == "base"  # 0.3, 3.3 standard errors of 0.091: four of them at 64 seeds
    assert judged(0.2, 0.6, 0.3, 0.5, looks=()) == ""  # no look is left
    assert judged(0.39, 0.41, 0.4, 0.42) == ""  # told already
    assert judged(0.1, 0.9, -0.5, 0.1) == ""  # 0.05 with an error of 0.29: hopeless with 64, too
    assert judged(0.0, 0.05, 0.0, 0.03) == ""  # a loss is none
    assert judged(0.9, 0.99, 0.95, 0.92) == ""  # another fault: no room


def test_parts_at_a_budget_and_along_it():
    """KL differs by seed and arm: values are read where each has spent the same, linear between evaluations."""
    spent = {"base": [[0.0, 2.0, 4.0], [0.0, 4.0, 8.0]], "method": [[0.0, 1.0, 2.0], [0.0, 8.0, 4.0]]}
    gold = {"base": [[1.0, 2.0, 9.0], [1.0, 5.0, 0.0]], "method": [[1.0, 4.0, 6.0], [1.0, 9.0, 9.0]]}

    def made(name):
        found = arm([row[-1] for row in gold[name]])
        curves = {"eval/kl": spent[name], "eval/gold": gold[name]}
        curves = {k: {"step": [0, 5, 10], "values": v} for k, v in curves.items()}
        return dataclasses.replace(
            found, curves=curves, metrics={k: [r[-1] for r in v["values"]] for k, v in curves.items()}
        )

    both = Results({name: made(name) for name in spent})
    part = greater(both, "eval/gold", "method", "base", step=at("eval/kl", 3.0))
    # base: halfway from 2 to 9; three quarters of 1 to 5. method: never there, its last; three eighths of 1 to 9
    assert part.values == doubles((6.0 - 5.5, 4.0 - 4.0))
    assert part.text == "eval/gold at eval/kl 3, method - base > 0"
    assert part.short == 1 and "1 of 4 runs end before that, at their last value" in str(judged(part))
    whole = greater(both, "eval/gold", "method", "base", step=up_to("eval/kl", 2.0))
    assert whole.values == doubles((0.5 * (2.5 + 5.0) - 1.5, 2.0 - 2.0))
    assert whole.text == "eval/gold over eval/kl up to 2, method - base > 0"
    assert whole.short == 0 and "end before" not in str(judged(whole))
    assert greater(both, "eval/gold", "method", "base", step=at("eval/kl", 0.0)).values == (0.0, 0.0)
    with pytest.raises(KeyError):
        greater(both, "eval/gold", "method", "base", step=at("eval/other", 3.0))


def test_a_part_against_a_share_of_the_other():
    """Seed by seed in float64: the share of the mean would be the same margin for all seeds, and without an error."""
    base, method = [10.0, 20.0, 14.0, 31.0], [3.0, 9.0, 5.0, 12.5]
    both = Results({name: arm(x, metric="eval/tokens") for name, x in (("base", base), ("method", method))})
    part = claims.smaller_than_share(both, "eval/tokens", "method", "base", share=0.6)
    wanted = [np.float64(m) - np.float64(0.6) * np.float64(b) for m, b in zip(method, base, strict=True)]
    assert part.values == doubles(wanted) and part.values == doubles((-3.0, -3.0, -3.4, -6.1))
    assert part.text == "eval/tokens, method - 0.6 of base < 0"
    assert (part.sign, part.by, part.kind) == (-1, 0.0, "share")
    # mean -3.875, sd 1.495271, t(3) = 3.182446, half width 2.379309
    found = judged(part)
    assert found.verdict == "supported here" and not found.small and found.improvement == 1.0
    near_to.assert_printed((found.mean, found.low, found.high), (-3.875, -6.254309, -1.495691), 6)
    by_mean = judged(smaller(both, "eval/tokens", "method", "base", by=0.4 * float(np.mean(base))))
    assert by_mean.verdict == "undecided", "half as long in every seed, and the seeds differ in length"
    half = judged(claims.smaller_than_share(both, "eval/tokens", "method", "base", share=0.1))
    assert half.verdict == "contradicted"
    # at the threshold: undecided, though within d* of zero, as the method is far from the base
    near = dataclasses.replace(both, d_star={"eval/tokens": 9.0})
    assert judged(claims.smaller_than_share(near, "eval/tokens", "method", "base", share=0.4)).verdict == "undecided"
    more = claims.greater_than_share(both, "eval/tokens", "base", "method", share=2.0, step=None)
    assert more.values == doubles((4.0, 2.0, 4.0, 6.0)) and more.text.endswith("base - 2 of method > 0")
    grows = arm([31.0, 32.0, 33.0], metric="eval/tokens", curve={0: [10.0, 11.0, 10.0], 9: [31.0, 32.0, 33.0]})
    fell = Results({"base": grows, "method": arm([3.0, 4.0, 3.0], metric="eval/tokens")})
    assert claims.smaller_than_share(fell, "eval/tokens", "method", "base", share=0.6).fallen


def test_a_spread_is_a_part():
    """Distances to the own median: base .1, .4, .8, .9 -> .5, .2, .2, .3; method .5, .6, .6, .7 -> .1, 0, 0, .1."""
    both = results(base=[0.1, 0.4, 0.8, 0.9], method=[0.5, 0.6, 0.6, 0.7])
    part = steadier(both, "eval/accuracy", "method", "base")
    assert part.values == doubles((-0.4, -0.2, -0.2, -0.2)) and part.sign == -1
    assert judged(part).verdict == "supported here"
    assert judged(steadier(both, "eval/accuracy", "base", "method")).verdict == "contradicted"


def test_a_gain_beyond_that_of_another_metric():
    """Differences .2, .3 in one metric, .1, .3 in the other: .1 and 0 between them, seed by seed."""
    one, other = {"base": [0.1, 0.2], "method": [0.3, 0.5]}, {"base": [0.4, 0.4], "method": [0.5, 0.7]}
    both = Results({
        name: dataclasses.replace(arm(one[name]), metrics={"eval/hard": one[name], "eval/easy": other[name]})
        for name in one
    })  # fmt: skip
    part = gains_more(both, "eval/hard", "eval/easy", "method", "base")
    assert part.values == doubles((0.1, 0.0))
    assert part.text == "eval/hard, (method - base) less that of eval/easy > 0"
