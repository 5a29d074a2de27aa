"""The floors of the house: who may import whom, read from the source of every file."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = "ntl_lightning"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE
FILES = sorted(ROOT.rglob("*.py"))

FLOORS = {
    "paths": 0,
    "numbers": 1,
    "losses": 2,
    "data": 2,
    "evaluation": 2,
    "probes": 2,
    "backbones": 3,
    "optimization": 3,
    "output_head": 3,
    "integrations": 3,
    "module": 4,
    "callbacks": 4,
    "inspection": 5,
    "cli": 6,
    "__main__": 7,
    "__init__": 7,
}

# What each room may import from outside when it is loaded. The rest of Python is free.
OUTSIDE = {
    "paths": set(),
    "numbers": {"torch", "tokenizers"},
    "losses": {"torch"},
    "data": {"torch", "numpy", "datasets", "pyarrow", "transformers", "lightning"},
    "evaluation": {"torch", "torchmetrics", "transformers"},
    "probes": {"torch", "transformers"},
    "backbones": {"torch", "transformers", "lightning", "huggingface_hub"},
    "optimization": {"torch", "transformers"},
    "output_head": {"torch", "transformers"},
    "integrations": {"torch"},
    "module": {"torch", "numpy", "transformers", "lightning"},
    "callbacks": {"torch", "numpy", "lightning", "matplotlib", "rich"},
    "inspection": {"numpy", "pyarrow", "datasets", "rich"},
    "cli": {"torch", "lightning", "jsonargparse", "yaml", "rich"},
    "__main__": set(),
    "__init__": set(),
}

# What a function may import when it is called, or a type checker reads, beyond that.
LATER = {"numbers": {"transformers", "sentencepiece"}, "integrations": {"transformers"}}


def room_of(module: str) -> str:
    """The room of `ntl_lightning.data.sources` is `data`; of `ntl_lightning`, `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_of(file: Path) -> str:
    """The full name of a file's module."""
    parts = [PACKAGE, *file.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def imports_of(tree: ast.Module) -> list[tuple[int, str, list[str], bool]]:
    """Line, module, imported names, and whether the import waits for a call or a type checker."""
    found: list[tuple[int, str, list[str], bool]] = []

    def visit(node: ast.AST, waits: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((node.lineno, alias.name, [], waits) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.append((node.lineno, module, [alias.name for alias in node.names], waits))
        in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        types_only = (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        )
        for child in ast.iter_child_nodes(node):
            visit(child, waits or in_function or types_only)

    visit(tree, waits=False)
    return found


def violations(source: str, module: str) -> list[str]:
    """What a module's imports break, one line each."""
    room = room_of(module)
    broken = []
    for line, target, names, waits in imports_of(ast.parse(source)):
        where = f"{module}:{line} imports {target}"
        top = target.split(".")[0]
        if target.startswith("."):
            broken.append(f"{where}: write the full name")
        elif top == PACKAGE:
            modules = [f"{PACKAGE}.{name}" for name in names] if target == PACKAGE else [target]
            for other in map(room_of, modules):
                if other not in FLOORS:
                    broken.append(f"{where}: {other} is on no floor")
                elif other != room and FLOORS[other] >= FLOORS[room]:
                    broken.append(
                        f"{where}: {other} (floor {FLOORS[other]}) is not below {room} "
                        f"(floor {FLOORS[room]})"
                    )
            private = [
                name
                for name in [*target.split(".")[1:], *names]
                if name.startswith("_") and not name.endswith("__")
            ]
            broken += [f"{where}: {name} is private" for name in private]
        elif top not in sys.stdlib_module_names:
            allowed = OUTSIDE[room] | (LATER.get(room, set()) if waits else set())
            if top not in allowed:
                broken.append(f"{where}: {room} may import from outside only {sorted(allowed)}")
    return broken


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_imports_only_from_floors_below(file: Path) -> None:
    module = module_of(file)
    assert room_of(module) in FLOORS, f"{file}: give it a floor in {__file__}"
    assert violations(file.read_text(), module) == []


def test_every_room_has_a_floor() -> None:
    assert FILES
    assert {room_of(module_of(file)) for file in FILES} == set(FLOORS) == set(OUTSIDE)


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("numbers.text", "from ntl_lightning.losses import Objective", "losses (floor 2) is not"),
        ("data.loader", "import ntl_lightning.losses.terms", "losses (floor 2) is not below data"),
        ("losses.terms", "from ntl_lightning.data import Source", "data (floor 2) is not below"),
        ("module", "from ntl_lightning import cli", "cli (floor 6) is not below module"),
        ("module", "from ntl_lightning import NumberAwareLM", "NumberAwareLM is on no floor"),
        ("losses.terms", "def f():\n    from ntl_lightning import module", "module (floor 4)"),
        ("cli", "from ntl_lightning.module import _plain", "_plain is private"),
        ("losses.terms", "from ntl_lightning.losses.objective import _x", "_x is private"),
        ("cli", "from ntl_lightning.data._hidden import x", "_hidden is private"),
        ("losses.terms", "from .objective import Objective", "write the full name"),
        ("losses.terms", "import numpy as np", "losses may import from outside only ['torch']"),
        ("losses.terms", "if TYPE_CHECKING:\n    import lightning", "losses may import"),
        ("numbers.tokenizer", "from transformers import AutoTokenizer", "numbers may import"),
    ],
)
def test_the_walk_finds_what_is_not_allowed(module: str, source: str, message: str) -> None:
    (found,) = violations(source, f"{PACKAGE}.{module}")
    assert message in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("numbers.text", "import json, re\nfrom ntl_lightning.paths import expand_path"),
        ("numbers.tokenizer", "def f():\n    from transformers import AutoTokenizer"),
        ("numbers.tokenizer", "if TYPE_CHECKING:\n    import transformers"),
        ("losses.objective", "from ntl_lightning.losses.terms import LossTerm\nimport torch.nn"),
        ("callbacks.plots", "from ntl_lightning.numbers import find_numbers"),
        ("__main__", "from ntl_lightning.cli import main"),
    ],
)
def test_the_walk_lets_the_rest_pass(module: str, source: str) -> None:
    assert violations(source, f"{PACKAGE}.{module}") == []
