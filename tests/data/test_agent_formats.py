"""Miniature files in the documented layouts of agents' benchmarks, read back; each mistake names file, place, field."""

import json

import pytest

from experiments.agents.parts import desk_files
from experiments.agents.parts.desk_files import DeskTask
from jaxrl_llm.data import agent_formats
from jaxrl_llm.errors import DataError, UserError


def _write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


# --- ALFWorld

GRAMMAR = '"task": [{"rhs": "Your task is to: put a mug in shelf."}]'


def _household(root, folder, trial, *, kind="pick_and_place_simple", sliced=False, game=None, **changes):
    at = root / folder / trial
    parameters = {"object_target": "Mug", "parent_target": "Shelf", "mrecep_target": "", "toggle_target": "",
                  "object_sliced": sliced}  # fmt: skip
    notes = [{"task_desc": "Put a mug on the shelf.", "high_descs": ["Walk."], "votes": [1]}]
    found = {"task_id": trial, "task_type": kind, "pddl_params": parameters, "turk_annotations": {"anns": notes}}
    _write(at / "traj_data.json", found | changes)
    if game is not None:
        whole = {"pddl_domain": "(define)", "pddl_problem": "(define)", "grammar": GRAMMAR, "solvable": True,
                 "walkthrough": ["go to shelf 1", "move mug 1 to shelf 1"]}  # fmt: skip
        _write(at / "game.tw-pddl", whole | game)
    return at


def test_alfworld_games_that_it_plays_itself(tmp_path):
    a = _household(tmp_path, "pick_and_place_simple-Mug-None-Shelf-1", "trial_A", game={})
    _household(tmp_path, "pick_heat_then_place_in_recep-Mug-None-Shelf-1", "trial_B", game={"walkthrough": None},
               kind="pick_heat_then_place_in_recep")  # fmt: skip
    for k, left_out in enumerate(
        ({"sliced": True, "game": {}}, {"game": {"solvable": False}}, {}, {"kind": "pick_and_x"})
    ):
        _household(tmp_path, f"other-{k}", "trial_C", **left_out)
    _household(tmp_path, "movable_recep-1", "trial_D", game={})
    first, second = agent_formats.alfworld(tmp_path)
    assert first.prompt == "Your task is to: put a mug in shelf." and first.level == 1 and second.level == 4
    assert first.solution == "go to shelf 1\nmove mug 1 to shelf 1" and second.solution == ""
    assert first.answer["game"] == str(a / "game.tw-pddl") and first.answer["said"] == ["Put a mug on the shelf."]
    assert first.identity == "pick_and_place_simple-Mug-None-Shelf-1"
    (heated,) = agent_formats.alfworld(tmp_path, kinds=["pick_heat_then_place_in_recep"])
    assert heated == second


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"game": {"grammar": "no goal"}}, r"game.tw-pddl: grammar: it does not say 'Your task is to"),
        ({"game": {"pddl_problem": 3}}, r"game.tw-pddl: pddl_problem: 3 is not text"),
        ({"game": {"walkthrough": ["go", 2]}}, r"game.tw-pddl: walkthrough\[1\]: 2 is not text"),
        ({"game": {}, "turk_annotations": {}}, r"traj_data.json: turk_annotations: lacks anns; it has nothing"),
        ({"game": {}, "pddl_params": []}, r"traj_data.json: pddl_params: \[\] is not an object"),
        ({}, r"holds no game of 1 traj_data.json"),
    ],
)
def test_alfworld_mistakes(tmp_path, changes, message):
    _household(tmp_path, "a", "trial", **changes)
    with pytest.raises(DataError, match=message):
        agent_formats.alfworld(tmp_path)


def test_alfworld_kinds_are_known(tmp_path):
    with pytest.raises(UserError, match=r"kinds=\['bake'\] are none of pick_and_place_simple"):
        agent_formats.alfworld(tmp_path, kinds=["bake"])


# --- AppWorld

WHO = {"first_name": "Joyce", "last_name": "Weaver", "email": "joyce@example.com", "phone_number": "3155673041"}
SPECS = {"instruction": "Which song is liked most?", "supervisor": WHO, "datetime": "2023-05-18T12:00:00"}


def _apps(root, specs=SPECS, metadata=None, listed="82e2fac_1\n\n82e2fac_2\n"):
    _write(root / "data/datasets/train.txt", listed)
    for name in ("82e2fac_1", "82e2fac_2"):
        _write(root / f"data/tasks/{name}/specs.json", specs)
        truth = root / f"data/tasks/{name}/ground_truth"
        _write(truth / "metadata.json", {"difficulty": 2, "num_apps": 1} if metadata is None else metadata)
    _write(truth / "answer.json", json.dumps("A Love That Never Was"))
    _write(truth / "required_apps.json", ["spotify"])
    _write(truth / "solution.py", "def solution(apis, requester): ...\n")
    return root


