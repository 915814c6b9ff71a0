# SPDX-License-Identifier: Apache-2.0
"""How a patch is laid over a function of LMCache, and when it is not.

A `Patch` is a set of replacements that only make sense together. Each replacement names one function and the digests of
the source texts it was written for. A patch goes in only if every function it touches is present and known (or, for a
wrapper, has the parameters it relies on); otherwise nothing of it goes in and one line says which function and why.
Applying twice does nothing. Nothing on disk is changed.

Threads: `apply` and `restore_all` hold one lock; call them before the engine serves.
Errors: none are raised for an unknown or missing function; a report says so.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import textwrap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

logger = logging.getLogger("semkv.engine_hooks.patches")

AnyFunction = Callable[..., Any]
_ORIGINAL = "__semkv_original__"
_NAMES = "__semkv_patches__"


class PatchState(str, Enum):
    """What became of a patch."""

    APPLIED = "applied"
    ALREADY = "already"
    UNKNOWN_FUNCTION = "unknown_function"
    MISSING = "missing"
    NEEDS_ANOTHER = "needs_another"


@dataclass(frozen=True)
class Replacement:
    """One function to replace.

    target: "module:Class.function" or "module:function".
    make: gets the function that is in place now and returns the new one.
    digests: source digests of the functions this was written for; None for a wrapper that only relies on `parameters`.
    parameters: names that the function must accept, for wrappers.
    """

    target: str
    make: Callable[[AnyFunction], AnyFunction]
    digests: frozenset[str] | None = None
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Patch:
    """A named set of replacements with the reason for it."""

    name: str
    reason: str
    replacements: tuple[Replacement, ...]
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class PatchReport:
    """What `apply` did with one patch."""

    name: str
    state: PatchState
    detail: str = ""

    @property
    def active(self) -> bool:
        """True if the patch is in place."""
        return self.state in (PatchState.APPLIED, PatchState.ALREADY)


@dataclass
class _Place:
    owner: Any
    attribute: str
    current: AnyFunction

    @property
    def original(self) -> AnyFunction:
        found: AnyFunction = getattr(self.current, _ORIGINAL, self.current)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        found: tuple[str, ...] = getattr(self.current, _NAMES, ())
        return found


_lock = threading.Lock()
_undo: list[tuple[Any, str, AnyFunction]] = []
_active: set[str] = set()


def source_digest(function: AnyFunction) -> str:
    """16 hex digits over the function's own source text; empty if the source cannot be read."""
    try:
        source = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""
    lines = [line.rstrip() for line in textwrap.dedent(source).splitlines()]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _find(target: str) -> _Place | None:
    module_name, _, path = target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError:
        return None
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
        if owner is None:
            return None
    current = vars(owner).get(attribute)
    return _Place(owner, attribute, current) if callable(current) else None


def _objection(replacement: Replacement, place: _Place) -> str:
    if replacement.digests is not None:
        digest = source_digest(place.original)
        if digest not in replacement.digests:
            return (
                f"{replacement.target} has the source digest {digest or 'unreadable'}, which this patch does not know"
            )
        return ""
    try:
        accepted = inspect.signature(place.original).parameters
    except (TypeError, ValueError):
        return f"{replacement.target} has no readable signature"
    absent = [name for name in replacement.parameters if name not in accepted]
    return f"{replacement.target} does not take {', '.join(absent)}" if absent else ""


def _apply_one(patch: Patch) -> PatchReport:
    if patch.name in _active:
        return PatchReport(patch.name, PatchState.ALREADY)
    lacking = [name for name in patch.requires if name not in _active]
    if lacking:
        return PatchReport(patch.name, PatchState.NEEDS_ANOTHER, f"needs {', '.join(lacking)}, which is not in place")
    places: list[tuple[Replacement, _Place]] = []
    for replacement in patch.replacements:
        place = _find(replacement.target)
        if place is None:
            return PatchReport(patch.name, PatchState.MISSING, f"{replacement.target} does not exist here")
        objection = _objection(replacement, place)
        if objection:
            return PatchReport(patch.name, PatchState.UNKNOWN_FUNCTION, objection)
        places.append((replacement, place))
    for replacement, place in places:
        new = replacement.make(place.current)
        setattr(new, _ORIGINAL, place.original)
        setattr(new, _NAMES, (*place.names, patch.name))
        _undo.append((place.owner, place.attribute, place.current))
        setattr(place.owner, place.attribute, new)
    _active.add(patch.name)
    return PatchReport(patch.name, PatchState.APPLIED)


def apply(patches: Sequence[Patch]) -> list[PatchReport]:
    """Apply patches in order; one line in the log for each that could not go in."""
    reports = []
    with _lock:
        for patch in patches:
            report = _apply_one(patch)
            if not report.active:
                logger.warning("patch %s is left out: %s", report.name, report.detail)
            reports.append(report)
    return reports


def active_patches() -> frozenset[str]:
    """Names of the patches in place."""
    with _lock:
        return frozenset(_active)


def restore_all() -> None:
    """Put every replaced function back (for tests that show what happens without a patch)."""
    with _lock:
        while _undo:
            owner, attribute, function = _undo.pop()
            setattr(owner, attribute, function)
        _active.clear()
