"""What a compiled TPU program takes by the compiler's own count: cycles of every fusion, times the trips of its loop.

libtpu writes ``estimated_cycles`` beside every fusion of a program that it has optimised. Kernels and collectives carry
no such figure: a kernel is counted by the operations and bytes it declares (``pl.CostEstimate``), a collective by its
bytes over the links of a chip, less what is computed between its start and its end. A figure of the compiler does not
drift with the machine that compiles, and is no measurement: launches and the host are not in it. Copies into fast
memory run beside computing, but not beside a kernel, which is counted as if it had the memory's bandwidth for itself.
"""

import collections
import json
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxrl_llm.planning.chips import Chip

SHOWN = 10  # places
LINKS = 2  # directions of a ring in which a chip sends and receives
_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4,
          "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
_WORD = 8  # bytes of a semaphore or a number beside what is moved
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all",
                "collective-broadcast")  # fmt: skip


class Place(NamedTuple):
    """One place in the source, all its operations of one kind together."""

    seconds: float
    kind: str  # computing, kernels, exposed or waiting
    where: str  # file:line of the innermost frame inside the package, else the operation's name
    operation: str


class Schedule(NamedTuple):
    """Seconds of one chip."""

    computing: float  # the compiler's cycles
    kernels: float  # by operations and bytes
    collectives: float  # by bytes over links
    exposed: float  # of the collectives, what no computing hides
    waiting: float  # for copies into fast memory that have started early and not early enough
    places: tuple[Place, ...]  # the dearest first
    unknown_loops: int = 0  # loops whose number of trips is not in the program; counted once

    @property
    def total(self) -> float:
        """Computing, kernels, what is exposed of the collectives, and waits for copies."""
        return self.computing + self.kernels + self.exposed + self.waiting


def extended(few: Schedule, more: Schedule, layers: tuple[int, int, int], show: int = SHOWN) -> Schedule:
    """The schedule of a deeper program of the same layers by a straight line through two shallow ones, place by place.

    Right where layers are compiled one by one, each like the one before it; of a loop over layers too, whose trips it
    multiplies.

    Args:
      few, more: of programs of ``layers[0]`` and ``layers[1]`` layers.
      layers: those two numbers, and the number wanted.
      show: how many places to name.
    """
    first, second, wanted = layers

    def line(a: float, b: float) -> float:
        return max(b + (b - a) * (wanted - second) / (second - first), 0.0)

    sums = (line(getattr(few, name), getattr(more, name)) for name in Schedule._fields[:5])
    before = {place[1:]: place.seconds for place in few.places}
    places = [Place(line(before.get(place[1:], 0.0), place.seconds), *place[1:]) for place in more.places]
    places.sort(key=lambda place: -place.seconds)
    return Schedule(*sums, tuple(places[:show]), more.unknown_loops)


class _Line(NamedTuple):
    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    rest: str
    inside: str = ""  # between the parentheses: the value of a constant


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at ``start`` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    return len(text) - 1


def _line(text: str) -> _Line | None:
    name, equals, right = text.strip().removeprefix("ROOT ").partition(" = ")
    if not equals:
        return None
    end = _closing(right, 0) + 1 if right.startswith("(") else right.find(" ")
    kind, right = right[:end], right[end:].lstrip()
    opened = right.find("(")
    closed = _closing(right, opened)
    operands = tuple(re.findall(r"%([\w.\-]+)", right[opened:closed]))
    inside = right[opened + 1 : closed] if closed - opened < 32 else ""
    return _Line(name.lstrip("%"), kind, right[:opened], operands, right[closed + 1 :], inside)


