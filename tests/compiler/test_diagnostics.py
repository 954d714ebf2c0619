"""How one diagnostic is shown."""

import pytest

from shipway.compiler.diagnostics import FEW, LEGAL_SHOWN, as_text
from shipway.schemas.diagnostics import Diagnostic


def shown(number: int) -> str:
    legal = tuple(f"v{index}" for index in range(number))
    return as_text(Diagnostic(code="CL002", summary="no such choice", legal=legal)).plain


@pytest.mark.parametrize("number", [1, LEGAL_SHOWN, LEGAL_SHOWN + FEW])
def test_few_legal_values_are_all_shown(number: int) -> None:
    assert f"v{number - 1}\n" in shown(number)
    assert " more" not in shown(number)


def test_many_legal_values_are_counted() -> None:
    assert f"v{LEGAL_SHOWN - 1} and {FEW + 1} more" in shown(LEGAL_SHOWN + FEW + 1)
    assert f"v{LEGAL_SHOWN}" not in shown(LEGAL_SHOWN + FEW + 1)
