"""The command line of ``python -m liger_patch``: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import BartConfig, LlamaConfig, Qwen3NextConfig

import liger_patch
from liger_patch.__main__ import main
from liger_patch.estimate import estimate as estimates
from liger_patch.estimate.model import described
from liger_patch.estimate.report import notes
from liger_patch.estimate.step import EAGER

NAMES = ["eager", "liger_patch, layers=False", "liger_patch"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=256,
        max_position_embeddings=4096,
    )
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_table_of_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", str(folder), "--length", "64"]) == 0
    printed, told = capsys.readouterr()
    assert told == f"estimating {folder}: seconds, for a large model a minute\n"
    assert all(name in printed for name in NAMES)
    assert "has no test" not in printed
    assert all(f"\n{card} GiB" in printed for card in (16, 24, 40, 48, 80, 141))
    assert "its positions end at 4,096" in printed
    assert f" >= {2**24:,}" in printed  # at 141 GiB: no longer one is tried


def test_json_of_a_config_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--batch", "2", "--lora-rank", "4", "--bits", "4", "--checkpointing"]
    given = [str(folder / "config.json"), *wanted, "--json"]
    assert main(["estimate", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tested"]
    assert found["notes"] == []
    assert found["settings"]["bits"] == 4
    assert found["settings"]["dtype"] == "bfloat16"
    for each in found["contenders"]:
        assert each["peak"] == sum(each["parts"].values()) > 0
        assert each["longest"]["16"] < each["longest"]["24"]


def test_offloaded_checkpoints_have_their_host_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6}
    LlamaConfig(**sizes, num_attention_heads=2, vocab_size=256).save_pretrained(tmp_path)
    given = ["--length", "16384", "--checkpointing", "--checkpoint-offload"]
    assert main(["estimate", str(tmp_path), *given]) == 0
    printed = capsys.readouterr().out
    title, *lines = printed.splitlines()
    assert "offloaded by liger_patch" in title
    (host,) = (line for line in lines if line.startswith("host memory"))
    assert host.split()[2:] == ["-", "0.08", "0.08"]  # 5 pieces: of all inputs but the last
    of_rows = printed.split("\nGiB of host memory for these ")[1].splitlines()
    (cells,) = (line.split()[2:] for line in of_rows if line.startswith("24 GiB"))
    assert cells[0] == "-"
    assert float(cells[-1]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--length", "0"], "argument --length: expected a whole number > 0, got '0'"),
        (["--supervised", "2"], "argument --supervised: expected a number > 0 and <= 1, got '2'"),
        (["--chunk-mib", "x"], "argument --chunk-mib: expected a number > 0, got 'x'"),
        (["--bits", "8"], "argument --bits: invalid choice: 8 (choose from 4)"),
        (["--bits", "4"], "--bits: quantized weights do not train: expected --lora-rank too"),
        (["--quantize-base", "fp8"], "--quantize-base: quantized weights do not train: expected"),
        (["--quantize-experts", "nf4"], "--quantize-experts: quantized weights do not train: "),
        (["--double-quant"], "argument --double-quant: expected --bits 4 too"),
        (["--checkpoint-offload"], "argument --checkpoint-offload: expected --checkpointing too"),
        (["--reserve-gib", "-1"], "argument --reserve-gib: expected a number >= 0, got '-1'"),
        (["--reserve-gib", "x"], "argument --reserve-gib: expected a number >= 0, got 'x'"),
        (["run", "missing.py"], "argument SCRIPT: expected a file, got missing.py"),
    ],
)
def test_what_does_not_fit_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments if arguments[0] == "run" else ["estimate", "model", *arguments]
    with pytest.raises(SystemExit, match="2"):
        main(given)
    printed = capsys.readouterr().err.replace("'4'", "4")  # Python 3.12 quotes choices no more
    assert message in printed
    assert printed.startswith(f"python -m liger_patch {given[0]}: error: ")  # and no usage
    assert len(printed.splitlines()) == 1


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"liger_patch {liger_patch.__version__}\n"


NO_MODEL = "model must be a name in the local Hugging Face cache, a folder or a config.json"
NO_DECODER = "model must be a decoder that generates text"


@pytest.mark.parametrize(
    ("config", "messages"),
    [
        ("./no/such/nothing", [NO_MODEL, "there is no such folder or file"]),
        ("nobody/nothing", ["`hf download nobody/nothing config.json` puts it there"]),
        (None, ["got '{folder}': this folder has no config.json\n"]),
        ('{"model_type": "llama", "hidden_size": "wide"}', [NO_MODEL]),
        ("[]", [NO_MODEL]),
        ("no JSON", [NO_MODEL]),
        ('{"a": 1}', [NO_MODEL]),
        ('{"model_type": "vit"}', [NO_DECODER, "got model_type 'vit'"]),
        ('{"model_type": "t5"}', [NO_DECODER, "got model_type 't5', an encoder-decoder\n"]),
    ],
)
def test_a_model_that_is_not_estimated_has_a_reason(
    config: str | None, messages: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder's configuration, or the name of a model."""
    named = config is not None and config.endswith("/nothing")
    if config is not None and not named:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        main(["estimate", config if named else str(tmp_path)])
    printed = capsys.readouterr().err
    assert all(message.replace("{folder}", str(tmp_path)) in printed for message in messages)


