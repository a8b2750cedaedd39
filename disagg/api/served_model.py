"""What the API must know of a model: tokenizer, chat template, limits, defaults, identity.

Made of the model's description, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from disagg.errors import ModelError
from disagg.models.description import GenerationDefaults, ModelDescription
from disagg.text.chat_template import ChatTemplate
from disagg.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """One entry of the models table.

    Attributes:
        name: what clients call it.
        fingerprint: equal only for equal weights and tokenizer; root of all block names.
        vocab_size: ids a prompt may hold are below it.
        num_parameters: as stored; a matrix that is tied to another one counts once.
        max_model_len: tokens of prompt and answer together.
        block_size: positions of a KV block, as its workers have it.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    fingerprint: str
    vocab_size: int
    max_model_len: int
    block_size: int
    eos_token_ids: tuple[int, ...] = ()
    defaults: GenerationDefaults = GenerationDefaults()  # noqa: RUF009 - it is frozen
    created_unix_s: int = 0
    num_parameters: int = 0  # 0: not known

    @classmethod
    def of(
        cls,
        model: ModelDescription,
        *,
        name: str,
        block_size: int,
        max_model_len: int | None = None,
        chat_template: str | None = None,
        created_unix_s: int = 0,
    ) -> ServedModel:
        """
        Args:
            chat_template: a file to take in the place of the model's own template.

        Raises:
            ModelError: names the file that is absent or wrong.
        """
        tokenizer = Tokenizer.from_json(model.read_tokenizer(), model.source)
        source = model.chat_template if chat_template is None else _read(chat_template)
        limit = model.config.max_model_len
        return cls(
            name=name,
            tokenizer=tokenizer,
            template=None if source is None else ChatTemplate(source, model.special_tokens),
            fingerprint=model.fingerprint,
            vocab_size=min(tokenizer.num_ids, model.config.vocab_size),
            max_model_len=min(limit, max_model_len or limit),
            block_size=block_size,
            eos_token_ids=model.eos_token_ids,
            defaults=model.defaults,
            created_unix_s=created_unix_s,
            num_parameters=model.num_parameters,
        )


def _read(chat_template: str) -> str:
    file = Path(chat_template)
    if not file.is_file():
        raise ModelError(f"The chat template {file} does not exist.", param="chat_template")
    return file.read_text("utf-8")
