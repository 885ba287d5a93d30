"""What runs in a limited process: a program, or the two sides of a test that know each other by two pipes only.

The solver executes model-written code and answers calls; the checker executes the tests and sees, in the place of the
program's names, stand-ins that call across. So the tests compare plain data by their own rules: an object that claims
to equal everything, an early exit or a rewritten ``assert`` reaches nothing on the other side. Arguments are copies:
what a program does to them does not change what the tests compare with, unless the call returns None, as functions do
that work in place. Functions of the tests that are handed to the program run on their own side.
"""

import ast
import builtins
import collections
import copy
import functools
import importlib
import io
import itertools
import json
import math
import operator
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from jaxrl_llm.sandbox.values import Unreadable, decode, encode

LONGEST = 32 << 20  # characters of one message between solver and checker
CHUNK = 256  # elements of an iterator that are fetched at once
OUT_OF_MEMORY = 101
ENDED = "the program ended"
_MOST_HELD = 10_000  # characters of what an exception holds
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


class Ended(BaseException):
    """The other side closed its pipe: another kind than what a program raises, as ``EOFError`` by reading nothing."""


class _Line:
    """JSON lines over two pipes."""

    def __init__(self, reading: int, writing: int):
        self._reader = io.BufferedReader(io.FileIO(reading), 1 << 16)
        self._writing = writing
        self.heard = 0  # characters so far

    def send(self, tree: Any) -> None:
        text = json.dumps(tree).encode() + b"\n"
        if len(text) > LONGEST:
            raise Unreadable("a value is too large to be handed over")
        while text:
            text = text[os.write(self._writing, text) :]

    def receive(self) -> Any:
        text = self._reader.readline(LONGEST)
        self.heard += len(text)
        if not text.endswith(b"\n"):
            raise Ended("the other side ended")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Unreadable("not a message") from error


class Foreign(Exception):
    """Marks exceptions that the other side raised, whatever their other type."""


class Unfit(TypeError):
    """The tests ask what cannot be asked from afar, which says nothing about the program."""


class Gone(BaseException):
    """The other side ended or talks nonsense; no ``except Exception`` of a test hides it."""


def _raising(error: BaseException) -> dict[str, Any]:
    """An exception as a message: its name, its text, and what ``except`` catches it."""
    text = error.args[0] if len(error.args) == 1 and type(error.args[0]) is str else _text(error)
    said = {"raised": type(error).__name__, "kind": _kind(type(error)), "text": text[:300]}
    try:
        held = encode(dict(vars(error)), _no_object)  # what an except clause reads of it
        return said | ({"held": held} if len(json.dumps(held)) <= _MOST_HELD else {})
    except Exception:  # no plain values, or an object that raises when it is looked at: its name and text must do
        return said


def _no_object(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} is no plain value")


def _kind(error: type) -> str:
    """The builtin exception that is next of kin."""
    return next(kind.__name__ for kind in error.__mro__ if getattr(builtins, kind.__name__, None) is kind)


def _exception(name: str, kind: str) -> type[Exception]:
    """The class of exceptions of that name, which is caught as ``kind``."""
    base = getattr(builtins, kind, None)
    plain = isinstance(base, type) and issubclass(base, Exception) and not issubclass(base, UnicodeError)
    return _exception_class(name, base if plain else RuntimeError)


@functools.cache
def _exception_class(name: str, base: type[Exception]) -> type[Exception]:
    return type(name, (Foreign,) if base is Exception else (base, Foreign), {})


def _raised(reply: dict[str, Any]) -> Exception:
    name, kind, text = (str(reply.get(key, "")) for key in ("raised", "kind", "text"))
    error = _exception(name, kind)(text)
    held = decode(reply.get("held"), lambda number: None)
    for key, value in held.items() if isinstance(held, dict) else ():
        if isinstance(key, str) and key.isidentifier() and key[0] != "_":
            vars(error)[key] = value
    return error


def _text(error: BaseException) -> str:
    try:
        return str.__str__(str(error))[:300]
    except BaseException:
        return "an error whose text raises"


