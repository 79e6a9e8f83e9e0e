"""What the commands say and how they end, without a swarm."""

import importlib.metadata
import os
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM

from p2p_dilocox import errors
from p2p_dilocox.model_config import load_model_config
from p2p_dilocox.program import Program
from p2p_dilocox.runspec import parse_run

from .conftest import LOOPBACK, RUN, command

KEY = "A" * 43
GOOD_PEER = "/ip4/127.0.0.1/tcp/1/p2p/QmSoLnSGccFuZQJzRadHn95W2CrSFmZuTdDWP8HXaHca9z"


def peer(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command("dilocox-peer"), [str(a) for a in arguments])


def bootstrap(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command("dilocox-bootstrap"), [str(a) for a in arguments])


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(outer_steps=3, H=2))
    return file


def test_the_options_of_every_command_are_frozen() -> None:
    """A script that works today works tomorrow. Adding is fine: add it here."""

    def options(name: str) -> dict[str, str]:
        return {
            sub: " ".join(sorted(max(p.opts, key=len) for p in c.params))
            for sub, c in command(name).commands.items()
        }

    assert options("dilocox-bootstrap") == {"serve": "--announce --archive --listen --run --state-dir"}
    assert options("dilocox-peer") == {
        "check-history": "--json files",
        "compare": "--allreduce-steps --away --clusters --json --link --out --processes --quick --run "
        "--seeds --steps --warm recipe_names",
        "coverage": "--json state_dirs",
        "demo": "--clusters --out --run",
        "export": "--average out state_dir",
        "id": "--state-dir",
        "join": "--adamw-bits --announce --client --cluster --devices --gpu-c --hours --link-file --listen "
        "--microbatches --month-bytes --name --offload --schedule --state-dir --threads --upload-rate link",
        "leave": "--now --state-dir",
        "pause": "--now --state-dir",
        "plan": "--adamw-bits --clusters --devices --downlink --flops --json --memory --mfu --microbatches "
        "--offload --paper --ranks --schedule --tokens --tokens-per-s --uplink run_file",
        "plot": "--out state_dirs",
        "resume": "--state-dir",
        "link": "--state-dir",
        "status": "--json --state-dir link",
        "validate": "run_file",
    }


@pytest.mark.parametrize(
    "module", ["peers.cli", "peers.join", "peers.status", "peers.control", "bootstrap.cli", "bootstrap.serve"]
)
def test_help_and_mistakes_wait_for_neither_torch_nor_hivemind(module: str) -> None:
    code = f"import sys, p2p_dilocox.{module} as _; print({{'torch', 'hivemind'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("p2p-dilocox") in peer("--version").output
    assert importlib.metadata.version("p2p-dilocox") in bootstrap("--version").output


@pytest.mark.parametrize("kind", [getattr(errors, name) for name in errors.__all__])
def test_every_error_is_one_line_and_its_exit_code(kind: type[errors.DilocoxError]) -> None:
    @click.group(cls=Program)
    @click.option("-v", "--verbose", is_flag=True)
    def program(verbose: bool) -> None: ...

    @program.command()
    def fail() -> None:
        raise kind("value, limit, way out")

    quiet, verbose = CliRunner().invoke(program, ["fail"]), CliRunner().invoke(program, ["-v", "fail"])
    assert (quiet.exit_code, quiet.stderr, quiet.stdout) == (
        kind.exit_code,
        "error: value, limit, way out\n",
        "",
    )
    assert verbose.exit_code == kind.exit_code
    assert "Traceback" in verbose.stderr
    assert verbose.stderr.endswith(quiet.stderr)


def test_validate_shows_the_run_on_one_screen(run_file: Path) -> None:
    result = peer("validate", run_file)
    assert result.exit_code == 0
    for part in (
        "86,176 parameters",
        "10.4 kB per outer step",
        "tiny, recipe dilocox, 3 outer steps",
        "llama in 2 stages",
        "layer 0: 50% of memory, 12% of work; layer 1: 50% of memory, 88% of work",
        "parameters drawn with seed",
        "H 2",
        "lowrank 4, the strongest 0.125 in 8 bits, 4 bits",
    ):
        assert part in result.output, part
    assert peer("validate", "demo").exit_code == 0


