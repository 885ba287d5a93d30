"""An airline desk of two users and four flights: what every tool does to the database, and what it refuses."""

import json

import pytest

from experiments.agents.parts import desk_files, tau_bench
from experiments.agents.parts.desk_files import DeskTask
from experiments.agents.parts.tau_bench_airline import AIRLINE
from experiments.agents.parts.tau_bench_tools import changed, fresh, toolbox
from jaxrl_llm.errors import DataError

DAY, NEXT = "2024-05-20", "2024-05-21"
ANN = {"first_name": "Ann", "last_name": "Lee", "dob": "1990-01-02"}
BOB = {"first_name": "Bob", "last_name": "Lee", "dob": "1991-01-02"}


def _open(price, seats=3):
    prices = {"basic_economy": price - 40, "economy": price, "business": 3 * price}
    return {"status": "available", "available_seats": dict.fromkeys(prices, seats), "prices": prices}


def _flight(number, origin, destination, leaves, arrives, **days):
    return {
        "flight_number": number, "origin": origin, "destination": destination, "scheduled_departure_time_est": leaves,
        "scheduled_arrival_time_est": arrives, "dates": {day.replace("_", "-")[1:]: x for day, x in days.items()},
    }  # fmt: skip


def _start():
    flown = {"flight_number": "HAT1", "date": DAY, "price": 100, "origin": "JFK", "destination": "SEA"}
    methods = {
        "credit_card_1": {"source": "credit_card", "id": "credit_card_1"},
        "gift_card_1": {"source": "gift_card", "amount": 200, "id": "gift_card_1"},
        "certificate_1": {"source": "certificate", "amount": 150, "id": "certificate_1"},
    }
    day, after = f"_{DAY}".replace("-", "_"), f"_{NEXT}".replace("-", "_")
    return {
        "users": {"ann": {"payment_methods": methods, "reservations": ["AAA"]}},
        "reservations": {
            "AAA": {
                "reservation_id": "AAA", "user_id": "ann", "cabin": "economy", "flights": [flown],
                "passengers": [ANN, BOB], "total_baggages": 1, "nonfree_baggages": 0,
                "payment_history": [{"payment_id": "credit_card_1", "amount": 200}],
            },
        },
        "flights": {
            "HAT1": _flight("HAT1", "JFK", "SEA", "08:00:00", "11:00:00", **{day: _open(120)}),
            "HAT2": _flight("HAT2", "JFK", "ORD", "08:00:00", "10:00:00", **{day: _open(60), after: _open(70)}),
            "HAT3": _flight("HAT3", "ORD", "SEA", "11:00:00", "13:00:00", **{day: _open(60, 1)}),
            "HAT4": _flight("HAT4", "ORD", "SEA", "09:30:00", "12:00:00",
                            **{day: _open(50), after: {"status": "cancelled"}}),
            "HAT5": _flight("HAT5", "JFK", "ORD", "22:00:00", "01:00:00+1", **{day: _open(40)}),
        },
    }  # fmt: skip


START = json.loads(json.dumps(_start()))
BOOK = {
    "user_id": "ann", "origin": "JFK", "destination": "SEA", "flight_type": "one_way", "cabin": "economy",
    "flights": [{"flight_number": "HAT2", "date": DAY}, {"flight_number": "HAT3", "date": DAY}], "passengers": [ANN],
    "payment_methods": [{"payment_id": "certificate_1", "amount": 150}, {"payment_id": "gift_card_1", "amount": 50}],
    "total_baggages": 2, "nonfree_baggages": 1, "insurance": "yes",
}  # fmt: skip
MOVE = {"reservation_id": "AAA", "cabin": "economy", "payment_id": "gift_card_1"}


def _run(name, arguments, tables=None):
    """``(answer, changed rows)`` of one call."""
    tables = fresh(START) if tables is None else tables
    answer = toolbox(tables, AIRLINE).run(name, arguments)
    assert START == _start()  # the beginning is shared, and stays what it was
    return answer, {k: v for rows in changed(tables, START).values() for k, v in rows.items()}


