"""What an answer is made of: content, reasoning and tool calls, told one event at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text the model wrote for itself."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A function is called; its arguments follow. `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """Arguments of call `index`: the text of a JSON object."""

    index: int
    text: str


Event: TypeAlias = Content | Reasoning | ToolCall | ToolArguments


class Parser(Protocol):
    """Text of an answer in, events out.

    However the text is cut into feeds, the events are the same once neighbours are merged. No event is taken back:
    what may still turn out to be a tag or a call is held until that is certain. Text that turns out to be neither is
    content, unchanged; nothing raises.
    """

    def feed(self, text: str) -> tuple[Event, ...]:
        """Takes the next piece of text; the events that are certain now."""
        ...

    def finish(self) -> tuple[Event, ...]:
        """The answer is over; the events that were held back."""
        ...


def merged(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events with neighbouring texts of one kind joined and empty ones left out."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        match event, last:
            case (Content(""), _) | (Reasoning(""), _):
                pass
            case Content(text), Content(before):
                out[-1] = Content(before + text)
            case Reasoning(text), Reasoning(before):
                out[-1] = Reasoning(before + text)
            case ToolArguments(index, text), ToolArguments(same, before) if index == same:
                out[-1] = replace(event, text=before + text)
            case _:
                out.append(event)
    return tuple(out)
