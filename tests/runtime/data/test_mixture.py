from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shipway.runtime.data.errors import DataError
from shipway.runtime.data.mixture import Mixture, stage_weights

WEIGHTS = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.01, 10), min_size=1)


@given(weights=WEIGHTS, rows=st.integers(1, 400))
def test_shares_are_met_at_every_moment(weights: dict[str, float], rows: int) -> None:
    mixture = Mixture(weights)
    total = sum(weights.values())
    for row in range(1, rows + 1):
        mixture.next()
        for name, count in mixture.state_dict().items():
            assert abs(count - row * weights[name] / total) < len(weights)


@given(weights=WEIGHTS, stop=st.integers(0, 50))
def test_a_resumed_mixture_continues_the_deal(weights: dict[str, float], stop: int) -> None:
    one = Mixture(weights)
    dealt = [one.next() for _ in range(100)]
    before, after = Mixture(weights), Mixture(weights)
    assert [before.next() for _ in range(stop)] == dealt[:stop]
    after.load_state_dict(before.state_dict())
    assert [after.next() for _ in range(100 - stop)] == dealt[stop:]


def test_a_weight_of_zero_gives_nothing() -> None:
    mixture = Mixture({"a": 0.0, "b": 1.0})
    assert {mixture.next() for _ in range(20)} == {"b"}


def test_without_a_mix_all_sources_weigh_the_same() -> None:
    assert stage_weights(None, {"a": 1, "b": 2}) == {"a": 1.0, "b": 1.0}


def test_an_unknown_source_and_an_empty_mix_are_refused() -> None:
    with pytest.raises(DataError, match="names 'c', and the sources are a, b"):
        stage_weights({"c": 1.0}, {"a": 1, "b": 2})
    with pytest.raises(DataError, match="no data source has a weight above zero"):
        Mixture({"a": 0.0})
