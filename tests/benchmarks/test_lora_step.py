"""The benchmark of LoRA steps: its rows, its contenders, and the processes that measure them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from slow_cases import slow_but
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import lora_contenders, lora_step
from benchmarks.__main__ import main
from benchmarks.lora_contenders import OFFLOADED, Request, Setting, is_measured, rows
from benchmarks.lora_report import RATIO, terminal_lora_table
from benchmarks.lora_step import CASES, DROPOUT, SETTINGS, Case, judged, run_case
from benchmarks.models import Model
from benchmarks.names import COMPILED, FLEX, LOWER_BOUND
from benchmarks.sft_step import tiny_tokenizer
from benchmarks.step_tables import lora_steps_table, lora_summary
from liger_patch import patch_status

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning"
)
# multiples of 64: bitsandbytes 0.50 takes scales of other blocks for other sizes on a CPU
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TINY = Model("tiny", LlamaConfig(**SIZES, **HEADS), sequences=2, length=9)
PARAMETERS = {"Llama-3.2-1B": 1.24, "Qwen3-8B of 18 layers": 4.72, "Gemma-3-4B": 3.88}
PARAMETERS["Qwen3-8B"] = 8.19  # 10^9

TIMED = {"ms": 2.0, "peak_mib": 1024.0, "loss": 1.0, "gradient_norm": 2.0, "first_step_s": 3.0}


@pytest.fixture
def request_of(tmp_path: Path) -> Callable[..., Request]:
    """Save the tiny model, and return what asks for it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(TINY.config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)

    def request(contender: str, *settings: Setting) -> Request:
        return Request(contender, "tiny", str(tmp_path), 2, 9, settings, rounds=1, device="cpu")

    return request


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model.name)
def test_models_have_the_sizes_of_their_names(case: Case):
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(case.model.config, dtype=torch.bfloat16)
    weights = dict(built.named_parameters())
    if case.model.config.tie_word_embeddings:  # Transformers 5.0 does not tie on the meta device
        weights.pop("lm_head.weight", None)
    expected = PARAMETERS[case.model.name.partition(",")[0]]
    assert sum(p.numel() for p in weights.values()) / 1e9 == pytest.approx(expected, rel=0.01)


def test_rows_are_chosen_by_name_and_models_cut():
    names = {
        each.name for each in CASES[0].named(["Qwen", "Llama-3.2-1B, 8 x 2048, LoRA"]).settings
    }
    assert names == {"LoRA", "LoRA + checkpointing", "LoRA with dropout"}
    assert not CASES[1].named(["Llama"]).settings
    for case in CASES:
        cut = case.cut(2, 4096, None).model
        assert cut.config.num_hidden_layers == 2 < case.model.config.num_hidden_layers
        assert cut.sequences * cut.length == 4096
        assert case.cut(None, None, None) == case
        long = case.cut(None, None, 1).model
        assert (long.sequences, long.length) == (1, case.model.sequences * case.model.length)
        assert long.name.endswith(f", 1 x {long.length}")
        for wrong in (0, 3):
            with pytest.raises(ValueError, match=f"sequences={wrong}: .* tokens=4096"):
                case.cut(None, 4096, wrong)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(CASES[2].cut(2, None, None).model.config)
    assert len(built.model.layers) == 2


@pytest.mark.parametrize(
    "setting", slow_but([SETTINGS[0], SETTINGS[-1]], SETTINGS), ids=lambda setting: setting.name
)
def test_ours_computes_what_eager_does(request_of: Callable[..., Request], setting: Setting):
    if setting.quantized:
        pytest.importorskip("bitsandbytes")
    found = [*rows(request_of("eager", setting)), *rows(request_of("liger_patch", setting))]
    assert {row.pop("model") for row in found} == {f"tiny, {setting.name}"}
    by_name = {row["contender"]: row for row in found}
    names = ["eager", *([] if setting.quantized else [LOWER_BOUND]), "liger_patch"]
    assert list(by_name) == names
    eager, ours = by_name["eager"], by_name["liger_patch"]
    # the same step, of a few tokens in bf16; tests/layers has what is exact
    assert ours["loss"] == pytest.approx(eager["loss"], rel=5e-3)
    assert ours["gradient_norm"] == pytest.approx(eager["gradient_norm"], rel=0.05)
    assert eager["gradient_norm"] > 0
    for row in (eager, ours):
        assert row["adapters"] == "float32"
        assert row["attention"] == "sdpa"
        assert row["trained"] == ours["trained"] > 0
        assert row["first_step_s"] > 0
    assert all(row["ms"] > 0 for row in found)


