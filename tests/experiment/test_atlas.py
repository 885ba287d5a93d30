"""Maps of the atlas: resumable by cell, read as far as they were run, and honest about the rest."""

import functools
import json
import re

import numpy as np
import pytest

from experiments.beds.parts import staleness_map
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, loop
from jaxrl_llm.experiment.evidence import atlas, fingerprints
from tests.experiment import tiny
from tests.experiment.made import made_module


def made_map():
    """Two methods on the table of logits; the dose is the number of steps of imitation before the reward."""
    found = made_module(SMOKE={}, EMBEDDED={"steps": 6, "eval_every": 3})
    found.METHODS = {"none": tiny.build, "other": functools.partial(_slower)}
    found.BASELINE, found.KNOB, found.DOSES, found.BASES = "none", "warm_steps", (0, 2), ("nano", "tiny")
    found.METRIC, found.TITLE = "eval/accuracy", "A map"
    return found


def _slower(settings):
    import dataclasses

    return tiny.build(dataclasses.replace(settings, learning_rate=0.01))


@pytest.mark.slow
def test_cells_that_are_there_are_not_run_again(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(loop, "run_arm", lambda *a, _run=loop.run_arm, **k: ran.append(a[2]) or _run(*a, **k))
    path, module = tmp_path / "map.json", made_map()
    options = atlas.Options(methods=("none", "other"), doses=(0.0,), bases=("nano",), seeds=2)
    kept = atlas.run(module, options, path, tmp_path / "seeds", "atlas FILE")
    assert kept["command"] == "atlas FILE" and {"commit", "made_on"} <= kept.keys()
    assert list(kept["cells"]) == ["nano/none/0", "nano/other/0"] and ran == [[0, 1], [0, 1]]
    assert json.loads(path.read_text()) == kept
    atlas.run(module, options, path, tmp_path / "elsewhere", "another")
    assert len(ran) == 2 and json.loads(path.read_text()) == kept, "the map itself says that they are done"
    more = atlas.Options(methods=("none",), seeds=3, bases=("nano",))
    kept = atlas.run(module, more, path, tmp_path / "seeds")
    assert ran[2:] == [[2], [0, 1, 2]], "one seed more, and another dose"
    assert kept["cells"]["nano/none/0"]["seeds"] == [0, 1, 2] and kept["cells"]["nano/other/0"]["seeds"] == [0, 1]
    paired = atlas.differences(kept, atlas.Cell("other", 0.0, "nano"), "none")
    assert paired.n == 2 and paired.mean < 0, "seeds that both have"
    kept["cells"]["nano/other/0"]["versions"]["device"] = "another"
    assert atlas.differences(kept, atlas.Cell("other", 0.0, "nano"), "none") is None


def test_a_part_of_the_grid_that_is_not_there():
    with pytest.raises(UserError, match="--methods grop: this map has none, other"):
        atlas.cells(made_map(), atlas.Options(methods=("grop",)))
    with pytest.raises(UserError, match="--doses 3.0: this map has 0, 2"):
        atlas.cells(made_map(), atlas.Options(doses=(3.0,)))


def _kept(values):
    cells = {
        name: {"seeds": list(range(len(x))), "values": x, "tail": 3, "problems": 512, "samples": 4, "updates": 120,
               "rollouts": 5760, "learning_rate": 2e-4, "versions": {"device": "cpu"}} for name, x in values.items()
    }  # fmt: skip
    return {"cells": cells, "title": "A map", "knob": "lag", "metric": "eval/accuracy", "baseline": "none",
            "doses": [0, 8], "bases": ["nano", "tiny"], "methods": ["none", "tis", "rec"]}  # fmt: skip


def test_cells_of_maps_made_elsewhere_are_taken_in(tmp_path):
    path, module = tmp_path / "map.json", made_map()
    for name, values in (("a", {"nano/none/0": [0.1, 0.2]}), ("b", {"nano/none/0": [0.3] * 3, "nano/other/0": [0.4]})):
        there = _kept(values) | {"knob": module.KNOB, "metric": module.METRIC}
        (tmp_path / f"{name}.json").write_text(json.dumps(there))
    kept = atlas.joined(module, path, (str(tmp_path / "b.json"), str(tmp_path / "a.json")), "atlas FILE --join b a")
    assert {name: cell["values"] for name, cell in kept["cells"].items()} == {
        "nano/none/0": [0.3] * 3, "nano/other/0": [0.4],
    }, "of two the one with more seeds"  # fmt: skip
    assert kept["command"] == "atlas FILE --join b a" and re.fullmatch(r"[0-9a-f]{12}\+?|", kept["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", kept["made_on"])
    assert json.loads(path.read_text()) == kept
    (tmp_path / "c.json").write_text(json.dumps(_kept({})))
    with pytest.raises(UserError, match="c.json is no map of eval/accuracy by warm_steps"):
        atlas.joined(module, path, (str(tmp_path / "c.json"),))
    with pytest.raises(UserError, match="--join nowhere cannot be read"):
        atlas.joined(module, path, ("nowhere",))


def test_a_page_says_what_was_run_what_helps_and_whether_bases_agree(tmp_path):
    rng = np.random.default_rng(0)
    level = {"none": 0.2, "tis": 0.3, "rec": 0.1}
    values = {f"nano/{m}/8": (x + 0.001 * rng.normal(size=8)).tolist() for m, x in level.items()}
    values["tiny/none/8"], values["tiny/tis/8"] = [0.2, 0.21, 0.19], [0.1, 0.11, 0.1]
    kept = _kept(values)
    text = atlas.page(kept, "map.png", staleness_map)
    assert "5 of 12 cells have been run (cpu), 3 to 8 seeds each" in text and "not tuned" in text
    assert "- lag 8: helps: tis; hurts: rec" in text and "## tiny" in text
    assert "- tis at lag 8: signs differ (nano +0.099" in text and "rec at lag 8" not in text
    assert "| none | 0.200 (n=8) |" in text
    atlas.plot(tmp_path / "map.png", kept)
    assert (tmp_path / "map.png").stat().st_size > 10_000
    assert "Nothing of it has been run." in atlas.page(_kept({}), "map.png", staleness_map)
    assert "Not known: no cell ran on two bases." in atlas.page(_kept({"nano/none/0": [0.1, 0.2]}), "m", staleness_map)


@pytest.mark.slow
def test_methods_of_the_first_map_differ_where_samples_are_stale():
    """As many programs as methods, at lag 8; without a lag the plain gradient is that of the bed."""
    plans = {}
    for name in staleness_map.METHODS:
        settings = atlas.settings_of(staleness_map, atlas.Cell(name, 8.0, "nano"), smoke=True)
        plans[name] = staleness_map.METHODS[name](settings)
    assert fingerprints.same_updates(plans) == []
    from experiments.beds import stale_sampler
    from jaxrl_llm.experiment.evidence import store

    own = atlas.settings_of(staleness_map, atlas.Cell("none", 8.0, "nano"), smoke=False)
    bed = arms.resolve(stale_sampler, arms.preset(stale_sampler, smoke=False, model="nano"), ("grpo",))["grpo"]
    bed = type(bed)(**{**vars(bed), "eval_problems": own.eval_problems, "eval_samples": own.eval_samples})
    pair = {"map": staleness_map.uncorrected(own), "bed": stale_sampler.build(bed)}
    codes = {name: store.code(stale_sampler, plan, arms.trace(plan)) for name, plan in pair.items()}
    assert codes["map"] == codes["bed"], "the bed's seeds serve the map"
