"""The image's bill of materials names every package and crate with its licence."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def sbom() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "packaging" / "sbom.py"))


@pytest.fixture(scope="module")
def crates(sbom: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crates")
    sbom["crates"](folder)
    return folder


def test_every_linked_crate_is_listed_with_its_licence_and_its_texts(crates: Path) -> None:
    found = json.loads((crates / "crates.json").read_text())
    locked = {(each["name"], each["version"]) for each in tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]}
    names = {each["name"] for each in found}
    assert {(each["name"], each["version"]) for each in found} <= locked
    assert {"tokio", "axum", "tokenizers", "pyo3"} <= names
    assert not {"proptest", "penstock-router"} & names, "neither test dependencies nor our own"
    assert all(each["license"] for each in found)
    texts = [each for each in found if (crates / f"{each['name']}-{each['version']}").is_dir()]
    assert len(texts) >= 0.9 * len(found), "nearly every crate is published with its licence's text"


def test_the_npm_packages_of_the_playgrounds_page_are_listed(crates: Path) -> None:
    page = ROOT / "router" / "src" / "http" / "playground" / "page.js"
    notices = page.read_text().partition("*/")[0]
    packages = json.loads((crates / "npm.json").read_text())
    # The build writes the name of each package that it bundles in a line of its own, before its licence.
    bundled = re.findall(r"^(?:@[\w-]+/)?[a-z][\w-]*$(?=\n\n)", notices, re.MULTILINE)
    assert [package["name"] for package in packages] == bundled
    assert all(package["license"] for package in packages)


def test_the_bill_identifies_each_component_once(sbom: dict[str, Any], crates: Path) -> None:
    bill = sbom["bill"](crates)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    references = [each["bom-ref"] for each in bill["components"]]
    assert len(references) == len(set(references))
    assert all(
        re.fullmatch(r"pkg:(cargo|npm|pypi|deb/debian)/[^@\s]+@\S+", each["purl"]) for each in bill["components"]
    )
    licensed = {each["purl"].partition("@")[0] for each in bill["components"] if "licenses" in each}
    assert {"pkg:pypi/torch", "pkg:pypi/numpy", "pkg:cargo/tokio", "pkg:npm/preact", "pkg:pypi/penstock"} <= licensed
