import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.server.events import Content, ToolArguments, ToolCall, merged
from muster.server.forced import calls_schema
from muster.server.styles import guess, marks, parser_for, styles
from server.parsing import calls, content, cuts, parse

STYLES = [style for style in styles() if style != "gpt-oss"]
FUNCTIONS = {
    "look_up": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "deep": {"type": "boolean"},
            "list": {"type": "array"},
            "more": {"type": "object"},
            "maybe": {"type": ["string", "null"]},
        },
    },
    "mcp.read-file": {"type": "object", "properties": {"path": {"type": "string"}}},
}


def spaced(value):
    return json.dumps(value, ensure_ascii=False)


def plain(value):
    return value if isinstance(value, str) else spaced(value)


def qwen(found):
    body = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {spaced(arguments)}}}\n</tool_call>'
        for name, arguments in found
    )
    return f"\n{body}"


def qwen_coder(found):
    def element(name, arguments):
        parameters = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"

    return "\n" + "\n".join(element(*call) for call in found)


def glm(found):
    def element(name, arguments):
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in arguments.items()
        )
        return f"\n<tool_call>{name}\n{pairs}</tool_call>"

    return "".join(element(*call) for call in found)


def deepseek_v3(found):
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{spaced(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in found
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def deepseek_v31(found):
    each = (f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{spaced(arguments)}<｜tool▁call▁end｜>" for n, arguments in found)
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def dsml(found, block="function_calls"):
    def element(name, arguments):
        parameters = "\n".join(
            f'<｜DSML｜parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">{plain(value)}'
            "</｜DSML｜parameter>"
            for key, value in arguments.items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{parameters}\n</｜DSML｜invoke>\n'

    return f"\n\n<｜DSML｜{block}>\n" + "".join(element(*call) for call in found) + f"</｜DSML｜{block}>"


def dsml_v4(found):
    return dsml(found, "tool_calls")


def mistral(found):
    return "[TOOL_CALLS]" + spaced([{"name": name, "arguments": arguments} for name, arguments in found])


def mistral_v11(found):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{spaced(arguments)}" for name, arguments in found)


def harmony(found):
    head = "<|start|>assistant<|channel|>commentary to=functions."
    return "".join(f"{head}{name} <|constrain|>json<|message|>{spaced(arguments)}<|call|>" for name, arguments in found)


FORMS = {
    qwen: "qwen3",
    qwen_coder: "qwen3",
    glm: "glm",
    deepseek_v3: "deepseek",
    deepseek_v31: "deepseek",
    dsml: "deepseek",
    dsml_v4: "deepseek",
    mistral: "mistral",
    mistral_v11: "mistral",
    harmony: "gpt-oss",
}
WORDS = st.text(alphabet='a1 "\\{}[],:\né😀.', max_size=12)
# What a form without quotes cannot tell from its own line breaks.
VALUES = {
    "text": WORDS.map(lambda text: text.strip("\n")),
    "count": st.integers(-9, 10**20),
    "share": st.floats(allow_nan=False, allow_infinity=False).filter(lambda number: not number.is_integer()),
    "deep": st.booleans(),
    "list": st.lists(st.integers(0, 9) | WORDS, max_size=3),
    "more": st.dictionaries(WORDS, st.none() | st.integers(0, 9), max_size=2),
    "maybe": st.sampled_from([None, "some"]),
}
CALL = st.one_of(
    st.tuples(st.just("look_up"), st.fixed_dictionaries({}, optional=VALUES)),
    st.tuples(st.just("mcp.read-file"), st.fixed_dictionaries({"path": VALUES["text"]})),
)


@settings(max_examples=100, deadline=None)
@given(found=st.lists(CALL, min_size=1, max_size=3), data=st.data())
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_calls_come_out_as_they_were_written_however_they_are_cut(form, found, data):
    style = FORMS[form]
    before = "<|channel|>final<|message|>Let me see.<|end|>" if style == "gpt-oss" else "Let me see."
    text = before + form(found)
    events = parse(data.draw(cuts(text)), style, style, functions=FUNCTIONS)
    assert content(events) == "Let me see."
    assert [(name, json.loads(arguments)) for _, name, arguments in calls(events)] == found
    assert [identity for identity, _, _ in calls(events)] == [f"#{index}" for index in range(len(found))]
    assert parse(text, style, style, functions=FUNCTIONS) == events


FRAGMENTS = {
    "qwen3": (
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {}}',
        "<function=f>",
        "</function>",
        "</thin",
        "<parameter=a>",
        "</parameter>",
        '"',
        "{",
        "<think>",
        "</think>",
    ),
    "glm": ("<tool_call>", "</tool_call>", "f", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>"),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "f<｜tool▁sep｜>{}",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<｜DSML｜function_calls>",
        '<｜DSML｜invoke name="f">',
        "</｜DSML｜invoke>",
        "</｜DSML｜function_calls>",
        "<｜tool",
        "</think>",
    ),
    "mistral": (
        "[TOOL_CALLS]",
        "[ARGS]",
        "f",
        '{"a": "',
        '"}',
        '[{"name": "f", "arguments": {}}]',
        "[/THINK]",
        "[CALL_ID]x",
    ),
}
COMMON = ("\n", "\n\n\n", " ", "a", "é😀", "<", "[", "1")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("style", STYLES)
def test_every_cut_of_any_text_gives_the_same_events(style, data):
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS[style] + COMMON), max_size=16)))
    whole = parse([text], style, style)
    assert parse(data.draw(cuts(text)), style, style) == whole
    assert parse(text, style, style) == whole


