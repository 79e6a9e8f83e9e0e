"""Recipes side by side: what they share, what is computed of their results, and what is not run twice."""

from dataclasses import replace
from pathlib import Path

import pytest

from p2p_dilocox.comparison import (
    Cell,
    Method,
    Result,
    Setup,
    cell_file,
    prepare,
    read_cell,
    run_cell,
    summarise,
)
from p2p_dilocox.comparison_plot import front
from p2p_dilocox.errors import SpecError, StateError
from p2p_dilocox.recipe import recipes
from p2p_dilocox.runspec import parse_run, parse_run_as, total_inner_steps
from p2p_dilocox.settings import adapted_inner_steps
from p2p_dilocox.simulation import Point
from p2p_dilocox.traffic import fp16_bytes, model_tensors

TEXT = """
[run]
id = "small"
recipe = "dilocox"
outer_steps = 99
[model.config]
model_type = "llama"
vocab_size = 2048
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 32
[data]
seq_len = 16
[inner]
H = 4
batch_size = 2
lr = 1e-2
warmup_steps = 2
[eval]
batches = 2
[outer]
lr = 0.123
[compression]
bits = 16
"""
SETUP = Setup(text=TEXT, clusters=3, inner_steps=8)


def result(recipe: str, seed: int, loss: float) -> Result:
    return Result(
        recipe=recipe, settings=recipe, seed=seed, val_loss=loss, averaged_loss=None, start_loss=9.0,
        tokens=100, outer_steps=2, H=4,
        wire_bytes_per_outer_step=50.0, compression_vs_fp16=8.0, from_local_steps=4.0, from_coding=2.0,
        utilisation=0.5, tokens_per_s=10.0, seconds=10.0,
        points=[Point(0, 0.0, 0, 0.0, 9.0), Point(2, 10.0, 100, 100.0, loss)],
    )  # fmt: skip


