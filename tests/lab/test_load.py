"""`muster bench --server`: the clock rules, every request is accounted for, the numbers are those of the server."""

import asyncio
import csv
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from server import small
from server.process import Server

from muster.lab.load.arrivals import Arrivals
from muster.lab.load.client import Client
from muster.lab.load.figures import Figures, Spread
from muster.lab.load.lengths import Pair, parse
from muster.lab.load.load import Load, Run
from muster.lab.load.objective import Objective
from muster.lab.load.outcome import Answer, Chunk, Failure, Kind, Outcome
from muster.lab.load.report import Report
from muster.lab.load.stage import Request, Stage
from muster.lab.screen import Screen

from .commands import Muster, first_line
from .endpoint import Endpoint


@pytest.fixture(scope="module")
def muster(tmp_path_factory):
    return Muster(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    with Server(small.save(tmp_path_factory.mktemp("served") / "tiny")) as server:
        yield server


def load(url, **changes):
    """Ten requests of four tokens at 100 per second, by a metronome."""
    plain = Load(
        server=url,
        model=None,
        key=None,
        rates=(100.0,),
        arrivals=Arrivals.parse("constant"),
        lengths=parse("fixed:20,4"),
        named="fixed:20,4",
        count=10,
        seconds=None,
        seed=0,
        shared=0,
        warm_up=0,
        timeout=5.0,
        objective=Objective(),
    )
    return replace(plain, **changes)


def run(script=None, **changes):
    """The report of a load on a server with this script, and the server."""
    with Endpoint(*filter(None, [script])) as server:
        return Run(load(server.url, **changes), Screen(None)).run(), server


def only(report):
    (figures,) = report.figures
    return figures


def together(count):
    """A script that answers nobody before so many have asked."""
    asked = []

    async def script(reply):
        asked.append(reply.number)
        while len(asked) < count:
            await asyncio.sleep(0.02)
        await reply.text("word ")
        await reply.usage(answer=1)
        await reply.end()

    return script


@pytest.mark.alone
def test_a_stalled_server_does_not_slow_arrivals_and_latency_counts_from_the_due_time():
    report, server = run(together(40), rates=(50.0,), count=40)
    arrived = np.array(server.arrived) - server.arrived[0]
    assert arrived == pytest.approx(np.arange(40) / 50, abs=0.2)
    outcomes = report.stages[0].outcomes
    assert sorted(outcome.due for outcome in outcomes) == pytest.approx(np.arange(40) / 50)
    for outcome in outcomes:
        assert 39 / 50 - outcome.due <= outcome.first_token <= outcome.whole < 3


def test_latency_counts_from_the_due_time_even_where_the_client_is_late_and_it_says_so():
    """It is late because writing its sixth prompt takes half a second."""

    def requests():
        for number in range(10):
            if number == 5:
                time.sleep(0.5)
            yield Request(number, "a prompt", Pair(2, 1), number / 100)

    async def send(stage, url):
        async with Client.open(url, model="toy", key=None) as client:
            await stage.run(client, requests(), timeout=5)

    stage = Stage(100.0, 0.1)
    with Endpoint(probes=False) as server:
        asyncio.run(send(stage, server.url))
    late = {one.number: one.first_token for one in stage.outcomes if one.sent - one.due > 0.4}
    assert sorted(late) == [5, 6, 7, 8, 9]
    assert min(late.values()) > 0.4
    figures = Figures.of(stage, Objective())
    assert figures.lag.max > 0.4
    assert figures.coarse
    notes = list(Report(setting(), Objective(), [stage], interrupted=False).notes())
    assert notes[0].startswith("warning: at 100 requests/s this client itself was late by ")


async def misbehave(reply):
    """Each of ten requests meets something else."""
    match reply.number:
        case 0:
            await reply.status(500, {"error": {"message": f"page {reply.words} is on fire"}})
        case 1:
            await reply.status(500, {"error": {"message": "page 77 is on fire"}})
        case 2:
            await reply.status(429, {"detail": "too many"})
        case 3:
            pass
        case 4:
            await reply.text("half an ")
        case 5:
            await reply.text("half an ")
            await reply.event({"error": {"message": "the engine has died"}})
        case 6:
            await asyncio.sleep(60)
        case 7:
            await reply.text("word ")
            await reply.end()
        case 8:
            await reply.event('{"choices": [{')
        case 9:
            await reply.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            event = b'data: {"choices": [{"text": "a"}]}\n\n'
            await reply.send(f"{len(event):x}\r\n".encode() + event + b"\r\n40\r\ndata:")


def test_every_failure_is_counted_by_its_reason_and_no_request_is_lost():
    report, _ = run(misbehave, timeout=0.7)
    figures = only(report)
    assert (figures.sent, figures.completed) == (10, 0)
    assert sum(figures.failures.values()) == 10
    first, *others = figures.failures.items()
    assert first[1] == 2  # numbers in a message do not make it another reason
    assert first[0].startswith("HTTP 500: page ")
    assert {count for _, count in others} == {1}
    kinds = sorted(why.partition(":")[0] for why, _ in others)
    no_end, malformed = ["stream without end"] * 2, ["malformed answer"] * 2
    assert kinds == sorted(["HTTP 429", "connection", "error in stream", "timeout", *no_end, *malformed])
    assert "error in stream: the engine has died" in figures.failures
    assert "HTTP 429: too many" in figures.failures
    rows = list(csv.DictReader(io.StringIO(report.csv())))
    assert [row["number"] for row in rows] == [str(number) for number in range(10)]
    assert [row["result"] for row in rows].count("http") == 3


def test_tokens_are_counted_from_usage_and_those_of_one_chunk_share_its_wait():
    async def fours(reply):
        for _ in range(reply.tokens // 4):
            await reply.text("four short wide words ")
            await asyncio.sleep(0.08)
        await reply.usage(prompt=1234)
        await reply.end()

    report, _ = run(fours, lengths=parse("fixed:20,12"), count=3)
    figures = only(report)
    assert (figures.prompt_tokens, figures.answer_tokens, figures.short) == (3 * 1234, 36, 0)
    for outcome in report.stages[0].outcomes:
        assert [chunk.tokens for chunk in outcome.answer.chunks] == [4, 4, 4]
        assert list(outcome.answer.gaps()) == pytest.approx([0.02] * 8, abs=0.008)
    assert any("not 60 as asked for" in note for note in report.notes())


def test_a_server_that_ends_answers_early_is_told_of():
    async def short(reply):
        await reply.text("enough")
        await reply.usage(answer=1)
        await reply.end()

    report, _ = run(short)
    assert only(report).short == 10
    assert any("does not heed ignore_eos" in note for note in report.notes())


def test_requests_are_those_of_any_client_and_prompts_have_the_wanted_length():
    report, server = run(shared=60, lengths=parse("fixed:50,4"), model="named", key="secret")
    assert all(
        body.keys() == {"model", "prompt", "max_tokens", "stream", "stream_options", "ignore_eos"}
        for body in server.bodies
    )
    assert {body["model"] for body in server.bodies} == {"named"}
    words = [body["prompt"].split() for body in server.bodies]
    assert {len(each) for each in words} == {(60 + 50 - 2) // 3}
    assert len({tuple(each[:20]) for each in words}) == 1
    assert len({tuple(each[20:24]) for each in words}) == 10
    assert only(report).prompt_tokens == only(report).asked_prompt_tokens == 1100


def test_another_run_with_the_same_seed_sends_other_words_at_the_same_times():
    (first, one), (second, two) = (run(arrivals=Arrivals.parse("poisson"), seed=7) for _ in range(2))
    due = [[outcome.due for outcome in sorted(r.stages[0].outcomes, key=lambda o: o.number)] for r in (first, second)]
    assert due[0] == due[1]
    assert not {body["prompt"] for body in one.bodies} & {body["prompt"] for body in two.bodies}


def test_warm_up_is_sent_first_and_not_counted():
    report, server = run(warm_up=5)
    assert len(server.bodies) == 15
    assert only(report).sent == 10


def setting():
    return {"server": "http://toy", "model": "toy", "arrivals": "constant", "lengths": "fixed:1,1"}


def known(rate, ends, failed=0):
    """A stage whose answers are whole at these times, of two tokens, the first halfway."""
    stage = Stage(rate, window=1.0, sent=len(ends) + failed)
    for number, end in enumerate(ends):
        answer = Answer(10, 2, (Chunk(end / 2, 1), Chunk(end, 1)))
        stage.outcomes.append(Outcome(number, Pair(10, 2), 0.0, 0.0, end, answer))
    for number in range(failed):
        failure = Failure(Kind.HTTP, "no", 500)
        stage.outcomes.append(Outcome(len(ends) + number, Pair(10, 2), 0.0, 0.0, 0.1, None, failure))
    return stage


def test_percentiles_are_those_of_numpy():
    chance = np.random.default_rng(0)
    for count in (1, 2, 3, 10, 99, 1000):
        values = chance.lognormal(size=count)
        spread = Spread.of(values.tolist())
        expected = np.percentile(values, [50, 90, 99, 100])
        assert [spread.p50, spread.p90, spread.p99, spread.max] == pytest.approx(expected.tolist())
        figures = Figures.of(known(1.0, values.tolist()), Objective())
        assert figures.e2e == spread
        assert figures.ttft.p99 == pytest.approx(np.percentile(values / 2, 99))
        assert figures.tbt.p90 == pytest.approx(np.percentile(values / 2, 90))


def test_goodput_counts_requests_within_every_limit_and_a_failed_one_is_not():
    objective = Objective.parse("ttft=500ms,tbt=1s,e2e=1.2s")
    figures = Figures.of(known(10.0, [0.9, 1.0, 1.1, 2.0], failed=1), objective)
    assert (figures.met, figures.judged, figures.share) == (2, 5, 0.4)
    assert figures.document()["goodput"] == pytest.approx(2 / 2.0)
    assert figures.document()["answer_tokens_per_second"] == pytest.approx(8 / 2.0)


def test_the_highest_rate_is_the_last_at_which_nine_of_ten_requests_meet_the_objective():
    stages = [known(1.0, [0.5] * 10), known(4.0, [0.5] * 9 + [9.0]), known(8.0, [0.5] * 8, failed=2)]
    report = Report(setting(), Objective.parse("e2e=1s"), stages, interrupted=False)
    assert report.document()["highest_rate_within_slo"] == 4.0
    assert report.verdict().startswith("4 requests/s is the highest rate here at which 90% of requests meet e2e <=")
    throughput, latency, failures = (table.text() for table in report.tables())
    assert [line.split()[0] for line in throughput.splitlines()[2:]] == ["1", "4", "8"]
    assert "8       2  HTTP 500: no" in failures
    assert latency.count("500.0 ms") > 0


def test_a_real_server_bears_it_without_torch_in_the_client(real, tmp_path):
    arguments = ["bench", "--server", f"{real.url}/v1/", "--rate", "4,8", "--requests", "8", "--json"]
    arguments += ["--lengths", "fixed:120,6", "--shared-prefix", "30", "--warm-up", "2", "--slo", "ttft=20s,e2e=60s"]
    arguments += ["--csv", str(tmp_path / "rows.csv"), "--plot", str(tmp_path / "latency.png")]
    code = (
        "import sys; from muster.cli import app\n"
        f"try: app({arguments!r})\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'muster.server'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["model"] == "tiny"
    assert [one["rate"] for one in document["rates"]] == [4, 8]
    for one in document["rates"]:
        assert (one["sent"], one["completed"], one["failed"], one["answer_tokens"]) == (8, 8, 0, 48)
        assert one["prompt_tokens"] == pytest.approx(8 * 150, rel=0.03)
        assert 0 < one["ttft"]["p50"] <= one["ttft"]["max"] <= one["e2e"]["max"]
        assert one["share_met"] == 1
    assert document["highest_rate_within_slo"] == 8
    rows = list(csv.DictReader((tmp_path / "rows.csv").open(newline="")))
    assert len(rows) == 16
    assert {row["result"] for row in rows} == {"completed"}
    assert all(float(row["due_s"]) <= float(row["sent_s"]) < float(row["ended_s"]) for row in rows)
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_real_server_refuses_is_told_in_its_words(real, muster):
    done = muster.run("bench", "--server", real.url, "--rate", "20", "--requests", "3", "--lengths", "fixed:5000,4")
    assert done.returncode == 1
    assert "HTTP 400: " in done.stdout
    assert "none of 3 completed" in done.stderr


def test_an_interrupt_reports_what_is_finished(muster):
    async def half(reply):
        await reply.text("word ")
        await asyncio.sleep(60 if reply.number % 2 else 0)
        await reply.usage(answer=1)
        await reply.end()

    with Endpoint(half) as server:
        options = ("--rate", "40,80", "--requests", "20", "--lengths", "fixed:9,1", "--json")
        process = muster.start("bench", "--server", server.url, *options)
        while len(server.bodies) < 20:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    document = json.loads(out)
    assert document["interrupted"]
    [figures] = document["rates"]
    assert (figures["sent"], figures["completed"], figures["failures"]) == (20, 10, {"interrupted": 10})


def test_an_interrupt_before_the_first_rate_is_an_interrupt_too(muster):
    async def never(reply):
        await asyncio.sleep(60)

    with Endpoint(never, probes=False) as server:
        process = muster.start("bench", "--server", server.url)
        while not server.bodies:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err


def test_lines_tell_of_progress_where_there_is_no_terminal(muster):
    with Endpoint() as server:
        options = ("--rate", "50,100", "--requests", "5", "--lengths", "fixed:9,1")
        process = muster.start("bench", "--server", server.url, *options)
        assert first_line(process.stderr, "50 requests/s: 5 sent, 5 completed, 0 failed")
        assert first_line(process.stderr, "100 requests/s: 5 sent, 5 completed, 0 failed")
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert out.startswith(f"toy at {server.url}: poisson arrivals, fixed:9,1 lengths\n")


def everything(terminal):
    """What is written to a terminal until nobody has it open any more."""
    drawn = b""
    while True:
        try:
            drawn += os.read(terminal, 4096)
        except OSError:
            return drawn


def test_a_terminal_sees_the_rate_that_runs(muster):
    terminal, end = os.openpty()
    with Endpoint() as server:
        options = ("--rate", "4", "--requests", "4", "--lengths", "fixed:9,1")
        process = muster.start("bench", "--server", server.url, *options, stderr=end)
        os.close(end)
        drawn = everything(terminal)
        out, _ = process.communicate(timeout=20)
    os.close(terminal)
    assert process.returncode == 0
    assert len(set(re.findall(rb"4 requests/s: (\d sent, \d completed)", drawn))) > 1
    assert "time to first token" in out


def test_a_server_that_is_not_there_is_told_of_and_so_is_one_with_several_models(muster):
    with Endpoint(models=({"id": "one"}, {"id": "two"})) as server:
        done = muster.run("bench", "--server", server.url)
        assert done.returncode == 1
        assert "found one, two, expected one model" in done.stderr
        assert "--model NAME" in done.stderr
        chosen = ("--model", "two", "--rate", "50", "--requests", "2", "--lengths", "fixed:9,1")
        assert muster.run("bench", "--server", server.url, *chosen).returncode == 0
        assert {body["model"] for body in server.bodies} == {"two"}
    gone = muster.run("bench", "--server", server.url)
    assert gone.returncode == 1
    assert f"{server.url}/v1/models: found connection: ConnectError" in gone.stderr


def test_a_key_goes_with_every_request(tmp_path):
    seen = []

    async def note(reply):
        seen.append(reply.headers.get("authorization"))
        await reply.status(401, {"error": {"message": "no"}})

    report, _ = run(note, key="secret", count=2)
    assert seen == ["Bearer secret"] * 2
    assert only(report).failures == {"HTTP 401: no": 2}


@pytest.fixture
def few_files():
    """A soft limit of open files, as a login shell has one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_requests_wait_at_once_than_files_may_usually_be_open(few_files):
    report, _ = run(together(300), rates=(300.0,), count=300, lengths=parse("fixed:9,1"), timeout=20)
    assert only(report).completed == 300
