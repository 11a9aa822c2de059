"""The application: routes, and what each does in a few lines."""

from __future__ import annotations

import mimetypes
import secrets
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from muster import __version__
from muster.errors import MusterError, RequestError
from muster.server import metrics as prometheus
from muster.server.answers import Answer, Extras, Renderer, dumps
from muster.server.body import read
from muster.server.chat import ChatRenderer
from muster.server.completions import CompletionRenderer
from muster.server.conversation import of_chat, of_response, prompt_of
from muster.server.gate import Gate
from muster.server.openai_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponseRequest,
    TokenizeRequest,
)
from muster.server.openapi import describe
from muster.server.plan_document import plan_document
from muster.server.refusal import RefusalError, internal, refuse
from muster.server.responses import ResponseRenderer
from muster.server.service import Service

_PAGE = Path(__file__).parent / "page"
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def application(service: Service) -> ASGIApp:
    """The ASGI application of a service."""
    app = FastAPI(title="Muster", version=__version__, docs_url=None, redoc_url=None)
    endpoints = Endpoints(service)
    app.add_api_route("/v1/chat/completions", endpoints.chat, methods=["POST"])
    app.add_api_route("/v1/completions", endpoints.complete, methods=["POST"])
    app.add_api_route("/v1/responses", endpoints.respond, methods=["POST"])
    app.add_api_route("/v1/models", endpoints.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", endpoints.model, methods=["GET"])
    app.add_api_route("/tokenize", endpoints.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", endpoints.detokenize, methods=["POST"])
    app.add_api_route("/health/live", endpoints.live, methods=["GET"])
    app.add_api_route("/health/ready", endpoints.ready, methods=["GET"])
    app.add_api_route("/metrics", endpoints.metrics, methods=["GET"])
    app.add_api_route("/v1/muster/plan", endpoints.plan, methods=["GET"])
    app.add_api_route("/v1/muster/state", endpoints.state, methods=["GET"])
    app.add_api_route("/", endpoints.page, methods=["GET"], include_in_schema=False)
    app.add_api_route("/page/{name}", endpoints.page, methods=["GET"], include_in_schema=False)
    app.add_exception_handler(MusterError, _refused)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Exception, _bug)
    keyed = bool(service.settings.keys)
    app.openapi = lambda: describe(app, keyed=keyed)  # type: ignore[method-assign]
    local = service.settings.loopback and not keyed
    return Gate(app, keys=service.settings.keys, local=local, metrics=service.metrics)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, MusterError)
    request.state.log["error"] = str(error).splitlines()[0]
    refused = refuse(error, request.state.id)
    return _json(refused.body, refused.status, refused.headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: "a path of this server; /openapi.json lists them", 405: "a method that this path has"}
    found = f"{request.method} {request.url.path[:100]}"
    refusal = RefusalError(
        error.status_code, "not_found", "path", found=found, expected=what.get(error.status_code, "")
    )
    refused = refuse(refusal, request.state.id)
    return _json(refused.body, refused.status, {**refused.headers, **(error.headers or {})})


async def _bug(request: Request, _: Exception) -> Response:
    refused = internal(request.state.id)
    return _json(refused.body, refused.status)


def _json(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(document), status, headers, "application/json")


