"""JSON schemas that a grammar can hold an answer to; any other is refused, so that what comes out always validates.

xgrammar takes many keywords that it does not enforce, alone or beside others, without a word. What is allowed here was
tested against a validator. A grammar may be narrower than its schema (properties in their order, none that are not
declared), never wider. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from muster.engine import patterns
from muster.errors import RequestError

Schema: TypeAlias = dict[str, Any] | bool

_MOST_BYTES = 1 << 18
_MOST_NODES, _MOST_DEPTH, _MOST_CHOICES = 2000, 64, 1000
# How often properties are counted makes xgrammar's compile time grow with the cube of their number.
_MOST_COUNTED = 50
_MOST_MULTIPLE = 1024

_SILENT = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"}
_SILENT |= {"$schema", "$id", "$comment", "$defs", "definitions"}
_LEADING = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_KEYWORDS: Mapping[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}
    | {"minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": _BOUNDS,
    "integer": _BOUNDS | {"multipleOf"},
    "boolean": set(),
    "null": set(),
}
_FORMATS = ("duration", "email", "hostname", "ipv6", "uri", "uuid")
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_YEAR = r"(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = r"(0[48]|[2468][048]|[13579][26])"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    rf"|([0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
)
_MINUTES = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTES}:[0-5][0-9](\.[0-9]{{1,9}}){{0,1}}(Z|[+-]{_MINUTES})"
# xgrammar's own let the 31st of February pass, and 01 in an address.
_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
}
# What a JSON string may hold without an escape; surrogates are no text.
_CHARACTER = r"[ !#-\[\]-\ud7ff\ue000-\u{10ffff}]"


def enforceable(text: str) -> str:
    """The schema as a grammar can hold an answer to it.

    Raises:
        RequestError: every place where it cannot.
    """
    if len(text) > _MOST_BYTES:
        raise RequestError("json_schema", found=f"{len(text):,} characters", expected=f"at most {_MOST_BYTES:,}")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("json_schema", found=str(error), expected="JSON") from error
    reading = _Reading()
    rewritten = reading.node(schema, (), 0)
    refusal = RequestError.gather("json_schema", reading.problems)
    if refusal is not None:
        raise refusal
    return json.dumps(rewritten)


class _Reading:
    """One walk over a schema: rewrites each node and gathers the problems."""

    def __init__(self) -> None:
        self.problems: list[RequestError] = []
        self._nodes = 0

    def node(self, schema: Any, path: tuple[str, ...], depth: int) -> Any:
        """The node as xgrammar must see it."""
        self._nodes += 1
        if self._nodes == _MOST_NODES + 1:
            self._problem((), found=f"more than {_MOST_NODES} subschemas", expected="fewer")
        if depth > _MOST_DEPTH:
            self._problem(path, found=f"more than {_MOST_DEPTH} levels", expected="fewer")
        if self._nodes > _MOST_NODES or depth > _MOST_DEPTH or schema is True:
            return schema
        if not isinstance(schema, dict):
            self._problem(path, found=json.dumps(schema)[:40], expected="a schema that some value fulfils")
            return schema
        node = {key: value for key, value in schema.items() if not key.startswith("x-")}
        leading = [key for key in _LEADING if key in node]
        if leading:
            self._leading(node, leading, path)
        else:
            self._typed(node, path)
        return {key: self._below(key, value, path, depth + 1) for key, value in node.items()}

    def _below(self, key: str, value: Any, path: tuple[str, ...], depth: int) -> Any:
        """A keyword's value with the schemas in it rewritten."""
        here = (*path, key)
        if key == "patternProperties" and isinstance(value, dict):
            value = {patterns.rewritten(pattern): schema for pattern, schema in value.items()}
        if key in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(value, dict):
                return {name: self.node(schema, (*here, name), depth) for name, schema in value.items()}
            self._problem(here, found=json.dumps(value)[:40], expected="an object of schemas")
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if isinstance(value, list) and value:
                return [self.node(schema, (*here, str(index)), depth) for index, schema in enumerate(value)]
            self._problem(here, found=json.dumps(value)[:40], expected="a list of schemas")
        elif key in ("items", "additionalProperties", "propertyNames") and value is not False:
            return self.node(value, here, depth)
        return value

    def _leading(self, node: dict[str, Any], leading: list[str], path: tuple[str, ...]) -> None:
        """A node that is a choice or a reference, beside which xgrammar sees nothing else."""
        key = leading[0]
        beside = sorted(node.keys() - _SILENT - {key})
        if key in ("enum", "const"):
            beside = [name for name in beside if name != "type"]
            self._values(node, key, path)
        if beside:
            self._problem((*path, beside[0]), found=f"{', '.join(beside)} beside {key}", expected=f"{key} alone")
        if key == "$ref" and not str(node[key]).startswith("#"):
            self._problem((*path, key), found=str(node[key]), expected="a reference into this schema: #/...")
        if key == "allOf" and isinstance(node[key], list) and len(node[key]) > 1:
            self._problem((*path, key), found=f"{len(node[key])} schemas", expected="one: they cannot be merged")
        if key == "oneOf" and isinstance(node[key], list) and not _disjoint(node[key]):
            expected = "ones of different types, or objects that a required const tells apart; or anyOf"
            self._problem((*path, key), found="schemas that one value may fulfil together", expected=expected)

    def _values(self, node: dict[str, Any], key: str, path: tuple[str, ...]) -> None:
        values = node[key] if key == "enum" else [node[key]]
        if not isinstance(values, list) or not 1 <= len(values) <= _MOST_CHOICES:
            self._problem((*path, key), found="no list of values", expected=f"from 1 to {_MOST_CHOICES}")
            return
        types = _types(node)
        strange = [value for value in values if types and not types_of(value) & types]
        if strange:
            self._problem((*path, key), found=json.dumps(strange[0]), expected=f"values of type {', '.join(types)}")
        # xgrammar lets any value of an enum pass whatever the type beside it; both are known to agree now.
        node.pop("type", None)

    def _typed(self, node: dict[str, Any], path: tuple[str, ...]) -> None:
        """A node that says what type of value it is, or lets its keywords say it."""
        keywords = node.keys() - _SILENT - {"type"}
        types = _types(node)
        if "type" not in node and keywords:
            types = {name for name in ("object", "array", "string", "number", "integer") if keywords <= _KEYWORDS[name]}
            node["type"] = next((name for name in _KEYWORDS if name in types), "object")
            types = {node["type"]}
        wrong = types - _KEYWORDS.keys()
        if wrong or ("type" in node and not types):
            expected = f"one or several of {', '.join(_KEYWORDS)}"
            self._problem((*path, "type"), found=json.dumps(node["type"])[:40], expected=expected)
            return
        known = {name for kind in types for name in _KEYWORDS[kind]}
        if node.get("uniqueItems") is False:
            keywords -= {"uniqueItems"}
        for name in sorted(keywords - known):
            self._problem((*path, name), found=f"{name} of {', '.join(sorted(types))}", expected=_known(types))
        for problem in (*_string(node, types), *_number(node, types), *_object(node, types)):
            self._problem((*path, problem[0]), found=problem[1], expected=problem[2])
        if "array" in types and "prefixItems" not in node:
            node.setdefault("items", {})

    def _problem(self, path: tuple[str, ...], *, found: str, expected: str) -> None:
        self.problems.append(RequestError(".".join(path) or "schema", found=found, expected=expected))


