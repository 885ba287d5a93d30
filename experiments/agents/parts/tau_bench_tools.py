"""The tools of tau-bench's retail desk as functions that change a database of users, orders and products.

A refusal is a ``ValueError`` whose text the agent reads, and changes nothing. What each tool does to the database is
what tau-bench's does, so that its tasks end in the same states. Database: ``desk_files.desk_database``.
"""

import ast
import copy
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxrl_llm.tools.calls import Toolbox, of_functions
from jaxrl_llm.tools.schema import Tool, tool

Tables = dict[str, dict[str, Any]]
Record = dict[str, Any]
ADDRESS = ("address1", "address2", "city", "state", "country", "zip")
REASONS = ("no longer needed", "ordered by mistake")
_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 200  # characters of an expression


def fresh(start: Tables) -> Tables:
    """Tables of an episode: they share their rows with the beginning until ``row`` is asked for one."""
    return {name: dict(rows) for name, rows in start.items()}


def changed(tables: Tables, start: Tables) -> Tables:
    """The rows that differ from those of the beginning."""
    return {
        name: {key: x for key, x in rows.items() if x is not start[name].get(key) and x != start[name].get(key)}
        for name, rows in tables.items()
    }


def row(tables: Tables, table: str, key: str) -> Record:
    """A row that may be changed; one that was taken before is no longer that of the table.

    Raises:
      ValueError: where there is none.
    """
    if key not in tables[table]:
        raise ValueError(f"{table[:-1]} not found")
    tables[table][key] = copy.deepcopy(tables[table][key])
    return tables[table][key]


def _order(tables: Tables, order_id: str, status: str, what: str) -> Record:
    order = row(tables, "orders", order_id)
    if order["status"] != status:
        raise ValueError(f"non-{status} order cannot be {what}")
    return order


def _method(tables: Tables, order: Record, payment_method_id: str) -> Record:
    methods = row(tables, "users", order["user_id"])["payment_methods"]
    if payment_method_id not in methods:
        raise ValueError("payment method not found")
    return methods[payment_method_id]


def _refund(tables: Tables, order: Record, payment_method_id: str, amount: float) -> None:
    method = row(tables, "users", order["user_id"])["payment_methods"].get(payment_method_id)
    if method is not None:
        _pay(method, -amount)


def _pay(method: Record, amount: float) -> None:
    """Takes money from a gift card; a negative amount is given back. Other methods keep no balance."""
    if method["source"] == "gift_card":
        method["balance"] = round(method["balance"] - amount, 2)


def _covered(method: Record, amount: float) -> None:
    if method["source"] == "gift_card" and method["balance"] < amount:
        raise ValueError("insufficient gift card balance")


def _there(order: Record, item_ids: Sequence[str]) -> None:
    have = [item["item_id"] for item in order["items"]]
    for item_id in item_ids:
        if item_ids.count(item_id) > have.count(item_id):
            raise ValueError(f"item {item_id} not found in the order")


def _replaced(
    tables: Tables, order: Record, item_ids: Sequence[str], new_item_ids: Sequence[str]
) -> tuple[list[Record], float]:
    """The new variants, one for each old item, and what they cost more."""
    _there(order, item_ids)
    if len(item_ids) != len(new_item_ids):
        raise ValueError("the numbers of old and new items differ")
    found, difference = [], 0.0
    for old, new in zip(item_ids, new_item_ids, strict=True):
        item = next(x for x in order["items"] if x["item_id"] == old)
        variant = tables["products"][item["product_id"]]["variants"].get(new)
        if variant is None or not variant["available"]:
            raise ValueError(f"new item {new} not found or not available")
        found.append(variant)
        difference += variant["price"] - item["price"]
    return found, difference


# --- looking things up


def find_user_id_by_email(tables: Tables, email: str) -> str:
    """The user id of an e-mail address."""
    for key, user in tables["users"].items():
        if user["email"].lower() == email.lower():
            return key
    raise ValueError("user not found")


def find_user_id_by_name_zip(tables: Tables, first_name: str, last_name: str, zip: str) -> str:
    """The user id of a name and zip code, for users without their e-mail address."""
    asked = (first_name.lower(), last_name.lower(), zip)
    for key, user in tables["users"].items():
        name = user["name"]
        if (name["first_name"].lower(), name["last_name"].lower(), user["address"]["zip"]) == asked:
            return key
    raise ValueError("user not found")


