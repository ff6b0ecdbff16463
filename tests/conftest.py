"""What all tests share: a quiet TensorFlow, and hypothesis without a clock."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import hypothesis  # noqa: E402

hypothesis.settings.register_profile(
    "house", deadline=None, derandomize=True, max_examples=50, database=None
)
hypothesis.settings.load_profile("house")