def test_looking_up_changes_nothing():
    ends = {"origin": "JFK", "destination": "SEA"}
    direct = {name: x for name, x in START["flights"]["HAT1"].items() if name != "dates"} | _open(120)
    for name, arguments, want in (
        ("get_user_details", {"user_id": "ann"}, START["users"]["ann"]),
        ("get_reservation_details", {"reservation_id": "AAA"}, START["reservations"]["AAA"]),
        ("search_direct_flight", ends | {"date": DAY}, [direct]),
        ("search_direct_flight", ends | {"date": NEXT}, []),
        ("search_onestop_flight", ends | {"date": NEXT}, []),  # the second flight of that day is cancelled
    ):
        answer, rows = _run(name, arguments)
        assert json.loads(answer.text) == want and not answer.error and rows == {}
    found = json.loads(_run("search_onestop_flight", ends | {"date": DAY})[0].text)
    # HAT4 leaves before HAT2 has landed, and nothing flies on the morning after HAT5
    assert [[x["flight_number"] for x in pair] for pair in found] == [["HAT2", "HAT3"]]
    assert found[0][1]["date"] == DAY and found[0][1]["prices"]["economy"] == 60
    assert json.loads(_run("list_all_airports", {})[0].text)["MCO"] == "Orlando"
    for flight, date, status in (("HAT4", NEXT, "cancelled"), ("HAT1", DAY, "available")):
        assert _run("get_flight_status", {"flight_number": flight, "date": date})[0].text == status


def test_a_booking_takes_money_certificates_and_seats():
    answer, rows = _run("book_reservation", BOOK)  # 60 + 60, 30 of insurance, 50 for a bag
    assert not answer.error and json.loads(answer.text) == rows["HATHAT"]
    assert [x["price"] for x in rows["HATHAT"]["flights"]] == [60, 60]
    assert rows["HATHAT"]["flights"][1]["origin"] == "ORD" and rows["HATHAT"]["created_at"] == "2024-05-15T15:00:00"
    assert rows["ann"]["reservations"] == ["AAA", "HATHAT"]
    assert set(rows["ann"]["payment_methods"]) == {"credit_card_1", "gift_card_1"}
    assert rows["ann"]["payment_methods"]["gift_card_1"]["amount"] == 150
    assert rows["HAT3"]["dates"][DAY]["available_seats"] == {"basic_economy": 1, "economy": 0, "business": 1}


def test_three_bookings_and_certificates_a_talk():
    tables = fresh(START)
    paid = [{"payment_id": "credit_card_1", "amount": 60}]
    one = BOOK | {"flights": BOOK["flights"][:1], "nonfree_baggages": 0, "insurance": "no", "payment_methods": paid}
    for name in ("HATHAT", "HATHAU", "HATHAV"):
        assert json.loads(_run("book_reservation", one, tables)[0].text)["reservation_id"] == name
    other = one | {"flights": [{"flight_number": "HAT5", "date": DAY}]}
    other["payment_methods"] = [{"payment_id": "credit_card_1", "amount": 40}]
    assert "too many reservations" in _run("book_reservation", other, tables)[0].text
    for last in ("22", "23", "24"):
        answer, rows = _run("send_certificate", {"user_id": "ann", "amount": 100}, tables)
        name = f"certificate_32213{last}"
        assert name in answer.text and rows["ann"]["payment_methods"][name]["amount"] == 100
    assert "too many certificates" in _run("send_certificate", {"user_id": "ann", "amount": 1}, tables)[0].text


