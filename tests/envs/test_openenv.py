"""Environments behind an OpenEnv server: a small one that speaks its protocol, and episodes of a run."""

import http
import importlib
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("websockets")
from websockets.datastructures import Headers
from websockets.http11 import Response
from websockets.sync.server import serve

from jaxrl_llm.data import tokenizer as tokenizers
from jaxrl_llm.envs import openenv
from jaxrl_llm.errors import UserError
from jaxrl_llm.experiment import cli
from jaxrl_llm.run import catalog
from tests.models_for_tests import byte_model, byte_tokenizer

GUESS = {"guess": {"type": "integer", "description": "Write a number from 1 to 8."}, "metadata": {"type": "object"}}
SPOKEN = {"message": {"type": "string"}, "metadata": {"type": "object"}}
BOTH = {"x": {"type": "integer"}, "why": {"type": "string"}}


class Server:
    """Guess a number from 1 to 8, by the seed; ``fields`` are those of an action, ``most`` episodes at once."""

    def __init__(self, fields=GUESS, most=1000, random=False):
        self.fields, self.most, self.random, self.open, self.ever = fields, most, random, 0, 0
        self.lock = threading.Lock()
        self.server = serve(self.play, "127.0.0.1", 0, process_request=self.page)
        self.address = f"http://127.0.0.1:{self.server.socket.getsockname()[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def page(self, link, request):
        pages = {"/schema": {"action": {"properties": self.fields}}, "/metadata": {"description": "A game."}}
        if request.path == "/ws":
            return None
        body = json.dumps(pages.get(request.path, [])).encode()
        headers = Headers({"Content-Type": "application/json", "Content-Length": str(len(body))})
        return Response(http.HTTPStatus.OK, "OK", headers, body)

    def play(self, link):
        with self.lock:
            self.open, self.ever = self.open + 1, self.ever + 1
            full, number = self.open > self.most, self.ever
        try:
            wanted = left = 0
            for raw in link:
                kind, data = (message := json.loads(raw))["type"], message.get("data", {})
                if full:
                    link.send(error("CAPACITY_REACHED", "full"))
                elif kind == "close":
                    return
                elif kind == "reset":
                    wanted, left = 1 + (number if self.random else data["seed"]) % 8, 3
                    said = f"Guess{' ' * (number if self.random else 0)}!"
                    link.send(observed({"message": said, "hints": []}, None, False))
                elif data.keys() - self.fields.keys() or not isinstance(data.get("guess", 0), int):
                    link.send(error("VALIDATION_ERROR", "guess is no number"))
                elif data.get("guess") == 7:
                    link.send(error("EXECUTION_ERROR", "seven broke it"))
                else:
                    left -= 1
                    right = data.get("guess", data) == wanted
                    link.send(observed({"message": "Right." if right else "No.", "left": left}, float(right),
                                       right or not left))  # fmt: skip
        finally:
            with self.lock:
                self.open -= 1


def error(code, said):
    return json.dumps({"type": "error", "data": {"code": code, "message": said}})


