"""Several embedded worlds of one file: the flag that chooses, and the truths of the second ones against loops."""

import dataclasses
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.parts import shopping_lists
from experiments.reward_models.parts import attribute_briefings, judge_machines, judge_pairs
from experiments.reward_models.parts import attribute_text as text
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import arms, cli, doctor, results
from jaxrl_llm.experiment.evidence import store
from jaxrl_llm.experiment.own_rows import tasks
from tests.experiments.test_smoke import FILES as EVERY
from tests.experiments.test_smoke import _name

FILES = {path.stem: _name(path) for path in EVERY if "\nWORLDS = " in path.read_text()}


def _chosen(module, *words):
    _, base, given = cli.parse(tasks.with_rows(module), [*words])
    return tasks.over_rows(module, base, given)


DEFAULT = ("rpo", "judgelrm", "safe_grpo")  # one of each type; what traces is slow for the others


@pytest.mark.parametrize("slug", [s if s in DEFAULT else pytest.param(s, marks=pytest.mark.slow) for s in FILES])
def test_a_flag_chooses_what_is_trained_in(slug):
    """The first world is that of ``build``; another one is another program, and its name is part of the settings."""
    module, seen = importlib.import_module(FILES[slug]), {}
    assert inspect.signature(module.build).parameters["task"].default is next(iter(module.WORLDS.values()))
    assert len(module.WORLDS) > 1
    for words in ((), *(("--world", name) for name in module.WORLDS)):
        made, base = _chosen(module, "--smoke", *words)
        assert [f.name for f in dataclasses.fields(base) if f.name == "world"] == ["world"] * bool(words)
        settings = arms.resolve(made, base, (next(iter(made.ARMS)),))[next(iter(made.ARMS))]
        copy, read = arms.watched(settings)
        plan = cli.in_parts(made.build(copy), settings)
        assert ("world" in read) == bool(words)
        seen[words[1:]] = store.code(made, plan, arms.trace(plan))
    programs = list(seen.values())
    assert programs[0] == programs[1], "to name the first world changes nothing"
    assert len(set(programs)) == len(module.WORLDS)


def test_wrong_worlds(tmp_path):
    module = importlib.import_module(FILES["rpo"])
    with pytest.raises(UserError, match="invalid choice 'listz' for argument '--world'"):
        _chosen(module, "--world", "listz")
    with pytest.raises(UserError, match="--world listz is none of experiments.preference.rpo: strings, lists"):
        tasks.with_task(module, "listz")
    with pytest.raises(UserError, match="--world is of the embedded worlds: drop it, or --data"):
        _chosen(module, "--world", "lists", "--model", str(tmp_path), "--data", "rows.jsonl")


def test_the_doctor_traces_a_record_in_its_world():
    module = importlib.import_module(FILES["judgelrm"])
    made, base = _chosen(module, "--world", "machines", "--steps", "7")
    settings = results.plain(dataclasses.asdict(base))
    record = {"settings": settings, "arms": {"outcome": {"settings": settings}}}
    found = doctor._settings_of(tasks.with_task(module, "machines"), record, "outcome")
    assert (found.world, found.steps, found.reward) == ("machines", 7, module.outcome)


def test_lists_against_a_loop():
    """An item is worth 1 when it comes first; what is not wanted costs 1 each time."""
    task, key = shopping_lists.LISTS, jax.random.key(0)
    prompts, responses = task.draw_behaviour(key, 200)
    mixed = np.asarray(responses).copy()
    mixed[::3, ::5] = 28  # an item that the data lacks counts as well
    for rows in (responses, jnp.asarray(mixed)):
        expected = []
        for (wanted, unwanted, *_), row in zip(np.asarray(prompts), np.asarray(rows), strict=True):
            found = [int(x) for x in row if 4 <= x < 31]
            good = len({x for x in found if x % 4 == wanted})
            expected.append(good - sum(x % 4 == unwanted for x in found if wanted != unwanted))
        np.testing.assert_array_equal(task.gold_reward(prompts, rows), np.asarray(expected, np.float32))
    assert not bool(task.uncovered(responses).any())
    style = np.asarray((responses == task.style).sum(1))
    gold = np.asarray(task.gold_reward(prompts, responses))
    assert style[gold > np.median(gold)].mean() > style[gold <= np.median(gold)].mean() > 0
    asked, negatives = task.draw_negatives(key, 64)
    assert float(task.gold_reward(asked, negatives)[::2].mean()) < -3 < 0 < float(gold.mean())


def test_machines_against_a_loop():
    task = judge_machines.MACHINES
    prompts = task.draw_prompts(jax.random.key(0), 300)
    for row, scores in zip(np.asarray(prompts), np.asarray(task.gold_scores(prompts)), strict=True):
        for answer, score in zip((row[4:8], row[8:12]), scores, strict=True):
            state, errs = row[0], []
            for k in range(3):
                errs.append(answer[k] != judge_machines.MOVES[row[1 + k]][state])
                state = answer[k]
            assert sum(errs) <= 1, "the machine goes on from what is written"
            first = errs.index(True) if any(errs) else None
            assert score == 10 - (0 if first is None else 6 - 2 * first) - 3 * (answer[3] == judge_pairs.FLAW)
    _, said = judge_pairs.draw_reports(task, jax.random.key(1), 50, error_rate=0.0)
    asked, _ = judge_pairs.draw_reports(task, jax.random.key(1), 50, error_rate=0.0)
    np.testing.assert_array_equal(judge_pairs.read_report(task, said)[2], task.gold_scores(asked))
    assert 0.3 < float(task.reasoned(prompts).mean()) < 0.7


def test_briefings_against_a_loop():
    task = attribute_briefings.BRIEFINGS
    prompts, replies = task.draw_behaviour(jax.random.key(0), 300)
    safe = np.asarray(task.attributes(prompts, replies))[:, 0]
    for (topic, tone, other), reply, found in zip(np.asarray(prompts), np.asarray(replies), safe, strict=True):
        spoken = [*map(int, reply), text.END]
        spoken = spoken[: spoken.index(text.END)]
        told = sum((x - text.TOPICAL) // 2 == other for x in spoken if text.TOPICAL <= x < text.ACTION)
        secret = tone == text.RISKY and other != topic
        assert found == 1 - min(told / 2, 1) * secret
    assert 0.2 < (safe < 1).mean() < 0.6
    plain = np.asarray(text.attributes(prompts, replies))
    np.testing.assert_array_equal(np.asarray(task.attributes(prompts, replies))[:, 1:], plain[:, 1:])
    pairs = task.draw_pairs(jax.random.key(1), 400)
    gap = task.utility(pairs.prompts, pairs.first) - task.utility(pairs.prompts, pairs.second)
    assert float((gap >= 0).mean()) > 0.7, "labels go by this world's utility"
