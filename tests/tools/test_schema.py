"""Declarations of tools and what their schemas say of arguments."""

import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.tools import schema

BOOK = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 10},
        "nights": {"type": "integer", "minimum": 1, "maximum": 30},
        "rate": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "kind": {"enum": ["single", "double"]},
        "guests": {"type": "array", "items": {"$ref": "#/$defs/Guest"}, "minItems": 1, "maxItems": 2},
        "code": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "pay": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 10}]},
        "fixed": {"const": 1},
        "both": {"allOf": [{"type": "integer"}, {"minimum": 3}]},
        "either": {"type": ["string", "boolean"]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {
        "Guest": {"type": "object", "properties": {"friend": {"$ref": "#/$defs/Guest"}}, "required": ["name"]},
    },
}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"city": "Bonn"}, ""),
        ({"city": "Bonn", "nights": 2.0, "rate": 0.5, "kind": "single", "code": None, "pay": 3, "fixed": 1.0}, ""),
        ({"city": "Bonn", "guests": [{"name": "A", "friend": {"name": "B"}}], "both": 3, "either": True}, ""),
        ([], "arguments: [] is no object"),
        ({}, "arguments: city is missing"),
        ({"city": 3}, "arguments.city: 3 is no string"),
        ({"city": "B"}, "arguments.city: length 1 is below 2"),
        ({"city": "B" * 11}, "arguments.city: length 11 is above 10"),
        ({"city": "Bonn", "nights": True}, "arguments.nights: True is no integer"),
        ({"city": "Bonn", "nights": 1.5}, "arguments.nights: 1.5 is no integer"),
        ({"city": "Bonn", "nights": 0}, "arguments.nights: 0 is beyond minimum 1"),
        ({"city": "Bonn", "nights": 31}, "arguments.nights: 31 is beyond maximum 30"),
        ({"city": "Bonn", "rate": 1}, "arguments.rate: 1 is beyond exclusiveMaximum 1"),
        ({"city": "Bonn", "kind": "suite"}, "arguments.kind: 'suite' is none of ['single', 'double']"),
        ({"city": "Bonn", "guests": []}, "arguments.guests: length 0 is below 1"),
        ({"city": "Bonn", "guests": [{}]}, "arguments.guests[0]: name is missing"),
        (
            {"city": "Bonn", "guests": [{"name": "A", "friend": {}}]},
            "arguments.guests[0].friend: name is missing",
        ),
        ({"city": "Bonn", "pay": 12}, "arguments.pay: 12 fits 2 alternatives instead of one"),
        ({"city": "Bonn", "fixed": True}, "arguments.fixed: True is not 1"),
        ({"city": "Bonn", "both": 2}, "arguments.both: 2 is beyond minimum 3"),
        ({"city": "Bonn", "either": 1}, "arguments.either: 1 is no string or boolean"),
    ],
)
def test_problems_name_the_place(value, found):
    assert schema.problem(value, BOOK) == found


@pytest.mark.parametrize(
    "told",
    [
        {"type": None}, {"type": 3}, {"type": [None, {}]}, {"enum": None}, {"enum": "5"}, {"maximum": "10"},
        {"exclusiveMinimum": None}, {"maxLength": "0"}, {"minItems": None}, {"required": True}, {"required": [1]},
        {"properties": None}, {"properties": ["b"]}, {"additionalProperties": None}, {"items": None}, {"allOf": None},
        {"anyOf": None}, {"oneOf": 1}, {"$ref": None}, {"prefixItems": {}}, {"patternProperties": []},
    ],
)  # fmt: skip
def test_keywords_of_another_type_say_nothing(told):
    for value in (5, "x", [1], {"b": 1}, None):
        assert schema.problem({"a": value}, {"type": "object", "properties": {"a": told}}) == ""


PAIR = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}


@pytest.mark.parametrize(
    ("value", "told", "found"),
    [
        ([1, "a"], PAIR | {"items": False}, ""),
        ([1], PAIR | {"items": False}, ""),
        (["a", 1], PAIR, "arguments[0]: 'a' is no integer"),
        ([1, "a", 2.5], PAIR, ""),
        ([1, "a"] + [2.5] * schema.CHECKS, PAIR, ""),
        ([1, "a", 2.5], PAIR | {"items": False}, "arguments[2]: nothing is allowed here"),
        ([1, "a", 2.5], PAIR | {"items": {"type": "integer"}}, "arguments[2]: 2.5 is no integer"),
        ({"x_1": 3}, {"patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False}, ""),
        ({"y": 3}, {"patternProperties": {}, "additionalProperties": False}, "arguments.y: unknown; there are none"),
    ],
)
def test_items_by_place_and_names_by_pattern(value, told, found):
    assert schema.problem(value, told) == found


def test_further_problems():
    assert "fits no alternative" in schema.problem({"city": "Bonn", "code": 3}, BOOK)
    assert schema.problem({"city": "Bonn", "hotel": 1}, BOOK).startswith(
        "arguments.hotel: unknown; there are city, nights"
    )
    assert len(schema.problem({"city": "Bonn", "kind": "x" * 5000}, BOOK)) < 200


def test_any_schema_ends():
    endless = {"$ref": "#"}
    assert "too deeply" in schema.problem(1, endless)
    twice = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "array", "items": {"$ref": "#"}}]}
    deep: list = [1]
    for _ in range(30):
        deep = [deep]
    assert schema.problem(deep, twice)
    assert schema.problem({"x": 1}, {"$ref": "#/nowhere"}) == "" and schema.problem(1, {"type": "colour"}) == ""
    assert schema.problem(1, False) == "arguments: nothing is allowed here" and schema.problem(1, True) == ""


def test_declarations_go_there_and_back():
    item = schema.tool("book", "Books a room.", BOOK)
    assert schema.from_declaration(schema.declared(item)) == item
    assert schema.from_declaration(schema.declared(item)["function"]) == item
    assert schema.tool("now", "").parameters == {"type": "object", "properties": {}}
    for wrong, message in (
        ({"type": "web_search"}, "no declaration of a function"),
        ({"function": {}}, "no declaration of a function"),
        ({"name": "a b"}, "tool name 'a b'"),
        ({"name": "f", "parameters": {"type": "array"}}, "give the schema of an object"),
        ({"name": "f", "parameters": {"type": "object", "default": {1, 2}}}, "parameters are no JSON"),
    ):
        with pytest.raises(UserError, match=message):
            schema.from_declaration(wrong)
