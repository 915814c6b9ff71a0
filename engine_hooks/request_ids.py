# SPDX-License-Identifier: Apache-2.0
"""From the engine's request id back to the id that the API answered.

vLLM gives a request more than its API id on the way down:

    API answers     the engine sees
    chatcmpl-X      chatcmpl-X-1a2b3c4d            a random suffix of 8 hex digits, always
    cmpl-X          cmpl-X-0-1a2b3c4d              and the prompt's position in the batch
    chatcmpl-X      chatcmpl-X_1-1a2b3c4d          one of several conversations in one call
    chatcmpl-X      2_chatcmpl-X-1a2b3c4d          the third of n > 1 choices
    7               7-1a2b3c4d                     the offline `LLM` class

The engine does not keep the API's id, so it is worked out here. The rules are those of vLLM 0.18 and 0.32
(`InputProcessor.assign_request_id`, `ParentRequest.get_child_info`, the servers' `create_completion`).
Pure functions, no errors: an id that follows no rule comes back as it is.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
# A child of n > 1. Only where what follows is an id that vLLM itself makes: a caller's own id may begin like this too.
_CHILD = re.compile(r"^(\d{1,4})_(?=(?:chatcmpl-|cmpl-|resp_|\d+$))")
_PROMPT = re.compile(r"^(cmpl-.+)-(\d{1,6})$")
# Several conversations: only behind vLLM's own 32 hex digits (an id from X-Request-Id may end in _1 by itself).
_CONVERSATION = re.compile(r"^(chatcmpl-[0-9a-f]{32})_(\d{1,6})$")


class ApiId(NamedTuple):
    """The id of the API's answer, and which of its choices this is (0 where there is one)."""

    request_id: str
    choice: int


def randomised() -> bool:
    """Whether vLLM adds its random suffix in this process's environment (it does unless told not to)."""
    return os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0").strip().lower() not in ("1", "true", "yes")


def api_id(engine_request_id: str, *, suffixed: bool = True) -> ApiId:
    """Strip what vLLM added. `suffixed` is False where the random suffix was switched off."""
    text = _SUFFIX.sub("", engine_request_id) if suffixed else engine_request_id
    choice = 0
    child = _CHILD.match(text)
    if child:
        choice = int(child.group(1))
        text = text[child.end() :]
    many = _PROMPT.match(text) or _CONVERSATION.match(text)
    if many:
        text = many.group(1)
        choice = choice or int(many.group(2))
    return ApiId(text, choice)
