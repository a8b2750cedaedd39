"""Measures what KV that is given up saves, and what the answer loses, on SmolLM2-135M-Instruct.

    python -m bench.eviction [--tiny]

One engine computes prompts, and another goes on with them, once with all KV and once with that of
the first and the last tokens (`kv_eviction`). Everything is computed: both in one run.

- `kept`: first and last tokens of the prompt. `moved`: the KV of the pages' prompts that moves, as
  a share of all. `held`: bytes of blocks at the end of the answers to the questions.
- `perplexity`: of the text that follows `PROMPT_TOKENS` of a page of docs/, whose tokens see what
  is left of the prompt, and each other.
- `recall`: share of the questions about texts of 500 to 1,800 tokens that are answered with the
  right fact, which is one of the first tenth of the text (tests/held_out.jsonl).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.report import finish, print_table
from bench.requests import new_request
from disagg.config import EngineConfig
from disagg.engine.device.build import build_engine
from disagg.engine.sched.sequence import Sequence as EngineSequence
from disagg.kvtransfer.pulls import describe
from disagg.kvtransfer.slab import Slab, Stamps
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import KVEviction, SamplingParams
from disagg.models.batch import Batch
from disagg.models.description import ModelDescription, describe_model
from disagg.models.fetched import cached_file, fetch
from disagg.text.tokenizer import Tokenizer
from disagg.worker.kv_export import KVExport

ROOT = Path(__file__).parents[1]
PAGES = "design.md", "models.md", "planning.md", "reliability.md"
QUESTIONS = ROOT / "tests" / "held_out.jsonl"
LONGEST = slice(6, 24)  # of the questions
PROMPT_TOKENS, TEXT_TOKENS = 1536, 256
ANSWER_TOKENS = 12
NUM_BLOCKS, BLOCK_SIZE = 512, 16
KEPT: tuple[KVEviction | None, ...] = (
    None,
    KVEviction(window=1024),
    KVEviction(window=512),
    KVEviction(window=256),
    KVEviction(sinks=256, window=256),
)


class Arrived(NamedTuple):
    """A prompt on the second engine, which has not joined it."""

    sequence: EngineSequence
    num_blocks: int  # that moved


class Pair:
    """Two engines with the same model, whose KV is copied from one to the other."""

    def __init__(self, model: ModelDescription) -> None:
        config = EngineConfig(
            device="cpu",
            block_size=BLOCK_SIZE,
            max_model_len=2048,
            max_num_seqs=2,
            num_gpu_blocks_override=NUM_BLOCKS,
        )
        self.first, self._source = build_engine(config, model)
        self.second, self._target = build_engine(config, model)
        self.block_nbytes = self._source.block_nbytes
        stamps = Stamps(NUM_BLOCKS, "bench", 1)
        peer = describe("local", Slab(1, NUM_BLOCKS, 1, "bench"), stamps)
        self._export = KVExport(self.first, peer, stamps.generations)

    def move(self, name: str, prompt: list[int], kept: KVEviction | None) -> Arrived:
        sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, kv_eviction=kept)
        request = new_request(name, prompt, sampling, BLOCK_SIZE)
        leaving = EngineSequence(request, hand_over=True)
        self.first.submit(leaving)
        while self.first.has_work:
            self.first.step()
        ticket = self._export.leave(leaving, 0.0)
        request = new_request(
            name, leaving.tokens, sampling, BLOCK_SIZE, num_prompt_tokens=len(prompt)
        )
        sequence = EngineSequence(request)
        sequence.block_ids = self._copied(ticket)
        sequence.num_computed, sequence.num_evicted = ticket.num_tokens, ticket.num_evicted
        self._export.release(ticket.ticket_id)
        return Arrived(sequence, len(ticket.block_ids))

    def _copied(self, ticket: KVTicket) -> list[int]:
        into = self.second.reserve(len(ticket.block_ids))
        assert into is not None
        for block_id, source in zip(into, ticket.block_ids, strict=True):
            self._target.write_block(block_id, self._source.read_block(source))
        return into

    def answer(self, arrived: Arrived) -> list[int]:
        """The tokens of the answer."""
        sequence = arrived.sequence
        self.second.join(sequence)
        while self.second.has_work:
            self.second.step()
        return sequence.tokens[sequence.num_prompt_tokens :]

    def loss(self, arrived: Arrived, text: list[int]) -> float:
        """The mean loss of the tokens of a text behind the prompt, but the first."""
        sequence, num = arrived.sequence, len(text)
        start, evicted = sequence.num_computed, sequence.num_evicted
        table = sequence.block_ids
        more = self.second.reserve(-(-(start - evicted + num) // BLOCK_SIZE) - len(table))
        assert more is not None
        batch = _chunk(text, start, evicted, [*table, *more])
        runner: Any = self.second.runner
        logits = runner.decoder.forward(batch, self._target.pages)
        losses = torch.nn.functional.cross_entropy(logits[:-1], batch.token_ids[1:])
        self.second.release([*table, *more])
        return float(losses)


def _chunk(text: list[int], start: int, evicted: int, table: list[int]) -> Batch:
    """The batch in which a text is computed at once, as an engine makes it."""
    rows = torch.arange(len(text))
    ends = rows + (start - evicted)
    blocks = torch.tensor([table], dtype=torch.int32)
    return Batch(
        token_ids=torch.tensor(text),
        positions=rows + start,
        slots=blocks[0].long()[ends // BLOCK_SIZE] * BLOCK_SIZE + ends % BLOCK_SIZE,
        query_start=torch.tensor([0, len(text)], dtype=torch.int32),
        context_lens=ends[-1:].int() + 1,
        block_tables=blocks,
        logits_rows=rows,
        num_decodes=0,
        max_query_len=len(text),
        query_lens=(len(text),),
        context_lens_host=(int(ends[-1]) + 1,),
        are_shifted=evicted > 0,
    )


def _questions(count: int) -> Iterator[tuple[str, str]]:
    """Prompts in which the model's answer has begun, and the word that it should say next."""
    for line in QUESTIONS.read_text(encoding="utf-8").splitlines()[LONGEST][:count]:
        asked = json.loads(line)
        begun, _, right = asked["label"].rstrip(".").rpartition(" ")
        turn = f"<|im_start|>user\n{asked['prompt']}<|im_end|>\n<|im_start|>assistant\n{begun}"
        yield turn, right


