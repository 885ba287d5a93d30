"""The stated error rates are the simulated ones; Holm, gates and the algebra on literal numbers."""

import numpy as np
import pytest

from jaxrl_llm.experiment.evidence import verdicts
from tests import close
from tests.close import doubles

D_STAR = 0.02
NOISE = (0.0105, 0.0184)  # sd of a paired difference of one seed: on 512 and on 64 held-out problems


def simulate(true: float, sd: float, runs: int = 4000, seed: int = 0) -> tuple[dict[str, float], float]:
    """Shares of the verdicts, and seeds until one is reached, of the whole procedure on normal differences."""
    rng = np.random.default_rng(seed)
    counts, seeds = {}, 0
    for _ in range(runs):
        values = rng.normal(true, sd, verdicts.LOOKS[-1])
        for n in verdicts.LOOKS:
            found = verdicts.bounds(values[:n], verdicts.level_at(n, verdicts.LOOKS))
            said = verdicts.decide(found.low, found.high, D_STAR)
            if said != verdicts.UNDECIDED:
                break
        counts[said], seeds = counts.get(said, 0) + 1, seeds + n
    return {name: count / runs for name, count in counts.items()}, seeds / runs


@pytest.mark.parametrize("sd", NOISE)
def test_a_true_zero_is_decided_soon_and_seldom_wrongly(sd):
    shares, seeds = simulate(0.0, sd)
    assert shares.get(verdicts.SUPPORTED_HERE, 0) <= 0.025 + 0.005  # two standard errors of the simulation
    assert shares.get(verdicts.CONTRADICTED, 0) <= 0.025 + 0.005
    assert shares[verdicts.NO_EFFECT] > 0.9
    assert seeds <= 24


@pytest.mark.parametrize("sd", NOISE)
def test_an_effect_of_interest_is_found(sd):
    shares, _ = simulate(D_STAR, sd)
    assert shares[verdicts.SUPPORTED_HERE] >= 0.95
    assert shares.get(verdicts.NO_EFFECT, 0) <= 0.025 and verdicts.CONTRADICTED not in shares


def test_a_noisy_zero_that_stays_open_is_never_often_supported():
    """Where d* cannot be reached every look is used: the levels still add up to 2.5 % a side."""
    shares, seeds = simulate(0.0, 0.2, runs=8000)
    assert seeds > 55
    for said in (verdicts.SUPPORTED_HERE, verdicts.CONTRADICTED):
        assert 0.005 < shares[said] <= 0.025 + 0.0035


def test_levels_add_up_whatever_the_looks():
    for looks in (verdicts.LOOKS, (8,), (4, 12, 13), (8, 16)):
        found = verdicts.levels(looks)
        assert sum(found) == doubles(0.05) and min(found) > 0
        assert verdicts.level_at(looks[-1], looks) == doubles(found[-1])
    assert verdicts.level_at(9, verdicts.LOOKS) == doubles(verdicts.levels()[0])
    assert verdicts.level_at(3, verdicts.LOOKS) == doubles(verdicts.levels()[0])
    for looks in ((), (8, 8), (16, 8), (1, 2)):
        with pytest.raises(ValueError, match="looks="):
            verdicts.levels(looks)


def test_bounds_are_the_t_interval_and_open_without_two_values():
    found = verdicts.bounds([0.1, 0.2, 0.3, 0.2], level=0.05)
    half = 3.18245 * 0.0408248
    close.assert_printed((found.low, found.high), (0.2 - half, 0.2 + half), 6)
    narrow, wide = (verdicts.bounds([0.1, 0.2, 0.3, 0.2], level=x) for x in (0.2, 0.01))
    assert wide.low < found.low < narrow.low and wide.p == narrow.p == found.p < 0.05
    for few in ([], [0.3]):
        assert verdicts.decide(*verdicts.bounds(few)[1:3], 1.0) == verdicts.UNDECIDED
    assert verdicts.bounds([0.1, 0.1]).p == 0.0 and verdicts.bounds([0.0, 0.0]).p == 1.0


def test_holm_holds_the_error_over_all_secondary_parts():
    rng, runs, wrong = np.random.default_rng(1), 2000, 0
    for _ in range(runs):
        p_values = [verdicts.bounds(rng.normal(0, 1, 8)).p for _ in range(5)]
        wrong += any(rejected for _, rejected in verdicts.holm(p_values))
    assert wrong / runs <= 0.05 + 0.01


def test_holm_stops_at_the_first_that_fails():
    """0.03 is above 0.05 / 2, so that 0.04 is not asked, although it is below 0.05."""
    assert [rejected for _, rejected in verdicts.holm([0.03, 0.001, 0.04])] == [False, True, False]
    assert [rejected for _, rejected in verdicts.holm([0.02, 0.001, 0.03])] == [True, True, True]


