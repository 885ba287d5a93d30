"""What runs in a limited process: a program, or the two sides of a test that know each other by two pipes only.

The solver executes model-written code and answers calls; the checker executes the tests and sees, in the place of the
program's names, stand-ins that call across. So the tests compare plain data by their own rules: an object that claims
to equal everything, an early exit or a rewritten ``assert`` reaches nothing on the other side. Arguments are copies:
what a program does to them does not change what the tests compare with.
"""

import ast
import builtins
import importlib
import io
import itertools
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from jaxrl_llm.sandbox.values import Unreadable, decode, encode

LONGEST = 4 << 20  # characters of one message between solver and checker
CHUNK = 256  # elements of an iterator that are fetched at once
OUT_OF_MEMORY = 101
LIBRARY = frozenset(
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator random re "
    "statistics string sys time typing".split()
)


def run_program(source: str) -> int:
    """Executes a program as ``__main__`` and returns its exit code."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(source, "<program>", "exec"), module.__dict__)
        return 0
    except SystemExit as error:
        return _exit_code(error)
    except MemoryError:
        return OUT_OF_MEMORY
    except BaseException as error:
        _show(error)
        return 1
    finally:
        _flush()


def run_call(module: str, name: str, given: list, writing: int) -> int:
    """Calls a function of a module that is loaded and writes what it returns as JSON."""
    try:
        text = json.dumps(getattr(sys.modules[module], name)(*given)).encode()
        while text:
            text = text[os.write(writing, text) :]
        return 0
    except MemoryError:
        return OUT_OF_MEMORY
    except BaseException as error:
        _show(error)
        return 1
    finally:
        _flush()


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return int(error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    frames = error.__traceback__
    traceback.print_exception(type(error), error, frames.tb_next if frames else None, limit=-20)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError, TypeError):
            continue  # the program closed or replaced it


class _Line:
    """JSON lines over two pipes."""

    def __init__(self, reading: int, writing: int):
        self._reader = io.BufferedReader(io.FileIO(reading), 1 << 16)
        self._writing = writing

    def send(self, tree: Any) -> None:
        text = json.dumps(tree).encode() + b"\n"
        if len(text) > LONGEST:
            raise Unreadable("a value is too large to be handed over")
        while text:
            text = text[os.write(self._writing, text) :]

    def receive(self) -> Any:
        text = self._reader.readline(LONGEST)
        if not text.endswith(b"\n"):
            raise EOFError("the other side ended")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Unreadable("not a message") from error


def solve(source: str, reading: int, writing: int) -> int:
    """Executes a program and answers calls of its functions until the other side closes."""
    line, objects = _Line(reading, writing), []
    space: dict[str, Any] = {"__name__": "program"}
    failed: BaseException | None = None
    try:
        exec(compile(source, "<program>", "exec"), space)
    except BaseException as error:  # also SystemExit: the tests go on and find what is missing
        failed = error

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    while True:
        try:
            request = line.receive()
        except EOFError:
            return 0
        try:
            if failed is not None:
                raise failed
            reply = _answer(request, space, objects, keep)
        except BaseException as error:
            reply = {"raised": type(error).__name__, "text": _text(error)}
        try:
            line.send(reply)
        except (Unreadable, TypeError, ValueError) as error:
            line.send({"raised": "ValueError", "text": _text(error)})


def _text(error: BaseException) -> str:
    try:
        return str.__str__(str(error))[:300]
    except BaseException:
        return "an error whose text raises"


def _answer(request: dict, space: dict[str, Any], objects: list, keep: Callable[[Any], int]) -> dict[str, Any]:
    target, *path = request["target"]
    value = space[target] if isinstance(target, str) else objects[target]
    for name in path:
        value = getattr(value, name)
    if request["do"] == "get":
        return {"value": encode(value, keep)}
    if request["do"] == "take":
        taken = list(itertools.islice(value, CHUNK))
        return {"value": encode(taken, keep)}
    if request["do"] == "iterate":
        return {"value": encode([iter(value)], keep)}
    arguments, named = decode(request["given"], objects.__getitem__)
    return {"value": encode(value(*arguments, **named), keep)}


class StandIn:
    """In the tests, an object of the program: calls and attributes cross over, comparisons do not."""

    __slots__ = ("_ask", "_path")

    def __init__(self, ask: Callable[..., Any], path: list):
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_path", path)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", self._path, (list(arguments), named))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", [*self._path, name])

    def __iter__(self) -> Iterator[Any]:
        iterator = self._ask("iterate", self._path)[0]
        while True:
            chunk = self._ask("take", iterator._path)
            yield from chunk
            if len(chunk) < CHUNK:
                return

    def __len__(self) -> int:
        return self._ask("call", [*self._path, "__len__"], ([], {}))

    def __getitem__(self, key: Any) -> Any:
        return self._ask("call", [*self._path, "__getitem__"], ([key], {}))

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "<an object of the program>"


class Gone(BaseException):
    """The solver ended or talks nonsense; no ``except Exception`` of a test hides it."""


def _asker(line: _Line) -> Callable[..., Any]:
    def number_of(value: Any) -> int:
        if isinstance(value, StandIn) and len(value._path) == 1 and isinstance(value._path[0], int):
            return value._path[0]
        raise TypeError(f"a {type(value).__name__} of the tests cannot be handed to the program")

    def held(number: int) -> StandIn:
        return StandIn(ask, [number])

    def ask(do: str, path: list, given: tuple[list, dict] | None = None) -> Any:
        sent = None if given is None else encode(given, number_of)
        try:
            line.send({"do": do, "target": path, "given": sent})
            reply = line.receive()
            if not isinstance(reply, dict):
                raise Unreadable("not a reply")
            if "raised" in reply:
                raise _raised(str(reply["raised"]), str(reply.get("text", "")))
            value = decode(reply["value"], held)
            if do in ("take", "iterate") and not isinstance(value, list):
                raise Unreadable("not a list")
            return value
        except (EOFError, OSError, Unreadable, KeyError, IndexError) as error:
            if isinstance(error, _Foreign):
                raise
            raise Gone(f"the program ended: {error}") from error

    return ask


class _Foreign(Exception):
    """Marks exceptions that the program raised, whatever their other type."""


def _raised(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, UnicodeError):
        kind, text = RuntimeError, f"{name}: {text}"
    return type(name, (kind, _Foreign), {})(text)


def _free_names(source: str) -> set[str]:
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    stored = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    defined = {n.name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return {node.id for node in names} - stored - defined


def _find(name: str, space: dict[str, Any], ask: Callable[..., Any]) -> None:
    """What a test means by a name that it does not define: a builtin, a module of the library, then the program's."""
    if name in space or hasattr(builtins, name):
        return
    if name in LIBRARY:
        space[name] = importlib.import_module(name)
        return
    _bring(name, space, ask)


