"""Rates are chosen on what training shows: rewards, or rows held out of a table; never on evaluation problems."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import reduce
from jaxrl_llm.curriculum.uniform import make_uniform
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import loop
from jaxrl_llm.experiment.evidence import standard, store, tuning
from jaxrl_llm.experiment.results import Results
from jaxrl_llm.train.offline import Offline
from jaxrl_llm.train.plan import Plan, Stage
from tests import close
from tests.close import doubles
from tests.experiment import tiny
from tests.experiment.made import arm, made_module

ROWS = 16  # of which two are held out: they want another answer than the others


def offline(rate: float, *, rows_per_step: int = 4, whole: bool = False) -> Offline:
    """Squared distance of a number to the rows' answers."""

    def loss(params, extras, rows, total=None):
        errors = jnp.square(params["x"] - rows["wanted"])
        value = reduce.scalars(errors) if total is None else jnp.sum(errors) / total
        return value, {"tokens/trained": jnp.asarray(errors.size, jnp.float32)}

    table = {"wanted": jnp.where(jnp.arange(ROWS) < ROWS - 2, 1.0, 3.0)}
    count = (lambda rows: jnp.float32(rows["wanted"].shape[0])) if whole else None
    return Offline(lambda extras: table, make_uniform(), rows_per_step, loss, optax.sgd(rate), whole=count)


def plan(rate: float, **more) -> Plan:
    measured = {"eval/accuracy": jnp.float32(0.0)}
    return Plan(lambda key: {"x": jnp.float32(0.0)}, (Stage(offline(rate, **more), 6),), lambda params, key: measured)


def test_rows_held_out_are_not_trained_on_and_their_loss_is_seen():
    found = loop.run_arm(tuning.tried(plan(0.5)), tiny.Settings(steps=6, eval_every=1), [0, 1])
    assert "eval/accuracy" not in found.metrics, "nothing is measured"
    values = np.asarray(found.curves[tuning.HELD]["values"])
    np.testing.assert_array_equal(values[:, 0], 9.0)  # before the first update: (0 - 3)^2
    # it goes to the mean of the rows that train: 1, for those that want 3 are not among them
    np.testing.assert_array_equal(values[:, 2:], 4.0)
    close.assert_near(np.asarray(found.curves["loss/total"]["values"])[:, 2:], 0.0)


def test_parts_of_a_batch_show_the_same_loss_of_held_out_rows():
    method = offline(0.1, whole=True)
    seen = []
    for parts in (1, 2):
        own = plan(0.1)._replace(stages=(Stage(tuning.held_out(method._replace(microbatches=parts)), 4),))
        found = loop.run_arm(own, tiny.Settings(steps=4, eval_every=1), [0])
        seen.append(found.curves[tuning.HELD]["values"])
    close.assert_relative(*seen)


def test_too_few_rows_and_streams_are_refused():
    method = tuning.held_out(offline(0.1, rows_per_step=15))
    with pytest.raises(UserError, match="--tune leaves 14 of 16 rows to train on, a step takes 15"):
        method.rows({})
    with pytest.raises(UserError, match="--tune sets rows aside, and --rows-in host reads them as a stream"):
        tuning.held_out(offline(0.1)._replace(stream=lambda seed: iter(())))


def test_each_arm_is_judged_by_what_it_has(tmp_path):
    """A table by its held-out loss, of which less is better; samples by their reward, as before."""
    module = made_module(ARMS={"pairs": {}}, build=lambda settings: plan(settings.learning_rate))
    options = types.SimpleNamespace(fresh=False, microbatches=0, most_skipped=0)
    resolved = {"pairs": tiny.Settings(learning_rate=0.5, eval_every=1)}
    built = {name: module.build(settings) for name, settings in resolved.items()}
    job = standard.Job(module, options, tiny.Settings(), resolved, built, tmp_path, tmp_path)
    found = tuning.tune(job, ["pairs"], (0.001, 0.01, 0.5))
    assert found["metric"] == tuning.HELD and found["best"] == {"pairs": 0.5} and found["at_the_edge"] == ["pairs"]
    means = [np.mean(values) for values in found["curves"]["pairs"].values()]
    assert means[0] > means[1] > means[2] == doubles(4.0)
    online = tiny.build(tiny.Settings(warm_steps=2))
    assert tuning.criterion(online) == (tuning.METRIC, 1)
    assert tuning.tried(online).stages == online.stages, "imitation before a reward is left as it is"


