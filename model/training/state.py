"""Says which rows a training step takes: in time order, shuffled only within a bounded stretch; and who works on which.

Knows numbers of rows, and how much work each is. Does not know rows.

The rows of a step follow from (seed, step) alone: a run that resumes at step n takes what it would have taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heapreplace

import numpy as np
import numpy.typing as npt

from feature_store.errors import InvalidInput

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOrder:
    """Steps over `num_rows` rows that lie in time order."""

    num_rows: int
    batch_rows: int
    """Rows of a step over all processes; the last step of an epoch may have fewer."""
    window_rows: int
    """Rows that are shuffled among themselves; a row never moves farther. 1 keeps time order."""
    seed: int = 0
    epochs: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_rows", "window_rows", "epochs"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def epoch_steps(self) -> int:
        """Steps of one pass."""
        return -(-self.num_rows // self.batch_rows)

    @property
    def num_steps(self) -> int:
        """Steps of all passes."""
        return self.epoch_steps * self.epochs

    def epoch(self, step: int) -> int:
        """Pass that a step belongs to, from 0."""
        return step // max(1, self.epoch_steps)

    def rows(self, step: int) -> Rows:
        """Rows of a step.

        Raises:
            InvalidInput: there is no such step.
        """
        if not 0 <= step < self.num_steps:
            raise InvalidInput(f"step {step} does not exist; the run has {self.num_steps}")
        start = step % self.epoch_steps * self.batch_rows
        stop = min(start + self.batch_rows, self.num_rows)
        windows = range(start // self.window_rows, (stop - 1) // self.window_rows + 1)
        order = np.concatenate([self._window(self.epoch(step), window) for window in windows])
        first = windows[0] * self.window_rows
        return order[start - first : stop - first]

    def _window(self, epoch: int, window: int) -> Rows:
        start = window * self.window_rows
        size = min(self.window_rows, self.num_rows - start)
        return start + np.random.default_rng([self.seed, epoch, window]).permutation(size)


def dealt(work: Rows, hands: int) -> Rows:
    """The hand [n] that each row goes to: as many rows to each, to within one, and work that adds up nearly alike.

    A step lasts as long as the process with most to do. From the longest row on, the hand that has least so far takes one
    (Graham 1969), unless it has its number. Meta's base batch shuffling ("GEM Training", 2026) has the same aim: it sorts the
    sub-batches of 128 rows that readers emit and puts the heaviest beside the lightest; here any process can read any row,
    so that rows are dealt one by one.
    """
    count = [(len(work) - hand + hands - 1) // hands for hand in range(hands)]
    least = [(0, hand) for hand in range(hands) if count[hand]]
    hand_of = np.zeros(len(work), dtype=np.int64)
    for row in np.argsort(-work, kind="stable"):
        load, hand = least[0]
        hand_of[row] = hand
        count[hand] -= 1
        if count[hand]:
            heapreplace(least, (load + int(work[row]), hand))
        else:
            heappop(least)
    return hand_of
