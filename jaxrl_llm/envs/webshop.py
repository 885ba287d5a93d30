"""A shop over WebShop's local files: search, click, buy; the paper's reward for what was bought.

From "WebShop: Towards Scalable Real-World Web Interaction with Grounded Language Agents", arXiv:2207.01206: actions are
``search[WORDS]`` and ``click[BUTTON]``, pages are their texts between ``[SEP]``, as in its ``text`` mode; a choice of
an option is shown in front of the page. Any other text changes nothing. Products: ``data.webshop``.
"""

import re
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.data.webshop import Goal, Product
from jaxrl_llm.envs.text import Given, given
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.host.env import TextEnv, TextStepResult, text_identity
from jaxrl_llm.tools.boxes import bm25
from jaxrl_llm.verifiers.overlap import common_subsequence

HITS, SHOWN = 50, 10  # of a search, of a page
BUY, BACK, NEXT, BEFORE = "Buy Now", "Back to Search", "Next >", "< Prev"
PARTS = ("Description", "Features", "Reviews")
RULES = (
    "You are shopping in a web shop of text pages. Write one action: search[words] looks for products; click[name] "
    "presses a button, opens a product or chooses an option of the page. Choose the options that are asked for, then "
    "click[Buy Now].\n\n"
)
ALIKE = 85.0  # per cent, above which two texts are the same
COLOURS = tuple(
    "amber aqua beige black blue bronze brown burgundy charcoal chocolate copper coral cream cyan gold gray green "
    "grey indigo ivory khaki lavender lilac lime magenta maroon mint navy olive orange peach pink plum purple "
    "rainbow red rose rust sand silver tan teal turquoise violet white wine yellow".split()
)
LITTLE = frozenset(
    "a an and are as at be by can do for from has have in into is it its no not of off on or our out over per so that "
    "the them these this to up use very we what when with without you your".split()
)
Search = Callable[[str, int], Sequence[str]]
Nouns = Callable[[str], Collection[str]]


class Shop(NamedTuple):
    """``search(words, n)`` gives the ``asin`` of the ``n`` products that fit best, the best first."""

    products: dict[str, Product]
    search: Search