def test_a_table_that_is_validated_holds_no_rows_out(tmp_path):
    """Fresh samples on other problems choose the rate: the table trains whole, and more reward is better."""

    def build(settings):
        return plan(settings.learning_rate)._replace(
            validate=lambda params, key: {"reward/mean": -jnp.abs(params["x"] - 1.0)}
        )

    module = made_module(ARMS={"pairs": {}}, build=build)
    options = types.SimpleNamespace(fresh=False, microbatches=0, most_skipped=0)
    resolved = {"pairs": tiny.Settings(learning_rate=0.5, eval_every=1)}
    built = {name: build(settings) for name, settings in resolved.items()}
    assert tuning.criterion(built["pairs"]) == (tuning.METRIC, 1)
    assert tuning.tried(built["pairs"]).stages == built["pairs"].stages
    job = standard.Job(module, options, tiny.Settings(), resolved, built, tmp_path, tmp_path)
    found = tuning.tune(job, ["pairs"], (0.001, 0.01, 0.5))
    means = {rate: np.mean(values) for rate, values in found["curves"]["pairs"].items()}
    assert found["metric"] == "reward/mean" and f"{found['best']['pairs']:g}" == max(means, key=means.get)
    assert len(set(means.values())) == 3


@dataclasses.dataclass(frozen=True)
class Pulled(tiny.Settings):
    """With a coefficient of the method: how much of an answer is wanted."""

    wanted: float = 0.5
    kind: str = "method"  # which reads it; the baseline does not, and passed gives it to what ignores it


def _pulled(tmp_path, arms):
    def build(settings):
        given = plan(settings.learning_rate)
        wanted = 0.0 if settings.kind == "baseline" else settings.wanted
        if settings.kind == "method":
            stage = given.stages[0]
            rows = lambda extras: {"wanted": wanted * stage.method.rows(extras)["wanted"]}  # noqa: E731
            given = given._replace(stages=(stage._replace(method=stage.method._replace(rows=rows)),))
        return given._replace(validate=lambda params, key: {"reward/mean": params["x"]})

    module = made_module(ARMS=arms, Settings=Pulled, build=build)
    given = types.SimpleNamespace(fresh=False, microbatches=0, most_skipped=0)
    base = Pulled(eval_every=1)
    resolved = {name: dataclasses.replace(base, **changes) for name, changes in arms.items()}
    built = {name: build(settings) for name, settings in resolved.items()}
    return standard.Job(module, given, base, resolved, built, tmp_path, tmp_path)


def test_a_coefficient_of_the_method_is_tried_at_the_best_rate(tmp_path):
    """By the arms that read it and do not set it themselves; the others take the method's."""
    arms = {"method": {}, "baseline": {"kind": "baseline"}, "passed": {"kind": "passed"}, "without": {},
            "fixed": {"wanted": 2.0}}  # fmt: skip
    job = _pulled(tmp_path, arms)
    tuned = tuning.tune(job, ["method", "baseline", "passed"], (0.001, 0.01, 0.5))
    assert tuned["best"] == {"method": 0.5, "baseline": 0.5, "passed": 0.5}
    found = tuning.tune_coefficient(job, tuned, "wanted=0.5,1,1.5")
    own = found["coefficient"]
    assert own["best"] == {"method": 1.5} and own["at_the_edge"] == ["method"] and own["field"] == "wanted"
    assert list(own["curves"]["method"]) == ["0.5", "1", "1.5"]
    assert tuning.chosen_text(found) == "method 0.5, baseline 0.5, passed 0.5, method.wanted 1.5"
    applied = tuning.applied(job, found).resolved
    assert {name: settings.wanted for name, settings in applied.items()} == {
        "method": 1.5, "baseline": 1.5, "passed": 1.5, "without": 1.5, "fixed": 2.0,
    }  # fmt: skip
    assert {settings.learning_rate for settings in applied.values()} == {0.5}