@settings(max_examples=300, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("style", STYLES)
def test_text_without_a_well_formed_call_comes_out_unchanged(style, data):
    fragments = [part for part in FRAGMENTS[style] + COMMON if "thin" not in part and "THINK" not in part]
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=16)))
    events = parse(text, None, style)
    if not calls(events):
        assert content(events) == text


MALFORMED = {
    "qwen3": [
        "<tool_call>\n</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": 1, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {}} {"name": "g", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "name": "g", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": "b\n"}}\n</tool_call>',
        '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 100_000 + "</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n</tool_call>",
        "<tool_call>\n<function=f g>\n</function>\n</tool_call>",
    ],
    "glm": [
        "<tool_call>two words</tool_call>",
        "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>",
        "<tool_call>f\n<arg_value>a</arg_value>\n</tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value></tool_call>",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{]<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"></｜DSML｜function_calls>',
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">x'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
    ],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS][]",
        '[TOOL_CALLS][{"name": "f", "arguments": {}}',
        '[TOOL_CALLS][{"name": "f", "arguments": "{}"}]',
        "[TOOL_CALLS]f[ARGS]{",
    ],
}


@pytest.mark.parametrize(("style", "text"), [(style, text) for style, texts in MALFORMED.items() for text in texts])
def test_a_malformed_call_is_content_with_every_character(style, text):
    assert parse([f"a\n{text}\nb"], None, style) == (Content(f"a\n{text}\nb"),)


@pytest.mark.parametrize("form", [form for form in FORMS if form is not harmony], ids=lambda form: form.__name__)
def test_a_call_cut_short_anywhere_is_content_or_whole(form):
    style, text = FORMS[form], form([("look_up", {"text": "x y", "count": 3})])
    for end in range(len(text)):
        events = parse([text[:end]], None, style, functions=FUNCTIONS)
        found = [(name, json.loads(arguments)) for _, name, arguments in calls(events)]
        assert found in ([], [("look_up", {"text": "x y", "count": 3})])
        assert found or content(events) == text[:end]


@pytest.mark.parametrize("style", ["qwen3", "mistral"])
def test_a_tag_inside_a_string_of_the_arguments_is_part_of_the_string(style):
    value = 'write <tool_call> and </tool_call> and [TOOL_CALLS] and \\" here'
    form = qwen if style == "qwen3" else mistral_v11
    found = [("f", {"a": value}), ("g", {})]
    assert [(name, json.loads(a)) for _, name, a in calls(parse(form(found), None, style))] == found


def test_a_quote_in_an_unquoted_value_does_not_hide_the_closing_tag():
    events = parse(qwen_coder([("look_up", {"text": 'say "hi'})]) + "done", None, "qwen3", functions=FUNCTIONS)
    assert json.loads(calls(events)[0][2]) == {"text": 'say "hi'}
    assert content(events) == "done"


def test_a_good_call_after_a_bad_one_counts():
    bad = "<tool_call>{bad}</tool_call>\n"
    assert parse([bad.rstrip("\n") + qwen([("f", {})])], None, "qwen3") == (
        Content(bad),
        ToolCall(0, "#0", "f"),
        ToolArguments(0, "{}"),
    )
    assert parse(["<tool_call>{bad" + qwen([("f", {})])], None, "qwen3")[1:] == (
        ToolCall(0, "#0", "f"),
        ToolArguments(0, "{}"),
    )


def test_arguments_are_the_model_s_own_text():
    text = '{"big": 123456789012345678901234567890, "float": 1.50, "exponent": 1e400, "escape": "\\u00e9"}'
    events = parse([f'<tool_call>{{"arguments": {text}, "name": "f"}}</tool_call>'], None, "qwen3")
    assert calls(events) == [("#0", "f", text)]


