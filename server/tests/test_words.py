"""Doc comments are noun phrases or full sentences, never fragments of the name they explain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Folders whose doc comments are checked.
FOLDERS = ["proto", "router", "scheduler"]

FRAGMENT = re.compile(r"(Of|As of|Those|Which|Where|Whose|Whom|Who)\s|As `")
RUST_DOC = re.compile(r"\s*//[/!] ?(?P<text>.*)")
PROTO_DOC = re.compile(r"\s*// ?(?P<text>.*)")


def doc_comments(name: str, source: str) -> Iterator[tuple[int, str]]:
    """The line and the first words of each doc comment, by the file's extension."""
    if name.endswith(".py"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield node.body[0].lineno, text
        return
    pattern = RUST_DOC if name.endswith(".rs") else PROTO_DOC
    begins = True
    for number, line in enumerate(source.splitlines(), 1):
        doc = pattern.fullmatch(line)
        if doc and begins and doc["text"]:
            yield number, doc["text"]
        # A paragraph after an empty line begins anew.
        begins = not doc or not doc["text"]


def fragments(name: str, source: str) -> list[str]:
    """The doc comments that are fragments, as `line: text`."""
    return [f"{line}: {text}" for line, text in doc_comments(name, source) if FRAGMENT.match(text)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_doc_comments_are_no_fragments(folder: str) -> None:
    """Say what it is: `Bytes of one warning.`, not `Of one warning.`"""
    files = [file for extension in ("rs", "proto", "py") for file in (ROOT / folder).rglob(f"*.{extension}")]
    assert files
    found = {
        str(file.relative_to(ROOT)): lines
        for file in sorted(files)
        if (lines := fragments(file.name, file.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("a.rs", "/// Of one warning.\nconst MAX: usize = 512;\n", ["1: Of one warning."]),
        ("a.rs", "//! A room.\n//!\n//! Where it is.\n", ["3: Where it is."]),
        ("a.rs", "    /// As `seconds`, of decodes.\n", ["1: As `seconds`, of decodes."]),
        ("a.rs", "/// The seconds\n/// Of a step.\n// Of no doc comment.\nlet a = 1; // Of a line\n", []),
        ("a.rs", "/// Offsets of blocks.\n/// Whether it is.\n", []),
        ("a.proto", "// Those of it.\nuint32 a = 1; // of it\n", ["1: Those of it."]),
        ("a.py", 'def f():\n    """Whose it is."""\n    #: Of a line\n', ["2: Whose it is."]),
        ("a.py", 'def f():\n    """The owner."""\n    # Of a line\n', []),
    ],
)
def test_fragments_are_found_where_doc_comments_begin(name: str, source: str, expected: list[str]) -> None:
    assert fragments(name, source) == expected
