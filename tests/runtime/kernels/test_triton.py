"""Our GPU kernels in Triton's interpreter, where Triton is: bench/kernels_check.py has them on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
CASES = Path(__file__).with_name("triton_cases.py")


@pytest.mark.parametrize("case", ["convolution", "packed_convolution", "residual", "residual_twice"])
def test_a_kernel_of_ours_equals_the_plain_form_with_its_gradients(case):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.runtime.kernels.triton_cases", case]
    result = subprocess.run(command, env=environment, cwd=CASES.parents[3], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