def observed(observation, reward, done):
    return json.dumps({"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}})


@pytest.fixture
def started(monkeypatch):
    found = []

    def start(**how):
        found.append(Server(**how))
        return found[-1]

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    yield start
    for server in found:
        server.server.shutdown()


def test_an_episode(started):
    server = started()
    place = openenv.served(f"openenv:{server.address}")
    assert (place.field, place.kind) == ("guess", "integer")
    openenv.check(place)
    world = openenv.openenv_env(place)
    state = world.reset(np.zeros(2, np.uint32), 2)
    assert world.first(state) == "A game.\nWrite a number from 1 to 8.\nGuess!\n"
    assert world.step(state, "I don't know")[1:4] == ("That is no action: I don't know\n", 0.0, False)
    assert world.step(state, "It is 5.")[1:4] == ("message: No.\nleft: 2\n", 0.0, False)
    assert world.step(state, " 3 ")[1:4] == ("message: Right.\nleft: 1\n", 1.0, True)
    world.close(state)
    other = world.reset(np.zeros(2, np.uint32), 0)
    with pytest.raises(UserError, match="EXECUTION_ERROR: seven broke it"):
        world.step(other, "7")
    world.close(other)


def test_actions_of_text_and_of_several_fields(started):
    said = openenv.served(f"openenv:{started(fields=SPOKEN).address}")
    assert openenv.action_of(said, "3 is it\n") == {"message": "3 is it\n"}
    server = started(fields=BOTH)
    both = openenv.served(f"openenv:{server.address}/")
    assert both.field == "" and '{"x": "integer", "why": "string"}' in both.about
    assert openenv.action_of(both, 'I say {"x": 1, "why": "{}"}') == {"x": 1, "why": "{}"}
    for text_of_none in ("nothing", "[1]", '{"x": ', "}{"):
        assert openenv.action_of(both, text_of_none) is None
    one = openenv.served(f"openenv:{server.address}#why")
    assert (one.field, one.kind) == ("why", "string")
    listed = one._replace(field="moves", kind="array")
    assert openenv.action_of(listed, "[1, 2]") == {"moves": [1, 2]} and openenv.action_of(listed, "1,") is None
    number = one._replace(field="x", kind="number")
    assert openenv.action_of(number, "-1.5!") == {"x": -1.5}


def test_numbers_beyond_all_bounds_and_endless_brackets_are_no_action():
    """An exception here would void the episode: a policy could so throw away its own bad ones."""
    whole, all_fields = openenv.Served("", "", "n", "integer"), openenv.Served("", "", "", "string")
    several = openenv.Served("", "", "n", "array")
    for text in ("9" * 400, "-" + "9" * 5000, "1" * 400 + ".5"):
        assert openenv.action_of(whole, text) is None
        assert openenv.action_of(whole._replace(kind="number"), text) is None
    for text in ('{"a":' * 200_000, '{"a":' * 300 + "1" + "}" * 300, '{"a": 1e999}', '{"a": NaN}', '{"a": -Infinity}',
                 '{"a": "\\ud800"}'):  # fmt: skip
        assert openenv.action_of(all_fields, text) is None
    assert openenv.action_of(several, "[" * 200_000) is None and openenv.action_of(several, "[1, Infinity]") is None
    assert openenv.action_of(all_fields, '{"a": [[1.5]]}') == {"a": [[1.5]]}


def test_a_late_answer_is_known_before_its_process_is_ended(monkeypatch, tmp_path):
    """The other episodes of that process would have to begin anew."""

    class Told(Exception):
        pass

    def in_processes(make, **how):
        raise Told(how)

    monkeypatch.setattr(openenv, "served", lambda data: openenv.Served("http://h:1", "", "n", "integer"))
    monkeypatch.setattr(openenv, "check", lambda place: None)
    monkeypatch.setattr(catalog.processes, "in_processes", in_processes)
    settings = SimpleNamespace(data="openenv:http://h:1", env_processes=2, eval_problems=1)
    with pytest.raises(Told) as told:
        catalog.folders(settings, {}, tokenizers.load(byte_tokenizer(tmp_path)))
    assert told.value.args == ({"processes": 2, "call_s": 130.0},) and openenv.WAIT_S == 60.0  # it may connect first


def test_whole_numbers_are_not_rounded():
    place = openenv.Served("", "", "n", "integer")
    said = {"I take 9007199254740993.": 9007199254740993, "3.7": 3, "-0.5": 0, "+12": 12}
    assert {text: openenv.action_of(place, text)["n"] for text in said} == said
    assert openenv.action_of(place._replace(kind="number"), "3.7") == {"n": 3.7}


def test_mistakes_are_one_line(started):
    server = started(random=True)
    for data, said in (
        ("openenv:localhost", "give openenv:http://HOST:PORT"),
        ("openenv:http://127.0.0.1:9", "http://127.0.0.1:9/schema gives no JSON"),
        (f"openenv:{server.address}#move", "its actions have the fields guess, not move"),
    ):
        with pytest.raises(UserError, match="^--data ") as wrong:
            openenv.served(data)
        assert said in str(wrong.value) and "\n" not in str(wrong.value)
    with pytest.raises(UserError, match="another beginning at the second reset with seed 0"):
        openenv.check(openenv.served(f"openenv:{server.address}"))
    full = started(most=0)
    with pytest.raises(UserError, match="CAPACITY_REACHED: full; .* lower --slots"):
        openenv.check(openenv.served(f"openenv:{full.address}"))


def test_seeds_are_tasks(started, tmp_path):
    byte_tokenizer(tmp_path)
    tokenizer = importlib.import_module("jaxrl_llm.data.tokenizer").load(tmp_path)
    server = started()
    data = f"openenv:{server.address}"
    assert catalog.is_env(data) and not catalog.is_own(data)
    settings = SimpleNamespace(data=data, eval_problems=3, env_processes=1)
    train, held = catalog.folders(settings, {"action_tokens": 4, "observation_tokens": 12}, tokenizer)
    assert (len(train.tasks), list(held.tasks)) == (catalog.SEEDS, [1024, 1025, 1026])


@pytest.mark.slow
def test_two_steps_of_a_run(started, tmp_path):
    byte_model(tmp_path, "qwen2", max_positions=256)
    module = importlib.import_module("experiments.agents.gigpo")
    words = ["--model", str(tmp_path), "--data", f"openenv:{started().address}", "--smoke", "--seeds", "1", "--arm",
             "gigpo", "--max-turns", "3", "--action-tokens", "4", "--observation-tokens", "40", "--max-new-tokens",
             "150", "--eval-problems", "4", "--out", str(tmp_path / "out")]  # fmt: skip
    found = cli.run(module, words).arms["gigpo"]
    assert np.isfinite(found.metrics["loss/total"]).all() and found.metrics["eval/turns"] is not None
