"""`python -m tests.page_pictures`: take the pictures of the two pages anew, in headless Chromium.

docs/use/page.png is the server's page after a chat with `smollm2-hybrid` (`edge pull
smollm2-hybrid`) at temperature 0, and docs/use/profile.png is the page of `edge profile` for the
same model. Nothing in the pictures is written by hand.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser import Browser
from tests.server_process import Server

FOLDER = Path(__file__).parents[1] / "docs" / "use"
MODEL = "smollm2-hybrid"
# the answers have a list and a block of code
ASKED = (
    "Give three short tips for a good night's sleep.",
    "Write a Python function that reverses a string.",
)
PROFILE = ("-p", "128,256,512", "-n", "64", "-r", "5")


def take_server(path: Path) -> None:
    """Save a picture of the server's page after a conversation."""
    with Server(bundle=MODEL, anew=True) as server, Browser() as browser:
        browser.open(f"http://127.0.0.1:{server.port}/#{server.key}", width=900, height=700)
        browser.until("model.options.length === 1")
        browser.value("temperature.value = 0")
        for number, text in enumerate(ASKED, 1):
            browser.value("text.focus()")
            browser.type(text)
            browser.press("Enter")
            browser.until(f"!running && log.querySelectorAll('footer').length === {number}")
        browser.screenshot(path)


def take_profile(path: Path) -> None:
    """Save a picture of the upper part of the profile's page."""
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        page = Path(folder) / "page.html"
        command = ("profile", MODEL, *PROFILE, "--html", str(page))
        subprocess.run([sys.executable, "-m", "edge.apps.cli", *command], check=True)
        browser.open(page.as_uri(), width=900, height=840)
        browser.screenshot(path)


if __name__ == "__main__":
    take_server(FOLDER / "page.png")
    take_profile(FOLDER / "profile.png")
