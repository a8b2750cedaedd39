"""A model as the API uses it: tokenizer, chat template, limits, defaults, fingerprint.

Built from the model's description, without torch. The model "auto" is derived from the tiers of a
cascade. A larger tier takes over the rendered prompt and the tokens of a smaller one. So all tiers
must have the same tokenizer, chat template and end tokens, which is checked at start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from disagg.adapters import Adapter
from disagg.api.images import ImageRules
from disagg.config import AUTO
from disagg.errors import ModelError
from disagg.models.description import GenerationDefaults, ModelDescription
from disagg.models.pooling import ModelPooling
from disagg.text.answer_reader import NAMES as REASONING_PARSERS
from disagg.text.answer_reader import ReasoningFormat, reasoning_format_of
from disagg.text.chat_template import ChatTemplate
from disagg.text.tokenizer import Tokenizer
from disagg.text.tool_parsers.registry import NAMES as TOOL_CALL_PARSERS
from disagg.text.tool_parsers.registry import ToolFormat, tool_format_of


@dataclass(frozen=True)
class ServedModel:
    """One entry of the models table.

    Attributes:
        name: the name that clients use.
        full_name: a second name that clients may use, because vLLM would serve the model under it:
            Qwen/Qwen3-8B for Qwen3-8B; "" for none.
        fingerprint: identifies weights and tokenizer; it is the root of all block hashes.
        vocab_size: token ids of prompts must be below it.
        num_parameters: number of stored parameters; tied matrices count once.
        max_model_len: largest number of tokens of a prompt and its answer together.
        block_size: number of tokens in a KV block of its workers.
        slo_s: TTFT and TPOT SLO of its requests, in seconds; 0 for none.
        tool_call_parser, reasoning_parser: formats of its answers; "" detects them from the chat
            template, "none" parses nothing.
        adapter, base: the LoRA adapter, and the model that it adapts; None: it is no adapter.
        pooling: what it computes instead of answers.
        scored_ids: `pooling.scores` as token ids.
        images: how it takes images; None: it does not.
        remarks: sentences for whoever serves it, said at start.
        deferral: whose tokens stand beside its own, said in its replies; "" if no others do.
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
    num_parameters: int = 0  # 0 if unknown
    slo_s: tuple[float, float] = (0.0, 0.0)
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    full_name: str = ""
    remarks: tuple[str, ...] = ()
    deferral: str = ""
    adapter: Adapter | None = None
    base: ServedModel | None = None
    pooling: ModelPooling = ModelPooling(why_not="it is not known")  # noqa: RUF009 - it is frozen
    scored_ids: tuple[int, ...] = ()
    images: ImageRules | None = None

    @property
    def worker_model(self) -> str:
        """The name of the model whose workers serve it."""
        return self.name if self.base is None else self.base.name

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format of its tool calls; None if unknown."""
        return tool_format_of(self.template, self.tool_call_parser)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The format of its reasoning; None if it has none or the format is unknown."""
        source = self.template.source if self.template else ""
        return reasoning_format_of(source, self.reasoning_parser)

    def with_images(
        self, domains: tuple[str, ...], image_token_id: int | None = None
    ) -> ServedModel:
        """The same model on an engine that takes images, if its chat template shows them.

        Args:
            domains: the hosts from which images are fetched.
            image_token_id: the token that becomes an image's, if it is known. A template may write
                others around it, which stay.
        """
        mark = None if self.template is None else self.template.image_mark
        ids = [] if mark is None else self.tokenizer.encode_chat(mark)
        mark_id = next((each for each in ids if each in self.tokenizer.special_ids), None)
        if image_token_id in ids:
            mark_id = image_token_id
        rules = None if mark_id is None else ImageRules(mark_id, domains)
        return dataclasses.replace(self, images=rules)

    @classmethod
    def from_description(
        cls,
        model: ModelDescription,
        *,
        name: str,
        block_size: int,
        max_model_len: int | None = None,
        chat_template: str | None = None,
        tool_call_parser: str = "",
        reasoning_parser: str = "",
        created_unix_s: int = 0,
    ) -> ServedModel:
        """Read tokenizer and chat template of a model.

        Args:
            chat_template: path of a file that replaces the model's own template.

        Raises:
            ModelError: a file is missing or invalid, or there is no such parser.
        """
        _check_parser("tool_call_parser", tool_call_parser, TOOL_CALL_PARSERS)
        _check_parser("reasoning_parser", reasoning_parser, REASONING_PARSERS)
        tokenizer = Tokenizer.from_json(model.read_tokenizer(), model.source)
        source = model.chat_template if chat_template is None else _read(chat_template)
        template = None if source is None else ChatTemplate(source, model.special_tokens)
        remarks = model.remarks
        # Computed now, so that no request waits for it.
        form = tool_format_of(template, tool_call_parser)
        if template is not None and template.shows_tools and not (form or tool_call_parser):
            remarks.append(
                f"The chat template of {name} takes tools, but in no known format of calls:"
                " requests with tools are refused unless tool_choice is 'required' or a function."
                " --tool-call-parser (in a file: tool_call_parser) sets the format."
            )
        pooling, scored_ids = model.pooling, tuple[int, ...]()
        try:
            scored_ids = tuple(_token_of(each, tokenizer) for each in pooling.scores)
        except ValueError as error:
            pooling = ModelPooling(why_not=str(error))
        limit = model.max_model_len
        return cls(
            name=name,
            tokenizer=tokenizer,
            template=template,
            fingerprint=model.fingerprint,
            vocab_size=min(tokenizer.num_ids, model.vocab_size),
            max_model_len=min(limit, max_model_len or limit),
            block_size=block_size,
            eos_token_ids=model.eos_token_ids,
            defaults=model.defaults,
            created_unix_s=created_unix_s,
            num_parameters=model.num_parameters,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            remarks=tuple(remarks),
            pooling=pooling,
            scored_ids=scored_ids,
        )


