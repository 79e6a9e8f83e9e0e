"""Times, bytes and the paper's figures, against formulas written out here."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from p2p_dilocox.errors import SpecError
from p2p_dilocox.plan import paper
from p2p_dilocox.plan.cluster import Cluster
from p2p_dilocox.plan.model import PlannedModel
from p2p_dilocox.plan.speed import (
    AGREE_S,
    BACKGROUND_BYTES_PER_S,
    SPARE,
    WAITING,
    Compute,
    Link,
    bubble_share,
    codings,
    flops_per_token,
    pace,
)
from p2p_dilocox.plan.units import parse_bits_per_s, parse_bytes, parse_count, parse_flops
from p2p_dilocox.runspec import RunSpec, load_run_file
from p2p_dilocox.traffic import model_tensors, round_bytes

OPT, QWEN = 1_315_758_080, 108_491_952_128  # facebook/opt-1.3b as published; Qwen1.5-110B less two layers


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_bytes, "40GB", 40e9), (parse_bytes, "40gb", 40e9), (parse_bytes, "40GiB", 40 * 2**30),
        (parse_bytes, "40 GiB", 40 * 2**30), (parse_bytes, "1.5e3MB", 1.5e9), (parse_bytes, "512mib", 2**29),
        (parse_bytes, "800kB", 8e5), (parse_bytes, "1.5 MB", 1.5e6), (parse_bytes, "2 TB", 2e12),
        (parse_bytes, "7B", 7),
        (parse_bits_per_s, "100Mbps", 1e8), (parse_bits_per_s, "100mbit", 1e8),
        (parse_bits_per_s, "1Gbit/s", 1e9), (parse_bits_per_s, "0.5gbps", 5e8),
        (parse_bits_per_s, "12.5MB/s", 1e8),
        (parse_flops, "312TFLOPS", 312e12), (parse_flops, "312T", 312e12), (parse_flops, "312e12", 312e12),
        (parse_flops, "1pflops", 1e15),
        (parse_count, "20B", 20e9), (parse_count, "300M", 3e8), (parse_count, "1e9", 1e9),
        (parse_count, "1.5T", 1.5e12), (parse_count, "400", 400),
    ],
)  # fmt: skip
def test_quantities(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse, text)
        for parse in (parse_bytes, parse_bits_per_s, parse_flops, parse_count)
        for text in ("", "GB", "0", "0GB", "0Mbps", "-1", "-40GB", "nan", "inf", "1e999B", "40 XB", "4_0GB")
    ]
    + [(parse_bytes, "40Gb"), (parse_bytes, "40"), (parse_bytes, "40Gbps"), (parse_bytes, "4 0GB"),
       (parse_bits_per_s, "100"), (parse_bits_per_s, "100MB"), (parse_bits_per_s, "100Mbpm"),
       (parse_flops, "3GB"), (parse_count, "3GB")],
)  # fmt: skip
def test_quantities_that_are_refused(parse: Callable[[str], float], text: str) -> None:
    """With the text and a good example, as one sentence."""
    with pytest.raises(SpecError) as refused:
        parse(text)
    assert repr(text) in str(refused.value) and "\n" not in str(refused.value)


def test_the_bubble() -> None:
    assert [bubble_share("gpipe", s, m) for s, m in ((1, 1), (2, 1), (4, 8))] == [0, 1 / 2, 3 / 11]
    assert bubble_share("1f1b", 4, 8) == 3 / 11 and bubble_share("interleaved-1f1b", 4, 8, 2) == 3 / 19


@pytest.fixture(scope="module")
def demo() -> tuple[RunSpec, PlannedModel]:
    spec = load_run_file("demo")
    return spec, PlannedModel(spec)


def test_operations_per_token(demo: tuple[RunSpec, PlannedModel]) -> None:
    """Four layers of width 128 with an MLP of 384, two heads alike, and a tied head of 2048 words."""
    layer = 4 * 128 * 128 + 3 * 128 * 384
    assert flops_per_token(*demo) == 6 * (4 * layer + 2048 * 128) + 12 * 4 * 128 * 128


@pytest.mark.parametrize("recipe_mode", ["arrival", "none"])
def test_pace_of_a_slow_link(demo: tuple[RunSpec, PlannedModel], recipe_mode: str) -> None:
    spec, model = demo
    spec = replace(spec, overlap=replace(spec.overlap, mode=recipe_mode))
    cluster, link = Cluster(2, "cuda"), Link(up=1.5e5, down=1e6)
    found = pace(spec, model, cluster, Compute(tokens_per_s=2048.0), link, 3)
    step_s = 4 * 128 / 2048
    sent = round_bytes(spec, model.tensors, 3)
    assert found.step_s == step_s and found.sent_bytes == sent
    assert found.transfer_s == pytest.approx(8 * sent / 1.5e5), "the slower direction decides"
    assert AGREE_S + found.transfer_s < found.round_s < AGREE_S + found.transfer_s + 0.1
    training_s = 40 * step_s
    assert found.round_s > training_s, "the link must be slow"
    outer_s = found.round_s + (training_s if recipe_mode == "none" else 0)
    assert found.utilisation == pytest.approx(training_s / outer_s)
    assert found.waits_s == pytest.approx(outer_s - training_s)
    assert found.tokens_per_s == pytest.approx(3 * 40 * 4 * 128 / outer_s)
    assert found.month_bytes == pytest.approx(30 * 86400 * (sent / outer_s + 2 * BACKGROUND_BYTES_PER_S))

    def hides(H: int) -> bool:
        again = pace(replace(spec, inner=replace(spec.inner, H=H)), model, cluster, Compute(2048.0), link, 3)
        if recipe_mode == "none":
            return again.utilisation >= 1 - WAITING
        return again.round_s * SPARE <= H * step_s and again.waits_s == 0

    assert hides(found.enough_H) and not hides(found.enough_H - 1)


def test_compute_from_peak_and_bubble(demo: tuple[RunSpec, PlannedModel]) -> None:
    spec, model = demo  # two microbatches: a third of two ranks' time is bubble
    found = pace(spec, model, Cluster(2), Compute(flops=1e12, mfu=0.25), Link(1e9, 1e9), 2)
    assert found.step_s == pytest.approx(4 * 128 * flops_per_token(spec, model) / (2 * 1e12 * 0.25) * 3 / 2)


def test_codings_go_from_the_least_lossy_to_the_smallest(demo: tuple[RunSpec, PlannedModel]) -> None:
    spec, model = demo
    found = codings(spec, model)
    sizes = [round_bytes(replace(spec, compression=c.compression), model.tensors, 4) for c in found]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes) > 2
    assert found[0].compression.lowrank == 0


def test_the_paper_s_example_of_an_uncompressed_round() -> None:
    """Section 2.4.1: 533.3 GB and 1.18 h."""
    sent, hours = paper.sync_example()
    assert sent == pytest.approx(2 * 2 / 3 * 4 * 100e9)
    assert round(sent / 1e9, 1) == 533.3
    assert int(100 * hours) / 100 == 1.18


def test_the_paper_s_speeds() -> None:
    """Formulas written out again; deviations as docs/plan.md has them: one row is far off."""
    rates = [rate for case in paper.CASES for rate in paper.speed(case)]
    tokens, peak = 16384, 312e12 * 0.043
    small, large = 6 * OPT * tokens / (16 * peak), 6 * QWEN * tokens / (160 * peak)
    sync_small, sync_large = 16 * OPT / 1e9, 16 * QWEN / 1e9  # two clusters: each sends its vector once
    expected = [
        (745, tokens / (small + sync_small)),
        (16161, tokens / (small + sync_small / 500)),
        (23880, tokens / small),
        (10.4, tokens / (large + sync_large)),
        (2427, tokens / (large + sync_large / 1000)),
        (3728, tokens / large),
        (2197, 125 * tokens / (125 * large + sync_large / 8)),
        (1168, 125 * tokens / sync_large),
    ]
    assert [rate.printed for rate in rates] == [printed for printed, _ in expected]
    assert [rate.tokens_per_s for rate in rates] == pytest.approx([value for _, value in expected])
    off = {(r.case, r.method): round(r.deviation, 2) for r in rates}
    assert {key for key, d in off.items() if abs(d) > 0.15} == {("OPT-1.3B", "cocktailsgd")}
    assert off["OPT-1.3B", "cocktailsgd"] == 0.57


def test_which_methods_fit_in_40_gb() -> None:
    fits = {(f.method, f.gpus): f.fits for f in paper.memory(paper.CASES[1])}
    assert not any(fit for (_, gpus), fit in fits.items() if gpus == 8), (
        "one server holds 107B with no method"
    )
    assert fits["allreduce", 80] and fits["cocktailsgd", 80] and fits["dilocox", 80]
    assert ("opendiloco", 80) not in fits
    assert all(f.fits for f in paper.memory(paper.CASES[0]))
    (ours,) = (f for f in paper.memory(paper.CASES[1]) if (f.method, f.gpus) == ("dilocox", 80))
    assert ours.gpu_bytes == 28 * QWEN / 80


def test_the_107b_model_is_counted_as_its_config_says() -> None:
    width, inner, words, kv = 8192, 49152, 152064, 1024
    attention = 2 * width * width + width + 2 * (width * kv + kv)
    layer = attention + 3 * width * inner + 2 * width
    assert 78 * layer + 2 * words * width + width == QWEN


@pytest.mark.parametrize("case", paper.CASES, ids=lambda case: case.run)
def test_a_case_of_the_paper_has_the_parameters_of_its_run(case: paper.Case) -> None:
    spec = load_run_file(case.run)
    tensors = model_tensors(spec)
    assert tensors.num_parameters == case.parameters
    # Embedding and head are stages of their own, so the state of the fullest stage fits too.
    largest = max(sum(math.prod(s) for s in shapes.values()) for shapes in tensors.stages.values())
    assert spec.model.stages == case.gpus and 28 * largest < paper.GPU_BYTES
    assert spec.inner.H == paper.H
    assert bool(spec.compression.lowrank) == (case.dilocox < 4 / 16)
