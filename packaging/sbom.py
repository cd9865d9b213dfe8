"""The image's bill of materials, in CycloneDX's form: Debian packages, Python packages, crates and the playground's npm
packages, with their licences.

    python packaging/sbom.py crates FOLDER    where cargo is: crates.json, npm.json, and every crate's licence texts
    python packaging/sbom.py image FOLDER     in the image: prints the bill, with what is in that folder

The licence texts of Debian packages are in /usr/share/doc, those of Python packages in their *.dist-info folders, and
those of npm packages at the beginning of the playground's page.js.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("penstock", "penstock-kernels")  # crates in the image; others of the workspace are for tests
LICENCE_FILE = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)", re.IGNORECASE)


def crates(folder: Path) -> None:
    """Writes npm.json, crates.json and the licence texts of every crate that the shipped ones are linked with."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    target = re.search(r"^host: (\S+)$", _output(["rustc", "-vV"]), re.MULTILINE)
    command += ["--filter-platform", target[1]] if target else []
    command += ["--features", "penstock-kernels/python"]
    found = json.loads(_output(command))
    packages = {package["id"]: package for package in found["packages"]}
    edges = {
        node["id"]: [each["pkg"] for each in node["deps"] if any(kind["kind"] is None for kind in each["dep_kinds"])]
        for node in found["resolve"]["nodes"]
    }
    linked, waiting = set[str](), [id for id, package in packages.items() if package["name"] in SHIPPED]
    while waiting:
        if (id := waiting.pop()) not in linked:
            linked.add(id)
            waiting += edges[id]
    external = [packages[id] for id in linked if packages[id]["source"] is not None]
    external.sort(key=lambda package: (package["name"], package["version"]))
    folder.mkdir(parents=True, exist_ok=True)
    for package in external:
        texts = folder / f"{package['name']}-{package['version']}"
        for file in sorted(Path(package["manifest_path"]).parent.iterdir()):
            if LICENCE_FILE.match(file.name) and file.is_file():
                texts.mkdir(exist_ok=True)
                shutil.copy(file, texts)
    kept = [{name: package[name] for name in ("name", "version", "license")} for package in external]
    (folder / "crates.json").write_text(json.dumps(kept, indent=1) + "\n")
    (folder / "npm.json").write_text(json.dumps(npm_packages(), indent=1) + "\n")


def npm_packages() -> list[dict[str, str]]:
    """What the playground's page.js bundles: the locked packages that are not only for its build and its tests."""
    locked = json.loads((ROOT / "playground" / "package-lock.json").read_text())["packages"]
    return [
        {"name": path.rpartition("node_modules/")[2], "version": package["version"], "license": package["license"]}
        for path, package in locked.items()
        if path and not package.get("dev")
    ]


def bill(folder: Path) -> dict[str, Any]:
    """The bill of what is installed where this runs. folder: that of `crates`."""
    components = [*debian_packages(), *python_packages()]
    for crate in json.loads((folder / "crates.json").read_text()):
        components.append(component("cargo", crate["name"], crate["version"], crate["license"]))
    for package in json.loads((folder / "npm.json").read_text()):
        components.append(component("npm", package["name"], package["version"], package["license"]))
    unique = {each["bom-ref"]: each for each in components}
    version = metadata.version("penstock")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component("pypi", "penstock", version, "Apache-2.0") | {"type": "application"}},
        "components": [unique[ref] for ref in sorted(unique)],
    }


def component(kind: str, name: str, version: str, expression: str | None = None, stated: str = "") -> dict[str, Any]:
    """kind: the type of a package URL. expression: the licence in SPDX's form; stated: in the package's own words."""
    purl = f"pkg:{kind}/{name.replace('@', '%40')}@{version.replace('+', '%2B')}"
    found: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if expression:
        found["licenses"] = [{"expression": expression}]
    elif stated:
        found["licenses"] = [{"license": {"name": stated[:200]}}]
    return found


def python_packages() -> Iterator[dict[str, Any]]:
    for distribution in metadata.distributions():
        about = distribution.metadata
        classifiers = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier") or () if "License ::" in text]
        words = about["License"] if "License" in about else ""  # noqa: SIM401
        expression = about["License-Expression"] if "License-Expression" in about else None  # noqa: SIM401
        stated = " ".join((words or ", ".join(classifiers)).split())
        name = re.sub(r"[-_.]+", "-", about["Name"]).lower()
        yield component("pypi", name, distribution.version, expression, stated)


def debian_packages() -> Iterator[dict[str, Any]]:
    """None where there is no dpkg. A package's licences are in its own file, which has no common form."""
    if shutil.which("dpkg-query") is None:
        return
    for line in _output(["dpkg-query", "--show", "--showformat", "${Package} ${Version}\n"]).splitlines():
        name, version = line.split()
        yield component("deb/debian", name, version)


def _output(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["crates", "image"])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.command == "crates":
        crates(options.folder)
    else:
        print(json.dumps(bill(options.folder), indent=1, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
