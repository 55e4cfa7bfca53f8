"""Says which part of a model is at work, from outside: seconds and bytes of every part, forward and backward.

Knows modules, autograd's nodes and a clock. Does not know what the parts mean.

Time belongs to the innermost named module that runs. Backward has no modules, but autograd numbers the nodes of its graph
in the order in which forward made them, so that a node belongs to the part that was at work when it was made; a gradient
that is added to a parameter belongs to the node before it. Nothing of the model's own code is touched.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Phase = Literal["forward", "backward"]
aten = torch.ops.aten
_ROW_READERS = {aten.embedding, aten.index_select, aten.gather, aten.index}
"""Of their first argument they read what they return."""
_ROW_WRITERS = {aten.index_copy, aten.index_copy_, aten.index_put, aten.index_put_, aten.index_add, aten.index_add_}
"""Of their first argument they touch as much as the others hold."""
_OVERWRITERS = {aten.copy_, aten.fill_, aten.zero_}
"""They do not read what they write over."""
_IDLE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""They only take memory."""


class At(NamedTuple):
    """Where time goes."""

    part: str
    phase: Phase


class Watch:
    """Charges time to parts; does nothing until it is started."""

    def __init__(self, *, synchronize: Callable[[], None] = lambda: None) -> None:
        """`synchronize` waits for a device that works ahead of its host."""
        self.seconds: defaultdict[At, float] = defaultdict(float)
        self.at: At | None = None
        self._synchronize, self._since = synchronize, 0.0
        self._enclosing: list[At] = []
        self._firsts: list[int] = []
        self._makers: list[str] = []

    @contextmanager
    def started(self, part: str) -> Iterator[None]:
        """Charges what the block does, at first to `part`."""
        self._firsts.clear()
        self._makers.clear()
        self._begin(part)
        try:
            yield
        finally:
            self._charge(None)
            self._enclosing.clear()

    def switch(self, part: str, phase: Phase = "forward") -> None:
        """From here on `part` is at work."""
        if self.at is None:
            return
        self._charge(At(part, phase))
        self._made_by(part)

    def enter(self, part: str) -> None:
        """`part` is at work until `leave`."""
        if self.at is not None:
            self._enclosing.append(self.at)
            self.switch(part)

    def leave(self) -> None:
        """The part that was at work before `enter` is so again."""
        if self._enclosing:
            self.switch(*self._enclosing.pop())

    def follow(self, losses: Iterable[Tensor], then: str) -> None:
        """Lets the nodes of a graph name their parts when backward reaches them; after that `then` is at work."""
        if self.at is None:
            return
        self._charge(None)  # until `then` begins, nothing of the model's is done
        for node in _nodes(losses):
            part = self._maker(_number(node))
            if part is not None:
                node.register_prehook(self._telling(part))
        self._begin(then)

    def _telling(self, part: str) -> Callable[[tuple[Tensor, ...]], None]:
        return lambda gradients: self._charge(At(part, "backward"))

    def _begin(self, part: str) -> None:
        self.at, self._since = At(part, "forward"), time.perf_counter()
        self._made_by(part)

    def _charge(self, at: At | None) -> None:
        if self.at is None:
            return
        self._synchronize()
        now = time.perf_counter()
        self.seconds[self.at] += now - self._since
        self.at, self._since = at, now

    def _made_by(self, part: str) -> None:
        self._firsts.append(torch._C._autograd._get_sequence_nr())
        self._makers.append(part)

    def _maker(self, number: int) -> str | None:
        index = bisect_right(self._firsts, number) - 1
        return self._makers[index] if index >= 0 and number < 2**63 else None


@contextmanager
def watched(watch: Watch, parts: Mapping[str, Sequence[nn.Module]]) -> Iterator[None]:
    """Lets the modules of every part tell a watch when they run, until the block ends."""
    handles = []
    for part, modules in parts.items():
        for module in modules:
            handles.append(module.register_forward_pre_hook(_entering(watch, part)))
            handles.append(module.register_forward_hook(lambda module, given, made: watch.leave()))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _entering(watch: Watch, part: str) -> Callable[[nn.Module, Any], None]:
    return lambda module, given: watch.enter(part)


def _number(node: Node) -> int:
    """Nodes are numbered in the order in which they were made; those that add to a parameter have the highest number."""
    number: int = node._sequence_nr()
    return number


def _nodes(losses: Iterable[Tensor]) -> Iterator[Node]:
    """Every node from which a gradient can come, once."""
    waiting = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen: set[Node] = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)


class Traffic(TorchDispatchMode):
    """Counts what every operation must read and write, by part.

    Each tensor counts once an operation, as often as it is used by one: what runs unfused moves this much between memory
    (or a cache) and the cores. Views move nothing, a look-up reads the rows that it returns, a broadcast what it stores.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self.bytes: Counter[At] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and counts it; one that is made of others is counted as these."""
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        out = func(*args, **kwargs)
        if self._watch.at is not None:
            self.bytes[self._watch.at] += moved_bytes(func, args, kwargs, out)
        return out


def moved_bytes(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that an operation reads and writes."""
    kind = func._overloadpacket
    if func.is_view or kind in _IDLE:
        return 0
    given = _tensors((args, kwargs))
    made = [tensor for tensor in _tensors(out) if not any(tensor is each for each in given)]
    written = [tensor for value in _changed(func, args, kwargs) for tensor in _tensors(value)]
    if kind in _ROW_WRITERS:
        return 2 * sum(map(_size, given[1:])) + 2 * sum(map(_size, made))
    if kind in _ROW_READERS:
        return sum(map(_size, given[1:])) + 2 * sum(map(_size, made))
    read = given[1:] if kind in _OVERWRITERS else given
    return sum(map(_size, [*read, *made, *written]))


def _changed(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Arguments that an operation writes to."""
    changed = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return changed


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor's own elements: what is broadcast counts once."""
    if tensor.layout != torch.strided or not tensor.numel():
        return 0
    return tensor.itemsize * math.prod(size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
