"""A real server on loopback that speaks the OpenAI protocol and may fail, vanish and come back."""

import contextlib
import http.server
import json
import threading
import time

PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "OPENAI_API_KEY")


def capitals(request):
    """The last message in capitals."""
    return request["messages"][-1]["content"].upper()


class Server:
    """``plan`` holds the status codes of the next requests (or names of what is no reply), ``seen`` all requests, and
    ``most`` how many came at once."""

    def __init__(self, reply=capitals, wait_s=0.0):
        self.reply, self.wait_s, self.plan, self.seen = reply, wait_s, [], []
        self.finish = "stop"  # why replies end
        self.lock, self.now, self.most, self.port = threading.Lock(), 0, 0, 0
        self.http = None
        self.up()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def up(self):
        """On the same port as before."""
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                outer.answer(self)

            def log_message(self, *_):
                """Silent."""

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def down(self):
        self.http.shutdown()
        self.http.server_close()

    def answer(self, handler):
        request = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.seen.append(request | {"path": handler.path, "key": handler.headers["Authorization"]})
            status = self.plan.pop(0) if self.plan else 200
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.wait_s)
        body = {
            "id": "1", "object": "chat.completion", "created": 0, "model": request["model"],
            "choices": [{"index": 0, "finish_reason": self.finish} | self.choice(request)],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        }  # fmt: skip
        raw = json.dumps(body if status == 200 else {"error": {"message": "no"}}).encode()
        kind = "application/json"
        if isinstance(status, str):  # a good status, and no reply: a proxy's page, half of one, another's
            raw = {"page": b"<html>", "cut": raw[:9], "other": b'{"hello": 1}'}[status]
            kind, status = "text/html" if status == "page" else kind, 200
        with self.lock:
            self.now -= 1
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(raw)))
        handler.send_header("Retry-After", "0.01")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(raw)

    def choice(self, request):
        """What is said, in the form of whichever of the two was asked."""
        text = self.reply(request)
        return {"text": text} if "prompt" in request else {"message": {"role": "assistant", "content": text}}


@contextlib.contextmanager
def serving(monkeypatch, **how):
    """A ``Server``, asked without proxies and keys."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    server = Server(**how)
    try:
        yield server
    finally:
        server.down()