def test_models_are_trained_as_the_setting_says(request_of: Callable[..., Request]):
    bnb = pytest.importorskip("bitsandbytes")
    for setting in (*SETTINGS, DROPOUT):
        model = lora_contenders.CONTENDERS["eager"](request_of("eager", setting), setting)
        assert model.is_gradient_checkpointing is setting.checkpointing
        rates = {m.p for m in model.modules() if isinstance(m, nn.Dropout)}
        assert rates == ({setting.dropout} if setting.dropout else set())
        in_4_bits = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
        assert len(in_4_bits) == (7 * SIZES["num_hidden_layers"] if setting.quantized else 0)
        adapters = lora_contenders.fill_adapters(model)
        assert len(adapters) == 2 * 7 * SIZES["num_hidden_layers"]
        assert all(p.abs().sum() > 0 for p in adapters)


def test_a_failure_is_a_row_and_the_next_setting_is_measured(
    request_of: Callable[..., Request], monkeypatch: pytest.MonkeyPatch, capsys
):
    eager = lora_contenders.CONTENDERS["eager"]

    def make(request: Request, setting: Setting):
        if setting.checkpointing:
            raise ValueError("no checkpointing")
        return eager(request, setting)

    monkeypatch.setitem(lora_contenders.CONTENDERS, "liger_patch", make)
    first, second = rows(request_of("liger_patch", SETTINGS[2], SETTINGS[0]))
    assert first["failure"] == "does not run: ValueError: no checkpointing"
    assert second["ms"] > 0
    assert "Traceback" in capsys.readouterr().err

    def failing(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(lora_contenders, "step_bound", failing)
    timed, bound = rows(request_of("eager", SETTINGS[0]))
    assert timed["ms"] > 0
    assert bound == {
        "model": "tiny, LoRA",
        "contender": LOWER_BOUND,
        "failure": "out of memory",
    }


@pytest.mark.slow
@pytest.mark.skipif(find_spec("unsloth") is not None, reason="it needs a GPU")
def test_each_contender_has_a_process_and_one_that_is_missing_is_reported(capfd):
    names = ("eager", "Unsloth", "liger_patch")
    found = list(run_case(Case(TINY, SETTINGS[:1]), names, rounds=1, device="cpu"))
    by_name = {row["contender"]: row for row in found}
    assert list(by_name) == [LOWER_BOUND, *names]
    assert by_name["liger_patch"]["loss"] == pytest.approx(by_name["eager"]["loss"], rel=1e-3)
    assert not any("wrong" in row for row in found)
    missing = "does not run: exit status 1: ModuleNotFoundError: No module named 'unsloth'"
    assert by_name["Unsloth"] == {
        "model": "tiny, LoRA",
        "contender": "Unsloth",
        "failure": missing,
    }
    out, err = capfd.readouterr()
    assert "tiny: liger_patch ..." in out
    assert "Traceback" in err


def test_a_process_that_dies_leaves_the_rows_that_it_wrote(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    """Its other settings get the exit status and the last words as their failure."""
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "lora_contenders.py").write_text(
        "import json, sys\n"
        "def main(request, results):\n"
        "    row = {'model': 'tiny, LoRA', 'contender': 'eager', 'ms': 1.0}\n"
        "    results.write_text(json.dumps(row) + '\\n')\n"
        "    sys.exit('killed')\n"
    )
    monkeypatch.setattr(lora_step, "ROOT", tmp_path)
    request = Request("eager", "tiny", "", 2, 9, SETTINGS[:2], rounds=1)
    kept, lost = lora_step.run_apart(request)
    assert kept["ms"] == 1.0
    assert lost["model"] == "tiny, QLoRA"
    assert lost["failure"] == "does not run: exit status 1: killed"


def test_a_contender_may_take_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch, tmp_path):
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    waits = "import time\ndef main(request, results):\n    time.sleep(600)\n"
    (package / "lora_contenders.py").write_text(waits)
    monkeypatch.setattr(lora_step, "ROOT", tmp_path)
    request = Request("eager", "tiny", "", 2, 9, SETTINGS[:1], rounds=1)
    (lost,) = lora_step.run_apart(request, limit=1.0)
    assert lost["failure"] == "takes longer than 1 s"


