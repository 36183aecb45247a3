"""Dependencies point one way, and the code stays in readable pieces."""

import ast
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
PACKAGE = REPO / "lerobot_parallel"
FILES = sorted(PACKAGE.rglob("*.py"))
# config <- plans <- engine <- checkpoint <- training <- cli, hooks
LAYERS = {name: level for level, name in enumerate(("config", "plans", "engine", "checkpoint", "training", "cli"))}
HEAVY = {"torch", "lerobot", "accelerate", "draccus", "safetensors", "huggingface_hub", "numpy"}
LIGHT = (
    "__init__.py",
    "hooks.py",
    "config/errors.py",
    "config/topology.py",
    "config/runtime.py",
    "config/source.py",
    "cli/main.py",
)


def layer(name: str) -> str:
    """The layer of a file or dotted name inside the package: its folder, or the module itself."""
    return name.removesuffix(".py").replace("/", ".").partition(".")[0]


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import(tree: ast.Module) -> set[str]:
    """What importing the module imports; not what its functions do when called."""
    body = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return set(imports(ast.Module(body=body, type_ignores=[])))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def own(names: Iterator[str] | set[str]) -> set[str]:
    return {name.removeprefix("lerobot_parallel.") for name in names if name.startswith("lerobot_parallel.")}


def functions() -> Iterator[ast.FunctionDef]:
    for path in FILES:
        yield from (node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_dependencies_point_one_way(path: Path):
    mine = layer(str(path.relative_to(PACKAGE)))
    if mine not in LAYERS:
        return
    wrong = {name for name in own(imports(parse(path))) if LAYERS.get(layer(name), -1) > LAYERS[mine]}
    assert not wrong
    if mine != "cli":
        assert "hooks" not in {layer(name) for name in own(imports(parse(path)))}


def test_the_hook_reaches_for_three_modules_and_only_when_it_has_to():
    tree = parse(PACKAGE / "hooks.py")
    assert own(at_import(tree)) == set()
    modules = {".".join(name.split(".")[:2]) for name in own(imports(tree))}
    assert modules == {"config.source", "plans.registry", "training.command"}


@pytest.mark.parametrize("name", LIGHT)
def test_what_must_start_fast_imports_nothing_heavy(name: str):
    assert not {module.partition(".")[0] for module in at_import(parse(PACKAGE / name))} & HEAVY


def test_config_alone_of_its_layer_needs_the_host():
    for path in (PACKAGE / "config").glob("*.py"):
        needs = {module.partition(".")[0] for module in at_import(parse(path))} & HEAVY
        assert needs <= ({"lerobot"} if path.name == "train.py" else set()), path.name


def test_the_package_itself_imports_lazily():
    assert own(at_import(parse(PACKAGE / "__init__.py"))) == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_is_long(path: Path):
    assert len(path.read_text().splitlines()) <= 500


def test_half_of_the_functions_are_short():
    assert statistics.median(node.end_lineno - node.lineno + 1 for node in functions()) <= 12


def test_arguments_have_types():
    untyped = [
        f"{node.name}({argument.arg})"
        for node in functions()
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if argument.annotation is None and argument.arg not in ("self", "cls", "_self")
    ]
    assert not untyped


def test_nothing_depends_on_where_it_was_written():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=REPO, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    homes = re.compile("|".join(rf"(?<![\w.])/{place}/\w" for place in ("work", "root", "home", "Users")))
    texts = [REPO / name for name in listed.stdout.splitlines() if name.endswith((".py", ".md", ".toml", ".sh", "run"))]
    found = {str(path.relative_to(REPO)) for path in texts if path.is_file() and homes.search(path.read_text())}
    assert found == set()
