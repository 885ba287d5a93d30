"""A retail desk of two users: what every tool does to the database, scripted talks, and what they are worth."""

import json

import numpy as np
import pytest

from experiments.agents.parts import tau_bench, tau_bench_tools
from experiments.agents.parts.desk_files import DeskTask
from jaxrl_llm.data import chat
from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.errors import DataError
from jaxrl_llm.tools.endpoints import Unanswered
from tests.models_for_tests import byte_tokenizer

NO_SEED = np.zeros((2,), np.uint32)
HOME = {"address1": "1 Road", "address2": "", "city": "Bonn", "state": "NW", "country": "Germany", "zip": "53111"}
AWAY = HOME | {"address1": "2 Lane"}


def _item(product, item, price, size):
    return {"name": "Mug", "product_id": product, "item_id": item, "price": price, "options": {"size": size}}


def _start():
    def paid(amount, method):
        return [{"transaction_type": "payment", "amount": amount, "payment_method_id": method}]

    variants = {
        i: {"item_id": i, "options": {"size": s}, "available": s != "L", "price": p}
        for i, s, p in (("11", "S", 10.0), ("12", "M", 12.5), ("13", "L", 20.0))
    }
    methods = {"gift_card_1": {"source": "gift_card", "id": "gift_card_1", "balance": 30.0},
               "paypal_1": {"source": "paypal", "id": "paypal_1"}}  # fmt: skip
    return {
        "users": {"ann_lee_1": {"name": {"first_name": "Ann", "last_name": "Lee"}, "address": HOME,
                                "email": "ann@example.com", "payment_methods": methods, "orders": ["#W1", "#W2"]}},
        "products": {"1": {"name": "Mug", "product_id": "1", "variants": variants}},
        "orders": {
            "#W1": {"order_id": "#W1", "user_id": "ann_lee_1", "address": HOME, "status": "pending",
                    "items": [_item("1", "11", 10.0, "S")] * 2, "payment_history": paid(20.0, "gift_card_1")},
            "#W2": {"order_id": "#W2", "user_id": "ann_lee_1", "address": HOME, "status": "delivered",
                    "items": [_item("1", "12", 12.5, "M")], "payment_history": paid(12.5, "paypal_1")},
        },
    }  # fmt: skip


START = json.loads(json.dumps(_start()))


def _run(name, **arguments):
    """``(answer, changed rows)`` of one call."""
    tables = tau_bench_tools.fresh(START)
    answer = tau_bench_tools.toolbox(tables).run(name, arguments)
    assert START == _start()  # the beginning is shared, and stays what it was
    return answer, {k: v for rows in tau_bench_tools.changed(tables, START).values() for k, v in rows.items()}


def test_looking_up_changes_nothing():
    for name, arguments, text in (
        ("find_user_id_by_email", {"email": "ANN@example.com"}, "ann_lee_1"),
        ("find_user_id_by_name_zip", {"first_name": "ann", "last_name": "LEE", "zip": "53111"}, "ann_lee_1"),
        ("list_all_product_types", {}, '{"Mug": "1"}'),
        ("calculate", {"expression": "(20 - 7.5) * -2 / 3"}, "-8.33"),
        ("think", {"thought": "?"}, ""),
        ("transfer_to_human_agents", {"summary": "?"}, "Transfer successful"),
        ("get_order_details", {"order_id": "#W2"}, json.dumps(START["orders"]["#W2"])),
        ("get_product_details", {"product_id": "1"}, json.dumps(START["products"]["1"])),
        ("get_user_details", {"user_id": "ann_lee_1"}, json.dumps(START["users"]["ann_lee_1"])),
    ):
        answer, rows = _run(name, **arguments)
        assert (answer.text, answer.error, answer.valid, rows) == (text, False, True, {})


@pytest.mark.parametrize("expression", ["2 ** 9", "9 // 2", "1 +", "1 / 0", "(" * 150 + "1", "a", "1" * 201, ""])
def test_only_plain_arithmetic_is_calculated(expression):
    answer, _ = _run("calculate", expression=expression)
    assert answer.error and answer.valid


