"""WebShop's local files: products of ``items_shuffle*.json``, attributes of ``items_ins_v2*.json``, human instructions.

From "WebShop: Towards Scalable Real-World Web Interaction with Grounded Language Agents", arXiv:2207.01206.
``envs.webshop`` is the shop. Nothing is downloaded.
"""

import itertools
import pathlib
import random
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.data.agent_formats import checked, field, load_json, texts
from jaxrl_llm.errors import DataError, UserError

STEPS = tuple(10.0 * k for k in range(1, 100))  # prices that an instruction may name
UNBOUNDED = 1e6
SPLITS = {"test": (0, 500), "eval": (500, 1500), "train": (1500, None)}  # of the shuffled instructions


class Product(NamedTuple):
    """What the shop has; ``price`` is one draw from the range that ``tag`` shows, the same for everybody."""

    asin: str
    name: str
    query: str  # what it was found by
    category: str  # parts between ›
    description: str
    bullets: tuple[str, ...]
    tag: str
    price: float
    options: dict[str, tuple[str, ...]]
    attributes: tuple[str, ...]


class Goal(NamedTuple):
    """An instruction and what the reward compares: attributes, options and an upper price of one product."""

    asin: str
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float


def _price(pricing: Any, asin: str, where: str) -> tuple[float, str]:
    if not pricing:
        return 100.0, "$100.0"
    kept = (re.sub(r"[^\d.]", "", part) for part in checked(pricing, str, f"{where}: pricing").split("$")[1:])
    try:
        found = [float(part) for part in kept][:2]
    except ValueError as error:
        raise DataError(f"{where}: pricing: {pricing!r} holds no price") from error
    if not found:
        raise DataError(f"{where}: pricing: {pricing!r} has no $")
    if len(found) == 1:
        return found[0], f"${found[0]}"
    draw = np.random.default_rng(zlib.crc32(asin.encode())).random()
    return found[0] + (found[1] - found[0]) * draw, f"${found[0]} to ${found[1]}"


def _options(record: Mapping[str, Any], where: str) -> dict[str, tuple[str, ...]]:
    found = {}
    for name, values in checked(
        record.get("customization_options") or {}, dict, f"{where}: customization_options"
    ).items():
        if values is not None:
            at = f"{where}: customization_options: {name}"
            values = [field(value, "value", str, at) for value in checked(values, list, at)]
            found[name.lower()] = tuple(value.strip().replace("/", " | ").lower() for value in values)
    return found


def _product(record: Any, attributes: Mapping[str, Any], where: str) -> Product:
    asin = field(record, "asin", str, where)
    where = f"{where} ({asin})"
    names = ("name", "query", "product_category", "full_description")
    name, query, category, description = (field(record, key, str, where) for key in names)
    bullets = record.get("small_description") or []
    bullets = (
        (bullets,) if isinstance(bullets, str) else texts({"small_description": bullets}, "small_description", where)
    )
    price, tag = _price(record.get("pricing"), asin, where)
    noted = checked(attributes.get(asin) or {}, dict, f"attributes: {asin}")
    kept = texts(noted, "attributes", f"attributes: {asin}") if "attributes" in noted else ()
    return Product(asin, name, query.lower().strip(), category, description, bullets, tag, price,
                   _options(record, where), kept)  # fmt: skip


def products(
    items: str | pathlib.Path, attributes: str | pathlib.Path, *, limit: int | None = None
) -> dict[str, Product]:
    """The products by ``asin``, in the order of the file; repeated and ill-named ones are left out, as WebShop does.

    Args:
      items: ``items_shuffle.json`` or ``items_shuffle_1000.json``: a list of products.
      attributes: ``items_ins_v2.json`` or ``items_ins_v2_1000.json``: notes by ``asin``.
      limit: rows of ``items`` that are read.

    Raises:
      DataError: naming file, row and field.
    """
    rows = checked(load_json(pathlib.Path(items)), list, str(items))
    notes = checked(load_json(pathlib.Path(attributes)), dict, str(attributes))
    found: dict[str, Product] = {}
    for k, record in enumerate(rows[:limit]):
        asin = field(record, "asin", str, f"{items}: product {k}")
        if asin != "nan" and len(asin) <= 10 and asin not in found:
            found[asin] = _product(record, notes, f"{items}: product {k}")
    if not found:
        raise DataError(f"{items} holds no products")
    return found


