"""A model's linear layers multiply MXFP8 numbers while nothing else about it changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from model.gem.batch import Batch
from model.gem.foundation import FoundationModel
from model.gem.presets import tiny
from model.kernels.quantized_matmul import Recipe
from model.training.precision import MxLinear, from_mx, to_mx
from tests.model.world_batches import batch_of, layout

BATCH = Batch.from_numpy(batch_of([5, 0, 40], [3, 2, 4]))


def foundation() -> FoundationModel:
    torch.manual_seed(0)
    model = FoundationModel(tiny(), layout())
    with torch.no_grad():
        model.heads.out.normal_()
    return model.eval()


def logits(model: FoundationModel) -> Tensor:
    return model(BATCH).logits_NK


def test_layers_are_replaced_by_rule_and_what_is_named_stays() -> None:
    model = foundation()
    before = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    names = to_mx(model, Recipe())
    plain = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert plain == {name for name in before if name.startswith(("tokens.", "heads."))}
    assert set(names) == before - plain
    assert {name for name, module in model.named_modules() if isinstance(module, MxLinear)} == set(names)
    assert "layers.0.interaction.experts.0.mlp.0" in names
    assert to_mx(foundation(), Recipe(), keep={"layers"}) != names


def test_parameters_are_the_same_objects_under_the_same_names_and_come_back() -> None:
    model = foundation()
    before, parameters = logits(model), dict(model.named_parameters())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    names = to_mx(model, Recipe())
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameters[name] for name in parameters)
    foundation().load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(state, strict=True)
    assert not torch.equal(logits(model), before)
    assert from_mx(model) == names
    assert torch.equal(logits(model), before)
    assert all(type(model.get_submodule(name)) is nn.Linear for name in names)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert from_mx(model) == ()


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(square=False, stochastic=False), Recipe(rotation=8)])
def test_logits_and_gradients_of_the_foundation_model_stay_near_float32s(recipe: Recipe) -> None:
    model = foundation().train()
    model.heads.dropout = 0.0
    upstream = torch.randn(logits(model).shape, generator=torch.Generator().manual_seed(1))

    def run() -> tuple[Tensor, Tensor]:
        out = logits(model)
        found = torch.autograd.grad(out, list(model.layers.parameters()), upstream, allow_unused=True)
        return out.detach(), torch.cat([g.flatten() for g in found if g is not None])

    out, gradient = run()
    to_mx(model, recipe)
    torch.manual_seed(0)
    mx_out, mx_gradient = run()
    assert float((mx_out - out).norm() / out.norm()) < 0.15  # .02 to .08 in models of six seeds
    assert float(torch.cosine_similarity(mx_gradient, gradient, dim=0)) > 0.97


def test_a_row_scores_the_same_alone_and_among_others_in_evaluation_only() -> None:
    torch.manual_seed(0)
    layer = MxLinear(nn.Linear(64, 8), Recipe(stochastic=False))
    x = torch.randn(40, 64) * torch.logspace(-9, 9, 40)[:, None]  # a neighbour's scale would bury the small rows
    for training, same in ((False, True), (True, False)):
        layer.train(training)
        together, alone = layer(x), torch.cat([layer(row[None]) for row in x])
        close = torch.allclose(together, alone, rtol=1e-5, atol=1e-6)
        assert close == same


def test_any_leading_shape_none_and_a_missing_bias_are_fine_and_flops_are_counted_as_before() -> None:
    for bias in (True, False):
        linear = nn.Linear(32, 8, bias=bias)
        layer = MxLinear(linear, Recipe())
        for shape in ((32,), (0, 32), (3, 32), (2, 3, 32)):
            out = layer(torch.randn(shape))
            assert out.shape == (*shape[:-1], 8)
        with FlopCounterMode(display=False) as counted:
            layer(torch.randn(3, 32))
        assert counted.get_total_flops() == 2 * 3 * 32 * 8


def test_a_layer_with_two_names_stays_one_layer() -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
    model["b"] = model["a"]
    assert to_mx(model, Recipe()) == ("a", "b")
    assert model["a"] is model["b"]
    assert from_mx(model) == ("a", "b")
    assert model["a"] is model["b"]


def test_what_cannot_be_replaced_is_refused_and_the_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(40, 8), nn.Linear(64, 8))
    with pytest.raises(ValueError, match="do not fill the inputs of 0; choose a smaller"):
        to_mx(model, Recipe(rotation=32))
    assert {type(layer) for layer in model} == {nn.Linear}
    assert to_mx(model, Recipe(rotation=32), keep={"0"}) == ("1",)
    to_mx(model, Recipe())
    with pytest.raises(ValueError, match="replace once only"):
        to_mx(model, Recipe())
    with pytest.raises(ValueError, match="no plain linear layer"):
        to_mx(nn.Sequential(nn.Embedding(3, 4)), Recipe())


def test_a_replaced_model_trains_and_its_optimizer_moves_the_layers_own_weights() -> None:
    torch.manual_seed(0)
    model = foundation().train()
    model.heads.dropout = 0.0
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    to_mx(model, Recipe(rotation=8))
    weight = model.layers[0].candidate_summary.mlp[0].weight
    before, labels = weight.clone(), (torch.arange(27) % 3 == 0).float().view(9, 3)
    losses = []
    for _ in range(30):
        loss = nn.functional.binary_cross_entropy_with_logits(logits(model), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert not torch.equal(weight, before)
