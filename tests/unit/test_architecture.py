"""The shape of the code: which part may know which, how long a file may be, what must not occur."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 400

# What describes a run, an event or an error: the vocabulary every part shares. It knows none of the parts.
WORDS = {
    "__init__",
    "consistency",
    "env",
    "errors",
    "events",
    "fault_points",
    "lineage",
    "model_config",
    "overlap",
    "pieces",
    "placement",
    "recipe",
    "runspec",
    "selection",
    "settings",
    "spec_diff",
    "stability",
    "suggest",
    "tokenizer",
    "toml_lines",
    "wish",
}
# The arrows: part -> parts it may import besides itself and WORDS. A part not named may import all but apps.
ARROWS = {
    "compression": set[str](),
    "swarm": {"ports"},
    "data": set[str](),
    "pipeline": set[str](),
    "inner": set[str](),
    "controller": set[str](),
    "adapting": {"averaging", "controller"},
    "anchor_mean": set[str](),
    "backlog": {"averaging"},
    "error_alarm": set[str](),
    "offload": set[str](),
    "outer_step": set[str](),
    "local_outer": {"outer_step"},
    "gradient_sum": {"inner", "outer", "pipeline"},
    "outer": {"compression", "offload", "outer_step"},
    "averaging": {"compression", "controller", "outer", "swarm"},
    "history": {"averaging", "line_file"},
    "invariants": {"averaging"},
    "training_rank": {
        "adapting",
        "anchor_mean",
        "averaging",
        "backlog",
        "data",
        "data_share",
        "error_alarm",
        "gradient_sum",
        "history",
        "inner",
        "local_outer",
        "offload",
        "outer",
        "outer_step",
        "pipeline",
    },
    "trainer": {
        "averaging",
        "inner",
        "offload",
        "outer",
        "outer_step",
        "pipeline",
        "training_rank",
    },
    "simulation": {
        "adapting",
        "anchor_mean",
        "averaging",
        "data",
        "gradient_sum",
        "history",
        "inner",
        "local_outer",
        "outer",
        "pipeline",
        "swarm",
        "trainer",
        "traffic",
    },
    # It reads a whole Rank; the trainer knows it only as a function to call.
    "checkpoint": {"averaging", "outer", "pipeline", "swarm", "tensor_file", "trainer"},
    "plan": {"averaging", "compression", "pipeline", "traffic"},
    "bootstrap": {"averaging", "compression", "ports", "program", "sinks", "state_dir", "swarm", "traffic"},
}
APPS = {"peers", "bootstrap"}
# Pure arithmetic: tensors and the standard library, no sockets, no files of ours, no Hugging Face.
PURE = {
    "compression", "controller", "local_outer", "offload", "outer", "outer_step", "overlap", "selection",
    "stability",
}  # fmt: skip
PURE_MAY_IMPORT = {"numpy", "torch"}
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "core", "base", "tools"}
VAGUE_ENDINGS = ("Manager", "Handler", "Helper", "Wrapper", "Factory", "Mixin")
ENVIRONMENT = {"environ", "os.environ", "os.environb", "os.getenv", "os.putenv"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save", "os.system", "yaml.load"}


def files(*folders: str) -> list[Path]:
    found = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    assert found
    return found


LIBRARY = files("p2p_dilocox")
PROGRAMS = files("peers", "bootstrap")
EVERYTHING = [*LIBRARY, *PROGRAMS, *files("tests", "benchmarks")]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    """The installed, dotted name: peers/cli.py is p2p_dilocox.peers.cli."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "p2p_dilocox" else ("p2p_dilocox", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in (*LIBRARY, *PROGRAMS)}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of all that a file imports, inside functions too."""
    package = module_name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield node.lineno, inner if inner in MODULES else source


def part_of(module: str) -> str:
    """compression for p2p_dilocox.compression.intn, trainer for p2p_dilocox.trainer."""
    return (module.split(".") + ["__init__"])[1]


