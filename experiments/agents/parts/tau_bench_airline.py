"""The tools of tau-bench's airline desk as functions that change a database of users, reservations and flights.

A refusal is a ``ValueError`` whose text the agent reads, and changes nothing. What each tool does to the database is
what tau2-bench's does: a booking takes its seats, and a change of flights changes the cabin, which tau-bench forgot.
Database: ``desk_files.desk_database``.
"""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.agents.parts.tau_bench_tools import (
    Record,
    Tables,
    calculate,
    declared_as,
    row,
    think,
    transfer_to_human_agents,
    with_text,
)
from jaxrl_llm.tools.schema import Tool

NOW = "2024-05-15T15:00:00"  # of every episode, as the desk's rules say
NEW_RESERVATIONS = ("HATHAT", "HATHAU", "HATHAV")
NEW_CERTIFICATES = ("certificate_3221322", "certificate_3221323", "certificate_3221324")
CABINS = ("basic_economy", "economy", "business")
BAG, INSURANCE = 50, 30  # dollars: a bag that is not free, and a passenger's insurance
AIRPORTS = {
    "SFO": "San Francisco", "JFK": "New York", "LAX": "Los Angeles", "ORD": "Chicago", "DFW": "Dallas",
    "DEN": "Denver", "SEA": "Seattle", "ATL": "Atlanta", "MIA": "Miami", "BOS": "Boston", "PHX": "Phoenix",
    "IAH": "Houston", "LAS": "Las Vegas", "MCO": "Orlando", "EWR": "Newark", "CLT": "Charlotte",
    "MSP": "Minneapolis", "DTW": "Detroit", "PHL": "Philadelphia", "LGA": "LaGuardia",
}  # fmt: skip


def _flown(tables: Tables, flight_number: str, date: str) -> tuple[Record, Record]:
    """A flight, and how it stands on a day; neither is to be changed."""
    flight = tables["flights"].get(flight_number)
    if flight is None:
        raise ValueError(f"flight {flight_number} not found")
    if date not in flight["dates"]:
        raise ValueError(f"flight {flight_number} not found on date {date}")
    return flight, flight["dates"][date]


def _seated(tables: Tables, asked: Record, cabin: str, people: int) -> Record:
    """The part of a reservation that a flight with enough seats becomes."""
    number, date = asked["flight_number"], asked["date"]
    flight, day = _flown(tables, number, date)
    if day["status"] != "available":
        raise ValueError(f"flight {number} not available on date {date}")
    if day["available_seats"][cabin] < people:
        raise ValueError(f"not enough seats on flight {number}")
    ends = {name: flight[name] for name in ("origin", "destination")}
    return {"flight_number": number, "date": date, "price": day["prices"][cabin]} | ends


def _method(methods: Record, payment_id: str) -> Record:
    if payment_id not in methods:
        raise ValueError(f"payment method {payment_id} not found")
    return methods[payment_id]


def _charge(tables: Tables, reservation: Record, payment_id: str, amount: int | float) -> None:
    """What a change of a reservation costs more; a negative amount is given back."""
    method = _method(row(tables, "users", reservation["user_id"])["payment_methods"], payment_id)
    if method["source"] == "certificate":
        raise ValueError("a certificate cannot be used to update a reservation")
    if method["source"] == "gift_card":
        if method["amount"] < amount:
            raise ValueError("gift card balance is not enough")
        method["amount"] -= amount
    if amount:
        reservation["payment_history"].append({"payment_id": payment_id, "amount": amount})


# --- looking things up


def get_user_details(tables: Tables, user_id: str) -> Record:
    """Name, membership, saved passengers, payment methods and reservations of a user."""
    return row(tables, "users", user_id)


def get_reservation_details(tables: Tables, reservation_id: str) -> Record:
    """Flights, cabin, passengers, bags, insurance and payments of a reservation."""
    return row(tables, "reservations", reservation_id)


def list_all_airports(tables: Tables) -> dict[str, str]:
    """The cities of all airports by their code."""
    return dict(AIRPORTS)


def _on(tables: Tables, date: str, **ends: str) -> list[Record]:
    """The flights that can be booked on a day, with seats and prices, between the airports that are given."""
    return [
        {name: x for name, x in flight.items() if name != "dates"} | flight["dates"][date]
        for flight in tables["flights"].values()
        if flight["dates"].get(date, {}).get("status") == "available"
        and all(flight[name] == code for name, code in ends.items())
    ]


