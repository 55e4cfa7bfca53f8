"""Ad groups, clocks, lifetimes, settings and the embedder, each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from gem.solaris.v1.task_pb2 import SpeculationTask

from feature_store.batch import FIELDS, FeatureBatch
from feature_store.errors import CorruptArtefact, FailedPrecondition
from feature_store.layout import Layout
from feature_store.packing import ad_key, ad_shape
from feature_store.spec import Spec
from services.solaris.groups import KEEP_SECONDS, UNKNOWN_SECONDS, AdGroups
from services.solaris.lifetimes import Lifetime, Lifetimes
from services.solaris.settings import WorkerProcessSettings
from services.solaris.worker.batching import concatenate
from services.solaris.worker.clock import RequestClock, WallClock
from services.solaris.worker.embedder import FoundationEmbedder, load_embedder
from tests.services.small_models import DIM, SPEC_PATH, foundation, requests, vertical, world_spec


@pytest.fixture(scope="module")
def spec() -> Spec:
    return world_spec()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory, spec: Spec) -> FoundationEmbedder:
    return load_embedder(foundation(tmp_path_factory.mktemp("models"), spec), spec)


@dataclass
class CountedRows:
    """Rows of ads, and how often each was asked for."""

    rows: dict[str, bytes]
    asked: list[str] = field(default_factory=list)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self.asked += keys
        return [self.rows.get(key) for key in keys]


def ad_row(spec: Spec, ad: int, group: int) -> bytes:
    shape = ad_shape(Layout(spec))
    row = np.zeros((), dtype=shape.dtype)
    row["digest"] = shape.digest
    row["ids"][:2] = ad, group
    return row.tobytes()


def test_an_ads_group_is_asked_for_once_and_again_when_it_is_old(spec: Spec) -> None:
    now = [0.0]
    store = CountedRows({ad_key(1): ad_row(spec, 1, 7)})
    groups = AdGroups(store, Layout(spec), clock=lambda: now[0])
    assert groups([1, 2, 1]) == [7, None, 7]
    assert groups([1, 2]) == [7, None]
    assert store.asked == [ad_key(1), ad_key(2)]
    now[0] = UNKNOWN_SECONDS
    assert groups([1, 2]) == [7, None]
    assert store.asked[2:] == [ad_key(2)]
    now[0] = KEEP_SECONDS
    store.rows[ad_key(1)] = ad_row(spec, 1, 8)
    assert groups([1]) == [8]


def test_a_row_of_another_spec_has_no_group(spec: Spec) -> None:
    store = CountedRows({ad_key(1): ad_row(spec, 1, 7)[:-1]})
    assert AdGroups(store, Layout(spec))([1]) == [None]


def test_a_pair_is_never_there_before_its_request_ends() -> None:
    task = SpeculationTask(request_ms=1_000)
    clock = RequestClock(lag_ms=5)
    assert (clock.computed_ms(task), clock.available_ms(1_005), clock.now_ms([task])) == (
        1_005,
        1_005,
        1_005,
    )
    with pytest.raises(ValueError, match="lag_ms"):
        RequestClock(lag_ms=0)


def test_a_live_pair_is_available_when_it_is_written() -> None:
    times = iter([100, 130])
    clock = WallClock(read_ms=lambda: next(times))
    assert clock.computed_ms(SpeculationTask(request_ms=1)) == 100
    assert clock.available_ms(100) == 130


def test_lifetimes_stretch_together_and_refuse_nonsense() -> None:
    twice = Lifetimes().stretched(2.0)
    assert twice.pair.hard_ms == 2 * Lifetimes().pair.hard_ms
    assert twice.user_half_life_ms == 2 * Lifetimes().user_half_life_ms
    assert twice.row_ms == twice.user.hard_ms
    with pytest.raises(ValueError, match="stretched"):
        Lifetimes().stretched(0)
    with pytest.raises(ValueError, match="soft_ms"):
        Lifetime(soft_ms=2, hard_ms=1)


@pytest.mark.parametrize(
    ("wrong", "said"), [({"clock": "sun"}, "clock"), ({"lag_ms": 0}, "lag_ms")]
)
def test_worker_settings_say_what_is_wrong(wrong: dict[str, object], said: str) -> None:
    paths = {"spec": SPEC_PATH, "tables": Path("t"), "foundation": Path("f")}
    with pytest.raises(ValueError, match=said):
        WorkerProcessSettings(store="sqlite:///x", sequence="a:1", **paths, **wrong)  # type: ignore[arg-type]


def one_by_one(batch: FeatureBatch) -> list[FeatureBatch]:
    """The requests of a batch, each by itself."""
    found = []
    for r in range(batch.num_requests):
        axes = {
            "request": slice(r, r + 1),
            "event": slice(*batch.event_offsets[r : r + 2]),
            "candidate": slice(*batch.candidate_offsets[r : r + 2]),
            "memory": slice(*batch.memory_offsets[r : r + 2]),
        }
        columns = {name: getattr(batch, name)[axes[f.axis]] for name, f in FIELDS.items()}
        offsets = {
            f"{axis}_offsets": np.array([0, axes[axis].stop - axes[axis].start])
            for axis in ("event", "candidate", "memory")
        }
        found.append(FeatureBatch(**columns, **offsets))
    return found


def test_users_computed_together_get_what_they_get_alone(
    embedder: FoundationEmbedder, spec: Spec
) -> None:
    batch = requests(spec, [4, 1, 3])
    parts = one_by_one(batch)
    joined = concatenate(parts)
    assert all(
        (getattr(joined, name) == getattr(batch, name)).all()
        for name in ("event_offsets", "candidate_offsets")
    )
    together = embedder.embed(joined)
    assert together.shape == (8, DIM)
    np.testing.assert_allclose(
        together, np.concatenate([embedder.embed(p) for p in parts]), atol=1e-5
    )


def test_a_pair_embedding_ignores_what_solaris_and_loopfm_left(
    embedder: FoundationEmbedder, spec: Spec
) -> None:
    batch = requests(spec, [3])
    bare = batch._replace(
        pair_q=np.zeros((3, 0), np.int8), memory_offsets=np.zeros(2, np.int64),
        **{n: getattr(batch, n)[:0] for n in FIELDS if n.startswith("memory_")},
    )  # fmt: skip
    assert (embedder.embed(batch) == embedder.embed(bare)).all()


def test_an_embedder_needs_a_foundation_model_that_is_what_was_published(
    tmp_path: Path, spec: Spec
) -> None:
    with pytest.raises(FailedPrecondition, match="foundation"):
        load_embedder(vertical(tmp_path, spec, "A0"), spec)
    folder = foundation(tmp_path, spec)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CorruptArtefact, match="digest"):
        load_embedder(folder, spec)
