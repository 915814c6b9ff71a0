# SPDX-License-Identifier: Apache-2.0
"""`semkv schema`: the messages as JSON Schema and AsyncAPI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from semkv.cli.output import BAD_INPUT, console, fail, print_json


def schema(
    name: Annotated[str | None, typer.Argument(help="One document, such as prefetch.v1; without it, all.")] = None,
    directory: Annotated[Path | None, typer.Option("--directory", "-d", help="Write the files here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One document a line.")] = False,
) -> None:
    """Print or write what each message looks like: JSON Schema for each type, and one AsyncAPI 3 document.

    Example: semkv schema prefetch.v1
    """
    from semkv.bus import schema as library

    documents = {file.removesuffix(".json"): json.loads(text) for file, text in library.documents().items()}
    if name is not None:
        if name not in documents:
            fail(f"{name!r:.80} is no document: {', '.join(sorted(documents))}", BAD_INPUT)
        documents = {name: documents[name]}
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for key, content in documents.items():
                text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
                (directory / f"{key}.json").write_text(text, encoding="utf-8")
        except OSError as error:
            fail(f"--directory: {error}", BAD_INPUT)
    elif as_json or name is None:
        for key, content in documents.items():
            print_json({"name": key, "document": content})
    else:
        console.print_json(json.dumps(documents[name]))
