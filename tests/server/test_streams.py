"""A stream cut anywhere is the same stream: however many tokens a step yields, however long pieces wait."""

import asyncio
import json

import pytest
from engine import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.engine.request import Request, SamplingParams, TokenLogprob
from muster.engine.text import TextStream
from muster.engine.tokenizer import Tokenizer
from muster.server.answers import Extras, dumps
from muster.server.chat import ChatRenderer
from muster.server.completions import CompletionRenderer
from muster.server.mailbox import Cursor, Mailbox
from muster.server.responses import ResponseRenderer
from muster.server.styles import parser_for

TEXT = (
    "<think>w\u00f6rld \U0001f600?</think>\n\nso: <tool_call>"
    '{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>\u4f60\u597dEND of it'
)
HEAD = {"id": "x", "created": 1, "model": "m"}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny._tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return Tokenizer.open(directory)


def answer(tokenizer, stop, length):
    params = SamplingParams(logprobs=1, max_tokens=length, stop=stop)
    text = TextStream(tokenizer.decode, (5,), stop)
    return Request(prompt=(5,), params=params, limit=1 + length, stop_ids=frozenset(), seed=0, text=text)


def grown(request, ids, groups):
    """The cursor's piece after each step; a step yields as many tokens as its group says."""
    cursor = Cursor(request, 0)
    ids = iter(ids)
    for group in groups:
        for token_id in (next(ids, None) for _ in range(group)):
            if token_id is not None and request.finish_reason is None:
                request.append(token_id, TokenLogprob(token_id, -0.5, ((token_id, -0.5),)))
        yield cursor.piece()
        if request.finish_reason is not None:
            return


async def delivered(pieces, reads):
    """The pieces as a reader gets them who lets as many pile up as `reads` says before each look."""
    mailbox, pieces = Mailbox(), iter(pieces)
    taken = []

    async def read():
        taken.extend([piece async for piece in mailbox.pieces(1)])

    reader = asyncio.ensure_future(read())
    while not reader.done():
        for piece in (next(pieces, None) for _ in range(next(reads, 1))):
            if piece is not None:
                mailbox.put(piece)
        for _ in range(3):
            await asyncio.sleep(0)
    return taken


def renderers(tokenizer):
    functions = {"add": {"type": "object"}}
    extras = Extras(logprobs=True, token_ids=True, usage=True)
    number = iter(range(100))
    parser = parser_for("qwen3", "qwen3", functions=functions, new_id=lambda: f"call{next(number)}")
    yield ChatRenderer(HEAD, [parser], tokenizer, extras)
    yield CompletionRenderer(HEAD, 1, 1, tokenizer, extras)
    yield ResponseRenderer(HEAD, parser_for("qwen3", None), tokenizer)


def rendered(renderer, pieces):
    """Events joined by what they are, and the whole document, without ids that are random."""
    events = [*renderer.opening(), *(event for piece in pieces for event in renderer.take(piece)), *renderer.closing()]
    texts = {}
    for event in events:
        for kind, text in told(event):
            texts[kind] = texts.get(kind, type(text)()) + text
    whole = renderer.whole()
    for item in whole.get("output", []):
        del item["id"]
    return texts, json.dumps(whole, sort_keys=True)


def told(event):
    if "delta" in event and isinstance(event["delta"], str):
        yield event["type"], event["delta"]
    for choice in event.get("choices", []):
        delta = choice.get("delta", choice)
        yield from ((key, delta[key]) for key in ("content", "reasoning_content", "text") if key in delta)
        for call in delta.get("tool_calls", []):
            yield "arguments", call["function"].get("arguments", "")
            yield "names", call["function"].get("name", "")
        logprobs = choice.get("logprobs") or {}
        yield "logprobs", logprobs.get("content") or logprobs.get("token_logprobs") or []
        yield "ids", choice.get("token_ids", [])
        yield "finish", choice.get("finish_reason") or ""


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.integers(0, 9), max_size=80),
    reads=st.lists(st.integers(0, 6), max_size=60),
    stop=st.sampled_from([(), ("END",), ("D of", "\u597d"), ("not there",)]),
    length=st.integers(1, 140),
)
def test_every_way_of_cutting_an_answer_gives_the_same_events_and_the_same_whole(
    tokenizer, groups, reads, stop, length
):
    ids = (tokenizer.encode(TEXT) + [0] * 200)[:length]
    one_by_one = list(grown(answer(tokenizer, stop, length), ids, [1] * length))
    cut = grown(answer(tokenizer, stop, length), ids, groups + [7] * length)
    arrived = asyncio.run(delivered(cut, iter(reads)))
    for first, second in zip(renderers(tokenizer), renderers(tokenizer), strict=True):
        assert rendered(second, arrived) == rendered(first, one_by_one)


def test_what_is_told_piece_by_piece_is_what_the_engine_says_at_the_end(tokenizer):
    ids = tokenizer.encode(TEXT)
    request = answer(tokenizer, ("END",), len(ids))
    pieces = list(grown(request, ids, [1, 3] * len(ids)))
    output = request.output()
    assert "".join(piece.text for piece in pieces) == output.text == TEXT[: TEXT.index("END")]
    assert tuple(token_id for piece in pieces for token_id in piece.token_ids) == output.token_ids
    assert tuple(entry for piece in pieces for entry in piece.logprobs) == output.logprobs
    assert [piece.output for piece in pieces] == [None] * (len(pieces) - 1) + [output]
    chat = next(renderers(tokenizer))
    texts, whole = rendered(chat, pieces)
    message = json.loads(whole)["choices"][0]["message"]
    assert message["reasoning_content"] == "w\u00f6rld \U0001f600?"
    assert message["content"] == texts["content"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": "</tool_call>"}
    assert texts["finish"] == "tool_calls"
    assert json.loads(whole)["usage"]["completion_tokens"] == len(output.token_ids)


def test_an_event_is_one_line_whatever_ends_lines_for_its_reader():
    text = "".join(map(chr, (*range(0x3000), 0xD800, 0x1F600)))
    written = dumps({"text": text}).decode()
    assert written.splitlines() == [written]
    assert json.loads(written) == {"text": text}
