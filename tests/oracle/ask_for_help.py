"""Run scripts with `--help`, one after the other in this process, and print as JSON what each said.

    python ask_for_help.py SCRIPT ...

A script that starts Python ends with an error.
"""

import io
import json
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


class NoPython(subprocess.Popen[bytes]):
    """Starts what torch asks for on being imported, and no Python."""

    def __init__(self, command: Any, *arguments: Any, **options: Any) -> None:
        if sys.executable in map(str, command):
            raise RuntimeError(f"--help started a process: {command}")
        super().__init__(command, *arguments, **options)


def help_of(script: str) -> str:
    """What the script printed; its exit code must be 0."""
    sys.argv = [script, "--help"]
    sys.path.insert(0, str(Path(script).parent))
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"{script} --help exits with {end.code!r}") from end
    finally:
        sys.path.remove(str(Path(script).parent))
    return printed.getvalue()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are not those of the scripts
    scripts = sys.argv[1:]
    subprocess.Popen = NoPython  # type: ignore[misc]
    json.dump({script: help_of(script) for script in scripts}, sys.stdout)
