# SPDX-License-Identifier: Apache-2.0
"""What the C++ core offers to Python; a test compares the names with the module's."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeAlias

_RowPlane: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int]

class EngineKVFormat(enum.IntEnum):
    NB_NL_TWO_BS_NH_HS = 0
    NL_X_TWO_NB_BS_NH_HS = 1
    NL_X_NB_TWO_BS_NH_HS = 2
    NL_X_NB_BS_HS = 3
    TWO_X_NL_X_NBBS_NH_HS = 4
    NL_X_NBBS_ONE_HS = 5
    NL_X_TWO_NB_NH_BS_HS = 6
    NL_X_NB_TWO_NH_BS_HS = 7
    NB_NL_TWO_NH_BS_HS = 8
    TWO_X_NL_X_NB_BS_NH_HS = 9
    NL_X_NB_NH_BS_TWO_HS = 10
    NL_X_NB_BS_NH_TWO_HS = 11
    NL_X_NB_NH_BS_CS = 12
    NL_X_NB_BS_NH_CS = 13
    NL_X_NB_BSV_BSS = 14
    NL_X_TWO_NB_NH_ONE_BS_HS = 15
    NL_X_TWO_X_NB_BS_NH_HS = 16
    NL_X_NP_X_NB_BS_ONE_HS = 17
    NL_X_NB_BS_NH_HS = 18
    NL_X_TWO_X_NB_NZ_BS_C0 = 19
    NL_X_NB_PAGE = 20
    NL_X_TWO_NB_PAGE = 21

def all_formats() -> list[EngineKVFormat]: ...
def is_cross_layer(format: EngineKVFormat) -> bool: ...
def is_layer_list(format: EngineKVFormat) -> bool: ...
def is_kv_list(format: EngineKVFormat) -> bool: ...
def is_mla(format: EngineKVFormat) -> bool: ...
def is_hnd(format: EngineKVFormat) -> bool: ...
def is_two_major(format: EngineKVFormat) -> bool: ...
def is_pbs_fused(format: EngineKVFormat) -> bool: ...
def is_fused_packed(format: EngineKVFormat) -> bool: ...
def is_kv_second_tuple(format: EngineKVFormat) -> bool: ...
def is_single_kv(format: EngineKVFormat) -> bool: ...
def is_opaque(format: EngineKVFormat) -> bool: ...
def is_nz(format: EngineKVFormat) -> bool: ...
def is_deprecated(format: EngineKVFormat) -> bool: ...
def kv_size(format: EngineKVFormat) -> int: ...

class Direction(enum.Enum):
    gather = 0
    scatter = 1

class Stores(enum.Enum):
    automatic = 0
    plain = 1
    streaming = 2

def block_ids(slots: Any, start: int, end: int, block_size: int) -> list[int]: ...

class BlockCopier:
    def __init__(self, planes: Sequence[tuple[int, int, int, int]]) -> None: ...
    @property
    def bytes_per_block(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def planes(self) -> int: ...
    def object_bytes(self, blocks: int) -> int: ...
    def copy_slots(
        self,
        direction: Direction,
        slots: Any,
        start: int,
        end: int,
        block_size: int,
        object: int,
        object_size: int,
        skip: int = 0,
        threads: int = 1,
        stores: Stores = ...,
    ) -> None: ...
    def copy_ids(
        self,
        direction: Direction,
        ids: Any,
        object: int,
        object_size: int,
        skip: int = 0,
        threads: int = 1,
        stores: Stores = ...,
    ) -> None: ...

class RowCopier:
    def __init__(
        self,
        planes: Sequence[tuple[int, int, int, int, int, int, int, int, int, int]],
        block_size: int,
        bytes_per_token: int,
    ) -> None: ...
    @property
    def bytes_per_token(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def planes(self) -> int: ...
    def copy_blocks(
        self,
        direction: Direction,
        ids: Any,
        tokens: int,
        object: int,
        object_size: int,
        skip: int = 0,
        threads: int = 1,
        stores: Stores = ...,
    ) -> None: ...
    def copy_slots(
        self,
        direction: Direction,
        slots: Any,
        object: int,
        object_size: int,
        skip: int = 0,
        threads: int = 1,
        stores: Stores = ...,
    ) -> None: ...

def token_bytes(tokens: object) -> bytes | None: ...
def hash_ints(texts: object) -> tuple[int, ...] | None: ...
def read_file(path: str, buffer: Any, skip: int, direct: bool, at_once: int) -> tuple[int, int]: ...
