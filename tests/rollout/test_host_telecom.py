"""A telecom desk of two customers and a phone: what the tools of both sides do and cannot reach, talks, their worth."""

import copy
import itertools
import json

import numpy as np
import pytest

from experiments.agents.parts import desk_files, tau_bench, tau_bench_phone, tau_bench_telecom
from experiments.agents.parts.desk_files import SideCall
from experiments.agents.parts.tau_bench_tools import changed, fresh
from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.errors import DataError
from jaxrl_llm.tools.endpoints import Unanswered
from tests.models_for_tests import byte_tokenizer
from tests.rollout.test_host_desk import START as SHOP

MINE, BILL = {"customer_id": "C1", "line_id": "L1"}, "B9"


def _line(name, number, plan, **more):
    return {"line_id": name, "phone_number": number, "status": "Active", "plan_id": plan, "device_id": "D1",
            "data_used_gb": 3.0, "data_refueling_gb": 0.0, "roaming_enabled": False,
            "contract_end_date": "2026-12-31"} | more  # fmt: skip


def _customer(name, full_name, number, lines, bills):
    return {"customer_id": name, "full_name": full_name, "date_of_birth": "1990-01-02", "phone_number": number,
            "line_ids": lines, "bill_ids": bills}  # fmt: skip


def _bill(name, status, issued):
    return {"bill_id": name, "customer_id": "C1", "status": status, "issue_date": issued, "total_due": 0.0,
            "line_items": []}  # fmt: skip


def _tables():
    return {
        "customers": {"C1": _customer("C1", "Ánn Lee", "555-1", ["L1", "L2"], ["B1", "B2"]),
                      "C2": _customer("C2", "Bob Ray", "555-9", ["L3"], [])},
        "lines": {"L1": _line("L1", "555-1", "P1"), "L2": _line("L2", "555-2", "P1"),
                  "L3": _line("L3", "555-3", "P2", status="Suspended")},
        "plans": {"P1": {"plan_id": "P1", "data_limit_gb": 5.0, "price_per_month": 40.0,
                         "data_refueling_price_per_gb": 2.0},
                  "P2": {"plan_id": "P2", "data_limit_gb": 9.0, "price_per_month": 60.0,
                         "data_refueling_price_per_gb": 1.0}},
        "devices": {"D1": {"device_id": "D1", "model": "X"}},
        "bills": {"B1": _bill("B1", "Paid", "2025-01-05"), "B2": _bill("B2", "Draft", "2025-03-01")},
        "phone": tau_bench_phone.phone(),
    }  # fmt: skip


START = _tables()
DESK = tau_bench.Desk(START, "Help customers.", tau_bench_telecom.TELECOM, tau_bench_phone.IN_HAND)

# --- tasks, in tau2-bench's form: what is wrong, and the actions that mend it


def _user(name, /, **arguments):
    return {"env_type": "user", "func_name": name, "arguments": arguments}


def _network(name, /, **arguments):
    return {"env_type": "assistant", "func_name": name, "arguments": MINE | arguments}


def _does(who, name, /, **arguments):
    return {"requestor": who, "name": name, "arguments": arguments}


def _refused(permission):
    return [_user("remove_app_permission", app_name="messaging", permission=permission)]


def _granted(permission):
    return [_does("user", "grant_app_permission", app_name="messaging", permission=permission)]


def _suspended(ended):
    return [_network("suspend_line_for_overdue_bill", new_bill_id=BILL, contract_ended=ended),
            _user("simulate_network_search")]  # fmt: skip


