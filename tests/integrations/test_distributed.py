"""The patch under the engines of several processes: each step is eager's, and fused where it can
be. The engines are set up by their libraries' own functions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gloo_group import run
from slow_cases import slow_but

from liger_patch.layers import checks

fully_shard = pytest.mark.skipif(
    torch.__version__.startswith("2.6"), reason="fully_shard of torch 2.6 needs an accelerator"
)


def steps(folder: Path, *cases: str, device: str = "cpu", processes: int = 2) -> None:
    run("distributed_step.py", str(folder / "group"), device, *cases, processes=processes)


def test_wrappers_of_torch(tmp_path: Path) -> None:
    engines = ["ddp", "ddp_unused", "ddp_static"]
    steps(
        tmp_path, *engines, *(f"{engine} --layers" for engine in engines), "ddp --no-sync --alone"
    )


@fully_shard
def test_fsdp2(tmp_path: Path) -> None:
    """Where the whole model is a unit that frees the head, logits can be read once it is gathered
    again.
    """
    steps(
        tmp_path,
        "fsdp2",
        "fsdp2 --layers",
        "fsdp2_resharded --late evaluation",
        "fsdp2_resharded --layers --late backward",
    )


@fully_shard
def test_fsdp2_units_that_free_the_head(tmp_path: Path) -> None:
    """The weight stays from the head's call to its backward pass."""
    pytest.importorskip("peft")
    steps(
        tmp_path,
        "fsdp2_head --no-sync --alone --late backward",
        "fsdp2_head --evaluate --labels none --metric",
        "fsdp2_norm_head --layers --labels uneven",
        "fsdp2_tied_head --tied --evaluate",
        "fsdp2_mixed",
        "fsdp2_offload --layers",
        "hsdp_head",
        "hsdp_replicated_head --layers",
        "fsdp2_head --lora --evaluate",
        "fsdp2_head --leftover",
        "fsdp2_head --distrusted",
        "fsdp2_head --model t5gemma --evaluate --metric",  # lm_head is around the head
    )


@pytest.mark.slow
@fully_shard
def test_other_settings_of_fsdp2_units_that_free_the_head(tmp_path: Path) -> None:
    steps(tmp_path, "fsdp2_offload", "hsdp_replicated_head")


def test_fsdp1(tmp_path: Path) -> None:
    """A copy of the weight stays where the head is a unit."""
    pytest.importorskip("peft")
    steps(
        tmp_path,
        "fsdp1 --layers --no-sync --alone",
        "fsdp1_head --layers --lora --evaluate --labels none --metric",
        "fsdp1_head --no-sync --leftover --late evaluation",
        "fsdp1_lm_head --model t5gemma --evaluate",  # lm_head is around the head
    )


