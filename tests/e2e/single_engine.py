"""What one engine alone answers: the reference for everything that is served in parts."""

from __future__ import annotations

from pathlib import Path

from disagg.api.served_model import ServedModel
from disagg.config import EngineConfig
from disagg.engine.device.build import build_engine
from disagg.engine.sched.sequence import Sequence
from disagg.messages import GenerateRequest, SamplingParams
from disagg.models.description import describe_model


class SingleEngine:
    """Chat on one engine, one request at a time, without links, transfers or Ray."""

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        self._engine, _ = build_engine(config, describe_model(directory))
        self._model = ServedModel.from_description(
            describe_model(directory), name="single", block_size=16
        )
        self._answers: dict[GenerateRequest, str] = {}  # tests ask the same again and again

    def prompt(self, content: str) -> list[int]:
        template, tokenizer = self._model.template, self._model.tokenizer
        assert template is not None
        messages = [{"role": "user", "content": content}]
        text = template.render(messages, add_generation_prompt=True, arguments={})
        return tokenizer.encode_chat(text)

    def chat(
        self,
        content: str,
        max_tokens: int,
        *,
        temperature: float = 0,
        seed: int = 0,
        ignore_eos: bool = False,
    ) -> str:
        tokens = self.prompt(content)
        request = GenerateRequest(
            request_id="single",
            model="single",
            token_ids=tuple(tokens),
            num_prompt_tokens=len(tokens),
            hash_root=b"single",
            block_hashes=(),
            sampling=SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                stop_token_ids=() if ignore_eos else self._model.eos_token_ids,
            ),
            deadline_unix_s=float("inf"),
        )
        if request not in self._answers:
            self._answers[request] = self._answer(request)
        return self._answers[request]

    def _answer(self, request: GenerateRequest) -> str:
        sequence = Sequence(request)
        self._engine.submit(sequence)
        while self._engine.has_work:
            self._engine.step()
        return self._model.tokenizer.decode(sequence.tokens[sequence.num_prompt_tokens :])