def _bring(name: str, space: dict[str, Any], ask: Callable[..., Any]) -> None:
    """The program's value of a name, or a stand-in for it."""
    try:
        value = ask("get", [name])
    except _Foreign as error:
        if isinstance(error, KeyError):
            return  # the program has no such name: the test that needs it fails
        raise
    space[name] = StandIn(ask, [name]) if isinstance(value, StandIn) else value


def check(setup: str, entries: list[str], checks: list[str], reading: int, writing: int) -> dict[str, Any]:
    """Executes each check against the program on the other side; which passed, and why the first other did not."""
    ask = _asker(_Line(reading, writing))
    passed: list[bool] = []
    reason = ""
    for source in checks:
        try:
            space: dict[str, Any] = {"__name__": "tests"}
            exec(compile(setup, "<setup>", "exec"), space)
            for name in entries:
                space.pop(name, None)
                _bring(name, space, ask)
            for name in sorted(_free_names(source)):
                _find(name, space, ask)
            exec(compile(source, "<tests>", "exec"), space)
            passed.append(True)
        except Gone as error:
            reason = reason or str(error)
            break
        except BaseException as error:
            reason = reason or _why(error, source)
            passed.append(False)
    passed += [False] * (len(checks) - len(passed))
    return {"passed": passed, "reason": reason[:500]}


def _why(error: BaseException, source: str) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<tests>"]
    where = source.splitlines()[lines[-1] - 1].strip() if lines and lines[-1] else ""
    text = _text(error)
    return f"{type(error).__name__}{': ' + text if text else ''}{' at ' + where if where else ''}"
