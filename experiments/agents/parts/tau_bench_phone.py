"""The phone in a user's hand: tau2-bench's telecom users have tools of their own, which the agent cannot reach.

The phone is one more table of an episode, ``phone``, of two rows: ``device``, its settings, and ``surroundings``, where
the user is and what the network lets the phone do. The user's tools see this table and no other, the agent's tools
(``tau_bench_telecom``) all others; ``settle`` carries over what one side notices of the other: a line that is
suspended, roaming, used up data, a request to pay and its payment.

From "tau2-bench: Evaluating Conversational Agents in a Dual-Control Environment", arXiv:2506.07982.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from experiments.agents.parts import tau_bench_telecom
from experiments.agents.parts.tau_bench import Device
from experiments.agents.parts.tau_bench_tools import Record, Tables, declared_as, row, with_text
from jaxrl_llm.tools.schema import Tool

PHONE = "phone"  # the table
APN = {
    "apn_name": "internet", "reset_at_reboot": False, "mms_apn": "mms",
    "mmsc_url": "http://mms.carrier.com/mms/wapenc", "mms_proxy": None, "mms_port": None,
}  # fmt: skip
PERMISSIONS = ("sms", "storage", "phone", "network")
APPS = {"messaging": ("sms", "storage", "phone"), "browser": ("storage", "network")}  # and what each is allowed
DEVICE: Record = {
    "sim_card_status": "active", "sim_card_missing": False, "airplane_mode": False, "network_signal_strength": "good",
    "network_technology_connected": "5G", "network_connection_status": "connected", "battery_level": 80,
    "data_enabled": True, "roaming_enabled": False, "network_mode_preference": "4g_5g_preferred",
    "active_apn_settings": APN, "wifi_enabled": False, "wifi_connected": False, "wifi_ssid": None,
    "wifi_signal_strength": "none", "wifi_calling_enabled": False, "wifi_calling_mms_over_wifi": False,
    "data_saver_mode": False, "vpn_enabled_setting": False, "vpn_connected": False, "vpn_performance": "excellent",
    "app_statuses": {
        app: {"app_name": app, "permissions": {name: name in allowed for name in PERMISSIONS}}
        for app, allowed in APPS.items()
    },
}  # fmt: skip
SURROUNDINGS: Record = {
    "name": None, "phone_number": None, "is_abroad": False, "roaming_allowed": False, "line_active": True,
    "signal_strength": {"2G": "poor", "3G": "fair", "4G": "good", "5G": "excellent"},
    "mobile_data_usage_exceeded": False, "payment_request": None,
}  # fmt: skip
MODES = {"4g_5g_preferred": ("5G", "4G"), "4g_only": ("4G",), "3g_only": ("3G",), "2g_only": ("2G",)}
MBPS = {"2G": 0.25, "3G": 3.0, "4G": 55.0, "5G": 275.0}  # under an excellent signal
SIGNAL = {"none": 0.0, "poor": 0.2, "fair": 0.5, "good": 0.8, "excellent": 1.0}  # share of that
SPEEDS = (("very poor", 1.0), ("poor", 5.0), ("fair", 25.0), ("good", 100.0))  # below so many; else excellent
SLOW_VPN, DATA_SAVER = 0.1, 0.2  # share of the speed that is left


def phone(settings: Record | None = None) -> dict[str, Record]:
    """The table of a phone on which everything works.

    Args:
      settings: ``device`` and ``surroundings`` with what differs from that, as tau2-bench's ``user_db.toml`` has them.
    """
    rows = copy.deepcopy({"device": DEVICE, "surroundings": SURROUNDINGS})
    for name, given in (settings or {}).items():
        rows[name] = _over(rows[name], given)
    return rows


def _over(base: Record, given: Record) -> Record:
    both = {name: _over(base[name], x) for name, x in given.items() if isinstance(base.get(name), dict) and x}
    return base | given | both


def _device(tables: Tables) -> Record:
    return tables[PHONE]["device"]


def _around(tables: Tables) -> Record:
    return tables[PHONE]["surroundings"]


def _set(tables: Tables, which: str = "device", **changes: Any) -> None:
    tables[PHONE][which] = tables[PHONE][which] | changes


# --- what follows from the settings


def sim_of(device: Record) -> str:
    """``active``, ``missing``, ``locked_pin`` or ``locked_puk``."""
    return "missing" if device["sim_card_missing"] else device["sim_card_status"]


def search(tables: Tables) -> None:
    """The phone looks for a network; it finds none in airplane mode, without SIM, line, or the right access point."""
    device, around = _device(tables), _around(tables)
    found = (
        sim_of(device) == "active" and not device["airplane_mode"] and around["line_active"]
        and device["active_apn_settings"]["apn_name"] != "broken"
    )  # fmt: skip
    kinds, signal = MODES[device["network_mode_preference"]], around["signal_strength"]
    kind = next((x for x in kinds if signal.get(x, "none") != "none"), kinds[-1])
    _set(
        tables, network_connection_status="connected" if found else "no_service",
        network_technology_connected=kind if found else "none",
        network_signal_strength=signal.get(kind, "none") if found else "none",
    )  # fmt: skip


def data_works(tables: Tables) -> bool:
    """Whether mobile data does: service, data on, some left, and abroad the phone and the line may roam."""
    device, around = _device(tables), _around(tables)
    served = device["network_connection_status"] != "no_service" and device["network_signal_strength"] != "none"
    roams = not around["is_abroad"] or (device["roaming_enabled"] and around["roaming_allowed"])
    on = device["data_enabled"] and not device["airplane_mode"]
    return bool(served and roams and on and not around["mobile_data_usage_exceeded"])


def speed(tables: Tables) -> tuple[float, str]:
    """Megabits a second of mobile data, and in words; (0, "no connection") where there are none."""
    if not data_works(tables):
        return 0.0, "no connection"
    device = _device(tables)
    slow = SLOW_VPN if device["vpn_connected"] and device["vpn_performance"] == "poor" else 1.0
    slow *= DATA_SAVER if device["data_saver_mode"] else 1.0
    most = MBPS.get(device["network_technology_connected"], 0.0)
    found = round(most * SIGNAL[device["network_signal_strength"]] * slow, 2)
    return found, next((word for word, below in SPEEDS if found < below), "excellent")


def sends_pictures(tables: Tables) -> bool:
    """Whether picture messages can be sent: data of 3G or more, the centre's address, two permissions, no Wi-Fi calls.

    Wi-Fi calling takes messages along where it is set so, and the carrier cannot take them there.
    """
    device = _device(tables)
    allowed = device["app_statuses"].get("messaging", {"permissions": {}})["permissions"]
    over_wifi = device["wifi_calling_enabled"] and device["wifi_calling_mms_over_wifi"]
    right = device["active_apn_settings"]["mmsc_url"] is not None and not over_wifi
    right = right and all(allowed.get(name) for name in ("storage", "sms"))
    return bool(data_works(tables) and device["network_technology_connected"] != "2G" and right)


def settle(tables: Tables) -> None:
    """What each side notices of the other: the line as the network has it, requests to pay, and payments.

    Raises:
      ValueError: where no line has the user's phone number.
    """
    around = _around(tables)
    if around["phone_number"] is None:
        return
    line = tau_bench_telecom.line_of(tables, around["phone_number"])
    limit = tables["plans"][line["plan_id"]]["data_limit_gb"] + line["data_refueling_gb"]
    asked = around["payment_request"]
    if asked is not None and asked["paid"]:
        row(tables, "bills", asked["bill_id"])["status"] = "Paid"
        asked = None
    if asked is None:
        waiting = tau_bench_telecom.waiting_bills(tables, tau_bench_telecom.customer_of(tables, around["phone_number"]))
        if waiting:
            asked = {"bill_id": waiting[0]["bill_id"], "amount_due": waiting[0]["total_due"], "paid": False}
    _set(
        tables, "surroundings", line_active=line["status"] == "Active", roaming_allowed=line["roaming_enabled"],
        mobile_data_usage_exceeded=line["data_used_gb"] >= limit, payment_request=asked,
    )  # fmt: skip


# --- the user's tools: looking


def _on(state: bool) -> str:
    return "on" if state else "off"


def check_status_bar(tables: Tables) -> str:
    """Reads the status bar: airplane mode or signal, network, mobile data and data saver, Wi-Fi, VPN and battery."""
    device = _device(tables)
    kind = device["network_technology_connected"]
    if device["airplane_mode"]:
        shown = ["airplane mode"]
    elif kind == "none":
        shown = ["no signal", "no mobile data"]
    else:
        data = f"mobile data {_on(device['data_enabled'])}"
        shown = [f"{device['network_signal_strength']} signal", kind, data]
        shown += ["data saver"] if device["data_enabled"] and device["data_saver_mode"] else []
    shown += ["Wi-Fi"] if device["wifi_connected"] else []
    shown += ["VPN"] if device["vpn_connected"] else []
    return "Status bar: " + ", ".join([*shown, f"battery {device['battery_level']} %"])


def check_network_status(tables: Tables) -> str:
    """Shows airplane mode, SIM, connection, signal, network, mobile data, data roaming and Wi-Fi."""
    device = _device(tables)
    shown = {
        "airplane mode": _on(device["airplane_mode"]), "SIM card": sim_of(device),
        "connection": device["network_connection_status"], "signal": device["network_signal_strength"],
        "network": device["network_technology_connected"], "mobile data": _on(device["data_enabled"]),
        "data roaming": _on(device["roaming_enabled"]), "Wi-Fi": _on(device["wifi_enabled"]),
        "Wi-Fi network": device["wifi_ssid"] or "none",
    }  # fmt: skip
    return "\n".join(f"{name}: {x}" for name, x in shown.items())


def check_network_mode_preference(tables: Tables) -> str:
    """Shows which kind of network the phone prefers."""
    return f"preferred network: {_device(tables)['network_mode_preference']}"


def run_speed_test(tables: Tables) -> str:
    """Measures how fast mobile data are."""
    found, words = speed(tables)
    return f"speed test: {words}" + (f", {found:.2f} Mbps" if found else "")


def check_sim_status(tables: Tables) -> str:
    """Shows whether the SIM card works, is missing, or locked by a PIN or PUK."""
    return f"SIM card: {sim_of(_device(tables))}"


def check_data_restriction_status(tables: Tables) -> str:
    """Shows whether the data saver is on."""
    return f"data saver: {_on(_device(tables)['data_saver_mode'])}"


def check_apn_settings(tables: Tables) -> str:
    """Shows the name of the access point, and the address of the centre for picture messages."""
    settings = _device(tables)["active_apn_settings"]
    return f"access point: {settings['apn_name']}\npicture messages (MMSC): {settings['mmsc_url'] or 'not set'}"


def check_wifi_status(tables: Tables) -> str:
    """Shows whether Wi-Fi is on, and connected."""
    device = _device(tables)
    joined = f"connected to {device['wifi_ssid']}" if device["wifi_connected"] else "not connected"
    return f"Wi-Fi: {_on(device['wifi_enabled'])}, {joined}"


def check_wifi_calling_status(tables: Tables) -> str:
    """Shows whether Wi-Fi calling is on."""
    return f"Wi-Fi calling: {_on(_device(tables)['wifi_calling_enabled'])}"


def check_vpn_status(tables: Tables) -> str:
    """Shows whether a VPN is connected, and how good its server is."""
    device = _device(tables)
    return f"VPN: connected, performance {device['vpn_performance']}" if device["vpn_connected"] else "VPN: off"


def check_installed_apps(tables: Tables) -> str:
    """Lists the apps."""
    return "apps: " + ", ".join(_device(tables)["app_statuses"])


def _allowed(tables: Tables, app_name: str) -> Record:
    apps = _device(tables)["app_statuses"]
    if app_name not in apps:
        raise ValueError(f"there is no app {app_name}; there are {', '.join(apps)}")
    return apps[app_name]["permissions"]


def check_app_status(tables: Tables, app_name: str) -> str:
    """Shows an app and what it is allowed."""
    return f"app {app_name}: {check_app_permissions(tables, app_name)}"


def check_app_permissions(tables: Tables, app_name: str) -> str:
    """Shows what an app is allowed."""
    allowed = [name for name, yes in _allowed(tables, app_name).items() if yes]
    return f"allowed: {', '.join(allowed) or 'nothing'}"


def can_send_mms(tables: Tables) -> str:
    """Tries whether a picture message can be sent."""
    return "a picture message can be sent" if sends_pictures(tables) else "a picture message cannot be sent"


def check_payment_request(tables: Tables) -> str:
    """Shows whether the desk has asked for a payment."""
    asked = _around(tables)["payment_request"]
    return f"asked to pay {asked['amount_due']} dollars for bill {asked['bill_id']}" if asked else "nothing to pay"


# --- the user's tools: acting


def _shown(tables: Tables, text: str) -> str:
    return f"{text}\n{check_status_bar(tables)}"


def _switched(tables: Tables, setting: str, name: str) -> str:
    state = not _device(tables)[setting]
    _set(tables, **{setting: state})
    return f"{name} is now {_on(state)}"


def toggle_airplane_mode(tables: Tables) -> str:
    """Turns airplane mode on or off; on, it disconnects network, Wi-Fi and VPN."""
    text = _switched(tables, "airplane_mode", "airplane mode")
    if _device(tables)["airplane_mode"]:
        _set(tables, vpn_connected=False)
    if _device(tables)["airplane_mode"] or _device(tables)["wifi_enabled"]:
        _set(tables, wifi_connected=False, wifi_ssid=None, wifi_signal_strength="none")
    search(tables)
    return _shown(tables, text)


def set_network_mode_preference(tables: Tables, mode: str) -> str:
    """Chooses the kind of network that the phone prefers."""
    if mode not in MODES:
        raise ValueError(f"{mode} is none of {', '.join(MODES)}")
    _set(tables, network_mode_preference=mode)
    search(tables)
    return _shown(tables, f"preferred network: {mode}")


def reseat_sim_card(tables: Tables) -> str:
    """Takes the SIM card out and puts it in again."""
    _set(tables, sim_card_missing=False)
    search(tables)
    return _shown(tables, "the SIM card was put in again")


def toggle_data(tables: Tables) -> str:
    """Turns mobile data on or off."""
    text = _switched(tables, "data_enabled", "mobile data")
    search(tables)
    return _shown(tables, text)


def toggle_roaming(tables: Tables) -> str:
    """Turns data roaming on or off."""
    text = _switched(tables, "roaming_enabled", "data roaming")
    search(tables)
    return _shown(tables, text)


def toggle_data_saver_mode(tables: Tables) -> str:
    """Turns the data saver on or off."""
    return _shown(tables, _switched(tables, "data_saver_mode", "data saver"))


def set_apn_settings(tables: Tables, apn_settings: Record) -> str:
    """Writes the settings of the access point."""
    if unknown := set(apn_settings) - set(APN):
        raise ValueError(f"{', '.join(sorted(unknown))}: the settings are {', '.join(APN)}")
    _set(tables, active_apn_settings=APN | apn_settings)
    search(tables)
    return _shown(tables, "the access point was set")


def reset_apn_settings(tables: Tables) -> str:
    """Resets the settings of the access point; they change when the phone is rebooted."""
    _set(tables, active_apn_settings=_device(tables)["active_apn_settings"] | {"reset_at_reboot": True})
    search(tables)
    return _shown(tables, "the access point is reset at the next reboot")


def toggle_wifi(tables: Tables) -> str:
    """Turns Wi-Fi on or off."""
    if _device(tables)["airplane_mode"]:
        raise ValueError("Wi-Fi cannot be changed in airplane mode")
    text = _switched(tables, "wifi_enabled", "Wi-Fi")
    if not _device(tables)["wifi_enabled"]:
        _set(tables, wifi_connected=False, wifi_ssid=None, wifi_signal_strength="none")
    return _shown(tables, text)


def toggle_wifi_calling(tables: Tables) -> str:
    """Turns Wi-Fi calling on or off."""
    return _shown(tables, _switched(tables, "wifi_calling_enabled", "Wi-Fi calling"))


def connect_vpn(tables: Tables) -> str:
    """Connects the VPN."""
    _set(tables, vpn_connected=True)
    return _shown(tables, "the VPN is connected")


def disconnect_vpn(tables: Tables) -> str:
    """Disconnects the VPN."""
    was = _device(tables)["vpn_connected"]
    _set(tables, vpn_connected=False)
    return _shown(tables, "the VPN is disconnected" if was else "no VPN was connected")


def _permit(tables: Tables, app_name: str, permission: str, allowed: bool) -> None:
    permissions = _allowed(tables, app_name)
    if permission.lower() not in permissions:
        raise ValueError(f"{permission} is none of {', '.join(permissions)}")
    apps = _device(tables)["app_statuses"]
    app = apps[app_name] | {"permissions": permissions | {permission.lower(): allowed}}
    _set(tables, app_statuses=apps | {app_name: app})


def grant_app_permission(tables: Tables, app_name: str, permission: str) -> str:
    """Allows an app something."""
    _permit(tables, app_name, permission, True)
    return _shown(tables, f"{app_name} is allowed {permission.lower()}")


def reboot_device(tables: Tables) -> str:
    """Restarts the phone, which then looks for a network; an access point that was to be reset is."""
    if _device(tables)["active_apn_settings"]["reset_at_reboot"]:
        _set(tables, active_apn_settings=APN)
    search(tables)
    return _shown(tables, "the phone was restarted")


def make_payment(tables: Tables) -> str:
    """Pays what the desk has asked for."""
    asked = _around(tables)["payment_request"]
    if asked is None:
        raise ValueError("nothing to pay")
    _set(tables, "surroundings", payment_request=asked | {"paid": True})
    return f"{asked['amount_due']} dollars were paid for bill {asked['bill_id']}"


_APP, _APP_PERMISSION = with_text("app_name"), with_text("app_name") | {"permission": {"type": "string"}}
_APN = {"type": "object", "properties": {name: {} for name in APN}}
TOOLS: Sequence[tuple[Tool, Callable[..., Any]]] = (
    *(
        declared_as(function, {})
        for function in (
            check_status_bar, check_network_status, check_network_mode_preference, run_speed_test, check_sim_status,
            check_data_restriction_status, check_apn_settings, check_wifi_status, check_wifi_calling_status,
            check_vpn_status, check_installed_apps, can_send_mms, check_payment_request, toggle_airplane_mode,
            reseat_sim_card, toggle_data, toggle_roaming, toggle_data_saver_mode, reset_apn_settings, toggle_wifi,
            toggle_wifi_calling, connect_vpn, disconnect_vpn, reboot_device, make_payment,
        )
    ),
    declared_as(check_app_status, _APP),
    declared_as(check_app_permissions, _APP),
    declared_as(set_network_mode_preference, {"mode": {"type": "string", "enum": list(MODES)}}),
    declared_as(set_apn_settings, {"apn_settings": _APN}),
    declared_as(grant_app_permission, _APP_PERMISSION),
)  # fmt: skip


# --- how tasks begin


def _who(tables: Tables, name: str, phone_number: str) -> None:
    _set(tables, "surroundings", name=name, phone_number=phone_number)


def _where(tables: Tables, abroad: bool) -> None:
    _set(tables, "surroundings", is_abroad=abroad)


def _turned(tables: Tables, *, setting: str, to: bool) -> None:
    _set(tables, **{setting: to})
    if setting == "airplane_mode" and to:
        _set(tables, vpn_connected=False)
    search(tables)


def _locked(tables: Tables, mode: str) -> None:
    _set(tables, sim_card_status=f"locked_{mode}")
    search(tables)


def _apn(tables: Tables, **changes: Any) -> None:
    _set(tables, active_apn_settings=_device(tables)["active_apn_settings"] | changes)
    search(tables)


def _wifi_calling(tables: Tables, enabled: bool, mms_over_wifi: bool | None = None) -> None:
    over = {} if mms_over_wifi is None else {"wifi_calling_mms_over_wifi": mms_over_wifi}
    _set(tables, wifi_calling_enabled=enabled, **over)


def _slow_vpn(tables: Tables) -> None:
    _set(tables, vpn_connected=True, vpn_performance="poor")


def _forbidden(tables: Tables, app_name: str, permission: str) -> None:
    _permit(tables, app_name, permission, False)


_SETTINGS = {"airplane_mode": "airplane_mode", "data": "data_enabled", "roaming": "roaming_enabled",
             "data_saver_mode": "data_saver_mode"}  # fmt: skip
BEGINNINGS: dict[str, Callable[..., Any]] = {
    "set_user_info": _who, "set_user_location": _where, "lock_sim_card": _locked,
    "unseat_sim_card": partial(_turned, setting="sim_card_missing", to=True),
    "break_apn_settings": partial(_apn, apn_name="broken"), "break_apn_mms_setting": partial(_apn, mmsc_url=None),
    "set_wifi_calling": _wifi_calling, "break_vpn": _slow_vpn, "remove_app_permission": _forbidden,
    "simulate_network_search": search,
} | {
    f"turn_{name}_{_on(to)}": partial(_turned, setting=setting, to=to)
    for name, setting in _SETTINGS.items() for to in (True, False)
}  # fmt: skip


# --- what may be asserted of the end


def _is(tables: Tables, expected_status: Any, *, setting: str) -> bool:
    return _device(tables)[setting] == expected_status


def _data(tables: Tables, expected_status: bool) -> bool:
    return data_works(tables) == expected_status


def _pictures(tables: Tables, expected_status: bool) -> bool:
    return sends_pictures(tables) == expected_status


def _used_up(tables: Tables, expected_status: bool) -> bool:
    return _around(tables)["mobile_data_usage_exceeded"] == expected_status


def _fast(tables: Tables, expected_speed: int | float, expected_desc: str | None = None) -> bool:
    found, words = speed(tables)
    return found >= expected_speed and (expected_desc is None or words == expected_desc.lower())


def _not_fastest(tables: Tables) -> bool:
    return speed(tables)[1] != "excellent"


CHECKS: dict[str, Callable[..., bool]] = {
    "assert_airplane_mode_status": partial(_is, setting="airplane_mode"),
    "assert_service_status": partial(_is, setting="network_connection_status"),
    "assert_mobile_roaming_status": partial(_is, setting="roaming_enabled"),
    "assert_mobile_data_saver_mode_status": partial(_is, setting="data_saver_mode"),
    "assert_mobile_data_status": _data, "assert_can_send_mms": _pictures, "assert_internet_speed": _fast,
    "assert_internet_not_excellent": _not_fastest, "assert_mobile_data_usage_exceeded": _used_up,
}  # fmt: skip

IN_HAND = Device(
    PHONE, TOOLS, settle,
    begin={"user": BEGINNINGS, "assistant": tau_bench_telecom.BEGINNINGS},
    checks={"user": CHECKS, "assistant": tau_bench_telecom.CHECKS},
)  # fmt: skip
