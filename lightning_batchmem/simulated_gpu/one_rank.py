"""One process as the first rank of many, where the other ranks do not exist.

``nccl_stub.cpp`` has the functions of NCCL, on which torch's own process group runs, and the values
that ranks with equal data would exchange. Torch's fake process group takes the place of gloo, and a
store in this process that of the one over the network.

This file is executed before Lightning is imported, so it imports torch and the standard library
only, and neighbours that were loaded before.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed
from torch.utils._pytree import tree_leaves

from lightning_batchmem.simulated_gpu.known import (
    host_view,
    is_known,
    is_small,
    is_writable,
    make_known,
    mark_unknown,
)

MOST_BYTES = 2**20
"""Values of larger tensors are unknown after an exchange, as in ``nccl_stub.cpp``."""

_TO_ONE_RANK = frozenset({"send", "recv_", "recv_any_source_", "isend", "irecv", "batch_p2p_ops"})

_ALL_TO_ALL = frozenset({"alltoall_", "alltoall_base_", "all_to_all_single"})
# Torch copies what they receive out of one tensor, or what they send into one.
_LISTED = frozenset({"allgather_", "gather_", "scatter_"})
_NOT_WRITTEN = frozenset({"all_reduce_coalesced", "reduce_scatter_"})
_COPYING = frozenset({"all_reduce", "broadcast"})

Refuse = Callable[[str], object]


def raise_refusal(sentence: str) -> NoReturn:
    """Refuse in a process that has nothing else to do about it."""
    raise RuntimeError(sentence)


def meet_nobody(ranks: int, refuse: Refuse = raise_refusal) -> None:
    """Let process groups of this many ranks be made without the others.

    The private names used here are those of torch 2.14, the first that makes gloo by a plugin.

    Args:
        ranks: how many there are.
        refuse: ends the process with a sentence.
    """
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    if not hasattr(c10d.Backend, "_ensure_backend_registered"):
        refuse(f"several GPUs are simulated with torch 2.14 or later, got {torch.__version__}")
        return
    # Its import registers the fake process group.
    import_module("torch.testing._internal.distributed.fake_pg")
    store = vars(distributed)["HashStore"]()

    def meet(*_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
        yield store, 0, ranks

    # `torch.distributed.rendezvous` is a function of this module.
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    handlers = rendezvous._rendezvous_handlers
    handlers.update(dict.fromkeys(handlers, meet))

    c10d.Backend._plugins["GLOO"] = c10d.Backend._plugins["FAKE"]
    replaced = {
        "init_process_group": _without_device(c10d.init_process_group),
        "all_reduce": _with_sums(c10d.all_reduce),
        "broadcast_object_list": _from_this_rank(c10d.broadcast_object_list, refuse),
        "scatter_object_list": _from_this_rank(c10d.scatter_object_list, refuse),
    }
    vars(distributed).update(replaced)
    vars(c10d).update(replaced)
    # It advises the device that is left out.
    warnings.filterwarnings("ignore", r"barrier\(\): using the device")
    # The fake process group does not have the barrier in which gloo waits for each rank. Lightning
    # calls it after prepare_data.
    c10d.ProcessGroup.monitored_barrier = _meet


def _meet(*_: Any, **__: Any) -> None:
    """Meet nobody."""


def _from_this_rank(exchange: Callable[..., None], refuse: Refuse) -> Callable[..., None]:
    """Nobody knows the objects that another rank would send."""
    signature = inspect.signature(exchange)

    @functools.wraps(exchange)
    def exchanging(*arguments: Any, **keywords: Any) -> None:
        given = signature.bind(*arguments, **keywords).arguments
        # Rank 0 is the first one of every group that it is in.
        source = given.get("src") or given.get("group_src")
        if source and distributed.get_rank(given.get("group")) == 0:
            refuse(
                f"the program receives objects of rank {source} ({exchange.__name__}), and"
                " simulate has rank 0 only; let rank 0 send them"
            )
        else:
            exchange(*arguments, **keywords)

    return exchanging


def _without_device(init_process_group: Callable[..., None]) -> Callable[..., None]:
    """Let torch make each group by itself.

    With a device, NCCL makes other groups of the first one, and is not told how many ranks they
    have.
    """

    @functools.wraps(init_process_group)
    def initializing(*arguments: Any, device_id: Any = None, **keywords: Any) -> None:
        init_process_group(*arguments, **keywords)

    return initializing


def _with_sums(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """The fake process group, which has the tensors of the host, adds nothing."""

    @functools.wraps(all_reduce)
    def summing(tensor: Tensor, op: Any = distributed.ReduceOp.SUM, *rest: Any, **more: Any) -> Any:
        work = all_reduce(tensor, op, *rest, **more)
        if tensor.device.type == "cpu" and op == distributed.ReduceOp.SUM:
            group = more.get("group", rest[0] if rest else None)
            # A group without this rank has -1, and exchanges nothing.
            with torch.no_grad():
                tensor.mul_(max(1, distributed.get_world_size(group)))
        return work

    return summing


class Exchanges:
    """The collectives of ``torch.distributed`` on tensors of the device.

    Args:
        refuse: ends the process with a sentence.
    """

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a collective, and note which of the received values are known."""
        name = func._schema.name.partition("::")[2]
        self._check(name, args)
        if name in _COPYING:
            # Torch copies on the device, and then exchanges in place.
            func = getattr(torch.ops._c10d_functional, f"{name}_").default
            args = (_copy_of(args[0]), *args[1:])
        result = func(*args, **kwargs)
        # What this rank sends comes last, behind arguments with a name.
        groups = [group for group in map(_tensors_of, (*kwargs.values(), *args)) if group]
        is_listed = name in _LISTED
        # Of a scatter, another rank may send.
        sent = _tensors_of(args[1]) if is_listed else groups[-1]
        # Of exchanges in place there is no other argument.
        received = _tensors_of(result) or _tensors_of(groups[:-1]) or sent
        is_sent = len(sent) > 0 and all(map(is_known, sent))
        may_know = is_sent and self._writes_values(name, [*sent, *received])
        for tensor in received:
            if may_know and is_writable(tensor, overwrites=True):
                make_known(tensor)
            else:
                mark_unknown(tensor)
        if may_know and is_listed:
            # Torch copies them on the device. A rank that scatters keeps the first one.
            source = host_view(sent[0])
            for output in received:
                # The others send something else if it is larger or smaller.
                if output.numel() == source.numel():
                    make_known(output, source.reshape(output.shape))
                else:
                    mark_unknown(output)
        return result

    def _check(self, name: str, args: Sequence[Any]) -> None:
        """Refuse what depends on other ranks."""
        if name in _TO_ONE_RANK:
            self._refuse(
                "the program sends tensors from one rank to another, as pipeline parallelism does,"
                " and simulate has one rank; use DDP, FSDP or DeepSpeed"
            )
        if name in _ALL_TO_ALL and any(len(sizes) > 1 for sizes in map(_sizes, args)):
            self._refuse(
                "the program exchanges parts of different sizes with all ranks, as expert and"
                " context parallelism do, and simulate has one rank; use DDP, FSDP or DeepSpeed"
            )

    def _writes_values(self, name: str, tensors: Sequence[Tensor]) -> bool:
        """Whether the process group writes what equal ranks would exchange."""
        # A group of one rank really copies.
        if distributed.get_world_size() == 1 and distributed.get_backend() == "gloo":
            return True
        if name in _LISTED and all(one.dtype == torch.uint8 for one in tensors):
            # Objects of the program.
            return all(map(is_small, tensors))
        has_values = all(one.nbytes <= MOST_BYTES for one in tensors)
        return has_values and name not in (*_ALL_TO_ALL, *_NOT_WRITTEN)


def _copy_of(tensor: Tensor) -> Tensor:
    copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    may_know = is_known(tensor) and is_small(tensor)
    return make_known(copy, host_view(tensor)) if may_know else mark_unknown(copy)


def _tensors_of(value: Any) -> list[Tensor]:
    """The tensors of the device in an argument or a result."""
    return [one for one in tree_leaves(value) if isinstance(one, Tensor) and one.is_cuda]


def _sizes(value: Any) -> set[int]:
    """The different sizes in an argument that lists parts, or their sizes."""
    if not isinstance(value, (list, tuple)):
        return set()
    return {one.numel() if isinstance(one, Tensor) else one for one in value}
