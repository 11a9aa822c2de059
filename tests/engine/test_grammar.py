"""Answers that must match a grammar, from random weights: what comes out always parses and validates."""

import json
import random
import re

import jsonschema
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from engine import tiny
from engine.test_text import SENTENCEPIECE
from muster import LLM, SamplingParams
from muster.engine.grammar import Grammar, Reasoning
from muster.engine.tokenizer import Tokenizer
from muster.errors import RequestError

VOCAB = 260
ENDS = (b'"', b"]", b"}", b"0")
INTEGER, STRING, BOOLEAN = {"type": "integer"}, {"type": "string"}, {"type": "boolean"}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", '"q"']}, "maxItems": 2},
    },
    "required": ["name", "age"],
}


def open_llm(directory, **options):
    return LLM(directory, **{"page_size": tiny.PAGE, "threads": 1, "unproven": True, **options})


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.open(directory)


def compiled(kind, text, tokenizer):
    return Grammar.compile(kind, text if isinstance(text, str) else json.dumps(text), tokenizer, VOCAB)


def answer(llm, grammar, prompt=(5, 9, 200, 31), **options):
    """One request's output and its text of all tokens, special ones included."""
    request = llm.engine.request(prompt, SamplingParams(**{"temperature": 1.0, "max_tokens": 80, **options}), grammar)
    llm.engine.add(request)
    while not llm.engine.idle:
        llm.engine.step()
    output = request.output()
    return output, llm.tokenizer.decode(output.token_ids, skip_special_tokens=False)


def walk(grammar, tokenizer, seed, stop_ids=frozenset({tiny.EOS}), patience=60, most=None):
    """A random text of the grammar: any allowed tokens, then whatever ends soonest; None beyond `most` tokens."""
    rng, matcher, ids = random.Random(seed), grammar.start(stop_ids), []
    while not matcher.done:
        allowed = (matcher.mask(torch.zeros(VOCAB)) == 0).nonzero().flatten().tolist()
        assert allowed
        if stop_ids & set(allowed) and (len(ids) > patience or rng.random() < 0.3):
            break
        allowed = [token_id for token_id in allowed if token_id not in stop_ids]
        ends = [token_id for token_id in allowed if tokenizer.token_bytes(token_id) in ENDS]
        ids.append(rng.choice(ends if ends and len(ids) > patience else allowed))
        matcher.accept(ids[-1])
        if most is not None and len(ids) > most:
            return None
        assert len(ids) < 2000
    return tokenizer.decode(ids)


