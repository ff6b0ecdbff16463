"""Buckets of Google Cloud Storage (gs://) and of Amazon S3 (s3://) as stores of files."""

from lingvo_gshard.core import stores
from lingvo_gshard.wings.object_stores import buckets, connections

_BUCKETS: stores.Store = buckets

for _scheme in connections.SCHEMES:
    stores.OBJECT_STORES.register(_scheme)(_BUCKETS)