_Problem: TypeAlias = tuple[str, str, str]


def _string(node: dict[str, Any], types: set[str]) -> Iterator[_Problem]:
    """Problems of a string; lengths become a pattern, because xgrammar lets control characters into counted strings."""
    if "string" not in types:
        return
    lengths: list[str] = [name for name in ("minLength", "maxLength") if name in node]
    others: list[str] = [name for name in ("pattern", "format") if name in node]
    if len(others) + bool(lengths) > 1:
        yield (others + lengths)[-1], " beside ".join(others + lengths), "one of them"
        return
    bad = [name for name in lengths if not _count(node[name])]
    if bad:
        yield bad[0], json.dumps(node[bad[0]])[:40], "a whole number of at least 0"
    elif lengths:
        least, most = node.pop("minLength", 0), node.pop("maxLength", "")
        node["pattern"] = f"^{_CHARACTER}{{{least},{most}}}$"
    elif "pattern" in node:
        yield from _pattern("pattern", node["pattern"])
        node["pattern"] = patterns.rewritten(str(node["pattern"]))
    elif "format" in node and node["format"] not in (*_FORMATS, *_PATTERNS):
        yield "format", json.dumps(node["format"])[:40], f"one of {', '.join(sorted((*_FORMATS, *_PATTERNS)))}"
    elif node.get("format") in _PATTERNS:
        node["pattern"] = _PATTERNS[node.pop("format")]


def _pattern(name: str, pattern: Any) -> Iterator[_Problem]:
    if isinstance(pattern, str):
        yield from ((name, found, expected) for found, expected in patterns.problems(pattern))
    else:
        yield name, json.dumps(pattern)[:40], "a regular expression"


