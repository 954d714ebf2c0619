"""Work over several processes gives what one process gives."""

import subprocess
import sys

import pytest

from shipway.compiler import spread as module
from shipway.compiler.spread import spread

# In a process of its own, as test runners have threads and may have loaded torch.
PROGRAM = """
import os
from shipway.compiler import spread as module
from shipway.compiler.forked import may_fork
from shipway.compiler.spread import spread

asked, answers = os.pipe()

def work(item):
    if item == 7:
        raise ValueError("seven")
    if item == 3:
        os.read(asked, 1)  # whoever has this item waits until another process has done the next
    if item == 1:
        os.write(answers, b"1")
    return item * item, os.getpid()

module.cores = lambda: 2
assert may_fork()
done = spread(work, [3, 1, 2, 5])
assert [value for value, _ in done] == [9, 1, 4, 25]
assert len({process for _, process in done}) == 2
spread(work, [2, 5], lambda: print("meanwhile", flush=True))
try:
    spread(work, [1, 7, 2])
except ValueError as error:
    print(error)
"""


def test_forked_work_comes_back_in_order_and_raises_what_was_raised() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ran.stdout == "meanwhile\nseven\n"


def test_one_core_does_all_the_work_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: 1)
    seen: list[int] = []
    assert spread(seen.append, [1, 2]) == [None, None]
    assert seen == [1, 2]