class Endpoints:
    """One method for each route."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())

    async def chat(self, request: Request) -> Any:
        """Answers a conversation."""
        service = self._service
        body = await self._read(request, ChatRequest)
        conversation = await service.aside(lambda: of_chat(service, body))
        renderer = ChatRenderer(
            self._head("chatcmpl"),
            conversation.parsers,
            service.llm.tokenizer,
            _extras(body),
        )
        return self._answer(request, conversation.requests, renderer, stream=bool(body.stream))

    async def complete(self, request: Request) -> Any:
        """Continues texts."""
        service = self._service
        body = await self._read(request, CompletionRequest)
        requests = await service.aside(lambda: service.completion(body))
        renderer = CompletionRenderer(
            self._head("cmpl"),
            len(requests),
            body.n or 1,
            service.llm.tokenizer if service.llm.has_tokenizer else None,
            _extras(body),
        )
        return self._answer(request, requests, renderer, stream=bool(body.stream))

    async def respond(self, request: Request) -> Any:
        """Answers with one message."""
        service = self._service
        body = await self._read(request, ResponseRequest)
        conversation = await service.aside(lambda: of_response(service, body))
        [parser] = conversation.parsers
        [asked] = conversation.requests
        head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": service.settings.name,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": asked.params.temperature,
            "top_p": asked.params.top_p,
            "text": {"format": _described(body.text.format if body.text else None)},
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": True,
            "store": False,
            "metadata": {},
        }
        renderer = ResponseRenderer(head, parser, service.llm.tokenizer)
        return self._answer(request, conversation.requests, renderer, stream=bool(body.stream))

    async def models(self) -> Response:
        """The one model."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """One model by name."""
        self._service.check_model(name)
        return _json(self._model())

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text or a conversation."""
        service = self._service
        body = await self._read(request, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            found = "neither" if body.prompt is None else "both"
            raise RequestError("prompt", found=f"{found} of prompt and messages", expected="one of them")
        prompt, messages = body.prompt, body.messages or ()
        ids = await service.aside(
            lambda: prompt_of(service, messages) if prompt is None else service.tokenizer.encode(prompt)
        )
        return _json({"tokens": ids, "count": len(ids), "max_model_len": service.llm.engine.limit})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        service = self._service
        body = await self._read(request, DetokenizeRequest)
        return _json({"prompt": await service.aside(lambda: service.decode(body.tokens))})

    async def live(self) -> Response:
        """Whether the process answers."""
        return _json({"live": True})

    async def ready(self) -> Response:
        """Whether requests should be sent here, and why not."""
        health = self._service.health
        document = {"ready": health.ready, "reasons": health.reasons, "phase": health.phase, "canary": health.canary}
        return _json(document, 200 if health.ready else 503)

    async def metrics(self) -> Response:
        """For Prometheus."""
        return Response(self._service.metrics.page(), media_type=prometheus.CONTENT_TYPE)

    async def plan(self) -> Response:
        """Which backends run what, on what evidence, and why not the others."""
        return _json(plan_document(self._service.llm.decoder.plan))

    async def state(self) -> Response:
        """What the engine does now."""
        engine = self._service.llm.engine
        step = engine.last_step
        stats = engine.stats
        return _json(
            {
                "ready": self._service.health.ready,
                "reasons": self._service.health.reasons,
                "alive": self._service.worker.alive,
                "running": engine.running,
                "waiting": engine.waiting,
                "pages": {"all": engine.pages, "free": engine.free_pages},
                "last_step": {"number": step.number, "requests": len(step.rows), "tokens": step.tokens}
                if step
                else None,
                "generated_tokens": stats.generated_tokens,
                "prefill_tokens_per_second": stats.prefill_rate,
                "decode_tokens_per_second": stats.decode_rate,
            }
        )

    async def page(self, name: str = "index.html") -> Response:
        """A file of the page for browsers."""
        path = _PAGE / name
        if path.parent != _PAGE or not path.is_file():
            raise RefusalError(404, "not_found", "page", found=repr(name[:100]), expected="a file of the page")
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(path.read_bytes(), media_type=kind, headers=_PAGE_HEADERS)

    async def _read(self, request: Request, model: Any) -> Any:
        body = await read(request, model, self._service.settings.body_bytes)
        self._service.check_model(body.model)
        if getattr(body, "user", None) is not None:
            request.state.log["user"] = body.user
        if getattr(body, "stream_options", None) is not None and not body.stream:
            raise RequestError("stream_options", found="them without stream", expected="stream: true")
        return body

    def _answer(self, request: Request, requests: Any, renderer: Renderer, *, stream: bool) -> Answer:
        service = self._service
        request.state.log["prompt_tokens"] = sum({id(one.prompt): len(one.prompt) for one in requests}.values())
        job = service.worker.submit(requests)
        patience = service.settings.patience
        return Answer(service.worker, job, renderer, stream=stream, request=request, patience=patience)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{kind}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self._service.settings.name,
        }

    def _model(self) -> dict[str, Any]:
        llm = self._service.worker.llm
        return {
            "id": self._service.settings.name,
            "object": "model",
            "created": self._created,
            "owned_by": "muster",
            "max_model_len": llm.engine.limit if llm else None,
        }


def _described(form: BaseModel | None) -> dict[str, Any]:
    """A text format as the client wrote it."""
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)


def _extras(body: ChatRequest | CompletionRequest) -> Extras:
    return Extras(
        # Zero of the best beside each token is still log-probabilities.
        logprobs=body.logprobs is not None and body.logprobs is not False,
        token_ids=bool(body.return_token_ids),
        usage=body.stream_options is not None and body.stream_options.include_usage,
    )
