"""Which JSON schemas are held to, and how the others are refused."""

import json

import pytest

from muster.engine.schema import enforceable
from muster.errors import RequestError

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def deep(levels):
    schema = INTEGER
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED = {
    "uniqueItems": {"type": "array", "items": INTEGER, "uniqueItems": True},
    "contains": {"type": "array", "contains": INTEGER},
    "not": {"not": STRING},
    "if": {"type": "integer", "if": {"minimum": 5}, "then": {"maximum": 9}},
    "dependentRequired": {"type": "object", "properties": {"a": INTEGER}, "dependentRequired": {"a": ["b"]}},
    "oneOf": {"oneOf": [INTEGER, {"type": "number"}]},
    "allOf": {"allOf": [INTEGER, {"minimum": 5}]},
    "type": {"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 2}]},
    "minimum": {"$defs": {"x": INTEGER}, "$ref": "#/$defs/x", "minimum": 5},
    "$ref": {"$ref": "https://example.com/schema.json"},
    "format": {"type": "string", "format": "regex"},
    "maxLength": {"type": "string", "pattern": "^a+$", "maxLength": 3},
    "minLength": {"type": "string", "minLength": -1},
    "pattern": {"type": "string", "pattern": '^"$'},
    "enum": {"type": "string", "enum": ["a", 1]},
    "multipleOf": {"type": "integer", "multipleOf": 1_000_003},
    "required": {"type": "object", "properties": {"a": INTEGER}, "required": ["a", "b"]},
    "minProperties": {"type": "object", "additionalProperties": INTEGER, "minProperties": 2},
    "patternProperties": {"type": "object", "patternProperties": {"^a$": INTEGER, "^a|b$": STRING}},
    "propertyNames": {"type": "object", "properties": {"abc": INTEGER}, "propertyNames": {"maxLength": 2}},
    "items": {"type": "array", "items": [INTEGER, STRING]},
    "nullable": {"type": "integer", "nullable": True},
    "frobnicate": {"type": "integer", "frobnicate": 1},
    "schema": False,
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_a_grammar_cannot_hold_an_answer_to_is_refused_by_its_name(keyword):
    with pytest.raises(RequestError) as caught:
        enforceable(json.dumps(REFUSED[keyword]))
    assert keyword in [reason.thing for reason in caught.value.reasons]
    assert all(reason.expected for reason in caught.value.reasons)


def test_every_problem_is_reported_at_once_with_its_path():
    schema = {
        "type": "object",
        "properties": {
            "one": {"type": "array", "items": {"type": "string", "format": "nonsense"}},
            "two": {"anyOf": [INTEGER, {"type": "thing"}]},
        },
        "required": ["three"],
    }
    with pytest.raises(RequestError) as caught:
        enforceable(json.dumps(schema))
    assert {reason.thing for reason in caught.value.reasons} == {
        "properties.one.items.format",
        "properties.two.anyOf.1.type",
        "required",
    }


@pytest.mark.parametrize("text", ["", "{", "NaN nonsense", "[" * 100_000])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(RequestError):
        enforceable(text)


@pytest.mark.parametrize(
    "schema",
    [
        deep(200),
        {"anyOf": [INTEGER] * 3000},
        {"enum": list(range(5000))},
        {"type": "object", "properties": {f"p{i}": INTEGER for i in range(200)}, "maxProperties": 100},
        {"const": "x" * 300_000},
    ],
    ids=["deep", "many", "choices", "counted", "long"],
)
def test_what_would_take_a_compiler_minutes_is_refused(schema):
    with pytest.raises(RequestError):
        enforceable(json.dumps(schema))


@pytest.mark.parametrize("schema", [[], 3, "string", None, {"type": 3}, {"type": []}, {"anyOf": []}, {"properties": 3}])
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(RequestError):
        enforceable(json.dumps(schema))


WRONG = ("\\\\", r"\n", r"\x22", r"\u005c", r"\u{22}", "\t", "(?=a)b", "(?!a)b", "(?<=a)b", "a$b", "(^a|b)c")
WRONG += ("é.", "é[^a]", "[!-é]", r"\u4e00\s", "(a+b){1,2}", r"\bfoo", r"(a)\1", '"')
RIGHT = ("^[ -~]+$", '^["b]$', r"^[^a\\]$", r"^(?:a|(?<x>b))\.\d\w\s$", r"[a-é\u4e00-\u9fa5]", "^a|b$", "^(ab+)?$")


@pytest.mark.parametrize("pattern", WRONG)
def test_a_pattern_that_xgrammar_gets_wrong_is_refused(pattern):
    with pytest.raises(RequestError) as caught:
        enforceable(json.dumps({"type": "string", "pattern": pattern}))
    assert [reason.thing for reason in caught.value.reasons] == ["pattern"]


@pytest.mark.parametrize("pattern", RIGHT)
def test_a_pattern_that_xgrammar_gets_right_is_taken(pattern):
    enforceable(json.dumps({"type": "string", "pattern": pattern}))


def test_alternatives_that_types_or_constants_tell_apart_are_taken():
    def tagged(name):
        return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}

    enforceable(json.dumps({"oneOf": [tagged("a"), tagged("b"), STRING, {"type": ["integer", "null"]}]}))
    for overlapping in ([tagged("a"), tagged("a")], [tagged("a"), {"type": "object"}], [STRING, {"enum": ["a", 1]}]):
        with pytest.raises(RequestError, match="oneOf"):
            enforceable(json.dumps({"oneOf": overlapping}))


def test_annotations_are_no_problem_and_keywords_say_the_type_where_it_is_missing():
    schema = {"title": "T", "x-order": 1, "properties": {"a": {"minimum": 3}}, "default": {}, "description": "d"}
    found = json.loads(enforceable(json.dumps(schema)))
    assert found["type"] == "object"
    assert found["properties"]["a"]["type"] == "number"


def test_a_property_may_have_the_name_of_a_keyword():
    names = ("type", "enum", "not", "$ref", "x-y", "if")
    schema = {"type": "object", "properties": dict.fromkeys(names, INTEGER), "required": list(names)}
    assert json.loads(enforceable(json.dumps(schema))) == schema
