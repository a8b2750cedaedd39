"""What one engine alone answers: the reference for everything that is served in parts."""

from __future__ import annotations

from array import array
from pathlib import Path

from disagg.api.served_model import ServedModel
from disagg.config import EngineConfig
from disagg.engine.device.build import build_engine
from disagg.engine.sched.sequence import Sequence
from disagg.messages import GenerateRequest, Pooling, SamplingParams
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
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=() if ignore_eos else self._model.eos_token_ids,
        )
        request = _request(self.prompt(content), sampling)
        if request not in self._answers:
            sequence = self._run(request)
            answer = sequence.tokens[sequence.num_prompt_tokens :]
            self._answers[request] = self._model.tokenizer.decode(answer)
        return self._answers[request]

    def embedding(self, text: str) -> list[float]:
        tokens = self._model.tokenizer.encode(text, add_special_tokens=True)
        pooled = self._run(_request(tokens, SamplingParams(max_tokens=1, pooling=Pooling()))).pooled
        assert pooled is not None
        return array("f", pooled).tolist()

    def _run(self, request: GenerateRequest) -> Sequence:
        sequence = Sequence(request)
        self._engine.submit(sequence)
        while self._engine.has_work:
            self._engine.step()
        return sequence


def _request(tokens: list[int], sampling: SamplingParams) -> GenerateRequest:
    return GenerateRequest(
        request_id="single",
        model="single",
        token_ids=tuple(tokens),
        num_prompt_tokens=len(tokens),
        hash_root=b"single",
        block_hashes=(),
        sampling=sampling,
        deadline_unix_s=float("inf"),
    )