def test_appworld_tasks(tmp_path):
    first, second = agent_formats.appworld(_apps(tmp_path), "train")
    assert first.answer == {"task_id": "82e2fac_1", "supervisor": WHO, "datetime": SPECS["datetime"]}
    assert second.answer["answer"] == "A Love That Never Was" and second.answer["required_apps"] == ["spotify"]
    assert first.prompt.startswith("My name is Joyce Weaver") and first.prompt.endswith(SPECS["instruction"])
    assert (first.level, first.solution, second.solution[:12]) == (2, "", "def solution")
    assert first.identity == second.identity == "82e2fac"  # variants stay on one side of a split


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"specs": {"instruction": "x"}}, r"82e2fac_1/specs.json: lacks datetime; it has instruction"),
        ({"specs": SPECS | {"supervisor": WHO | {"email": None}}}, r"specs.json: supervisor: email: null is not text"),
        ({"specs": '{\n"instruction": }'}, r"specs.json:2: not JSON"),
        ({"specs": "[" * 100_000}, r"specs.json: JSON that cannot be read \(maximum recursion depth exceeded"),
        ({"specs": "9" * 5000}, r"specs.json: JSON that cannot be read \(Exceeds the limit \(4300 digits\)"),
        ({"metadata": {"difficulty": True}}, r"metadata.json: difficulty: true is not a whole number"),
        ({"listed": "82e2fac_9"}, r"82e2fac_9/specs.json cannot be read"),
        ({"listed": "\n"}, r"train.txt names no task"),
    ],
)
def test_appworld_mistakes(tmp_path, given, message):
    with pytest.raises(DataError, match=message):
        agent_formats.appworld(_apps(tmp_path, **given), "train")


def test_appworld_splits_are_named(tmp_path):
    with pytest.raises(DataError, match="dev.txt does not exist; splits there: train"):
        agent_formats.appworld(_apps(tmp_path), "dev")
    with pytest.raises(DataError, match="splits there: none, run appworld download data"):
        agent_formats.appworld(tmp_path / "nowhere", "dev")


# --- tau-bench

PYTHON = """from tau_bench.types import Task, Action
TASKS_TEST = [
    Task(annotator="0", user_id="a_b_1", instruction="You are A. " "Cancel #W1.",
         actions=[Action(name="cancel_pending_order", kwargs={"order_id": "#W1", "reason": "no longer needed"})],
         outputs=["54.04"]),
]
"""
CANCEL = {"name": "cancel_pending_order", "arguments": {"order_id": "#W1", "reason": "no longer needed"}}
OLD = {"instruction": "You are A. Cancel #W1.", "outputs": ["54.04"], "actions": [CANCEL]}
TAU2 = {
    "id": "0",
    "user_scenario": {"persona": None, "instructions": {
        "domain": "retail", "reason_for_call": "You are A.", "known_info": "Cancel #W1.", "unknown_info": None,
        "task_instructions": ""}},
    "initial_state": None,
    "evaluation_criteria": {
        "actions": [{"action_id": "0_0", "requestor": "assistant", **CANCEL}],
        "communicate_info": ["54.04"], "nl_assertions": None},
}  # fmt: skip


def test_desk_tasks_of_three_layouts(tmp_path):
    old = _write(tmp_path / "tasks_test.py", PYTHON)
    listed = _write(tmp_path / "tasks.py", f"tasks = {OLD!r}".replace("= {", "= [{") + "]")
    new = _write(tmp_path / "tasks.json", [TAU2])
    (a,), (b,), (c,) = map(desk_files.desk_tasks, (old, listed, new))
    call = ("cancel_pending_order", {"order_id": "#W1", "reason": "no longer needed"})
    assert a == DeskTask("0", "You are A. Cancel #W1.", (call,), ("54.04",), f"{old}:3")
    assert b[:4] == a[:4] and c.instruction == "You are A.\nCancel #W1." and c[2:4] == a[2:4]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.py", "TASKS = [Task(instruction=open('x'))]", r"t.py:1: open\('x'\) is no literal, Task or Action"),
        ("t.py", "TASKS = [\nTask('x')]", r"t.py:2: Task takes keywords only"),
        ("t.py", "TASKS = [", r"t.py:1: no Python"),
        ("t.py", "x = 1", r"t.py assigns 0 lists"),
        ("t.py", "TASKS = []", r"t.py holds no tasks"),
        ("t.py", "T = [Task(instruction='x', actions=[Action(name='y')])]", r"t.py:1: actions\[0\]: lacks arguments"),
        ("t.json", [{"actions": []}], r"t.json: task 0: lacks instruction; it has actions"),
        ("t.json", [OLD, OLD | {"outputs": [3]}], r"t.json: task 1: outputs\[0\]: 3 is not text"),
        ("t.json", [TAU2 | {"initial_state": {"a": 1}}], r"task 0: initial_state: tasks that change the database"),
        ("t.json", [TAU2 | {"user_scenario": {"instructions": {}}}], r"user_scenario: instructions: lacks all of"),
        ("t.json", {"tasks": []}, r"t.json: \{\"tasks\": \[\]\} is not a list"),
    ],
)  # fmt: skip
def test_desk_task_mistakes(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message):
        desk_files.desk_tasks(_write(tmp_path / name, text))


def test_desk_databases_of_both_layouts(tmp_path):
    tables = {"users": {"a": {"email": "a@b"}}, "orders": {"#W1": {"status": "pending"}}, "products": {"1": {}}}
    for name, rows in tables.items():
        _write(tmp_path / f"old/{name}.json", rows)
    _write(tmp_path / "new/db.json", tables)
    assert desk_files.desk_database(tmp_path / "old", "retail") == tables
    assert desk_files.desk_database(tmp_path / "new", "retail") == tables
    with pytest.raises(DataError, match="db.json: lacks reservations; it has users, orders, products"):
        desk_files.desk_database(tmp_path / "new", "airline")
    with pytest.raises(DataError, match="reservations.json cannot be read"):
        desk_files.desk_database(tmp_path / "old", "airline")
    with pytest.raises(UserError, match="desk='bank' is none of retail, airline"):
        desk_files.desk_database(tmp_path, "bank")
    _write(tmp_path / "old/orders.json", {"#W1": "pending"})
    with pytest.raises(DataError, match='old: orders: #W1: "pending" is not an object'):
        desk_files.desk_database(tmp_path / "old", "retail")
