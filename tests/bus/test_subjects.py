# SPDX-License-Identifier: Apache-2.0
"""Subjects are built from any names, read back, and nothing else is one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv.bus import subjects
from semkv.bus.subjects import Subject, SubjectError

NAMES = st.text(min_size=1, max_size=80)
TOKENS = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)


@given(NAMES)
def test_a_token_stands_for_any_name(name: str) -> None:
    token = subjects.token(name)
    assert subjects.is_token(token)
    assert subjects.stands_for(name, token)
    assert subjects.stands_for(token, token)


@given(NAMES, NAMES)
def test_different_names_have_different_tokens(a: str, b: str) -> None:
    assert (subjects.token(a) == subjects.token(b)) == (a == b)


def test_nobody_can_choose_the_token_of_another_name() -> None:
    stolen = subjects.token("acme corp")
    assert subjects.token(stolen) != stolen


@given(NAMES, TOKENS, NAMES, NAMES, TOKENS, st.integers(0, 999_999_999))
def test_built_subjects_read_back(tenant: str, domain: str, instance: str, client: str, id_: str, rank: int) -> None:
    t = subjects.token
    assert subjects.parse(subjects.event(tenant, domain, instance, "finished")) == Subject(
        "evt", t(tenant), domain, t(instance), "finished"
    )
    assert subjects.parse(subjects.command(tenant, domain, instance, "evict")) == Subject(
        "cmd", t(tenant), domain, t(instance), "evict"
    )
    assert subjects.parse(subjects.result(tenant, domain, client, id_, instance, rank)) == Subject(
        "res", t(tenant), domain, t(instance), "", t(client), id_, rank
    )
    assert subjects.parse(subjects.registry(instance, rank)) == Subject(
        "registry", instance=t(instance), name="engine", rank=rank
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "semkv.v1", "semkv.v2.t.d.cmd.all.evict", "semkv.v1.t.d.cmd.all", "semkv.v1.t.d.cmd.all.evict.x",
        "semkv.v1.t.d.xyz.all.evict", "semkv.v1..d.cmd.all.evict", "semkv.v1.t.d.cmd.*.evict", "semkv.v1.t.d.cmd.>",
        "semkv.v1.t.d.res.c.id.i.-1", "semkv.v1.t.d.res.c.id.i.01", "semkv.v1.t.d.res.c.id.i.x",
        "semkv.v1.t.d.res.c.id.i.9999999999", "$KV.semkv_engines.a", "$KV.other.a.0", "semkv.v1.t.d.cmd.a b.evict",
    ],
)  # fmt: skip
def test_what_is_no_subject_of_ours_is_refused(text: str) -> None:
    with pytest.raises(SubjectError):
        subjects.parse(text)


@pytest.mark.parametrize("bad", ["", "a.b", "*", "x" * 65, "a b"])
def test_domains_and_ids_must_be_tokens(bad: str) -> None:
    with pytest.raises(SubjectError):
        subjects.command("t", bad, "all", "evict")
    with pytest.raises(SubjectError):
        subjects.result("t", "d", "c", bad, "i", 0)
