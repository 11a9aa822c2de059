"""The page at `/`, as a reader has it: a real Chromium before a real server."""

import json
import signal

import pytest

from server.browser import ARGUMENTS, CHROMIUM, PHONE, Visit
from server.process import Server

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

PLAIN = str.maketrans({"\N{EN DASH}": "-", "\N{MULTIPLICATION SIGN}": "x"})
HOSTILE = "<img src=x onerror=alert(1)>&lt;"
LITERAL = "".join(f"\\{mark}" if mark in "()." else mark for mark in HOSTILE)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def slow(checkpoint):
    """A server whose steps take 30 ms, so that streaming can be watched."""
    with Server(checkpoint, fault="slow") as running:
        yield running


def grown(answer):
    """The text of an answer, once there is some while more is on its way."""
    answer.page.wait_for_selector(".answer[aria-busy=true] > .text:not(:empty)")
    return answer.locator("> .text").text_content()


def test_a_question_is_answered_and_streamed_by_keyboard_alone(browser, slow):
    with Visit(browser, slow.url).ready() as visit:
        page, keys = visit.page, visit.page.keyboard
        visit.force(response_format={"type": "regex", "regex": "[a-z]{20} end"})
        keys.type("one")
        keys.press("Shift+Enter")
        keys.type("two")
        assert page.locator(".answer").count() == 0
        keys.press("Enter")
        first = grown(page.locator(".answer"))
        answer = visit.ended()
        text = answer.locator("> .text").text_content()
        assert text.startswith(first)
        assert text.endswith(" end")
        assert len(text) == 24
        assert page.locator(".question").text_content() == "one\ntwo"
        assert answer.locator(".foot").text_content().startswith(("24 tokens", "25 tokens"))
        assert page.evaluate("document.activeElement.id") == "question"
        # From the question on, Tab reaches every control, in the order in which they are seen.
        reached = [keys.press("Tab") or page.evaluate("document.activeElement.id") for _ in range(3)]
        assert reached == ["new", "settings-open", "send"]
        keys.press("Shift+Tab")
        keys.press("Enter")
        assert page.evaluate("document.activeElement.id") == "temperature"
        keys.press("Tab")
        keys.type("5")
        keys.press("Enter")
        page.wait_for_selector("#settings", state="hidden")
        assert page.evaluate("document.activeElement.id") == "settings-open"
        page.unroute_all()
        visit.force(ignore_eos=True)
        page.focus("#question")
        keys.type("more")
        keys.press("Enter")
        assert visit.ended().locator(".foot").text_content().startswith("5 tokens")
        assert "cut off at the limit of tokens" in visit.ended().locator(".foot").text_content()


@pytest.mark.parametrize("way", ["escape", "button", "new conversation", "closed tab"])
def test_stopping_an_answer_frees_its_pages(browser, slow, way):
    slow.wait(slow.at_rest)
    with Visit(browser, slow.url).ready() as visit:
        visit.force(ignore_eos=True)
        grown(visit.ask("go on for ever"))
        assert not slow.at_rest()
        assert visit.page.locator("#running").text_content() in ("0", "1")
        match way:
            case "escape":
                visit.page.keyboard.press("Escape")
            case "button":
                visit.page.click("#stop")
            case "new conversation":
                visit.page.click("#new")
            case "closed tab":
                visit.page.close()
        slow.wait(slow.at_rest, seconds=5)
        if way in ("escape", "button"):
            assert "stopped" in visit.ended().locator(".foot").text_content()
        if way == "new conversation":
            visit.page.wait_for_selector("#greeting")
            assert visit.page.locator("article").count() == 0


def test_what_the_model_writes_stays_text(browser, slow):
    with Visit(browser, slow.url).ready() as visit:
        dialogs = []
        visit.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        visit.force(response_format={"type": "regex", "regex": LITERAL})
        visit.ask(HOSTILE)
        assert visit.ended().locator("> .text").text_content() == HOSTILE
        assert visit.page.locator(".question").text_content() == HOSTILE
        assert visit.page.locator("#messages img, #messages script").count() == 0
        assert dialogs == []


