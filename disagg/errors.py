"""The exception tree. Every error knows its HTTP status and whether trying again can help.

    DisaggError
    ├── StartupError            a flag, a model directory or a machine that cannot work
    │   ├── ModelError          a checkpoint that is missing, broken or unsupported
    │   └── NotEnoughMemory     no room for one full-length sequence
    ├── RequestError            the client's request is wrong (4xx, retrying cannot help)
    │   ├── InvalidRequest      a field is wrong; known before it reaches a worker
    │   ├── ContextLengthExceeded
    │   ├── GrammarError        what an answer should look like is wrong, or too complex
    │   ├── EngineCannot        the engine of the model (vLLM) does not have what it asks for
    │   ├── ModelNotFound
    │   ├── Unauthorized
    │   └── RequestTooLarge
    ├── Overloaded              refused early; try again after `retry_after_s`
    │   └── RateLimited         a tenant has used up its limits
    ├── Unavailable             no worker can serve this at the moment
    ├── DeadlineExceeded        the request's deadline has passed
    ├── WorkerLost              a worker died or hung up; the request moves elsewhere
    ├── TransferFailed          KV did not arrive intact; it is computed instead
    ├── EngineFailed            a bug or a device failure inside an engine
    └── RequestFailed           this request alone failed, and would fail on any worker
        └── InvalidLogits       the model gave no numbers from which a token can be chosen

Messages are sentences for the person who gets them: what happened, why, what to do.
Errors cross processes as (code, message, param), see `messages.WireError`.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias


class DisaggError(Exception):
    """Root of all errors of this package.

    Args:
        message: a sentence for the user.
        param: the request parameter or flag at fault, if there is one.
    """

    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"  # OpenAI's `error.type`
    code: str = "internal_error"  # OpenAI's `error.code`; unique per class
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class StartupError(DisaggError):
    code = "startup_error"


class ModelError(StartupError):
    code = "model_error"


class NotEnoughMemory(StartupError):
    code = "not_enough_memory"


class RequestError(DisaggError):
    http_status = 400
    error_type = "invalid_request_error"
    code = "invalid_value"


class InvalidRequest(RequestError):
    """A field of the request is wrong; `code` says which kind of rule it breaks.

    It never crosses a process: whatever reaches a worker has been checked before.
    """

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.code = code


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class GrammarError(RequestError):
    code = "invalid_grammar"


class EngineCannot(RequestError):
    code = "unsupported_by_engine"


class ModelNotFound(RequestError):
    http_status = 404
    code = "model_not_found"


class Unauthorized(RequestError):
    http_status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class RequestTooLarge(RequestError):
    http_status = 413
    code = "request_too_large"


RefusalReason: TypeAlias = Literal[  # a label in metrics
    "predicted_late", "became_late", "queue_full", "no_room", "tenant_limit"
]


class Overloaded(DisaggError):
    """Refused before any work was done. `retry_after_s` is the predicted wait in seconds."""

    http_status = 429
    error_type = "rate_limit_error"
    code = "overloaded"
    retryable = True
    reason: RefusalReason = "no_room"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float = 1.0,
        reason: RefusalReason | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s
        self.reason = reason or self.reason


class RateLimited(Overloaded):
    """A tenant has used up what it may use for now, whatever the workers do."""

    code = "rate_limit_exceeded"
    reason = "tenant_limit"


class Unavailable(DisaggError):
    http_status = 503
    code = "unavailable"
    retryable = True


class DeadlineExceeded(DisaggError):
    http_status = 504
    error_type = "timeout_error"
    code = "deadline_exceeded"


class WorkerLost(DisaggError):
    http_status = 503
    code = "worker_lost"
    retryable = True


class TransferFailed(DisaggError):
    http_status = 503
    code = "transfer_failed"
    retryable = True


class EngineFailed(DisaggError):
    """An engine failed in a step of the request, which may be the cause.

    It is never sent to a second engine.
    """

    code = "engine_failed"


class RequestFailed(DisaggError):
    """The request's own numbers broke a worker's code. It is never sent to a second worker."""

    code = "request_failed"


def request_failed(cause: Exception) -> RequestFailed:
    """The error that ends a request on which a worker's code failed."""
    error = RequestFailed(f"The worker failed on this request: {cause}.")
    error.__cause__ = cause
    return error


class InvalidLogits(RequestFailed):
    code = "invalid_logits"


def error_from_code(code: str, message: str, param: str | None = None) -> DisaggError:
    """Rebuild an error that crossed a process. An unknown code becomes a plain `DisaggError`."""
    return _BY_CODE.get(code, DisaggError)(message, param=param)


def _subclasses(cls: type[DisaggError]) -> list[type[DisaggError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _subclasses(sub))]


# Without `InvalidRequest`, whose codes are its instances' and which stays where it was raised.
_BY_CODE = {cls.code: cls for cls in _subclasses(DisaggError) if "code" in vars(cls)}