SCHEMAS = {
    "anything": {},
    "string": STRING,
    "integer": INTEGER,
    "number": {"type": "number"},
    "several types": {
        "type": ["object", "array", "string"],
        "properties": {"a": INTEGER},
        "maxLength": 2,
        "maxItems": 1,
    },
    "lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}[^x]\\d$"},
    "pattern beyond ASCII": {"type": "string", "pattern": "^[a-cé]{2,4}\\u4e00\\d$"},
    "pattern of anything": {"type": "string", "pattern": "^.{3,5}$"},
    "range": {"type": "integer", "exclusiveMinimum": -7, "maximum": 12},
    "open range": {"type": "number", "minimum": 3.25},
    "real range": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.001},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": -20, "maximum": 20},
    "enum": {"enum": ['a"b', "c\\d", "é\n", 1.5, None, {"x": [1]}, "<eos>"]},
    "typed enum": {"type": "string", "enum": ["a", "b"]},
    "const": {"const": {"b": [1, None], "a": "é"}},
    "array": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 3},
    "any array": {"type": "array", "minItems": 1},
    "tuple": {"type": "array", "prefixItems": [INTEGER, BOOLEAN], "items": {"type": "null"}, "maxItems": 4},
    "person": PERSON,
    "any object": {"type": "object"},
    "optional": {"type": "object", "properties": {"a": INTEGER, "b": BOOLEAN, "c": INTEGER}, "minProperties": 2},
    "map": {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": BOOLEAN, "required": ["a"]},
    "names": {"type": "object", "propertyNames": {"pattern": "^[a-z]{1,3}$"}, "additionalProperties": INTEGER},
    "pattern names": {"type": "object", "patternProperties": {"^x[ab]$": INTEGER}, "additionalProperties": False},
    "odd names": {"type": "object", "properties": {'a"b': INTEGER, "é": INTEGER}, "required": ['a"b', "é"]},
    "anyOf": {"$defs": {"x": INTEGER}, "anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "default": None},
    "oneOf": {
        "oneOf": [
            {"type": "object", "properties": {"t": {"const": "a"}, "x": INTEGER}, "required": ["t", "x"]},
            {"type": "object", "properties": {"t": {"const": "b"}, "x": STRING}, "required": ["t", "x"]},
        ]
    },
    "recursive": {
        "$defs": {"n": {"type": "object", "properties": {"v": INTEGER, "n": {"$ref": "#/$defs/n"}}, "required": ["v"]}},
        "$ref": "#/$defs/n",
    },
    "allOf": {"$defs": {"x": INTEGER}, "allOf": [{"$ref": "#/$defs/x"}]},
    "date": {"type": "string", "format": "date"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_random_text_of_a_schema_parses_and_validates(name, tokenizer):
    grammar = compiled("json_schema", SCHEMAS[name], tokenizer)
    for seed in range(25):
        text = walk(grammar, tokenizer, seed)
        jsonschema.validate(json.loads(text), SCHEMAS[name], format_checker=jsonschema.FormatChecker())


ATOMS = ("a", "1", " ", r"\.", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", ".", "[abc]", "[^a]", "[ -~]", '[^"]', '["b]')
ATOMS += (r"[^\s]", r"[\w\s]", r"[!-\]]", r"[\x00-\x7f]", r"\x41", r"[\\b]", "~", "é", "[aé]", r"[\u4e00-\u9fa5a-z]")
ECMA_SPACE = r"\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"


def random_pattern(rng, depth=0):
    """A pattern of the kind that schemas have."""
    kind = rng.random()
    if depth > 3 or kind < 0.45:
        return rng.choice(ATOMS)
    if kind < 0.7:
        return random_pattern(rng, depth + 1) + random_pattern(rng, depth + 1)
    if kind < 0.8:
        return f"({random_pattern(rng, depth + 1)}|{random_pattern(rng, depth + 1)})"
    return f"(?:{random_pattern(rng, depth + 1)})" + rng.choice(("*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "??"))


def python_pattern(pattern):
    """What Python matches as JavaScript matches the pattern, in ASCII mode."""
    for written, meant in ((r"[^\s]", f"[^{ECMA_SPACE}]"), (r"[\w\s]", rf"[\w{ECMA_SPACE}]")):
        pattern = pattern.replace(written, meant)
    return pattern.replace(r"\S", f"[^{ECMA_SPACE}]").replace(r"\s", f"[{ECMA_SPACE}]")


@pytest.mark.parametrize("seed", range(8))
def test_random_texts_of_random_patterns_are_json_and_match_them(seed, tokenizer):
    rng, taken = random.Random(seed), 0
    for _ in range(60):
        pattern = f"^{random_pattern(rng)}$"
        try:
            grammar = compiled("json_schema", {"type": "string", "pattern": pattern}, tokenizer)
        except RequestError:
            continue
        text = walk(grammar, tokenizer, rng.random(), patience=30, most=300)
        if text is None:
            continue
        taken += 1
        assert re.search(python_pattern(pattern), json.loads(text), re.ASCII), (pattern, text)
    assert taken > 30


def test_every_random_json_object_is_one(tokenizer):
    grammar = compiled("json_object", "", tokenizer)
    found = [json.loads(walk(grammar, tokenizer, seed)) for seed in range(40)]
    assert all(isinstance(value, dict) for value in found)
    assert len({json.dumps(value) for value in found}) > 10


def test_random_bytes_of_a_grammar_are_always_utf_8(tokenizer):
    grammar = compiled("regex", "x[^a]{20}", tokenizer)
    for seed in range(100):
        text = walk(grammar, tokenizer, seed)
        assert "\ufffd" not in text
        assert re.fullmatch("x[^a]{20}", text, re.DOTALL)


def test_random_texts_of_an_ebnf_grammar_are_derived_from_it(tokenizer):
    grammar = compiled("grammar", 'root ::= sum\nsum ::= [0-9] | "(" sum " + " sum ")"\n', tokenizer)
    for seed in range(20):
        text = walk(grammar, tokenizer, seed, patience=0)
        while re.search(r"\(\d \+ \d\)", text):
            text = re.sub(r"\(\d \+ \d\)", "0", text)
        assert re.fullmatch(r"\d", text)


def test_a_tokenizer_with_byte_fallback_works_as_well():
    tokenizer = Tokenizer(None, PreTrainedTokenizerFast(tokenizer_object=SENTENCEPIECE, eos_token="<eos>"))
    grammar = Grammar.compile("regex", "the( cat|é漢)+s", tokenizer, 300)
    ids = [tokenizer._tokenizer.convert_tokens_to_ids(token) for token in ("▁", "▁the", "▁cat", "s")]
    matcher = grammar.start(frozenset())
    assert (matcher.mask(torch.zeros(300)) == 0).nonzero().flatten().tolist() == [ord("t")]
    for token_id in [*b"the", ids[2], *"é漢".encode(), ids[3]]:
        matcher.accept(token_id)
    assert matcher.done


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_an_answer_of_the_engine_validates_whatever_the_weights_say(temperature, directory, llm, tokenizer):
    grammar = compiled("json_schema", PERSON, tokenizer)
    ended = 0
    for seed in range(12):
        output, text = answer(llm, grammar, temperature=temperature, seed=seed, prompt=(seed + 1, 7))
        assert output.text == text
        if output.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(text), PERSON)
        else:
            assert output.finish_reason == "length"
    assert ended


def grammars(tokenizer):
    return [
        compiled("json_schema", PERSON, tokenizer),
        None,
        compiled("regex", "[a-f]+[0-9]{12}(ab)*", tokenizer),
        compiled("json_object", "", tokenizer),
        None,
        compiled("grammar", 'root ::= [a-z] root | "."', tokenizer),
    ]


def run_all(llm, grammars):
    params = [SamplingParams(max_tokens=40, temperature=1.2, seed=seed) for seed in range(len(grammars))]
    prompts = [[seed + 1] * (seed * 5 + 1) for seed in range(len(grammars))]
    requests = [llm.engine.request(*each) for each in zip(prompts, params, grammars, strict=True)]
    for request in requests:
        llm.engine.add(request)
    return requests


def drain(llm, requests):
    while not llm.engine.idle:
        llm.engine.step()
    return [request.output().token_ids for request in requests]


@pytest.fixture(scope="module")
def alone(directory, tokenizer):
    """Each request on an engine of its own."""
    tokens = []
    for index in range(6):
        llm = open_llm(directory)
        [request] = run_all(llm, grammars(tokenizer))[index : index + 1]
        for other in [*llm.engine._scheduler.waiting]:
            if other is not request:
                llm.engine.abort(other)
        tokens += drain(llm, [request])
    return tokens


@pytest.mark.parametrize("options", [{}, {"token_budget": 1}, {"token_budget": 3}, {"max_batch": 2}], ids=str)
def test_a_request_with_a_grammar_gets_the_same_tokens_in_a_mixed_batch(options, directory, tokenizer, alone):
    llm = open_llm(directory, **options)
    assert drain(llm, run_all(llm, grammars(tokenizer))) == alone


def test_a_request_with_a_grammar_gets_the_same_tokens_when_it_is_preempted(directory, tokenizer, alone):
    llm = open_llm(directory, kv_bytes=20 * tiny.PAGE_BYTES)
    assert drain(llm, run_all(llm, grammars(tokenizer))) == alone
    assert llm.stats.preemptions


def test_a_request_with_a_grammar_gets_the_same_tokens_after_every_restart(directory, tokenizer, alone):
    llm = open_llm(directory)
    requests = run_all(llm, grammars(tokenizer))
    while not llm.engine.idle:
        llm.engine.step()
        llm.engine._scheduler.restart()
    assert [request.output().token_ids for request in requests] == alone


def test_an_answer_ends_without_an_end_of_sequence_where_nothing_may_follow(llm, tokenizer):
    output, text = answer(llm, compiled("regex", "[a-z]{3}!", tokenizer))
    assert (output.finish_reason, output.stopped_by) == ("stop", None)
    assert re.fullmatch("[a-z]{3}!", text)
    assert output.usage.completion_tokens == 4


def test_an_end_of_sequence_is_allowed_exactly_where_the_grammar_may_end(llm, tokenizer):
    grammar = compiled("regex", "[a-z]{3}(ab)*", tokenizer)
    bias = {tiny.EOS: 100.0}
    output, text = answer(llm, grammar, logit_bias=bias)
    assert (output.finish_reason, output.stopped_by) == ("stop", tiny.EOS)
    assert re.fullmatch("[a-z]{3}<eos>", text)


def test_with_eos_ignored_the_grammar_goes_on_as_long_as_it_can(llm, tokenizer):
    grammar = compiled("regex", "[a-z]{3}(ab)*", tokenizer)
    output, text = answer(llm, grammar, ignore_eos=True, logit_bias={tiny.EOS: 100.0}, max_tokens=21)
    assert output.finish_reason == "length"
    assert re.fullmatch("[a-z]{3}(ab){9}", text)


def test_a_stop_id_that_is_text_ends_the_answer_only_where_the_grammar_may_end(llm, tokenizer):
    grammar = compiled("regex", "x{5}y*", tokenizer)
    x = tokenizer.encode("x")[0]
    output, text = answer(llm, compiled("regex", "[xy]{5}y*", tokenizer), stop_token_ids=(x,), logit_bias={x: 100.0})
    assert (output.finish_reason, output.stopped_by, text) == ("stop", x, "yyyyyx")
    output, _ = answer(llm, grammar, stop_token_ids=(x,))
    assert output.finish_reason == "error"
    assert "grammar" in output.error


def test_a_stop_string_ends_an_answer_before_its_grammar_does(llm, tokenizer):
    output, _ = answer(llm, compiled("regex", "aaaa-bbbb", tokenizer), stop=("-b",))
    assert (output.text, output.finish_reason, output.stopped_by) == ("aaaa", "stop", "-b")


def test_max_tokens_end_an_answer_before_its_grammar_does(llm, tokenizer):
    output, text = answer(llm, compiled("regex", "a{50}", tokenizer), max_tokens=7)
    assert (output.finish_reason, text) == ("length", "a" * 7)


def test_a_grammar_that_is_complete_with_the_last_token_allowed_ends_with_stop(llm, tokenizer):
    output, _ = answer(llm, compiled("regex", "a{7}", tokenizer), max_tokens=7)
    assert output.finish_reason == "stop"


def test_log_probabilities_are_those_of_the_model_and_not_of_the_grammar(llm, tokenizer):
    output, _ = answer(llm, compiled("regex", "abc", tokenizer), logprobs=2, temperature=0.0)
    assert all(entry.logprob < 0 for entry in output.logprobs)
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)


def test_special_tokens_are_never_text_of_a_grammar(llm, tokenizer):
    bias = dict.fromkeys((256, 258), 100.0)
    output, text = answer(llm, compiled("regex", "[^q]{12}", tokenizer), logit_bias=bias)
    assert output.finish_reason == "stop"
    assert not {256, 257, 258, 259} & set(output.token_ids)
    assert text == output.text


def test_a_grammar_of_the_answer_begins_after_the_reasoning(llm, tokenizer):
    opening, closing = tokenizer.encode("<s>", bare=True)[0], tokenizer.encode("!", bare=True)[0]
    grammar = compiled("regex", "[0-9]{4}", tokenizer)
    for seed in range(6):
        inside = grammar.after(Reasoning(opening, (closing,), inside=True))
        output, text = answer(llm, inside, seed=seed, max_tokens=90, logit_bias={closing: 4.0, tiny.EOS: 9.0})
        assert output.finish_reason == "stop"
        assert re.fullmatch(r"[^!]*![0-9]{4}", text.replace("<end>", ""), re.DOTALL)
    maybe = grammar.after(Reasoning(opening, (closing,), inside=False))
    _, text = answer(llm, maybe)
    assert re.fullmatch("[0-9]{4}", text)
    _, text = answer(llm, maybe, logit_bias={opening: 100.0, closing: 4.0}, max_tokens=90)
    assert text.startswith("<s>")


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(a", "not closed"),
        ("regex", "a(?=b)", "Lookahead"),
        ("regex", "", "no text that matches"),
        ("grammar", "root ::= foo", "foo"),
        ("grammar", 'start ::= "a"', "root"),
        ("grammar", "root ::= root", "no text that matches"),
        ("grammar", "root ::= " + "(" * 20_000, "limit"),
        ("grammar", "x" * 70_000, "70,000"),
        ("json_schema", '{"type": "object"', "JSON"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"$ref": "#/$defs/x"}', r"\$defs"),
        ("json_schema", '{"$ref": "#"}', "#"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum"),
    ],
)
def test_a_bad_grammar_is_a_request_error_that_names_what_is_wrong(kind, text, message, tokenizer):
    with pytest.raises(RequestError, match=message) as caught:
        compiled(kind, text, tokenizer)
    assert kind in str(caught.value)
    assert ".cc:" not in str(caught.value)


def test_one_compiler_serves_all_grammars_of_a_tokenizer(tokenizer):
    one, other = (compiled("regex", text, tokenizer) for text in ("a", "b"))
    assert one._words is other._words
