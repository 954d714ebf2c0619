"""The table of kernels: one choice for each operation, with its reason."""

import pytest

from shipway.runtime.kernels import dispatch, table
from shipway.runtime.kernels.dispatch import BLOCKS, FAST, OVERRIDE, PLAIN, compiles_blocks


@pytest.fixture
def undecided():
    """A process that has not chosen yet, before and after."""
    dispatch._choices.cache_clear()
    yield
    dispatch._choices.cache_clear()


def installed(monkeypatch, found):
    def version(package):
        if found is None:
            raise dispatch.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(dispatch, "version", version)


def kernels(device):
    """The table without its row for whole blocks."""
    return [choice for choice in table(device) if choice.operation != BLOCKS]


def test_every_operation_has_a_plain_form():
    assert {fast.operation for fast in FAST} == set(PLAIN)


def test_the_cpu_takes_the_plain_forms(undecided):
    for choice in kernels("cpu"):
        assert choice.implementation == PLAIN[choice.operation]
        assert choice.reason == "no other form on cpu"


def test_cuda_takes_the_fast_forms_where_their_package_is_new_enough(undecided, monkeypatch):
    monkeypatch.delenv(OVERRIDE, raising=False)
    installed(monkeypatch, "0.6.1.dev3")
    chosen = {choice.operation: choice.implementation for choice in kernels("cuda")}
    assert chosen == {fast.operation: fast.implementation for fast in FAST}


@pytest.mark.parametrize(("found", "reason"), [(None, "pip install"), ("0.5.9", "older than 0.6")])
def test_a_missing_or_old_package_falls_back_and_says_why(undecided, monkeypatch, found, reason):
    monkeypatch.delenv(OVERRIDE, raising=False)
    installed(monkeypatch, found)
    for choice, fast in zip(kernels("cuda"), FAST, strict=True):
        if fast.package:
            assert choice.implementation == PLAIN[choice.operation]
            assert reason in choice.reason
        else:
            assert choice.implementation == fast.implementation


def test_the_override_forces_plain_forms_on_cuda(undecided, monkeypatch):
    monkeypatch.setenv(OVERRIDE, "plain")
    assert all(choice.implementation == PLAIN[choice.operation] for choice in kernels("cuda"))


def test_the_choice_is_made_once(undecided, monkeypatch):
    monkeypatch.delenv(OVERRIDE, raising=False)
    before = table("cuda")
    monkeypatch.setenv(OVERRIDE, "plain")
    assert table("cuda") == before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_whole_blocks_are_compiled_where_the_blueprint_says_so(device):
    rows = {asked: table(device, asked)[-1] for asked in ("auto", "none", "blocks")}
    assert {row.operation for row in rows.values()} == {BLOCKS}
    assert {asked: row.implementation for asked, row in rows.items()} == {
        "auto": "PyTorch",
        "none": "PyTorch",
        "blocks": "torch.compile",
    }
    assert "training.compile: blocks" in rows["auto"].reason
    assert [compiles_blocks(device, asked) for asked in rows] == [False, False, True]
