"""Totals of published models, to the parameter."""

from __future__ import annotations

import pytest

from shipway.compiler.compose import compose
from shipway.compiler.lower import lower
from shipway.compiler.operators.base import Shard, flops
from shipway.compiler.parameters import count
from shipway.schemas.model import Model

PUBLISHED_TOTALS = {
    # Counted from each model's published configuration; model-sources of the design names the sources.
    "k3": 2_779_484_476_000 + 447_358_976,
    "kimi_linear_48b": 49_122_681_728,
    "deepseek_v3": 671_026_419_200,
    "kimi_k2": 1_026_408_232_448,
    "qwen3_235b": 235_093_634_560,
    "mixtral_8x7b": 46_702_792_704,
    "llama31_405b": 405_853_388_800,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
}


def published(name: str) -> Model:
    return Model.from_data(compose(name).data["model"])


@pytest.mark.parametrize(("name", "total"), PUBLISHED_TOTALS.items())
def test_total_is_the_published_one(name: str, total: int) -> None:
    parameters = count(published(name))
    assert parameters.total == total
    assert sum(block.total for block in parameters.blocks) == total


def test_k3_differs_from_its_checkpoint_by_the_padding_of_a_log_alone() -> None:
    model = published("k3")
    delta_layers = model.attention_kinds().count("delta")
    assert count(model).total + delta_layers * (128 - 96) == 2_779_931_837_184


def test_active_parameters_in_the_three_conventions() -> None:
    k3 = count(published("k3"))
    table = 163_840 * 7168
    assert k3.active == 104_189_530_208
    assert k3.active_with_embedding == k3.active + table
    assert k3.active_without_head == k3.active - table
    assert count(published("deepseek_v3")).active_with_embedding == 37_552_282_624


def test_a_tied_head_is_active_once() -> None:
    model = published("llama31_8b")
    tied = model.model_copy(update={"tied_embeddings": True})
    table = model.vocabulary * model.width
    untied_count, tied_count = count(model), count(tied)
    assert tied_count.total == untied_count.total - table
    assert tied_count.active == untied_count.active == tied_count.active_with_embedding
    assert tied_count.active_without_head == untied_count.active_without_head


def test_multi_token_prediction_is_deepseek_v3s_and_not_active() -> None:
    model = published("deepseek_v3")
    extended = Model.from_data(model.model_dump(mode="json") | {"multi_token_prediction": {"depth": 1}})
    before, after = count(model), count(extended)
    assert after.total - before.total == 11_610_068_224  # without its copies of embedding and head
    assert after.active == before.active


def test_blocks_of_k3() -> None:
    blocks = {block.block: block for block in count(published("k3")).blocks}
    assert blocks["delta attention"].total == 69 * 443_740_384
    assert blocks["latent attention"].total == 24 * 232_196_096
    assert blocks["routed experts"].total == 92 * 896 * 33_030_144
    assert blocks["routed experts"].active * 896 == blocks["routed experts"].total * 16
    assert blocks["vision tower"].total == 401_214_464
    assert blocks["projector"].total == 46_144_512
    assert blocks["attention residuals"].total == 2_680_832


def test_the_93_layers_of_k3_are_few_kinds() -> None:
    lowered = lower(published("k3"))
    kinds = lowered.layer_kinds()
    assert sum(number for _, number in kinds) == len(lowered.layers) == 93
    assert len(kinds) <= 25  # attention x feed-forward x sources read


@pytest.mark.parametrize(
    ("name", "context", "published_gigaflops"),
    # TFLOP/s over tokens/s of the same run, so whatever the hardware: NeMo AutoModel, torchtitan on H100.
    [("qwen3_30b_a3b", 4096, 23.0), ("kimi_k2", 4096, 204.5), ("llama31_405b", 8192, 2521.0)],
)
def test_model_flops_per_token_are_the_published_ones(
    name: str, context: int, published_gigaflops: float
) -> None:
    shard = Shard(1, context)
    work = [flops(part.kernels(shard)) for _, part in lower(published(name)).placed_parts()]
    per_token = sum(part.forward + part.backward for part in work) / context
    assert per_token / 1e9 == pytest.approx(published_gigaflops, rel=0.01)
