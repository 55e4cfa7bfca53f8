"""Every command block of every page works, and prints what the page says."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md") if path.name != "README.md")
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def free_base() -> int:
    for base in range(7600, 60000, 100):
        with socket.socket() as probe:
            if all(probe.connect_ex(("127.0.0.1", base + offset)) for offset in range(20)):
                return base
    raise OSError("no free ports on loopback")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / page).read_text())
    script = "\n".join(text for kind, text in blocks if kind == "sh")
    expected = [line for kind, text in blocks if kind == "text" for line in text.splitlines()]
    assert script, "a page without commands teaches nothing"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "BASE_PORT": str(free_base()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-mo", "pipefail", "-euc", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for line in expected:
        assert line in done.stdout + done.stderr


def test_the_index_names_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    assert [page for page in PAGES if f"({page})" not in index] == []
