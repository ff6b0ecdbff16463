"""What all tests share: a quiet TensorFlow, eight devices, and hypothesis without a clock."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Before jax starts in whatever test is first; TensorFlow does not read them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import hypothesis  # noqa: E402

hypothesis.settings.register_profile(
    "house", deadline=None, derandomize=True, max_examples=50, database=None
)
hypothesis.settings.load_profile("house")
