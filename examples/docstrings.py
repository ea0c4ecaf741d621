"""Conversations that every machine has: questions about Python's standard library, answered by its
docstrings, and a tokenizer with a chat template for them.
"""

import ast
import random
from collections.abc import Iterator
from pathlib import Path

from corpus import STANDARD_LIBRARY, source_files
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, END = "<|pad|>", "<|end|>"
# What is between generation and endgeneration is what assistant_only_loss trains on.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

Conversation = dict[str, list[dict[str, str]]]  # TRL's "prompt" and "completion"


def conversations(count: int) -> list[Conversation]:
    """Up to `count`, the same for the same Python and the same count."""
    paths = source_files()
    random.Random(0).shuffle(paths)
    answers: dict[str, str] = {}
    for path in paths:
        answers.update(_answers(path))
        if len(answers) >= count:
            break
    return [
        {
            "prompt": [{"role": "user", "content": question}],
            "completion": [{"role": "assistant", "content": answer}],
        }
        for question, answer in list(answers.items())[:count]
    ]


def chat_tokenizer(conversations: list[Conversation], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on these conversations, of at most `vocab_size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        message["content"]
        for conversation in conversations
        for message in conversation["prompt"] + conversation["completion"]
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE
    )


def _answers(path: Path) -> Iterator[tuple[str, str]]:
    """Question and docstring of all that is public in one module."""
    module = path.relative_to(STANDARD_LIBRARY).with_suffix("")
    names = [name for name in module.parts if name != "__init__"]
    tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    if not any(name.startswith("_") for name in names):
        yield from _answers_within(tree, ".".join(names))


def _answers_within(parent: ast.Module | ast.ClassDef, name: str) -> Iterator[tuple[str, str]]:
    for node in parent.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if node.name.startswith("_"):
            continue
        is_class = isinstance(node, ast.ClassDef)
        full_name = f"{name}.{node.name}"
        if docstring := ast.get_docstring(node):
            yield f"What is {full_name}?" if is_class else f"What does {full_name} do?", docstring
        if is_class:
            yield from _answers_within(node, full_name)
