# SPDX-License-Identifier: Apache-2.0
"""Generated histories: whoever evicts, no chunk of another live conversation goes.

The model knows who is who, which the forest does not: agents with a session, and agents that send hashes only. It keeps
conversations as plain lists and judges every evict by brute force.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from semkv.consumers.storage.forest import PrefixForest

IDLE_S = 100.0


class Talk:
    """A conversation as its agent knows it."""

    def __init__(self, tenant: str, session: str | None, chain: tuple[int, ...], request: str, now: float) -> None:
        self.tenant = tenant
        self.session = session
        self.chain = chain
        self.requests = {request}
        self.used = now
        self.tail: int | None = None
        self.taken = False  # another nameless chain extended this one: the forest takes that for its next turn

    @property
    def needs(self) -> tuple[int, ...]:
        """Its whole chunks and its tail."""
        return self.chain if self.tail is None else (*self.chain, self.tail)

    def alive(self, now: float) -> bool:
        return bool(self.requests) or now - self.used < IDLE_S


class Histories(RuleBasedStateMachine):
    """Requests come, grow, end and idle; agents evict."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.forest = PrefixForest("default", clock=lambda: self.now, idle_s=IDLE_S, running_s=1e9, dead_limit=5)
        self.talks: list[Talk] = []
        self.numbers = 0
        self.children: dict[tuple[int, ...], int] = {}
        self.tails: dict[tuple[int, ...], int] = {}
        self.turns: dict[str, set[tuple[int, ...]]] = {}

    def fresh(self) -> int:
        self.numbers += 1
        return self.numbers

    def grow(self, chain: tuple[int, ...], by: list[int]) -> tuple[int, ...]:
        # Equal prefix and equal content give the equal hash, as in a real chain.
        for content in by:
            chain = (*chain, self.children.setdefault((*chain[-1:], content), 10_000 + len(self.children)))
        return chain

    def tail_of(self, chain: tuple[int, ...], content: int | None) -> int | None:
        """What is left behind the last whole chunk: equal where chain and content are."""
        return None if content is None else self.tails.setdefault((*chain[-1:], content), 50_000 + len(self.tails))

    left = st.sampled_from([None, None, 0, 1])
    content = st.lists(st.integers(0, 1), min_size=1, max_size=3)

    @rule(session=st.sampled_from([None, None, None, "s1", "s2"]), by=content, ends=st.booleans(), left=left)
    def begin(self, session: str | None, by: list[int], ends: bool, left: int | None) -> None:
        """A new request, whose chain may share any prefix with others."""
        request = f"r{self.fresh()}"
        chain = self.grow((), by)
        tail = self.tail_of(chain, left)
        self.forest.record_lookup("default", session, chain, request, tail=tail)
        if session is None:
            self.take_one(chain)
        talk = Talk("default", session, chain, request, self.now)
        talk.tail = tail
        self.outdate(talk)
        self.talks.append(talk)
        if ends:
            self.forest.finished(talk.requests)
            talk.requests = set()

    @precondition(lambda self: self.talks)
    @rule(data=st.data(), by=content, left=left)
    def proceed(self, data: st.DataObject, by: list[int], left: int | None) -> None:
        """A next turn of a session, or of a conversation of which there is no doubt whose it is."""
        talk = data.draw(st.sampled_from(self.talks))
        if not talk.alive(self.now) or (talk.session is None and talk.requests):
            return
        request = f"r{self.fresh()}"
        chain = self.grow(talk.chain, by)
        if talk.session is None and self.shadowed(talk, chain):
            return
        tail = self.tail_of(chain, left)
        self.forest.record_lookup("default", talk.session, chain, request, tail=tail)
        talk.chain, talk.used, talk.taken, talk.tail = chain, self.now, False, tail
        self.outdate(talk)
        talk.requests.add(request)

    def outdate(self, newer: Talk) -> None:
        """A turn with the whole chain of another of its session is a later turn of it: that one's tail is over.

        A turn that goes back to an earlier point of its session is one of the longer chain's, and its tail is nobody's.
        The longer one may be forgotten here and still known there, where any of the session's requests keeps it.
        """
        if newer.session is None:
            return
        for talk in self.talks:
            if talk.session == newer.session and talk is not newer and newer.chain[: len(talk.chain)] == talk.chain:
                talk.tail = None
        turns, length = self.turns.setdefault(newer.session, set()), len(newer.chain)
        if any(len(chain) > length and chain[:length] == newer.chain for chain in turns):
            newer.tail = None
        turns.add(newer.chain)

    def take_one(self, chain: tuple[int, ...]) -> None:
        """The longest ended nameless conversation that this chain extends is what the forest replaces."""
        extended = [
            talk
            for talk in self.talks
            if talk.session is None
            and not talk.requests
            and not talk.taken
            and len(talk.chain) < len(chain)
            and chain[: len(talk.chain)] == talk.chain
        ]
        if extended:
            taken = max(extended, key=lambda talk: len(talk.chain))
            taken.taken, taken.tail = True, None

    def shadowed(self, talk: Talk, chain: tuple[int, ...]) -> bool:
        """True if the new turn extends another conversation without a session as well."""
        return any(
            other is not talk and other.session is None and chain[: len(other.chain)] == other.chain
            for other in self.talks
        )

    @precondition(lambda self: self.talks)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Requests of a conversation end."""
        talk = data.draw(st.sampled_from(self.talks))
        self.forest.finished(talk.requests)
        if talk.requests:
            talk.used = self.now
        talk.requests = set()

    @rule(seconds=st.sampled_from([1.0, 40.0, 70.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.talks = [talk for talk in self.talks if talk.alive(self.now)]

    @precondition(lambda self: self.talks)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A conversation of its own begins with the prompt of another, or with a part of it, and ends at once."""
        talk = data.draw(st.sampled_from(self.talks))
        chain = talk.chain[: data.draw(st.integers(1, len(talk.chain)))]
        request = f"r{self.fresh()}"
        self.forest.record_lookup("default", None, chain, request)
        self.take_one(chain)
        self.talks.append(Talk("default", None, chain, request, self.now))
        self.forest.finished([request])
        self.talks[-1].requests = set()

    @precondition(lambda self: self.talks)
    @rule(data=st.data())
    def evict_all_of_it(self, data: st.DataObject) -> None:
        """An agent evicts its whole conversation."""
        talk = data.draw(st.sampled_from(self.talks))
        self.judge(talk.needs, talk.session, talk)

    @precondition(lambda self: self.talks)
    @rule(data=st.data())
    def evict_own(self, data: st.DataObject) -> None:
        """An agent evicts part or all of its conversation, named or not."""
        talk = data.draw(st.sampled_from(self.talks))
        wanted = tuple(data.draw(st.lists(st.sampled_from(talk.needs), unique=True))) or talk.needs
        self.judge(wanted, talk.session, talk)

    @rule(data=st.data(), session=st.sampled_from([None, "s1", "s9"]))
    def evict_anything(self, data: st.DataObject, session: str | None) -> None:
        """Somebody evicts whatever comes to mind; named conversations of others must be safe all the same."""
        everything = sorted({chunk for talk in self.talks for chunk in talk.needs}) or [1]
        wanted = tuple(data.draw(st.lists(st.sampled_from(everything), unique=True)))
        gone = set(wanted) - self.forest.shared("default", session, wanted)
        for talk in self.talks:
            if talk.session is not None and talk.session != session:
                assert not gone & set(talk.needs), f"{session} evicted from {talk.session}"
            if talk.session is None and (session is not None or talk.requests):
                assert not gone & set(talk.needs), f"{session} evicted from a conversation without a session"

    def judge(self, wanted: tuple[int, ...], session: str | None, who: Talk) -> None:
        gone = set(wanted) - self.forest.shared("default", session, wanted)
        for talk in self.talks:
            if talk is who or (session is not None and talk.session == session):
                continue
            if talk.taken:
                continue
            assert not gone & set(talk.needs), f"{who.needs} took {gone} from {talk.needs}"

    @invariant()
    def counts_are_those_of_the_leaves(self) -> None:
        """Every node's count is the number of leaves through it."""
        leaves, nodes = self.forest._leaves, self.forest._nodes
        counted: dict[int, int] = {}
        for leaf in leaves._by_age.values():
            for node in leaves.nodes_of(leaf):
                counted[node] = counted.get(node, 0) + 1
        for node in nodes._index.values():
            assert nodes.count_of(node) == counted.get(node, 0)


Histories.TestCase.settings = settings(max_examples=400, stateful_step_count=50, deadline=None)
TestHistories = Histories.TestCase
