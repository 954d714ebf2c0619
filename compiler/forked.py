"""Work in a process of its own, forked from this one: nothing that is loaded here is loaded again."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from shipway.compiler.frozen import frozen

Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def may_fork() -> bool:
    """Whether a fork of this process is sound: Linux, no thread beside this one, and torch not loaded."""
    return sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules


@contextmanager
def ahead(
    load: Callable[[], Callable[[Item], Result]],
) -> Iterator[Callable[[Item, Callable[[], object]], Result]]:
    """The function that `load` loads, in a process of its own while this one still finds out what to ask.

    It can be called once; the second argument is what this process does while the other one works. Where
    there is no core for it or a fork is not safe, all is done here when it is called.
    """
    if cores() < 2 or not may_fork():
        yield lambda item, meanwhile: load()(item)
        return
    asked, question = os.pipe()

    def work() -> Result:
        os.close(question)
        made = load()
        return made(_received(asked))

    helper = forked(work)
    os.close(asked)
    with os.fdopen(question, "wb", buffering=0) as stream:

        def call(item: Item, meanwhile: Callable[[], object]) -> Result:
            import pickle

            with suppress(BrokenPipeError):  # then its result says what happened
                stream.write(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
            stream.close()
            meanwhile()
            return helper.result()

        try:
            yield call
        finally:
            helper.end()


@frozen
class Outcome(Generic[Result]):
    """What work returned, or raised."""

    result: Result | None
    error: Exception | None

    def value(self) -> Result:
        """The result; raises what the work raised."""
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]  # None is a result like any other

    def __getstate__(self) -> dict[str, object]:
        return {"result": self.result, "error": self.error and _portable(self.error)}


def attempt(work: Callable[[], Result]) -> Outcome[Result]:
    """The outcome of `work`."""
    try:
        return Outcome(work(), None)
    except Exception as error:
        return Outcome(None, error)


def _portable(error: Exception) -> Exception:
    """The error as another process can have it: a traceback doesn't travel, and some errors don't either."""
    import pickle
    import traceback

    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(text)
    return error


@frozen
class Helper(Generic[Result]):
    """A forked process, and the pipe that its result comes through."""

    process: int
    pipe: int

    def result(self) -> Result:
        """What its work returned, once it is done; raises what the work raised."""
        outcome: Outcome[Result] = _received(self.pipe)
        return outcome.value()

    def end(self) -> None:
        """Wait for it; it has sent its result, or nobody wants it any more."""
        os.close(self.pipe)
        os.kill(self.process, signal.SIGTERM)
        os.waitpid(self.process, 0)


def forked(work: Callable[[], Result]) -> Helper[Result]:
    """Do `work` in another process, which must be ended."""
    pipe, results = os.pipe()
    process = os.fork()
    if process:
        os.close(results)
        return Helper(process, pipe)
    try:
        import pickle

        # An interrupt reaches the whole process group: the first process alone answers it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Asked to end, it ends its own helpers first.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
        os.close(pipe)
        outcome = attempt(work)
        with os.fdopen(results, "wb") as stream:
            pickle.dump(outcome, stream, pickle.HIGHEST_PROTOCOL)
    finally:
        # Neither buffered output nor what is registered for the end of the program happens twice.
        os._exit(0)


def _received(pipe: int) -> Any:
    """What another process sends until it closes its end."""
    import pickle

    with os.fdopen(pipe, "rb", closefd=False) as stream:
        sent = stream.read()
    if not sent:
        raise ChildProcessError("a process that did part of the work was ended")
    return pickle.loads(sent)
