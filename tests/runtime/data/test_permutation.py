from __future__ import annotations

import numpy as np
import pytest

from shipway.runtime.data.permutation import derive_key, permute


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000, 65537])
def test_every_index_has_exactly_one_image(count: int) -> None:
    images = permute(np.arange(count), count, derive_key(0, "a", 0))
    assert sorted(images.tolist()) == list(range(count))


def test_an_index_is_mapped_alone_as_it_is_among_all() -> None:
    key = derive_key(3, "a", 7)
    images = permute(np.arange(1000), 1000, key)
    assert [int(permute(np.array([i]), 1000, key)[0]) for i in range(0, 1000, 97)] == images[::97].tolist()


def test_huge_counts_need_no_list() -> None:
    count = 10**15
    images = permute(np.arange(10**4), count, derive_key(0))
    assert len(set(images.tolist())) == 10**4
    assert images.min() >= 0
    assert images.max() < count
    # Ten bins of the image are hit about equally: chi-squared with 9 degrees of freedom, p < 1e-6 at 44.
    hits = np.bincount(images // (count // 10), minlength=10)
    assert ((hits - 1000) ** 2 / 1000).sum() < 44


def test_neighbours_do_not_stay_neighbours() -> None:
    images = permute(np.arange(10**4), 10**4, derive_key(1))
    assert abs(np.corrcoef(np.arange(10**4), images)[0, 1]) < 0.05


def test_keys_differ_by_part_and_not_by_concatenation() -> None:
    assert derive_key("ab", "c").tolist() != derive_key("a", "bc").tolist()
    assert derive_key(0, "a", 0).tolist() == derive_key(0, "a", 0).tolist()
