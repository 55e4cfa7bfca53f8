"""What the processes do in the tests of experts and tables that are shared out: `python sharded.py FOLDER` writes what they found.

They are forked, so that all import once.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from feature_store.replay import Replay
from feature_store.spec import load_spec
from feature_store.tables import Tables
from feature_store.world import DAY_MS, START_MS, WorldConfig, generate
from model.gem.config import GemConfig
from model.nn.embedding import IdEmbeddings
from model.nn.interaction import MixtureOfWukongExperts
from model.nn.shape import IdColumn
from model.training.experts import join_experts, shard_experts
from model.training.fitting import FitConfig, Progress
from model.training.optimizers import Optimizer, OptimizerConfig
from model.training.parallel import Processes, joined
from model.training.rows import ReplayRows
from model.training.shards import WHOLE
from model.training.tables import join_tables, shard_tables
from model.training.trainer import RunConfig, Teams, train

SPEC = Path(__file__).resolve().parents[3] / "feature_store" / "datasets" / "world.yaml"
TOKENS, WIDTH = 5, 6
REQUESTS = 55
"""Of a run in steps of nine: the last step leaves one process without rows."""


class Case(NamedTuple):
    """A mixture, its rows in each process, and the size of a team."""

    combine: str
    experts: int
    rows: tuple[int, ...]
    size: int
    dtype: torch.dtype = torch.float32
    alike: bool = False


CASES = {
    2: [
        *(Case(*each, 2) for each in product(("sum", "concat"), (2, 4), ((3, 5), (0, 4)))),
        *(Case(combine, 2, (3, 5), 2, torch.bfloat16) for combine in ("sum", "concat")),
        Case("sum", 2, (3, 5), 2, alike=True),
        Case("sum", 2, (0, 0), 2),
    ],
    4: [Case("sum", 4, (3, 0, 2, 4), 2), Case("concat", 4, (3, 0, 2, 4), 4)],
}
"""By number of processes."""


class Two(nn.Module):
    """Two mixtures, one after the other."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(5)
        shape = {"experts": case.experts, "factors": 4, "linear": 4, "rank": 2, "hidden": 8, "combine": case.combine}
        self.first = MixtureOfWukongExperts(TOKENS, WIDTH, **shape)
        self.second = MixtureOfWukongExperts(8, WIDTH, **shape)
        for mixture in (self.first, self.second) if case.alike else ():
            for expert in mixture.experts:
                expert.load_state_dict(mixture.experts[0].state_dict())
        self.to(case.dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def passed(case: Case, processes: Processes) -> dict[str, Tensor]:
    """Outputs and input gradients of a process's rows; gradients over all of them; parameters after two moves."""
    model = Two(case)
    shard = shard_experts(model, processes, case.size) if processes.world_size > 1 else WHOLE
    torch.manual_seed(7)
    x, weights = (torch.randn(sum(case.rows), n, WIDTH).to(case.dtype) for n in (TOKENS, 8))
    if processes.world_size > 1:
        x, weights = (tensor.split(list(case.rows))[processes.rank] for tensor in (x, weights))
    x.requires_grad_()
    found: dict[str, Tensor] = {}
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        out = model(x)
        (out * weights).sum().backward()
        shard.sum_gradients(processes, dict(model.named_parameters()))
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = shard.norm({name: gradient.norm() for name, gradient in gradients.items()})
        found |= {"out": out.detach(), "x": x.grad.clone(), "norm": torch.tensor(norm)}  # type: ignore[union-attr]
        found |= {f"gradient/{name}": g for name, g in shard.gathered(gradients).items()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 1e-2 * gradients[name]
    join_experts(model, shard)
    return found | {f"parameter/{name}": p.detach() for name, p in model.named_parameters()}


class LookupCase(NamedTuple):
    """Requests of each process, and the size of a team."""

    requests: tuple[int, ...]
    size: int
    rows: tuple[int, int] = (7, 40)
    """Of either table."""


LOOKUPS = {
    2: [LookupCase((3, 5), 2), LookupCase((0, 4), 2), LookupCase((0, 0), 2)],
    4: [LookupCase((3, 0, 2, 4), 2), LookupCase((3, 0, 2, 4), 4), LookupCase((1, 6, 1, 1), 4, rows=(4, 5))],
}
"""By number of processes; a team of all has no replica, teams of two have one each."""


class Lookup(nn.Module):
    """Three columns over two tables: two of one key a request, one of five."""

    def __init__(self, case: LookupCase) -> None:
        super().__init__()
        torch.manual_seed(5)
        few, many = (IdColumn(name=name, table=name, rows=rows) for name, rows in zip(("few", "many"), case.rows, strict=True))
        self.columns = [many, few, dataclasses.replace(many, name="again")]
        self.ids = IdEmbeddings([few, many], 3, initial_std=1.0)

    def forward(self, keys: list[Tensor]) -> Tensor:
        return torch.cat(self.ids(self.columns, keys))


def looked_up(case: LookupCase, processes: Processes) -> dict[str, Tensor]:
    """Vectors of a process's keys; gradients, tables and sums of squares after two moves; tables drawn anew."""
    model = Lookup(case)
    shard = shard_tables(model, processes, case.size) if processes.world_size > 1 else WHOLE
    torch.manual_seed(7)
    keys = [torch.randint(0, 30, (sum(case.requests), n)) for n in (1, 1, 5)]
    weights = [torch.randn(sum(case.requests), 3 * n) for n in (1, 1, 5)]
    if processes.world_size > 1:
        keys, weights = ([x.split(list(case.requests))[processes.rank] for x in each] for each in (keys, weights))
    optimizer = Optimizer(model, OptimizerConfig(warmup_steps=0), shard=shard)
    found: dict[str, Tensor] = {}
    for step in range(2):
        optimizer.clear()
        out = model([x.flatten() for x in keys])
        (out * torch.cat([weight.view(-1, 3) for weight in weights])).sum().backward()
        shard.sum_gradients(processes, optimizer.parameters)
        gradients = {name: p.grad.clone() for name, p in optimizer.parameters.items()}  # type: ignore[union-attr]
        norm, moved = optimizer.step(step, 2)
        assert moved
        found |= {f"out/{n}": part for n, part in enumerate(out.detach().split([x.numel() for x in keys]))}
        found |= {f"gradient/{name}": g for name, g in shard.gathered(gradients).items()} | {"norm": torch.tensor(norm)}
    found |= {key: value.clone() for key, value in shard.gathered(optimizer.state()).items()}
    learned = {name: table.detach().clone() for name, table in model.named_parameters()}
    found |= {f"held/{name}": table for name, table in learned.items()}
    torch.manual_seed(11)
    optimizer.start_tables_over(model)
    join_tables(model, shard)
    found |= {f"drawn/{name}": p.detach() for name, p in model.named_parameters()}
    return found | {f"learned/{name}": table for name, table in shard.gathered(learned).items()}


def pass_cases(processes: Processes, folder: Path) -> None:
    for number, lookup in enumerate(LOOKUPS[processes.world_size]):
        found = {name: tensor.contiguous().clone() for name, tensor in looked_up(lookup, processes).items()}
        save_file(found, folder / f"tables-{processes.world_size}-{number}-{processes.rank}.safetensors")
    for number, case in enumerate(CASES[processes.world_size]):
        found = {name: tensor.contiguous() for name, tensor in passed(case, processes).items()}
        save_file(found, folder / f"{processes.world_size}-{number}-{processes.rank}.safetensors")


def two_experts() -> GemConfig:
    """The preset of the runs."""
    return GemConfig(experts=2)


class Stopped(Exception):
    """In the middle of a run."""


def train_whole(processes: Processes, folder: Path, replay: Replay, *, team: int, stop: int = 0) -> None:
    """Trains the foundation model; it leaves its checkpoints, and what it has become."""
    first_day = ReplayRows(replay, START_MS, START_MS + DAY_MS).examples.request_ms
    run = RunConfig(
        preset="sharded:two_experts", train_from_ms=START_MS, train_to_ms=int(first_day[REQUESTS]),
        valid_to_ms=START_MS + 2 * DAY_MS, optimizer=OptimizerConfig(warmup_steps=2),
        fit=FitConfig(batch_requests=9, window_requests=32, checkpoint_steps=2, epochs=2),
    )  # fmt: skip

    def end_at_stop(progress: Progress) -> None:
        if progress.step == stop:
            raise Stopped

    with suppress(Stopped):
        trained = train(
            run, replay, processes=processes, teams=Teams(experts=team, tables=team),
            checkpoints=folder / f"run-{team}", on_progress=end_at_stop,
        )  # fmt: skip
        state = {name: tensor.clone() for name, tensor in trained.teacher.state_dict().items()}
        state["losses"] = torch.tensor(trained.log.losses)
        save_file(state, folder / f"trained-{team}-{processes.rank}.safetensors")


def fork(world: int, do: Callable[[Processes], None]) -> None:
    """Lets so many processes do it together."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    def start(rank: int) -> None:
        processes = Processes(rank=rank, world_size=world)
        with joined(processes, address, timeout_seconds=60.0):
            do(processes)

    context = multiprocessing.get_context("fork")
    running = [context.Process(target=start, args=(rank,)) for rank in range(world)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    if any(process.exitcode for process in running):
        raise SystemExit(f"exit codes of {world} processes: {[process.exitcode for process in running]}")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for world in CASES:
        fork(world, lambda processes: pass_cases(processes, folder))
    tables = Tables(folder / "tables")
    generate(WorldConfig(users=20, ads=60, days=3, requests_per_user=6.0), tables)
    replay = Replay(load_spec(SPEC), tables)
    rows = ReplayRows(replay, START_MS, START_MS + DAY_MS)
    rows.batch(np.arange(len(rows)))  # loads all that is lazy before processes part
    fork(2, lambda processes: train_whole(processes, folder, replay, team=1))
    fork(2, lambda processes: train_whole(processes, folder, replay, team=2, stop=3))
    fork(2, lambda processes: train_whole(processes, folder, replay, team=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
