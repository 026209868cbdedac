"""The stub of kvtier._native names what the module has, with the same parameters and defaults.

stubtest does not look into nanobind's functions, so this does.
"""

import ast
from pathlib import Path

import kvtier
from kvtier import _native

STUB = Path(kvtier.__file__).with_name("_native.pyi")


def parameters(function: ast.FunctionDef) -> list[tuple[str, bool]]:
    """Names of the parameters, and whether each has a default."""
    arguments = function.args
    assert not arguments.kwonlyargs
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    required = len(names) - len(arguments.defaults)
    return [(name, position >= required) for position, name in enumerate(names)]


def runtime_parameters(function: object) -> list[tuple[str, bool]]:
    """The same, from the signature that nanobind keeps."""
    signatures: tuple[tuple[str, object, object], ...] = function.__nb_signature__  # type: ignore[attr-defined]
    assert len(signatures) == 1, "overloads are not for us"
    text = signatures[0][0].replace("\\", "")  # \0 stands for the first default
    parsed = ast.parse(f"{text}: ...").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    return parameters(parsed)


def stub_functions() -> dict[str, ast.FunctionDef]:
    """All functions and methods of the stub by dotted name; a property is neither."""
    found = {}
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.decorator_list:
                    found[f"{node.name}.{method.name}"] = method
    return found


def runtime_functions() -> dict[str, object]:
    """All nanobind functions and methods of the module that a caller may use."""
    found: dict[str, object] = {}
    for name, value in vars(_native).items():
        if hasattr(value, "__nb_signature__"):
            found[name] = value
        elif isinstance(value, type) and not name.startswith("_"):
            for method, function in vars(value).items():
                if hasattr(function, "__nb_signature__"):
                    found[f"{name}.{method}"] = function
    return found


def test_stub_and_module_have_the_same_functions() -> None:
    assert "checksum" in stub_functions()
    assert stub_functions().keys() == runtime_functions().keys()


def test_every_function_has_the_parameters_that_the_stub_says() -> None:
    at_runtime = runtime_functions()
    for name, function in stub_functions().items():
        assert runtime_parameters(at_runtime[name]) == parameters(function), name