def test_an_ablation_takes_the_rate_of_the_method(tmp_path):
    """At the baseline's its difference to the method would be one of rates, too; as near to both, the baseline's."""
    arms = {
        "method": {}, "baseline": {"kind": "baseline", "wanted": 2.0}, "ablation": {"wanted": 3.0},
        "control": {"kind": "baseline"}, "between": {"kind": "passed", "wanted": 4.0},
    }  # fmt: skip
    tuned = {"best": {"method": 0.5, "baseline": 0.01}}
    applied = tuning.applied(_pulled(tmp_path, arms), tuned).resolved
    assert {name: settings.learning_rate for name, settings in applied.items()} == {
        "method": 0.5, "baseline": 0.01, "ablation": 0.5, "control": 0.01, "between": 0.01,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("wanted=1,2", "at least three different finite values"),
        ("wanted=1,2,inf", "at least three different finite values"),
        ("wanted=a,b,c", "'a,b,c' is no list of float numbers"),
        ("want=1,2,3", "'want' is no number among the settings"),
        ("kind=1,2,3", "'kind' is no number among the settings"),
        ("learning_rate=1,2,3", "'learning_rate' is no number among the settings"),
        ("warm_steps=2,3,4", "no arm of the primary part that trains reads warm_steps"),
    ],
)
def test_coefficients_that_cannot_be_tried_are_named(tmp_path, spec, said):
    job = _pulled(tmp_path, {"method": {}})
    with pytest.raises(UserError, match=said):
        tuning.tune_coefficient(job, {"best": {"method": 0.5}}, spec)


def test_a_rate_at_which_a_seed_diverges_is_the_worst():
    worth = [tuning._worth(values, -1) for values in ([0.1, float("nan"), 0.1], [5.0, 5.0, 5.0], [1.0, 2.0, 3.0])]
    assert worth == [-np.inf, -5.0, -2.0]


def test_a_rate_at_which_a_seed_diverges_at_the_end_is_the_worst(tmp_path, monkeypatch):
    """Its reward until then may be the highest of all."""
    job = _job(tmp_path, {"pairs": {}})
    run = store.run_arms

    def diverging(*given, **named):
        found = run(*given, **named)
        found.arms["pairs@0.5"].metrics["loss/total"][1] = float("nan")
        return found

    assert tuning.tune(job, ["pairs"], (0.001, 0.01, 0.5))["best"] == {"pairs": 0.5}
    monkeypatch.setattr(store, "run_arms", diverging)
    assert tuning.tune(job, ["pairs"], (0.001, 0.01, 0.5))["best"] == {"pairs": 0.01}


def test_a_rate_counts_with_the_next_higher_one():
    assert tuning.with_the_next([1.0, 3.0, 2.0]) == [2.0, 2.5, -np.inf]
    assert tuning.with_the_next([1.0, -np.inf, 9.0]) == [-np.inf, -np.inf, -np.inf], "beside one that diverged"


