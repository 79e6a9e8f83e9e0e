"""The project as pip installs it: from a wheel, from the wheel of an sdist, and editable.

Everything is built from a copy of the repository's files, installed into an environment of its own that sees
the packages of this one, and used from another directory.
"""

import csv
import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from build import ProjectBuilder

ROOT = Path(__file__).parents[2]
PACKAGE_FOLDERS = ("p2p_dilocox", "peers", "bootstrap")
# Other folders of the repository: modules of these names would clash with somebody else's.
FOREIGN_NAMES = ("peers", "bootstrap", "tests", "docker", "benchmarks", "docs")
WAYS = ("wheel", "wheel of the sdist", "editable")

pytestmark = [
    pytest.mark.packaging,
    # setuptools says this to everyone who installs in editable mode; what it warns of is tested below.
    pytest.mark.filterwarnings("ignore:Editable installation"),
]


@dataclass(frozen=True)
class Installed:
    way: str
    python: Path
    site: Path
    elsewhere: Path
    """A directory outside of the repository."""

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment, or `python`; its output is text."""
        return subprocess.run(
            [self.python.parent / command[0], *command[1:]],
            cwd=self.elsewhere,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    def python_prints(self, code: str) -> str:
        done = self.run("python", "-c", code)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()


def repository_files() -> list[str]:
    """What git tracks or would add, as in the next commit."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's files, so that nothing is built inside it."""
    copy = tmp_path_factory.mktemp("sources")
    for name in repository_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheels(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("wheels")
    sdist = ProjectBuilder(sources).build("sdist", out / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(out / "unpacked", filter="data")
    (unpacked,) = (out / "unpacked").iterdir()
    builders = {way: ProjectBuilder(unpacked if way == "wheel of the sdist" else sources) for way in WAYS}
    return {
        way: Path(builder.build("editable" if way == "editable" else "wheel", out / way))
        for way, builder in builders.items()
    }


@pytest.fixture(scope="module", params=WAYS)
def installed(
    request: pytest.FixtureRequest, wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    # Before the outer packages are visible: pip would otherwise find this project installed among them.
    command = [
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheels[request.param]),
    ]
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *command], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return Installed(request.param, python, site, tmp_path_factory.mktemp("elsewhere"))


def test_a_wheel_holds_the_files_of_git_and_no_others(wheels: dict[str, Path]) -> None:
    expected = sorted(
        name if name.startswith("p2p_dilocox/") else f"p2p_dilocox/{name}"
        for name in repository_files()
        if name.split("/")[0] in PACKAGE_FOLDERS
    )
    for way in ("wheel", "wheel of the sdist"):
        with zipfile.ZipFile(wheels[way]) as wheel:
            names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        assert sorted(names) == expected


def test_the_sdist_makes_the_same_wheel(wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels["wheel"]) as one, zipfile.ZipFile(wheels["wheel of the sdist"]) as other:
        assert {n: one.read(n) for n in one.namelist()} == {n: other.read(n) for n in other.namelist()}


def test_only_p2p_dilocox_stands_at_the_top_of_site_packages(installed: Installed) -> None:
    (record,) = installed.site.glob("p2p_dilocox-*.dist-info/RECORD")
    paths = [row[0] for row in csv.reader(record.read_text(encoding="utf-8").splitlines())]
    top = {path.split("/")[0] for path in paths if not path.startswith("../")} - {
        record.parent.name,
        "__pycache__",
    }
    if installed.way == "editable":  # a finder instead of the files
        assert all(name.startswith("__editable__") for name in top)
    else:
        assert top == {"p2p_dilocox"}
    code = f"import importlib.util as u; print([n for n in {FOREIGN_NAMES} if u.find_spec(n)])"
    assert installed.python_prints(code) == "[]"


def test_the_code_that_runs_is_the_code_that_was_installed(installed: Installed, sources: Path) -> None:
    code = (
        "import p2p_dilocox as lib, p2p_dilocox.peers.cli as peer, p2p_dilocox.bootstrap.cli as bootstrap;"
        "print(lib.__file__, peer.__file__, bootstrap.__file__, sep='\\n')"
    )
    if installed.way == "editable":
        expected = [
            sources / "p2p_dilocox" / "__init__.py",
            sources / "peers" / "cli.py",
            sources / "bootstrap" / "cli.py",
        ]
    else:
        inside = installed.site / "p2p_dilocox"
        expected = [inside / "__init__.py", inside / "peers" / "cli.py", inside / "bootstrap" / "cli.py"]
    assert installed.python_prints(code).splitlines() == [str(path) for path in expected]


@pytest.mark.parametrize("program", ["dilocox-peer", "dilocox-bootstrap"])
def test_a_program_starts_and_knows_its_version(installed: Installed, program: str) -> None:
    helped = installed.run(program, "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert helped.stdout.startswith(f"Usage: {program} ")
    version = installed.run(program, "--version")
    assert version.stdout.split()[-1] == importlib.metadata.version("p2p-dilocox")


@pytest.mark.parametrize("app", ["peers", "bootstrap"])
def test_an_app_runs_as_a_module(installed: Installed, app: str) -> None:
    done = installed.run("python", "-m", f"p2p_dilocox.{app}", "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_each_module_is_loaded_under_one_name(installed: Installed) -> None:
    code = (
        "import sys, p2p_dilocox.peers.worker, p2p_dilocox.peers.join, p2p_dilocox.bootstrap.serve;"
        f"print(sorted({set(FOREIGN_NAMES)} & set(sys.modules)))"
    )
    done = installed.run("python", "-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_shipped_run_is_valid_where_it_is_installed(installed: Installed) -> None:
    """It reads the run spec and the tokenizer from the installed package."""
    where = "import p2p_dilocox.bootstrap as b; print(b.__path__[0])"
    run = Path(installed.python_prints(where)) / "runs" / "demo.toml"
    done = installed.run("dilocox-peer", "validate", str(run))
    assert done.returncode == 0, done.stderr
