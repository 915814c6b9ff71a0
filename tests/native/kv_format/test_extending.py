# SPDX-License-Identifier: Apache-2.0
"""The guide in docs/kv_format.md works: a format and an engine are added by its steps in a copy of the sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SPEC = """# SPDX-License-Identifier: Apache-2.0
from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import EngineKVFormat


class NlXNbNhHsBs(KVFormatSpec):
    format = EngineKVFormat.NL_X_NB_NH_HS_BS
    producers = ("an engine of this test",)
"""
DETECTOR = """# SPDX-License-Identifier: Apache-2.0
from semkv.native.kv_format.detector import EngineDetector, one_format
from semkv.native.kv_format.types import EngineKVFormat, EngineType, LayoutError


class NewDetector(EngineDetector):
    engine = EngineType.NEWCOMER

    def discover(self, kv_caches, layout_hints):
        for index, entry in enumerate(kv_caches):
            if entry.dim() != 4:
                raise LayoutError(f"layer {index}: not [NB, NH, HS, BS]")
        return one_format([EngineKVFormat.NL_X_NB_NH_HS_BS] * len(kv_caches), kv_caches)
"""
PROGRAM = """
import torch
from semkv.native import _core, layout
F = layout.EngineKVFormat
layers = [torch.zeros(7, 2, 4, 3) for _ in range(5)]
fmt, found = layout.normalize_kv_and_discover_format(layers, layout.EngineType.NEWCOMER)
assert fmt.name == "NL_X_NB_NH_HS_BS" and int(fmt) == 22, fmt
assert layout.get_num_blocks(found, fmt) == 7 and layout.get_block_size(found, fmt) == 3
assert layout.get_hidden_dim_size(found, fmt) == 8
assert layout.get_concrete_engine_kv_shape(found, fmt) == "5 x [7, 2, 4, 3]"
assert _core.is_layer_list(fmt) and not _core.is_mla(fmt) and _core.kv_size(fmt) == 1
assert _core.__file__.startswith("TREE"), _core.__file__
print("ADDED")
"""


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert before in text, f"{path}: {before!r}"
    path.write_text(text.replace(before, after, 1), encoding="utf-8")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_format_and_an_engine_are_added_by_the_guide(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "kv_format.md").read_text(encoding="utf-8")
    for step in ("kFormats", "_core.pyi", "native/kv_format/specs/", "native/kv_format/detectors/", "EngineType"):
        assert step in guide
    tree = tmp_path / "semkv"
    shutil.copytree(ROOT / "native", tree / "native", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    native = tree / "native"

    # Adding a format: the member and its facts, the spec's file.
    header = native / "core" / "kv_format.h"
    edit(header, "  NL_X_TWO_NB_PAGE = 21,\n", "  NL_X_TWO_NB_PAGE = 21,\n  NL_X_NB_NH_HS_BS = 22,\n")
    text = header.read_text(encoding="utf-8")
    end = re.search(r"\n};\n\nconstexpr const FormatFacts& facts", text)
    assert end is not None
    fact = (
        '\n    FormatFacts{.format = detail::NL_X_NB_NH_HS_BS, .name = "NL_X_NB_NH_HS_BS", '
        ".structure = detail::layer_list, .kv_size = 1},"
    )
    header.write_text(text[: end.start()] + fact + text[end.start() :], encoding="utf-8")
    (native / "kv_format" / "specs" / "nl_x_nb_nh_hs_bs.py").write_text(SPEC, encoding="utf-8")
    # Adding an engine: the member, the detector's file.
    types = native / "kv_format" / "types.py"
    edit(types, '    MOCK = "mock"\n', '    MOCK = "mock"\n    NEWCOMER = "newcomer"\n')
    (native / "kv_format" / "detectors" / "newcomer.py").write_text(DETECTOR, encoding="utf-8")

    build(native)
    program = PROGRAM.replace("TREE", str(tree))
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[str(tmp_path), *sys.path]!r}\n{program}"],
        capture_output=True,
        text=True,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        cwd=tmp_path,
    )
    assert "ADDED" in done.stdout, done.stdout + done.stderr


def build(native: Path) -> None:
    """Compiles the core into the copied tree, by the same sources list as the project's build."""
    import nanobind

    include = Path(nanobind.include_dir())
    base = include.parent
    suffix = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    python = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_paths()['include'])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    sources = [str(p) for p in sorted((native / "core").glob("*.cpp")) if p.name != "row_copy_avx512.cpp"]
    command = [
        "g++",
        "-std=c++20",
        "-O0",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-strict-aliasing",
        "-pthread",
    ]
    command += [f"-I{include}", f"-I{base / 'ext' / 'robin_map' / 'include'}", f"-I{python}", *sources]
    command += [str(base / "src" / "nb_combined.cpp"), "-o", str(native / f"_core{suffix}")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