def test_a_model_that_cannot_be_saved_is_the_failure_of_all(monkeypatch: pytest.MonkeyPatch):
    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(lora_step, "save", full)
    case = Case(TINY, SETTINGS[:2])
    found = list(run_case(case, ("eager", "Unsloth"), rounds=1, device="cpu"))
    assert [row["failure"] for row in found] == ["does not run: OSError: disk full"] * 4


def test_offloaded_checkpoints_are_measured_where_there_are_some(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def run_apart(request: Request, *, limit: float | None) -> list[dict]:
        asked.append((request.contender, [each.checkpointing for each in request.settings]))
        return []

    monkeypatch.setattr(lora_step, "run_apart", run_apart)
    for settings in (SETTINGS[:3], SETTINGS[:1]):
        list(run_case(Case(TINY, settings), ("liger_patch", OFFLOADED), rounds=1, device="cpu"))
    ours = "liger_patch"
    assert asked == [(ours, [False, False, True]), (OFFLOADED, [True]), (ours, [False])]


def test_flex_attention_is_measured_where_windows_slide(request_of: Callable[..., Request]):
    names = {case.model.name for case in CASES if is_measured(FLEX, case.model.config, SETTINGS[2])}
    assert names == {"Gemma-3-4B, 4 x 2048"}
    model = lora_contenders.CONTENDERS[FLEX](request_of(FLEX, SETTINGS[0]), SETTINGS[0])
    assert model.config._attn_implementation == "flex_attention"
    assert patch_status(model).patched


def test_the_compiled_contender_compiles_each_layer_of_a_patched_model(
    request_of: Callable[..., Request],
):
    model = lora_contenders.CONTENDERS[COMPILED](request_of(COMPILED, SETTINGS[2]), SETTINGS[2])
    assert patch_status(model).patched
    layers = model.get_base_model().model.layers
    assert len(layers) == SIZES["num_hidden_layers"]
    assert all(layer._compiled_call_impl is not None for layer in layers)


def test_the_contender_with_offloaded_checkpoints_asks_for_it(request_of: Callable[..., Request]):
    setting = SETTINGS[2]
    model = lora_contenders.CONTENDERS[OFFLOADED](request_of(OFFLOADED, setting), setting)
    assert dict(patch_status(model).rows)["checkpoint offload"] != "off"


def made_up() -> list[dict]:
    """Rows of three contenders in two settings, as ``run_case`` yields them."""
    eager = [
        {"model": "tiny, LoRA", "contender": "eager", **TIMED},
        {"model": "tiny, LoRA", "contender": LOWER_BOUND, "ms": 1.0},
        {"model": "tiny, QLoRA", "contender": "eager", **TIMED},
    ]
    unsloth = [
        {"model": "tiny, LoRA", "contender": "Unsloth", **TIMED, "first_step_s": 19.0},
        {"model": "tiny, QLoRA", "contender": "Unsloth", **TIMED, "loss": 1.5},
    ]
    ours = [
        {"model": "tiny, LoRA", "contender": "liger_patch", **TIMED, "ms": 1.5},
        {"model": "tiny, QLoRA", "contender": "liger_patch", "failure": "out of memory"},
    ]
    eagers = {"tiny, LoRA": eager[0], "tiny, QLoRA": eager[2]}
    return [row for rows in (eager, unsloth, ours) for row in judged(rows, eagers)]


def test_a_bound_comes_first_and_a_row_unlike_eagers_is_wrong():
    found = made_up()
    assert [row["contender"] for row in found[:3]] == [LOWER_BOUND, "eager", "eager"]
    assert [row["model"] for row in found[:3]] == ["tiny, LoRA", "tiny, LoRA", "tiny, QLoRA"]
    wrong = [(row["model"], row["contender"]) for row in found if row.get("wrong")]
    assert wrong == [("tiny, QLoRA", "Unsloth")]


def test_rows_come_as_each_contender_ends_and_are_compared_with_eagers(
    monkeypatch: pytest.MonkeyPatch,
):
    """So what was measured is written if the next contender, or somebody, ends the benchmark."""
    ended = []

    def run_apart(request: Request, *, limit: float | None) -> list[dict]:
        ended.append(request.contender)
        wrong = {"loss": 1.5} if request.contender == "Unsloth" else {}
        return [{"model": "tiny, LoRA", "contender": request.contender, **TIMED, **wrong}]

    monkeypatch.setattr(lora_step, "run_apart", run_apart)
    contenders = ("eager", "Unsloth", "liger_patch")
    found = run_case(Case(TINY, SETTINGS[:1]), contenders, rounds=1, device="cpu")
    wrong = []
    for i, row in enumerate(found):
        assert ended == list(contenders[: i + 1])
        wrong.append(row.get("wrong", False))
    assert wrong == [False, True, False]


def test_no_row_is_wrong_where_eager_has_no_result(monkeypatch: pytest.MonkeyPatch):
    def run_apart(request: Request, *, limit: float | None) -> list[dict]:
        result = {"failure": "out of memory"} if request.contender == "eager" else TIMED
        return [{"model": "tiny, LoRA", "contender": request.contender, **result}]

    monkeypatch.setattr(lora_step, "run_apart", run_apart)
    found = run_case(Case(TINY, SETTINGS[:1]), ("eager", "liger_patch"), rounds=1, device="cpu")
    assert [("loss" in row, "wrong" in row) for row in found] == [(False, False), (True, False)]


def test_tables_have_the_ratio_to_unsloth_where_both_are_right():
    report = {"gpu": "GPU", "date": "2026-01-01", "versions": {"torch": "2.6"}, "command": "c"}
    table = lora_steps_table(report | {"lora_steps": made_up()})
    head, _, lora, qlora, _, note = table.splitlines()
    assert head.endswith(f"| {LOWER_BOUND} | eager | Unsloth | liger_patch | {RATIO} |")
    assert lora == "| tiny, LoRA | 1.0 | 2.0 / 1.0 | 2.0 / 1.0 | 1.5 / 1.0 | 0.75 / 1.00 |"
    assert qlora == "| tiny, QLoRA |  | 2.0 / 1.0 | wrong | out of memory |  |"
    assert "eager 3 s, Unsloth 19 s, liger_patch 3 s." in note
    said = terminal_lora_table(made_up())
    for words in ("tiny, QLoRA", "out of memory", "wrong", LOWER_BOUND, "0.75"):
        assert words in said


def test_a_summary_has_first_steps_of_lines_that_it_does_not_show():
    report = {"gpu": "GPU", "date": "2026-01-01", "versions": {"torch": "2.6"}, "command": "c"}
    settings = ("LoRA + checkpointing", 9.0), ("QLoRA + checkpointing", 0.1)
    rows = made_up() + [
        {
            "model": f"tiny, {setting}",
            "contender": OFFLOADED,
            "ms": 1.0,
            "peak_mib": 1024.0,
            "first_step_s": seconds,
        }
        for setting, seconds in settings
    ]
    table = lora_summary(report | {"lora_steps": rows})
    assert "| tiny, QLoRA + checkpointing |" in table
    assert "| tiny, LoRA + checkpointing |" not in table
    assert f"{OFFLOADED} 9 s." in table


def test_a_summary_leaves_out_lines_in_which_a_contender_failed():
    report = {"gpu": "GPU", "date": "2026-01-01", "versions": {"torch": "2.6"}, "command": "c"}
    setting = "tiny, QLoRA + checkpointing"
    rows = [
        *made_up(),
        {"model": setting, "contender": "eager", **TIMED},
        {"model": setting, "contender": LOWER_BOUND, "failure": "out of memory"},
        {"model": setting, "contender": "Unsloth", **TIMED},
    ]
    assert f"| {setting} |" in lora_summary(report | {"lora_steps": rows})
    rows[-1] = {"model": setting, "contender": "Unsloth", "failure": "takes longer than 120 s"}
    table = lora_summary(report | {"lora_steps": rows})
    assert f"| {setting} |" not in table
    assert "| tiny, LoRA |" in table
    plainer = "tiny, LoRA + checkpointing"
    rows.insert(0, {"model": plainer, "contender": "eager", **TIMED})
    assert f"| {plainer} |" in lora_summary(report | {"lora_steps": rows})


def test_contenders_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path):
    measured = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def measure(
        case: Case, contenders: list[str], *, rounds: int, limit: float | None
    ) -> list[dict]:
        assert limit is None
        measured.append((case.model.name, len(case.settings), contenders, rounds))
        return made_up()

    monkeypatch.setattr(lora_step, "run_case", measure)
    options = ["--model", "Gemma", "--contender", "Unsloth", "--rounds", "3"]
    assert main(["lora_step", *options, "--output", str(tmp_path)]) == 0
    assert measured == [("Gemma-3-4B, 4 x 2048", 2, ["eager", "Unsloth"], 3)]
