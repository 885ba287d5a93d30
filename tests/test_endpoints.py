"""Models behind an address, played by a server here: cache, replay, budget, retries, failures."""

import http.server
import json
import threading

import pytest

from jaxrl_llm.errors import DataError, UserError
from jaxrl_llm.tools import endpoints
from jaxrl_llm.verifiers.verdict import Verdict

pytest.importorskip("openai")


class Model(http.server.BaseHTTPRequestHandler):
    """Answers with the last message in capitals; ``plan`` holds the status codes of the next requests."""

    plan: list[int] = []
    seen: list[dict] = []

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(request | {"path": self.path, "key": self.headers["Authorization"]})
        status = self.plan.pop(0) if self.plan else 200
        text = request["messages"][-1]["content"].upper()
        body = {
            "id": "1", "object": "chat.completion", "created": 0, "model": request["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        }  # fmt: skip
        raw = json.dumps(body if status == 200 else {"error": {"message": "no"}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("Retry-After", "0.01")
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_):
        """Silent."""


@pytest.fixture
def address(monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    Model.plan, Model.seen = [], []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def _said(text):
    return [{"role": "user", "content": text}]


def test_a_question_is_asked_once_and_replayed_without_a_network(address, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret-key")
    path = tmp_path / "kept" / "replies.jsonl"
    chat = endpoints.make_chat(address, "m", cache=path, key_variable="JUDGE_KEY", seed=3)
    assert [chat(_said("one")), chat(_said("one")), chat(_said("two"))] == ["ONE", "ONE", "TWO"]
    assert [s["messages"][0]["content"] for s in Model.seen] == ["one", "two"]
    assert Model.seen[0]["path"] == "/v1/chat/completions" and Model.seen[0]["key"] == "Bearer secret-key"
    assert (Model.seen[0]["seed"], Model.seen[0]["temperature"], Model.seen[0]["model"]) == (3, 0.0, "m")
    assert "secret-key" not in path.read_text()
    with path.open("a") as file:
        file.write('{"key": "cut')  # by a crash
    again = endpoints.make_chat("http://nowhere.invalid", "m", cache=path, seed=3, replay=True)
    assert again(_said("two")) == "TWO" and len(path.read_text().splitlines()) == 2
    with pytest.raises(endpoints.Unanswered, match="holds no reply to .*three.*drop replay"):
        again(_said("three"))
    other = endpoints.make_chat("http://nowhere.invalid", "m", cache=path, seed=4, replay=True)
    with pytest.raises(endpoints.Unanswered):
        other(_said("two"))


def test_passing_trouble_is_tried_again_and_lasting_trouble_is_no_reply(address, tmp_path):
    chat = endpoints.make_chat(address, "m", cache=tmp_path / "a", budget=endpoints.Budget(retries=2))
    Model.plan = [503, 429]
    assert chat(_said("one")) == "ONE" and len(Model.seen) == 3
    Model.plan = [500, 500, 500]
    with pytest.raises(endpoints.Unanswered, match="m at http://127.*InternalServerError"):
        chat(_said("two"))
    Model.plan = [400]
    assert endpoints.ask_all(chat, [_said("a"), _said("b")], workers=1) == [None, "B"]
    assert len((tmp_path / "a").read_text().splitlines()) == 2, "failures are not kept"


@pytest.mark.parametrize("budget", [endpoints.Budget(requests=2), endpoints.Budget(tokens=10)])
def test_the_budget_holds_and_kept_replies_cost_nothing(address, tmp_path, budget):
    chat = endpoints.make_chat(address, "m", cache=tmp_path / "a", budget=budget)
    assert [chat(_said(t)) for t in "aabb"] == ["A", "A", "B", "B"]
    with pytest.raises(endpoints.Unanswered, match="budget is spent: 2 requests, 10 tokens"):
        chat(_said("c"))


def test_many_at_a_time_stay_in_order(address, tmp_path):
    chat = endpoints.make_chat(address, "m", cache=tmp_path / "a")
    words = [f"w{k}" for k in range(24)]
    assert endpoints.ask_all(chat, [_said(w) for w in words]) == [w.upper() for w in words]
    assert len(endpoints.Cache(tmp_path / "a").replies) == 24


def test_a_judge_that_does_not_answer_is_invalid_and_not_wrong():
    def chat(messages):
        text = messages[0]["content"]
        if text == "lost":
            raise endpoints.Unanswered("gone")
        return {"good": "score: 0.5", "odd": "hm"}[text]

    verify = endpoints.make_verifier(
        chat, lambda answer, response: _said(response), lambda x: float(x[7:]) if x.startswith("score: ") else None
    )
    assert verify({}, "good") == Verdict(0.5, True, "")
    assert verify({}, "odd") == Verdict(0.0, False, "no verdict in 'hm'")
    assert verify({}, "lost") == Verdict(0.0, False, "gone")


def test_mistakes(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(UserError, match="https://api.example.com/v1 wants a key; .* variable OPENAI_API_KEY"):
        endpoints.make_chat("https://api.example.com/v1", "m", cache=tmp_path / "a")
    with pytest.raises(UserError, match="cannot be used"):
        endpoints.make_chat("http://localhost/v1", "m", cache=tmp_path)
    (tmp_path / "bad").write_text("{}\n")
    with pytest.raises(DataError, match="bad:1: not a kept reply"):
        endpoints.make_chat("http://localhost/v1", "m", cache=tmp_path / "bad")
    monkeypatch.setitem(__import__("sys").modules, "openai", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_llm\[endpoints\]'"):
        endpoints.make_chat("http://localhost/v1", "m", cache=tmp_path / "a")
