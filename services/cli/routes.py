"""Route tables over the vertical models that a home has published.

Knows the standard arms and their names. Does not know how routing works.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from feature_store.errors import NotFound
from feature_store.spec import Spec
from model.training.artefact import read_manifest, resolve
from model.vertical.presets import ARMS
from services.cli.home import Home

SHARES = {"A0": 1000, "A1": 1000, "A2": 1000, "A3": 7000}
"""Buckets of 10 000 where all four arms exist: most users get everything, a tenth each less of it."""
WORTH = {"click": 1.0, "conversion": 5.0, "purchase": 20.0}
"""What an outcome is worth in an ad's value, by objective name; others do not count until the route table says so."""


def published_verticals(home: Home, spec: Spec) -> dict[str, Path]:
    """Name on the protocol → folder of the current version, of every standard arm that was published.

    Raises:
        NotFound: there is none.
    """
    names = [f"{surface}-{arm.lower()}" for surface in spec.surfaces for arm in ARMS]
    found = {name: resolve(home.models_root / name) for name in names if (home.models_root / name).exists()}
    if not found:
        raise NotFound(f"{home.models_root} holds no vertical model; run `gemctl train vertical --surface …` first")
    return found


def write_routes(home: Home, spec: Spec, verticals: Mapping[str, Path]) -> None:
    """A route table in which every surface splits its users among the arms it has."""
    surfaces = {name: _surface(name, spec, verticals) for name in spec.surfaces if _arms(name, verticals)}
    home.routes_path.write_text(yaml.safe_dump({"version": 1, "surfaces": surfaces}, sort_keys=False))


def _surface(surface: str, spec: Spec, verticals: Mapping[str, Path]) -> dict[str, Any]:
    arms = _arms(surface, verticals)
    total, weights = sum(SHARES[arm] for arm in arms), {}
    for arm in arms:
        weights[arm] = SHARES[arm] * 10_000 // total
    weights[arms[-1]] += 10_000 - sum(weights.values())
    valued = {name: WORTH[name] for name in spec.objectives if name in WORTH}
    return {
        "salt": f"{surface}-ranking",
        "value_weights": valued or {spec.objectives[0]: 1.0},
        "arms": [_arm(arm, weights[arm], verticals[f"{surface}-{arm.lower()}"]) for arm in arms],
    }


def _arms(surface: str, verticals: Mapping[str, Path]) -> list[str]:
    return [arm for arm in ARMS if f"{surface}-{arm.lower()}" in verticals]


def _arm(arm: str, weight: int, folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    made: dict[str, Any] = {"name": arm, "model": manifest.name, "weight": weight}
    if manifest.loopfm_space_id:
        made |= {"loopfm": True, "loopfm_space_id": manifest.loopfm_space_id.hex(), "loopfm_dim": 64}
    if manifest.solaris_space_id:
        made |= {"solaris": True, "solaris_space_id": manifest.solaris_space_id.hex(), "solaris_dim": 64}
    return made
