"""What is derived from the boundaries of documents is made once."""

import torch

from shipway.runtime.kernels.documents import derived


def test_what_is_derived_from_boundaries_is_made_once_for_each_of_them_and_each_name():
    made = []

    def of(bounds, name):
        return derived(bounds, name, lambda: made.append(name) or len(made))

    first, second = torch.tensor([0, 3]), torch.tensor([0, 3])
    assert [of(first, "a"), of(first, "a"), of(first, "b"), of(second, "a")] == [1, 1, 2, 3]
    assert made == ["a", "b", "a"]
