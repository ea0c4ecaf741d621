"""A tokenizer over the vocabulary of the tiny models, and data sets of made-up words.

One word is one token, ``w`` and its id. The data sets are those that TRL's trainers take; datasets
takes a second to import, so that is left to those who make one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tiny_models import BOS, END_OF_WORDS, EOS, FIRST_WORD, PAD, VOCAB_SIZE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

UNKNOWN = 3
# {% generation %} marks what the assistant says, for losses on that alone
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "w4 {% generation %}{{ message['content'] + ' w6' }}{% endgeneration %} "
    "{% else %}"
    "{{ 'w5 ' + message['content'] + ' w6 ' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w4 {% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    special = {PAD: "<pad>", BOS: "<bos>", EOS: "<eos>", UNKNOWN: "<unk>"}
    vocabulary = {special.get(token, f"w{token}"): token for token in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special[UNKNOWN]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHAT_TEMPLATE,
        **{name: special[token] for name, token in names.items()},
    )


class Writer:
    """Texts of random words, always the same."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def words(self, fewest: int, most: int) -> str:
        count = self.random.randint(fewest, most)
        return " ".join(f"w{self.random.randrange(FIRST_WORD, END_OF_WORDS)}" for _ in range(count))

    def prompt(self) -> str:
        return self.words(2, 5)

    def answer(self) -> str:
        return " " + self.words(2, 8)


def prompts_and_completions(count: int = 24) -> Any:
    """For SFT: the loss is that of the completions."""
    return _dataset(
        lambda writer, _: {"prompt": writer.prompt(), "completion": writer.answer()}, count
    )


def conversations() -> Any:
    """For SFT: two turns each."""
    turns = ("user", "assistant", "user", "assistant")
    return _dataset(
        lambda writer, _: {
            "messages": [{"role": role, "content": writer.words(2, 5)} for role in turns]
        }
    )


def preferences() -> Any:
    """For DPO."""
    return _dataset(
        lambda writer, _: {
            "prompt": writer.prompt(),
            "chosen": writer.answer(),
            "rejected": writer.answer(),
        }
    )


def judgements() -> Any:
    """For KTO: every second completion is a good one."""
    return _dataset(
        lambda writer, i: {
            "prompt": writer.prompt(),
            "completion": writer.answer(),
            "label": i % 2 == 0,
        }
    )


def _dataset(row: Callable[[Writer, int], dict[str, Any]], count: int = 24) -> Any:
    from datasets import Dataset

    writer = Writer()
    return Dataset.from_list([row(writer, i) for i in range(count)])
