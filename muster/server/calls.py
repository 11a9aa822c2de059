"""How each model family writes a tool call: from the text between the tags to names and arguments.

Every reader raises ValueError for a text that is not a call of its form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from muster.engine.schema import types_of
from muster.server import jsontext

Functions: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The functions a request offers: the JSON schema of the parameters of each, by name."""


@dataclass(frozen=True)
class Call:
    """One call: `arguments` is the text of a JSON object, `id` the model's own name for the call if it gave one."""

    name: str
    arguments: str
    id: str | None = None


Reader: TypeAlias = Callable[[str, Functions], tuple[Call, ...]]

_NAME = re.compile(r"[^\s<>\[\]{}\"'`]+")
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def read_qwen(body: str, functions: Functions) -> tuple[Call, ...]:
    """`{"name": ..., "arguments": {...}}`, or as Qwen3-Coder: `<function=NAME>`, then `<parameter=KEY>` elements."""
    if not body.lstrip().startswith("<function="):
        return (_from_object(body),)
    found = []
    for function, inside in _elements(body, r"<function=([^>\n]+)>", "</function>"):
        values = dict[str, str]()
        for parameter, text in _elements(inside, r"<parameter=([^>\n]+)>", "</parameter>"):
            text = text.removeprefix("\n").removesuffix("\n")
            _add(values, parameter[1], _typed(text, function[1], parameter[1], functions))
        found.append(Call(_checked(function[1]), _object(values)))
    return _some(found)


def read_glm(body: str, functions: Functions) -> tuple[Call, ...]:
    """`NAME`, then `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` in turn."""
    head, tag, rest = body.partition("<arg_key>")
    name, values = head.strip(), dict[str, str]()
    for pair, text in _elements(tag + rest, r"<arg_key>([^<]+)</arg_key>\s*<arg_value>", "</arg_value>"):
        key = pair[1].strip()
        _add(values, key, _typed(text, name, key, functions))
    return (Call(_checked(name), _object(values)),)


def read_deepseek(body: str, _functions: Functions) -> tuple[Call, ...]:
    """Calls of V3.1, `NAME<｜tool▁sep｜>{...}`, or of V3 and R1, `function<｜tool▁sep｜>NAME` and a JSON code block."""
    found = []
    for _, text in _elements(body, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"):
        name, separator, arguments = text.partition("<｜tool▁sep｜>")
        if not separator:
            raise ValueError("no <｜tool▁sep｜>")
        block = re.fullmatch(r"\s*([^\n]+)\n```json\n(.*)\n```\s*", arguments, re.DOTALL)
        if block is not None:
            name, arguments = block[1], block[2]
        found.append(Call(_checked(name.strip()), _checked_object(arguments)))
    return _some(found)


def read_dsml(body: str, _functions: Functions) -> tuple[Call, ...]:
    """DeepSeek V3.2 and later: `<｜DSML｜invoke name="NAME">` and `<｜DSML｜parameter name="KEY" string="true">`."""
    found = []
    parameter = r'<｜DSML｜parameter name="([^"\n]+)" string="(true|false)">'
    for invoke, inside in _elements(body, r'<｜DSML｜invoke name="([^"\n]+)">', "</｜DSML｜invoke>"):
        values = dict[str, str]()
        for head, text in _elements(inside, parameter, "</｜DSML｜parameter>"):
            _add(values, head[1], _quoted(text) if head[2] == "true" else _checked_value(text))
        found.append(Call(_checked(invoke[1]), _object(values)))
    return _some(found)


def read_mistral(body: str, _functions: Functions) -> tuple[Call, ...]:
    """An array of `{"name": ..., "arguments": {...}}`, or since v11 `NAME[CALL_ID]ID[ARGS]{...}`."""
    if body.lstrip().startswith("["):
        return read_array(body)
    match = re.fullmatch(r"\s*([^\s\[{]+)(?:\[CALL_ID\]([^\s\[{]+))?(?:\[ARGS\])?(.*)", body, re.DOTALL)
    if match is None:
        raise ValueError("no name")
    return (Call(_checked(match[1]), _checked_object(match[3]), match[2]),)


def read_array(body: str) -> tuple[Call, ...]:
    """An array of `{"name": ..., "arguments": {...}}`."""
    return _some([_from_object(item) for item in jsontext.items(body)])


def checked_call(name: str, arguments: str) -> Call:
    """A call of a name and the text of a JSON object."""
    return Call(_checked(name), _checked_object(arguments))


def _from_object(text: str) -> Call:
    found = jsontext.members(text)
    if not {"name"} <= found.keys() <= {"name", "arguments", "id"}:
        raise ValueError(f"members {sorted(found)}")
    name, own_id = jsontext.value(found["name"]), jsontext.value(found.get("id", "null"))
    if not isinstance(name, str) or not isinstance(own_id, str | None):
        raise ValueError("the name or the id is no string")
    return Call(_checked(name), _checked_object(found.get("arguments", "{}")), own_id)


def _elements(text: str, opening: str, closing: str) -> Iterator[tuple[re.Match[str], str]]:
    """The elements that the text is made of: how `opening`, a pattern, matched, and what stands before `closing`."""
    pattern, at = re.compile(rf"\s*{opening}"), 0
    while (head := pattern.match(text, at)) is not None:
        end = text.find(closing, head.end())
        if end < 0:
            raise ValueError(f"no {closing} after {at}")
        yield head, text[head.end() : end]
        at = end + len(closing)
    if text[at:].strip():
        raise ValueError(f"no {opening} at {at}")


def _typed(text: str, function: str, key: str, functions: Functions) -> str:
    """A value that was written without quotes, as JSON: what the function's schema says decides, then how it reads."""
    properties = functions.get(function, {}).get("properties")
    types = _types(properties.get(key)) if isinstance(properties, Mapping) else frozenset()
    if types != {"string"}:
        try:
            written = _checked_value(_PYTHON.get(text.strip(), text))
        except ValueError:
            pass
        else:
            if "string" not in types or types_of(jsontext.value(written)) & types:
                return written
    return _quoted(text)


def _types(schema: object) -> frozenset[str]:
    """The JSON types that a parameter may have; none if its schema does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    found = set[str]()
    for part in (schema, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        if not isinstance(part, Mapping):
            continue
        declared = part.get("type", ())
        found |= {declared} if isinstance(declared, str) else set(declared)
        for choice in (*part.get("enum", ()), *([part["const"]] if "const" in part else ())):
            found |= types_of(choice)
    return frozenset(found)


def _checked(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no function name")
    return name


def _checked_value(text: str) -> str:
    jsontext.value(text)
    return text.strip()


def _checked_object(text: str) -> str:
    jsontext.members(text)
    return text.strip()


def _add(values: dict[str, str], key: str, written: str) -> None:
    if key in values:
        raise ValueError(f"{key!r} twice")
    values[key] = written


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _object(values: Mapping[str, str]) -> str:
    pairs = (f"{_quoted(key)}: {written}" for key, written in values.items())
    return "{" + ", ".join(pairs) + "}"


def _some(found: list[Call]) -> tuple[Call, ...]:
    if not found:
        raise ValueError("no call")
    return tuple(found)
