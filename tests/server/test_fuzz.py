"""Bodies that no client should send: none of them is the server's fault, and none changes it."""

import http.client
import json
import random
import subprocess
import sys
from collections import Counter

import httpx
import pytest

from server.process import Server

BODIES = 10_000
SAID = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
VALID = {
    "/v1/chat/completions": [
        {"model": "tiny", "messages": SAID, "max_tokens": 2, "temperature": 0.5, "seed": 1, "n": 2},
        {"messages": SAID, "max_completion_tokens": 1, "logprobs": True, "top_logprobs": 2, "stop": ["a", "b"]},
        {"messages": SAID, "max_tokens": 1, "tools": [TOOL], "tool_choice": "auto", "logit_bias": {"5": 1}},
        {"messages": SAID, "max_tokens": 1, "response_format": {"type": "regex", "regex": "[a-z]+"}},
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "x"}]},
                {"role": "assistant", "content": "y", "reasoning_content": "z"},
                {"role": "tool", "content": "1", "tool_call_id": "2"},
            ],
            "max_tokens": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ],
    "/v1/completions": [
        {"prompt": "hello", "max_tokens": 2, "logprobs": 2, "top_k": 3, "min_p": 0.1, "stop_token_ids": [3]},
        {"prompt": [[1, 2], [3]], "max_tokens": 1, "repetition_penalty": 1.1, "ignore_eos": True},
    ],
    "/v1/responses": [{"input": "hello", "max_output_tokens": 1, "text": {"format": {"type": "text"}}}],
    "/tokenize": [{"prompt": "hello"}, {"messages": SAID}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
ODD = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308, "", "x", "\ud800", "\x00", "é" * 50,
    "🙂", "a" * 5000, "-1", "nan", "__class__", "{{7*7}}", "../../etc/passwd", [], {}, [[]], [{}], {"": ""}, [None],
    ["x"] * 40, {"type": "function"}, {"type": "text"}, {"role": "user"}, [1, "x", None], {"$ref": "#"},
]  # fmt: skip


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from places(child, (*path, key))


def mutated(chance, value):
    """The value with something in it replaced, left out or added."""
    value = json.loads(json.dumps(value))
    *before, last = chance.choice([path for path in places(value) if path])
    parent = value
    for key in before:
        parent = parent[key]
    match chance.randrange(4):
        case 0:
            del parent[last]
        case 1 if isinstance(parent, dict):
            parent[chance.choice(["x", "", "\ud83d", "n", "stop", "stream", "seed", "type", last + "s"])] = parent[last]
        case _:
            parent[last] = chance.choice(ODD)
    return value


def body(chance, path):
    value = chance.choice(VALID[path])
    for _ in range(chance.randrange(4)):
        value = mutated(chance, value) if value else value
    raw = json.dumps(value).encode()
    if chance.random() < 0.2:
        place = chance.randrange(len(raw) + 1)
        junk = chance.choice(
            [b"", b"\x00", b"\xff", b'"', b"{" * 500, b"[" * 3000, b",", b"\\", b"1e999", b"NaN", b"9" * 5000]
        )
        raw = raw[:place] + junk + raw[place + chance.randrange(3) :]
    return raw


@pytest.fixture(scope="module")
def fuzzed(checkpoint):
    """A server of so short a context that a body without a limit costs little."""
    with Server(checkpoint, "--max-context", 48) as running:
        yield running


def test_ten_thousand_mutilated_bodies_are_answered_and_none_with_500(fuzzed):
    chance = random.Random(0)
    connection = http.client.HTTPConnection("127.0.0.1", httpx.URL(fuzzed.url).port, timeout=60)
    statuses = Counter()
    for _ in range(BODIES):
        path = chance.choice(list(VALID))
        raw = body(chance, path)
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        statuses[answer.status] += 1
        assert answer.status in (200, 400, 404), (answer.status, path, raw[:2000], content[:500])
        if answer.status != 200:
            error = json.loads(content)["error"]
            assert error["reasons"], raw
            assert "expected" in error["message"] or "found" in error["message"], (raw, error)
    # A fuzzer that is always or never refused tests nothing.
    assert min(statuses[200], statuses[400]) > BODIES / 10, statuses
    fuzzed.wait(fuzzed.at_rest)
    assert fuzzed.get("/health/ready").json()["ready"]


def test_the_openapi_document_is_kept_to(fuzzed):
    """What schemathesis makes of the document, valid and not, is answered as the document says."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{fuzzed.url}/openapi.json", "--checks", checks]
    command += ["--max-examples", "25", "--seed", "1", "--phases", "examples,coverage,fuzzing", "--no-color"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd="/")
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
