"""Runs independent jobs in forked processes, which share what the parent has read instead of reading it again.

Knows processes. Does not know jobs.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")

_work: Callable[[Any], Any]
"""In a forked process: what it does with each job."""


def forked(work: Callable[[Job], Result], jobs: Sequence[Job], *, processes: int) -> Iterator[tuple[Job, Result]]:
    """Each job with its result as they are done; results are pickled, `work` and what it refers to are not.

    Processes are forked before this returns: call it while no other thread runs, before a progress bar is drawn.
    One after the other in this process where forking is unsafe: beside an accelerator, and off Linux.
    """
    if processes < 2 or sys.platform != "linux" or torch.cuda.is_available():
        return ((job, work(job)) for job in jobs)
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_adopt, initargs=(work,))
    return _results(pool, {pool.submit(_run, job): job for job in jobs})


def _results(pool: ProcessPoolExecutor, waiting: Mapping[Future[Result], Job]) -> Iterator[tuple[Job, Result]]:
    with pool:
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def _adopt(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    torch.set_num_threads(1)


def _run(job: Any) -> Any:
    return _work(job)