def test_tools_that_change_the_database():
    _, rows = _run("cancel_pending_order", order_id="#W1", reason="no longer needed")
    assert rows["#W1"]["status"] == "cancelled" and rows["#W1"]["cancel_reason"] == "no longer needed"
    assert rows["#W1"]["payment_history"][1] == {
        "transaction_type": "refund", "amount": 20.0, "payment_method_id": "gift_card_1"}  # fmt: skip
    assert rows["ann_lee_1"]["payment_methods"]["gift_card_1"]["balance"] == 50.0

    _, rows = _run("modify_pending_order_items", order_id="#W1", item_ids=["11", "11"], new_item_ids=["12", "11"],
                   payment_method_id="gift_card_1")  # fmt: skip
    assert [x["item_id"] for x in rows["#W1"]["items"]] == ["12", "11"]
    assert rows["#W1"]["items"][0] == _item("1", "12", 12.5, "M") and rows["#W1"]["status"] == "pending (item modified)"
    assert rows["#W1"]["payment_history"][1]["amount"] == 2.5
    assert rows["ann_lee_1"]["payment_methods"]["gift_card_1"]["balance"] == 27.5

    _, rows = _run("modify_pending_order_payment", order_id="#W1", payment_method_id="paypal_1")
    assert [p["transaction_type"] for p in rows["#W1"]["payment_history"]] == ["payment", "payment", "refund"]
    assert rows["ann_lee_1"]["payment_methods"]["gift_card_1"]["balance"] == 50.0

    _, rows = _run("modify_pending_order_address", order_id="#W1", **AWAY)
    assert rows == {"#W1": START["orders"]["#W1"] | {"address": AWAY}}
    _, rows = _run("modify_user_address", user_id="ann_lee_1", **AWAY)
    assert rows["ann_lee_1"]["address"] == AWAY
    _, rows = _run("return_delivered_order_items", order_id="#W2", item_ids=["12"], payment_method_id="gift_card_1")
    assert rows == {"#W2": START["orders"]["#W2"] | {
        "status": "return requested", "return_items": ["12"], "return_payment_method_id": "gift_card_1"}}  # fmt: skip
    _, rows = _run("exchange_delivered_order_items", order_id="#W2", item_ids=["12"], new_item_ids=["11"],
                   payment_method_id="paypal_1")  # fmt: skip
    assert rows["#W2"]["exchange_price_difference"] == -2.5 and rows["#W2"]["exchange_new_items"] == ["11"]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("get_order_details", {"order_id": "W1"}, "order not found"),
        ("cancel_pending_order", {"order_id": "#W2", "reason": "no longer needed"}, "non-pending order"),
        ("cancel_pending_order", {"order_id": "#W1", "reason": "whim"}, "the reason is one of"),
        ("modify_pending_order_payment", {"order_id": "#W1", "payment_method_id": "gift_card_1"}, "the current one"),
        ("modify_pending_order_payment", {"order_id": "#W1", "payment_method_id": "x"}, "payment method not found"),
        ("return_delivered_order_items", {"order_id": "#W2", "item_ids": ["12", "12"], "payment_method_id": "paypal_1"},
         "item 12 not found"),
        ("exchange_delivered_order_items", {"order_id": "#W2", "item_ids": ["12"], "new_item_ids": ["13"],
                                            "payment_method_id": "paypal_1"}, "new item 13 not found or not available"),
        ("exchange_delivered_order_items", {"order_id": "#W2", "item_ids": ["12"], "new_item_ids": [],
                                            "payment_method_id": "paypal_1"}, "numbers of old and new items differ"),
        ("find_user_id_by_email", {"email": "x"}, "user not found"),
    ],
)  # fmt: skip
def test_refusals_change_nothing(name, arguments, text):
    answer, rows = _run(name, **arguments)
    assert answer.error and answer.valid and text in answer.text and rows == {}


# --- talks

CANCEL = ("cancel_pending_order", {"order_id": "#W1", "reason": "no longer needed"})
TASK = DeskTask("7", "You are Ann Lee. Cancel #W1 and be told the refund.", (CANCEL,), ("1,020.0",), "tasks.py:3")
DESK = tau_bench.Desk(START, "Help users.")


