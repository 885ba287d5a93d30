"""Tools as chat templates and APIs declare them: a name, what it is for, and a JSON schema of its arguments."""

import json
import operator
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError

KINDS = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
    "null": type(None),
}  # fmt: skip
BEYOND = {
    "maximum": operator.gt, "minimum": operator.lt, "exclusiveMaximum": operator.ge, "exclusiveMinimum": operator.le,
}  # fmt: skip
CHECKS = 10_000  # of parts of one value against parts of a schema, after which the value is refused
DEEPEST = 64


class Tool(NamedTuple):
    """What a policy is told of a tool; ``parameters`` is the JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]


def tool(name: str, description: str, parameters: Mapping[str, Any] | None = None) -> Tool:
    """A checked ``Tool``; without ``parameters`` one that takes none.

    Raises:
      UserError: for a name or a schema that templates and APIs do not take.
    """
    schema = dict(parameters) if parameters else {"type": "object", "properties": {}}
    if not re.fullmatch(r"[\w.\-]{1,128}", name):
        raise UserError(f"tool name {name!r}: use letters, digits, _, . and -, at most 128")
    if schema.get("type") != "object":
        raise UserError(f"tool {name}: parameters have type {schema.get('type')!r}; give the schema of an object")
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"tool {name}: parameters are no JSON: {error}") from error
    return Tool(name, description, schema)


def declared(item: Tool) -> dict[str, Any]:
    """The form of OpenAI's ``tools=`` and of Hugging Face chat templates.

    >>> declared(tool("now", "The time."))["function"]["name"]
    'now'
    """
    function = {"name": item.name, "description": item.description, "parameters": item.parameters}
    return {"type": "function", "function": function}


def from_declaration(declaration: Mapping[str, Any]) -> Tool:
    """The tool of ``{"type": "function", "function": {...}}``, or of the inner part alone.

    Raises:
      UserError: when it has no name or another type.
    """
    kind, inner = declaration.get("type", "function"), declaration.get("function", declaration)
    if kind != "function" or not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise UserError(f"no declaration of a function: {shortened(declaration)}")
    return tool(inner["name"], str(inner.get("description") or ""), inner.get("parameters"))


def shortened(value: Any, limit: int = 80) -> str:
    """A value in one line of bounded length, for messages."""
    text = " ".join(str(value).split()) if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, 1 and true are not.

    >>> same({"a": [1]}, {"a": [1.0]}), same([1], [True])
    (True, False)
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def deep(value: Any, left: int = DEEPEST) -> bool:
    """Whether a JSON value is nested deeper than ``left``, which no tool needs and recursion may not survive.

    >>> deep([[1]]), deep([[1]], 1)
    (False, True)
    """
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left < 0 or any(deep(part, left - 1) for part in parts)


def problem(value: Any, schema: Any, *, at: str = "arguments") -> str:
    """What is wrong with a JSON value by a schema, in one line with the place; empty where nothing is.

    Checked are types, properties, items, enumerations, bounds of numbers, lengths, combinations and references within
    the schema. Whatever else it says (``pattern``, ``format``, ...) is not: a pattern may need unbounded time. So where
    ``patternProperties`` allow further names, any are allowed. Nor is a keyword of another type than it has
    (``"maximum": "10"``): it says nothing of any value.

    >>> schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    >>> problem({"n": "3"}, schema)
    "arguments.n: '3' is no integer"
    >>> problem({}, schema)
    'arguments: n is missing'
    """
    return _problem(value, schema, at, schema, [CHECKS], DEEPEST)


def _problem(value: Any, schema: Any, at: str, root: Any, left: list[int], depth: int) -> str:
    left[0] -= 1
    if left[0] < 0 or depth < 0:
        return f"{at}: too large or too deeply nested"
    if isinstance(schema, bool) or not isinstance(schema, Mapping):
        return f"{at}: nothing is allowed here" if schema is False else ""

    within = partial(_problem, root=root, left=left, depth=depth - 1)
    found = _own(value, schema, at)
    if found:
        return found
    if "$ref" in schema:
        found = within(value, _referred(root, str(schema["$ref"])), at)
    for inner in _told(schema, "allOf", list) or ():
        found = found or within(value, inner, at)
    if not found and (forms := _told(schema, "anyOf", list)) is not None:
        every = [within(value, inner, at) for inner in forms]
        found = "" if "" in every else f"{at}: {shortened(value)} fits no alternative: {'; '.join(every)[:200]}"
    if not found and (forms := _told(schema, "oneOf", list)) is not None:
        fits = sum(not within(value, inner, at) for inner in forms)
        found = "" if fits == 1 else f"{at}: {shortened(value)} fits {fits} alternatives instead of one"
    if found:
        return found
    return _parts(value, schema, at, within)


def _referred(root: Any, pointer: str) -> Any:
    """The part of the schema that ``#/$defs/Name`` names; True, which allows all, where there is none."""
    part = root
    for key in pointer.removeprefix("#").strip("/").split("/") if pointer.strip("#/") else ():
        key = key.replace("~1", "/").replace("~0", "~")
        part = part.get(key, True) if isinstance(part, Mapping) else True
    return part if pointer.startswith("#") else True


