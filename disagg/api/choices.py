"""The last step of a request: one `GenerateRequest` per choice, with id, seed and block hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from disagg.api.request_spec import RequestSpec, Text
from disagg.api.running_job import Job
from disagg.api.served_model import ServedModel
from disagg.api.slo import RequestSlo
from disagg.blocks import hash_blocks, hash_root
from disagg.messages import GenerateRequest, SamplingParams


class Caller(msgspec.Struct, frozen=True):
    """What the HTTP layer knows about a request besides its body."""

    request_id: str
    tenant: str = ""
    waited_s: float = 0.0  # time since the request arrived
    min_priority: int = 0  # lowest priority number that the request may set
    slo: RequestSlo = RequestSlo()  # SLOs from the request's headers
    least_slo: RequestSlo = RequestSlo()  # shortest SLOs that the tenant may set; 0: the model's


def name_choices(
    spec: RequestSpec,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    caller: Caller,
    traceparent: str = "",
    *,
    slo: RequestSlo = RequestSlo(),  # noqa: B008 - it is frozen
    created_unix_s: float,
    deadline_unix_s: float,
) -> Job:
    """Give each choice an id and a seed, and hash the blocks of each prompt.

    Args:
        prompts: the token ids of each prompt.
        sampling: sampling parameters of the first choice; the seeds of others derive from its seed.
    """
    requests: list[GenerateRequest] = []
    for token_ids in prompts:
        unnamed = GenerateRequest(
            request_id=caller.request_id,
            model=spec.model.name,
            token_ids=tuple(token_ids),
            num_prompt_tokens=len(token_ids),
            hash_root=b"",
            block_hashes=(),
            sampling=sampling,
            deadline_unix_s=deadline_unix_s,
            tenant=caller.tenant,
            priority=spec.priority,
            traceparent=traceparent,
            cache_salt=spec.cache_salt,
            ttft_slo_s=slo.ttft_s,
            tpot_slo_s=slo.tpot_s,
        )
        request, first = hash_request(unnamed, spec.model), len(requests)
        requests += [_choice(request, first + index) for index in range(spec.num_choices)]
    echoes = _texts(spec, prompts) if spec.echo else ()
    answered = replace(spec, prompts=())
    return Job(caller.request_id, int(created_unix_s), answered, tuple(requests), echoes)


def hash_request(request: GenerateRequest, model: ServedModel) -> GenerateRequest:
    """A copy of `request` for `model`, with that model's block hashes."""
    cache_tenant = f"{request.tenant}/{request.cache_salt}"
    root = hash_root(model.fingerprint, model.block_size, cache_tenant)
    hashes = tuple(hash_blocks(root, request.token_ids, model.block_size))
    return replace(
        request,
        model=model.name,
        hash_root=root,
        block_hashes=hashes,
        block_size=model.block_size,
    )


def _choice(request: GenerateRequest, index: int) -> GenerateRequest:
    """The request of choice `index`. Choices after the first have derived ids and seeds."""
    if index == 0:
        return request
    seed = _derived_seed(request.sampling.seed, index)
    return replace(
        request,
        request_id=f"{request.request_id}-{index}",
        sampling=replace(request.sampling, seed=seed),
    )


def _derived_seed(seed: int, index: int) -> int:
    raw = seed.to_bytes(8, "little", signed=True) + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1


def _texts(spec: RequestSpec, prompts: Sequence[Sequence[int]]) -> tuple[str, ...]:
    decode = spec.model.tokenizer.decode
    if spec.truncate_prompt_tokens is not None:
        return tuple(map(decode, prompts))
    pairs = zip(spec.prompts, prompts, strict=True)
    return tuple(prompt.text if isinstance(prompt, Text) else decode(ids) for prompt, ids in pairs)
