from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingCollection

from feature_store.errors import InvalidInput
from model.nn.interaction import MixtureOfWukongExperts
from model.training import checkpoint
from model.training.experts import join_experts, shard_experts
from model.training.parallel import Processes
from model.training.shards import WHOLE
from model.training.tables import distinct, join_tables, shard_tables
from tests.model.training import sharded


def every(by_world: dict[int, list[tuple[object, ...]]]) -> pytest.MarkDecorator:
    """(Number of processes, number of the case) of all cases."""
    cases = [
        pytest.param(world, number, id=f"{world} processes {tuple(case)}")
        for world, own in by_world.items()
        for number, case in enumerate(own)
    ]
    return pytest.mark.parametrize(("world", "number"), cases)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the processes wrote to."""
    folder = tmp_path_factory.mktemp("sharded")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(sharded.__file__)), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def of_all_rows(parts: list[dict[str, Tensor]], name: str) -> Tensor:
    """Rows of the processes one after the other; of all else, which is alike on each, the first's."""
    if name in ("out", "x") or name.startswith("out/"):
        return torch.cat([part[name] for part in parts])
    for part in parts[1:]:
        torch.testing.assert_close(part[name], parts[0][name], rtol=0.0, atol=0.0)
    return parts[0][name]


def distance(some: dict[str, Tensor], others: dict[str, Tensor], kind: str) -> float:
    """Of all tensors of a kind together."""
    return math.hypot(*((some[name].float() - others[name].float()).norm() for name in some if name.startswith(kind)))


@every(sharded.CASES)
def test_experts_shared_out_give_what_one_process_gives_forward_and_backward(found: Path, world: int, number: int) -> None:
    """Outputs, gradients of inputs and parameters, their norm; and whole parameters, joined again after two moves.

    In bfloat16 they must be as near as one process's to float32's.
    """
    case = sharded.CASES[world][number]
    alone = sharded.passed(case, Processes())
    parts = [load_file(found / f"{world}-{number}-{rank}.safetensors") for rank in range(world)]
    assert set(parts[0]) == set(alone)
    together = {name: of_all_rows(parts, name) for name in alone}
    if case.dtype == torch.bfloat16:
        exact = sharded.passed(case._replace(dtype=torch.float32), Processes())
        for kind in ("out", "x", "gradient/", "parameter/"):
            assert 0.0 < distance(together, exact, kind) < 1.5 * distance(alone, exact, kind)
    else:
        for name, expected in alone.items():
            assert (together[name] - expected).norm() <= 1e-5 * max(1.0, expected.norm()), name


@every(sharded.LOOKUPS)
def test_tables_shared_out_give_what_one_process_gives_forward_and_backward(found: Path, world: int, number: int) -> None:
    """Vectors, gradients, their norm, tables and Adagrad's sums after two moves; and tables drawn anew, joined again.

    Where several teams hold them, all end with the same rows, which are those of one process.
    """
    case = sharded.LOOKUPS[world][number]
    alone = sharded.looked_up(case, Processes())
    parts = [load_file(found / f"tables-{world}-{number}-{rank}.safetensors") for rank in range(world)]
    assert set(parts[0]) == set(alone)
    for name, expected in alone.items():
        if not name.startswith("held/"):
            together = of_all_rows(parts, name)
            assert (together - expected).norm() <= 1e-5 * max(1.0, expected.norm()), name
    for name in (name for name in alone if name.startswith("held/")):
        whole = parts[0][name.replace("held/", "learned/")]
        for rank, part in enumerate(parts):
            assert torch.equal(part[name], whole[rank % case.size :: case.size])


def test_a_process_is_asked_once_for_a_row_however_often_it_occurs() -> None:
    rows = torch.tensor([4, 0, 4, 3, 3, 8, 1])
    asked = distinct(rows, [3, 0, 4], 2)
    assert asked.rows.tolist() == [0, 2, 4, 0, 1]
    assert asked.counts_ET.tolist() == [[2, 0, 1], [0, 0, 2]]
    owner, table = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 2, 2, 2])
    assert (asked.rows * 2 + owner)[asked.place].tolist() == rows.tolist()
    assert table[asked.place].tolist() == [0, 0, 0, 2, 2, 2, 2]
    assert distinct(rows[:0], [0, 0], 3).counts_ET.tolist() == [[0, 0]] * 3


def test_a_run_that_shares_its_model_out_is_the_run_that_does_not(found: Path) -> None:
    """Stopped and resumed at that, in steps that leave a process without rows, twice over rows with tables drawn anew.

    Each process ends with the whole model.
    """
    whole = load_file(found / "trained-1-0.safetensors")
    for rank in range(2):
        shared = load_file(found / f"trained-2-{rank}.safetensors")
        assert len(whole["losses"]) == len(shared["losses"]) + 2 == 14
        torch.testing.assert_close(shared.pop("losses"), whole["losses"][2:], rtol=1e-5, atol=0.0)
        assert set(shared) == set(whole) - {"losses"}
        assert all(torch.allclose(value, whole[name], atol=1e-4) for name, value in shared.items())


def test_a_checkpoint_of_a_model_shared_out_is_one_of_all_of_it(found: Path) -> None:
    one, shared = checkpoint.load(found / "run-1"), checkpoint.load(found / "run-2")
    assert one.step == shared.step == 14
    for ours, theirs in ((one.model, shared.model), (one.optimizer, shared.optimizer)):
        assert set(ours) == set(theirs)
        assert all(torch.allclose(value, theirs[name], atol=1e-4) for name, value in ours.items())
        assert all(value.shape == theirs[name].shape for name, value in ours.items())
    assert any(name.startswith("adam/exp_avg/") and ".experts.1." in name for name in shared.optimizer)


def test_one_process_shares_nothing_out() -> None:
    model, lookup = sharded.Two(sharded.CASES[2][0]), sharded.Lookup(sharded.LOOKUPS[2][0])
    assert shard_experts(model, Processes(), 1) is WHOLE
    assert shard_tables(lookup, Processes(), 1) is WHOLE
    join_experts(model, WHOLE)
    join_tables(lookup, WHOLE)
    assert type(model.first) is MixtureOfWukongExperts
    assert type(lookup.ids.collection) is EmbeddingCollection


@pytest.mark.parametrize(
    ("world", "size", "says"), [(3, 3, "first has 2 experts"), (3, 2, "3 processes make no teams of 2"), (2, 0, "first has 2 experts")]
)
def test_experts_that_cannot_be_shared_out_evenly_are_refused(world: int, size: int, says: str) -> None:
    model = sharded.Two(sharded.CASES[2][0])
    with pytest.raises(InvalidInput, match=says):
        shard_experts(model, Processes(world_size=world), size)
    assert type(model.first) is MixtureOfWukongExperts
    with pytest.raises(InvalidInput, match="has no whole mixture of experts"):
        shard_experts(nn.Linear(1, 1), Processes(world_size=2), 2)


@pytest.mark.parametrize(
    ("world", "size", "says"), [(8, 8, "table few has 7 rows for 8 processes"), (3, 2, "3 processes make no teams of 2")]
)
def test_tables_that_cannot_be_shared_out_are_refused(world: int, size: int, says: str) -> None:
    model = sharded.Lookup(sharded.LOOKUPS[2][0])
    with pytest.raises(InvalidInput, match=says):
        shard_tables(model, Processes(world_size=world), size)
    assert type(model.ids.collection) is EmbeddingCollection
    with pytest.raises(InvalidInput, match="has no whole tables"):
        shard_tables(nn.Linear(1, 1), Processes(world_size=2), 2)
