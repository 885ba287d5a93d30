"""The tools of tau2-bench's telecom desk as functions that change a database of customers, lines, plans and bills.

A refusal is a ``ValueError`` whose text the agent reads, and changes nothing. What each tool does to the database is
what tau2-bench's does; the rules that a tool does not know (a line is resumed when its bill is paid, two gigabytes are
refuelled) are judged by the end. The user's phone, which none of these tools reaches: ``tau_bench_phone``. Database:
``desk_files.desk_database``.

From "tau2-bench: Evaluating Conversational Agents in a Dual-Control Environment", arXiv:2506.07982.
"""

import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from experiments.agents.parts.tau_bench_tools import (
    Record,
    Tables,
    declared_as,
    row,
    transfer_to_human_agents,
    with_text,
)
from jaxrl_llm.tools.schema import Tool

TODAY, CYCLE_END = "2025-02-25", "2025-02-28"  # of every episode, as the desk's rules say
LAST_MONTH = {"period_start": "2025-01-01", "period_end": "2025-01-31", "issue_date": "2025-01-01",
              "due_date": "2025-01-15"}  # fmt: skip
NEXT_MONTH = {"period_start": "2025-03-01", "period_end": "2025-03-31", "issue_date": "2025-03-01",
              "due_date": "2025-03-15"}  # fmt: skip
TABLE_OF = {"L": "lines", "D": "devices", "B": "bills", "C": "customers", "P": "plans"}  # by the first letter of an id
HOLDING_FEE = 5  # dollars a month
MOST_GB = 1000  # what a bill can be written for: a whole number that a policy writes has any length


def digits(phone_number: str) -> str:
    """The digits of a phone number, however it is written."""
    return "".join(c for c in phone_number if c.isdigit())


def _plain(name: str) -> str:
    """A name without accents and capitals."""
    return "".join(c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c)).casefold().strip()


def line_of(tables: Tables, phone_number: str) -> Record:
    """The line of a phone number, not to be changed.

    Raises:
      ValueError: where there is none.
    """
    wanted = digits(phone_number)
    for line in tables["lines"].values():
        if wanted and digits(line["phone_number"]) == wanted:
            return line
    raise ValueError(f"no line has the phone number {phone_number}")


def customer_of(tables: Tables, phone_number: str) -> Record:
    """The customer whom a phone number reaches, or one of whose lines has it; not to be changed.

    Raises:
      ValueError: where there is none.
    """
    wanted = digits(phone_number)
    for customer in tables["customers"].values():
        lines = [tables["lines"][name]["phone_number"] for name in customer["line_ids"] if name in tables["lines"]]
        if wanted and wanted in map(digits, [customer["phone_number"], *lines]):
            return customer
    raise ValueError(f"no customer has the phone number {phone_number}")


def waiting_bills(tables: Tables, customer: Record) -> list[Record]:
    """The bills of a customer for which a payment was requested."""
    bills = (tables["bills"][name] for name in customer["bill_ids"])
    return [bill for bill in bills if bill["status"] == "Awaiting Payment"]


def _line(tables: Tables, customer_id: str, line_id: str) -> Record:
    """A line of a customer, that may be changed."""
    if line_id not in row(tables, "customers", customer_id)["line_ids"]:
        raise ValueError(f"customer {customer_id} has no line {line_id}")
    return row(tables, "lines", line_id)


# --- looking things up


def get_customer_by_phone(tables: Tables, phone_number: str) -> Record:
    """The customer of a phone number: that of the contact, or of one of the lines."""
    return customer_of(tables, phone_number)


def get_customer_by_id(tables: Tables, customer_id: str) -> Record:
    """The customer of an id."""
    return row(tables, "customers", customer_id)


def get_customer_by_name(tables: Tables, full_name: str, dob: str) -> list[Record]:
    """The customers of a full name and a date of birth (YYYY-MM-DD)."""
    asked = (_plain(full_name), dob)
    return [x for x in tables["customers"].values() if (_plain(x["full_name"]), x["date_of_birth"]) == asked]


def get_details_by_id(tables: Tables, id: str) -> Record:
    """A customer (C...), line (L...), device (D...), bill (B...) or plan (P...) by its id."""
    table = TABLE_OF.get(id[:1])
    if table is None:
        raise ValueError(f"{id} is no id: one begins with {', '.join(TABLE_OF)}")
    return row(tables, table, id)


