"""This module divides the minibatches of a learner among several processes, its ranks.

Every rank is the same learner: it starts from the same weights, and gets the same segments and random numbers. What is
computed from a whole batch (advantages, running statistics, the correction for staleness) is equal in all of them, and
so are the rows of each minibatch. Of these a rank takes its part, and the gradients of all parts are summed by one
all-reduce of the block that holds them. The sum is the gradient of the whole minibatch, and all ranks take one step.

Cloning and the networks of reward signals are not divided: every rank trains them on all rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from sparring.pipeline.errors import Restartable


class RankLost(Restartable):
    """A rank of a learner has ended, or did not answer in time; the learner has to begin anew."""


@dataclass(eq=False)
class Ranks:
    """Knows the part of one rank.

    Attributes:
        rank: number of this process; 0 is the one that other services know.
        count: number of ranks; a learner of one process is a rank 0 of 1.
    """

    rank: int = 0
    count: int = 1

    def part(self, units: int) -> slice:
        """Returns which of some rows, sequences or windows are ours: all of them if there are fewer than ranks."""
        if units < self.count:
            return slice(None)
        return slice(self.rank * units // self.count, (self.rank + 1) * units // self.count)

    def weight(self, units: int, part: int, whole: int) -> float:
        """Returns the factor by which the mean over the rows of our part counts in the sum over all ranks.

        Args:
            units: what `part` divided.
            part: rows in our part.
            whole: rows in all units.
        """
        return 1 / self.count if units < self.count else part / max(1, whole)

    def sum(self, gradient: Tensor) -> None:
        """Replaces a block by the sum over all ranks.

        Raises:
            RankLost: another rank has ended or does not answer.
        """
        if self.count > 1:
            _together(partial(dist.all_reduce, gradient))

    def follow(self, blocks: Iterable[Tensor]) -> None:
        """Replaces blocks by those of rank 0, so that no rounding can add up to a difference. Raises as `sum`."""
        for block in blocks if self.count > 1 else ():
            _together(partial(dist.broadcast, block, 0))

    def leave(self) -> None:
        """Goes on alone, with all rows of every minibatch; the other ranks fail at their next sum."""
        if self.count > 1:
            dist.destroy_process_group()
        self.rank, self.count = 0, 1


def join(rank: int, count: int, meeting: Path, device: torch.device, timeout_s: float) -> Ranks:
    """Waits until all ranks have joined; one process can belong to one learner only.

    Gradients are not encrypted, so all ranks are on one machine, and nothing listens beyond its loopback.

    Args:
        rank: number of this process.
        count: number of ranks.
        meeting: a file in a private folder, new for each group of ranks, which may be removed afterwards.
        device: of this rank's networks.
        timeout_s: seconds that a rank waits for another, now and later.

    Raises:
        RankLost: not all of them have joined in time.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ[variable] = _loopback()
    backend, limit = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    meet = partial(dist.init_process_group, backend, init_method=meeting.as_uri(), timeout=limit)
    _together(partial(meet, rank=rank, world_size=count))
    _together(dist.barrier)  # the others read the file until they have connected
    return Ranks(rank, count)


def device_of(device: torch.device, rank: int, count: int) -> torch.device:
    """Returns the device of a rank: `cuda` is a GPU for each, by their numbers."""
    return torch.device("cuda", rank) if device.type == "cuda" and count > 1 else device


def _together(communicate: Callable[[], object]) -> None:
    try:
        communicate()
    except RuntimeError as error:
        raise RankLost(str(error).splitlines()[0]) from error


def _loopback() -> str:
    """Returns the name of the network interface that never leaves this machine."""
    interfaces = psutil.net_if_addrs().items()
    return next(name for name, found in interfaces if any(one.address.startswith("127.") for one in found))
