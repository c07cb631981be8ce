"""Who may import whom: the layers of the package, read from its source."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "pe_ablation"
SOURCES = sorted(PACKAGE.rglob("*.py"))
OUTSIDE = ("configs", "experiments")


def imported(source: str, package: str) -> set[str]:
    """Full names of all modules and objects that a source imports, wherever in it; `package` resolves relative ones."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    return found


def of_file(path: pathlib.Path) -> set[str]:
    return imported(
        path.read_text(encoding="utf-8"),
        ".".join(path.relative_to(PACKAGE.parent).parent.parts),
    )


def own(path: pathlib.Path) -> set[str]:
    """What a file imports of the package itself."""
    return {name for name in of_file(path) if name.split(".")[0] == "pe_ablation"}


def under(names: set[str], *allowed: str) -> set[str]:
    """The names that lie in none of the allowed modules."""
    return {name for name in names if not any(name == each or name.startswith(f"{each}.") for each in allowed)}


def strings(source: str) -> set[str]:
    """All string constants of a source, docstrings too."""
    return {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def names_folder(text: str, folder: str) -> bool:
    return folder in pathlib.PurePath(text).parts


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_imports_configs_or_experiments_or_reads_shared(path):
    assert not [name for name in of_file(path) if name.split(".")[0] in OUTSIDE]
    assert not [text for text in strings(path.read_text(encoding="utf-8")) if names_folder(text, "shared")]


@pytest.mark.parametrize("path", sorted((PACKAGE / "encodings").glob("*.py")), ids=lambda path: path.name)
def test_encodings_import_themselves_and_gradients_alone(path):
    assert not under(own(path), "pe_ablation.encodings", "pe_ablation.gradients")


def test_gradients_import_nothing_of_ours():
    assert not own(PACKAGE / "gradients.py")


def test_attention_imports_gradients_and_the_base_of_encodings_alone():
    found = own(PACKAGE / "attention.py")
    assert found and not under(found, "pe_ablation.encodings.base", "pe_ablation.fused", "pe_ablation.gradients")


def test_fused_kernels_import_the_base_of_encodings_alone():
    found = own(PACKAGE / "fused.py")
    assert found and not under(found, "pe_ablation.encodings.base")


def test_the_cache_imports_the_base_of_encodings_alone():
    found = own(PACKAGE / "cache.py")
    assert found and not under(found, "pe_ablation.encodings.base")


def test_positions_import_attention_alone():
    found = own(PACKAGE / "positions.py")
    assert found and not under(found, "pe_ablation.attention")


def test_model_imports_encodings_attention_and_what_is_below_them_alone():
    found = own(PACKAGE / "model.py")
    below = ("encodings", "attention", "cache", "fused", "gradients", "positions")
    assert not under(found, *(f"pe_ablation.{name}" for name in below))
    assert under(found, "pe_ablation.encodings") and under(found, "pe_ablation.attention")


def test_the_reader_of_imports_sees_every_form():
    source = "import configs.x\nfrom experiments import y\nfrom . import z\nfrom ..a import b\ndef f():\n"
    source += "    import_module('configs')"
    expected = {
        "configs.x",
        "experiments.y",
        "pe_ablation.data.z",
        "pe_ablation.a.b",
        "configs",
    }
    assert imported(source, "pe_ablation.data") == expected
    assert names_folder("/x/shared/y.csv", "shared") and not names_folder("H * D (shared)", "shared")
