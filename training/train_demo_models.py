"""Train, evaluate and export the demo models that ship with the package.

    python training/train_demo_models.py --model large --minutes 120
    python training/train_demo_models.py --model large --final --steps 4000
    python training/train_demo_models.py --model large --evaluate
    python training/train_demo_models.py --model large --export
    python training/train_demo_models.py --model tools --minutes 40
    python training/train_demo_models.py --model small --prompts prompts.jsonl

A run continues from its checkpoint in --folder.  One with --final begins where the main run has
ended, and one of demo-tools with demo-small as exported.  Batches depend on (schedule, seed, step)
only, and the learning rate and curriculum on the progress alone, so a run by --steps repeats
exactly.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.demo_batches import IGNORE, make_batch
from training.demo_evaluate import all_levels, evaluate
from training.demo_export import export, load_exported, widened
from training.demo_model import SHAPES, Decoder
from training.demo_tasks import FINAL_TASKS, MAIN_TASKS, Mixture
from training.demo_tokenizer import load_tokenizer, load_tools_tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent
CHECKPOINT_EVERY_S = 180.0
LOG_EVERY_STEPS = 25


@dataclass(frozen=True)
class Stage:
    """What rows look like until the run's progress reaches `until`.

    Steps go round `rows`: the length of a step's rows, and the share of recall among them.
    """

    until: float
    rows: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Schedule:
    """The course of one run: its curriculum, its tasks and its learning rate."""

    name: str
    stages: tuple[Stage, ...]
    mixture: Mixture
    decay_from: float
    tool_share: float = 0.0  # of rows in which functions are offered

    def stage_at(self, progress: float) -> Stage:
        """Return the curriculum's stage at a progress in [0, 1]."""
        return next(stage for stage in self.stages if progress < stage.until)

    def rate_factor(self, step: int, progress: float) -> float:
        """Rise linearly over the first steps, stay at one, fall linearly to zero."""
        return min(1.0, step / WARMUP_STEPS, max(0.0, (1.0 - progress) / (1.0 - self.decay_from)))


WARMUP_STEPS = 50
# Mostly short rows: attention over 2,048 tokens costs several times as much a token, and the
# circuits that recall needs form on short rows first.
MAIN = Schedule(
    "train",
    (
        Stage(0.35, ((256, 0.6),)),
        Stage(0.60, ((512, 0.6), (256, 0.6))),
        Stage(0.84, ((1024, 0.4), (512, 0.4), (256, 0.4))),
        Stage(1.01, ((2048, 0.4), (1024, 0.4), (512, 0.4), (256, 0.4))),
    ),
    MAIN_TASKS,
    decay_from=0.8,
)
# Arithmetic needs no long rows; recall does, and gets just enough of them to stay.
FINAL = Schedule(
    "final",
    (Stage(1.01, ((256, 0.1),) * 5 + ((512, 0.5), (1024, 0.5), (2048, 0.5))),),
    FINAL_TASKS,
    decay_from=0.6,
)
# Functions and their calls fit into short rows; everything else must stay.
TOOLS = Schedule(
    "tools",
    (Stage(1.01, ((256, 0.3), (256, 0.3), (512, 0.5))),),
    MAIN_TASKS,
    decay_from=0.5,
    tool_share=0.8,
)


class Optimizer:
    """Muon for the layers' matrices, AdamW for the embedding and the norms, one factor for both."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        # match_rms_adamw scales Muon's orthogonal updates to AdamW's size: one rate serves both.
        muon = torch.optim.Muon(
            matrices, lr=rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
        )
        adamw = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.parts: tuple[torch.optim.Optimizer, ...] = (muon, adamw)
        self.rate = rate

    def step(self, factor: float) -> None:
        """Apply and clear the gradients at `factor` times the rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.rate * factor
            part.step()
            part.zero_grad(set_to_none=True)


@dataclass
class Progress:
    """How far a run of one schedule has come; saved with its checkpoint."""

    schedule: str = MAIN.name
    step: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0

    def fraction(self, arguments: argparse.Namespace) -> float:
        """Return the part of the run that is done, by steps or by minutes."""
        if arguments.steps:
            return float(self.step / arguments.steps)
        return float(self.elapsed_s / (arguments.minutes * 60))


