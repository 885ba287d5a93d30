"""The resolved settings of every arm of every experiment, against a committed golden: a move or a merge changes none.

A deliberate change writes the golden anew, ``python -m tests.experiments.test_settings``, in a commit that says so.
"""

import importlib
import json
import pathlib
import re

import pytest

from jaxrl_llm.data import problems
from jaxrl_llm.experiment import arms, results
from tests.experiments.test_smoke import FILES, _ids, _name

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "settings.json"


def _resolved():
    """By experiment: the settings of its embedded run, and of every arm what is other than there."""
    found = {}
    for path in FILES:
        module = importlib.import_module(_name(path))
        base = arms.preset(module, smoke=False, model=module.Settings().model)
        same = results.plain(vars(base))
        by_arm = {name: results.plain(vars(one)) for name, one in arms.resolve(module, base, ()).items()}
        changed = {arm: {k: v for k, v in one.items() if v != same[k]} for arm, one in by_arm.items()}
        found[_ids(path)] = {"settings": same, "smoke": results.plain(module.SMOKE), "arms": changed}
    return found


def _write():
    lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in _resolved().items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def test_settings_of_all_arms_are_the_committed_ones():
    wanted, found = json.loads(GOLDEN.read_text()), json.loads(json.dumps(_resolved()))
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        for part in ("settings", "smoke", "arms"):
            assert one[part] == wanted[name][part], f"{name}: {part}"


def _asked(golden):
    """``(task, levels, split, number)`` of the generated problems that arms ask for, and one arm that does."""
    found = {}
    for name, one in golden.items():
        for arm, changes in one["arms"].items():
            full = one["settings"] | changes
            for task, levels in ((full.get("data"), full.get("levels")), (full.get("code"), full.get("code_levels"))):
                for split, number in (("train", full.get("train_problems")), ("heldout", full.get("eval_problems"))):
                    if task and levels and number and name != "analysis/compose_skills":  # its levels are of functions
                        found[task, tuple(levels), split, number] = f"{name} {arm}"
    return found


@pytest.mark.slow
def test_tasks_have_as_many_problems_as_every_arm_asks_for():
    for (task, levels, split, number), arm in _asked(json.loads(GOLDEN.read_text())).items():
        module = importlib.import_module(f"jaxrl_llm.data.tasks.{task}")
        drawn = problems.draw_split(module, split=split, n=number, seed=0, levels=levels)
        assert len(drawn) == number, f"{arm}: {task} {levels}, {split}"


SPELLED = {"three": 3, "four": 4, "six": 6, "eight": 8}
SIZES = re.compile(r"(?:chains of|Countdown with|Countdown of) ([\w, ]+?) (?:operations|numbers)")


def _sizes(words):
    """What ``2 to 4``, ``2, 3 and 4`` or ``three`` stand for."""
    ends = [SPELLED[x] if x in SPELLED else int(x) for x in re.findall(rf"\d+|{'|'.join(SPELLED)}", words)]
    return list(range(ends[0], ends[-1] + 1)) if " to " in words else ends


def test_docstrings_name_the_levels_that_are_measured():
    assert [_sizes(x) for x in ("2 to 4", "2, 3 and 4", "six to eight", "three")] == [[2, 3, 4]] * 2 + [[6, 7, 8], [3]]
    golden, told = json.loads(GOLDEN.read_text()), {}
    for path in FILES:
        measure = re.search(r"^Measure: .*?^Run: ", path.read_text(), re.DOTALL | re.MULTILINE)
        found = SIZES.search(" ".join(measure[0].split())) if measure else None
        if found and golden[_ids(path)]["settings"].get("levels"):
            told[_ids(path)] = _sizes(found[1]), list(golden[_ids(path)]["settings"]["levels"])
    assert len(told) > 20
    assert {name: both for name, both in told.items() if both[0] != both[1]} == {}


def test_no_arm_turns_a_switch():
    """What is true or false in resolved settings are options of the run, the same in all arms."""
    switches = set()
    for name, one in json.loads(GOLDEN.read_text()).items():
        switches |= {field for field, value in one["settings"].items() if isinstance(value, bool)}
        turned = {field for arm in one["arms"].values() for field, value in arm.items() if isinstance(value, bool)}
        assert not turned, f"{name}: name a function in the place of {turned}"
    assert switches == {"chat", "remat"}


if __name__ == "__main__":
    _write()
