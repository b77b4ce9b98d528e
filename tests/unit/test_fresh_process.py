"""A process that a warm one has begun ends as any other does, and no end is missed."""

import signal

from oracle.fresh_process import Begun


def test_it_ends_behind_its_threads() -> None:
    process = Begun(code="import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()")
    try:
        assert process.wait(1.0) is None
        process.signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
    finally:
        process.close()


def test_what_is_registered_for_its_end_runs() -> None:
    process = Begun(code="import atexit; atexit.register(print, 'the end')")
    try:
        assert process.wait(30) == 0
        assert process.said == "the end\n"
    finally:
        process.close()


def test_an_end_at_once_is_not_missed() -> None:
    for _ in range(20):
        process = Begun(code="import os; os._exit(3)")
        try:
            assert process.wait(30) == 3
            assert not process.is_alive()
        finally:
            process.close()