def test_a_run_as_another_recipe_keeps_all_but_the_method() -> None:
    first, second = (parse_run_as(TEXT, name, seed=5, inner_steps=8) for name in ("dilocox", "diloco"))
    for spec, name in ((first, "dilocox"), (second, "diloco")):
        assert (spec.outer, spec.compression) == (recipes()[name].outer, recipes()[name].compression)
        assert (spec.run.seed, spec.run.outer_steps, spec.inner.H) == (5, 2, 4)
    assert (first.model, first.data, first.inner) == (second.model, second.data, second.inner)


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_makes_as_many_inner_steps(name: str) -> None:
    """A method of one inner step per round makes more rounds, and so does one whose fragments take turns."""
    spec = parse_run_as(TEXT, name, seed=0, inner_steps=8)
    assert spec.run.outer_steps * spec.inner.H == 8
    own = recipes()[name].inner.get("H", 4 // recipes()[name].schedule.fragments)
    assert max(1, own) == spec.inner.H
    assert adapted_inner_steps(spec) == (spec.inner.H, spec.inner.H)


def test_what_a_recipe_cannot_be_is_said_before_anything_runs() -> None:
    with pytest.raises(SpecError, match="no method of run.toml, and no recipe, did you mean 'diloco'"):
        SETUP.spec("dilocoy", 0)
    with pytest.raises(SpecError, match="and no recipe. Known are allreduce, cocktailsgd, "):
        SETUP.spec("xyz", 0)
    with pytest.raises(SpecError, match="inner.warmup_steps = 2, must be at most 1"):
        replace(SETUP, inner_steps=1, text=TEXT.replace("H = 4", "H = 1")).spec("fedavg", 0)


def test_a_method_is_a_recipe_with_other_settings() -> None:
    overrides = {"inner": {"H": 3}, "compression": {"bits": 2}, "adapt": {"startup_steps": 2}}
    methods = {"mine": Method(recipe="dilocox-dense", overrides=overrides)}
    setup = replace(SETUP, methods=methods, inner_steps=15)
    spec = setup.spec("mine", 0)
    assert (spec.inner.H, spec.compression.bits, spec.compression.feedback) == (3, 2, "local")
    assert total_inner_steps(spec) == 2 * 1 + 4 * 3  # the 15 of others, less what makes no whole outer step
    assert str(methods["mine"]) == (
        "dilocox-dense: inner.H = 3, compression.bits = 2, adapt.startup_steps = 2"
    )
    assert setup.spec("dilocox-dense", 0).inner.H == 4
    with pytest.raises(SpecError, match=r"run.toml, methods.x: .*(inner.h = 3|unknown key h)"):
        replace(SETUP, methods={"x": Method(recipe="fedavg", overrides={"inner": {"h": 3}})}).spec("x", 0)


@pytest.mark.parametrize("H", [4, 1000])
def test_a_method_that_adapts_or_has_a_large_h_trains_on_as_many_tokens(H: int) -> None:  # noqa: N803
    overrides: dict[str, dict[str, object]] = {"inner": {"H": H}, "adapt": {"rule": "band"}}
    spec = replace(SETUP, methods={"x": Method(recipe="dilocox", overrides=overrides)}).spec("x", 0)
    assert spec.run.outer_steps * spec.inner.H == SETUP.inner_steps
    assert adapted_inner_steps(spec) == (spec.inner.H, spec.inner.H)


def test_a_setting_at_its_default_names_no_other_cell() -> None:
    def name(**keys: bool) -> str:
        methods = {"x": Method(recipe="dilocox", overrides={"compression": dict(keys)})}
        return cell_file(replace(SETUP, methods=methods), Cell("x", 0), Path(), "").name

    assert name() == name(factor_embeddings=True) != name(factor_embeddings=False)


def test_clusters_that_come_and_go_do_so_alike_under_every_method_and_the_first_never() -> None:
    churn = replace(SETUP, away=0.3, away_steps=20.0, inner_steps=10_000)
    first, *others = churn.places(0, 1000)
    assert first.absences == () and others[0].absences != others[1].absences
    assert churn.places(0, 1000)[1:] == others != churn.places(1, 1000)[1:]
    assert all(place.absences == () for place in SETUP.places(0, 1000))
    for place in others:
        gone = sum(a.stop_s - a.start_s for a in place.absences)
        assert gone / place.absences[-1].stop_s == pytest.approx(0.3, abs=0.03)
        assert gone / len(place.absences) == pytest.approx(20.0, rel=0.1)
        ends = [s for a in place.absences for s in (a.start_s, a.stop_s)]
        assert ends == sorted(ends)


def test_with_churn_a_cell_is_another_and_trains_less(tmp_path: Path) -> None:
    setup, cell = replace(SETUP, inner_steps=32), Cell("dilocox", 0)
    churn = replace(setup, away=0.5, away_steps=8.0)
    names = {cell_file(s, cell, tmp_path, "").name for s in (setup, churn, replace(churn, away=0.4))}
    assert len(names) == 3
    assert cell_file(replace(setup, away_steps=9.0), cell, tmp_path, "").name in names
    prepare(setup, tmp_path)
    steady, torn = (run_cell(s, cell, tmp_path) for s in (setup, churn))
    assert steady.points[0].val_loss == torn.points[0].val_loss
    assert torn.tokens < 0.9 * steady.tokens and torn.outer_steps == steady.outer_steps
    every_step = [run_cell(s, Cell("allreduce", 0), tmp_path).seconds for s in (setup, churn)]
    assert every_step[1] < 0.9 * every_step[0]  # rounds of fewer are shorter


def test_a_summary_is_ordered_by_loss_and_counts_the_gap_from_allreduce_of_the_same_seed() -> None:
    runs = [("far", 0, 4.4), ("far", 1, 4.0), ("allreduce", 0, 4.0), ("near", 0, 3.0), ("allreduce", 1, 5.0)]
    found = summarise([result(*run) for run in runs])
    assert [s.recipe for s in found] == ["near", "far", "allreduce"]
    assert [s.gap for s in found] == pytest.approx([-0.25, (0.1 - 0.2) / 2, 0.0])
    assert [s.gap_spread for s in found] == pytest.approx([0.0, 0.3, 0.0])
    assert [(s.seeds, s.loss_spread) for s in found] == [(1, 0.0), (2, pytest.approx(0.4)), (2, 1.0)]
    assert found[1].mean.points[-1].val_loss == pytest.approx(4.2)
    assert summarise([result("far", 0, 4.4)])[0].gap is None


def test_the_front_has_what_nothing_beats_with_as_few_bytes() -> None:
    def sends(recipe: str, sent: float, loss: float) -> Result:
        return replace(result(recipe, 0, loss), points=[Point(2, 10.0, 100, sent, loss)])

    runs = [
        ("dear", 9.0, 3.0),
        ("cheap", 1.0, 4.0),
        ("worse", 5.0, 4.5),
        ("between", 4.0, 3.5),
        ("tie", 4.0, 3.6),
    ]
    found = front(summarise([sends(*run) for run in runs]))
    assert [s.recipe for s in found] == ["cheap", "between", "dear"]


def test_a_cell_counts_bytes_against_fp16_at_every_step_and_its_result_is_kept(tmp_path: Path) -> None:
    prepare(SETUP, tmp_path)
    seen: list[tuple[int, int]] = []
    found = run_cell(SETUP, Cell("opendiloco", 0), tmp_path, lambda done, of: seen.append((done, of)))
    assert seen == [(n, 24) for n in range(1, 25)]
    fp16 = fp16_bytes(model_tensors(SETUP.spec("opendiloco", 0)).num_parameters, 3)
    assert found.wire_bytes_per_outer_step == pytest.approx(fp16, rel=0.01)  # it is fp16, every 4 inner steps
    assert found.compression_vs_fp16 == pytest.approx(4.0, rel=0.01)
    assert found.tokens == 3 * 8 * 2 * 16
    # 2 rounds of 31 s and 8 messages of 0.02 s each, behind which nothing is computed
    assert found.utilisation == pytest.approx(8 / (8 + 2 * (31 + 0.16)), rel=0.01)
    assert found.points[-1].val_loss == found.val_loss < found.start_loss
    (file,) = (tmp_path / "cells").iterdir()
    assert read_cell(SETUP, Cell("opendiloco", 0), tmp_path) == found
    for other, cell in ((replace(SETUP, clusters=2), Cell("opendiloco", 0)), (SETUP, Cell("opendiloco", 1))):
        assert read_cell(other, cell, tmp_path) is None
    file.write_text("{")
    with pytest.raises(StateError, match="delete it to run it again"):
        read_cell(SETUP, Cell("opendiloco", 0), tmp_path)


def test_all_start_from_the_same_warm_model(tmp_path: Path) -> None:
    warm = replace(SETUP, warm_steps=20)
    prepare(warm, tmp_path)
    starts = [run_cell(warm, Cell(name, 0), tmp_path).start_loss for name in ("fedavg", "dilocox")]
    cold = run_cell(SETUP, Cell("fedavg", 0), tmp_path).start_loss
    assert starts[0] == starts[1] < cold - 0.1


def test_studies_share_cells_whose_settings_are_the_same(tmp_path: Path) -> None:
    prepare(SETUP, tmp_path)
    found = run_cell(SETUP, Cell("fedavg", 0), tmp_path)
    named = replace(SETUP, methods={"mean": Method(recipe="fedavg"), "other": Method(recipe="diloco")})
    again = read_cell(named, Cell("mean", 0), tmp_path)
    assert again is not None
    assert again == replace(found, recipe="mean")
    assert read_cell(named, Cell("other", 0), tmp_path) is None


def test_the_mean_of_the_last_anchors_is_in_the_result(tmp_path: Path) -> None:
    setup = replace(SETUP, methods={"a": Method(recipe="fedavg", overrides={"eval": {"average": 2}})})
    prepare(setup, tmp_path)
    found = run_cell(setup, Cell("a", 0), tmp_path)
    assert found.averaged_loss is not None
    assert found.averaged_loss != found.val_loss
    assert run_cell(setup, Cell("fedavg", 0), tmp_path).averaged_loss is None


@pytest.mark.parametrize("name", recipes())
def test_real_clusters_get_the_same_run_as_text(name: str) -> None:
    spec = SETUP.spec(name, 1)
    assert parse_run(SETUP.run_text(name, 1)) == replace(spec, run=replace(spec.run, min_clusters=3))
