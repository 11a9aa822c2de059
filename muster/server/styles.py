"""How the model families write reasoning and tool calls, by name.

A style is one row. Sources: the chat templates that are published with the models, and OpenAI's description of
harmony.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from muster.checkpoint.spec import ModelSpec
from muster.engine.grammar import Reasoning
from muster.engine.tokenizer import Tokenizer
from muster.errors import UsageError
from muster.server import calls, harmony
from muster.server.calls import Functions
from muster.server.events import Content, Event, Parser
from muster.server.forced import ForcedCallParser
from muster.server.harmony import HarmonyParser
from muster.server.reasoning import ReasoningParser
from muster.server.tools import CallForm, CallParser, CallWriter, new_id

_QWEN = (CallForm("<tool_call>", "</tool_call>", calls.read_qwen, quoted=True),)
_GLM = (CallForm("<tool_call>", "</tool_call>", calls.read_glm, bounded=False),)
_DEEPSEEK = (
    CallForm("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", calls.read_deepseek),
    CallForm("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", calls.read_dsml),
    CallForm("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", calls.read_dsml),
)
_MISTRAL = (CallForm("[TOOL_CALLS]", None, calls.read_mistral, quoted=True),)


@dataclass(frozen=True)
class Style:
    """One family's way.

    Attributes:
        opening, closing: tags around reasoning at the beginning of an answer.
        forms: how tool calls are written.
        words: special tokens inside calls.
        families: model families (`ModelSpec.family`) that use it, for checkpoints whose template does not show it.
    """

    opening: str
    closing: str
    forms: tuple[CallForm, ...] = ()
    words: tuple[str, ...] = ()
    families: tuple[str, ...] = ()


_THINK = ("<think>", "</think>")
_STYLES: Mapping[str, Style] = {
    "qwen3": Style(*_THINK, _QWEN, families=("qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")),
    "glm": Style(
        *_THINK, _GLM, ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), ("glm4_moe", "glm_moe_dsa")
    ),
    "deepseek": Style(
        *_THINK,
        _DEEPSEEK,
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "｜DSML｜"),
        ("deepseek_v3", "deepseek_v32"),
    ),
    "gpt-oss": Style(harmony.CHANNEL, f"{harmony.CHANNEL}final{harmony.MESSAGE}", (), harmony.TAGS, ("gpt_oss",)),
    "mistral": Style("[THINK]", "[/THINK]", _MISTRAL, ("[CALL_ID]", "[ARGS]")),
}
_HARMONY = "gpt-oss"


def styles() -> tuple[str, ...]:
    """Names of all styles."""
    return tuple(_STYLES)


def parser_for(
    reasoning: str | None,
    tools: str | None,
    *,
    functions: Functions | None = None,
    prompt: str = "",
    forced: bool = False,
    new_id: Callable[[], str] = new_id,
) -> Parser:
    """A parser for one answer.

    Args:
        reasoning: style of the reasoning; None: whatever looks like it is content.
        tools: style of the calls; None: whatever looks like one is content.
        functions: parameters' JSON schemas of the functions on offer, by name.
        prompt: the text before the answer; its end says whether the answer begins inside reasoning.
        forced: the answer proper is what `calls_schema` describes, whatever the style of calls.
        new_id: gives ids to calls.

    Raises:
        UsageError: there is no style of that name.
    """
    writer, parsers = CallWriter(new_id), list[Parser]()
    if _HARMONY in (reasoning, tools):
        parsers.append(HarmonyParser(None if tools is None or forced else functions or {}, writer))
    elif reasoning is not None:
        style = _style("reasoning style", reasoning)
        parsers.append(ReasoningParser(style.opening, style.closing, inside=_ends(prompt, style.opening)))
    if forced:
        parsers.append(ForcedCallParser(writer))
    elif tools is not None and tools != _HARMONY:
        parsers.append(CallParser(_style("tool call style", tools).forms, functions or {}, writer))
    return Chain(parsers)


def reasoning_before(style: str, tokenizer: Tokenizer, prompt: str) -> Reasoning | None:
    """The reasoning after which a grammar begins; None if this tokenizer has no tokens for its tags.

    Raises:
        UsageError: there is no style of that name.
    """
    found = _style("reasoning style", style)
    opening, closing = (tokenizer.encode(tag, bare=True) for tag in (found.opening, found.closing))
    if style == _HARMONY:
        return Reasoning(None, tuple(closing), inside=True)
    if len(opening) != 1 or len(closing) != 1:
        return None
    over = _ends(prompt, found.closing)
    return Reasoning(None if over else opening[0], tuple(closing), inside=_ends(prompt, found.opening))


def marks(reasoning: str | None, tools: str | None) -> frozenset[str]:
    """Special tokens that must stay in the text of an answer for `parser_for` to see them.

    Raises:
        UsageError: there is no style of that name.
    """
    found = set[str]()
    if reasoning is not None:
        style = _style("reasoning style", reasoning)
        found |= {style.opening, style.closing, *style.words}
    if tools is not None:
        style = _style("tool call style", tools)
        found |= {*style.words, *(tag for form in style.forms for tag in (form.opening, form.closing) if tag)}
    return frozenset(found)


def guess(spec: ModelSpec, chat_template: str) -> tuple[str | None, str | None]:
    """The styles of reasoning and of tool calls that a checkpoint uses, by its chat template, then by its family."""
    family = next((name for name, style in _STYLES.items() if spec.family in style.families), None)
    if harmony.CHANNEL in chat_template:
        return _HARMONY, _HARMONY
    seen = [name for name, style in _STYLES.items() if any(form.opening in chat_template for form in style.forms)]
    if "glm" in seen and "<arg_key>" in chat_template:
        seen = ["glm"]
    tools = next(iter(seen), None)
    thinks = [name for name, style in _STYLES.items() if style.closing in chat_template]
    reasoning = next((name for name in (tools, family, *thinks) if name in thinks), None)
    if not chat_template and family is not None:
        return family, family
    return reasoning, tools


class Chain:
    """Parsers one after another: each reads the content that the one before it leaves. See `Parser`."""

    def __init__(self, parsers: Sequence[Parser]) -> None:
        self._parsers = tuple(parsers)

    def feed(self, text: str) -> tuple[Event, ...]:
        """Takes the next piece of text; the events that are certain now."""
        return tuple(self._pass(0, (Content(text),)))

    def finish(self) -> tuple[Event, ...]:
        """The answer is over; the events that were held back."""
        events: list[Event] = []
        for index, parser in enumerate(self._parsers):
            events += self._pass(index + 1, parser.finish())
        return tuple(events)

    def _pass(self, first: int, events: Iterable[Event]) -> Iterator[Event]:
        if first == len(self._parsers):
            yield from events
            return
        for event in events:
            if isinstance(event, Content):
                yield from self._pass(first + 1, self._parsers[first].feed(event.text))
            else:
                yield event


def _ends(prompt: str, tag: str) -> bool:
    return prompt.rstrip("\n").endswith(tag)


def _style(kind: str, name: str) -> Style:
    if name not in _STYLES:
        raise UsageError(kind, found=repr(name), expected=f"one of {', '.join(_STYLES)}")
    return _STYLES[name]
