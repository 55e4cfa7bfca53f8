"""A real tower from a real artefact: proven before it serves, and each candidate scored by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from gem.schema.v1 import dataset_spec_pb2
from safetensors.numpy import load_file, save_file

from feature_store.batch import DEFAULT_LEVEL, FIELDS, FeatureBatch
from feature_store.errors import CorruptArtefact, FailedPrecondition, NotFound
from feature_store.spec import Spec, parse_yaml
from model.training.checkpoint import sha256
from services.vertical.loading import Pins, TowerScorer, load_scorer
from services.vertical.settings import VerticalSettings
from tests.services.small_models import (
    LOOPFM_SPACE,
    SOLARIS_SPACE,
    SPEC_PATH,
    foundation,
    requests,
    vertical,
    world_spec,
)


@pytest.fixture(scope="module")
def spec() -> Spec:
    return world_spec()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, spec: Spec) -> Path:
    return vertical(tmp_path_factory.mktemp("models"), spec, "A3")


@pytest.fixture(scope="module")
def scorer(published: Path, spec: Spec) -> TowerScorer:
    return load_scorer(published, spec, Pins(), max_candidates=10_000)


@pytest.fixture
def copied(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "1"))


def of_candidates(batch: FeatureBatch, rows: list[int]) -> FeatureBatch:
    """The same request with only these candidates, in this order."""
    chosen = {
        name: getattr(batch, name)[rows] for name, f in FIELDS.items() if f.axis == "candidate"
    }
    return batch._replace(**chosen, candidate_offsets=np.array([0, len(rows)]))


@pytest.mark.parametrize("n", [0, 1, 200, 10_000])
def test_n_candidates_get_n_finite_probabilities(scorer: TowerScorer, spec: Spec, n: int) -> None:
    scores = scorer.score(requests(spec, [n]))
    assert scores.probabilities_NK.shape == (n, 3)
    assert scores.objectives == ("click", "conversion", "purchase")
    assert ((scores.probabilities_NK > 0) & (scores.probabilities_NK < 1)).all()
    assert not scores.fallback_N.any()


def test_a_candidates_score_depends_on_no_other_candidate(scorer: TowerScorer, spec: Spec) -> None:
    batch = requests(spec, [50])
    together = scorer.score(batch).probabilities_NK
    order = np.random.default_rng(0).permutation(50).tolist()
    shuffled = scorer.score(of_candidates(batch, order)).probabilities_NK
    np.testing.assert_allclose(shuffled, together[order], atol=1e-6)
    for row in (0, 17, 49):
        alone = scorer.score(of_candidates(batch, [row])).probabilities_NK
        np.testing.assert_allclose(alone[0], together[row], atol=1e-6)


def test_a_poisoned_candidate_gets_the_base_rate_and_leaves_the_others_as_they_were(
    scorer: TowerScorer, spec: Spec
) -> None:
    batch = requests(spec, [5])
    scale = batch.pair_scale.copy()
    scale[2] = np.nan
    level = np.zeros_like(batch.pair_level)
    clean, poisoned = (
        scorer.score(batch._replace(pair_scale=s, pair_level=level))
        for s in (batch.pair_scale, scale)
    )
    assert poisoned.fallback_N.tolist() == [False, False, True, False, False]
    assert ((poisoned.probabilities_NK[2] > 0) & (poisoned.probabilities_NK[2] < 1)).all()
    np.testing.assert_allclose(
        poisoned.probabilities_NK[[0, 1, 3, 4]], clean.probabilities_NK[[0, 1, 3, 4]], atol=1e-6
    )


def test_the_contract_is_that_of_the_artefact(scorer: TowerScorer, spec: Spec) -> None:
    contract = scorer.contract
    assert contract.objectives == spec.objectives
    assert (contract.widths["ad_ids"], contract.widths["memory_q"], contract.widths["pair_q"]) == (
        5,
        32,
        64,
    )
    assert contract.unread == frozenset()
    assert contract.stamps == {
        "spec_hash": spec.hash.hex(),
        "loopfm_space_id": LOOPFM_SPACE.hex(),
        "solaris_space_id": SOLARIS_SPACE.hex(),
    }
    assert contract.ranges["pair_level"] == (0, DEFAULT_LEVEL)


def test_a_model_without_channels_reads_no_tensor_of_theirs(tmp_path: Path, spec: Spec) -> None:
    bare = load_scorer(vertical(tmp_path, spec, "A0"), spec, Pins(), max_candidates=10)
    assert bare.contract.unread == {n for n in FIELDS if n.startswith(("pair_", "memory_"))}
    assert set(bare.contract.stamps) == {"spec_hash"}


def test_a_pointer_serves_the_current_version(published: Path, spec: Spec) -> None:
    assert load_scorer(published.parent, spec, Pins(), max_candidates=10).version == "1"


def test_a_model_of_another_spec_is_refused(published: Path) -> None:
    text = SPEC_PATH.read_text().replace("rows: 64,", "rows: 65,")
    other = Spec(parse_yaml(text, dataset_spec_pb2.DatasetSpec))
    with pytest.raises(FailedPrecondition, match="spec"):
        load_scorer(published, other, Pins(), max_candidates=10)


@pytest.mark.parametrize("pin", ["loopfm_space", "solaris_space"])
def test_a_model_of_another_space_is_refused(published: Path, spec: Spec, pin: str) -> None:
    with pytest.raises(FailedPrecondition, match="space"):
        load_scorer(published, spec, Pins(**{pin: b"elsewhere"[:8]}), max_candidates=10)


def test_a_foundation_model_is_no_vertical(tmp_path: Path, spec: Spec) -> None:
    with pytest.raises(FailedPrecondition, match="vertical"):
        load_scorer(foundation(tmp_path, spec), spec, Pins(), max_candidates=10)


def test_a_folder_without_an_artefact_is_not_found(tmp_path: Path, spec: Spec) -> None:
    with pytest.raises(NotFound):
        load_scorer(tmp_path, spec, Pins(), max_candidates=10)


def test_a_flipped_byte_of_the_weights_is_found(copied: Path, spec: Spec) -> None:
    weights = copied / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CorruptArtefact, match="digest"):
        load_scorer(copied, spec, Pins(), max_candidates=10)


def test_weights_that_miss_the_golden_request_are_refused_even_with_their_digest(
    copied: Path, spec: Spec
) -> None:
    weights = copied / "model.safetensors"
    arrays = load_file(weights)
    changed = next(name for name in arrays if name.startswith("serving.") and name.endswith("bias"))
    arrays[changed] = arrays[changed] + 0.5
    save_file(arrays, weights)
    manifest = copied / "manifest.json"
    fields = json.loads(manifest.read_text())
    fields["digests"]["model.safetensors"] = sha256(weights)
    manifest.write_text(json.dumps(fields))
    with pytest.raises(CorruptArtefact, match="golden"):
        load_scorer(copied, spec, Pins(), max_candidates=10)


@pytest.mark.parametrize(
    ("models", "said"),
    [((), "no model"), (("nowhere",), "name=folder"), (("a=x", "a=y"), "twice")],
)
def test_a_list_of_models_is_checked_before_anything_is_loaded(
    models: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        VerticalSettings(models=models, spec=SPEC_PATH)
