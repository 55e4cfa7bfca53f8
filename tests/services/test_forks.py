"""Jobs in forked processes: results come back, and so do errors."""

from __future__ import annotations

import os

import pytest
import torch

from feature_store.errors import InvalidInput
from services.demo.forks import forked


@pytest.mark.parametrize("processes", [1, 3])
def test_every_job_comes_back_with_its_result(processes: int) -> None:
    weights = torch.arange(4.0, requires_grad=True)

    def work(job: int) -> float:
        (loss := (weights * job).sum()).backward()  # type: ignore[no-untyped-call]  # torch's own
        return loss.item()

    assert dict(forked(work, range(7), processes=processes)) == {job: 6.0 * job for job in range(7)}


def test_jobs_run_beside_each_other_and_share_what_was_read() -> None:
    read = object()
    seen = dict(forked(lambda job: (os.getpid(), id(read)), [1, 2], processes=2))
    assert os.getpid() not in {pid for pid, _ in seen.values()}
    assert {name for _, name in seen.values()} == {id(read)}


def test_a_job_that_fails_says_why() -> None:
    def work(job: int) -> int:
        raise InvalidInput(f"job {job} has no rows")

    with pytest.raises(InvalidInput, match="job 3 has no rows"):
        list(forked(work, [3], processes=2))
