from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from gem.training.v1.model_manifest_pb2 import ModelManifest

from feature_store.errors import CorruptArtefact, FailedPrecondition, InvalidInput, NotFound
from model.training import artefact, configuration
from model.training.artefact import Golden, Score

_path = Path(__file__).with_name("small.py")
_spec = importlib.util.spec_from_file_location("training_small", _path)
assert _spec is not None
assert _spec.loader is not None
small = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = small
_spec.loader.exec_module(small)


def manifest(version: str, **fields: object) -> ModelManifest:
    return ModelManifest(name="small", version=version, kind="vertical", spec_hash=b"s" * 16, **fields)  # type: ignore[arg-type]


def load(folder: Path) -> Score:
    model = small.SmallModel()
    artefact.load_weights(folder, artefact.read_manifest(folder), model)
    return model.score  # type: ignore[no-any-return]


def published(root: Path, version: str = "1", *, shift: float = 0.0, loader: Callable[[Path], Score] = load) -> Path:
    model = small.SmallModel()
    model.out.bias.data += shift
    batch = small.SmallRows(3).batch(np.arange(3))[0]
    return artefact.publish(root, manifest(version), model, Golden(batch, model.score(batch)), load=loader)


def test_a_published_version_is_current_and_scores_as_it_did(tmp_path: Path) -> None:
    folder = published(tmp_path)
    assert artefact.current(tmp_path, "small") == folder == tmp_path / "small" / "1"
    batch = small.SmallRows(5, seed=4).batch(np.arange(5))[0]
    np.testing.assert_array_equal(load(folder)(batch), small.SmallModel().score(batch))
    np.testing.assert_array_equal(load(tmp_path / "small")(batch), load(folder)(batch))
    read = artefact.read_manifest(folder)
    assert set(read.digests) == {"model.safetensors", "golden.safetensors"}
    assert read.architecture_hash == artefact.architecture_hash(small.SmallModel())


def test_current_moves_forth_and_back_and_names_what_is_there(tmp_path: Path) -> None:
    published(tmp_path, "1")
    published(tmp_path, "2", shift=1.0)
    assert artefact.current(tmp_path, "small").name == "2"
    artefact.point(tmp_path, "small", "1")
    assert artefact.current(tmp_path, "small").name == "1"
    with pytest.raises(NotFound, match=r"has no version '3'.*\['1', '2'\]"):
        artefact.point(tmp_path, "small", "3")


def test_a_version_never_changes(tmp_path: Path) -> None:
    published(tmp_path, "1")
    with pytest.raises(InvalidInput, match="versions never change"):
        published(tmp_path, "1", shift=1.0)


def test_a_version_that_does_not_reproduce_its_golden_request_is_never_published(tmp_path: Path) -> None:
    def wrong(folder: Path) -> Score:
        return lambda batch: load(folder)(batch) + np.float32(0.01)

    published(tmp_path, "1")
    with pytest.raises(CorruptArtefact, match=r"misses its golden request by 0\.01"):
        published(tmp_path, "2", loader=wrong)
    assert artefact.current(tmp_path, "small").name == "1"
    assert artefact.versions(tmp_path, "small") == ["1"]


@pytest.mark.parametrize("name", ["model.safetensors", "golden.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_file_is_refused_by_name_and_digest(tmp_path: Path, name: str, damage: str) -> None:
    folder = published(tmp_path)
    file, digest = folder / name, artefact.read_manifest(folder).digests[name]
    data = file.read_bytes()
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage == "flip" else data[:-9])
    with pytest.raises(CorruptArtefact, match=rf"{name}.*{digest}"):
        load(folder)


def test_a_manifest_that_is_not_json_is_refused(tmp_path: Path) -> None:
    folder = published(tmp_path)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(CorruptArtefact, match=r"manifest\.json is not a manifest"):
        artefact.read_manifest(folder)
    with pytest.raises(NotFound, match="holds no artefact"):
        artefact.read_manifest(tmp_path / "nowhere")


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    folder = published(tmp_path)
    other = small.SmallModel()
    other.out = small.nn.Linear(8, 3)
    with pytest.raises(CorruptArtefact, match="was written for architecture"):
        artefact.load_weights(folder, artefact.read_manifest(folder), other)


def test_a_model_of_another_kind_or_spec_is_refused(tmp_path: Path) -> None:
    read = artefact.read_manifest(published(tmp_path))
    artefact.require(read, kind="vertical", spec_hash=b"s" * 16)
    with pytest.raises(FailedPrecondition, match="a foundation model is needed"):
        artefact.require(read, kind="foundation", spec_hash=b"s" * 16)
    with pytest.raises(FailedPrecondition, match="was built for spec 7373"):
        artefact.require(read, kind="vertical", spec_hash=b"t" * 16)


@pytest.mark.parametrize("bad", ["", ".", "..", "current", "a/b", ".hidden", "a b", "../up"])
def test_a_version_that_is_no_folder_name_is_refused(tmp_path: Path, bad: str) -> None:
    with pytest.raises(InvalidInput, match="cannot name a model or version"):
        published(tmp_path, bad)


def test_no_pickle_is_ever_written_or_read(tmp_path: Path) -> None:
    folder = published(tmp_path)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    assert not any(b"\x80\x02" in path.read_bytes()[:4] or path.read_bytes()[:2] == b"PK" for path in folder.iterdir())


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    rate: float = 0.5
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    size: int = 1
    deep: bool = False
    mode: Literal["a", "b"] = "a"
    limit: int | None = None
    inner: Inner = Inner()


def test_a_configuration_comes_back_from_json() -> None:
    config = Outer(size=3, deep=True, mode="b", limit=7, inner=Inner(rate=2.0, names=("x", "y")))
    assert configuration.parse(Outer, configuration.dump(config)) == config
    assert configuration.parse(Outer, "{}") == Outer()
    assert configuration.differences(config, Outer(size=4, deep=True, mode="b", limit=7, inner=config.inner)) == ["size: 3 → 4"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"size": true}', "Outer.size is True; it must be int, not bool"),
        ('{"size": 1.5}', "must be int"),
        ('{"deep": 1}', "must be bool"),
        ('{"sise": 1}', r"unknown fields \['sise'\]"),
        ('{"mode": "c"}', r"must be one of \['a', 'b'\]"),
        ('{"inner": {"rate": "fast"}}', "Outer.inner.rate is 'fast'; it must be float"),
        ('{"inner": {"names": [1]}}', r"Outer.inner.names\[0\] is 1"),
        ("[", "is not JSON"),
    ],
)
def test_a_configuration_is_read_strictly(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        configuration.parse(Outer, text)