def search_direct_flight(tables: Tables, origin: str, destination: str, date: str) -> list[Record]:
    """The direct flights between two airports on a day that can be booked, with seats and prices."""
    return _on(tables, date, origin=origin, destination=destination)


def search_onestop_flight(tables: Tables, origin: str, destination: str, date: str) -> list[list[Record]]:
    """The pairs of flights with one stop between two airports on a day that can be booked."""
    found = []
    for first in _on(tables, date, origin=origin):
        arrives, next_date = first["scheduled_arrival_time_est"], date
        if "+1" in arrives and date[-2:].isdigit():
            next_date = f"2024-05-{int(date[-2:]) + 1}"  # as the benchmark writes it, whose days have two digits
        found += [
            [first | {"date": date}, second | {"date": next_date}]
            for second in _on(tables, next_date, origin=first["destination"], destination=destination)
            if second["scheduled_departure_time_est"] >= arrives
        ]
    return found


def get_flight_status(tables: Tables, flight_number: str, date: str) -> str:
    """Whether a flight of a day can be booked, has landed, flies, is late or is cancelled."""
    return _flown(tables, flight_number, date)[1]["status"]


# --- changing things


def book_reservation(
    tables: Tables,
    user_id: str,
    origin: str,
    destination: str,
    flight_type: str,
    cabin: str,
    flights: list[Record],
    passengers: list[Record],
    payment_methods: list[Record],
    total_baggages: int,
    nonfree_baggages: int,
    insurance: str,
) -> Record:
    """Books flights for a user; the payments must add up to the price."""
    user, people = row(tables, "users", user_id), len(passengers)
    free = [name for name in NEW_RESERVATIONS if name not in tables["reservations"]]
    if not free:
        raise ValueError("too many reservations in one talk")
    seated = [_seated(tables, flight, cabin, people) for flight in flights]
    price = people * sum(flight["price"] for flight in seated) + BAG * nonfree_baggages
    price += INSURANCE * people if insurance == "yes" else 0
    used = [paid["payment_id"] for paid in payment_methods]
    for paid in payment_methods:
        method = _method(user["payment_methods"], paid["payment_id"])
        limited = method["source"] in ("gift_card", "certificate")
        if limited and (method["amount"] < paid["amount"] or used.count(paid["payment_id"]) > 1):
            raise ValueError(f"not enough balance in payment method {paid['payment_id']}")
    total = sum(paid["amount"] for paid in payment_methods)
    if total != price:
        raise ValueError(f"the payments do not add up: the price is {price}, and {total} is paid")
    for paid in payment_methods:
        method = _method(user["payment_methods"], paid["payment_id"])
        if method["source"] == "gift_card":
            method["amount"] -= paid["amount"]
        elif method["source"] == "certificate":
            del user["payment_methods"][paid["payment_id"]]
    for flight in seated:
        row(tables, "flights", flight["flight_number"])["dates"][flight["date"]]["available_seats"][cabin] -= people
    user["reservations"].append(free[0])
    tables["reservations"][free[0]] = {
        "reservation_id": free[0], "user_id": user_id, "origin": origin, "destination": destination,
        "flight_type": flight_type, "cabin": cabin, "flights": seated, "passengers": list(passengers),
        "payment_history": list(payment_methods), "created_at": NOW, "total_baggages": total_baggages,
        "nonfree_baggages": nonfree_baggages, "insurance": insurance,
    }  # fmt: skip
    return tables["reservations"][free[0]]


def cancel_reservation(tables: Tables, reservation_id: str) -> Record:
    """Cancels a whole reservation and gives back what was paid for it."""
    reservation = row(tables, "reservations", reservation_id)
    paid = reservation["payment_history"]
    paid.extend([{"payment_id": x["payment_id"], "amount": -x["amount"]} for x in paid])
    reservation["status"] = "cancelled"
    return reservation


