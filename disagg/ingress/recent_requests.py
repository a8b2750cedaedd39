"""Values of an ingress's latest requests by request id, limited in number."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class RecentRequests(Generic[T]):
    """A value for each of the last `max_num` requests; older ones are forgotten."""

    def __init__(self, max_num: int) -> None:
        self.max_num = max_num
        self._values: OrderedDict[str, T] = OrderedDict()

    def get(self, request_id: str) -> T | None:
        return self._values.get(request_id)

    def put(self, request_id: str, value: T) -> None:
        self._values[request_id] = value
        self._values.move_to_end(request_id)
        while len(self._values) > self.max_num:
            self._values.popitem(last=False)
