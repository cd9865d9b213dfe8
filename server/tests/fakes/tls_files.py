"""Certificates of a group of workers, made with openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from penstock_server.protocol.endpoint import WORKER_NAME, Tls

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def make_tls(folder: Path) -> Tls:
    """A new authority, and a certificate of it for a worker."""
    folder.mkdir(exist_ok=True)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    names = ("-subj", "/CN=worker", "-addext", f"subjectAltName=DNS:{WORKER_NAME}")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE")
    openssl("req", "-x509", *new_key, *signed, "-keyout", "worker.key", "-out", "worker.pem", *names)
    certificate, key, authority = ((folder / name).read_text() for name in ("worker.pem", "worker.key", "ca.pem"))
    return Tls(certificate, key, authority)
