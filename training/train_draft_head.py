"""Train an EAGLE-3 head that drafts for a demo model, and write it as vLLM and SGLang read one.

    python training/train_draft_head.py --model large --minutes 10 --out heads/demo-large

The head learns what the model would say after each token of the rows on which the model was
trained, also from states that it has made itself (EAGLE-3, arXiv 2503.01840, "training-time test").
Measure it with `python -m bench.speculation --config '{"method": "eagle3", "model": ...}'`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as functional
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.demo_batches import make_batch
from training.demo_export import load_exported
from training.demo_model import MLP, SHAPES, Decoder, Linear, ModelShape, RMSNorm, rotate
from training.demo_tokenizer import MAX_LENGTH, PAD_ID
from training.train_demo_models import REPOSITORY, Optimizer

NUM_UNROLLED = 3  # tokens of a draft that are learned
LENGTH, NUM_ROWS, RECALL_SHARE = 192, 12, 0.3
NUM_REPEATED = 3  # rows that repeat a part of themselves, as a model does that knows nothing else
NUM_KV_HEADS, INTERMEDIATE_SIZE = 1, 128  # a head that is large costs more than it gains
LOG_EVERY_STEPS = 20
KV: TypeAlias = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal grouped-query attention over a token and a state, side by side."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        hidden, self.head_dim = shape.hidden_size, shape.head_dim
        self.num_groups = shape.num_heads // shape.num_kv_heads
        std = (2 * hidden) ** -0.5
        self.q_proj = Linear(2 * hidden, shape.num_heads * shape.head_dim, std)
        self.k_proj = Linear(2 * hidden, shape.num_kv_heads * shape.head_dim, std)
        self.v_proj = Linear(2 * hidden, shape.num_kv_heads * shape.head_dim, std)
        self.o_proj = Linear(shape.num_heads * shape.head_dim, hidden, hidden**-0.5)

    def forward(
        self, x: Tensor, cosine: Tensor, sine: Tensor, before: list[KV]
    ) -> tuple[Tensor, KV]:
        """Attend over x [batch, length, 2 * hidden]; cosine and sine are [length, head_dim / 2].

        Args:
            before: keys and values of earlier tokens of the drafts. Those of the first one are of
                all positions, and the i'th row sees them up to its own; of the others only its own.
        """
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (
            each(x).view(heads).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = rotate(q, cosine, sine) * self.head_dim**-0.5
        k, v = (
            each.repeat_interleave(self.num_groups, dim=1) for each in (rotate(k, cosine, sine), v)
        )
        length = x.shape[1]
        (all_k, all_v), *own = [
            (each_k[:, :, :length], each_v[:, :, :length]) for each_k, each_v in [*before, (k, v)]
        ]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = [(q @ all_k.transpose(2, 3)).masked_fill(later, -torch.inf)]
        scores += [(q * own_k).sum(-1, keepdim=True) for own_k, _ in own]
        weights = torch.cat(scores, -1).float().softmax(-1).to(x.dtype)
        mixed = weights[..., :length] @ all_v
        for place, (_, own_v) in enumerate(own):
            mixed = mixed + weights[..., length + place, None] * own_v
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out, (k, v)


class Layer(nn.Module):
    """The layer of a head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        norms = [RMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(3)]
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norms
        self.self_attn, self.mlp = Attention(shape), MLP(shape)

    def forward(
        self, tokens: Tensor, states: Tensor, cosine: Tensor, sine: Tensor, before: list[KV]
    ) -> tuple[Tensor, KV]:
        """The next states [batch, length, hidden] of embeddings and states of the same shape."""
        both = torch.cat((self.input_layernorm(tokens), self.hidden_norm(states)), -1)
        attended, kv = self.self_attn(both, cosine, sine, before)
        states = states + attended
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out, kv


