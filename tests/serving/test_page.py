"""The page of the server: one file that refers to nothing, its map and text in step, and what it does in a browser.

The browser is Chromium, where it is installed, driven through its own protocol over a pipe: no driver is needed.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest
import torch

from locret_stream.cache import UnitStore
from locret_stream.engine import EngineState, occupancy
from locret_stream.serving.app import PAGE
from tests import processes
from tests.langchain.support import Script
from tests.serving.support import Served, serving

LOG = "".join(f"{number} the door is shut, and the window is open\n" for number in range(300))
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
# Become a program that reads commands from descriptor 3 and answers on 4.
_BECOME = """
import fcntl, os, sys
high = [fcntl.fcntl(int(given), fcntl.F_DUPFD, 10) for given in sys.argv[1:3]]
for own, given in zip((3, 4), high):
    os.dup2(given, own)
os.execv(sys.argv[3], sys.argv[3:])
"""
_needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here: expected chromium, "
                                     "chromium-browser, google-chrome or chrome on the path")


def in_browser(test: Callable[..., None]) -> Callable[..., None]:
    """A test that needs Chromium."""
    marked: Callable[..., None] = pytest.mark.real(_needs_chromium(test))
    return marked


def ingest(served: Served, session: str, text: str) -> None:
    answer = served.http.post(f"/v1/sessions/{session}/ingest", content=text.encode())
    assert answer.status_code == 200, answer.text


# -- the file, and what it asks the server for ------------------------------------------------------------------


def test_the_page_is_one_file_that_refers_to_nothing(served: Served):
    answer = served.http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe-eval" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    page = answer.text
    assert page == PAGE.read_text(encoding="utf-8") and len(page.encode()) < 64 << 10
    assert not re.findall(r"https?://|\bsrc=|@import|\burl\(|\bimport\b|<link(?! rel=\"icon\" href=\"data:,\")", page)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|localStorage|"
                          r"DOMParser|\bon[a-z]+=\"", page)


def test_the_page_needs_no_key_and_shows_nothing_without_one(script: Script, tmp_path: Path):
    with serving(tmp_path, keys={"s3cret": ""}, key="s3cret") as served:
        assert httpx.get(f"{served.url}/").status_code == 200
        assert httpx.get(f"{served.url}/v1/sessions").status_code == 401


@pytest.mark.parametrize("told", [LOG, "Ägypten 🐪 über alles, naïve 日本語 tokens\n" * 40])
@pytest.mark.parametrize("columns", [7, 4096])
@pytest.mark.thorough(but=2)
def test_texts_are_cut_into_the_columns_of_the_map(script: Script, tmp_path: Path, told: str, columns: int):
    with serving(tmp_path, budget=512) as served:
        ingest(served, "builds", told)
        for start, end in ((0, 300), (13, 200), (100, 101)):
            where = {"start": start, "end": end}
            map = served.http.get("/v1/sessions/builds/map", params=where | {"columns": columns}).json()
            text = served.http.get("/v1/sessions/builds/text", params=where | {"column": map["column"]}).json()
            whole = served.http.get("/v1/sessions/builds/text", params=where).json()
            assert len(text["pieces"]) == len(map["kept"][0][0]) and text["column"] == map["column"]
            assert "".join(text["pieces"]) == text["text"] == whole["text"] and text["share"] == whole["share"]
        wrong = served.http.get("/v1/sessions/builds/text", params={"column": 0})
        assert wrong.status_code == 400 and "column is 0" in wrong.json()["error"]["message"]
        assert served.http.get("/v1/sessions/nothing/text", params={"column": 1}).status_code == 404


def test_the_map_is_told_while_a_turn_runs(served: Served):
    ingest(served, "builds", LOG)
    before = served.http.get("/v1/sessions/builds/map").json()
    thread = served.service.threads.named("builds")
    served.do(thread.lock.acquire())
    try:
        assert served.http.get("/v1/sessions/builds/map", timeout=20).json() == before
    finally:
        served.loop.call_soon_threadsafe(thread.lock.release)


@pytest.mark.parametrize("start, end", [(0, None), (0, 10_000_000), (5_000_000, 5_000_400), (9_990_000, 10_000_000)])
def test_ten_million_tokens_are_mapped_within_20_ms(start: int, end: int | None):
    """By units and not by tokens: as many as the bundled model keeps, of a stream of 10 million tokens."""
    tokens, pending, heads = 10_000_000, 128, 2
    budgets = [96, 96, 2784, 96]
    torch.manual_seed(0)
    held = [torch.randint(tokens - pending, (heads, budget)).sort().values for budget in budgets]
    store = SimpleNamespace(counts=budgets, positions=held.__getitem__)
    state = EngineState(cast(UnitStore, store), {})
    state.seen, state.pending = tokens - pending, [0] * pending
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        found = occupancy(state, start, end, 480)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.02, seconds
    last = tokens if end is None else end
    for layer, head in ((0, 0), (2, 1)):
        positions = torch.cat([held[layer][head], torch.arange(state.seen, tokens)])
        inside = positions[(positions >= start) & (positions < last)] - start
        assert found.kept[layer][head] == torch.bincount(
            inside // found.column, minlength=len(found.kept[0][0])).tolist()


# -- in a browser -----------------------------------------------------------------------------------------------


class Browser:
    """A page in Chromium.

    Attributes:
        told: what it told of errors: exceptions, console.error, refused loads. asked: every URL that it asked for.
    """

    def __init__(self, folder: Path):
        out, self._write = os.pipe()
        self._read, into = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                   "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        self._process = processes.start_python("-S", "-c", _BECOME, out, into, CHROMIUM, *options, "about:blank",
                                               pass_fds=(out, into), stdout=processes.DEVNULL, stderr=processes.DEVNULL)
        os.close(out)
        os.close(into)
        self._last, self._buffer, self._session = 0, b"", None  # type: tuple[int, bytes, str | None]
        self.told, self.asked = list[Any](), list[str]()
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params: Any) -> Any:
        """A command of the browser's protocol and its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._last:
            self._note(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], 60)[0], "the browser says nothing"
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser ended"
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if (method == "Runtime.exceptionThrown" or (method == "Log.entryAdded" and params["entry"]["level"] == "error")
                or (method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"))):
            self.told.append(params)
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def see(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (expression, found)
        return found["result"].get("value")

    def until(self, expression: str, within_s: float = 60) -> None:
        """Returns when the expression is true."""
        end = time.monotonic() + within_s
        while not self.see(expression):
            assert time.monotonic() < end, (expression, self.told, self.see("document.body.innerText"))
            time.sleep(0.02)

    def open(self, url: str, *, width: int = 1400) -> None:
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.do("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && typeof loadSessions === 'function' && waiting === 0")

    def press(self, key: str, *, shift: bool = False) -> None:
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        for kind in ("keyDown", "keyUp"):
            self.do("Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=8 if shift else 0,
                    **({"text": text} if text and kind == "keyDown" else {}))

    def drag(self, selector: str, first: float, last: float) -> None:
        """With the mouse, from one part of an element's width to another; a click where they are the same."""
        self.see(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
        box = self.see(f"(({{x, y, width, height}}) => [x, y, width, height])"
                       f"(document.querySelector('{selector}').getBoundingClientRect())")
        for kind, part in (("mousePressed", first), ("mouseMoved", last), ("mouseReleased", last)):
            self.do("Input.dispatchMouseEvent", type=kind, x=box[0] + part * box[2], y=box[1] + box[3] / 2,
                    button="left", buttons=1, clickCount=1)

    def type(self, element: str, text: str) -> None:
        self.see(f"by('{element}').focus()")
        self.do("Input.insertText", text=text)

    def show(self, session: str) -> None:
        """Choose a session of the list, by its name, and wait until its map is there."""
        self.see(f"[...document.querySelectorAll('#sessions button')].find(one => one.textContent === "
                 f"{json.dumps(session)}).click()")
        self.settle()

    def settle(self) -> None:
        """Returns when the map of what is shown is there, and its text if that is short enough."""
        self.until("waiting === 0 && shown.memory && shown.map && shown.map.start === shown.start && "
                   "shown.map.end === shown.end && (shown.end - shown.start > MOST_TEXT || text?.map === shown.map)")

    def close(self) -> None:
        self._session = None
        self.do("Browser.close")
        self._process.wait(30)
        os.close(self._write)
        os.close(self._read)


@contextmanager
def browser_of(folder: Path) -> Iterator[Browser]:
    browser = Browser(folder)
    try:
        yield browser
    finally:
        browser.close()


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser_of(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@in_browser
def test_a_session_is_shown_zoomed_and_read(script: Script, tmp_path: Path, browser: Browser):
    with serving(tmp_path, budget=512) as served:
        ingest(served, "builds", LOG)
        browser.open(served.url)
        assert browser.see("!by('empty').hidden && by('session').hidden")
        browser.show("builds")
        memory = served.http.get("/v1/sessions/builds/memory").json()
        tokens, figures = memory["tokens"], browser.see("by('figures').innerText")
        assert f"{tokens:,}" in figures and "a full cache" in figures and "tok/s" in figures
        assert browser.see("shown.end") == tokens and browser.see("document.title").startswith("builds")
        colors = browser.see("(canvas => new Set(new Uint32Array(canvas.getContext('2d').getImageData(0, 0, "
                             "canvas.width, canvas.height).data.buffer)).size)(by('heat'))")
        assert colors > 5  # it is painted
        # Drag, click and keys zoom in; every step is a range that the map and the breadcrumbs agree on.
        browser.drag("#heat", 0.2, 0.6)
        browser.settle()
        dragged = browser.see("shown.end - shown.start")
        assert tokens * 0.3 < dragged < tokens * 0.5
        browser.see("by('heat').focus()")
        browser.press("+")
        browser.settle()
        assert abs(browser.see("shown.end - shown.start") - dragged / 2) <= 1
        browser.see("show(0, 40)")
        browser.settle()
        assert browser.see("shown.map.column") == 1 and browser.see("text.spans.length") == 40
        assert "0 the door is shut" in browser.see("by('text').textContent")
        # The shading is that of the tokens: the sinks are kept, and what lies behind them was evicted.
        assert browser.see("[...document.querySelectorAll('#text span')].map(span => +span.classList.contains('k4'))"
                           ) == [1] * 4 + [0] * 36
        assert browser.see("by('crumbs').innerText").replace("\n", " ").startswith("All")
        # Keys: the mark goes through the columns, rows are chosen, the text has a mark of its own, Escape goes out.
        browser.press("ArrowRight", shift=True)
        browser.press("ArrowDown")
        assert browser.see("shown.row") == 1 and "layer 0, KV head 0" in browser.see("by('readout').textContent")
        browser.see("by('text').focus()")
        browser.press("ArrowRight")
        browser.press("ArrowRight")
        assert browser.see("by('text-readout').textContent").startswith("token 1: 100 % kept")
        browser.press("Escape")
        browser.settle()
        assert browser.see("shown.end - shown.start") > 40
        for _ in range(8):
            browser.press("Escape")
        browser.settle()
        assert browser.see("[shown.start, shown.end]") == [0, tokens]
        assert not browser.told
        assert all(url.startswith((served.url, "data:", "about:")) for url in browser.asked), browser.asked
        ranges = [dict(parse_qsl(urlsplit(url).query)) for url in browser.asked if "/text?" in url]
        assert ranges and all(int(one["end"]) - int(one["start"]) <= 4096 for one in ranges)  # never the whole text


@in_browser
def test_all_can_be_reached_by_tab_at_every_width(served: Served, browser: Browser):
    ingest(served, "builds", LOG)
    for width in (360, 820, 1600):
        browser.open(f"{served.url}/?{width}#session=builds&start=0&end=200", width=width)
        browser.settle()
        assert browser.see("document.documentElement.scrollWidth <= innerWidth"), width
        assert browser.see("[...document.querySelectorAll('#session :is(button, input, select, textarea, canvas), "
                           "nav button')].every(one => one.tabIndex === 0)")
        browser.see("document.body.focus()")
        reached = []
        for _ in range(40):
            browser.press("Tab")
            reached.append(browser.see("document.activeElement.id"))
        for element in ("whole", "in", "rows", "heat", "text", "question", "words"):
            assert element in reached, (width, element, reached)
        assert reached.index("whole") < reached.index("in") < reached.index("heat") < reached.index("question")
        unnamed = browser.see("[...document.querySelectorAll('button, input:not([hidden]), select, textarea, canvas')]"
                              ".filter(one => !(one.ariaLabel || one.getAttribute('aria-labelledby') || "
                              "one.labels?.length || one.textContent.trim())).map(one => one.outerHTML)")
        assert unnamed == []
    assert not browser.told


@in_browser
def test_questions_and_search_lead_to_their_places(script: Script, tmp_path: Path, browser: Browser):
    script.say = lambda shown: f"It is shut. {HOSTILE}"
    with serving(tmp_path, budget=512, recall=True) as served:
        ingest(served, "builds", LOG.replace("137 the door is shut", "137 the door is ajar"))
        browser.open(f"{served.url}/#session=builds")
        browser.settle()
        browser.type("question", "When was it ajar?")
        browser.press("Enter")
        browser.until("document.querySelectorAll('#answers .answer').length === 1")
        assert browser.see("document.querySelector('#answers .answer').textContent") == f"It is shut. {HOSTILE}"
        places = "[...document.querySelectorAll('#answers .places button')]"
        browser.until(f"{places}.length > 0")
        browser.see(f"{places}.find(one => one.textContent.includes('137 the door')).click()")
        browser.settle()
        assert "137 the door is ajar" in browser.see("by('text').textContent").replace("↵", "")
        assert browser.see("document.activeElement.id") == "heat"
        browser.see("show(0, 1e9)")
        browser.type("words", "201 window")
        browser.press("Enter")
        browser.until("document.querySelectorAll('#places button').length > 0")
        browser.see("[...document.querySelectorAll('#places button')].find(one => one.textContent.includes('201 the'))"
                    ".click()")
        browser.settle()
        assert "201 the door" in browser.see("by('text').textContent")
        assert browser.see("document.title") == "builds · locret-stream" and not browser.told


@in_browser
def test_names_texts_and_errors_are_never_read_as_html(served: Served, script: Script, browser: Browser):
    script.say = lambda shown: HOSTILE
    for name in (HOSTILE[:60], "a/b c?d#e%2F"):
        first = served.http.post("/v1/responses", json={"input": HOSTILE, "session_id": name})
        assert first.status_code == 200, first.text
    browser.open(served.url)
    for name in (HOSTILE[:60], "a/b c?d#e%2F"):
        browser.show(name)
        assert browser.see("by('title').textContent") == name
        browser.settle()
        assert HOSTILE in browser.see("by('text').textContent")
        assert browser.see("document.images.length + document.scripts.length") == 1
    browser.see("show(0, 20)")
    browser.see(f"tellWrong(new Error({json.dumps(HOSTILE)}))")
    assert HOSTILE in browser.see("by('wrong').textContent") and browser.see("document.images.length") == 0
    assert "owned" not in browser.see("document.title") and not browser.told


@in_browser
def test_the_key_stays_in_the_tab_and_errors_are_the_apis(script: Script, tmp_path: Path, browser: Browser):
    with serving(tmp_path, keys={"s3cret": ""}, key="s3cret") as served:
        ingest(served, "builds", LOG)
        browser.open(served.url)
        browser.until("!by('wrong').hidden")
        assert "no valid API key was given" in browser.see("by('wrong').innerText")
        assert browser.see("document.activeElement.id") == "key"
        assert browser.told  # the refused load, so what goes wrong is noticed here
        browser.told.clear()
        browser.type("key", "s3cret")
        browser.press("Enter")
        browser.until("document.querySelectorAll('#sessions button').length === 1 && by('wrong').hidden")
        browser.show("builds")
        assert browser.see("sessionStorage.length") == 1 and browser.see("localStorage.length") == 0
        assert browser.see("document.cookie") == "" and "s3cret" not in browser.see("location.href")
        assert not browser.told


@in_browser
def test_figures_are_polled_while_the_page_is_seen_and_follow_the_stream(served: Served, browser: Browser):
    ingest(served, "builds", LOG)
    browser.open(f"{served.url}/#session=builds")
    browser.settle()
    before = browser.see("shown.memory.tokens")
    ingest(served, "builds", LOG)
    browser.until(f"shown.memory.tokens > {before} && shown.end === shown.memory.tokens && "
                  "shown.whole.tokens === shown.end")
    browser.settle()
    browser.see("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    browser.see("document.dispatchEvent(new Event('visibilitychange'))")
    browser.see("new Promise(done => setTimeout(done, 1500))")
    asked = len(browser.asked)
    browser.see("new Promise(done => setTimeout(done, 2500))")
    assert len(browser.asked) == asked
    browser.see("delete document.hidden")
    browser.see("document.dispatchEvent(new Event('visibilitychange'))")
    browser.see("new Promise(done => setTimeout(done, 1500))")
    assert len(browser.asked) > asked and not browser.told


@in_browser
@pytest.mark.slow  # a million tokens are read first: minutes
def test_a_session_of_a_million_tokens_opens_within_a_second(tmp_path: Path, browser: Browser):
    """As a process of its own, with the bundled model: by a link to it, in a page that was closed before. Run with -s,
    it prints what it took."""
    process = processes.start_python("-m", "locret_stream", "serve", "--port", "0", "--json", "--store", tmp_path,
                                     stdout=processes.PIPE, stderr=processes.DEVNULL)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"].removesuffix("/v1")
        line, seconds = "the door is shut, and the window is open at {}\n", list[float]()
        with httpx.Client(base_url=url, timeout=3_600) as http:
            told, lines = 0, 0
            while told < 1_000_000:
                text = "".join(line.format(number) for number in range(lines, lines + 10_000))
                answer = http.post("/v1/sessions/log/ingest", content=text.encode())
                assert answer.status_code == 200, answer.text
                told, lines = http.get("/v1/sessions/log/memory").json()["tokens"], lines + 10_000
        for _ in range(5):
            browser.do("Page.navigate", url="about:blank")
            began = time.perf_counter()
            browser.open(f"{url}/#session=log")
            browser.settle()
            seconds.append(time.perf_counter() - began)
            assert browser.see("shown.end") == told
        print(f"{told:,} tokens: opened in {', '.join(f'{one * 1000:.0f}' for one in seconds)} ms")
        assert sorted(seconds)[2] <= 1, seconds
    finally:
        process.kill()
        process.communicate()
