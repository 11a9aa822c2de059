"""A real headless Chromium, and what must be true of every visit to the page."""

import shutil
import time
from urllib.parse import urlsplit

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 740}
UNANSWERED = "Failed to load resource"
"""How Chromium's console tells of an answer that is none of 200, which a visitor may provoke on purpose."""


class Visit:
    """A tab at a server's page, whose every request and error is kept."""

    def __init__(self, browser, url, *, size=DESKTOP, provoking=False, **options):
        self.url, self.provoking = url, provoking
        self.context = browser.new_context(viewport=size, **options)
        self.context.set_default_timeout(15_000)
        self.page = self.context.new_page()
        self.hosts, self.errors = set(), []
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._console)
        self.page.goto(url)

    def _console(self, message):
        if message.type in ("error", "warning") and not (self.provoking and message.text.startswith(UNANSWERED)):
            self.errors.append(message.text)

    def ready(self):
        """Until the page says that the server is ready and shows its plan."""
        self.page.wait_for_selector("#readiness[data-kind=ready]")
        self.page.wait_for_selector(".part", state="attached")
        return self

    def until(self, expression, seconds=15):
        """Until an expression holds; the page's own policy forbids Playwright to wait for one."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"still not: {expression}"
            self.page.wait_for_timeout(20)

    def force(self, **fields):
        """Adds fields to what the page asks for, so that the real model's answer is known."""

        def asked(route):
            route.continue_(post_data={**route.request.post_data_json, **fields})

        self.page.route("**/v1/chat/completions", asked)

    def ask(self, question):
        """Types a question and sends it."""
        self.page.locator("#question").press_sequentially(question)
        self.page.keyboard.press("Enter")
        return self.page.locator(".answer").last

    def ended(self):
        """Until the newest answer is over."""
        self.page.wait_for_selector("#log[aria-busy=false]")
        return self.page.locator(".answer").last

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.context.close()
        if kind is None:
            assert self.errors == []
            assert self.hosts == {urlsplit(self.url).netloc}