class Program:
    """The text of an optimised program, taken apart."""

    def __init__(self, text: str):
        """Reads ``as_text()`` of a compiled program."""
        self.computations: dict[str, list[_Line]] = {}
        self.entry, current = "", None
        self.tables: dict[str, dict[int, str]] = {}
        table = None
        for line in _whole_lines(text):
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = self.tables.setdefault(line, {})
            elif not line.startswith(" ") and line.endswith("{") and "->" in line:
                table, words = None, line.split()
                current = words[1 if words[0] == "ENTRY" else 0].lstrip("%")
                self.entry = current if words[0] == "ENTRY" else self.entry
                self.computations[current] = []
            elif table is not None and line[:1].isdigit():
                number, _, value = line.partition(" ")
                table[int(number)] = value
            elif line.startswith("}"):
                current = None
            elif current and (found := _line(line)):
                self.computations[current].append(found)

    def where(self, rest: str) -> str:
        """``file:line`` of the innermost frame inside the package."""
        frame = _number(rest, "stack_frame_id")
        found = ""
        for _ in range(64):
            if frame is None or frame not in self.tables.get("StackFrames", {}):
                break
            row = self.tables["StackFrames"][frame]
            location = self.tables["FileLocations"][_number(row, "file_location_id") or 0]
            name = self.tables["FileNames"][_number(location, "file_name_id") or 0].strip('"')
            inside = re.split(r"jaxrl_llm/|site-packages/", name)[-1]  # whoever's machine it is
            place = f"{inside}:{_number(location, 'line')}"
            if "jaxrl_llm/" in name:
                return place
            found = found or place
            parent = _number(row, "parent_frame_id")
            frame = None if parent == frame else parent
        return found

    def trips(self, line: _Line) -> int | None:
        """How often a loop runs: what the compiler knows, else the largest whole number in its condition, in steps of
        what its body adds to what is compared there.
        """
        known = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', line.rest)
        if known:
            return int(known[1])
        seen, found, asked, todo = set(), [], set(), [_called(line, "condition")[0]]
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            for inner in self.computations.get(name, []):
                constant = inner.op == "constant" and re.match(r"[su]32\[\]", inner.type)
                found += [int(inner.inside)] if constant and inner.inside.isdigit() else []
                asked |= {_number(inner.rest, "index")} if inner.op == "get-tuple-element" else set()
                todo += _called(inner, "calls")
        return -(-max(found) // self.added(_called(line, "body")[0], asked)) if found else None

    def added(self, body: str, asked: set[int | None]) -> int:
        """What one turn of a loop adds to the counter among the arrays that are ``asked`` for; 1 where that is unclear.

        Windows of a product are two in a turn.
        """
        lines = self.computations.get(body, [])
        by_name, last = {line.name: line for line in lines}, lines[-1:]
        for place, name in enumerate(last[0].operands if last else ()):
            line = by_name.get(name)
            if line is None or line.op != "add" or place not in asked:
                continue
            terms = [by_name[term] for term in line.operands if term in by_name]
            steps = [int(term.inside) for term in terms if term.op == "constant" and term.inside.isdigit()]
            if len(steps) == 1 and steps[0] and any(_number(term.rest, "index") == place for term in terms):
                return steps[0]
        return 1


def _whole_lines(text: str) -> Iterator[str]:
    """Lines of a program; those of one operation, whose attributes may have line breaks (Pallas's), as one."""
    held = ""
    for line in text.splitlines():
        if held.startswith("  ") and line and not line.startswith("  ") and not re.match(r"\}(,|\s|$)", line):
            held += line
            continue
        yield held
        held = line
    yield held


def _number(text: str, name: str) -> int | None:
    found = re.search(rf"\b{name}=(\d+)", text)
    return int(found[1]) if found else None


def _called(line: _Line, name: str) -> list[str]:
    return re.findall(rf"\b{name}=\{{?%?([\w.\-]+)", line.rest)


def _size(kind: str) -> float:
    """Bytes of a type, tuples together."""
    arrays = re.findall(r"\b(\w+)\[([\d,]*)\]", kind)
    sizes = (_BYTES.get(name, 0) * math.prod(map(int, filter(None, shape.split(",")))) for name, shape in arrays)
    return float(sum(sizes))


def _sizes(kind: str) -> list[float]:
    """Bytes of each array of a type."""
    return [_size(found) for found in re.findall(r"\b\w+\[[\d,]*\]", kind)]


def _largest(kind: str) -> float:
    """Bytes of the largest array of a type."""
    return max(_sizes(kind), default=0.0)


def _moved(line: _Line) -> float:
    """Bytes that a copy moves: a part of what it is cut out of."""
    return min((size for size in _sizes(line.type) if size > _WORD), default=0.0)


def _queued(due: dict[str, float], way: str, now: float, seconds: float) -> float:
    """When a transfer ends that shares its way: one comes after the other."""
    due[way] = max(now, due.get(way, now)) + seconds
    return due[way]


def _ends(line: _Line) -> bool:
    return line.op.endswith("-done") or line.name.startswith("async-collective-done")


def _parts(rest: str) -> int:
    """How many devices meet."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    if listed:
        return len(listed[1].split(","))
    shaped = re.search(r"replica_groups=\[(\d+),(\d+)\]", rest)
    if shaped:
        return int(shaped[2])
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest)  # mesh['a'=2,'b'=4] {'b'}
    if not named:
        return 2
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
    axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])  # 'a':(2)3 is a part of an axis, of three
    return math.prod(int(part) if part else sizes[name] for name, part in axes)


def collective_seconds(op: str, size: float, parts: int, chip: Chip) -> float:
    """Of one collective on a ring of ``parts`` chips; where each sends to each, on a grid with no links around it.

    Half of what everybody has goes through the middle of the grid, over as many links as its shorter side has.

    Args:
      op: the operation's name.
      size: bytes of the larger of what goes in and what comes out, on one chip.
    """
    links = LINKS * chip.link
    if op.startswith("collective-permute"):
        return chip.meeting + size / chip.link
    if "all-to-all" in op:
        return chip.meeting + size * 2 ** math.ceil(math.log2(max(parts, 2)) / 2) / 4 / chip.link
    if op.startswith("all-reduce"):
        return chip.meeting + 2 * size * (parts - 1) / parts / links
    return chip.meeting + size * (parts - 1) / parts / links


class _Sums:
    """What is added up while a program is walked through."""

    def __init__(self, program: Program, chip: Chip, filled: float):
        self.program, self.chip, self.filled = program, chip, filled
        self.types = {name: {line.name: line for line in lines} for name, lines in program.computations.items()}
        self.parts: collections.Counter[str] = collections.Counter()
        self.places: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self.unknown = 0
        self.lengths: dict[str, float] = {}  # seconds of collectives that have started
        self.given: set[str] = set()  # updates by which those began that had been started without their numbers

    def spend(self, line: _Line, kind: str, seconds: float, times: float) -> float:
        """Counts an operation; its seconds."""
        self.parts[kind] += times * seconds
        where = "copies into fast memory" if kind == "waiting" else self.program.where(line.rest)
        name = re.search(r'op_name="([^"]*)"', line.rest)
        operation = name[1].rpartition("/")[2] if name and kind != "waiting" else line.op
        self.places[kind, where or line.name, operation] += times * seconds
        return seconds

    def kernel(self, line: _Line) -> float:
        """Seconds of a custom call: the larger of its operations and its bytes at the chip's peak rates."""
        found = re.search(r'"cost_estimate":(\{[^}]*\})', line.rest)
        if not found:
            return 0.0
        needs = json.loads(found[1])
        return self.filled * max(
            int(needs["flops"]) / self.chip.flops, int(needs["bytes_accessed"]) / self.chip.bandwidth
        )

    def collective(self, computation: str, line: _Line) -> float:
        """Seconds of a collective."""
        size = max(_largest(line.type), sum(map(_size, self.operand_types(computation, line))))
        # a sum of which each chip keeps its part is written as the whole sum and a slice, in a computation of this name
        op = "reduce-scatter" if computation.startswith("all-reduce-scatter") else line.op
        return collective_seconds(op, size, _parts(line.rest), self.chip)

    def inner_collective(self, line: _Line) -> tuple[str, _Line] | None:
        """The collective inside a fusion or an asynchronous call."""
        for name in _called(line, "calls") + _called(line, "to_apply") + _called(line, "called_computations"):
            for inner in self.program.computations.get(name, []):
                if inner.op.startswith(_COLLECTIVES):
                    return name, inner
                if found := self.inner_collective(inner):
                    return found
        return None

    def run(self, computation: str, times: float) -> float:
        """Seconds of one pass through a computation that is run so many times in all."""
        now, due = 0.0, {}
        for line in self.program.computations.get(computation, []):
            now = self.step(computation, line, times, now, due)
        return now

    def step(self, computation: str, line: _Line, times: float, now: float, due: dict[str, float]) -> float:
        """The time after one operation; ``due``: when the transfers that have started will be over."""
        if line.op == "while":
            trips = self.program.trips(line)
            self.unknown += trips is None
            return now + (trips or 1) * self.run(_called(line, "body")[0], times * (trips or 1))
        if line.op == "conditional":
            return now + self.branches(line, times)
        if line.op == "call":
            return now + sum(self.run(name, times) for name in _called(line, "to_apply"))
        if _ends(line):
            end = max((due.pop(name, now) for name in line.operands), default=now)
            collective = "collective" in line.name or line.op.startswith(_COLLECTIVES) or self.given & {*line.operands}
            kind = "exposed" if collective else "waiting"
            return now + self.spend(line, kind, max(end - now, 0.0), times)
        if line.op == "async-update":  # where a SparseCore of v7x is given what it was started for
            for name in filter(due.__contains__, line.operands):
                del due[name]
                if name in self.lengths:
                    due[line.name] = _queued(due, "links", now, self.lengths[name])
                    self.given.add(line.name)
                else:
                    due[line.name] = now + _moved(line) / self.chip.bandwidth
            return now
        cycles = re.search(r'estimated_cycles"?:\s*"?(\d+)', line.rest)
        if cycles and int(cycles[1]) and not line.name.startswith("async-collective"):
            return now + self.spend(line, "computing", int(cycles[1]) / self.chip.clock, times)
        if met := self.met(computation, line):
            seconds = self.collective(*met)
            self.parts["collectives"] += times * seconds
            if line.op.endswith("-start") or "-start" in line.name:
                way = re.search(r"source_target_pairs=(\S+)", met[1].rest)
                due[line.name] = _queued(due, way[1], now, seconds) if way else now + seconds
                self.lengths[line.name] = seconds
                return now
            return now + self.spend(line, "exposed", seconds, times)
        if line.op in ("copy-start", "slice-start", "async-start"):
            due[line.name] = max([now, *(end for name, end in due.items() if "copy" in name or "slice" in name)])
            due[line.name] += _moved(line) / self.chip.bandwidth  # one after the other: they share the memory
            return now
        if line.op == "custom-call":
            seconds = self.spend(line, "kernels", self.kernel(line), times)
            for name in due:  # a kernel is counted as if it had the memory for itself: nothing comes meanwhile
                due[name] += seconds if "copy" in name or "slice" in name else 0.0
            return now + seconds
        return now

    def operand_types(self, computation: str, line: _Line) -> list[str]:
        """Types of what an operation is given."""
        return [self.types[computation][name].type for name in line.operands if name in self.types[computation]]

    def met(self, computation: str, line: _Line) -> tuple[str, _Line] | None:
        """The collective that an operation is, starts, ends or holds: where it stands, and its line."""
        if line.op.startswith(_COLLECTIVES):
            return computation, line
        return None if line.op == "custom-call" else self.inner_collective(line)

    def branches(self, line: _Line, times: float) -> float:
        """The dearest branch."""
        names = _called(line, "true_computation") + _called(line, "false_computation")
        listed = re.search(r"branch_computations=\{([^}]*)\}", line.rest)
        names += [name.strip().lstrip("%") for name in listed[1].split(",")] if listed else []
        kept, found = (self.parts.copy(), self.places.copy()), []
        for name in names:
            self.parts, self.places = kept[0].copy(), kept[1].copy()
            found.append((self.run(name, times), self.parts, self.places))
        if not found:
            return 0.0
        seconds, self.parts, self.places = max(found, key=lambda one: one[0])
        return seconds


def of_text(text: str, chip: Chip, *, filled: float = 1.0, show: int = SHOWN) -> Schedule:
    """The schedule of ``as_text()`` of a compiled program.

    Args:
      filled: the share of what kernels declare that they do on average: of a cache that fills as it goes.
      show: how many places to name.
    """
    program = Program(text)
    sums = _Sums(program, chip, filled)
    sums.run(program.entry, 1.0)
    places = [Place(seconds, *key) for key, seconds in sums.places.most_common(show)]
    found = (float(sums.parts[name]) for name in ("computing", "kernels", "collectives", "exposed", "waiting"))
    return Schedule(*found, tuple(places), sums.unknown)
