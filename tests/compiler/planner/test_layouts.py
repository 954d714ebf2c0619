import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shipway.compiler.layouts import RECOMPUTE, count_layouts, enumerate_layouts, from_layout, splits
from shipway.compiler.operators.base import Limit
from shipway.compiler.space import Space
from shipway.schemas.capability import CAPABILITY
from shipway.schemas.layout import LayoutConstraints


def space(**changes: object) -> Space:
    facts: dict[str, object] = {
        "devices": 16,
        "devices_per_node": 8,
        "domain": 8,
        "sequences": 32,
        "context": 4096,
        "layers": 8,
        "experts": 8,
        "tied": False,
        "limits": (Limit("tp", "heads", 12), Limit("ep", "routed experts", 8)),
        "constraints": LayoutConstraints(),
    }
    return Space(**(facts | changes))  # type: ignore[arg-type]


spaces = st.builds(
    space,
    devices=st.sampled_from([1, 2, 8, 16, 24]),
    sequences=st.integers(1, 48),
    context=st.sampled_from([256, 1024, 3072]),
    layers=st.integers(1, 9),
    experts=st.sampled_from([0, 8]),
    tied=st.booleans(),
    constraints=st.builds(
        LayoutConstraints,
        pipeline_parallel=st.sampled_from([None, None, 2]),
        data_parallel_shard=st.sampled_from([None, None, 2, 4]),
        micro_batch=st.sampled_from([None, None, 1, 2]),
        recompute=st.sampled_from([None, None, "full"]),
        zero=st.sampled_from([None, 1, 2, 3]),
    ),
)


@settings(max_examples=80, deadline=None)
@given(made=spaces)
def test_every_listed_layout_is_legal(made: Space) -> None:
    found = enumerate_layouts(made)
    assert count_layouts(made) == len(found)
    if not len(found):
        return
    c = found
    data = c.replicate * c.shard
    assert (c.world <= made.devices).all()
    assert (data * c.micro_batch * c.micro_batches == made.sequences).all()
    assert ((c.shard * c.cp * c.tp) % c.ep == 0).all()
    assert (made.context % (c.cp * c.tp) == 0).all()
    assert (c.micro_batches >= c.pp).all()
    assert (c.chunks <= made.layers).all()
    assert all(12 % int(tp) == 0 for tp in np.unique(c.tp))
    if made.tied:
        assert (c.pp == 1).all()
    for index in range(0, len(c), max(len(c) // 7, 1)):
        layout = c.layout(index)
        assert layout.world_size == c.world[index]
        for field, value in made.constraints.model_dump(exclude_none=True).items():
            assert getattr(layout, field) == value


@settings(max_examples=40, deadline=None)
@given(made=spaces)
def test_the_widest_layouts_stand_for_all(made: Space) -> None:
    everything = enumerate_layouts(made)
    assume(len(everything))
    cores = enumerate_layouts(made, widest=True)
    expanded, _ = splits(made, cores)

    def rows(candidates: object) -> set[tuple[int, ...]]:
        columns = [getattr(candidates, name) for name in type(candidates).__dataclass_fields__]
        return set(zip(*(column.tolist() for column in columns), strict=True))

    assert rows(expanded) == rows(everything)


def test_size_one_axes_always_work() -> None:
    # torchtitan#2184: a mesh of one device.
    found = enumerate_layouts(
        space(devices=1, devices_per_node=1, domain=1, sequences=1, layers=1, experts=0)
    )
    assert len(found) == len(CAPABILITY.zero) * len(RECOMPUTE)
    assert set(found.world.tolist()) == {1}


def test_layouts_round_trip() -> None:
    found = enumerate_layouts(space())
    for index in (0, len(found) // 2, len(found) - 1):
        layout = found.layout(index)
        assert from_layout(layout).layout(0) == layout


@pytest.mark.parametrize("sequences", [7, 11])
def test_awkward_batches_still_have_layouts(sequences: int) -> None:
    found = enumerate_layouts(space(sequences=sequences))
    assert len(found)
    assert set((found.replicate * found.shard).tolist()) <= {1, sequences}


def test_most_devices_are_used_unless_cost_is_the_objective() -> None:
    assert (2 * enumerate_layouts(space()).world > 16).all()
    assert (enumerate_layouts(space(any_size=True)).world <= 8).any()
