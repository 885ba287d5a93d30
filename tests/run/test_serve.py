"""``jaxrl serve``: what is asked at once is answered as alone, by clients of OpenAI and of this project."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from jaxrl_llm.__main__ import main
from jaxrl_llm.run import options
from jaxrl_llm.run.commands import chat, serve
from jaxrl_llm.run.commands.answering import Batcher, Question, Reply, make_decode
from jaxrl_llm.tools import endpoints
from tests.endpoint_for_tests import PROXIES
from tests.models_for_tests import byte_model

PROMPTS = ("1+2=>", "3*4-5=>", "7=>")


@pytest.fixture(scope="module")
def nano():
    return options.open_model(options.ModelSettings(model="nano"), trains=False)


def asked(model, **changes):
    questions = [Question(model.tokenizer.encode(text), 20, 1.0, 1.0, seed) for seed, text in enumerate(PROMPTS)]
    return [q._replace(**changes) for q in questions]


def test_a_reply_does_not_depend_on_what_is_asked_beside_it(nano):
    decode = make_decode(nano, most=32)
    mixed = [*asked(nano), *asked(nano, temperature=0.0), *asked(nano, top_p=0.5), *asked(nano, most=3, choice=1)]
    together = decode(mixed)
    assert together == [decode([question])[0] for question in mixed]
    assert together[0] != decode(asked(nano, seed=77))[0] and len(set(map(str, together))) > 6
    assert all(len(reply.ids) <= 3 for reply in together[9:])
    assert any(reply.ended for reply in together) and not any(nano.tokenizer.eos_ids[0] in r.ids for r in together)


@pytest.mark.slow
def test_a_model_on_a_mesh_says_the_same(nano):
    there = options.open_model(options.ModelSettings(model="nano", mesh="data=2,tensor=2"), trains=False)
    assert make_decode(there, most=32)(asked(there)) == make_decode(nano, most=32)(asked(nano))


def test_questions_of_many_threads_share_batches():
    sizes = []

    def decode(questions):
        sizes.append(len(questions))
        time.sleep(0.02)
        if any(q.seed == 13 for q in questions):
            raise ValueError("thirteen")
        return [Reply([q.seed], True) for q in questions]

    batcher = Batcher(decode, rows=4, wait_s=0.02)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda k: batcher.ask(Question([1], 1, 1.0, 1.0, k)).result(5).ids, range(12)))
    assert found == [[k] for k in range(12)] and max(sizes) <= 4 and len(sizes) < 12
    with pytest.raises(ValueError, match="thirteen"):
        batcher.ask(Question([1], 1, 1.0, 1.0, 13)).result(5)
    assert batcher.ask(Question([1], 1, 1.0, 1.0, 14)).result(5).ids == [14], "the next batch is decoded"
    batcher.close()
    assert not batcher.thread.is_alive()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A server in this process of a small model with a chat template."""
    folder = byte_model(tmp_path_factory.mktemp("served"), "qwen2", max_positions=128)
    server, batcher, name = serve.begin(serve.Settings(model=str(folder), port=0, max_new_tokens=24, name="small"))
    assert name == "small"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    batcher.close()


@pytest.fixture
def client(address, monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    return openai.OpenAI(base_url=address, api_key="none", max_retries=0)


TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]


def test_clients_of_openai_are_answered(client):
    assert [model.id for model in client.models.list()] == ["small"]
    one = client.chat.completions.create(model="small", messages=TALK, seed=3, max_tokens=8, n=2)
    again = client.chat.completions.create(model="small", messages=TALK, seed=3, max_completion_tokens=8, n=2)
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in again.choices] and texts[0] != texts[1]
    assert one.usage.completion_tokens <= 16 and one.usage.prompt_tokens > 12
    assert {choice.finish_reason for choice in one.choices} <= {"stop", "length"}
    greedy = client.completions.create(model="small", prompt=["ab", "ab", [97, 98]], temperature=0.0, max_tokens=6)
    assert greedy.choices[0].text == greedy.choices[1].text and len(greedy.choices) == 3
    whole = greedy.choices[0].text
    cut = client.completions.create(model="small", prompt="ab", temperature=0.0, max_tokens=6, stop=[whole[2]])
    assert cut.choices[0].text == whole[: whole.index(whole[2])] and cut.choices[0].finish_reason == "stop"