def _call(name, arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _talk(actions, task=TASK, user=tau_bench.plain_user):
    world = tau_bench.desk_env(DESK, user)
    state, said = world.reset(NO_SEED, tau_bench.open_talk(task, user)), None
    for action in actions:
        said = world.step(state, action)
        state = said.state
    return said


def test_a_talk_that_does_what_the_user_wants():
    cancel, told = _call(*CANCEL), "You get back $1,020.0. Goodbye"
    said = _talk([cancel])
    assert said.text.startswith('<tool_response>\n{"order_id": "#W1"') and not said.done and said.mark == 1
    assert _talk([cancel, "Shall I?"]).text == "Yes."
    assert _talk(["Shall I?", cancel, told])[2:5] == (1.0, True, True)
    for wrong, reason in (
        ([cancel, "Goodbye."], "not told everything"),
        ([told], "database differs"),
        ([cancel, _call("modify_user_address", {"user_id": "ann_lee_1"} | AWAY), told], "database differs"),
    ):
        said = _talk(wrong)
        assert said[2:5] == (0.0, True, True) and reason in said.reason
    handed = _talk([told + "?", cancel, _call("transfer_to_human_agents", {"summary": "done"})])
    assert handed[2:5] == (1.0, True, True)


@pytest.mark.parametrize("written", ['{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_a_stand_in_for_users_reads_whatever_an_agent_writes(written):
    """An exception would void the episode: an agent could so throw away its own bad ones."""
    system = f'<tools>{{"type": "function", "function": {{"name": "go"}}}}</tools>{tau_bench.WANTS}'
    said = tau_bench.plain_user([{"content": system}, {"content": "a"}, {"content": f"go {written}"}])
    assert said == '<tool_call>{"name": "go", "arguments": {}}</tool_call>'


def test_bad_calls_are_answered_and_change_nothing():
    for action, text in (
        (_call("fly", {}), "there is no tool fly"),
        (_call("get_order_details", {"order_id": 1}), "arguments.order_id: 1 is no string"),
        (_call("transfer_to_human_agents", {}), "arguments: summary is missing"),
        ("<tool_call>{", "the call is no JSON"),
    ):
        said = _talk([action])
        assert text in said.text and not said.done and said.valid and said.mark == 0


def test_the_situation_is_database_and_talk():
    world = tau_bench.desk_env(DESK)
    client = tau_bench.open_talk(TASK, tau_bench.plain_user)
    one, other = world.reset(NO_SEED, client), world.reset(NO_SEED, client)
    before = world.identity(one)
    assert before == world.identity(other)
    world.step(one, _call("get_order_details", {"order_id": "#W1"}))
    assert world.identity(one) == before
    world.step(one, _call(*CANCEL))
    assert world.identity(one) != before == world.identity(other)  # episodes do not share what they change


def test_a_user_that_is_not_reached_is_no_failure_of_the_agent():
    def absent(messages, draw=0):
        if len(messages) > 2:
            raise Unanswered("down")
        return "Hello"

    said = _talk(["Hi?"], user=absent)
    assert not said.valid and said.reason == "the user: down"


def test_tasks_that_do_not_fit_are_named(tmp_path):
    tokenizer = tokenizers.load(byte_tokenizer(tmp_path))
    sizes = {"action_tokens": 64, "observation_tokens": 64}
    for actions, message in (
        ((("fly", {}),), r"tasks.py:3: actions\[0\]: name: 'fly' is no tool of the desk; there are find_user"),
        ((CANCEL, ("get_order_details", {})), r"tasks.py:3: actions\[1\]: get_order_details: order_id is missing"),
    ):
        with pytest.raises(DataError, match=message):
            tau_bench.desks_texts([(DESK, [TASK._replace(actions=actions)])], tokenizer, **sizes)


def test_problems_hold_rules_tools_and_the_first_message(tmp_path):
    tokenizer = tokenizers.load(byte_tokenizer(tmp_path))
    reply = chat.make_reply_encoder(tokenizer)
    out = tau_bench.desks_texts([(DESK, [TASK])], tokenizer, action_tokens=400, observation_tokens=900, encode=reply)
    shown = tokenizer.decode(np.asarray(out.problems.tokens[0])[np.asarray(out.problems.valid[0])].tolist())
    assert "Help users." in shown and '"name": "cancel_pending_order"' in shown and TASK.instruction in shown
    state = out.env.reset(NO_SEED, out.tasks[0])
    heard = out.env.step(state, [*tokenizer.encode("Shall I cancel it?"), tokenizer.eos_ids[0]])
    assert heard.tokens == reply("Yes.") and "Yes." in tokenizer.decode(heard.tokens)
    assert not heard.done