CURVE = np.array([[0.2, 0.3, 0.4, 0.5], [0.22, 0.32, 0.4, 0.52], [0.18, 0.3, 0.42, 0.5]])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (CURVE, ""),
        (np.full((3, 4), 0.4) + np.array([[0.01], [0.0], [0.02]]), "not four standard errors"),
        (CURVE + [[0, 0, 0.5, 0.0]], "falls from"),
        (CURVE + [[0.4, 0.42, 0.43, 0.44]], "outside 10 - 85 %"),
        (CURVE + [[0, 0.15, 0.08, 0]], "before the first evaluation (step 10)"),
    ],
    ids=["good", "no gain", "unlearns", "ceiling", "too early"],
)
def test_gates_of_a_bed(values, said):
    found = verdicts.gates([0, 10, 20, 30], values, ceiling=1.0)
    assert said in found[0] if said else not found, found


def _curve(*points, apart=0.0):
    """Three seeds whose ends are so far apart: the standard error of their gain is ``apart / sqrt(3)``."""
    values = np.tile(np.asarray(points, float), (3, 1))
    values[:, -1] += np.array([-apart, 0.0, apart])
    return values


@pytest.mark.parametrize(
    ("fine", "faulty", "said"),
    [
        # the standard error is 0.025
        (_curve(0.2, 0.2, 0.31, apart=0.0433), _curve(0.2, 0.2, 0.29, apart=0.0433), "not four standard errors"),
        (_curve(0.2, 0.3, 0.7, 0.61), _curve(0.2, 0.3, 0.7, 0.59), "more than a fifth of its gain"),
        (_curve(0.2, 0.3, 0.84), _curve(0.2, 0.3, 0.86), "outside 10 - 85 %"),
        (_curve(0.0, 0.05, 0.11), _curve(0.0, 0.05, 0.09), "outside 10 - 85 %"),
        (_curve(0.2, 0.379, 0.5), _curve(0.2, 0.383, 0.5), "before the first evaluation"),
    ],
    ids=["errors", "falls", "ceiling", "floor", "early"],
)
def test_where_a_gate_closes(fine, faulty, said):
    """The numbers of the standard, from both sides."""
    steps = range(fine.shape[1])
    assert not verdicts.gates(steps, fine, ceiling=1.0)
    (found,) = verdicts.gates(steps, faulty, ceiling=1.0)
    assert said in found


def test_what_is_undefined_hides_no_fault_of_a_bed():
    """One evaluation that no seed has, at the place where the fault shows best."""
    none = np.full((3, 1), np.nan)
    falls = np.hstack([CURVE[:, :2], none, CURVE[:, 2:] + [[0.5, 0.0]]])
    assert "falls from" in verdicts.gates([0, 10, 20, 30, 40], falls, ceiling=1.0)[0]
    early = np.hstack([CURVE[:, :1], none, CURVE[:, 1:] + [[0.15, 0.08, 0.0]]])
    assert "before the first evaluation (step 20)" in verdicts.gates([0, 10, 20, 30, 40], early, ceiling=1.0)[0]
    # at a budget that no run spends their last values stand for it, a point beyond all steps
    assert "before the first evaluation (step 20)" in verdicts.gates([0, 10, 20, 30], early, ceiling=1.0)[0]
    for k in (0, 3):
        lost = CURVE.copy()
        lost[:, k] = np.nan
        assert "not four standard errors" in verdicts.gates([0, 10, 20, 30], lost, ceiling=1.0)[0]


def test_seeds_without_a_gain_make_it_no_surer():
    two = np.array([[0.0, 0.1], [0.0, 0.5]])
    mean, error = verdicts.gained(two)
    close.assert_printed((mean, error), (0.3, 0.2), 6)
    assert verdicts.gained(np.vstack([two, [[0.0, np.nan]] * 30])) == (mean, error)
    assert verdicts.gained(np.vstack([two, [[0.4, np.nan]]])) == (mean, error), "nor is its start part of the mean"
    assert np.isnan(verdicts.gained([[0.0, np.nan]])[0]) and verdicts.gained([[0.0, np.nan]])[1] == np.inf


def test_a_baseline_at_chance_fails_its_gate():
    noisy = CURVE + np.array([[0.0, 0, 0, 0.05], [0, 0, 0, -0.02], [0, 0, 0, 0.0]])
    assert not verdicts.gates([0, 1, 2, 3], noisy, ceiling=1.0, chance=0.2)
    assert "where guessing earns" in verdicts.gates([0, 1, 2, 3], noisy, ceiling=1.0, chance=0.5)[-1]
    ends = _curve(0.1, 0.2, 0.5, apart=0.0173)  # four standard errors are 0.04
    assert not verdicts.gates([0, 1, 2], ends, ceiling=1.0, chance=0.45)
    assert "where guessing earns 0.47" in verdicts.gates([0, 1, 2], ends, ceiling=1.0, chance=0.47)[-1]


def test_replication_is_two_beds():
    here, not_here, open_ = verdicts.SUPPORTED_HERE, verdicts.CONTRADICTED, verdicts.UNDECIDED
    assert verdicts.across([here, here]) == verdicts.SUPPORTED
    assert verdicts.across([here, open_]) == here and verdicts.across([not_here, open_]) == not_here
    assert verdicts.across([here, not_here]) == open_ and verdicts.across([]) == verdicts.NOT_JUDGED
    assert verdicts.across([verdicts.INVALID, here]) == here and verdicts.across([verdicts.INVALID]) == verdicts.INVALID
    assert verdicts.across([verdicts.NO_EFFECT, open_]) == verdicts.NO_EFFECT