def _token_of(named: int | str, tokenizer: Tokenizer) -> int:
    """The id of a token that is named by its id or its text. Raises `ValueError`."""
    if isinstance(named, int):
        found = [named] if 0 <= named < tokenizer.num_ids else []
    else:
        found = tokenizer.encode(named, add_special_tokens=False)
    if len(found) != 1:
        raise ValueError(f"its scores are those of {named!r}, which is not a single token.")
    return found[0]


def _check_parser(param: str, name: str, names: tuple[str, ...]) -> None:
    if name and name not in names:
        raise ModelError(
            f"There is no {param} {name[:64]!r}; choose from {', '.join(names)}.", param=param
        )


def _read(chat_template: str) -> str:
    try:
        return Path(chat_template).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"Cannot read the chat template {chat_template}:"
            f" {error.strerror if isinstance(error, OSError) else error}.",
            param="chat_template",
        ) from error


def auto_model(tiers: Sequence[ServedModel]) -> ServedModel:
    """The model that stands for the cascade of `tiers`, smallest first.

    Its limits are the tightest of all tiers. The defaults of sampling parameters are those of the
    largest tier.
    """
    return dataclasses.replace(
        tiers[0],
        name=AUTO,
        full_name="",
        max_model_len=min(tier.max_model_len for tier in tiers),
        vocab_size=min(tier.vocab_size for tier in tiers),
        defaults=tiers[-1].defaults,
        num_parameters=0,
        pooling=ModelPooling(why_not="it stands for several models; name one of them."),
        images=None,
    )


def check_one_language(tiers: Sequence[ServedModel]) -> None:
    """Check that models can take over each other's prompts and tokens.

    Raises:
        ModelError: two models differ; the message says in what.
    """
    for one, other in pairwise(tiers):
        reason = _difference(one, other)
        if reason:
            raise ModelError(
                f"{one.name!r} and {other.name!r} cannot form a cascade: {reason}. In a cascade the"
                " larger model takes over the tokens of the smaller one; use models of one family,"
                " or serve them without --cascade.",
                param="cascade",
            )


def _difference(one: ServedModel, other: ServedModel) -> str:
    if one.tokenizer.core.to_str() != other.tokenizer.core.to_str():
        first, second = one.tokenizer.num_ids, other.tokenizer.num_ids
        numbers = f", with {first} and {second} tokens" if first != second else ""
        return f"their tokenizers differ{numbers}"
    if sorted(one.eos_token_ids) != sorted(other.eos_token_ids):
        return (
            f"their answers end with different tokens, {sorted(one.eos_token_ids)} and"
            f" {sorted(other.eos_token_ids)}"
        )
    templates = [None if each.template is None else each.template.key for each in (one, other)]
    if templates[0] != templates[1]:
        return "their chat templates differ (--chat-template sets one template for both)"
    return ""
