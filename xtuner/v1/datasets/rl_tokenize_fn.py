"""From a JSONL row to the prompt's tokens."""

import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator, model_validator

from xtuner.v1.config import XTunerConfig
from xtuner.v1.data_proto import RolloutState
from xtuner.v1.utils.not_here import not_here

from .record import Record, RowError, parse_record

# Arguments of `apply_chat_template` that decide what it returns and are set here or by a field.
_RESERVED_KWARGS = frozenset(
    "conversation tools chat_template add_generation_prompt continue_final_message tokenize tokenizer_kwargs "
    "padding truncation max_length return_tensors return_dict return_assistant_tokens_mask".split()
)

# Names in a sample's `extra_fields` that are read as the prompt's, the engine's or the agent loop's own.
_RESERVED_FIELDS = frozenset("raw_prompt origin_data_source top_logprobs tool_turns".split())


class RLTextTokenizeFnConfig(XTunerConfig):
    """How a row's chat messages become prompt tokens.

    The chat template renders the messages with a generation prompt, and the text is tokenised without adding
    special tokens: what the template writes is all there is, so a BOS never comes twice.

    A control token spelled out in a message ("<|im_end|>") becomes that control token, as in inference
    engines and chat servers. Such rows are counted when the data is read and reported with the first line's
    number.
    """

    max_length: int | None = Field(None, ge=1)
    """Longest prompt in tokens; longer ones are left out when the data is read, and counted. None: no
    limit; with the longest one, responses must fit the context and (training) `pack_max_length`."""
    tools_schema: list[Any] | None = None
    """JSON schemas of tools, written into the prompt by the chat template."""
    system_prompt: str | None = Field(None, min_length=1)
    """System message for rows without one. A row's own system message stays; such rows are counted in the
    log."""
    enable_thinking: bool | None = None
    """Handed to the chat template (Qwen3: False asks for an answer without thinking). None: the template's
    default."""
    data_judger_mapping: dict[str, str | dict[str, float]] | None = Field(None, min_length=1)
    """Judger, or weight of each judger, for each `data_source` of the rows. A `data_source` without an entry
    is an error. For a judger that reads them (`ComposedJudgerConfig`). None: `data_source` names the judger itself."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables for the chat template."""
    require_ground_truth: bool = True
    """Refuse rows without `reward_model.ground_truth`. False if no judger needs a label; reward functions then get
    None."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _no_reserved(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_RESERVED_KWARGS & kwargs.keys()):
            raise ValueError(
                f"{taken} are not variables of a chat template. Tools go to `tools_schema`; another template "
                "is set on the tokenizer."
            )
        return kwargs

    @model_validator(mode="after")
    def _thinking_once(self) -> "RLTextTokenizeFnConfig":
        if self.enable_thinking is not None and "enable_thinking" in self.chat_template_kwargs:
            raise ValueError(
                f"enable_thinking={self.enable_thinking} and chat_template_kwargs['enable_thinking']="
                f"{self.chat_template_kwargs['enable_thinking']!r} are both set; keep one of them."
            )
        return self

    def build(self, tokenizer: Any) -> "RLTextTokenizeFn":
        """A function from row to `RolloutState`. Raises ValueError if the chat template cannot do what is
        asked."""
        return RLTextTokenizeFn(self, tokenizer)


class RLTextTokenizeFn:
    """Row (a JSON object) to `RolloutState` with the prompt's tokens; raises RowError for a row it cannot
    use.

    To tokenise in another way, subclass this and let `build` of a subclass of the config return it.
    """

    def __init__(self, config: RLTextTokenizeFnConfig, tokenizer: Any):
        self.config = config.model_copy(deep=True)
        self.tokenizer = tokenizer
        self._template_kwargs = dict(self.config.chat_template_kwargs)
        if config.enable_thinking is not None:
            self._template_kwargs["enable_thinking"] = config.enable_thinking
        self._tools = self.config.tools_schema or None
        self._check_template()
        added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        control_tokens = {token for token in (*tokenizer.all_special_tokens, *added) if token}
        # An empty alternation would match everywhere; `(?!)` never does.
        self._control_token = re.compile("|".join(map(re.escape, sorted(control_tokens))) or r"(?!)")

    def __call__(self, row: dict[str, Any]) -> RolloutState:
        record = self.parse(row)
        messages = self.messages(record)
        text = self.render(messages)
        prompt_ids = self._encode([text])[0]
        return RolloutState(
            message=messages,
            prompt_ids=prompt_ids,
            num_tokens=len(prompt_ids),
            data_source=record.data_source,
            reward_model=record.reward_model,
            tools=self._tools,
            extra_fields={
                **record.extra_info,
                "raw_prompt": text,
                "origin_data_source": record.origin_data_source,
            },
        )

    def parse(self, row: dict[str, Any]) -> Record:
        """Check a row and find its judgers."""
        record = parse_record(row, self.config.require_ground_truth)
        if taken := _RESERVED_FIELDS & record.extra_info.keys():
            raise RowError(f"extra_info.{min(taken)}", "this name is taken by the sample's own; rename it.")
        if self.config.data_judger_mapping is None:
            return record
        return replace(record, data_source=_judgers(record.data_source, self.config.data_judger_mapping))

    def messages(self, record: Record) -> list[dict[str, Any]]:
        """The row's messages, behind the configured system prompt if they have none of their own."""
        if self.config.system_prompt is None or self.has_system(record):
            return record.messages
        return [{"role": "system", "content": self.config.system_prompt}, *record.messages]

    def has_system(self, record: Record) -> bool:
        return record.messages[0]["role"] in ("system", "developer")

    def has_control_token(self, record: Record) -> bool:
        """Whether a message spells out a token that steers the model."""
        return any(self._control_token.search(message.get("content") or "") for message in record.messages)

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt's text, from the chat template. Raises RowError for messages that it refuses, ValueError if it is
        none itself."""
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=self._tools,
                tokenize=False,
                add_generation_prompt=True,
                **self._template_kwargs,
            )
        except TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path!r} is wrong in its line {error.lineno}: "
                f"{error.message}. Mend it; chat_template.jinja comes before what tokenizer_config.json has."
            ) from error
        except (TemplateError, TypeError) as error:
            raise RowError("prompt", f"the chat template refuses these messages ({error}).") from error

    def measure(self, texts: list[str]) -> list[tuple[int, int]]:
        """(tokens, largest id) of each rendered text; an empty one has (0, -1)."""
        return [(len(ids), max(ids, default=-1)) for ids in self._encode(texts)]

    @cached_property
    def fingerprint(self) -> str | None:
        """Changes with whatever the lengths and the checks depend on: code, config, tokenizer, template.

        None if that cannot be known (code without a file, a tokenizer without a serialised form).
        """
        import transformers

        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        content = json.loads(backend.to_str())
        # What the last call asked for, not what the tokenizer is.
        content["truncation"] = content["padding"] = None
        try:
            subclasses = [
                *type(self).__mro__[: -len(RLTextTokenizeFn.__mro__)],
                *type(self.config).__mro__[: -len(RLTextTokenizeFnConfig.__mro__)],
            ]
            own_files = sorted(Path(__file__).parent.glob("*.py"))
            files = [*own_files, *(Path(inspect.getfile(cls)) for cls in subclasses)]
            code = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        except (TypeError, OSError):
            return None
        parts = [
            code,
            transformers.__version__,
            type(self.tokenizer).__name__,
            content,
            self.tokenizer.chat_template,
            self.tokenizer.special_tokens_map,
            self.config.model_dump(),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:  # transformers fails on an empty list
            return []
        # The tokenizers library encodes a list on all cores, which leaves a pool of processes nothing to gain.
        encoded = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
        )
        return encoded["input_ids"]

    def _check_template(self) -> None:
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"The tokenizer {self.tokenizer.name_or_path!r} has no chat template, so "
                "messages cannot become a prompt. Take an instruction-tuned model's, or set its chat_template."
            )
        template = self.tokenizer.get_chat_template(tools=self._tools)
        asked = {name: f"chat_template_kwargs[{name!r}]" for name in self.config.chat_template_kwargs}
        if self.config.enable_thinking is not None:
            asked["enable_thinking"] = "enable_thinking"
        if self._tools:
            asked["tools"] = "tools_schema"
        for name, field in asked.items():
            if not re.search(rf"\b{re.escape(name)}\b", template):
                raise ValueError(
                    f"RLTextTokenizeFnConfig.{field} is set, but the chat template of "
                    f"{self.tokenizer.name_or_path!r} does not use {name!r}: without effect. Remove it."
                )


def _judgers(source: dict[str, float], mapping: Mapping[str, str | dict[str, float]]) -> dict[str, float]:
    judgers: dict[str, float] = {}
    for name, weight in source.items():
        if name not in mapping:
            known = ", ".join(mapping)
            raise RowError("data_source", f"{name!r} has no entry in data_judger_mapping (it has {known}).")
        target = mapping[name]
        for judger, share in ({target: 1.0} if isinstance(target, str) else target).items():
            judgers[judger] = judgers.get(judger, 0.0) + weight * share
    return judgers


if not TYPE_CHECKING:  # a type checker would take any name for one that is there
    _INSTEAD = {
        "RLQwen3VLTokenizeFnConfig": "models read text alone, use RLTextTokenizeFnConfig",
    }
    __getattr__ = not_here(__name__, _INSTEAD)