class Sums:
    """What one row of the table adds up."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.num_right = self.num_moved = self.num_held = 0  # the last two in blocks


def measure(pair: Pair, tokenizer: Tokenizer, tiny: bool) -> list[dict[str, Any]]:
    """Each prompt in all ways, one after another: the first engine then has it in its cache."""
    texts = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES]
    sums = [Sums() for _ in KEPT]
    for text in texts[: 1 if tiny else None]:
        page = tokenizer.encode(text, add_special_tokens=False)
        for kept, own in zip(KEPT, sums, strict=True):
            arrived = pair.move("page", page[:PROMPT_TOKENS], kept)
            own.num_moved += arrived.num_blocks
            after = page[PROMPT_TOKENS : PROMPT_TOKENS + TEXT_TOKENS]
            own.losses.append(pair.loss(arrived, after))
    questions = [*_questions(2 if tiny else 18)]
    for prompt, right in questions:
        token_ids = tokenizer.encode(prompt, add_special_tokens=False)
        for kept, own in zip(KEPT, sums, strict=True):
            arrived = pair.move("question", token_ids, kept)
            num_evicted = arrived.sequence.num_evicted
            answer = pair.answer(arrived)
            own.num_right += right in tokenizer.decode(answer)
            own.num_held += -(-(len(token_ids) + len(answer) - num_evicted) // BLOCK_SIZE)
    return [
        {
            "kept": "all" if kept is None else f"{kept.sinks}+{kept.window}",
            "moved": own.num_moved / sums[0].num_moved,
            "held": own.num_held * pair.block_nbytes,
            "perplexity": math.exp(sum(own.losses) / len(own.losses)),
            "recall": own.num_right / len(questions),
        }
        for kept, own in zip(KEPT, sums, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="one page and two questions")
    args = parser.parse_args()
    fetch("smollm2", lambda event, message, **fields: print(message, flush=True), lambda: False)
    model = describe_model(cached_file("smollm2"))
    tokenizer = Tokenizer.from_json(model.read_tokenizer(), model.name)
    rows = measure(Pair(model), tokenizer, args.tiny)
    print_table(rows)
    finish("eviction", rows, prompt_tokens=PROMPT_TOKENS, block_size=BLOCK_SIZE)


if __name__ == "__main__":
    main()
