"""From stage to stage the sources go on where they stood."""

from __future__ import annotations

import torch

from tests.runtime.data.streams import loader, numbered_texts

SOURCES = {"a": numbered_texts(300, 1, "a"), "b": numbered_texts(300, 2, "b")}


def documents(steps: list[tuple]) -> set[tuple[str, int]]:
    """Documents begun in these steps."""
    return {(s.source, s.document) for step in steps for b in step for s in b.samples if s.start == 0}


def test_a_new_stage_repeats_no_document_and_loses_no_token() -> None:
    first = loader(SOURCES, context=16, rows_per_step=8)
    begun = documents([first.next_step() for _ in range(12)])
    second = loader(SOURCES, stage="second", context=64, rows_per_step=4)
    second.load_state_dict(first.state_dict())
    assert second.step == 0
    later = [second.next_step() for _ in range(6)]
    assert begun
    assert not begun & documents(later)
    # A document cut at the stages' border goes on in the new stage at its next token.
    ends = {
        source: (cursor["position"], cursor["offset"])
        for source, cursor in first.state_dict()["sources"].items()
    }
    firsts: dict[str, int] = {}
    for sample in (s for step in later for b in step for s in b.samples):
        firsts.setdefault(sample.source, sample.start)
    assert firsts == {source: offset for source, (_, offset) in ends.items()}


def test_a_source_that_rests_for_a_stage_goes_on_afterwards() -> None:
    first = loader(SOURCES)
    first.next_step()
    second = loader(SOURCES, stage="second", weights={"b": 1.0})
    second.load_state_dict(first.state_dict())
    second.next_step()
    third = loader(SOURCES, stage="third")
    third.load_state_dict(second.state_dict())
    before, after = first.state_dict()["sources"]["a"], third.state_dict()["sources"]["a"]
    assert before["tokens"] > 0
    assert after == before


def test_the_same_stage_continues_at_its_step() -> None:
    one = loader(SOURCES)
    one.next_step()
    other = loader(SOURCES)
    other.load_state_dict(one.state_dict())
    assert other.step == 1
    assert torch.equal(other.next_step()[0].tokens, one.next_step()[0].tokens)
