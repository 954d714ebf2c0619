"""What is measured of fp8 is what training does, and nothing where a device has none."""

from __future__ import annotations

import pytest
import torch

from shipway.runtime.calibration.fp8 import E4M3, measure_fp8, round_by_row


@pytest.mark.parametrize("dimension", [0, -1])
def test_rounding_is_torchaos(dimension: int) -> None:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    x = torch.randn(48, 80, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16) * 3
    found, scale = round_by_row(x, dimension)
    expected = hp_tensor_to_float8_dynamic(
        x,
        E4M3,
        LinearMMConfig(),
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=dimension,
        round_scales_to_power_of_2=True,
    )
    assert torch.equal(scale, expected._scale)
    assert torch.equal(found.view(torch.uint8), expected._data.view(torch.uint8))


def test_a_device_without_products_in_fp8_has_no_rows() -> None:
    assert list(measure_fp8(torch.device("cpu"), ((2048, 2048, 2048),))) == []
