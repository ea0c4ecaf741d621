"""A tiny model and the search for its longest row, for the tests of that benchmark."""

from transformers import LlamaConfig

from benchmarks.lora_step import CHECKPOINTED
from benchmarks.models import Model
from benchmarks.row_search import Search

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TINY = Model("tiny", LlamaConfig(**SIZES, **HEADS), sequences=1)
LORA, _ = CHECKPOINTED
SEARCH = Search("eager", "tiny", "", LORA, (1.0, 2.0), 8, 96, (16,), 1, "cpu")