def page_text(product: Product) -> str:
    """What a search engine reads of a product: name, description, first bullet and options."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return " ".join([product.name, product.description, *product.bullets[:1], options]).lower()


def bm25_search(products: dict[str, Product]) -> Search:
    """BM25 over ``page_text`` by bm25s, with the constants of Lucene's index in the paper's code.

    Raises:
      UserError: without the package.
    """
    names = list(products)
    find = bm25([page_text(product) for product in products.values()], method="lucene", k1=0.9, b=0.4)
    return lambda words, n: [names[i] for i in find(words, n)]


# --- the reward


def likeness(one: str, other: str) -> float:
    """How alike two texts are as sets of words, in per cent (the token set ratio of the paper's code).

    >>> likeness("easy to clean", "clean, easy"), round(likeness("red", "rod"), 1), likeness("", "a")
    (100.0, 66.7, 0.0)
    """
    first, second = (set(re.sub(r"[^a-z0-9]", " ", text.lower()).split()) for text in (one, other))
    both = " ".join(sorted(first & second))
    left, right = " ".join(sorted(first - second)), " ".join(sorted(second - first))
    if not first or not second:
        return 0.0
    if both and not (left and right):
        return 100.0
    apart, gap = len(left) + len(right) - 2 * common_subsequence(left, right), len(both) + bool(both)
    found = [1 - apart / (2 * gap + len(left) + len(right))]
    if both:
        found += [1 - (1 + len(rest)) / (2 * len(both) + 1 + len(rest)) for rest in (left, right)]
    return 100.0 * max(found)


def content_words(name: str) -> set[str]:
    """The words of a name that may say what it is: no little words, no numbers.

    >>> sorted(content_words("Pack of 2 Mugs, for the Office"))
    ['mugs', 'office', 'pack']
    """
    return {word for word in re.findall(r"[a-z]+", name.lower()) if len(word) > 1 and word not in LITTLE}


def _colour(option: str) -> str:
    return next((colour for colour in COLOURS if colour in option), option)


def _kind(bought: Product, wanted: Product, nouns: Nouns) -> float:
    """How far the product is of the kind that was asked for."""
    parts = [{part.strip() for part in product.category.split("›")} for product in (bought, wanted)]
    mine, theirs = set(nouns(bought.name)), set(nouns(wanted.name))
    shared = len(mine & theirs) / len(theirs) if theirs else 0.2
    if shared == 0.0:
        return 0.0
    if shared < 0.1:
        return 0.1
    return 1.0 if bought.query == wanted.query or len(parts[0] & parts[1]) >= 2 or shared > 0.2 else 0.5


def purchase_reward(
    goal: Goal, bought: Product, wanted: Product, chosen: Collection[str], *, nouns: Nouns = content_words
) -> float:
    """``kind x (attributes found + options chosen + price kept) / (attributes + options + 1)``, in [0, 1].

    From "WebShop: Towards Scalable Real-World Web Interaction with Grounded Language Agents", arXiv:2207.01206, eq. 1.
    Differs from its code in ``nouns`` (there the nouns of the name by a spaCy model, which can be given), and in the
    list of colours that two spellings of an option are reduced to.

    Args:
      wanted: the product that the instruction was written for.
      chosen: options of what was bought.
    """
    text = [bought.name.lower(), " ".join(bought.bullets).lower(), bought.description.lower()]
    attributes = sum(
        any(likeness(mine, asked) > ALIKE for mine in bought.attributes) or any(asked in part for part in text)
        for asked in goal.attributes
    )
    options = sum(any(likeness(_colour(mine), _colour(asked)) > ALIKE for mine in chosen) for asked in goal.options)
    kept = attributes + options + (bought.price <= goal.price_upper)
    return _kind(bought, wanted, nouns) * kept / (len(goal.attributes) + len(goal.options) + 1)


# --- the pages


class Visit(NamedTuple):
    """Where a customer is: at the search bar, among hits, at a product, or at a part of its page."""

    goal: Goal
    hits: tuple[str, ...] | None = None
    page: int = 1
    asin: str = ""
    part: str = ""
    chosen: tuple[tuple[str, str], ...] = ()  # option and value


def _buttons(shop: Shop, visit: Visit) -> dict[str, Visit | None]:
    """What can be clicked, in small letters, and where it leads; None: it buys."""
    start = Visit(visit.goal)
    if visit.hits is None:
        return {}
    if not visit.asin:
        found = {BACK: start, NEXT: visit._replace(page=visit.page + 1)}
        found |= {BEFORE: visit._replace(page=visit.page - 1)} if visit.page > 1 else {}
        found |= {asin: visit._replace(asin=asin) for asin in _shown(visit)}
    elif visit.part:
        found = {BACK: start, BEFORE: visit._replace(part="")}
    else:
        found = {BACK: start, BEFORE: visit._replace(asin="", chosen=()), BUY: None}
        found |= {part: visit._replace(part=part) for part in PARTS}
        for option, values in shop.products[visit.asin].options.items():
            rest = tuple(pair for pair in visit.chosen if pair[0] != option)
            found |= {value: visit._replace(chosen=(*rest, (option, value))) for value in values}
    return {name.lower(): to for name, to in found.items()}


def _shown(visit: Visit) -> tuple[str, ...]:
    return (visit.hits or ())[(visit.page - 1) * SHOWN : visit.page * SHOWN]


def page(shop: Shop, visit: Visit) -> str:
    """The text of the page where a customer is."""
    head = ["Instruction:", visit.goal.instruction]
    if visit.hits is None:
        return " [SEP] ".join(["WebShop", *head, "Search"])
    if not visit.asin:
        turn = [BEFORE, NEXT] if visit.page > 1 else [NEXT]
        rows = [x for a in _shown(visit) for x in (a, shop.products[a].name, shop.products[a].tag)]
        return " [SEP] ".join([*head, BACK, f"Page {visit.page} (Total results: {len(visit.hits)})", *turn, *rows])
    product = shop.products[visit.asin]
    if visit.part:
        said = {"Description": (product.description,), "Features": product.bullets}.get(visit.part, ())
        return " [SEP] ".join([*head, BACK, BEFORE, *said])
    options = [x for name, values in product.options.items() for x in (name, *values)]
    whole = [*head, BACK, BEFORE, *options, product.name, f"Price: {product.tag}", "Rating: N.A.", *PARTS, BUY]
    return "".join(f"You have clicked {value}. " for _, value in visit.chosen) + " [SEP] ".join(whole)


def read_action(text: str) -> tuple[str, str] | None:
    """``("search" or "click", what)`` of the last line that holds an action; None where none does.

    >>> read_action("I need a mug.\\nsearch[blue mug]"), read_action("buy it")
    (('search', 'blue mug'), None)
    """
    for line in reversed(text.split("\n")):
        inside = line[: max(line.rfind("]"), 0)]  # an action goes on to the last bracket of its line
        if found := re.search(r"\b(search|click)\[(?=.)", inside):
            return found[1], inside[found.end() :].strip().lower()
    return None


def shop_env(shop: Shop, *, nouns: Nouns = content_words, penalty: float = 0.0) -> TextEnv:
    """The shop; a task is a ``Goal``. Buying ends the episode and pays ``purchase_reward``, nothing else pays.

    Args:
      penalty: taken off what a step pays whose text is no search and no button of the page.
    """

    def step(visit: Visit, text: str) -> TextStepResult:
        action, paid = read_action(text), 0.0
        buttons = _buttons(shop, visit) if action is not None and action[0] == "click" else {}
        after: Visit | None = visit
        if action is not None and action[0] == "search" and action[1]:
            after = Visit(visit.goal, tuple(shop.search(action[1], HITS)))
        elif action is not None and action[1] in buttons:
            after = buttons[action[1]]
        else:
            paid = -penalty
        if after is not None:
            return TextStepResult(after, page(shop, after), paid, False)
        bought, wanted = shop.products[visit.asin], shop.products[visit.goal.asin]
        chosen = [value for _, value in visit.chosen]
        return TextStepResult(visit, "", purchase_reward(visit.goal, bought, wanted, chosen, nouns=nouns), True)

    return TextEnv(lambda seed, goal: Visit(goal), step, lambda visit: text_identity(page(shop, visit)))


def shop_texts(
    shop: Shop,
    goals: Sequence[Goal],
    tokenizer: Tokenizer,
    *,
    action_tokens: int,
    observation_tokens: int,
    nouns: Nouns = content_words,
    prompt: Callable[[str], Any] = RULES.__add__,
    encode: Callable[[str], Sequence[int]] | None = None,
    chat: bool = False,
    penalty: float = 0.0,
) -> Given:
    """One problem a goal, whose prompt shows the first page; arguments as of ``text.as_begun`` and ``shop_env``.

    Raises:
      UserError: for a goal whose product the shop does not have.
    """
    for goal in goals:
        if goal.asin not in shop.products:
            raise UserError(f"goal {goal.instruction[:60]!r} is for {goal.asin}, which the shop does not have")
    rows = [
        Problem("webshop", prompt(page(shop, Visit(goal))), "", {}, 0,
                f"{goal.asin} {zlib.crc32(goal.instruction.encode())}")
        for goal in goals
    ]  # fmt: skip
    return given(
        shop_env(shop, nouns=nouns, penalty=penalty), rows, list(goals), tokenizer, action_tokens=action_tokens,
        observation_tokens=observation_tokens, encode=encode, chat=chat,
    )  # fmt: skip