def _number(node: dict[str, Any], types: set[str]) -> Iterator[_Problem]:
    multiple = node.get("multipleOf", 1)
    if "integer" in types and not (_count(multiple) and 1 <= multiple <= _MOST_MULTIPLE):
        yield "multipleOf", json.dumps(multiple)[:40], f"a whole number from 1 to {_MOST_MULTIPLE}"
    if "number" in types and "multipleOf" in node:
        yield "multipleOf", "multipleOf of number", "type integer beside it"


def _object(node: dict[str, Any], types: set[str]) -> Iterator[_Problem]:
    """Problems of an object: rules about names hold for declared names or for free ones, not for both."""
    if "object" not in types:
        return
    properties, required = node.get("properties", {}), node.get("required", [])
    named, names = node.get("patternProperties", {}), node.get("propertyNames")
    if not isinstance(properties, dict) or not isinstance(named, dict):
        return
    if not isinstance(required, list) or len({str(name) for name in required}) != len(required):
        yield "required", json.dumps(required)[:40], "a list of different names"
    elif not {str(name) for name in required} <= properties.keys():
        missing = next(name for name in required if name not in properties)
        yield "required", json.dumps(missing), "names that properties declares"
    if named and (properties or names is not None or len(named) > 1 or node.get("additionalProperties", False)):
        yield "patternProperties", "it beside other properties", "one pattern, alone"
    for pattern in named:
        yield from _pattern("patternProperties", pattern)
    if names is not None and properties:
        yield "propertyNames", "it beside properties", "one of them"
    yield from _counts(node, bool(named) or names is not None or not properties, len(properties))


def _counts(node: dict[str, Any], free: bool, declared: int) -> Iterator[_Problem]:
    free = free or bool(node.get("additionalProperties", False))
    least, most = node.get("minProperties", 0), node.get("maxProperties", 0)
    if not (_count(least) and _count(most)):
        yield "minProperties", json.dumps([least, most])[:40], "whole numbers of at least 0"
    elif free and least > 1:
        # A name may come twice, which counts once.
        yield "minProperties", f"{least} of free names", "at most 1, or properties that are declared"
    elif declared > _MOST_COUNTED and ("minProperties" in node or "maxProperties" in node):
        yield "maxProperties", f"a count of {declared} properties", f"at most {_MOST_COUNTED} properties"


def _disjoint(branches: list[Any]) -> bool:
    """Whether no value can fulfil two of these schemas, as far as types and required constants show it."""
    return not any(_overlap(one, other) for index, one in enumerate(branches) for other in branches[index + 1 :])


def _overlap(one: Any, other: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return True
    mine, theirs = _kinds(one), _kinds(other)
    if not mine or not theirs:
        return True
    if mine & theirs - {"object"}:
        return not _apart(one, other)
    if "object" not in mine & theirs:
        return False
    shared = set(one.get("required", [])) & set(other.get("required", []))
    pairs = ((one.get("properties", {}).get(name), other.get("properties", {}).get(name)) for name in shared)
    return not any(isinstance(a, dict) and isinstance(b, dict) and _apart(a, b) for a, b in pairs)


def _apart(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both are lists of values with none in common."""
    mine, theirs = _choices(one), _choices(other)
    return bool(mine and theirs) and not mine & theirs


def _choices(node: dict[str, Any]) -> set[str]:
    values = [node["const"]] if "const" in node else node.get("enum", [])
    return {json.dumps(value, sort_keys=True) for value in values}


def _kinds(node: dict[str, Any]) -> set[str]:
    """Types of a branch, integers as numbers."""
    types = _types(node) or {kind for choice in _choices(node) for kind in types_of(json.loads(choice))}
    return {"number" if name == "integer" else name for name in types}


def _types(node: Mapping[str, Any]) -> set[str]:
    declared = node.get("type", [])
    names = declared if isinstance(declared, list) else [declared]
    return {name if isinstance(name, str) else json.dumps(name) for name in names}


def types_of(value: object) -> set[str]:
    """The names that a schema may use for the type of a JSON value."""
    if isinstance(value, bool):
        return {"boolean"}
    names = {str: {"string"}, int: {"integer", "number"}, float: {"number"}, list: {"array"}, dict: {"object"}}
    return names.get(type(value), {"null"})


def _known(types: set[str]) -> str:
    names = sorted({name for kind in types if kind in _KEYWORDS for name in _KEYWORDS[kind]})
    return f"only what a grammar enforces: {', '.join(names) or 'nothing'}"


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
