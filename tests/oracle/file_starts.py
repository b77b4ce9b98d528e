"""Files of states that are begun and ended again and again, in many threads and processes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from mambaslots.inference.contexts.state_files import StateFiles


def wait_for(files: StateFiles) -> None:
    """Return once what was saved and deleted before is written and removed."""
    done = threading.Event()
    files._writer.work.put(done.set)
    assert done.wait(60)


def start_in_threads(path: str, number: int) -> int:
    """Begin and end files below `path` in six threads, `number` times each; returns how many lost a state."""
    with ThreadPoolExecutor(6) as threads:
        return sum(threads.map(_start, [path] * 6, [number] * 6))


def _start(path: str, number: int) -> int:
    row, num_lost = torch.zeros(8, dtype=torch.uint8), 0
    for _ in range(number):
        files = StateFiles(path, 8, "model")
        files.save(0, 1, row, lambda: 5)
        wait_for(files)
        num_lost += files.load(0, 1, row) != 5
        files.close()
    return num_lost