def test_changes_of_a_reservation():
    _, rows = _run("cancel_reservation", {"reservation_id": "AAA"})
    assert rows["AAA"]["status"] == "cancelled"
    assert [x["amount"] for x in rows["AAA"]["payment_history"]] == [200, -200]

    both = [{"flight_number": "HAT1", "date": DAY}]  # stays, at the price that was paid
    _, rows = _run("update_reservation_flights", MOVE | {"flights": both})
    assert rows == {}
    _, rows = _run("update_reservation_flights", MOVE | {"flights": both, "cabin": "basic_economy"})
    assert rows["AAA"]["cabin"] == "basic_economy" and rows["AAA"]["flights"][0]["price"] == 80
    assert rows["AAA"]["payment_history"][-1] == {"payment_id": "gift_card_1", "amount": -40}
    assert rows["ann"]["payment_methods"]["gift_card_1"]["amount"] == 240
    other = [{"flight_number": "HAT2", "date": NEXT}, {"flight_number": "HAT4", "date": DAY}]
    _, rows = _run("update_reservation_flights", MOVE | {"flights": other})  # 2 x (70 + 50) - 200
    assert rows["AAA"]["payment_history"][-1]["amount"] == 40 and "HAT2" not in rows  # seats are not taken here

    _, rows = _run("update_reservation_passengers", {"reservation_id": "AAA", "passengers": [BOB, BOB]})
    assert rows == {"AAA": START["reservations"]["AAA"] | {"passengers": [BOB, BOB]}}
    bags = {"reservation_id": "AAA", "total_baggages": 4, "nonfree_baggages": 2, "payment_id": "gift_card_1"}
    _, rows = _run("update_reservation_baggages", bags)
    assert rows["AAA"]["nonfree_baggages"] == 2 and rows["AAA"]["payment_history"][-1]["amount"] == 100
    assert rows["ann"]["payment_methods"]["gift_card_1"]["amount"] == 100


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("get_reservation_details", {"reservation_id": "B"}, "reservation not found"),
        ("get_flight_status", {"flight_number": "HAT9", "date": DAY}, "flight HAT9 not found"),
        ("get_flight_status", {"flight_number": "HAT1", "date": NEXT}, "not found on date"),
        ("book_reservation", BOOK | {"user_id": "bob"}, "user not found"),
        ("book_reservation", BOOK | {"nonfree_baggages": 2}, "the price is 250, and 200 is paid"),
        ("book_reservation", BOOK | {"passengers": [ANN, BOB]}, "not enough seats on flight HAT3"),
        ("book_reservation", BOOK | {"flights": [{"flight_number": "HAT4", "date": NEXT}]}, "not available on date"),
        ("book_reservation", BOOK | {"payment_methods": [{"payment_id": "x", "amount": 200}]}, "method x not found"),
        ("book_reservation", BOOK | {"payment_methods": [{"payment_id": "gift_card_1", "amount": 201}]},
         "not enough balance"),
        ("book_reservation", BOOK | {"payment_methods": [{"payment_id": "certificate_1", "amount": 100}] * 2},
         "not enough balance"),
        ("update_reservation_flights", MOVE | {"flights": [], "payment_id": "certificate_1"}, "certificate cannot"),
        ("update_reservation_flights",
         MOVE | {"cabin": "business", "flights": [{"flight_number": "HAT1", "date": DAY}]}, "gift card balance"),
        ("update_reservation_passengers", {"reservation_id": "AAA", "passengers": [ANN]}, "number of passengers"),
        ("send_certificate", {"user_id": "bob", "amount": 5}, "user not found"),
    ],
)  # fmt: skip
def test_refusals_change_nothing(name, arguments, text):
    answer, rows = _run(name, arguments)
    assert answer.error and answer.valid and text in answer.text and rows == {}


def test_a_talk_about_a_reservation():
    desk = tau_bench.Desk(START, "Help passengers.", AIRLINE)
    cancel = ("cancel_reservation", {"reservation_id": "AAA"})
    task = DeskTask("0", "Cancel AAA.", (("get_user_details", {"user_id": "ann"}), cancel), (), "tasks.json: task 0")
    world = tau_bench.desk_env(desk)

    def pays(*calls):
        state = world.reset([0, 1], tau_bench.open_talk(task, tau_bench.plain_user))
        for name, arguments in calls:
            state = world.step(
                state, f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
            ).state
        return world.step(state, "Done.").reward

    assert pays(cancel) == 1.0
    start = world.reset([0, 1], tau_bench.open_talk(task, tau_bench.plain_user))
    for more, said in (
        ({"cabin": "first"}, "arguments.cabin: 'first' is none of"),
        ({"passengers": [{"first_name": "Ann"}]}, "arguments.passengers[0]: last_name, dob are missing"),
        ({"total_baggages": -1}, "arguments.total_baggages: -1"),
    ):
        call = json.dumps({"name": "book_reservation", "arguments": BOOK | more})
        assert said in world.step(start, f"<tool_call>{call}</tool_call>").text
    assert pays() == 0.0 and pays(cancel, ("send_certificate", {"user_id": "ann", "amount": 50})) == 0.0


def test_the_published_parts_of_tasks(tmp_path):
    tasks = [DeskTask(str(k), f"task {k}", (), (), "tasks.json") for k in range(3)]
    path = tmp_path / "split_tasks.json"
    path.write_text('{"train": ["2", "0"], "test": ["1"], "base": ["0", "1", "2"]}')
    train, held = desk_files.desk_split(path, tasks)
    assert [t.identity for t in train] == ["2", "0"] and [t.identity for t in held] == ["1"]
    for text, said in (
        ('{"train": ["0"]}', "lacks test"),
        ('{"train": ["9"], "test": []}', "there is no task '9'"),
        ('{"train": ["1", "0"], "test": ["1"]}', "task '1' is in train and in test"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            desk_files.desk_split(path, tasks)
