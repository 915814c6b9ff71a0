# SPDX-License-Identifier: Apache-2.0
"""The guide in docs/kv_format.md works: a format and an engine are added by its steps in a copy of the sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FORMAT = "NL_X_NB_BS_TWO_NH_HS"
"""A token with its keys and then its values: [NB, BS, 2, NH, HS]. No engine has it."""
PROGRAM = """
import torch
from semkv.native import _core, layout
F = layout.EngineKVFormat
layers = [torch.zeros(7, 3, 2, 2, 4) for _ in range(5)]
fmt, found = layout.normalize_kv_and_discover_format(layers, layout.EngineType.NEWCOMER)
assert fmt.name == "FORMAT" and int(fmt) == 22, fmt
assert layout.get_num_blocks(found, fmt) == 7 and layout.get_block_size(found, fmt) == 3
assert layout.get_hidden_dim_size(found, fmt) == 16 and layout.get_kv_size(found, fmt) == 1
assert layout.get_concrete_engine_kv_shape(found, fmt) == "5 x [7, 3, 2, 2, 4]"
try:
    layout.normalize_kv_and_discover_format(layers[0][0], layout.EngineType.NEWCOMER)
    raise SystemExit("a refusal was expected")
except layout.LayoutError:
    pass
assert _core.__file__.startswith("TREE"), _core.__file__
print("ADDED")
import pytest
# "The tests over all formats do the rest", of the new one and of what lists them all.
tests = "tests/native"
raise SystemExit(pytest.main([
    "-v", "-p", "no:cacheprovider", "-k", "FORMAT or core_has or stub_names or a_file_for_each",
    f"{tests}/kv_format/test_formats.py", f"{tests}/kv_format/test_detection.py", f"{tests}/kv_format/test_groups.py",
    f"{tests}/kv_format/test_where_lmcache_is_wrong.py", f"{tests}/transfer/test_cpu.py",
]))
"""
GUIDE = ROOT / "docs" / "kv_format.md"


def example(number: int) -> str:
    """The guide's own code, the `number`th block of Python under a heading that begins with Adding."""
    text = GUIDE.read_text(encoding="utf-8")
    blocks = re.findall(
        r"^ *```python\n(.*?)^ *```$", text[text.index("## Adding a format") :], re.DOTALL | re.MULTILINE
    )
    return "# SPDX-License-Identifier: Apache-2.0\n" + textwrap.dedent(blocks[number])


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert before in text, f"{path}: {before!r}"
    path.write_text(text.replace(before, after, 1), encoding="utf-8")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_format_and_an_engine_are_added_by_the_guide(tmp_path: Path) -> None:
    native, tests = tmp_path / "semkv" / "native", tmp_path / "tests" / "native"
    without = shutil.ignore_patterns("__pycache__", "*.so", "connector", "acl_emulator", "core", "conftest.py")
    shutil.copytree(ROOT / "native", native, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copytree(ROOT / "tests" / "native", tests, ignore=without)
    (tmp_path / "tests" / "__init__.py").touch()

    # Adding a format, step 1: the member and its facts at the end, and the stub.
    header = native / "core" / "kv_format.h"
    edit(header, "  NL_X_TWO_NB_PAGE = 21,\n", f"  NL_X_TWO_NB_PAGE = 21,\n  {FORMAT} = 22,\n")
    text = header.read_text(encoding="utf-8")
    end = re.search(r"\n};\n\nconstexpr const FormatFacts& facts", text)
    assert end is not None
    fact = (
        f'\n    FormatFacts{{.format = detail::{FORMAT}, .name = "{FORMAT}", '
        ".structure = detail::layer_list, .kv_size = 1, .fused_packed = true},"
    )
    header.write_text(text[: end.start()] + fact + text[end.start() :], encoding="utf-8")
    edit(native / "_core.pyi", "    NL_X_TWO_NB_PAGE = 21\n", f"    NL_X_TWO_NB_PAGE = 21\n    {FORMAT} = 22\n")
    # Step 2: the spec's file, which is the guide's example with the new name in place of the old.
    spec = example(0).replace("NL_X_NB_BS_NH_HS", FORMAT)
    (native / "kv_format" / "specs" / f"{FORMAT.lower()}.py").write_text(spec, encoding="utf-8")
    # Step 3: its shape, and how the engine hands it in.
    shapes = tests / "kv_format" / "shapes.py"
    edit(shapes, "    simple = {\n", f"    simple = {{\n        F.{FORMAT}: (NB, BS, 2, NH, HS),\n")
    start = "    engines: dict[EngineKVFormat, tuple[EngineType, LayoutHints]] = {\n"
    edit(shapes, start, f"{start}        F.{FORMAT}: (EngineType.NEWCOMER, {{}}),\n")

    # Adding an engine, step 1: the member. Step 2: the detector's file, again the guide's example.
    types = native / "kv_format" / "types.py"
    edit(types, '    MOCK = "mock"\n', '    MOCK = "mock"\n    NEWCOMER = "newcomer"\n')
    detector = example(1).replace("ATOM", "NEWCOMER").replace("NL_X_NB_BS_HS", FORMAT).replace("!= 3", "!= 5")
    (native / "kv_format" / "detectors" / "newcomer.py").write_text(detector, encoding="utf-8")

    build(native)
    program = PROGRAM.replace("TREE", str(tmp_path)).replace("FORMAT", FORMAT)
    paths = [str(tmp_path), *sys.path]
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {paths!r}\n{program}"],
        capture_output=True,
        text=True,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        cwd=tmp_path,
    )
    assert "ADDED" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    for test in ("test_every_format_that_an_engine_makes_is_found", "test_rows_there_and_back"):
        assert f"{test}[{FORMAT}] PASSED" in done.stdout, done.stdout


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
