"""The log: one JSON object a line, on stderr."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def log(event: str, **fields: Any) -> None:
    """Writes one line; fields that are None are left out."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{int(time.time() * 1000) % 1000:03d}Z"
    line = {"time": stamp, "event": event} | {name: value for name, value in fields.items() if value is not None}
    sys.stderr.write(json.dumps(line, ensure_ascii=True, default=str) + "\n")
    sys.stderr.flush()
