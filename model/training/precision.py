"""Makes chosen linear layers of a model multiply MXFP8 numbers, and takes it back: from outside of the model.

Knows torch's linear layers and their names. Does not know models, nor how they are trained.

Parameters stay the same objects in float32 under the same names: optimizers, checkpoints and artefacts notice nothing.
Embeddings, norms and products that are no linear layer (attention, pooling, crosses) stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from torch import Tensor, nn

from model.kernels.quantized_matmul import Recipe, mx_matmul

HIGH = frozenset({"embeddings", "tokens", "heads"})
"""Parts whose layers stay high: what turns features into tokens, and the last tokens into logits."""


class MxLinear(nn.Linear):
    """Another linear layer's parameters, multiplied as a recipe says.

    In evaluation every row has scales of its own, whatever the recipe: a score must not depend on the rows beside it,
    and the square tiles that spare training a second copy would make it so.
    """

    def __init__(self, linear: nn.Linear, recipe: Recipe) -> None:
        nn.Module.__init__(self)  # nn.Linear's would draw new parameters
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.recipe = recipe
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """[..., out_features]"""
        recipe = self.recipe if self.training else dataclasses.replace(self.recipe, square=False)
        out = mx_matmul(x.reshape(-1, self.in_features), self.weight, recipe).reshape(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def to_mx(model: nn.Module, recipe: Recipe, *, keep: Collection[str] = HIGH) -> tuple[str, ...]:
    """Replaces the linear layers of a model in place; returns the names of those replaced.

    Args:
        model: holds plain nn.Linear layers under names.
        recipe: of every replaced layer.
        keep: a layer stays if one of these is a part of its dotted name, as "heads" is of "heads.trunk".

    Raises:
        ValueError: no layer is left to replace, or the recipe's rotation does not divide a layer's width. The model
            is then as it was.
    """
    chosen = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) is nn.Linear and name and not set(keep) & set(name.split("."))
    }
    if not chosen:
        found = f"{type(model).__name__} has no plain linear layer outside of {sorted(keep)}"
        raise ValueError(f"{found}; keep fewer, or replace once only")
    uneven = [name for name, linear in chosen.items() if recipe.rotation and linear.in_features % recipe.rotation]
    if uneven:
        found = f"blocks of {recipe.rotation} do not fill the inputs of {', '.join(uneven)}"
        raise ValueError(f"{found}; choose a smaller rotation or keep these layers")
    made = {id(linear): MxLinear(linear, recipe) for linear in chosen.values()}  # one layer may have two names
    for name, linear in chosen.items():
        _put(model, name, made[id(linear)])
    return tuple(chosen)


def from_mx(model: nn.Module) -> tuple[str, ...]:
    """Puts plain linear layers back, with the parameters as they are now; returns their names."""
    found = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, MxLinear) and name}
    made = {id(layer): _plain(layer) for layer in found.values()}
    for name, layer in found.items():
        _put(model, name, made[id(layer)])
    return tuple(found)


def _plain(layer: MxLinear) -> nn.Linear:
    linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    linear.weight, linear.bias = layer.weight, layer.bias
    return linear.train(layer.training)


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)