# operations that cross over. Those of two operands have both on the other side: an object of the program that is
# compared with a value of the tests would learn what is expected, and could equal it
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "len": len, "bool": bool, "str": str, "repr": repr, "hash": hash, "next": next, "abs": abs, "neg": operator.neg,
    "pos": operator.pos, "invert": operator.invert, "int": int, "float": float, "complex": complex,
    "index": operator.index, "round": round, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil,
    "format": format, "reversed": reversed, "getitem": operator.getitem, "setitem": operator.setitem,
    "delitem": operator.delitem, "setattr": setattr, "delattr": delattr, "isinstance": isinstance,
    "issubclass": issubclass, "copy": copy.copy, "deepcopy": copy.deepcopy,
    "enter": lambda x: type(x).__enter__(x), "exit": lambda x, *e: type(x).__exit__(x, *e),
}  # fmt: skip
_PAIRS = {
    "__eq__": operator.eq, "__ne__": operator.ne, "__lt__": operator.lt, "__le__": operator.le, "__gt__": operator.gt,
    "__ge__": operator.ge, "__add__": operator.add, "__sub__": operator.sub, "__mul__": operator.mul,
    "__truediv__": operator.truediv, "__floordiv__": operator.floordiv, "__mod__": operator.mod,
    "__matmul__": operator.matmul, "__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor,
}  # fmt: skip
# builtin types mean the same on both sides
_TYPES = frozenset({int, float, complex, str, bytes, bool, list, tuple, set, frozenset, dict, range})


class _Callback:
    """In the program, a function of the tests: it runs on their side."""

    def __init__(self, solver: "_Solver", number: int, name: str):
        self._solver, self._number = solver, number
        self.__name__ = self.__qualname__ = name  # which decorators hand on
        self.__doc__ = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._solver.call_back(self._number, arguments, named)


class _Iterator:
    """In the program, an iterator of the tests: its elements come from their side."""

    def __init__(self, following: _Callback):
        self._following = following

    def __iter__(self) -> "_Iterator":
        return self

    def __next__(self) -> Any:
        return self._following()


class _Solver:
    """The program's side: what its names mean, and the objects that the tests hold."""

    def __init__(self, line: _Line, space: dict[str, Any], failed: BaseException | None):
        self.line, self.space, self.failed = line, space, failed
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}  # of an object by its id: the same object is the same number
        self.callbacks: dict[int, _Callback] = {}

    def keep(self, value: Any) -> Any:
        """The reference of an object."""
        if isinstance(value, _Callback):
            return ["tests", value._number]
        if isinstance(value, _Iterator):
            return ["iterator", value._following._number]
        if isinstance(value, type) and value in _TYPES:
            return ["builtin", value.__name__]
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.numbers[id(value)]

    def held(self, reference: Any) -> Any:
        """The object of a reference."""
        if isinstance(reference, int):
            return self.objects[reference]
        kind, *rest = reference
        if kind == "iterator":
            return _Iterator(self.held(["tests", *rest, "__next__"]))
        if kind == "tests":
            return self.callbacks.setdefault(rest[0], _Callback(self, *rest))
        return getattr(builtins, rest[0]) if kind == "builtin" else self.target(rest)

    def target(self, path: list) -> Any:
        """The object of a name or number and of attributes after it."""
        value = self.space[path[0]] if isinstance(path[0], str) else self.objects[path[0]]
        for name in path[1:]:
            value = getattr(value, name)
        return value

    def until(self, ended: str) -> Any:
        """Answers requests until a message has the key ``ended``, which it returns.

        Raises:
          Ended: when the other side did.
        """
        while True:
            message = self.line.receive()
            if ended in message:
                return message
            try:
                if self.failed is not None:
                    raise self.failed
                reply = self._answer(message)
            except Ended:
                raise
            except BaseException as error:
                reply = _raising(error)
            try:
                self.line.send(reply)
            except (Unreadable, TypeError, ValueError) as error:
                self.line.send({"raised": "ValueError", "kind": "ValueError", "text": _text(error)})

    def _answer(self, request: dict) -> dict[str, Any]:
        value, given = self.target(request["target"]), request["given"]
        if request["do"] == "get":
            if isinstance(value, type) and issubclass(value, Exception):
                return {"exception": value.__name__, "kind": _kind(value)}
            return {"value": encode(value, self.keep)}
        arguments, named = decode(given, self.held)
        if request["do"] == "take":
            return {"value": encode(list(itertools.islice(value, *arguments)), self.keep)}
        if request["do"] == "iterate":
            return {"value": encode([iter(value)], self.keep)}
        if request["do"] != "call":
            operation = _OPERATIONS.get(request["do"]) or _PAIRS[request["do"]]
            return {"value": encode(operation(value, *arguments), self.keep)}
        result = value(*arguments, **named)
        reply = {"value": encode(result, self.keep)}
        if result is None:  # as what works in place returns; then the tests see what it did
            after = encode((arguments, named), self.keep)
            if after != given:
                reply["after"] = after
        return reply

    def call_back(self, number: int, arguments: tuple, named: dict[str, Any]) -> Any:
        """Calls a function of the tests, and answers what that one asks meanwhile."""
        self.line.send({"callback": number, "given": encode((list(arguments), named), self.keep)})
        reply = self.until("called")
        if "raised" in reply:
            raise _raised(reply)
        return decode(reply["called"], self.held)


