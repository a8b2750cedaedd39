"""Events of a step become deltas of the right streams on the right links."""

from __future__ import annotations

import msgspec

from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import TokenEvent
from disagg.errors import EngineFailed, Overloaded
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import StageTimes, Start, TokenDelta, TokenLogprobs
from disagg.worker.streams import TOKEN_NBYTES, Streams
from tests.worker.plays import Trip, request_of

TICKET = KVTicket("1/1", "prefill", 1, "fake:4", 3, (0,), (5,))


TIMES = StageTimes(True, 0.75, 0.0, 0.25)  # a step of 0.25 s that ends 1 s after all came


def start(stream_id: int, *, hand_over: bool = False) -> Start:
    return Start(stream_id, request_of(Trip(0, (4, 5, 6), 9), "client's own id", 4), hand_over)


def take(streams: Streams, *events: TokenEvent) -> dict[int, list[TokenDelta]]:
    for event in events:
        event.sequence.was_admitted = True
    return streams.deltas(events, lambda sequence: TICKET, lambda sequence: None, 1.0, 0.25)


def test_streams_of_one_id_on_two_links_are_two() -> None:
    streams = Streams()
    first, second = streams.open(1, start(7), 0.0), streams.open(2, start(7), 0.0)
    assert first.request_id != second.request_id, "whatever name the clients gave them"
    deltas = take(streams, TokenEvent(first, (10,)), TokenEvent(second, (11,)))
    assert deltas == {
        1: [TokenDelta(7, (10,), times=TIMES)],
        2: [TokenDelta(7, (11,), times=TIMES)],
    }


def test_the_first_delta_says_what_was_cached_and_no_other() -> None:
    streams = Streams()
    sequence = streams.open(1, start(1), 0.0)
    sequence.num_cached_tokens = 2
    logprobs = (TokenLogprobs(-0.5),)
    first = take(streams, TokenEvent(sequence, (10,), logprobs))
    assert first == {1: [TokenDelta(1, (10,), None, logprobs, num_cached_tokens=2, times=TIMES)]}
    last = take(streams, TokenEvent(sequence, (11,), finish_reason="stop"))
    assert last == {1: [TokenDelta(1, (11,), "stop")]}
    assert streams.num_open == 0


def test_who_leaves_takes_a_ticket_along() -> None:
    streams = Streams()
    sequence = streams.open(1, start(1, hand_over=True), 0.0)
    deltas = take(streams, TokenEvent(sequence, (10,), left=True))
    assert deltas == {1: [TokenDelta(1, (10,), ticket=TICKET, times=TIMES)]}
    assert deltas[1][0].is_last and streams.num_open == 0


def test_an_error_is_the_last_delta() -> None:
    streams = Streams()
    sequence = streams.open(1, start(1), 0.0)
    ((delta,),) = take(streams, TokenEvent(sequence, error=Overloaded("too much"))).values()
    assert delta.error is not None and isinstance(delta.error.to_error(), Overloaded)
    assert delta.is_last and streams.num_open == 0


def test_nobody_hears_of_a_closed_stream() -> None:
    streams = Streams()
    sequences = [streams.open(1, start(i), 0.0) for i in (1, 2)]
    other = streams.open(2, start(1), 0.0)
    assert streams.of_link(1) == [sequence.request_id for sequence in sequences]
    for name in streams.of_link(1):
        streams.cancel(name, 0.5)
        streams.cancel(name, 0.5)
    left: list[Sequence] = []
    events = tuple(TokenEvent(sequence, (3,), left=True) for sequence in (*sequences, other))

    def leave(sequence: Sequence) -> KVTicket:
        left.append(sequence)
        return TICKET

    assert set(streams.deltas(events, leave, lambda sequence: None, 1.0, 0.25)) == {2}
    assert left == [other], "a ticket that nobody gets would keep blocks"


def test_a_broken_engine_ends_every_stream_once() -> None:
    streams = Streams()
    for link_id in (1, 2):
        streams.open(link_id, start(5), 0.0)
    deltas = streams.fail_all(EngineFailed("broken"))
    assert {link: [delta.stream_id for delta in each] for link, each in deltas.items()} == {
        1: [5],
        2: [5],
    }
    assert all(delta.is_last for each in deltas.values() for delta in each)
    assert streams.num_open == 0 and streams.fail_all(EngineFailed("broken")) == {}


def test_bytes_of_prompts_come_back_however_streams_end() -> None:
    streams = Streams()
    first, second, third = (streams.open(1, start(number), 0.0) for number in (1, 2, 3))
    assert streams.nbytes == 3 * 3 * TOKEN_NBYTES
    take(streams, TokenEvent(first, (10,)))
    assert streams.nbytes == 3 * 3 * TOKEN_NBYTES, "it goes on"
    take(streams, TokenEvent(first, (11,), finish_reason="stop"))
    streams.cancel(second.request_id, 0.5)
    streams.cancel(second.request_id, 0.5)
    assert streams.nbytes == 3 * TOKEN_NBYTES
    take(streams, TokenEvent(third, error=Overloaded("planted")))
    assert streams.nbytes == 0
    streams.open(1, start(4), 0.0)
    streams.fail_all(EngineFailed("planted"))
    assert streams.nbytes == 0


def test_a_draft_takes_room_like_a_prompt() -> None:
    drafted = request_of(Trip(0, (4, 5, 6), 9), "client's own id", 4)
    drafted = msgspec.structs.replace(drafted, draft_token_ids=(7, 8))
    streams = Streams()
    streams.open(1, Start(1, drafted), 0.0)
    assert streams.nbytes == (3 + 2) * TOKEN_NBYTES
