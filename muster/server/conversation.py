"""From messages to requests: the chat template, the tools on offer, the grammar of the answer and its parser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from muster.engine.grammar import Grammar
from muster.engine.request import Request, SamplingParams
from muster.errors import RequestError
from muster.server.events import Parser
from muster.server.forced import calls_schema
from muster.server.openai_types import (
    AssistantMessage,
    ChatRequest,
    GrammarFormat,
    InputMessage,
    JsonObjectFormat,
    JsonSchemaFormat,
    JsonSchemaText,
    NamedTool,
    RegexFormat,
    ResponseFormat,
    ResponseRequest,
    TextFormat,
    Tool,
)
from muster.server.service import Service
from muster.server.styles import guess, marks, parser_for, reasoning_before

_TAIL = 64
"""Tokens at the end of a prompt that may hold the tag which opens reasoning."""


@dataclass(frozen=True)
class Conversation:
    """A checked conversation.

    Attributes:
        requests: of the engine, one for each answer.
        parsers: of their texts.
    """

    requests: Sequence[Request]
    parsers: Sequence[Parser]


@dataclass(frozen=True)
class Offer:
    """The tools of a conversation.

    Attributes:
        tools: functions that the model may call, as OpenAI describes them.
        forced: the answer must be calls of these.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    forced: bool = False

    @property
    def functions(self) -> dict[str, Any]:
        """The parameters' JSON schemas by name."""
        return {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in self.tools}


@dataclass(frozen=True)
class _Draft:
    """What both kinds of conversation come down to."""

    messages: Sequence[Any]
    params: SamplingParams
    count: int = 1
    form: ResponseFormat | None = None
    offer: Offer = field(default_factory=Offer)
    options: Mapping[str, Any] = field(default_factory=dict)


def of_chat(service: Service, body: ChatRequest) -> Conversation:
    """A chat completion's.

    Raises:
        RequestError: everything that is wrong.
    """
    params = body.params(_most_tokens(body) or service.llm.engine.limit, logprobs=_logprobs(body))
    offer = _offer(body)
    if offer.forced and not isinstance(body.response_format, TextFormat | None):
        raise RequestError("response_format", found="it beside tool_choice", expected="one of them")
    options = body.chat_template_kwargs or {}
    return _conversation(service, _Draft(body.messages, params, body.n or 1, body.response_format, offer, options))


def of_response(service: Service, body: ResponseRequest) -> Conversation:
    """A response's.

    Raises:
        RequestError: everything that is wrong.
    """
    said = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else list(body.input)
    if body.instructions is not None:
        said = [InputMessage(role="system", content=body.instructions), *said]
    params = body.params(body.max_output_tokens or service.llm.engine.limit)
    asked = body.text.format if body.text else None
    form = JsonSchemaFormat(type=asked.type, json_schema=asked) if isinstance(asked, JsonSchemaText) else asked
    return _conversation(service, _Draft(said, params, form=form))


def prompt_of(
    service: Service,
    messages: Sequence[Any],
    tools: Sequence[Mapping[str, Any]] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """A conversation's token ids.

    Raises:
        RequestError: the checkpoint's chat template does not take it, or there is none.
    """
    tokenizer = service.tokenizer
    if not tokenizer.has_chat_template:
        expected = "none: the checkpoint has no chat template"
        raise RequestError("messages", found="some", expected=expected, hint="use /v1/completions")
    return tokenizer.chat([_plain(message) for message in messages], tools=tools, options=options)


def _conversation(service: Service, draft: _Draft) -> Conversation:
    offer, tokenizer = draft.offer, service.tokenizer
    prompt = prompt_of(service, draft.messages, offer.tools, draft.options)
    before = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False)
    reasoning, calls = _styles(service, offer)
    grammar = _grammar(service, draft.form, offer)
    if grammar is not None and reasoning is not None:
        first = reasoning_before(reasoning, tokenizer, before)
        grammar = grammar.after(first) if first is not None else grammar
    keep = marks(reasoning, calls)
    requests = service.requests(prompt, draft.params, draft.count, grammar, keep)
    return Conversation(
        requests,
        [parser_for(reasoning, calls, functions=offer.functions, prompt=before, forced=offer.forced) for _ in requests],
    )


def _styles(service: Service, offer: Offer) -> tuple[str | None, str | None]:
    """How reasoning and calls are written; no calls without tools."""
    settings = service.settings
    reasoning, calls = guess(service.llm.decoder.spec, service.tokenizer.chat_template)
    reasoning, calls = settings.reasoning or reasoning, settings.tools or calls
    if offer.tools and calls is None and not offer.forced:
        expected = "none: nobody knows how this checkpoint writes calls"
        raise RequestError("tools", found="some", expected=expected, hint="muster serve --tool-style names a way")
    return reasoning, calls if offer.tools else None


def _grammar(service: Service, form: ResponseFormat | None, offer: Offer) -> Grammar | None:
    if offer.forced:
        return service.grammar("json_schema", calls_schema(offer.functions, parallel=len(offer.tools) > 1))
    match form:
        case JsonObjectFormat():
            return service.grammar("json_object", "")
        case JsonSchemaFormat(json_schema=named):
            return service.grammar("json_schema", json.dumps(named.schema_ if named.schema_ is not None else {}))
        case GrammarFormat(grammar=text):
            return service.grammar("grammar", text)
        case RegexFormat(regex=text):
            return service.grammar("regex", text)
    return None


def _offer(body: ChatRequest) -> Offer:
    """The tools, only the chosen one if one is chosen."""
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise RequestError("tools", found="functions of the same name", expected="different names")
    if choice not in (None, "none") and not tools:
        raise RequestError("tool_choice", found="it without tools", expected="tools")
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise RequestError("tool_choice", found=repr(choice.function.name), expected=f"one of {', '.join(names)}")
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    forced = choice == "required" or isinstance(choice, NamedTool)
    strict = next((tool.function.name for tool in tools if tool.function.strict), None)
    if strict is not None and not forced and choice != "none":
        expected = "it with tool_choice 'required' or a function's name, where a grammar sees to it"
        raise RequestError("tools", found=f"strict: true of {strict!r}", expected=expected)
    return Offer([] if choice == "none" else [_described(tool) for tool in tools], forced)


def _described(tool: Tool) -> dict[str, Any]:
    described: dict[str, Any] = tool.model_dump(exclude_none=True)
    return described


def _most_tokens(body: ChatRequest) -> int | None:
    both = {body.max_completion_tokens, body.max_tokens} - {None}
    if len(both) > 1:
        found = f"{body.max_tokens} beside max_completion_tokens {body.max_completion_tokens}"
        raise RequestError("max_tokens", found=found, expected="one of them")
    return next(iter(both), None)


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs", found=f"{body.top_logprobs} without logprobs", expected="logprobs: true")
    return (body.top_logprobs or 0) if body.logprobs else None


def _plain(message: Any) -> dict[str, Any]:
    """A message as chat templates read it: its content one text, the arguments of calls as objects."""
    plain: dict[str, Any] = message.model_dump(exclude_none=True)
    if plain["role"] == "developer":
        plain["role"] = "system"
    if isinstance(message.content, list):
        plain["content"] = "\n".join(part.text for part in message.content)
    if isinstance(message, AssistantMessage):
        plain.setdefault("content", "")
        for call in plain.get("tool_calls", ()):
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return plain


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError("arguments of a tool call", found=repr(text[:100]), expected="the text of a JSON object")
    return value