def test_mistral_s_own_ids_are_kept():
    text = '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}'
    assert calls(parse(text, None, "mistral")) == [("abc123XYZ", "f", '{"a": 1}'), ("#0", "g", '{"b": 2}')]


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("five", {"type": "integer"}, "five"),
        ("True", {"type": "boolean"}, True),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("5", {"type": ["string", "null"]}, "5"),
        ("5", {"type": ["string", "number"]}, 5),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {"const": 5}, 5),
        ("5", {}, 5),
        ("five", {}, "five"),
        ('{"a": 1}', {"$ref": "#/$defs/x"}, {"a": 1}),
        ("true", {"type": "string"}, "true"),
        ("[1", {"type": "array"}, "[1"),
    ],
)
def test_the_function_s_schema_decides_what_an_unquoted_value_is(written, schema, value):
    functions = {"f": {"type": "object", "properties": {"a": schema}}}
    text = f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    assert json.loads(calls(parse(text, None, "glm", functions=functions))[0][2]) == {"a": value}


def test_a_call_is_told_when_its_closing_tag_is_there_and_not_before():
    parser = parser_for(None, "qwen3")
    assert merged(parser.feed('Hi\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call')) == (Content("Hi"),)
    told = merged([*parser.feed(">"), *parser.feed("<")])
    assert [type(event) for event in told] == [ToolCall, ToolArguments]
    assert merged(parser.feed("b")) == (Content("<b"),)


def test_new_ids_are_nine_letters_or_digits_and_differ():
    parser = parser_for(None, "qwen3")
    events = [*parser.feed(qwen([("f", {})] * 50)), *parser.finish()]
    ids = {event.id for event in events if isinstance(event, ToolCall)}
    assert len(ids) == 50
    assert all(len(identity) == 9 and identity.isalnum() and identity.isascii() for identity in ids)


def test_a_long_call_in_single_characters_takes_time_in_proportion():
    text = qwen([("f", {"a": "x" * 200_000})])
    assert len(calls(parse(text, None, "qwen3"))) == 1


@settings(max_examples=100, deadline=None)
@given(found=st.lists(CALL, min_size=1, max_size=3), data=st.data())
@pytest.mark.parametrize("style", [None, "qwen3", "gpt-oss"])
def test_forced_calls_come_out_of_the_array_that_the_schema_describes(style, found, data):
    before = {None: "", "qwen3": "<think>hm</think>\n\n"}.get(style, "<|channel|>final<|message|>")
    text = before + spaced([{"name": name, "arguments": arguments} for name, arguments in found])
    events = parse(data.draw(cuts(text)), style, None, forced=True)
    assert [(name, json.loads(arguments)) for _, name, arguments in calls(events)] == found
    assert content(events) == ""


def test_a_forced_call_cut_short_is_content():
    assert parse(['[{"name": "f", "argu'], None, None, forced=True) == (Content('[{"name": "f", "argu'),)


def test_the_schema_of_forced_calls_moves_references_with_the_schemas_they_are_in():
    schema = {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"items": {"$ref": "#"}}}}
    found = json.loads(calls_schema({"f": schema}, parallel=False))
    assert found["$defs"]["f"]["properties"]["a"]["$ref"] == "#/$defs/f/$defs/x"
    assert found["$defs"]["f"]["$defs"]["x"]["items"]["$ref"] == "#/$defs/f"
    assert found["maxItems"] == 1


SPEC = SimpleNamespace(family="mixtral")
TEMPLATES = {
    ("qwen3", "qwen3"): "<tool_call> ... </tool_call> '</think>' in content",
    (None, "qwen3"): "<tool_call> ... </tool_call>",
    ("glm", "glm"): "<think></think> <tool_call>{name}<arg_key>",
    ("deepseek", "deepseek"): "{{'</think>'}} <｜tool▁calls▁begin｜>",
    ("gpt-oss", "gpt-oss"): "<|start|>assistant<|channel|>",
    (None, "mistral"): "[TOOL_CALLS]",
    ("mistral", "mistral"): "[THINK] [/THINK] [TOOL_CALLS]",
    (None, None): "<|im_start|>",
}


@pytest.mark.parametrize("styles", TEMPLATES)
def test_the_chat_template_says_which_styles_a_checkpoint_has(styles):
    assert guess(SPEC, TEMPLATES[styles]) == styles


def test_a_checkpoint_without_a_template_has_the_styles_of_its_family():
    assert guess(SimpleNamespace(family="deepseek_v32"), "") == ("deepseek", "deepseek")
    assert guess(SPEC, "") == (None, None)


def test_marks_are_all_special_tokens_that_a_parser_looks_for():
    assert {"<|channel|>", "<|message|>", "<|end|>", "<|call|>"} <= marks("gpt-oss", None)
    assert {"[TOOL_CALLS]", "[ARGS]", "[THINK]"} <= marks("mistral", "mistral")
    assert marks(None, None) == frozenset()
