"""What `muster bench --server` is told: arrivals, lengths, limits, and every wrong option at once."""

import itertools
import statistics
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.errors import MusterError, UsageError
from muster.lab.load.arrivals import BURST, Arrivals
from muster.lab.load.events import Events
from muster.lab.load.lengths import NAMED, Pair, parse
from muster.lab.load.objective import Objective
from muster.lab.load.outcome import spread_tokens
from muster.lab.load.prompts import WORDS, Gauge, Prompts

from .commands import Muster


@pytest.fixture(scope="module")
def muster(tmp_path_factory):
    return Muster(tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize(
    ("name", "variation"), [("constant", 0.0), ("poisson", 1.0), ("burst", BURST), ("burst:1.5", 1.5)]
)
def test_gaps_have_the_rate_and_the_variation_that_were_asked_for(name, variation):
    arrivals = Arrivals.parse(name)
    times = list(itertools.islice(arrivals.times(4.0, seed=1), 40_000))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.05, abs=1e-9)
    assert times == pytest.approx([2 * time for time in itertools.islice(arrivals.times(8.0, seed=1), 40_000)])


def test_another_seed_is_another_pattern():
    first, same, other = (list(itertools.islice(Arrivals.parse("poisson").times(1, seed), 9)) for seed in (1, 1, 2))
    assert first == same != other


@pytest.mark.parametrize("name", NAMED)
def test_named_lengths_have_the_medians_they_state(name):
    pairs = list(itertools.islice(parse(name).pairs(seed=3), 4000))
    assert statistics.median(pair.prompt for pair in pairs) == pytest.approx(NAMED[name].prompt, rel=0.1)
    assert statistics.median(pair.answer for pair in pairs) == pytest.approx(NAMED[name].answer, rel=0.1)
    assert pairs == list(itertools.islice(parse(name).pairs(seed=3), 4000))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '[10, 2]\n\n{"prompt_tokens": 20, "answer_tokens": 3}\n'),
        ("a.csv", "prompt_tokens,answer_tokens\n10,2\n20,3\n"),
        ("b.csv", "10,2\n20, 3\n"),
    ],
)
def test_a_file_of_pairs_is_taken_in_its_order_and_again_from_the_start(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    pairs = list(itertools.islice(parse(str(tmp_path / name)).pairs(seed=0), 3))
    assert pairs == [Pair(10, 2), Pair(20, 3), Pair(10, 2)]


def test_every_wrong_line_of_a_file_is_told(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("prompt,answer\n10,2\n10\n0,4\nten,4\n1,2,3\n")
    with pytest.raises(UsageError) as error:
        parse(str(path))
    assert [f"line {number} of" in str(error.value) for number in range(1, 7)] == [False, False, *[True] * 4]


@pytest.mark.parametrize("text", ["", "fixed:1", "fixed:0,4", "fixed:a,b", "fixed:1,2,3", "nowhere.csv", "talk"])
def test_other_lengths_are_refused(text):
    with pytest.raises(MusterError, match="--lengths"):
        parse(text)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "ttft=0ms", "p99=5ms", "ttft=1s,ttft=2s", "e2e=-1s"])
def test_other_limits_are_refused(text):
    with pytest.raises(MusterError, match="--slo"):
        Objective.parse(text)


def test_limits_have_units():
    assert Objective.parse("ttft=500ms, tbt=.5ms,e2e=2m").limits == pytest.approx(
        {"ttft": 0.5, "tbt": 0.0005, "e2e": 120}
    )


def test_words_are_distinct_and_of_one_length():
    assert len(set(WORDS)) == len(WORDS) == 64
    assert {len(word) for word in WORDS} == {5}


@given(st.integers(1, 500), st.floats(1, 8), st.integers(0, 3))
def test_a_prompt_has_the_tokens_that_were_asked_for_to_half_a_word(tokens, per_word, base):
    prompts = Prompts(Gauge(base, per_word), shared=0, nonce="n")
    found = base + per_word * len(prompts.text("1", tokens).split())
    assert abs(found - tokens) <= per_word / 2 + 1e-6 or found == base + per_word


@settings(max_examples=40)
@given(st.lists(st.text(min_size=1), max_size=6), st.randoms(use_true_random=False))
def test_events_are_the_same_however_the_bytes_are_cut(texts, chance):
    lines = [text.replace("\n", "").replace("\r", "") for text in texts]
    stream = "".join(f": note\r\nevent: x\ndata: {line}\n\n" for line in lines).encode("utf-8", "surrogatepass")
    cuts = sorted(chance.randrange(len(stream) + 1) for _ in range(5))
    events = Events()
    pieces = [stream[start:end] for start, end in itertools.pairwise([0, *cuts, len(stream)])]
    found = [event.decode("utf-8", "surrogatepass") for piece in pieces for event in events.feed(piece)]
    assert found == lines


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 100))
def test_a_chunked_answer_has_as_many_tokens_as_the_server_counted(sizes, tokens):
    chunks = spread_tokens([float(i) for i in range(len(sizes))], sizes, tokens)
    assert sum(chunk.tokens for chunk in chunks) == tokens
    assert all(chunk.tokens > 0 for chunk in chunks)
    with_text = sum(size > 0 for size in sizes)
    if tokens >= with_text > 0 and tokens != len(sizes):
        assert [sizes[int(chunk.at)] > 0 for chunk in chunks] == [True] * with_text


def test_everything_wrong_is_told_at_once(muster, tmp_path):
    wrong = {
        "--server": "localhost:8000",
        "--rate": "1,0",
        "--arrivals": "burst:0.5",
        "--lengths": "talk",
        "--slo": "ttft",
        "--requests": "0",
        "--timeout": "0",
        "--warm-up": "-1",
        "--shared-prefix": "-5",
        "--api-key-file": str(tmp_path / "none"),
        "--csv": str(tmp_path / "none" / "rows.csv"),
        "--plot": str(tmp_path / "rows.doc"),
        "--backend": "cpu",
        "--tokens": "1",
    }
    options = itertools.chain.from_iterable(wrong.items())
    done = muster.run("bench", "MODEL", *options, "--seconds", "3")
    assert done.returncode == 2
    assert done.stdout == ""
    told = {line.split()[1].rstrip(":") for line in done.stderr.splitlines() if line.startswith("  - ")}
    assert told >= {*wrong, "MODEL"}
    assert "--requests and --seconds: found both, expected one of them" in done.stderr


def test_options_of_a_server_are_refused_beside_a_model_and_one_of_both_is_needed(muster, tmp_path):
    done = muster.run("bench", tmp_path, "--rate", "3", "--api-key-file", tmp_path)
    assert done.returncode == 2
    assert "--rate: found it without --server" in done.stderr
    assert "--api-key-file: found it without --server" in done.stderr
    neither = muster.run("bench")
    assert neither.returncode == 2
    assert "found neither MODEL nor --server, expected one of them" in neither.stderr


def test_without_httpx_it_says_how_to_install_it():
    code = (
        "import sys; sys.modules['httpx'] = None; from muster.cli import main\n"
        "sys.argv = ['muster', 'bench', '--server', 'http://localhost:1']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "pip install 'muster-moe[load]'" in done.stderr