REFUEL = _does("assistant", "refuel_data", **MINE, gb_amount=2.0)
ENABLE = _does("assistant", "enable_roaming", **MINE)
RESET = [_does("user", "reset_apn_settings"), _does("user", "reboot_device")]
PAID = [_does("assistant", "send_payment_request", customer_id="C1", bill_id=BILL), _does("user", "make_payment")]
RESUMED = [_does("assistant", "resume_line", **MINE), _does("user", "reboot_device")]
ABROAD = _user("set_user_location", abroad=True)
FAULTS = {  # by what is asked for: the changes at the beginning, and the actions; none where only a human helps
    "service": {
        "airplane": ([_user("turn_airplane_mode_on")], [_does("user", "toggle_airplane_mode")]),
        "sim": ([_user("unseat_sim_card")], [_does("user", "reseat_sim_card")]),
        "apn": ([_user("break_apn_settings")], RESET),
        "overdue": (_suspended(False), [*PAID, *RESUMED]),
        "locked": ([_user("lock_sim_card", mode="pin")], None),
        "ended": (_suspended(True), None),
    },
    "data": {
        "airplane": ([_user("turn_airplane_mode_on")], [_does("user", "toggle_airplane_mode")]),
        "off": ([_user("turn_data_off")], [_does("user", "toggle_data")]),
        "saver": ([_user("turn_data_saver_mode_on")], [_does("user", "toggle_data_saver_mode")]),
        "slow": ([_user("set_network_mode_preference", mode="2g_only")],
                 [_does("user", "set_network_mode_preference", mode="4g_5g_preferred")]),
        "vpn": ([_user("break_vpn")], [_does("user", "disconnect_vpn")]),
        "used": ([_network("set_data_usage", data_used_gb=5.1)], [REFUEL]),
        "line": ([ABROAD, _user("turn_roaming_on"), _network("disable_roaming")], [ENABLE]),
        "roaming": ([ABROAD, _user("turn_roaming_off"), _network("disable_roaming")],
                    [ENABLE, _does("user", "toggle_roaming")]),
    },
    "mms": {
        "sim": ([_user("unseat_sim_card")], [_does("user", "reseat_sim_card")]),
        "off": ([_user("turn_data_off")], [_does("user", "toggle_data")]),
        "slow": ([_user("set_network_mode_preference", mode="2g_only")],
                 [_does("user", "set_network_mode_preference", mode="4g_5g_preferred")]),
        "wifi": ([_user("set_wifi_calling", enabled=True, mms_over_wifi=True)], [_does("user", "toggle_wifi_calling")]),
        "mmsc": ([_user("break_apn_mms_setting")], RESET),
        "sms": (_refused("sms"), _granted("sms")),
        "both": (_refused("sms") + _refused("storage"), _granted("sms") + _granted("storage")),
    },
}  # fmt: skip
CHECKS = {
    "service": [_user("assert_service_status", expected_status="connected"),
                _network("assert_no_overdue_bill") | {"arguments": {"overdue_bill_id": BILL}}],
    "data": [_user("assert_mobile_data_status", expected_status=True),
             _user("assert_internet_speed", expected_speed=200, expected_desc="excellent")],
    "mms": [_user("assert_can_send_mms", expected_status=True)],
}  # fmt: skip
HAND_OVER = _does("assistant", "transfer_to_human_agents", summary="It is locked.") | {"compare_args": []}


def record_of(issue, *names, basis=("ENV_ASSERTION",)):
    found = [FAULTS[issue][name] for name in names]
    begin = [_user("set_user_info", name="Ánn Lee", phone_number="555-1"), *(c for calls, _ in found for c in calls)]
    fixable, checks = all(actions is not None for _, actions in found), CHECKS[issue]
    actions = [action for _, actions in found for action in actions] if fixable else [HAND_OVER]
    if "used" in names:
        checks = [*checks, _network("assert_data_refueling_amount", expected_amount=2.0)]
    if not fixable:
        checks, basis = [_user("assert_service_status", expected_status="no_service")], ("ENV_ASSERTION", "ACTION")
    return {
        "id": f"{issue}:{'|'.join(names)}", "user_scenario": {"instructions": f"Your {issue} does not work."},
        "initial_state": {"initialization_actions": begin},
        "evaluation_criteria": {"actions": actions, "env_assertions": checks, "reward_basis": list(basis)},
    }  # fmt: skip


def _task(tmp_path, *given, **more):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([record_of(*given, **more)]))
    (task,) = desk_files.desk_tasks(path)
    return task


