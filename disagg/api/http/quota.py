"""Tenants' limits in HTTP: 429 replies, `x-ratelimit-*` headers, and a bound on priorities."""

from __future__ import annotations

from collections.abc import Callable

from disagg.api.http.request import HttpRequest
from disagg.api.request_spec import RequestSlo
from disagg.api.running_job import RunningJob
from disagg.config import TenantConfig
from disagg.store.limits import Limits

_PREFIX = b"x-ratelimit-"


class Quota:
    """Counts requests against their tenants' limits.

    Args:
        tenant: returns a tenant's settings by name.
        tenant_class: returns a tenant's label in metrics; the configuration limits their number.
        limits: limits that all ingresses enforce together.
    """

    def __init__(
        self,
        tenant: Callable[[str], TenantConfig],
        tenant_class: Callable[[str], str],
        limits: Limits,
    ) -> None:
        self._tenant = tenant
        self.tenant_class = tenant_class
        self._limits = limits

    def min_priority(self, name: str) -> int:
        return self._tenant(name).min_priority

    def least_slo(self, name: str) -> RequestSlo:
        """The shortest SLOs that a tenant's requests may set; 0 for those of the model."""
        tenant = self._tenant(name)
        return RequestSlo(tenant.min_ttft_slo_s or 0.0, tenant.min_tpot_slo_s or 0.0)

    def begin(self, request: HttpRequest) -> None:
        """Count a new request. Raises `RateLimited`."""
        self._limits.begin(request.tenant)
        request.num_output_tokens = lambda: 0

    def take_prompt(self, request: HttpRequest, run: RunningJob) -> None:
        """Count the tokens of a request's prompts. Raises `RateLimited`."""
        self._limits.take_tokens(request.tenant, run.num_prompt_tokens)
        request.num_output_tokens = lambda: run.num_completion_tokens
        self.say(request)

    def end(self, request: HttpRequest) -> None:
        """Count the end of a request and its output tokens, whether it succeeded or not."""
        if request.num_output_tokens is not None:
            self._limits.end(request.tenant, request.num_output_tokens())

    def say(self, request: HttpRequest) -> None:
        """Add the headers that tell the client what is left of its limits."""
        headers = request.reply_headers
        headers[:] = [each for each in headers if not each[0].startswith(_PREFIX)]
        for kind, left in self._limits.remaining(request.tenant).items():
            said = {
                "limit": left.limit,
                "remaining": left.remaining,
                "reset": duration(left.reset_s),
            }
            headers += [
                (_PREFIX + f"{name}-{kind}".encode(), str(value).encode())
                for name, value in said.items()
            ]


def duration(seconds: float) -> str:
    """A duration in the format of OpenAI's headers: 20ms, 1.5s, 6m0s."""
    if seconds < 1.0:
        return f"{round(1000 * seconds)}ms"
    minutes, rest = divmod(round(seconds, 1), 60.0)
    return f"{int(minutes)}m{round(rest)}s" if minutes else f"{rest:g}s"
