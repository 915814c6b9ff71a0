# SPDX-License-Identifier: Apache-2.0
"""What a sentence says about going on, apart from its subject: "继续讨论刚才的…", "let's go on with …", "yesterday".

``read(query)`` takes those phrases off and leaves the subject. A query with no subject left asks for the newest topic.
Pure; Chinese and English.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Cues", "read"]

DAY_S = 86_400.0

_GO_ON = re.compile(
    r"继续|接着|接上|回到|说回|聊回|再(?:说说|聊聊|看看|谈谈)|往下(?:说|做|走)?|还是(?:说|聊|回)|恢复"
    r"|\b(?:go|going|carry|carrying|move|keep going|get|getting) on(?: with)?\b|\bcontinu(?:e|ing)\b(?: with| on)?"
    r"|\b(?:back|return|returning|going back|get back) to\b|\bresum(?:e|ing)\b"
    r"|\bpick(?:ing)? (?:it |things )?up(?: again)?\b"
    r"|\bproceed(?: with)?\b|\bkeep (?:going|working|discussing|talking)(?: on| about)?\b|\bfollow(?:ing)? up(?: on)?\b"
    r"|\bpick up where\b|\bwhere (?:we|i|you) (?:left off|were|stopped)\b|\bleft off\b|\brevisit(?:ing)?\b",
    re.IGNORECASE,
)
_JUST_NOW = re.compile(
    r"刚才|刚刚|方才|前面|上一个|\bjust now\b|\ba (?:moment|minute|second) ago\b|\bpreviously\b"
    r"|\bwhere (?:we|i|you) (?:left off|were|stopped)\b"
    r"|\bthe (?:last|previous|earlier) (?:topic|subject|thing|question|discussion)\b",
    re.IGNORECASE,
)
_LAST_TIME = re.compile(
    r"上次|上回|之前那次|\blast time\b|\bother (?:day|session)\b|\b(?:last|previous) session\b", re.IGNORECASE
)
_DAYS = (
    (re.compile(r"昨天|昨晚|\byesterday(?:'s)?\b|\blast night\b", re.IGNORECASE), 0.25 * DAY_S, 2 * DAY_S),
    (re.compile(r"前天|\bday before yesterday\b", re.IGNORECASE), 1 * DAY_S, 3 * DAY_S),
    (re.compile(r"上周|上星期|上个星期|\blast week(?:'s)?\b", re.IGNORECASE), 2 * DAY_S, 14 * DAY_S),
    (re.compile(r"上个月|\blast month(?:'s)?\b", re.IGNORECASE), 14 * DAY_S, 62 * DAY_S),
)
# Words that only frame the subject. They are taken off last, and only count as "nothing left" when nothing else is.
_FRAME = re.compile(
    r"讨论|聊(?:的|过|到)?|谈(?:的|到|过)?|说(?:的|到|过)?|话题|事情|事儿|内容"
    r"|之前|以前|我们|咱们|那个|这个|一下|关于|部分|那件事|的事|对话"
    r"|\b(?:discuss(?:ed|ing|ion)?|talk(?:ed|ing)?(?: about)?|conversation|topic|subject|thread|earlier|before|again"
    r"|about|working on|work on|let'?s|please|ok(?:ay)?|now|so|well|matter|chat|last|previous)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Cues:
    """A query taken apart."""

    subject: str  # what is left to look up
    go_on: bool  # a phrase asks to go on with something
    just_now: bool  # … that was being discussed just before
    elsewhere: bool  # … in another session ("last time")
    age_s: tuple[float, float] | None  # … about that long ago
    phrases: tuple[str, ...]  # what was recognised, for the explanation


def read(query: str) -> Cues:
    """Takes the phrases of going on, of time and of framing off a query."""
    phrases: list[str] = []

    def take(pattern: re.Pattern[str], text: str) -> tuple[bool, str]:
        found = [match.group(0) for match in pattern.finditer(text)]
        phrases.extend(found)
        return bool(found), pattern.sub(" ", text)

    just_now, rest = take(_JUST_NOW, query)
    elsewhere, rest = take(_LAST_TIME, rest)
    age: tuple[float, float] | None = None
    for pattern, low, high in _DAYS:
        found, rest = take(pattern, rest)
        if found and age is None:
            age = (low, high)
    go_on, rest = take(_GO_ON, rest)
    rest = _FRAME.sub(" ", rest)
    return Cues(" ".join(rest.split()), go_on, just_now, elsewhere, age, tuple(phrases))
