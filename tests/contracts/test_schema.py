# SPDX-License-Identifier: Apache-2.0
"""The generated documents are true: committed copies equal the models, samples validate, AsyncAPI's parser agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from semkv.bus import codec, schema
from semkv.bus.messages import Message
from tests.contracts import node as second_language
from tests.contracts.samples import SAMPLES

COMMITTED = Path(__file__).parents[2] / "docs" / "schema"


def test_the_committed_documents_are_what_the_models_say() -> None:
    committed = {file.name: file.read_text() for file in COMMITTED.glob("*.json")}
    assert committed == schema.documents(), "run: semkv schema docs/schema"


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: m.type)
def test_samples_validate_and_broken_ones_do_not(message: Message) -> None:
    document = schema.json_schema(type(message))
    jsonschema.Draft202012Validator.check_schema(document)
    fields: dict[str, Any] = json.loads(codec.encode(message, json=True)[0])
    jsonschema.validate(fields, document)
    for name in document["required"]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({k: v for k, v in fields.items() if k != name}, document)
    if "chunk_hashes" in fields:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**fields, "chunk_hashes": ["0xff"]}, document)


VALIDATE = """
const {Parser} = require('@asyncapi/parser');
const text = require('fs').readFileSync(process.argv[1], 'utf8');
new Parser().parse(text).then(({document, diagnostics}) => {
  const errors = diagnostics.filter(d => d.severity === 0);
  console.log(JSON.stringify(errors));
  process.exit(document && errors.length === 0 ? 0 : 1);
});
"""


def test_asyncapis_own_parser_accepts_the_document_and_refuses_a_broken_one(node: None, tmp_path: Path) -> None:
    good = second_language.run(VALIDATE, str(COMMITTED / schema.ASYNCAPI))
    assert good.returncode == 0, good.stdout + good.stderr
    broken = tmp_path / "broken.json"
    broken.write_text((COMMITTED / schema.ASYNCAPI).read_text().replace('"action": "send"', '"action": "publish"'))
    assert second_language.run(VALIDATE, str(broken)).returncode == 1
