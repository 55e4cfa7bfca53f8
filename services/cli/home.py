"""The folder in which one machine keeps a platform: spec, tables, store, models, traces.

Knows paths. Does not know what the files hold.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from feature_store.errors import FailedPrecondition, NotFound

if TYPE_CHECKING:  # Arrow and Delta Lake take half a second to import: help and traces do without them
    from feature_store.spec import Spec
    from feature_store.tables import Tables

_MADE = ("spec.yaml", "tables", "models", "online.sqlite*", "routes.yaml", "traces", "logs", "report.*")
"""What a platform and its demo leave in a home."""
DATASETS = Path(__file__).resolve().parents[2] / "feature_store" / "datasets"


@dataclass(frozen=True, slots=True)
class Home:
    """Paths of a platform that lives in one folder."""

    root: Path

    @property
    def spec_path(self) -> Path:
        """The dataset spec."""
        return self.root / "spec.yaml"

    @property
    def tables_root(self) -> Path:
        """Delta Lake tables."""
        return self.root / "tables"

    @property
    def store_url(self) -> str:
        """The online store: one SQLite file."""
        return f"sqlite:///{self.root / 'online.sqlite'}"

    @property
    def models_root(self) -> Path:
        """Artefacts, models/<name>/<version>/."""
        return self.root / "models"

    @property
    def routes_path(self) -> Path:
        """The route table."""
        return self.root / "routes.yaml"

    @property
    def trace_path(self) -> Path:
        """Folder of OTLP/JSON lines, one file a service."""
        return self.root / "traces"

    def start_over(self) -> None:
        """Makes the folder a demo's, and removes what an earlier demo left in it.

        Raises:
            FailedPrecondition: it holds a platform that no demo made; nothing was removed.
        """
        mark = self.root / "made-by-demo"
        if self.spec_path.exists() and not mark.exists():
            raise FailedPrecondition(
                f"{self.root} holds a platform that no demo made, and a demo would write over it; give another --home"
            )
        self.root.mkdir(parents=True, exist_ok=True)
        mark.touch()
        for made in _MADE:
            for path in self.root.glob(made):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def adopt(self, spec_path: Path) -> None:
        """Makes the folder and copies the spec into it.

        Raises:
            InvalidInput: it is not a spec; the home keeps the one it has.
        """
        from feature_store.spec import load_spec

        load_spec(spec_path)
        self.root.mkdir(parents=True, exist_ok=True)
        if spec_path.resolve() != self.spec_path.resolve():
            shutil.copyfile(spec_path, self.spec_path)

    def model(self, name: str) -> Path:
        """Folder of a published model.

        Raises:
            NotFound: there is none of that name; says which there are.
        """
        folder = self.models_root / name
        if not folder.is_dir():
            known = sorted(path.name for path in self.models_root.glob("*")) if self.models_root.is_dir() else []
            raise NotFound(
                f"{self.models_root} holds no model {name!r}, only {known}; run `gemctl train` with --home {self.root} first"
            )
        return folder

    def spec(self) -> Spec:
        """The spec of this home.

        Raises:
            NotFound: the folder has none yet.
        """
        if not self.spec_path.exists():
            raise NotFound(
                f"{self.spec_path} does not exist; run `gemctl import` or `gemctl world` with --home {self.root} first"
            )
        from feature_store.spec import load_spec

        return load_spec(self.spec_path)

    def tables(self) -> Tables:
        """The log tables of this home."""
        from feature_store.tables import Tables

        return Tables(self.tables_root)