def test_reasoning_is_there_and_folded(browser, slow):
    with Visit(browser, slow.url).ready() as visit:
        thinking = {"type": "regex", "regex": "[a-d]{9}</think>\\n\\n[x-z]{5}"}
        visit.force(response_format=thinking, chat_template_kwargs={"enable_thinking": True})
        visit.ask("think")
        answer = visit.ended()
        reasoning = answer.locator("details > .text")
        assert len(reasoning.text_content().strip()) == 9
        assert not reasoning.is_visible()
        assert len(answer.locator("> .text").text_content().strip()) == 5
        answer.locator("summary").press("Enter")
        assert reasoning.is_visible()


def test_a_refusal_is_shown_in_the_servers_words_and_the_question_comes_back(browser, slow):
    with Visit(browser, slow.url, provoking=True).ready() as visit:
        visit.page.evaluate("document.getElementById('temperature').value = -1")
        visit.ask("too cold")
        refused = slow.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "too cold"}], "temperature": -1},
        )
        assert visit.ended().locator(".error").text_content() == refused.json()["error"]["message"]
        assert visit.page.locator("#question").input_value() == "too cold"


def test_the_conversation_and_the_settings_reach_the_server(browser, slow):
    with Visit(browser, slow.url).ready() as visit:
        page = visit.page
        bodies = []
        page.on("request", lambda request: request.method == "POST" and bodies.append(request.post_data_json))
        page.evaluate("document.getElementById('system').value = 'be brief'")
        page.evaluate("document.getElementById('max-tokens').value = 3")
        page.evaluate("document.getElementById('temperature').value = 0")
        visit.ask("one")
        visit.ended()
        visit.ask("two")
        visit.ended()
        first, second = bodies
        assert (second["temperature"], second["max_tokens"]) == (0, 3)
        assert first["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
        assert second["messages"][-1] == {"role": "user", "content": "two"}
        said = [message["content"] for message in second["messages"] if message["role"] == "assistant"]
        assert said in ([], [page.locator(".answer > .text").first.text_content()])


def test_the_plan_shows_every_entry_and_every_loser(browser, slow):
    plan = slow.get("/v1/muster/plan").json()
    with Visit(browser, slow.url).ready() as visit:
        parts = visit.page.locator(".part")
        assert parts.count() == len(plan["parts"])
        order = sorted(plan["parts"], key=lambda part: ["experts", "draft", "linears"].index(part["role"]))
        for index, part in enumerate(order):
            shown = parts.nth(index)
            rows = [row.inner_text() for row in shown.locator("tbody tr").all()]
            assert len(rows) == len(part["entries"])
            for row, entry in zip(rows, part["entries"], strict=True):
                assert entry["backend"] in row
                assert entry["reason"] in row
                assert ("UNPROVEN" in row) == (not entry["evidence"])
            lost = shown.locator("li")
            assert lost.count() == len(part["losers"])
            for loser, text in zip(part["losers"], lost.all_text_contents(), strict=True):
                assert loser["backend"] in text
                assert all(reason in text for reason in loser["reasons"])
        assert "UNPROVEN" in visit.page.locator("#plan-toggle").inner_text()


MEASURED = {
    "proven": True,
    "remarks": ["noisy"],
    "parts": [
        {
            "role": "linears",
            "proven": True,
            "problem": {"rows": 960, "columns": 576, "weights": "bf16"},
            "entries": [
                {"max_tokens": 1, "backend": "a", "reason": "fastest", "evidence": ["1", "2"], "ahead": [2.34, 13.05],
                 "of_floor": [0.512, 0.92]},
                {"max_tokens": 64, "backend": "b", "reason": "tie", "evidence": ["3"], "ahead": None,
                 "of_floor": [1.04, 1.04]},
                {"max_tokens": None, "backend": "c", "reason": "left", "evidence": ["4"], "ahead": None,
                 "of_floor": None},
            ],
            "losers": [],
        }
    ],
}  # fmt: skip


def test_shares_of_the_floor_are_figures_and_bars(browser, slow):
    """By the page's own module: a plan with times takes longer to make than a test may."""
    with Visit(browser, slow.url).ready() as visit:
        visit.page.evaluate("async (plan) => (await import('/page/plan.js')).showPlan(plan)", MEASURED)
        rows = [row.inner_text().split("\n") for row in visit.page.locator(".part tbody tr").all()]
        words = [" ".join(" ".join(row).split()).translate(PLAIN) for row in rows]
        assert words[0].startswith("1 a fastest 51-92 % 2.3-13x ahead ✓ 2")
        assert words[1].startswith("2-64 b tie 104 % ✓ 1")
        assert words[2].startswith("65+ c left not timed ✓ 1")
        bars = visit.page.locator(".bar").all()
        widths = [[rect.get_attribute("width") for rect in bar.locator("rect").all()] for bar in bars]
        assert widths == [["92%", "51.2%"], ["100%", "100%"]]


def test_the_live_figures_are_those_of_the_server(browser, slow):
    slow.wait(slow.at_rest)
    with Visit(browser, slow.url).ready() as visit:
        page = visit.page
        visit.force(ignore_eos=True)
        visit.ask("go on for ever")
        visit.until("document.getElementById('running').textContent === '1'")
        visit.until("Number(document.getElementById('pages-used').textContent) > 0")
        visit.until("Number(document.getElementById('server-rate').textContent) > 1")
        # Steps of 30 ms and more: 33 tokens a second, or twice that where this machine is busy and news come late.
        assert 1 < float(page.locator("#answer-rate").text_content()) < 70
        assert float(page.locator("#server-rate").text_content()) < 70
        pages = slow.state()["pages"]["all"]
        assert page.locator("#pages-all").text_content().replace(",", "") == str(pages)
        page.keyboard.press("Escape")
        visit.until("document.getElementById('running').textContent === '0'")
        visit.until("document.getElementById('pages-used').textContent === '0'")


WIDE = """() => [...document.querySelectorAll("html, body, body *")].filter((box) => box.checkVisibility())
    .filter((box) => !box.closest(".unseen, svg") && getComputedStyle(box).display !== "inline")
    .filter((box) => getComputedStyle(box).textOverflow !== "ellipsis")
    .filter((box) => box.scrollWidth > box.clientWidth || box.getBoundingClientRect().right > innerWidth)
    .map((box) => box.outerHTML)"""
"""What is wider than its place."""


def test_a_phone_scrolls_up_and_down_only(browser, slow):
    with Visit(browser, slow.url, size=PHONE, has_touch=True, is_mobile=True).ready() as visit:
        page = visit.page
        assert not page.locator("#plan").is_visible()
        visit.force(response_format={"type": "regex", "regex": "[a-z]{50}"})
        visit.ask("w" * 60)
        visit.ended()
        assert page.evaluate(WIDE) == []
        page.tap("#plan-toggle")
        assert page.locator("#plan").is_visible()
        assert not page.locator("#log").is_visible()
        for summary in page.locator(".part summary").all():
            summary.tap()
        assert page.evaluate(WIDE) == []


FAINT = """() => {
    const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const luminance = (colour) => channels(colour).slice(0, 3)
        .map((byte) => byte / 255)
        .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
    const behind = (box) => {
        const colour = getComputedStyle(box).backgroundColor;
        return channels(colour)[3] === 0 ? behind(box.parentElement) : colour;
    };
    const contrast = (box) => {
        const [dark, light] = [getComputedStyle(box).color, behind(box)].map(luminance).sort((a, b) => a - b);
        return (light + 0.05) / (dark + 0.05);
    };
    const texts = [...document.querySelectorAll("body *")].filter((box) => box.checkVisibility())
        .filter((box) => [...box.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim()));
    return { seen: texts.length, faint: texts.filter((box) => contrast(box) < 4.5).map((box) => box.outerHTML) };
}"""
"""Texts whose contrast is below that of WCAG 2 AA."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(browser, slow, scheme):
    with Visit(browser, slow.url, color_scheme=scheme, provoking=True).ready() as visit:
        for summary in visit.page.locator(".part summary").all():
            summary.click()
        visit.page.evaluate("document.getElementById('temperature').value = -1")
        visit.ask("too cold")
        visit.ended()
        visit.page.click("#settings-open")
        found = visit.page.evaluate(FAINT)
        assert found["faint"] == []
        assert found["seen"] > 50


def test_streaming_moves_nothing_and_follows_only_who_is_at_the_bottom(browser, slow):
    small = {"width": 700, "height": 420}
    with Visit(browser, slow.url, size=small, reduced_motion="reduce").ready() as visit:
        page = visit.page
        lines = {"type": "regex", "regex": "([a-z]\\n){200}"}
        visit.force(response_format=lines)
        page.evaluate(
            """() => { window.moved = 0; new PerformanceObserver((list) => {
                for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.moved += entry.value;
            }).observe({ type: "layout-shift" }); }"""
        )
        visit.ask("list")
        distance = "(log => log.scrollHeight - log.scrollTop - log.clientHeight)(document.getElementById('log'))"
        visit.until("document.getElementById('log').scrollTop > 40")
        assert page.evaluate(distance) < 30
        assert page.evaluate("document.getAnimations().length") == 0
        page.locator("#log").evaluate("log => log.scrollTo(0, 0)")
        before = page.locator(".answer > .text").text_content()
        visit.until(f"document.querySelector('.answer > .text').textContent.length > {len(before) + 10}")
        assert page.evaluate("document.getElementById('log').scrollTop") == 0
        page.keyboard.press("Escape")
        visit.ended()
        assert page.evaluate("window.moved") < 0.01


def test_from_the_first_moment_the_page_asks_for_the_key_and_shows_how_the_server_is(browser, checkpoint, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret-one\n")
    with Server(checkpoint, "--api-key-file", keys, fault="late", wait=False) as server:
        server.url = server.event("listening")["url"]
        with Visit(browser, server.url, provoking=True) as visit:
            page = visit.page
            page.wait_for_selector("#key[open]")
            page.keyboard.press("Escape")
            page.wait_for_selector("#key[open]")
            page.keyboard.type("wrong")
            page.keyboard.press("Enter")
            visit.until("document.getElementById('key-reason').textContent.includes('does not know')")
            page.keyboard.type("secret-one")
            page.keyboard.press("Enter")
            page.wait_for_selector("#readiness[data-kind=loading]")
            assert page.locator("#reasons").text_content() == "the server is loading"
            visit.ready()
            assert page.locator("#reasons").is_hidden()
            page.reload()
            visit.ready()
            assert not page.locator("#key").is_visible()
            assert page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
            assert "secret-one" not in page.content()
            visit.force(ignore_eos=True)
            grown(visit.ask("go on for ever"))
            server.signal(signal.SIGKILL)
            assert "connection was lost" in visit.ended().locator(".error").text_content()
            page.wait_for_selector("#readiness[data-kind=lost]")


def test_a_lost_connection_is_shown_and_recovers(browser, slow):
    with Visit(browser, slow.url, provoking=True).ready() as visit:
        page = visit.page
        visit.context.set_offline(True)
        page.wait_for_selector("#readiness[data-kind=lost]")
        assert "connection was lost" in page.locator("#reasons").text_content()
        assert page.locator("#running").text_content() == "\N{EN DASH}"
        visit.ask("anybody?")
        assert "connection was lost" in visit.ended().locator(".error").text_content()
        visit.context.set_offline(False)
        visit.ready()
        assert page.locator("#reasons").is_hidden()
        visit.force(max_tokens=3, ignore_eos=True)
        page.focus("#question")
        page.keyboard.press("Enter")
        assert page.locator(".question").last.text_content() == "anybody?"
        assert visit.ended().locator(".foot").text_content().startswith("3 tokens")


EVENTS = (
    "\ufeffdata: {\"text\": \"Größe 🐳\"}\r\n\r\n: a comment\r\nevent: x\ndata: one\ndata:two\n\ndata\n\nid: 1\n\n"
    "data:  led\r\rdata: [DONE]\n\ndata: never ended"
)  # fmt: skip
CUTS = """async (bytes) => {
    const { EventParser } = await import("/page/events.js");
    const all = new Uint8Array(bytes);
    const read = (pieces, parser = new EventParser()) => pieces.flatMap((piece) => parser.feed(piece));
    const results = [read([all]), read([...all].map((byte) => Uint8Array.of(byte)))];
    for (let one = 0; one <= all.length; one++) {
        for (let two = one; two <= Math.min(all.length, one + 6); two++) {
            results.push(read([all.slice(0, one), all.slice(one, two), all.slice(two)]));
        }
    }
    return [...new Set(results.map((result) => JSON.stringify(result)))];
}"""


def test_events_are_the_same_however_their_bytes_are_cut(browser, slow):
    with Visit(browser, slow.url).ready() as visit:
        [found] = visit.page.evaluate(CUTS, list(EVENTS.encode()))
        assert json.loads(found) == ['{"text": "Größe 🐳"}', "one\ntwo", "", " led", "[DONE]"]
