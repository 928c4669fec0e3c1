"""Keys and certificates of one cluster, made by openssl: an authority, the API server's, its clients' towards
the kubelet and towards the servers of other APIs, the metrics server's, and the pair that signs service
account tokens. They live as long as the cluster does."""

from __future__ import annotations

from pathlib import Path

from . import metrics
from .components import AGGREGATOR, SERVICE_IP
from .layout import DOMAIN, GATEWAY, TOKENS, Layout
from .shell import run

DAYS = "3650"


def create(layout: Layout) -> None:
    """Write every key, certificate and token into `layout.pki` (readable by root alone)."""
    pki = layout.pki
    authority = pki / "ca.key"
    _key(authority)
    run(["openssl", "req", "-x509", "-new", "-key", authority, "-subj", "/CN=elastic-ps-cluster",
         "-days", DAYS, "-out", pki / "ca.crt"])  # fmt: skip
    service = f"kubernetes.default.svc.{DOMAIN}"
    names = [f"DNS:{service.rsplit('.', cut)[0] if cut else service}" for cut in range(5)]
    names += ["DNS:localhost", f"IP:{GATEWAY}", f"IP:{SERVICE_IP}", "IP:127.0.0.1"]
    _certificate(pki, "apiserver", "/CN=kube-apiserver", f"subjectAltName={','.join(names)}\n")
    _certificate(pki, "client", "/O=system:masters/CN=kube-apiserver", "extendedKeyUsage=clientAuth\n")
    measuring = f"subjectAltName=DNS:{metrics.NAME}.{metrics.NAMESPACE}.svc,IP:{GATEWAY}\n"
    _certificate(pki, metrics.NAME, f"/CN={metrics.NAME}", measuring)
    _certificate(pki, AGGREGATOR, f"/CN={AGGREGATOR}", "extendedKeyUsage=clientAuth\n")
    _key(pki / "service-account.key")
    run(
        [
            "openssl",
            "pkey",
            "-in",
            pki / "service-account.key",
            "-pubout",
            "-out",
            pki / "service-account.pub",
        ]
    )
    lines = []
    for name, (user, groups) in TOKENS.items():
        lines.append(f"{layout.tokens[name]},{user},{name}" + (f',"{groups}"' if groups else ""))
    (pki / "tokens.csv").write_text("\n".join(lines) + "\n")


def _key(path: Path) -> None:
    run(["openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out", path])


def _certificate(pki: Path, name: str, subject: str, extensions: str) -> None:
    key, request, options = pki / f"{name}.key", pki / f"{name}.csr", pki / f"{name}.ext"
    _key(key)
    options.write_text(extensions)
    run(["openssl", "req", "-new", "-key", key, "-subj", subject, "-out", request])
    run(["openssl", "x509", "-req", "-in", request, "-CA", pki / "ca.crt", "-CAkey", pki / "ca.key",
         "-CAcreateserial", "-days", DAYS, "-extfile", options, "-out", pki / f"{name}.crt"])  # fmt: skip