def dotted(node: ast.expr) -> str:
    """torch.load for the expression torch.load, "" for what is not a plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_import_follows_an_arrow() -> None:
    wrong = []
    for module, path in MODULES.items():
        part = part_of(module)
        allowed = WORDS if part in WORDS else WORDS | ARROWS[part] if part in ARROWS else None
        for line, target in imports(path):
            if target.split(".")[0] != "p2p_dilocox":
                continue
            other = part_of(target)
            fits = other not in APPS if allowed is None else other in allowed
            if other != part and not fits:
                wrong.append(f"{place(path, line)}: {part} -> {other}")
    assert wrong == []


def test_no_import_goes_round_in_a_circle() -> None:
    graph = {
        module: {target for _, target in imports(path) if target in MODULES and target != module}
        for module, path in MODULES.items()
    }
    for module, path in MODULES.items():
        if path.name == "__init__.py":  # a package hands out its modules; they may name it as their parent
            graph[module] = {target for target in graph[module] if not target.startswith(f"{module}.")}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"circle of imports: {' -> '.join(error.args[1])}")


def test_an_app_is_imported_under_one_name() -> None:
    """Else peers.cli and p2p_dilocox.peers.cli are two copies of every class."""
    wrong = [
        f"{place(path, line)}: {target}"
        for path in EVERYTHING
        for line, target in imports(path)
        if target.split(".")[0] in APPS
    ]
    for path in PROGRAMS:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and not node.level and part_of(node.module or "") in APPS:
                wrong.append(f"{place(path, node.lineno)}: write it as a relative import")
    assert wrong == []


def test_arithmetic_needs_only_torch() -> None:
    wrong = []
    for module, path in MODULES.items():
        if part_of(module) in PURE:
            allowed = PURE_MAY_IMPORT | {"p2p_dilocox"}
            for line, target in imports(path):
                if target.split(".")[0] not in allowed and not is_standard(target):
                    wrong.append(f"{place(path, line)}: {target}")
    assert wrong == []


def is_standard(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names


def test_files_stay_short_or_say_why() -> None:
    """Above 400 lines, line 1 must be a comment `# long: <reason>`."""
    lines = {path: path.read_text(encoding="utf-8").splitlines() for path in EVERYTHING}
    longest = sorted(lines, key=lambda path: -len(lines[path]))
    print(*(f"{len(lines[path]):5} {path.relative_to(ROOT)}" for path in longest[:10]), sep="\n")  # noqa: T201
    too_long = [
        place(path, len(text))
        for path, text in lines.items()
        if len(text) > MAX_LINES and not text[0].startswith("# long: ")
    ]
    assert too_long == []


def test_names_say_what_a_thing_is() -> None:
    wrong = [
        place(path, 1) for path in EVERYTHING if VAGUE_NAMES & {path.stem, *path.relative_to(ROOT).parts}
    ]
    for path in EVERYTHING:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and node.name.endswith(VAGUE_ENDINGS):
                wrong.append(f"{place(path, node.lineno)}: class {node.name}")
    assert wrong == []


def test_no_wait_loses_a_cancellation() -> None:
    """asyncio.wait_for does in Python 3.11, see swarm/patience.py."""
    wrong = [
        place(path, node.lineno)
        for path in (*LIBRARY, *PROGRAMS)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and dotted(node.func) == "asyncio.wait_for"
    ]
    assert wrong == []


def test_bytes_of_others_cannot_become_code() -> None:
    wrong = []
    for path in EVERYTHING:
        wrong += [
            f"{place(path, n)}: {name}" for n, name in imports(path) if name.split(".")[0] in UNSAFE_MODULES
        ]
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call):
                shell = any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in node.keywords)
                if dotted(node.func) in UNSAFE_CALLS or shell:
                    wrong.append(f"{place(path, node.lineno)}: {ast.unparse(node)[:60]}")
    assert wrong == []


def test_the_environment_is_read_in_one_place() -> None:
    wrong = []
    for path in (*LIBRARY, *PROGRAMS):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.expr) and dotted(node) in ENVIRONMENT and path.name != "env.py":
                wrong.append(place(path, node.lineno))
    assert wrong == []


def test_our_functions_take_no_open_ended_keywords() -> None:
    """**kwargs would swallow a misspelt setting. `**_name` says: called as others call their own."""
    wrong = [
        f"{place(path, node.lineno)}: {node.name}(**{node.args.kwarg.arg})"
        for path in (*LIBRARY, *PROGRAMS)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.args.kwarg
        and not node.args.kwarg.arg.startswith("_")
    ]
    assert wrong == []
