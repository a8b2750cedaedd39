"""Tickets for KV that vLLM's NixlConnector transfers: its parameters inside a ticket of ours.

vLLM keeps the blocks of a finished prompt for a lease, and a decode worker that reads them later
would read other tokens' KV without noticing. Therefore a ticket has its end: one that may be too
old when the blocks are read is not used, and the prompt is computed again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from disagg.kvtransfer.ticket import KVTicket, Peer

# Until the decode worker's first heartbeat has renewed the lease: a wait in its queue, and the
# difference of two clocks.
MARGIN_S = 10.0
TRANSPORT = "vllm"

ASK = {  # of a prefill worker: keep the blocks for another engine
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Parameters(msgspec.Struct, array_like=True):
    """What the ticket carries.

    ends_unix_s: end of the lease by the clock of the worker that issued it.
    """

    ends_unix_s: float
    kv_transfer_params: dict[str, Any]


def issue(
    peer: Peer, ticket_id: str, num_tokens: int, ends_unix_s: float, params: dict[str, Any]
) -> KVTicket:
    """A ticket for the KV of the first `num_tokens` tokens of a request."""
    return KVTicket(
        ticket_id=ticket_id,
        source_id=peer.worker_id,
        epoch=peer.epoch,
        layout=peer.layout,
        num_tokens=num_tokens,
        block_ids=(),
        generations=(),
        foreign=msgspec.msgpack.encode(Parameters(ends_unix_s, params)),
    )


def redeem(ticket: KVTicket | None, peer: Peer, num_tokens: int, now: float) -> dict[str, Any]:
    """vLLM's parameters for a request of `num_tokens` tokens, or {} if its KV is computed here.

    vLLM takes KV of all tokens but the last: of fewer, it would take blocks that are not there.
    """
    if ticket is None or ticket.layout != peer.layout or not ticket.foreign:
        return {}
    parameters = msgspec.msgpack.decode(ticket.foreign, type=Parameters)
    if ticket.num_tokens < num_tokens - 1 or now > parameters.ends_unix_s - MARGIN_S:
        return {}
    return parameters.kv_transfer_params
