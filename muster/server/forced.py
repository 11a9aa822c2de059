"""Answers that must be tool calls: the JSON schema that forces them, and the parser of what it forces.

The same for every model: the schema goes through the grammar, so nothing depends on how a family writes its calls.
"""

from __future__ import annotations

import json
import re
from typing import Any

from muster.server.calls import Functions, read_array
from muster.server.events import Content, Event
from muster.server.tools import CallWriter

_PLAIN = re.compile(r"[\w-]+")


def calls_schema(functions: Functions, *, parallel: bool) -> str:
    """JSON schema of an array of calls of these functions, of exactly one call unless `parallel`."""
    definitions = {
        name if _PLAIN.fullmatch(name) else f"function{index}": schema or {"type": "object"}
        for index, (name, schema) in enumerate(functions.items())
    }
    choices = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{key}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, key in zip(functions, definitions, strict=True)
    ]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": choices}, "minItems": 1}
    if not parallel:
        schema["maxItems"] = 1
    schema["$defs"] = {key: _moved(parameters, f"#/$defs/{key}") for key, parameters in definitions.items()}
    return json.dumps(schema)


class ForcedCallParser:
    """An answer that is nothing but an array of calls. See `Parser`."""

    def __init__(self, writer: CallWriter) -> None:
        self._writer = writer
        self._pieces: list[str] = []

    def feed(self, text: str) -> tuple[Event, ...]:
        """Takes the next piece of text; no event is certain before the end."""
        self._pieces.append(text)
        return ()

    def finish(self) -> tuple[Event, ...]:
        """The calls, or the text if it is cut short."""
        text = "".join(self._pieces)
        try:
            calls = read_array(text)
        except ValueError:
            return (Content(text),)
        return tuple(self._writer.events(calls))


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to its own root lead to where it stands now."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    target = moved.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = root + target[1:]
    return moved
