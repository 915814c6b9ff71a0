# SPDX-License-Identifier: Apache-2.0
"""The specs and detectors that the folders beside this file hold, found when first asked for. Any thread."""

from __future__ import annotations

import functools

from semkv.native.kv_format import detectors, specs
from semkv.native.kv_format.detector import EngineDetector
from semkv.native.kv_format.discovery import discover
from semkv.native.kv_format.spec import KVFormatSpec
from semkv.native.kv_format.types import DiscoverableKVCache, EngineKVFormat, EngineType, LayoutError


@functools.cache
def all_specs() -> dict[EngineKVFormat, type[KVFormatSpec]]:
    found = discover(specs, KVFormatSpec, "format")
    return {key: spec for key, spec in found.items() if isinstance(key, EngineKVFormat)}


@functools.cache
def all_detectors() -> dict[EngineType, EngineDetector]:
    found = discover(detectors, EngineDetector, "engine")
    return {key: detector() for key, detector in found.items() if isinstance(key, EngineType)}


def get_spec_class(fmt: EngineKVFormat) -> type[KVFormatSpec]:
    """The spec of a format, given as the enum's member or its value."""
    try:
        return all_specs()[EngineKVFormat(fmt)]
    except (ValueError, KeyError):
        raise LayoutError(f"no spec for the KV format {fmt!r}") from None


def get_spec(kv_caches: DiscoverableKVCache, fmt: EngineKVFormat) -> KVFormatSpec:
    """A spec over normalized KV caches."""
    return get_spec_class(fmt)(kv_caches)


def get_detector(engine: EngineType) -> EngineDetector:
    try:
        return all_detectors()[engine]
    except KeyError:
        raise LayoutError(f"no KV cache detector for the engine {engine!r}") from None
