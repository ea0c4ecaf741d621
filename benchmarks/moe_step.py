"""Measure LoRA training steps of mixtures of experts beside peers, one process a contender.

    python -m benchmarks moe_step                        all rows
    python -m benchmarks moe_step --model 30B --contender Unsloth

As ``lora_step``, with adapters of rank 16 on attention and on the weights of all experts (PEFT's
``target_parameters``). Liger-Kernel does not train these adapters, and is not measured.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from transformers import GptOssConfig, Qwen3MoeConfig

from .lora_contenders import Setting
from .lora_step import BENCHMARK as LORA_BENCHMARK
from .lora_step import Case, cases
from .models import Model

SETTINGS = (
    Setting("LoRA on experts", experts=True),
    Setting("LoRA on experts + checkpointing", experts=True, checkpointing=True),
)
QWEN = Qwen3MoeConfig(  # Qwen3-30B-A3B's shape
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_hidden_layers=6,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    vocab_size=151936,
    tie_word_embeddings=False,
)
GPT_OSS = GptOssConfig(num_hidden_layers=6, num_local_experts=32)  # gpt-oss-20b's shape
CASES = (
    Case(Model("Qwen3-30B-A3B of 6 layers, 4 x 2048", QWEN, sequences=4), SETTINGS),
    Case(Model("Qwen3-30B-A3B of 6 layers, 1 x 2048", QWEN, sequences=1), SETTINGS[:1]),
    Case(Model("gpt-oss-20b of 6 layers, 2 x 2048", GPT_OSS, sequences=2), SETTINGS[:1], "eager"),
)
BENCHMARK = replace(LORA_BENCHMARK, cases=partial(cases, of=CASES))
