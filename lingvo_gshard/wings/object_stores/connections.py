"""Opens buckets: packages, credentials, endpoints and time limits of the libraries beneath.

Small files go through fsspec's gcsfs and s3fs, which etils.epath and so Orbax use, too. Arrays go
through TensorStore. Both read the usual settings of the environment: GOOGLE_APPLICATION_CREDENTIALS
and `gcloud auth application-default login`; AWS_PROFILE, AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from typing import TYPE_CHECKING, Any

from lingvo_gshard.core import UserError, stores

if TYPE_CHECKING:
    import fsspec

# Scheme -> fsspec's protocol, its package, and what it reads.
_PROTOCOLS = {"gs": ("gcs", "gcsfs", "Google Cloud Storage"), "s3": ("s3", "s3fs", "Amazon S3")}
SCHEMES = tuple(_PROTOCOLS)
# An answer that stops for so long counts as a failed request.
_CONNECT_SECONDS, _READ_SECONDS = 15, 60
_REGION = "us-east-1"
# Requests of TensorStore that fail are repeated, with pauses that double up to the largest.
_RETRIES = {"max_retries": 7, "initial_delay": "500ms", "max_delay": "16s"}
_SETTINGS = {
    # epath would use TensorFlow's file systems for gs://, and has none for s3://.
    "EPATH_USE_TF": "false",
    # gcsfs would ask another service for the type of each bucket before it uses it.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": str(_CONNECT_SECONDS),
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": str(_READ_SECONDS),
}


def prepare(path: str) -> None:
    """Sets what the libraries read when they are imported; UserError without a package."""
    _prepare(path.partition("://")[0])


def file_system(path: str) -> fsspec.AbstractFileSystem:
    """Returns fsspec's file system of a path in a bucket; always the same one."""
    prepare(path)
    import fsspec

    protocol = _PROTOCOLS[path.partition("://")[0]][0]
    return fsspec.filesystem(protocol)


def key_value_store(path: str) -> dict[str, Any]:
    """Returns TensorStore's specification of the store below a path in a bucket.

    Keys are appended to the URL, so the URL of a folder ends with "/".
    """
    prepare(path)
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme == "gs":
        driver = os.environ.get("TENSORSTORE_GCS_BACKEND", "gcs")
        return {"driver": driver, "bucket": bucket, "path": key, "gcs_request_retries": _RETRIES}
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": key}
    spec["s3_request_retries"] = _RETRIES
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        spec |= {"endpoint": endpoint, "aws_region": region or _REGION}
    elif region:
        spec["aws_region"] = region
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        # The chain of all sources would report each file that is missing.
        spec["aws_credentials"] = {"type": "environment"}
    return spec


@functools.cache
def _prepare(scheme: str) -> None:
    protocol, package, service = _PROTOCOLS[scheme]
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{scheme}:// needs the package {package}, which reads {service}: pip install {package}"
        )
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import fsspec.config

    chosen = fsspec.config.conf.setdefault(protocol, {})
    for name, value in _arguments(scheme).items():
        chosen.setdefault(name, value)
    for name in ("gcsfs", "s3fs", "fsspec"):
        # They log the traceback of each failed request; `attempts` reports what lasts.
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


def _arguments(scheme: str) -> dict[str, Any]:
    """Returns arguments of a file system: nothing is cached, and no request waits for ever."""
    if scheme == "s3":
        # Orbax's requests are repeated by the library alone.
        retries = {"mode": "standard", "max_attempts": _RETRIES["max_retries"]}
        limits = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _READ_SECONDS}
        return {"use_listings_cache": False, "config_kwargs": {**limits, "retries": retries}}
    import aiohttp

    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=_CONNECT_SECONDS, sock_read=_READ_SECONDS
    )
    # epath opens the file system with this argument, too.
    return {
        "use_listings_cache": False,
        "session_kwargs": {"timeout": timeout},
        "finalize_on_close": True,
    }


def split(path: stores.GivenPath) -> tuple[str, str, str]:
    """Returns scheme ("gs" or "s3"), bucket and key of a path; UserError if it names no bucket."""
    text = os.fspath(path)
    scheme, _, rest = text.partition("://")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise UserError(f"{text}: the name of a bucket is missing, as in {scheme}://bucket/run")
    return scheme, bucket, key.strip("/")
