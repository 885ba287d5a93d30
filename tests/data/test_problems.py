import hashlib
import importlib
import itertools

import numpy as np
import pytest

from experiments.parts import corpus
from experiments.parts.corpus_tasks import relations, sudoku, translation
from jaxrl_llm.data import problems as tables
from jaxrl_llm.data.tasks import chain, countdown, keydoor
from jaxrl_llm.errors import UserError
from tests.models_for_tests import nano

NAMES = ("countdown", "chain", "programs", "sudoku", "strings", "relations", "keydoor", "sql", "translation")


def _module(name):
    own = name in ("countdown", "chain", "programs", "keydoor")
    return importlib.import_module(f"{'jaxrl_llm.data.tasks' if own else 'experiments.parts.corpus_tasks'}.{name}")


def _draw(task, n, seed=0):
    rng = np.random.default_rng(seed)
    return [task.make(rng, int(rng.choice(task.LEVELS))) for _ in range(n)]


@pytest.mark.parametrize("name", NAMES)
def test_splits_are_seeded_distinct_and_disjoint(name):
    task = _module(name)
    train = tables.make_split(task, split="train", n=60, seed=0)
    held = tables.make_split(task, split="heldout", n=12, seed=0)
    assert train == tables.make_split(task, split="train", n=60, seed=0)
    assert {p.prompt for p in train} != {p.prompt for p in tables.make_split(task, split="train", n=60, seed=1)}
    assert len({p.prompt for p in train}) == 60 and len({p.prompt for p in held}) == 12
    assert not {p.prompt for p in train} & {p.prompt for p in held}
    assert not any(tables.is_heldout(p.identity) for p in train)


def test_the_corpus_holds_no_held_out_problem():
    """Identities rebuilt from the text alone, so that nothing the generator says is believed."""
    rng = np.random.default_rng(0)
    for _ in range(1500):
        prompt, _, _ = corpus.document(rng)
        identity = prompt
        if prompt.startswith("cd "):
            *numbers, target = map(int, prompt[3:-2].split())
            identity = f"{sorted(numbers)}:{target}"
        share = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:4], "big") / 2**32
        assert share >= tables.HELDOUT_SHARE


def test_reordered_countdown_numbers_are_one_problem():
    by_identity = {}
    for p in _draw(countdown, 3000):
        by_identity.setdefault(p.identity, set()).add(p.prompt)
    twins = [prompts for prompts in by_identity.values() if len(prompts) > 1]
    assert twins
    for prompts in twins:
        assert len({(tuple(sorted(p[3:-2].split()[:-1])), p[3:-2].split()[-1]) for p in prompts}) == 1


def test_levels_and_weights():
    found = tables.make_split(countdown, split="train", n=200, seed=0, levels=(3, 4), weights=(0.8, 0.2))
    assert {p.level for p in found} == {3, 4}
    assert np.mean([p.level == 3 for p in found]) > 0.6
    with pytest.raises(ValueError, match="split='test' is not one of train, heldout"):
        tables.make_split(countdown, split="test", n=1, seed=0)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_level_is_refused(name):
    with pytest.raises(ValueError, match="level=0"):
        _module(name).make(np.random.default_rng(0), 0)


def test_answers_are_rows_of_the_table():
    problems = _draw(countdown, 20)
    table = tables.encode_problems(nano()[3], problems, answers=tables.countdown_answers)
    assert table.answers["numbers"].shape == (20, 4)
    for k, p in enumerate(problems):
        row = np.asarray(table.answers["numbers"][k])
        assert row[: p.level].tolist() == p.answer["numbers"] and not row[p.level :].any()
        assert (int(table.answers["target"][k]), int(table.level[k])) == (p.answer["target"], p.level)
    chains = _draw(chain, 20)
    table = tables.encode_problems(nano()[3], chains, answers=tables.value_answers)
    assert table.answers["value"].tolist() == [p.answer["value"] for p in chains]
    assert tables.encode_problems(nano()[3], chains).answers == {}


def test_a_long_prompt_is_named_with_its_length():
    tokenizer = nano()[3]
    problems = _draw(translation, 5)
    longest = max(range(5), key=lambda k: len(problems[k].prompt))
    length = len(problems[longest].prompt) + 1  # BOS
    assert tables.encode_problems(tokenizer, problems, prompt_tokens=length).tokens.shape == (5, length)
    with pytest.raises(UserError, match=f"prompt {longest} has {length} tokens, the limit is {length - 1}"):
        tables.encode_problems(tokenizer, problems, prompt_tokens=length - 1)


def test_sudoku_prompts_have_one_solution_by_search():
    for p in _draw(sudoku, 10):
        cells = [c for c in p.prompt[3:-2] if c != "/"]
        blanks = [k for k, c in enumerate(cells) if c == "."]
        assert len(blanks) == p.level
        found = []
        for values in itertools.product("1234", repeat=len(blanks)):
            grid = list(cells)
            for k, value in zip(blanks, values, strict=True):
                grid[k] = value
            lines = [grid[4 * r : 4 * r + 4] for r in range(4)] + [grid[c::4] for c in range(4)]
            lines += [[grid[4 * r + c] for r in (y, y + 1) for c in (x, x + 1)] for y in (0, 2) for x in (0, 2)]
            if all(sorted(line) == ["1", "2", "3", "4"] for line in lines):
                found.append("/".join("".join(grid[4 * r : 4 * r + 4]) for r in range(4)))
        assert found == [p.solution]


def test_relations_by_transitive_closure():
    for p in _draw(relations, 60):
        facts, _, asked = p.prompt[4:-2].partition("?")
        less = {(f[0], f[2]) if f[1] == "<" else (f[2], f[0]) for f in facts.split(",")}
        for _ in range(4):
            less |= {(a, d) for a, b in less for c, d in less if b == c}
        a, b = asked.split(",")
        assert p.answer["value"] == ("<" if (a, b) in less else ">")
        assert ((a, b) in less) != ((b, a) in less)


def test_plans_by_a_second_simulator():
    """A door, a key and walls as sets of positions; every shorter plan fails, so the reference is shortest."""

    def opens(world, plan):
        at, held = world.index("A"), False
        for action in plan[:-1]:
            at += {"l": -1, "r": 1, "p": 0}[action]
            held |= action == "p" and world[at] == "K"
            if not 0 <= at < len(world) or world[at] == "D":
                return False
        return plan[-1:] == "o" and held and "D" in world[max(0, at - 1) : at + 2]

    for p in _draw(keydoor, 60):
        world = p.answer["world"]
        assert p.prompt == f"kd {world}=>" and opens(world, p.solution)
        key, agent, door = world.index("K"), world.index("A"), world.index("D")
        assert len(p.solution) == abs(agent - key) + 1 + abs(key - door) - 1 + 1
