"""The page at `/`: one file that may only run its own script and talk to this server."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

_FILE = Path(__file__).with_name("page.html")


def page() -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers.

    The policy names script and style by their hashes, so nothing injected into the page would run.
    """
    text = _FILE.read_text(encoding="utf-8")
    hashes = {tag: _hash(text, tag) for tag in ("script", "style")}
    policy = "; ".join([
        "default-src 'none'", f"script-src '{hashes['script']}'", f"style-src '{hashes['style']}'",
        "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'",
        "frame-ancestors 'none'", "require-trusted-types-for 'script'",
    ])  # fmt: skip
    return text.encode(), {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
    }


def _hash(text: str, tag: str) -> str:
    inside = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    assert len(inside) == 1, tag
    return "sha256-" + base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