def _call(name, arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _says(action, sides=("assistant", "user")):
    """What the agent writes to have an action taken."""
    name, arguments = action["name"], action["arguments"]
    asked = f"Would you please do {name} {json.dumps(arguments)}?"
    return _call(name, arguments) if action["requestor"] == "assistant" else asked


def _talk(task, texts, user=tau_bench.plain_user):
    world = tau_bench.desk_env(DESK, user)
    state, said = world.reset(np.zeros((2,), np.uint32), tau_bench.open_talk(task, user, DESK)), None
    for text in texts:
        said = world.step(state, text)
        state = said.state
        if said.done or not said.valid:
            break
    return said


def _combinations():
    """Every problem of one or two things that are wrong, and each issue with all that can be mended at once."""
    for issue, faults in FAULTS.items():
        fixable = [
            name for name, (_, actions) in faults.items() if actions is not None and name not in ("both", "line")
        ]
        for count in (1, 2):
            yield from ((issue, *names) for names in itertools.combinations(faults, count))
        yield issue, *fixable


EXCLUSIVE = ({"overdue", "ended"}, {"line", "roaming"}, {"sms", "both"})


@pytest.mark.parametrize("given", [x for x in _combinations() if not any(e <= set(x) for e in EXCLUSIVE)], ids="-".join)
def test_the_plan_of_a_task_succeeds_and_doing_nothing_does_not(given, tmp_path):
    task, record = _task(tmp_path, *given), record_of(*given)
    tau_bench.check_task(DESK, task)
    begun = tau_bench.begun_tables(DESK, task)
    human = record["evaluation_criteria"]["actions"] == [HAND_OVER]
    assert human == all(tau_bench.holds(DESK, begun, call) == wanted for call, wanted in task.checks)
    plan = [_says(action) for action in record["evaluation_criteria"]["actions"]]
    assert _talk(task, [*plan, "Good-bye."])[2:5] == (1.0, True, True)
    said = _talk(task, ["Good-bye."])
    assert said[2:5] == (0.0, True, True) and said.reason
    if len(given) == 2 and len(plan) > 1:  # every action is needed
        for k in range(len(plan)):
            assert _talk(task, [*plan[:k], *plan[k + 1 :], "Good-bye."]).reward == 0.0, plan[k]
    assert START == _tables()  # the beginning is shared, and stays what it was


def test_each_side_reaches_its_own_tables_alone():
    """Whatever the tools of a side are told, they leave the other's tables as they were."""
    shapes = {"string": ["C1", "L1", "B1", "sms", "messaging", "2g_only", "555-1"], "number": [2.0], "integer": [1],
              "object": [{"apn_name": "broken"}]}  # fmt: skip
    changes = {"assistant": 0, "user": 0}
    for side, tools in (("assistant", tau_bench_telecom.TELECOM), ("user", tau_bench_phone.TOOLS)):
        for item, _ in tools:
            properties = item.parameters["properties"]
            for values in itertools.product(*(shapes[x["type"]] for x in properties.values())):
                tables = fresh(START)
                before = copy.deepcopy(tables)
                box = tau_bench.side_box(
                    DESK._replace(device=DESK.device._replace(settle=lambda _: None)), tables, side
                )
                answer = box.run(item.name, dict(zip(properties, values, strict=True)))
                assert answer.valid, (item.name, answer.text)
                moved = {name for name in tables if tables[name] != before[name]}
                assert moved <= ({"phone"} if side == "user" else set(tables) - {"phone"}), item.name
                changes[side] += bool(moved)
    assert changes["assistant"] > 5 and changes["user"] > 9
    agent = tau_bench.side_box(DESK, fresh(START), "assistant")
    assert not {x.name for x in agent.tools} & {x.name for x, _ in tau_bench_phone.TOOLS}


def test_the_agent_cannot_call_what_the_user_can(tmp_path):
    task = _task(tmp_path, "service", "airplane")
    said = _talk(task, [_call("toggle_airplane_mode", {})])
    assert "there is no tool toggle_airplane_mode" in said.text and not said.done
    said = _talk(task, ["Do toggle_airplane_mode, please."])
    assert said.text.startswith("airplane mode is now off\nStatus bar: excellent signal, 5G, mobile data on")
    assert said.state.made == (SideCall("user", "toggle_airplane_mode", {}),)


@pytest.mark.parametrize(
    ("given", "texts", "why"),
    [
        # more than may be refuelled, or refuelled twice
        (("data", "used"), [_call("refuel_data", MINE | {"gb_amount": 3.0})], "assert_data_refueling_amount"),
        (("data", "used"), [_call("refuel_data", MINE | {"gb_amount": 2.0})] * 2, "assert_data_refueling_amount"),
        # resumed and not paid
        (("service", "overdue"), [_says(x) for x in RESUMED], "assert_no_overdue_bill"),
        (("service", "overdue"), [_says(PAID[0]), *(_says(x) for x in RESUMED)], "assert_no_overdue_bill"),
        # resumed though the contract has ended, handed over afterwards, too
        (("service", "ended"), [_says(x) for x in (*PAID, *RESUMED, HAND_OVER)], "assert_service_status"),
        # handed over though it can be mended; not handed over though it cannot
        (("service", "airplane"), [_says(HAND_OVER)], "assert_service_status"),
        (("service", "locked"), ["Do reseat_sim_card?", "Do reboot_device?"], "transfer_to_human_agents was not"),
    ],
)
def test_who_breaks_the_rules_fails(given, texts, why, tmp_path):
    said = _talk(_task(tmp_path, *given), [*texts, "Good-bye."])
    assert said[2:5] == (0.0, True, True) and why in said.reason


def test_where_the_database_counts_nothing_else_may_have_changed(tmp_path):
    task = _task(tmp_path, "service", "airplane", basis=("ENV_ASSERTION", "DB"))
    mended = "Do toggle_airplane_mode?"
    assert _talk(task, [mended, "Bye."]).reward == 1.0
    assert _talk(task, [mended, "Do toggle_wifi?", "Bye."]).reason == "the database differs from the gold one"
    assert _talk(task, [mended, "Do toggle_wifi?", "And toggle_wifi again?", "Bye."]).reward == 1.0
    assert _talk(task, [mended, _call("enable_roaming", MINE), "Bye."]).reward == 0.0


# --- single tools


def _after(*calls):
    """``(last answer, tables)`` of calls of both sides."""
    tables = fresh(START)
    tau_bench_phone.BEGINNINGS["set_user_info"](tables, "Ánn Lee", "555-1")
    tables["phone"]["surroundings"]["signal_strength"]["2G"] = "poor"
    answer = None
    for side, name, arguments in calls:
        answer = tau_bench.side_box(DESK, tables, side).run(name, arguments)
    return answer, tables


def test_looking_up():
    ann, lines = START["customers"]["C1"], START["lines"]
    for name, arguments, want in (
        ("get_customer_by_phone", {"phone_number": "(555) 2"}, ann),
        ("get_customer_by_id", {"customer_id": "C1"}, ann),
        ("get_customer_by_name", {"full_name": "ann lee", "dob": "1990-01-02"}, [ann]),
        ("get_customer_by_name", {"full_name": "ann lee", "dob": "1990-01-03"}, []),
        ("get_details_by_id", {"id": "L3"}, lines["L3"]),
        ("get_details_by_id", {"id": "P1"}, START["plans"]["P1"]),
        ("get_bills_for_customer", {"customer_id": "C1", "limit": 1}, [START["bills"]["B2"]]),
        ("get_bills_for_customer", {"customer_id": "C1", "limit": 1.0}, [START["bills"]["B2"]]),
        ("get_data_usage", MINE, {"line_id": "L1", "data_limit_gb": 5.0, "cycle_end_date": "2025-02-28",
                                  "data_used_gb": 3.0, "data_refueling_gb": 0.0}),
    ):  # fmt: skip
        answer, tables = _after(("assistant", name, arguments))
        assert json.loads(answer.text) == want and not answer.error
        assert not any(rows for table, rows in changed(tables, START).items() if table != "phone")


@pytest.mark.parametrize(
    ("side", "name", "arguments", "text"),
    [
        ("assistant", "get_customer_by_phone", {"phone_number": "x"}, "no customer has the phone number x"),
        ("assistant", "get_details_by_id", {"id": "X1"}, "X1 is no id"),
        ("assistant", "resume_line", MINE, "only a suspended line"),
        ("assistant", "suspend_line", {"customer_id": "C2", "line_id": "L3", "reason": "lost"}, "only an active line"),
        ("assistant", "enable_roaming", {"customer_id": "C1", "line_id": "L3"}, "customer C1 has no line L3"),
        ("assistant", "send_payment_request", {"customer_id": "C2", "bill_id": "B1"}, "customer C2 has no bill B1"),
        ("assistant", "refuel_data", MINE | {"gb_amount": 0}, "must be positive"),
        ("assistant", "refuel_data", MINE | {"gb_amount": 10**400}, "more than 1000 gigabytes"),
        ("user", "make_payment", {}, "nothing to pay"),
        ("user", "check_app_permissions", {"app_name": "chess"}, "there is no app chess; there are messaging, browser"),
        ("user", "grant_app_permission", {"app_name": "browser", "permission": "camera"}, "camera is none of sms"),
        ("user", "set_apn_settings", {"apn_settings": {"name": "x"}}, "name: the settings are apn_name"),
    ],
)
def test_refusals_change_nothing(side, name, arguments, text):
    answer, tables = _after((side, name, arguments))
    assert answer.error and answer.valid and text in answer.text
    assert changed(tables, START) == changed(_after()[1], START)


def test_one_bill_waits_at_a_time_and_is_paid_by_the_user():
    ask = ("assistant", "send_payment_request", {"customer_id": "C1", "bill_id": "B2"})
    assert "already awaiting payment" in _after(ask, ask)[0].text
    answer, tables = _after(ask, ("user", "check_payment_request", {}))
    assert (
        answer.text == "asked to pay 0.0 dollars for bill B2" and tables["bills"]["B2"]["status"] == "Awaiting Payment"
    )
    answer, tables = _after(ask, ("user", "make_payment", {}), ("user", "check_payment_request", {}))
    assert answer.text == "nothing to pay" and tables["bills"]["B2"]["status"] == "Paid"


def test_gigabytes_are_charged():
    refuel = ("assistant", "refuel_data", MINE | {"gb_amount": 1.5})
    _, tables = _after(refuel, refuel)
    assert tables["lines"]["L1"]["data_refueling_gb"] == 3.0 and tables["bills"]["B2"]["total_due"] == 6.0
    other = {"customer_id": "C2", "line_id": "L3", "gb_amount": 2}
    _, tables = _after(("assistant", "refuel_data", other), ("assistant", "refuel_data", other))
    (new,) = set(tables["bills"]) - set(START["bills"])  # of a customer without a bill of the next month, one
    assert tables["bills"][new]["total_due"] == 4.0 and tables["customers"]["C2"]["bill_ids"] == [new]


def test_speed_is_network_signal_and_what_slows_it_down():
    def tested(*calls):
        return tau_bench_phone.speed(_after(*(("user", name, arguments) for name, arguments in calls))[1])

    assert tested() == (220.0, "excellent")  # the phone comes with a good signal of 5G
    assert tested(("reboot_device", {})) == (275.0, "excellent")
    mode = "set_network_mode_preference"
    assert tested((mode, {"mode": "4g_only"})) == (44.0, "good")
    assert tested((mode, {"mode": "3g_only"})) == (1.5, "poor")
    assert tested((mode, {"mode": "2g_only"})) == (0.05, "very poor")
    assert tested((mode, {"mode": "4g_only"}), ("toggle_data_saver_mode", {})) == (8.8, "fair")
    assert tested(("connect_vpn", {})) == (220.0, "excellent")  # a VPN alone slows nothing
    assert tested(("toggle_data", {})) == (0.0, "no connection")
    tables = fresh(START)
    tau_bench_phone.BEGINNINGS["break_vpn"](tables)
    assert tau_bench_phone.speed(tables) == (22.0, "fair")
    for name in ("toggle_airplane_mode", "toggle_airplane_mode"):  # the tunnel does not come back by itself
        tau_bench.side_box(DESK, tables, "user").run(name, {})
    assert tau_bench_phone.speed(tables) == (275.0, "excellent")


def test_an_access_point_is_reset_at_the_reboot_and_a_resumed_line_is_found_at_it(tmp_path):
    tables = tau_bench.begun_tables(DESK, _task(tmp_path, "service", "apn", "overdue"))
    users, agents = (tau_bench.side_box(DESK, tables, side) for side in ("user", "assistant"))
    assert users.run("check_network_status", {}).text.count("no_service") == 1
    users.run("reset_apn_settings", {})
    assert users.run("check_apn_settings", {}).text.startswith("access point: broken")
    users.run("reboot_device", {})
    assert users.run("check_apn_settings", {}).text.startswith("access point: internet")
    agents.run("resume_line", MINE)
    assert users.run("check_status_bar", {}).text.startswith("Status bar: no signal")
    users.run("reboot_device", {})
    assert users.run("check_status_bar", {}).text.startswith("Status bar: excellent signal")


# --- users and files


def test_the_user_says_only_what_its_words_are(tmp_path):
    """A model calls its tools first; the agent sees none of that, and a user who only calls is no failure of it."""
    task, heard = _task(tmp_path, "service", "airplane"), []

    def model(messages, draw=0):
        heard.append([m["content"] for m in messages])
        if len(messages) == 2:
            return "No service!" + _call("check_status_bar", {})
        return _call("toggle_airplane_mode", {}) if "tool_response" not in messages[-1]["content"] else "It is back."

    said = _talk(task, ["Is airplane mode on?"], user=model)
    assert said.text == "It is back." and said.state.client.opening == "No service!"
    assert '"name": "make_payment"' in heard[0][0] and heard[0][0].endswith("does not work.")
    assert "airplane mode is now off" in heard[-1][-1]
    said = _talk(task, ["Hi?"], user=lambda m, d=0: "Hi" if len(m) == 2 else _call("check_status_bar", {}))
    assert not said.valid and said.reason == "the user called tools 9 times and said nothing"

    def absent(messages, draw=0):
        if len(messages) > 2:
            raise Unanswered("down")
        return "Hello"

    assert _talk(task, ["Hi?"], user=absent).reason == "the user: down"


def test_a_script_does_what_a_message_names(tmp_path):
    task = _task(tmp_path, "mms", "both")
    both = 'grant_app_permission({"app_name": "messaging", "permission": "sms"}), then can_send_mms'
    said = _talk(task, [both])
    assert said.text.splitlines()[0] == "messaging is allowed sms"
    assert said.text.endswith("a picture message cannot be sent")
    assert "error: arguments: app_name, permission are missing" in _talk(task, ["grant_app_permission {oops"]).text


def write(folder, rows):
    """The files of tau2-bench's telecom, of the tables here."""
    folder.mkdir(exist_ok=True)
    lines = []
    for table in ("plans", "devices", "lines", "customers", "bills"):
        for record in _tables()[table].values():
            lines += [f"[[{table}]]", *(f"{key} = {json.dumps(x, ensure_ascii=False)}" for key, x in record.items())]
    (folder / "db.toml").write_text("\n".join(lines))
    (folder / "user_db.toml").write_text("[device]\nbattery_level = 50\n[device.active_apn_settings]\nmms_apn = 'x'\n")
    (folder / "main_policy.md").write_text("Be kind.")
    (folder / "tech_support_manual.md").write_text("Reboot.")
    (folder / "tasks.json").write_text(json.dumps(rows))
    names = [row["id"] for row in rows]
    (folder / "split_tasks.json").write_text(json.dumps({"train": names[1:], "test": names[:1], "base": names}))
    return folder


def test_files(tmp_path):
    folder = write(tmp_path / "telecom", [record_of("service", "airplane")])
    tables = desk_files.desk_database(folder, "telecom")
    assert tables == {name: rows for name, rows in _tables().items() if name != "phone"}
    phone = tau_bench_phone.phone(desk_files.load_toml(folder / "user_db.toml"))
    device = tau_bench_phone.DEVICE
    assert phone["device"] == device | {
        "battery_level": 50, "active_apn_settings": device["active_apn_settings"] | {"mms_apn": "x"}
    }  # fmt: skip
    (folder / "db.toml").write_text("[[plans]]\nplan_id = 'P1'\n[[plans]]\nplan_id = 'P1'\n")
    for text, said in (
        (
            "customers = []\nlines = []\n[[plans]]\nplan_id = 'P'\n[[plans]]\nplan_id = 'P'\n",
            "two records have one plan_",
        ),
        ("customers = [3]", r"customers\[0\]: 3 is not an object"),
        ("lines = []", "lacks customers"),
        ("lines", "db.toml: not TOML"),
    ):
        (folder / "db.toml").write_text(text)
        with pytest.raises(DataError, match=said):
            desk_files.desk_database(folder, "telecom")


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("initial_state", {"initialization_data": {"a": 1}}, "initial_state: tasks that change the database by init"),
        (
            "initial_state",
            {"initialization_actions": [_user("fly")]},
            r"initialization_actions\[0\]: name: 'fly' is no",
        ),
        ("initial_state", {"initialization_actions": [_user("lock_sim_card", pin=1)]}, "lock_sim_card: "),
        (
            "initial_state",
            {"initialization_actions": [_user("set_user_info", name="A")]},
            "missing a required argument",
        ),
        (
            "initial_state",
            {"initialization_actions": [{"env_type": "cat"}]},
            'env_type: "cat" is none of assistant, user',
        ),
        ("evaluation_criteria", {"reward_basis": ["NL_ASSERTION"]}, "reward_basis: NL_ASSERTION cannot be judged here"),
        (
            "evaluation_criteria",
            {"env_assertions": [_user("assert_peace")]},
            r"env_assertions\[0\]: func_name: 'assert_pe",
        ),
        (
            "evaluation_criteria",
            {"env_assertions": [_user("reboot_device")]},
            "'reboot_device' is nothing that can be as",
        ),
        (
            "evaluation_criteria",
            {"actions": [_does("assistant", "toggle_data")]},
            "'toggle_data' is no tool of the desk",
        ),
        (
            "evaluation_criteria",
            {"actions": [_does("user", "resume_line", **MINE)]},
            "'resume_line' is no tool of the use",
        ),
        ("evaluation_criteria", {"actions": [_does("cat", "purr")]}, 'requestor: "cat" is none of assistant, user'),
    ],
)
def test_mistakes_are_named(part, change, message, tmp_path):
    record = record_of("service", "airplane")
    record[part] = record[part] | change
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([record]))
    with pytest.raises(DataError, match=message):
        tau_bench.check_task(DESK, desk_files.desk_tasks(path)[0])


