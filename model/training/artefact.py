"""Publishes models as immutable folders, and loads none that is not exactly what was published.

Knows files, digests and the manifest. Does not know how a model computes, nor where folders are copied to.

    models/<name>/<version>/   model.safetensors, golden.safetensors, manifest.json
    models/<name>/current      the version that is in use; moves atomically, forth and back

A version is published in three steps: write, verify by loading it and reproducing its golden request, move `current`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from gem.training.v1.model_manifest_pb2 import ModelManifest
from google.protobuf import json_format
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import nn

from feature_store.batch import FeatureBatch
from feature_store.errors import CorruptArtefact, FailedPrecondition, InvalidInput, NotFound
from model.training.checkpoint import load_state, load_tensors, sha256, verify, write_atomically

MODEL, GOLDEN, MANIFEST, CURRENT = "model.safetensors", "golden.safetensors", "manifest.json", "current"
_LOGITS = "expected_logits"
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
Score = Callable[[FeatureBatch], npt.NDArray[np.float32]]


class Golden(NamedTuple):
    """A request and what the model answered when it was published."""

    batch: FeatureBatch
    logits_NK: npt.NDArray[np.float32]


def publish(
    root: Path,
    manifest: ModelManifest,
    model: nn.Module,
    golden: Golden,
    *,
    load: Callable[[Path], Score],
    make_current: bool = True,
) -> Path:
    """Writes a version, proves it by loading it with `load`, and makes it current; returns its folder.

    Raises:
        InvalidInput: name or version cannot be a folder, or the version exists.
        CorruptArtefact: what was written does not load or does not reproduce the golden request; nothing has moved.
    """
    folder = root / _part(manifest.name) / _part(manifest.version)
    if folder.exists():
        raise InvalidInput(f"{folder} exists and versions never change; choose another version")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write(partial, manifest, model, golden)
    prove(partial, load(partial))
    os.replace(partial, folder)
    if make_current:
        point(root, manifest.name, manifest.version)
    return folder


def point(root: Path, name: str, version: str) -> None:
    """Makes a published version the current one: also how a version is rolled back.

    Raises:
        NotFound: it is not published.
    """
    if not (root / name / version / MANIFEST).is_file():
        raise NotFound(f"model {name!r} has no version {version!r} below {root}; it has {versions(root, name)}")
    write_atomically(root / name / CURRENT, version)


def current(root: Path, name: str) -> Path:
    """Folder of the current version.

    Raises:
        NotFound: nothing is published under the name.
    """
    pointer = root / name / CURRENT
    if not pointer.is_file():
        raise NotFound(f"model {name!r} has no current version below {root}; publish one")
    return root / name / pointer.read_text(encoding="utf-8").strip()


def versions(root: Path, name: str) -> list[str]:
    """Published versions of a model, in order of name."""
    return sorted(path.parent.name for path in (root / name).glob(f"*/{MANIFEST}") if not path.parent.name.startswith("."))


def read_manifest(folder: Path) -> ModelManifest:
    """The manifest of a version; `folder` may also be models/<name>, then of the current one.

    Raises:
        NotFound: the folder holds no artefact.
        CorruptArtefact: the manifest is not readable.
    """
    path = resolve(folder) / MANIFEST
    try:
        return json_format.Parse(path.read_text(encoding="utf-8"), ModelManifest(), ignore_unknown_fields=True)
    except OSError as error:
        raise NotFound(f"{folder} holds no artefact: {error.strerror}; give the folder of a published version") from error
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise CorruptArtefact(f"{path} is not a manifest: {error}; publish it again", file=MANIFEST) from error


def resolve(folder: Path) -> Path:
    """The version that a folder names: itself, or the one its pointer names."""
    pointer = folder / CURRENT
    return folder / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else folder


def require(manifest: ModelManifest, *, kind: str, spec_hash: bytes) -> None:
    """Refuses a model that was built for something else.

    Raises:
        FailedPrecondition: its kind or its spec is another one.
    """
    if manifest.kind != kind:
        raise FailedPrecondition(f"model {manifest.name!r} is a {manifest.kind} model; a {kind} model is needed")
    if manifest.spec_hash != spec_hash:
        raise FailedPrecondition(
            f"model {manifest.name} {manifest.version} was built for spec {manifest.spec_hash.hex()}, "
            f"not {spec_hash.hex()}; train it on this spec or start with that one"
        )


def load_weights(folder: Path, manifest: ModelManifest, model: nn.Module) -> None:
    """Fills a model with a version's verified weights.

    Raises:
        CorruptArtefact: a file is missing or changed, or its tensors are not the model's.
    """
    at = resolve(folder)
    for name, digest in manifest.digests.items():
        verify(at / name, digest)
    if manifest.architecture_hash != architecture_hash(model):
        raise CorruptArtefact(
            f"{at} was written for architecture {manifest.architecture_hash}, its configuration now builds "
            f"{architecture_hash(model)}; load it with the code that wrote it, or train it again"
        )
    load_state(model, load_tensors(at / MODEL))
    model.eval()


def load_golden(folder: Path, manifest: ModelManifest) -> Golden:
    """The golden request of a version, verified.

    Raises:
        CorruptArtefact: the file is missing or changed.
    """
    at = resolve(folder)
    verify(at / GOLDEN, manifest.digests.get(GOLDEN, "none"))
    arrays = load_arrays(at / GOLDEN)
    return Golden(FeatureBatch(**{name: arrays[name] for name in FeatureBatch._fields}), arrays[_LOGITS])


def prove(folder: Path, score: Score, *, tolerance: float = 1e-4) -> None:
    """Scores the golden request again: logits must agree within `tolerance` (another machine sums in another order).

    Raises:
        CorruptArtefact: they do not; says by how much.
    """
    golden = load_golden(folder, read_manifest(folder))
    logits = score(golden.batch)
    if logits.shape != golden.logits_NK.shape:
        raise CorruptArtefact(f"{folder} answers its golden request with {logits.shape}, not {golden.logits_NK.shape}")
    gap = float(np.abs(logits - golden.logits_NK).max(initial=0.0))
    if not gap <= tolerance:
        raise CorruptArtefact(f"{folder} misses its golden request by {gap:g} (allowed {tolerance:g}); publish it again")


def architecture_hash(model: nn.Module) -> str:
    """Hash of a model's modules and parameter shapes, 16 bytes in hex."""
    lines = [f"{name} {type(module).__qualname__}" for name, module in model.named_modules()]
    lines += [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in model.named_parameters()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _write(folder: Path, manifest: ModelManifest, model: nn.Module, golden: Golden) -> None:
    tensors = {name: value.detach().contiguous().clone() for name, value in model.state_dict().items()}
    save_file(tensors, folder / MODEL)
    arrays = {name: np.ascontiguousarray(value) for name, value in golden.batch._asdict().items()}
    save_arrays({**arrays, _LOGITS: np.ascontiguousarray(golden.logits_NK)}, folder / GOLDEN)
    complete = ModelManifest()
    complete.CopyFrom(manifest)
    complete.architecture_hash = architecture_hash(model)
    for name in (MODEL, GOLDEN):
        complete.digests[name] = sha256(folder / name)
    (folder / MANIFEST).write_text(json_format.MessageToJson(complete), encoding="utf-8")


def _part(text: str) -> str:
    if text == CURRENT or not _PART.fullmatch(text):
        raise InvalidInput(f"{text!r} cannot name a model or version; use letters, digits, '-', '_' and '.'")
    return text
