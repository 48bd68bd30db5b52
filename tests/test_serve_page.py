"""The page at `/`: its permissions, and its use in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser
from tests.server_process import END, Server, is_error

LAST = "document.querySelector('#log article:last-child {}')"
# the page's request, without the token that ends an answer; the page itself has no such field
NO_END = f"""window.fetch = ((send) => (path, asked) => {{
    const body = {{...JSON.parse(asked.body), logit_bias: {{{END}: -100}}}};
    return send(path, {{...asked, body: JSON.stringify(body)}});
}})(window.fetch)"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(bundle="demo-draft") as running:  # without attention: no context ends an answer
        yield running


def test_the_page_needs_no_key_and_may_do_little(server: Server) -> None:
    status, headers, body = server.request("GET", "/", headers={"authorization": None})
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    for tag in ("script", "style"):
        inside = re.search(rb"<%s>(.*?)</%s>" % (tag.encode(), tag.encode()), body, re.DOTALL)
        assert inside
        digest = base64.b64encode(hashlib.sha256(inside[1]).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(rb"https?:|//[a-z]|innerHTML|eval\(|style=| on[a-z]+=", body)
    assert server.key.encode() not in body


def test_only_our_own_page_may_call(server: Server) -> None:
    own = {"origin": f"http://127.0.0.1:{server.port}"}
    status, headers, _ = server.request("GET", "/v1/models", headers=own)
    assert status == 200 and "access-control-allow-origin" not in headers
    others = (
        f"http://127.0.0.1:{server.port + 1}", f"http://localhost:{server.port}",
        f"file://127.0.0.1:{server.port}", "http://evil", "null",
    )  # fmt: skip
    for origin in others:
        status, _, body = server.request("GET", "/v1/models", headers={"origin": origin})
        assert status == 403 and is_error(body)


def test_a_person_talks_stops_takes_back_and_forks(server: Server) -> None:
    with Browser() as browser:
        page = f"http://127.0.0.1:{server.port}/"
        browser.open(page, width=900, height=700)
        browser.until("problem.textContent.includes('type the key below')")
        assert browser.value("document.activeElement.id") == "key"
        # a refused message can be sent again
        browser.value("text.value = 'Hello', send()")
        browser.until("!running && problem.textContent")
        assert browser.value("[talk.messages.length, text.value]") == [0, "Hello"]
        assert browser.value("document.activeElement.id") == "key"
        browser.open(f"{page}#{server.key}", width=900, height=700)
        browser.open(f"{page}?again#{server.key}", width=900, height=700)
        browser.until("model.options.length === 1")
        assert server.key not in browser.value("location.href")

        def ask(text: str) -> None:
            browser.value("text.focus()")
            browser.type(text)
            browser.press("Enter")

        def said() -> str:
            return str(browser.value(LAST.format("p") + ".textContent"))

        ended = f"!running && {LAST.format('footer')}?.textContent.includes(' ms')"
        browser.value("temperature.value = 0")
        ask("Hello, how are you?")
        browser.until(ended)
        expected = server.client().chat.completions.create(
            model="demo-draft", messages=[{"role": "user", "content": "Hello, how are you?"}],
            temperature=0,
        )  # fmt: skip
        first = said()
        assert first == expected.choices[0].message.content
        footer = str(browser.value(LAST.format("footer") + ".textContent"))
        assert re.search(r"\d+ tokens · prompt \d+.* · first after \d+ ms · .*stop", footer)

        browser.value("most.value = 1000000, plain = window.fetch")
        browser.value(f"{NO_END}, null")
        ask("Tell me <b>all</b>.")
        browser.until(f"{LAST.format('p')}.textContent.length > 20")
        browser.press("Escape")
        browser.until("!running")
        assert "stopped" in browser.value(LAST.format("footer") + ".textContent")
        browser.value("window.fetch = plain, null")
        assert browser.value("document.querySelectorAll('#log b').length") == 0  # text stays text
        click = (
            "[...log.querySelectorAll('button')].findLast((b) => b.textContent === '{}').click()"
        )
        browser.value(click.format("Undo"))
        assert said() == first and browser.value("text.value") == "Tell me <b>all</b>."
        browser.value("text.value = '', most.value = '', temperature.value = 0")
        browser.value(click.format("Fork"))
        ask("And you?")
        browser.until(ended)
        assert browser.value("talk.messages.length") == 4 and browser.value("talks.length") == 2
        assert browser.value("talks[0].messages.length") == 2
        other = said()
        browser.value(click.format("Again"))
        browser.until(ended)
        assert said() == other and browser.value("talk.messages.length") == 4
        if folder := os.environ.get("EDGE_SCREENSHOTS"):
            _screens(browser, page, server.key, Path(folder))
        # on a phone nothing is wider than the screen
        browser.open(f"{page}#{server.key}", width=360, height=640, dark=True)
        assert browser.value("document.documentElement.scrollWidth") <= 360
        unasked = [line for line in browser.said if "401" not in line]
        assert unasked == []


def test_code_is_shown_as_code_and_an_answer_that_fails_costs_nothing(server: Server) -> None:
    text = "See:\n\n```python\nfor x in <b>y</b>:\n    go(x)\n```\n\nand ```so```.\n~~~\nlast"
    with Browser() as browser:
        browser.open(f"http://127.0.0.1:{server.port}/#{server.key}", width=360, height=640)
        browser.until("model.options.length === 1")
        asked, answered = {"role": "user", "content": text}, {"role": "assistant", "content": ""}
        browser.value(f"talk.messages.push({json.dumps(asked)}, {json.dumps(answered)}), draw()")
        for end in range(len(text)):  # as it streams
            browser.value(f"grow(talk.messages[1], {json.dumps(text[end])})")
        blocks = [
            ["p", "See:"],
            ["pre", "for x in <b>y</b>:\n    go(x)"],
            ["p", "and so."],
            ["pre", "last"],
        ]
        for index in (0, 1):
            blocks[2][1] = ("and ```so```.", "and so.")[index]  # answers are Markdown
            shown = f"[...log.children[{index}].querySelector('div').children]"
            assert browser.value(f"{shown}.map((b) => [b.localName, b.textContent])") == blocks
        assert browser.value("document.documentElement.scrollWidth") <= 360
        browser.value("temperature.value = -3, draw(), again()")
        browser.until("!running && problem.textContent")
        assert browser.value("talk.messages.map((m) => m.content)") == [text, text]


MARKDOWN = """# The **plan**, <i>first</i>

Go *now*, not 2 * 3 * 4 or a*b*c:

3. one `x<y`
   and more

4. two
   - in **two**
   * again
- other
| a | **b** |
|---|:--:|
| 1 | <img src=x onerror=alert(1)> |
end **open
"""
SHOWN = """<h3>The <strong>plan</strong>, &lt;i&gt;first&lt;/i&gt;</h3>
<p>Go <em>now</em>, not 2 * 3 * 4 or a*b*c:</p>
<ol start="3"><li>one <code>x&lt;y</code>
and more</li><li>two<ul><li>in <strong>two</strong></li><li>again</li></ul></li></ol>
<ul><li>other</li></ul>
<table tabindex="0"><tr><th>a</th><th><strong>b</strong></th></tr>\
<tr><td>1</td><td>&lt;img src=x onerror=alert(1)&gt;</td></tr></table>
<p>end **open</p>"""


def test_markdown_is_shown_and_no_text_is_markup(server: Server) -> None:
    with Browser() as browser:
        browser.open(f"http://127.0.0.1:{server.port}/#{server.key}", width=360, height=640)
        browser.until("model.options.length === 1")
        both = [{"role": "user", "content": MARKDOWN}, {"role": "assistant", "content": MARKDOWN}]
        browser.value(f"talk.messages.push(...{json.dumps(both)}), draw()")
        shown = "[...log.children[{}].querySelector('div').children].map((b) => b.{})"
        assert browser.value(shown.format(0, "textContent")) == [MARKDOWN]
        whole = browser.value(shown.format(1, "outerHTML"))
        assert "\n".join(whole) == SHOWN
        assert browser.value("document.documentElement.scrollWidth") <= 360
        # a long chat scrolls within the page, not the page
        assert browser.value("log.scrollHeight > log.clientHeight")
        assert browser.value("document.documentElement.scrollHeight <= innerHeight")
        # as it streams; whatever the text, the final result equals rendering it in one piece
        noise = "".join(random.Random(1).choices("*`|-#~1. \nab<", k=400))
        for text in (MARKDOWN, noise):
            browser.value("talk.messages[1].content = '', draw()")
            for end in range(len(text)):
                browser.value(f"grow(talk.messages[1], {json.dumps(text[end])})")
            grown = browser.value(shown.format(1, "outerHTML"))
            browser.value("draw()")
            assert grown == browser.value(shown.format(1, "outerHTML"))
        # unclosed markup costs time linear in its length
        for part in ("*", "**a", "`", "```", "|", "# ", "  - ", "~"):
            browser.value(
                f"fill(document.createElement('div'), {json.dumps(part)}.repeat(1e5), true), 1"
            )
        assert browser.said == []


def _screens(browser: Browser, page: str, key: str, folder: Path) -> None:
    """Save screenshots for people to look at."""
    for name, width, height, dark in (("light", 900, 560, False), ("dark", 390, 700, True)):
        browser.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                     deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.send("Emulation.setEmulatedMedia", features=[scheme])
        browser.screenshot(folder / f"page-{name}.png")
