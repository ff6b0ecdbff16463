"""Installs lingvo_gshard: one import name and its commands."""

import os
import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
TOOLS = (
    "train",
    "evaluate",
    "translate",
    "generate",
    "bench",
    "doctor",
    "inspect",
    "verify",
    "plan",
    "prepare",
    "report",
    "experts",
    "export",
    "import",
    "launch",
    "checkpoints",
    "serve",
    "completion",
)
# Extras `gcs` and `s3`: runs in buckets, where etils and Orbax use fsspec.
GCS = ["gcsfs>=2025.3"]
S3 = ["s3fs>=2025.3"]
# Extra `serve`, which the tests need, too.
SERVE = [
    "httptools>=0.6",
    "prometheus-client>=0.20",
    "starlette>=0.47",
    "uvicorn>=0.30",
]
# Extra `language-id`, which the tests need, too.
LANGUAGE_ID = ["py3langid>=0.4"]
# Extra `parquet`, which the tests need, too.
PARQUET = ["pyarrow>=17"]


def version() -> str:
    """Returns the version that the package itself gives."""
    text = (ROOT / "lingvo_gshard" / "core" / "version.py").read_text(encoding="utf-8")
    return re.search(r'^VERSION = "(.+)"$', text, re.MULTILINE).group(1)


def long_description() -> str:
    """Returns the README, or nothing in a tree without one.

    PROJECT_URL in the environment is the address of the repository on its host. With it, links lead
    to the files of this version there, since a package index has no files of the repository.
    """
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    address = os.environ.get("PROJECT_URL", "").rstrip("/")
    if not address:
        return text
    places = {True: f"{address}/raw/v{version()}/", False: f"{address}/blob/v{version()}/"}

    def absolute(link: re.Match[str]) -> str:
        return link[1] + places[link[2].endswith((".png", ".svg"))] + link[2]

    text = text.replace("<the address of this repository>", address)
    return re.sub(r"(\]\(|\bsrc(?:set)?=\")(?!https?:|#)([^)\"\s]+)", absolute, text)


