"""Generated code is what the .proto files say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [sys.executable, ROOT / "proto" / "generate.py", tmp_path], check=True, env={**os.environ, "PATH": path}
    )
    made = {file.relative_to(tmp_path): file.read_bytes() for file in tmp_path.rglob("*.py*")}
    kept = {
        file.relative_to(ROOT / "proto/gen"): file.read_bytes()
        for file in (ROOT / "proto/gen").rglob("*.py*")
        if "__pycache__" not in file.parts
    }
    assert set(made) == set(kept)
    assert [str(name) for name in made if made[name] != kept[name]] == []


def test_the_contract_lints_clean() -> None:
    buf = Path(sys.executable).parent / "buf"
    done = subprocess.run([buf, "lint"], cwd=ROOT / "proto", capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""