@pytest.mark.slow
def test_other_settings_of_fsdp1(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    steps(
        tmp_path,
        "fsdp1 --layers --no-sync",
        "fsdp1_head --evaluate --labels none --metric",
        "fsdp1_head --no-sync --late evaluation",
        "fsdp1_head --layers --lora --alone",
        "fsdp1_head --leftover",
    )


@pytest.mark.slow
@fully_shard
def test_fsdp2_of_a_compiled_model(tmp_path: Path) -> None:
    steps(tmp_path, 'fsdp2_head --compiled --fallback "torch.compile traces"')


def skip_without_last_unit() -> None:
    fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils")
    if not hasattr(fsdp_utils, "_find_final_norm"):
        pytest.skip("this accelerate makes no unit of the last norm and the head")


@fully_shard
def test_fsdp2_as_accelerate_prepares_it(tmp_path: Path) -> None:
    skip_without_last_unit()
    steps(
        tmp_path,
        "accelerate_fsdp2 --labels none",
        "accelerate_fsdp2 --tied --no-sync --alone",
        "accelerate_fsdp2_linear --layers --evaluate",
        "accelerate_fsdp2_linear --lora --layers",
        "accelerate_fsdp2_mixed --layers",
    )


@pytest.mark.slow
@fully_shard
def test_other_settings_of_accelerates_fsdp2(tmp_path: Path) -> None:
    skip_without_last_unit()
    steps(
        tmp_path,
        "accelerate_fsdp2 --layers",
        "accelerate_fsdp2 --tied",
        "accelerate_fsdp2 --no-sync --alone",
    )


@fully_shard
def test_sharded_checkpoints(tmp_path: Path) -> None:
    """Of PyTorch's functions and of accelerate's, into unpatched and patched models."""
    pytest.importorskip("accelerate", minversion="1.15")
    engines = "fsdp2_head", "hsdp_replicated_head", "accelerate_fsdp2"
    run("sharded_checkpoints.py", str(tmp_path), *engines)


def skip_without_own_sharding() -> None:
    if not hasattr(pytest.importorskip("transformers.distributed"), "DistributedConfig"):
        pytest.skip("this Transformers shards nothing itself")


@fully_shard
def test_fsdp2_of_transformers_own(tmp_path: Path) -> None:
    skip_without_own_sharding()
    steps(tmp_path, "transformers_fsdp --layers")


@pytest.mark.slow
@fully_shard
def test_fsdp2_and_tensor_parallel_of_transformers_own(tmp_path: Path) -> None:
    """Two times two processes."""
    skip_without_own_sharding()
    steps(tmp_path, "transformers_fsdp_tp --layers --alone", processes=4)


@fully_shard
def test_a_distributed_vocabulary(tmp_path: Path) -> None:
    steps(tmp_path, "tensor_parallel --layers")


def test_deepspeeds_engine(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("peft")
    steps(
        tmp_path,
        "zero1 --late step",
        "zero3 --lora --evaluate --late step",
        "zero3 --tied --layers --labels uneven --alone",
        "zero3 --model two_losses",
        "zero3_plain --layers --late backward",
    )


@pytest.mark.slow
def test_other_settings_of_deepspeeds_engine(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("peft")
    steps(
        tmp_path,
        "zero2 --late step",
        "zero1 --layers",
        "zero2 --layers",
        "zero3 --alone --evaluate --late step",
        "zero3 --lora --evaluate",
        "zero3 --distrusted",
        "zero3 --model two_losses --lora --evaluate",
        "zero3 --model two_losses --distrusted",
        "zero3_regathered --model two_losses",
        "zero3_offload --model two_losses --layers",
        "zero3 --layers --labels none --metric",
        "zero3_plain --tied --evaluate --metric",
        "zero3_regathered",
        "zero3_offload --layers",
        "zero3_plain --lora --layers --labels none",
    )


@pytest.mark.parametrize("stage", slow_but(["3"], ["1", "2", "3"]))
def test_trainer_with_deepspeed(stage: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    run("deepspeed_trainer.py", str(tmp_path), "transformers", stage)


@pytest.mark.slow
def test_trainer_of_trl_with_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("trl")
    run("deepspeed_trainer.py", str(tmp_path), "trl", "3")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_engines_on_gpus(tmp_path: Path) -> None:
    steps(
        tmp_path,
        "ddp_static",
        "ddp_unused --layers",
        "accelerate_fsdp2 --layers",
        "accelerate_fsdp2 --tied",
        "fsdp2_resharded --late backward",
        "fsdp1_head --layers",
        "tensor_parallel --layers",
        device="cuda",
    )


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_qlora_on_gpus(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    engines = "ddp", "accelerate_fsdp2", "zero3"
    cases = [f"{engine} --quantized --layers --alone" for engine in engines]
    steps(tmp_path, *cases, device="cuda")


@pytest.mark.parametrize("engines", [("ddp", "ddp_static"), ("fsdp1",)], ids=" ".join)
def test_feed_forward_layers_in_slices(engines: tuple[str, ...], tmp_path: Path) -> None:
    """Under checkpoints of both kinds, with and without adapters."""
    pytest.importorskip("peft")
    if checks.TOP_HOOKS is None:
        pytest.skip("torch 2.6 does not tell its hooks")
    run("sliced_step.py", str(tmp_path / "group"), *engines)


@fully_shard
def test_feed_forward_layers_in_slices_under_fsdp2(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run("sliced_step.py", str(tmp_path / "group"), "fsdp2")
