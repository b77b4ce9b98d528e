"""The operator's page in a headless Chromium, and the server that the page belongs to, in a thread."""

import os
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from fastapi import FastAPI

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

# The text nodes of the page that are harder to read than WCAG 2 allows (AA: 4.5 to 1).
LOW_CONTRAST = """
() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [[r, .2126], [g, .7152], [b, .0722]].reduce((sum, [value, weight]) => {
    const v = value / 255;
    return sum + weight * (v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  }, 0);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = channels(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const owner = node.parentElement;
    if (!node.textContent.trim() || !owner.checkVisibility() || owner.closest("noscript")) continue;
    const style = getComputedStyle(owner);
    const colour = channels(owner.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [high, low] = [luminance(colour), luminance(ground(owner))].sort((a, b) => b - a);
    if ((high + .05) / (low + .05) < 4.5) found.push(`${node.textContent} ${colour} ${ground(owner)}`);
  }
  return found;
}
"""


class PageServer:
    """An application in a thread of its own, at one address of loopback. It stops and starts again."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    def start(self) -> None:
        config = uvicorn.Config(self.app, port=self._port, log_level="error", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError(f"the application did not start at {self.url}")
            self._thread.join(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def __enter__(self) -> "PageServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def a_browser() -> Iterator[Any]:
    """A Chromium of this machine; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no Chromium is installed: {', '.join(NAMES)}")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


class Visit:
    """A page that is open, what the browser complains of, and which hosts it asks."""

    def __init__(self, browser: Any, url: str, width: int = 1280, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.set_default_timeout(15_000)
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda message: self._note(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self._note(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.page.goto(url)

    def _note(self, complaint: str) -> None:
        self.complaints.append(complaint)

    def wait_for(self, selector: str) -> None:
        """Until the page shows it."""
        self.page.locator(selector).first.wait_for()

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def texts(self, selector: str) -> list[str]:
        return list(self.page.locator(selector).all_inner_texts())

    def rows(self, body: str) -> list[list[str]]:
        """The cells of a table's body."""
        script = "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))"
        return list(self.page.locator(f"#{body} tr").evaluate_all(script))

    @property
    def overflow(self) -> int:
        """Pixels that the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))

    @property
    def low_contrast(self) -> list[str]:
        return list(self.page.evaluate(LOW_CONTRAST))
