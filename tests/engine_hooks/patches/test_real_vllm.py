# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with prefix caching under pressure on DDR and SSD: well with the patches, broken once they are out."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM: run it with make test")

from bench.drill_vllm import drill

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_partial_hits_under_pressure_need_the_patches(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = drill(tmp_path_factory.mktemp("v") / "1", patched=True, seconds=6.0, without_s=60.0)
    assert run.how == "well", f"{run.how}\n{run.log[-4000:]}"
    assert run.counts["quiet points"] > 0
    assert run.counts["loads behind a part that vLLM had"] > 0, "the case that the patches are for did not arise"
    assert run.counts["prefetches: loaded"] > 0
    assert run.without not in ("", "well"), "without the patches nothing went wrong: they are not shown to be needed"
