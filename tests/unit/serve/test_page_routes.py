"""The operator's page without a browser: its files, their headers, and its colours."""

import ast
import http.client
import itertools
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from oracle.operations_snapshot import snapshot

pytest.importorskip("fastapi")

from fastapi import FastAPI
from mambaslots.serve.api_keys import ApiKeys
from mambaslots.serve.app import page_router
from mambaslots.serve.middleware import AccessMiddleware
from oracle.browser import PageServer

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "core/serve/page"
FILES = sorted(path.name for path in FOLDER.iterdir())
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    app = FastAPI()
    app.add_middleware(AccessMiddleware, keys=ApiKeys({}, "open-sesame"))
    app.include_router(page_router)

    async def shown() -> dict[str, Any]:
        return snapshot(3, model="\ud83d")

    app.state.engine = SimpleNamespace(snapshot=shown)
    with PageServer(app) as started:
        yield started


def ask(server: PageServer, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(server.url.split("/")[2])
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


def check_headers(response: http.client.HTTPResponse) -> None:
    policy = response.headers["Content-Security-Policy"].split("; ")
    assert policy[0] == "default-src 'self'"
    assert "unsafe" not in " ".join(policy)
    assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_open_and_is_asked_for_again_only_when_it_changes(server: PageServer, name: str) -> None:
    path = "/" if name == "index.html" else f"/page/{name}"
    response, content = ask(server, path)
    assert response.status == 200
    assert content == (FOLDER / name).read_bytes()
    assert response.headers["Content-Type"] == MEDIA_TYPES[Path(name).suffix]
    assert response.headers["Cache-Control"] == "no-cache"
    check_headers(response)
    etag = response.headers["ETag"]
    for known in (etag, f'"other", W/{etag}'):
        again, nothing = ask(server, path, **{"If-None-Match": known})
        assert (again.status, nothing, again.headers["ETag"]) == (304, b"", etag)
    assert ask(server, path, **{"If-None-Match": '"other"'})[0].status == 200


@pytest.mark.parametrize("name", ["none.js", "..%2fapp.py", "%2e%2e/app.py", "page.js/"])
def test_no_other_file_is_served(server: PageServer, name: str) -> None:
    response, content = ask(server, f"/page/{name}")
    assert response.status in (404, 307), "or a redirection to a name without the slash"
    assert b"import" not in content


def test_the_figures_need_the_admin_key_and_are_not_stored(server: PageServer) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic open-sesame"}):
        response, content = ask(server, "/status.json", **headers)
        assert response.status == 401
        assert b"tokens" not in content
    response, content = ask(server, "/status.json", Authorization="Bearer open-sesame")
    assert response.status == 200
    assert response.headers["Cache-Control"] == "no-store"
    check_headers(response)
    assert json.loads(content) == snapshot(3, model="\ud83d")
    for encodings in ("br, gzip", "gzip;q=0", "identity;q=0, *;q=0"):
        response, same = ask(
            server, "/status.json", **{"Authorization": "Bearer open-sesame", "Accept-Encoding": encodings}
        )
        assert response.status == 200
        assert response.headers["Content-Encoding"] is None
        assert same == content


class Elements(HTMLParser):
    """All attributes of a page, and what stands in its scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str]] = []
        self.inline = ""
        self._tag = ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style"):
            self.inline += data.strip()


def test_the_page_is_complete_and_its_policy_lets_it_run() -> None:
    """No inline script or style, no other host, and every id that the scripts name."""
    source = (FOLDER / "index.html").read_text()
    elements = Elements(source)
    assert elements.inline == ""
    assert [name for name, _ in elements.attributes if name == "style" or name.startswith("on")] == []
    scripts = "".join((FOLDER / name).read_text() for name in FILES if name.endswith(".js"))
    for text in (source, scripts, (FOLDER / "page.css").read_text()):
        assert set(re.findall(r"(?:https?:)?//[\w.]+", text)) <= {"http://www.w3.org"}, "SVG's namespace"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", scripts)
    linked = {value for name, value in elements.attributes if name in ("src", "href")}
    imported = {f"page/{name}" for name in re.findall(r'from "\./([\w.]+)"', scripts)}
    assert {path.removeprefix("page/") for path in linked | imported} == set(FILES) - {"index.html"}
    ids = [value for name, value in elements.attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    named = set(re.findall(r'\$\("([\w-]+)"\)|(?:Chart|fillTable)\("([\w-]+)"', scripts))
    assert {one or other for one, other in named} <= set(ids)
    about = {
        value for name, value in elements.attributes if name in ("aria-labelledby", "aria-describedby", "for")
    }
    assert about <= set(ids)


def test_a_wheel_has_the_files_of_the_page() -> None:
    source = ast.walk(ast.parse((ROOT / "setup.py").read_text()))
    (data,) = [node.value for node in source if isinstance(node, ast.keyword) and node.arg == "package_data"]
    patterns = ast.literal_eval(data)["mambaslots.serve"]
    packed = {path.name for pattern in patterns for path in (ROOT / "core/serve").glob(pattern)}
    assert packed == set(FILES)


# ---- colours

# Linear RGB as people see it who lack a kind of cones: Machado, Oliveira and Fernandes, "A Physiologically
# based Model for Simulation of Color Vision Deficiency", 2009, table of severity 1.
VISION = {
    "all cones": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900],
    ],
}  # fmt: skip
XYZ = [
    [0.4124564, 0.3575761, 0.1804375],
    [0.2126729, 0.7151522, 0.0721750],
    [0.0193339, 0.1191920, 0.9503041],
]
WHITE = [0.95047, 1.0, 1.08883]
LEAST_DISTANCE = 12  # CIE76; 2.3 is just noticeable side by side


def seen(colour: str, vision: object) -> np.ndarray:
    """CIELAB of a colour "#rrggbb" or "#rgb" as a person with this vision sees it."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    coded = np.array([int(digits[at : at + 2], 16) for at in (0, 2, 4)]) / 255
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    x, y, z = XYZ @ np.clip(vision @ linear, 0, 1) / WHITE
    x, y, z = (np.cbrt(v) if v > 216 / 24389 else (24389 / 27 * v + 16) / 116 for v in (x, y, z))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_the_colours_of_reasons_stay_apart(scheme: str, vision: str) -> None:
    style = (FOLDER / "page.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    values = dict(re.findall(r"--([\w-]+): (#\w+);", light + (dark if scheme == "dark" else "")))
    reasons = re.search(r"const REASONS = \{(.*?)\};", (FOLDER / "page.js").read_text(), re.DOTALL)
    assert reasons is not None
    names = re.findall(r"^  (\w+):", reasons[1], re.MULTILINE)
    colours = {}
    for name in names:
        variable = re.search(rf"\.s-{name}\b[^{{]*\{{ color: var\(--([\w-]+)\)", style)
        assert variable is not None, f"{name} has no colour"
        colours[name] = seen(values[variable[1]], np.array(VISION[vision]))
    distances = {
        (a, b): float(np.linalg.norm(colours[a] - colours[b])) for a, b in itertools.combinations(names, 2)
    }
    assert len(names) == 10
    assert {pair: distance for pair, distance in distances.items() if distance < LEAST_DISTANCE} == {}
