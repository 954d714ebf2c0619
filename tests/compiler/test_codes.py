"""Every code that the compiler gives can be explained."""

from __future__ import annotations

import re
from pathlib import Path

import shipway.compiler
import shipway.runtime
from shipway.compiler.codes import codes

FOLDERS = [Path(next(iter(package.__path__))) for package in (shipway.compiler, shipway.runtime)]
CODE = re.compile(r'"([A-Z]{2}\d{3})"')


def test_every_code_given_is_explained_and_the_other_way_round() -> None:
    given: dict[str, str] = {}
    for path in (path for folder in FOLDERS for path in folder.rglob("*.py")):
        if path.name != "codes.py":
            given |= dict.fromkeys(CODE.findall(path.read_text()), path.name)
    assert {code: file for code, file in given.items() if code not in codes()} == {}
    assert sorted(set(codes()) - set(given)) == []


def test_explanations_are_sentences() -> None:
    for code in codes().values():
        assert code.explanation.rstrip().endswith("."), code.code
        assert not code.title.endswith("."), code.code
