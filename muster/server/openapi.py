"""The OpenAPI document: the bodies that are read, the answers that are given, and every refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from muster.server.openai_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponseRequest,
    TokenizeRequest,
)

_BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_REFUSALS = {
    "400": "a body that cannot be served, and everything that is wrong with it",
    "401": "no API key, or a wrong one",
    "404": "another model, or no such path",
    "405": "a method that the path does not have",
    "408": "a body that does not come to its end",
    "413": "a body that is too large",
    "415": "a body that is no JSON",
    "421": "a Host that is not this machine",
    "429": "the queue is full",
    "500": "the engine or the server failed",
    "503": "not ready, or shutting down",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code", "reasons"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "reasons": {"type": "array", "items": {"type": "object"}},
            },
        }
    },
}


def _list_of(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": dict(items)}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": sorted(properties), "properties": properties}


_TEXT, _NUMBER, _WHOLE = {"type": "string"}, {"type": "number"}, {"type": "integer"}
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": _TEXT, "event": _TEXT}}
_USAGE = _object(prompt_tokens=_WHOLE, completion_tokens=_WHOLE, total_tokens=_WHOLE)
_MODEL = _object(id=_TEXT, object={"const": "model"}, created=_WHOLE, owned_by=_TEXT)
_ANSWERS: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": _object(
        id=_TEXT,
        object={"const": "chat.completion"},
        created=_WHOLE,
        model=_TEXT,
        choices=_list_of(_object(index=_WHOLE, message=_object(role=_TEXT), finish_reason=_TEXT)),
        usage=_USAGE,
    ),
    "/v1/completions": _object(
        id=_TEXT,
        object={"const": "text_completion"},
        created=_WHOLE,
        model=_TEXT,
        choices=_list_of(_object(index=_WHOLE, text=_TEXT, finish_reason=_TEXT)),
        usage=_USAGE,
    ),
    "/v1/responses": _object(
        id=_TEXT, object={"const": "response"}, created_at=_WHOLE, model=_TEXT, status=_TEXT, output=_list_of({})
    ),
    "/v1/models": _object(object={"const": "list"}, data=_list_of(_MODEL)),
    "/v1/models/{name}": _MODEL,
    "/tokenize": _object(tokens=_list_of(_WHOLE), count=_WHOLE, max_model_len=_WHOLE),
    "/detokenize": _object(prompt=_TEXT),
    "/health/live": _object(live={"const": True}),
    "/health/ready": _object(ready={"type": "boolean"}, reasons=_list_of(_TEXT), phase=_TEXT),
    "/v1/muster/plan": _object(proven={"type": "boolean"}, parts=_list_of(_object(role=_TEXT, problem={}))),
    "/v1/muster/state": _object(ready={"type": "boolean"}, running=_WHOLE, waiting=_WHOLE),
}


def describe(app: FastAPI, *, keyed: bool) -> dict[str, Any]:
    """The document of an application; `keyed` if its clients need an API key."""
    if app.openapi_schema:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    modes = [(model, "validation") for model in _BODIES.values()]
    _, models = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas = {**models["$defs"], "Error": _ERROR}
    document["components"] = {"schemas": schemas}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(operation, path)
    if keyed:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    app.openapi_schema = document
    return document


def _complete(operation: dict[str, Any], path: str) -> None:
    """Adds what FastAPI cannot know, since bodies are read and answers written here."""
    if path in _BODIES:
        reference = {"$ref": f"#/components/schemas/{_BODIES[path].__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    content: dict[str, Any] = {"application/json": {"schema": _ANSWERS.get(path, {})}}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": _EVENT}
    if path == "/metrics":
        content = {"text/plain": {"schema": _TEXT}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {status: {"description": text, "content": error} for status, text in _REFUSALS.items()}
    if path == "/health/ready":
        refusals["503"] = {"description": "not ready, and why", "content": content}
    operation["responses"] = {"200": {"description": "the answer", "content": content}, **refusals}