setup(
    name="lingvo_gshard",
    version=version(),
    description="GShard for TensorFlow: giant Transformers written as if for one device.",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="The lingvo_gshard Authors",
    url=os.environ.get("PROJECT_URL"),
    license="Apache-2.0",
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["lingvo_gshard", "lingvo_gshard.*"]),
    package_data={
        "lingvo_gshard": [
            "py.typed",
            "__init__.pyi",
            "*/__init__.pyi",
            "tools/*/__init__.pyi",
            "api/*.txt",
            "tools/*/*.bash",
            "tools/*/*.css",
            "tools/*/*.html",
            "tools/*/*.json",
            "tools/*/*.txt",
            "tools/*/*.yaml",
            "tools/*/*.zsh",
            "data/embedded/*",
            "wings/compiler_options/*.json",
            "wings/earlier_versions/*.json",
            "wings/giants/*.toml",
            "wings/hlo/*.textproto",
            "wings/inference/*.json",
            "wings/open_models/*.json",
            "wings/open_models/families/*.json",
            "wings/pages/*.css",
            "wings/pages/*.html",
            "wings/pages/*.js",
            "wings/planning/*/*.toml",
            "wings/planning/picture/*.css",
            "wings/planning/picture/*.js",
            "wings/preparation/*.json",
            "wings/preparation/cleaning/*.json",
            "wings/preparation/vocabularies/*.json",
            "wings/profiling/*.textproto",
            "wings/profiling/*.toml",
            "wings/reporting/page/*.css",
            "wings/reporting/page/*.js",
            "wings/serving/*.json",
            "wings/serving/endpoints/*.toml",
            "wings/serving/planning/page/*.css",
            "wings/serving/planning/page/*.html",
            "wings/serving/planning/page/*.js",
            "wings/serving/page/*.css",
            "wings/serving/page/*.html",
            "wings/serving/page/*.js",
        ]
    },
    data_files=[("share/lingvo_gshard", ["constraints.txt"])],
    # The least version that is known to work; constraints.txt pins the row that was tested.
    install_requires=[
        "absl-py>=2.1",
        "array-record>=0.8.3",
        "etils>=1.13",
        "gin-config>=0.5",
        "grain>=0.2.18",
        # Chat templates of published models. Older versions let templates leave the sandbox.
        "jinja2>=3.1.6",
        "jax>=0.10.2,<0.11",
        # Names of public modules, imported when they are first used.
        "lazy-loader>=0.6",
        "ml-dtypes>=0.5",
        "msgspec>=0.19",
        "numpy>=2.0",
        "orbax-checkpoint>=0.12.8",
        "packaging>=23",
        "polib>=1.2",
        "protobuf>=6",
        # Manifests for Kubernetes.
        "pyyaml>=6",
        "regex>=2024.4",
        "rich>=13",
        "sacrebleu>=2.5",
        "safetensors>=0.5",
        "scipy>=1.14",
        "sentencepiece>=0.2",
        "tensorboard~=2.21.0",
        "tensorflow~=2.21.0",
        "tensorstore>=0.1.71",
        "tokenizers>=0.21",
        "zstandard>=0.23",
    ],
    extras_require={
        # Other engines that `python -m benchmarks decode` asks, and libraries that tests ask.
        "peers": [
            "ctranslate2>=4.5",
            "lm-eval>=0.4.9",
            "openai>=2",
            "torch>=2.4",
            "transformers>=4.46,<6",
            "trl>=1.0",
        ],
        # Parquet files as sources of gshard-prepare.
        "parquet": PARQUET,
        # Data sets of Hugging Face that training streams. Older versions do not restore positions.
        # Not among those of the tests: Keras imports its pandas, half a second of each command.
        "datasets": ["datasets>=3.6"],
        # gshard-prepare on several machines. Beam needs older versions of pillow, protobuf and
        # pyarrow than those in constraints.txt.
        "beam": ["apache-beam>=2.77"],
        "plan": ["libtpu==0.0.42.1"],
        "plan-gpu": ["jax-cuda12-pjrt==0.10.2", "jax-cuda12-plugin==0.10.2"],
        "export": ["tensorflow-text~=2.21.0"],
        # gshard-launch ray, with `ray job submit` and the dashboard.
        "ray": ["ray[default]>=2.60"],
        "serve": SERVE,
        "gcs": GCS,
        "s3": S3,
        # Published tasks that gshard-evaluate --tasks asks.
        "tasks": ["lm-eval>=0.4.9"],
        # Identifies the languages of texts; see input.cleaning.max_other_language.
        "language-id": LANGUAGE_ID,
        # Services that gshard-train --writer sends metrics to.
        "wandb": ["wandb>=0.19"],
        "mlflow": ["mlflow>=3.1"],
        # pytest-xdist 3.8 ignores xdist_group marks under pytest 9.2:
        # https://github.com/pytest-dev/pytest-xdist/issues/1386
        "test": [
            *GCS,
            *LANGUAGE_ID,
            *PARQUET,
            *S3,
            *SERVE,
            "basedpyright>=1.30",
            "build>=1.2",
            "datasketch>=1.6",
            # What moto's server needs of its extra `server`, which brings far more.
            "flask>=3",
            "flask-cors>=5",
            "gcp-storage-emulator>=2024.8",
            "httpx>=0.27",
            "hypothesis>=6.100",
            # Tutorials are notebooks, which tests execute.
            "ipykernel>=6.29",
            "moto[s3]>=5.1",
            "nbclient>=0.10",
            "pytest>=8.1,<9.2",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.9",
            "tensorflow-text~=2.21.0",
        ],
        # The site, by `make docs`.
        "docs": ["mkdocs-material>=9.6"],
        "dev": ["pre-commit>=4.0", "twine>=6"],
    },
    entry_points={
        "console_scripts": [
            f"gshard-{tool} = lingvo_gshard.tools.console.entry:run_script" for tool in TOOLS
        ]
    },
)
