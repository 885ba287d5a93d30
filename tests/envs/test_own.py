"""An env of one's own by ``--data module:Class``, as the page of the documentation shows it; and of packages."""

import importlib
import pathlib
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.envs import text
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli
from jaxrl_llm.run import catalog, parts
from tests.models_for_tests import byte_model, byte_tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "own-env.md").read_text()
SIZES = {"action_tokens": 4, "observation_tokens": 12}


@pytest.fixture
def guess(tmp_path, monkeypatch):
    """The file of the page, beside the command."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code.strip().splitlines()) <= 15
    (tmp_path / "guess.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    monkeypatch.delitem(sys.modules, "guess", raising=False)
    return tmp_path


def test_an_env_of_the_page_plays_in_processes(guess):
    byte_tokenizer(guess)
    tokenizer = importlib.import_module("jaxrl_llm.data.tokenizer").load(guess)
    settings = SimpleNamespace(data="guess:Guess", eval_problems=5, env_processes=1)
    train, held = catalog.folders(settings, SIZES, tokenizer)
    assert len(held.tasks) == 5 and not set(map(repr, train.tasks)) & set(map(repr, held.tasks))
    world = text.own_env("guess:Guess")
    state = world.reset(np.zeros(2, np.uint32), 2)
    assert world.first(state) == "Guess my number from 1 to 8.\n"
    assert world.step(state, "2")[1:4] == ("Higher.\n", 0.0, False)
    assert world.step(state, " 3 ")[1:4] == ("Right.\n", 1.0, True)
    far = world.reset(np.zeros(2, np.uint32), 2)
    assert world.identity(far) != world.identity(state)  # what was said tells situations apart


def test_what_names_a_class():
    assert catalog.is_own("guess:Guess") and catalog.is_own("my.envs:make")
    for data in (
        "webshop:FOLDER",
        "gymnasium:CartPole-v1",
        "tfds:gsm8k",
        "rows.jsonl",
        "reasoning_gym:chain_sum",
        "",
        "jaxrl_llm:train",
    ):  # a folder with a split, seen from here
        assert not catalog.is_own(data), data


@pytest.mark.parametrize("body, said", [
    ("class Guess: pass", "has no reset and no step"),
    ("class Guess:\n tasks = 0\n def reset(self, t): return ''\n def step(self, t): return '', 0, 1", "tasks=0"),
    ("Guess = 3", "is int; give a class"),
    ("import nothing_of_the_kind", "No module named"),
])  # fmt: skip
def test_a_wrong_class_is_one_line(guess, body, said):
    (guess / "guess.py").write_text(body)
    with pytest.raises(UserError, match="--data guess:Guess") as wrong:
        text.own_tasks("guess:Guess", 4)
    assert said in str(wrong.value) and "\n" not in str(wrong.value)


def test_what_an_env_returns_is_checked(guess):
    (guess / "guess.py").write_text("class Guess:\n def reset(self, t): return 'a'\n def step(self, t): return 'b'")
    world = text.own_env("guess:Guess")
    with pytest.raises(UserError, match=r"Guess.step returned str; return \(text, reward, done\)"):
        world.step(world.reset(np.zeros(2, np.uint32), 0), "x")


def test_gymnasium_by_name():
    pytest.importorskip("gymnasium")
    world = text.plain_gymnasium("CartPole-v1")
    state = world.reset(np.zeros(2, np.uint32), 3)
    assert world.first(state).endswith("Write a number from 0 to 1.")
    for said in ("7", "-1", "--1", "\u00b2", "\u0661", "9" * 5000, ""):
        assert world.step(state, said).text.startswith("That is no action."), said
    assert world.step(state, " 1\n").reward == 1.0
    with pytest.raises(UserError, match="neither texts nor numbers from a list"):
        text.plain_gymnasium("Pendulum-v1")


def test_families_of_reasoning_gym_are_rows():
    pytest.importorskip("reasoning_gym")
    train, held, verify = parts.load_problems("reasoning_gym:chain_sum", train=40, heldout=4, seed=0)
    assert len(held) == 4 and not {p.prompt for p in train} & {p.prompt for p in held}
    assert verify(held[0].answer, f"<answer>{held[0].solution}</answer>").value == 1.0
    with pytest.raises(UserError, match="no reasoning-gym family 'chess'"):
        parts.load_problems("reasoning_gym:chess", train=4, heldout=4, seed=0)


def test_rows_of_reasoning_gym_are_others_for_every_seed_and_none_is_held_out():
    """A family draws item i from its seed + i: close seeds would give one another's problems."""
    pytest.importorskip("reasoning_gym")
    (one, held), (other, again) = (
        parts.load_problems("reasoning_gym:basic_arithmetic", train=65, heldout=64, seed=seed)[:2] for seed in (0, 1)
    )
    shown = [{problem.identity for problem in rows} for rows in (one, other, held)]
    assert held == again and [len(x) for x in shown] == [65, 65, 64] and len(one) == len(other) == 65
    assert len(set.union(*shown)) == 65 + 65 + 64


AGENTS = sorted(p.stem for p in (ROOT / "experiments" / "agents").glob("*.py") if not p.stem.startswith("_"))
ROWS_ALONE = ("ufo", "w4s", "igpo", "curio", "torl")  # and say why
WORDS = ["--max-turns", "2", "--action-tokens", "4", "--observation-tokens", "90", "--max-new-tokens", "120",
         "--slots", "4", "--eval-problems", "2", "--smoke", "--seeds", "1"]  # fmt: skip
MORE = {"agentgym_rl": ["--turns", "1", "2"]}
FIRST_ARM = {"agentgym_rl": "scaling", "tool_star": "tool_star", "curio": "rlhf", "w4s": "rlao", "loop": "loop"}


@pytest.mark.slow
@pytest.mark.parametrize("data", ["guess:Guess", "gymnasium:CartPole-v1"])
@pytest.mark.parametrize("slug", [slug for slug in AGENTS if slug != "openagi"])
def test_every_agent_plays_it(slug, data, guess, tmp_path):
    if data.startswith("gymnasium"):
        pytest.importorskip("gymnasium")
    byte_model(guess, "qwen2", max_positions=1400)
    module = importlib.import_module(f"experiments.agents.{slug}")
    arm = FIRST_ARM.get(slug, next(iter(module.ARMS)))
    words = [
        *WORDS,
        *MORE.get(slug, []),
        "--arm",
        arm,
        "--model",
        str(guess),
        "--data",
        data,
        "--out",
        str(tmp_path / "out"),
    ]
    if slug in ROWS_ALONE:
        with pytest.raises(UserError, match=re.escape(f"--data {data}: {module.ONLY}")):
            cli.run(module, words)
        return
    found = cli.run(module, words).arms[arm]
    assert found.metrics and all(
        np.isfinite(found.metrics.get(name, [0.0])).all() for name in ("loss/total", "grad/norm")
    )
