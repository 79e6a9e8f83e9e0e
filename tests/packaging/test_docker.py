"""The container files agree with the programs they start. Building them needs an engine: not done here."""

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILES = {"dilocox-peer": "peer.Dockerfile", "dilocox-bootstrap": "bootstrap.Dockerfile"}


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """(FROM, debian:...), (RUN, ...): comments dropped, continued lines joined."""
    text = (ROOT / "docker" / dockerfile).read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines() if line.strip()]


def last(dockerfile: str, instruction: str) -> str:
    return [value for name, value in instructions(dockerfile) if name == instruction][-1]


def accepts(program: str, words: list[str]) -> None:
    """Raises click.UsageError unless the installed `program` would run with these arguments. Runs nothing."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=program)
    group = entry.load()
    assert isinstance(group, click.Group)
    with group.make_context(program, list(words), resilient_parsing=False) as context:
        name, command, rest = group.resolve_command(context, list(words))
        assert command is not None
        command.make_context(name, rest, parent=context)


def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def services(image: str) -> list[dict[str, Any]]:
    return [s for s in compose()["services"].values() if s["image"] == image and "entrypoint" not in s]


@pytest.mark.parametrize("program", DOCKERFILES)
def test_an_image_starts_its_program_as_an_unprivileged_user(program: str) -> None:
    assert json.loads(last(DOCKERFILES[program], "ENTRYPOINT")) == ["tini", "-s", "--", program]
    assert last(DOCKERFILES[program], "USER") == "dilocox"


def test_the_default_command_of_the_bootstrap_image_is_accepted() -> None:
    accepts("dilocox-bootstrap", json.loads(last("bootstrap.Dockerfile", "CMD")))


@pytest.mark.parametrize("program", DOCKERFILES)
def test_the_commands_of_the_swarm_are_accepted(program: str) -> None:
    commands = [service["command"] for service in services(program)]
    assert commands
    for command in commands:
        accepts(program, command)


def test_a_command_with_an_unknown_option_is_not_accepted() -> None:
    with pytest.raises(click.UsageError):
        accepts("dilocox-peer", ["join", "--link-fil", "/link/join-link"])


def test_both_images_share_the_layers_below_their_sources() -> None:
    def below(dockerfile: str) -> list[tuple[str, str]]:
        steps = instructions(dockerfile)
        return steps[: steps.index(("USER", "dilocox"))]

    assert below("peer.Dockerfile") == below("bootstrap.Dockerfile")


def test_the_swarm_has_two_clusters_with_state_of_their_own_and_shared_memory() -> None:
    clusters = services("dilocox-peer")
    assert len(clusters) == 2
    states = {volume for cluster in clusters for volume in cluster["volumes"] if volume.endswith(":/state")}
    assert len(states) == 2
    assert {cluster["shm_size"] for cluster in clusters} == {"1gb"}


def test_a_cluster_never_sees_the_keys_of_the_organiser() -> None:
    (bootstrap,) = services("dilocox-bootstrap")
    (keys,) = [volume.split(":")[0] for volume in bootstrap["volumes"] if volume.endswith(":/state")]
    for cluster in services("dilocox-peer"):
        assert keys not in {volume.split(":")[0] for volume in cluster["volumes"]}


def test_every_volume_is_declared_and_every_dockerfile_exists() -> None:
    spec = compose()
    named = {volume.split(":")[0] for service in spec["services"].values() for volume in service["volumes"]}
    assert named == set(spec["volumes"])
    for service in spec["services"].values():
        if "build" in service:
            build = service["build"]
            assert (ROOT / "docker" / build["context"] / build["dockerfile"]).is_file()


def test_the_build_context_holds_what_the_install_needs() -> None:
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    assert kept == {
        "pyproject.toml",
        "constraints.txt",
        "README.md",
        "LICENSE",
        "p2p_dilocox",
        "peers",
        "bootstrap",
    }
    assert all((ROOT / name).exists() for name in kept)