def get_user_details(tables: Tables, user_id: str) -> Record:
    """Name, address, payment methods and orders of a user."""
    return row(tables, "users", user_id)


def get_order_details(tables: Tables, order_id: str) -> Record:
    """Status and details of an order, whose id begins with #W."""
    return row(tables, "orders", order_id)


def get_product_details(tables: Tables, product_id: str) -> Record:
    """The variants of a product with their options, prices and stock."""
    return row(tables, "products", product_id)


def list_all_product_types(tables: Tables) -> dict[str, str]:
    """Names and product ids of everything the store sells."""
    return dict(sorted((product["name"], product["product_id"]) for product in tables["products"].values()))


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Expression):
        return _value(node.body)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return _value(node.operand) * (-1.0 if isinstance(node.op, ast.USub) else 1.0)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only numbers, + - * / and brackets are calculated")


def calculate(tables: Tables, expression: str) -> str:
    """The value of an arithmetic expression, to two digits."""
    if len(expression) > LONGEST or not set(expression) <= set("0123456789+-*/(). "):
        raise ValueError(f"an expression has at most {LONGEST} digits, brackets and signs + - * /")
    try:
        return str(round(_value(ast.parse(expression.strip(), mode="eval")), 2))
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f"cannot be calculated: {type(error).__name__}") from error


def think(tables: Tables, thought: str) -> str:
    """Keeps a thought; changes and looks up nothing."""
    return ""


def transfer_to_human_agents(tables: Tables, summary: str) -> str:
    """Hands the user to a human agent and ends the talk.

    Only for what no tool can do, or where the user asks for it.
    """
    return "Transfer successful"


# --- changing things


def cancel_pending_order(tables: Tables, order_id: str, reason: str) -> Record:
    """Cancels a pending order and refunds it."""
    order = _order(tables, order_id, "pending", "cancelled")
    if reason not in REASONS:
        raise ValueError(f"the reason is one of: {', '.join(REASONS)}")
    refunds = [{"transaction_type": "refund", "amount": paid["amount"], "payment_method_id": paid["payment_method_id"]}
               for paid in order["payment_history"]]  # fmt: skip
    for refund in refunds:
        _refund(tables, order, refund["payment_method_id"], refund["amount"])
    order["status"], order["cancel_reason"] = "cancelled", reason
    order["payment_history"].extend(refunds)
    return order


def modify_pending_order_address(tables: Tables, order_id: str, **address: str) -> Record:
    """Changes where a pending order is sent."""
    order = _order(tables, order_id, "pending", "modified")
    order["address"] = {name: address[name] for name in ADDRESS}
    return order


def modify_user_address(tables: Tables, user_id: str, **address: str) -> Record:
    """Changes the default address of a user."""
    user = row(tables, "users", user_id)
    user["address"] = {name: address[name] for name in ADDRESS}
    return user


