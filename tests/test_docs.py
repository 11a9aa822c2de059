"""Pages show what the commands print today."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from console_blocks import refreshed  # noqa: E402


@pytest.mark.parametrize("page", ["docs/inspect.md"])
def test_a_page_shows_what_its_commands_print(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "$ muster" in text
    assert refreshed(text) == text, f"run: python scripts/console_blocks.py {page}"
