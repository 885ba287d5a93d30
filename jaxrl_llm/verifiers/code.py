"""Programs judged by their tests, in the sandbox: HumanEval, MBPP and their like.

The tests run in another process than the program and exchange plain data with it, see ``sandbox.inside``: leaving
early, answers that equal everything or rewritten builtins earn nothing. Each process that judges keeps one warm worker;
run this verifier in a ``pool.VerifierPool`` to use several.
"""

import ast
import functools
import re
import textwrap
from typing import Any

from jaxrl_llm.sandbox.pool import Sandbox
from jaxrl_llm.sandbox.records import Checked, Limits
from jaxrl_llm.verifiers.fences import PYTHON, blocks, written_in
from jaxrl_llm.verifiers.verdict import Verdict

LIMITS = Limits(cpu_s=4.0, wall_s=8.0, memory_mb=512)
TIMEOUT_S = 90.0  # of an item in a pool: the sandbox has its own, smaller limits, and may have to start again
MAX_CHARACTERS = 60_000
# what a base model goes on with after the body of a function
_NEXT = re.compile(r"^(?:class |def |async def |#|@|if |print|assert |```|<)", re.MULTILINE)
_FUTURE = re.compile(r"^from[ \t]+__future__[ \t]+import\b(?:[ \t]*\([^()]*\)|[^\n]*)\n", re.MULTILINE)
_WITHIN = re.compile(r"(?:[ \t]*\n)*[ \t]+\S")  # its first line that is not blank is indented


@functools.cache
def _sandbox() -> Sandbox:
    return Sandbox(workers=1, limits=LIMITS)


def prepare() -> None:
    """Starts the worker; a verifier pool calls it before the clock runs."""
    _sandbox().run("")


def extract(response: str, entries: list[str]) -> str:
    """The program in a response: its last fenced block that defines an entry, or the last one, or all of the text.

    Of blocks that define none those in Python count first, then those without a language.

    >>> extract("Sure:\\n```python\\ndef f(x):\\n    return x\\n```\\nDone.", ["f"])
    'def f(x):\\n    return x\\n'
    """
    text = response[-MAX_CHARACTERS:]
    found = blocks(text)
    defining = [textwrap.dedent(b.text) for b in found if any(_defines(b.text, name) for name in entries)]
    return (defining or written_in(PYTHON, found) or [text])[-1]


def _defines(source: str, name: str) -> bool:
    name = re.escape(name)
    pattern = rf"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b|^{name}[ \t]*[:=]"
    return re.search(pattern, source, re.MULTILINE) is not None


@functools.lru_cache(maxsize=1024)
def _by_itself(start: str) -> str:
    r"""As many lines of the shown code as are Python without what follows: its imports and helpers, no open head.

    >>> _by_itself("import math\n\ndef area(r):\n"), _by_itself("f = lambda x: ")
    ('import math\n\n', '')
    """
    lines = start.splitlines(keepends=True)
    for count in range(len(lines), 0, -1):
        try:
            ast.parse(found := "".join(lines[:count]))
        except (SyntaxError, ValueError):
            continue
        return found
    return ""


def program(answer: dict[str, Any], response: str) -> str:
    r"""What is executed: the response's code, after the prompt's where it continues or needs that.

    A response that defines an entry itself has no use for its head, only for what stands before that (``_by_itself``);
    what it imports of ``__future__`` stays in front. One that begins within a function goes on from the head.

    Args:
      answer: ``entries``, and ``start``: the code that the prompt showed (imports and the head of the function), or "".

    >>> program({"entries": ["f"], "start": "f = lambda x: "}, "f = lambda x: x*2")
    '\nf = lambda x: x*2'
    """
    code, start = extract(response, answer["entries"]), answer.get("start", "")
    if not start:
        return code
    if not _WITHIN.match(code) and any(_defines(code, name) for name in answer["entries"]):
        end = max((found.end() for found in _FUTURE.finditer(code)), default=0)
        return f"{code[:end]}{_by_itself(start)}\n{code[end:]}"
    following = _NEXT.search(code)
    return start + (code[: following.start()] if following and following.start() else code)


def _checked(answer: dict[str, Any], response: str) -> Checked:
    return _sandbox().check(
        program(answer, response), answer["checks"], setup=answer.get("setup", ""), entries=answer["entries"]
    )


def verify(answer: dict[str, Any], response: str) -> Verdict:
    """1 where the response's program passes every one of ``answer["checks"]``, else 0.

    Args:
      answer: ``checks`` (pieces of Python that pass if they end), ``entries`` (names that are the program's),
        optionally ``setup`` (runs before each check) and ``start`` (see ``program``).
    """
    checked = _checked(answer, response)
    if not checked.valid:
        return Verdict(0.0, False, checked.reason)
    right = all(checked.passed)
    return Verdict(float(right), True, "right" if right else checked.reason or "a test failed")


def verify_share(answer: dict[str, Any], response: str) -> Verdict:
    """The share of ``answer["checks"]`` that pass: a denser reward, which some tests give to half a program."""
    checked = _checked(answer, response)
    if not checked.valid:
        return Verdict(0.0, False, checked.reason)
    count = sum(checked.passed)
    return Verdict(
        count / len(checked.passed), True, f"{count} of {len(checked.passed)} checks. {checked.reason}".strip()
    )
