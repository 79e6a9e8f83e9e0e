import pytest

from p2p_dilocox.errors import SpecError
from p2p_dilocox.recipe import OVERLAP_DEFAULTS, default_gamma, recipes
from p2p_dilocox.runspec import parse_run
from p2p_dilocox.settings import Compression, Outer


def test_dilocox_has_both_low_rank_and_four_bits() -> None:
    compression = recipes()["dilocox"].compression
    assert (compression.lowrank, compression.bits, compression.return_bits) == (64, 4, 4)
    assert (compression.strong_bits, compression.strong_fraction) == (8, 0.125)


def test_dense_differs_from_dilocox_by_the_low_rank_and_what_it_leaves_only() -> None:
    full, dense = recipes()["dilocox"], recipes()["dilocox-dense"]
    assert (dense.outer, dense.overlap) == (full.outer, full.overlap)
    assert dense.compression == Compression(
        bits=4, return_bits=4, strong_bits=4, strong_fraction=0.125, gather_up_to=2, group=64, lowrank=0,
        feedback="local", gamma=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "outer", "mode", "bits"),
    [
        ("dilocox", Outer(lr=0.7, momentum=0.7), "arrival", 4),
        ("dilocox-dense", Outer(lr=0.7, momentum=0.7), "arrival", 4),
        ("dilocox-paper", Outer(lr=0.5, momentum=0.5), "paper", 4),
        ("diloco", Outer(lr=0.7, momentum=0.9), "none", 32),
        ("opendiloco", Outer(lr=0.7, momentum=0.9), "none", 16),
        ("sparta", Outer(lr=1.0, momentum=0.0, nesterov=False), "none", 32),
        ("overlap-sparta", Outer(lr=1.0, momentum=0.0, nesterov=False), "delay", 32),
        ("allreduce", Outer(lr=1.0, momentum=0.0, nesterov=False, average="gradient"), "none", 32),
        ("eager", Outer(lr=0.4, momentum=0.5), "eager", 32),
        ("cocktailsgd", Outer(lr=1.0, momentum=0.0, nesterov=False), "none", 4),
        ("sparseloco", Outer(lr=1.0, momentum=0.0, nesterov=False), "none", 2),
        ("streaming", Outer(lr=0.4, momentum=0.9), "delay", 4),
        ("fedavg", Outer(lr=1.0, momentum=0.0, nesterov=False), "none", 32),
    ],
)
def test_recipes_are_those_of_their_papers(name: str, outer: Outer, mode: str, bits: int) -> None:
    recipe = recipes()[name]
    assert (recipe.outer, recipe.overlap.mode, recipe.compression.bits) == (outer, mode, bits)
    assert recipe.source.startswith(("arXiv:", "EXO gym", "CocktailSGD"))
    assert len(recipe.about) > 80


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_is_a_valid_run_without_another_word(name: str) -> None:
    text = spec_text("", name).replace("H = 1\n", "" if recipes()[name].inner else "H = 1\n")
    spec = parse_run(text)
    assert (spec.outer, spec.schedule, spec.overlap) == (
        recipes()[name].outer, recipes()[name].schedule, recipes()[name].overlap,
    )  # fmt: skip
    assert spec.inner.H == 1


def test_every_recipe_uses_the_gamma_that_its_feedback_and_rank_call_for() -> None:
    for recipe in recipes().values():
        compression = recipe.compression
        if compression.top == 1:  # SparseLoCo's decay is a momentum
            assert compression.gamma == default_gamma(compression.feedback, compression.lowrank)


def test_error_feedback_is_damped_behind_a_low_rank_only() -> None:
    assert (default_gamma("local", 16), default_gamma("local", 0), default_gamma("paper", 16)) == (
        0.5,
        1.0,
        1.0,
    )


def test_overlap_defaults_are_keyed_by_their_own_mode() -> None:
    assert {mode: overlap.mode for mode, (overlap, _) in OVERLAP_DEFAULTS.items()} == {
        mode: mode for mode in ("arrival", "delay", "boundary", "eager", "paper", "none")
    }


def spec_text(compression: str, recipe: str = "dilocox") -> str:
    return (
        f'[run]\nid = "r"\nrecipe = "{recipe}"\nouter_steps = 1\n'
        '[model]\npath = "nowhere"\n[inner]\nH = 1\nbatch_size = 1\nlr = 1e-3\n'
        f"[compression]\n{compression}\n"
    )


@pytest.mark.parametrize("recipe", recipes())
@pytest.mark.parametrize("bits", [2, 4, 8, 16, 32, 64])
def test_more_bits_for_all_directions_are_as_many_for_the_strongest(recipe: str, bits: int) -> None:
    compression = parse_run(spec_text(f"bits = {bits}", recipe)).compression
    assert compression.strong_bits == max(bits, recipes()[recipe].compression.strong_bits)


def test_fewer_bits_for_the_strongest_directions_than_for_the_rest_are_refused() -> None:
    assert parse_run(spec_text("bits = 3\nstrong_bits = 3")).compression.strong_bits == 3
    with pytest.raises(SpecError, match=r"strong_bits = 2, must be at least bits = 3, what the weaker"):
        parse_run(spec_text("bits = 3\nstrong_bits = 2"))
