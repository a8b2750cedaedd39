"""Checks whether a Ray cluster answers and accepts our token, before Ray is imported.

Ray itself retries a refused connection for a minute, and writes the cause only to its log. So this
module sends one gRPC request to the cluster's head first.
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
WHERE = "give the address that `ray start --head` printed (port 6379 by default)"
ADVICE = (
    "copy ~/.ray/auth_token from its head node to this machine, or set RAY_AUTH_TOKEN"
    " (docs/reliability.md)"
)


def check_address(address: str) -> None:
    """Check that a Ray head answers at the address and accepts our token.

    RAY_AUTH_MODE is set so that Ray sends the token if and only if the cluster requires one. The
    cluster decides, not the user: if the two sides disagree, the connection hangs. Only addresses
    HOST:PORT and `auto` are checked, and only clusters without TLS.

    Raises:
        StartupError: none answers, or it does not accept the token.
    """
    found = _host_and_port(address)
    if found is not None:
        try:
            socket.create_connection(found, CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise _refusal(
                f"No Ray cluster answers at {address}: {error.strerror or error}. Start one with"
                f" `ray start --head`, or {WHERE}."
            ) from error
    token, source = find_token()
    if found is None or _is_of_ray_alone():
        if token:
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        return
    code = _ask(found, "").name
    is_required = code == "UNAUTHENTICATED"
    if is_required and token:
        code = _ask(found, token).name
    match code:
        case "OK":
            os.environ["RAY_AUTH_MODE"] = "token" if is_required else "disabled"
            return
        case "UNAUTHENTICATED" if token:
            reason = f"does not accept the token in {source}: {ADVICE}."
        case "UNAUTHENTICATED":
            reason = f"requires a token, but there is none on this machine: {ADVICE}."
        case "DEADLINE_EXCEEDED":
            reason = (
                f"accepts connections but did not answer within {ANSWER_TIMEOUT_S:.0f} s; check"
                " whether its head is frozen or overloaded."
            )
        case code:
            raise _refusal(f"The server at {address} is not a Ray head ({code.lower()}): {WHERE}.")
    raise _refusal(f"The Ray cluster at {address} {reason}")


def find_token() -> tuple[str, str]:
    """The token that Ray would use, and where it was found; "" if there is none."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token, "RAY_AUTH_TOKEN"
    file = Path(os.path.expanduser(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"))
    try:
        return file.read_text().strip(), str(file)
    except (OSError, ValueError):
        return "", str(file)


def _refusal(message: str) -> StartupError:
    return StartupError(message, param="ray_address")


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Parse HOST:PORT or `auto`; None for addresses in other forms."""
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
    """Whether the cluster uses TLS or Kubernetes tokens, which only Ray itself supports."""
    names = ("RAY_USE_TLS", "RAY_ENABLE_K8S_TOKEN_AUTH")
    return any(os.environ.get(name, "").lower() in ("1", "true") for name in names)


def _ask(address: tuple[str, int], token: str) -> grpc.StatusCode:
    """The gRPC status of a health check of a head."""
    import grpc

    host, port = address
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # Like Ray, do not use an HTTP proxy to reach the cluster.
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(target, options) as channel:
        check = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        metadata = [("authorization", f"Bearer {token}")] if token else []
        try:
            check(b"", timeout=ANSWER_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK
