import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.errors import UsageError
from muster.server.events import Content, Reasoning, ToolArguments, ToolCall, merged
from muster.server.styles import parser_for, styles
from muster.server.tags import TagSplitter
from server.parsing import content, cuts, parse, thoughts

TAGGED = [style for style in styles() if style != "gpt-oss"]
THINK = {"mistral": ("[THINK]", "[/THINK]")}
FRAGMENTS = [
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<",
    "</",
    "[/",
    "thi",
    "nk>",
    "\n",
    "\n\n\n",
    "a",
    " ",
    "é😀",
    ">",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
PLAIN = st.text(alphabet="a <[/>]\né😀", min_size=1, max_size=12).map(lambda text: text.strip("\n")).filter(bool)


def tags(style):
    return THINK.get(style, ("<think>", "</think>"))


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, data=st.data())
@pytest.mark.parametrize("style", TAGGED)
@pytest.mark.parametrize("prompt", ["", "x<think>\n", "x[THINK]"])
def test_every_cut_gives_the_same_events(style, prompt, text, data):
    whole = parse([text], style, None, prompt=prompt)
    assert parse(data.draw(cuts(text)), style, None, prompt=prompt) == whole
    assert parse(text, style, None, prompt=prompt) == whole


@settings(max_examples=100, deadline=None)
@given(thought=PLAIN, answer=PLAIN)
@pytest.mark.parametrize("style", TAGGED)
def test_reasoning_and_content_come_out_as_they_were_written(style, thought, answer):
    opening, closing = tags(style)
    events = parse(f"{opening}\n{thought}\n{closing}\n\n{answer}", style, None)
    assert events == (Reasoning(thought), Content(answer))


@pytest.mark.parametrize("style", TAGGED)
def test_a_prompt_that_opened_the_reasoning_makes_the_answer_begin_inside(style):
    opening, closing = tags(style)
    for written in ("", "\n"):
        events = parse(f"\nhm\n{closing}\n\nyes", style, None, prompt=f"question{opening}{written}")
        assert events == (Reasoning("hm"), Content("yes"))


def test_an_opening_tag_that_the_model_repeats_is_no_text():
    assert parse("<think>\nhm</think>yes", "deepseek", None, prompt="<think>\n") == (Reasoning("hm"), Content("yes"))


def test_a_prompt_that_closed_the_reasoning_makes_all_content():
    text = "yes, <think> opens it and </think> closes it"
    assert parse(text, "qwen3", None, prompt="<think>\n\n</think>\n\n") == (Content(text),)


def test_empty_reasoning_is_no_event():
    assert parse("<think>\n\n</think>\n\nyes", "qwen3", None) == (Content("yes"),)


@pytest.mark.parametrize("unfinished", ["", "<", "</", "</think", "\n", "\n\n</thin"])
def test_reasoning_cut_short_loses_nothing(unfinished):
    assert parse(f"<think>\nhm{unfinished}", "qwen3", None) == (Reasoning(f"hm{unfinished}"),)


@pytest.mark.parametrize("text", ["<thi", "<", "<think", "a\n", "\n\n"])
def test_an_unfinished_opening_tag_is_content(text):
    assert content(parse(text, "qwen3", None)) == text


def test_text_that_cannot_become_a_tag_comes_out_at_once():
    parser = parser_for("qwen3", "qwen3")
    assert merged(parser.feed("<think>")) == ()
    assert merged(parser.feed("\n\nhm, 1 < 2")) == (Reasoning("hm, 1 < 2"),)
    assert merged(parser.feed(" so </th")) == (Reasoning(" so "),)
    assert merged(parser.feed("at")) == (Reasoning("</that"),)
    assert merged(parser.feed("</think>")) == ()
    assert merged(parser.feed("yes")) == (Content("yes"),)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, data=st.data())
def test_without_styles_everything_is_content(text, data):
    assert content(parse(data.draw(cuts(text)), None, None)) == text


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="<ab>\n", max_size=20), data=st.data())
@pytest.mark.parametrize("breaks", [0, 1, 2])
def test_pieces_joined_are_the_text_and_tags_do_not_depend_on_the_cuts(breaks, text, data):
    def split(pieces):
        splitter = TagSplitter(["<a>", "<ab>", "<bb"], breaks=breaks)
        found = [part for piece in pieces for part in splitter.push(piece)] + list(splitter.close())
        assert "".join(part.text for part in found) == text
        return [part for part in found if part.tag]

    assert split(data.draw(cuts(text))) == split([text])


def test_a_run_of_line_breaks_is_held_no_longer_than_a_tag_could_claim_it():
    splitter = TagSplitter(["<a>"])
    assert "".join(piece.text for _ in range(500) for piece in splitter.push("\n")) == "\n" * 498


HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "assistant", "analysis"]
HARMONY += ["final", "commentary", " to=functions.f", "json", '{"a": 1}', "\n", "<|", "hé"]


@settings(max_examples=500, deadline=None)
@given(text=st.lists(st.sampled_from(HARMONY), max_size=14).map("".join), data=st.data())
def test_every_cut_of_harmony_gives_the_same_events(text, data):
    whole = parse([text], "gpt-oss", "gpt-oss", functions={"f": {}})
    assert parse(data.draw(cuts(text)), "gpt-oss", "gpt-oss", functions={"f": {}}) == whole
    assert parse(text, "gpt-oss", "gpt-oss", functions={"f": {}}) == whole


def test_harmony_channels_say_what_is_reasoning():
    text = "<|channel|>analysis<|message|>hm\n<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    text += "<|start|>assistant<|channel|>final<|message|>It is 4.\n"
    events = parse(text, "gpt-oss", "gpt-oss")
    assert events == (Reasoning("hm\n"), Content("I look.It is 4.\n"))


@pytest.mark.parametrize(
    "message",
    [
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        '<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"a": 1}',
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        '<|channel|>commentary to=f <|constrain|>json<|message|>{"a": 1}<|call|>',
    ],
)
def test_harmony_calls_have_their_recipient_in_either_part_of_the_header(message):
    text = f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{message}"
    events = parse(text, "gpt-oss", "gpt-oss", functions={"f": {}})
    assert events == (Reasoning("hm"), ToolCall(0, "#0", "f"), ToolArguments(0, '{"a": 1}'))


def test_a_malformed_harmony_call_is_content_and_the_rest_goes_on():
    bad = '<|channel|>commentary to=functions.f<|message|>{"a": '
    text = f"{bad}<|end|><|start|>assistant<|channel|>final<|message|>yes"
    assert parse(text, "gpt-oss", "gpt-oss") == (Content(f"{bad}yes"),)


def test_a_harmony_message_to_a_tool_that_is_not_on_offer_stays_in_its_channel():
    text = "<|channel|>analysis to=python<|message|>print(1)<|call|>"
    assert parse(text, "gpt-oss", "gpt-oss") == (Reasoning("print(1)"),)


def test_an_answer_without_harmony_is_content():
    assert parse('{"a": 1}', "gpt-oss", "gpt-oss") == (Content('{"a": 1}'),)


def test_a_harmony_header_without_its_message_is_nothing():
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>fin"
    assert parse(text, "gpt-oss", "gpt-oss") == (Reasoning("hm"),)


def test_thoughts_and_content_of_every_style_keep_every_character_between_tags():
    for style in TAGGED:
        opening, closing = tags(style)
        text = "".join(map(chr, range(32, 127))).replace("[", "").replace("<", "")
        events = parse(f"{opening}{text}{closing}{text}", style, style)
        assert (thoughts(events), content(events)) == (text, text)


def test_an_unknown_style_is_refused_with_those_there_are():
    with pytest.raises(UsageError, match="qwen3, glm, deepseek, gpt-oss, mistral"):
        parser_for("llama", None)
