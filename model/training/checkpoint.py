"""Keeps a run on disk so that it can go on exactly where it was, on any number of processes.

Knows tensors by name, files and digests. Does not know models or optimizers.

A checkpoint is a folder `step-N/` of safetensors and one JSON; nothing is ever unpickled. The pointer `latest` moves after
the folder is complete: a kill at any moment leaves the checkpoint before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from feature_store.errors import CorruptArtefact, NotFound

_STATE, _LATEST = "state.json", "latest"


class Checkpoint(NamedTuple):
    """A run after `step` steps."""

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    facts: Mapping[str, str]
    """What a resumed run must agree with: configuration, spec hash."""


def save(folder: Path, checkpoint: Checkpoint, *, keep: int = 2) -> Path:
    """Writes a checkpoint below `folder`, moves the pointer, drops all but the newest `keep`."""
    final = folder / f"step-{checkpoint.step:010d}"
    partial = folder / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {"model.safetensors": checkpoint.model, "optimizer.safetensors": checkpoint.optimizer}
    for name, named in tensors.items():
        save_file({key: value.detach().contiguous().clone() for key, value in named.items()}, partial / name)
    digests = {name: sha256(partial / name) for name in tensors}
    state = {"step": checkpoint.step, "facts": dict(checkpoint.facts), "digests": digests}
    (partial / _STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    write_atomically(folder / _LATEST, final.name)
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load(folder: Path) -> Checkpoint:
    """The newest complete checkpoint below `folder`.

    Raises:
        NotFound: there is none.
        CorruptArtefact: a file is not what was written; names it.
    """
    pointer = folder / _LATEST
    if not pointer.exists():
        raise NotFound(f"{folder} holds no checkpoint; start the run anew")
    at = folder / pointer.read_text(encoding="utf-8").strip()
    state = json.loads((at / _STATE).read_text(encoding="utf-8"))
    for name, digest in state["digests"].items():
        verify(at / name, digest)
    return Checkpoint(
        step=int(state["step"]),
        model=load_tensors(at / "model.safetensors"),
        optimizer=load_tensors(at / "optimizer.safetensors"),
        facts=state["facts"],
    )


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file.

    Raises:
        CorruptArtefact: it is not one.
    """
    try:
        return dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise CorruptArtefact(f"{path} is not readable as safetensors: {error}; publish it again", file=path.name) from error


def load_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Fills a model; buffers take the length that was written (vocabularies grow when they are fitted).

    Raises:
        CorruptArtefact: names or shapes of parameters are not the model's.
    """
    for name, buffer in model.named_buffers():
        if name in tensors and tensors[name].shape != buffer.shape:
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, torch.empty_like(tensors[name]))
    try:
        model.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise CorruptArtefact(f"tensors do not fit the model: {error}; load them with the code that wrote them") from error


def sha256(path: Path) -> str:
    """Digest of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, digest: str) -> None:
    """Refuses a file that is not what was written.

    Raises:
        CorruptArtefact: it is missing or has another digest; names file and digests.
    """
    if not path.is_file():
        raise CorruptArtefact(f"{path} is missing; it should have digest {digest}; publish it again", file=path.name)
    found = sha256(path)
    if found != digest:
        raise CorruptArtefact(
            f"{path} has digest {found}, it was written with {digest}; publish it again", file=path.name, digest=found
        )


def write_atomically(path: Path, text: str) -> None:
    """Replaces a small file: a reader sees the old text or the new, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
