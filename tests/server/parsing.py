"""Feeding a parser a text in pieces."""

from hypothesis import strategies as st

from muster.server.events import Content, Reasoning, ToolArguments, ToolCall, merged
from muster.server.styles import parser_for


def parse(pieces, reasoning, tools, **options):
    """Merged events of a text in pieces; calls have ids #0, #1, ..."""
    ids = iter(range(1000))
    parser = parser_for(reasoning, tools, new_id=lambda: f"#{next(ids)}", **options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*events, *parser.finish()])


@st.composite
def cuts(draw, text):
    """The text in pieces, some of them empty, some of one character, some long."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def content(events):
    return "".join(event.text for event in events if isinstance(event, Content))


def thoughts(events):
    return "".join(event.text for event in events if isinstance(event, Reasoning))


def calls(events):
    """(id, name, arguments) of each call."""
    arguments = {event.index: event.text for event in events if isinstance(event, ToolArguments)}
    return [(event.id, event.name, arguments[event.index]) for event in events if isinstance(event, ToolCall)]