def _bound(product: Product, rng: np.random.Generator) -> tuple[float, str]:
    """An upper price, and the words that say so."""
    above = [step for step in STEPS if step > product.price][:4]
    if len(above) < 2:
        return UNBOUNDED, ""
    upper = max(above[k] for k in rng.choice(len(above), 2, replace=False))
    return upper, f", and price lower than {upper:.2f} dollars"


def human_goals(path: str | pathlib.Path, shop: Mapping[str, Product], *, seed: int = 0) -> list[Goal]:
    """The instructions that people wrote (``items_human_ins.json``: lists by ``asin``) for the products of a shop.

    Those without attributes are left out, as WebShop does; upper prices are drawn by ``seed`` and place.

    Raises:
      DataError: naming file, product and field, or where no instruction is for a product of the shop.
    """
    written = checked(load_json(pathlib.Path(path)), dict, str(path))
    found = []
    for asin, product in shop.items():
        for k, record in enumerate(checked(written.get(asin) or [], list, f"{path}: {asin}")):
            where = f"{path}: {asin}[{k}]"
            said, wanted = field(record, "instruction", str, where), texts(record, "instruction_attributes", where)
            options = record.get("instruction_options") or []
            chosen = options.values() if isinstance(options, dict) else options
            chosen = texts({"instruction_options": list(chosen)}, "instruction_options", where)
            if wanted:
                rng = np.random.default_rng([seed, k, zlib.crc32(asin.encode())])
                upper, words = _bound(product, rng)
                found.append(Goal(asin, said.strip(".") + words, wanted, chosen, upper))
    if not found:
        raise DataError(f"{path} has no instruction for the {len(shop)} products of the shop")
    return found


def made_goals(path: str | pathlib.Path, shop: Mapping[str, Product], *, seed: int = 0) -> list[Goal]:
    """The instructions of ``items_ins_v2.json``: one for every combination of the options of a product.

    Raises:
      DataError: naming file, product and field, or where no instruction is for a product of the shop.
    """
    written = checked(load_json(pathlib.Path(path)), dict, str(path))
    found: list[Goal] = []
    for asin, product in shop.items():
        record = checked(written.get(asin) or {}, dict, f"{path}: {asin}")
        if not record.get("instruction"):
            continue
        where = f"{path}: {asin}"
        said, wanted = field(record, "instruction", str, where), texts(record, "instruction_attributes", where)
        if not wanted:
            raise DataError(f"{where}: instruction_attributes: empty beside an instruction")
        upper, words = _bound(product, np.random.default_rng([seed, zlib.crc32(asin.encode())]))
        found += (Goal(asin, said + options + words, wanted, chosen, upper) for options, chosen in _chosen(product))
    if not found:
        raise DataError(f"{path} has no instruction for the {len(shop)} products of the shop")
    return found


def _chosen(product: Product) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every combination of options, in words and as values."""
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        said = ", and ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
        yield (f" with {said}" if said else ""), values


def split_goals(goals: Sequence[Goal], split: str) -> list[Goal]:
    """``test`` (the first 500 of a shuffled list), ``eval`` (the next 1000) or ``train`` (the rest), as WebShop splits.

    The list is shuffled as WebShop shuffles its own, by Python's generator with seed 233: the same goals in the same
    order (those of ``human_goals`` over the whole catalogue) give the benchmark's own sets.

    Raises:
      UserError: for another split, or one that is empty.
    """
    if split not in SPLITS:
        raise UserError(f"split={split!r} is none of {', '.join(SPLITS)}")
    order = list(range(len(goals)))
    random.Random(233).shuffle(order)
    first, last = SPLITS[split]
    if first >= len(goals):
        raise UserError(f"split={split!r} is empty: {len(goals)} goals; {split} begins at {first}")
    return [goals[k] for k in order[first:last]]