def _is(value: Any, kind: str) -> bool:
    if kind not in KINDS:
        return True
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, KINDS[kind])


def _told(schema: Mapping[str, Any], key: str, kind: type | tuple[type, ...]) -> Any:
    """What a schema says under a keyword; None where it says nothing of the type that the keyword has."""
    told = schema.get(key)
    return told if isinstance(told, kind) and not isinstance(told, bool) else None


def _own(value: Any, schema: Mapping[str, Any], at: str) -> str:
    """What a schema says of the value itself."""
    kinds = _told(schema, "type", (str, list)) or []
    kinds = [kinds] if isinstance(kinds, str) else [kind for kind in kinds if isinstance(kind, str)]
    if kinds and not any(_is(value, k) for k in kinds):
        return f"{at}: {shortened(repr(value))} is no {' or '.join(kinds)}"
    choices = _told(schema, "enum", list)
    if choices is not None and not any(same(value, x) for x in choices):
        return f"{at}: {shortened(repr(value))} is none of {shortened(choices, 200)}"
    if "const" in schema and not same(value, schema["const"]):
        return f"{at}: {shortened(repr(value))} is not {shortened(repr(schema['const']))}"
    sizes = {"maxLength": str, "minLength": str, "maxItems": list, "minItems": list}
    for key, kind in sizes.items():
        bound = _told(schema, key, (int, float))
        if bound is not None and isinstance(value, kind):
            over = len(value) > bound if key.startswith("max") else len(value) < bound
            if over:
                return f"{at}: length {len(value)} is {'above' if key.startswith('max') else 'below'} {bound}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        for key, beyond in BEYOND.items():
            bound = _told(schema, key, (int, float))
            if bound is not None and beyond(value, bound):
                return f"{at}: {shortened(repr(value))} is beyond {key} {bound}"
    return ""


def _parts(value: Any, schema: Mapping[str, Any], at: str, within: Callable[..., str]) -> str:
    """What a schema says of the parts of an object or array."""
    if isinstance(value, dict):
        needed = _told(schema, "required", list) or ()
        missing = [k for k in needed if isinstance(k, str) and k not in value]
        if missing:
            return f"{at}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        known, rest = _told(schema, "properties", dict) or {}, schema.get("additionalProperties", True)
        rest = True if _told(schema, "patternProperties", dict) else rest
        for key, part in value.items():
            place = f"{at}.{shortened(key, 40)}"
            if key not in known and rest is False:
                return f"{place}: unknown; there {'is' if len(known) == 1 else 'are'} {', '.join(known) or 'none'}"
            found = within(part, known.get(key, rest), place)
            if found:
                return found
    if isinstance(value, list):
        first = _told(schema, "prefixItems", list) or []
        for k, part in enumerate(value if "items" in schema else value[: len(first)]):
            found = within(part, first[k] if k < len(first) else schema["items"], f"{at}[{k}]")
            if found:
                return found
    return ""
