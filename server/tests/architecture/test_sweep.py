"""Every other causal model of transformers generates its tokens over our cache, or is refused with a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from models_page import SWEEP_HEADING, Measured
from sweep import SERVED, model_types, outcome

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", model_types())
def test_is_served_like_transformers_or_refused(model_type: str, tmp_path: Path, measured: Measured) -> None:
    came_out = outcome(model_type, tmp_path)
    measured.other(model_type, came_out)
    assert came_out == SERVED or len(came_out) > len("not tried: ")


def test_the_page_lists_every_other_model(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--models-table", None):
        pytest.skip("the page is being written")
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w-]+)` \|", page.split(SWEEP_HEADING)[1], re.MULTILINE)
    assert listed == model_types(), "the page is stale: make docs"
