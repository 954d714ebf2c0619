"""Cases from the field about numerics, checkpoints and data, and the tests that hold us to each.

Every name here must be a test function: a case whose test goes missing is noticed.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

CASES: dict[str, tuple[str, ...]] = {
    "torchtitan#2184: axes of size 1 always work": (
        "runtime/test_mesh.py::test_data_parallel_layouts_run",
        "runtime/test_parity.py::test_quick_core_of_the_table_is_proven",
    ),
    "Megatron-LM#5916: the gradient norm holds experts under EP x TP": (
        "runtime/test_parallel_expert.py::test_expert_parallel_trains_what_one_process_trains",
        "runtime/test_parallel_tensor.py::test_tensor_parallel_trains_what_one_process_trains",
        "runtime/test_observability.py::test_details_come_when_due_and_say_what_each_layer_and_expert_did",
    ),
    "pytorch#160285: expert gradients are not doubled at EP 2": (
        "runtime/test_parallel_expert.py::test_expert_parallel_trains_what_one_process_trains",
    ),
    "transformers#48205: tail rows of the grouped product are zero, every gradient is compared": (
        "runtime/kernels/test_experts.py::test_grouped_product_zeroes_tail_rows_and_gives_idle_experts_zero_gradients",
        "templates/test_forward.py::test_loss_and_every_gradient_are_the_references",
        "runtime/test_parallel_expert.py::test_expert_parallel_trains_what_one_process_trains",
    ),
    "NeMo AutoModel#2995: the router has its gradient, experts without tokens a zero one": (
        "templates/test_forward.py::test_gradient_reaches_every_parameter",
        "templates/test_routing.py::test_bias_gets_no_gradient_and_scores_do",
        "runtime/kernels/test_experts.py::test_grouped_product_zeroes_tail_rows_and_gives_idle_experts_zero_gradients",
        "runtime/test_muon.py::test_missing_gradient_still_decays_momentum_and_weight",
    ),
    "torchtitan#771: layouts agree from one seed, with recomputation on and off": (
        "runtime/test_parity.py::test_quick_core_of_the_table_is_proven",
        "runtime/test_data_parallel.py::test_recomputation_changes_nothing",
        "runtime/test_parallel_expert.py::test_recomputation_routes_as_forward_did",
    ),
    "torchtitan#3984: nothing leaks across packed documents": (
        "templates/test_forward.py::test_packed_documents_are_as_if_separate",
        "runtime/kernels/test_delta.py::test_nothing_leaks_across_a_boundary_inside_a_chunk",
    ),
    "torchtitan#4803, pytorch#197487: context parallel of delta rules passes the state on": (
        "runtime/test_parallel_context.py::test_context_parallel_trains_what_one_process_trains",
        "runtime/kernels/test_delta.py::test_a_segment_is_an_affine_map_of_its_initial_state",
    ),
    "torchtitan#811, #816: other numbers of ranks reshard and re-partition, or are refused": (
        "runtime/test_checkpoint.py::test_other_numbers_of_ranks_go_on_the_same",
        "runtime/test_mesh.py::test_impossible_number_of_ranks_names_the_possible_ones",
        "runtime/data/test_loader.py::test_a_stream_killed_and_resumed_at_other_degrees_is_the_unbroken_one",
        "runtime/data/test_loader.py::test_a_degree_that_does_not_divide_the_batch_is_refused_with_the_legal_ones",
        "bench/test_soak.py::test_stopped_it_loses_nothing_and_goes_on_with_other_processes",
    ),
    "torchtitan#1136: after a resume with uneven shards the next loss is the same, bit for bit": (
        "runtime/test_checkpoint.py::test_same_layout_goes_on_bit_for_bit",
        "bench/test_soak.py::test_killed_and_out_of_disk_it_loses_no_more_than_the_interval_and_goes_on_bit_for_bit",
    ),
    "KempnerForge#104: a save in the background and a barrier do not deadlock": (
        "runtime/test_checkpoint.py::test_saves_back_to_back_keep_their_own_values_and_the_last_two",
    ),
    "torchdata#1437, #1513, datasets#7447: no epoch and no sample is lost on resume": (
        "runtime/data/test_loader.py::test_a_stream_killed_and_resumed_at_other_degrees_is_the_unbroken_one",
        "runtime/data/test_stream.py::test_an_epoch_has_every_document_exactly_once",
        "runtime/data/test_interleave.py::test_an_epoch_has_every_token_once",
        "runtime/data/test_stages.py::test_a_new_stage_repeats_no_document_and_loses_no_token",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_its_tests(case: str) -> None:
    for entry in CASES[case]:
        path, name = entry.split("::")
        tree = ast.parse((TESTS / path).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in names, entry
