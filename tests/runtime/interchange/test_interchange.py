"""Published names, shapes and files: the same logits on both sides."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shipway.compiler.compose import compose
from shipway.compiler.emit.build import build as write_build
from shipway.compiler.starter import starter
from shipway.compiler.validate import validate
from shipway.runtime.build_folder import import_model
from shipway.runtime.exit_codes import Fatal
from shipway.runtime.generation.weights import load_model, save_weights
from shipway.runtime.interchange.__main__ import main as interchange
from shipway.runtime.interchange.convert import published_tensors, take_weights
from shipway.runtime.interchange.families import Unpublishable, config_of, family_of
from shipway.runtime.interchange.files import CONFIG, INDEX, open_folder, write_folder
from shipway.schemas.model import Model
from tests.templates.generated import build, load, tokens_of, variant
from tests.templates.test_build import plan_of


def deepseek_v3(**changes) -> Model:
    return variant(
        "rotary latent",
        **{
            "norm_eps": 1e-6,
            "attention__mix": {"pattern": ["latent"]},
            "attention__latent__output_gate": "none",
            "multi_token_prediction": None,
            **changes,
        },
    )


def kimi_linear(**changes) -> Model:
    return variant(
        "older delta",
        **{
            "attention__delta__value_heads": None,
            "attention__delta__value_width": 16,
            "attention__delta__decay_rank": 16,
            "attention__delta__output_gate_bias": False,
            "attention__latent__output_gate": "none",
            "attention__latent__norm_eps": 1e-6,
            "residual": {"kind": "plain"},
            "feed_forward__experts__latent_width": None,
            "feed_forward__activation": {"kind": "swiglu"},
            **changes,
        },
    )


def kimi_k3(**changes) -> Model:
    return variant(
        "hybrid", **{"attention__delta__decay_rank": 16, "attention__latent__norm_eps": 1e-6, **changes}
    )


def deepseek_v3_predicting(**changes) -> Model:
    return deepseek_v3(multi_token_prediction={"depth": 2}, **changes)


FAMILIES = {"deepseek_v3": deepseek_v3, "kimi_linear": kimi_linear, "kimi_k3": kimi_k3}


def trained(model: Model) -> torch.nn.Module:
    """A model whose balancing bias, too, is not zero."""
    built = build(model).eval()
    generator = torch.Generator().manual_seed(9)
    for name, buffer in built.named_buffers():
        if name.endswith("balance_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return built


def export(built: torch.nn.Module, model: Model, folder: Path, **options) -> Path:
    write_folder(folder, config_of(model), published_tensors(built.state_dict(), model), **options)
    return folder


@pytest.mark.parametrize("make", [*FAMILIES.values(), deepseek_v3_predicting])
def test_export_then_import_gives_every_weight_back(make: Callable[[], Model], tmp_path: Path) -> None:
    model = make()
    assert FAMILIES[family_of(model)].__name__ in make.__name__
    built = trained(model)
    published = open_folder(export(built, model, tmp_path, shard_bytes=20_000))
    assert (tmp_path / INDEX).exists()
    again = load(model).Model()
    take_weights(again, model, published)
    for name, tensor in built.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.parametrize("query_rank", [24, None])
@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear"])
def test_transformers_reads_what_we_export(family: str, query_rank: int | None, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = FAMILIES[family](attention__latent__query_rank=query_rank)
    built = trained(model)
    export(built, model, tmp_path)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = tokens_of(model, 2, 40)
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(tokens).logits, built(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_linear"])
def test_we_read_what_transformers_saves(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = FAMILIES[family]()
    (tmp_path / CONFIG).write_text(json.dumps(config_of(model)))
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.2)
    theirs.save_pretrained(tmp_path)
    built = load(model).Model().eval()
    take_weights(built, model, open_folder(tmp_path))
    tokens = tokens_of(model, 2, 40)
    with torch.no_grad():
        torch.testing.assert_close(built(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_further_prediction_is_published_as_layers_after_the_last(tmp_path: Path) -> None:
    model = deepseek_v3_predicting()
    built = trained(model)
    tensors = dict(published_tensors(built.state_dict(), model))
    ordinary = {
        name.removeprefix("model.layers.4.") for name in tensors if name.startswith("model.layers.4.")
    }
    around = {"hnorm", "enorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"}
    for index in (5, 6):  # the model has five layers
        start = f"model.layers.{index}."
        found = {name.removeprefix(start) for name in tensors if name.startswith(start)}
        assert found == ordinary | {f"{name}.weight" for name in around}
    # there the embedding comes first
    x, following = torch.randn(2, 3, model.width).unbind()
    ours = built.prediction[1].projection(torch.cat([x, following], -1))
    theirs = torch.cat([following, x], -1) @ tensors["model.layers.6.eh_proj.weight"].T
    torch.testing.assert_close(ours, theirs)
    assert config_of(model)["num_nextn_predict_layers"] == 2


def test_transformers_reads_all_but_further_prediction(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = deepseek_v3_predicting()
    built = trained(model)
    export(built, model, tmp_path)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert all(name.startswith(("model.layers.5.", "model.layers.6.")) for name in report["unexpected_keys"])
    tokens = tokens_of(model, 2, 40)
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(tokens).logits, built(tokens), rtol=1e-4, atol=1e-5)


def test_a_prediction_with_a_head_of_its_own_is_refused(tmp_path: Path) -> None:
    model = deepseek_v3_predicting()
    tensors = dict(published_tensors(build(model).state_dict(), model))
    tensors["model.layers.5.shared_head.head.weight"] = tensors["lm_head.weight"] + 1
    write_folder(tmp_path, config_of(model), tensors.items())
    with pytest.raises(Fatal, match=r"5\.shared_head\.head\.weight is not lm_head\.weight again"):
        take_weights(load(model).Model(), model, open_folder(tmp_path))


def test_k3_tensors_have_their_published_names(tmp_path: Path) -> None:
    model = kimi_k3()
    tensors = dict(published_tensors(build(model).state_dict(), model))
    attention = r"self_attn\.({})\.weight"
    shared = "o_proj|g_proj"
    delta = attention.format(f"[qkv]_proj|[qkv]_conv1d|f_[ab]_proj|b_proj|o_norm|{shared}")
    latent = attention.format(f"q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj|(q|kv)_a_layernorm|{shared}")
    layer = "|".join(
        (
            r"input_layernorm\.weight|post_attention_layernorm\.weight",
            r"(self_attention|mlp)_res_(norm|proj)\.weight",
            rf"{delta}|self_attn\.(A_log|dt_bias)|{latent}",
            r"mlp\.(gate|up|down)_proj\.weight",
            r"block_sparse_moe\.gate\.(weight|e_score_correction_bias)",
            r"block_sparse_moe\.routed_expert_(down_proj|norm|up_proj)\.weight",
            r"block_sparse_moe\.shared_experts\.(gate|up|down)_proj\.weight",
            r"block_sparse_moe\.experts\.\d+\.w[123]\.weight",
        )
    )
    whole = r"embed_tokens\.weight|norm\.weight|output_attn_res_(norm|proj)\.weight"
    published = re.compile(rf"language_model\.(lm_head\.weight|model\.({whole}|layers\.\d+\.({layer})))")
    assert [name for name in tensors if not published.fullmatch(name)] == []
    a_log = tensors["language_model.model.layers.0.self_attn.A_log"]
    assert a_log.shape == (128,)
    assert not a_log[2:].any()
    assert config_of(model)["text_config"]["linear_attn_config"]["full_attn_layers"] == [2, 4, 5]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (variant("grouped"), "no latent attention"),
        (kimi_k3(residual={"kind": "full"}), "no block attention residuals"),
        (
            deepseek_v3(norm_eps=1e-5, attention__latent__norm_eps=None),
            "latent norms have an epsilon of 1e-05",
        ),
        (kimi_linear(multi_token_prediction={"depth": 1}), "multi-token prediction"),
        (
            deepseek_v3(feed_forward__mix={"pattern": ["experts", "dense"], "tail": ["experts"]}),
            "dense layers",
        ),
    ],
)
def test_a_model_without_a_published_counterpart_is_told_why(model: Model, reason: str) -> None:
    with pytest.raises(Unpublishable, match=reason):
        family_of(model)


def test_a_refusal_names_the_fields_to_set() -> None:
    wide = kimi_linear(attention__delta__decay_rank=8, attention__latent__norm_eps=None)
    with pytest.raises(Unpublishable) as refused:
        family_of(wide)
    width = kimi_linear().attention.delta.key_width
    assert refused.value.way_out.splitlines()[1:] == [
        "  model.attention.latent.norm_eps=1e-6",
        f"  model.attention.delta.value_width={width}",
        f"  model.attention.delta.decay_rank={width}",
    ]
    with pytest.raises(Unpublishable) as refused:
        family_of(variant("grouped"))
    assert refused.value.way_out == ""


def test_settings_that_a_refusal_names_make_the_model_one_of_the_family() -> None:
    with pytest.raises(Unpublishable) as refused:
        family_of(plan_of("tiny", "model.attention.latent.norm_eps=1e-5").blueprint.model)
    help_line, *settings = (line.strip() for line in refused.value.way_out.splitlines())
    assert family_of(plan_of("tiny", *settings).blueprint.model) == "kimi_k3"
    assert help_line.startswith("For kimi_k3, ")


def test_the_blueprint_that_init_writes_can_be_exported(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(starter("mine", "schema.json"))
    blueprint, _ = validate(compose(str(tmp_path / "mine.yaml"), (), None))
    assert blueprint is not None
    assert family_of(blueprint.model) == "kimi_k3"


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    model = kimi_linear()
    published = open_folder(export(build(model), model, tmp_path))
    other = kimi_linear(feed_forward__experts__active=3)
    with pytest.raises(Fatal, match="num_experts_per_token is 2, the blueprint has 3"):
        take_weights(load(other).Model(), other, published)


def test_missing_and_left_over_tensors_are_named(tmp_path: Path) -> None:
    model = kimi_linear()
    tensors = dict(published_tensors(build(model).state_dict(), model))
    tensors["model.extra.weight"] = tensors.pop("lm_head.weight")
    write_folder(tmp_path, config_of(model), tensors.items())
    with pytest.raises(Fatal, match=r"missing: lm_head\.weight\n.*left over: model\.extra\.weight"):
        take_weights(load(model).Model(), model, open_folder(tmp_path))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Fatal, match=r"no folder of published weights: it has no config\.json and"):
        open_folder(tmp_path)


def test_commands_export_a_checkpoint_and_import_it_again(tmp_path: Path) -> None:
    plan = plan_of("tiny")
    write_build(plan, tmp_path / "build")
    model = import_model(tmp_path / "build").Model()
    model.init_weights(torch.Generator().manual_seed(0))
    save_weights(model, tmp_path / "saved", plan.hash)
    for arguments in (
        ["export", "build", "--checkpoint", "saved", "--out", "published", "--dtype", "fp32"],
        ["import", "build", "published", "--out", "imported"],
    ):
        command = [sys.executable, "-c", "from shipway.compiler.cli import main; main()", *arguments]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
    module = import_model(tmp_path / "build")
    again = load_model(module, tmp_path / "imported", torch.device("cpu"), torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_json_has_what_is_wrong_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, setting in (("eps", "model.attention.latent.norm_eps=1e-5"), ("build", "name=tiny")):
        write_build(plan_of("tiny", setting), tmp_path / folder)
    for arguments, code, words in (
        (("export", "eps", "saved", "out"), "EX001", "no published family can hold this model"),
        (("export", "build", "saved", "out"), "EN001", "has no finished checkpoint"),
        (("import", "build", "nowhere", "out"), "EN001", "nowhere does not exist"),
    ):
        command, *paths = arguments
        assert interchange([command, *(str(tmp_path / path) for path in paths), "--json"]) == 4
        (told,) = json.loads(capsys.readouterr().out)["diagnostics"]
        assert told["code"] == code
        assert words in told["summary"]
