"""Images of chat messages with real vLLM (CPU): a tiny random Idefics3, beside plain `LLM.chat`.

Of the families that vLLM reads without torchvision, this one has a mark for each image in its
prompts.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import base64
import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_tiny_tokenizer
from tests.vllm.test_vllm import BLOCK_SIZE, COMMON, fleet, plain

NUM_NEW, SIDE = 12, 56
SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _write(directory: Path) -> None:
    """In a process of its own, as torch stays."""
    import torch
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessor,
        Idefics3Processor,
        PreTrainedTokenizerFast,
    )

    end_id = write_tiny_tokenizer(directory)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), eos_token="<|im_end|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    edge = {"longest_edge": SIDE}
    images = Idefics3ImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = Idefics3Config(
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
        vision_config={**sizes, "num_attention_heads": 2, "image_size": SIDE, "patch_size": 14},
        text_config={
            "model_type": "llama",
            **sizes,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": 288,
            "max_position_embeddings": 1024,
            "eos_token_id": end_id,
        },
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).float()
    for weight in model.parameters():  # far from uniform: images change answers
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    assert json.loads((directory / "config.json").read_text())["model_type"] == "idefics3"


def png(seed: int) -> str:
    """A data: URL of noise."""
    rng = random.Random(seed)
    rows = b"".join(b"\0" + rng.randbytes(3 * SIDE) for _ in range(SIDE))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0))
    file = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


def conversations() -> list[list[dict[str, Any]]]:
    """With one image, another, two in both orders, the first again, and none."""

    def image(seed: int) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": png(seed)}}

    what, and_this = ({"type": "text", "text": text} for text in ("what is " * 9, " and " * 9))
    contents: list[Any] = [
        [what, image(1)],
        [what, image(2)],
        [image(1), and_this, image(2)],
        [image(2), and_this, image(1), what],
        [what, image(1), and_this],
        "none",
    ]
    return [[{"role": "user", "content": content}] for content in contents]


def in_other_dialects() -> dict[str, dict[str, Any]]:
    """The first conversation, by path."""
    text, url = "what is " * 9, png(1)
    response = [
        {"type": "input_text", "text": text},
        {"type": "input_image", "image_url": url},
    ]
    data = url.partition("base64,")[2]
    message = [
        {"type": "text", "text": text},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
    ]
    return {
        "/v1/responses": {
            "input": [{"role": "user", "content": response}],
            "max_output_tokens": NUM_NEW,
        },
        "/v1/messages": {
            "messages": [{"role": "user", "content": message}],
            "max_tokens": NUM_NEW,
        },
    }


def _plain(directory: str) -> list[tuple[int, list[int]]]:
    from vllm import LLM, SamplingParams

    engine = LLM(model=directory, **COMMON)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    outputs = engine.chat(conversations(), greedy)
    answers = [(len(each.prompt_token_ids), list(each.outputs[0].token_ids)) for each in outputs]
    engine.llm_engine.engine_core.shutdown()
    return answers


@pytest.mark.timeout(900)
async def test_answers_about_images_are_those_of_plain_vllm(tmp_path: Path) -> None:
    await plain(_write, tmp_path)
    expected = await plain(_plain, str(tmp_path))
    assert len({tuple(tokens) for _, tokens in expected}) == len(expected)
    async with fleet(str(tmp_path)) as (cluster, client):

        async def ask(messages: list[dict[str, Any]], status: int = 200) -> dict[str, Any]:
            body = {"messages": messages, "max_tokens": NUM_NEW, "temperature": 0}
            more = {"ignore_eos": True, "return_token_ids": True}
            reply = await client.post("/v1/chat/completions", json=body | more)
            assert reply.status_code == status, reply.text
            found: dict[str, Any] = reply.json()
            return found

        for messages, (num_prompt, tokens) in zip(conversations(), expected, strict=True):
            found = await ask(messages)
            assert found["choices"][0]["token_ids"] == tokens
            assert found["usage"]["prompt_tokens"] == num_prompt
        # Two blocks of text and that of the image, whose name comes from vLLM's events.
        again = await ask(conversations()[0])
        (decision,) = cluster.ingress.dispatcher.decision(again["id"])
        assert decision.route.num_cached_tokens > 2 * BLOCK_SIZE
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        for path, asked in in_other_dialects().items():
            reply = await client.post(path, json=asked)
            assert reply.status_code == 200, reply.text
            usage = reply.json()["usage"]
            cached = usage.get("cache_read_input_tokens", 0)  # which Anthropic counts apart
            assert usage["input_tokens"] + cached == expected[0][0], path
        broken = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]
        refused = await ask([{"role": "user", "content": broken}], status=400)
        assert refused["error"]["code"] == "unsupported_by_engine"
