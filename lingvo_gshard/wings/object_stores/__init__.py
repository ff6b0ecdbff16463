"""Buckets of Google Cloud Storage (gs://) and of Amazon S3 (s3://) as stores of files."""

from lingvo_gshard.core.files.stores import STORES, Store
from lingvo_gshard.wings.object_stores import buckets, connections

_BUCKETS: Store = buckets

for _scheme in connections.SCHEMES:
    STORES.register(_scheme)(_BUCKETS)