class Trainer:
    """One model, its optimizer, its progress and its checkpoint."""

    def __init__(self, arguments: argparse.Namespace, tokenizer: Tokenizer) -> None:
        torch.manual_seed(arguments.seed)
        self.arguments = arguments
        self.tokenizer = tokenizer
        self.device = torch.device(arguments.device)
        self.model = self._new_model().to(self.device)
        self.optimizer = Optimizer(self.model, arguments.rate)
        self.schedule = FINAL if arguments.final else MAIN
        if arguments.model == "tools":
            self.schedule = TOOLS
        self.progress = Progress(self.schedule.name)
        self.checkpoint: Path = arguments.folder / f"{arguments.model}.pt"
        if self.checkpoint.exists():
            self._restore()
        if arguments.compile:
            torch.compiler.config.recompile_limit = 64
            for block in self.model.layers:
                block.compile()

    def _new_model(self) -> Decoder:
        shape = SHAPES[self.arguments.model]
        if self.arguments.model != "tools":
            return Decoder(shape)
        folder = self.arguments.assets / "demo-small"
        small = load_exported(SHAPES["small"], folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return widened(small, tokenizer, shape, self.tokenizer)

    def _restore(self) -> None:
        saved = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for part, state in zip(self.optimizer.parts, saved["optimizer"], strict=True):
            part.load_state_dict(state)
        progress = Progress(**saved["progress"])
        if progress.schedule == self.schedule.name:
            self.progress = progress
        elif self.schedule is MAIN and not self.arguments.export:
            raise SystemExit(f"{self.checkpoint} has begun its final run: pass --final")

    def save(self) -> None:
        """Write the checkpoint beside its place and move it there, so that none is ever half."""
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "model": self.model.state_dict(),
            "optimizer": [part.state_dict() for part in self.optimizer.parts],
            "progress": vars(self.progress),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(content, partial)
        partial.replace(self.checkpoint)

    def _batch(self, stage: Stage) -> tuple[Tensor, Tensor]:
        step = self.progress.step
        length, recall_share = stage.rows[step % len(stage.rows)]
        seed = f"{self.schedule.name} {self.arguments.seed} {step}"
        num_rows = self.arguments.batch_tokens // length
        ids, labels = make_batch(
            self.tokenizer, seed, length, num_rows, recall_share, self.schedule.mixture,
            self.schedule.tool_share,
        )  # fmt: skip
        return ids.to(self.device), labels.to(self.device)

    def step(self) -> tuple[Tensor, Tensor]:
        """Train on one batch; return its (loss, accuracy over answer tokens)."""
        fraction = self.progress.fraction(self.arguments)
        ids, labels = self._batch(self.schedule.stage_at(fraction))
        answers = labels != IGNORE
        logits = self.model.logits(self.model(ids)[answers])
        loss = functional.cross_entropy(logits, labels[answers])
        torch.autograd.backward(loss)
        self.optimizer.step(self.schedule.rate_factor(self.progress.step, fraction))
        self.progress.step += 1
        self.progress.num_tokens += ids.numel()
        accuracy = (logits.detach().argmax(-1) == labels[answers]).float().mean()
        return loss.detach(), accuracy

    def run(self) -> None:
        """Train to the end of the schedule, saving now and then."""
        saved_s = last_s = time.monotonic()
        tokens_then = self.progress.num_tokens
        sums = torch.zeros(2)
        while (fraction := self.progress.fraction(self.arguments)) < 1.0:
            start_s = time.monotonic()
            sums += torch.stack(self.step()).cpu()
            now_s = time.monotonic()
            self.progress.elapsed_s += now_s - start_s
            if self.progress.step % LOG_EVERY_STEPS == 0:
                speed = (self.progress.num_tokens - tokens_then) / (now_s - last_s)
                self._log(sums / LOG_EVERY_STEPS, speed, fraction)
                sums.zero_()
                last_s, tokens_then = now_s, self.progress.num_tokens
            if now_s - saved_s > CHECKPOINT_EVERY_S:
                self.save()
                saved_s = now_s
        self.save()

    def _log(self, means: Tensor, speed: float, fraction: float) -> None:
        elapsed_s = self.progress.elapsed_s
        remaining_s = elapsed_s * (1 - fraction) / max(fraction, 1e-9)
        print(
            f"step {self.progress.step} loss {means[0]:.4f} accuracy {means[1]:.4f} "
            f"tokens/s {speed:.0f} tokens {self.progress.num_tokens / 1e6:.1f}M "
            f"elapsed {elapsed_s / 60:.1f}min eta {remaining_s / 60:.1f}min "
            f"length {self.schedule.stage_at(fraction).rows[0][0]}",
            flush=True,
        )


def evaluate_exported(arguments: argparse.Namespace) -> None:
    """Print the exported model's accuracy table, then the same as one line of JSON."""
    folder = arguments.assets / f"demo-{arguments.model}"
    model = load_exported(SHAPES[arguments.model], folder).to(arguments.device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    accuracies = evaluate(model, tokenizer, arguments.samples, arguments.seed)
    for name, accuracy in accuracies.items():
        print(f"{name:<18} {accuracy:7.1%}")
    print(json.dumps({"model": f"demo-{arguments.model}", "accuracy": accuracies}))


def write_prompts(arguments: argparse.Namespace) -> None:
    """Write labelled prompts of every level as `disagg cascade calibrate` reads them."""
    folder = arguments.assets / f"demo-{arguments.model}"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with arguments.prompts.open("w") as file:
        for level in all_levels():
            rng = random.Random(f"held out {arguments.seed} {level.name}")
            for _ in range(arguments.samples):
                turn = level.make(rng, tokenizer)
                row = {"prompt": turn.question, "label": turn.answer}
                file.write(json.dumps(row) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(SHAPES), required=True)
    parser.add_argument("--minutes", type=float, default=120.0, help="length of the whole run")
    parser.add_argument("--steps", type=int, default=0, help="length in steps, instead of minutes")
    parser.add_argument("--final", action="store_true", help="the run that follows the main one")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / ".train")
    parser.add_argument("--assets", type=Path, default=REPOSITORY / "disagg" / "assets")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--samples", type=int, default=200, help="conversations a table row")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--evaluate", action="store_true", help="measure the exported model")
    mode.add_argument("--export", action="store_true", help="export the checkpoint as it is")
    mode.add_argument("--prompts", type=Path, help="write held-out prompts with their answers")
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    arguments = parse_arguments()
    if arguments.evaluate:
        evaluate_exported(arguments)
        return
    if arguments.prompts:
        write_prompts(arguments)
        return
    if arguments.model == "tools":
        tokenizer = load_tools_tokenizer(arguments.folder, arguments.assets / "demo-small")
    else:
        tokenizer = load_tokenizer(arguments.folder)
    trainer = Trainer(arguments, tokenizer)
    if not arguments.export:
        trainer.run()
    export(trainer.model, trainer.tokenizer, arguments.assets / f"demo-{arguments.model}")


if __name__ == "__main__":
    main()
