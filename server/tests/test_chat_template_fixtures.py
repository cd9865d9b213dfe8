"""The router's tests compare chat templates with stored renderings, which must equal those of transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "router" / "tests" / "fixtures" / "templates"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_templates", FOLDER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_stored_renderings_equal_those_of_the_installed_transformers(generate: ModuleType) -> None:
    assert generate.expectation() == generate.read("expectation.json")


def test_every_case_is_rendered_by_a_template_and_every_template_renders_most_cases(generate: ModuleType) -> None:
    families = generate.read("expectation.json")["families"]
    assert len(families) >= 12
    for name in generate.read("conversation.json")["cases"]:
        refused_on_purpose = name in (
            "malformed_documents",
            "continued_image",
            "continued_nothing",
            "continued_with_prompt",
        )
        assert any(family[name] is not None for family in families.values()) != refused_on_purpose, name
    for name, family in families.items():
        assert sum(rendering is not None for rendering in family.values()) > 15, name
