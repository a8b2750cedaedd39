"""Heads in the public layouts: what they compute, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from disagg.errors import ModelError
from disagg.models.decoder import CpuDecoder, Decoder, load_model
from disagg.models.description import ModelDescription, describe_model
from disagg.models.draft_layers import (
    DraftLayers,
    eagle3_head,
    first_layers,
    medusa_heads,
    mtp_layer,
)
from disagg.models.heads import HeadDecoder, MedusaHeads, first_layers_of
from tests.kernels.step_cases import assert_as_close
from tests.models.checkpoints import write_checkpoint
from tests.models.heads import KEPT, add_mtp_layer, write_eagle3, write_medusa
from tests.models.paging import Tokens, make_batch, new_slab
from tests.tiny_model import write_tiny_model

NUM_TOKENS = 23


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDescription:
    return describe_model(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", inner=96))


def load(model: ModelDescription, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(model, dtype, torch.device("cpu"))


def computed(decoder: Decoder, given: Tensor | None = None) -> tuple[Tensor, list[int]]:
    """The logits of some tokens, in chunks, and these."""
    ids = [(7 * i + 3) % 90 for i in range(NUM_TOKENS)]
    slab, tokens, logits = (
        new_slab(decoder.config, 8, 4, decoder.dtype),
        Tokens(ids, [*range(8)]),
        [],
    )
    for num in (9, 1, 13):
        first = tokens.num_computed
        if isinstance(decoder, HeadDecoder):
            assert given is not None
            decoder.given = given[first : first + num]
        logits.append(decoder.forward(make_batch([(tokens, num)], 4, every_row=True), slab))
        tokens.num_computed += num
    return torch.cat(logits), ids


def head_of(whole: Decoder, drafts: DraftLayers) -> tuple[HeadDecoder, Tensor]:
    """The head, and the states that the model has kept for it, each in the slot of its position."""
    head = HeadDecoder(whole, drafts)
    kept = head.keep_states(whole, 32)
    computed(whole)
    return head, kept.by_slot[:NUM_TOKENS]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"num_draft_tokens": 61, "has_embedding": True},
        {"norm_before_residual": True, "rope_theta": 50.0},
    ],
    ids=str,
)
def test_an_eagle3_head(asked: dict[str, Any], model: ModelDescription, tmp_path: Path) -> None:
    """As the paper and the checkpoints' own code describe it, written plainly."""
    place = write_eagle3(tmp_path / "head", Path(model.source), **asked)
    whole = load(model)
    head, states = head_of(whole, eagle3_head(place, model))
    w = {
        name.removesuffix(".weight"): x
        for name, x in load_file(place / "model.safetensors").items()
    }
    logits, ids = computed(head, states)
    table = load_file(Path(model.source) / "model.safetensors")["model.embed_tokens.weight"]
    before = [table[ids], states_after(first_layers_of(whole, first_layers(model, 1)), ids)]
    fused = torch.cat([before[layer] for layer in KEPT], 1) @ w["fc"].T
    torch.testing.assert_close(states, fused, atol=1e-4, rtol=1e-4)

    tokens = w.get("embed_tokens", table)[ids]
    normed = rms(fused, w["midlayer.hidden_norm"], 1e-5)
    both = torch.cat((rms(tokens, w["midlayer.input_layernorm"], 1e-5), normed), 1)
    q, k, v = (
        (both @ w[f"midlayer.self_attn.{name}_proj"].T).view(NUM_TOKENS, -1, 8).transpose(0, 1)
        for name in "qkv"
    )
    angles = torch.outer(
        torch.arange(NUM_TOKENS), asked.get("rope_theta", 10000.0) ** (-torch.arange(0, 8, 2) / 8)
    ).repeat(1, 2)

    def turned(x: Tensor) -> Tensor:
        rotated = torch.cat((-x[..., 4:], x[..., :4]), -1)
        return x * angles.cos() + rotated * angles.sin()

    attended = scaled_dot_product_attention(
        turned(q), turned(k), v, is_causal=True, enable_gqa=True
    )
    hidden = normed if asked.get("norm_before_residual") else fused
    hidden = hidden + attended.transpose(0, 1).flatten(1) @ w["midlayer.self_attn.o_proj"].T
    mlp = rms(hidden, w["midlayer.post_attention_layernorm"], 1e-5)
    gate, up = (mlp @ w[f"midlayer.mlp.{name}_proj"].T for name in ("gate", "up"))
    hidden = hidden + (silu(gate) * up) @ w["midlayer.mlp.down_proj"].T
    known = rms(hidden, w["norm"], 1e-5) @ w["lm_head"].T
    expected = torch.full((NUM_TOKENS, 260), -torch.inf)
    every = 2 if "num_draft_tokens" in asked else 1
    expected[:, : every * known.shape[1] : every] = known
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)
    assert head.made is not None
    torch.testing.assert_close(head.made, hidden[-13:], atol=1e-3, rtol=1e-4)