def test_validate_builds_the_model_and_looks_for_the_data(run_file: Path) -> None:
    text = run_file.read_text()
    run_file.write_text(text.replace("num_key_value_heads = 2", "num_key_value_heads = 3"))
    assert peer("validate", run_file).exit_code == 6
    run_file.write_text(text.replace("[data]", '[data]\nsource = "text"\npaths = ["no-such.txt"]'))
    result = peer("validate", run_file)
    assert result.exit_code == 0
    assert "warning: data.paths: no-such.txt does not exist" in result.output


def test_validate_looks_through_the_weights_that_a_run_starts_from(run_file: Path, tmp_path: Path) -> None:
    model = parse_run(run_file.read_text()).model
    load_model_config(model).save_pretrained(tmp_path / "model")
    head, _, rest = run_file.read_text().partition("[model.config]")
    path, tail = f'path = "{tmp_path / "model"}"\n', rest[rest.index("[data]") :]
    run_file.write_text(f'{head}{path}start = "weights"\n{tail}')
    result = peer("validate", run_file)
    assert result.exit_code == 6 and "neither model.safetensors nor" in result.stderr
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"")
    assert "are pickled (.bin)" in peer("validate", run_file).stderr
    AutoModelForCausalLM.from_config(load_model_config(model)).save_pretrained(tmp_path / "model")
    assert f"tensors in 1 files of {tmp_path}" in " ".join(peer("validate", run_file).output.split())
    run_file.write_text(f"{head}{path}{tail}")
    result = peer("validate", run_file)
    assert result.exit_code == 0
    assert "has weights, which are not read" in " ".join(result.output.split())


