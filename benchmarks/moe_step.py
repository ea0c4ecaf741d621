"""Measure training steps of mixtures of experts beside peers, one process a contender.

    python -m benchmarks moe_step                        all rows
    python -m benchmarks moe_step --model 30B --contender Unsloth

As ``lora_step``, with adapters of rank 16 on attention and on the weights of all experts (PEFT's
``target_parameters``), or training every weight of a small mixture. Eager is Transformers' own
choice for experts, PyTorch's grouped products. Whole models of 30B and 20B have experts in 4 bits
and adapters of rank 8, and are ours alone: bitsandbytes leaves experts as they are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from transformers import GptOssConfig, Qwen3MoeConfig

from .lora_contenders import Setting
from .lora_step import BENCHMARK as LORA_BENCHMARK
from .lora_step import Case, cases, cut_config
from .models import Model

SETTINGS = (
    Setting("LoRA on experts", experts=True),
    Setting("LoRA on experts + checkpointing", experts=True, checkpointing=True),
)
FULL = (
    Setting("full training", rank=0, experts=True),
    Setting("full training + checkpointing", rank=0, experts=True, checkpointing=True),
)
NF4, MXFP4 = (
    Setting(f"{name} experts + checkpointing", checkpointing=True, rank=8, experts=True, held=name)
    for name in ("nf4", "mxfp4")
)
QWEN = Qwen3MoeConfig(  # Qwen3-30B-A3B
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    vocab_size=151936,
    tie_word_embeddings=False,
)
GPT_OSS = GptOssConfig(num_hidden_layers=24, num_local_experts=32)  # gpt-oss-20b
SMALL = cut_config(QWEN, 4)  # 1.3 billion numbers
SMALL.num_experts = 32
QWEN_CUT, GPT_OSS_CUT = (cut_config(each, 6) for each in (QWEN, GPT_OSS))
CASES = (
    Case(Model("Qwen3-30B-A3B of 6 layers, 4 x 2048", QWEN_CUT, sequences=4), SETTINGS),
    Case(Model("Qwen3-30B-A3B of 6 layers, 1 x 2048", QWEN_CUT, sequences=1), SETTINGS),
    Case(Model("gpt-oss-20b of 6 layers, 2 x 2048", GPT_OSS_CUT, sequences=2), SETTINGS, "eager"),
    Case(Model("Qwen3-MoE of 4 layers and 32 experts, 4 x 2048", SMALL, sequences=4), FULL),
    Case(Model("Qwen3-30B-A3B, 1 x 2048", QWEN, sequences=1), (NF4,)),
    Case(Model("gpt-oss-20b, 1 x 2048", GPT_OSS, sequences=1), (MXFP4,), "eager"),
)
BENCHMARK = replace(LORA_BENCHMARK, cases=partial(cases, of=CASES))