def get_bills_for_customer(tables: Tables, customer_id: str, limit: int | float = 12) -> list[Record]:
    """The bills of a customer, the newest first, at most ``limit``."""
    bills = [tables["bills"][name] for name in row(tables, "customers", customer_id)["bill_ids"]]
    most = max(int(limit), 0)  # JSON says 2.0 as well
    return sorted(bills, key=lambda bill: bill["issue_date"], reverse=True)[:most]


def get_data_usage(tables: Tables, customer_id: str, line_id: str) -> Record:
    """The data that a line has used in this cycle, what its plan has, what was refuelled, and when the cycle ends."""
    line = _line(tables, customer_id, line_id)
    limit = row(tables, "plans", line["plan_id"])["data_limit_gb"]
    used = {name: line[name] for name in ("data_used_gb", "data_refueling_gb")}
    return {"line_id": line_id, "data_limit_gb": limit, "cycle_end_date": CYCLE_END} | used


# --- changing things


def suspend_line(tables: Tables, customer_id: str, line_id: str, reason: str) -> Record:
    """Suspends an active line, for six months at most."""
    line = _line(tables, customer_id, line_id)
    if line["status"] != "Active":
        raise ValueError("only an active line can be suspended")
    line |= {"status": "Suspended", "suspension_start_date": TODAY}
    return {"message": f"the line is suspended; a month costs ${HOLDING_FEE}", "line": line}


def resume_line(tables: Tables, customer_id: str, line_id: str) -> Record:
    """Resumes a line that is suspended or waits for its activation."""
    line = _line(tables, customer_id, line_id)
    if line["status"] not in ("Suspended", "Pending Activation"):
        raise ValueError("only a suspended line can be resumed")
    line |= {"status": "Active", "suspension_start_date": None}
    return {"message": "the line is resumed", "line": line}


def send_payment_request(tables: Tables, customer_id: str, bill_id: str) -> str:
    """Asks a customer to pay a bill, one at a time. Whether it is overdue, or paid, is not looked at: look first."""
    customer = row(tables, "customers", customer_id)
    if waiting_bills(tables, customer):
        raise ValueError("a bill of this customer is already awaiting payment")
    if bill_id not in customer["bill_ids"]:
        raise ValueError(f"customer {customer_id} has no bill {bill_id}")
    row(tables, "bills", bill_id)["status"] = "Awaiting Payment"
    return f"the payment of bill {bill_id} was requested"


def enable_roaming(tables: Tables, customer_id: str, line_id: str) -> str:
    """Lets a line be used abroad."""
    line = _line(tables, customer_id, line_id)
    was, line["roaming_enabled"] = line["roaming_enabled"], True
    return "roaming was enabled before" if was else "roaming is enabled"


def disable_roaming(tables: Tables, customer_id: str, line_id: str) -> str:
    """Does not let a line be used abroad any longer."""
    line = _line(tables, customer_id, line_id)
    was, line["roaming_enabled"] = line["roaming_enabled"], False
    return "roaming is disabled" if was else "roaming was disabled before"


def refuel_data(tables: Tables, customer_id: str, line_id: str, gb_amount: int | float) -> Record:
    """Adds gigabytes to a line's data of this cycle, at the price of its plan, on the customer's next bill."""
    if gb_amount <= 0:
        raise ValueError("the amount must be positive")
    if gb_amount > MOST_GB:
        raise ValueError(f"more than {MOST_GB} gigabytes cannot be added at once")
    line = _line(tables, customer_id, line_id)
    price = row(tables, "plans", line["plan_id"])["data_refueling_price_per_gb"]
    line["data_refueling_gb"] += gb_amount
    _charge(tables, customer_id, gb_amount * price, f"{gb_amount} GB of data for line {line_id}")
    return {"message": f"{gb_amount} GB were added to line {line_id}", "charge": gb_amount * price,
            "new_data_refueling_gb": line["data_refueling_gb"]}  # fmt: skip


def _charge(tables: Tables, customer_id: str, amount: int | float, description: str) -> None:
    """Puts an amount on the bill that is not yet issued; where a customer has none, one of the next month is made."""
    customer = row(tables, "customers", customer_id)
    draft = next((x for x in customer["bill_ids"] if tables["bills"][x]["status"] == "Draft"), None)
    if draft is None:
        draft = f"B-{customer_id}-next"
        customer["bill_ids"].append(draft)
        tables["bills"][draft] = _bill(draft, customer_id, "Draft", NEXT_MONTH)
    bill = row(tables, "bills", draft)
    bill["line_items"].append({"description": description, "amount": amount, "date": TODAY, "item_type": "Charge"})
    bill["total_due"] += amount