def test_an_architecture_without_a_row_has_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"d_model": 64, "decoder_layers": 1, "decoder_attention_heads": 4, "vocab_size": 131}
    BartConfig(is_encoder_decoder=False, is_decoder=True, **sizes).save_pretrained(tmp_path)
    assert main(["estimate", str(tmp_path), "--length", "64", "--json"]) == 0
    note = "liger_patch has no test of BartForCausalLM: apply_patch compares its first call"
    found = json.loads(capsys.readouterr().out)
    assert (found["class"], found["tested"]) == ("BartForCausalLM", False)
    assert [each[: len(note)] for each in found["notes"]] == [note]
    assert [each["name"] for each in found["contenders"]] == NAMES


def test_a_loop_over_chunks_of_tokens_has_no_longest_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "CONTENDERS", [EAGER])
    gated_delta_rule = {f"linear_{name}_head_dim": 16 for name in ("key", "value")}
    gated_delta_rule |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    config = Qwen3NextConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=131,
        layer_types=["linear_attention"],
        intermediate_size=64,
        mlp_only_layers=[0],
        **gated_delta_rule,
    )
    config.save_pretrained(tmp_path)
    assert main(["estimate", str(tmp_path), "--length", "64"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "The longest sequences are not estimated: how many tensors Qwen3NextForCausalLM makes "
        "depends on the length, or it takes no longer ones. --length estimates the peak of "
        "another length."
    )


def test_notes_name_the_contenders_without_longest_rows() -> None:
    found = [estimates.Estimate("eager", {}, {16: 1}), estimates.Estimate("liger_patch", {})]
    (note,) = notes("Model", True, found)
    assert note.startswith("The longest sequences of liger_patch are not estimated: ")
    assert notes("Model", True, found[:1]) == []


def test_a_quantized_checkpoint_has_its_bits_or_an_error_with_its_method(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    given = ["estimate", str(folder), "--length", "64"]
    for quantization, message in (
        ({"quant_method": "awq", "bits": 4}, "quantized, or by bitsandbytes, got 'awq': without"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "held in 4 bits, which do not tr"),
    ):
        path.write_text(json.dumps(config | {"quantization_config": quantization}), "utf-8")
        with pytest.raises(SystemExit, match="2"):
            main(given)
        assert message in capsys.readouterr().err
    assert main([*given, "--lora-rank", "4"]) == 0
    assert ", LoRA of rank 4, 4 bits, " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([*given, "--lora-rank", "4", "--quantize-base", "fp8"])
    assert "argument --quantize-base: linear layers are in 4 bits" in capsys.readouterr().err


def test_an_error_without_words_is_its_kind() -> None:
    """One of several lines: test_a_script_that_fails_as_it_is_runs_patched."""
    assert described(ValueError()) == "ValueError"
