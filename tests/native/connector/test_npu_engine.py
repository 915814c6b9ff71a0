# SPDX-License-Identifier: Apache-2.0
"""When the NPU connector is chosen; LMCache's engine on it, with the real torch_npu on the emulated ACL runtime.

The emulation proves how the API is used and in what order things happen, not speed.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from semkv.native.connector import vllm_npu
from semkv.native.connector.vllm_npu import LATENT_PLANES, NZ_PLANES, PLANES, NpuLayout, npu_layout, ours_serves
from semkv.native.transfer.streams import AcceleratorMissingError
from tests.native.acl_emulator import run_program

pytestmark = pytest.mark.lmcache
PROGRAM = Path(__file__).with_name("npu_engine_program.py")


def test_lmcache_on_the_emulated_device(libraries: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    variables = {"SEMKV_DEVICE_STAGE_MIB": "1", "PYTHONHASHSEED": "0", "LMCACHE_LOG_LEVEL": "ERROR"}
    done = run_program(PROGRAM, libraries, [str(tmp_path)], **variables)
    assert "PASSED" in done.stdout, done.stdout + done.stderr


def engine(*, mla: bool = False, block_size: int = 128, cache_dtype: str = "auto") -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=mla),
        cache_config=SimpleNamespace(block_size=block_size, cache_dtype=cache_dtype),
    )


def vllm_ascend_stand_in(monkeypatch: pytest.MonkeyPatch, *, is_310p: bool) -> None:
    package, utils = ModuleType("vllm_ascend"), ModuleType("vllm_ascend.utils")
    utils.is_310p = lambda: is_310p  # type: ignore[attr-defined]  # a stand-in's function
    monkeypatch.setitem(sys.modules, "vllm_ascend", package)
    monkeypatch.setitem(sys.modules, "vllm_ascend.utils", utils)


def test_the_layout_is_known_from_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert npu_layout(engine()) == NpuLayout(PLANES, 128, "auto")
    assert npu_layout(engine(mla=True)).format == LATENT_PLANES
    vllm_ascend_stand_in(monkeypatch, is_310p=False)
    assert npu_layout(engine()).format == PLANES
    vllm_ascend_stand_in(monkeypatch, is_310p=True)
    nz = npu_layout(engine(block_size=64))
    assert (nz.format, nz.hints["kv_layout"]) == (NZ_PLANES, "NZ")
    tags = {
        npu_layout(engine(block_size=size, cache_dtype=kind)).tag for size in (64, 128) for kind in ("auto", "int8")
    }
    assert len(tags | {npu_layout(engine(mla=True)).tag}) == 5
    assert nz.tag == "nl_x_two_x_nb_nz_bs_c0.b64"


def npu_stand_in(monkeypatch: pytest.MonkeyPatch, *, available: bool) -> None:
    npu = SimpleNamespace(is_available=lambda: available)
    monkeypatch.setattr(vllm_npu, "load_npu", lambda: SimpleNamespace(npu=npu))


def test_ours_serves_where_nobody_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    npu_stand_in(monkeypatch, available=True)
    assert ours_serves()
    npu_stand_in(monkeypatch, available=False)
    with pytest.raises(AcceleratorMissingError, match=r"torch.npu.is_available\(\) is false: check npu-smi"):
        ours_serves()
    monkeypatch.undo()
    with pytest.raises(AcceleratorMissingError, match="torch_npu does not load"):
        ours_serves()


def test_lmcache_ascend_serves_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    npu_stand_in(monkeypatch, available=True)
    (tmp_path / "lmcache_ascend").mkdir()
    (tmp_path / "lmcache_ascend" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    vllm_npu._say_not_loaded.cache_clear()
    with caplog.at_level(logging.ERROR, "semkv.native"):
        assert not ours_serves()
        assert not ours_serves()
    assert [record.getMessage() for record in caplog.records if "not loaded" in record.getMessage()] == [
        record.getMessage() for record in caplog.records
    ]
    assert len(caplog.records) == 1  # LMCache will say that there is no device connector: why, is said once
    caplog.clear()
    monkeypatch.setitem(sys.modules, "lmcache_ascend", ModuleType("lmcache_ascend"))
    assert not ours_serves()
    assert not caplog.records
