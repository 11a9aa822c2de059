"""A request's body: read up to a size, parsed up to a depth and a count, and checked field by field."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from muster.errors import RequestError
from muster.server.refusal import RefusalError

DEEPEST = 64
"""Objects and lists inside each other."""
MOST_VALUES = 500_000
"""Values in all."""
MOST_PROBLEMS = 20
"""Problems told at once."""
_SECONDS = 30
"""That a body may take to come."""
_DIGITS = 16
_QUOTED = 100
"""Characters of a body that an error quotes."""

_Model = TypeVar("_Model", bound=BaseModel)

_UNSUPPORTED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "audio": ("this server answers with text only", ()),
    "background": ("answers are given at once", (False,)),
    "best_of": ("n answers are generated and all returned", (1,)),
    "conversation": ("this server keeps no conversations: send the earlier messages along", ()),
    "echo": ("the prompt is not returned", (False,)),
    "function_call": ("use tool_choice", ()),
    "functions": ("use tools", ()),
    "include": ("a response holds all there is", ()),
    "metadata": ("this server keeps no responses", ({},)),
    "modalities": ("this server answers with text only", (["text"],)),
    "parallel_tool_calls": ("the model decides how many calls it makes", (True,)),
    "prediction": ("predicted outputs are not supported", ()),
    "previous_response_id": ("this server keeps no responses: send the earlier messages along", ()),
    "prompt_logprobs": ("log-probabilities are those of the answer", ()),
    "reasoning": ("use /v1/chat/completions", ()),
    "reasoning_effort": ("use chat_template_kwargs, as the checkpoint's chat template has it", ()),
    "service_tier": ("all requests are served alike", ("auto", "default")),
    "store": ("this server keeps no responses", (False,)),
    "suffix": ("text is continued, not filled in", ()),
    "truncation": ("a prompt that is too long is refused", ("disabled",)),
    "use_beam_search": ("beam search is not supported", (False,)),
    "web_search_options": ("this server reads no web pages", ()),
}
"""Fields that clients know from elsewhere, what is the case here, and the values that ask for just that."""


async def read(request: Request, model: type[_Model], most_bytes: int) -> _Model:
    """The body as a `model`.

    Raises:
        RefusalError: it is no JSON, or too large.
        RequestError: every field that is wrong, unknown or not supported.
    """
    kind = request.headers.get("content-type", "")
    if kind.split(";")[0].strip().lower() != "application/json":
        raise RefusalError(
            415,
            "content_type",
            "Content-Type",
            found=repr(kind[:100]),
            expected="application/json",
            hint="with curl: -H 'Content-Type: application/json'",
        )
    value = _parse(await _bytes(request, most_bytes))
    _measure(value)
    if not isinstance(value, dict):
        raise RequestError("body", found=_kind(value), expected="a JSON object")
    value = {name: item for name, item in value.items() if name in model.model_fields or not _neutral(name, item)}
    try:
        return model.model_validate(value)
    except ValidationError as error:
        refusal = RequestError.only_or_all("request", list(_problems(error, model, value)))
        assert refusal is not None
        raise refusal from None


async def _bytes(request: Request, most: int) -> bytes:
    declared = request.headers.get("content-length", "")
    body = bytearray()
    if not (declared.isdecimal() and int(declared[:_DIGITS]) > most):
        try:
            async with asyncio.timeout(_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        break
                else:
                    return bytes(body)
        except (ClientDisconnect, TimeoutError):
            found = f"{len(body):,} bytes and no end"
            expected = f"all of it within {_SECONDS} s"
            raise RefusalError(408, "body_timeout", "body", found=found, expected=expected) from None
    raise RefusalError(
        413,
        "body_too_large",
        "body",
        found=f"more than {most:,} bytes",
        expected=f"at most {most:,}",
        hint="shorten it",
    )


def _parse(body: bytes) -> Any:
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise RequestError("body", found=str(error), expected="JSON") from None


def _measure(value: Any) -> None:
    """Refuses what is nested too deep or holds too many values."""
    count, level = 1, [value]
    for _ in range(DEEPEST + 1):
        level = [child for parent in level for child in _children(parent)]
        count += len(level)
        if count > MOST_VALUES:
            raise RequestError("body", found=f"more than {MOST_VALUES:,} values", expected="fewer")
        if not level:
            return
    raise RequestError("body", found=f"values more than {DEEPEST} levels deep", expected="fewer levels")


def _children(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _neutral(name: str, value: Any) -> bool:
    """Whether a field that is not supported asks for what is the case anyway."""
    return name in _UNSUPPORTED and (value is None or value in _UNSUPPORTED[name][1])


def _problems(error: ValidationError, model: type[BaseModel], body: Any) -> Iterator[RequestError]:
    """Each place in the body that is wrong, once, with everything that would be right there."""
    places: dict[str, list[Mapping[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        places.setdefault(_path(detail, body), []).append(detail)
    for path, details in list(places.items())[:MOST_PROBLEMS]:
        first = details[0]
        if first["type"] == "extra_forbidden":
            yield _unknown(path, str(first["loc"][-1]), model)
        elif first["type"].startswith("union_tag"):
            yield _variant(path, first)
        elif first["type"] == "missing":
            yield RequestError(path, found="nothing", expected="a value: the field is required")
        else:
            expected = dict.fromkeys(_expected(detail) for detail in details)
            yield RequestError(path, found=_found(first["input"]), expected=", or ".join(expected))
    if len(places) > MOST_PROBLEMS:
        yield RequestError(f"{len(places) - MOST_PROBLEMS} further fields", found="problems too", expected="none")


def _path(detail: Mapping[str, Any], body: Any) -> str:
    """Where in the body, as a client would write it: messages[0].content."""
    path, value = "", body
    for number, step in enumerate(detail["loc"], 1):
        absent = detail["type"] == "missing" and number == len(detail["loc"])
        if isinstance(step, int) and isinstance(value, list):
            path += f"[{step}]"
            value = value[step]
        elif isinstance(value, dict) and (step in value or absent):
            path += f".{step}" if path else str(step)
            value = value.get(step)
        # What is left are names of the types that were tried.
    return short(path) or "body"


def _unknown(path: str, name: str, model: type[BaseModel]) -> RequestError:
    if path == name and name in _UNSUPPORTED:
        hint, _ = _UNSUPPORTED[name]
        return RequestError(name, found="a field that is not supported", expected="none", hint=hint)
    near = difflib.get_close_matches(name[:64], model.model_fields, n=1) if path == name else []
    hint = f"did you mean {near[0]}?" if near else ""
    known = f"one of {', '.join(sorted(model.model_fields))}" if path == name else "a known field, or none"
    return RequestError(path, found="a field that is not known", expected=known, hint=hint)


def _variant(path: str, detail: Mapping[str, Any]) -> RequestError:
    """An object that is none of several kinds, which the value of one of its fields tells apart."""
    context = detail["ctx"]
    field = context["discriminator"].strip("'")
    expected = context.get("expected_tags", "a value: the field is required")
    found = short(repr(context["tag"])) if "tag" in context else "nothing"
    return RequestError(f"{path}.{field}", found=found, expected=expected)


def _expected(detail: Mapping[str, Any]) -> str:
    text = str(detail["msg"])
    for beginning in ("Input should be ", "Value should have ", "String should have ", "List should have "):
        text = text.removeprefix(beginning)
    return text


def _found(value: Any) -> str:
    if isinstance(value, dict | list):
        return _kind(value)
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number of more than 64 bits"
    return short(repr(value))


def short(text: str) -> str:
    """Text as an error quotes it."""
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
