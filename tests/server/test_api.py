"""The API as its clients use it: the openai package and curl against a real process."""

import json
import math
import re
import subprocess

import openai
import pytest

from muster import LLM, SamplingParams
from server.small import CONTEXT

SAID = [{"role": "user", "content": "hello"}]
SHORT = {"max_tokens": 24, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
CALL = r'<tool_call>\{"name": "add", "arguments": \{"a": 1, "b": "</tool_call>"\}\}</tool_call>'
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


def joined(chunks):
    """The choices of a stream put together as the document without a stream has them, and the usage."""
    choices, usage = {}, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            into = choices.setdefault(
                choice.index, {"content": "", "reasoning": "", "ids": [], "logprobs": [], "calls": []}
            )
            assert "finish" not in into, "something follows the last chunk"
            delta = choice.delta
            into["content"] += delta.content or ""
            into["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            into["ids"] += getattr(choice, "token_ids", None) or []
            into["logprobs"] += choice.logprobs.content if choice.logprobs else []
            for call in delta.tool_calls or []:
                if call.id:
                    into["calls"].append({"name": call.function.name, "arguments": ""})
                into["calls"][call.index]["arguments"] += call.function.arguments
            if choice.finish_reason:
                into["finish"] = choice.finish_reason
    return [choices[index] for index in sorted(choices)], usage


def whole(completion):
    return [
        {
            "content": choice.message.content or "",
            "reasoning": getattr(choice.message, "reasoning_content", None) or "",
            "ids": getattr(choice, "token_ids", None) or [],
            "logprobs": choice.logprobs.content if choice.logprobs else [],
            "calls": [
                {"name": call.function.name, "arguments": call.function.arguments}
                for call in choice.message.tool_calls or []
            ],
            "finish": choice.finish_reason,
        }
        for choice in completion.choices
    ], completion.usage


def plain(usage):
    """Usage without what the cache had, which differs from one run to the next."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


CHATS = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 7},
    "negative seed": {"seed": -7},
    "several": {"seed": 3, "n": 3},
    "logprobs": {"seed": 1, "logprobs": True, "top_logprobs": 3},
    "logprobs alone": {"seed": 1, "logprobs": True},
    "stop": {"seed": 5, "stop": ["e", "\u00e9", "ab"], "max_tokens": 400},
    "bias": {"temperature": 0, "logit_bias": {"65": 100}},
    "all options": {
        "seed": 11,
        "top_p": 0.9,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "extra_body": {
            "top_k": 40,
            "min_p": 0.01,
            "repetition_penalty": 1.1,
            "stop_token_ids": [250],
            "return_token_ids": True,
            "skip_special_tokens": False,
        },
    },
    "json object": {"seed": 2, "response_format": {"type": "json_object"}, "max_tokens": 60},
    "regex": {"seed": 2, "response_format": {"type": "regex", "regex": "(yes|no), [a-z]{3,9}"}},
    "grammar": {"seed": 2, "response_format": {"type": "grammar", "grammar": 'root ::= "a" | "b" root'}},
    "reasoning": {
        "seed": 4,
        "response_format": {"type": "regex", "regex": "[a-d]{9}</think>\\n\\n[x-z]{5}"},
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}, "return_token_ids": True},
    },
    "tool call": {
        "seed": 4,
        "max_tokens": 200,
        "tools": [ADD],
        "response_format": {"type": "regex", "regex": f"[x-z]{{4}}{CALL}{CALL}"},
    },
}


@pytest.mark.parametrize("name", CHATS)
def test_a_streamed_chat_is_the_whole_one(client, name):
    options = {"model": "tiny", "messages": SAID, **SHORT, **CHATS[name]}
    expected, usage = whole(client.chat.completions.create(**options))
    found, streamed_usage = joined(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert found == expected
    assert plain(streamed_usage) == plain(usage)
    assert sum(len(choice["ids"]) for choice in expected) == usage.completion_tokens
    assert all(choice["finish"] for choice in expected)


def test_reasoning_and_content_are_told_apart(client):
    [choice], _ = whole(client.chat.completions.create(model="tiny", messages=SAID, **{**SHORT, **CHATS["reasoning"]}))
    assert len(choice["reasoning"]) == 9
    assert choice["content"].strip().strip("xyz") == ""
    assert choice["finish"] == "stop"


def test_tool_calls_come_as_calls_with_their_arguments(client):
    options = {**SHORT, **CHATS["tool call"]}
    [choice], _ = whole(client.chat.completions.create(model="tiny", messages=SAID, **options))
    assert [call["name"] for call in choice["calls"]] == ["add", "add"]
    assert all(json.loads(call["arguments"]) == {"a": 1, "b": "</tool_call>"} for call in choice["calls"])
    assert choice["finish"] == "tool_calls"
    assert len(choice["content"]) == 4


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_is_asked_for_is_made_and_obeys_its_schema(client, choice):
    number = {"type": "integer", "enum": [1, 22]}
    schema = {"type": "object", "properties": {"a": number}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema, "strict": True}}
    options = {"model": "tiny", "messages": SAID, "tools": [tool], "tool_choice": choice, "max_tokens": 400, "seed": 3}
    [choice], _ = whole(client.chat.completions.create(**options))
    [call] = choice["calls"]
    assert call["name"] == "add"
    assert json.loads(call["arguments"])["a"] in (1, 22)
    assert choice["finish"] == "tool_calls"
    [streamed], _ = joined(client.chat.completions.create(**options, stream=True))
    assert streamed["calls"] == choice["calls"]


def test_without_tools_what_looks_like_a_call_is_text(client):
    options = {**SHORT, **CHATS["tool call"], "tools": openai.NOT_GIVEN}
    [choice], _ = whole(client.chat.completions.create(model="tiny", messages=SAID, **options))
    assert choice["calls"] == []
    assert choice["content"].count("<tool_call>") == 2


def test_an_answer_with_a_schema_obeys_it(client):
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}, "n": {"enum": [1, 2]}},
        "required": ["yes", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(model="tiny", messages=SAID, response_format=form, max_tokens=400, seed=1)
    document = json.loads(answer.choices[0].message.content)
    assert type(document["yes"]) is bool
    assert document["n"] in (1, 2)


def test_the_server_answers_what_the_engine_answers(client, checkpoint):
    llm = LLM(checkpoint, unproven=True, threads=1)
    expected = llm.generate("some text", SamplingParams(max_tokens=30, temperature=0.8, seed=5, logprobs=2))[0]
    answer = client.completions.create(
        model="tiny",
        prompt="some text",
        max_tokens=30,
        temperature=0.8,
        seed=5,
        logprobs=2,
        extra_body={"return_token_ids": True},
    )
    choice = answer.choices[0]
    assert choice.text == expected.text
    assert tuple(choice.token_ids) == expected.token_ids
    assert choice.finish_reason == expected.finish_reason
    assert choice.logprobs.token_logprobs == pytest.approx([entry.logprob for entry in expected.logprobs], abs=1e-4)
    assert answer.usage.completion_tokens == len(expected.token_ids)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "abc"},
        {"prompt": ["abc", "some other text"], "n": 2},
        {"prompt": [97, 98, 99]},
        {"prompt": [[97, 98], [99]], "logprobs": 2},
        {"prompt": "abc", "stop": "e", "max_tokens": 300},
    ],
)
def test_a_streamed_completion_is_the_whole_one(client, options):
    options = {"model": "tiny", **SHORT, "seed": 1, **options}
    expected = client.completions.create(**options)
    texts, ids, logprobs, reasons, usage = {}, {}, {}, {}, None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            ids[choice.index] = ids.get(choice.index, []) + choice.token_ids
            logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs if choice.logprobs else [])
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    choices = expected.choices
    assert [choice.index for choice in choices] == sorted(texts)
    assert [choice.text for choice in choices] == [texts[index] for index in sorted(texts)]
    assert [choice.token_ids for choice in choices] == [ids[index] for index in sorted(ids)]
    assert [choice.finish_reason for choice in choices] == [reasons[index] for index in sorted(reasons)]
    assert [c.logprobs.token_logprobs if c.logprobs else [] for c in choices] == [logprobs[i] for i in sorted(logprobs)]
    assert plain(usage) == plain(expected.usage)


def test_a_text_and_its_ids_are_the_same_prompt_and_each_prompt_counts_once(client):
    options = {"model": "tiny", "temperature": 0, "max_tokens": 5}
    text = client.completions.create(prompt="abc", **options)
    ids = client.completions.create(prompt=[97 - 33, 98 - 33, 99 - 33], n=2, **options)
    assert client.post("/../tokenize", body={"prompt": "abc"}, cast_to=object)["tokens"] == [64, 65, 66]
    assert [choice.text for choice in ids.choices] == [text.choices[0].text] * 2
    assert text.usage.prompt_tokens == ids.usage.prompt_tokens == 3


def test_several_answers_have_seeds_in_a_row(client):
    one = [
        client.completions.create(model="tiny", prompt="x", seed=5 + i, max_tokens=12).choices[0].text for i in range(3)
    ]
    three = client.completions.create(model="tiny", prompt="x", seed=5, n=3, max_tokens=12)
    assert [choice.text for choice in three.choices] == one
    assert len(set(one)) > 1


def test_logprobs_are_those_of_the_tokens_and_their_bytes_are_the_text(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=SAID,
        seed=1,
        max_tokens=30,
        logprobs=True,
        top_logprobs=4,
        extra_body=SHORT["extra_body"],
    )
    choice = answer.choices[0]
    entries = choice.logprobs.content
    assert len(entries) == len(choice.token_ids) == 30
    assert (
        b"".join(bytes(entry.bytes) for entry in entries)
        .decode("utf-8", "replace")
        .startswith(choice.message.content[:5])
    )
    for entry in entries:
        best = [top.logprob for top in entry.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert len(best) == 4
        assert entry.logprob <= 0
        assert sum(map(math.exp, best)) <= 1 + 1e-6


@pytest.mark.parametrize("options", [{}, {"instructions": "be brief"}, {"input": SAID}])
def test_a_streamed_response_is_the_whole_one(client, options):
    options = {"model": "tiny", "input": "hello", "max_output_tokens": 6, "temperature": 0, **options}
    expected = client.responses.create(**options)
    events = list(client.responses.create(**options, stream=True))
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.output_text
    )
    last = events[-1].response
    assert last.output_text == expected.output_text
    assert last.usage.output_tokens == expected.usage.output_tokens
    cut = expected.usage.output_tokens == options["max_output_tokens"]
    assert last.status == expected.status == ("incomplete" if cut else "completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert {event.type for event in events} >= {"response.output_item.added", "response.output_text.done"}


def test_a_response_keeps_to_its_schema_and_names_it(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "one", "schema": schema, "strict": True}
    answer = client.responses.create(model="tiny", input="hello", max_output_tokens=400, text={"format": form})
    assert answer.status == "completed"
    assert json.loads(answer.output_text)["a"] in (1, 2)
    assert answer.text.format.to_dict() == form


def test_the_answers_to_one_prompt_share_its_computation(server):
    before = tokens_by_kind(server)
    prompt = [7 * index % 250 for index in range(400)]
    answer = server.post("/v1/completions", {"prompt": prompt, "n": 4, "max_tokens": 2, "ignore_eos": True})
    assert len(answer.json()["choices"]) == 4
    after = tokens_by_kind(server)
    assert after["prompt"] - before["prompt"] == 4 * 400
    assert after["cached"] - before["cached"] == 3 * 384


def tokens_by_kind(server):
    lines = server.get("/metrics").text.splitlines()
    found = [re.fullmatch(r'muster_tokens_total\{kind="(\w+)"\} (\S+)', line) for line in lines]
    return {match[1]: float(match[2]) for match in found if match}


def test_models_are_listed_and_found_by_name(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        client.models.retrieve("another")
    with pytest.raises(openai.NotFoundError, match="expected 'tiny'"):
        client.completions.create(model="another", prompt="x")


@pytest.mark.parametrize("text", ["hello", "wörld 你好 \U0001f600", " spaces  \n"])
def test_tokens_and_text_are_each_others_inverse(server, text):
    answer = server.post("/tokenize", {"prompt": text}).json()
    assert answer["count"] == len(answer["tokens"]) == len(text.encode())
    assert answer["max_model_len"] == CONTEXT
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_a_conversation_is_tokenized_as_the_model_reads_it(server):
    tokens = server.post("/tokenize", {"messages": SAID}).json()["tokens"]
    text = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text == "<s>user:hello<s>assistant:<think></think>"


def curl(server, path, body):
    command = ["curl", "-sS", f"{server.url}{path}", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_curl_gets_a_document_and_a_stream(server):
    body = {"messages": SAID, "max_tokens": 8, "temperature": 0}
    content = json.loads(curl(server, "/v1/chat/completions", body))["choices"][0]["message"]["content"]
    lines = curl(server, "/v1/chat/completions", {**body, "stream": True}).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == content
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


REFUSED = {
    "an unknown field": ({"temprature": 1}, "temprature", "did you mean temperature"),
    "an unsupported field": ({"audio": {"voice": "x"}}, "audio", "text only"),
    "an unsupported value": ({"store": True}, "store", "keeps no responses"),
    "a wrong type": ({"max_tokens": "20"}, "max_tokens", "'20', expected a valid integer"),
    "a bool for a number": ({"temperature": True}, "temperature", "number"),
    "a range": ({"top_p": 1.5}, "top_p", "found 1.5, expected a number above 0 and at most 1"),
    "a role": ({"messages": [{"role": "usr", "content": "x"}]}, "messages[0].role", "'usr'"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        "image_url",
    ),
    "no messages": ({"messages": []}, "messages", "at least 1 item"),
    "a bias for no token": ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    "a bias for a foreign token": ({"logit_bias": {"70000": 1}}, "logit_bias", "0 to 259"),
    "too many answers": ({"n": 1000}, "n", "less than or equal to 64"),
    "two limits": ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "one of them"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    "stream options alone": ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    "a bad grammar": ({"response_format": {"type": "grammar", "grammar": "root ::= ("}}, "grammar", "found"),
    "a bad regex": ({"response_format": {"type": "regex", "regex": "(("}}, "regex", "found"),
    "a tool choice alone": ({"tool_choice": "auto"}, "tool_choice", "without tools"),
    "a tool that is not there": (
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        "tool_choice",
        "one of add",
    ),
    "a strict tool that may be called or not": (
        {"tools": [{**ADD, "function": {**ADD["function"], "strict": True}}]},
        "tools",
        "tool_choice 'required'",
    ),
    "a template option": ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "enable_thinking"),
    "a template": ({"chat_template_kwargs": {"chat_template": "{{1}}"}}, "chat_template_kwargs", "enable_thinking"),
    "a long prompt": ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "prompt", "at most 1023"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(server, name):
    more, param, text = REFUSED[name]
    answer = server.post("/v1/chat/completions", {"messages": SAID, **more})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert param in [reason["param"] for reason in error["reasons"]]
    assert text in error["message"]


def test_every_problem_is_told_at_once_and_the_client_raises(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=SAID, top_p=7, temperature=-1)
    assert [reason["param"] for reason in caught.value.body["reasons"]] == ["temperature", "top_p"]
    assert caught.value.param == "temperature"


def test_fields_that_ask_for_what_is_the_case_are_taken(server):
    neutral = {"store": False, "service_tier": "auto", "parallel_tool_calls": True, "audio": None, "metadata": {}}
    body = {"messages": SAID, "max_tokens": 1, **neutral, "user": "someone"}
    assert server.post("/v1/chat/completions", body).status_code == 200
    server.wait(lambda: any(line.get("user") == "someone" for line in list(server.log)))


@pytest.mark.parametrize(
    ("content", "kind", "status", "text"),
    [
        (b'{"messages": [', "application/json", 400, "EOF"),
        (b"[" * 100_000, "application/json", 400, "recursion"),
        (b'{"user":' + b"[" * 70 + b"]" * 70 + b"}", "application/json", 400, "64 levels"),
        (b"[1, 2]", "application/json", 400, "a JSON object"),
        (b'{"messages": NaN}', "application/json", 400, "JSON"),
        (b'{"prompt": "\\ud800"}', "application/json", 400, "JSON"),
        (b"\xff\xfe", "application/json", 400, "JSON"),
        (b"", "application/json", 400, "JSON"),
        (b"x" * (5 << 20), "application/json", 413, "4,194,304"),
        (b"[" + b"0," * 600_000 + b"0]", "application/json", 400, "500,000 values"),
        (b"{}", "text/plain", 415, "application/json"),
    ],
)
def test_a_body_beyond_the_limits_is_refused(server, content, kind, status, text):
    import httpx

    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers={"content-type": kind}, timeout=30)
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]


def test_no_path_and_no_wrong_method_is_a_plain_error(server):
    assert server.get("/v1/nothing").status_code == 404
    answer = server.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["reasons"][0]["found"] == "GET /v1/completions"


def test_every_answer_has_its_request_id_and_so_has_the_log(server):
    answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, headers={"x-request-id": "my-id.1"})
    assert answer.headers["x-request-id"] == "my-id.1"
    server.wait(lambda: any(line.get("id") == "my-id.1" for line in list(server.log)))
    line = next(line for line in server.log if line.get("id") == "my-id.1")
    assert (line["path"], line["status"], line["completion_tokens"]) == ("/v1/completions", 200, 2)
    odd = server.get("/health/live", headers={"x-request-id": "no good\tid"})
    assert odd.headers["x-request-id"] != "no good\tid"


def test_no_error_tells_where_the_server_keeps_its_files(server, checkpoint):
    bodies = [{}, {"messages": SAID, "top_p": 9}, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}]
    answers = [server.post(path, body).text for body in bodies for path in ("/v1/chat/completions", "/v1/completions")]
    answers += [server.get("/page/../../worker.py").text, server.get("/page/%2e%2e%2fworker.py").text]
    assert not [answer for answer in answers if str(checkpoint.parent) in answer or "muster/" in answer]


def test_health_metrics_plan_and_state_tell_what_is_the_case(server):
    server.post("/v1/completions", {"prompt": "x" * 40, "max_tokens": 4, "ignore_eos": True})
    assert server.get("/health/live").json() == {"live": True}
    assert server.get("/health/ready").json() == {"ready": True, "reasons": [], "phase": "serving", "canary": True}
    lines = [line for line in server.get("/metrics").text.splitlines() if not line.startswith("#")]
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    assert values["muster_ready"] == values["muster_canary_passed"] == 1
    assert values['muster_tokens_total{kind="generated"}'] >= 4
    assert values["muster_time_to_first_token_seconds_count"] >= 1
    assert values["muster_time_between_tokens_seconds_count"] >= 3
    assert values['muster_kv_pages{state="free"}'] > 0
    assert any(name.startswith("muster_plan_info{") and 'role="experts"' in name for name in values)
    plan = server.get("/v1/muster/plan").json()
    assert {part["role"] for part in plan["parts"]} == {"experts", "linears"}
    assert plan["proven"] is False
    assert all(entry["reason"] for part in plan["parts"] for entry in part["entries"])
    server.wait(server.at_rest)