def solve(source: str, reading: int, writing: int) -> int:
    """Executes a program and answers calls of its functions until the other side closes."""
    space: dict[str, Any] = {"__name__": "program"}
    failed: BaseException | None = None
    try:
        exec(compile(source, "<program>", "exec"), space)
    except BaseException as error:  # also SystemExit: the tests go on and find what is missing
        failed = error
    try:
        _Solver(_Line(reading, writing), space, failed).until("end")
    except Ended:
        return 0
    return 1


class StandIn:
    """In the tests, an object of the program: what is done with it crosses over, comparisons with values do not."""

    __slots__ = ("_ask", "_path")

    def __init__(self, ask: Callable[..., Any], path: list):
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_path", path)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", self._path, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(name)
        return self._ask("get", [*self._path, name])

    def __iter__(self) -> Iterator[Any]:
        iterator = self._ask("iterate", self._path)[0]
        left, wanted = _ahead(iterator), 1
        while True:
            while left:
                yield left.popleft()
            chunk = self._ask("take", iterator._path, (wanted,))
            left.extend(chunk)
            if len(chunk) < wanted and not left:
                return
            wanted = min(2 * wanted, CHUNK)

    def __next__(self) -> Any:
        left = _ahead(self)
        return left.popleft() if left else self._ask("next", self._path)

    def __copy__(self) -> Any:
        return self._ask("copy", self._path)

    def __deepcopy__(self, memo: dict) -> Any:
        return self._ask("deepcopy", self._path)

    def __exit__(self, kind: Any, value: Any, trace: Any) -> Any:
        return self._ask("exit", self._path, (None, None, None))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, StandIn) and self._ask("isinstance", value._path, (self,))

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, StandIn) and self._ask("issubclass", value._path, (self,))


def _ahead(iterator: StandIn) -> collections.deque:
    """What was fetched of an iterator and not yet used, whoever uses it."""
    return iterator._ask.__self__.ahead.setdefault(tuple(iterator._path), collections.deque())


def _cross(name: str, operation: str) -> Callable[..., Any]:
    def method(self: StandIn, *arguments: Any) -> Any:
        return self._ask(operation, self._path, arguments)

    method.__name__ = name
    return method


def _cross_pair(name: str) -> Callable[..., Any]:
    def method(self: StandIn, other: Any) -> Any:
        if not isinstance(other, StandIn):
            return NotImplemented
        return self._ask(name, self._path, (other,))

    method.__name__ = name
    return method


for _name in _OPERATIONS:
    if f"__{_name}__" not in StandIn.__dict__ and _name not in ("isinstance", "issubclass"):
        setattr(StandIn, f"__{_name}__", _cross(f"__{_name}__", _name))
for _name in _PAIRS:
    setattr(StandIn, _name, _cross_pair(_name))


class _Asker:
    """The tests' side: asks the program, and runs functions of the tests that the program calls."""

    def __init__(self, line: _Line):
        self.line = line
        self.mine: list[Callable[..., Any]] = []
        self.iterators: dict[int, Iterator[Any]] = {}  # by the number of what gives the next element
        self.known: dict[int, StandIn] = {}
        self.unfit = ""  # why no program can be asked this
        self.ahead: dict[tuple, collections.deque] = {}  # by the path of an iterator

    def reference(self, value: Any) -> Any:
        """What stands for an object that is handed to the program: one of its own, a type, or a function."""
        if isinstance(value, StandIn):
            path = value._path
            return path[0] if len(path) == 1 and isinstance(path[0], int) else ["path", *path]
        if isinstance(value, type) and value in _TYPES:
            return ["builtin", value.__name__]
        if not callable(value) and hasattr(type(value), "__next__"):
            self.mine.append(value.__next__)
            self.iterators[len(self.mine) - 1] = value
            return ["iterator", len(self.mine) - 1]
        if not callable(value):
            raise Unfit(f"a {type(value).__name__} of the tests cannot be handed to the program")
        self.mine.append(value)
        return ["tests", len(self.mine) - 1, str(getattr(value, "__name__", type(value).__name__))]

    def held(self, reference: Any) -> Any:
        """What a reference of the program stands for."""
        if isinstance(reference, int):  # the same object is the same stand-in: ``is`` means what it says
            return self.known.setdefault(reference, StandIn(self.ask, [reference]))
        kind, what = reference
        if kind in ("tests", "iterator") and type(what) is int and what >= 0:
            return (self.mine if kind == "tests" else self.iterators)[what]
        return {kind.__name__: kind for kind in _TYPES}[what]

    def ask(self, do: str, path: list, arguments: tuple = (), named: dict[str, Any] | None = None) -> Any:
        """The program's answer.

        Raises:
          Gone: when there is none.
          Foreign: what the program raised.
        """
        given = (list(arguments), named or {})
        try:
            sent = encode(given, self.reference)
        except Unfit as error:
            self.unfit = str(error)
            raise
        try:
            self._say({"do": do, "target": path, "given": sent})
            while "callback" in (reply := self._message()):
                self._say(self._called(reply))
            if "exception" in reply:
                return _exception(str(reply["exception"]), str(reply.get("kind")))
            if "raised" in reply:
                raise _raised(reply)
            value = decode(reply["value"], self.held)
            if do in ("take", "iterate") and not isinstance(value, list):
                raise Unreadable("not a list")
            # of what gives something back the tests see nothing else: a program that says so anyway would write the
            # very values that its answer is compared with
            if "after" in reply and do == "call" and value is None:
                _adopt(given, decode(reply["after"], self.held))
            return value
        except (Ended, OSError, Unreadable, KeyError, IndexError) as error:
            if isinstance(error, Foreign):
                raise
            raise Gone(f"{ENDED}: {error}") from error

    def _say(self, tree: Any) -> None:
        try:
            self.line.send(tree)
        except Unreadable as error:
            if self.line.heard > LONGEST // 2:  # what is too large may be the program's own
                raise
            self.unfit = str(error)
            raise Unfit(self.unfit) from error

    def _message(self) -> dict[str, Any]:
        reply = self.line.receive()
        if not isinstance(reply, dict):
            raise Unreadable("not a reply")
        return reply

    def _called(self, message: dict[str, Any]) -> dict[str, Any]:
        number = message["callback"]
        arguments, named = decode(message["given"], self.held)
        if type(number) is not int or number < 0:
            raise Unreadable("no function of the tests")
        function = self.mine[number]
        try:
            return {"called": encode(function(*arguments, **named), self.reference)}
        except Exception as error:
            return {"called": None} | _raising(error)


