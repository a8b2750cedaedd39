"""Measures what weights of 8 and 4 bits cost in quality and save in memory and time, on a CPU.

    python -m bench.quantised [--model smollm2] [--threads 1] [--rounds 5] [--tiny] [--quality]

- `weights MB`: by how much a process grows when it loads the model; one process a model.
- `perplexity`: of the tokens of a fixed text. Random weights (`--model 160m`) have no bits that a
  file could keep, and get random tokens.
- `ms/step`: a decode step of one stream, and of eight, after 256 tokens each.
- `ms/prompt`: these 256 tokens.
- `perplexity_on_gpus`: with the numbers and scales that a GPU would keep of the layers, which are
  widened and computed here.

The kinds of weights take turns. `packed` keeps the bits of the file. With `--quality` nothing is
timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from bench.engine import write_checkpoint
from bench.kernels_decoder import BLOCK_SIZE, NUM_BLOCKS, uniform_batch
from bench.report import finish, print_table, take_turns
from bench.shapes import SHAPES
from disagg.config import ASSETS
from disagg.kernels.dispatch import Quantization
from disagg.kernels.kv_pages import FORMATS, new_pages
from disagg.kernels.packed_matrix import quantized
from disagg.kernels.packed_sizes import BITS, Kind
from disagg.models.decoder import Decoder, build_decoder, load_model
from disagg.models.description import describe_model
from disagg.models.fetched import FETCHED, cached_file, fetch
from disagg.models.packing import LAYER_FIELDS
from disagg.models.weights import LayerWeights, load_weights

CPU = torch.device("cpu")
KINDS: dict[str, Quantization | None] = {
    "bfloat16": None,
    "int8": "int8",
    "int4": "int4",
    "packed": "packed",
}
PROMPT, OUTPUT = 256, 32
RANDOM = [name for name in SHAPES if name not in FETCHED]
NUM_RANDOM = 407  # as many as `TEXT` has for SmolLM2
TEXT = """\
The ferry left the old harbour a little after six, when the lamps along the quay were still lit
and the fishmongers were carrying their boxes up the wet steps. Only four passengers had come
aboard: a schoolteacher with two suitcases, a young couple who spoke in low voices, and a man of
about sixty who stood at the rail and looked back at the town as if he were counting its windows.
The captain knew him. For thirty years he had repaired the clocks of every church between here and
the northern islands, and now that the last of them had been replaced by an electric one, he was
going home.

It takes about five hours to cross when the sea is calm. In winter the current is stronger, and
boats that draw more than three metres have to wait for the tide before they can pass the narrow
channel between the two lighthouses. The older of these was built in 1824 from granite that was
brought down the river on barges. Its light can be seen from twenty miles away, although since the
satellites came hardly any ship depends on it. People keep it burning because they have always
done so, and because the birds that migrate in autumn have learned to turn there.

The teacher asked whether there was anything to drink. The captain's daughter, who looked after
the engine, brought her a cup of tea with too much sugar, and then sat down beside her and asked
what was in the suitcases. They were full of books. The island's only school had closed nine years
ago, when there were three pupils left; this spring there would be eleven of them, and somebody
had to teach them how to read and how to divide one number by another. She was not afraid of the
winters, she said. She was afraid that she would have to play the organ on Sundays, because the
last letter from the mayor had mentioned it twice.
"""


class Contender:
    """A model with one kind of weights."""

    def __init__(self, place: Path, decoder: Decoder) -> None:
        config = describe_model(place).config
        self.decoder = decoder
        heads = (config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self.pages = new_pages(FORMATS["bfloat16"], NUM_BLOCKS, *heads, CPU)
        self.vocab_size = config.vocab_size

    def perplexity(self, ids: list[int]) -> float:
        tables = torch.arange(-(-len(ids) // BLOCK_SIZE), dtype=torch.int32)[None]
        batch = uniform_batch(torch.tensor([ids]), 0, tables)
        every = torch.arange(len(ids))
        logits = self.decoder.forward(dataclasses.replace(batch, logits_rows=every), self.pages)
        return math.exp(float(cross_entropy(logits[:-1], torch.tensor(ids[1:]))))

    def seconds(self, num_seqs: int) -> tuple[float, float]:
        """Of the prompts, and of one decode step."""
        num_blocks = -(-(PROMPT + OUTPUT) // BLOCK_SIZE)
        tables = torch.randperm(NUM_BLOCKS)[: num_seqs * num_blocks].view(num_seqs, -1).int()
        new = torch.randint(0, self.vocab_size, (num_seqs, PROMPT))
        begin_s = time.perf_counter()
        logits = self.decoder.forward(uniform_batch(new, 0, tables), self.pages)
        prompts_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        for position in range(PROMPT, PROMPT + OUTPUT):
            new = logits.argmax(-1, keepdim=True)
            logits = self.decoder.forward(uniform_batch(new, position, tables), self.pages)
        return prompts_s, (time.perf_counter() - begin_s) / OUTPUT


def as_on_a_cpu(place: Path, quantization: Quantization | None) -> Contender:
    model = describe_model(place)
    return Contender(place, load_model(model, torch.bfloat16, CPU, quantization=quantization))


def as_on_a_gpu(place: Path, kind: Kind) -> Contender:
    model = describe_model(place)
    weights = load_weights(model, torch.bfloat16, CPU)

    def widened(layer: LayerWeights) -> LayerWeights:
        matrices = {field: getattr(layer, field) for field in LAYER_FIELDS}
        kept = {
            field: quantized(matrix, kind).widened(torch.bfloat16)
            for field, matrix in matrices.items()
            if matrix is not None
        }
        return dataclasses.replace(layer, **kept)

    weights = dataclasses.replace(weights, layers=(widened(each) for each in weights.layers))
    return Contender(place, build_decoder(model.config, weights))


def loaded_nbytes(place: Path, quantization: Quantization | None) -> int:
    """What this process has more of once a model is loaded."""
    model, process = describe_model(place), psutil.Process()
    before = process.memory_info().rss
    decoder = load_model(model, torch.bfloat16, CPU, quantization=quantization)
    grown = int(process.memory_info().rss) - before
    del decoder
    return grown


def alone(place: Path, quantization: Quantization | None) -> int:
    """`loaded_nbytes` of a new process, in which torch has grown to its size before."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as pool:
        pool.submit(loaded_nbytes, ASSETS / "demo-small", quantization).result()
        return pool.submit(loaded_nbytes, place, quantization).result()


