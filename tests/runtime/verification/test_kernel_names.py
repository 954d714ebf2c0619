"""Kernels by the plan's categories, and the time when none runs."""

import pytest

from shipway.runtime.verification.kernel_names import IDLE, category, kernel_times


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NNN", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>", "matrix products"),
        (
            "_ZN7cutlass13device_kernelIN4gemm6kernel13GemmUniversalINS5_17GroupProblemShape",
            "expert products",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<192, 128, 64, 8>>", "attention"),
        ("chunk_kda_bwd_kernel_wy_dqkg_fused", "delta attention"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "delta attention"),
        ("causal_conv1d_bwd_kernel", "memory-bound work"),
        ("triton_red_fused__to_copy_logsumexp_0", "memory-bound work"),
        (
            "void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add<BFloat16>>",
            "memory-bound work",
        ),
    ],
)
def test_a_kernel_that_an_h200_ran_is_told_by_its_name(kernel: str, name: str) -> None:
    assert category(kernel) == name


def test_time_is_summed_by_category_and_gaps_between_kernels_are_idle() -> None:
    def event(name: str, start: int, length: int, **more: object) -> dict[str, object]:
        return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, **more}

    axis = {"args": {"Process Group Description": "mesh_fsdp"}}
    times = kernel_times(
        [
            event("nvjet_a", 0, 10),
            event("ncclDevKernel_AllGather", 5, 15, **axis),
            event("triton_poi_fused_0", 30, 5),
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100},
        ]
    )
    assert times.seconds == pytest.approx({"matrix products": 10e-6, "memory-bound work": 5e-6, IDLE: 10e-6})
    assert times.communication == pytest.approx({"fsdp": 15e-6})
    assert times.count == 3
    assert next(iter(times.slowest)) == "ncclDevKernel_AllGather"
