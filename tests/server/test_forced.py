"""Answers that must be calls, from the schema through the grammar to the parser."""

import json

import jsonschema
import pytest
from engine import tiny
from engine.test_grammar import walk

from muster.engine.grammar import Grammar
from muster.engine.tokenizer import Tokenizer
from muster.errors import RequestError
from muster.server.forced import calls_schema
from server.parsing import calls, content, parse

FUNCTIONS = {
    "look_up": {
        "type": "object",
        "properties": {"count": {"$ref": "#/$defs/number"}, "deep": {"type": "boolean"}},
        "required": ["count"],
        "$defs": {"number": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
    "mcp.read-file": {"properties": {"path": {"type": "string", "maxLength": 4}}, "required": ["path"]},
    "now": {},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(tiny.save(tiny.mixtral(), tmp_path_factory.mktemp("forced")))


@pytest.mark.parametrize("parallel", [False, True])
def test_random_answers_are_calls_of_the_functions_with_arguments_of_their_schemas(parallel, tokenizer):
    schema = calls_schema(FUNCTIONS, parallel=parallel)
    grammar = Grammar.compile("json_schema", schema, tokenizer, 260)
    names, most = set(), 0
    for seed in range(40):
        text = walk(grammar, tokenizer, seed, patience=400)
        events = parse(list(text), None, None, forced=True)
        assert content(events) == ""
        found = calls(events)
        for _, name, arguments in found:
            assert isinstance(json.loads(arguments), dict)
            jsonschema.validate(json.loads(arguments), FUNCTIONS[name])
            names.add(name)
        assert found
        most = max(most, len(found))
    assert names == FUNCTIONS.keys()
    assert (most > 1) == parallel


def test_a_function_whose_schema_cannot_be_held_to_is_refused_by_its_name(tokenizer):
    schema = calls_schema({"f": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}, parallel=False)
    with pytest.raises(RequestError, match=r"\$defs\.f\.properties\.a\.uniqueItems"):
        Grammar.compile("json_schema", schema, tokenizer, 260)
