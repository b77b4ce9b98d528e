"""The operator's page in Chromium: what it shows of a snapshot, and of a conversation that was just held."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mambaslots as ms
import pytest
import torch
from oracle.browser import PageServer, Visit, a_browser
from oracle.operations_snapshot import snapshot

pytest.importorskip("fastapi")

from fastapi import FastAPI
from mambaslots.serve import ServerSettings, make_app
from mambaslots.serve.api_keys import ApiKeys
from mambaslots.serve.app import page_router
from mambaslots.serve.middleware import AccessMiddleware

TINY_CODE = Path(__file__).parents[3] / "models/tiny-code"
NOTHING = "\u2013"  # a dash
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&amp;\u202e\ud83d"


def an_app(shown: dict[str, Any], admin_key: str | None = None, **api_keys: str) -> FastAPI:
    """The page's routes behind the server's middleware, over one snapshot, `app.state.shown`."""
    app = FastAPI()
    app.add_middleware(AccessMiddleware, keys=ApiKeys(api_keys, admin_key))
    app.include_router(page_router)
    app.state.shown = shown

    async def snapshot() -> dict[str, Any]:
        return dict(app.state.shown)

    app.state.engine = SimpleNamespace(snapshot=snapshot)
    return app


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with a_browser() as started:
        yield started


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    """Serves what a test puts into `server.app.state.shown`."""
    with PageServer(an_app(snapshot())) as started:
        yield started


@pytest.fixture
def visit(browser: Any, server: PageServer) -> Iterator[Any]:
    """Opens the page on a snapshot. At the end the browser must have nothing to complain of."""
    visits: list[Visit] = []

    def opened(shown: dict[str, Any], **how: Any) -> Visit:
        server.app.state.shown = shown
        visits.append(Visit(browser, server.url, **how))
        visits[-1].wait_for("#figures")
        return visits[-1]

    yield opened
    for one in visits:
        one.page.close()
        assert one.complaints == []
        assert {f"http://{host}/" for host in one.hosts} == {server.url}


def cell(value: int) -> str:
    return f"{value:,}"


def share(part: int, whole: int) -> str:
    value = 100 * part / whole
    return f"{value:.0f} %" if value in (0, 100) else f"{value:.1f} %"


# ---- what is shown


def test_every_figure_of_the_snapshot_is_on_the_page(visit: Any) -> None:
    warning = "state_evicted cost 34 % of the prompt tokens; raise num_mamba_slots (64)."
    shown = snapshot(130, warnings=[warning])
    page = visit(shown)
    assert page.text("#warning-list") == warning
    assert page.text("#model") == "tiny-code"

    tokens = shown["tokens"]
    counts = {"resumed": tokens["resumed"], **tokens["by_reason"]}
    rows = {cells[0].split("\n")[0]: cells[1:] for cells in page.rows("reasons")}
    assert rows == {name: [cell(n), share(n, tokens["prompt"])] for name, n in counts.items() if n}
    without = ", ".join(name.replace("_", " ") for name, n in counts.items() if not n)
    assert sorted(page.text("#no-tokens")[11:-1].split(", ")) == sorted(without.split(", "))
    assert "Time saved, about\n3.6 s\n" in page.text("#tiles")
    assert f"{share(tokens['resumed'], tokens['prompt'])} since the start" in page.text("#tiles")
    recent = [point for point in shown["series"]["points"] if point["time_s"] > shown["time_s"] - 60]
    resumed, prompt = (sum(point[name] for point in recent) for name in ("resumed", "prompt"))
    assert page.texts("#tiles .value")[:3] == [share(resumed, prompt), "12 ms", "12 ms"]

    parts = {"pinned": 5, "not pinned": 35, "reserved": 2, "running requests": 3, "free": 19}
    assert page.texts("#states-legend li") == [f"{name} {n} ({share(n, 67)})" for name, n in parts.items()]
    blocks = {"held": 40, "cached": 150, "free": 66}
    assert page.texts("#kv-legend li") == [f"{name} {n} ({share(n, 256)})" for name, n in blocks.items()]
    assert page.texts("#queue-legend li") == ["running 3 (18.8 %)", "waiting 2 (12.5 %)"]
    assert page.rows("evictions")[0] == ["new_state\nits slot was needed for another state", "17", "73.9 %"]
    assert len(page.rows("evictions")) == 3
    assert page.rows("latency")[0] == ["To the first token", "12 ms", "180 ms", "1.25 s"]
    assert page.rows("tenants") == [
        [
            tenant["name"], cell(tenant["requests"]),
            share(tenant["resumed_tokens"], tenant["prompt_tokens"]),
        ]
        for tenant in shown["tenants"]
    ]  # fmt: skip
    page.page.click("summary")
    assert page.text("#description") == "\n".join(shown["engine"]["description"])


def test_a_request_shows_where_it_resumed_and_why_not_deeper(visit: Any) -> None:
    shown = snapshot(130)
    page = visit(shown)
    assert len(page.rows("requests")) == 12
    page.page.click("#show-all")
    rows = page.rows("requests")
    assert len(rows) == len(shown["requests"]) == 100
    for cells, request in zip(rows, shown["requests"], strict=True):
        prompt, resumed = request["prompt_tokens"], request["resumed_tokens"]
        assert [cells[0], *cells[2:6], *cells[8:]] == [
            str(request["id"]), request["tenant"], cell(prompt),
            f"{cell(resumed)} · {share(resumed, prompt)}", request["why"],
            cell(request["generated_tokens"]), request["finish_reason"] or "running",
        ]  # fmt: skip
    bars = page.page.locator("#requests svg")
    labels = bars.evaluate_all("bars => bars.map(bar => bar.getAttribute('aria-label'))")
    for label, request in zip(labels, shown["requests"], strict=True):
        spans = [[0, request["resumed_tokens"], "resumed"], *request["spans"]]
        words = [f"{reason}: tokens {a:,} to {b:,}" for a, b, reason in spans if b > a]
        assert label == "; ".join(words)
    widths = "bars => bars.map(bar => [...bar.querySelectorAll('rect')].map(r => r.width.baseVal.value))"
    for of_bar in bars.evaluate_all(widths):
        assert sum(of_bar) == pytest.approx(1000)
        assert min(of_bar) > 5, "every span can be seen"


def test_a_chart_is_read_with_the_pointer_and_with_keys(visit: Any) -> None:
    shown = snapshot(40)
    page = visit(shown)
    page.page.check("#window [value='60']")
    assert page.text("#token-unit") == "in each 2 s"
    chart = page.page.locator("#token-chart svg")
    chart.focus()
    totals = dict.fromkeys(("prompt tokens", "resumed", *ms.COMPUTE_REASONS), 0)
    for _ in range(30):  # all bins of a minute
        page.page.keyboard.press("ArrowLeft")
        for line in page.texts("#tip div"):
            name, _, value = line.partition("\n")
            if name in totals:
                totals[name] += int(value.split(" ")[0].replace(",", ""))
    points = shown["series"]["points"][-30:]
    assert totals.pop("prompt tokens") == sum(point["prompt"] for point in points) > 0
    assert totals.pop("resumed") == sum(point["resumed"] for point in points)
    assert totals == {name: sum(point["by_reason"][name] for point in points) for name in ms.COMPUTE_REASONS}
    chart.blur()
    assert not page.page.is_visible("#tip")
    page.page.hover("#hit-chart", position={"x": 640, "y": 50})
    assert page.page.is_visible("#tip")
    page.page.locator("#reasons tr").nth(2).focus()
    faded = page.page.locator("#token-chart rect.faded")
    assert faded.count() > 0
    assert page.page.locator("#token-chart .s-kv_evicted.faded").count() == 0


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (400, "dark"),
        pytest.param(1280, "dark", marks=pytest.mark.long),
        pytest.param(400, "light", marks=pytest.mark.long),
    ],
)
def test_the_page_fits_and_can_be_read(visit: Any, width: int, scheme: str) -> None:
    shown = snapshot(130, warnings=["A setting should change. " * 20])
    page = visit(shown, width=width, scheme=scheme)
    assert page.overflow <= 0
    assert page.low_contrast == []
    page.page.click("#show-all")
    assert len(page.rows("requests")) == 100
    assert page.overflow <= 0
    page.page.evaluate("document.body.style.color = '#777'")
    assert page.low_contrast != [], "text that is hard to read is noticed"


@pytest.mark.parametrize("width", [1280, 400])
def test_huge_numbers_fit(visit: Any, width: int) -> None:
    def grown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item if key.endswith("_s") else grown(item) for key, item in value.items()}
        if isinstance(value, list):
            return [grown(item) for item in value]
        return value * 10**12 if isinstance(value, int) else value

    page = visit(grown(snapshot(30)), width=width)
    assert page.overflow <= 0
    assert page.page.locator("#tiles").inner_text().count("NaN") == 0
    assert page.rows("requests")[0][3].endswith("T")
    assert page.page.locator("#requests td[title*=',000,000,000,000']").count() > 0


def test_without_a_request_the_page_says_how_to_send_one(visit: Any, server: PageServer) -> None:
    page = visit(snapshot())
    assert f"curl {server.url}v1/completions" in page.text("#first-request")
    assert not page.page.is_visible("#requests-table")
    assert not page.page.is_visible("#warnings")
    assert page.texts("#tiles .value")[0] == NOTHING
    assert page.text("#token-chart .empty") == "no prompt in this time"
    assert page.rows("tenants") == [["No tenant yet."]]
    server.app.state.shown = snapshot(1)
    page.wait_for("#requests tr")
    assert page.rows("tenants")[0][1] == "1"
    assert not page.page.is_visible("#first-request")


def test_text_of_clients_is_text(visit: Any) -> None:
    """Tenants choose their names; nothing that the server sends becomes an element."""
    shown = snapshot(3, model=HOSTILE, version=HOSTILE, warnings=[HOSTILE])
    for tenant in shown["tenants"]:
        tenant["name"] = HOSTILE + tenant["name"]
    for request in shown["requests"]:
        request.update(tenant=HOSTILE, why=HOSTILE, finish_reason=HOSTILE)
        request["spans"][0][2] = HOSTILE
    shown["tokens"]["by_reason"][HOSTILE] = 5
    shown["evictions"]["by_cause"][HOSTILE] = 5
    shown["engine"]["description"] = [HOSTILE]
    page = visit(shown)
    assert page.page.locator("img").count() == 1, "the icon"
    assert page.page.locator("script").count() == 1
    readable = HOSTILE.replace("\ud83d", "\ufffd")
    assert page.page.text_content("#warning-list li").replace("\ud83d", "\ufffd") == readable
    assert page.rows("requests")[0][2].startswith("<img src=x onerror=alert(1)><script>")
    assert any("<script>" in cells[0] for cells in page.rows("reasons"))


def test_what_lies_between_computed_spans_was_resumed(visit: Any) -> None:
    """A request that was preempted may resume behind tokens that it has computed."""
    shown = snapshot(2)
    shown["requests"][0] |= {"prompt_tokens": 200, "spans": [[32, 64, "never_seen"], [96, 200, "never_seen"]]}
    shown["requests"][1] |= {"prompt_tokens": 200, "resumed_tokens": 96, "spans": []}
    page = visit(shown)
    bars = page.page.locator("#requests svg")
    assert bars.nth(0).get_attribute("aria-label") == (
        "resumed: tokens 0 to 32; never_seen: tokens 32 to 64; "
        "resumed: tokens 64 to 96; never_seen: tokens 96 to 200"
    )
    assert bars.nth(1).get_attribute("aria-label") == "resumed: tokens 0 to 96"
    assert [cells[-1] for cells in page.rows("requests")] == ["running", "running"]


def test_a_request_that_waits_has_nothing_to_show(visit: Any) -> None:
    shown = snapshot(1)
    nothing = {"resumed_tokens": 0, "generated_tokens": 0, "spans": [], "ttft_s": None, "inter_token_s": None}
    shown["requests"][0] |= nothing | {"finish_reason": None}
    (cells,) = visit(shown).rows("requests")
    assert cells[6:] == [NOTHING, NOTHING, "0", "waiting"]


# ---- asking


def test_a_server_that_is_gone_is_said_so_and_comes_back(browser: Any) -> None:
    server = PageServer(an_app(snapshot(5)))
    with server:
        visit = Visit(browser, server.url)
        visit.wait_for("#requests tr")
        assert visit.complaints == []
    try:
        visit.wait_for("#gone")
        assert visit.text("#gone").startswith("The server does not answer. What stands here is of ")
        assert len(visit.rows("requests")) == 5
        server.app.state.shown = snapshot(6)
        with server:
            visit.page.locator("#gone").wait_for(state="hidden")
            assert len(visit.rows("requests")) == 6
            server.app.state.engine.snapshot = lambda: 1 / 0
            visit.wait_for("#gone")
            assert visit.text("#gone").startswith("The server answered 500: an internal error")
    finally:
        visit.page.close()


def test_the_page_asks_for_the_admin_key(browser: Any) -> None:
    with PageServer(an_app(snapshot(5), admin_key="open-sesame")) as server:
        visit = Visit(browser, server.url)
        visit.wait_for("#key-form")
        assert not visit.page.is_visible("#figures")
        for key, answer in (("a key", "printable ASCII"), ("wrong", "The server refused this key.")):
            visit.page.fill("#key", key)
            visit.page.keyboard.press("Enter")
            visit.page.get_by_text(answer).wait_for()
            assert not visit.page.is_visible("#figures")
        visit.page.fill("#key", "open-sesame")
        visit.page.click("#key-form button")
        visit.wait_for("#requests tr")
        assert not visit.page.is_visible("#key-form")
        assert visit.page.url == server.url, "the key is in no address"
        visit.page.reload()
        visit.wait_for("#requests tr")
        visit.page.close()
        other = Visit(browser, server.url)  # another tab
        other.wait_for("#key-form")
        other.page.close()


def test_a_server_without_an_admin_key_says_that_it_has_none(browser: Any) -> None:
    with PageServer(an_app(snapshot(5), red="key-of-red")) as server:
        visit = Visit(browser, server.url)
        visit.wait_for("#gone")
        assert "the server has no admin_key" in visit.text("#gone")
        visit.page.close()


# ---- with the server


def keys_of(value: Any) -> Any:
    """Which keys a JSON value has, also those of the first item of each list."""
    if isinstance(value, dict):
        return {key: keys_of(item) for key, item in value.items()}
    return [keys_of(item) for item in value[:1]] if isinstance(value, list) else None


def test_a_conversation_that_was_just_held_is_shown_with_the_figures_of_the_api(browser: Any) -> None:
    openai = pytest.importorskip("openai")
    loaded = ms.load(TINY_CODE, dtype=torch.float32)
    config = ms.InferenceConfig(
        block_size_tokens=32, max_requests=4, max_tokens_per_step=512, max_sequence_length=2048,
        num_kv_blocks=64, num_mamba_slots=8,
    )  # fmt: skip
    settings = ServerSettings(
        model_name="tiny-code", api_keys={"red": "key-of-red", "blue": "key-of-blue"}, admin_key="open-sesame"
    )
    app = make_app(ms.DynamicInferenceEngine(loaded.model, config), loaded, settings)
    usages = []
    with PageServer(app) as server:
        for tenant in ("red", "blue"):
            client = openai.OpenAI(base_url=f"{server.url}v1", api_key=f"key-of-{tenant}", max_retries=0)
            messages = [{"role": "user", "content": "Write the function `close(self)`."}]
            for _ in range(2):
                answer = client.chat.completions.create(model="tiny-code", messages=messages, max_tokens=40)
                usages.append((tenant, answer.usage, answer.choices[0].finish_reason))
                messages += [answer.choices[0].message.model_dump(include={"role", "content"})]
                messages += [{"role": "user", "content": "Now write `open(self)`."}]
            client.close()
        visit = Visit(browser, server.url)
        visit.page.fill("#key", "open-sesame")
        visit.page.keyboard.press("Enter")
        visit.wait_for("#requests tr")
        rows, tenants, reasons = visit.rows("requests"), visit.rows("tenants"), visit.rows("reasons")
        asked = "fetch('status.json', {headers: {Authorization: 'Bearer open-sesame'}}).then(a => a.json())"
        while not (status := visit.page.evaluate(asked))["series"]["points"]:
            visit.page.wait_for_timeout(100)  # until the first interval has ended
        prompt = "class Stack:\n" * 12
        for number, key in enumerate(("", "key-of-blue", "key-of-blue")):
            visit.page.fill("#prompt", prompt)
            if key:
                visit.page.fill("#try-key", key)
            visit.page.click("#try button")
            said = ("401: the key is missing", "Resumed 0 of ", r"Resumed (?!0 )\d+ of ")[number]
            visit.page.get_by_text(re.compile(said)).wait_for()
        assert visit.text("#answer")
        visit.page.close()
    for cells, (tenant, usage, reason) in zip(rows, reversed(usages), strict=True):
        cached = usage.prompt_tokens_details.cached_tokens
        assert [*cells[2:5], *cells[8:]] == [
            tenant, cell(usage.prompt_tokens), f"{cell(cached)} · {share(cached, usage.prompt_tokens)}",
            cell(usage.completion_tokens), reason,
        ]  # fmt: skip
    cached = sum(usage.prompt_tokens_details.cached_tokens for _, usage, _ in usages)
    prompt = sum(usage.prompt_tokens for _, usage, _ in usages)
    assert reasons[0][1:] == [cell(cached), share(cached, prompt)]
    assert sum(int(cells[1].replace(",", "")) for cells in reasons) == prompt
    assert cached > 0
    assert {cells[0]: cells[1] for cells in tenants} == {"red": "2", "blue": "2"}
    made_up = keys_of(snapshot(3))
    made_up["evictions"]["by_cause"] = keys_of(status)["evictions"]["by_cause"]
    assert keys_of(status) == made_up, "the snapshots of these tests are like the monitor's"
