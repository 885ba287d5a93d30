"""A WebShop of three products, in the layout of its files."""

import json

from jaxrl_llm.data import webshop

ITEMS = [
    {
        "asin": "B000000001", "name": "Acme Ceramic Mug", "query": "Mugs ", "product_category": "Home › Kitchen › Mugs",
        "full_description": "Holds hot coffee.", "small_description": ["keeps warm", "easy to clean"],
        "pricing": "$12.50", "customization_options": {
            "Color": [{"value": " Navy Blue", "image": "x"}, {"value": "Red", "image": None}],
            "Size": [{"value": "12/16 oz"}], "Style": None,
        },
        "images": ["x"], "category": "kitchen",
    },
    {
        "asin": "B000000002", "name": "Porcelain Cup", "query": "cups", "product_category": "Home › Kitchen › Cups",
        "full_description": "Thin.", "small_description": "for tea", "pricing": "$9.99$1,019.99",
        "customization_options": {}, "images": ["x"], "category": "kitchen",
    },
    {
        "asin": "B000000003", "name": "Desk Lamp", "query": "lamps", "product_category": "Office › Light › Lamps",
        "full_description": "", "small_description": [], "pricing": None, "customization_options": None,
        "images": ["x"], "category": "office",
    },
    {"asin": "nan", "name": "x"},
]  # fmt: skip
ITEMS.append(ITEMS[0])
NOTES = {
    "B000000001": {"attributes": ["dishwasher safe", "lead free"], "instruction": "find mugs",
                   "instruction_attributes": ["lead free"]},
    "B000000002": {"attributes": ["dishwasher safe"], "instruction": None},
}  # fmt: skip
WRITTEN = {
    "B000000001": [
        {"asin": "B000000001", "instruction": "i need a mug.", "instruction_attributes": ["dishwasher safe"],
         "instruction_options": ["red", "12 oz"]},
        {"asin": "B000000001", "instruction": "anything", "instruction_attributes": [], "instruction_options": []},
    ]
}  # fmt: skip


def write_shop(folder):
    """Writes the three files and reads the products."""
    for name, value in (("items_shuffle", ITEMS), ("items_ins_v2", NOTES), ("items_human_ins", WRITTEN)):
        (folder / f"{name}.json").write_text(json.dumps(value))
    return webshop.products(folder / "items_shuffle.json", folder / "items_ins_v2.json")


def forty_mugs(folder, instructions=1):
    """A folder of WebShop's files with forty products, enough to hold some out, and so many instructions for each."""
    names = [f"B{k:09d}" for k in range(40)]
    (folder / "items_shuffle_1000.json").write_text(json.dumps([ITEMS[0] | {"asin": name} for name in names]))
    (folder / "items_ins_v2_1000.json").write_text(json.dumps({name: NOTES["B000000001"] for name in names}))
    (folder / "items_human_ins.json").write_text(
        json.dumps({name: WRITTEN["B000000001"] * instructions for name in names})
    )
    return folder


def first_products(products):
    """In the place of ``host_shop.bm25_search``: a search that needs no package."""
    return lambda words, n: list(products)[:n]