def test_validate_names_every_mistake_with_its_line(run_file: Path) -> None:
    text = run_file.read_text().replace("H = 2", "H = 0").replace("lr = 1e-2", "lr = nan\nbatchsize = 3")
    run_file.write_text(text)
    lines = text.splitlines()
    result = peer("validate", run_file)
    assert result.exit_code == 2
    for mistake in ("H = 0", "lr = nan", "batchsize = 3"):
        assert f"run.toml line {lines.index(mistake) + 1}: " in result.stderr, mistake
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("", "must start with dilocox://"),
        ("127.0.0.1:31337", "must start with dilocox://"),
        (f"dilocox://../../tmp?key={KEY}&peer={GOOD_PEER}", "run id"),
        (f"dilocox://tiny?key={KEY}", "names no peer"),
        (f"dilocox://tiny?key=short&peer={GOOD_PEER}", "key 'short'"),
        (f"dilocox://tiny?key={KEY}&peer=/ip/127.0.0.1/tcp/1", "/ip/127.0.0.1/tcp/1"),
        (f"dilocox://tiny?key={KEY}&peer=/ip4/127.0.0.1/tcp/1", "does not end in /p2p/"),
        (f"dilocox://tiny?key={KEY}&peer=%20{GOOD_PEER}", "white space"),
        (f"dilocox://tiny/x?key={KEY}&peer={GOOD_PEER}", "'/x'"),
        (f"dilocox://tiny?key={KEY}&peer={GOOD_PEER}#part", "'#part'"),
        (f"dilocox://tiny?key={KEY}&peer={GOOD_PEER}x", "is not a peer id"),
    ],
)
def test_a_bad_link_is_named_with_a_good_example(tmp_path: Path, link: str, words: str) -> None:
    """Field report A8."""
    for result in (peer("join", link, "--state-dir", tmp_path / "state"), peer("status", link)):
        assert result.exit_code == 2
        assert words in result.stderr
        assert "203.0.113.5" in result.stderr or "run id" in result.stderr or "copy" in result.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--name", "../up"], "name '../up'"),
        (["--name", "a\x1b[31m"], "must be 1 to 32 of letters"),
        (["--listen", "/ip4/127.0.0.1"], "has no /tcp/<port>"),
        (["--announce", LOOPBACK], "announces port 0"),
        (["--cluster", "none-such"], "no cluster profile 'none-such'"),
        (["--cluster", ""], "no cluster profile ''"),
        (["--devices", "gpu"], "devices = 'gpu' is not a list"),
        (["--devices", ""], "devices = '' is not a list"),
        (["--listen", ""], "is empty"),
        (["--hours", "at night"], 'write them as "22:00-07:00"'),
        (["--month-bytes", "50"], "'50' has no unit: write 50GB"),
        (["--upload-rate", "1kB"], "must be at least 64.0 kB per second"),
        (["--listen", GOOD_PEER], "must leave out /p2p/"),
        (["--listen", "/ip4/192.0.2.1/tcp/31337"], "192.0.2.1 is not an address of this machine"),
    ],
)
def test_a_bad_option_is_refused_before_anything_starts(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    """Field report A7: port 0 in what is announced."""
    link = f"dilocox://tiny?key={KEY}&peer={GOOD_PEER}"
    result = peer("join", link, "--state-dir", tmp_path / "state", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "state").exists()


def test_an_empty_directory_name_is_not_this_directory() -> None:
    for result in (
        peer("join", f"dilocox://tiny?key={KEY}&peer={GOOD_PEER}", "--state-dir", ""),
        peer("demo", "--out", ""),
        bootstrap("serve", "--run", "demo", "--state-dir", ""),
    ):
        assert result.exit_code == 2
        assert "the name is empty" in result.stderr


def test_join_needs_one_link(tmp_path: Path) -> None:
    assert "give the join link once" in peer("join").stderr
    assert "cannot read a join link" in peer("join", "--link-file", tmp_path / "none").stderr


def test_a_directory_without_a_cluster_has_no_status_and_nothing_to_leave(tmp_path: Path) -> None:
    assert peer("status", "--state-dir", tmp_path).exit_code == 5
    assert peer("leave", "--state-dir", tmp_path).exit_code == 5
    assert peer("leave", "--state-dir", tmp_path / "none").exit_code == 5
    assert peer("export", tmp_path, tmp_path / "model").exit_code == 5
    assert peer("status").exit_code == 2


@pytest.mark.parametrize(
    ("option", "address", "words"),
    [
        ("--announce", "/ip4/192.0.2.1/tcp/0", "announces port 0"),
        ("--announce", f"/ip4/192.0.2.1/tcp/1{GOOD_PEER[GOOD_PEER.index('/p2p') :]}", "leave out /p2p/"),
        ("--listen", "/ip/172.16.0.1/tcp/31337", "protocol ip"),
        ("--listen", "/ip4/127.0.0.1/tcp/31337 ", "white space"),
        ("--listen", "127.0.0.1:31337", "is not a multiaddress"),
        ("--listen", "", "is empty"),
        ("--listen", "/ip4/192.0.2.1/tcp/31337", "192.0.2.1 is not an address of this machine"),
    ],
)
def test_serve_refuses_a_bad_address_and_leaves_no_trace(
    tmp_path: Path, run_file: Path, option: str, address: str, words: str
) -> None:
    """Field reports A7, A8."""
    result = bootstrap("serve", "--run", run_file, "--state-dir", tmp_path / "state", option, address)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "state").exists()


def test_a_port_that_is_in_use_is_named_with_its_owner(tmp_path: Path, run_file: Path) -> None:
    """R19, field report G7."""
    link, state = f"dilocox://tiny?key={KEY}&peer={GOOD_PEER}", tmp_path / "state"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        listen = f"/ip4/127.0.0.1/tcp/{port}"
        refused = [
            bootstrap("serve", "--run", run_file, "--state-dir", state, "--listen", listen),
            peer("join", link, "--state-dir", state, "--listen", listen),
        ]
    for result in refused:
        assert result.exit_code == 2
        assert f"port {port} is in use by process {os.getpid()} (" in result.stderr


def test_a_demo_that_would_wait_for_ever_is_refused(tmp_path: Path, run_file: Path) -> None:
    run_file.write_text(run_file.read_text().replace('"tiny"', '"tiny"\nmin_clusters = 3'))
    result = peer("demo", "--run", run_file, "--clusters", "2", "--out", tmp_path / "demo")
    assert result.exit_code == 2
    assert "this run waits for 3" in result.stderr
    assert not (tmp_path / "demo").exists()


def test_the_demo_deletes_nothing_but_an_earlier_demo(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    result = peer("demo", "--out", tmp_path)
    assert result.exit_code == 5
    assert "nothing was deleted" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
