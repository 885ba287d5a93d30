"""An agents' experiment in the world of local files: two steps of training, and one line for what does not serve."""

import json
import sys
from itertools import pairwise

import numpy as np
import pytest

from experiments.agents import gigpo, stratified_grpo
from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.envs import webshop
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli, multi_turn_plan
from tests import close
from tests.models_for_tests import byte_model, byte_tokenizer
from tests.shop_for_tests import first_products, forty_mugs

SIZES = ["--max-turns", "2", "--action-tokens", "8", "--observation-tokens", "60", "--max-new-tokens", "80"]


@pytest.fixture()
def shop(tmp_path, monkeypatch):
    """Forty mugs; a search that needs no package."""
    monkeypatch.setattr(webshop, "bm25_search", first_products)
    return forty_mugs(tmp_path)


def test_what_is_no_action_costs_in_training_alone(shop, tmp_path):
    """Success is measured by what a shop pays, whatever training takes off."""
    tokenizer = tokenizers.load(byte_tokenizer(tmp_path))
    action = [*tokenizer.encode("buy it"), tokenizer.eos_ids[0]]
    for settings, paid in ((gigpo.Settings, [-0.1, 0.0]), (multi_turn_plan.Settings, [0.0, 0.0])):
        parts = multi_turn_plan.open_place(settings(data=f"webshop:{shop}"), tokenizer)
        begun = [(part.env, part.env.reset(np.zeros((2,), np.uint32), part.tasks[0])) for part in parts]
        assert [env.step(state, action).reward for env, state in begun] == paid


def test_places_hold_products_out(shop, tmp_path):
    tokenizer = tokenizers.load(byte_tokenizer(tmp_path))
    train, held = multi_turn_plan.open_place(multi_turn_plan.Settings(data=f"webshop:{shop}"), tokenizer)
    mine, theirs = ({goal.asin for goal in part.tasks} for part in (train, held))
    assert len(mine) + len(theirs) == 40 and not mine & theirs and theirs
    shown = tokenizer.decode(np.asarray(held.problems.tokens[0])[np.asarray(held.problems.valid[0])].tolist())
    assert "i need a mug" in shown
    forty_mugs(shop, instructions=40)  # a whole catalogue is parted as the benchmark parts it, 100 to train on
    whole = multi_turn_plan.Settings(data=f"webshop:{shop}", eval_problems=7)
    assert [len(part.tasks) for part in multi_turn_plan.open_place(whole, tokenizer)] == [100, 7]
    (shop / "items_human_ins.json").unlink()
    train, _ = multi_turn_plan.open_place(multi_turn_plan.Settings(data=f"webshop:{shop}"), tokenizer)
    assert train.tasks[0].attributes == ("lead free",)  # the written ones are gone


def test_places_that_are_none(shop, tmp_path, monkeypatch):
    tokenizer = tokenizers.load(byte_tokenizer(tmp_path))
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setitem(sys.modules, "textworld", None)
    for data, message in (
        (f"shop:{shop}", "give webshop:FOLDER, alfworld:FOLDER, textworld:FOLDER, textarena:GAME, gymnasium:NAME, "),
        ("webshop:nowhere", "--data webshop:nowhere: give webshop:FOLDER"),
        (f"webshop:{empty}", r"empty has 0 files items_ins_v2\*.json; it should have one"),
        (f"alfworld:{empty}", "give json_2.1.1, which holds train and valid_unseen"),
        (f"textworld:{empty}", "no .z8 or .ulx file below the folder; make games with tw-make"),
    ):
        with pytest.raises(UserError, match=message):
            multi_turn_plan.open_place(multi_turn_plan.Settings(data=data), tokenizer)


def test_flags_of_the_host_need_data(tmp_path):
    with pytest.raises(UserError, match="--slots is read by no chosen arm"):
        cli.run(gigpo, ["--smoke", "--plan", "--arm", "gigpo", "--slots", "4"])


@pytest.mark.slow
def test_two_steps_in_a_shop(shop, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    byte_model(folder, "qwen2", max_positions=700)
    arguments = ["--model", str(folder), "--data", f"webshop:{shop}", *SIZES, "--slots", "3", "--eval-problems", "2"]
    chosen = ["--smoke", "--seeds", "1", "--arm", "grpo", "gigpo", "critic", "--out", str(tmp_path / "out")]
    found = cli.run(gigpo, [*chosen, *arguments])
    for name, arm in found.arms.items():
        assert np.isfinite(arm.metrics["loss/total"]).all() and arm.metrics["world/failed_fraction"] == [0.0]
        lacks = {"step/shared"} if name == "critic" else set()  # who has a critic has no groups
        assert arm.metrics["eval/success"] == [0.0] and set(gigpo.METRICS) - lacks <= set(arm.metrics)
    assert any(name.startswith("value/") for name in found.arms["critic"].metrics)
    divided = ["--arm", "grpo", "--mesh", "data=2,fsdp=2", "--microbatches", "2", "--out", str(tmp_path / "mesh")]
    split = cli.run(gigpo, ["--smoke", "--seeds", "1", *divided, *arguments]).arms["grpo"].metrics
    for name in ("reward/mean", "policy/entropy", "length/mean_tokens"):
        close.assert_relative(split[name], found.arms["grpo"].metrics[name], err_msg=name)
    with pytest.raises(UserError, match="prompts and --max-new-tokens 600 need"):
        more = {"--max-new-tokens": "600", "--max-turns": "99"}
        cli.run(gigpo, [*chosen, *(more.get(flag, word) for flag, word in pairwise(["", *arguments]))])


@pytest.mark.slow
def test_searches_are_trained_with_tools(tmp_path):
    rows = [{"prompt": f"What is {k} + {k}?", "answer": str(2 * k)} for k in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    folder = tmp_path / "model"
    folder.mkdir()
    byte_model(folder, "qwen2", max_positions=1024)
    sizes = ["--max-turns", "2", "--action-tokens", "4", "--observation-tokens", "8", "--max-new-tokens", "24"]
    command = ["--smoke", "--arm", "grpo", "stratified", "--seeds", "1", *sizes, "--slots", "4", "--eval-problems", "2"]
    data = [
        "--model",
        str(folder),
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--tools",
        "calculator",
        "--verifier",
        "exact",
    ]
    found = cli.run(stratified_grpo, [*command, *data, "--out", str(tmp_path / "out")])
    for arm in found.arms.values():
        assert set(stratified_grpo.METRICS) <= set(arm.metrics) and arm.updates == 2
        assert np.isfinite(arm.metrics["loss/total"]).all() and arm.metrics["world/failed_fraction"] == [0.0]
    with pytest.raises(UserError, match="'oven' is no tool; choose python, calculator, search=CORPUS.jsonl"):
        multi_turn_plan.open_place(multi_turn_plan.Settings(data="chain", tools="oven"), tokenizers.load(folder))
