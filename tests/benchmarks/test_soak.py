"""The soak, tiny and on the CPU: its runs train, resume, switch adapters, and are compared."""

from __future__ import annotations

import pytest

from benchmarks import soak
from benchmarks.names import EAGER, OURS


@pytest.mark.slow
@pytest.mark.parametrize("run", soak.STEPS)
def test_contenders_train_alike(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.setattr(soak, "LENGTH", 32)
    rows = [soak.soak(run, contender, 20, "cpu") for contender in (EAGER, OURS)]
    eager, ours = rows
    assert (eager["fused"], ours["fused"]) == (None, True)
    assert len(ours["training"]) == 2
    assert len(ours["held_out"]) == 4  # a resumed run's too
    assert ours["training"] == pytest.approx(eager["training"], abs=1e-3)
    assert ours["training"] != eager["training"]
    assert f"{ours['held_out'][-1]:10.4f}" in soak.terminal_soak_table(rows)


def test_watch_switches_adapters_and_stops() -> None:
    class Model:
        peft_config = "default", soak.SECOND
        active_adapter = "default"

        def set_adapter(self, name: str) -> None:
            self.active_adapter = name

    class State:
        global_step = 0
        should_training_stop = False

    model, state = Model(), State()
    watch = soak.Watch(model, 40, stop=6)
    seen = []
    for state.global_step in range(1, 7):
        watch.on_step_end(None, state, state)
        seen.append((model.active_adapter, state.should_training_stop))
    default, second = "default", soak.SECOND
    assert [name for name, _ in seen] == [default, second, second, default, default, second]
    assert [stops for _, stops in seen] == [False] * 5 + [True]