def states_after(decoder: Decoder, ids: list[int]) -> Tensor:
    """What comes out of its last layer, before the norm."""
    batch = make_batch([(Tokens(ids, [*range(8)]), NUM_TOKENS)], 4, every_row=True)
    return decoder._states(batch, new_slab(decoder.config, 8, 4, decoder.dtype), None)[0]


@pytest.mark.parametrize("variant", ["glm4-moe", "deepseek-v3"])
def test_an_mtp_layer(variant: str, tmp_path: Path) -> None:
    """Its block is that of transformers' third layer, the rest is written plainly."""
    checkpoint = write_checkpoint(tmp_path / "model", variant)
    model = describe_model(add_mtp_layer(tmp_path / "model"))
    head, states = head_of(load(model), mtp_layer(model))
    logits, ids = computed(head, states)
    theirs, eps = checkpoint.model.model, model.config.rms_norm_eps
    w = load_file(tmp_path / "model" / "model.safetensors")
    e_norm, h_norm, eh_proj, norm = (
        w[f"model.layers.3.{name}.weight"]
        for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    )
    with torch.no_grad():
        prompt = torch.tensor([ids])
        last = theirs(prompt).last_hidden_state
        torch.testing.assert_close(states, last[0], atol=1e-4, rtol=1e-4)
        tokens = theirs.embed_tokens(prompt)
        hidden = torch.cat((rms(tokens, e_norm, eps), rms(last, h_norm, eps)), 2) @ eh_proj.T
        positions = torch.arange(NUM_TOKENS)[None]
        mask = torch.full((1, 1, NUM_TOKENS, NUM_TOKENS), -torch.inf).triu(1)
        hidden = theirs.layers[2](
            hidden,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=theirs.rotary_emb(hidden, positions),
        )
        expected = checkpoint.model.lm_head(rms(hidden, norm, eps))[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_the_compiled_step_keeps_the_same_states(tmp_path: Path) -> None:
    model = describe_model(write_tiny_model(tmp_path / "tiny", inner=96))
    place = write_eagle3(tmp_path / "head", tmp_path / "tiny")
    whole, drafts = load(model, torch.bfloat16), eagle3_head(place, model)
    assert isinstance(whole, CpuDecoder)
    decoders = load(model), whole, without_step(whole)
    assert_as_close(*(head_of(each, drafts)[1].float() for each in decoders))


def without_step(decoder: CpuDecoder) -> Decoder:
    """The same weights in steps of torch."""
    plain = Decoder.__new__(Decoder)
    vars(plain).update(vars(decoder))
    return plain


@pytest.mark.parametrize("num_draft_tokens", [0, 61])
def test_a_compiled_head(num_draft_tokens: int, tmp_path: Path) -> None:
    """As close to float32 as torch in bfloat16, also what it makes for its own next token."""
    model = describe_model(write_tiny_model(tmp_path / "tiny", inner=96))
    head, of = tmp_path / "head", tmp_path / "tiny"
    place = write_eagle3(head, of, head_dim=16, num_draft_tokens=num_draft_tokens)
    found = []
    for dtype, is_compiled in (
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ):
        decoder = HeadDecoder(load(model, dtype), eagle3_head(place, model))
        assert (decoder._step is not None) == (dtype == torch.bfloat16)
        decoder._step = decoder._step if is_compiled else None
        given = torch.randn(NUM_TOKENS, 128, generator=torch.Generator().manual_seed(1))
        logits, _ = computed(decoder, given.to(torch.bfloat16).to(dtype))
        assert decoder.made is not None
        known = logits[:, : 2 * num_draft_tokens : 2] if num_draft_tokens else logits
        assert (logits.isinf().sum(1) == 260 - known.shape[1]).all()
        found.append((known, decoder.made.float()))
    for exact, torchs, ours in zip(*found, strict=True):
        assert_as_close(exact, ours, torchs)


@pytest.mark.parametrize(
    "asked", [{}, {"is_authors": True}, {"num_known": 61}], ids=["vLLM", "authors", "some tokens"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_medusa_heads(
    dtype: torch.dtype, asked: dict[str, Any], model: ModelDescription, tmp_path: Path
) -> None:
    """As the paper and the authors' code describe them; also with the states of a compiled step."""
    place = write_medusa(tmp_path, Path(model.source), **asked)
    whole = load(model, dtype)
    assert isinstance(whole, CpuDecoder) == (dtype == torch.bfloat16)
    heads = MedusaHeads(whole, medusa_heads(place, model))
    kept = heads.keep_states(whole, 32)
    logits, _ = computed(whole)
    table = load_file(Path(model.source) / "model.safetensors")["model.embed_tokens.weight"]
    atol = 1e-3 if dtype == torch.float32 else 0.3
    states = kept.by_slot[:NUM_TOKENS].float()
    torch.testing.assert_close(states @ table.T, logits, atol=atol, rtol=0.05)

    (file,) = place.glob("*.safetensors")
    w = {name: each.to(dtype) for name, each in load_file(file).items()}
    named = heads.token_ids(kept.by_slot[:NUM_TOKENS], 2)
    assert heads.num_heads == 3 and named.shape == (NUM_TOKENS, 2)
    for head in range(2):
        x = kept.by_slot[:NUM_TOKENS]
        for j in range(2):
            block = f"{head}.{j}.linear" if "is_authors" in asked else f"blocks.{head}.layers.{j}"
            x = x + silu(linear(x, w[f"{block}.weight"], w.get(f"{block}.bias")))
        rows = w[f"{head}.2.weight" if "is_authors" in asked else f"lm_heads.{head}.weight"]
        said = (x @ rows.T).float()
        ids = named[:, head] // 2 if "num_known" in asked else named[:, head]
        torch.testing.assert_close(
            said.gather(1, ids.unsqueeze(1))[:, 0], said.max(1).values, atol=0.0, rtol=0.01
        )


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_first_layers_share_their_weights(quantization: Any, model: ModelDescription) -> None:
    """Also those that the compiled step reads; and the whole model is as before."""
    whole = load_model(model, torch.bfloat16, torch.device("cpu"), quantization=quantization)
    before, _ = computed(whole)
    first = first_layers_of(whole, first_layers(model, 1))
    assert isinstance(first, CpuDecoder)
    logits, _ = computed(first)
    exact = load_model(model, torch.float32, torch.device("cpu"), quantization=quantization)
    truth, _ = computed(first_layers_of(exact, first_layers(model, 1)))
    assert_as_close(truth, logits, computed(without_step(first))[0])
    assert not torch.equal(logits, before)
    assert torch.equal(computed(whole)[0], before)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"hidden_size": 64}, "hidden size is 64, not 128"),
        ({"target_hidden_size": 64}, "hidden size is 64, not 128"),
        ({"vocab_size": 300}, "vocab_size is 300, not 260"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, not 1"),
        ({"architectures": ["LlamaForCausalLM"]}, "needs a head"),
        ({"eagle_aux_hidden_state_layer_ids": None}, r"layers \[2, 1, -1\] are needed"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"tensors": {"fc.bias": np.ones(128, np.float32)}}, "unexpected tensors: model.fc.bias"),
        ({"tensors": {"norm.weight": np.ones(9, np.float32)}}, r"model.norm.weight is \[9\]"),
        ({"draft_vocab_size": 30}, "needs d2t"),
    ],
    ids=str,
)
def test_what_is_no_head_of_the_model_is_refused(
    asked: dict[str, Any], reason: str, model: ModelDescription, tmp_path: Path
) -> None:
    place = write_eagle3(tmp_path / "head", Path(model.source), **asked)
    with pytest.raises(ModelError, match=reason):
        eagle3_head(place, model)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, not 128"),
        ({"vocab_size": 300}, "vocab_size is 300, not 260"),
        (
            {"tensors": {"blocks.1.layers.0.weight": np.ones((64, 64), np.float32)}},
            r"blocks.1.layers.0.weight is \[64, 64\], not \[128, 128\]",
        ),
        ({"tensors": {"fc.bias": np.ones(128, np.float32)}}, "unexpected tensors: fc.bias"),
        ({"num_heads": 0}, "missing tensors: blocks.0.layers.0.weight"),
        ({"num_known": 9, "tensors": {"token_map": np.arange(8)}}, r"needs token_map, \[9\]"),
    ],
    ids=str,
)
def test_what_are_no_medusa_heads_of_the_model_is_refused(
    asked: dict[str, Any], reason: str, model: ModelDescription, tmp_path: Path
) -> None:
    place = write_medusa(tmp_path, Path(model.source), **asked)
    with pytest.raises(ModelError, match=reason):
        medusa_heads(place, model)


def test_tokens_that_the_model_does_not_have_are_refused(
    model: ModelDescription, tmp_path: Path
) -> None:
    beyond = {"d2t": np.full(61, 200)}
    place = write_eagle3(tmp_path, Path(model.source), num_draft_tokens=61, tensors=beyond)
    with pytest.raises(ModelError, match=r"d2t .* names tokens that the model does not have"):
        HeadDecoder(load(model), eagle3_head(place, model))


def test_a_model_without_such_layers_is_refused(model: ModelDescription) -> None:
    with pytest.raises(ModelError, match="has no layer that predicts further tokens"):
        mtp_layer(model)
    with pytest.raises(ModelError, match="exit_layer = 2 is too large"):
        first_layers(model, 2)
