from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipway.compiler.cut import cut, cuts


def slowest(costs: list[int], bounds: tuple[int, ...]) -> int:
    return max(sum(costs[start:end]) for start, end in pairwise(bounds))


def best_by_force(costs: list[int], chunks: int) -> int:
    cuts = combinations(range(1, len(costs)), chunks - 1)
    return min(slowest(costs, (0, *inner, len(costs))) for inner in cuts)


layers = st.lists(st.integers(1, 60), min_size=1, max_size=9)


@settings(deadline=None)
@given(costs=layers, data=st.data())
def test_a_cut_is_as_even_as_any(costs: list[int], data: st.DataObject) -> None:
    chunks = data.draw(st.integers(1, len(costs)))
    bounds = cut(costs, chunks)
    assert bounds[0] == 0
    assert bounds[-1] == len(costs)
    assert all(start < end for start, end in pairwise(bounds))
    assert slowest(costs, bounds) == best_by_force(costs, chunks)


@settings(deadline=None)
@given(length=st.integers(1, 9), data=st.data())
def test_models_cut_together_are_cut_as_each_alone(length: int, data: st.DataObject) -> None:
    models = data.draw(st.lists(st.lists(st.integers(1, 60), min_size=length, max_size=length), min_size=1))
    chunks = data.draw(st.lists(st.integers(1, length), min_size=len(models), max_size=len(models)))
    together = cuts(np.array(models), np.array(chunks))
    for costs, count, bounds in zip(models, chunks, together.tolist(), strict=True):
        assert tuple(bounds[: count + 1]) == cut(costs, count)
        assert set(bounds[count:]) == {length}


def test_layers_never_get_lost() -> None:
    # torchtitan#963: an uneven split dropped layers.
    for layers_ in range(1, 130):
        chunks = np.arange(1, min(layers_, 40) + 1)
        bounds = cuts(np.ones((len(chunks), layers_), dtype=np.int64), chunks)
        for count, row in zip(chunks.tolist(), bounds.tolist(), strict=True):
            assert row[0] == 0
            assert row[count] == layers_
            assert all(start < end for start, end in pairwise(row[: count + 1]))


def test_more_chunks_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers do not fill 3 chunks"):
        cut([1, 1], 3)


def test_the_head_lightens_its_chunk() -> None:
    # Megatron-Bridge#5391: embedding and loss make the end stages slow.
    bounds = cut([4, *[2] * 14, 8], 4)
    sizes = [end - start for start, end in pairwise(bounds)]
    assert sizes[-1] < max(sizes)
