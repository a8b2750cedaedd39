"""Checks whether a Ray cluster answers and accepts our token, before Ray is imported.

Ray itself repeats a connection that is refused or gets no answer for a minute, and writes the cause
only to its log. So the head is asked once here, over gRPC.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from disagg.errors import StartupError

if TYPE_CHECKING:
    import grpc

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 5.0
WHERE = "give the address that `ray start --head` printed, with port 6379 if it was not changed"
ADVICE = (
    "copy ~/.ray/auth_token from its head to this machine, or set RAY_AUTH_TOKEN"
    " (docs/reliability.md)"
)


def check_address(address: str) -> None:
    """Raises `StartupError` unless a Ray head answers there and accepts our token, if it needs one.

    Does not check addresses that are not HOST:PORT or `auto`, nor clusters with TLS.
    """
    found = _host_and_port(address)
    if found is None:
        return
    try:
        socket.create_connection(found, CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise _refusal(
            f"No Ray cluster answers at {address}: {error.strerror or error}. Start one with"
            f" `ray start --head`, or {WHERE}."
        ) from error
    if _is_of_ray_alone():
        return
    token, place = find_token()
    match _ask(found, token).name:
        case "OK":
            return
        case "UNAUTHENTICATED" if token:
            words = f"does not take the token in {place}: {ADVICE}"
        case "UNAUTHENTICATED":
            words = f"wants its token, and there is none here: {ADVICE}"
        case "DEADLINE_EXCEEDED":
            words = (
                f"takes connections and does not answer within {ANSWER_TIMEOUT_S:.0f} s; is its"
                " head frozen, or the machine overloaded?"
            )
        case code:
            raise _refusal(
                f"The server that listens at {address} is no Ray head ({code.lower()}): {WHERE}."
            )
    raise _refusal(f"The Ray cluster at {address} {words}")


def wants_token(address: str) -> bool | None:
    """Whether the cluster requires a token; None: not known."""
    found = _host_and_port(address)
    if found is None or _is_of_ray_alone():
        return None
    code = _ask(found, "").name
    return code == "UNAUTHENTICATED" if code in ("OK", "UNAUTHENTICATED") else None


def find_token() -> tuple[str, str]:
    """The token that Ray itself would find, and where; empty if there is none."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token, "RAY_AUTH_TOKEN"
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    try:
        return file.read_text().strip(), str(file)
    except (OSError, ValueError):
        return "", str(file)


def _refusal(words: str) -> StartupError:
    return StartupError(words, param="ray_address")


def _host_and_port(address: str) -> tuple[str, int] | None:
    """None for addresses in other forms, which only Ray reads."""
    if address == "auto":
        try:
            temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
            last = Path(temporary) / "ray" / "ray_current_cluster"
            address = os.environ.get("RAY_ADDRESS") or last.read_text().strip()
        except OSError:
            return None
    host, colon, port = address.rpartition(":")
    if not colon or "://" in address or not port.isdecimal():
        return None
    return host.strip("[]"), int(port)


def _is_of_ray_alone() -> bool:
    """Clusters with certificates, or with tokens of Kubernetes."""
    names = ("RAY_USE_TLS", "RAY_ENABLE_K8S_TOKEN_AUTH")
    return any(os.environ.get(name, "").lower() in ("1", "true") for name in names)


def _ask(address: tuple[str, int], token: str) -> grpc.StatusCode:
    """A head's answer to a health check."""
    import grpc

    host, port = address
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # As Ray, which does not ask an HTTP proxy the way to its own cluster.
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(target, options) as channel:
        question = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        metadata = [("authorization", f"Bearer {token}")] if token else []
        try:
            question(b"", timeout=ANSWER_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK
