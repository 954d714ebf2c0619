"""Generated models against the token-by-token reference, and what must hold of any of them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from bench.reference import Reference, imbalance
from tests.templates.generated import VARIANTS, build, load, next_labels, tokens_of, variant

TEXT_VARIANTS = [name for name in VARIANTS if name != "vision"]
AUXILIARY = "grouped"  # the variant with a load-balancing loss


def document_bounds(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def reference_loss(model, weights, documents, labels) -> torch.Tensor:
    """Loss of a list of documents, with the load-balancing loss of every row where there is one."""
    reference = Reference(model, weights)
    loss = sum(reference.loss(tokens, targets) for tokens, targets in zip(documents, labels, strict=True))
    experts = model.feed_forward.experts
    if experts is not None and experts.balancing.kind == "auxiliary":
        for routed in reference.routed.values():
            rest = iter(routed)
            for targets in labels:
                row = list(itertools.islice(rest, len(targets)))
                counted = int((targets != -100).sum())
                loss = loss + experts.balancing.weight * counted * imbalance(row, experts)
    return loss


@pytest.mark.parametrize("name", TEXT_VARIANTS)
def test_loss_and_every_gradient_are_the_references(name: str) -> None:
    model = variant(name)
    built = build(model).double()
    tokens = tokens_of(model, 2, 9)
    labels = next_labels(tokens)
    labels[1, 2] = -100
    built(tokens, labels).backward()

    weights = {
        n: t.detach().clone().requires_grad_(t.is_floating_point()) for n, t in built.state_dict().items()
    }
    expected = reference_loss(model, weights, list(tokens), list(labels))
    expected.backward()

    assert built(tokens, labels).item() == pytest.approx(expected.item(), rel=1e-9)
    for path, parameter in built.named_parameters():
        assert parameter.grad is not None, path
        torch.testing.assert_close(parameter.grad, weights[path].grad, rtol=1e-6, atol=1e-8, msg=path)


@pytest.mark.parametrize("name", TEXT_VARIANTS)
def test_gradient_reaches_every_parameter(name: str) -> None:
    model = variant(name)
    built = build(model)
    tokens = tokens_of(model, 4, 24)
    built(tokens, next_labels(tokens)).backward()
    silent = {path for path, parameter in built.named_parameters() if not parameter.grad.abs().sum() > 0}
    # with nothing but the embedding to read, the first softmax over depth has one source: it is 1
    expected = {"layers.0.attention_residual.query", "layers.0.attention_residual.norm.weight"}
    assert silent == (set() if model.residual.kind == "plain" else expected)


@pytest.mark.parametrize("name", TEXT_VARIANTS)
def test_labels_give_the_summed_loss_of_the_logits(name: str) -> None:
    model = variant(name, multi_token_prediction=None)
    if name == AUXILIARY:
        model = variant(name, feed_forward__experts__balancing={"kind": "none"})
    built = build(model).eval()
    tokens = tokens_of(model, 2, 12)
    labels = next_labels(tokens)
    loss = built(tokens, labels)
    logits = built(tokens)
    assert logits.shape == (2, 12, model.vocabulary)
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("name", TEXT_VARIANTS)
def test_packed_documents_are_as_if_separate(name: str) -> None:
    lengths = (7, 1, 40, 16)  # within a chunk, a single token, over a chunk, whole tiles
    model = variant(name)
    built = build(model).double().eval()
    tokens = tokens_of(model, 1, sum(lengths))
    packed = built(tokens, cu_seqlens=document_bounds(*lengths))
    separate = [built(part) for part in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(separate, 1))


def test_documents_may_be_packed_in_several_rows() -> None:
    model = variant("hybrid")
    built = build(model).double().eval()
    tokens = tokens_of(model, 2, 12)
    packed = built(tokens, cu_seqlens=document_bounds(5, 7, 12))
    torch.testing.assert_close(packed[0, 5:], built(tokens[:1, 5:])[0])
    torch.testing.assert_close(packed[1], built(tokens[1:])[0])


@pytest.mark.parametrize("name", ["rotary latent", "three kinds"])
def test_further_predictions_stay_inside_their_document(name: str) -> None:
    model = variant(name)
    built = build(model).double().eval()
    tokens = tokens_of(model, 1, 20)
    parts = tokens.split((8, 12), dim=1)
    labels = torch.cat([next_labels(part) for part in parts], 1)
    packed = built(tokens, labels, document_bounds(8, 12))
    separate = sum(built(part, next_labels(part)) for part in parts)
    torch.testing.assert_close(packed, separate)


@pytest.mark.parametrize("name", TEXT_VARIANTS)
def test_same_input_gives_the_same_bits(name: str) -> None:
    model = variant(name)
    tokens = tokens_of(model, 2, 33)
    runs = []
    for _ in range(2):
        built = build(model)
        loss = built(tokens, next_labels(tokens))
        loss.backward()
        runs.append([loss, *(parameter.grad for parameter in built.parameters())])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@pytest.mark.parametrize("name", TEXT_VARIANTS)
def test_later_tokens_do_not_change_earlier_logits(name: str) -> None:
    model = variant(name)
    built = build(model).double().eval()
    tokens = tokens_of(model, 1, 24)
    changed = tokens.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % model.vocabulary
    torch.testing.assert_close(built(tokens)[:, :15], built(changed)[:, :15])


def split_into_stages(built: torch.nn.Module, cuts: list[int]) -> list[torch.nn.Module]:
    """Copies of a model that keep a run of layers each, as a pipeline does."""
    bounds = [0, *cuts, len(built.layers)]
    stages = []
    for start, end in itertools.pairwise(bounds):
        stage = copy.deepcopy(built)
        for index in range(len(built.layers)):
            if not start <= index < end:
                del stage.layers[str(index)]
        if start > 0 and not (end == len(built.layers) and keeps_embedding(built)):
            stage.embed = None
        if end < len(built.layers):
            stage.norm = None
            for name in ("head", "output_residual", "prediction"):
                if hasattr(stage, name):
                    setattr(stage, name, None)
        stages.append(stage)
    return stages


def keeps_embedding(built: torch.nn.Module) -> bool:
    """Whether the last stage needs the embedding too: as its head, or to read further tokens."""
    return not hasattr(built, "head") or hasattr(built, "prediction")


@pytest.mark.parametrize("cuts", [[2], [1, 3]])
@pytest.mark.parametrize("name", [name for name in TEXT_VARIANTS if name != AUXILIARY])
def test_stages_one_after_another_are_the_whole_model(name: str, cuts: list[int]) -> None:
    model = variant(name)
    built = build(model).double()
    tokens = tokens_of(model, 2, 10)
    labels = next_labels(tokens)
    bounds = document_bounds(4, 6, 10)
    whole = built(tokens, labels, bounds)
    whole.backward()

    stages = split_into_stages(built, cuts)
    for stage in stages:
        stage.zero_grad()
    state = tokens
    for stage in stages[:-1]:
        state = stage(state, cu_seqlens=bounds)
    loss = stages[-1](state, labels, bounds)
    loss.backward()
    torch.testing.assert_close(loss, whole)
    gradients = {
        path: p.grad for stage in stages for path, p in stage.named_parameters() if p.grad is not None
    }
    for path, parameter in built.named_parameters():
        if path != "embed.weight" or not keeps_embedding(built):
            torch.testing.assert_close(gradients[path], parameter.grad, msg=path)


def test_a_stage_that_would_lose_the_auxiliary_loss_refuses() -> None:
    model = variant(AUXILIARY)
    first, _ = split_into_stages(build(model), [2])
    with pytest.raises(RuntimeError, match="auxiliary loss"):
        first(tokens_of(model, 1, 4))


def test_a_micro_batch_counts_the_auxiliary_losses_of_its_own_prediction_layers() -> None:
    model = variant(AUXILIARY, multi_token_prediction={"depth": 1})
    built, tokens = build(model), tokens_of(model, 2, 20)
    gradients = []
    for _ in range(2):  # the second would go backward through what the first left behind
        built.zero_grad()
        built(tokens, next_labels(tokens)).backward()
        gradients.append([p.grad.clone() for p in built.parameters()])
    for first, second in zip(*gradients, strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("name", ["hybrid", AUXILIARY])
def test_recomputation_changes_nothing_and_counts_no_token_twice(name: str) -> None:
    model = variant(name)
    tokens = tokens_of(model, 2, 20)
    plain, recomputing = build(model), build(model)
    for layer in recomputing.layers.values():
        forward = layer.forward
        layer.forward = lambda *inputs, forward=forward: checkpoint(forward, *inputs, use_reentrant=False)
    for built in (plain, recomputing):
        built(tokens, next_labels(tokens)).backward()
    for (path, parameter), other in zip(plain.named_parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), path
    for path, counter in plain.named_buffers():
        assert torch.equal(counter, recomputing.get_buffer(path)), path
    assert plain.layers["1"].feed_forward.router.load.sum() == tokens.numel() * 2


def test_each_parameter_is_drawn_by_its_own_name() -> None:
    model = variant("hybrid")
    whole = load(model).Model()
    whole.init_weights(torch.Generator().manual_seed(3))
    _, last = split_into_stages(load(model).Model(), [2])
    last.init_weights(torch.Generator().manual_seed(3))
    for path, parameter in last.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(path)), path
    again = load(model).Model()
    again.init_weights(torch.Generator().manual_seed(4))
    assert not torch.equal(again.head.weight, whole.head.weight)


@pytest.mark.parametrize("name", [*TEXT_VARIANTS, "vision"])
def test_initial_values_are_those_of_the_sources(name: str) -> None:
    model = variant(name)
    built = load(model).Model()
    for tensor in built.state_dict().values():
        tensor.fill_(torch.nan)
    built.init_weights(torch.Generator().manual_seed(0))
    for path, tensor in built.state_dict().items():
        assert tensor.isfinite().all(), path
        if path.endswith("norm.weight"):
            assert (tensor == 1).all(), path
        elif path.endswith(("query", ".bias", "balance_bias")):
            assert (tensor == 0).all(), path
        elif path.endswith("a_log"):
            assert (tensor == 0).all() or (tensor.exp() > 1).all(), path
        elif path.endswith("dt_bias"):
            step = F.softplus(tensor)
            assert ((step > 9.9e-4) & (step < 0.101)).all(), path
        elif path.endswith("conv.weight"):
            assert tensor.abs().max() <= tensor.shape[1] ** -0.5, path
        else:
            assert tensor.std() == pytest.approx(model.init_std, rel=0.3), path
            assert abs(tensor.mean()) < model.init_std / 3, path