def modify_pending_order_items(
    tables: Tables, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> Record:
    """Changes items of a pending order, each to another variant of its product; once for an order."""
    order = _order(tables, order_id, "pending", "modified")
    variants, difference = _replaced(tables, order, item_ids, new_item_ids)
    method = _method(tables, order, payment_method_id)
    _covered(method, difference)
    kind = "payment" if difference > 0 else "refund"
    paid = {"transaction_type": kind, "amount": abs(difference), "payment_method_id": payment_method_id}
    order["payment_history"].append(paid)
    _pay(method, difference)
    for old, variant in zip(item_ids, variants, strict=True):
        item = next(x for x in order["items"] if x["item_id"] == old)
        item |= {name: variant[name] for name in ("item_id", "price", "options")}
    order["status"] = "pending (item modified)"
    return order


def modify_pending_order_payment(tables: Tables, order_id: str, payment_method_id: str) -> Record:
    """Changes how a pending order is paid."""
    order = _order(tables, order_id, "pending", "modified")
    method, history = _method(tables, order, payment_method_id), order["payment_history"]
    if len(history) != 1 or history[0]["transaction_type"] != "payment":
        raise ValueError("the order has not exactly one payment")
    amount, before = history[0]["amount"], history[0]["payment_method_id"]
    if before == payment_method_id:
        raise ValueError("the new payment method is the current one")
    _covered(method, amount)
    for kind, which in (("payment", payment_method_id), ("refund", before)):
        history.append({"transaction_type": kind, "amount": amount, "payment_method_id": which})
    _pay(method, amount)
    _refund(tables, order, before, amount)
    return order


def return_delivered_order_items(tables: Tables, order_id: str, item_ids: list[str], payment_method_id: str) -> Record:
    """Takes items of a delivered order back; once for an order."""
    order = _order(tables, order_id, "delivered", "returned")
    method = _method(tables, order, payment_method_id)
    if method["source"] != "gift_card" and payment_method_id != order["payment_history"][0]["payment_method_id"]:
        raise ValueError("a refund goes to the original payment method or a gift card")
    _there(order, item_ids)
    order["status"], order["return_payment_method_id"] = "return requested", payment_method_id
    order["return_items"] = sorted(item_ids)
    return order


def exchange_delivered_order_items(
    tables: Tables, order_id: str, item_ids: list[str], new_item_ids: list[str], payment_method_id: str
) -> Record:
    """Exchanges items of a delivered order, each for another variant of its product; once for an order."""
    order = _order(tables, order_id, "delivered", "exchanged")
    _, difference = _replaced(tables, order, item_ids, new_item_ids)
    difference = round(difference, 2)
    _covered(_method(tables, order, payment_method_id), difference)
    order |= {
        "status": "exchange requested", "exchange_items": sorted(item_ids), "exchange_new_items": sorted(new_item_ids),
        "exchange_payment_method_id": payment_method_id, "exchange_price_difference": difference,
    }  # fmt: skip
    return order


# --- what the agent is told of them


_ASK = " List the details and have the user confirm them first."


def with_text(*names: str) -> Record:
    """Arguments that are texts, or lists of texts where they end with ``ids``, as a schema has them."""
    text = {"type": "string"}
    return {name: {"type": "array", "items": text} if name.endswith("ids") else text for name in names}


def declared_as(
    function: Callable[..., Any], arguments: Record, *, ask: bool = False, optional: Sequence[str] = ()
) -> tuple[Tool, Callable[..., Any]]:
    """A function of the tables as a tool, described by its docstring.

    Args:
      arguments: what else it takes: the JSON schema of each.
      ask: the agent is told to have the user confirm it first.
      optional: arguments that may be left out.
    """
    needed = [name for name in arguments if name not in optional]
    schema = {"type": "object", "properties": arguments, "required": needed, "additionalProperties": False}
    description = " ".join((function.__doc__ or "").split()) + (_ASK if ask else "")
    return tool(function.__name__, description, schema), function


def _declared(function: Callable[..., Any], *arguments: str, ask: bool = False) -> tuple[Tool, Callable[..., Any]]:
    kinds = with_text(*arguments)
    if "reason" in kinds:
        kinds["reason"] = {"type": "string", "enum": list(REASONS)}
    return declared_as(function, kinds, ask=ask)


_EXCHANGED = ("order_id", "item_ids", "new_item_ids", "payment_method_id")
RETAIL = (
    _declared(find_user_id_by_email, "email"),
    _declared(find_user_id_by_name_zip, "first_name", "last_name", "zip"),
    _declared(get_user_details, "user_id"),
    _declared(get_order_details, "order_id"),
    _declared(get_product_details, "product_id"),
    _declared(list_all_product_types),
    _declared(calculate, "expression"),
    _declared(think, "thought"),
    _declared(transfer_to_human_agents, "summary"),
    _declared(cancel_pending_order, "order_id", "reason", ask=True),
    _declared(modify_pending_order_address, "order_id", *ADDRESS, ask=True),
    _declared(modify_user_address, "user_id", *ADDRESS, ask=True),
    _declared(modify_pending_order_items, *_EXCHANGED, ask=True),
    _declared(modify_pending_order_payment, "order_id", "payment_method_id", ask=True),
    _declared(return_delivered_order_items, "order_id", "item_ids", "payment_method_id", ask=True),
    _declared(exchange_delivered_order_items, *_EXCHANGED, ask=True),
)


def toolbox(tables: Tables, tools: Sequence[tuple[Tool, Callable[..., Any]]] = RETAIL) -> Toolbox:
    """The tools of one episode, which change its ``tables``."""
    return of_functions([(item, partial(function, tables)) for item, function in tools])
