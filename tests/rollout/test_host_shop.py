"""A shop of three products: the reward by hand, the pages, and a scripted customer."""

import json
import sys
import time

import numpy as np
import pytest

from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.data import webshop
from jaxrl_llm.data.webshop import Goal
from jaxrl_llm.envs import webshop as host_shop
from jaxrl_llm.errors import UserError
from tests.close import doubles
from tests.models_for_tests import byte_tokenizer
from tests.shop_for_tests import ITEMS, write_shop

NO_SEED = np.zeros((2,), np.uint32)
GOAL = Goal("B000000001", "a red mug", ("dishwasher safe", "easy to clean"), ("deep red",), 30.0)


def _overlap(products):
    """A search by shared words."""

    def search(words, n):
        scores = {a: len(set(words.split()) & set(host_shop.page_text(p).split())) for a, p in products.items()}
        return [a for a in sorted(scores, key=lambda a: -scores[a]) if scores[a]][:n]

    return search


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    products = write_shop(tmp_path_factory.mktemp("shop"))
    return host_shop.Shop(products, _overlap(products))


def test_the_last_line_with_an_action_counts_up_to_its_last_bracket():
    for text, action in (
        ("search[a] or click[b]\nso", ("search", "a] or click[b")), ("click[A]\nsearch[]", ("click", "a")),
        ("click[x]\nclick[ Buy Now ].", ("click", "buy now")), ("research[a]", None), ("search[a\n]", None),
    ):  # fmt: skip
        assert host_shop.read_action(text) == action, text


@pytest.mark.parametrize("text", ["search[" * 50_000, "click[" + "]\nclick[" * 50_000, "]" * 200_000])
def test_long_texts_are_read_once(text):
    start = time.process_time()
    assert host_shop.read_action(text) is None
    assert time.process_time() - start < 5.0


def test_likeness_is_the_token_set_ratio():
    # shared "red", rests "dark" and "blood" with one letter in common: 1 - (4 + 5 - 2) / (2 * 4 + 4 + 5)
    assert host_shop.likeness("dark red", "blood red") == doubles(100 * (1 - 7 / 17))
    assert host_shop.likeness("red", "red mug of clay") == 100.0
    assert host_shop.likeness("RED-blue", "blue, red") == 100.0
    assert host_shop.likeness("wash", "wish") == doubles(75.0)


def test_rewards_by_hand(shop):
    mug, cup, lamp = shop.products.values()
    # both attributes (one by its list, one in a bullet), the colour, the price
    assert host_shop.purchase_reward(GOAL, mug, mug, ["red"]) == 1.0
    assert host_shop.purchase_reward(GOAL, mug, mug, ["navy blue"]) == 0.75
    assert host_shop.purchase_reward(GOAL._replace(price_upper=10.0), mug, mug, []) == 0.5
    # no noun of "Acme Ceramic Mug" is in the name of the cup or the lamp
    assert host_shop.purchase_reward(GOAL, cup, mug, ["red"]) == host_shop.purchase_reward(GOAL, lamp, mug, []) == 0.0
    # other nouns, say of a parser: half shared, and two parts of the category
    assert host_shop.purchase_reward(GOAL, cup, mug, ["red"], nouns=lambda name: {"vessel", name[0]}) == doubles(
        (1 + 1 + (cup.price <= 30.0)) / 4
    )
    # neither query nor category, and a twelfth or a fifth of the nouns: a tenth, and half
    dear = GOAL._replace(price_upper=200.0)
    wide = {"x", *"abcdefghijk"}
    assert host_shop.purchase_reward(dear, lamp, mug, [], nouns=lambda n: wide if n == mug.name else {"x"}) == (
        doubles(0.1 / 4)
    )
    assert host_shop.purchase_reward(
        dear, lamp, mug, [], nouns=lambda n: {"x", *"bcde"} if n == mug.name else {"x"}
    ) == doubles(0.5 / 4)