def _bill(bill_id: str, customer_id: str, status: str, dates: Record) -> Record:
    return {"bill_id": bill_id, "customer_id": customer_id, "total_due": 0, "status": status, "line_items": []} | dates


# --- how tasks begin


def set_data_usage(tables: Tables, customer_id: str, line_id: str, data_used_gb: int | float) -> None:
    """A line has used so much data."""
    _line(tables, customer_id, line_id)["data_used_gb"] = data_used_gb


def suspend_line_for_overdue_bill(
    tables: Tables, customer_id: str, line_id: str, new_bill_id: str, contract_ended: bool
) -> None:
    """A line is suspended since last month's bill was not paid; its contract may have ended, too."""
    line = _line(tables, customer_id, line_id)
    if line["status"] != "Active":
        raise ValueError("only an active line can be suspended")
    price = row(tables, "plans", line["plan_id"])["price_per_month"]
    bill = _bill(new_bill_id, customer_id, "Overdue", LAST_MONTH)
    bill["line_items"].append(
        {"description": f"line {line_id}", "amount": price, "date": TODAY, "item_type": "Charge"}
    )  # fmt: skip
    tables["bills"][new_bill_id] = bill | {"total_due": price}
    row(tables, "customers", customer_id)["bill_ids"].append(new_bill_id)
    line |= {"status": "Suspended", "suspension_start_date": TODAY}
    if contract_ended:
        line["contract_end_date"] = LAST_MONTH["period_end"]


BEGINNINGS: dict[str, Callable[..., Any]] = {
    "set_data_usage": set_data_usage, "suspend_line_for_overdue_bill": suspend_line_for_overdue_bill,
}  # fmt: skip


# --- what may be asserted of the end


def _refuelled(tables: Tables, customer_id: str, line_id: str, expected_amount: int | float) -> bool:
    return round(_line(tables, customer_id, line_id)["data_refueling_gb"] - expected_amount, 6) == 0


def _line_status(tables: Tables, customer_id: str, line_id: str, expected_status: str) -> bool:
    return _line(tables, customer_id, line_id)["status"] == expected_status


def _overdue(tables: Tables, customer_id: str, overdue_bill_id: str) -> bool:
    bill = tables["bills"].get(overdue_bill_id, {})
    return bill.get("customer_id") == customer_id and bill.get("status") == "Overdue"


def _not_overdue(tables: Tables, overdue_bill_id: str) -> bool:
    """There is no such bill, or it is paid."""
    return tables["bills"].get(overdue_bill_id, {"status": "Paid"})["status"] == "Paid"


CHECKS: dict[str, Callable[..., bool]] = {
    "assert_data_refueling_amount": _refuelled, "assert_line_status": _line_status,
    "assert_overdue_bill_exists": _overdue, "assert_no_overdue_bill": _not_overdue,
}  # fmt: skip


# --- what the agent is told of the tools

_OF_LINE = ("customer_id", "line_id")
_LIMIT = {"limit": {"type": "integer", "minimum": 1}}
TELECOM: Sequence[tuple[Tool, Callable[..., Any]]] = (
    declared_as(get_customer_by_phone, with_text("phone_number")),
    declared_as(get_customer_by_id, with_text("customer_id")),
    declared_as(get_customer_by_name, with_text("full_name", "dob")),
    declared_as(get_details_by_id, with_text("id")),
    declared_as(get_bills_for_customer, with_text("customer_id") | _LIMIT, optional=("limit",)),
    declared_as(get_data_usage, with_text(*_OF_LINE)),
    declared_as(suspend_line, with_text(*_OF_LINE, "reason"), ask=True),
    declared_as(resume_line, with_text(*_OF_LINE)),
    declared_as(send_payment_request, with_text("customer_id", "bill_id")),
    declared_as(enable_roaming, with_text(*_OF_LINE)),
    declared_as(disable_roaming, with_text(*_OF_LINE)),
    declared_as(refuel_data, with_text(*_OF_LINE) | {"gb_amount": {"type": "number"}}, ask=True),
    declared_as(transfer_to_human_agents, with_text("summary")),
)
