"""Comments are noun phrases or full sentences, never fragments of the name they explain."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Folders whose comments are checked.
FOLDERS = [
    "bench",
    "integration-tests",
    "kernels",
    "launcher",
    "packaging",
    "proto",
    "router",
    "scheduler",
    "server/penstock",
    "server/penstock_server",
    "server/tests",
]
# Files that a build writes.
GENERATED = ROOT / "server" / "penstock_server" / "pb"

FRAGMENT = re.compile(r"(Of|As of|Those|Which|Where|Whose|Whom|Who)\s|As `")
# Comments in Python may begin in lower case.
PYTHON_FRAGMENT = re.compile(r"#:?\s*((of|as of|those|which|where|whose|whom|who)\b|as `)", re.IGNORECASE)
RUST_DOC = re.compile(r"\s*//[/!] ?(?P<text>.*)")
PROTO_DOC = re.compile(r"\s*// ?(?P<text>.*)")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each docstring, those of attributes included."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text.strip()


def python_comments(source: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each comment, from the hash. Comments on adjacent lines are one."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            is_trailing = bool(token.line[:column].strip())
            if is_trailing or number != last + 1:
                yield number, token.string
            last = number


def doc_comments(name: str, source: str) -> Iterator[tuple[int, str]]:
    """The line and the first words of each doc comment of Rust or Protobuf, by the file's extension."""
    pattern = RUST_DOC if name.endswith(".rs") else PROTO_DOC
    begins = True
    for number, line in enumerate(source.splitlines(), 1):
        doc = pattern.fullmatch(line)
        if doc and begins and doc["text"]:
            yield number, doc["text"]
        # A paragraph after an empty line begins anew.
        begins = not doc or not doc["text"]


def fragments(name: str, source: str) -> list[str]:
    """The comments that are fragments, as `line: text`."""
    if name.endswith(".py"):
        found = [each for each in docstrings(source) if FRAGMENT.match(each[1])]
        found += [each for each in python_comments(source) if PYTHON_FRAGMENT.match(each[1])]
    else:
        found = [each for each in doc_comments(name, source) if FRAGMENT.match(each[1])]
    return [f"{line}: {text}" for line, text in sorted(found)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_comments_are_no_fragments(folder: str) -> None:
    """Say what it is: `Bytes of one warning.`, not `Of one warning.`"""
    files = [file for extension in ("rs", "proto", "py") for file in (ROOT / folder).rglob(f"*.{extension}")]
    assert files
    found = {
        str(file.relative_to(ROOT)): lines
        for file in sorted(files)
        if not file.is_relative_to(GENERATED) and (lines := fragments(file.name, file.read_text()))
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
        ("a.py", 'def f():\n    """Whose it is."""\n', ["2: Whose it is."]),
        ("a.py", 'class A:\n    a: int\n    """Of a line."""\n', ["3: Of a line."]),
        ("a.py", 'a = 1\n"""Of a line."""\n', ["2: Of a line."]),
        ("a.py", "a = 1  # of a line\nb = 2  # as of `A`\n", ["1: # of a line", "2: # as of `A`"]),
        ("a.py", "#: Those of a line\na = 1\n# as `A`\n", ["1: #: Those of a line", "3: # as `A`"]),
        ("a.py", "a = 1  # the sum\n# of a line\n\n# The sum\n# of a line\n", []),
        ("a.py", 'a = "# of a line"\nb = 1  # offsets\nc = 2  # whole\n', []),
        ("a.py", 'def f():\n    """The owner."""\n    # The line\n    return """Of a line."""\n', []),
    ],
)
def test_fragments_are_found_where_comments_begin(name: str, source: str, expected: list[str]) -> None:
    assert fragments(name, source) == expected
