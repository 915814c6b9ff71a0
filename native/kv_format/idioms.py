# SPDX-License-Identifier: Apache-2.0
"""The lint rule that keeps layouts in one place: what code outside kv_format may not do with KV caches and formats.

`python -m semkv.native.kv_format.idioms FOLDER ...` prints a line for each finding and exits 1 if there are any. Uses
the standard library alone, so that it runs anywhere.

KV1 asks a KV cache for its shape, strides, rank or size (ask semkv.native.layout).
KV2 takes a KV cache apart by index (`kv_caches[0]`, `kv_caches[layer][1]`): what is there depends on the format.
KV3 compares with or lists members of EngineKVFormat (ask a predicate, or add a fact to the format).
KV4 imports from inside semkv.native.kv_format (import semkv.native.layout).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CACHE_NAME = re.compile(r"(^|_)(kv_?caches?|kv_layers?|layer_caches?|paged_kv)$")
SHAPE_NAMES = frozenset({"shape", "stride", "strides", "ndim", "dim", "size", "numel"})
EXEMPT = ("native/kv_format/", "native/layout.py", "native/transfer/", "native/_core.pyi")


@dataclass(frozen=True)
class Finding:
    """One forbidden idiom and where it stands."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule} {self.text}"


def check_source(source: str, path: Path) -> list[Finding]:
    """The findings of one file's text."""
    found = []
    for node in ast.walk(ast.parse(source, str(path))):
        for rule, text in _findings(node):
            found.append(Finding(path, getattr(node, "lineno", 1), rule, text))
    return sorted(found, key=lambda finding: finding.line)


def check_folders(folders: Iterable[Path]) -> list[Finding]:
    """The findings of every Python file below, but for the places whose job layouts are."""
    found = []
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            if not any(part in file.as_posix() for part in EXEMPT):
                found += check_source(file.read_text(encoding="utf-8"), file)
    return found


def _findings(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Attribute) and node.attr in SHAPE_NAMES and _is_cache(node.value):
        yield "KV1", f"asks a KV cache for its {node.attr}; semkv.native.layout answers for every format"
    if isinstance(node, ast.Subscript) and _is_cache(node.value) and not _by_name(node):
        yield "KV2", "takes a KV cache apart by index; what is there depends on the format"
    if isinstance(node, ast.Compare) and any(map(_is_member, [node.left, *node.comparators])):
        yield "KV3", "compares with a member of EngineKVFormat; ask a predicate instead"
    if isinstance(node, ast.Set | ast.List | ast.Tuple) and sum(map(_is_member, node.elts)) > 1:
        yield "KV3", "lists members of EngineKVFormat; add a fact to the formats instead"
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("semkv.native.kv_format"):
        yield "KV4", "imports from inside semkv.native.kv_format; import semkv.native.layout"
    if isinstance(node, ast.Import) and any(name.name.startswith("semkv.native.kv_format") for name in node.names):
        yield "KV4", "imports from inside semkv.native.kv_format; import semkv.native.layout"


def _is_cache(node: ast.AST) -> bool:
    """A name, an attribute or an item that is called a KV cache."""
    if isinstance(node, ast.Subscript):
        return _is_cache(node.value)
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return bool(CACHE_NAME.search(name))


def _by_name(node: ast.Subscript) -> bool:
    """`kv_caches["layer.0"]` only chooses an entry of a dict by its name; `dict[...]` in an annotation has no cache."""
    return isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)


def _is_member(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "EngineKVFormat"


def main(arguments: list[str]) -> int:
    findings = check_folders(map(Path, arguments or ["bus", "native", "consumers", "engine_hooks", "cli"]))
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