def test_a_beginning_that_cannot_be_is_named(tmp_path):
    task = _task(tmp_path, "service", "overdue", "ended")  # suspended twice
    said = r"initialization_actions\[3\]: suspend_line_for_overdue_bill: only an active line"
    with pytest.raises(DataError, match=said):
        tau_bench.begun_tables(DESK, task)
    tokenizer = tokenizers.load(byte_tokenizer(tmp_path))
    with pytest.raises(DataError, match=said):  # before anything is played
        tau_bench.desks_texts([(DESK, [task])], tokenizer, action_tokens=64, observation_tokens=64)


def test_several_desks_are_one_world(tmp_path):
    tokenizer = tokenizers.load(byte_tokenizer(tmp_path))
    task, shop = _task(tmp_path, "service", "airplane"), tau_bench.Desk(SHOP, "Help users.")
    order = desk_files.DeskTask("0", "Keep all.", (), (), "tasks.json: task 0")
    sizes = {"action_tokens": 400, "observation_tokens": 900}
    found = tau_bench.desks_texts([(shop, [order]), (DESK, [task, task])], tokenizer, **sizes)
    assert found.problems.answers["desk"].tolist() == [0, 1, 1] and found.problems.tokens.shape[0] == 3
    shown = [tokenizer.decode(np.asarray(t)[np.asarray(v)].tolist())
             for t, v in zip(found.problems.tokens, found.problems.valid, strict=True)]  # fmt: skip
    assert "cancel_pending_order" in shown[0] and "resume_line" in shown[1] and "toggle_data" not in shown[1]
    state = found.env.reset(np.zeros((2,), np.uint32), found.tasks[1])
    for text in ("Do toggle_airplane_mode?", "Bye."):
        said = found.env.step(state, tokenizer.encode(text))
        state = said.state
    assert said.done and said.reward == 1.0 and found.env.identity(state) == found.env.identity(state)
    state = found.env.reset(np.zeros((2,), np.uint32), found.tasks[0])
    assert found.env.step(state, tokenizer.encode("Bye.")).reward == 1.0