def _adopt(old: Any, new: Any) -> Any:
    """Makes a container of the tests what the program made of its copy; what it holds now."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = [*(_adopt(a, b) for a, b in zip(old, new, strict=False)), *new[len(old) :]]
    elif isinstance(old, dict) and isinstance(new, dict):
        merged = {key: _adopt(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(merged)
    elif isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray) and isinstance(new, bytearray):
        old[:] = new
    elif isinstance(old, collections.deque) and isinstance(new, collections.deque):
        old.clear()
        old.extend(new)
    elif isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        changed = tuple(_adopt(a, b) for a, b in zip(old, new, strict=True))
        return old if all(a is b for a, b in zip(old, changed, strict=True)) else new
    else:
        return new
    return old


def _free_names(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    stored = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imported = {node.asname or node.name.partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    return {node.id for node in names} - stored - defined - imported


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
    except Foreign as error:
        if isinstance(error, KeyError):
            return  # the program has no such name: the test that needs it fails
        raise
    space[name] = StandIn(ask, [name]) if isinstance(value, StandIn) else value


def check(setup: str, entries: list[str], checks: list[str], reading: int, writing: int) -> dict[str, Any]:
    """Executes each check against the program on the other side; which passed, and why the first other did not.

    ``unfit`` says why the tests cannot judge any program: they are no Python, need a module that is not there, or hand
    over what cannot be handed over.
    """
    asker = _Asker(_Line(reading, writing))
    ask = asker.ask
    passed: list[bool] = []
    reason = ""
    try:
        prepare = compile(setup, "<setup>", "exec")
        programs = [compile(source, "<tests>", "exec") for source in checks]
    except (SyntaxError, ValueError) as error:
        return {"passed": [False] * len(checks), "reason": "", "unfit": f"the tests are no Python: {error}"[:500]}
    wanted = sorted(_free_names(setup))
    for source, program in zip(checks, programs, strict=True):
        try:
            space: dict[str, Any] = {"__name__": "tests"}
            for name in wanted:
                _find(name, space, ask)
            exec(prepare, space)
            for name in entries:
                space.pop(name, None)
                _bring(name, space, ask)
            for name in sorted(_free_names(source)):
                _find(name, space, ask)
            exec(program, space)
            passed.append(True)
        except Gone as error:
            reason = reason or str(error)
            break
        except BaseException as error:
            if isinstance(error, ImportError) and not isinstance(error, Foreign):
                asker.unfit = f"the tests need what is not there: {_text(error)}"
            reason = reason or _why(error, source)
            passed.append(False)
    passed += [False] * (len(checks) - len(passed))
    return {"passed": passed, "reason": reason[:500], "unfit": asker.unfit[:500]}


def _why(error: BaseException, source: str) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == "<tests>"]
    where = source.splitlines()[lines[-1] - 1].strip() if lines and lines[-1] else ""
    text = _text(error)
    return f"{type(error).__name__}{': ' + text if text else ''}{' at ' + where if where else ''}"
