"""The real logs that models are compared on: where their spec lies, how they are imported, and where they are cut.

Knows data sets. Does not know models or metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from feature_store.importing.kuairand import import_kuairand
from feature_store.importing.rows import ImportReport
from feature_store.importing.trivago import import_trivago
from feature_store.spec import Spec, load_spec
from feature_store.splits import day_ms, instant
from feature_store.tables import Tables

DATASETS = Path(__file__).resolve().parents[1] / "feature_store/datasets"
_DAY = len("2022-05-02")


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """One data set and its protocol."""

    title: str
    spec_name: str
    fill: Callable[[Path, Tables, Spec], ImportReport]
    zone: str
    """Of days and of times without one."""
    ends: tuple[str, str, str]
    """Of training, validation and test, as `end_ms` reads them."""
    objectives: tuple[str, ...]
    bar: Mapping[str, float]
    """NE of LightGBM with counters measured on these rows outside of this project."""
    lists: bool = False
    """Impressions of one user and instant were shown as a list, and can be ranked against each other."""

    def spec(self) -> Spec:
        """Its data set spec."""
        return load_spec(DATASETS / f"{self.spec_name}.yaml")

    def end_ms(self, text: str) -> int:
        """The millisecond after a part: of a day (its last one, whole) or an instant in ISO 8601 (the first that is outside).

        Raises:
            InvalidInput: it is neither.
        """
        return day_ms(text, zone=self.zone, later=1) if len(text) == _DAY else instant(text, zone=self.zone)


LOGS: Mapping[str, Log] = {
    "kuairand": Log(
        title="KuaiRand-Pure",
        spec_name="kuairand",
        fill=import_kuairand,
        zone="Asia/Shanghai",
        ends=("2022-05-02", "2022-05-04", "2022-05-06"),
        objectives=("click", "long_view", "like"),
        bar={"click": 0.8465, "long_view": 0.8518},
    ),
    "trivago": Log(
        title="trivago",
        spec_name="trivago",
        fill=import_trivago,
        zone="UTC",
        ends=("2018-11-07", "2018-11-08T08:00", "2018-11-08T17:00"),
        objectives=("click",),
        bar={"click": 0.6457},
        lists=True,
    ),
}