def update_reservation_flights(
    tables: Tables, reservation_id: str, cabin: str, flights: list[Record], payment_id: str
) -> Record:
    """Changes flights or cabin of a reservation; all of its flights are named, those that stay, too."""
    reservation = row(tables, "reservations", reservation_id)
    people, before = len(reservation["passengers"]), reservation["flights"]
    kept = {(x["flight_number"], x["date"]): x for x in before} if cabin == reservation["cabin"] else {}
    after = [kept.get((x["flight_number"], x["date"])) or _seated(tables, x, cabin, people) for x in flights]
    dearer = people * (sum(x["price"] for x in after) - sum(x["price"] for x in before))
    _charge(tables, reservation, payment_id, dearer)
    reservation |= {"flights": after, "cabin": cabin}
    return reservation


def update_reservation_passengers(tables: Tables, reservation_id: str, passengers: list[Record]) -> Record:
    """Changes who flies; how many do stays the same."""
    reservation = row(tables, "reservations", reservation_id)
    if len(passengers) != len(reservation["passengers"]):
        raise ValueError("the number of passengers does not match")
    reservation["passengers"] = list(passengers)
    return reservation


def update_reservation_baggages(
    tables: Tables, reservation_id: str, total_baggages: int, nonfree_baggages: int, payment_id: str
) -> Record:
    """Changes how many bags a reservation has, and how many of them are not free."""
    reservation = row(tables, "reservations", reservation_id)
    more = BAG * max(0, nonfree_baggages - reservation["nonfree_baggages"])
    _charge(tables, reservation, payment_id, more)
    reservation |= {"total_baggages": total_baggages, "nonfree_baggages": nonfree_baggages}
    return reservation


def send_certificate(tables: Tables, user_id: str, amount: int | float) -> str:
    """Gives a user a certificate of some dollars; only where the rules allow it."""
    methods = row(tables, "users", user_id)["payment_methods"]
    free = [name for name in NEW_CERTIFICATES if name not in methods]
    if not free:
        raise ValueError("too many certificates in one talk")
    methods[free[0]] = {"source": "certificate", "amount": amount, "id": free[0]}
    return f"certificate {free[0]} of {amount} given to user {user_id}"


# --- what the agent is told of them

_TEXT, _WHOLE = {"type": "string"}, {"type": "integer", "minimum": 0}


def _listed(**kinds: Record) -> Record:
    """A list of records with these members."""
    one = {"type": "object", "properties": kinds, "required": list(kinds), "additionalProperties": False}
    return {"type": "array", "items": one}


_FLIGHTS = _listed(flight_number=_TEXT, date=_TEXT)
_PEOPLE = _listed(first_name=_TEXT, last_name=_TEXT, dob=_TEXT)
_PAYMENTS = _listed(payment_id=_TEXT, amount={"type": "number"})
_CABIN = {"type": "string", "enum": list(CABINS)}
_BAGS = {"total_baggages": _WHOLE, "nonfree_baggages": _WHOLE}
_ENDS = ("origin", "destination")
AIRLINE: Sequence[tuple[Tool, Callable[..., Any]]] = (
    declared_as(get_user_details, with_text("user_id")),
    declared_as(get_reservation_details, with_text("reservation_id")),
    declared_as(list_all_airports, {}),
    declared_as(search_direct_flight, with_text(*_ENDS, "date")),
    declared_as(search_onestop_flight, with_text(*_ENDS, "date")),
    declared_as(get_flight_status, with_text("flight_number", "date")),
    declared_as(calculate, with_text("expression")),
    declared_as(think, with_text("thought")),
    declared_as(transfer_to_human_agents, with_text("summary")),
    declared_as(
        book_reservation,
        with_text("user_id", *_ENDS)
        | {"flight_type": {"type": "string", "enum": ["one_way", "round_trip"]}, "cabin": _CABIN, "flights": _FLIGHTS}
        | {"passengers": _PEOPLE, "payment_methods": _PAYMENTS}
        | _BAGS
        | {"insurance": {"type": "string", "enum": ["yes", "no"]}},
        ask=True,
    ),
    declared_as(cancel_reservation, with_text("reservation_id"), ask=True),
    declared_as(
        update_reservation_flights,
        with_text("reservation_id") | {"cabin": _CABIN, "flights": _FLIGHTS} | with_text("payment_id"),
        ask=True,
    ),
    declared_as(update_reservation_passengers, with_text("reservation_id") | {"passengers": _PEOPLE}, ask=True),
    declared_as(update_reservation_baggages, with_text("reservation_id") | _BAGS | with_text("payment_id"), ask=True),
    declared_as(send_certificate, with_text("user_id") | {"amount": {"type": "number"}}),
)
