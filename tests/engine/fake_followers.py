"""The other ranks of a worker as threads of the test's process.

They load, meet and compute as `disagg.worker.rank` does in processes of their own, and get the same
messages; so a test starts no process, and can look into each rank.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from disagg.adapters import Adapter
from disagg.config import EngineConfig
from disagg.engine.device.build import build_engine
from disagg.engine.device.communicator import TorchCommunicator
from disagg.engine.device.follower import Follower
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.memory_plan import LARGEST_STEP
from disagg.engine.engine import Engine
from disagg.models.communicator import Communicator
from disagg.models.description import ModelDescription, describe_model
from disagg.models.share import Share
from disagg.rank_messages import RankCapture, RankStep, RankWork, decode_task, encode


class CountingCommunicator:
    """A communicator, and how often each of its methods was called."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.calls: Counter[str] = Counter()

    @property
    def share(self) -> Share:
        return self._inner.share

    def all_reduce_(self, x: Tensor) -> Tensor:
        self.calls["all_reduce_"] += 1
        return self._inner.all_reduce_(x)

    def largest_(self, x: Tensor) -> Tensor:
        self.calls["largest_"] += 1
        return self._inner.largest_(x)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        self.calls["gather"] += 1
        return self._inner.gather(x, widths)

    def broadcast_(self, x: Tensor) -> Tensor:
        self.calls["broadcast_"] += 1
        return self._inner.broadcast_(x)


class FakeFollowers:
    """Implements `engine.device.followers.Followers`.

    Attributes:
        given: what all ranks were given to do, in order.
        communicator: the first rank's, from `meet` on.
        followers: the other ranks, by number.
    """

    communicator: CountingCommunicator

    def __init__(self, config: EngineConfig, description: ModelDescription, place: Path) -> None:
        self.num_ranks, self._share = config.tensor_parallel_size, config.share()
        self.given: list[RankWork] = []
        self._meeting_place = str(place / "meeting")
        self._threads = {rank: ThreadPoolExecutor(1) for rank in range(1, self.num_ranks)}
        self._ends: list[Future[None]] = []
        self.followers = {
            rank: Follower(config, description, config.share(rank), LARGEST_STEP, 1)
            for rank in self._threads
        }

    def meet(self, device_type: str) -> Communicator:
        self._loads = [
            self._threads[rank].submit(follower.load, self._meeting_place)
            for rank, follower in self.followers.items()
        ]
        self._own = TorchCommunicator(self._share, device_type, self._meeting_place)
        self.communicator = CountingCommunicator(self._own)
        return self.communicator

    def least_room_nbytes(self, own_nbytes: int | None) -> int | None:
        for load in self._loads:
            load.result()
        return own_nbytes

    def raise_lost(self) -> None:
        for load in self._loads:
            load.result()

    def allocate(self, num_blocks: int, max_num_seqs: int) -> None:
        for follower in self.followers.values():
            follower.allocate(num_blocks, max_num_seqs)

    def load_adapter(self, adapter: Adapter) -> Future[None]:
        raise AssertionError("adapters are tested with ranks in processes")

    def forget_adapter(self, digest: str) -> None:
        raise AssertionError("adapters are tested with ranks in processes")

    def follow(self, work: RankWork) -> None:
        frame = encode(work)
        self.given.append(work)
        for rank, thread in self._threads.items():
            self._ends.append(thread.submit(self._do, rank, frame))

    def close(self) -> None:
        """Wait until all is done. Raises what any rank raised."""
        for thread in self._threads.values():
            thread.shutdown()
        for end in self._ends:
            end.result()

    def leave(self) -> None:
        """End the first rank's connections, as the end of its process would: nobody waits for it.
        Nothing can be computed afterwards."""
        del self._own._group
        for thread in self._threads.values():
            thread.shutdown()

    def _do(self, rank: int, frame: bytes) -> None:
        try:
            task = decode_task(frame)
            assert isinstance(task, RankStep | RankCapture), "an engine moves no KV"
            self.followers[rank].follow(task)
        except BaseException as error:
            # Its connections end with it, as if its process had: the first rank must not wait.
            traceback.clear_frames(error.__traceback__)
            del self.followers[rank]
            raise


@contextmanager
def engine_of_ranks(
    directory: Path, place: Path, *, num_ranks: int, **sizes: Any
) -> Iterator[tuple[Engine, KVCache, FakeFollowers]]:
    """An engine of so many ranks, in float32 on a CPU.

    Args:
        place: an empty directory, where the ranks meet.
        sizes: of `EngineConfig`.
    """
    config = EngineConfig(
        dtype="float32", device="cpu", num_threads=1, tensor_parallel_size=num_ranks, **sizes
    )
    model = describe_model(directory)
    others = FakeFollowers(config, model, place)
    try:
        yield *build_engine(config, model, followers=others if num_ranks > 1 else None), others
    except BaseException:
        others.leave()
        raise
    others.close()
