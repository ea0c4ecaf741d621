"""Text that every machine has: the source of Python's standard library, as blocks of tokens."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer

STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
# Installed packages, which differ from machine to machine, tests and generated tables.
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "lib2to3",
}
END_OF_FILE = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # 256 bytes and END_OF_FILE
HELD_OUT_EVERY = 20  # one file in 20 is kept for the evaluation loss
EVALUATION_TOKENS = 16_384


@dataclass(frozen=True)
class Corpus:
    """Token blocks of one length; every file ends with `end_of_file_id`."""

    train: torch.Tensor  # (blocks, length) int64
    evaluation: torch.Tensor  # (blocks, length) int64, from files that `train` has not seen
    end_of_file_id: int
    files: int
    megabytes: float


def build_corpus(
    vocab_size: int, length: int, *, evaluation_tokens: int = EVALUATION_TOKENS
) -> Corpus:
    """Trains a byte-level BPE tokenizer on the training files and cuts all files into blocks.

    The same Python and the same arguments give the same blocks.
    """
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in source_files()]
    evaluation_texts = texts[::HELD_OUT_EVERY]
    train_texts = [text for index, text in enumerate(texts) if index % HELD_OUT_EVERY]

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        train_texts, vocab_size=vocab_size, special_tokens=[END_OF_FILE], show_progress=False
    )
    end_of_file_id = tokenizer.token_to_id(END_OF_FILE)

    def blocks(texts: list[str]) -> torch.Tensor:
        tokens = [
            token
            for encoding in tokenizer.encode_batch(texts)
            for token in (*encoding.ids, end_of_file_id)
        ]
        count = len(tokens) // length
        return torch.tensor(tokens[: count * length]).view(count, length)

    return Corpus(
        train=blocks(train_texts),
        evaluation=blocks(evaluation_texts)[: max(1, evaluation_tokens // length)],
        end_of_file_id=end_of_file_id,
        files=len(texts),
        megabytes=sum(map(len, texts)) / 1e6,
    )


def source_files() -> list[Path]:
    return [
        path
        for path in sorted(STANDARD_LIBRARY.rglob("*.py"))
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(STANDARD_LIBRARY).parts)
    ]
