"""The benchmark of chats counts what it says, for one template and a folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks/chat_marks.py"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
RUN = """
import sys
sys.path[:0] = [{folder!r}]
import chat_marks
chat_marks.TEMPLATES = {{}}
chat_marks.main()
"""


def test_a_folder_of_templates(tmp_path: Path) -> None:
    (tmp_path / "plain.jinja").write_text(TEMPLATE)
    (tmp_path / "refusing.jinja").write_text("{{ raise_exception('no') }}")
    arguments = ["--templates", str(tmp_path), "--json", str(tmp_path / "out.json"), "--block", "64"]
    command = [sys.executable, "-c", RUN.format(folder=str(BENCHMARK.parent)), *arguments]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "refusing: 0 histories (the template refuses all)" in done.stdout
    rows = json.loads((tmp_path / "out.json").read_text())
    assert f"plain: {len(rows)} histories" in done.stdout
    assert len(rows) == 9
    assert all(row["marks"] == row["ideal"] >= row["none"] for row in rows)
    assert all(row["ideal"] % 64 == 0 and row["ideal"] < row["prompt"] for row in rows)
    assert sum(row["none"] for row in rows) < sum(row["marks"] for row in rows)
    sums = next(line for line in done.stdout.splitlines() if line.startswith("all "))
    assert f"{sum(row['prompt'] for row in rows):,}" in sums
    assert f"as deep as possible with marks: {len(rows)} of {len(rows)};" in done.stdout
