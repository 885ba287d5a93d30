"""Miniature WebShop files, read back."""

import json

import pytest

from jaxrl_llm.data import webshop
from jaxrl_llm.errors import DataError, UserError
from tests.shop_for_tests import ITEMS, NOTES, WRITTEN, write_shop


def test_products(tmp_path):
    shop = write_shop(tmp_path)
    assert list(shop) == ["B000000001", "B000000002", "B000000003"]  # a repeated and an ill-named one are left out
    mug, cup, lamp = shop.values()
    assert mug.options == {"color": ("navy blue", "red"), "size": ("12 | 16 oz",)} and mug.query == "mugs"
    assert (mug.price, mug.tag, lamp.price, lamp.tag) == (12.5, "$12.5", 100.0, "$100.0")
    assert cup.tag == "$9.99 to $1019.99" and 9.99 <= cup.price <= 1019.99
    assert cup.bullets == ("for tea",) and mug.attributes == ("dishwasher safe", "lead free") and lamp.attributes == ()
    assert write_shop(tmp_path) == shop and len(webshop.products(*_paths(tmp_path)[:2], limit=1)) == 1


def _paths(folder):
    return folder / "items_shuffle.json", folder / "items_ins_v2.json", folder / "items_human_ins.json"


def test_goals(tmp_path):
    shop = write_shop(tmp_path)
    goals = webshop.human_goals(_paths(tmp_path)[2], shop)
    assert [(g.asin, g.attributes, g.options) for g in goals] == [
        ("B000000001", ("dishwasher safe",), ("red", "12 oz"))
    ]
    assert goals[0].instruction.startswith("i need a mug, and price lower than ") and goals[0].price_upper > 12.5
    assert goals[0].instruction.endswith(f"{goals[0].price_upper:.2f} dollars")
    made = webshop.made_goals(_paths(tmp_path)[1], shop)
    assert [g.options for g in made] == [("navy blue", "12 | 16 oz"), ("red", "12 | 16 oz")]
    assert made[0].instruction.startswith("find mugs with color: navy blue, and size: 12 | 16 oz, and price lower")
    assert goals == webshop.human_goals(_paths(tmp_path)[2], shop)
    bounds = {webshop.human_goals(_paths(tmp_path)[2], shop, seed=s)[0].price_upper for s in range(20)}
    assert bounds == {30.0, 40.0, 50.0}  # the larger of two of the four next ones


def test_splits_are_disjoint_and_whole(tmp_path):
    goal = webshop.Goal("a", "", ("x",), (), 1.0)
    goals = [goal._replace(asin=str(k)) for k in range(1600)]
    parts = [webshop.split_goals(goals, split) for split in ("test", "eval", "train")]
    assert list(map(len, parts)) == [500, 1000, 100] and {g.asin for part in parts for g in part} == set(
        map(str, range(1600))
    )
    assert [g.asin for g in parts[0][:4]] == ["1085", "1042", "423", "483"]  # Python's generator with seed 233
    with pytest.raises(UserError, match="split='train' is empty: 10 goals; train begins at 1500"):
        webshop.split_goals(goals[:10], "train")
    with pytest.raises(UserError, match="split='dev' is none of test, eval, train"):
        webshop.split_goals(goals, "dev")


@pytest.mark.parametrize(
    ("file", "value", "message"),
    [
        (0, [ITEMS[0] | {"name": None}], r"items_shuffle.json: product 0 \(B000000001\): name: null is not text"),
        (0, [{"name": "x"}], r"items_shuffle.json: product 0: lacks asin; it has name"),
        (0, [ITEMS[0] | {"pricing": "12 dollars"}], r"product 0 \(B000000001\): pricing: '12 dollars' has no \$"),
        (0, [ITEMS[0] | {"customization_options": {"size": [{}]}}], r"customization_options: size: lacks value"),
        (0, [], r"items_shuffle.json holds no products"),
        (1, {"B000000001": {"attributes": "x"}}, r"attributes: B000000001: attributes: \"x\" is not a list"),
        (1, [], r"items_ins_v2.json: \[\] is not an object"),
    ],
)  # fmt: skip
def test_mistakes_of_products(tmp_path, file, value, message):
    write_shop(tmp_path)
    paths = _paths(tmp_path)
    paths[file].write_text(json.dumps(value))
    with pytest.raises(DataError, match=message):
        webshop.products(*paths[:2])


def test_mistakes_of_instructions(tmp_path):
    shop, path = write_shop(tmp_path), tmp_path / "other.json"
    for value, message in (
        ({"B000000001": [{"instruction": "x"}]}, r"other.json: B000000001\[0\]: lacks instruction_attributes"),
        ({"B9": WRITTEN["B000000001"]}, r"other.json has no instruction for the 3 products"),
    ):
        path.write_text(json.dumps(value))
        with pytest.raises(DataError, match=message):
            webshop.human_goals(path, shop)
    path.write_text(json.dumps({"B000000001": NOTES["B000000001"] | {"instruction_attributes": []}}))
    with pytest.raises(DataError, match="B000000001: instruction_attributes: empty beside an instruction"):
        webshop.made_goals(path, shop)
