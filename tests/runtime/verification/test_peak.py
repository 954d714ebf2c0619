"""What lives at the peak, from allocations and frees in order."""

from shipway.runtime.verification.peak import BEFORE, at_peak


def alloc(address: int, size: int, line: int) -> dict[str, object]:
    frames = [
        {"filename": "/torch/nn/modules/module.py", "line": 1, "name": "_call_impl"},
        {"filename": "/build/model.py", "line": line, "name": "forward"},
    ]
    return {"action": "alloc", "addr": address, "size": size, "frames": frames}


def free(address: int, size: int) -> dict[str, object]:
    return {"action": "free_completed", "addr": address, "size": size}


def test_lines_are_summed_over_what_lives_when_most_does() -> None:
    history = [
        alloc(1, 10, 5),
        alloc(2, 20, 6),
        free(1, 10),
        alloc(1, 30, 5),
        alloc(3, 5, 6),
        free(2, 20),
        free(3, 5),
    ]
    assert at_peak(history) == {"build/model.py:5 forward": 30, "build/model.py:6 forward": 25}


def test_what_was_there_before_counts_until_it_is_freed() -> None:
    history = [alloc(1, 10, 5), free(9, 40), alloc(2, 5, 6), alloc(9, 7, 6), free(9, 7)]
    assert at_peak(history) == {BEFORE: 40, "build/model.py:5 forward": 10}
