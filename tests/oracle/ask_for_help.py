"""Scripts run with `--help`, one after the other, in a fork of this process, which has imported what they do.

A script that starts Python ends with an error. None finds modules that lie beside another.
"""

import io
import json
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Sequence
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


def helps(scripts: Sequence[Path], said: Path) -> dict[str, str]:
    """What each script printed; `said`: a file for it."""
    with warnings.catch_warnings(action="ignore"):  # of threads, which a fork does not have
        process = os.fork()
    if not process:
        try:
            _be_as_new({str(script.parent) for script in scripts})
            said.write_text(json.dumps({str(script): help_of(str(script)) for script in scripts}))
        except BaseException:
            said.write_text(json.dumps(traceback.format_exc()))
        finally:
            os._exit(0)
    os.waitpid(process, 0)
    found = json.loads(said.read_text())
    assert isinstance(found, dict), found
    return found


def _be_as_new(folders: set[str]) -> None:
    """Forget the folders in which this process finds modules, and those of scripts with what is in them."""
    subprocess.Popen = NoPython  # type: ignore[misc]
    root = str(Path(__file__).parents[2])
    sys.path[:] = [path for path in sys.path if not path.startswith(root) or "site-packages" in path]
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(tuple(folders)):
            del sys.modules[name]
