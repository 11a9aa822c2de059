"""The bodies of requests: OpenAI's fields and the engine's further sampling options; no other field is accepted."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from muster.engine.request import SamplingParams

MOST_STOPS = 16
MOST_BIASES = 1024
MOST_ANSWERS = 64
MOST_MESSAGES = 4096
MOST_TOOLS = 256
MOST_LOGPROBS = 20

Name = Annotated[str, Field(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]


class Strict(BaseModel):
    """Types as they are written, no unknown field, no NaN and no infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


_FURTHER = (
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class StreamOptions(Strict):
    """How an answer is streamed."""

    include_usage: bool = False


class Sampling(Strict):
    """What all endpoints that generate share; ranges are those of `SamplingParams`."""

    model: Name | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None

    def params(self, max_tokens: int, **more: Any) -> SamplingParams:
        """The engine's options; what is not given is as OpenAI has it.

        Raises:
            RequestError: every option out of its range.
        """
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        given |= {"seed": self.seed % (1 << 64) if self.seed is not None else None, **more}
        options = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(max_tokens=max_tokens, **{"temperature": 1.0, **options})


class Generation(Sampling):
    """What completions and chat completions share."""

    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOPS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_BIASES)] | None = None
    return_token_ids: bool | None = None

    def params(self, max_tokens: int, **more: Any) -> SamplingParams:
        """As `Sampling.params`."""
        given = {name: getattr(self, name) for name in _FURTHER}
        if self.logit_bias is not None:
            given["logit_bias"] = tuple((_token_id(key), value) for key, value in self.logit_bias.items())
        return super().params(max_tokens, **{**given, **more})


def _token_id(key: str) -> int | str:
    """The id that a JSON key names; what is none stays as it is, for `SamplingParams` to refuse."""
    return int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else key


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_ANSWERS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_ANSWERS)]
    )
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """A function by name, with the text of a JSON object."""

    name: Name
    arguments: str


class ToolCallMessage(Strict):
    """A call in an earlier answer."""

    id: Name
    type: Literal["function"]
    function: FunctionCall


Content = str | Annotated[list[TextPart], Field(min_length=1)]


class SystemMessage(Strict):
    """Instructions."""

    role: Literal["system", "developer"]
    content: Content


class UserMessage(Strict):
    """What the user says."""

    role: Literal["user"]
    content: Content


class AssistantMessage(Strict):
    """What the model said."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCallMessage], Field(min_length=1, max_length=MOST_TOOLS)] | None = None


class ToolMessage(Strict):
    """What a function answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Name
    name: Name | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]


class Function(Strict):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function by name."""

    name: Name


class NamedTool(Strict):
    """The tool to call."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """A JSON schema by name."""

    name: Name
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """JSON as a schema has it."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class GrammarFormat(Strict):
    """Text that a grammar in EBNF derives. Not OpenAI's."""

    type: Literal["grammar"]
    grammar: Annotated[str, Field(min_length=1, max_length=1 << 16)]


class RegexFormat(Strict):
    """Text that a regular expression matches. Not OpenAI's."""

    type: Literal["regex"]
    regex: Annotated[str, Field(min_length=1, max_length=1 << 12)]


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | GrammarFormat | RegexFormat, Field(discriminator="type")
]


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class InputText(Strict):
    """A piece of a message to /v1/responses."""

    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(Strict):
    """A message to /v1/responses."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[InputText], Field(min_length=1)]
    type: Literal["message"] | None = None


class JsonSchemaText(JsonSchema):
    """JSON as a schema has it, in the words of /v1/responses."""

    type: Literal["json_schema"]


class TextOptions(Strict):
    """What the text of a response looks like."""

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaText, Field(discriminator="type")] | None = None


class ResponseRequest(Sampling):
    """POST /v1/responses, for text."""

    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    store: Literal[False] | None = None


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a conversation as the model would read it."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: Name | None = None
    tokens: list[TokenId]
