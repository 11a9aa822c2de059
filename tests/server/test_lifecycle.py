"""From start to end: readiness, keys, the queue, clients that go, faults, signals."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from server.launch import TRIGGER
from server.process import Server

LONG = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
BAD = {"prompt": [TRIGGER, 1, 2], "max_tokens": 5}


@pytest.fixture(scope="module")
def slow(checkpoint):
    """A server whose steps take 30 ms, with room for little."""
    with Server(checkpoint, "--max-batch", 4, "--max-queue", 2, fault="slow") as running:
        yield running


def stream(server, body):
    """An open stream; the caller closes it."""
    client = httpx.Client(timeout=60)
    request = client.build_request("POST", f"{server.url}/v1/completions", json={**body, "stream": True})
    return client.send(request, stream=True)


def sent(connection, path, body, length=None):
    """Sends a request, perhaps not all of it, and reads nothing."""
    raw = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines.append(f"Content-Length: {length or len(raw)}")
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + raw)


@pytest.mark.parametrize("streaming", [True, False])
def test_the_pages_of_a_client_that_goes_are_free_at_once(slow, streaming):
    slow.wait(slow.at_rest)
    with socket.create_connection(("127.0.0.1", httpx.URL(slow.url).port)) as connection:
        sent(connection, "/v1/completions", {**LONG, "stream": streaming})
        slow.wait(lambda: slow.state()["running"] == 1)
    before = slow.state()["last_step"]["number"]
    slow.wait(slow.at_rest)
    # The state is asked over HTTP between steps of 30 ms: what is more than this would be steps for nobody.
    assert slow.state()["last_step"]["number"] <= before + 2
    slow.wait(lambda: any(line.get("gone") for line in list(slow.log)))


def test_a_full_queue_says_so_and_when_to_come_again(slow):
    slow.wait(slow.at_rest)
    streams = [stream(slow, LONG) for _ in range(4)]
    waiting = [threading.Thread(target=lambda: stream(slow, {**LONG, "max_tokens": 2}).read()) for _ in range(2)]
    for thread in waiting:
        thread.start()
    slow.wait(lambda: slow.state()["alive"] == 6)
    answer = slow.post("/v1/completions", LONG)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert "6 requests ahead, 1 more, expected at most 6" in answer.json()["error"]["message"]
    never = slow.post("/v1/completions", {**LONG, "n": 7})
    assert (never.status_code, never.json()["error"]["param"]) == (400, "answers")
    for response in streams:
        response.close()
    for thread in waiting:
        thread.join(30)
    slow.wait(slow.at_rest)


def test_a_client_that_does_not_read_stalls_nobody(slow):
    slow.wait(slow.at_rest)
    # With a small receive buffer and top log-probabilities its answer is far more than the sockets hold.
    lazy = socket.socket()
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lazy.connect(("127.0.0.1", httpx.URL(slow.url).port))
    sent(lazy, "/v1/completions", {**LONG, "max_tokens": 300, "logprobs": 20, "stream": True})
    slow.wait(lambda: slow.state()["running"] == 1)
    began = time.monotonic()
    assert slow.post("/v1/completions", {**LONG, "max_tokens": 20}).status_code == 200
    assert time.monotonic() - began < 10
    # Its answer is computed to the end though it takes none of it, and is whole when it does.
    slow.wait(lambda: slow.state()["running"] == 0)
    lazy.settimeout(30)
    received = b""
    while b"[DONE]" not in received:
        received += lazy.recv(1 << 16)
    lazy.close()
    events = [line for line in received.split(b"\n") if b"data: {" in line]
    tokens = sum(len(json.loads(line[line.index(b"{") :])["choices"][0]["logprobs"]["tokens"]) for line in events)
    assert tokens == 300
    slow.wait(slow.at_rest)


def test_a_short_prompt_is_not_held_up_by_a_long_one(checkpoint):
    with Server(checkpoint, "--token-budget", 32, fault="slow") as server:
        long = {"prompt": [1] * 1000, "max_tokens": 1, "ignore_eos": True}
        done = {}

        def ask(name, body):
            server.post("/v1/completions", body)
            done[name] = server.state()["last_step"]["number"]

        threads = [threading.Thread(target=ask, args=("long", long))]
        threads[0].start()
        server.wait(lambda: server.state()["running"] == 1)
        threads.append(threading.Thread(target=ask, args=("short", {**long, "prompt": [2] * 8, "max_tokens": 4})))
        threads[1].start()
        for thread in threads:
            thread.join(60)
        assert done["short"] < done["long"] - 10


def test_health_is_honest_from_the_first_moment(checkpoint):
    with Server(checkpoint, wait=False) as server:
        server.url = server.event("listening")["url"]
        assert server.get("/health/live").status_code == 200
        first = server.get("/health/ready")
        if first.status_code == 503:
            assert first.json()["reasons"] == ["the server is loading"]
            answer = server.post("/v1/completions", {"prompt": "x"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        server.wait(lambda: server.get("/health/ready").status_code == 200)
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_model_that_does_not_pass_its_canary_is_never_ready(checkpoint):
    server = Server(checkpoint, fault="canary", wait=False)
    assert server.exit_code(60) == 1
    assert "the same after every token" in server.text
    assert "Traceback" not in server.text


def test_nan_fails_its_own_request_and_takes_readiness_away(checkpoint, tmp_path):
    with Server(checkpoint, fault="nan", home=tmp_path) as server:
        good = stream(server, {**LONG, "max_tokens": 300})
        answer = server.post("/v1/completions", BAD)
        assert answer.status_code == 500
        assert "NaN" in answer.json()["error"]["message"]
        broken = stream(server, BAD)
        assert broken.status_code == 500
        ready = server.get("/health/ready")
        assert ready.status_code == 503
        assert "logits" in ready.json()["reasons"][0]
        assert b"[DONE]" in good.read()
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 3}).status_code == 200
        server.wait(server.at_rest)


def test_a_fatal_error_ends_the_process_with_a_report_and_every_client_with_an_error(checkpoint, tmp_path):
    with Server(checkpoint, fault="fatal", home=tmp_path) as server:
        good = stream(server, LONG)
        lines = good.iter_lines()
        next(lines)
        answer = server.post("/v1/completions", BAD)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
        assert "engine_failed" in "".join(lines)
        assert server.exit_code() == 1
        [path] = (tmp_path / "crashes").iterdir()
        report = json.loads(path.read_text())
        assert report["failure"] == "RuntimeError: the device is gone"
        assert {part["role"] for part in report["plan"]["parts"]} == {"experts", "linears"}
        assert report["shapes"]["hidden"] == 64
        assert {"prompt_tokens": 3, "start": 0, "end": 3} in report["last_step"]["requests"]
        assert str(path) in server.event("fatal")["report"]
        assert "in fatal" in "".join(report["traceback"])


def test_a_step_that_hangs_takes_readiness_away_and_then_ends_the_process(checkpoint, tmp_path):
    with Server(checkpoint, "--watchdog", 1, fault="hang", home=tmp_path) as server:
        asking = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", BAD)))
        answers = []
        asking.start()
        server.wait(lambda: server.get("/health/ready").status_code == 503, 10)
        assert "expected at most 1 s" in server.get("/health/ready").json()["reasons"][0]
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 503
        assert server.exit_code() == 1
        asking.join(10)
        assert answers[0].status_code == 500
        [path] = (tmp_path / "crashes").iterdir()
        assert any("time.sleep(3600)" in line for line in json.loads(path.read_text())["threads"]["engine"])


def test_a_step_that_ends_late_gives_readiness_back(checkpoint):
    with Server(checkpoint, "--watchdog", 1, fault="nap") as server:
        assert server.post("/v1/completions", BAD).status_code == 200
        assert server.event("hang")
        assert server.event("recovered")
        assert server.get("/health/ready").status_code == 200


def test_a_signal_drains_what_is_on_its_way(checkpoint):
    with Server(checkpoint, fault="slow") as server:
        answer = stream(server, {**LONG, "max_tokens": 60})
        server.signal(signal.SIGTERM)
        server.event("draining")
        ready = server.get("/health/ready")
        assert (ready.status_code, ready.json()["reasons"]) == (503, ["the server is draining"])
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 503
        assert b"[DONE]" in answer.read()
        assert server.exit_code() == 0


def test_what_does_not_end_before_the_deadline_is_cut_with_an_error(checkpoint):
    with Server(checkpoint, "--drain", 0.5, fault="slow") as server:
        answer = stream(server, LONG)
        server.signal(signal.SIGTERM)
        assert b"shutting_down" in answer.read()
        assert server.exit_code() == 1
        assert server.event("drained")["cut"] == 1


def test_a_second_interrupt_ends_it_at_once(checkpoint):
    with Server(checkpoint, fault="slow") as server:
        answer = stream(server, LONG)
        server.signal(signal.SIGINT)
        server.event("draining")
        began = time.monotonic()
        server.signal(signal.SIGINT)
        assert server.exit_code() == 130
        assert time.monotonic() - began < 2
        answer.close()


def test_an_idle_server_that_is_interrupted_says_130(checkpoint):
    with Server(checkpoint) as server:
        server.signal(signal.SIGINT)
        assert server.exit_code() == 130


def test_a_key_opens_the_api_and_is_told_to_nobody(checkpoint, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret-one\nsecret-two\n")
    with Server(checkpoint, "--api-key-file", keys, wait=False) as server:
        server.url = server.event("listening")["url"]
        server.wait(lambda: server.get("/health/ready").status_code == 200)
        for headers in ({}, {"authorization": "Bearer secret-on"}, {"authorization": "Basic secret-one"}):
            answer = server.post("/v1/completions", {"prompt": "x"}, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "secret" not in answer.text
        assert server.get("/metrics").status_code == 401
        good = {"authorization": "Bearer secret-two"}
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=good).status_code == 200
        assert "secret" not in server.text


def test_a_web_page_under_another_name_cannot_use_a_server_without_a_key(server):
    answer = server.post("/v1/completions", {"prompt": "x"}, headers={"host": "evil.example:80"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (421, "host")
    assert server.get("/health/live", headers={"host": "localhost"}).status_code == 200


def test_a_client_that_goes_in_the_middle_of_its_body_is_no_bug(server):
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as connection:
        sent(connection, "/tokenize", {}, length=100)
        time.sleep(0.2)
    server.wait(lambda: any(line.get("status") == 408 for line in list(server.log)))


def test_it_listens_on_loopback_alone(server):
    assert server.url.startswith("http://127.0.0.1:")
    port = httpx.URL(server.url).port
    table = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=False).stdout
    assert f"0.0.0.0:{port} " not in table


def test_a_port_in_use_is_a_plain_error(server, checkpoint):
    port = httpx.URL(server.url).port
    command = [sys.executable, "-m", "muster.cli", "serve", str(checkpoint), "--port", str(port)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert f"127.0.0.1 port {port}" in result.stderr
    assert "Traceback" not in result.stderr


def test_every_bad_option_is_told_at_once(tmp_path):
    options = ["--reasoning-style", "x", "--max-body", "0", "--kv-gib", "-1"]
    command = [sys.executable, "-m", "muster.cli", "serve", str(tmp_path / "none"), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    for name in ("MODEL", "--reasoning-style", "--max-body", "--kv-gib"):
        assert name in result.stderr


def test_killed_in_the_middle_it_starts_again_and_answers_the_same(checkpoint, tmp_path):
    body = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
    with Server(checkpoint, fault="slow", home=tmp_path) as server:
        expected = server.post("/v1/completions", body).json()["choices"]
        streams = [stream(server, {**LONG, "prompt": [index] * 50}) for index in range(8)]
        server.signal(signal.SIGKILL)
        assert server.exit_code() == -signal.SIGKILL
        for response in streams:
            with pytest.raises(httpx.TransportError):
                response.read()
        port = httpx.URL(server.url).port
    with Server(checkpoint, "--port", port, home=tmp_path) as again:
        assert again.url == server.url
        assert again.post("/v1/completions", body).json()["choices"] == expected
        assert again.at_rest()
