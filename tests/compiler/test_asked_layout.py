"""Layouts as people write them, and what is wrong with those that are none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipway.compiler.asked_layout import NAMES, read_layout
from shipway.compiler.describe import describe
from shipway.compiler.render.words import short
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.layout import Layout, LayoutConstraints


@pytest.mark.parametrize(
    "text",
    ["tp=8,pp=4", "tp=8 pp=4", "TP8 PP4", "tensor_parallel: 8, pipeline-parallel: 4", " PP 4 x TP 8, "],
)
def test_forms(text: str) -> None:
    assert read_layout(text, "--why") == LayoutConstraints(tensor_parallel=8, pipeline_parallel=4)


def test_choices_take_any_case() -> None:
    read = read_layout("ZeRO 2, recompute=Full, schedule=1F1B, micro-batch 3", "--why")
    assert read == LayoutConstraints(zero=2, recompute="full", schedule="1f1b", micro_batch=3)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        Layout,
        **dict.fromkeys(NAMES.values(), st.integers(2, 4096)),
        micro_batch=st.integers(1, 64),
        micro_batches=st.integers(1, 4096),
        zero=st.sampled_from([1, 2, 3]),
        recompute=st.sampled_from(["none", "selective", "full"]),
    )
)
def test_what_a_plan_prints_reads_back(layout: Layout) -> None:
    degrees = {field: getattr(layout, field) for field in NAMES.values()}
    assert read_layout(short(layout), "--why") == LayoutConstraints(**degrees)
    policies = {field: getattr(layout, field) for field in ("zero", "recompute", "micro_batch")}
    assert read_layout(describe(layout), "--why") == LayoutConstraints(**degrees, **policies)


@pytest.mark.parametrize(
    ("text", "column", "word"),
    [
        ("tp=8, tpp=3", 7, "has no `tpp`"),
        ("tp=0", 4, "from 1 on, not `0`"),
        ("tp=8, pp", 9, "not nothing"),
        ("tp=8 tp=4", 6, "given twice"),
        ("recompute=half", 11, "none, selective, full"),
        ("zero=4", 6, "1, 2, 3"),
        ("tp=99999999999999999999", 4, "whole number"),
        ("?", 1, "no part of a layout"),
        ("", 1, "nothing is asked"),
    ],
)
def test_nonsense_is_located(text: str, column: int, word: str) -> None:
    wrong = read_layout(text, "--why")
    assert isinstance(wrong, Diagnostic)
    assert word in wrong.summary
    assert wrong.where is not None
    assert (wrong.where.file, wrong.where.column) == ("--why", column)


@settings(deadline=None)
@given(st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    assert isinstance(read_layout(text, "--why"), LayoutConstraints | Diagnostic)
