"""Tests of runs in buckets, against emulators of Google Cloud Storage and Amazon S3."""
