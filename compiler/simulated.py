"""Length of a pipeline's passes by running every rank's order, action by action: what a plan prints.

The search compares layouts by closed forms (`schedule.pipeline_seconds`), which are near it and far sooner
known.
"""

from __future__ import annotations

from collections.abc import Sequence

from shipway.compiler.chunked import Chunked
from shipway.compiler.problem import Problem
from shipway.compiler.schedule import rounds, warmup_forwards
from shipway.compiler.step_time import deferred_seconds, send_seconds
from shipway.compiler.v_timing import v_simulated_seconds


def simulated_seconds(problem: Problem, chunked: Chunked) -> float:
    """Length of all passes of one step of one pipelined layout."""
    order, own = chunked.order, chunked.own  # columns in model order
    forward, backward = chunked.cells("forward")[:, order], chunked.cells("backward")[:, order]
    send, count = send_seconds(problem, chunked), int(own.micro_batches[0])
    if chunked.is_v_shaped:
        deferred = deferred_seconds(chunked, chunked.cells("backward"))[:, order]
        return v_simulated_seconds(chunked.schedule, forward, backward, deferred, send, count)
    chunks = forward[0].tolist(), backward[0].tolist()
    virtual = forward.shape[1] // chunked.pp
    return interleaved_seconds(chunked.pp, virtual, count, *chunks, float(send[0]))


def interleaved_seconds(
    pp: int,
    virtual: int,
    micro_batches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    send_seconds: float,
) -> float:
    """Seconds of 1F1B, interleaved or not; `forward` and `backward` are of each chunk, in model order.

    The same as `schedule.simulate`, without a record of what was done.
    """
    chunks, count = pp * virtual, micro_batches
    # When the output of each pass is there: forwards of all chunks, then backwards.
    done: list[float | None] = [None] * (2 * chunks * count)
    orders = [_order(pp, virtual, count, rank) for rank in range(pp)]
    position, free = [0] * pp, [0.0] * pp
    apart = send_seconds if pp > 1 else 0.0
    waiting = set(range(pp))
    while waiting:
        moved = False
        for rank in sorted(waiting):
            order, at, now = orders[rank], position[rank], free[rank]
            while at < len(order):
                slot = order[at]
                chunk, number = divmod(slot, count)
                if chunk < chunks:
                    needs = slot - count if chunk else -1
                    lasts = forward[chunk]
                else:
                    # Backward of the last chunk follows its own forward, the others that of the next chunk.
                    needs = slot + count if chunk < 2 * chunks - 1 else (chunks - 1) * count + number
                    lasts = backward[chunk - chunks]
                if needs >= 0:
                    ready = done[needs]
                    if ready is None:
                        break
                    if needs // count % chunks != chunk % chunks:
                        ready += apart
                    now = max(now, ready)
                now += lasts
                done[slot] = now
                at += 1
                moved = True
            position[rank], free[rank] = at, now
            if at == len(order):
                waiting.discard(rank)
        if not moved:
            raise ValueError("the schedule waits for itself")
    return max(free)


def _order(pp: int, virtual: int, count: int, rank: int) -> list[int]:
    """A rank's passes as slots: chunk x micro-batches + micro-batch, backwards behind all forwards."""
    chunks, total = pp * virtual, count * virtual
    per_round = count // rounds(pp, count) if virtual > 1 else 1
    cycle = per_round * virtual

    def slot(index: int, local: int, behind: int) -> int:
        number = index // cycle * per_round + index % per_round
        return (behind + local * pp + rank) * count + number

    ahead = [slot(i, i // per_round % virtual, 0) for i in range(total)]
    back = [slot(i, virtual - 1 - i // per_round % virtual, chunks) for i in range(total)]
    warm = warmup_forwards(pp, virtual, count, rank)
    paired = [each for pair in zip(ahead[warm:], back, strict=False) for each in pair]
    return [*ahead[:warm], *paired, *back[total - warm :]]