@pytest.mark.parametrize(
    ("reached", "chosen", "edge"),
    [
        # the highest by itself, 0.544, stands beside a rate that does not hold
        ([0.540, 0.544, 0.231], 0.0005, []),
        ([0.3, 0.5, 0.45], 0.001, []),
        ([0.3, 0.5, 0.6], 0.001, ["sampled"]),  # what is the best of all was not tried: more rates are wanted
        ([0.5, 0.4, 0.3], 0.0005, ["sampled"]),
        ([0.5, 0.4, float("nan")], 0.0005, ["sampled"]),
        # no two that hold are neighbours: the best alone, and nothing is said of a mean with the next
        ([float("nan"), 0.5, float("nan")], 0.001, []),
        ([0.4, float("nan"), 0.5], 0.002, ["sampled"]),
    ],
)
def test_a_rate_of_samples_is_one_whose_next_holds(monkeypatch, tmp_path, reached, chosen, edge):
    """Three seeds do not show the last rate that holds; where values are no rates, each counts alone."""
    rates = (0.0005, 0.001, 0.002)
    built = {f"sampled@{rate:g}": tiny.build(tiny.Settings()) for rate in rates}
    curves = {f"sampled@{rate:g}": np.full(3, value) for rate, value in zip(rates, reached, strict=True)}
    monkeypatch.setattr(store, "run_arms", lambda *given, **named: None)
    monkeypatch.setattr(tuning.sweep, "second_half", lambda found, name, metric: curves[name])
    options = types.SimpleNamespace(fresh=False)
    found = tuning.best(options, tmp_path, "", rates, {}, built, {}, rising=True)
    assert (found["best"], found["at_the_edge"]) == ({"sampled": chosen}, edge)
    pairs = np.isfinite(reached[:-1]) & np.isfinite(reached[1:])
    assert found["with_the_next"] == ["sampled"] * bool(pairs.any())
    alone = tuning.best(options, tmp_path, "", rates, {}, built, {})
    highest = max((value, -rate) for value, rate in zip(np.nan_to_num(reached, nan=-1.0), rates, strict=True))[1]
    assert alone["best"] == {"sampled": -highest} and alone["with_the_next"] == []


@pytest.mark.parametrize("rising", [True, False])
def test_an_arm_that_diverges_at_every_rate_has_none(monkeypatch, tmp_path, rising):
    built = {f"sampled@{rate:g}": tiny.build(tiny.Settings()) for rate in (0.1, 0.2, 0.3)}
    monkeypatch.setattr(store, "run_arms", lambda *given, **named: None)
    monkeypatch.setattr(tuning.sweep, "second_half", lambda found, name, metric: np.array([0.5, np.nan, 0.5]))
    options = types.SimpleNamespace(fresh=False)
    with pytest.raises(
        UserError, match="arm sampled diverges, or has no reward/mean, at every one of 0.1 0.2 0.3 that"
    ):
        tuning.best(options, tmp_path, "", (0.1, 0.2, 0.3), {}, built, {}, rising=rising)


def test_a_rate_of_a_table_counts_alone(tmp_path):
    found = tuning.tune(_job(tmp_path, {"pairs": {}}), ["pairs"], (0.5, 0.01, 0.001))
    assert found["with_the_next"] == [] and list(found["curves"]["pairs"]) == ["0.001", "0.01", "0.5"]


def test_an_arm_keeps_a_rate_of_its_own(tmp_path):
    """One that is measured as it was loaded has 0: another rate would train it; any other cannot be tuned."""
    job = _job(tmp_path, {"pairs": {}, "floor": {"learning_rate": 0.0}, "fast": {"learning_rate": 0.4}})
    found = tuning.tune(job, ["pairs", "floor"], (0.001, 0.01, 0.5))
    assert found["best"] == {"pairs": 0.5} and set(found["curves"]) == {"pairs"}
    moved = tuning.applied(job, found).resolved
    assert {name: settings.learning_rate for name, settings in moved.items()} == {
        "pairs": 0.5, "floor": 0.0, "fast": 0.4
    }  # fmt: skip
    with pytest.raises(UserError, match="--tune: arm fast sets its own learning rate; drop --tune"):
        tuning.tune(job, ["pairs", "fast"], (0.001, 0.01, 0.5))


def test_a_rate_of_many_digits_is_the_one_that_names_its_runs(tmp_path):
    """Else its neighbours are not found, when all seeds of a record have run."""
    found = tuning.tune(_job(tmp_path, {"pairs": {}}), ["pairs"], (0.001, 0.01, 0.123456789))
    assert found["best"] == {"pairs": 0.123457} and list(found["curves"]["pairs"]) == ["0.001", "0.01", "0.123457"]