def test_a_talk_is_answered_as_by_chat(client, address, tmp_path):
    folder = byte_model(tmp_path, "qwen2", max_positions=128)
    settings = chat.Settings(model=str(folder), temperature=0.0, max_new_tokens=24)
    talk = [{"role": "user", "content": "Hello"}]
    said = client.chat.completions.create(model="small", messages=talk, temperature=0.0).choices[0].message.content
    assert said == chat.make_answer(settings)(talk)
    ask = endpoints.make_chat(address, "small", cache=tmp_path / "replies.jsonl", temperature=0.0, max_tokens=24)
    assert ask(talk, 0) == said


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": TALK, "stream": True}, "stream=True is not served; leave it out"),
        ({"messages": TALK, "tools": [{"type": "function"}]}, "tools="),
        ({"messages": TALK, "logprobs": True}, "logprobs=True is not served"),
        ({"messages": TALK, "presence_penalty": 0.5}, "presence_penalty=0.5 is not served"),
        ({"messages": TALK, "max_tokens": 25}, "max_tokens=25 is no whole number from 1 to 24"),
        ({"messages": TALK, "temperature": -1}, "temperature=-1 is no number from 0.0"),
        ({"messages": TALK, "temperature": True}, "temperature=True is no number"),
        ({"messages": TALK, "top_p": 0}, "top_p=0 is no number"),
        ({"messages": TALK, "n": 1.5}, "n=1.5 is no whole number"),
        ({"messages": TALK, "seed": -1}, "seed=-1 is no whole number"),
        ({"messages": TALK, "stop": [""]}, "stop must be a text"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, r"\ud800 is half of a character, which no tokenizer"),
        ({"messages": [{"content": "x"}]}, "message 0 has no role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "images and sounds are not read"),
        ({"messages": TALK, "chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, "exceed the context of 128"),
        ([1], "the request must be a JSON object"),
        ("{", "the request is no JSON"),
    ],
)
def test_what_is_not_served_is_said(address, body, said):
    status, found = post(address, "/v1/chat/completions", body if body == "{" else json.dumps(body))
    assert status == 400 and said in found["error"]["message"]


def post(address, path, raw, length=None):
    connection = http.client.HTTPConnection(address.removeprefix("http://").removesuffix("/v1"), timeout=30)
    headers = {} if length is None else {"Content-Length": length}
    connection.request("POST" if raw is not None else "GET", path, raw, headers)
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def test_paths_and_lengths(address):
    assert post(address, "/health", None) == (200, {})
    assert post(address, "/v1/models/small", None)[1]["id"] == "small"
    assert post(address, "/nothing", None)[0] == post(address, "/v1/embeddings", "{}")[0] == 404
    assert post(address, "/v1/completions", "{}", "99999999999")[0] == 413
    for prompt in (None, [], [[]], [10**6], [1.5]):
        status, found = post(address, "/v1/completions", json.dumps({"prompt": prompt}))
        assert status == 400 and "prompt " in found["error"]["message"], prompt


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "99999"], "--port 99999 must lie in [0, 65535]"),
        (["--batch", "0"], "--batch 0 must be at least 1"),
        (["--wait-ms", "-1"], "--wait-ms -1.0 must not be negative"),
        (["--max-new-tokens", "5000"], "--max-new-tokens 5000 leaves no room for a prompt"),
        (["--model", "missing"], "no bundled model 'missing'"),
        (["--lora", "2"], "--lora 2 is of training"),
        (["--host", "256.0.0.1", "--max-new-tokens", "16"], "--host 256.0.0.1"),
    ],
)
def test_mistakes_are_one_line(words, said, capsys):
    assert main(["serve", "--no-compile-cache", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_port_that_is_taken(capsys):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        assert main(["serve", "--model", "nano", "--max-new-tokens", "16", "--port", port]) == 2
    assert f"--port {port}: Address already in use; choose another" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM])
def test_the_command_itself(ends):
    words = [sys.executable, "-m", "jaxrl_llm", "serve", "--port", "0"]
    run = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    try:
        line = run.stdout.readline()
        assert line.startswith("nano at http://127.0.0.1:") and line.endswith(" (Ctrl-C ends)\n")
        status, found = post(line.split()[2], "/v1/completions", json.dumps({"prompt": "1+1=>", "temperature": 0}))
        assert status == 200 and found["choices"][0]["text"]
        run.send_signal(ends)
        assert run.wait(20) == 130
    finally:
        run.kill()
        run.stdout.close()
        run.wait()
