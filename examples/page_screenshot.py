"""Hold conversations of two tenants with a server, and take a picture of the page that its operator sees.

    python examples/page_screenshot.py --picture docs/operations_page.png

The script starts `mambaslots serve models/tiny-code` with pools that are too small for all the conversations,
so that states are evicted. It needs the extra `serve`, playwright, and a Chromium that is installed.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import arguments
from conversation_texts import Conversation, conversations

MODEL = Path(__file__).parents[1] / "models/tiny-code"
KEYS = {"editor": "editor-key", "tests": "tests-key"}
ADMIN_KEY = "operator-key"
SIZES = {
    "--num-mamba-slots": 20, "--num-kv-blocks": 200, "--block-size-tokens": 32, "--max-requests": 4,
    "--max-sequence-length": 2048, "--threads": 1,
}  # fmt: skip
LAST_ROW = 5  # of the table of requests, in the picture
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def running_server() -> Iterator[str]:
    """The address of a server in a process of its own, which ends with the block."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"{tenant}:{key}\n" for tenant, key in KEYS.items()))
        command = [sys.executable, "-m", "mambaslots", "serve", str(MODEL), "--port", "0"]
        command += ["--api-keys", str(keys), *(str(word) for size in SIZES.items() for word in size)]
        environment = os.environ | {"MAMBASLOTS_ADMIN_KEY": ADMIN_KEY}
        log = Path(folder) / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=file, text=True
            )
        try:
            assert process.stdout is not None
            ready = next((line for line in process.stdout if " at http" in line), None)
            if ready is None:
                raise RuntimeError(f"the server did not start:\n{log.read_text()}")
            yield ready.rpartition(" at ")[2].strip()
        finally:
            process.terminate()
            process.wait()


def hold(address: str, tenant: str, conversation: Conversation, over: threading.Event) -> None:
    """Ask turn after turn, with pauses, some turns twice. The whole history is sent each time."""
    import openai

    draw = random.Random(conversation.start_step)
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEYS[tenant])
    messages: list[Any] = [{"role": "system", "content": conversation.system_prompt}]
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn.text})
        answer = None
        for _ in range(draw.choice((1, 1, 2))):
            if over.wait(draw.uniform(0.5, 4.0)):
                return
            answer = client.chat.completions.create(
                model=MODEL.name, messages=messages, max_tokens=turn.answer_tokens,
                temperature=turn.temperature or 0.0, seed=turn.seed,
            )  # fmt: skip
        assert answer is not None
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


def keep_talking(address: str, tenant: str, talks: Iterator[Conversation], over: threading.Event) -> None:
    """One user after the other, until it is over."""
    for conversation in talks:
        if over.is_set():
            return
        hold(address, tenant, conversation, over)


def take_picture(address: str, picture: Path, width: int, scheme: str) -> None:
    """Open the page, give it the operator's key, and photograph it down to a few requests."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    if chromium is None:
        raise RuntimeError(f"no Chromium is installed; looked for {', '.join(CHROMIUMS)}")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=sandbox)
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(address)
        page.fill("#key", ADMIN_KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#requests tr")
        page.check("#window [value='60']")
        page.wait_for_timeout(200)
        last = page.locator("#requests tr").nth(LAST_ROW).bounding_box()
        assert last is not None
        clip = {"x": 0, "y": 0, "width": width, "height": last["y"] + last["height"]}
        page.screenshot(path=picture, full_page=True, clip=clip)  # type: ignore[arg-type]
        browser.close()


def main() -> None:
    parser = arguments.make_parser(__doc__)
    parser.add_argument(
        "--picture", type=arguments.new_file, metavar="PATH", default=Path("page.png"),
        help="the file to write (default: %(default)s)",
    )  # fmt: skip
    arguments.add_count(parser, "--seconds", 90, "the users have talked for so long in the picture")
    arguments.add_count(parser, "--users", 3, "users of each tenant at once")
    arguments.add_count(parser, "--width", 1280, "of the window in pixels")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light", help="(default: %(default)s)")
    options = parser.parse_args()
    with running_server() as address:
        over = threading.Event()
        users = []
        for number, tenant in enumerate(tenant for tenant in KEYS for _ in range(options.users)):
            talks = iter(conversations(50, 4, seed=number, longest_answer=60))
            users.append(threading.Thread(target=keep_talking, args=(address, tenant, talks, over)))
        for user in users:
            user.start()
        try:
            time.sleep(options.seconds)
            take_picture(address, options.picture, options.width, options.scheme)
        finally:
            over.set()
            for user in users:
                user.join()
    print(f"{options.picture} shows the page of {address}.")


if __name__ == "__main__":
    main()
