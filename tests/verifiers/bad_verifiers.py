"""Verifiers that misbehave, as the pool meets them; imported by worker processes."""

import os
import subprocess
import sys
import time

from jaxrl_llm.verifiers.verdict import Verdict


def obey(answer, response):
    """Does what the response says."""
    if response == "hang":
        while True:
            pass
    if response == "sleep":
        time.sleep(1000)
    if response == "memory":
        return Verdict(float(len(bytearray(64 << 30))))
    if response == "more and more memory":
        held = []
        while True:
            held.append(bytearray(64 << 20))
    if response == "one big number":
        return Verdict(float(9**9**9 % 7))
    if response == "exit":
        os._exit(3)
    if response == "abort":
        os.abort()
    if response == "child":
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    if response == "raise":
        raise KeyError("absent")
    if response == "deep":
        return obey(answer, response)
    if response == "print":
        print("noise on standard output")
        sys.stderr.write("noise on standard error\n")
    if response == "jax?":
        return Verdict(float(any(name in sys.modules for name in ("jax", "numpy", "torch"))))
    if response == "slow":
        time.sleep(0.02 * (answer["n"] % 3))
    return Verdict(float(answer["n"]), True, "seen")


def not_a_verdict(answer, response):
    return "right"