class Head(nn.Module):
    """An EAGLE-3 head. Names of the parameters are those of its checkpoints."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        shape = replace(model.shape, num_kv_heads=NUM_KV_HEADS, intermediate_size=INTERMEDIATE_SIZE)
        self.shape = shape
        self.kept = 1, shape.num_layers // 2 + 1, shape.num_layers - 1
        self.fc = Linear(3 * shape.hidden_size, shape.hidden_size, (3 * shape.hidden_size) ** -0.5)
        self.midlayer = Layer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.norm.weight.data.copy_(model.norm.weight)
        # It begins with what the model itself would say without its last layer.
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, -shape.hidden_size :] = torch.eye(shape.hidden_size)
            for last in (self.midlayer.self_attn.o_proj, self.midlayer.mlp.down_proj):
                last.weight.mul_(0.1)

    def loss(self, model: Decoder, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The cross entropy with the model's distributions of all drafted tokens of ids [batch,
        length], and for each place of a draft the share that the model would choose too."""
        is_token = ids != PAD_ID
        with torch.no_grad():
            kept, residual = _states(model, ids, self.kept)
            wanted = model.logits(residual)
        states = self.fc(torch.cat(kept, -1))
        rotary = [each.to(states.dtype) for each in model.rotary(ids.shape[1])]
        total, shares, before = torch.zeros(()), [], list[KV]()
        for place in range(1, NUM_UNROLLED + 1):
            # States are of positions i, tokens of i + place, and so is what the model says.
            states, length = states[:, : ids.shape[1] - place], ids.shape[1] - place
            tokens = model.embed_tokens(ids[:, place:]).to(states.dtype).detach()
            cosine, sine = (each[place - 1 :][:length] for each in rotary)
            states, kv = self.midlayer(tokens, states, cosine, sine, before)
            before.append(kv)
            said = functional.linear(self.norm(states), model.embed_tokens.weight.to(states.dtype))
            matters = is_token[:, place:]
            target, logits = wanted[:, place:][matters], said[matters].float()
            total = total + functional.cross_entropy(logits, target.softmax(-1)) * 0.8 ** (
                place - 1
            )
            shares.append((logits.argmax(-1) == target.argmax(-1)).float().mean().detach())
        return total, shares

    def write(self, folder: Path) -> None:
        """Write config and weights (bfloat16) into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            **self.shape.hf_config(),
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": self.shape.vocab_size,
            "tie_word_embeddings": False,
            "max_position_embeddings": MAX_LENGTH,
            "eagle_aux_hidden_state_layer_ids": self.kept,
        }
        weights = {
            name: each.detach().to(torch.bfloat16) for name, each in self.state_dict().items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _rows(tokenizer: Tokenizer, step: int) -> Tensor:
    """Token ids [NUM_ROWS, LENGTH] of a step."""
    ids, _ = make_batch(tokenizer, f"head {step}", LENGTH, NUM_ROWS, RECALL_SHARE)
    rng = random.Random(step)
    for row in ids[:NUM_REPEATED]:
        first, period = rng.randrange(LENGTH // 3), rng.randrange(2, LENGTH // 4)
        repeated = row[first : first + period].repeat(LENGTH // period + 1)
        row[first:] = repeated[: LENGTH - first]
    return ids


def _states(model: Decoder, ids: Tensor, layers: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    """What these layers get, and the residual stream: [batch, length, hidden] each."""
    kept: dict[int, Tensor] = {}
    x = model.embed_tokens(ids).to(torch.bfloat16)
    rotary = [each.to(x.dtype) for each in model.rotary(ids.shape[1])]
    for index, block in enumerate(model.layers):
        kept[index] = x
        x = block(x, *rotary)
    return [kept[layer] for layer in layers], x


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(SHAPES), default="large")
    parser.add_argument("--minutes", type=float, default=20.0, help="of CPU time")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--out", type=Path, required=True, help="folder of the head")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    folder = REPOSITORY / "disagg" / "assets" / f"demo-{arguments.model}"
    model = load_exported(SHAPES[arguments.model], folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    head = Head(model)
    optimizer = Optimizer(head, arguments.rate)
    began_s, step, sums = time.process_time(), 0, torch.zeros(NUM_UNROLLED)
    while (done := (time.process_time() - began_s) / (60 * arguments.minutes)) < 1:
        ids = _rows(tokenizer, step)
        loss, shares = head.loss(model, ids)
        torch.autograd.backward(loss)
        optimizer.step(min(1.0, (step + 1) / 20, (1 - done) / 0.5))
        sums, step = sums + torch.stack(shares), step + 1
        if step % LOG_EVERY_STEPS == 0:
            head.write(arguments.out)
            right = " ".join(f"{float(each):.3f}" for each in sums / LOG_EVERY_STEPS)
            print(f"step {step} loss {float(loss):.4f} right {right}", flush=True)
            sums = torch.zeros(NUM_UNROLLED)
    head.write(arguments.out)


if __name__ == "__main__":
    main()
