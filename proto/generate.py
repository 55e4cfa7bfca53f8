"""Generates Python from the .proto files into proto/gen.

    python proto/generate.py [OUT]

Knows protoc's flags. Does not know what the messages mean.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Writes messages, stubs and their types for every .proto under proto/gem to `out`.

    Raises:
        RuntimeError: protoc refused a file; its message is on stderr.
    """
    out.mkdir(parents=True, exist_ok=True)
    sources = sorted(str(path.relative_to(PROTO)) for path in (PROTO / "gem").rglob("*.proto"))
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    include = str(files("grpc_tools") / "_proto")
    arguments = ["protoc", f"-I{PROTO}", f"-I{include}", *outputs, f"--mypy_grpc_out=quiet:{out}", *sources]
    if protoc.main(arguments) != 0:
        raise RuntimeError("protoc failed; see its message above")
    (out / "gem" / "py.typed").touch()


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTO / "gen")
