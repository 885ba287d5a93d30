"""An env that another process can import, whose actions do to the process what packages do to theirs."""

import os
import signal
import time

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.host.env import TextEnv, TextStepResult, text_identity


class Counter:
    """Counts up; a task is where it begins."""

    def __init__(self, start, luck):
        self.said = [f"at {start}"]
        self.count, self.luck, self.inside = start, luck, False

    def step(self, text):
        assert not self.inside, "two threads at once"
        self.inside = True
        try:
            return self.act(text)
        finally:
            self.inside = False

    def act(self, text):
        if text == "hang":
            time.sleep(600)
        if text == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "leave":
            raise SystemExit(3)
        if text == "fail":
            raise KeyError("no such door")
        if text == "eat":
            bytearray(1 << 40)
        self.count += 1
        shown = {"process": str(os.getpid()), "dice": str(int(self.luck.integers(1000)))}.get(text, f"at {self.count}")
        self.said.append(shown)
        return TextStepResult(self, shown, 0.5, text == "stop", cut=text == "cut", mark=self.count)


def make_counter(moody=False):
    def reset(seed, task):
        if task == "nowhere":
            raise UserError("no such task; give a number")
        return Counter(task, np.random.default_rng(os.getpid() if moody else seed))

    def close(counter):
        if counter.count == 1013:
            raise ValueError("it is stuck")

    return TextEnv(
        reset, Counter.step, lambda c: text_identity("\n".join(c.said)), close=close, first=lambda c: c.said[0]
    )


def make_nothing():
    raise UserError("needs a package; pip install it")


def make_wrong():
    raise ImportError("libgame.so: no such file")


def make_late():
    time.sleep(600)