def test_a_scripted_customer(shop):
    world = host_shop.shop_env(shop)
    visit = world.reset(NO_SEED, GOAL)
    assert host_shop.page(shop, visit) == "WebShop [SEP] Instruction: [SEP] a red mug [SEP] Search"
    said = world.step(visit, "I look.\nsearch[ Ceramic mug ]")
    assert said.text == (
        "Instruction: [SEP] a red mug [SEP] Back to Search [SEP] Page 1 (Total results: 1) [SEP] Next > [SEP] "
        "B000000001 [SEP] Acme Ceramic Mug [SEP] $12.5"
    )
    for useless in ("buy it", "click[buy now]", "click[B000000003]", "search[]", "click[< Prev]"):
        assert world.step(said.state, useless)[:4] == (said.state, said.text, 0.0, False)
    before = world.identity(said.state)
    said = world.step(said.state, "click[b000000001]")
    assert said.text == (
        "Instruction: [SEP] a red mug [SEP] Back to Search [SEP] < Prev [SEP] color [SEP] navy blue [SEP] red [SEP] "
        "size [SEP] 12 | 16 oz [SEP] Acme Ceramic Mug [SEP] Price: $12.5 [SEP] Rating: N.A. [SEP] Description "
        "[SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    assert world.identity(said.state) != before
    item = said
    said = world.step(
        world.step(said.state, "click[navy blue]").state, "click[Red]"
    )  # another choice of the same option
    assert said.text.startswith("You have clicked red. Instruction:") and said.state.chosen == (("color", "red"),)
    features = world.step(said.state, "click[Features]")
    assert features.text.endswith("< Prev [SEP] keeps warm [SEP] easy to clean")
    assert world.step(features.state, "click[< Prev]").state == said.state
    assert world.step(said.state, "click[< prev]").state.chosen == ()
    assert world.step(said.state, "click[back to search]").state == visit
    assert world.step(item.state, "click[Buy Now]")[2:4] == (0.75, True)
    assert world.step(said.state, "click[Buy Now]")[2:4] == (1.0, True)


def test_what_is_no_action_costs(shop):
    """A search for nothing and a button of another page are none; the page stays, and so does what a purchase pays."""
    world = host_shop.shop_env(shop, penalty=0.1)
    state, paid = world.reset(NO_SEED, GOAL), []
    for text in ("mug please", "search[]", "click[buy now]", "search[red mug]", f"click[{GOAL.asin}]", "click[lime]"):
        said = world.step(state, text)
        state = said.state
        paid.append(said.reward)
    assert paid == [-0.1, -0.1, -0.1, 0.0, 0.0, -0.1] and not said.done
    bought = [env.step(state, "click[buy now]") for env in (world, host_shop.shop_env(shop))]
    assert bought[0].reward == bought[1].reward > 0 and bought[0].done


def test_pages_of_ten(shop):
    world = host_shop.shop_env(shop._replace(search=lambda words, n: ["B000000001"] * 9 + ["B000000002", "B000000003"]))
    said = world.step(world.reset(NO_SEED, GOAL), "search[x]")
    assert "Page 1 (Total results: 11)" in said.text and "B000000003" not in said.text
    said = world.step(said.state, "click[Next >]")
    assert "Page 2 (Total results: 11) [SEP] < Prev [SEP] Next > [SEP] B000000003 [SEP] Desk Lamp" in said.text
    assert "B000000002" not in said.text and "Page 1" in world.step(said.state, "click[< Prev]").text


def test_problems_show_the_first_page(shop, tmp_path):
    tokenizer = tokenizers.load(byte_tokenizer(tmp_path))
    out = host_shop.shop_texts(shop, [GOAL], tokenizer, action_tokens=40, observation_tokens=400)
    shown = tokenizer.decode(np.asarray(out.problems.tokens[0])[np.asarray(out.problems.valid[0])].tolist())
    assert shown.startswith("You are shopping") and shown.endswith("a red mug [SEP] Search")
    state = out.env.reset(NO_SEED, out.tasks[0])
    for action, reward in (
        ("search[mug]", 0.0),
        ("click[B000000001]", 0.0),
        ("click[red]", 0.0),
        ("click[buy now]", 1.0),
    ):
        heard = out.env.step(state, tokenizer.encode(action))
        state = heard.state
        assert heard.reward == reward and heard.done == bool(reward)
    with pytest.raises(UserError, match="goal 'a red mug' is for B1, which the shop does not have"):
        host_shop.shop_texts(shop, [GOAL._replace(asin="B1")], tokenizer, action_tokens=4, observation_tokens=4)


def test_bm25_finds_the_product(shop, tmp_path):
    pytest.importorskip("bm25s")
    search = host_shop.bm25_search(shop.products)
    assert search("ceramic mug for coffee", 50) == ["B000000001"] and search("lamp", 1) == ["B000000003"]
    assert search("zebra", 5) == search("the", 5) == search("!", 5) == []
    items = [ITEMS[0] | {"asin": f"C{k:03d}", "name": f"Mug number{k}"} for k in range(30)]
    (tmp_path / "items.json").write_text(json.dumps(items))
    (tmp_path / "notes.json").write_text("{}")
    many = webshop.products(tmp_path / "items.json", tmp_path / "notes.json")
    assert host_shop.bm25_search(many)("number7", 3) == ["C007"]


def test_without_the_package_the_remedy_is_named(shop, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_llm\[tasks\]', or give a search"):
        host_shop.bm25_search(shop.products)