def test_the_bed_is_examined_at_the_neighbours_too(tmp_path, monkeypatch, capsys):
    """At the higher rate the baseline unlearns: what the method is ahead of there supports nothing."""
    ends = {0.001: [0.4, 0.41, 0.42, 0.4], 0.01: [0.5, 0.51, 0.52, 0.5], 0.5: [0.0, 0.02, 0.0, 0.01]}

    def run_arms(options, resolved, built, identities, seeds, folder, **more):
        found = {}
        for name, settings in resolved.items():
            last = ends[settings.learning_rate]
            curve = {0: [0.1, 0.11, 0.1, 0.1], 3: [0.2, 0.21, 0.22, 0.2], 6: last}
            found[name] = arm([x + 0.1 * (name == "method") + 0.001 * k for k, x in enumerate(last)], curve=curve)
        return Results(found)

    job = _job(tmp_path, {"baseline": {}, "method": {}, "warm": {}})
    monkeypatch.setattr(store, "run_arms", run_arms)
    monkeypatch.setattr(store, "identities", lambda *a, **k: {})
    monkeypatch.setattr(tuning.cli, "build_arms", lambda *a: ({}, {}))
    tuned = {"curves": {"method": {"0.001": [], "0.01": [], "0.5": []}}, "best": {"method": 0.01, "baseline": 0.01}}
    own = {name: dataclasses.replace(settings, learning_rate=0.01) for name, settings in job.resolved.items()}
    found = run_arms(None, own, {}, {}, [], tmp_path)
    lower, higher = tuning.neighbours(job, tuned, dataclasses.replace(found, d_star={"eval/accuracy": 0.02}), 0, 1)
    assert (lower["verdict"], lower["bed"]) == ("supported here", [])
    assert higher["verdict"] == "test bed invalid" and higher["low"] > 0
    assert higher["bed"][0].startswith("eval/accuracy of baseline: the baseline gains -0.09")
    assert f"(n=4, 95 % interval, d* 0.02, better in 1.00); {higher['bed'][0]}" in capsys.readouterr().out


def _job(tmp_path, rows):
    """Arms on a table of rows; ``rows`` as in ARMS."""
    module = made_module(ARMS=rows, build=lambda settings: plan(settings.learning_rate))
    options = types.SimpleNamespace(fresh=False, microbatches=0, most_skipped=0)
    resolved = {
        name: dataclasses.replace(tiny.Settings(learning_rate=0.5, eval_every=1), **changes)
        for name, changes in rows.items()
    }
    built = {name: module.build(settings) for name, settings in resolved.items()}
    return standard.Job(module, options, tiny.Settings(), resolved, built, tmp_path, tmp_path)


def test_an_arm_that_does_not_train_has_no_rate(tmp_path):
    """A floor stays as it is, and the other arm is tuned; where no arm trains there is nothing to do."""

    def build(settings):
        return plan(settings.learning_rate)._replace(**{"stages": ()} if settings.steps == 0 else {})

    module = made_module(ARMS={"pairs": {}, "floor": {}}, build=build)
    options = types.SimpleNamespace(fresh=False, microbatches=0, most_skipped=0)
    resolved = {"pairs": tiny.Settings(learning_rate=0.5, eval_every=1), "floor": tiny.Settings(steps=0)}
    built = {name: build(settings) for name, settings in resolved.items()}
    job = standard.Job(module, options, tiny.Settings(), resolved, built, tmp_path, tmp_path)
    found = tuning.tune(job, ["pairs", "floor"], (0.001, 0.01, 0.5))
    assert found["best"] == {"pairs": 0.5} and set(found["curves"]) == {"pairs"}
    with pytest.raises(UserError, match="no arm of the primary part trains"):
        tuning.tune(job, ["floor"], (0.001, 0.01, 0.5))