def place_of(name: str) -> Path:
    if name in FETCHED:
        fetch(name, lambda event, message, **fields: print(message, flush=True), lambda: False)
        return cached_file(name)
    bundled = ASSETS / name
    return bundled if bundled.exists() else Path(name)


def tokens_of(name: str, place: Path) -> list[int]:
    model = describe_model(place)
    if name in RANDOM:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(0, model.config.vocab_size, (NUM_RANDOM,), generator=generator)
        return [int(each) for each in drawn]
    return list(Tokenizer.from_str(model.read_tokenizer()).encode(TEXT).ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help=f"or {', '.join(RANDOM)}, or a path")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    parser.add_argument("--quality", action="store_true", help="perplexities only")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.model, arguments.rounds = "15m", 1
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        name = arguments.model
        is_random = name in RANDOM
        measure(arguments, write_checkpoint(name, Path(folder)) if is_random else place_of(name))


def measure(arguments: argparse.Namespace, place: Path) -> None:
    batches = [1] if arguments.tiny else [1, 8]
    kinds = {
        name: kind
        for name, kind in KINDS.items()
        if kind != "packed" or describe_model(place).is_quantized
    }
    contenders = {name: as_on_a_cpu(place, kind) for name, kind in kinds.items()}
    ids = tokens_of(arguments.model, place)
    table: list[dict[str, Any]] = [
        {"weights": name, "perplexity": each.perplexity(ids)} for name, each in contenders.items()
    ]
    on_gpus = {kind: as_on_a_gpu(place, kind).perplexity(ids) for kind in BITS}
    if arguments.quality:
        print_table(table)
        finish("quantised", table, model=arguments.model, perplexity_on_gpus=on_gpus)
        return
    for row, kind in zip(table, kinds.values(), strict=True):
        row["weights MB"] = alone(place, kind) / 1e6
    for num_seqs in batches:
        prompts: dict[str, list[float]] = {name: [] for name in kinds}

        def step_s(name: str, num_seqs: int = num_seqs, prompts: Any = prompts) -> float:
            prompts_s, taken_s = contenders[name].seconds(num_seqs)
            prompts[name].append(prompts_s)
            return taken_s

        steps = take_turns({name: partial(step_s, name) for name in kinds}, arguments.rounds)
        for row, name in zip(table, kinds, strict=True):
            row[f"ms/step of {num_seqs}"] = 1e3 * steps[name]
            if num_seqs == 1:
                row["ms/prompt"] = 1e3 * statistics.median(prompts[name])
    print_table(table)
    wide, *narrow = table
    ratios = {
        row["weights"]: {key: row[key] / wide[key] for key in wide if key != "weights"}
        for row in narrow
    }
    sentences = {name: each.decoder.step_sentence for name, each in contenders.items()}
    finish(
        "quantised",
        table,
        model=arguments.model,
        num_tokens=len(ids),
        perplexity_on_gpus=on_gpus,
        threads=arguments.threads,
        of_bfloat16=ratios,
        steps=sentences,
    )


if __name__ == "__main__":
    main()
