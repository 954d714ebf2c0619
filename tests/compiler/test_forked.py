"""Work in other processes: what it gives, what it raises, and that none of them is left."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from shipway.compiler import forked as module
from shipway.compiler.forked import ahead, cores, may_fork

# In a process of its own, as test runners have threads and may have loaded torch.
START = """
import os
from shipway.compiler import forked as module
from shipway.compiler.forked import ahead, forked, may_fork

module.cores = lambda: 2
assert may_fork()
"""


def printed(program: str) -> list[str]:
    """Lines that a program prints."""
    done = subprocess.run([sys.executable, "-c", START + program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_what_is_loaded_ahead_answers_from_another_process() -> None:
    program = """
def load():
    process = os.getpid()
    return lambda item: (item * item, process)

with ahead(load) as ask:
    square, process = ask(7, lambda: print("meanwhile"))
print(square, process != os.getpid())
"""
    assert printed(program) == ["meanwhile", "49 True"]


def test_what_nobody_asks_is_ended() -> None:
    program = """
import signal
signal.alarm(30)
with ahead(signal.pause) as ask:
    pass
try:
    os.wait()
except ChildProcessError:
    print("none left")
"""
    assert printed(program) == ["none left"]


def test_an_error_comes_with_the_text_of_its_traceback() -> None:
    program = """
def work():
    raise ValueError("seven")

helper = forked(work)
try:
    helper.result()
except ValueError as error:
    print(error, *error.__notes__)
helper.end()
"""
    told = printed(program)
    assert told[0].startswith("seven Traceback")
    assert any(line.endswith("in work") for line in told)


def test_an_error_that_cannot_be_sent_comes_by_its_name() -> None:
    program = """
class Odd(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")

def work():
    raise Odd(1, 2)

helper = forked(work)
try:
    helper.result()
except RuntimeError as error:
    print(error)
helper.end()
"""
    assert printed(program) == ["Odd: 1 and 2"]


def test_a_process_that_was_ended_is_told_from_one_that_returned_nothing() -> None:
    program = """
for work in (lambda: None, lambda: os._exit(1)):
    helper = forked(work)
    try:
        print(helper.result())
    except ChildProcessError as error:
        print(error)
    helper.end()
with ahead(lambda: os._exit(1)) as ask:
    try:
        ask(bytes(2**20), lambda: None)  # more than a pipe holds
    except ChildProcessError as error:
        print(error)
"""
    ended = "a process that did part of the work was ended"
    assert printed(program) == ["None", ended, ended]


def test_a_process_that_is_ended_ends_its_own_helpers() -> None:
    program = """
import signal
read, write = os.pipe()

def outer():
    helper = forked(signal.pause)
    try:
        os.write(write, b"%d" % helper.process)
        helper.result()
    finally:
        helper.end()

helper = forked(outer)
process = int(os.read(read, 20))
helper.end()
try:
    os.kill(process, 0)
    print("left", process)
except ProcessLookupError:
    print("ended")
"""
    assert printed(program) == ["ended"]


def test_with_one_core_all_is_done_here_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: 1)
    loaded: list[str] = []

    def load() -> Callable[[int], int]:
        loaded.append("loaded")
        return lambda item: item + 1

    with ahead(load) as ask:
        assert not loaded
        assert ask(1, print) == 2
    assert loaded == ["loaded"]


def test_no_fork_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", object())
    assert cores() >= 1
    assert not may_fork()
