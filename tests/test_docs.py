"""Pages show what the commands print today."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from console_blocks import refreshed  # noqa: E402
from performance import newest, page  # noqa: E402

from muster.lab.prove.tolerance import LIMITS  # noqa: E402


@pytest.mark.parametrize("page", ["docs/inspect.md"])
def test_a_page_shows_what_its_commands_print(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "$ muster" in text
    assert refreshed(text) == text, f"run: python scripts/console_blocks.py {page}"


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "results" / name).read_text(encoding="utf-8").splitlines()]


def test_the_readme_quotes_the_speeds_that_were_recorded() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = {(record["what"], record["who"]): record for record in records("cpu.jsonl")}
    decode, prefill, ours = "decode, tok/s", "prefill of 512, tok/s", "muster nvfp4"
    speed = {key: record["median"] for key, record in found.items() if "median" in record}
    rows = {
        "Muster, NVFP4 experts": ours,
        "Muster, bf16": "muster bf16",
        "transformers, float32": "transformers float32",
    }
    quotes = [f"| {title} | {speed[decode, who]:.1f} | {speed[prefill, who]:.0f} |" for title, who in rows.items()]
    quotes += [f"| {speed[f'decode of {count} requests, tok/s', ours]:.0f} | |" for count in (8, 32)]
    quotes.append(f"one core busy with something else | {speed['decode beside a busy core, tok/s', ours]:.1f} |")
    quotes.append(f"That is {speed[decode, ours] / speed[decode, 'transformers float32']:.1f} times transformers")
    quotes.append(f"({speed['read bandwidth, GB/s', 'all threads']:.0f} GB/s;")
    quotes.append(f"could deliver {found[decode, ours]['floor_tok_s']:.0f} times a second")
    quotes.append(f"Loading takes {found['load', ours]['seconds']:.1f} s")
    quotes.append(f"A token reads {found[decode, ours]['weight_bytes_per_token'] / 1e6:.0f} MB of weights")
    assert [quote for quote in quotes if quote not in text] == []


def test_the_page_about_numerics_quotes_the_noise_and_the_limits_that_were_recorded() -> None:
    text = " ".join((ROOT / "docs/numerics.md").read_text(encoding="utf-8").split())
    noise = {record["format"]: record["relative_rms"] for record in records("formats.jsonl")}
    quotes = [f"about {noise['nvfp4']:.3f} for `nvfp4`, {noise['mxfp4']:.3f} for `mxfp4`"]
    quotes.append(f"{noise['fp8-block']:.3f} for `fp8-*`, {noise['int4-g32']:.2f} for `int4-g32`")
    quotes.append(f"one to bf16 alone is {power(noise['bf16'], 2)}")
    measured = records("limits.jsonl")
    for grade in {record["grade"] for record in measured}:
        mine = [record for record in measured if record["grade"] == grade]
        worst = (max(record[what]["worst"] for record in mine) for what in ("whole", "worst_token"))
        limit = LIMITS[grade]
        limits = f"{power(limit.whole)}, {power(limit.worst_token)}"
        quotes.append(f"| {grade} | {', '.join(map(power, worst))} | {limits} |")
    quotes.append(f"{min(r['ideal_whole'] for r in measured if r['grade'] == 'nvfp4'):.4f} away from it")
    assert [quote for quote in quotes if quote not in text] == []


def power(number: float, digits: int = 1) -> str:
    """As the page writes it: 1.7 · 10⁻³."""
    head, tail = f"{number:.{digits}e}".split("e")
    return f"{head} · 10{str(int(tail)).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def test_the_page_about_the_server_quotes_its_record() -> None:
    text = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    speed = {(one["what"], one["who"]): one["median"] for one in records("server.jsonl") if "who" in one}
    first, decode, total = "time to first token, ms", "decode, tok/s", "total, tok/s"
    alone, one, many = "in process", "one client", "32 clients"
    quotes = [f"| the engine in process | {speed[first, alone]:.0f} ms | {speed[decode, alone]:.1f} | |"]
    quotes.append(f"| {speed[first, one]:.0f} ms | {speed[decode, one]:.1f} | {speed[total, one]:.0f} |")
    quotes.append(f"| {many} | | | {speed[total, many]:.0f} |")
    assert [quote for quote in quotes if quote not in text] == []


def test_the_page_about_load_quotes_its_record() -> None:
    (record,) = [record for record in records("server.jsonl") if record["what"] == "load"]
    assert f"\n{record['stdout'].rstrip()}\n```" in (ROOT / "docs/load.md").read_text(encoding="utf-8")


def test_the_page_about_plans_quotes_the_recorded_story() -> None:
    text = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    story = {record["what"]: record for record in records("demo-story.jsonl")}
    assert f"$ muster plan MODEL\n{story['plan']['stdout'].rstrip()}\n```" in text
    assert f"```\n{story['run']['stderr_end'][-1]}\n```" in text
    assert f"took {sum(record['seconds'] for record in story.values()):.0f} s there" in text


def test_the_page_about_performance_says_what_its_records_say() -> None:
    found = records("h200-experts.jsonl")
    assert newest(found) == found
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    name = "results/h200-experts.jsonl"
    assert page(found, name, "../results/h200-experts.svg") == text, (
        f"run: scripts/performance.py {name} docs/performance.md"
    )


def test_the_notes_on_kernels_quote_the_best_of_each_version() -> None:
    text = (ROOT / "docs/kernel-notes.md").read_text(encoding="utf-8")
    measured = [one for one in records("h200-versions.jsonl") if isinstance(one["version"], int) and "tool" not in one]
    for version in range(1, 7):
        best = {}
        for one in measured:
            ours = [time for who, time in one["microseconds"].items() if who not in ("decode", "triton_fused")]
            if one["version"] == version and ours:
                best[one["shape"], one["tokens"]] = min(ours)
        times = (best[place] for place in (("397B", 512), ("397B", 2048), ("30B", 2048)))
        assert f"| {version} | {' | '.join(f'{time:.0f}' for time in times)} |" in text
